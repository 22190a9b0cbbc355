//! Which dims expert parallelism splits beside samples: those that count the experts of a mixture.
//!
//! A stack of weights has such a dim: a product with what each expert is sent goes expert by expert. The ranks of `ep` share samples as
//! those of `dp` do, and each holds some of the experts; what has an expert dim lies by samples or by experts, as costs least, and an
//! all_to_all leads from one to the other (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2; Rajbhandari et al. 2022, arXiv 2201.05596).

use super::super::forward::{Forward, Kind};
use super::super::{Parallel, advice};
use super::classes::Classes;
use super::model::Place;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::{Op, Rule};
use dcc_program::factors::DimFactors;
use dcc_program::{AxisId, FactorId};
use std::collections::{BTreeMap, BTreeSet};

/// The dims of experts in a forward graph, and where samples are.
#[derive(Debug)]
pub(super) struct Experts {
    pub axis: AxisId,
    /// Classes of dims.
    roots: BTreeSet<usize>,
    /// The dim of each parameter that has one part for each expert.
    pub stacks: BTreeMap<NodeId, usize>,
    /// These, and what is made of them alone.
    of_stacks: BTreeSet<NodeId>,
    /// What scores the experts: weights with a row or column for each, and their products.
    routers: BTreeSet<NodeId>,
    /// The factor of samples of each node, where `axis` stands if not on experts.
    pub samples: BTreeMap<NodeId, FactorId>,
}

impl Experts {
    /// Errors: no stack has as many experts as `ep` has ranks.
    pub fn of(
        forward: &Forward,
        classes: &Classes,
        axis: AxisId,
        options: &Parallel,
        samples: BTreeMap<NodeId, FactorId>,
    ) -> Result<Experts> {
        let roots = counted(forward, classes);
        let [routers, of_stacks] = [const { BTreeSet::new() }; 2];
        let mut experts = Experts { axis, roots, stacks: BTreeMap::new(), of_stacks, routers, samples };
        experts.find_routers(forward, classes);
        let mut most = 0;
        for &id in forward.order.iter().filter(|&&id| forward.kind(id) == Kind::Param && !experts.routers.contains(&id)) {
            let shape = &forward.graph.ty(id).shape;
            let dim = (0..shape.len()).find(|&dim| experts.roots.contains(&classes.root_of_dim(id, dim)));
            let Some(dim) = dim.filter(|&dim| shape.iter().enumerate().any(|(other, &size)| other != dim && size > 1)) else {
                continue;
            };
            most = most.max(shape[dim]);
            if shape[dim] >= u64::from(options.ep) {
                experts.stacks.insert(id, dim);
            }
        }
        if experts.stacks.is_empty() {
            return Err(refused(forward, options, most));
        }
        for &id in &forward.order {
            let of = |set: &BTreeSet<NodeId>| forward.graph[id].operands.iter().any(|o| set.contains(o));
            let made = !forward.is_batched(id) && of(&experts.of_stacks);
            if experts.stacks.contains_key(&id) || made {
                experts.of_stacks.insert(id);
            }
        }
        Ok(experts)
    }

    /// Where a node may have the axis: on its samples, and on its experts; only there where it reads what they alone have.
    pub fn places(&self, forward: &Forward, classes: &Classes, id: NodeId, rule: &Rule) -> Vec<Option<Place>> {
        let at = |factor| Place { factor, inner: false };
        let home = self.samples.get(&id).copied();
        if let Some(&dim) = self.stacks.get(&id) {
            return vec![Some(at(FactorId(dim as u8)))];
        }
        let operands = &forward.graph[id].operands;
        let of_stacks = self.of_stacks.contains(&id) || operands.iter().any(|o| self.of_stacks.contains(o));
        // To move inputs costs, which the planner does not count.
        let of_inputs = home.is_some() && operands.iter().any(|&o| forward.kind(o) == Kind::Input);
        if self.routers.contains(&id) || (of_inputs && !of_stacks) {
            return vec![home.map(at)];
        }
        let counts = |f: &FactorId| self.roots.contains(&classes.root_of(forward, id, *f)) && !rule.is_whole(*f);
        let mut places: Vec<_> = rule.spec.ids().filter(counts).filter(|&f| home != Some(f)).map(|f| Some(at(f))).collect();
        if !of_stacks || places.is_empty() {
            places.push(home.map(at));
        }
        places
    }

