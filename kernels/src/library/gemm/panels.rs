//! The copies of panels that the microkernel reads: where they lie, how those are made that it does not make itself, and the memory that is
//! asked for before.

use super::{Gemm, Panel, Rows, Side};
use crate::library::lines::Lines;
use crate::library::pack::{Size, Source};
use crate::library::simd::{Element, LINE};

/// Bytes between packed panels: several of them are written side by side, in different sets of the first-level cache.
const APART: usize = 128;

impl<E: Element, S: Copy + Send + Sync> Gemm<E, S> {
    /// Elements from one packed row panel to the next, and from one packed column panel to the next.
    pub(super) fn panel_elements(&self) -> [usize; 2] {
        let apart = APART / size_of::<E>();
        let row = match self.read_a {
            Rows::Copied => self.kernels.rows * self.copied_row(),
            Rows::InPlace | Rows::Packed => self.kernels.rows * self.longest + apart,
        };
        [row, self.kernels.columns * self.longest + apart]
    }

    /// Elements from one copied row to the next: an odd number of cache lines.
    pub(super) fn copied_row(&self) -> usize {
        let line = LINE / size_of::<E>();
        (self.longest.div_ceil(line) | 1) * line
    }

    /// The memory that row panels will be read, copied or packed from, as far as it is regular.
    pub(super) fn source_of_rows(&self, a: *const S, panels: &[Panel], piece: usize) -> Lines {
        let (s, runs) = (&self.strides, &self.pieces[piece]);
        let size: usize = panels.iter().map(|panel| panel.size).sum();
        let from = a.wrapping_offset(self.rows.source(&panels[0]) + runs[0].a);
        match self.read_a {
            Rows::Copied | Rows::InPlace if s.a_step == 1 => {
                let last = &runs[runs.len() - 1];
                Lines::new(from, size, s.a_row, last.position + last.size)
            }
            Rows::Copied | Rows::Packed if s.a_row == 1 => Lines::new(from, runs[0].size, s.a_step, size),
            _ => Lines::none(),
        }
    }

    /// The same of column panels.
    pub(super) fn source_of_columns(&self, b: *const S, panels: &[Panel], piece: usize) -> Lines {
        let (s, runs) = (&self.strides, &self.pieces[piece]);
        let size: usize = panels.iter().map(|panel| panel.size).sum();
        let from = b.wrapping_offset(self.columns.source(&panels[0]) + runs[0].b);
        match (self.pack_b, s.b_column, s.b_step) {
            (true, 1, _) => Lines::new(from, runs[0].size, s.b_step, size),
            (true, _, 1) => Lines::new(from, size, s.b_column, runs[0].size),
            _ => Lines::none(),
        }
    }

    /// Packs steps of a panel that begin at `position` of their piece; of pairs, one that is the second of a pair by itself.
    ///
    /// # Safety
    /// As `Pack`, with `to` where the panel's copy begins.
    unsafe fn pack_run(&self, mut source: Source<S>, to: *mut E, mut position: usize, mut size: Size) {
        let steps = self.packing.steps;
        // SAFETY: the caller's; the word was written with the step before.
        unsafe {
            if !position.is_multiple_of(steps) && size.steps > 0 {
                (self.packing.second)(source, to.add(position / steps * size.apart), size);
                source.from = source.from.wrapping_offset(source.step);
                (position, size.steps) = (position + 1, size.steps - 1);
            }
            (self.packing.pack)(source, to.add(position / steps * size.apart), size);
        }
    }

    /// Copies the rows of panels as [row][step].
    ///
    /// # Safety
    /// As `compute`.
    pub(super) unsafe fn copy_rows(&self, a: *const S, rows: &[Panel], piece: usize, copied: *mut E) {
        let (elements, apart) = (self.panel_elements()[0], self.copied_row() * (size_of::<E>() / size_of::<S>()));
        let (s, runs) = (&self.strides, &self.pieces[piece]);
        let end = runs.last().map_or(0, |run| run.position + run.size);
        let whole = end.next_multiple_of(self.kernels.words * self.packing.steps);
        for (n, panel) in rows.iter().enumerate() {
            // SAFETY of both blocks: the caller's; words are so many steps, and those that A is read as need no conversion.
            let to = unsafe { copied.add(n * elements).cast::<S>() };
            for (run, part) in runs.iter().flat_map(|run| self.rows.parts(panel).iter().map(move |part| (run, part))) {
                let source = Source { from: a.wrapping_offset(part.source + run.a), stride: s.a_row, step: s.a_step };
                let size = Size { rows: part.size, width: part.size, apart, steps: run.size };
                unsafe { (self.packing.lay)(source, to.add(part.position * apart + run.position), size) };
            }
            for row in 0..if whole > end { panel.size } else { 0 } {
                unsafe { to.add(row * apart + end).write_bytes(0, whole - end) };
            }
        }
    }

