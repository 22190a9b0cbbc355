//! Which dim runs in tiles, in what order the other loops run, and how many chunks of work that makes: functions of shapes, and of whether
//! one thread runs them all, on which no sum depends.

use super::access::{Access, Typing, bit, bits, over_of, reachable, value_of};
use super::{Nest, behind};
use crate::library::vector::Ty;
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Outside, Stmt, UnaryOp};
use dcc_program::types::DType;

/// Elements of a tile: operands and temporaries of a usual kernel, a KiB of each, stay in the first-level cache while its primitives pass
/// over them one after another.
const TILE: usize = 256;
/// A statement's own dim of up to so many points is one tile, so that its values serve later statements of the point. Without such, longer
/// tiles would only keep memory waiting: it is read ahead while a tile's first pass goes on.
pub const SINGLE: usize = 4096;
/// Tile length where an operand is read or written across its memory order: its cache lines are used again by the next points.
const BLOCK: usize = 64;
/// Least elements of a tile of two dims that is shortened for enough chunks.
const LEAST: usize = 128;
/// Nanoseconds of a chunk, about.
const CHUNK_NS: f64 = 20_000.0;
/// Nanoseconds of a primitive's call.
const CALL_NS: f64 = 6.0;

/// Nanoseconds of a copied row.
const ROW_NS: f64 = 2.0;

/// How a dim is cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    pub dim: DimId,
    pub length: usize,
}

/// The decisions about one nest.
#[derive(Clone, Debug)]
pub struct Plan {
    /// An outer dim in tiles, around the whole body.
    pub column: Option<Tiling>,
    /// A dim right behind the column's: a tile has all its points for each point of the column dim.
    pub behind: Option<DimId>,
    /// Outer loops that run inside a point, slowest first: what does not depend on them is computed once.
    pub within: Vec<DimId>,
    /// Outer loops, slowest first; the column dim stands for its tiles.
    pub order: Vec<DimId>,
    /// Without a column: each statement's own tile dim.
    pub statements: Vec<Option<Tiling>>,
    /// Iterations of the outer loops, and how many of them make a chunk.
    pub points: usize,
    pub grain: usize,
    /// Estimated duration on one thread.
    pub nanoseconds: usize,
}

impl Plan {
    /// With no tile longer than `longest`: kernels of very many values need shorter ones. Where more than one of `threads` run it, there
    /// are chunks for them.
    pub fn new(nest: &Nest, typing: &Typing, longest: usize, threads: usize) -> Plan {
        let estimate = Estimate::new(nest, typing);
        let body = &nest.kernel.body;
        let best_own = |i: usize| {
            let own = over_of(&body[i]).iter().map(|dim| Some(*dim));
            let scalar = std::iter::once(None);
            let costs = own.chain(scalar).map(|dim| (estimate.statement(i, dim), dim));
            costs.min_by(|x, y| x.0.total_cmp(&y.0)).expect("the scalar way is always there")
        };
        let rows: Vec<(f64, Option<DimId>)> = (0..body.len()).map(best_own).collect();
        let row_cost: f64 = rows.iter().map(|row| row.0).sum();
        let columns =
            nest.kernel.outer.iter().map(|dim| ((0..body.len()).map(|i| estimate.statement(i, Some(*dim))).sum::<f64>(), *dim));
        let column = columns.min_by(|x, y| x.0.total_cmp(&y.0));
        let pairs = behind::pairs(nest, typing, longest).into_iter();
        let pair = pairs.map(|pair| (estimate.with_behind(pair), pair)).min_by(|x, y| x.0.total_cmp(&y.0));
        let best = column.map_or(row_cost, |column| column.0.min(row_cost));
        if let Some((cost, pair)) = pair.filter(|pair| pair.0 < best) {
            return Plan::with_behind(&estimate, pair, cost, longest);
        }
        match column.filter(|column| column.0 < row_cost) {
            Some((cost, dim)) => Plan::with_column(nest, &estimate, (dim, cost), longest, threads),
            None => {
                let tiling = |(_, dim): &(f64, Option<DimId>)| {
                    dim.map(|dim| {
                        let extent = nest.extents[usize::from(dim.0)];
                        let serves_others = body.iter().filter(|stmt| over_of(stmt).contains(&dim)).count() > 1;
                        let most = if serves_others { SINGLE } else { 2 * TILE }.min(longest);
                        Tiling { dim, length: if extent <= most { extent.max(1) } else { TILE.min(longest) } }
                    })
                };
                let order = nest.kernel.outer.clone();
                Plan::finish(nest, None, order, rows.iter().map(tiling).collect(), row_cost)
            }
        }
    }

