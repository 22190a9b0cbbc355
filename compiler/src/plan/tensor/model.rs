//! The planner's problem over the tensor axes, `cp` and `ep`: nodes with their choices, what each choice wants of the values it reads, what it
//! makes, and what all of that costs.
//!
//! A value has one layout. Each distinct layout that its readers want is made once; each distinct layout of the contributions to
//! its gradient is added up first and turned into the value's own once: that is how `place` interns and adds.

use super::super::annotated::Wish;
use super::super::forward::{Forward, Kind};
use super::super::pins::{Pins, shards};
use super::super::samples::{self, Samples};
use super::super::{CONTEXT, EXPERT, Strategy};
use super::classes::Classes;
use super::context::Context;
use super::experts::Experts;
use super::layout::{At, Layout, MAX_AXES, TensorAxes};
use super::unmet;
use crate::cost::{self, Machine, reshard};
use crate::error::Result;
use crate::graph::NodeId;
use crate::ops::{Op, Rule};
use dcc_program::factors::DimFactors;
use dcc_program::{AxisId, AxisList, FactorId, Mesh, Reduce, Sharding, TensorType};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Cost in a unit that the whole model's work sets, so that sums are exact and large models do not overflow.
pub(super) type Cost = u64;

/// One way to compute a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Choice {
    /// The axes of each factor.
    pub factors: Vec<AxisList>,
    /// Axes, by index, over which pending operands pass through.
    pub keep: SmallVec<[u8; MAX_AXES]>,
    /// Work of the op and its gradient.
    pub cost: Cost,
    /// Kept by a rank: a parameter with its gradient and state, a result until the gradients of its readers are computed.
    pub bytes: u64,
    /// By read: the wanted layout, pendings that are kept aside.
    pub wants: SmallVec<[Layout; 3]>,
    /// By read: the layout of the contribution to the gradient.
    pub gives: SmallVec<[Layout; 3]>,
    /// The result's layout, pendings that are kept aside.
    pub makes: Layout,
}

/// One use of a value by a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Read {
    /// Operand of the op; `None` where sources stand between.
    pub operand: Option<u8>,
    /// Contributes to the value's gradient.
    pub gradient: bool,
    /// The gradient of the op reads the value again.
    pub again: bool,
}

/// All of a node but which values it reads: layers that repeat share it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Class {
    pub reads: Vec<Read>,
    pub choices: Vec<Choice>,
    /// Operand sets through which pending sums may pass.
    pub linear: Vec<Vec<usize>>,
    /// A number: pending sums pass wherever they can.
    pub scalar: bool,
    /// Of the result; index into `Problem::kinds`.
    pub kind: usize,
    pub output: bool,
}

impl Class {
    /// Of the choice that needs least.
    pub fn least(&self) -> u64 {
        self.choices.iter().map(|choice| choice.bytes).min().unwrap_or(0)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Item {
    pub id: NodeId,
    /// Index into `Problem::classes`.
    pub class: usize,
    /// By read: the item that makes the value.
    pub values: SmallVec<[usize; 3]>,
}

/// What decides the cost of moving a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ValueKind {
    /// With its batch axes.
    pub ty: TensorType,
    /// Computed once per step, its gradient's reductions too.
    pub per_step: bool,
}

#[derive(Debug)]
pub(super) struct Problem {
    pub items: Vec<Item>,
    pub classes: Vec<Class>,
    pub kinds: Vec<ValueKind>,
    pub axes: TensorAxes,
    pub mesh: Mesh,
    pub machine: Machine,
    /// Cost units per second.
    pub scale: f64,
}

/// Cost of moving a value between two layouts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moving {
    /// Of reductions and exchanges, which happen once, and of gathers, which the backward repeats.
    pub once: Cost,
    pub gather: Cost,
    /// Of a copy that is held from the beginning of a step to its end, were it but a slice.
    pub copy: Cost,
}

impl Problem {
    pub fn class(&self, item: usize) -> &Class {
        &self.classes[self.items[item].class]
    }

    pub fn units(&self, seconds: f64) -> Cost {
        (seconds * self.scale).round() as Cost
    }

    pub fn microbatches(&self) -> f64 {
        f64::from(self.mesh.size_of("mb"))
    }

