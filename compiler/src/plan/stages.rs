//! Pipeline stages: contiguous cuts of the order of the batched nodes, the slowest stage as fast as possible.
//!
//! Zheng et al. 2022 (Alpa), arXiv 2201.12023, section 5, without its search over meshes. Cuts are considered where few
//! bytes cross them, of all and of each part of the time. Where stages of such cuts share parameters, cuts of another order are
//! compared, which has the calls of a module side by side. After: edges never decrease the stage. Inputs have none: each
//! stage reads them itself.

use super::annotated::StageWish;
use super::forward::{Forward, Kind};
use super::{Plan, Strategy};
use crate::cost::{self, Machine};
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// Candidates of cuts per stage that are looked at, at least.
const CANDIDATES: usize = 8;

/// By how much the slowest stage has to be faster for cuts that more bytes cross: those hold more activations, too.
const WORTH: f64 = 0.9;

/// The stage of each batched node. `wishes`: stages that some have to be on.
/// Errors: more stages than products and lookups to compute on them; wishes that edges contradict or that leave a stage empty.
pub(super) fn cut(
    forward: &Forward,
    plan: &Plan,
    machine: &Machine,
    wishes: &BTreeMap<NodeId, StageWish>,
) -> Result<BTreeMap<NodeId, u32>> {
    let staged = |id: &NodeId| forward.is_batched(*id) && forward.kind(*id) != Kind::Input;
    let mut order: Vec<NodeId> = forward.order.iter().copied().filter(staged).collect();
    let stages = plan.parts() as usize;
    let mut line = Line::of(forward, plan, machine, &order);
    let heavy = line.heavy[order.len()];
    if stages > heavy.max(1) {
        let (pp, chunks) = (plan.stages(), plan.layout().chunks);
        let flags = if chunks == 1 { format!("--pp {pp}") } else { format!("--pp {pp} of {chunks} virtual stages each") };
        return Err(Error::stages(format!("{flags} needs {stages} stages; the model has work for {heavy}"))
            .note(format!("{heavy} products and lookups depend on the batch, each stage computes at least one"))
            .help(fewer_stages(heavy, pp as usize, chunks as usize)));
    }
    let reach = Reach::of(forward, stages, wishes)?;
    let in_order =
        |order: &[NodeId], line: &Line| line.cut(stages, &reach.of_order(order)).map(|cuts| Cut::of(order, line, cuts));
    let found = in_order(&order, &line).or_else(|| {
        // Not in this order: what has to be early goes first.
        order.sort_by_key(|id| reach.first[id.0 as usize]);
        line = Line::of(forward, plan, machine, &order);
        in_order(&order, &line)
    });
    let empty = || Error::pin(format!("the annotated stages leave one of the {stages} stages without work"));
    let mut cut = found.ok_or_else(empty)?;
    if cut.exchanged(forward, plan) > 0 {
        let level = line.level(forward, &order);
        let other = in_order(&level, &Line::of(forward, plan, machine, &level));
        let exchanged = |cut: &Cut| cut.exchanged(forward, plan);
        let time = |cut: &Cut| cut.slowest * f64::from(plan.mesh.size_of("mb")) + machine.send(exchanged(cut));
        let is_better = |other: &Cut| exchanged(other) < exchanged(&cut) && time(other) < time(&cut);
        cut = other.filter(is_better).unwrap_or(cut);
    }
    Ok(cut.stages)
}

/// The stage of each batched node, and the seconds of the slowest.
struct Cut {
    stages: BTreeMap<NodeId, u32>,
    slowest: f64,
}

impl Cut {
    fn of(order: &[NodeId], line: &Line, cuts: Vec<usize>) -> Cut {
        let stage = |position: usize| cuts.iter().filter(|&&c| c <= position).count() as u32;
        let stages = order.iter().enumerate().map(|(position, &id)| (id, stage(position))).collect();
        let ends: Vec<usize> = [0].into_iter().chain(cuts).chain([order.len()]).collect();
        let slowest = ends.windows(2).map(|ends| line.stage_seconds(ends[0], ends[1])).fold(0.0, f64::max);
        Cut { stages, slowest }
    }

