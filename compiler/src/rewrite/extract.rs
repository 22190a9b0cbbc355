//! Which of all equal terms to keep: greedy over the DAG, so that what is shared counts once, then bounded improvement.
//!
//! Finding the cheapest DAG is NP-hard (Stepp 2011); the result here is never dearer than the region was.

use super::solve::{Local, Problem, Solution};
use super::term::{Graph, Head, Term};
use crate::ops::{Binary, Op};
use dcc_program::factors::DimFactors;
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{FactorId, FactorSpec, TensorType};
use egg::Id;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;

/// Passes of improvement over the chosen terms.
const PASSES: usize = 2;

/// Relative time of a term: elements touched, weighted by what touching one costs, plus a launch for what is no part of a fused
/// kernel.
fn cost(egraph: &Graph, term: &Term) -> u64 {
    let Head::Op(op) = &term.head else { return 0 };
    let elements = term.ty.elements();
    let operands: u64 = term.args.iter().map(|&id| egraph[id].data.ty.elements()).sum();
    match op {
        Op::Const(_) | Op::Iota(_) | Op::StopGradient(_) => 1,
        Op::Reshape(_) => 2,
        Op::BroadcastInDim(_) => 2 + elements / 64,
        Op::Unary(op) => 4 + elements * unary_weight(op.op),
        Op::Binary(_) if scales_product(egraph, term) => 4 + 16 * elements,
        Op::Binary(op) => 4 + elements * binary_weight(op.op),
        Op::Compare(_) | Op::Select(_) | Op::Cast(_) => 4 + elements,
        Op::Transpose(_) | Op::Slice(_) | Op::Pad(_) | Op::Concatenate(_) | Op::Reverse(_) => 64 + 8 * elements,
        Op::Reduce(_) => 64 + 4 * operands,
        Op::DotGeneral(op) => 256 + (elements + operands) * (6 + loops(&op.spec)) / 2,
        _ => 256 + 8 * (elements + operands),
    }
}

/// Loops of a contraction after merging factors that are neighbours, in the same order, wherever they occur: strided access for
/// each above three.
fn loops(spec: &FactorSpec) -> u64 {
    let sides: Vec<&Vec<DimFactors>> = spec.operands.iter().chain([&spec.result]).collect();
    let follows = |a: FactorId, b: FactorId| {
        sides.iter().all(|dims| {
            let at = |f: FactorId| dims.iter().position(|d| d.contains(&f));
            match (at(a), at(b)) {
                (Some(x), Some(y)) => x + 1 == y,
                (None, None) => true,
                _ => false,
            }
        })
    };
    let merged = spec.ids().filter(|&b| spec.ids().any(|a| a != b && follows(a, b))).count();
    (spec.names.len() - merged) as u64
}

/// A number times a contraction: no part of the kernel that makes the operands, and in the backward pass a gradient of its own
/// that is written out for the two contractions that read it.
fn scales_product(egraph: &Graph, term: &Term) -> bool {
    let Some(Op::Binary(Binary { op: BinaryOp::Mul })) = term.op() else { return false };
    let is_dot = |&id: &Id| egraph[id].nodes.iter().any(|t| matches!(t.op(), Some(Op::DotGeneral(_))));
    term.args.iter().any(is_dot) && term.args.iter().any(|&id| egraph[id].data.splat.is_some())
}

fn unary_weight(op: UnaryOp) -> u64 {
    match op {
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Not | UnaryOp::Sign | UnaryOp::IsNan | UnaryOp::IsInf => 1,
        UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::RoundEven => 3,
        _ => 8,
    }
}

fn binary_weight(op: BinaryOp) -> u64 {
    match op {
        BinaryOp::Pow => 24,
        BinaryOp::Div | BinaryOp::Rem => 3,
        _ => 1,
    }
}

