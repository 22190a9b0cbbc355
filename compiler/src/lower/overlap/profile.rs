//! Bytes of scratch that a section holds at each of its instructions.

use super::super::select::Selected;
use super::windows::Flight;
use dcc_program::program::{BufferId, Instr};
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Profile {
    live: Vec<u64>,
    most: u64,
    /// By piece of memory, its bytes and the last instruction that needs it.
    ends: BTreeMap<BufferId, (u64, usize)>,
}

impl Profile {
    pub fn new(selected: &Selected, scratch: &BTreeSet<BufferId>, body: &[Instr]) -> Profile {
        let bytes = |id: BufferId| selected.program.ty(id).local_bytes(&selected.program.mesh);
        let mut lives: BTreeMap<BufferId, (u64, usize, usize)> = BTreeMap::new();
        for (at, instr) in body.iter().enumerate() {
            for &id in instr.results.iter().chain(&instr.operands) {
                let root = selected.storage[id.0 as usize];
                if scratch.contains(&root) {
                    let life = lives.entry(root).or_insert((0, at, at));
                    *life = (life.0.max(bytes(id)), life.1, at);
                }
            }
        }
        let mut live = vec![0; body.len()];
        for &(bytes, first, last) in lives.values() {
            live[first..=last].iter_mut().for_each(|sum| *sum += bytes);
        }
        let most = live.iter().copied().max().unwrap_or(0);
        Profile { live, most, ends: lives.into_iter().map(|(id, (bytes, _, last))| (id, (bytes, last))).collect() }
    }

    /// The last place, up to `due`, where a transfer may be waited for without making the section need more; its operand lives so long.
    pub fn extend(&mut self, flight: &Flight) -> usize {
        let Some((bytes, last)) = self.ends.get_mut(&flight.operand) else { return flight.due };
        let from = (*last + 1).min(flight.due);
        let room = self.live[from..flight.due].iter().take_while(|&&sum| sum + *bytes <= self.most).count();
        self.live[from..from + room].iter_mut().for_each(|sum| *sum += *bytes);
        *last = (*last).max((from + room).saturating_sub(1));
        (from + room).max(flight.wait.min(flight.due))
    }
}
