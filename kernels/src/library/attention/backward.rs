//! The gradient of attention.

use super::ahead::{Ahead, Operand};
use super::rows::{Apart, Row};
use super::{Attention, Cell, Inputs, KEYS, MAX_BLOCK, PANEL, Shape, Side, Strides};
use crate::cpu::pool::{Pool, Worker};
use crate::library::SharedPtr;
use crate::library::math::Real;
use crate::library::microkernel::Block;

/// What the backward pass reads, and the layouts of what the shape does not describe.
pub struct Gradient<'a, E> {
    pub output_gradient: &'a [E],
    /// Of the output's gradient; its channels are contiguous.
    pub output_gradient_strides: Strides,
    pub inputs: Inputs<'a, E>,
    pub o: &'a [E],
    pub lse: &'a [E],
}

/// Where the gradients go, in layouts of their own.
pub struct Gradients<'a, E> {
    pub dq: &'a mut [E],
    pub dk: &'a mut [E],
    pub dv: &'a mut [E],
    pub dq_strides: Strides,
    pub dk_strides: Strides,
    pub dv_strides: Strides,
}

/// Operands of one backward pass.
struct Pass<'a, E> {
    given: &'a Gradient<'a, E>,
    dq: SharedPtr<E>,
    dk: SharedPtr<E>,
    dv: SharedPtr<E>,
    /// Layouts of dQ, dK, dV.
    strides: [Strides; 3],
}

/// A thread's space, and a head's packed keys and values.
#[derive(Clone, Copy)]
struct Space<E> {
    scratch: *mut E,
    packed_k: *mut E,
    packed_v: *mut E,
}

fn at(strides: &Strides, [b, h, g]: [usize; 3], position: usize) -> usize {
    b * strides.batch + h * strides.head + g * strides.group + position * strides.position
}

/// Zeros so many elements, so far apart.
///
/// # Safety
/// They may be written.
unsafe fn clear<E: Real>(to: *mut E, count: usize, apart: usize) {
    // SAFETY: the caller's; zero bits are the number zero.
    unsafe {
        match apart {
            1 => to.write_bytes(0, count),
            _ => (0..count).for_each(|i| *to.add(i * apart) = E::ZERO),
        }
    }
}

impl<E: Real> Attention<E> {
    /// dQ, dK and dV, overwritten.
    ///
    /// # Panics
    /// If an operand or the workspace is too short, or the channels of the output's gradient are not contiguous.
    pub fn backward(&self, pool: &Pool, given: &Gradient<'_, E>, results: Gradients<'_, E>, workspace: &mut [E]) {
        let s = &self.shape;
        self.check_inputs(&given.inputs);
        self.check_gradients(given, &results);
        assert!(workspace.len() >= self.backward_workspace(), "a workspace of {} elements", workspace.len());
        let pass = Pass {
            given,
            dq: SharedPtr::new(results.dq.as_mut_ptr()),
            dk: SharedPtr::new(results.dk.as_mut_ptr()),
            dv: SharedPtr::new(results.dv.as_mut_ptr()),
            strides: [results.dq_strides, results.dk_strides, results.dv_strides],
        };
        let Inputs { k, v, .. } = given.inputs;
        let [for_q, for_k, for_v] = self.operands(&given.inputs);
        let [of_q, of_k, of_v] = &pass.strides;
        let following = [
            for_q,
            for_k,
            for_v,
            Operand::new(given.output_gradient.as_ptr(), &given.output_gradient_strides, s.queries, s.values),
            Operand::new(given.o.as_ptr(), &s.o, s.queries, s.values),
            Operand::new(pass.dq.get(), of_q, s.queries, s.channels),
            Operand::new(pass.dk.get(), of_k, s.keys, s.channels),
            Operand::new(pass.dv.get(), of_v, s.keys, s.values),
        ];
        let (keys, values, own) = (self.packed(s.channels), self.packed(s.values), self.backward_workspace() == 0);
        let workspace = SharedPtr::new(workspace.as_mut_ptr());
        let multiply_adds = self.flops() * 5 / 4 / (s.batch * s.heads).max(1);
        pool.run(s.batch * s.heads, self.flops() * 5 / 32 / self.kernels.lanes, &|worker: &mut Worker, chunk| {
            let mut ahead = Ahead::of(s, chunk + 1, &following, multiply_adds);
            let scratch = worker.scratch().cast::<E>();
            // SAFETY: lengths were checked; the chunk owns its key head's gradients and those of the queries that see it, and its panels.
            unsafe {
                let packed_k =
                    if own { scratch.add(self.scratch_elements()) } else { workspace.get().add(chunk * (keys + values)) };
                let space = Space { scratch, packed_k, packed_v: packed_k.add(keys) };
                self.pack(k, &s.k, s.channels, chunk, space.packed_k);
                self.pack(v, &s.v, s.values, chunk, space.packed_v);
                self.backward_head(&pass, [chunk / s.heads, chunk % s.heads], space, &mut ahead);
            }
        });
    }

