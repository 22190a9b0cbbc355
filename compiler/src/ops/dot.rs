//! `dot_general`: the contraction of two tensors, by a factor spec.

use super::example::{Example, floats, rounded};
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Tensor, offsets, strides};
use dcc_program::factors::DimFactors;
use dcc_program::{DType, FactorId, FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// `Σ` over the factors missing from the result of the product of both operands; every dim is one factor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DotGeneral {
    /// For instance `b m k, k n -> b m n`.
    pub spec: FactorSpec,
    /// Half floats give f32, in which they are summed, instead of their own dtype.
    #[serde(default, skip_serializing_if = "is_false")]
    pub wide: bool,
}

pub(super) fn is_false(flag: &bool) -> bool {
    !flag
}

/// The dtype of a sum of products of `dtype`.
pub(super) fn sum_dtype(dtype: DType, wide: bool) -> DType {
    if wide && dtype.bytes() == 2 { DType::F32 } else { dtype }
}

impl DotGeneral {
    /// From a spec known to parse.
    pub fn of(spec: &str) -> DotGeneral {
        FactorSpec::parse(spec).expect("a dot of ours parses").into()
    }
}

impl From<FactorSpec> for DotGeneral {
    /// The result has the operands' dtype.
    fn from(spec: FactorSpec) -> DotGeneral {
        DotGeneral { spec, wide: false }
    }
}

/// The spec with these dims in the place of `of`'s, its names in order of first appearance again.
pub(super) fn respec(of: &FactorSpec, operands: &[&[DimFactors]], result: &[DimFactors]) -> FactorSpec {
    let operands: Vec<String> = operands.iter().map(|dims| of.dims_text(dims)).collect();
    let text = format!("{} -> {}", operands.join(", "), of.dims_text(result));
    FactorSpec::parse(&text).expect("a spec of known factors parses")
}

/// How far apart the elements of each factor of `factors` are in a row-major tensor; 0 where it has no such dim.
pub(super) fn factor_strides(factors: &[FactorId], dims: &[DimFactors], shape: &[u64]) -> Vec<isize> {
    let of_dims = strides(shape);
    let stride = |f: &FactorId| dims.iter().zip(&of_dims).filter(|(dim, _)| dim.contains(f)).map(|(_, &s)| s as isize).sum();
    factors.iter().map(stride).collect()
}

/// Size of each factor of a spec of plain dims, from its operands and result.
pub(super) fn factor_sizes(spec: &FactorSpec, operands: &[&Tensor], result: &TensorType) -> Vec<u64> {
    let mut sizes = vec![1; spec.names.len()];
    let shapes = operands.iter().map(|x| &x.shape).chain([&result.shape]);
    for (dims, shape) in spec.operands.iter().chain([&spec.result]).zip(shapes) {
        for (dim, &size) in dims.iter().zip(shape) {
            sizes[usize::from(dim[0].0)] = size;
        }
    }
    sizes
}

/// The elements of `x` in row-major order over `factors`, repeated over those it does not have.
pub(super) fn pack(x: &Tensor, dims: &[DimFactors], factors: &[FactorId], sizes: &[u64]) -> Vec<f64> {
    let shape: Vec<u64> = factors.iter().map(|f| sizes[usize::from(f.0)]).collect();
    let values = x.f64s();
    offsets(&shape, 0, &factor_strides(factors, dims, &x.shape)).map(|o| values[o]).collect()
}

/// The tensor of `dims` from values in row-major order over `factors`, summed over those it does not have.
pub(super) fn unpack(values: &[f64], factors: &[FactorId], sizes: &[u64], dims: &[DimFactors], ty: &TensorType) -> Tensor {
    let shape: Vec<u64> = factors.iter().map(|f| sizes[usize::from(f.0)]).collect();
    let mut out = vec![0.0; ty.elements() as usize];
    let at = offsets(&shape, 0, &factor_strides(factors, dims, &ty.shape));
    values.iter().zip(at).for_each(|(v, o)| out[o] += v);
    Tensor::floats(ty.dtype, &ty.shape, out)
}

/// The result of an op all of whose dims are plain factors; every result factor must come from an operand.
pub(super) fn infer_by_spec(name: &str, spec: &FactorSpec, operands: &[&TensorType]) -> Result<TensorType> {
    let wrong = |why: String| {
        let shapes: Vec<_> = operands.iter().map(|t| t.shape.to_vec()).collect();
        Error::shape(format!("{name}({}) of {shapes:?}: {why}", spec.text()))
    };
    if spec.operands.len() != operands.len() {
        return Err(wrong(format!("{} operands expected", spec.operands.len())));
    }
    let repeats = |dims: &Vec<DimFactors>| (1..dims.len()).any(|i| dims[..i].contains(&dims[i]));
    if spec.operands.iter().chain([&spec.result]).any(repeats) {
        return Err(wrong("a factor occurs twice".to_owned()));
    }
    let mut sizes: Vec<Option<u64>> = vec![None; spec.names.len()];
    for (dims, ty) in spec.operands.iter().zip(operands) {
        if dims.len() != ty.rank() || dims.iter().any(|d| d.len() != 1) {
            return Err(wrong(format!("operand {:?} has rank {}", spec.dims_text(dims), ty.rank())));
        }
        for (dim, &size) in dims.iter().zip(&ty.shape) {
            let factor = usize::from(dim[0].0);
            if *sizes[factor].get_or_insert(size) != size {
                return Err(wrong(format!("factor {} is {} and {size}", spec.names[factor], sizes[factor].unwrap_or(0))));
            }
        }
    }
    let size = |dim: &DimFactors| sizes[usize::from(dim.first()?.0)];
    let shape: Option<Vec<u64>> = spec.result.iter().map(size).collect();
    let shape = shape.ok_or_else(|| wrong("a result factor has no operand".to_owned()))?;
    Ok(TensorType::new(operands[0].dtype, shape))
}

