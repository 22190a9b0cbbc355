//! Memory that an instruction's results share with its operands or with each other.
//!
//! A kernel may write over an input where every point reads just the element that it writes, and nothing reads the input
//! after the store. Copies, reshapes and the like may stay in place; `resolve` and `drop_mb` must. An all_reduce may end
//! where it began. Everything else needs results of its own.

use super::{Checked, Fault, WaitResults, refuse};
use crate::kernel::*;
use crate::program::*;

/// Bytes of a buffer in its block; slots of an area do not matter within one instruction.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Span {
    pub place: Place,
    pub start: u64,
    pub end: u64,
}

impl Span {
    pub fn of(p: &Program, id: BufferId) -> Span {
        let buffer = p.buffer(id);
        Span { place: buffer.place, start: buffer.offset, end: buffer.offset + buffer.ty.local_bytes(&p.mesh) }
    }

    pub fn overlaps(&self, other: &Span) -> bool {
        self.place == other.place && self.start < other.end && other.start < self.end
    }
}

pub(super) fn instr(p: &Program, instr: &Instr, wait_results: &WaitResults<'_>) -> Checked<()> {
    for (i, &a) in instr.results.iter().enumerate() {
        for &b in &instr.results[..i] {
            if Span::of(p, a).overlaps(&Span::of(p, b)) {
                return refuse(Fault::InPlace, format!("results b{} and b{} share memory", b.0, a.0));
            }
        }
        for (o, &operand) in instr.operands.iter().enumerate() {
            shared(p, instr, (i, a), (o, operand))?;
        }
    }
    match &instr.action {
        Action::Library(Library::ResolveMicrobatches | Library::DropMicrobatch { .. }) => {
            let (result, operand) = (Span::of(p, instr.results[0]), Span::of(p, instr.operands[0]));
            if result != operand {
                return refuse(Fault::InPlace, "operand and result must be in the same place");
            }
            Ok(())
        }
        Action::Start { token, transfer } => {
            let results = wait_results.get(token).copied().unwrap_or_default();
            transfer_results(p, instr, results, transfer)
        }
        _ => Ok(()),
    }
}

fn shared(p: &Program, instr: &Instr, (i, result): (usize, BufferId), (o, operand): (usize, BufferId)) -> Checked<()> {
    let (a, b) = (Span::of(p, result), Span::of(p, operand));
    if !a.overlaps(&b) {
        return Ok(());
    }
    let text = format!("result b{} and operand b{}", result.0, operand.0);
    if a != b {
        return refuse(Fault::InPlace, format!("{text} share part of their memory"));
    }
    let allowed = match &instr.action {
        Action::Kernel(_) => may_replace(p, instr, i, o),
        Action::Library(library) => matches!(
            library,
            Library::Copy
                | Library::Reshape { .. }
                | Library::ResolveMicrobatches
                | Library::KeepFirst { .. }
                | Library::DropMicrobatch { .. }
        ),
        _ => false,
    };
    if allowed { Ok(()) } else { refuse(Fault::InPlace, format!("{text} share memory, but it writes before all is read")) }
}

/// Whether result `i` of a kernel may lie where its operand `o` does: elements are of one size and number, and each is read where it is
/// about to be written. False of other instructions.
pub fn may_replace(p: &Program, instr: &Instr, i: usize, o: usize) -> bool {
    let Action::Kernel(kernel) = instr.action else { return false };
    let block = |id: BufferId| (p.ty(id).local_shape(&p.mesh), p.ty(id).dtype.bytes());
    block(instr.results[i]) == block(instr.operands[o]) && pointwise(&p.kernels[kernel as usize], i as u8, o as u8)
}

/// Whether the kernel reads of `input` just the element of `output` that it is about to write, not to add to: that would be twice there.
fn pointwise(kernel: &Kernel, output: u8, input: u8) -> bool {
    let stores: Vec<(usize, &[Index], StoreMode)> = (kernel.body.iter().enumerate())
        .filter_map(|(i, stmt)| match stmt {
            Stmt::Store { output: o, index, mode, .. } if *o == output => Some((i, &index[..], *mode)),
            _ => None,
        })
        .collect();
    let Some(&(first, index, _)) = stores.first() else { return false };
    let plain = index.iter().all(|i| matches!(i, Index::Dim(_)));
    if !plain || stores.iter().any(|(_, other, mode)| *other != index || *mode == StoreMode::Accumulate) {
        return false;
    }
    let reads = |id: &ExprId| matches!(kernel.get(*id), Expr::Load { input: i, .. } if *i == input);
    let elsewhere = |id: &ExprId| matches!(kernel.get(*id), Expr::Load { index: i, .. } if i[..] != *index);
    kernel.body.iter().enumerate().all(|(i, stmt)| {
        let needed = kernel.post_order(stmt.value(), |_| false);
        needed.iter().filter(|id| reads(id)).all(|id| i <= first && !elsewhere(id))
    })
}

/// Each result may be where its own operand is, of what may end where it began.
fn transfer_results(p: &Program, instr: &Instr, results: &[BufferId], transfer: &Transfer) -> Checked<()> {
    for (r, &result) in results.iter().enumerate() {
        for (o, &operand) in instr.operands.iter().enumerate() {
            let (a, b) = (Span::of(p, result), Span::of(p, operand));
            let reduces = matches!(transfer, Transfer::AllReduce { .. } | Transfer::StageSum { .. });
            if a.overlaps(&b) && !(reduces && r == o && a == b) {
                return refuse(Fault::InPlace, format!("result b{} and operand b{} share memory", result.0, operand.0));
            }
        }
    }
    Ok(())
}
