//! The gradient of attention.

use super::rows::Row;
use super::{Attention, Inputs, KEYS, MAX_BLOCK, Shape, Strides, Task};
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

/// Pointers of one backward pass.
struct Pass<'a, E> {
    task: Task<'a, E>,
    packed_v: *const E,
    given: &'a Gradient<'a, E>,
    dq: SharedPtr<E>,
    dk: SharedPtr<E>,
    dv: SharedPtr<E>,
    /// Layouts of dQ, dK, dV.
    strides: [Strides; 3],
}

// SAFETY: chunks write disjoint heads.
unsafe impl<E: Send> Send for Pass<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Pass<'_, E> {}

/// A block of queries against a block of keys.
#[derive(Clone, Copy)]
struct Cell {
    head: [usize; 3],
    first: usize,
    rows: usize,
    from: usize,
    keys: usize,
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
        let (for_k, for_v) = workspace.split_at_mut(self.forward_workspace());
        self.pack(pool, given.inputs.k, &s.k, s.channels, for_k);
        self.pack(pool, given.inputs.v, &s.v, s.values, for_v);
        let task = Task { inputs: given.inputs, packed_k: for_k.as_ptr() };
        let pass = Pass {
            task,
            packed_v: for_v.as_ptr(),
            given,
            dq: SharedPtr::new(results.dq.as_mut_ptr()),
            dk: SharedPtr::new(results.dk.as_mut_ptr()),
            dv: SharedPtr::new(results.dv.as_mut_ptr()),
            strides: [results.dq_strides, results.dk_strides, results.dv_strides],
        };
        pool.run(s.batch * s.heads, self.flops() * 5 / 32 / self.kernels.lanes, &|worker: &mut Worker, chunk| {
            // SAFETY: lengths were checked; the chunk owns its key head's gradients and those of the queries that see it.
            unsafe { self.backward_head(&pass, [chunk / s.heads, chunk % s.heads], worker.scratch().cast()) };
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

    /// # Safety
    /// The operands were checked, `scratch` holds `scratch_elements`, nobody else writes this head's gradients.
    unsafe fn backward_head(&self, pass: &Pass<'_, E>, [b, h]: [usize; 2], scratch: *mut E) {
        let s = &self.shape;
        // SAFETY: positions and channels stay below the operands' sizes.
        unsafe {
            for key in 0..s.keys {
                let (dk, dv) = (at(&pass.strides[1], [b, h, 0], key), at(&pass.strides[2], [b, h, 0], key));
                clear(pass.dk.get().add(dk), s.channels, pass.strides[1].channel);
                clear(pass.dv.get().add(dv), s.values, pass.strides[2].channel);
            }
            for g in 0..s.groups {
                for first in (0..s.queries).step_by(self.block) {
                    self.backward_rows(pass, [b, h, g], first, scratch);
                }
            }
        }
    }

    /// # Safety
    /// As `backward_head`.
    unsafe fn backward_rows(&self, pass: &Pass<'_, E>, head: [usize; 3], first: usize, scratch: *mut E) {
        let s = &self.shape;
        let rows = self.block.min(s.queries - first);
        let seen = self.limit(first + rows - 1);
        let mut state = [Row::<E>::start(); MAX_BLOCK];
        // SAFETY: as above.
        unsafe {
            for (r, row) in state[..rows].iter_mut().enumerate() {
                let (o, g) = (at(&s.o, head, first + r), at(&pass.given.output_gradient_strides, head, first + r));
                let given = (&pass.given.output_gradient[g..], &pass.given.o[o..]);
                let dot = match s.o.channel {
                    1 => self.rows.dot(given.0.as_ptr(), given.1.as_ptr(), s.values),
                    apart => (0..s.values).fold(E::ZERO, |dot, f| dot.plus(given.0[f].times(given.1[f * apart]))),
                };
                *row = Row::with(pass.given.lse[at(&s.lse, head, first + r)], dot);
                if seen == 0 {
                    let dq = at(&pass.strides[0], head, first + r);
                    clear(pass.dq.get().add(dq), s.channels, pass.strides[0].channel);
                }
            }
            for from in (0..seen).step_by(KEYS) {
                let cell = Cell { head, first, rows, from, keys: KEYS.min(seen - from) };
                self.backward_cell(pass, cell, &mut state[..rows], scratch);
            }
        }
    }

    /// P and dS of one block, then its share of dV, dK and dQ.
    ///
    /// # Safety
    /// As `backward_head`.
    unsafe fn backward_cell(&self, pass: &Pass<'_, E>, cell: Cell, state: &mut [Row<E>], scratch: *mut E) {
        let s = &self.shape;
        let Cell { head, first, rows, from, keys } = cell;
        let number = head[0] * s.heads + head[1];
        let (p, ds) = (scratch, scratch.wrapping_add(self.block * KEYS));
        let block = [rows, first, from, keys];
        let strides = &pass.given.output_gradient_strides;
        let q = pass.task.inputs.q.as_ptr().wrapping_add(at(&s.q, head, first));
        let g = pass.given.output_gradient.as_ptr().wrapping_add(at(strides, head, first));
        // SAFETY: as above.
        unsafe {
            self.product(q, s.q.position, s.channels, pass.task.packed_k.add(number * self.packed(s.channels)), block, p);
            self.product(g, strides.position, s.values, pass.packed_v.add(number * self.packed(s.values)), block, ds);
            for (r, row) in state.iter_mut().enumerate() {
                let count = self.limit(first + r).saturating_sub(from).min(keys);
                row.describe(s.scale, self.masked(pass.task.inputs.mask, head, first + r, from), s.mask.channel, keys, count);
                self.rows.probability(p.add(r * KEYS), row, count);
                self.rows.gradient(ds.add(r * KEYS), row, p.add(r * KEYS), keys);
            }
            let key = [head[0], head[1], 0];
            let step = KEYS as isize;
            let [dq, dk, dv] = &pass.strides;
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
                beta: E::ONE,
            };
            let into = |block: Block<E>, c: *mut E, layout: &Strides| Block {
                c,
                c_row: layout.position as isize,
                c_column: layout.channel as isize,
                ..block
            };
            let product = into(unit(p, 1, step, g, strides.position, rows), pass.dv.get().add(at(dv, key, from)), dv);
            self.accumulate(keys, s.values, product);
            let product = into(unit(ds, 1, step, q, s.q.position, rows), pass.dk.get().add(at(dk, key, from)), dk);
            self.accumulate(keys, s.channels, product);
            let k = pass.task.inputs.k.as_ptr().add(at(&s.k, key, from));
            let product = into(unit(ds, step, 1, k, s.k.position, keys), pass.dq.get().add(at(dq, head, first)), dq);
            self.accumulate(rows, s.channels, Block { beta: if from == 0 { E::ZERO } else { E::ONE }, ..product });
        }
    }
}