    fn with_column(nest: &Nest, estimate: &Estimate, (dim, cost): (DimId, f64), longest: usize, threads: usize) -> Plan {
        let extent = nest.extents[usize::from(dim.0)];
        let mut order: Vec<DimId> = nest.kernel.outer.iter().copied().filter(|d| *d != dim).collect();
        let across = estimate.across(dim).filter(|d| order.contains(d));
        let others: usize = order.iter().map(|d| nest.extents[usize::from(d.0)]).product();
        let mut length = if across.is_some() { BLOCK } else { TILE }.min(longest);
        if threads > 1 && cost > 2.0 * CHUNK_NS && others < 16 {
            // Few points otherwise: shorter tiles for enough chunks, though longer ones are read faster.
            length = length.min(extent.div_ceil(16usize.div_ceil(others.max(1))).next_multiple_of(32).max(64));
        }
        if let Some(across) = across {
            order.retain(|d| *d != across);
            order.extend([dim, across]);
        } else {
            order.push(dim);
        }
        Plan::finish(nest, Some(Tiling { dim, length }), order, vec![None; nest.kernel.body.len()], cost)
    }

    /// Tiles of two dims. Loops that share values run within a point where there are points enough without them.
    fn with_behind(estimate: &Estimate, (dim, behind): (DimId, DimId), cost: f64, longest: usize) -> Plan {
        let nest = estimate.nest;
        let extent = |d: DimId| nest.extents[usize::from(d.0)];
        let chunks = (cost / CHUNK_NS).clamp(1.0, 16.0) as usize;
        let most = (TILE.min(longest) / extent(behind)).clamp(1, extent(dim));
        let least = most.min(extent(dim).div_ceil(chunks).max(LEAST.div_ceil(extent(behind))));
        let others: Vec<DimId> = nest.kernel.outer.iter().copied().filter(|d| *d != dim && *d != behind).collect();
        let enough = |loops: &[DimId], length: usize| {
            loops.iter().map(|d| extent(*d)).product::<usize>() * extent(dim).div_ceil(length) >= chunks
        };
        // Tiles are shorter only where that makes the chunks.
        let length = |loops: &[DimId]| if enough(loops, most) { most } else { least };
        let (mut within, mut order): (Vec<DimId>, Vec<DimId>) =
            others.iter().partition(|other| estimate.shares(**other, (dim, behind)));
        if !enough(&order, length(&order)) {
            (within, order) = (vec![], others);
        }
        let length = length(&order);
        order.push(dim);
        let mut plan = Plan::finish(nest, Some(Tiling { dim, length }), order, vec![None; nest.kernel.body.len()], cost);
        (plan.behind, plan.within) = (Some(behind), within);
        plan
    }

    fn finish(nest: &Nest, column: Option<Tiling>, order: Vec<DimId>, statements: Vec<Option<Tiling>>, cost: f64) -> Plan {
        let (points, grain, nanoseconds) = (1, 1, cost as usize);
        let mut plan = Plan { column, behind: None, within: vec![], order, statements, points, grain, nanoseconds };
        plan.points = plan.order.iter().map(|dim| plan.trips(nest, *dim)).product();
        let chunks = (cost / CHUNK_NS).clamp(1.0, 64.0) as usize;
        plan.grain = plan.points.div_ceil(chunks).max(1);
        plan
    }

    /// Iterations of an outer loop.
    pub fn trips(&self, nest: &Nest, dim: DimId) -> usize {
        let extent = nest.extents[usize::from(dim.0)];
        match self.column {
            Some(column) if column.dim == dim => extent.div_ceil(column.length),
            _ => extent,
        }
    }
}

/// Nanoseconds of statements under a choice of tile dim.
struct Estimate<'a> {
    nest: &'a Nest,
    typing: &'a Typing,
    /// Each statement's expressions and memory accesses.
    parts: Vec<(Vec<ExprId>, Vec<Access>)>,
}

impl<'a> Estimate<'a> {
    fn new(nest: &'a Nest, typing: &'a Typing) -> Self {
        let parts = nest.kernel.body.iter().map(|stmt| {
            let exprs = reachable(&nest.kernel, &[value_of(stmt)]);
            let load = |id: &ExprId| match nest.kernel.get(*id) {
                Expr::Load { input, index, outside } => {
                    Some(Access::new(nest, &nest.inputs[usize::from(*input)], index, *outside))
                }
                _ => None,
            };
            let mut accesses: Vec<Access> = exprs.iter().filter_map(load).collect();
            if let Stmt::Store { output, index, .. } = stmt {
                accesses.push(Access::new(nest, &nest.outputs[usize::from(*output)], index, Outside::Never));
            }
            (exprs, accesses)
        });
        Estimate { nest, typing, parts: parts.collect() }
    }

    fn extent(&self, dim: DimId) -> f64 {
        self.nest.extents[usize::from(dim.0)] as f64
    }

    fn statement(&self, i: usize, tile: Option<DimId>) -> f64 {
        let stmt = &self.nest.kernel.body[i];
        let (exprs, accesses) = &self.parts[i];
        let all = bits(&self.nest.kernel.outer) | bits(over_of(stmt));
        let points: f64 =
            (0..self.nest.extents.len() as u8).map(DimId).filter(|d| all & bit(*d) != 0).map(|d| self.extent(d)).product();
        let Some(tile) = tile else { return points * 8.0 * (exprs.len() + accesses.len()) as f64 };
        let length = self.extent(tile).clamp(1.0, TILE as f64);
        let depends = |id: ExprId| self.typing.depends(id) & bit(tile) != 0;
        let mut each = 0.0;
        let mut calls = 1.0;
        for id in exprs.iter().filter(|id| depends(**id)) {
            each += self.operation(*id);
            calls += 1.0;
        }
        for access in accesses {
            let stride = access.strides[usize::from(tile.0)];
            let indirect = access.indirect.iter().any(|(_, id)| depends(*id));
            each += match (indirect || !access.checked.is_empty(), stride) {
                (true, _) => 1.5,
                (false, 0 | 1) => 0.05,
                _ => 1.0,
            };
        }
        points * (each + calls * CALL_NS / length)
    }