/// A set of classes by dense number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn insert(&mut self, i: usize) {
        if self.0.len() <= i / 64 {
            self.0.resize(i / 64 + 1, 0);
        }
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn contains(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1)
    }

    fn extend(&mut self, other: &Set) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(w, &word)| (0..64).filter(move |b| word >> b & 1 == 1).map(move |b| w * 64 + b))
    }
}

/// The chosen term of each class, and what it needs.
struct Choice {
    term: usize,
    cost: u64,
    /// The class itself and all below, as they were chosen then.
    needs: Set,
    total: u64,
}

struct Extractor<'a> {
    egraph: &'a Graph,
    classes: Vec<Id>,
    number: BTreeMap<Id, usize>,
    chosen: Vec<Option<Choice>>,
}

/// The cheapest terms for the outputs of `problem`, whose terms are the classes `ids`. `None` where they are not cheaper than
/// the problem's own.
pub fn cheapest(egraph: &Graph, problem: &Problem, ids: &[Id]) -> Option<Solution> {
    let mut classes: Vec<Id> = egraph.classes().map(|class| class.id).collect();
    classes.sort_unstable();
    let number = classes.iter().enumerate().map(|(i, &id)| (id, i)).collect();
    let chosen = classes.iter().map(|_| None).collect();
    let mut extractor = Extractor { egraph, classes, number, chosen };
    extractor.greedy();
    let roots: Vec<usize> = problem.outputs.iter().map(|&o| extractor.number_of(ids[o as usize])).collect();
    extractor.order(&roots)?;
    for _ in 0..PASSES {
        if !extractor.improve(&roots) {
            break;
        }
    }
    let order = extractor.order(&roots)?;
    let total: u64 = order.iter().map(|&c| extractor.chosen[c].as_ref().map_or(0, |choice| choice.cost)).sum();
    (total < extractor.original(problem, ids)).then(|| extractor.solution(problem, ids, &roots, &order))
}

