//! New values computed where the old ones lie: parameters and optimizer state.

use super::super::select::Selected;
use dcc_program::kernel::{Expr, Stmt};
use dcc_program::program::{Action, BufferId, Instr, Library, Program, SectionKind, TokenId, Transfer};

/// Drops each copy of a new value onto its parameter that may be written there at once: by a kernel that reads the parameter only
/// at the element that it writes, or by a gather; nothing reads the old value afterwards.
pub(in crate::lower) fn update_in_place(selected: &mut Selected) {
    let Some(section) = selected.program.sections.iter().rposition(|s| s.kind == SectionKind::Update) else { return };
    let mut body = std::mem::take(&mut selected.program.sections[section].body);
    let mut kept = Vec::new();
    while let Some(Action::Library(Library::Copy)) = body.last().map(|i| &i.action) {
        let copy = body.pop().expect("there is a last instruction");
        let (from, to) = (copy.operands[0], copy.results[0]);
        match writer_in_place(&selected.program, &body, from, to) && selected.storage[from.0 as usize] == from {
            true => rename(&mut body, selected, from, to),
            false => kept.push(copy),
        }
    }
    body.extend(kept.into_iter().rev());
    selected.program.sections[section].body = body;
}

fn writer_in_place(program: &Program, body: &[Instr], from: BufferId, to: BufferId) -> bool {
    let Some(writer) = body.iter().position(|i| i.results.contains(&from)) else { return false };
    let instr = &body[writer];
    let kernel = match instr.action {
        Action::Kernel(kernel) => &program.kernels[kernel as usize],
        Action::Wait(token) => return gathers_in_place(program, body, token, from, to),
        _ => return false,
    };
    let output = instr.results.iter().position(|r| *r == from).expect("found above");
    let stored = kernel.body.iter().find_map(|s| match s {
        Stmt::Store { output: o, index, .. } if usize::from(*o) == output => Some(index),
        _ => None,
    });
    let same_element = kernel.exprs.iter().all(|e| match e {
        Expr::Load { input, index, .. } if instr.operands[usize::from(*input)] == to => Some(index) == stored,
        _ => true,
    });
    let pointwise = kernel.body.iter().all(|s| match s {
        Stmt::Store { over, .. } => over.is_empty(),
        Stmt::Let { .. } => true,
        Stmt::Reduce { .. } => false,
    });
    let read_later = body[writer + 1..].iter().any(|i| i.operands.contains(&to) || i.results.contains(&to));
    let written_before = body[..writer].iter().any(|i| i.results.contains(&to));
    same_element && pointwise && !read_later && !written_before && program.ty(from) == program.ty(to)
}

/// A gather writes its result from the start on.
fn gathers_in_place(program: &Program, body: &[Instr], token: TokenId, from: BufferId, to: BufferId) -> bool {
    let is_start = |instr: &Instr| match instr.action {
        Action::Start { token: other, transfer: Transfer::AllGather { .. } } => other == token,
        _ => false,
    };
    let Some(start) = body.iter().position(is_start) else { return false };
    let touched = |instrs: &[Instr]| instrs.iter().any(|i| i.operands.contains(&to) || i.results.contains(&to));
    let written_before = body[..start].iter().any(|i| i.results.contains(&to));
    !touched(&body[start..]) && !written_before && program.ty(from) == program.ty(to)
}

fn rename(body: &mut [Instr], selected: &mut Selected, from: BufferId, to: BufferId) {
    for instr in body {
        for buffer in instr.results.iter_mut().chain(&mut instr.operands) {
            if *buffer == from {
                *buffer = to;
            }
        }
    }
    for output in &mut selected.program.outputs {
        if output.buffer == from {
            output.buffer = to;
        }
    }
    selected.storage[from.0 as usize] = selected.storage[to.0 as usize];
}
