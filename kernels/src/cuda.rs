//! Kernels as CUDA C++.
//!
//! A generated kernel's text comes from its loop nest, specialised to its sizes; global offsets come with each run. It stands on
//! `PRELUDE` alone, so that NVRTC needs no header. The same text runs on a CPU where a compiler of C++ is given an emulation of CUDA's
//! words, which is how it is tested without a GPU.

mod emit;
pub mod group;
pub mod library;
mod mapping;
pub mod transfer;

use crate::tile::{Nest, Typing, reachable, value_of};
use dcc_program::kernel::{Expr, ExprId, Index, Stmt};
use emit::{Entry, emit, stored};
use group::{Argument, Body};
use mapping::Mapping;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What all texts of kernels begin with.
pub const PRELUDE: &str = include_str!("cuda/prelude.cuh");

/// A kernel's text, and how to run it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    pub terms: Option<library::Terms>,
    pub meaning: Meaning,
    /// Of a generated kernel, what each launch does; empty where launches stay by themselves.
    pub bodies: Vec<Body>,
    /// Words that the one launch of a group gets as one argument, in place of all others; 0 where it is none.
    pub table: usize,
}

/// What a text was made of, where others can be made of that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Meaning {
    #[default]
    Other,
    Product(Arc<library::product::Product>),
    Nest(Arc<Nest>),
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
        let meaning = Meaning::Nest(Arc::new(nest.clone()));
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
        let texts: Vec<_> = entries.iter().map(|(entry, .., mapping)| emit(&nest, &typing, mapping, *entry)).collect();
        let parameters: Vec<usize> =
            texts.iter().flat_map(|text| &text.1).copied().collect::<BTreeSet<_>>().into_iter().collect();
        let reductions = nest.kernel.body.iter().filter(|stmt| is_in_parts(stmt));
        let workspace = if mapping.parts > 1 { reductions.count() * mapping.parts * mapping.points * 8 } else { 0 };
        let arguments = arguments(&nest, &parameters, workspace > 0);
        let all = arguments.iter().map(|(_, ty, name)| format!("{ty} {name}")).collect::<Vec<_>>().join(", ");
        let mut source = Source { workspace, ..Source::default() };
        for ((entry, name, parts, mapping), (body, own)) in entries.into_iter().zip(texts) {
            let blocks = u32::try_from(mapping.blocks(&nest)).ok().filter(|blocks| *blocks <= i32::MAX as u32);
            let blocks = blocks.ok_or_else(|| format!("a kernel of {} points", mapping.points))?;
            let threads = mapping.threads() as u32;
            let piece = if parts > 1 { ", piece = blockIdx.y" } else { "" };
            source.text += &format!(
                "extern \"C\" __global__ void __launch_bounds__({threads}, 1)\n{name}({all}) {{\n    const int block = \
                 blockIdx.x{piece};\n{body}}}\n"
            );
            source.launches.push(Launch { entry: name, blocks: [blocks, parts], threads, shared: 0 });
            let inputs = inputs_of(&nest, entry);
            let used = |argument: &Argument| match *argument {
                Argument::Operand(n) if n < nest.inputs.len() => inputs.contains(&n),
                Argument::Operand(_) => entry != Entry::Parts,
                Argument::Workspace => true,
                Argument::Parameter(n) => own.contains(&parameters[n]),
            };
            let used: Vec<_> = arguments.iter().filter(|(argument, ..)| used(argument)).cloned().collect();
            source.bodies.push(Body {
                text: body,
                arguments: used.iter().map(|(argument, ..)| *argument).collect(),
                types: used.into_iter().map(|(_, ty, name)| (ty, name)).collect(),
                joins: mapping.across.is_none(),
            });
        }
        let bytes = |array: &crate::tile::Array| array.block.iter().product::<usize>() * array.dtype.bytes() as usize;
        source.operand_bytes = nest.inputs.iter().chain(&nest.outputs).map(bytes).collect();
        Ok(Source { parameters, meaning, ..source })
    }
}

/// Whether a statement is a sum that parts can have.
fn is_in_parts(stmt: &Stmt) -> bool {
    matches!(stmt, Stmt::Reduce { over, .. } if !over.is_empty())
}

/// The inputs that an entry reads. (Its text in a group names no others.)
fn inputs_of(nest: &Nest, entry: Entry) -> BTreeSet<usize> {
    let kernel = &nest.kernel;
    let counts = |stmt: &&Stmt| match entry {
        Entry::Whole => true,
        Entry::Parts => is_in_parts(stmt),
        Entry::Finish => !is_in_parts(stmt),
    };
    let roots: Vec<ExprId> = kernel.body.iter().filter(counts).map(value_of).collect();
    let stored = kernel.body.iter().filter(counts).filter_map(|stmt| match stmt {
        Stmt::Store { index, .. } => Some(index),
        _ => None,
    });
    let computed = stored.flatten().filter_map(|index| if let Index::Expr(id) = index { Some(*id) } else { None });
    let all: Vec<ExprId> = roots.into_iter().chain(computed).collect();
    let load = |id: ExprId| if let Expr::Load { input, .. } = kernel.get(id) { Some(usize::from(*input)) } else { None };
    reachable(kernel, &all).into_iter().filter_map(load).collect()
}

/// All that a nest's launches get, with types and names.
fn arguments(nest: &Nest, parameters: &[usize], workspace: bool) -> Vec<(Argument, String, String)> {
    let count = nest.inputs.len();
    let inputs = nest.inputs.iter().enumerate();
    let inputs = inputs.map(|(n, array)| (Argument::Operand(n), format!("const {}*", stored(array.dtype)), format!("x{n}")));
    let outputs = nest.outputs.iter().enumerate();
    let outputs =
        outputs.map(|(n, array)| (Argument::Operand(count + n), format!("{}*", stored(array.dtype)), format!("y{n}")));
    let workspace = workspace.then(|| (Argument::Workspace, "long long*".to_owned(), "workspace".to_owned()));
    let parameters = parameters.iter().enumerate();
    let parameters = parameters.map(|(at, n)| (Argument::Parameter(at), "long long".to_owned(), format!("o{n}")));
    inputs.chain(outputs).chain(workspace).chain(parameters).collect()
}