    /// Packs row panels as [word][row].
    ///
    /// # Safety
    /// As `compute`.
    pub(super) unsafe fn pack_rows(&self, a: *const S, rows: &[Panel], piece: usize, packed: *mut E) {
        let elements = self.panel_elements()[0];
        let mut first = 0;
        while first < rows.len() {
            let panel = &rows[first];
            let count = self.side_by_side(&self.rows, &rows[first..], self.strides.a_row, piece);
            let to = packed.wrapping_add(first * elements);
            for run in &self.pieces[piece] {
                let source = |at: isize| {
                    let from = a.wrapping_offset(at + run.a);
                    Source { from, stride: self.strides.a_row, step: self.strides.a_step }
                };
                // SAFETY: the caller's.
                unsafe {
                    if count > 1 {
                        let width = panel.size;
                        let size = Size { rows: width, width, apart: width, steps: run.size };
                        let to = to.wrapping_add(run.position / self.packing.steps * width);
                        (self.packing.pack_side)(source(self.rows.source(panel)), to, size, count, elements);
                        continue;
                    }
                    for part in self.rows.parts(panel) {
                        let size = Size { rows: part.size, width: part.size, apart: panel.size, steps: run.size };
                        self.pack_run(source(part.source), to.wrapping_add(part.position), run.position, size);
                    }
                }
            }
            first += count.max(1);
        }
    }

    /// How many of the panels, from the first on, are equally large and lie side by side in the source: they are packed together, step by
    /// step. None where steps of the piece do not begin words.
    fn side_by_side(&self, side: &Side, panels: &[Panel], stride: isize, piece: usize) -> usize {
        if stride != 1 || !self.pieces[piece].iter().all(|run| run.position.is_multiple_of(self.packing.steps)) {
            return 0;
        }
        let (at, width) = (side.source(&panels[0]), panels[0].size);
        let follows = |(j, panel): &(usize, &Panel)| {
            panel.count == 1 && panel.size == width && side.source(panel) == at + (j * width) as isize
        };
        panels.iter().enumerate().take_while(follows).count()
    }

    /// Packs column panels as [word][column], as wide as the microkernel, zeros at the end.
    ///
    /// # Safety
    /// As `run`; `packed` holds `columns.len()` panels.
    pub(super) unsafe fn pack_columns(&self, b: *const S, columns: &[Panel], piece: usize, packed: *mut E) {
        let (width, s, steps) = (self.kernels.columns, &self.strides, self.packing.steps);
        let mut first = 0;
        while first < columns.len() {
            let at = self.columns.source(&columns[first]);
            let whole = columns[first].size == width;
            let count = if whole { self.side_by_side(&self.columns, &columns[first..], s.b_column, piece) } else { 0 };
            for run in &self.pieces[piece] {
                let to = packed.wrapping_add(first * self.panel_elements()[1]);
                let source = |at: isize| Source { from: b.wrapping_offset(at + run.b), stride: s.b_column, step: s.b_step };
                // SAFETY: the caller's.
                unsafe {
                    if count > 0 {
                        let size = Size { rows: width, width, apart: width, steps: run.size };
                        let to = to.wrapping_add(run.position / steps * width);
                        (self.packing.pack_side)(source(at), to, size, count, self.panel_elements()[1]);
                        continue;
                    }
                    let parts = self.columns.parts(&columns[first]);
                    for (n, part) in parts.iter().enumerate() {
                        // The last one fills the panel.
                        let lanes = if n + 1 == parts.len() { width - part.position } else { part.size };
                        let size = Size { rows: part.size, width: lanes, apart: width, steps: run.size };
                        self.pack_run(source(part.source), to.wrapping_add(part.position), run.position, size);
                    }
                }
            }
            first += count.max(1);
        }
        // SAFETY: the caller's.
        unsafe { self.end_with_zeros(columns.len(), piece, packed) };
    }

    /// What follows the words of so many column panels, up to whole ones of what a block takes at a time.
    ///
    /// # Safety
    /// As `pack_columns`.
    unsafe fn end_with_zeros(&self, columns: usize, piece: usize, packed: *mut E) {
        let width = self.kernels.columns;
        let words = self.pieces[piece].last().map_or(0, |run| (run.position + run.size).div_ceil(self.packing.steps));
        let missing = words.next_multiple_of(self.kernels.words) - words;
        for panel in 0..if missing > 0 { columns } else { 0 } {
            // SAFETY: the caller's; panels are as long as whole words of the longest piece.
            unsafe { packed.add(panel * self.panel_elements()[1] + words * width).write_bytes(0, missing * width) };
        }
    }
}
