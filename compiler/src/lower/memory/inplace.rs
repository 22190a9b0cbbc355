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
        match writes_in_place(selected, &body, &kept, from, to) {
            true => rename(body.iter_mut().chain(&mut kept), selected, from, to),
            false => kept.push(copy),
        }
    }
    body.extend(kept.into_iter().rev());
    selected.program.sections[section].body = body;
}

/// Whether what computes `from` may write it where `to` lies; `kept` are copies behind the body.
fn writes_in_place(selected: &mut Selected, body: &[Instr], kept: &[Instr], from: BufferId, to: BufferId) -> bool {
    let Selected { program, storage, .. } = selected;
    let Some(writer) = body.iter().position(|i| i.results.contains(&from)) else { return false };
    let is_param = program.params.iter().any(|param| param.buffer == from);
    if program.ty(from) != program.ty(to) || storage[from.0 as usize] != from || is_param {
        return false;
    }
    // A parameter may be read under another type.
    let lies_there = |id: &BufferId| storage[id.0 as usize] == storage[to.0 as usize];
    let reads = |i: &Instr| i.operands.iter().any(lies_there);
    let writes = |i: &Instr| i.results.iter().any(lies_there);
    if body[..writer].iter().any(writes) || body[writer + 1..].iter().chain(kept).any(|i| reads(i) || writes(i)) {
        return false;
    }
    match body[writer].action {
        Action::Wait(token) => gathers_in_place(body, token, lies_there),
        Action::Kernel(_) => computes_in_place(program, body, writer, from, lies_there),
        _ => false,
    }
}

/// Whether the kernel of `writer` may write `from` where some of its operands lie. Its stores may change places for that: what a store
/// reads must not have been replaced by one before it.
fn computes_in_place(
    program: &mut Program,
    body: &[Instr],
    writer: usize,
    from: BufferId,
    lies_there: impl Fn(&BufferId) -> bool,
) -> bool {
    let Action::Kernel(kernel) = body[writer].action else { return false };
    let output = body[writer].results.iter().position(|r| *r == from).expect("the writer of it");
    let given = program.kernels[kernel as usize].body.clone();
    for stmts in [given.clone(), stored_last(&given, output)] {
        program.kernels[kernel as usize].body = stmts;
        let replaces = |instr: &Instr, i: usize, o: usize| may_replace(program, instr, i, o);
        let mut users = body.iter().filter(|i| i.action == Action::Kernel(kernel));
        let still = users.all(|instr| in_place(instr).all(|(i, o)| replaces(instr, i, o)));
        let mut reads = (0..body[writer].operands.len()).filter(|o| lies_there(&body[writer].operands[*o]));
        if still && reads.all(|o| replaces(&body[writer], output, o)) {
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
fn gathers_in_place(body: &[Instr], token: TokenId, lies_there: impl Fn(&BufferId) -> bool) -> bool {
    let is_start = |instr: &Instr| match instr.action {
        Action::Start { token: other, transfer: Transfer::AllGather { .. } } => other == token,
        _ => false,
    };
    let Some(start) = body.iter().position(is_start) else { return false };
    let touched = |instr: &Instr| instr.operands.iter().chain(&instr.results).any(&lies_there);
    let written_before = body[..start].iter().any(|instr| instr.results.iter().any(&lies_there));
    !body[start..].iter().any(touched) && !written_before
}

/// `from`, and what it is called under other types, becomes `to`.
fn rename<'a>(instrs: impl Iterator<Item = &'a mut Instr>, selected: &mut Selected, from: BufferId, to: BufferId) {
    for instr in instrs {
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
    let place = selected.storage[to.0 as usize];
    selected.storage.iter_mut().filter(|storage| **storage == from).for_each(|storage| *storage = place);
}
