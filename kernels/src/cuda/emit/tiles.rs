//! Kernels without reductions that read operands across their results: through tiles in shared memory, read along one dim and written
//! along the other, so that neighbouring threads have neighbouring elements both times.

use super::super::mapping::{BLOCK, SIDE, is_across};
use super::{Emitter, stored};
use crate::tile::{Access, reachable, value_of};
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Outside};
use std::collections::BTreeMap;

/// Bytes of shared memory that tiles take at most, of the 48 KiB that a block has without being asked.
const MOST_BYTES: usize = 40 << 10;

impl Emitter<'_> {
    /// The body, of a block for each tile. Operands lie along `across`, results along the last dim.
    pub(super) fn tiled(&mut self, across: DimId) {
        let mut others = self.mapping.outer.clone();
        let along = others.pop().expect("a tile has two dims");
        others.retain(|dim| *dim != across);
        let blocks = [along, across].map(|dim| self.nest.extents[usize::from(dim.0)].div_ceil(SIDE));
        let i = self.index_type();
        self.line(format!("const {i} tile = block;"));
        self.line(format!("const {i} first{} = tile % {} * {SIDE};", along.0, blocks[0]));
        self.line(format!("const {i} first{} = tile / {} % {} * {SIDE};", across.0, blocks[0], blocks[1]));
        if !others.is_empty() {
            self.line(format!("const {i} others = tile / {};", blocks[0] * blocks[1]));
            self.decode("others", &others);
        }
        self.line(format!("const int column = threadIdx.x % {SIDE}, row = threadIdx.x / {SIDE};"));
        let mut loads = self.loads_across(along, across);
        // Those that there is no room for are read across.
        let mut room = MOST_BYTES;
        loads.retain(|(_, input, _)| {
            let bytes = SIDE * (SIDE + 1) * self.nest.inputs[usize::from(*input)].dtype.bytes() as usize;
            let fits = bytes <= room;
            room -= if fits { bytes } else { 0 };
            fits
        });
        let mut tiles = Vec::new();
        for (id, input, _) in &loads {
            let (name, ty) = (self.name("tile"), stored(self.nest.inputs[usize::from(*input)].dtype));
            // A column more: neighbours down a column lie in different banks.
            self.line(format!("DCC_SHARED_ARRAY({ty}, {name}, [{SIDE}][{}]);", SIDE + 1));
            tiles.push((*id, name));
        }
        self.walk(along, across);
        for ((_, input, index), (_, name)) in loads.iter().zip(&tiles) {
            let nest = self.nest;
            let at = self.offset(&nest.inputs[usize::from(*input)], index);
            self.line(format!("{name}[r][column] = x{input}[{at}];"));
        }
        self.close_walk(along, across);
        self.line("__syncthreads();");
        let all: Vec<usize> = (0..self.nest.kernel.body.len()).collect();
        let roots: Vec<ExprId> = self.nest.kernel.body.iter().map(value_of).collect();
        self.prepare(&roots, self.known());
        self.walk(across, along);
        self.tiles = tiles.into_iter().map(|(id, name)| (id, format!("{name}[column][r]"))).collect();
        self.at_element(&all, &BTreeMap::new(), &BTreeMap::new());
        self.close_walk(across, along);
    }

    /// The loads that lie along `across`: their inputs and indices.
    fn loads_across(&self, along: DimId, across: DimId) -> Vec<(ExprId, u8, Vec<Index>)> {
        let nest = self.nest;
        let roots: Vec<ExprId> = nest.kernel.body.iter().map(value_of).collect();
        let load = |id: ExprId| {
            let Expr::Load { input, index, outside: Outside::Never } = nest.kernel.get(id) else { return None };
            let array = &nest.inputs[usize::from(*input)];
            let strides = Access::new(nest, array, index, Outside::Never).strides;
            let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
            let far = is_across(&strides, array.dtype.bytes() as usize, [along, across]);
            (plain && far).then(|| (id, *input, index.clone()))
        };
        reachable(&nest.kernel, &roots).into_iter().filter_map(load).collect()
    }

    /// Opens a loop over a tile's points: a warp's threads lie along `columns`.
    fn walk(&mut self, rows: DimId, columns: DimId) {
        let i = self.index_type();
        self.line("#pragma unroll");
        self.open(format!("for (int r = row; r < {SIDE}; r += {})", BLOCK / SIDE));
        for (dim, own) in [(rows, "r"), (columns, "column")] {
            let extent = self.nest.extents[usize::from(dim.0)];
            self.line(format!("const {i} i{0} = first{0} + {own};", dim.0));
            if !extent.is_multiple_of(SIDE) {
                self.line(format!("if (i{} >= {extent}) continue;", dim.0));
            }
            self.index[usize::from(dim.0)] = Some(format!("i{}", dim.0));
        }
    }

    fn close_walk(&mut self, rows: DimId, columns: DimId) {
        self.close();
        [rows, columns].into_iter().for_each(|dim| self.index[usize::from(dim.0)] = None);
    }
}
