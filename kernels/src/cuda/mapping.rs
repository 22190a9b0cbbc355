//! How the points and loops of a nest are spread over threads: functions of shapes only, so that sums keep their order on every GPU.

use crate::tile::{Access, Nest, Typing, children, dims_of, over_of, reachable, value_of};
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Outside, Stmt};
use dcc_program::types::DType;
use std::collections::BTreeSet;

/// Threads of a block of single points, and of a block of warps that each have a point; a point has two such blocks at most, whose threads
/// can have 128 registers.
pub(super) const BLOCK: usize = 256;
const WARP: usize = 32;
/// Threads that fill the GPUs of today twice over.
const MANY: usize = 1 << 18;
/// Elements of a thread where a group shares a point: aimed at, and the most whose values stay in registers for later statements.
const EACH: usize = 16;
const KEPT: usize = 32;
/// Bytes of the elements that a thread moves in one step: all are in registers before any is stored.
pub(super) const MOVED: usize = 384;
/// What the last block counts up to behind the last element, at most.
const BEHIND: usize = 1 << 14;
/// Points of a tile along each of its two dims, and the fewest points for which there are tiles.
pub(super) const SIDE: usize = 32;
const TILED: usize = 1 << 12;
/// Bytes that memory moves at least.
const SECTOR: usize = 32;
/// Most parts of a reduction.
const PARTS: usize = 1024;

/// Whether offsets up to so many elements are numbers of 32 bits.
pub(super) fn is_narrow(most: usize) -> bool {
    most < (1 << 31) - BEHIND
}

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
    /// Of a kernel without reductions that reads an operand across the result: the dim that the operand lies along. Blocks have tiles of
    /// SIDE points of this and of the last dim, which they read along one and write along the other.
    pub across: Option<DimId>,
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
        let mut mapping = Mapping { outer, points, group: 1, vector: 1, parts: 1, across: None };
        if own {
            let vectors = kernel.body.iter().filter_map(|stmt| mapping.loops(nest, typing, over_of(stmt)).dims.last().copied());
            mapping.vector = vectors.map(|dim| walks.vector(dim)).min().unwrap_or(1);
            mapping.vector = narrowed(nest, typing, mapping.vector, None);
            let few = points < MANY / BLOCK;
            let each = if few { EACH / 4 } else { EACH };
            mapping.group = longest.div_ceil(each.max(mapping.vector)).next_power_of_two().clamp(WARP, 2 * BLOCK);
        } else if let Some(last) = last
            && longest == 1
            && kernel.body.iter().all(|stmt| !matches!(stmt, Stmt::Reduce { .. }))
        {
            mapping.vector = narrowed(nest, typing, walks.vector(last), Some(last));
            if let Some([along, across]) = walks.tile(points) {
                mapping.outer.retain(|dim| *dim != along);
                mapping.outer.push(along);
                (mapping.vector, mapping.across) = (1, Some(across));
            }
        }
        mapping.parts = parts(nest, &mapping, longest);
        mapping
    }

    /// Of the entry that adds up many parts: a warp for a point, since there are few points, and each part is far from the next.
    pub fn finishing(&self) -> Mapping {
        let mapping = self.clone();
        if self.group == 1 && self.parts >= WARP { Mapping { group: WARP, vector: 1, ..mapping } } else { mapping }
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
    pub fn blocks(&self, nest: &Nest) -> usize {
        if let Some(across) = self.across {
            let sides = [across, *self.outer.last().expect("a tile has two dims")].map(|dim| nest.extents[usize::from(dim.0)]);
            return self.points / (sides[0] * sides[1]) * sides[0].div_ceil(SIDE) * sides[1].div_ceil(SIDE);
        }
        let each = if self.group == 1 { self.vector } else { 1 };
        self.points.div_ceil(self.threads() / self.group * each).max(1)
    }
}

/// Bytes that statements load and store at each point of `dims`, where the values `known` are there.
pub(super) fn moved(nest: &Nest, typing: &Typing, stmts: &[&Stmt], dims: &[DimId], known: &BTreeSet<ExprId>) -> usize {
    let bytes = |dtype: DType| dtype.bytes() as usize;
    let (mut needed, mut stack) = (BTreeSet::new(), stmts.iter().map(|stmt| value_of(stmt)).collect::<Vec<_>>());
    while let Some(id) = stack.pop() {
        if !known.contains(&id) && needed.insert(id) {
            stack.extend(children(nest.kernel.get(id)));
        }
    }
    let loaded = needed.into_iter().filter_map(|id| match nest.kernel.get(id) {
        Expr::Load { input, .. } if typing.depends(id) & dims_of(dims) != 0 => {
            Some(bytes(nest.inputs[usize::from(*input)].dtype))
        }
        _ => None,
    });
    let stored = stmts.iter().filter_map(|stmt| match stmt {
        Stmt::Store { output, .. } => Some(bytes(nest.outputs[usize::from(*output)].dtype)),
        _ => None,
    });
    loaded.sum::<usize>() + stored.sum::<usize>()
}

