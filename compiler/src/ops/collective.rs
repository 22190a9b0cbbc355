//! Ops that `place` adds: communication and changes of sharding, plus the gradient sum that autodiff adds.
//!
//! Their results' types are decided by `place`; `infer` gives dtype and global shape, which none of them changes. Nor does any of
//! them change the global value: that is what a pending or sharded value combines to.

use super::example::{Example, floats};
use super::{Binary, OpDef, exactly};
use crate::error::{Error, Result};
use crate::interp::Tensor;
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
    /// Which of the uses of a sharded parameter it is for: it is gathered once for uses that are close, and again for others.
    #[serde(default, skip_serializing_if = "is_first")]
    pub region: u32,
}

fn is_first(region: &u32) -> bool {
    *region == 0
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

impl super::Op {
    /// Whether ranks exchange data.
    pub fn is_communication(&self) -> bool {
        use super::Op::{AllGather, AllReduce, AllToAll, ReduceScatter, StageSum, Transfer};
        matches!(self, AllReduce(_) | ReduceScatter(_) | AllGather(_) | AllToAll(_) | Transfer(_) | StageSum(_))
    }
}

macro_rules! unchanged {
    ($($op:ident = $name:literal, $example:expr;)+) => {
        $(impl OpDef for $op {
            const NAME: &'static str = $name;

            fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
                let [x] = exactly::<1>(Self::NAME, operands)?;
                Ok(TensorType::new(x.dtype, x.shape.iter().copied()))
            }

            fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
                vec![vec![0]]
            }

            fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
                operands[0].clone()
            }

            fn examples() -> Vec<Example> {
                vec![Example::new($example, [floats(1, &[5, 3])]).wrt(&[])]
            }
        })+
    };
}

unchanged! {
    AllReduce = "all_reduce", AllReduce { reduce: Reduce::Sum, axes: SmallVec::from_slice(&[AxisId(0), AxisId(1)]) };
    ReduceScatter = "reduce_scatter", ReduceScatter { axis: AxisId(0), dim: 1 };
    AllGather = "all_gather", AllGather { axis: AxisId(0), dim: 1, region: 0 };
    AllToAll = "all_to_all", AllToAll { axis: AxisId(0), from: 0, to: 1 };
    SliceAxis = "slice_axis", SliceAxis { axis: AxisId(0), dim: 1 };
    KeepFirst = "keep_first", KeepFirst { axis: AxisId(0) };
    ResolveMicrobatches = "resolve_mb", ResolveMicrobatches {};
    DropMicrobatch = "drop_mb", DropMicrobatch { dim: 0 };
    Transfer = "transfer", Transfer {};
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

/// The operands combined one after the other.
fn combine(op: Reduce, operands: &[&Tensor], result: &TensorType) -> Tensor {
    let op = Binary { op: super::reduce::binary(op) };
    operands[1..].iter().fold(operands[0].clone(), |sum, x| op.eval(&[&sum, x], result))
}

impl OpDef for GradSum {
    const NAME: &'static str = "grad_sum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer_sum(Self::NAME, operands)
    }

    fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![(0..operands.len()).collect()]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        combine(Reduce::Sum, operands, result)
    }

    fn examples() -> Vec<Example> {
        let of = |n: u32| Example::new(GradSum { of: n }, (0..n).map(|i| floats(i, &[5, 3]))).wrt(&[]);
        vec![of(1), of(3)]
    }
}

impl OpDef for StageSum {
    const NAME: &'static str = "stage_sum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer_sum(Self::NAME, operands)
    }

    fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
        if self.reduce == Reduce::Sum { vec![(0..operands.len()).collect()] } else { Vec::new() }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        combine(self.reduce, operands, result)
    }

    fn examples() -> Vec<Example> {
        let of = |reduce| {
            Example::new(StageSum { reduce, stages: SmallVec::from_slice(&[0, 3]) }, [floats(1, &[5]), floats(2, &[5])])
                .wrt(&[])
        };
        vec![of(Reduce::Sum), of(Reduce::Max)]
    }
}