    /// Weights whose only dim that a product sums over, or that it keeps, counts experts; not those that it goes through expert by expert.
    fn find_routers(&mut self, forward: &Forward, classes: &Classes) {
        for (id, weight, data) in products(forward) {
            let factors = Factors::of(forward, id, weight, data);
            let counts = |f: &FactorId| self.roots.contains(&classes.root_of(forward, id, *f));
            let scores = |factors: &[FactorId]| matches!(factors, [f] if counts(f));
            if factors.along.iter().any(counts) {
                continue;
            }
            if scores(&factors.kept) || scores(&factors.summed) {
                self.routers.insert(id);
                self.mark_weights(forward, forward.graph[id].operands[weight]);
            }
        }
    }

    /// `id` and the weights that it is made of.
    fn mark_weights(&mut self, forward: &Forward, id: NodeId) {
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if matches!(forward.kind(id), Kind::Param | Kind::Begin) && self.routers.insert(id) {
                open.extend(&forward.graph[id].operands);
            }
        }
    }
}

fn refused(forward: &Forward, options: &Parallel, most: u64) -> Error {
    let ep = options.ep;
    let what = match most {
        0 => {
            format!("--ep {ep} has no experts to split: no product goes expert by expert through a weight that stacks several")
        }
        most => format!("--ep {ep} has too few experts to split: no weight stacks more than {most}"),
    };
    let help = match most {
        0 | 1 => {
            let others = advice::instead(forward, options, "--ep", ep);
            format!(
                "export the experts as one weight of shape [experts, in, out] that products go through, not one that is looked up for each \
                 token, or {others}"
            )
        }
        most => format!("use --ep {most} or less"),
    };
    Error::expert_parallel(what).help(help)
}

/// Classes of the dims that count experts: those that batched products with weights go along; and those that a product keeps of a stack
/// beside another dim, that a product sums over beside another, and that a product scores. Not the heads of attention.
fn counted(forward: &Forward, classes: &Classes) -> BTreeSet<usize> {
    let [mut along, mut kept, mut summed, mut scored] = [const { BTreeSet::new() }; 4];
    for (id, weight, data) in products(forward) {
        let factors = Factors::of(forward, id, weight, data);
        let roots = |factors: &[FactorId]| factors.iter().map(|&f| classes.root_of(forward, id, f)).collect::<Vec<_>>();
        // A matrix for each.
        if !factors.kept.is_empty() && !factors.summed.is_empty() {
            along.extend(roots(&factors.along));
        }
        if factors.kept.len() > 1 { &mut kept } else { &mut scored }.extend(roots(&factors.kept));
        if factors.summed.len() > 1 {
            summed.extend(roots(&factors.summed));
        }
    }
    along.extend(kept.intersection(&summed).filter(|root| scored.contains(root)));
    let heads: BTreeSet<usize> = forward.order.iter().flat_map(|&id| attended(forward, classes, id, &along)).collect();
    &along - &heads
}

/// The factors of a weight in a product with data.
struct Factors {
    /// Of the data and the result too.
    along: Vec<FactorId>,
    kept: Vec<FactorId>,
    summed: Vec<FactorId>,
}

impl Factors {
    fn of(forward: &Forward, id: NodeId, weight: usize, data: usize) -> Factors {
        let spec = &forward.rule(id).spec;
        let other = &spec.operands[data];
        let own = |which: &dyn Fn(FactorId) -> bool| {
            spec.operands[weight].iter().flatten().copied().filter(|&f| which(f)).collect::<Vec<_>>()
        };
        Factors {
            along: own(&|f| has(other, f) && spec.in_result(f)),
            kept: own(&|f| !has(other, f)),
            summed: own(&|f| !spec.in_result(f)),
        }
    }
}

