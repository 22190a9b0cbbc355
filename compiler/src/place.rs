//! Applies a plan: gives every value its sharding, stage and section, and inserts the collectives.
//!
//! Each op is computed by its strategy (the plan's for forward nodes, inherited through `grad_of` for gradients, else that of its
//! operands); an operand that lies otherwise is resharded. Before: a logical training graph. After: every type has a
//! sharding, every node a stage and a section, communication is explicit, pending values are read only by linear ops.

mod accumulate;
mod chain;
mod gradient;
mod halves;
mod once;
mod reach;
mod reshard;
mod stack;
mod strategy;
mod zero;

use crate::error::{Error, Result};
use crate::graph::{GradOf, Graph, Node, NodeId, Operands, Phase};
use crate::ops::{GradSum, Op, Rule};
use crate::optimizer::NORM_TERM;
use crate::plan::{Plan, Strategy, Zero};
use crate::schedule::Layout;
use crate::train::updates;
use dcc_program::program::ParamKind;
use dcc_program::{AxisId, AxisList, Reduce, Sharding, TensorType};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};

pub use accumulate::can_accumulate;

/// A pending reduction.
type Pending = (AxisId, Reduce);

/// The placed graph of `graph` under `plan`. An output that several stages hold (a tied parameter's update) occurs once per
/// stage under its name.
/// Errors: a value that mixes samples of several microbatches; a whole-batch count that depends on parameters.
pub fn place(graph: &Graph, plan: &Plan) -> Result<Graph> {
    let mut placer = Placer::new(graph, plan);
    let live = graph.live();
    for id in graph.ids().filter(|id| live[id.0 as usize]) {
        let staged = placer.stage[id.0 as usize];
        if let Some(stage) = staged.filter(|_| !placer.is_source(id)) {
            placer.value(id, stage, graph[id].phase, None)?;
        }
    }
    placer.place_outputs()?;
    let mut placed = placer.out;
    placed.set_cursor(Default::default());
    if plan.schedule.has_halves() {
        placed = halves::halve(placed, &placer.gradients)?;
    }
    let placed = once::sink(placed)?;
    if plan.microbatches() == 1 { Ok(placed) } else { accumulate::own_accumulators(placed) }
}

struct Placer<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    out: Graph,
    /// Stage of each logical node; `None` where it is cloned for each reader.
    stage: Vec<Option<u32>>,
    /// Stages whose contributions reach a node of the backward pass; of a parameter, the stages that read it.
    reach: Vec<BTreeSet<u32>>,
    /// Placed value of a logical node on a stage, by the phase that reads it where that matters.
    built: FxHashMap<(NodeId, u32, Phase), NodeId>,
    /// The strategy that each logical node was first computed with.
    strategies: FxHashMap<NodeId, Strategy>,
    /// Clones in section `count` of placed forward nodes.
    counted: FxHashMap<NodeId, NodeId>,
    sources: Vec<bool>,
    /// Sources of nothing but sources.
    constants: Vec<bool>,
    /// Of one microbatch: sums that are resolved in place, which nobody reads as sums from then on.
    resolved: FxHashSet<NodeId>,
    /// Forward nodes that depend on no parameter: masks, positions, labels.
    of_data: Vec<bool>,
    sums: BTreeMap<NodeId, gradient::PlacedSum>,
    /// By gradient of a parameter and stage, terms that are the same for all microbatches: the update adds them.
    once: FxHashMap<(NodeId, u32), Vec<NodeId>>,
    /// Placed gradients of values that stages compute.
    gradients: FxHashSet<NodeId>,
    regions: zero::Regions,
    /// The node that is being placed, of those that are computed once per microbatch or by the update.
    reader: NodeId,
    /// The stage that what is being placed is for.
    here: u32,
    /// Nodes that are being computed for each other.
    nested: usize,
    layout: Layout,
}

