//! Sharding rules: the factors of an op with their sizes and restrictions.

use dcc_program::factors::DimFactors;
use dcc_program::{FactorId, FactorSpec, Reduce, TensorType};

/// Which dims of an op's operands and result correspond, and what sharding each factor allows.
///
/// A factor that is missing from the result is reduced: where it is sharded, the result is pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub spec: FactorSpec,
    /// Global size of each factor; filled by `sized`.
    pub sizes: Vec<u64>,
    /// Factors that may not be sharded: sorted, scanned, shifted dims.
    pub whole: Vec<FactorId>,
    /// Factors that computed indices select: an index outside of the shard contributes zero, the result is a pending sum.
    pub masked: Vec<FactorId>,
    /// How a factor missing from the result is reduced.
    pub reduce: Reduce,
}

impl Rule {
    pub fn new(spec: FactorSpec) -> Rule {
        Rule { spec, sizes: Vec::new(), whole: Vec::new(), masked: Vec::new(), reduce: Reduce::Sum }
    }

    /// All operands and the result have the same dims.
    pub fn pointwise(operands: usize, rank: usize) -> Rule {
        Rule::new(FactorSpec::pointwise(operands, rank))
    }

    /// Parses a spec known to be right.
    pub fn of(spec: &str) -> Rule {
        Rule::new(FactorSpec::parse(spec).expect("a rule of ours parses"))
    }

    /// Computes the sizes from the global shapes.
    pub fn sized(mut self, operands: &[&TensorType], result: &TensorType) -> Rule {
        self.sizes = self.spec.sizes(operands, result).expect("infer accepted these shapes");
        self
    }

    pub fn size(&self, factor: FactorId) -> u64 {
        self.sizes[factor.0 as usize]
    }

    /// Size of the factor of that name.
    pub fn size_of(&self, name: &str) -> u64 {
        self.spec.names.iter().position(|n| n == name).map_or(1, |i| self.sizes[i])
    }

    pub fn is_whole(&self, factor: FactorId) -> bool {
        self.whole.contains(&factor)
    }

    /// Factors that index no result dim.
    pub fn reduced(&self) -> impl Iterator<Item = FactorId> + '_ {
        self.spec.ids().filter(|&f| !self.spec.in_result(f))
    }

    /// A pointwise rule in which the dims where `shifted` says so are different, unshardable factors on both sides.
    pub fn shifted(rank: usize, operands: usize, shifted: impl Fn(usize) -> bool) -> Rule {
        let mut rule = Rule::pointwise(operands, rank);
        for dim in (0..rank).filter(|&d| shifted(d)) {
            rule.whole.push(FactorId(dim as u8));
            for operand in 0..operands {
                let fresh = FactorId(rule.spec.names.len() as u8);
                rule.spec.names.push(format!("x{operand}_{dim}"));
                rule.spec.operands[operand][dim] = DimFactors::from_slice(&[fresh]);
                rule.whole.push(fresh);
            }
        }
        rule
    }

    /// The rule of a reshape: runs of dims with equal products are split into common factors where their sizes allow, else each
    /// side's dims are unshardable. Common factors are named `f0 f1 …`, the others `w0 w1 …`.
    pub fn reshape(from: &[u64], to: &[u64]) -> Rule {
        let mut rule = Rule::new(FactorSpec { names: Vec::new(), operands: vec![vec![]], result: vec![] });
        let (mut i, mut j) = (0, 0);
        while i < from.len() || j < to.len() {
            let (i0, j0) = (i, j);
            let (mut left, mut right) = (1u64, 1u64);
            loop {
                if left == right && (i > i0 || j > j0) {
                    break;
                }
                if (left <= right && i < from.len()) || j >= to.len() {
                    left *= from[i];
                    i += 1;
                } else {
                    right *= to[j];
                    j += 1;
                }
                if (i >= from.len() && j >= to.len()) || (left == 0 && right == 0) {
                    break;
                }
            }
            rule.reshape_run(&from[i0..i], &to[j0..j]);
        }
        rule
    }

    /// Adds a factor named by its count among those of its kind, so that a reshape and its inverse name shardable factors alike.
    fn push_named(&mut self, kind: char) {
        let count = self.spec.names.iter().filter(|n| n.starts_with(kind)).count();
        self.spec.names.push(format!("{kind}{count}"));
    }

    fn reshape_run(&mut self, from: &[u64], to: &[u64]) {
        match common_factors(from, to) {
            Some(factors) => {
                let first = self.spec.names.len() as u8;
                factors.iter().for_each(|_| self.push_named('f'));
                let group = |dims: &[u64]| -> Vec<DimFactors> {
                    let mut next = 0;
                    dims.iter()
                        .map(|&d| {
                            let mut product = 1;
                            let mut dim = DimFactors::new();
                            while product < d {
                                product *= factors[next];
                                dim.push(FactorId(first + next as u8));
                                next += 1;
                            }
                            dim
                        })
                        .collect()
                };
                self.spec.operands[0].extend(group(from));
                self.spec.result.extend(group(to));
            }
            None => {
                for (side, dims) in [(0, from), (1, to)] {
                    for _ in dims {
                        let id = FactorId(self.spec.names.len() as u8);
                        self.push_named('w');
                        self.whole.push(id);
                        let dim = DimFactors::from_slice(&[id]);
                        if side == 0 { self.spec.operands[0].push(dim) } else { self.spec.result.push(dim) }
                    }
                }
            }
        }
    }
}

/// Sizes whose consecutive products are the dims of both sides; dims of size 1 take no factor. `None` where boundaries cross.
fn common_factors(from: &[u64], to: &[u64]) -> Option<Vec<u64>> {
    let boundaries = |dims: &[u64]| -> Vec<u64> {
        dims.iter()
            .scan(1u64, |p, &d| {
                *p *= d;
                Some(*p)
            })
            .collect()
    };
    if from.iter().chain(to).any(|&d| d == 0) {
        return None;
    }
    let mut cuts: Vec<u64> = boundaries(from).into_iter().chain(boundaries(to)).filter(|&c| c > 1).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut factors = Vec::new();
    let mut last = 1;
    for cut in cuts {
        if cut % last != 0 {
            return None;
        }
        factors.push(cut / last);
        last = cut;
    }
    // Dims are read major first: prefix products from the left must be exact on both sides, which the cuts guarantee.
    Some(factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(from: &[u64], to: &[u64]) -> (String, usize) {
        let rule = Rule::reshape(from, to);
        (rule.spec.text(), rule.whole.len())
    }

    #[test]
    fn reshapes_find_common_factors() {
        assert_eq!(spec(&[8, 16, 64], &[8, 16, 4, 16]), ("f0 f1 (f2 f3) -> f0 f1 f2 f3".to_owned(), 0));
        assert_eq!(spec(&[8, 16, 64], &[128, 64]), ("f0 f1 f2 -> (f0 f1) f2".to_owned(), 0));
        assert_eq!(spec(&[2, 3], &[3, 2]), ("w0 w1 -> w2 w3".to_owned(), 4));
        assert_eq!(spec(&[5], &[1, 5, 1]), ("f0 -> () f0 ()".to_owned(), 0));
        assert_eq!(spec(&[], &[1, 1]), ("-> () ()".to_owned(), 0));
    }
}