    /// All statements with tiles of two dims: values of both in whole tiles, values of one of them repeated, which loops share.
    fn with_behind(&self, (dim, behind): (DimId, DimId)) -> f64 {
        let statement = |i: usize| {
            let stmt = &self.nest.kernel.body[i];
            let (exprs, accesses) = &self.parts[i];
            let (pair, all) = (bit(dim) | bit(behind), bits(&self.nest.kernel.outer) | bits(over_of(stmt)));
            let dims = (0..self.nest.extents.len() as u8).map(DimId);
            let points: f64 = dims.filter(|d| all & bit(*d) != 0).map(|d| self.extent(d)).product();
            let width = if all & bit(behind) == 0 { 1.0 } else { self.extent(behind) };
            let length = (TILE as f64 / width).floor().clamp(1.0, self.extent(dim)) * width;
            let shared = points / (self.extent(dim) * width);
            let (mut each, mut calls) = (0.0, 1.0);
            for id in exprs {
                match self.typing.depends(*id) & pair {
                    0 => {}
                    both if both == pair || width == 1.0 => {
                        each += self.operation(*id);
                        calls += 1.0;
                    }
                    _ => each += (self.operation(*id) + CALL_NS / length) / shared,
                }
            }
            for access in accesses {
                let strides = [dim, behind].map(|d| access.strides[usize::from(d.0)]);
                each += match strides {
                    [0, 0] => 0.0,
                    [row, 1] if row != 0 && (row != width as i64 || !access.checked.is_empty()) => {
                        calls += 1.0;
                        0.05 + ROW_NS / width
                    }
                    [1, 0] | [0, 1] => 0.05 / shared,
                    [0, _] | [_, 0] => (0.05 + 1.0 / width) / shared,
                    _ => 0.05,
                };
            }
            points * (each + calls * CALL_NS / length)
        };
        (0..self.nest.kernel.body.len()).map(statement).sum()
    }

    /// Whether something is computed for a tile of two dims that a loop over `other` need not compute again.
    fn shares(&self, other: DimId, (dim, behind): (DimId, DimId)) -> bool {
        let pair = bit(dim) | bit(behind);
        let made = |id: &ExprId| match self.nest.kernel.get(*id) {
            Expr::Load { input, index, outside } => {
                let array = &self.nest.inputs[usize::from(*input)];
                let access = Access::new(self.nest, array, index, *outside);
                let widened = array.dtype != DType::F32 && array.dtype != DType::F64;
                let [first, second] = [dim, behind].map(|d| access.strides[usize::from(d.0)]);
                widened || !access.checked.is_empty() || second != 1 || first != self.extent(behind) as i64
            }
            Expr::Const { .. } | Expr::Var(_) => false,
            _ => true,
        };
        let shared = |id: &&ExprId| {
            let depends = self.typing.depends(**id);
            depends & pair != 0 && depends != bit(behind) && depends & bit(other) == 0 && made(id)
        };
        self.parts.iter().flat_map(|part| &part.0).any(|id| shared(&id))
    }

    fn operation(&self, id: ExprId) -> f64 {
        let each = match self.nest.kernel.get(id) {
            Expr::Load { .. } | Expr::Var(_) | Expr::Const { .. } => return 0.0,
            Expr::Unary(
                UnaryOp::Exp
                | UnaryOp::Tanh
                | UnaryOp::Erf
                | UnaryOp::Logistic
                | UnaryOp::Log
                | UnaryOp::Expm1
                | UnaryOp::Log1p,
                _,
            ) => 0.3,
            Expr::Unary(UnaryOp::Gelu | UnaryOp::GeluSlope | UnaryOp::GeluTanh | UnaryOp::GeluTanhSlope, _) => 0.5,
            Expr::Unary(UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Not, _) => 0.03,
            Expr::Unary(UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::RoundEven, _) => 0.15,
            Expr::Unary(..) | Expr::Binary(BinaryOp::Pow, ..) => 10.0,
            Expr::Uniform { .. } => 0.5,
            _ => 0.03,
        };
        if matches!(self.typing.ty(id), Ty::F32 | Ty::Bool) { each } else { 2.0 * each }
    }

    /// A dim along which an operand is contiguous that is read or written across its order along `tile`.
    fn across(&self, tile: DimId) -> Option<DimId> {
        let strided = |access: &&Access| !matches!(access.strides[usize::from(tile.0)], 0 | 1);
        let access = self.parts.iter().flat_map(|part| &part.1).find(strided)?;
        access.strides.iter().position(|stride| *stride == 1).map(|d| DimId(d as u8))
    }
}
