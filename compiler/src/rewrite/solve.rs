//! One region: into an e-graph, the rules until nothing changes or a limit is reached, the cheapest terms out again.
//!
//! Everything here is a function of the region's structure. Limits count rounds and terms, never time.

use super::extract;
use super::rules::Rule;
use super::term::{Expr, Facts, Graph, Head, Term};
use dcc_program::TensorType;
use egg::Id;
use smallvec::SmallVec;

/// Rounds in which every rule is tried on every term.
const ROUNDS: usize = 12;
/// Terms beyond which no rule is tried.
const TERMS: usize = 4000;

/// A node of a region; operands are positions in the region.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Local {
    pub head: Head,
    pub ty: TensorType,
    pub args: SmallVec<[u32; 3]>,
}

/// A region, operands first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    pub terms: Vec<Local>,
    /// What the rest of the graph reads.
    pub outputs: Vec<u32>,
}

/// What takes a region's place.
#[derive(Clone, Debug)]
pub struct Solution {
    pub terms: Vec<Local>,
    /// For each term the one of the problem that it comes from, and whether the two are equal.
    pub from: Vec<(u32, bool)>,
    pub outputs: Vec<u32>,
}

/// The cheapest terms equal to the region that `rules` find; the region itself where none are cheaper.
pub fn solve(problem: &Problem, rules: &[Rule]) -> Solution {
    let (egraph, ids) = saturated(problem, rules);
    extract::cheapest(&egraph, problem, &ids).unwrap_or_else(|| unchanged(problem))
}

/// All that `rules` find equal to the region's terms, and the classes of these.
pub(super) fn saturated(problem: &Problem, rules: &[Rule]) -> (Graph, Vec<Id>) {
    let mut egraph = Graph::new(Facts);
    let mut ids: Vec<Id> = Vec::with_capacity(problem.terms.len());
    for local in &problem.terms {
        let args = local.args.iter().map(|&a| ids[a as usize]).collect();
        ids.push(egraph.add(Term { head: local.head.clone(), ty: local.ty.clone(), args }));
    }
    egraph.rebuild();
    let mut rounds = 0;
    while rounds < ROUNDS && egraph.total_number_of_nodes() <= TERMS && round(&mut egraph, rules) {
        rounds += 1;
    }
    tracing::debug!(nodes = ids.len(), rounds, terms = egraph.total_number_of_nodes(), "rewrote a region");
    (egraph, ids)
}

/// Tries every rule on every term, then adds what was found. Whether anything is new.
fn round(egraph: &mut Graph, rules: &[Rule]) -> bool {
    let mut classes: Vec<Id> = egraph.classes().map(|class| class.id).collect();
    classes.sort_unstable();
    let mut found: Vec<(Id, Expr)> = Vec::new();
    for &id in classes.iter().filter(|id| egraph[**id].data.splat.is_none()) {
        for term in &egraph[id].nodes {
            for rule in rules {
                found.extend(rule.find(egraph, id, term).into_iter().map(|expr| (id, expr)));
            }
        }
    }
    let before = egraph.total_number_of_nodes();
    let mut changed = false;
    for (id, expr) in found {
        if egraph.total_number_of_nodes() > TERMS {
            break;
        }
        let Some(other) = expr.add(egraph) else { continue };
        if egraph[other].data.ty == egraph[id].data.ty {
            changed |= egraph.union(id, other);
        }
    }
    egraph.rebuild();
    changed || egraph.total_number_of_nodes() != before
}

/// The region as it is.
pub fn unchanged(problem: &Problem) -> Solution {
    let from = (0..problem.terms.len() as u32).map(|term| (term, true)).collect();
    Solution { terms: problem.terms.clone(), from, outputs: problem.outputs.clone() }
}
