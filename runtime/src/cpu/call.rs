//! A prepared call: what remains of an instruction when everything known before the step is worked out.

use super::Running;
use super::attention::Attending;
use super::contraction::Contraction;
use super::convolution::Convolving;
use super::indexed::{Choice, RunningSum, Scatter};
use super::pool::Pooling;

use crate::error::{Error, Result};
use crate::exec::{Bound, Site, Span};
use crate::library::rows::Rows;
use dcc_kernels::cpu::jit::Compiled;
use dcc_program::kernel::Kernel;
use dcc_program::program::Instr;
use std::sync::Arc;

/// One instruction, ready to run on any slots and microbatch.
pub struct Call {
    work: Work,
    /// Bytes of workspace that it needs, and where they are in planned memory, if they are there.
    needs: usize,
    workspace: Option<Span>,
}

pub(super) enum Work {
    Kernel(Generated),
    Dot(Box<Contraction>),
    Convolution(Box<Convolving>),
    MaxPool(Pooling),
    Attention(Box<Attending>),
    Scatter(Scatter),
    Cumsum(RunningSum),
    TopK(Choice),
    /// Copies rows, or zeroes a span.
    Rows(Rows),
    Zero(Span),
}

/// A generated kernel and its arguments.
pub(super) struct Generated {
    code: Arc<Compiled>,
    /// Inputs, then outputs.
    operands: Box<[Span]>,
    /// Global offsets of microbatch 0, and what each microbatch adds.
    offsets: Box<[(i64, i64)]>,
}

impl super::Cpu {
    /// Compiles `kernel` for the operands of `instr` on this rank. Errors: operands that do not fit it.
    pub fn kernel(&mut self, site: &Site<'_>, kernel: &Kernel, instr: &Instr) -> Result<Call> {
        let Bound { mut nest, operands, offsets } = Bound::new(site, kernel, instr)?;
        nest.shared = Some(shared(&operands, nest.inputs.len()));
        let (operands, offsets): (Box<[Span]>, Box<[(i64, i64)]>) = (operands.into(), offsets.into());
        let code = self.jit.compile(nest).map_err(Error::device)?;
        let large_enough = operands.iter().zip(&code.operand_bytes).all(|(span, &bytes)| span.bytes >= bytes);
        if operands.len() != code.operand_bytes.len() || !large_enough {
            return Err(Error::artifact("a kernel's operands have other types than the kernel"));
        }
        let words = operands.len() + offsets.len();
        self.arguments.reserve(words.saturating_sub(self.arguments.len()));
        Ok(Call::from(Work::Kernel(Generated { code, operands, offsets })))
    }
}

/// By output, which of the `inputs` first operands share memory with it.
fn shared(operands: &[Span], inputs: usize) -> Vec<Vec<u8>> {
    let (inputs, outputs) = operands.split_at(inputs);
    let of = |output: &Span| inputs.iter().zip(0..).filter(|(input, _)| input.overlaps(output)).map(|(_, n)| n).collect();
    outputs.iter().map(of).collect()
}

impl From<Work> for Call {
    fn from(work: Work) -> Call {
        Call::new(work, 0)
    }
}

impl Call {
    /// `needs`: bytes of workspace, of which there are whole words.
    pub(super) fn new(work: Work, needs: usize) -> Call {
        Call { work, needs: needs.next_multiple_of(size_of::<u64>()), workspace: None }
    }

    /// Bytes of workspace that it needs: of planned memory, where `work_in` names some, else of the device's own.
    pub fn workspace_bytes(&self) -> usize {
        self.needs
    }

    /// Gives it a workspace: a span that nothing else uses while it runs.
    ///
    /// # Panics
    /// If that is shorter than what it needs.
    pub fn work_in(&mut self, span: Span) {
        assert!(
            span.bytes >= self.needs && span.offset.is_multiple_of(size_of::<u64>()),
            "a workspace of {span:?} for {}",
            self.needs
        );
        self.workspace = Some(span);
    }

    /// Multiplications and additions of matrix products in one run.
    pub fn flops(&self) -> u64 {
        match &self.work {
            Work::Dot(dot) => dot.flops(),
            Work::Convolution(convolution) => convolution.flops(),
            Work::Attention(attention) => attention.flops(),
            _ => 0,
        }
    }

    pub(super) fn run(&self, mut on: Running<'_>) {
        if let Some(span) = self.workspace {
            // SAFETY: any bits are a u64, to which the span is aligned; nothing else uses it now.
            on.workspace = unsafe { on.memory.elements_mut(span, on.bases) };
        }
        match &self.work {
            Work::Kernel(kernel) => kernel.run(on),
            Work::Dot(dot) => dot.run(on),
            Work::Convolution(convolution) => convolution.run(on),
            Work::MaxPool(pool) => pool.run(&on),
            Work::Attention(attention) => attention.run(on),
            Work::Scatter(scatter) => scatter.run(&on),
            Work::Cumsum(sum) => sum.run(&on),
            Work::TopK(choice) => choice.run(&on),
            Work::Rows(rows) => rows.run(&on),
            Work::Zero(span) => on.memory.zero_span(*span, on.bases),
        }
    }
}

impl Generated {
    fn run(&self, on: Running<'_>) {
        let Running { memory, pool, arguments, bases, microbatch, .. } = on;
        arguments.clear();
        arguments.extend(self.operands.iter().map(|&span| memory.pointer(span, bases) as u64));
        arguments.extend(self.offsets.iter().map(|&(base, step)| (base + step * i64::from(microbatch)) as u64));
        // SAFETY: `pointer` checked each span against the arena, and `kernel` each span against what the code accesses; spans are
        // aligned to their elements. The program's order keeps others from writing the operands meanwhile.
        unsafe { self.code.run(pool, arguments) }
    }
}
