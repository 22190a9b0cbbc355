//! Scaled dot-product attention and its gradient as library ops. Dao 2023, arXiv 2307.08691.

mod mask;

use super::dot::{factor_sizes, pack, sum_dtype, unpack};
use super::example::{Example, bools, floats, rounded};
use super::{Op, OpDef, Rule};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::{NodeId, Operands};
use crate::interp::Tensor;
use dcc_program::program::{Attention as Attributes, MaskKind};
use dcc_program::{DType, FactorId, FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// Operands Q, K, V and the mask if there is one. `causal` keeps keys s ≤ t; a query without keys gives zero.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attention {
    pub attributes: Attributes,
    /// 0: O; 1: the log-sum-exp of the scores, O's dims without the value dim, f32 also for half floats.
    pub out: u8,
}

/// Operands dO, Q, K, V, O, Lse and the mask if there is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttentionGrad {
    pub attributes: Attributes,
    /// 0: dQ, 1: dK, 2: dV.
    pub out: u8,
}

impl Op {
    /// Whether this is attention and a factor counts its queries or keys.
    pub fn counts_positions(&self, spec: &FactorSpec, factor: FactorId) -> bool {
        let is_attention = matches!(self, Op::Attention(_) | Op::AttentionGrad(_));
        is_attention && ["t", "s"].contains(&spec.names[usize::from(factor.0)].as_str())
    }
}

/// Factors by name, as `dcc_program::program::Attention` documents them: `b h t e`, keys `s`, value dim `f`, group `g`.
fn factor(spec: &FactorSpec, name: &str) -> Option<FactorId> {
    spec.names.iter().position(|n| n == name).map(|i| FactorId(i as u8))
}

impl Attention {
    /// Spec of this result: O's, or Lse's.
    fn spec(&self) -> FactorSpec {
        let mut spec = self.attributes.spec.clone();
        if self.out == 1 {
            let f = factor(&spec, "f");
            spec.result.retain(|d| d.first().copied() != f);
        }
        spec
    }
}

impl AttentionGrad {
    /// dO, Q, K, V, O, Lse (, mask) -> the operand whose gradient this is.
    fn spec(&self) -> FactorSpec {
        let forward = &self.attributes.spec;
        let lse = Attention { attributes: self.attributes.clone(), out: 1 }.spec().result;
        let mut spec = forward.clone();
        spec.operands = vec![forward.result.clone()];
        spec.operands.extend(forward.operands[..3].iter().cloned());
        spec.operands.extend([forward.result.clone(), lse]);
        spec.operands.extend(forward.operands.get(3).cloned());
        spec.result = forward.operands[usize::from(self.out)].clone();
        spec
    }
}

fn infer(name: &str, attributes: &Attributes, spec: &FactorSpec, operands: &[&TensorType]) -> Result<TensorType> {
    let masked = usize::from(attributes.mask != MaskKind::None);
    if attributes.spec.operands.len() != 3 + masked {
        return Err(Error::graph(format!("{name}({}) has not {} operands", attributes.spec.text(), 3 + masked)));
    }
    if ["e", "f", "t", "s"].iter().any(|n| factor(&attributes.spec, n).is_none()) {
        return Err(Error::graph(format!("{name}({}) lacks one of the factors t s e f", attributes.spec.text())));
    }
    super::dot::infer_by_spec(name, spec, operands)
}

/// Keys stay whole, as do the dims that are summed inside. A causal query counts from its shard.
fn rule(spec: FactorSpec) -> Rule {
    let whole = ["s", "e", "f"].iter().filter_map(|n| factor(&spec, n)).collect();
    Rule { whole, ..Rule::new(spec) }
}

/// Queries, keys, values and mask packed row by row: what is left of a spec are sizes.
struct Packed {
    sizes: Vec<u64>,
    /// All factors but `t s e f`.
    batch: Vec<FactorId>,
    t: FactorId,
    s: FactorId,
    e: FactorId,
    f: FactorId,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    mask: Option<Vec<f64>>,
    scale: f64,
    causal: bool,
}

impl Packed {
    fn new(a: &Attributes, qkv: &[&Tensor], mask: Option<&Tensor>, sizes: Vec<u64>) -> Packed {
        let role = |name: &str| factor(&a.spec, name).expect("infer saw it");
        let [t, s, e, f] = ["t", "s", "e", "f"].map(role);
        let batch: Vec<FactorId> = a.spec.ids().filter(|x| ![t, s, e, f].contains(x)).collect();
        let order = |row: FactorId, column: FactorId| [&batch[..], &[row, column]].concat();
        let packed = |i: usize, row, column| pack(qkv[i], &a.spec.operands[i], &order(row, column), &sizes);
        let mask = mask.map(|mask| {
            let additive = match a.mask {
                MaskKind::Additive => mask.clone(),
                _ => {
                    let values = mask.i64s().iter().map(|&keep| if keep != 0 { 0.0 } else { f64::NEG_INFINITY }).collect();
                    Tensor::floats(qkv[0].dtype, &mask.shape, values)
                }
            };
            pack(&additive, &a.spec.operands[3], &order(t, s), &sizes)
        });
        let (q, k, v) = (packed(0, t, e), packed(1, s, e), packed(2, s, f));
        Packed { batch, t, s, e, f, q, k, v, mask, scale: f64::from_bits(a.scale), causal: a.causal, sizes }
    }

