//! Parameters updated as soon as their gradients are there, in the backward pass, so that no two gradients need lie in memory at once
//! (Lv et al. 2023, arXiv 2306.09782, there for SGD).
//!
//! Before: `update` has all that the optimizer does. After, where each section runs once a step: what of it reads only what the backward
//! pass has made stands behind the last instruction that it must follow. Clipping and loss scaling wait for all gradients, as before.

use super::select::Selected;
use crate::schedule::Turns;
use dcc_program::program::{Action, BufferId, Instr, ParamKind, SectionId, SectionKind, TokenId};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};

/// Section, by its turn, and behind how many of its instructions.
type At = (usize, usize);

pub(super) fn update_early(selected: &mut Selected, turns: &Turns) {
    let order: Vec<SectionId> = turns.list.iter().map(|turn| turn.0).collect();
    let runs_once = order.iter().collect::<BTreeSet<_>>().len() == order.len();
    let (true, Some(section)) = (runs_once, selected.program.sections.iter().rposition(|s| s.kind == SectionKind::Update))
    else {
        return;
    };
    let Some(mut moves) = Moves::new(selected, &order) else { return };
    let (mut kept, mut moved) = (Vec::new(), Vec::new());
    for instr in std::mem::take(&mut selected.program.sections[section].body) {
        match moves.place(&instr) {
            Some(at) => moved.push((at, instr)),
            None => {
                moves.keep(&instr);
                kept.push(instr);
            }
        }
    }
    selected.program.sections[section].body = kept;
    // Later ones follow earlier ones of the same place; what runs once has one variant.
    moved.sort_by_key(|(at, _)| *at);
    for ((turn, behind), instr) in moved.into_iter().rev() {
        let section = selected.program.sections.iter_mut().find(|section| section.id() == order[turn]);
        section.expect("an instruction that it follows stands there").body.insert(behind, instr);
    }
}

struct Moves {
    storage: Vec<BufferId>,
    /// The first backward section.
    earliest: At,
    /// Where each piece of memory is written last, and where it is touched last, by what stands in the passes.
    written: FxHashMap<BufferId, At>,
    touched: FxHashMap<BufferId, At>,
    /// Memory of parameters and optimizer state; what of it the moved instructions have written.
    lasting: FxHashSet<BufferId>,
    renewed: FxHashSet<BufferId>,
    /// What the instructions that stay, so far, read and write.
    reads: FxHashSet<BufferId>,
    writes: FxHashSet<BufferId>,
}

impl Moves {
    /// None without a backward section.
    fn new(selected: &Selected, order: &[SectionId]) -> Option<Moves> {
        let bodies: BTreeMap<SectionId, &[Instr]> = super::memory::bodies(selected);
        let earliest = (order.iter().position(|id| id.kind.is_backward() && bodies.contains_key(id))?, 0);
        let storage = |b: BufferId| selected.storage[b.0 as usize];
        let changes = selected.program.params.iter().filter(|param| param.trained || param.kind != ParamKind::Weight);
        let lasting = changes.map(|param| storage(param.buffer)).collect();
        let mut moves = Moves {
            storage: selected.storage.clone(),
            earliest,
            written: FxHashMap::default(),
            touched: FxHashMap::default(),
            lasting,
            renewed: FxHashSet::default(),
            reads: FxHashSet::default(),
            writes: FxHashSet::default(),
        };
        for (turn, id) in order.iter().enumerate().filter(|(_, id)| id.kind != SectionKind::Update) {
            let mut started: FxHashMap<TokenId, &Instr> = FxHashMap::default();
            for (i, instr) in bodies.get(id).copied().unwrap_or(&[]).iter().enumerate() {
                let at = (turn, i + 1);
                let flying = match instr.action {
                    Action::Start { token, .. } => {
                        started.insert(token, instr);
                        None
                    }
                    Action::Wait(token) => started.get(&token).copied(),
                    _ => None,
                };
                let in_use = flying.map_or(&[][..], |start| &start.operands[..]);
                for &result in &instr.results {
                    moves.written.insert(storage(result), at);
                }
                for &buffer in instr.results.iter().chain(&instr.operands).chain(in_use) {
                    moves.touched.insert(storage(buffer), at);
                }
            }
        }
        Some(moves)
    }

    fn roots(&self, buffers: &[BufferId]) -> Vec<BufferId> {
        buffers.iter().map(|b| self.storage[b.0 as usize]).collect()
    }

    /// Where the passes can run an instruction of `update`, as early as it may; after it all others see it there.
    fn place(&mut self, instr: &Instr) -> Option<At> {
        if matches!(instr.action, Action::Start { .. } | Action::Wait(_)) {
            return None;
        }
        let (operands, results) = (self.roots(&instr.operands), self.roots(&instr.results));
        let waits = operands.iter().any(|o| self.writes.contains(o) || self.renewed.contains(o) && !results.contains(o));
        let disturbs = results.iter().any(|r| self.writes.contains(r) || self.reads.contains(r) || self.renewed.contains(r));
        if waits || disturbs {
            return None;
        }
        let follows =
            operands.iter().filter_map(|o| self.written.get(o)).chain(results.iter().filter_map(|r| self.touched.get(r)));
        let at = follows.copied().fold(self.earliest, At::max);
        self.written.extend(results.iter().map(|&r| (r, at)));
        for root in operands.into_iter().chain(results.iter().copied()) {
            let last = self.touched.entry(root).or_insert(at);
            *last = at.max(*last);
        }
        self.renewed.extend(results.into_iter().filter(|r| self.lasting.contains(r)));
        Some(at)
    }

    fn keep(&mut self, instr: &Instr) {
        self.reads.extend(self.roots(&instr.operands));
        self.writes.extend(self.roots(&instr.results));
    }
}
