//! Ops without batched operands: inputs, parameters, scalars, constants, and generated tensors.

use super::{Example, OpDef, Rule, exactly};
use crate::error::{Error, Result};
use crate::interp::{Data, Tensor, offsets, wrap};
use dcc_program::philox::uniform;
use dcc_program::program::{ParamKind, Piece, ScalarKind};
use dcc_program::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// A tensor that each microbatch brings: model inputs, labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Input {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    /// The dim that counts samples; `None` for inputs that are the same for the whole batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_dim: Option<u8>,
}

/// A persistent tensor: weight, constant tensor or optimizer state; possibly a piece of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Param {
    /// Initializer name in the model.
    pub name: String,
    pub kind: ParamKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub piece: Option<Piece>,
    pub dtype: DType,
    /// Global shape, of the piece where there is one.
    pub shape: Shape,
}

/// A number that the runtime writes before each step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Scalar {
    pub kind: ScalarKind,
    pub dtype: DType,
}

/// One number of rank 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "ConstText", try_from = "ConstText")]
pub struct Const {
    pub dtype: DType,
    /// The f64 bits for floats, the i64 bits for integers and bool.
    pub bits: u64,
}

/// Whether a training step computes this. `train` settles what reads it, so that no program has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Training {}

/// The index along `dim`, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Iota {
    pub dtype: DType,
    pub shape: Shape,
    pub dim: u8,
}

/// Uniform f32 in [0, 1) by Philox on the global element index; operands: seed, step (i64 scalars).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Uniform {
    /// Stable from import: distinguishes random ops of a model.
    pub id: u32,
    pub shape: Shape,
}

/// A constant as texts have it: the shortest decimal that reads back as the same number.
#[derive(Serialize, Deserialize)]
struct ConstText {
    dtype: DType,
    value: String,
}

impl From<Const> for ConstText {
    fn from(c: Const) -> ConstText {
        let value = if c.dtype.is_float() { format!("{:?}", f64::from_bits(c.bits)) } else { (c.bits as i64).to_string() };
        ConstText { dtype: c.dtype, value }
    }
}

impl TryFrom<ConstText> for Const {
    type Error = String;

    fn try_from(text: ConstText) -> std::result::Result<Const, String> {
        let wrong = |_| format!("`{}` is no {}", text.value, text.dtype.name());
        if text.dtype.is_float() {
            text.value.parse().map(|x| Const::float(text.dtype, x)).map_err(|e: std::num::ParseFloatError| wrong(e.to_string()))
        } else {
            text.value.parse().map(|x| Const::int(text.dtype, x)).map_err(|e: std::num::ParseIntError| wrong(e.to_string()))
        }
    }
}

impl Const {
    pub fn float(dtype: DType, value: f64) -> Const {
        Const { dtype, bits: value.to_bits() }
    }

    pub fn int(dtype: DType, value: i64) -> Const {
        Const { dtype, bits: value as u64 }
    }

    /// `value` as the dtype wants it: its bits as f64, or truncated to an integer.
    pub fn of(dtype: DType, value: f64) -> Const {
        if dtype.is_float() { Const::float(dtype, value) } else { Const::int(dtype, value as i64) }
    }

    pub fn value(&self) -> f64 {
        if self.dtype.is_float() { f64::from_bits(self.bits) } else { self.bits as i64 as f64 }
    }
}

fn leaf(name: &str, operands: &[&TensorType], dtype: DType, shape: &Shape) -> Result<TensorType> {
    exactly::<0>(name, operands)?;
    Ok(TensorType::new(dtype, shape.iter().copied()))
}

impl OpDef for Input {
    const NAME: &'static str = "input";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }

    fn eval(&self, _: &[&Tensor], _: &TensorType) -> Tensor {
        panic!("inputs are bound, not computed")
    }

    fn examples() -> Vec<Example> {
        let of =
            |name: &str, dtype, batch_dim| Input { name: name.to_owned(), dtype, shape: Shape::from_slice(&[5, 3]), batch_dim };
        vec![Example::new(of("x", DType::F32, Some(0)), []), Example::new(of("a \"b\" # {c}", DType::I64, None), [])]
    }
}

