//! `--param-dtype bf16`: parameters that contractions alone read are kept as the half floats that these read, without an f32 master.
//!
//! An update computes from the half floats, widened, as it would from the master, and rounds its result stochastically: to nearest, what
//! is less than half of a last digit would be lost, step after step (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al. 2020, arXiv
//! 2010.06192). The random numbers are Philox's, of the run's seed, the step, the parameter and the element's global index, as dropout's:
//! every mesh rounds alike.
//!
//! Before: a graph of mixed precision, whose parameters are f32 and are read as casts, gradients and updates in f32. After: the same
//! with those parameters in the half type, where the casts were.

use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Operands, Phase};
use crate::ops::{Cast, Op, Param, Scalar, Uniform};
use crate::train::updates;
use dcc_program::DType;
use dcc_program::kernel::BinaryOp;
use dcc_program::program::{ParamKind, Piece, ScalarKind};
use std::collections::BTreeSet;

/// The parameters that are kept in half floats.
#[derive(Clone, Debug)]
pub struct Stored {
    half: DType,
    /// By name, and piece where the tensor is in several.
    names: BTreeSet<(String, Option<[u64; 3]>)>,
}

/// `Uniform::id` of the first parameter's numbers; the others count down. Those of a model's own random operators count up from zero.
const FIRST_ID: u32 = u32::MAX;

impl Stored {
    /// Of a training graph, the f32 weights that are read before the update, and only as casts to `half`.
    pub fn of(graph: &Graph, half: DType) -> Stored {
        let live = graph.live();
        let (mut narrowed, mut whole) = (BTreeSet::new(), BTreeSet::new());
        for id in graph.ids().filter(|id| live[id.0 as usize] && graph[*id].phase != Phase::Update) {
            let node = &graph[id];
            let narrows = matches!(node.op, Op::Cast(Cast { dtype }) if dtype == half);
            if narrows { &mut narrowed } else { &mut whole }.extend(node.operands.iter().copied());
        }
        whole.extend(graph.outputs.iter().map(|(_, id)| *id));
        let kept = narrowed.difference(&whole).filter_map(|&id| weight(graph, id));
        Stored { half, names: kept.map(key).collect() }
    }

    /// `graph`, of training or evaluation, with these parameters in half floats.
    pub fn apply(&self, graph: &Graph) -> Result<Graph> {
        let is_kept = |id: NodeId| weight(graph, id).is_some_and(|param| self.names.contains(&key(param)));
        let mut out = graph.map(|out, _, node, operands| {
            if let Op::Param(param) = &node.op {
                let kept = param.kind == ParamKind::Weight && self.names.contains(&key(param));
                let dtype = if kept { self.half } else { param.dtype };
                return out.add(Param { dtype, ..param.clone() }, &[]);
            }
            if matches!(node.op, Op::Cast(Cast { dtype }) if dtype == self.half) && is_kept(node.operands[0]) {
                return Ok(operands[0]);
            }
            let wide = node.operands.iter().zip(operands).map(|(&old, &new)| match is_kept(old) {
                true => widened(out, new, node.phase),
                false => Ok(new),
            });
            let wide = wide.collect::<Result<Operands>>()?;
            Ok(out.add_typed(node.op.clone(), &wide, node.ty.clone()))
        })?;
        self.round(&mut out)?;
        Ok(out)
    }

    /// What updates give back, rounded.
    fn round(&self, graph: &mut Graph) -> Result<()> {
        let mut next = FIRST_ID;
        for update in updates(graph) {
            if graph.ty(update.param).dtype != self.half || graph.ty(update.new).dtype == self.half {
                continue;
            }
            let rounded = self.rounded(graph, update.param, update.new, next)?;
            next -= 1;
            graph.outputs.iter_mut().filter(|output| output.1 == update.new).for_each(|output| output.1 = rounded);
        }
        Ok(())
    }

    fn rounded(&self, graph: &mut Graph, param: NodeId, new: NodeId, id: u32) -> Result<NodeId> {
        let before = graph.cursor();
        graph.set_phase(Phase::Update);
        let origin = graph.origin(new).to_owned();
        graph.set_origin(&origin);
        let [seed, step] = [ScalarKind::Seed, ScalarKind::Step].map(|kind| graph.add(Scalar { kind, dtype: DType::I64 }, &[]));
        let (seed, step) = (seed?, step?);
        graph.set_grad_of(Some(GradOf::Value(param)));
        let shape = graph.ty(param).shape.clone();
        let random = graph.add(Uniform { id, shape }, &[seed, step])?;
        let rounded = graph.binary(BinaryOp::RoundStochastic, new, random)?;
        let half = graph.cast(rounded, self.half)?;
        graph.set_cursor(before);
        Ok(half)
    }
}

/// `param`, in f32 for a reader in `phase`.
fn widened(graph: &mut Graph, param: NodeId, phase: Phase) -> Result<NodeId> {
    let before = graph.cursor();
    graph.set_phase(phase);
    if phase == Phase::Update {
        graph.set_grad_of(Some(GradOf::Value(param)));
    }
    let wide = graph.cast(param, DType::F32)?;
    graph.set_cursor(before);
    Ok(wide)
}

fn weight(graph: &Graph, id: NodeId) -> Option<&Param> {
    match &graph[id].op {
        Op::Param(param) if param.kind == ParamKind::Weight && param.dtype == DType::F32 => Some(param),
        _ => None,
    }
}

fn key(param: &Param) -> (String, Option<[u64; 3]>) {
    let piece = param.piece.map(|Piece { dim, start, end }| [u64::from(dim), start, end]);
    (param.name.clone(), piece)
}
