//! Attention and its gradient, score by score. Dao, FlashAttention-2, 2023, section 2, without the blocks.

use super::library::{Block, Factors, zeros};
use super::scalar::Value;
use super::{Fault, Rank, SimulateError, each_index};
use crate::factors::{DimFactors, FactorId, FactorSpec};
use crate::program::*;

/// Index of each factor that plays a part of its own; `None` where the spec has none of that name.
struct Roles {
    t: Option<usize>,
    s: usize,
    e: usize,
    f: usize,
}

impl Roles {
    fn of(spec: &FactorSpec) -> Fault<Roles> {
        let find = |name: &str| spec.names.iter().position(|n| n == name);
        let need = |name: &str| find(name).ok_or_else(|| SimulateError::fault(format!("attention without factor {name}")));
        Ok(Roles { t: find("t"), s: need("s")?, e: need("e")?, f: need("f")? })
    }
}

/// O's dims without `f`: the dims of Lse.
pub(crate) fn lse_dims(spec: &FactorSpec) -> Vec<DimFactors> {
    let f = spec.names.iter().position(|n| n == "f").map(|i| FactorId(i as u8));
    let without = |dim: &DimFactors| dim.iter().copied().filter(|&x| Some(x) != f).collect::<DimFactors>();
    spec.result.iter().filter(|dim| dim[..] != [f.unwrap_or(FactorId(u8::MAX))]).map(without).collect()
}

/// One (batch, head, query): its scores over the keys.
struct Row<'a> {
    a: &'a Attention,
    roles: Roles,
    factors: Factors,
    q: Block,
    k: Block,
    v: Block,
    mask: Option<Block>,
}

impl Row<'_> {
    fn read<'a>(p: &Program, a: &'a Attention, first: usize, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<Row<'a>> {
        let mut block = |i: usize| Block::read(p, instr.operands[i], step, rank);
        let (q, k, v) = (block(first)?, block(first + 1)?, block(first + 2)?);
        let mask = if a.mask == MaskKind::None { None } else { Some(block(instr.operands.len() - 1)?) };
        let o = p.ty(if first == 0 { instr.results[0] } else { instr.operands[0] });
        let mut operands = vec![&q.ty, &k.ty, &v.ty];
        operands.extend(mask.iter().map(|m| &m.ty));
        let factors = Factors::new(&a.spec, &operands, o, &p.mesh, &rank.at)?;
        Ok(Row { a, roles: Roles::of(&a.spec)?, factors, q, k, v, mask })
    }

    /// Index tuples of the rows: all factors but s, e, f.
    fn rows(&self) -> Vec<u64> {
        self.factors.valid(|x| x != self.roles.s && x != self.roles.e && x != self.roles.f)
    }

    fn with(&self, index: &[u64], factor: usize, value: u64) -> Vec<u64> {
        let mut index = index.to_vec();
        index[factor] = value;
        index
    }

    fn size(&self, factor: usize) -> u64 {
        self.factors.extents[factor].valid
    }

    fn at(&self, operand: usize, index: &[u64]) -> usize {
        self.factors.flat(&self.a.spec.operands[operand], index)
    }

    /// Scaled and masked Q·K; `None` where the mask drops it.
    fn score(&self, index: &[u64]) -> Fault<Option<f64>> {
        if let Some(t) = self.roles.t
            && self.a.causal
        {
            let global = |x: usize| self.factors.extents[x].offset + index[x];
            if global(self.roles.s) > global(t) {
                return Ok(None);
            }
        }
        let mut sum = 0.0;
        for e in 0..self.size(self.roles.e) {
            let index = self.with(index, self.roles.e, e);
            sum += self.q.value(self.at(0, &index))?.float()? * self.k.value(self.at(1, &index))?.float()?;
        }
        let score = sum * f64::from_bits(self.a.scale);
        match (&self.mask, self.a.mask) {
            (Some(mask), MaskKind::Additive) => Ok(Some(score + mask.value(self.at(3, index))?.float()?)),
            (Some(mask), MaskKind::Boolean) => Ok((mask.value(self.at(3, index))?.int()? != 0).then_some(score)),
            _ => Ok(Some(score)),
        }
    }
}

