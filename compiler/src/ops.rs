//! Everything dcc knows about operators: the list, and what one must say of itself.
//!
//! An op is defined once, in the file of its family. The enum `Op` and all dispatch come from the list at the end.

pub mod attention;
pub mod collective;
pub mod convolution;
pub mod dot;
pub mod elementwise;
pub mod example;
pub mod gather;
pub mod leaf;
pub mod movement;
pub mod pool;
pub mod reduce;
pub mod rule;
pub mod slice;
pub mod top_k;
pub mod unary;

use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::Tensor;
use dcc_program::TensorType;
use std::fmt::Debug;
use std::hash::Hash;

pub use attention::{Attention, AttentionGrad};
pub use collective::{
    AllGather, AllReduce, AllToAll, DropMicrobatch, GradSum, KeepFirst, ReduceScatter, ResolveMicrobatches, SliceAxis,
    StageSum, Transfer,
};
pub use convolution::Convolution;
pub use dot::DotGeneral;
pub use elementwise::{Binary, Cast, Compare, Select, StopGradient};
pub use example::Example;
pub use gather::{Gather, ScatterAdd};
pub use leaf::{Const, Input, Iota, Param, Scalar, Training, Uniform};
pub use movement::{BroadcastInDim, Reshape, Transpose};
pub use pool::MaxPool;
pub use reduce::{Cumsum, Reduce};
pub use rule::Rule;
pub use slice::{Concatenate, Pad, Reverse, Slice};
pub use top_k::TopK;
pub use unary::Unary;

/// Everything dcc knows about one operator.
pub trait OpDef: Clone + Debug + Eq + Ord + Hash {
    const NAME: &'static str;

    /// Result dtype and global shape from the operands'; never looks at shardings.
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType>;

    /// Which dims of operands and result correspond, and which factors may not be sharded.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
        Rule::pointwise(operands.len(), result.rank())
    }

    /// Sets of operands in which the op is jointly linear while the others are whole: a pending sum on exactly those operands
    /// passes through to the result.
    fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
        let _ = operands;
        Vec::new()
    }

    /// The meaning, and the oracle of all tests: the result from the operands, floats computed in f64 and not rounded.
    ///
    /// `result` is what `infer` gives, or a shard of it where the op is evaluated on shards of its operands: sizes come from it,
    /// not from attributes. Inputs, parameters and scalars have no meaning without a binding and panic.
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor;

    /// Gives each operand that needs one its contribution to the gradient, from the result `y` and its gradient `dy`. An op whose
    /// derivative is zero wherever it exists gives nothing.
    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let _ = dy;
        Err(g.broken(y, "the op has no gradient"))
    }

    /// What the generic tests feed it: every attribute value that changes the meaning, sizes that shard unevenly.
    fn examples() -> Vec<Example>;
}

/// `operands` as an array of `N`, or an error that the op takes `N`.
pub(crate) fn exactly<'a, const N: usize>(name: &str, operands: &[&'a TensorType]) -> Result<[&'a TensorType; N]> {
    operands.try_into().map_err(|_| Error::graph(format!("{name} takes {N} operands, {} given", operands.len())))
}

macro_rules! ops {
    ($($op:ident),+ $(,)?) => {
        /// One operator with its attributes.
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Op { $($op($op)),+ }

        $(impl From<$op> for Op {
            fn from(op: $op) -> Op { Op::$op(op) }
        })+

        impl Op {
            pub const NAMES: &'static [&'static str] = &[$($op::NAME),+];

            /// The name in texts.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$op(_) => $op::NAME),+ }
            }

            /// Result dtype and global shape. See [`OpDef::infer`].
            pub fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
                match self { $(Op::$op(op) => op.infer(operands)),+ }
            }

            /// See [`OpDef::rule`].
            pub fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
                match self { $(Op::$op(op) => op.rule(operands, result)),+ }
            }

            /// See [`OpDef::linear`].
            pub fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
                match self { $(Op::$op(op) => op.linear(operands)),+ }
            }

            /// See [`OpDef::eval`].
            pub fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
                match self { $(Op::$op(op) => op.eval(operands, result)),+ }
            }

            /// See [`OpDef::grad`].
            pub fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
                match self { $(Op::$op(op) => op.grad(g, y, dy)),+ }
            }

            /// The examples of all ops, in the order of `NAMES`.
            pub fn examples() -> Vec<Example> {
                let mut all = Vec::new();
                $(all.extend($op::examples());)+
                all
            }

            /// The attributes as one line of JSON.
            pub fn attributes(&self) -> String {
                match self { $(Op::$op(op) => serde_json::to_string(op).expect("attributes are plain data")),+ }
            }

            /// The op of that name with attributes as `attributes` prints them.
            pub fn parse(name: &str, attributes: &str) -> std::result::Result<Op, String> {
                match name {
                    $($op::NAME => serde_json::from_str::<$op>(attributes).map(Op::$op).map_err(|e| format!("{name}: {e}")),)+
                    _ => Err(format!("unknown op `{name}`")),
                }
            }
        }
    };
}

ops! {
    Input, Param, Scalar, Const, Training, Iota, Uniform,
    Unary, Binary, Compare, Select, Cast, StopGradient,
    BroadcastInDim, Reshape, Transpose, Slice, Pad, Concatenate, Reverse,
    Reduce, Cumsum, TopK, DotGeneral, Convolution, MaxPool, Gather, ScatterAdd, Attention, AttentionGrad,
    AllReduce, ReduceScatter, AllGather, AllToAll, SliceAxis, KeepFirst, ResolveMicrobatches, DropMicrobatch,
    GradSum, StageSum, Transfer,
}
