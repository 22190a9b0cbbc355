//! Long chains: what a value reads is placed before it, the farthest first, so that placing does not call itself for each node between.

use super::Placer;
use crate::error::Result;
use crate::graph::{NodeId, Phase};
use crate::ops::{GradSum, Op};
use crate::optimizer::NORM_TERM;

/// Calls within each other up to which sources are left to those who say how they want them.
const DEEP: usize = 32;

/// For whom a value is placed.
#[derive(Clone, Copy)]
struct Reader {
    stage: u32,
    phase: Phase,
    reader: NodeId,
}

impl Placer<'_> {
    /// Places the operands of `id` on `stage`, in the order in which `computed` asks for them.
    pub(super) fn place_operands(&mut self, id: NodeId, stage: u32, phase: Phase) -> Result<()> {
        let mut open = Vec::new();
        self.open_operands(id, Reader { stage, phase, reader: self.reader }, &mut open);
        while let Some((operand, by, is_open)) = open.pop() {
            match self.unplaced(operand, by.stage, by.phase) {
                Some((id, stage, phase)) if !is_open => {
                    open.push((operand, by, true));
                    let reader = if self.is_reader(id) { id } else { by.reader };
                    self.open_operands(id, Reader { stage, phase, reader }, &mut open);
                }
                _ if self.is_source(operand) => {}
                _ => {
                    (self.here, self.reader) = (by.stage, by.reader);
                    self.value(operand, by.stage, by.phase, None)?;
                }
            }
        }
        Ok(())
    }

    fn open_operands(&self, id: NodeId, by: Reader, open: &mut Vec<(NodeId, Reader, bool)>) {
        let operands = self.contributions(id, by.stage);
        let wanted = operands.iter().rev().filter(|&&operand| self.nested > DEEP || !self.is_source(operand));
        open.extend(wanted.map(|&operand| (operand, by, false)));
    }

    /// What `value` computes for `id` if it is not there yet, on which stage and in which phase.
    fn unplaced(&self, mut id: NodeId, stage: u32, mut phase: Phase) -> Option<(NodeId, u32, Phase)> {
        loop {
            let node = &self.graph[id];
            match &node.op {
                Op::StopGradient(_) => id = node.operands[0],
                Op::GradSum(GradSum { of: NORM_TERM }) => (id, phase) = (node.operands[0], Phase::Update),
                Op::Input(_) | Op::Param(_) | Op::Scalar(_) => return None,
                Op::Cast(_) if phase != Phase::Update && self.is_gathered(id) => return None,
                // These begin anew.
                Op::GradSum(_) if phase == Phase::Update && (node.phase == Phase::Backward || self.is_scalar_sum(id)) => {
                    return None;
                }
                _ => break,
            }
        }
        if self.is_source(id) {
            return Some(self.made_elsewhere(id, stage).map_or((id, stage, phase), |home| (id, home, self.graph[id].phase)));
        }
        let (home, made) = self.made_at(id, stage, phase);
        (!self.built.contains_key(&(id, home, made))).then_some((id, home, made))
    }
}