/// Products once per microbatch of a weight, or what is made of weights, with something batched; the two's numbers.
fn products(forward: &Forward) -> impl Iterator<Item = (NodeId, usize, usize)> {
    let weight = |id: NodeId| matches!(forward.kind(id), Kind::Param | Kind::Begin);
    forward.order.iter().filter_map(move |&id| {
        let node = &forward.graph[id];
        let (Op::DotGeneral(_), &[a, b]) = (&node.op, &node.operands[..]) else { return None };
        match (weight(a), weight(b)) {
            (true, false) if forward.is_batched(b) => Some((id, 0, 1)),
            (false, true) if forward.is_batched(a) => Some((id, 1, 0)),
            _ => None,
        }
    })
}

/// Classes of the dims that attention computes on, found or written out: products of two batched operands that go along `heads`, with
/// scores of all pairs for each.
fn attended(forward: &Forward, classes: &Classes, id: NodeId, heads: &BTreeSet<usize>) -> Vec<usize> {
    let node = &forward.graph[id];
    let spec = &forward.rule(id).spec;
    let root = |f: FactorId| classes.root_of(forward, id, f);
    let attends = match (&node.op, &spec.operands[..]) {
        (Op::Attention(_), _) => true,
        (Op::DotGeneral(_), [a, b]) if node.operands.iter().all(|&o| forward.is_batched(o)) => {
            let sums = spec.ids().any(|f| !spec.in_result(f));
            let pairs = spec.ids().any(|f| !has(a, f)) && spec.ids().any(|f| !has(b, f));
            let along = |f: FactorId| has(a, f) && has(b, f) && spec.in_result(f) && heads.contains(&root(f));
            sums && pairs && spec.ids().any(along)
        }
        _ => false,
    };
    spec.ids().filter(|_| attends).map(root).collect()
}