    /// Bytes, on one rank, of gradients that stages exchange in a step because several hold a parameter: there and back.
    fn exchanged(&self, forward: &Forward, plan: &Plan) -> u64 {
        let params = forward.order.iter().filter(|id| forward.kind(**id) == Kind::Param && forward.differentiable(**id));
        let of_param = |&id: &NodeId| {
            let parts = readers(forward, id).into_iter().filter_map(|id| self.stages.get(&id));
            let holders: BTreeSet<u32> = parts.map(|&part| plan.layout().place(part).0).collect();
            let bytes = plan.strategies.get(&id).map_or(0, |strategy| local_bytes(forward, plan, id, strategy));
            2 * bytes * (holders.len() as u64).saturating_sub(1)
        };
        params.map(of_param).sum()
    }
}

/// What a model with work for `heavy` stages can have in place of `pp` times `chunks`.
fn fewer_stages(heavy: usize, pp: usize, chunks: usize) -> String {
    let at_most = |most: usize| (most >= 2).then(|| format!("--pp {most} or less"));
    let one_chunk = "--schedule 1f1b without --virtual-stages";
    let alone = match chunks {
        1 => None,
        _ if pp <= heavy => Some(one_chunk.to_owned()),
        _ => at_most(heavy).map(|fewer| format!("{fewer} with {one_chunk}")),
    };
    let found: Vec<String> = alone.into_iter().chain(at_most(heavy / chunks)).collect();
    if found.is_empty() { "leave out --pp".to_owned() } else { format!("use {}", found.join(", or ")) }
}

/// By node, the stages that it may be on: what wishes and edges leave.
struct Reach {
    first: Vec<usize>,
    last: Vec<usize>,
}

impl Reach {
    fn of(forward: &Forward, stages: usize, wishes: &BTreeMap<NodeId, StageWish>) -> Result<Reach> {
        let graph = forward.graph;
        let mut reach = Reach { first: vec![0; graph.nodes.len()], last: vec![stages - 1; graph.nodes.len()] };
        for &id in &forward.order {
            let read = graph[id].operands.iter().map(|o| reach.first[o.0 as usize]).max().unwrap_or(0);
            reach.first[id.0 as usize] = match wishes.get(&id) {
                Some(wish) if wish.stage as usize >= stages => {
                    return Err(Error::pin(format!("annotated for stage {}, --pp {stages}", wish.stage)).at(&wish.at));
                }
                Some(wish) if (wish.stage as usize) < read => {
                    let what = format!("annotated for stage {}, but it reads what is computed on stage {read}", wish.stage);
                    return Err(Error::pin(what).at(&wish.at));
                }
                Some(wish) => {
                    reach.last[id.0 as usize] = wish.stage as usize;
                    wish.stage as usize
                }
                None => read,
            };
        }
        for &id in forward.order.iter().rev() {
            for operand in &graph[id].operands {
                let last = reach.last[id.0 as usize];
                let slot = &mut reach.last[operand.0 as usize];
                *slot = last.min(*slot);
            }
        }
        Ok(reach)
    }

    /// First and last stage in that order.
    fn of_order(&self, order: &[NodeId]) -> Vec<(usize, usize)> {
        order.iter().map(|id| (self.first[id.0 as usize], self.last[id.0 as usize])).collect()
    }
}

/// The batched nodes in a row; entry i of each sum is that of the nodes before i.
struct Line {
    seconds: Vec<f64>,
    /// Products and lookups.
    heavy: Vec<usize>,
    /// Bytes on one rank that a cut before node i sends forward, and again backward.
    crossing: Vec<u64>,
    /// Seconds of that.
    sending: Vec<f64>,
    /// Whether node i has to be where the node before is: both are results of one launch, or the backward pass of that one reads it.
    joined: Vec<bool>,
}

