//! How the points and loops of a nest are spread over threads: functions of shapes only, so that sums keep their order on every GPU.

use crate::tile::{Access, Nest, Typing, dims_of, over_of, reachable, value_of};
use dcc_program::kernel::{DimId, Expr, Index, Outside, Stmt};

/// Threads of a block of single points, and of a block of warps that each have a point; a point has two such blocks at most, whose threads
/// can have 128 registers.
pub(super) const BLOCK: usize = 256;
const WARP: usize = 32;
/// Threads that fill the GPUs of today twice over.
const MANY: usize = 1 << 18;
/// Elements of a thread where a group shares a point: aimed at, and the most whose values stay in registers for later statements.
const EACH: usize = 16;
const KEPT: usize = 32;
/// Most parts of a reduction.
const PARTS: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    /// Outer dims, slowest first: neighbouring threads, or groups of them, have neighbouring points of the last.
    pub outer: Vec<DimId>,
    pub points: usize,
    /// Threads that share a point: 1, or a warp up to a block.
    pub group: usize,
    /// Elements a thread takes side by side: points where it has its own, else of the last of a statement's dims.
    pub vector: usize,
    /// Parts of every reduction, each a block's; 1 where there are points enough.
    pub parts: usize,
}

/// A statement's loops as one: its dims, the one to walk through memory along last, and their points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loops {
    pub dims: Vec<DimId>,
    pub count: usize,
}

impl Mapping {
    pub fn new(nest: &Nest, typing: &Typing) -> Mapping {
        let walks = Walks::new(nest, typing);
        let kernel = &nest.kernel;
        let points: usize = kernel.outer.iter().map(|dim| nest.extents[usize::from(dim.0)]).product();
        let last = kernel.outer.iter().copied().min_by(|x, y| walks.cost_of_points(*x).total_cmp(&walks.cost_of_points(*y)));
        let longest = kernel.body.iter().map(|stmt| count(nest, over_of(stmt))).max().unwrap_or(1);
        let own_cost = if longest > 1 { walks.cost_of_groups(longest) } else { f64::INFINITY };
        let own = last.is_none_or(|dim| own_cost < walks.cost_of_points(dim)) && longest > 1;
        let mut outer: Vec<DimId> = kernel.outer.clone();
        if let Some(last) = last.filter(|_| !own) {
            outer.retain(|dim| *dim != last);
            outer.push(last);
        }
        let mut mapping = Mapping { outer, points, group: 1, vector: 1, parts: 1 };
        if own {
            let vectors = kernel.body.iter().filter_map(|stmt| mapping.loops(nest, typing, over_of(stmt)).dims.last().copied());
            mapping.vector = vectors.map(|dim| walks.vector(dim)).min().unwrap_or(1);
            let few = points < MANY / BLOCK;
            let each = if few { EACH / 4 } else { EACH };
            mapping.group = longest.div_ceil(each.max(mapping.vector)).next_power_of_two().clamp(WARP, 2 * BLOCK);
        } else if let Some(last) = last
            && longest == 1
            && kernel.body.iter().all(|stmt| !matches!(stmt, Stmt::Reduce { .. }))
        {
            mapping.vector = walks.vector(last);
        }
        mapping.parts = parts(nest, &mapping, longest);
        mapping
    }

    /// A statement's dims in the order in which their loops run.
    pub fn loops(&self, nest: &Nest, typing: &Typing, over: &[DimId]) -> Loops {
        let walks = Walks::new(nest, typing);
        let mut dims = over.to_vec();
        if let Some(last) = over.iter().copied().min_by(|x, y| walks.cost_along(*x).total_cmp(&walks.cost_along(*y))) {
            dims.retain(|dim| *dim != last);
            dims.push(last);
        }
        Loops { count: count(nest, over), dims }
    }

    /// Steps of a thread through `count` points of a statement's own.
    pub fn trips(&self, count: usize) -> usize {
        count.div_ceil(self.group * self.vector)
    }

    /// Whether values of a loop over `count` points stay in registers.
    pub fn keeps(&self, count: usize) -> bool {
        self.group > 1 && self.parts == 1 && self.trips(count) * self.vector <= KEPT
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        if self.group <= WARP { BLOCK } else { self.group }
    }

    /// Blocks along the points.
    pub fn blocks(&self) -> usize {
        let each = if self.group == 1 { self.vector } else { 1 };
        self.points.div_ceil(self.threads() / self.group * each).max(1)
    }
}

