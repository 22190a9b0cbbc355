//! Pending results through operations: a partial sum may pass only where the operation is linear in it.

use super::{Checked, Fault, refuse};
use crate::mesh::{AxisId, Mesh};
use crate::types::{AxisList, Reduce, TensorType};

pub(super) type Pending = Vec<(AxisId, Reduce)>;

/// Axes as a set; a mesh has at most 32.
pub(super) fn axis_set(axes: impl IntoIterator<Item = AxisId>) -> u32 {
    axes.into_iter().fold(0, |set, a| set | 1 << a.0)
}

pub(super) fn pending_text(pending: &[(AxisId, Reduce)], mesh: &Mesh) -> String {
    let one = |&(a, r): &(AxisId, Reduce)| match r {
        Reduce::Sum => format!("+{}", mesh.name(a)),
        r => format!("+{}:{}", r.name(), mesh.name(a)),
    };
    pending.iter().map(one).collect()
}

/// What the operands' pending sums leave pending in a result. `sets`: operands in which the operation is jointly linear.
/// `factors`: the axes of its factors.
pub(super) fn passed(operands: &[&TensorType], sets: &[&[usize]], factors: &[AxisList], mesh: &Mesh) -> Checked<Pending> {
    let used = axis_set(factors.iter().flatten().copied());
    let mut out = Pending::new();
    for &(axis, reduce) in operands.iter().flat_map(|t| &t.sharding.pending) {
        let is_pending = |t: &&TensorType| t.sharding.pending.contains(&(axis, reduce));
        let have: Vec<usize> = (0..operands.len()).filter(|&i| is_pending(&operands[i])).collect();
        let text = pending_text(&[(axis, reduce)], mesh);
        if reduce != Reduce::Sum || !sets.contains(&&have[..]) {
            return refuse(Fault::Pending, format!("operands {have:?} are partial results ({text}), read as whole"));
        }
        if used & axis_set([axis]) != 0 {
            let name = mesh.name(axis);
            return refuse(Fault::Pending, format!("a partial result ({text}) meets values sharded over {name}"));
        }
        out.push((axis, reduce));
    }
    out.sort();
    out.dedup();
    Ok(out)
}

/// `pending` and a reduction over `axes`.
pub(super) fn reduced(mut pending: Pending, axes: impl IntoIterator<Item = AxisId>, reduce: Reduce) -> Pending {
    pending.extend(axes.into_iter().map(|a| (a, reduce)));
    pending.sort();
    pending.dedup();
    pending
}