    fn check_gradients(&self, given: &Gradient<'_, E>, results: &Gradients<'_, E>) {
        let s: &Shape = &self.shape;
        let need = [
            (given.output_gradient.len(), self.reach(&given.output_gradient_strides, s.queries, s.values)),
            (given.o.len(), self.reach(&s.o, s.queries, s.values)),
            (given.lse.len(), self.reach(&s.lse, s.queries, 1)),
            (results.dq.len(), self.reach(&results.dq_strides, s.queries, s.channels)),
            (results.dk.len(), self.reach(&results.dk_strides, s.keys, s.channels)),
            (results.dv.len(), self.reach(&results.dv_strides, s.keys, s.values)),
        ];
        assert!(need.iter().all(|(have, need)| have >= need), "operands of (have, need) {need:?}");
        assert!(
            given.output_gradient_strides.channel == 1 || s.values == 1,
            "channels of the output's gradient are contiguous"
        );
    }

    /// Keys that the first block of queries sees.
    fn seen_first(&self) -> usize {
        let rows = self.block.min(self.shape.queries);
        if rows == 0 { 0 } else { self.limit(rows - 1) }
    }

    /// # Safety
    /// The operands were checked, the space holds `scratch_elements` and the head's keys and values, nobody else writes this head's gradients.
    unsafe fn backward_head(&self, pass: &Pass<'_, E>, [b, h]: [usize; 2], space: Space<E>, ahead: &mut Ahead<'_, E>) {
        let s = &self.shape;
        // SAFETY: positions and channels stay below the operands' sizes.
        unsafe {
            // The first block of queries overwrites the keys that it sees.
            for key in self.seen_first()..s.keys {
                let (dk, dv) = (at(&pass.strides[1], [b, h, 0], key), at(&pass.strides[2], [b, h, 0], key));
                clear(pass.dk.get().add(dk), s.channels, pass.strides[1].channel);
                clear(pass.dv.get().add(dv), s.values, pass.strides[2].channel);
            }
            for g in 0..s.groups {
                for first in (0..s.queries).step_by(self.block) {
                    self.backward_rows(pass, [b, h, g], first, space, ahead);
                }
            }
        }
    }

    /// # Safety
    /// As `backward_head`.
    unsafe fn backward_rows(
        &self,
        pass: &Pass<'_, E>,
        head: [usize; 3],
        first: usize,
        space: Space<E>,
        ahead: &mut Ahead<'_, E>,
    ) {
        let s = &self.shape;
        let rows = self.block.min(s.queries - first);
        let seen = self.limit(first + rows - 1);
        let mut state = [Row::<E>::start(); MAX_BLOCK];
        // SAFETY: as above.
        unsafe {
            let strides = &pass.given.output_gradient_strides;
            let g = pass.given.output_gradient.as_ptr().add(at(strides, head, first));
            let o = pass.given.o.as_ptr().add(at(&s.o, head, first));
            for (r, row) in state[..rows].iter_mut().enumerate() {
                let (g, o) = (g.add(r * strides.position), o.add(r * s.o.position));
                let dot = match s.o.channel {
                    1 => E::ZERO,
                    apart => (0..s.values).fold(E::ZERO, |dot, f| dot.plus((*g.add(f)).times(*o.add(f * apart)))),
                };
                *row = Row::with(pass.given.lse[at(&s.lse, head, first + r)], dot);
                if seen == 0 {
                    let dq = at(&pass.strides[0], head, first + r);
                    clear(pass.dq.get().add(dq), s.channels, pass.strides[0].channel);
                }
            }
            if s.o.channel == 1 {
                let apart = Apart { strides: [strides.position, s.o.position], count: s.values };
                self.rows.dots(&mut state[..rows], g, o, &apart);
            }
            for from in (0..seen).step_by(KEYS) {
                let cell = Cell { head, first, rows, from, keys: KEYS.min(seen - from) };
                self.backward_cell(pass, cell, &mut state[..rows], space, ahead);
            }
        }
    }