impl OpDef for Param {
    const NAME: &'static str = "param";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }

    fn eval(&self, _: &[&Tensor], _: &TensorType) -> Tensor {
        panic!("parameters are bound, not computed")
    }

    fn examples() -> Vec<Example> {
        let of = |kind, piece| {
            let name = "h.0/attn:weight".to_owned();
            Example::new(Param { name, kind, piece, dtype: DType::F32, shape: Shape::from_slice(&[5, 3]) }, [])
        };
        let piece = Piece { dim: 1, start: 3, end: 6 };
        vec![of(ParamKind::Weight, None), of(ParamKind::State("m".to_owned()), Some(piece))]
    }
}

impl OpDef for Scalar {
    const NAME: &'static str = "scalar";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &Shape::new())
    }

    fn eval(&self, _: &[&Tensor], _: &TensorType) -> Tensor {
        panic!("scalars are bound, not computed")
    }

    fn examples() -> Vec<Example> {
        ScalarKind::ALL.map(|kind| Example::new(Scalar { kind, dtype: DType::I64 }, [])).to_vec()
    }
}

impl OpDef for Const {
    const NAME: &'static str = "const";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &Shape::new())
    }

    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        let data = if self.dtype.is_float() {
            Data::Float(vec![f64::from_bits(self.bits)])
        } else {
            Data::Int(vec![wrap(self.dtype, self.bits as i64)])
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn examples() -> Vec<Example> {
        let floats = [0.1, -0.0, 1e300, f64::NEG_INFINITY].map(|x| Const::float(DType::F32, x));
        let ints = [i64::MIN, -1, 7].map(|x| Const::int(DType::I64, x));
        floats.into_iter().chain(ints).chain([Const::int(DType::Bool, 1)]).map(|c| Example::new(c, [])).collect()
    }
}

impl OpDef for Training {
    const NAME: &'static str = "training";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, DType::Bool, &Shape::new())
    }

    /// Of a graph that is not settled: as in a training step.
    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::new(result.dtype, result.shape.clone(), Data::Int(vec![1]))
    }

    fn examples() -> Vec<Example> {
        vec![Example::new(Training {}, [])]
    }
}

impl OpDef for Iota {
    const NAME: &'static str = "iota";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        if usize::from(self.dim) >= self.shape.len() {
            return Err(Error::shape(format!("iota along dim {} of a tensor of rank {}", self.dim, self.shape.len())));
        }
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }

    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        let mut strides = vec![0; result.rank()];
        strides[usize::from(self.dim)] = 1;
        let positions = offsets(&result.shape, 0, &strides);
        let data = if self.dtype.is_float() {
            Data::Float(positions.map(|i| i as f64).collect())
        } else {
            Data::Int(positions.map(|i| wrap(self.dtype, i as i64)).collect())
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn examples() -> Vec<Example> {
        let of = |dtype, dim| Example::new(Iota { dtype, shape: Shape::from_slice(&[5, 3]), dim }, []);
        vec![of(DType::I64, 0), of(DType::F32, 1), of(DType::I32, 1)]
    }
}

impl OpDef for Uniform {
    const NAME: &'static str = "uniform";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [seed, step] = exactly::<2>(Self::NAME, operands)?;
        if [seed, step].iter().any(|t| t.dtype != DType::I64 || t.rank() != 0) {
            return Err(Error::dtype("uniform takes an i64 scalar seed and step"));
        }
        Ok(TensorType::new(DType::F32, self.shape.iter().copied()))
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(0, result.rank());
        rule.spec.operands = vec![vec![], vec![]];
        rule
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (seed, step) = (operands[0].i64s()[0], operands[1].i64s()[0]);
        let values = (0..result.elements()).map(|i| f64::from(uniform(self.id, seed, step, i))).collect();
        Tensor::floats(result.dtype, &result.shape, values)
    }

    fn examples() -> Vec<Example> {
        let scalar = |x: i64| Tensor::ints(DType::I64, &[], vec![x]);
        let op = Uniform { id: 3, shape: Shape::from_slice(&[5, 3]) };
        vec![Example::new(op, [scalar(-7), scalar(2)])]
    }
}
