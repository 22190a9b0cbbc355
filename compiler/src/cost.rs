//! Seconds of ops and collectives on one rank. Only their ratios decide plans, so the rates need not be those of the machine.

pub mod kept;
pub mod reshard;
pub mod sections;

use crate::graph::NodeId;
use crate::ops::{Op, Rule};
use crate::plan::Strategy;
use crate::plan::forward::{Forward, Kind, is_pointwise};
use dcc_program::factors::DimFactors;
use dcc_program::{Mesh, TensorType};
use reshard::{Move, Step};

/// Rates of one rank and its links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Multiplications and additions per second in matrix products.
    pub flops: f64,
    /// Bytes per second to and from memory.
    pub memory: f64,
    /// Bytes per second that a rank sends to its neighbour in a ring.
    pub link: f64,
    /// Seconds until the first byte of a message arrives.
    pub latency: f64,
}

/// One CPU core and sockets: slow enough in products that the planner shards whatever `--tp` can shard, with links slow enough
/// beside memory that a collective more is never worth some elementwise work less.
impl Default for Machine {
    fn default() -> Machine {
        Machine { flops: 10e9, memory: 25e9, link: 1e9, latency: 1e-6 }
    }
}

/// Time of one execution of an op and of its gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    pub forward: f64,
    pub backward: f64,
}

impl Seconds {
    pub fn total(self) -> f64 {
        self.forward + self.backward
    }
}

impl std::ops::AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.forward += other.forward;
        self.backward += other.backward;
    }
}

impl Machine {
    /// A ring all_gather or reduce_scatter of `bytes` (of the whole, as each rank holds it after or before) over n ranks takes
    /// (n−1)/n · bytes/link + (n−1) · latency, an all_reduce twice that. Thakur, Rabenseifner, Gropp 2005, section 4.
    pub fn collective(&self, step: &Step, mesh: &Mesh) -> f64 {
        let ranks: f64 = step.axes.iter().map(|&a| f64::from(mesh.size(a))).product();
        if ranks <= 1.0 {
            return 0.0;
        }
        let once = (ranks - 1.0) / ranks * step.bytes as f64 / self.link + (ranks - 1.0) * self.latency;
        if step.kind == Move::AllReduce { 2.0 * once } else { once }
    }

    /// Bytes for each member of a group, of which a collective's latency takes a tenth of its time: see `collective`.
    pub fn bucket_bytes(&self) -> u64 {
        (10.0 * self.latency * self.link) as u64
    }

    /// Seconds to send `bytes` to another rank.
    pub fn send(&self, bytes: u64) -> f64 {
        bytes as f64 / self.link + self.latency
    }
}

/// Multiplications and additions of one forward execution on the rank that has most; 0 for all but products.
pub fn flops(op: &Op, rule: &Rule, strategy: &Strategy, mesh: &Mesh) -> f64 {
    let products = match op {
        Op::DotGeneral(_) => 1.0,
        Op::Attention(attention) if attention.out == 0 => match attention.attributes.causal {
            // Late queries see most keys: half of all, but of the last of n parts 1 - 1/2n.
            true => 2.0 - 1.0 / queries(rule, strategy, mesh),
            false => 2.0,
        },
        // Of the three factors of a window, two are loops.
        Op::Convolution(op) => 1.0 / op.windows.iter().map(|w| rule.size_of(&w.image) as f64).product::<f64>(),
        _ => return 0.0,
    };
    let locals = rule.spec.ids().map(|f| mesh.block(rule.size(f), &strategy.factors[usize::from(f.0)]) as f64);
    2.0 * products * locals.product::<f64>()
}

/// How many ranks share the queries of an attention.
fn queries(rule: &Rule, strategy: &Strategy, mesh: &Mesh) -> f64 {
    let Some(factor) = rule.spec.names.iter().position(|name| name == "t") else { return 1.0 };
    strategy.factors[factor].iter().map(|&axis| f64::from(mesh.size(axis))).product()
}

