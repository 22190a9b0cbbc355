//! New values computed where the old ones lie: parameters and optimizer state.

use super::super::select::Selected;
use dcc_program::check::may_replace;
use dcc_program::kernel::Stmt;
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
        match selected.storage[from.0 as usize] == from && writes_in_place(&mut selected.program, &body, from, to) {
            true => rename(&mut body, selected, from, to),
            false => kept.push(copy),
        }
    }
    body.extend(kept.into_iter().rev());
    selected.program.sections[section].body = body;
}

fn writes_in_place(program: &mut Program, body: &[Instr], from: BufferId, to: BufferId) -> bool {
    let Some(writer) = body.iter().position(|i| i.results.contains(&from)) else { return false };
    if program.ty(from) != program.ty(to) {
        return false;
    }
    match body[writer].action {
        Action::Wait(token) => gathers_in_place(body, token, to),
        Action::Kernel(_) => {
            let read_later = body[writer + 1..].iter().any(|i| i.operands.contains(&to) || i.results.contains(&to));
            let written_before = body[..writer].iter().any(|i| i.results.contains(&to));
            !read_later && !written_before && computes_in_place(program, body, writer, from, to)
        }
        _ => false,
    }
}

/// Whether the kernel of `writer` may write `from` where `to` lies. Its stores may change places for that: what a store reads must not
/// have been replaced by one before it.
fn computes_in_place(program: &mut Program, body: &[Instr], writer: usize, from: BufferId, to: BufferId) -> bool {
    let Action::Kernel(kernel) = body[writer].action else { return false };
    let output = body[writer].results.iter().position(|r| *r == from).expect("the writer of it");
    let given = program.kernels[kernel as usize].body.clone();
    for stmts in [given.clone(), stored_last(&given, output)] {
        program.kernels[kernel as usize].body = stmts;
        let replaces = |instr: &Instr, i: usize, o: usize| may_replace(program, instr, i, o);
        let users = body.iter().filter(|i| i.action == Action::Kernel(kernel));
        let still = users.clone().all(|instr| in_place(instr).all(|(i, o)| replaces(instr, i, o)));
        let reads = (0..body[writer].operands.len()).filter(|o| body[writer].operands[*o] == to);
        if still && reads.clone().all(|o| replaces(&body[writer], output, o)) {
            return true;
        }
    }
    program.kernels[kernel as usize].body = given;
    false
}

/// Results and operands of an instruction that are one.
fn in_place(instr: &Instr) -> impl Iterator<Item = (usize, usize)> {
    let operands = instr.operands.iter().enumerate();
    operands.filter_map(|(o, operand)| Some((instr.results.iter().position(|r| r == operand)?, o)))
}

/// The statements with those that store `output` at the end, if nothing but stores comes in between.
fn stored_last(stmts: &[Stmt], output: usize) -> Vec<Stmt> {
    let begin = stmts.iter().rposition(|s| !matches!(s, Stmt::Store { .. })).map_or(0, |last| last + 1);
    let (others, last): (Vec<&Stmt>, Vec<&Stmt>) =
        stmts[begin..].iter().partition(|s| !matches!(s, Stmt::Store { output: o, .. } if usize::from(*o) == output));
    stmts[..begin].iter().chain(others).chain(last).cloned().collect()
}

/// A gather writes its result from the start on.
fn gathers_in_place(body: &[Instr], token: TokenId, to: BufferId) -> bool {
    let is_start = |instr: &Instr| match instr.action {
        Action::Start { token: other, transfer: Transfer::AllGather { .. } } => other == token,
        _ => false,
    };
    let Some(start) = body.iter().position(is_start) else { return false };
    let touched = |instrs: &[Instr]| instrs.iter().any(|i| i.operands.contains(&to) || i.results.contains(&to));
    let written_before = body[..start].iter().any(|i| i.results.contains(&to));
    !touched(&body[start..]) && !written_before
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
