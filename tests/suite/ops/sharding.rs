//! Every legal sharding of every example against the whole: operands split by the rule, each shard evaluated on its own, results
//! combined by the rule. Tails of uneven shards hold NaN where the rule says that nobody reads them.

use super::*;
use dcc::ops::Rule;
use dcc_program::factors::DimFactors;
use dcc_program::program::MaskKind;
use dcc_program::{Coordinates, DType, Extent, FactorId, Mesh};

/// One rank's extents, by factor, under a set of sharded factors.
struct Shard<'a> {
    rule: &'a Rule,
    extents: Vec<Extent>,
}

impl Shard<'_> {
    fn extent(&self, factor: FactorId) -> Extent {
        self.extents[usize::from(factor.0)]
    }

    fn local_type(&self, dims: &[DimFactors], ty: &TensorType) -> TensorType {
        TensorType::new(ty.dtype, dims.iter().map(|dim| dim.iter().map(|&f| self.extent(f).block).product()))
    }

    /// Global index of a local one, or the factors in whose tail it lies.
    fn global(&self, dims: &[DimFactors], local: &[u64]) -> Result<Vec<u64>, Vec<FactorId>> {
        let mut tails = Vec::new();
        let mut global = Vec::new();
        for (dim, &index) in dims.iter().zip(local) {
            let (mut rest, mut scale, mut at) = (index, 1, 0);
            for &f in dim.iter().rev() {
                let extent = self.extent(f);
                let i = rest % extent.block;
                rest /= extent.block;
                if i >= extent.valid {
                    tails.push(f);
                }
                at += (extent.offset + i) * scale;
                scale *= self.rule.size(f);
            }
            global.push(at);
        }
        if tails.is_empty() { Ok(global) } else { Err(tails) }
    }

    /// The rank's block of an operand: in the tail of a reduced factor the neutral element, in other tails garbage.
    fn local(&self, dims: &[DimFactors], whole: &Tensor) -> Tensor {
        let ty = self.local_type(dims, &whole.ty());
        let values = values(whole);
        let at = |local: &[u64]| match self.global(dims, local) {
            Ok(global) => values[flat(&whole.shape, &global)],
            Err(tails) if tails.iter().any(|&f| !self.rule.spec.in_result(f)) => neutral_of(self.rule.reduce),
            Err(_) => Value { float: f64::NAN, int: if whole.dtype == DType::Bool { 1 } else { 77 } },
        };
        tensor(&ty, indices(&ty.shape).iter().map(|local| at(local)).collect())
    }
}

/// An element, of which the dtype says which half counts.
#[derive(Clone, Copy)]
struct Value {
    float: f64,
    int: i64,
}

/// What the reduction of nothing gives; for the small integers that examples reduce.
fn neutral_of(op: dcc_program::Reduce) -> Value {
    use dcc_program::Reduce::{Max, Min, Prod, Sum};
    match op {
        Sum => Value { float: 0.0, int: 0 },
        Prod => Value { float: 1.0, int: 1 },
        Max => Value { float: f64::NEG_INFINITY, int: -1_000_000 },
        Min => Value { float: f64::INFINITY, int: 1_000_000 },
    }
}

fn values(x: &Tensor) -> Vec<Value> {
    match &x.data {
        Data::Float(v) => v.iter().map(|&float| Value { float, int: 0 }).collect(),
        Data::Int(v) => v.iter().map(|&int| Value { float: 0.0, int }).collect(),
    }
}

fn tensor(ty: &TensorType, values: Vec<Value>) -> Tensor {
    if ty.dtype.is_float() {
        Tensor::floats(ty.dtype, &ty.shape, values.iter().map(|v| v.float).collect())
    } else {
        Tensor::ints(ty.dtype, &ty.shape, values.iter().map(|v| v.int).collect())
    }
}

fn flat(shape: &[u64], index: &[u64]) -> usize {
    shape.iter().zip(index).fold(0, |flat, (&size, &i)| flat * size as usize + i as usize)
}

/// All indices of a shape in row-major order.
fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![vec![]], |rows, &size| {
        rows.iter().flat_map(|row| (0..size).map(move |i| [row.clone(), vec![i]].concat())).collect()
    })
}