/// In how many parts all reductions run, so that there are threads enough: only where none waits for another.
fn parts(nest: &Nest, mapping: &Mapping, longest: usize) -> usize {
    let kernel = &nest.kernel;
    let reduced = |stmt: &&Stmt| matches!(stmt, Stmt::Reduce { .. });
    let waits = |stmt: &Stmt| reachable(kernel, &[value_of(stmt)]).iter().any(|id| matches!(kernel.get(*id), Expr::Var(_)));
    let mut reductions = kernel.body.iter().filter(reduced).peekable();
    if reductions.peek().is_none() || reductions.any(waits) {
        return 1;
    }
    let wanted = MANY / (mapping.points * mapping.group).max(1);
    let most = longest / (mapping.group * EACH.max(mapping.vector));
    wanted.min(most).clamp(1, PARTS)
}

fn count(nest: &Nest, dims: &[DimId]) -> usize {
    dims.iter().map(|dim| nest.extents[usize::from(dim.0)]).product()
}

/// Every access of a nest: its element bytes, whether each index is a plain dim, and how often it runs.
struct Walks<'a> {
    nest: &'a Nest,
    all: Vec<Walk>,
}

struct Walk {
    access: Access,
    /// Dims that a computed index depends on.
    scattered: u64,
    bytes: usize,
    plain: bool,
    times: f64,
}

impl<'a> Walks<'a> {
    fn new(nest: &'a Nest, typing: &Typing) -> Walks<'a> {
        let mut all = Vec::new();
        let points = count(nest, &nest.kernel.outer) as f64;
        for stmt in &nest.kernel.body {
            let times = points * count(nest, over_of(stmt)) as f64;
            let mut add = |array: &crate::tile::Array, index: &[Index], outside| {
                let access = Access::new(nest, array, index, outside);
                let scattered = access.indirect.iter().fold(0, |all, (_, id)| all | typing.depends(*id));
                let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
                all.push(Walk { access, scattered, bytes: array.dtype.bytes() as usize, plain, times });
            };
            for id in reachable(&nest.kernel, &[value_of(stmt)]) {
                if let Expr::Load { input, index, outside } = nest.kernel.get(id) {
                    add(&nest.inputs[usize::from(*input)], index, *outside);
                }
            }
            if let Stmt::Store { output, index, .. } = stmt {
                add(&nest.outputs[usize::from(*output)], index, Outside::Never);
            }
        }
        Walks { nest, all }
    }

    /// Sectors of memory that neighbours along `dim` touch.
    fn cost_along(&self, dim: DimId) -> f64 {
        let each = |walk: &Walk| {
            let scattered = walk.scattered & dims_of(&[dim]) != 0;
            walk.times
                * match walk.access.strides[usize::from(dim.0)].unsigned_abs() {
                    _ if scattered => 8.0,
                    0 => 0.1,
                    stride => stride.min(8) as f64,
                }
        };
        self.all.iter().map(each).sum()
    }

    fn cost_of_points(&self, dim: DimId) -> f64 {
        let extent = self.nest.extents[usize::from(dim.0)];
        self.cost_along(dim) * WARP.div_ceil(extent.clamp(1, WARP)) as f64
    }

    /// As `cost_of_points`, where a warp or more walks along each statement's own dims.
    fn cost_of_groups(&self, longest: usize) -> f64 {
        let all = self.nest.kernel.body.iter().flat_map(|stmt| over_of(stmt).iter().copied());
        let best = all.map(|dim| self.cost_along(dim)).min_by(f64::total_cmp).unwrap_or(f64::INFINITY);
        best * WARP.div_ceil(longest.clamp(1, WARP)) as f64
    }

    /// Elements side by side along `dim` that one instruction can move, wherever they are moved at all.
    fn vector(&self, dim: DimId) -> usize {
        let even = |walk: &&Walk| self.is_even(walk, dim, 1);
        let widest = self.all.iter().filter(even).map(|walk| walk.bytes).max();
        let Some(widest) = widest else { return 1 };
        let extent = self.nest.extents[usize::from(dim.0)];
        let fits = |vector: usize| extent.is_multiple_of(vector) && self.all.iter().any(|walk| self.is_even(walk, dim, vector));
        [16 / widest, 8 / widest, 4 / widest].into_iter().map(|n| n.clamp(1, 8)).find(|n| fits(*n)).unwrap_or(1)
    }

    fn is_even(&self, walk: &Walk, dim: DimId, vector: usize) -> bool {
        walk.plain && is_even(&walk.access.strides, dim, vector)
    }
}

/// Whether elements lie side by side along `dim`, and every `vector` of them begin where such a pack may.
pub(super) fn is_even(strides: &[i64], dim: DimId, vector: usize) -> bool {
    let others = strides.iter().enumerate().filter(|(d, _)| *d != usize::from(dim.0));
    strides[usize::from(dim.0)] == 1 && others.map(|other| other.1).all(|stride| stride % vector as i64 == 0)
}