impl Line {
    fn of(forward: &Forward, plan: &Plan, machine: &Machine, order: &[NodeId]) -> Line {
        let count = order.len();
        let mut line =
            Line { seconds: vec![0.0], heavy: vec![0], crossing: vec![0; count + 1], sending: Vec::new(), joined: Vec::new() };
        let position: BTreeMap<NodeId, usize> = order.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        for (i, &id) in order.iter().enumerate() {
            let strategy = plan.strategies.get(&id);
            let seconds = strategy.map_or(0.0, |s| cost::op(forward, id, s, &plan.mesh, machine).total());
            line.joined.push(forward.first_result(id).is_some() || forward.is_for_backward(id));
            line.seconds.push(line.seconds[i] + seconds);
            line.heavy.push(line.heavy[i] + usize::from(is_heavy(&forward.graph[id].op)));
            let last = readers(forward, id).iter().filter_map(|reader| position.get(reader).copied()).max();
            if let (Some(last), Some(strategy)) = (last, strategy) {
                let bytes = local_bytes(forward, plan, id, strategy);
                let both = if forward.differentiable(id) { 2 } else { 1 };
                line.crossing[i + 1..=last].iter_mut().for_each(|c| *c += both * bytes);
            }
        }
        line.sending = line.crossing.iter().map(|&bytes| machine.send(bytes)).collect();
        line
    }

    /// The nodes of this order by the time of the slowest path to each: calls of one module side by side, where `order` has one after the
    /// other. What is joined stays together.
    fn level(&self, forward: &Forward, order: &[NodeId]) -> Vec<NodeId> {
        let starts: Vec<usize> = (0..order.len()).filter(|&i| i == 0 || !self.joined[i]).collect();
        let ends = starts[1..].iter().copied().chain([order.len()]);
        let mut ready = vec![0.0_f64; forward.graph.nodes.len()];
        let mut groups: Vec<(f64, &[NodeId])> = Vec::new();
        for (from, to) in starts.iter().copied().zip(ends) {
            let group = &order[from..to];
            let operands = group.iter().flat_map(|id| &forward.graph[*id].operands);
            let start = operands.filter(|id| !group.contains(*id)).map(|id| ready[id.0 as usize]).fold(0.0, f64::max);
            // Never earlier than it starts, however sums are rounded.
            let end = start + (self.seconds[to] - self.seconds[from]);
            group.iter().for_each(|id| ready[id.0 as usize] = end);
            groups.push((start, group));
        }
        groups.sort_by(|a, b| a.0.total_cmp(&b.0));
        groups.into_iter().flat_map(|(_, group)| group.iter().copied()).collect()
    }

    /// The positions of `stages - 1` cuts: the slowest stage least, then the fewest bytes, then the earliest cuts. `None` where
    /// no cuts of this order leave every node on a stage of its `reach`.
    fn cut(&self, stages: usize, reach: &[(usize, usize)]) -> Option<Vec<usize>> {
        if stages == 1 {
            return Some(Vec::new());
        }
        let count = self.seconds.len() - 1;
        let mut budget = CANDIDATES * stages;
        loop {
            let places = self.places(budget);
            let few = self.cut_at(&places, stages, reach);
            // Few bytes may cross only at one end, behind the last reader of a mask or of what an encoder made.
            let even = self.cut_at(&self.spread(places, budget), stages, reach);
            let found = match (few, even) {
                (Some(few), Some(even)) if even.0 < WORTH * few.0 => Some(even),
                (few, even) => few.or(even),
            };
            if found.is_some() || budget >= 2 * count {
                return found.map(|(_, cuts)| cuts);
            }
            budget *= 2;
        }
    }

