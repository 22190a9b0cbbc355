//! When transfers start and when they are waited for: apart, so that what is computed in between hides them.
//!
//! Before: every wait directly follows its start, new values are computed in place. After: the same instructions with starts earlier and
//! waits later within their section, each start still behind what it reads and each wait before whoever reads its result or overwrites
//! its operand. All ranks of a stage run one program, so the members of a group start in one order; messages and sums over stages, whose
//! members run different programs, stay where they are.
//!
//! What that costs in memory is bounded, since either end of a transfer lives until it is waited for:
//! - Where neither end is scratch, or an all_reduce ends where it began (`reduce`), it starts when its operand is there and is waited for
//!   when its result is read: nothing lives longer than it did.
//! - What is gathered of parameters is gathered one bucket ahead of its use: while one is used, the next is under way (FSDP, Zhao et al.
//!   2023, section 3.3.2).
//! - What the section does not read, such as a gradient's shard, is waited for when the next one starts.
//! - All else is waited for later only where that makes the section need no more.

mod buckets;
mod emit;
mod profile;
mod reduce;
mod windows;

use super::select::Selected;
use crate::plan::{Overlap, Plan};
use dcc_program::program::{BufferId, Instr, SectionId};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn overlap(selected: &mut Selected, plan: &Plan) {
    reduce::reduce_in_place(selected);
    if plan.overlap == Overlap::Off {
        return;
    }
    let scratch = scratch(selected);
    for index in 0..selected.program.sections.len() {
        let body = std::mem::take(&mut selected.program.sections[index].body);
        selected.program.sections[index].body = section(selected, &scratch, plan, body);
    }
}

fn section(selected: &Selected, scratch: &BTreeSet<BufferId>, plan: &Plan, body: Vec<Instr>) -> Vec<Instr> {
    let flights = windows::flights(selected, scratch, &body);
    if flights.is_empty() {
        return body;
    }
    let mut profile = profile::Profile::new(selected, scratch, &body);
    let buckets = buckets::fill(flights, plan, &mut profile);
    emit::emit(body, buckets)
}

/// Pieces of memory that live within one section.
fn scratch(selected: &Selected) -> BTreeSet<BufferId> {
    let root = |id: BufferId| selected.storage[id.0 as usize];
    let program = &selected.program;
    let mut sections: BTreeMap<BufferId, BTreeSet<SectionId>> = BTreeMap::new();
    for section in &program.sections {
        for id in section.body.iter().flat_map(|instr| instr.results.iter().chain(&instr.operands)) {
            sections.entry(root(*id)).or_default().insert(section.id());
        }
    }
    let outside = program.inputs.iter().map(|x| x.buffer).chain(program.outputs.iter().map(|x| x.buffer));
    let outside = outside.chain(selected.persistent.iter().copied()).chain(selected.sent.iter().map(|(id, _)| *id));
    let outside: BTreeSet<BufferId> = outside.map(root).collect();
    sections.into_iter().filter(|(id, of)| of.len() == 1 && !outside.contains(id)).map(|(id, _)| id).collect()
}