/// Whether types can say it: in a compound dim only the major factor (of those larger than 1) is sharded, and evenly.
fn is_legal(rule: &Rule, shards: &[(FactorId, u32)]) -> bool {
    let dims = rule.spec.operands.iter().chain([&rule.spec.result]).flatten();
    let fits = |dim: &DimFactors, factor: FactorId, n: u32| {
        dim.len() == 1
            || !dim.contains(&factor)
            || (dim.iter().find(|&&f| rule.size(f) > 1) == Some(&factor) && rule.size(factor).is_multiple_of(u64::from(n)))
    };
    let distinct = shards.windows(2).all(|w| w[0].0 != w[1].0);
    distinct
        && shards.iter().all(|&(f, _)| !rule.is_whole(f))
        && dims.clone().all(|dim| shards.iter().all(|&(f, n)| fits(dim, f, n)))
}

/// Evaluates the example on every rank of a mesh with one axis per entry of `shards` and compares with the whole.
fn check(example: &Example, rule: &Rule, shards: &[(FactorId, u32)]) -> Result<(), String> {
    let names = ["a", "b"];
    let mesh = Mesh::new(&shards.iter().zip(names).map(|(&(_, n), name)| (name, n)).collect::<Vec<_>>());
    let result = example.result();
    let combine = dcc::ops::Binary {
        op: match rule.reduce {
            dcc_program::Reduce::Sum => dcc_program::kernel::BinaryOp::Add,
            dcc_program::Reduce::Max => dcc_program::kernel::BinaryOp::Max,
            dcc_program::Reduce::Min => dcc_program::kernel::BinaryOp::Min,
            dcc_program::Reduce::Prod => dcc_program::kernel::BinaryOp::Mul,
        },
    };
    let scalar = TensorType::new(result.dtype, []);
    let mut combined: Vec<Option<Value>> = vec![None; result.elements() as usize];
    for rank in 0..mesh.world() {
        let at: Coordinates = mesh.coordinates(rank);
        let extent = |f: FactorId| {
            let axes: Vec<_> = mesh.ids().filter(|a| shards[usize::from(a.0)].0 == f).collect();
            mesh.extent(rule.size(f), &axes, &at)
        };
        let shard = Shard { rule, extents: rule.spec.ids().map(extent).collect() };
        let mut operands: Vec<Tensor> =
            rule.spec.operands.iter().zip(&example.operands).map(|(dims, x)| shard.local(dims, x)).collect();
        shift_indices(&example.op, &shard, &mut operands);
        let op = mask_causal(&example.op, &shard, &mut operands);
        let local_type = shard.local_type(&rule.spec.result, &result);
        let local = values(&op.eval(&operands.iter().collect::<Vec<_>>(), &local_type));
        for (index, value) in indices(&local_type.shape).iter().zip(local) {
            let Ok(global) = shard.global(&rule.spec.result, index) else { continue };
            let slot = &mut combined[flat(&result.shape, &global)];
            *slot = Some(match *slot {
                Some(sum) => {
                    let [sum, value] = [sum, value].map(|x| tensor(&scalar, vec![x]));
                    values(&dcc::ops::OpDef::eval(&combine, &[&sum, &value], &scalar))[0]
                }
                None => value,
            });
        }
    }
    let combined: Option<Vec<Value>> = combined.into_iter().collect();
    close(&tensor(&result, combined.ok_or("an element that no rank holds")?), &example.eval(), REORDERED)
}

/// A rank's indices count from its shard of the factor that they select.
fn shift_indices(op: &Op, shard: &Shard, operands: &mut [Tensor]) {
    let (operand, factor) = match op {
        Op::Gather(gather) => (1, gather.indexed()),
        Op::ScatterAdd(scatter) => (0, scatter.indexed()),
        _ => return,
    };
    if let Data::Int(values) = &mut operands[operand].data
        && shard.rule.masked.contains(&factor)
    {
        values.iter_mut().for_each(|i| *i -= shard.extent(factor).offset as i64);
    }
}