impl OpDef for DotGeneral {
    const NAME: &'static str = "dot_general";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(Self::NAME, operands)?;
        if a.dtype != b.dtype || !a.dtype.is_float() {
            return Err(Error::dtype(format!("dot_general of {} and {}", a.dtype.name(), b.dtype.name())));
        }
        let in_both = |f: FactorId| self.spec.in_operand(0, f) && self.spec.in_operand(1, f);
        if !self.spec.ids().all(|f| self.spec.in_result(f) || in_both(f)) {
            return Err(Error::shape(format!("dot_general({}) sums over a factor of one operand", self.spec.text())));
        }
        let ty = infer_by_spec(Self::NAME, &self.spec, operands)?;
        Ok(ty.with_dtype(sum_dtype(a.dtype, self.wide)))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule::new(self.spec.clone())
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0], vec![1]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let spec = &self.spec;
        let sizes = factor_sizes(spec, operands, result);
        let class = |in_result: bool, in_a: bool, in_b: bool| -> Vec<FactorId> {
            let of =
                |f: &FactorId| (spec.in_result(*f), spec.in_operand(0, *f), spec.in_operand(1, *f)) == (in_result, in_a, in_b);
            spec.ids().filter(of).collect()
        };
        let (batch, m, n) = (class(true, true, true), class(true, true, false), class(true, false, true));
        let k = [class(false, true, true), class(false, true, false), class(false, false, true)].concat();
        let total = |factors: &[FactorId]| factors.iter().map(|f| sizes[usize::from(f.0)] as usize).product::<usize>();
        let (rows, columns, depth) = (total(&m), total(&n), total(&k));
        let a = pack(operands[0], &spec.operands[0], &[&batch[..], &m, &k].concat(), &sizes);
        let b = pack(operands[1], &spec.operands[1], &[&batch[..], &k, &n].concat(), &sizes);
        let mut c = vec![0.0; total(&batch) * rows * columns];
        for (row, c) in c.chunks_exact_mut(columns.max(1)).enumerate() {
            let a = &a[row * depth..][..depth];
            let b = &b[row / rows * depth * columns..][..depth * columns];
            for (&a, b) in a.iter().zip(b.chunks_exact(columns)) {
                for (c, &b) in c.iter_mut().zip(b) {
                    *c += a * b;
                }
            }
        }
        unpack(&c, &[&batch[..], &m, &n].concat(), &sizes, &spec.result, result)
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let dtype = g.ty(g.operand(0)).dtype;
        let dy = g.of_value(y, |g| g.cast(dy, dtype))?;
        for (i, other) in [(0, 1), (1, 0)] {
            // Factors that only this operand has are summed by the dot: the gradient repeats along them.
            let own = |dim: &DimFactors| !self.spec.in_result(dim[0]) && !self.spec.in_operand(other, dim[0]);
            let dims = &self.spec.operands[i];
            let kept: Vec<usize> = (0..dims.len()).filter(|&d| !own(&dims[d])).collect();
            let to: Vec<DimFactors> = kept.iter().map(|&d| dims[d].clone()).collect();
            let (x, with) = (g.operand(i), g.operand(other));
            g.give(i, |g| {
                // Operands keep the forward's order: dy stands in the place of the operand that it differentiates.
                let (result, rest) = (&self.spec.result[..], &self.spec.operands[other][..]);
                let (dims, operands) = if i == 0 { ([result, rest], [dy, with]) } else { ([rest, result], [with, dy]) };
                let dot = g.add(DotGeneral::from(respec(&self.spec, &dims, &to)), &operands)?;
                let shape = g.ty(x).shape.clone();
                g.of_value(x, |g| g.broadcast(dot, &shape, &kept))
            })?;
        }
        Ok(())
    }

    fn examples() -> Vec<Example> {
        let of = |spec: &str, a: &[u64], b: &[u64]| Example::new(DotGeneral::of(spec), [floats(1, a), floats(2, b)]);
        let half = |wide, dtype| {
            let op = DotGeneral { wide, ..DotGeneral::of("b m k, b k n -> b m n") };
            let operands = [floats(1, &[2, 3, 5]), floats(2, &[2, 5, 4])];
            Example::new(op, operands.map(|x| rounded(dtype, &x))).wrt(&[])
        };
        vec![
            half(false, DType::BF16),
            half(true, DType::BF16),
            half(false, DType::F16),
            half(true, DType::F16),
            of("m k, k n -> m n", &[3, 5], &[5, 4]),
            of("m k, n k -> n m", &[3, 5], &[4, 5]),
            of("b t k, k n -> b t n", &[2, 3, 4], &[4, 5]),
            of("b h t e, b h s e -> b h t s", &[2, 3, 2, 4], &[2, 3, 5, 4]),
            of("b h t s, b s h e -> b t h e", &[2, 3, 2, 4], &[2, 4, 3, 5]),
            of("b t m, b t n -> m n", &[2, 3, 4], &[2, 3, 5]),
            of("m, n -> m n", &[3], &[5]),
            of("k, k ->", &[5], &[5]),
        ]
    }
}