/// Seconds of one execution of node `id` under `strategy`: per microbatch for what depends on the batch, per step for the rest.
/// A parameter costs its update. Pointwise ops, broadcasts and reductions that feed each other are one kernel: what lies
/// between them costs nothing, a value that several of them read is read once.
pub(crate) fn op(forward: &Forward, id: NodeId, strategy: &Strategy, mesh: &Mesh, machine: &Machine) -> Seconds {
    let node = &forward.graph[id];
    let rule = forward.rule(id);
    let own = bytes(&node.ty, &rule.spec.result, strategy, mesh);
    let updates = f64::from(u8::from(forward.differentiable(id)));
    match forward.kind(id) {
        // AdamW reads weight, gradient and two moments and writes three of them.
        Kind::Param => return Seconds { forward: 0.0, backward: updates * 7.0 * own / machine.memory },
        Kind::Source | Kind::Alias | Kind::Outside | Kind::Input => return Seconds::default(),
        Kind::Constant | Kind::Begin | Kind::Batched => {}
    }
    let reads: f64 = node
        .operands
        .iter()
        .zip(&rule.spec.operands)
        .map(|(&o, dims)| reading(forward, id, o) * bytes(forward.graph.ty(o), dims, strategy, mesh))
        .sum();
    let moved = if matches!(node.op, Op::Gather(_)) { own } else { reads };
    let writes = if is_written(forward, id) { own } else { 0.0 };
    let seconds = (flops(&node.op, rule, strategy, mesh) / machine.flops).max((moved + writes) / machine.memory);
    Seconds { forward: seconds, backward: repeats(forward, id) * seconds }
}

/// The part of a node's gradient that is of parameters: what schedules put off.
pub(crate) fn of_weights(forward: &Forward, id: NodeId) -> f64 {
    let node = &forward.graph[id];
    let wanted: Vec<NodeId> = node.operands.iter().copied().filter(|&o| forward.differentiable(o)).collect();
    let products = matches!(node.op, Op::DotGeneral(_) | Op::Convolution(_) | Op::Gather(_));
    let weights = wanted.iter().filter(|&&o| !forward.is_batched(o)).count();
    if products && weights > 0 { weights as f64 / wanted.len() as f64 } else { 0.0 }
}

/// Work of a node's gradient in units of the node's own.
pub(crate) fn repeats(forward: &Forward, id: NodeId) -> f64 {
    let node = &forward.graph[id];
    match node.op {
        _ if !forward.differentiable(id) => 0.0,
        Op::DotGeneral(_) | Op::Convolution(_) => node.operands.iter().filter(|&&o| forward.differentiable(o)).count() as f64,
        // Five products for two: the scores are computed again.
        Op::Attention(_) => 2.5,
        _ => 2.0,
    }
}

/// Bytes on one rank of a tensor whose dims are indexed by these factors.
pub(crate) fn bytes(ty: &TensorType, dims: &[DimFactors], strategy: &Strategy, mesh: &Mesh) -> f64 {
    let local = ty.shape.iter().zip(dims).map(|(&size, factors)| {
        let axes: Vec<_> = factors.iter().flat_map(|f| &strategy.factors[usize::from(f.0)]).copied().collect();
        mesh.block(size, &axes) as f64
    });
    local.product::<f64>() * ty.dtype.bytes() as f64
}

/// Ops that lowering makes one kernel with their neighbours.
fn is_fused(op: &Op) -> bool {
    is_pointwise(op) || matches!(op, Op::BroadcastInDim(_) | Op::Reduce(_))
}

/// Whether the result stands in memory: somebody outside of its kernel reads it.
fn is_written(forward: &Forward, id: NodeId) -> bool {
    let node = &forward.graph[id];
    let pointwise = is_fused(&node.op) && !matches!(node.op, Op::Reduce(_));
    let outside = |&reader: &NodeId| !is_fused(&forward.graph[reader].op);
    !pointwise || forward.is_output(id) || forward.readers[id.0 as usize].iter().any(outside)
}

/// The part of reading `operand` that `reader` pays for.
fn reading(forward: &Forward, reader: NodeId, operand: NodeId) -> f64 {
    if forward.kind(operand) == Kind::Source || !is_written(forward, operand) {
        return 0.0;
    }
    if !is_fused(&forward.graph[reader].op) {
        return 1.0;
    }
    let fused = forward.readers[operand.0 as usize].iter().filter(|&&r| is_fused(&forward.graph[r].op)).count();
    1.0 / fused as f64
}