/// Elements side by side, up to `vector`, for which those of a step fit into registers, whatever statements it is of.
fn narrowed(nest: &Nest, typing: &Typing, vector: usize, last: Option<DimId>) -> usize {
    let own = |dims: &[DimId]| last.map_or(dims.to_vec(), |last| vec![last]);
    let steps = nest.kernel.body.iter().filter(|stmt| last.is_some() || !over_of(stmt).is_empty()).map(|stmt| {
        let together: Vec<&Stmt> = nest.kernel.body.iter().filter(|other| over_of(other) == over_of(stmt)).collect();
        moved(nest, typing, &together, &own(over_of(stmt)), &BTreeSet::new())
    });
    let most = steps.max().unwrap_or(0);
    let mut vector = vector;
    while vector > 1 && most * vector > MOVED {
        vector /= 2;
    }
    vector
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

/// Every access of a nest: its element bytes, whether each index is a plain dim, what it is, and how often it runs.
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
    stored: bool,
    /// Whether a load that is never outside of its operand, by plain dims.
    loaded: bool,
    times: f64,
}

impl<'a> Walks<'a> {
    fn new(nest: &'a Nest, typing: &Typing) -> Walks<'a> {
        let mut all = Vec::new();
        let points = count(nest, &nest.kernel.outer) as f64;
        for stmt in &nest.kernel.body {
            let times = points * count(nest, over_of(stmt)) as f64;
            let mut add = |array: &crate::tile::Array, index: &[Index], outside, stored: bool| {
                let access = Access::new(nest, array, index, outside);
                let scattered = access.indirect.iter().fold(0, |all, (_, id)| all | typing.depends(*id));
                let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
                let loaded = plain && !stored && outside == Outside::Never;
                all.push(Walk { access, scattered, bytes: array.dtype.bytes() as usize, plain, stored, loaded, times });
            };
            for id in reachable(&nest.kernel, &[value_of(stmt)]) {
                if let Expr::Load { input, index, outside } = nest.kernel.get(id) {
                    add(&nest.inputs[usize::from(*input)], index, *outside, false);
                }
            }
            if let Stmt::Store { output, index, .. } = stmt {
                add(&nest.outputs[usize::from(*output)], index, Outside::Never, true);
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

    /// The dim that all results lie along, and the one that most bytes of operands lie along which are far apart there.
    fn tile(&self, points: usize) -> Option<[DimId; 2]> {
        let size = |dim: DimId| self.nest.extents[usize::from(dim.0)];
        let lies = |walk: &Walk, dim: DimId| walk.plain && walk.access.strides[usize::from(dim.0)] == 1;
        let outer = || self.nest.kernel.outer.iter().copied().filter(|dim| size(*dim) >= SIDE / 2);
        let along = outer().find(|dim| self.all.iter().filter(|walk| walk.stored).all(|walk| lies(walk, *dim)))?;
        let bytes = |across: DimId| -> usize {
            self.all
                .iter()
                .filter(|walk| is_across(&walk.access.strides, walk.bytes, [along, across]) && walk.loaded)
                .map(|walk| walk.bytes)
                .sum()
        };
        let best = outer().filter(|dim| *dim != along).max_by_key(|dim| (bytes(*dim), std::cmp::Reverse(dim.0)))?;
        (points >= TILED && bytes(best) > 0).then_some([along, best])
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

/// Whether elements of so many bytes lie side by side along the second dim, and far apart along the first.
pub(super) fn is_across(strides: &[i64], bytes: usize, [along, across]: [DimId; 2]) -> bool {
    strides[usize::from(across.0)] == 1 && strides[usize::from(along.0)].unsigned_abs() as usize * bytes >= SECTOR
}

/// Whether elements lie side by side along `dim`, and every `vector` of them begin where such a pack may.
pub(super) fn is_even(strides: &[i64], dim: DimId, vector: usize) -> bool {
    let others = strides.iter().enumerate().filter(|(d, _)| *d != usize::from(dim.0));
    strides[usize::from(dim.0)] == 1 && others.map(|other| other.1).all(|stride| stride % vector as i64 == 0)
}