impl Extractor<'_> {
    fn number_of(&self, id: Id) -> usize {
        self.number[&self.egraph.find(id)]
    }

    fn args(&self, class: usize, term: usize) -> impl Iterator<Item = usize> + '_ {
        self.egraph[self.classes[class]].nodes[term].args.iter().map(|&id| self.number_of(id))
    }

    /// Chooses for every class the term whose DAG is cheapest, until nothing changes.
    fn greedy(&mut self) {
        for _ in 0..64 {
            let mut changed = false;
            for class in 0..self.classes.len() {
                for term in 0..self.egraph[self.classes[class]].nodes.len() {
                    let Some(choice) = self.consider(class, term) else { continue };
                    if self.chosen[class].as_ref().is_none_or(|old| choice.total < old.total) {
                        self.chosen[class] = Some(choice);
                        changed = true;
                    }
                }
            }
            if !changed {
                break;
            }
        }
    }

    /// The term as the choice of its class, if its operands have choices and none of them needs the class.
    fn consider(&self, class: usize, term: usize) -> Option<Choice> {
        let mut needs = Set::default();
        for arg in self.args(class, term) {
            needs.extend(&self.chosen[arg].as_ref()?.needs);
        }
        if needs.contains(class) {
            return None;
        }
        let below: u64 = needs.iter().map(|c| self.chosen[c].as_ref().map_or(0, |choice| choice.cost)).sum();
        needs.insert(class);
        let cost = cost(self.egraph, &self.egraph[self.classes[class]].nodes[term]);
        Some(Choice { term, cost, needs, total: below + cost })
    }

    /// The classes that the chosen terms of `roots` need, operands first. `None` if they need each other.
    fn order(&self, roots: &[usize]) -> Option<Vec<usize>> {
        // 1 while a class is open, 2 once it is done.
        let mut state = vec![0u8; self.classes.len()];
        let mut order = Vec::new();
        for &root in roots {
            let mut stack = vec![(root, false)];
            while let Some((class, ready)) = stack.pop() {
                if ready {
                    state[class] = 2;
                    order.push(class);
                    continue;
                }
                match state[class] {
                    2 => continue,
                    1 => return None,
                    _ => state[class] = 1,
                }
                stack.push((class, true));
                let term = self.chosen[class].as_ref()?.term;
                let mut pending: Vec<usize> = self.args(class, term).filter(|&a| state[a] != 2).collect();
                if pending.iter().any(|&a| state[a] == 1) {
                    return None;
                }
                let mut seen = FxHashSet::default();
                pending.retain(|&a| seen.insert(a));
                stack.extend(pending.into_iter().rev().map(|a| (a, false)));
            }
        }
        Some(order)
    }

    fn total(&self, roots: &[usize]) -> Option<u64> {
        let order = self.order(roots)?;
        Some(order.iter().map(|&c| self.chosen[c].as_ref().map_or(0, |choice| choice.cost)).sum())
    }

    /// Tries every other term of every chosen class once; keeps what makes the whole cheaper.
    fn improve(&mut self, roots: &[usize]) -> bool {
        let (Some(order), Some(mut best)) = (self.order(roots), self.total(roots)) else { return false };
        let mut improved = false;
        for class in order {
            for term in 0..self.egraph[self.classes[class]].nodes.len() {
                let Some(choice) = self.consider(class, term) else { continue };
                if self.chosen[class].as_ref().is_some_and(|old| old.term == choice.term) {
                    continue;
                }
                let old = self.chosen[class].replace(choice);
                match self.total(roots).filter(|&total| total < best) {
                    Some(total) => {
                        best = total;
                        improved = true;
                    }
                    None => self.chosen[class] = old,
                }
            }
        }
        improved
    }

    /// The cost of the problem's own terms.
    fn original(&self, problem: &Problem, ids: &[Id]) -> u64 {
        let mut needed = vec![false; problem.terms.len()];
        problem.outputs.iter().for_each(|&o| needed[o as usize] = true);
        for i in (0..problem.terms.len()).rev() {
            if needed[i] {
                problem.terms[i].args.iter().for_each(|&a| needed[a as usize] = true);
            }
        }
        let term = |local: &Local| Term {
            head: local.head.clone(),
            ty: local.ty.clone(),
            args: local.args.iter().map(|&a| ids[a as usize]).collect(),
        };
        problem.terms.iter().zip(needed).filter(|(_, needed)| *needed).map(|(l, _)| cost(self.egraph, &term(l))).sum()
    }

    fn solution(&self, problem: &Problem, ids: &[Id], roots: &[usize], order: &[usize]) -> Solution {
        let mut from: Vec<Option<u32>> = vec![None; self.classes.len()];
        for (i, &id) in ids.iter().enumerate().rev() {
            from[self.number_of(id)] = Some(i as u32);
        }
        let equal: Vec<bool> = from.iter().map(Option::is_some).collect();
        // A class that the problem did not have comes from what reads it, in the end from an output.
        let (&first, _) = problem.outputs.split_first().expect("a region has an output");
        for &class in order.iter().rev() {
            let mine = from[class].unwrap_or(first);
            let term = self.chosen[class].as_ref().expect("ordered classes are chosen").term;
            for arg in self.args(class, term) {
                from[arg].get_or_insert(mine);
            }
        }
        let mut place = vec![0u32; self.classes.len()];
        let mut terms = Vec::with_capacity(order.len());
        for &class in order {
            place[class] = terms.len() as u32;
            let choice = self.chosen[class].as_ref().expect("ordered classes are chosen");
            let term = &self.egraph[self.classes[class]].nodes[choice.term];
            let ty: TensorType = term.ty.clone();
            let args = self.args(class, choice.term).map(|a| place[a]).collect();
            terms.push(Local { head: term.head.clone(), ty, args });
        }
        Solution {
            terms,
            from: order.iter().map(|&class| (from[class].unwrap_or(first), equal[class])).collect(),
            outputs: roots.iter().map(|&class| place[class]).collect(),
        }
    }
}