    pub fn moving(&self, kind: usize, from: Layout, to: Layout) -> Moving {
        let kind = &self.kinds[kind];
        let ty = kind.ty.with_sharding(from.over(&kind.ty.sharding, &self.axes));
        let mut moving = Moving::default();
        for step in reshard::steps(&ty, &to.over(&kind.ty.sharding, &self.axes), &self.mesh) {
            let cost = self.units(self.machine.collective(&step, &self.mesh));
            let once = step.kind.is_reduction() || (step.kind == reshard::Move::AllToAll && !kind.per_step);
            *if once { &mut moving.once } else { &mut moving.gather } += cost;
        }
        if kind.per_step && from != to {
            let copy = kind.ty.with_sharding(to.resolved().over(&kind.ty.sharding, &self.axes));
            moving.copy = self.units(copy.local_bytes(&self.mesh) as f64 / self.machine.memory);
        }
        moving
    }

    /// A wanted layout, once. A gathered parameter is priced as if it were gathered for every microbatch, forward and backward: a
    /// copy that stays for the step is the memory that sharding was to save.
    pub fn want_cost(&self, kind: usize, moving: Moving, again: bool) -> Cost {
        if self.kinds[kind].per_step {
            return self.per_step(moving.once) + 2 * moving.gather + moving.copy;
        }
        moving.once + moving.gather * if again { 2 } else { 1 }
    }

    /// A contribution to the gradient, once. Parameters keep what is pending until the update.
    pub fn give_cost(&self, kind: usize, moving: Moving) -> Cost {
        let once = if self.kinds[kind].per_step { self.per_step(moving.once) } else { moving.once };
        once + moving.gather
    }

    /// The axes of tensor parallelism.
    pub fn tensor_axes(&self) -> TensorAxes {
        self.axes.iter().copied().filter(|&axis| ![CONTEXT, EXPERT].contains(&self.mesh.name(axis))).collect()
    }

    /// `strategy` over the batch axes, and these axes.
    pub fn merge(&self, strategy: &Strategy, factors: &[AxisList], keep: &[u8]) -> Strategy {
        let mut strategy = strategy.clone();
        for (all, tensor) in strategy.factors.iter_mut().zip(factors) {
            all.extend(tensor.iter().copied());
        }
        strategy.keep.extend(keep.iter().map(|&i| self.axes[usize::from(i)]));
        strategy
    }

    fn per_step(&self, cost: Cost) -> Cost {
        (cost as f64 / self.microbatches()).round() as Cost
    }
}

/// Under sequence parallelism, what it costs to keep a whole value for the backward pass, in times of gathering it: more than to gather it
/// again, and to add up the gradients of what is added to it or scales it.
const KEPT: f64 = 8.0;

/// What tensor axes may split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Along {
    /// Dims that weights have.
    Features,
    /// Sequence parallelism: the others too, instead of the width, and what is kept has a price.
    Sequence,
    /// The same, as memory allows.
    Memory,
}

/// What stays in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Bytes that a rank has for each byte of a weight: itself, gradient and state, less what data-parallel ranks share.
    pub copies: f64,
    /// Microbatches between their forward and their backward.
    pub in_flight: u64,
}

/// Builds the problem of the forward graph on a mesh whose tensor axes are `axes`.
pub(super) struct Builder<'a> {
    pub forward: &'a Forward<'a>,
    pub samples: &'a Samples,
    pub classes: &'a Classes,
    pub pins: &'a Pins,
    /// Context and expert parallelism: what `samples` knows nothing of.
    pub context: Option<&'a Context>,
    pub experts: Option<&'a Experts>,
    pub along: Along,
    pub held: Held,
}

/// Where an axis that is no tensor axis may stand: major to those, or minor to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub factor: FactorId,
    pub inner: bool,
}

/// A use of a value through sources: the value, and for each of its dims the dim of the operand it stands on.
type Root = (NodeId, SmallVec<[u8; 4]>, bool, bool);

