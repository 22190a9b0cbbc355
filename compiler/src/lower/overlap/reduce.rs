//! All_reduces that end where they began: where nothing reads the pending value afterwards, it needs no second piece of memory.

use super::super::select::Selected;
use dcc_program::program::{Action, BufferId, SectionId, TokenId, Transfer};
use std::collections::{BTreeMap, BTreeSet};

/// Gives the result of each all_reduce the memory of its operand, where that is free from the start on.
pub(super) fn reduce_in_place(selected: &mut Selected) {
    for (section, at, operand, result) in reductions(selected) {
        let root = selected.storage[operand.0 as usize];
        let bytes = |id: BufferId| selected.program.ty(id).local_bytes(&selected.program.mesh);
        let fits = bytes(operand) == bytes(result) && bytes(operand) == bytes(root);
        let own = selected.storage[result.0 as usize] == result;
        if own && fits && is_free(selected, root, section, at) {
            // What shares the result's memory comes along.
            selected.storage.iter_mut().filter(|of| **of == result).for_each(|of| *of = root);
        }
    }
}

/// Section, instruction, operand and result of every all_reduce.
fn reductions(selected: &Selected) -> Vec<(SectionId, usize, BufferId, BufferId)> {
    let sections = &selected.program.sections;
    let mut results: BTreeMap<TokenId, BufferId> = BTreeMap::new();
    for instr in sections.iter().flat_map(|section| &section.body) {
        if let (Action::Wait(token), [result]) = (&instr.action, &instr.results[..]) {
            results.insert(*token, *result);
        }
    }
    let mut found = Vec::new();
    // The last variant of a section has the instructions of the others.
    let last: BTreeMap<SectionId, usize> = sections.iter().enumerate().map(|(at, section)| (section.id(), at)).collect();
    for (&id, &index) in &last {
        for (at, instr) in sections[index].body.iter().enumerate() {
            if let Action::Start { token, transfer: Transfer::AllReduce { .. } } = &instr.action {
                found.push((id, at, instr.operands[0], results[token]));
            }
        }
    }
    found
}

/// Whether nobody but the wait touches the memory once instruction `at` of a section has started, and the section that runs once for
/// each microbatch finds it written anew.
fn is_free(selected: &Selected, root: BufferId, section: SectionId, at: usize) -> bool {
    let program = &selected.program;
    let of = |id: BufferId| selected.storage[id.0 as usize];
    let named = program.params.iter().map(|x| x.buffer).chain(program.inputs.iter().map(|x| x.buffer));
    let named = named.chain(program.scalars.iter().map(|x| x.buffer)).chain(program.outputs.iter().map(|x| x.buffer));
    let sent = selected.sent.iter().map(|(id, _)| *id);
    if named.chain(sent).any(|id| of(id) == root) {
        return false;
    }
    let last: BTreeMap<SectionId, usize> = program.sections.iter().enumerate().map(|(at, s)| (s.id(), at)).collect();
    let mut touching: BTreeSet<SectionId> = BTreeSet::new();
    for (&id, &index) in &last {
        let body = &program.sections[index].body;
        let touches = |n: usize| body[n].results.iter().chain(&body[n].operands).any(|&b| of(b) == root);
        let mut places = (0..body.len()).filter(|&n| touches(n));
        match id == section {
            true if places.clone().any(|n| n > at) => return false,
            _ => touching.extend(places.next().map(|_| id)),
        }
    }
    let before = |id: &SectionId| *id <= section && (id.chunk == section.chunk || !id.kind.is_pass());
    let anew = !section.kind.is_per_microbatch() || touching.iter().all(|id| id.kind.is_per_microbatch());
    touching.iter().all(before) && anew
}
