//! Redistribution: the collectives that turn one sharding of a value into another.

use dcc_program::{AxisId, AxisList, Mesh, Reduce, Sharding, TensorType};
use smallvec::SmallVec;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Move {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
}

/// One collective of a redistribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub kind: Move,
    pub axes: SmallVec<[AxisId; 2]>,
    /// Bytes on one rank: of the operand, for all_gather of the result.
    pub bytes: u64,
}

impl Move {
    /// Resolves a pending reduction.
    pub fn is_reduction(self) -> bool {
        matches!(self, Move::AllReduce | Move::ReduceScatter)
    }

    pub fn name(self) -> &'static str {
        match self {
            Move::AllReduce => "all_reduce",
            Move::ReduceScatter => "reduce_scatter",
            Move::AllGather => "all_gather",
            Move::AllToAll => "all_to_all",
        }
    }
}

/// The collectives from `ty` to `to`: pending → sharded where the wanted dims allow, the other pendings in one all_reduce per
/// reduction, dim → dim, sharded → whole. Slices, and whole → pending, are local. `mb`, and axes of size 1, cost nothing.
pub fn steps(ty: &TensorType, to: &Sharding, mesh: &Mesh) -> Vec<Step> {
    let mut route = Route { ty: ty.clone(), to, mesh, steps: Vec::new() };
    route.scatter();
    route.reduce();
    route.gather();
    route.steps
}

struct Route<'a> {
    ty: TensorType,
    to: &'a Sharding,
    mesh: &'a Mesh,
    steps: Vec<Step>,
}

impl Route<'_> {
    fn push(&mut self, kind: Move, axes: &[AxisId], bytes: u64) {
        let axes: SmallVec<[AxisId; 2]> =
            axes.iter().copied().filter(|&a| !self.mesh.is_microbatch(a) && self.mesh.size(a) > 1).collect();
        if !axes.is_empty() {
            self.steps.push(Step { kind, axes, bytes });
        }
    }

    fn dropped(&self) -> Vec<(AxisId, Reduce)> {
        self.ty.sharding.pending.iter().copied().filter(|p| !self.to.pending.contains(p)).collect()
    }

    fn scatter(&mut self) {
        while let Some((axis, dim)) = self.next_scatter() {
            let bytes = self.ty.local_bytes(self.mesh);
            self.push(Move::ReduceScatter, &[axis], bytes);
            self.ty.sharding.pending.retain(|&mut (a, _)| a != axis);
            self.ty.sharding.dims[dim].push(axis);
        }
    }

    fn next_scatter(&self) -> Option<(AxisId, usize)> {
        let sums = self.dropped().into_iter().filter(|&(_, r)| r == Reduce::Sum);
        sums.filter_map(|(axis, _)| self.dim_that_takes(axis).map(|d| (axis, d))).next()
    }

    /// The dim that wants `axis` next.
    fn dim_that_takes(&self, axis: AxisId) -> Option<usize> {
        let next = |have: &AxisList, want: &AxisList| want.starts_with(have) && want.get(have.len()) == Some(&axis);
        (0..self.to.dims.len()).find(|&d| next(&self.ty.sharding.dims[d], &self.to.dims[d]))
    }

    fn reduce(&mut self) {
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod] {
            let axes: Vec<AxisId> = self.dropped().iter().filter(|p| p.1 == reduce).map(|p| p.0).collect();
            if !axes.is_empty() {
                let bytes = self.ty.local_bytes(self.mesh);
                self.push(Move::AllReduce, &axes, bytes);
                self.ty.sharding.pending.retain(|&mut (a, r)| r != reduce || !axes.contains(&a));
            }
        }
    }

    fn gather(&mut self) {
        for dim in 0..self.to.dims.len() {
            while !self.to.dims[dim].starts_with(&self.ty.sharding.dims[dim]) {
                let before = self.ty.local_bytes(self.mesh);
                let axis = self.ty.sharding.dims[dim].pop().expect("the empty list starts every list");
                match self.dim_that_takes(axis) {
                    Some(other) => {
                        self.push(Move::AllToAll, &[axis], before);
                        self.ty.sharding.dims[other].push(axis);
                    }
                    None => {
                        let after = self.ty.local_bytes(self.mesh);
                        self.push(Move::AllGather, &[axis], after);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: &str, to: &str) -> String {
        let mesh = Mesh::new(&[("mb", 2), ("dp", 2), ("tp0", 4), ("tp1", 2)]);
        let ty = |text| TensorType::parse(text, &mesh).unwrap();
        let text = |s: &Step| {
            let axes: Vec<&str> = s.axes.iter().map(|&a| mesh.name(a)).collect();
            format!("{} {} {}", s.kind.name(), axes.join(" "), s.bytes)
        };
        let steps: Vec<String> = steps(&ty(from), &ty(to).sharding, &mesh).iter().map(text).collect();
        steps.join("; ")
    }

    #[test]
    fn every_pair_of_shardings_has_a_route() {
        assert_eq!(check("f32[64, 8]", "f32[64/tp0, 8]+tp1"), "");
        assert_eq!(check("f32[64, 8]+tp0+tp1", "f32[64, 8]"), "all_reduce tp0 tp1 2048");
        assert_eq!(check("f32[64, 8]+max:tp0", "f32[64/tp0, 8]"), "all_reduce tp0 2048");
        assert_eq!(check("f32[64, 8]+tp0", "f32[64/tp0, 8]"), "reduce_scatter tp0 2048");
        assert_eq!(check("f32[64, 8/tp0/tp1]", "f32[64, 8]"), "all_gather tp1 512; all_gather tp0 2048");
        assert_eq!(check("f32[64, 8/tp0]", "f32[64/tp0, 8]"), "all_to_all tp0 512");
        assert_eq!(check("f32[64/mb/dp, 8/tp0]", "f32[64/mb/dp, 8]"), "all_gather tp0 512");
        assert_eq!(check("f32[64/mb, 8]+tp1", "f32[64/mb/dp/tp1, 8]"), "all_reduce tp1 1024");
    }
}
