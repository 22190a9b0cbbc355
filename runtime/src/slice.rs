//! Boxes of row-major tensors: which contiguous runs of a global tensor a rank's local buffer holds, and where.

use dcc_program::program::Piece;
use dcc_program::{Coordinates, Mesh, Shape, TensorType};

/// A box of a global tensor, held in a local buffer that may be larger (blocks of uneven shards have unspecified tails).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Shape of the whole tensor.
    pub global: Vec<u64>,
    /// Global index of the box's first element.
    pub start: Vec<u64>,
    /// Elements of the box along each dim.
    pub extent: Vec<u64>,
    /// Shape of the buffer; at least `extent`.
    pub local: Vec<u64>,
}

/// Elements that lie side by side in both tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Row-major indices of the first element.
    pub global: u64,
    pub local: u64,
    pub len: u64,
}

impl Slice {
    /// A whole tensor in a buffer of its own shape.
    pub fn whole(shape: &[u64]) -> Slice {
        Slice { global: shape.to_vec(), start: vec![0; shape.len()], extent: shape.to_vec(), local: shape.to_vec() }
    }

    /// What the rank at `at` holds of a value of type `ty`.
    pub fn of(ty: &TensorType, mesh: &Mesh, at: &Coordinates) -> Slice {
        let extents = ty.extents(mesh, at);
        Slice {
            global: ty.shape.to_vec(),
            start: extents.iter().map(|extent| extent.offset).collect(),
            extent: extents.iter().map(|extent| extent.valid).collect(),
            local: extents.iter().map(|extent| extent.block).collect(),
        }
    }

    /// Becomes a copy of `other` in the memory it has.
    pub fn copy_from(&mut self, other: &Slice) {
        let Slice { global, start, extent, local } = other;
        self.global.clone_from(global);
        self.start.clone_from(start);
        self.extent.clone_from(extent);
        self.local.clone_from(local);
    }

    /// The same elements as part of the tensor that this one is a piece of: `piece` along its dim, `whole` elements there.
    pub fn as_piece(mut self, piece: &Piece, whole: u64) -> Slice {
        let dim = usize::from(piece.dim);
        self.global[dim] = whole;
        self.start[dim] += piece.start;
        self
    }

    pub fn elements(&self) -> u64 {
        self.extent.iter().product()
    }

    pub fn local_elements(&self) -> u64 {
        self.local.iter().product()
    }

