//! Kernels as CUDA C++.
//!
//! A generated kernel's text comes from its loop nest, specialised to its sizes; global offsets come with each run. It stands on
//! `PRELUDE` alone, so that NVRTC needs no header. The same text runs on a CPU where a compiler of C++ is given an emulation of CUDA's
//! words, which is how it is tested without a GPU.

mod emit;
pub mod library;
mod mapping;
pub mod transfer;

use crate::tile::{Nest, Typing};
use dcc_program::kernel::Stmt;
use emit::{Entry, emit, stored};
use mapping::Mapping;

/// What all texts of kernels begin with.
pub const PRELUDE: &str = include_str!("cuda/prelude.cuh");

/// A kernel's text, and how to run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Behind `PRELUDE`.
    pub text: String,
    /// In order. Each gets the pointers of inputs, then outputs, the workspace where there is one, and `parameters` as i64.
    pub launches: Vec<Launch>,
    /// Bytes that the launches share; nothing need be in them.
    pub workspace: usize,
    /// Numbers of the parameters of `Nest::parameters` that are passed.
    pub parameters: Vec<usize>,
    /// Of inputs, then outputs.
    pub operand_bytes: Vec<usize>,
    /// What it computes, where a vendor's library can too.
    pub gemm: Option<library::gemm::Gemm>,
}

/// One entry of a text, and over how many threads it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub entry: String,
    /// Along x and y.
    pub blocks: [u32; 2],
    pub threads: u32,
    /// Bytes of dynamic shared memory of each block.
    pub shared: u32,
}

impl Source {
    /// The text of `nest`, with entries whose names begin with `name`. Errors: more points than a grid has blocks.
    pub fn new(nest: &Nest, name: &str) -> Result<Source, String> {
        let nest = nest.clone().simplified();
        let typing = Typing::new(&nest.kernel);
        let mapping = Mapping::new(&nest, &typing);
        let entries = if mapping.parts > 1 {
            let parts = mapping.parts as u32;
            vec![
                (Entry::Parts, format!("{name}_parts"), parts, mapping.clone()),
                (Entry::Finish, name.to_owned(), 1, mapping.finishing()),
            ]
        } else {
            vec![(Entry::Whole, name.to_owned(), 1, mapping.clone())]
        };
        let bodies: Vec<_> = entries.iter().map(|(entry, .., mapping)| emit(&nest, &typing, mapping, *entry)).collect();
        let parameters: Vec<usize> =
            bodies.iter().flat_map(|body| &body.1).copied().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
        let reductions = nest.kernel.body.iter().filter(|stmt| matches!(stmt, Stmt::Reduce { over, .. } if !over.is_empty()));
        let workspace = if mapping.parts > 1 { reductions.count() * mapping.parts * mapping.points * 8 } else { 0 };
        let arguments = arguments(&nest, &parameters, workspace > 0);
        let mut text = String::new();
        let mut launches = Vec::new();
        for ((_, entry, parts, mapping), (body, _)) in entries.into_iter().zip(bodies) {
            let blocks = u32::try_from(mapping.blocks(&nest)).ok().filter(|blocks| *blocks <= i32::MAX as u32);
            let blocks = blocks.ok_or_else(|| format!("a kernel of {} points", mapping.points))?;
            let threads = mapping.threads() as u32;
            text +=
                &format!("extern \"C\" __global__ void __launch_bounds__({threads}, 1)\n{entry}({arguments}) {{\n{body}}}\n");
            launches.push(Launch { entry, blocks: [blocks, parts], threads, shared: 0 });
        }
        let bytes = |array: &crate::tile::Array| array.block.iter().product::<usize>() * array.dtype.bytes() as usize;
        let operand_bytes = nest.inputs.iter().chain(&nest.outputs).map(bytes).collect();
        Ok(Source { text, launches, workspace, parameters, operand_bytes, gemm: None })
    }
}

fn arguments(nest: &Nest, parameters: &[usize], workspace: bool) -> String {
    let inputs = nest.inputs.iter().enumerate().map(|(n, array)| format!("const {}* x{n}", stored(array.dtype)));
    let outputs = nest.outputs.iter().enumerate().map(|(n, array)| format!("{}* y{n}", stored(array.dtype)));
    let workspace = workspace.then(|| "long long* workspace".to_owned());
    let parameters = parameters.iter().map(|n| format!("long long o{n}"));
    inputs.chain(outputs).chain(workspace).chain(parameters).collect::<Vec<_>>().join(", ")
}