pub(super) fn forward(p: &Program, a: &Attention, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let row = Row::read(p, a, 0, instr, step, rank)?;
    let (mut o, mut lse) = (zeros(p, instr.results[0], step)?, zeros(p, instr.results[1], step)?);
    let lse_dims = lse_dims(&a.spec);
    each_index(&row.rows(), |index| {
        let mut scores = Vec::new();
        for s in 0..row.size(row.roles.s) {
            scores.push(row.score(&row.with(index, row.roles.s, s))?.unwrap_or(f64::NEG_INFINITY));
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, |m, x| if x.is_nan() { x } else { m.max(x) });
        let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        let total = if max == f64::NEG_INFINITY { max } else { max + sum.ln() };
        lse.add(row.factors.flat(&lse_dims, index), Value::Float(total))?;
        for (s, score) in (0u64..).zip(&scores).filter(|(_, x)| **x != f64::NEG_INFINITY) {
            let index = row.with(index, row.roles.s, s);
            for f in 0..row.size(row.roles.f) {
                let index = row.with(&index, row.roles.f, f);
                let v = row.v.value(row.at(2, &index))?.float()?;
                o.add(row.factors.flat(&a.spec.result, &index), Value::Float((score - total).exp() * v))?;
            }
        }
        Ok(())
    })?;
    o.write(rank)?;
    lse.write(rank)
}

pub(super) fn backward(p: &Program, a: &Attention, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let row = Row::read(p, a, 1, instr, step, rank)?;
    let mut block = |i: usize| Block::read(p, instr.operands[i], step, rank);
    let (d_o, o, lse) = (block(0)?, block(4)?, block(5)?);
    let mut grads = [zeros(p, instr.results[0], step)?, zeros(p, instr.results[1], step)?, zeros(p, instr.results[2], step)?];
    let (lse_dims, scale) = (lse_dims(&a.spec), f64::from_bits(a.scale));
    let dot_f = |x: &Block, y: &Block, y_dims: &[DimFactors], index: &[u64]| -> Fault<f64> {
        let mut sum = 0.0;
        for f in 0..row.size(row.roles.f) {
            let index = row.with(index, row.roles.f, f);
            let x = x.value(row.factors.flat(&a.spec.result, &index))?.float()?;
            sum += x * y.value(row.factors.flat(y_dims, &index))?.float()?;
        }
        Ok(sum)
    };
    each_index(&row.rows(), |index| {
        let delta = dot_f(&d_o, &o, &a.spec.result, index)?;
        let total = lse.value(row.factors.flat(&lse_dims, index))?.float()?;
        for s in 0..row.size(row.roles.s) {
            let index = row.with(index, row.roles.s, s);
            let Some(score) = row.score(&index)?.filter(|x| *x != f64::NEG_INFINITY) else { continue };
            let probability = (score - total).exp();
            let d_score = scale * probability * (dot_f(&d_o, &row.v, &a.spec.operands[2], &index)? - delta);
            for e in 0..row.size(row.roles.e) {
                let index = row.with(&index, row.roles.e, e);
                let (q, k) = (row.at(0, &index), row.at(1, &index));
                grads[0].add(q, Value::Float(d_score * row.k.value(k)?.float()?))?;
                grads[1].add(k, Value::Float(d_score * row.q.value(q)?.float()?))?;
            }
            for f in 0..row.size(row.roles.f) {
                let index = row.with(&index, row.roles.f, f);
                let dy = d_o.value(row.factors.flat(&a.spec.result, &index))?.float()?;
                grads[2].add(row.at(2, &index), Value::Float(probability * dy))?;
            }
        }
        Ok(())
    })?;
    grads.iter().try_for_each(|g| g.write(rank))
}