    fn size(&self, factor: FactorId) -> usize {
        self.sizes[usize::from(factor.0)] as usize
    }

    fn order(&self, last: &[FactorId]) -> Vec<FactorId> {
        [&self.batch[..], last].concat()
    }

    /// Number of (batch, query) rows.
    fn rows(&self) -> usize {
        self.batch.iter().map(|&f| self.size(f)).product::<usize>() * self.size(self.t)
    }

    /// Row `key` of a packed matrix of `width` columns, in the batch of `row`.
    fn of_key<'a>(&self, values: &'a [f64], row: usize, key: usize, width: usize) -> &'a [f64] {
        &values[(row / self.size(self.t) * self.size(self.s) + key) * width..][..width]
    }

    /// Scaled and masked scores of a row.
    fn scores(&self, row: usize) -> Vec<f64> {
        let (keys, width) = (self.size(self.s), self.size(self.e));
        let q = &self.q[row * width..][..width];
        let score = |s: usize| {
            if self.causal && s > row % self.size(self.t) {
                return f64::NEG_INFINITY;
            }
            let mask = self.mask.as_ref().map_or(0.0, |m| m[row * keys + s]);
            if mask == f64::NEG_INFINITY { mask } else { self.scale * product(q, self.of_key(&self.k, row, s, width)) + mask }
        };
        (0..keys).map(score).collect()
    }
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `to += factor · from`.
fn accumulate(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, super::elementwise::max);
    if max == f64::NEG_INFINITY { max } else { max + scores.iter().map(|x| (x - max).exp()).sum::<f64>().ln() }
}

/// The softmax of `scores`; zero where a mask left nothing.
fn probabilities(scores: &[f64], lse: f64) -> Vec<f64> {
    scores.iter().map(|&x| if x == f64::NEG_INFINITY { 0.0 } else { (x - lse).exp() }).collect()
}

impl OpDef for Attention {
    const NAME: &'static str = "attention";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let ty = infer(Self::NAME, &self.attributes, &self.spec(), operands)?;
        Ok(ty.with_dtype(sum_dtype(ty.dtype, self.out == 1)))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        rule(self.spec())
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let sizes = factor_sizes(&self.spec(), operands, result);
        let packed = Packed::new(&self.attributes, operands, operands.get(3).copied(), sizes);
        let width = packed.size(packed.f);
        let mut lse = vec![0.0; packed.rows()];
        let mut o = vec![0.0; packed.rows() * width];
        for row in 0..packed.rows() {
            let scores = packed.scores(row);
            lse[row] = log_sum_exp(&scores);
            for (key, p) in probabilities(&scores, lse[row]).into_iter().enumerate() {
                accumulate(&mut o[row * width..][..width], p, packed.of_key(&packed.v, row, key, width));
            }
        }
        let (values, order) = match self.out {
            0 => (o, packed.order(&[packed.t, packed.f])),
            _ => (lse, packed.order(&[packed.t])),
        };
        unpack(&values, &order, &packed.sizes, &self.spec().result, result)
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        if self.out != 0 {
            return Err(g.broken(y, "attention's log-sum-exp has no gradient"));
        }
        let forward = g[y].operands.clone();
        let lse = g.in_forward(|g| g.add(Attention { out: 1, ..self.clone() }, &forward))?;
        let mut operands = Operands::from_slice(&[dy]);
        operands.extend(forward[..3].iter().copied());
        operands.extend([y, lse]);
        operands.extend(forward.get(3).copied());
        for out in 0..3 {
            g.give(usize::from(out), |g| g.add(AttentionGrad { attributes: self.attributes.clone(), out }, &operands))?;
        }
        if forward.len() == 4 {
            g.give(3, |g| mask::gradient(self, g, y, lse, dy))?;
        }
        Ok(())
    }

    fn examples() -> Vec<Example> {
        let mut all = Vec::new();
        for (attributes, operands) in cases() {
            for out in [0, 1] {
                let example = Example::new(Attention { attributes: attributes.clone(), out }, operands.clone());
                let trains: Vec<usize> = (0..operands.len()).filter(|&i| operands[i].dtype.is_float()).collect();
                all.push(if out == 0 { example.wrt(&trains) } else { example.wrt(&[]) });
            }
        }
        for (attributes, operands, _) in halves() {
            let of = |out| Example::new(Attention { attributes: attributes.clone(), out }, operands.clone()).wrt(&[]);
            all.extend([of(0), of(1)]);
        }
        all
    }
}