    /// Calls `each` for every run, in row-major order.
    pub fn for_each_run(&self, mut each: impl FnMut(Run)) {
        if self.elements() == 0 {
            return;
        }
        let rank = self.extent.len();
        let Some(last) = rank.checked_sub(1) else {
            return each(Run { global: 0, local: 0, len: 1 });
        };
        // Trailing dims that are whole on both sides join one run.
        let mut split = last;
        while split > 0 && self.extent[split] == self.global[split] && self.extent[split] == self.local[split] {
            split -= 1;
        }
        let len = self.extent[split..].iter().product();
        let mut index = Shape::from_elem(0, split);
        loop {
            each(Run {
                global: self.offset(&self.global, &self.start, &index),
                local: self.offset(&self.local, &[], &index),
                len,
            });
            let Some(dim) = (0..split).rev().find(|&dim| index[dim] + 1 < self.extent[dim]) else { return };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }

    /// Row-major index, in a tensor of `shape`, of the element at `index` (zeros for dims that it does not have) plus `start`.
    fn offset(&self, shape: &[u64], start: &[u64], index: &[u64]) -> u64 {
        let at = |dim: usize| index.get(dim).unwrap_or(&0) + start.get(dim).unwrap_or(&0);
        (0..shape.len()).fold(0, |offset, dim| offset * shape[dim] + at(dim))
    }

    /// Global start and extent of what both boxes of one tensor hold; `None` if nothing.
    pub fn intersect(&self, other: &Slice) -> Option<(Vec<u64>, Vec<u64>)> {
        let dims = 0..self.start.len();
        let start: Vec<u64> = dims.clone().map(|d| self.start[d].max(other.start[d])).collect();
        let end = dims.map(|d| (self.start[d] + self.extent[d]).min(other.start[d] + other.extent[d]));
        let extent: Option<Vec<u64>> = end.zip(&start).map(|(end, &start)| end.checked_sub(start).filter(|&n| n > 0)).collect();
        Some((start, extent?))
    }
}

/// Calls `each` with `(index in from's buffer, index in into's buffer, elements)` for every run that two slices of one tensor
/// have in common; the elements in all.
pub fn for_each_common(from: &Slice, into: &Slice, mut each: impl FnMut(u64, u64, u64)) -> u64 {
    let Some((start, extent)) = from.intersect(into) else { return 0 };
    // The common box as seen from each buffer: a box of a tensor of the buffer's shape.
    let runs = |slice: &Slice| {
        let within = start.iter().zip(&slice.start).map(|(a, b)| a - b).collect();
        let boxed = Slice { global: slice.local.clone(), start: within, extent: extent.clone(), local: extent.clone() };
        let mut runs = Vec::new();
        boxed.for_each_run(|run| runs.push(run));
        runs
    };
    let (reads, writes) = (runs(from), runs(into));
    let mut read = reads.iter().flat_map(|run| pieces(*run, &writes)).peekable();
    for write in &writes {
        while let Some(piece) = read.next_if(|piece: &Run| piece.local < write.local + write.len) {
            each(piece.global, write.global + piece.local - write.local, piece.len);
        }
    }
    extent.iter().product()
}

/// `run` cut where one of `cuts` (ascending `local`) begins.
fn pieces(run: Run, cuts: &[Run]) -> Vec<Run> {
    let first = cuts.partition_point(|cut| cut.local <= run.local);
    let inner = cuts[first..].iter().map(|cut| cut.local).take_while(|&at| at < run.local + run.len);
    let mut out = Vec::new();
    let mut start = run.local;
    for end in inner.chain([run.local + run.len]) {
        out.push(Run { global: run.global + start - run.local, local: start, len: end - start });
        start = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(global: &[u64], start: &[u64], extent: &[u64], local: &[u64]) -> Slice {
        Slice { global: global.to_vec(), start: start.to_vec(), extent: extent.to_vec(), local: local.to_vec() }
    }

    fn runs(slice: &Slice) -> Vec<(u64, u64, u64)> {
        let mut out = Vec::new();
        slice.for_each_run(|run| out.push((run.global, run.local, run.len)));
        out
    }

    #[test]
    fn runs_join_whole_trailing_dims() {
        assert_eq!(runs(&Slice::whole(&[3, 4])), [(0, 0, 12)]);
        assert_eq!(runs(&Slice::whole(&[])), [(0, 0, 1)]);
        assert_eq!(runs(&Slice::whole(&[0, 4])), []);
        assert_eq!(runs(&slice(&[4, 6], &[2, 0], &[2, 6], &[2, 6])), [(12, 0, 12)]);
        assert_eq!(runs(&slice(&[2, 5], &[0, 3], &[2, 2], &[2, 3])), [(3, 0, 2), (8, 3, 2)]);
    }

    #[test]
    fn any_slices_assemble_into_any_others() {
        let shape = [5u64, 3, 4];
        let whole: Vec<u8> = (0..60).collect();
        // Uneven blocks along each dim, in padded buffers.
        for (source_dim, target_dim) in (0..3).flat_map(|a| (0..3).map(move |b| (a, b))) {
            let blocks = |dim: usize, n: u64| -> Vec<Slice> {
                let block = shape[dim].div_ceil(n);
                (0..n)
                    .map(|i| {
                        let mut slice = Slice::whole(&shape);
                        slice.start[dim] = (i * block).min(shape[dim]);
                        slice.extent[dim] = ((i + 1) * block).min(shape[dim]) - slice.start[dim];
                        slice.local[dim] = block;
                        slice
                    })
                    .collect()
            };
            let cut = |slice: &Slice| -> Vec<u8> {
                let mut out = vec![0xEE; slice.local_elements() as usize];
                slice.for_each_run(|run| {
                    let (from, to, len) = (run.global as usize, run.local as usize, run.len as usize);
                    out[to..to + len].copy_from_slice(&whole[from..from + len]);
                });
                out
            };
            for target in blocks(target_dim, 2) {
                let mut found = vec![0xEE; target.local_elements() as usize];
                let mut copied = 0;
                for source in blocks(source_dim, 3) {
                    let bytes = cut(&source);
                    copied += for_each_common(&source, &target, |from, to, len| {
                        let (from, to, len) = (from as usize, to as usize, len as usize);
                        found[to..to + len].copy_from_slice(&bytes[from..from + len]);
                    });
                }
                assert_eq!(copied, target.elements());
                assert_eq!(found, cut(&target));
            }
        }
    }
}
