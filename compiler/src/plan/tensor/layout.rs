//! How a value lies over the tensor axes, as the planner counts it: one place per axis.

use dcc_program::{AxisId, Reduce, Sharding};
use smallvec::SmallVec;

/// The axes that choices place, major first: `cp` and `ep` where there are any; `tp`, or `tp0 tp1` where heads need the split.
pub(super) type TensorAxes = SmallVec<[AxisId; 2]>;

/// At most this many such axes.
pub(super) const MAX_AXES: usize = 4;

/// Where each axis lies in a value: nowhere (whole), on a dim, or pending. On one dim the major axis stands first, but for one that is
/// `Inner`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Layout([At; MAX_AXES]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum At {
    #[default]
    Whole,
    Dim(u8),
    /// On a dim, minor to axes that come after it.
    Inner(u8),
    Pending(Reduce),
}

impl Layout {
    pub fn set(&mut self, axis: usize, at: At) {
        self.0[axis] = at;
    }

    pub fn is_pending_sum(self, axis: usize) -> bool {
        self.0[axis] == At::Pending(Reduce::Sum)
    }

    /// The same dims, nothing pending.
    pub fn resolved(self) -> Layout {
        Layout(self.0.map(|at| if matches!(at, At::Pending(_)) { At::Whole } else { at }))
    }

    /// `base` and these axes: after its own axes on a dim.
    pub fn over(self, base: &Sharding, axes: &TensorAxes) -> Sharding {
        let mut sharding = base.clone();
        for (i, &axis) in axes.iter().enumerate() {
            match self.0[i] {
                At::Whole => {}
                At::Dim(dim) => sharding.dims[usize::from(dim)].push(axis),
                At::Inner(_) => {}
                At::Pending(reduce) => sharding.pending.push((axis, reduce)),
            }
        }
        for (i, &axis) in axes.iter().enumerate() {
            if let At::Inner(dim) = self.0[i] {
                sharding.dims[usize::from(dim)].push(axis);
            }
        }
        sharding.pending.sort_unstable();
        sharding
    }
}