impl Builder<'_> {
    /// Errors: a pin that no choice meets.
    pub fn build(&self, mesh: &Mesh, axes: TensorAxes, machine: Machine) -> Result<Problem> {
        let forward = self.forward;
        let decided = |id: &NodeId| matches!(forward.kind(*id), Kind::Param | Kind::Begin | Kind::Batched);
        let ids: Vec<NodeId> = forward.order.iter().copied().filter(decided).collect();
        let index: FxHashMap<NodeId, usize> = ids.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        let (items, classes, kinds, mesh) = (Vec::new(), Vec::new(), Vec::new(), mesh.clone());
        let mut problem = Problem { items, classes, kinds, axes, mesh, machine, scale: 1.0 };
        problem.scale = self.scale(&problem, &ids);
        let mut classes: FxHashMap<Class, usize> = FxHashMap::default();
        let mut kinds: FxHashMap<ValueKind, usize> = FxHashMap::default();
        for &id in &ids {
            let value = self.value_kind(id);
            let next = kinds.len();
            let kind = *kinds.entry(value.clone()).or_insert(next);
            if kind == next {
                problem.kinds.push(value);
            }
            let (class, values) = self.class(&problem, id, kind, &index)?;
            let class = *classes.entry(class).or_insert_with_key(|class| {
                problem.classes.push(class.clone());
                problem.classes.len() - 1
            });
            problem.items.push(Item { id, class, values });
        }
        Ok(problem)
    }

    /// The whole work of the model is 2^44 units.
    fn scale(&self, problem: &Problem, ids: &[NodeId]) -> f64 {
        let seconds = |&id: &NodeId| {
            let strategy = &self.samples.strategies[&id];
            cost::op(self.forward, id, strategy, &problem.mesh, &problem.machine).total()
        };
        let total: f64 = ids.iter().map(seconds).sum();
        if total > 0.0 { (1u64 << 44) as f64 / total } else { 1.0 }
    }

    fn value_kind(&self, id: NodeId) -> ValueKind {
        let mut sharding = self.samples.shardings[id.0 as usize].clone();
        sharding.pending.clear();
        let ty = self.forward.graph.ty(id).with_sharding(sharding);
        ValueKind { ty, per_step: self.forward.kind(id) != Kind::Batched }
    }

    fn class(
        &self,
        problem: &Problem,
        id: NodeId,
        kind: usize,
        index: &FxHashMap<NodeId, usize>,
    ) -> Result<(Class, SmallVec<[usize; 3]>)> {
        let forward = self.forward;
        let node = &forward.graph[id];
        let mut reads = Vec::new();
        let mut values = SmallVec::new();
        let mut dims: Vec<Vec<DimFactors>> = Vec::new();
        let mut read_wishes = Vec::new();
        for (i, (&operand, factors)) in node.operands.iter().zip(&forward.rule(id).spec.operands).enumerate() {
            for (value, map, direct, differentiable) in self.roots(operand) {
                let Some(&value_index) = index.get(&value) else { continue };
                let gradient = differentiable && forward.differentiable(value) && forward.differentiable(id);
                let again = gradient && reads_again(&node.op);
                if let Some(wish) = self.pins.reads.get(&(id, value)) {
                    read_wishes.push((reads.len(), value, wish));
                }
                reads.push(Read { operand: direct.then_some(i as u8), gradient, again });
                values.push(value_index);
                dims.push(map.iter().map(|&d| factors[usize::from(d)].clone()).collect());
            }
        }
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| forward.graph.ty(o)).collect();
        let linear = node.op.linear(&types).into_iter().filter(|set| !set.is_empty()).collect();
        let scalar = node.ty.elements() <= 1;
        let output = forward.is_output(id);
        let mut class = Class { reads, choices: Vec::new(), linear, scalar, kind, output };
        class.choices = self.choices(problem, id, &class, &dims);
        if let Some(wish) = self.pins.values.get(&id) {
            let base = self.samples.lies(forward, id);
            self.restrict(problem, &mut class.choices, &base, wish, |choice| choice.makes)?;
        }
        for (read, value, wish) in read_wishes {
            let base = self.samples.has(forward, id, value);
            self.restrict(problem, &mut class.choices, &base, wish, |choice| choice.wants[read])?;
        }
        Ok((class, values))
    }

    /// Leaves the choices whose layout, over the axes that `base` has, meets the wish. Errors: none does.
    fn restrict(
        &self,
        problem: &Problem,
        choices: &mut Vec<Choice>,
        base: &Sharding,
        wish: &Wish,
        layout: impl Fn(&Choice) -> Layout,
    ) -> Result<()> {
        let sharding = |choice: &Choice| layout(choice).resolved().over(base, &problem.axes);
        let possible = choices.iter().map(|choice| shards(&sharding(choice), &problem.mesh)).collect();
        choices.retain(|choice| wish.is_met(&sharding(choice), &problem.mesh));
        if choices.is_empty() { Err(unmet(wish, possible)) } else { Ok(()) }
    }

    /// The values behind an operand: itself, or what the sources it is made of read.
    fn roots(&self, operand: NodeId) -> SmallVec<[Root; 2]> {
        let graph = self.forward.graph;
        let node = &graph[operand];
        let identity = || (0..node.ty.rank() as u8).collect();
        match (&node.op, self.forward.kind(operand)) {
            (_, Kind::Alias) => {
                let mut roots = self.roots(node.operands[0]);
                roots.iter_mut().for_each(|root| root.3 = false);
                roots
            }
            (Op::BroadcastInDim(broadcast), _) => {
                let mut roots = self.roots(node.operands[0]);
                for (_, map, direct, _) in &mut roots {
                    map.iter_mut().for_each(|d| *d = broadcast.dims[usize::from(*d)]);
                    *direct = false;
                }
                roots
            }
            (_, Kind::Source) => {
                let mut roots: SmallVec<[Root; 2]> = node.operands.iter().flat_map(|&o| self.roots(o)).collect();
                roots.iter_mut().for_each(|root| root.2 = false);
                roots
            }
            _ => smallvec::smallvec![(operand, identity(), true, true)],
        }
    }

    fn choices(&self, problem: &Problem, id: NodeId, class: &Class, dims: &[Vec<DimFactors>]) -> Vec<Choice> {
        let rule = self.forward.rule(id);
        let count = rule.spec.names.len();
        // A pinned parameter may be sharded where the planner would not.
        let pinned = self.forward.kind(id) == Kind::Param && self.pins.values.contains_key(&id);
        let allowed: Vec<FactorId> = rule.spec.ids().filter(|&f| pinned || self.may_shard(id, rule, f)).collect();
        let mut choices = Vec::new();
        for factors in self.legal_assignments(problem, id, rule, count, &allowed) {
            let free: SmallVec<[u8; MAX_AXES]> = (0..problem.axes.len() as u8)
                .filter(|&i| !class.linear.is_empty() && !factors.iter().flatten().any(|a| *a == problem.axes[usize::from(i)]))
                .collect();
            let sets: Vec<SmallVec<[u8; MAX_AXES]>> = if class.scalar { vec![free] } else { subsets(&free) };
            choices.extend(sets.into_iter().map(|keep| self.choice(problem, id, dims, factors.clone(), keep)));
        }
        choices
    }

    /// Axes on factors: the tensor axes in all ways, those of sequences and experts where they may stand and all fits.
    fn legal_assignments(
        &self,
        problem: &Problem,
        id: NodeId,
        rule: &Rule,
        count: usize,
        allowed: &[FactorId],
    ) -> Vec<Vec<AxisList>> {
        let legal = |factors: &Vec<AxisList>| self.is_legal(problem, id, rule, factors);
        let mut all = self.assignments(&problem.tensor_axes(), id, count, allowed);
        let experts = self.experts.map(|experts| (experts.axis, experts.places(self.forward, self.classes, id, rule)));
        let context = self.context.map(|context| (context.axis, context.places(self.forward, id, rule)));
        for (axis, places) in experts.into_iter().chain(context) {
            let with = |&place: &Option<Place>| all.iter().map(move |factors| with_axis(factors, place, axis)).filter(legal);
            let placed: Vec<Vec<AxisList>> = places.iter().flat_map(with).collect();
            all = if placed.is_empty() { all } else { placed };
        }
        all.retain(legal);
        all
    }

    /// Axes on factors. Split axes act as one where they can: the minor one is used only with the major one, on dims of one class
    /// (`n`, or the `h` and `g` that `n` is reshaped into).
    fn assignments(&self, axes: &TensorAxes, id: NodeId, count: usize, allowed: &[FactorId]) -> Vec<Vec<AxisList>> {
        let mut all = vec![vec![AxisList::new(); count]];
        for (i, &axis) in axes.iter().enumerate() {
            for n in 0..all.len() {
                let major = all[n].iter().position(|axes| !axes.is_empty());
                for &factor in allowed {
                    let joins = |major: usize| self.classes.are_one(self.forward, id, FactorId(major as u8), factor);
                    if i > 0 && !major.is_some_and(joins) {
                        continue;
                    }
                    let mut next = all[n].clone();
                    next[usize::from(factor.0)].push(axis);
                    all.push(next);
                }
            }
        }
        all
    }

    fn may_shard(&self, id: NodeId, rule: &Rule, factor: FactorId) -> bool {
        let of_batch = !self.samples.strategies[&id].factors[usize::from(factor.0)].is_empty();
        let feature = self.classes.is_feature(self.forward, id, factor);
        let allowed = match self.along {
            Along::Features => feature,
            Along::Sequence | Along::Memory => self.may_shard_along(id, rule, factor),
        };
        allowed && !rule.is_whole(factor) && !of_batch
    }

    /// The same under sequence parallelism: products and attention have their features split, lookups too, and what lies between the
    /// layers' products the sequence instead of the width.
    fn may_shard_along(&self, id: NodeId, rule: &Rule, factor: FactorId) -> bool {
        let feature = self.classes.is_feature(self.forward, id, factor);
        match &self.forward.graph[id].op {
            Op::DotGeneral(_) | Op::Convolution(_) | Op::Attention(_) => feature,
            Op::Gather(_) => feature || !rule.masked.contains(&factor),
            _ if self.forward.kind(id) != Kind::Batched => true,
            _ => !feature || !self.classes.is_width(self.forward, id, factor),
        }
    }

    /// Seconds that stand for memory: of a frozen parameter, whose slices cost nothing else, and of a value until a gradient reads it, under
    /// sequence parallelism and where it has features.
    fn keeping(&self, problem: &Problem, id: NodeId, strategy: &Strategy) -> f64 {
        let (forward, mesh) = (self.forward, &problem.mesh);
        let dims = &forward.rule(id).spec.result;
        if forward.kind(id) == Kind::Param && !forward.differentiable(id) {
            return cost::bytes(forward.graph.ty(id), dims, strategy, mesh) / problem.machine.memory;
        }
        let has_features = || dims.iter().flatten().any(|&f| self.classes.is_feature(forward, id, f));
        let priced = self.along == Along::Sequence && has_features();
        if !priced || !self.is_kept(id) {
            return 0.0;
        }
        let [whole, local] =
            [&self.samples.strategies[&id], strategy].map(|strategy| cost::bytes(forward.graph.ty(id), dims, strategy, mesh));
        let gather = reshard::Step { kind: reshard::Move::AllGather, axes: problem.tensor_axes(), bytes: whole as u64 };
        KEPT * problem.machine.collective(&gather, mesh) * local / whole.max(1.0)
    }

    /// Whether gradients read the result.
    fn is_kept(&self, id: NodeId) -> bool {
        let forward = self.forward;
        let reads = |&reader: &NodeId| forward.differentiable(reader) && reads_again(&forward.graph[reader].op);
        forward.kind(id) == Kind::Batched && forward.readers[id.0 as usize].iter().any(reads)
    }

    fn held(&self, problem: &Problem, id: NodeId, strategy: &Strategy) -> u64 {
        let forward = self.forward;
        let local = cost::bytes(forward.graph.ty(id), &forward.rule(id).spec.result, strategy, &problem.mesh);
        match forward.kind(id) {
            Kind::Param if forward.differentiable(id) => (local * self.held.copies) as u64,
            Kind::Param => local as u64,
            _ if self.is_kept(id) => local as u64 * self.held.in_flight,
            _ => 0,
        }
    }

    /// Every rank gets a part, heads are whole, compound dims are filled exactly from the major factor on.
    fn is_legal(&self, problem: &Problem, id: NodeId, rule: &Rule, factors: &[AxisList]) -> bool {
        let mesh = &problem.mesh;
        let op = &self.forward.graph[id].op;
        let heads = |f: FactorId| matches!(op, Op::Attention(_)) && !op.counts_positions(&rule.spec, f);
        let fits = rule.spec.ids().all(|f| {
            let parts: u64 = factors[usize::from(f.0)].iter().map(|&a| u64::from(mesh.size(a))).product();
            parts <= rule.size(f) && (!heads(f) || rule.size(f).is_multiple_of(parts))
        });
        let strategy = problem.merge(&self.samples.strategies[&id], factors, &[]);
        let sides = rule.spec.operands.iter().flatten().chain(&rule.spec.result);
        fits && sides.filter(|dim| dim.len() > 1).all(|dim| samples::fills(dim, rule, &strategy, mesh))
    }

    fn choice(
        &self,
        problem: &Problem,
        id: NodeId,
        dims: &[Vec<DimFactors>],
        factors: Vec<AxisList>,
        keep: SmallVec<[u8; MAX_AXES]>,
    ) -> Choice {
        let rule = self.forward.rule(id);
        let makes = layout(&problem.axes, &rule.spec.result, &factors, rule.reduce);
        let gives: SmallVec<[Layout; 3]> = dims.iter().map(|dims| layout(&problem.axes, dims, &factors, Reduce::Sum)).collect();
        let wants = gives.iter().map(|layout| layout.resolved()).collect();
        let strategy = problem.merge(&self.samples.strategies[&id], &factors, &[]);
        let seconds = cost::op(self.forward, id, &strategy, &problem.mesh, &problem.machine).total();
        // The update of a parameter counts for every microbatch: its time stands for the memory it takes.
        let per_step = matches!(self.forward.kind(id), Kind::Begin | Kind::Constant);
        let keeping = self.keeping(problem, id, &strategy);
        let cost = problem.units(keeping + if per_step { seconds / problem.microbatches() } else { seconds });
        let bytes = self.held(problem, id, &strategy);
        Choice { factors, keep, cost, bytes, wants, gives, makes }
    }
}

