//! From kernel IR to a tiled loop nest: what a kernel looks like once its dims have sizes, and which dim runs in tiles.
//!
//! Before: a checked kernel and the extents of its operands on this rank. After: a `Nest` in which neighbouring dims that are one dim in
//! memory are merged, elementwise stores iterate over outer dims, and every statement has a tile dim, chosen by a cost that knows
//! only shapes; so chunks, and with them results, do not depend on the number of threads.

mod access;
mod behind;
mod choose;
mod simplify;

pub use access::Typing;
pub(crate) use access::{
    Access, Dims, along, bit, bits as dims_of, children, computed, defines, dims_in, over_of, pass_of, reachable, slope,
    value_of,
};
pub(crate) use choose::SINGLE;
pub use choose::{Plan, Tiling};

use dcc_program::kernel::{DimId, Expr, Index, Kernel, Stmt};
use dcc_program::mesh::Extent;
use dcc_program::types::DType;

/// A kernel's operand on this rank. Blocks are dense and row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Array {
    pub dtype: DType,
    /// Elements allotted along each dim.
    pub block: Vec<usize>,
    /// Elements that exist along each dim.
    pub valid: Vec<usize>,
    /// Where the parameters hold the global index of each dim's first element.
    pub offset: Vec<usize>,
}

/// A kernel with the sizes that an instruction gives it. Global offsets are not part of it: they come with each run as parameters, so
/// that layers, ranks and microbatches share code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nest {
    pub kernel: Kernel,
    /// Points of each loop dim on this rank.
    pub extents: Vec<usize>,
    /// Where the parameters hold the global index of each loop dim's first point.
    pub offset: Vec<usize>,
    pub inputs: Vec<Array>,
    pub outputs: Vec<Array>,
    /// By output, the inputs that share memory with it; none where that is not known, so that any may.
    pub shared: Option<Vec<Vec<u8>>>,
}

impl Nest {
    /// Binds `kernel` to the extents of its operands, dim by dim. `Err` says which dims do not fit.
    pub fn bind(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>]) -> Result<Nest, String> {
        let mut next = kernel.dims.len();
        let mut arrays = |arguments: &[dcc_program::kernel::Argument], extents: &[Vec<Extent>], what: &str| {
            if arguments.len() != extents.len() {
                return Err(format!("{} {what} for a kernel of {}", extents.len(), arguments.len()));
            }
            let mut array = |(argument, dims): (&dcc_program::kernel::Argument, &Vec<Extent>)| {
                if usize::from(argument.rank) != dims.len() {
                    return Err(format!("an operand of rank {} where the kernel has rank {}", dims.len(), argument.rank));
                }
                let offset = (next..next + dims.len()).collect();
                next += dims.len();
                let size = |get: fn(&Extent) -> u64| dims.iter().map(|extent| get(extent) as usize).collect();
                Ok(Array { dtype: argument.dtype, block: size(|e| e.block), valid: size(|e| e.valid), offset })
            };
            arguments.iter().zip(extents).map(&mut array).collect::<Result<Vec<Array>, String>>()
        };
        let inputs_bound = arrays(&kernel.inputs, inputs, "inputs")?;
        let outputs_bound = arrays(&kernel.outputs, outputs, "outputs")?;
        let loops = loop_extents(kernel, inputs, outputs)?;
        Ok(Nest {
            kernel: kernel.clone(),
            extents: loops.iter().map(|extent| extent.valid as usize).collect(),
            offset: (0..kernel.dims.len()).collect(),
            inputs: inputs_bound,
            outputs: outputs_bound,
            shared: None,
        })
    }

    /// The parameters of a run: the global offsets of loop dims and operand dims, in the order `bind` numbered them.
    pub fn parameters(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>]) -> Result<Vec<i64>, String> {
        let loops = loop_extents(kernel, inputs, outputs)?;
        let operands = inputs.iter().chain(outputs).flatten();
        Ok(loops.iter().chain(operands).map(|extent| extent.offset as i64).collect())
    }

    /// The same meaning in fewer, longer loops.
    pub fn simplified(mut self) -> Nest {
        simplify::round_once(&mut self);
        simplify::promote(&mut self);
        while simplify::merge_one(&mut self) {}
        self
    }

    /// The same meaning without variables, for kernels without reductions all of whose statements are elementwise.
    pub(crate) fn inlined(mut self) -> Nest {
        simplify::inline(&mut self);
        self
    }
}

/// The extent of each loop dim: of every operand dim that it indexes directly.
fn loop_extents(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>]) -> Result<Vec<Extent>, String> {
    let mut found: Vec<Option<Extent>> = vec![None; kernel.dims.len()];
    let mut bind = |index: &[Index], extents: Option<&Vec<Extent>>| {
        let extents = extents.ok_or("an operand that the kernel does not have")?;
        for (index, extent) in index.iter().zip(extents) {
            let Index::Dim(DimId(d)) = index else { continue };
            let slot = &mut found[usize::from(*d)];
            if slot.is_some_and(|other| other.offset != extent.offset || other.valid != extent.valid) {
                return Err(format!("loop dim {} covers {slot:?} and {extent:?}", kernel.dims[usize::from(*d)]));
            }
            *slot = Some(*extent);
        }
        Ok(())
    };
    for stmt in &kernel.body {
        if let Stmt::Store { output, index, .. } = stmt {
            bind(index, outputs.get(usize::from(*output)))?;
        }
    }
    for expr in &kernel.exprs {
        if let Expr::Load { input, index, .. } = expr {
            bind(index, inputs.get(usize::from(*input)))?;
        }
    }
    let name = |d: usize| format!("no operand dim gives loop dim {} its size", kernel.dims[d]);
    found.iter().enumerate().map(|(d, extent)| extent.ok_or_else(|| name(d))).collect()
}
