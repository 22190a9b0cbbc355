//! Rows by computed index, and its transpose. Covers embedding lookup, ONNX Gather and GatherElements.

use super::dot::{factor_strides, infer_by_spec, respec};
use super::example::{Example, floats, ints};
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Data, Tensor, offsets};
use dcc_program::factors::DimFactors;
use dcc_program::{DType, FactorId, FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// Operands: data, indices (i64 or i32, in `[0, size)`; anything else gives zero). The factor of data that is not in the result
/// is the indexed one: `v e, b t -> b t e` is an embedding lookup, `i v, i j -> i j` takes along a dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gather {
    pub spec: FactorSpec,
}

/// Operands: indices, updates. `b t, b t e -> v e` adds each update to the row of a zero tensor that its index names; the factor
/// of the result that is in no operand is the indexed one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScatterAdd {
    pub spec: FactorSpec,
    /// Size of the indexed factor.
    pub size: u64,
}

impl Gather {
    /// The factor that indices select.
    pub fn indexed(&self) -> FactorId {
        self.spec.operands[0].iter().flatten().copied().find(|&f| !self.spec.in_result(f)).expect("infer saw it")
    }
}

impl ScatterAdd {
    /// The factor that indices select.
    pub fn indexed(&self) -> FactorId {
        let fresh = |&f: &FactorId| !self.spec.in_operand(0, f) && !self.spec.in_operand(1, f);
        self.spec.result.iter().flatten().copied().find(fresh).expect("infer saw it")
    }
}

/// Size and stride of the dim of `factor`.
fn extent(factor: FactorId, dims: &[DimFactors], shape: &[u64]) -> (u64, usize) {
    let dim = dims.iter().position(|d| d.contains(&factor)).expect("the indexed factor is a dim");
    (shape[dim], factor_strides(&[factor], dims, shape)[0] as usize)
}

/// `index` where it lies in `[0, size)`.
fn row(index: i64, size: u64) -> Option<usize> {
    u64::try_from(index).ok().filter(|&i| i < size).map(|i| i as usize)
}

fn index_dtype(ty: &TensorType) -> Result<()> {
    if matches!(ty.dtype, DType::I64 | DType::I32) {
        return Ok(());
    }
    Err(Error::dtype(format!("indices of {}", ty.dtype.name())))
}