    /// `places`, and of each of `budget` equal shares of the time the last position with the fewest crossing bytes: what a product is
    /// added to and rectified by stays with it.
    fn spread(&self, mut places: Vec<usize>, budget: usize) -> Vec<usize> {
        let count = self.seconds.len() - 1;
        let mut best: Vec<Option<usize>> = vec![None; budget + 1];
        let scale = budget as f64 / self.seconds[count].max(f64::MIN_POSITIVE);
        for i in (1..count).filter(|&i| !self.joined[i]) {
            let slot = &mut best[((self.seconds[i] * scale) as usize).min(budget)];
            if slot.is_none_or(|known| self.crossing[i] <= self.crossing[known]) {
                *slot = Some(i);
            }
        }
        places.extend(best.into_iter().flatten());
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The `budget` positions with the fewest crossing bytes, all that cross equally few included, with the two ends; ascending.
    fn places(&self, budget: usize) -> Vec<usize> {
        let count = self.seconds.len() - 1;
        let mut bytes: Vec<u64> = self.crossing[1..count.max(1)].to_vec();
        bytes.sort_unstable();
        let limit = bytes.get(budget.min(bytes.len()).saturating_sub(1)).copied().unwrap_or(0);
        let mut places = vec![0];
        places.extend((1..count).filter(|&i| self.crossing[i] <= limit && !self.joined[i]));
        places.push(count);
        places
    }

    /// Best of all cuts at `places`, with the seconds of their slowest stage: best[j] is that of the nodes before places[j], as
    /// (slowest stage, bytes, last cut).
    fn cut_at(&self, places: &[usize], stages: usize, reach: &[(usize, usize)]) -> Option<(f64, Vec<usize>)> {
        let mut best: Vec<Vec<Option<(f64, u64, usize)>>> = vec![vec![None; places.len()]; stages + 1];
        best[0][0] = Some((0.0, 0, 0));
        for j in 1..places.len() {
            // Of the nodes between the places: the stages that all of them may be on.
            let (mut first, mut last) = (0, stages - 1);
            for i in (0..j).rev() {
                for (from, to) in &reach[places[i]..places[i + 1]] {
                    (first, last) = (first.max(*from), last.min(*to));
                }
                let works = self.heavy[places[j]] > self.heavy[places[i]] || stages == 1;
                for stage in (first..=last).filter(|_| works) {
                    let Some((slowest, bytes, _)) = best[stage][i] else { continue };
                    let slowest = slowest.max(self.stage_seconds(places[i], places[j]));
                    let next = (slowest, bytes + self.crossing[places[i]], i);
                    // Of equal ones the earliest cut.
                    let better = |old: (f64, u64, usize)| next <= old;
                    if best[stage + 1][j].is_none_or(better) {
                        best[stage + 1][j] = Some(next);
                    }
                }
            }
        }
        let mut at = places.len() - 1;
        let slowest = best[stages][at]?.0;
        let mut cuts = Vec::new();
        for stage in (1..=stages).rev() {
            at = best[stage][at]?.2;
            cuts.push(places[at]);
        }
        cuts.pop();
        cuts.reverse();
        Some((slowest, cuts))
    }

    fn stage_seconds(&self, from: usize, to: usize) -> f64 {
        let cut = |at: usize| if at == 0 || at + 1 == self.seconds.len() { 0.0 } else { self.sending[at] };
        self.seconds[to] - self.seconds[from] + cut(from) + cut(to)
    }
}

/// Who reads the value, itself or through what is made where it is read or once a step.
fn readers(forward: &Forward, id: NodeId) -> BTreeSet<NodeId> {
    let mut found = BTreeSet::new();
    let mut open = vec![id];
    while let Some(next) = open.pop() {
        for &reader in &forward.readers[next.0 as usize] {
            if found.insert(reader) && matches!(forward.kind(reader), Kind::Source | Kind::Alias | Kind::Begin) {
                open.push(reader);
            }
        }
    }
    found
}

fn is_heavy(op: &Op) -> bool {
    matches!(op, Op::DotGeneral(_) | Op::Convolution(_) | Op::Gather(_))
        || matches!(op, Op::Attention(attention) if attention.out == 0)
}

/// Bytes of the value on one rank.
fn local_bytes(forward: &Forward, plan: &Plan, id: NodeId, strategy: &Strategy) -> u64 {
    let mut ty: TensorType = forward.graph.ty(id).clone();
    for (dim, factors) in ty.sharding.dims.iter_mut().zip(&forward.rule(id).spec.result) {
        dim.extend(factors.iter().flat_map(|f| &strategy.factors[usize::from(f.0)]).copied());
    }
    ty.local_bytes(&plan.mesh)
}
