//! Dynamic loss scaling, as `torch.amp.GradScaler`: gradients of f16 are those of a multiple of the loss, lest small ones vanish.
//!
//! The scale, and what it is decided by, is state like an optimizer's, but of no parameter. States begin at zero, so they count: the
//! scale is `initial · growth^growths · backoff^backoffs`. A gradient that is not finite makes the global norm so, which all ranks
//! agree on: then the step is skipped, by selecting old values over new ones.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::{Const, Param, Scalar};
use crate::optimizer::Update;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::{ParamKind, ScalarKind};
use dcc_program::{DType, Shape};

/// The name under which the states are kept.
const NAME: &str = "loss_scale";

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub initial: f64,
    /// What it is multiplied by after `interval` steps none of which was skipped.
    pub growth: f64,
    /// What it is multiplied by after a step that was.
    pub backoff: f64,
    pub interval: u32,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { initial: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000 }
    }
}

impl LossScale {
    /// Errors: a number out of range.
    pub fn check(&self) -> Result<()> {
        let LossScale { initial, growth, backoff, interval } = *self;
        let wrong = |what: String| Err(Error::usage(what));
        if !(initial > 0.0 && initial.is_finite() && (initial as f32).is_normal()) {
            return wrong(format!("--loss-scale {initial} is no positive number that f32 holds"));
        }
        if !(growth >= 1.0 && (growth as f32).is_finite()) {
            return wrong(format!("--loss-scale-growth {growth} is no number from 1 on that f32 holds"));
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return wrong(format!("--loss-scale-backoff {backoff} is not between 0 and 1"));
        }
        if interval == 0 {
            return wrong("--loss-scale-interval 0: the scale grows after one step or more".to_owned());
        }
        Ok(())
    }
}

/// The scale of a step, in a training graph.
#[derive(Clone, Copy, Debug)]
pub struct Scaler {
    options: LossScale,
    growths: NodeId,
    backoffs: NodeId,
    /// Steps since the scale last changed.
    clean: NodeId,
    /// f32, rank 0.
    pub scale: NodeId,
}

impl Scaler {
    /// Adds the states and the scale, in phase forward.
    pub fn new(graph: &mut Graph, options: LossScale) -> Result<Scaler> {
        let before = graph.cursor();
        graph.set_origin("loss scale");
        let [growths, backoffs, clean] = ["growths", "backoffs", "clean"].map(|kind| state(graph, kind));
        let (growths, backoffs, clean) = (growths?, backoffs?, clean?);
        let grown = power(graph, options.growth, growths)?;
        let backed = power(graph, options.backoff, backoffs)?;
        let both = graph.binary(BinaryOp::Mul, grown, backed)?;
        let scale = graph.scale(both, options.initial)?;
        let scale = graph.cast(scale, DType::F32)?;
        graph.set_cursor(before);
        Ok(Scaler { options, growths, backoffs, clean, scale })
    }

    /// What gradients are multiplied by to undo the scale: f64, rank 0.
    pub fn inverse(&self, graph: &mut Graph) -> Result<NodeId> {
        let scale = graph.cast(self.scale, DType::F64)?;
        let one = graph.add(Const::float(DType::F64, 1.0), &[])?;
        graph.binary(BinaryOp::Div, one, scale)
    }

    /// Whether the norm of the gradients is not finite.
    pub fn overflows(&self, graph: &mut Graph, norm: NodeId) -> Result<NodeId> {
        let (nan, infinite) = (graph.unary(UnaryOp::IsNan, norm)?, graph.unary(UnaryOp::IsInf, norm)?);
        graph.binary(BinaryOp::Or, nan, infinite)
    }

    /// The number of this step among those that are not skipped, from 1: f64, rank 0. Each that was is a backoff.
    pub fn step(&self, graph: &mut Graph) -> Result<NodeId> {
        let step = graph.add(Scalar { kind: ScalarKind::Step, dtype: DType::I64 }, &[])?;
        let step = graph.cast(step, DType::F64)?;
        graph.binary(BinaryOp::Sub, step, self.backoffs)
    }

    /// The new values of the states, in phase update.
    pub fn updates(&self, graph: &mut Graph, overflow: NodeId) -> Result<Vec<Update>> {
        let before = graph.cursor();
        graph.set_phase(Phase::Update);
        graph.set_grad_of(None);
        graph.set_origin("loss scale");
        let zero = graph.add(Const::float(DType::F64, 0.0), &[])?;
        let clean = graph.binary_scalar(BinaryOp::Add, self.clean, 1.0)?;
        let due = graph.splat_like(f64::from(self.options.interval), clean)?;
        let grows = graph.compare(CompareOp::Ge, clean, due)?;
        let grown = graph.binary_scalar(BinaryOp::Add, self.growths, 1.0)?;
        // Not beyond what f32 holds, as GradScaler: gradients that are all zero never overflow.
        let (scale, most) = (graph.cast(self.scale, DType::F64)?, f64::from(f32::MAX) / self.options.growth);
        let most = graph.splat_like(most, scale)?;
        let has_room = graph.compare(CompareOp::Le, scale, most)?;
        let has_grown = graph.binary(BinaryOp::And, grows, has_room)?;
        let growths = graph.select(has_grown, grown, self.growths)?;
        let growths = graph.select(overflow, self.growths, growths)?;
        let clean = graph.select(grows, zero, clean)?;
        let clean = graph.select(overflow, zero, clean)?;
        let backed = graph.binary_scalar(BinaryOp::Add, self.backoffs, 1.0)?;
        let backoffs = graph.select(overflow, backed, self.backoffs)?;
        graph.set_cursor(before);
        let pairs = [(self.growths, growths), (self.backoffs, backoffs), (self.clean, clean)];
        Ok(pairs.map(|(param, new)| Update { param, new }).to_vec())
    }
}

fn state(graph: &mut Graph, kind: &str) -> Result<NodeId> {
    let kind = ParamKind::State(kind.to_owned());
    graph.add(Param { name: NAME.to_owned(), kind, piece: None, dtype: DType::F64, shape: Shape::new() }, &[])
}

/// `base^exponent`.
fn power(graph: &mut Graph, base: f64, exponent: NodeId) -> Result<NodeId> {
    let base = graph.add(Const::float(DType::F64, base), &[])?;
    graph.binary(BinaryOp::Pow, base, exponent)
}