impl<'a> Placer<'a> {
    fn new(graph: &'a Graph, plan: &'a Plan) -> Placer<'a> {
        let mut out = Graph::new();
        out.mesh = Some(plan.mesh.clone());
        let mut placer = Placer {
            graph,
            plan,
            out,
            stage: Vec::with_capacity(graph.nodes.len()),
            reach: Vec::new(),
            built: FxHashMap::default(),
            strategies: FxHashMap::default(),
            counted: FxHashMap::default(),
            resolved: FxHashSet::default(),
            sources: Vec::new(),
            constants: Vec::new(),
            of_data: Vec::new(),
            sums: BTreeMap::new(),
            once: FxHashMap::default(),
            gradients: FxHashSet::default(),
            regions: zero::regions(graph, plan),
            reader: NodeId(0),
            here: 0,
            nested: 0,
            layout: plan.layout(),
        };
        placer.find_sources();
        for id in graph.ids() {
            let stage = placer.home(id);
            placer.stage.push(stage);
        }
        placer.find_reach();
        placer
    }

    fn is_source(&self, id: NodeId) -> bool {
        self.sources[id.0 as usize]
    }

    fn is_constant(&self, id: NodeId) -> bool {
        self.constants[id.0 as usize]
    }

    fn place_outputs(&mut self) -> Result<()> {
        let last = self.plan.parts() - 1;
        let replaced: FxHashMap<NodeId, NodeId> = updates(self.graph).into_iter().map(|u| (u.new, u.param)).collect();
        for (name, id) in &self.graph.outputs {
            let stages = self.output_stages(*id, last);
            for stage in stages {
                let value = self.value(*id, stage, self.output_phase(*id), None)?;
                let mut sharding = self.out.ty(value).sharding.with_pending([]);
                if let Some(&param) = replaced.get(id) {
                    sharding.dims = self.stored_dims(param).into();
                }
                let value = self.reshard(value, &sharding, self.output_phase(*id))?;
                self.out.outputs.push((name.clone(), value));
            }
        }
        Ok(())
    }

    /// Where an output is wanted: a parameter's update on every stage that holds the parameter, what is computed from sums over
    /// stages on all of these (so that all take part), anything else once.
    fn output_stages(&self, id: NodeId, last: u32) -> Vec<u32> {
        let of = self.graph.grad_of(id);
        match (self.graph[id].phase, of) {
            (Phase::Update, _) => {}
            // A gradient itself: on the first stage that holds the parameter.
            (Phase::Backward, Some(GradOf::Value(param))) => return vec![self.param_stages(param)[0]],
            _ => return vec![self.stage[id.0 as usize].unwrap_or(last)],
        }
        match of {
            Some(GradOf::Value(param)) => self.param_stages(param),
            _ => (0..self.plan.stages()).collect(),
        }
    }

    /// The ranks that hold a parameter, as the first chunks that they have; one that nothing reads lives on stage 0.
    fn param_stages(&self, param: NodeId) -> Vec<u32> {
        let stages: BTreeSet<u32> = self.reach[param.0 as usize].iter().map(|&stage| self.first_chunk(stage)).collect();
        if stages.is_empty() { vec![0] } else { stages.into_iter().collect() }
    }

    /// The stage that is the first chunk of the ranks that have `stage`. What chunks share, all but their passes, is there.
    fn first_chunk(&self, stage: u32) -> u32 {
        self.layout.place(stage).0
    }

    fn output_phase(&self, id: NodeId) -> Phase {
        // A sum over microbatches is whole only after the last of them.
        if self.graph[id].phase != Phase::Forward || self.graph.ty(id).rank() == 0 { Phase::Update } else { Phase::Forward }
    }

    /// The placed value of logical `id` for a reader on `stage` in `phase`. Sources are made as `want` says.
    fn value(&mut self, id: NodeId, stage: u32, phase: Phase, want: Option<&[AxisList]>) -> Result<NodeId> {
        let node = &self.graph[id];
        match &node.op {
            Op::StopGradient(_) => return self.value(node.operands[0], stage, phase, want),
            Op::Param(_) | Op::Cast(_) if phase != Phase::Update && self.is_gathered(id) => {
                return self.gathered(id, stage, phase);
            }
            Op::Input(_) | Op::Param(_) | Op::Scalar(_) => return self.leaf(id, stage, phase),
            Op::GradSum(GradSum { of: NORM_TERM }) => return self.norm_term(id, stage),
            Op::GradSum(_) if phase == Phase::Update && node.phase == Phase::Backward => {
                return self.parameter_gradient(id, stage);
            }
            _ => {}
        }
        if self.is_source(id) {
            return match self.made_elsewhere(id, stage) {
                None => self.source(id, stage, phase, want),
                Some(home) => {
                    let made = self.source(id, home, node.phase, want)?;
                    self.transfer(made, stage, node.phase)
                }
            };
        }
        if node.phase == Phase::Update && self.is_scalar_sum(id) {
            return self.scalar_sum(id, stage);
        }
        let (home, made) = self.made_at(id, stage, phase);
        let built = match self.built.get(&(id, home, made)) {
            Some(&built) => built,
            None => {
                let built = self.compute(id, home, made, None)?;
                self.built.insert((id, home, made), built);
                built
            }
        };
        if home == stage { Ok(built) } else { self.transfer(built, stage, node.phase) }
    }

    /// The stage, and the phase, that compute `id`, which is no source, for a reader.
    fn made_at(&self, id: NodeId, stage: u32, phase: Phase) -> (u32, Phase) {
        let home = self.stage[id.0 as usize];
        // What is made of gathered weights alone is made again by the backward pass.
        let again = self.plan.zero == Zero::Parameters && phase == Phase::Backward && !self.of_data[id.0 as usize];
        (home.unwrap_or(stage), if again && home.is_none() { phase } else { self.graph[id].phase })
    }

    /// The stage that makes a source for `stage`, if not that itself: a weight is on the stages that read it by the plan, not on all that
    /// read what is made of it.
    fn made_elsewhere(&self, id: NodeId, stage: u32) -> Option<u32> {
        self.stage[id.0 as usize].filter(|&home| home != stage && self.reads_weight(id))
    }

    /// Whether a source is made of a weight.
    fn reads_weight(&self, id: NodeId) -> bool {
        let (mut open, mut seen) = (vec![id], FxHashSet::default());
        while let Some(id) = open.pop() {
            for &operand in &self.graph[id].operands {
                match self.graph[operand].op {
                    Op::Param(_) => return true,
                    _ if self.is_source(operand) && seen.insert(operand) => open.push(operand),
                    _ => {}
                }
            }
        }
        false
    }

    /// The value on another stage: whole over space, still pending over microbatches. Of one microbatch, what the forward pass
    /// reads is resolved in place, so it is before it is sent.
    fn transfer(&mut self, value: NodeId, stage: u32, phase: Phase) -> Result<NodeId> {
        let mb = self.mb();
        let whole = phase == Phase::Forward && self.plan.microbatches() == 1;
        let ty = self.out.ty(value);
        let sharding = ty.sharding.with_pending(ty.sharding.pending.iter().copied().filter(|p| p.0 == mb && !whole));
        let value = self.reshard(value, &sharding, phase)?;
        let ty = self.out.ty(value).clone();
        let Node { phase: section, stage: home, .. } = self.out[value];
        if home.map(|home| self.first_chunk(home)) == Some(self.first_chunk(stage)) {
            return Ok(value);
        }
        Ok(self.make(crate::ops::Transfer {}, &[value], ty, stage, section))
    }

    fn leaf(&mut self, id: NodeId, stage: u32, phase: Phase) -> Result<NodeId> {
        let node = &self.graph[id];
        let weight = matches!(&node.op, Op::Param(param) if param.kind == ParamKind::Weight);
        if weight && !self.param_stages(id).contains(&self.first_chunk(stage)) {
            return Err(self.graph.broken(id, &format!("stage {stage} reads a parameter that it does not hold")));
        }
        let mut sharding = Sharding::replicated(node.ty.rank());
        let mut section = Phase::Begin;
        match &node.op {
            Op::Input(input) => {
                section = if phase == Phase::Count { Phase::Count } else { Phase::Forward };
                if let Some(dim) = input.batch_dim {
                    sharding.dims[usize::from(dim)] = self.plan.batch.iter().copied().filter(|&a| self.matters(a)).collect();
                }
            }
            Op::Param(_) => sharding.dims = self.stored_dims(id).into(),
            _ => {}
        }
        let factors = sharding.dims.to_vec();
        self.strategies.entry(id).or_insert(Strategy { factors, keep: Default::default() });
        self.out.set_origin_of(self.graph, id);
        Ok(self.make(node.op.clone(), &[], node.ty.with_sharding(sharding), stage, section))
    }

    fn source(&mut self, id: NodeId, stage: u32, phase: Phase, want: Option<&[AxisList]>) -> Result<NodeId> {
        let rank = self.graph.ty(id).rank();
        let whole = vec![AxisList::new(); rank];
        let want = want.unwrap_or(&whole);
        let rule = self.rule(id);
        let mut factors = vec![AxisList::new(); rule.spec.names.len()];
        for (dim, axes) in rule.spec.result.iter().zip(want) {
            factors[usize::from(dim[0].0)] = axes.clone();
        }
        self.compute(id, stage, phase, Some(Strategy { factors, keep: Default::default() }))
    }

    fn rule(&self, id: NodeId) -> Rule {
        self.graph.rule(&self.graph[id])
    }

    /// Adds a placed node: to the stage if it is of a pass, else where the rank's chunks share it.
    fn make(&mut self, op: impl Into<Op>, operands: &[NodeId], ty: TensorType, stage: u32, section: Phase) -> NodeId {
        self.out.set_stage(Some(if section.is_pass() { stage } else { self.first_chunk(stage) }));
        self.out.set_phase(section);
        self.out.add_typed(op, operands, ty)
    }

    /// Computes logical `id` on `stage`: chooses the strategy, reshards the operands, derives the type.
    fn compute(&mut self, id: NodeId, stage: u32, phase: Phase, strategy: Option<Strategy>) -> Result<NodeId> {
        let before = (self.reader, self.here);
        self.here = stage;
        if self.is_reader(id) {
            self.reader = id;
        }
        self.nested += 1;
        let placed = self.computed(id, stage, phase, strategy);
        self.nested -= 1;
        (self.reader, self.here) = before;
        placed
    }

    /// Whether what is placed for `id` is placed for this node, not for one that reads it.
    fn is_reader(&self, id: NodeId) -> bool {
        self.stage[id.0 as usize].is_some() || self.graph[id].phase != Phase::Forward
    }

    fn computed(&mut self, id: NodeId, stage: u32, phase: Phase, strategy: Option<Strategy>) -> Result<NodeId> {
        let operands = self.contributions(id, stage);
        let rule = self.rule(id);
        let strategy = match strategy {
            Some(strategy) => strategy,
            None => {
                let before = (self.reader, self.here);
                self.place_operands(id, stage, phase)?;
                (self.reader, self.here) = before;
                let found: Vec<Option<NodeId>> = operands
                    .iter()
                    .map(|&o| if self.is_source(o) { Ok(None) } else { self.value(o, stage, phase, None).map(Some) })
                    .collect::<Result<_>>()?;
                self.choose(id, &rule, &found, (stage, phase))?
            }
        };
        let strategy = self.legal(&rule, strategy);
        self.strategies.entry(id).or_insert_with(|| strategy.clone());
        let wants: Vec<Vec<AxisList>> = rule.spec.operands.iter().map(|dims| dims_of(dims, &strategy)).collect();
        if matches!(self.graph[id].op, Op::GradSum(_)) {
            return self.gradient_sum(id, &operands, stage, phase, &wants[0]);
        }
        let mut values = Vec::with_capacity(operands.len());
        for (&operand, want) in operands.iter().zip(&wants) {
            values.push(self.value(operand, stage, phase, Some(want))?);
        }
        let mut keepers = self.kept_pendings(id, &strategy, &values);
        let by_update = phase == Phase::Backward && self.waits_for_update(id, &values, &keepers)?;
        let phase = if by_update { Phase::Update } else { phase };
        keepers.retain(|pending, _| !by_update || pending.0 != self.mb());
        for ((i, value), want) in values.iter_mut().enumerate().zip(&wants) {
            let pending = self.out.ty(*value).sharding.pending.clone();
            let keeps = |p: &Pending| keepers.get(p).is_some_and(|set| set.contains(&i));
            let once = Some((self.mb(), Reduce::Sum)).filter(|p| keeps(p) && self.counts_once(id, operands[i], *value));
            let kept = pending.into_iter().filter(keeps).chain(once);
            let sharding = Sharding { dims: want.clone().into(), pending: Default::default() }.with_pending(kept);
            *value = self.reshard(*value, &sharding, phase)?;
        }
        let missing = rule.reduced().flat_map(|f| strategy.factors[usize::from(f.0)].iter().map(|&a| (a, rule.reduce)));
        let sharding = Sharding { dims: dims_of(&rule.spec.result, &strategy).into(), pending: Default::default() }
            .with_pending(keepers.into_keys().chain(missing));
        let ty = self.graph.ty(id).with_sharding(sharding);
        let section = self.section(phase, &values, &ty);
        self.out.set_origin_of(self.graph, id);
        let forward = |f: NodeId| self.built.get(&(f, stage, Phase::Forward)).copied();
        self.out.set_grad_of(match self.graph.grad_of(id) {
            Some(GradOf::Op(f)) => forward(f).map(GradOf::Op),
            _ => None,
        });
        let made = self.make(self.graph[id].op.clone(), &values, ty, stage, section);
        self.out.set_grad_of(None);
        Ok(made)
    }

    /// The operands of `id` that matter on `stage`: a gradient sum without a stage takes only that stage's contributions. What any
    /// stage can make, whole, is the first one's.
    fn contributions(&self, id: NodeId, stage: u32) -> Operands {
        let node = &self.graph[id];
        if !matches!(node.op, Op::GradSum(_)) || self.stage[id.0 as usize].is_some() {
            return node.operands.clone();
        }
        let reach = &self.reach;
        let here = |o: &NodeId| match self.stage[o.0 as usize] {
            Some(s) if !self.is_constant(*o) => s == stage,
            None if !self.is_constant(*o) && self.graph[*o].phase == Phase::Backward => reach[o.0 as usize].contains(&stage),
            _ => reach[id.0 as usize].first() == Some(&stage),
        };
        node.operands.iter().copied().filter(here).collect()
    }

    /// Pending reductions that pass through `id`, and for each the operands that keep it.
    fn kept_pendings(&self, id: NodeId, strategy: &Strategy, values: &[NodeId]) -> BTreeMap<Pending, Vec<usize>> {
        let node = &self.graph[id];
        // Of one microbatch, what a running average is of is read as the forward pass reads it: resolved in place.
        let read = |v: NodeId| node.operands.contains(&v) && self.graph[v].phase == Phase::Forward;
        let averaged = matches!(self.graph.grad_of(id), Some(GradOf::Value(v)) if node.phase == Phase::Backward && read(v));
        if averaged && self.plan.microbatches() == 1 {
            return BTreeMap::new();
        }
        let types: Vec<&TensorType> = values.iter().map(|&v| self.out.ty(v)).collect();
        let used: BTreeSet<AxisId> = strategy.factors.iter().flatten().copied().collect();
        let all: BTreeSet<Pending> = values.iter().flat_map(|&v| self.out.ty(v).sharding.pending.iter().copied()).collect();
        let mut keepers = BTreeMap::new();
        for pending in all {
            let (axis, reduce) = pending;
            let has = |i: &usize| self.out.ty(values[*i]).sharding.pending.contains(&pending);
            let once = |i: &usize, o: NodeId| axis == self.mb() && self.joins_sums(id) && self.counts_once(id, o, values[*i]);
            let joins = |i: &usize| node.operands.get(*i).is_some_and(|&o| self.reads_zero(id, o) || once(i, o));
            let may = |i: &usize| has(i) || joins(i);
            let wanted = axis == self.mb()
                || strategy.keep.contains(&axis)
                || node.ty.elements() <= 1
                || (node.phase == Phase::Backward && self.is_gradient_of_stageless(id));
            // Of one microbatch, what is made of data alone is never a sum: then no value is read both ways.
            let is_counted = axis == self.mb() && self.plan.microbatches() == 1 && self.of_data[id.0 as usize];
            if reduce != Reduce::Sum || used.contains(&axis) || !wanted || is_counted {
                continue;
            }
            let keeps = |set: &Vec<usize>| set.iter().any(has) && set.iter().all(may);
            let mut sets = node.op.linear(&types);
            if axis == self.mb() {
                self.order_sums(id, values, &mut sets);
            }
            if let Some(set) =
                sets.into_iter().filter(keeps).find(|set| axis != self.mb() || !self.is_resolved(id, values, set))
            {
                keepers.insert(pending, set);
            }
        }
        keepers
    }

    /// Of products of two sums over samples the one of data alone is counted before the passes: it need not stay a sum, and is none
    /// beside what is counted.
    fn order_sums(&self, id: NodeId, values: &[NodeId], sets: &mut Vec<Vec<usize>>) {
        let node = &self.graph[id];
        let is_of_data = |id: NodeId| self.of_data[id.0 as usize];
        if self.plan.microbatches() > 1 && is_of_data(id) {
            let is_sum = |i: &usize| self.out.ty(values[*i]).sharding.is_pending(self.mb());
            sets.retain(|set| (0..values.len()).filter(is_sum).all(|i| set.contains(&i)));
        }
        sets.sort_by_key(|set| set.iter().all(|&i| node.operands.get(i).is_none_or(|&o| is_of_data(o))));
    }

    /// Of one microbatch, where a sum over it is resolved in place: whether `id` must read one among these of its operands resolved.
    /// It must if another of its operands waits for that, or if the sum is of an earlier section, which resolves it for all others.
    fn is_resolved(&self, id: NodeId, values: &[NodeId], set: &[usize]) -> bool {
        let pending = |i: &usize| self.out.ty(values[*i]).sharding.pending.iter().any(|p| p.0 == self.mb());
        let resolved = |i: &usize| {
            let sum = self.accumulator(values[*i]);
            let whole = |other: usize| !set.contains(&other) && self.accumulator(values[other]) == sum;
            // It would be read as it is and resolved in one pass.
            let both = |other: usize| {
                let reads = |value: &usize| self.reads_sum(values[*value], self.accumulator(values[other]));
                !set.contains(&other) && pending(&other) && set.iter().any(reads)
            };
            let waits = (0..values.len()).any(|other| whole(other) || both(other) || self.waits_for(values[other], sum));
            let later = self.graph[id].phase != self.out[sum].phase;
            waits || (later && (self.graph[id].phase == Phase::Backward || self.resolved.contains(&sum)))
        };
        self.plan.microbatches() == 1 && set.iter().filter(|i| pending(i)).any(resolved)
    }

    /// Whether `value` depends on `sum` as it is, not resolved.
    fn reads_sum(&self, value: NodeId, sum: NodeId) -> bool {
        let (mut open, mut seen) = (vec![value], BTreeSet::new());
        while let Some(id) = open.pop() {
            if id == sum {
                return true;
            }
            if id > sum && seen.insert(id) && !matches!(self.out[id].op, Op::ResolveMicrobatches(_)) {
                open.extend(&self.out[id].operands);
            }
        }
        false
    }

    /// Whether `value` depends on the resolved `sum`.
    fn waits_for(&self, value: NodeId, sum: NodeId) -> bool {
        let (mut open, mut seen) = (vec![value], BTreeSet::new());
        while let Some(id) = open.pop().filter(|_| self.resolved.contains(&sum)) {
            if id <= sum || !seen.insert(id) {
                continue;
            }
            let node = &self.out[id];
            if matches!(node.op, Op::ResolveMicrobatches(_)) && self.accumulator(node.operands[0]) == sum {
                return true;
            }
            open.extend(&node.operands);
        }
        false
    }

    /// Whether the kernel of `reader` has zero in the place of this operand: a pending sum over any axis. What is concatenated is in
    /// memory, where nobody knows it.
    fn reads_zero(&self, reader: NodeId, operand: NodeId) -> bool {
        !matches!(self.graph[reader].op, Op::Concatenate(_)) && self.is_zero(operand)
    }

    /// Zero everywhere.
    fn is_zero(&self, mut id: NodeId) -> bool {
        while let Op::BroadcastInDim(_) | Op::Cast(_) = self.graph[id].op {
            id = self.graph[id].operands[0];
        }
        matches!(&self.graph[id].op, Op::Const(c) if c.value() == 0.0)
    }

    /// Gradients of values that every stage clones (parameters, their casts) keep every pending until the update.
    fn is_gradient_of_stageless(&self, id: NodeId) -> bool {
        matches!(self.graph.grad_of(id), Some(GradOf::Op(f) | GradOf::Value(f)) if self.stage[f.0 as usize].is_none())
    }

    fn mb(&self) -> AxisId {
        self.plan.mesh.microbatch_axis().expect("every plan has the axis mb")
    }

    /// Whether the axis divides anything; `mb` always stands in types.
    fn matters(&self, axis: AxisId) -> bool {
        self.plan.mesh.size(axis) > 1 || axis == self.mb()
    }

    fn per_microbatch(&self, ty: &TensorType) -> bool {
        ty.is_per_microbatch(&self.plan.mesh)
    }

    /// The section of a value read in `phase` whose operands are `operands`.
    fn section(&self, phase: Phase, operands: &[NodeId], ty: &TensorType) -> Phase {
        if phase == Phase::Update {
            return Phase::Update;
        }
        let section_of = |&o: &NodeId| self.out[o].phase;
        if operands.iter().map(section_of).any(|o| o == Phase::Update) {
            return Phase::Update;
        }
        let batched = self.per_microbatch(ty) || operands.iter().any(|&o| self.per_microbatch(self.out.ty(o)));
        if phase == Phase::Count {
            return if batched { Phase::Count } else { Phase::Ready };
        }
        let within = |s: Phase| operands.iter().map(section_of).any(|o| o == s);
        if batched || within(Phase::Forward) || within(Phase::Backward) {
            return if phase == Phase::Backward || within(Phase::Backward) { Phase::Backward } else { Phase::Forward };
        }
        if within(Phase::Ready) || within(Phase::Count) { Phase::Ready } else { Phase::Begin }
    }

    fn refused(&self, value: NodeId, what: String) -> Error {
        Error::plan(what).at(self.out.origin(value))
    }
}

/// The axes of each dim: those of its factors, major first.
fn dims_of(dims: &[dcc_program::factors::DimFactors], strategy: &Strategy) -> Vec<AxisList> {
    let axes = |f: &dcc_program::FactorId| strategy.factors[usize::from(f.0)].iter().copied();
    dims.iter().map(|dim| dim.iter().flat_map(axes).collect()).collect()
}
