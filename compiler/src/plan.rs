//! What the planner decides and `place` applies: the mesh, and a stage and strategy for each forward node.

use crate::graph::NodeId;
use dcc_program::{AxisId, AxisList, Mesh};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Everything that `place`, `pipeline` and `lower` follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Axes `mb, pp, dp, tp` (each present even at size 1; split axes in the place of their parent).
    pub mesh: Mesh,
    /// Axes of every batch dim: `mb` first, then `dp`.
    pub batch: AxisList,
    /// By forward node of the training graph; a node without one follows its operands. The strategy of a `Param` gives its
    /// used type. Gradient nodes inherit through `Graph::grad_of`.
    pub strategies: BTreeMap<NodeId, Strategy>,
    /// Stage of each forward node that depends on a batched input; the others are cloned where they are read.
    pub stages: BTreeMap<NodeId, u32>,
    pub schedule: Schedule,
}

/// How one op is computed on the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Strategy {
    /// Axes of each factor of the op's rule, by `FactorId`, major first. An axis stands on at most one factor.
    pub factors: Vec<AxisList>,
    /// Axes over which a pending operand passes through where the op is linear; other pendings are resolved before.
    pub keep: SmallVec<[AxisId; 2]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    GPipe,
    #[default]
    OneFOneB,
}

impl Plan {
    pub fn microbatches(&self) -> u32 {
        self.mesh.size_of("mb")
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> u32 {
        self.mesh.size_of("pp")
    }
}

impl Strategy {
    pub fn whole(factors: usize) -> Strategy {
        Strategy { factors: vec![AxisList::new(); factors], keep: SmallVec::new() }
    }
}