    /// P and dS of one block, then its share of dV, dK and dQ.
    ///
    /// # Safety
    /// As `backward_head`.
    unsafe fn backward_cell(
        &self,
        pass: &Pass<'_, E>,
        cell: Cell,
        state: &mut [Row<E>],
        space: Space<E>,
        ahead: &mut Ahead<'_, E>,
    ) {
        let s = &self.shape;
        let Cell { head, first, rows, from, keys } = cell;
        let (panel, p) = (space.scratch, space.scratch.wrapping_add(PANEL));
        let ds = p.wrapping_add(self.block * KEYS);
        let inputs = &pass.given.inputs;
        let strides = &pass.given.output_gradient_strides;
        let q = inputs.q.as_ptr().wrapping_add(at(&s.q, head, first));
        let g = pass.given.output_gradient.as_ptr().wrapping_add(at(strides, head, first));
        let key = [head[0], head[1], 0];
        let (k, v) = (inputs.k.as_ptr().wrapping_add(at(&s.k, key, 0)), inputs.v.as_ptr().wrapping_add(at(&s.v, key, 0)));
        let side = |from, position, channels| Side { from, position, channels };
        let for_p = [side(q, s.q.position, s.channels), side(k, s.k.position, s.channels)];
        let for_ds = [side(g, strides.position, s.values), side(v, s.v.position, s.values)];
        // SAFETY: as above.
        unsafe {
            self.product(&cell, for_p, space.packed_k, p, ahead);
            self.product(&cell, for_ds, space.packed_v, ds, ahead);
            for (r, row) in state.iter_mut().enumerate() {
                let count = self.limit(first + r).saturating_sub(from).min(keys);
                row.describe(s.scale, self.masked(inputs.mask, head, first + r, from), s.mask.channel, keys, count);
            }
            self.rows.gradient(p, state, ds);
            let is_far = !ahead.is_used();
            let step = KEYS as isize;
            let [dq, dk, dv] = &pass.strides;
            let into_sums = if head[2] == 0 && first == 0 { E::ZERO } else { E::ONE };
            let unit = |a, a_row, a_step, b, b_step: usize, depth| Block {
                depth,
                a,
                a_row,
                a_step,
                b,
                b_step: b_step as isize,
                b_padded: false,
                c: std::ptr::null_mut(),
                c_row: 0,
                c_column: 0,
                columns: 0,
                alpha: E::ONE,
                beta: into_sums,
            };
            let into = |block: Block<E>, c: *mut E, layout: &Strides| Block {
                c,
                c_row: layout.position as isize,
                c_column: layout.channel as isize,
                ..block
            };
            let product = into(unit(p, 1, step, g, strides.position, rows), pass.dv.get().add(at(dv, key, from)), dv);
            self.accumulate([keys, s.values], product, panel, is_far, |tile| self.queries_of(&cell, tile), ahead);
            let product = into(unit(ds, 1, step, q, s.q.position, rows), pass.dk.get().add(at(dk, key, from)), dk);
            self.accumulate([keys, s.channels], product, panel, is_far, |tile| self.queries_of(&cell, tile), ahead);
            let k = k.add(from * s.k.position);
            let product = into(unit(ds, step, 1, k, s.k.position, keys), pass.dq.get().add(at(dq, head, first)), dq);
            let product = Block { beta: if from == 0 { E::ZERO } else { E::ONE }, ..product };
            self.accumulate([rows, s.channels], product, panel, is_far, |tile| self.keys_of(&cell, tile), ahead);
        }
    }
}
