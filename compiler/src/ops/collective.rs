//! Ops that `place` adds: communication and changes of sharding, plus the gradient sum that autodiff adds.
//!
//! Their results' types are decided by `place`; `infer` gives dtype and global shape, which none of them changes.

use super::{OpDef, exactly};
use crate::error::{Error, Result};
use dcc_program::{AxisId, Reduce, TensorType};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Sum of all contributions to the gradient of one value, even of one. `place` adds contributions of equal type first, then
/// reshards each group to the value's dims.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GradSum {
    /// The value's node number: gradient sums of different values never become one.
    pub of: u32,
}

/// Pending over `axes` → whole.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AllReduce {
    pub reduce: Reduce,
    pub axes: SmallVec<[AxisId; 2]>,
}

/// Pending sum over `axis` → sharded over it, last on `dim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReduceScatter {
    pub axis: AxisId,
    pub dim: u8,
}

/// Sharded over `axis`, last on `dim` → whole there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AllGather {
    pub axis: AxisId,
    pub dim: u8,
}

/// Sharded over `axis`, last on `from` → last on `to`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AllToAll {
    pub axis: AxisId,
    pub from: u8,
    pub to: u8,
}

/// Whole → sharded over `axis`, last on `dim`; local.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SliceAxis {
    pub axis: AxisId,
    pub dim: u8,
}

/// Whole → pending sum over `axis`: coordinate 0 keeps, the others zero; local.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct KeepFirst {
    pub axis: AxisId,
}

/// `+mb` → whole: the accumulator after its last addition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ResolveMicrobatches {}

/// `/mb` on `dim` of a mesh with one microbatch → whole there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DropMicrobatch {
    pub dim: u8,
}

/// The operands, one per stage of `stages`, summed; whole on each of those stages: one launch, a node per stage.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StageSum {
    pub reduce: Reduce,
    pub stages: SmallVec<[u32; 4]>,
}

/// The operand, made on another stage, on this one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Transfer {}

macro_rules! unchanged {
    ($($op:ident = $name:literal),+ $(,)?) => {
        $(impl OpDef for $op {
            const NAME: &'static str = $name;

            fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
                let [x] = exactly::<1>(Self::NAME, operands)?;
                Ok(TensorType::new(x.dtype, x.shape.iter().copied()))
            }

            fn linear(&self, _: usize) -> Vec<Vec<usize>> {
                vec![vec![0]]
            }
        })+
    };
}

unchanged! {
    AllReduce = "all_reduce", ReduceScatter = "reduce_scatter", AllGather = "all_gather", AllToAll = "all_to_all",
    SliceAxis = "slice_axis", KeepFirst = "keep_first", ResolveMicrobatches = "resolve_mb", DropMicrobatch = "drop_mb",
    Transfer = "transfer",
}

fn infer_sum(name: &str, operands: &[&TensorType]) -> Result<TensorType> {
    let Some(first) = operands.first() else {
        return Err(Error::graph(format!("{name} of nothing")));
    };
    if operands.iter().any(|x| x.dtype != first.dtype || x.shape != first.shape) {
        let types: Vec<_> = operands.iter().map(|t| (t.dtype.name(), t.shape.to_vec())).collect();
        return Err(Error::shape(format!("{name} of {types:?}")));
    }
    Ok(TensorType::new(first.dtype, first.shape.iter().copied()))
}

impl OpDef for GradSum {
    const NAME: &'static str = "grad_sum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer_sum(Self::NAME, operands)
    }

    fn linear(&self, operands: usize) -> Vec<Vec<usize>> {
        vec![(0..operands).collect()]
    }
}

impl OpDef for StageSum {
    const NAME: &'static str = "stage_sum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer_sum(Self::NAME, operands)
    }

    fn linear(&self, operands: usize) -> Vec<Vec<usize>> {
        vec![(0..operands).collect()]
    }
}
