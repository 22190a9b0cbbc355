//! The mesh: named axes of ranks, plus `mb`, the axis in time that microbatches run along.
//!
//! Axes stand in the order `mb, pp, rep, dp, cp, ep, tp` (split axes such as `tp0, tp1` in the place of their parent). A rank
//! is the row-major index of its coordinates without `mb`.

use smallvec::SmallVec;

/// Index of an axis in `Mesh::axes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct AxisId(pub u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxis {
    pub name: String,
    pub size: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    pub axes: Vec<MeshAxis>,
}

/// One coordinate per mesh axis, `mb` included.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates(pub SmallVec<[u32; 8]>);

/// The part of a dim that one shard covers, in global indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Global index of the first element.
    pub offset: u64,
    /// Elements that exist, at most `block`; the rest of the block is unspecified.
    pub valid: u64,
    /// Elements allotted: ceil(d / n) axis by axis, equal on all ranks.
    pub block: u64,
}

impl Mesh {
    /// A mesh of the given `(name, size)` axes, in order.
    pub fn new(axes: &[(&str, u32)]) -> Mesh {
        Mesh { axes: axes.iter().map(|&(name, size)| MeshAxis { name: name.to_owned(), size }).collect() }
    }

    pub fn axis(&self, name: &str) -> Option<AxisId> {
        self.axes.iter().position(|a| a.name == name).map(|i| AxisId(i as u8))
    }

    pub fn size(&self, axis: AxisId) -> u32 {
        self.axes[axis.0 as usize].size
    }

    pub fn name(&self, axis: AxisId) -> &str {
        &self.axes[axis.0 as usize].name
    }

    /// Size of the axis of that name, 1 where the mesh has none.
    pub fn size_of(&self, name: &str) -> u32 {
        self.axis(name).map_or(1, |a| self.size(a))
    }

    /// The axis in time; `None` where the mesh has no microbatches.
    pub fn microbatch_axis(&self) -> Option<AxisId> {
        self.axis("mb")
    }

    pub fn is_microbatch(&self, axis: AxisId) -> bool {
        self.name(axis) == "mb"
    }

    pub fn ids(&self) -> impl Iterator<Item = AxisId> + use<> {
        (0..self.axes.len() as u8).map(AxisId)
    }

    /// Axes in space: all but `mb`.
    pub fn space(&self) -> impl Iterator<Item = AxisId> + '_ {
        self.ids().filter(|&a| !self.is_microbatch(a))
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.space().map(|a| self.size(a)).product()
    }

    /// Coordinates of `rank`, with `mb` = 0.
    pub fn coordinates(&self, rank: u32) -> Coordinates {
        let mut rest = rank;
        let mut out: SmallVec<[u32; 8]> = smallvec::smallvec![0; self.axes.len()];
        for axis in (0..self.axes.len()).rev() {
            if self.axes[axis].name != "mb" {
                out[axis] = rest % self.axes[axis].size;
                rest /= self.axes[axis].size;
            }
        }
        Coordinates(out)
    }

    /// The rank at `coordinates`; `mb` is ignored.
    pub fn rank(&self, coordinates: &Coordinates) -> u32 {
        self.space().fold(0, |r, a| r * self.size(a) + coordinates.get(a))
    }

    /// Ranks that differ from `rank` only along `axes`, in row-major order of `axes` as given.
    pub fn group(&self, rank: u32, axes: &[AxisId]) -> Vec<u32> {
        let base = self.coordinates(rank);
        let total: u32 = axes.iter().map(|&a| self.size(a)).product();
        (0..total)
            .map(|index| {
                let mut rest = index;
                let mut at = base.clone();
                for &axis in axes.iter().rev() {
                    at.0[axis.0 as usize] = rest % self.size(axis);
                    rest /= self.size(axis);
                }
                self.rank(&at)
            })
            .collect()
    }

    /// Shards that `axes` cut something into over the ranks: `mb` cuts none.
    pub fn shards<'a>(&self, axes: impl IntoIterator<Item = &'a AxisId>) -> u64 {
        axes.into_iter().filter(|&&a| !self.is_microbatch(a)).map(|&a| u64::from(self.size(a))).product()
    }

    /// Which of the shards that `axes` cut, major first, the rank at `at` holds.
    pub fn shard<'a>(&self, axes: impl IntoIterator<Item = &'a AxisId>, at: &Coordinates) -> u64 {
        let axes = axes.into_iter().filter(|&&a| !self.is_microbatch(a));
        axes.fold(0, |index, &a| index * u64::from(self.size(a)) + u64::from(at.get(a)))
    }

    /// Elements per shard of a dim of `size` split along `axes`, major first: ceil axis by axis.
    pub fn block(&self, size: u64, axes: &[AxisId]) -> u64 {
        axes.iter().fold(size, |d, &a| d.div_ceil(u64::from(self.size(a)).max(1)))
    }

    /// The part of a dim of `size`, split along `axes`, that the rank at `at` holds.
    pub fn extent(&self, size: u64, axes: &[AxisId], at: &Coordinates) -> Extent {
        let (mut low, mut high, mut block) = (0, size, size);
        for &axis in axes {
            block = block.div_ceil(u64::from(self.size(axis)).max(1));
            low += u64::from(at.get(axis)) * block;
            high = high.min(low + block);
        }
        Extent { offset: low, valid: high.saturating_sub(low), block }
    }
}

impl Coordinates {
    pub fn get(&self, axis: AxisId) -> u32 {
        self.0[axis.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_row_major_without_mb() {
        let mesh = Mesh::new(&[("mb", 4), ("pp", 2), ("dp", 1), ("tp", 3)]);
        assert_eq!(mesh.world(), 6);
        for rank in 0..6 {
            assert_eq!(mesh.rank(&mesh.coordinates(rank)), rank);
        }
        assert_eq!(mesh.group(4, &[AxisId(3)]), [3, 4, 5]);
        assert_eq!(mesh.group(4, &[AxisId(1)]), [1, 4]);
    }

    #[test]
    fn uneven_shards_have_a_short_tail() {
        let mesh = Mesh::new(&[("tp", 4)]);
        let extents: Vec<_> = (0..4).map(|r| mesh.extent(10, &[AxisId(0)], &mesh.coordinates(r))).collect();
        assert_eq!(extents.iter().map(|e| (e.offset, e.valid)).collect::<Vec<_>>(), [(0, 3), (3, 3), (6, 3), (9, 1)]);
        assert!(extents.iter().all(|e| e.block == 3));
    }
}