impl OpDef for AttentionGrad {
    const NAME: &'static str = "attention_grad";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer(Self::NAME, &self.attributes, &self.spec(), operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        rule(self.spec())
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let sizes = factor_sizes(&self.spec(), operands, result);
        let a = &self.attributes;
        let packed = Packed::new(a, &operands[1..4], operands.get(6).copied(), sizes);
        let (queries, keys) = (packed.size(packed.t), packed.size(packed.s));
        let (e, f) = (packed.size(packed.e), packed.size(packed.f));
        let of_o = |x: &Tensor| pack(x, &a.spec.result, &packed.order(&[packed.t, packed.f]), &packed.sizes);
        let (d_o, o) = (of_o(operands[0]), of_o(operands[4]));
        let lse_dims = Attention { attributes: a.clone(), out: 1 }.spec().result;
        let lse = pack(operands[5], &lse_dims, &packed.order(&[packed.t]), &packed.sizes);
        let (row_factor, width) = [(packed.t, e), (packed.s, e), (packed.s, f)][usize::from(self.out)];
        let mut d = vec![0.0; packed.rows() / queries.max(1) * packed.size(row_factor) * width];
        for row in 0..packed.rows() {
            let d_o = &d_o[row * f..][..f];
            let delta = product(d_o, &o[row * f..][..f]);
            for (key, p) in probabilities(&packed.scores(row), lse[row]).into_iter().enumerate() {
                let at_key = (row / queries * keys + key) * width;
                let ds = packed.scale * p * (product(d_o, packed.of_key(&packed.v, row, key, f)) - delta);
                match self.out {
                    0 => accumulate(&mut d[row * e..][..e], ds, packed.of_key(&packed.k, row, key, e)),
                    1 => accumulate(&mut d[at_key..][..e], ds, &packed.q[row * e..][..e]),
                    _ => accumulate(&mut d[at_key..][..f], p, d_o),
                }
            }
        }
        let column = if self.out == 2 { packed.f } else { packed.e };
        unpack(&d, &packed.order(&[row_factor, column]), &packed.sizes, &self.spec().result, result)
    }

    fn examples() -> Vec<Example> {
        let mut all = Vec::new();
        let wide = cases().into_iter().map(|(attributes, operands)| (attributes, operands, DType::F64));
        for (attributes, operands, dtype) in wide.chain(halves()) {
            let of = |out| Example::new(Attention { attributes: attributes.clone(), out }, operands.clone()).eval();
            let (o, lse) = (rounded(dtype, &of(0)), of(1));
            let mut with = vec![rounded(dtype, &floats(9, &o.shape))];
            with.extend(operands[..3].iter().cloned());
            with.extend([o, lse]);
            with.extend(operands.get(3).cloned());
            all.extend(
                (0..3).map(|out| Example::new(AttentionGrad { attributes: attributes.clone(), out }, with.clone()).wrt(&[])),
            );
        }
        all
    }
}

/// Cases of half floats, whose additive mask is f32.
fn halves() -> impl Iterator<Item = (Attributes, Vec<Tensor>, DType)> {
    let dtypes = [DType::BF16, DType::F16, DType::BF16, DType::F16];
    cases().into_iter().zip(dtypes).map(|((attributes, operands), dtype)| {
        let of = |(i, x): (usize, &Tensor)| rounded(if i < 3 { dtype } else { DType::F32 }, x);
        (attributes, operands.iter().enumerate().map(of).collect(), dtype)
    })
}

/// Attributes and operands: plain; causal with time-major dims; grouped heads with an additive mask; a boolean mask with a row
/// that keeps nothing; an additive one by head, in another order.
fn cases() -> Vec<(Attributes, Vec<Tensor>)> {
    let attributes = |spec: &str, causal, mask| {
        let spec = FactorSpec::parse(spec).expect("an attention of ours parses");
        Attributes { spec, causal, mask, scale: 0.7f64.to_bits() }
    };
    let mut keep = bools(4, &[2, 4, 5]);
    if let crate::interp::Data::Int(values) = &mut keep.data {
        values[5..10].fill(0);
    }
    let (q, k, v) = (floats(1, &[2, 3, 4, 2]), floats(2, &[2, 3, 5, 2]), floats(3, &[2, 3, 5, 3]));
    vec![
        (attributes("b h t e, b h s e, b h s f -> b h t f", false, MaskKind::None), vec![q.clone(), k.clone(), v.clone()]),
        (
            attributes("b t h e, b s h e, b s h f -> b t h f", true, MaskKind::None),
            vec![floats(1, &[2, 4, 3, 2]), floats(2, &[2, 4, 3, 2]), floats(3, &[2, 4, 3, 2])],
        ),
        (
            attributes("b h g t e, b h s e, b h s f, t s -> b h g t f", false, MaskKind::Additive),
            vec![floats(1, &[2, 3, 2, 4, 2]), k.clone(), v.clone(), floats(4, &[4, 5])],
        ),
        (
            attributes("b h t e, b h s e, b h s f, b t s -> b h t f", false, MaskKind::Boolean),
            vec![q, k.clone(), v.clone(), keep],
        ),
        (
            attributes("b h t e, b h s e, b h s f, s h t -> b t h f", true, MaskKind::Additive),
            vec![floats(1, &[2, 3, 4, 2]), k, v, floats(5, &[5, 3, 4])],
        ),
    ]
}
