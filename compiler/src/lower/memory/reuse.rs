//! Results in the memory of operands that nothing reads any more.

use super::line::Line;
use crate::lower::select::Selected;
use dcc_program::check::may_replace;
use dcc_program::kernel::Stmt;
use dcc_program::program::{Action, BufferId, Instr, SectionId};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Pieces of scratch with the first and the last instruction of the line that touch them.
pub(super) type Lives = BTreeMap<BufferId, (usize, usize)>;

/// Lets kernels write over operands that they are the last to read, where each element is read as it is replaced: the piece of the result
/// joins that of the operand. Returns into which piece each of those that have gone has gone.
pub(super) fn join(
    selected: &Selected,
    bodies: &BTreeMap<SectionId, &[Instr]>,
    line: &Line,
    sizes: &BTreeMap<BufferId, u64>,
    lives: &mut Lives,
) -> FxHashMap<BufferId, BufferId> {
    let mut joined: FxHashMap<BufferId, BufferId> = FxHashMap::default();
    for (at, instr) in line.instructions(bodies) {
        for i in stored(selected, instr) {
            let own = selected.storage[instr.results[i].0 as usize];
            let root = |buffer: &BufferId| {
                let root = selected.storage[buffer.0 as usize];
                joined.get(&root).copied().unwrap_or(root)
            };
            let Some(&(first, last)) = lives.get(&own) else { continue };
            let is_over = |piece: BufferId| {
                let replaces = |(o, operand)| root(operand) != piece || may_replace(&selected.program, instr, i, o);
                lives.get(&piece).is_some_and(|life| life.1 == at)
                    && sizes[&own] <= sizes[&piece]
                    && instr.operands.iter().enumerate().all(replaces)
                    && !instr.results.iter().any(|result| root(result) == piece)
            };
            let into = instr.operands.iter().map(root).find(|&piece| first == at && is_over(piece));
            if let Some(into) = into {
                lives.remove(&own);
                lives.get_mut(&into).expect("just found").1 = last;
                joined.insert(own, into);
            }
        }
    }
    joined
}

/// A kernel's results, those that it stores last first: of all that it reads, the most has been read by then.
fn stored(selected: &Selected, instr: &Instr) -> Vec<usize> {
    let Action::Kernel(kernel) = instr.action else { return Vec::new() };
    let mut found = Vec::new();
    for stmt in selected.program.kernels[kernel as usize].body.iter().rev() {
        if let Stmt::Store { output, .. } = stmt
            && !found.contains(&usize::from(*output))
        {
            found.push(usize::from(*output));
        }
    }
    found
}