fn has(dims: &[DimFactors], factor: FactorId) -> bool {
    dims.iter().flatten().any(|&f| f == factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Graph;
    use dcc_program::Mesh;
    use expect_test::{Expect, expect};

    /// The stacks of a forward graph and their dims of experts, or the error; `x` and `w` become an input of samples and a parameter.
    fn check(ep: u32, lines: &[&str], expected: Expect) {
        let mut text = "graph\nforward\n".to_owned();
        for (at, line) in lines.iter().enumerate() {
            let (ty, what) = line.split_once(" = ").expect("a type and an op");
            let what = match what.split_once(' ') {
                Some(("x", name)) => format!("input{{batch_dim:0, name:{name}}}"),
                Some(("w", name)) => format!("param{{kind:weight, name:{name}}}"),
                Some(("dot", rest)) => {
                    let (spec, operands) = rest.split_once(" of ").expect("a spec and its operands");
                    format!("dot_general{{spec:\"{spec}\"}} {operands}")
                }
                _ => what.to_owned(),
            };
            text += &format!("%{at} {ty} = {what}\n");
        }
        text += &format!("output y = %{}\n", lines.len() - 1);
        let graph = Graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let forward = Forward::of(&graph);
        let axis = Mesh::new(&[("mb", 1), ("ep", ep)]).axis("ep").expect("an axis of the mesh");
        let options = Parallel { ep, ..Parallel::default() };
        let found = match Experts::of(&forward, &Classes::of(&forward), axis, &options, BTreeMap::new()) {
            Ok(experts) => {
                let stacks = experts.stacks.iter().map(|(&id, dim)| match &graph[id].op {
                    Op::Param(param) => format!("{} {dim}", param.name),
                    _ => "no parameter".to_owned(),
                });
                stacks.collect::<Vec<_>>().join(", ")
            }
            Err(error) => error.to_string(),
        };
        expected.assert_eq(&found);
    }

    /// Experts last or in the middle, with biases; the router is not stacked.
    #[test]
    fn stacks_are_what_products_go_along() {
        let graph = [
            "f32[8, 16, 32] = x tokens",
            "f32[32, 4] = w router",
            "f32[8, 16, 4] = dot b s d, d e -> b s e of %0, %1",
            "f32[32, 48, 4] = w up",
            "f32[8, 4, 16, 48] = dot b s d, d f e -> b e s f of %0, %3",
            "f32[4, 48] = w bias",
            "f32[8, 4, 16, 48] = broadcast_in_dim{dims:[1, 3]} %5",
            "f32[8, 4, 16, 48] = binary{op:add} %4, %6",
            "f32[48, 4, 32] = w down",
            "f32[8, 4, 16, 32] = dot b e s f, f e d -> b e s d of %7, %8",
            "f32[8, 16, 32] = dot b e s d, b s e -> b s d of %9, %2",
        ];
        check(4, &graph, expect!["up 2, bias 0, down 1"]);
        check(
            5,
            &graph,
            expect![[r#"
                error[DCC0314]: --ep 5 has too few experts to split: no weight stacks more than 4
                  help use --ep 4 or less"#]],
        );
    }

    /// All experts' hidden dims are summed over at once.
    #[test]
    fn stacks_are_kept_and_summed_over_beside_another_dim() {
        check(
            2,
            &[
                "f32[8, 16, 32] = x tokens",
                "f32[32, 4] = w router",
                "f32[8, 16, 4] = dot b s d, d e -> b s e of %0, %1",
                "f32[4, 32, 48] = w up",
                "f32[8, 16, 4, 48] = dot b s d, e d f -> b s e f of %0, %3",
                "f32[8, 16, 4, 48] = dot b s e f, b s e -> b s e f of %4, %2",
                "f32[4, 48, 32] = w down",
                "f32[8, 16, 32] = dot b s e f, e f d -> b s d of %5, %6",
            ],
            expect!["up 0, down 0"],
        );
    }

    /// Attention written out, with a matrix for each head.
    #[test]
    fn heads_are_no_experts() {
        check(
            2,
            &[
                "f32[8, 16, 32] = x tokens",
                "f32[32, 4, 8] = w q",
                "f32[8, 4, 16, 8] = dot b t d, d h k -> b h t k of %0, %1",
                "f32[4, 8, 8] = w turn",
                "f32[8, 4, 16, 8] = dot b h t k, h k l -> b h t l of %2, %3",
                "f32[8, 4, 16, 16] = dot b h t l, b h s l -> b h t s of %4, %2",
                "f32[8, 4, 16, 8] = dot b h t s, b h s k -> b h t k of %5, %2",
                "f32[4, 8, 32] = w out",
                "f32[8, 16, 32] = dot b h t k, h k d -> b t d of %6, %7",
            ],
            expect![[r#"
                error[DCC0314]: --ep 2 has no experts to split: no product goes expert by expert through a weight that stacks several
                  help export the experts as one weight of shape [experts, in, out] that products go through, not one that is looked up for each token, or use --dp 2 instead"#]],
        );
    }

    /// Experts that are modules of their own.
    #[test]
    fn weights_of_one_expert_each_are_refused() {
        check(
            2,
            &[
                "f32[8, 16, 32] = x tokens",
                "f32[32, 48] = w experts.0.up",
                "f32[8, 16, 48] = dot b t d, d f -> b t f of %0, %1",
                "f32[32, 48] = w experts.1.up",
                "f32[8, 16, 48] = dot b t d, d f -> b t f of %0, %3",
                "f32[8, 16, 48] = binary{op:add} %2, %4",
            ],
            expect![[r#"
                error[DCC0314]: --ep 2 has no experts to split: no product goes expert by expert through a weight that stacks several
                  help export the experts as one weight of shape [experts, in, out] that products go through, not one that is looked up for each token, or use --dp 2 instead"#]],
        );
    }
}