impl OpDef for Gather {
    const NAME: &'static str = "gather";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [_, indices] = exactly::<2>(Self::NAME, operands)?;
        index_dtype(indices)?;
        let missing = |&&f: &&FactorId| !self.spec.in_result(f);
        if self.spec.operands.len() != 2 || self.spec.operands[0].iter().flatten().filter(missing).count() != 1 {
            return Err(Error::shape(format!("gather({}) has not one indexed factor", self.spec.text())));
        }
        if self.spec.operands[1].iter().flatten().any(|f| missing(&f)) {
            return Err(Error::shape(format!("gather({}) drops a factor of the indices", self.spec.text())));
        }
        infer_by_spec(Self::NAME, &self.spec, operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { masked: vec![self.indexed()], ..Rule::new(self.spec.clone()) }
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (data, indices) = (operands[0], operands[1]);
        let factors: Vec<FactorId> = self.spec.result.iter().flatten().copied().collect();
        let at = |operand: usize, shape: &[u64]| {
            offsets(&result.shape, 0, &factor_strides(&factors, &self.spec.operands[operand], shape))
        };
        let rows = at(0, &data.shape).zip(at(1, &indices.shape));
        let (size, stride) = extent(self.indexed(), &self.spec.operands[0], &data.shape);
        let chosen = rows.map(|(base, i)| row(indices.i64s()[i], size).map(|r| base + r * stride));
        let data = match &data.data {
            Data::Float(v) => Data::Float(chosen.map(|o| o.map_or(0.0, |o| v[o])).collect()),
            Data::Int(v) => Data::Int(chosen.map(|o| o.map_or(0, |o| v[o])).collect()),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let (data, indices) = (g.operand(0), g.operand(1));
        let (size, _) = extent(self.indexed(), &self.spec.operands[0], &g.ty(data).shape);
        let spec = respec(&self.spec, &[&self.spec.operands[1], &self.spec.result], &self.spec.operands[0]);
        g.give(0, |g| g.add(ScatterAdd { spec, size }, &[indices, dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |spec: &str, data: Tensor, size: i64, indices: &[u64]| {
            let spec = FactorSpec::parse(spec).expect("a gather of ours parses");
            Example::new(Gather { spec }, [data, ints(-1, size + 1, 2, indices)])
        };
        vec![
            of("v e, b t -> b t e", floats(1, &[7, 3]), 7, &[2, 5]),
            of("i v, i j -> i j", floats(1, &[3, 5]), 5, &[3, 4]),
            of("i v k, j -> i j k", floats(1, &[3, 5, 2]), 5, &[4]),
            of("b v, b -> b", floats(1, &[3, 5]), 5, &[3]),
            of("v, ->", floats(1, &[5]), 5, &[]),
            of("v e, t -> t e", ints(1, 9, 1, &[5, 2]), 5, &[3]),
        ]
    }
}

impl OpDef for ScatterAdd {
    const NAME: &'static str = "scatter_add";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [indices, updates] = exactly::<2>(Self::NAME, operands)?;
        index_dtype(indices)?;
        if !updates.dtype.is_float() {
            return Err(Error::dtype(format!("scatter_add of {}", updates.dtype.name())));
        }
        let fresh = |f: &FactorId| !(0..2).any(|i| self.spec.in_operand(i, *f));
        if self.spec.operands.len() != 2 || self.spec.result.iter().flatten().filter(|f| fresh(f)).count() != 1 {
            return Err(Error::shape(format!("scatter_add({}) has not one indexed factor", self.spec.text())));
        }
        let lost = |f: &FactorId| !self.spec.in_operand(0, *f) && !self.spec.in_result(*f);
        let alone = |f: &FactorId| !self.spec.in_operand(1, *f);
        let [of_indices, of_updates] = [0, 1].map(|i| self.spec.operands[i].iter().flatten());
        if of_updates.clone().any(lost) || of_indices.clone().any(alone) {
            let what =
                format!("scatter_add({}) has a factor of updates nowhere else, or of indices not in updates", self.spec.text());
            return Err(Error::shape(what));
        }
        let mut operand_spec = self.spec.clone();
        let position = operand_spec.result.iter().position(|d| d.iter().any(fresh)).expect("counted above");
        operand_spec.result.remove(position);
        let mut ty = infer_by_spec(Self::NAME, &operand_spec, operands)?;
        ty.shape.insert(position, self.size);
        Ok(TensorType::new(updates.dtype, ty.shape))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { masked: vec![self.indexed()], ..Rule::new(self.spec.clone()) }
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![1]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (indices, updates) = (operands[0], operands[1]);
        let factors: Vec<FactorId> = self.spec.operands[1].iter().flatten().copied().collect();
        let at = |dims: &[DimFactors], shape: &[u64]| offsets(&updates.shape, 0, &factor_strides(&factors, dims, shape));
        let (size, stride) = extent(self.indexed(), &self.spec.result, &result.shape);
        let mut out = Tensor::zeros(result);
        let rows = at(&self.spec.operands[0], &indices.shape).zip(at(&self.spec.result, &result.shape));
        for (u, (i, base)) in rows.enumerate() {
            let Some(row) = row(indices.i64s()[i], size) else { continue };
            match (&updates.data, &mut out.data) {
                (Data::Float(from), Data::Float(to)) => to[base + row * stride] += from[u],
                _ => unreachable!("only floats are added"),
            }
        }
        out
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let indices = g.operand(0);
        let spec = respec(&self.spec, &[&self.spec.result, &self.spec.operands[0]], &self.spec.operands[1]);
        g.give(1, |g| g.add(Gather { spec }, &[dy, indices]))
    }

    fn examples() -> Vec<Example> {
        let of = |spec: &str, size: u64, indices: &[u64], updates: Tensor| {
            let spec = FactorSpec::parse(spec).expect("a scatter of ours parses");
            Example::new(ScatterAdd { spec, size }, [ints(-1, size as i64 + 1, 2, indices), updates])
        };
        vec![
            of("b t, b t e -> v e", 7, &[2, 5], floats(1, &[2, 5, 3])),
            of("i j, i j -> i v", 5, &[3, 4], floats(1, &[3, 4])),
            of("j, i j k -> i v k", 5, &[4], floats(1, &[3, 4, 2])),
            of("b, b -> b v", 5, &[3], floats(1, &[3])),
        ]
    }
}
