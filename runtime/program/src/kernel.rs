//! Kernel IR: one generated kernel as statements over a nest of loop dims.
//!
//! A kernel names no sizes: each loop dim is bound at an instruction from the operand dims it indexes (global size, axes), so
//! the kernel of a repeated layer stands once in a program. Indices are *global*; an operand's shard covers
//! `[offset, offset + valid)` of each of its dims, and code generation subtracts the offset. Loops run over the valid part of
//! the rank's shard of their dim, so that the unspecified tail of an uneven shard is neither read nor reduced.
//!
//! Meaning: for every point of the `outer` dims, in any order, run the statements of `body` in order. `Reduce` folds over its
//! own inner dims in a fixed order, `Store` writes every point of its own inner dims. No store reads what another outer point
//! writes; an output may share its buffer with an input only where every point reads just the element it writes.

mod canonical;
mod dtypes;

use crate::types::{DType, Reduce};

pub(crate) use canonical::Interner;
pub use dtypes::Dtypes;

/// Inputs of a kernel, and outputs.
pub const MAX_ARGUMENTS: usize = 256;

/// Index into `Kernel::dims`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DimId(pub u8);
/// Index into `Kernel::exprs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExprId(pub u32);
/// Number of a `Let` or `Reduce` statement's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VarId(pub u32);

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Kernel {
    /// Names of the loop dims.
    pub dims: Vec<String>,
    /// Dims iterated around the whole body, major first.
    pub outer: Vec<DimId>,
    pub inputs: Vec<Argument>,
    pub outputs: Vec<Argument>,
    /// Hash-consed by the builder; operands precede users.
    pub exprs: Vec<Expr>,
    pub body: Vec<Stmt>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Argument {
    pub dtype: DType,
    pub rank: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stmt {
    /// `var = value`, once per outer point.
    Let { var: VarId, value: ExprId },
    /// `var = op over inner dims: value`. Sums of f16 and bf16 accumulate in f32.
    Reduce { var: VarId, op: Reduce, over: Vec<DimId>, value: ExprId },
    /// `output[index] = value` (or `+=`) for every point of the inner dims `over`.
    Store { output: u8, over: Vec<DimId>, index: Vec<Index>, value: ExprId, mode: StoreMode },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoreMode {
    Assign,
    /// Adds to what is there: gradient accumulators.
    Accumulate,
}

/// A global index along one operand dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Index {
    /// The loop dim itself: binds its size and axes.
    Dim(DimId),
    /// `Σ coefficient·dim + offset`; all dims concerned are unsharded.
    Affine { terms: Vec<(DimId, i64)>, offset: i64 },
    /// A computed integer; only in loads.
    Expr(ExprId),
}

/// What a load outside of the operand's shard gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outside {
    /// Never happens.
    Never,
    /// Zero: shards of a gathered dim, borders of a pad.
    Zero,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Expr {
    Load {
        input: u8,
        index: Vec<Index>,
        outside: Outside,
    },
    Var(VarId),
    /// The value's f64 bits for floats, its i64 bits for integers and bool.
    Const {
        dtype: DType,
        bits: u64,
    },
    /// Global index of the loop dim, i64.
    Position(DimId),
    Unary(UnaryOp, ExprId),
    Binary(BinaryOp, ExprId, ExprId),
    Compare(CompareOp, ExprId, ExprId),
    /// `if 0 then 1 else 2`; both are evaluated, the unselected never poisons.
    Select(ExprId, ExprId, ExprId),
    Cast(DType, ExprId),
    /// Uniform f32 in [0, 1), a multiple of 2⁻²⁴: philox4x32-10 with key (lo, hi of `seed`), counter (lo, hi of `element` / 4,
    /// `id`, lo of `step`), word `element` mod 4, shifted right by 8. `seed`, `step`, `element` are i64.
    Uniform {
        id: u32,
        seed: ExprId,
        step: ExprId,
        element: ExprId,
    },
}

macro_rules! names {
    ($(#[$doc:meta])* $type:ident { $($variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $type { $($variant),+ }
        impl $type {
            pub const ALL: &'static [$type] = &[$($type::$variant),+];
            /// The name in texts, as in StableHLO.
            pub fn name(self) -> &'static str { match self { $($type::$variant => $name),+ } }
            pub fn parse(name: &str) -> Option<$type> { $type::ALL.iter().copied().find(|x| x.name() == name) }
        }
    };
}

names! {
    /// Elementwise functions of one argument. `gelu` is x Φ(x), `gelu_tanh` its approximation x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))),
    /// `…_slope` the derivative of each.
    UnaryOp {
        Neg = "neg", Abs = "abs", Sign = "sign", Exp = "exp", Expm1 = "expm1", Log = "log", Log1p = "log1p", Sqrt = "sqrt",
        Rsqrt = "rsqrt", Tanh = "tanh", Logistic = "logistic", Erf = "erf", Sin = "sin", Cos = "cos", Tan = "tan",
        Asin = "asin", Acos = "acos", Atan = "atan", Sinh = "sinh", Cosh = "cosh", Asinh = "asinh", Acosh = "acosh",
        Atanh = "atanh", Floor = "floor", Ceil = "ceil", RoundEven = "round_even", Not = "not", IsNan = "is_nan",
        IsInf = "is_inf", Gelu = "gelu", GeluSlope = "gelu_slope", GeluTanh = "gelu_tanh", GeluTanhSlope = "gelu_tanh_slope",
    }
}
names! {
    /// Elementwise functions of two arguments of one dtype. `min` and `max` return NaN where an argument is NaN. Integer
    /// arithmetic wraps; integer `div` truncates toward zero and gives 0 for a zero divisor, `rem` takes the dividend's sign.
    /// `round_stochastic` is of f32 alone: the first argument, rounded to what bf16 holds by the second, which is uniform in [0, 1)
    /// (`rounding::stochastic`).
    BinaryOp {
        Add = "add", Sub = "sub", Mul = "mul", Div = "div", Rem = "rem", Pow = "pow", Max = "max", Min = "min",
        And = "and", Or = "or", Xor = "xor", RoundStochastic = "round_stochastic",
    }
}
names! {
    /// Comparisons; the result is bool.
    CompareOp { Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge" }
}

impl Kernel {
    /// The id of `expr`, adding it if no equal one is there.
    pub fn expr(&mut self, expr: Expr) -> ExprId {
        if let Some(i) = self.exprs.iter().position(|e| *e == expr) {
            return ExprId(i as u32);
        }
        self.exprs.push(expr);
        ExprId(self.exprs.len() as u32 - 1)
    }

    pub fn get(&self, id: ExprId) -> &Expr {
        &self.exprs[id.0 as usize]
    }

    pub fn dim(&mut self, name: impl Into<String>) -> DimId {
        self.dims.push(name.into());
        DimId(self.dims.len() as u8 - 1)
    }
}
