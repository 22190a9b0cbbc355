//! Contractions with the dims that the model thinks in.
//!
//! Exporters flatten `[batch, tokens, width]` to two dims around every matrix product and transpose weights before it. Here a
//! transposed operand is read in place by a permuted spec, a flattened one by its own dims, a broadcast one without them, so
//! that sharding sees batch and tokens as what they are.

use dcc_program::FactorSpec;
use dcc_program::kernel::BinaryOp;

use super::build::Build;
use super::ops::computed_in;
use super::shape::merged;
use super::value::Value;
use crate::error::Result;
use crate::graph::NodeId;
use crate::ops::{DotGeneral, Op};

/// An operand and the name of the factor of each of its dims.
#[derive(Clone, Debug)]
struct Term {
    id: NodeId,
    factors: Vec<String>,
}

/// Factors that stand for several dims of both operands, and the sizes of these.
type Splits = Vec<(String, Vec<u64>)>;

impl Build {
    /// The contraction of `a` and `b` (halves in f32, which they are summed in) by factor names, such as `["m", "k"]`, `["k", "n"]` to `["m", "n"]`. Equal names have
    /// equal sizes; a name missing from `out` is summed over.
    pub fn dot(&mut self, a: (&Value, &[&str]), b: (&Value, &[&str]), out: &[&str]) -> Result<Value> {
        let dtype = a.0.dtype(self)?;
        let wide = computed_in(dtype);
        if wide != dtype {
            let (x, y) = (self.cast(a.0, wide)?, self.cast(b.0, wide)?);
            let product = self.dot((&x, a.1), (&y, b.1), out)?;
            return self.cast(&product, dtype);
        }
        let mut terms = Vec::with_capacity(2);
        let mut sizes: Vec<(String, u64)> = Vec::new();
        for (value, factors) in [a, b] {
            let shape = value.shape(self)?;
            sizes.extend(factors.iter().zip(&shape).map(|(name, &size)| ((*name).to_owned(), size)));
            let id = self.node(value)?;
            let term = Term { id, factors: factors.iter().map(|&name| name.to_owned()).collect() };
            terms.push(self.without_transpose(term));
        }
        let out: Vec<String> = out.iter().map(|&name| name.to_owned()).collect();
        let size = |name: &String| sizes.iter().find(|(n, _)| n == name).map_or(1, |&(_, size)| size);
        let merged_shape: Vec<u64> = out.iter().map(size).collect();
        let out = self.unflatten(&mut terms, out)?;
        for (mine, other) in [(0, 1), (1, 0)] {
            let shared = |name: &String| terms[other].factors.contains(name) && out.contains(name);
            let term = self.without_broadcast(&terms[mine], shared);
            terms[mine] = term;
        }
        let text = format!("{}, {} -> {}", terms[0].factors.join(" "), terms[1].factors.join(" "), out.join(" "));
        let spec = FactorSpec::parse(&text).expect("factor names are identifiers");
        let result = self.graph.add(DotGeneral::from(spec), &[terms[0].id, terms[1].id])?;
        self.reshape(&result.into(), &merged_shape)
    }

    /// `x + bias`, before the reshape that flattened x where the bias reaches only its last dim: the sum keeps the dims too.
    pub fn add_under_reshape(&mut self, x: &Value, bias: &Value) -> Result<Value> {
        let shape = x.shape(self)?;
        let flattened = match x {
            Value::Node(id) if matches!(self.graph[*id].op, Op::Reshape(_)) => Some(self.graph[*id].operands[0]),
            _ => None,
        };
        let last = |shape: &[u64]| shape.last().copied();
        let bias_shape = bias.shape(self)?;
        let narrow = bias_shape.iter().rev().skip(1).all(|&size| size == 1) && last(&bias_shape).is_some();
        let Some(source) = flattened.filter(|&id| narrow && last(&self.graph.ty(id).shape) == last(&shape)) else {
            return self.binary(BinaryOp::Add, x, bias);
        };
        let size: u64 = bias_shape.iter().product();
        let bias = self.reshape(bias, &[size])?;
        let sum = self.binary(BinaryOp::Add, &source.into(), &bias)?;
        self.reshape(&sum, &shape)
    }

    fn without_transpose(&self, term: Term) -> Term {
        let node = &self.graph[term.id];
        let Op::Transpose(op) = &node.op else { return term };
        let mut factors = term.factors.clone();
        for (name, &dim) in term.factors.iter().zip(&op.perm) {
            factors[usize::from(dim)] = name.clone();
        }
        Term { id: node.operands[0], factors }
    }

    /// Without the dims along which the operand repeats and the other operand does not.
    fn without_broadcast(&self, term: &Term, shared: impl Fn(&String) -> bool) -> Term {
        let node = &self.graph[term.id];
        let Op::BroadcastInDim(op) = &node.op else { return term.clone() };
        let kept = |dim: usize| op.dims.contains(&(dim as u8));
        if (0..term.factors.len()).any(|dim| !kept(dim) && !shared(&term.factors[dim])) {
            return term.clone();
        }
        let factors = (0..term.factors.len()).filter(|&dim| kept(dim)).map(|dim| term.factors[dim].clone()).collect();
        Term { id: node.operands[0], factors }
    }

    /// Replaces flattened operands by what they were before: a dim is split where the other operand does not have it or splits
    /// it alike. Gives the result's factors.
    fn unflatten(&mut self, terms: &mut [Term], out: Vec<String>) -> Result<Vec<String>> {
        let groups: Vec<Splits> = terms.iter().map(|term| self.splits(term)).collect();
        let mut all = Splits::new();
        for side in 0..2 {
            let other = &terms[1 - side].factors;
            let agreed = |split: &&(String, Vec<u64>)| !other.contains(&split.0) || groups[1 - side].contains(split);
            let chosen: Splits = groups[side].iter().filter(agreed).cloned().collect();
            all.extend(chosen);
        }
        let parts = |name: &String| match all.iter().find(|(split, _)| split == name) {
            Some((_, sizes)) => part_names(name, sizes.len()),
            None => vec![name.clone()],
        };
        for term in terms.iter_mut().filter(|term| term.factors.iter().any(|name| all.iter().any(|(split, _)| split == name))) {
            let shape = self.graph.ty(term.id).shape.clone();
            let fine = term.factors.iter().zip(&shape).flat_map(|(name, &size)| {
                let split = all.iter().find(|(split, _)| split == name);
                split.map_or_else(|| vec![size], |(_, sizes)| sizes.clone())
            });
            let fine: Vec<u64> = fine.collect();
            let id = self.reshape_node(term.id, &fine)?;
            let factors = term.factors.iter().flat_map(parts).collect();
            *term = self.without_transpose(Term { id, factors });
        }
        Ok(out.iter().flat_map(parts).collect())
    }

    /// The dims of the operand that a reshape merged from several, with their sizes.
    fn splits(&self, term: &Term) -> Splits {
        let node = &self.graph[term.id];
        let Op::Reshape(_) = node.op else { return Splits::new() };
        let from = &self.graph.ty(node.operands[0]).shape;
        let Some(groups) = merged(from, &node.ty.shape) else { return Splits::new() };
        let named = term.factors.iter().zip(groups).filter(|(_, group)| group.len() > 1);
        named.map(|(name, group)| (name.clone(), from[group].to_vec())).collect()
    }
}

fn part_names(name: &str, count: usize) -> Vec<String> {
    (0..count).map(|part| format!("{name}{part}")).collect()
}