/// A rank's queries count from its shard of them: the causal mask is written out, and added to what mask there is.
fn mask_causal(op: &Op, shard: &Shard, operands: &mut Vec<Tensor>) -> Op {
    let mut op = op.clone();
    let attributes = match &mut op {
        Op::Attention(op) if op.attributes.causal => &mut op.attributes,
        Op::AttentionGrad(op) if op.attributes.causal => &mut op.attributes,
        _ => return op,
    };
    let factor = |name: &str| FactorId(attributes.spec.names.iter().position(|n| n == name).expect("attention has it") as u8);
    let (t, s) = (factor("t"), factor("s"));
    if attributes.mask == MaskKind::None {
        let dims: Vec<DimFactors> = [t, s].iter().map(|&f| DimFactors::from_slice(&[f])).collect();
        let shape = [t, s].map(|f| shard.extent(f).block);
        operands.push(Tensor::floats(operands[0].dtype, &shape, vec![0.0; shape.iter().product::<u64>() as usize]));
        attributes.spec.operands.push(dims);
        attributes.mask = MaskKind::Additive;
    }
    attributes.causal = false;
    let dims = attributes.spec.operands.last().expect("a mask");
    let place = |factor: FactorId| dims.iter().position(|dim| dim.contains(&factor)).expect("a mask of queries and keys");
    let (query, key) = (place(t), place(s));
    let mask = operands.last_mut().expect("a mask");
    let positions = indices(&mask.shape);
    let Data::Float(values) = &mut mask.data else { panic!("a causal mask beside one of another kind") };
    for (value, at) in values.iter_mut().zip(positions) {
        if shard.extent(s).offset + at[key] > shard.extent(t).offset + at[query] {
            *value = f64::NEG_INFINITY;
        }
    }
    op
}

fn rule_of(example: &Example) -> Rule {
    let (types, result) = (types(&example.operands), example.result());
    let types: Vec<&TensorType> = types.iter().collect();
    example.op.rule(&types, &result).sized(&types, &result)
}

/// Each factor over 2 and 3 ranks, and each pair of factors over 2 × 3.
fn shardings(rule: &Rule) -> Vec<Vec<(FactorId, u32)>> {
    let single = rule.spec.ids().flat_map(|f| [vec![(f, 2)], vec![(f, 3)]]);
    let pairs = rule.spec.ids().flat_map(|f| rule.spec.ids().map(move |g| vec![(f, 2), (g, 3)]));
    single.chain(pairs).filter(|shards| is_legal(rule, shards)).collect()
}

/// Made on each rank from global positions, never split: nothing to combine.
fn is_source(op: &Op) -> bool {
    matches!(op, Op::Iota(_) | Op::Uniform(_) | Op::Const(_) | Op::Training(_))
}

#[test]
fn every_sharding_gives_the_whole() {
    let mut checked = std::collections::BTreeMap::<&str, u32>::new();
    for example in computed().filter(|e| !is_source(&e.op)) {
        let rule = rule_of(&example);
        for shards in shardings(&rule) {
            check(&example, &rule, &shards)
                .unwrap_or_else(|e| panic!("{} by {} under {shards:?}: {e}", describe(&example), rule.spec.text()));
            *checked.entry(example.op.name()).or_default() += 1;
        }
    }
    let leaves = ["const", "input", "iota", "param", "scalar", "training", "uniform"];
    let unchecked: Vec<&&str> = Op::NAMES.iter().filter(|n| !checked.contains_key(**n) && !leaves.contains(n)).collect();
    assert!(unchecked.is_empty(), "{unchecked:?}");
}

#[test]
fn wrong_rules_are_found() {
    let find = |wanted: fn(&Op) -> bool| computed().find(|e| wanted(&e.op)).unwrap();
    let breaks = |example: &Example, wrong: &dyn Fn(&mut Rule)| {
        let mut rule = rule_of(example);
        wrong(&mut rule);
        let found = shardings(&rule).iter().any(|shards| check(example, &rule, shards).is_err());
        assert!(found, "{}", describe(example));
    };
    breaks(&find(|op| matches!(op, Op::Cumsum(_))), &|rule| rule.whole.clear());
    breaks(&find(|op| matches!(op, Op::TopK(_))), &|rule| rule.whole.clear());
    breaks(&find(|op| matches!(op, Op::Reverse(_))), &|rule| rule.whole.clear());
    breaks(&find(|op| matches!(op, Op::Attention(_))), &|rule| rule.whole.clear());
    breaks(&find(|op| matches!(op, Op::Convolution(_))), &|rule| rule.whole.clear());
    breaks(&find(|op| matches!(op, Op::Gather(_))), &|rule| rule.masked.clear());
    breaks(&find(|op| matches!(op, Op::ScatterAdd(_))), &|rule| rule.masked.clear());
    breaks(&find(|op| matches!(op, Op::Reduce(r) if r.op == dcc_program::Reduce::Max)), &|rule| {
        rule.reduce = dcc_program::Reduce::Sum;
    });
    breaks(&find(|op| matches!(op, Op::Reduce(r) if r.op == dcc_program::Reduce::Prod)), &|rule| {
        rule.whole.clear();
        rule.reduce = dcc_program::Reduce::Sum;
    });
}