/// `factors` with `axis` at `place`.
fn with_axis(factors: &[AxisList], place: Option<Place>, axis: AxisId) -> Vec<AxisList> {
    let mut factors = factors.to_vec();
    if let Some(Place { factor, inner }) = place {
        let axes = &mut factors[usize::from(factor.0)];
        axes.insert(if inner { axes.len() } else { 0 }, axis);
    }
    factors
}

/// The layout of a tensor indexed by `dims`: an axis on a factor that it lacks is pending.
fn layout(axes: &TensorAxes, dims: &[DimFactors], factors: &[AxisList], reduce: Reduce) -> Layout {
    let mut layout = Layout::default();
    for (i, axis) in axes.iter().enumerate() {
        if let Some(factor) = factors.iter().position(|axes| axes.contains(axis)) {
            let at = |dim: usize| {
                // Of the major factors of the dim too.
                let mut on = dims[dim].iter().flat_map(|f| &factors[usize::from(f.0)]).take_while(|a| *a != axis);
                if on.any(|a| axes[i..].contains(a)) { At::Inner(dim as u8) } else { At::Dim(dim as u8) }
            };
            let dim = dims.iter().position(|dim| dim.contains(&FactorId(factor as u8)));
            layout.set(i, dim.map_or(At::Pending(reduce), at));
        }
    }
    layout
}

fn subsets(axes: &[u8]) -> Vec<SmallVec<[u8; MAX_AXES]>> {
    (0..1u32 << axes.len())
        .map(|bits| axes.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1).map(|(_, &a)| a).collect())
        .collect()
}

/// Whether the gradient of an op reads its operands, so that what was gathered is gathered again.
fn reads_again(op: &Op) -> bool {
    use dcc_program::kernel::{BinaryOp, UnaryOp};
    match op {
        Op::Unary(unary) => unary.op != UnaryOp::Neg,
        Op::Binary(binary) => !matches!(binary.op, BinaryOp::Add | BinaryOp::Sub),
        Op::DotGeneral(_) | Op::Convolution(_) | Op::Attention(_) => true,
        Op::Reduce(reduce) => reduce.op != Reduce::Sum,
        _ => false,
    }
}
