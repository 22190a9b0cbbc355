//! Room for workspaces: scratch memory that holds nothing while a call runs.
//!
//! Scratch is planned for the values of a step, of which few are alive at once but at its peak. Before: prepared calls, some of which need a
//! workspace. After: each of these has a range of scratch that no value, port or transfer needs in any execution of it, if there is one
//! that is long enough.

use super::blocks::{Blocks, SCRATCH, Span};
use super::{Site, Turn};
use crate::error::Result;
use dcc_program::program::{Action, BufferId, Instr, Program, TokenId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Scratch that starts on a cache line.
const ALIGN: usize = 64;

/// A call that needs a workspace.
pub(super) struct Need {
    pub section: usize,
    /// Of the section's instructions, and of those that are prepared.
    pub instr: usize,
    pub place: usize,
    pub bytes: usize,
}

impl Need {
    /// Of an action at this section, instruction and place.
    pub fn of(action: &super::Action, [section, instr, place]: [usize; 3]) -> Option<Need> {
        let super::Action::Compute(call) = action else { return None };
        let bytes = call.workspace_bytes();
        (bytes > 0).then_some(Need { section, instr, place, bytes })
    }
}

/// Where each need is met in scratch.
pub(super) fn find(site: &Site<'_>, blocks: &Blocks, turns: &[Turn], needs: &[Need]) -> Result<Vec<Option<Span>>> {
    if needs.is_empty() {
        return Ok(Vec::new());
    }
    let mut scan = Scan::new(site, needs)?;
    for turn in turns.iter().rev() {
        scan.turn(turn);
    }
    let room = blocks.scratch().len();
    Ok(needs.iter().zip(&scan.taken).map(|(need, taken)| gap(taken, need.bytes, room)).collect())
}

/// The first range of `bytes` between these.
fn gap(taken: &BTreeSet<Held>, bytes: usize, room: usize) -> Option<Span> {
    let mut free = 0;
    for &(start, end) in taken {
        if start >= free + bytes {
            break;
        }
        free = free.max(end.next_multiple_of(ALIGN));
    }
    (free + bytes <= room).then_some(Span { block: SCRATCH, offset: free, bytes })
}

/// First byte of a buffer in scratch, and the one behind its last.
type Held = (usize, usize);

/// Goes through a step from its end, with the values that are still to be read.
struct Scan<'a> {
    program: &'a Program,
    /// Of each buffer, if it is in scratch and not empty.
    places: Vec<Option<Held>>,
    /// What each token's transfer reads and writes.
    transfers: HashMap<TokenId, Vec<BufferId>>,
    live: BTreeSet<BufferId>,
    /// Used by so many transfers that run.
    flying: BTreeMap<BufferId, u32>,
    /// Numbers of needs.
    numbers: HashMap<(usize, usize), usize>,
    /// By need, what is in the way in any execution.
    taken: Vec<BTreeSet<Held>>,
}

impl<'a> Scan<'a> {
    fn new(site: &Site<'a>, needs: &[Need]) -> Result<Scan<'a>> {
        let program = site.program();
        let place = |id: u32| {
            let span = site.span(BufferId(id))?;
            Ok((span.block == SCRATCH && span.bytes > 0).then_some((span.offset, span.offset + span.bytes)))
        };
        let mut transfers: HashMap<TokenId, Vec<BufferId>> = HashMap::new();
        for instr in program.sections.iter().flat_map(|section| &section.body) {
            if let Action::Start { token, .. } | Action::Wait(token) = &instr.action {
                transfers.entry(*token).or_default().extend(instr.operands.iter().chain(&instr.results));
            }
        }
        Ok(Scan {
            program,
            places: (0..program.buffers.len() as u32).map(place).collect::<Result<_>>()?,
            transfers,
            live: BTreeSet::new(),
            flying: BTreeMap::new(),
            numbers: needs.iter().enumerate().map(|(n, need)| ((need.section, need.instr), n)).collect(),
            taken: vec![BTreeSet::new(); needs.len()],
        })
    }

    fn turn(&mut self, turn: &Turn) {
        let program = self.program;
        self.live.extend(turn.takes.iter().map(|(port, _)| program.outputs[*port].buffer));
        for (number, instr) in program.sections[turn.section].body.iter().enumerate().rev() {
            let need = self.numbers.get(&(turn.section, number)).copied();
            self.instr(instr, need);
        }
        for (port, _) in &turn.fills {
            self.live.remove(&program.inputs[*port].buffer);
        }
    }

    fn instr(&mut self, instr: &Instr, need: Option<usize>) {
        if let Some(need) = need {
            let used = instr.operands.iter().chain(&instr.results);
            let all = self.live.iter().chain(self.flying.keys()).chain(used);
            self.taken[need].extend(all.filter_map(|id| self.places[id.0 as usize]));
        }
        match &instr.action {
            Action::Wait(token) => {
                let used = self.transfers.get(token).into_iter().flatten();
                used.for_each(|id| *self.flying.entry(*id).or_default() += 1);
            }
            Action::Start { token, .. } => {
                for id in self.transfers.get(token).into_iter().flatten() {
                    if let Some(count) = self.flying.get_mut(id) {
                        *count -= 1;
                        if *count == 0 {
                            self.flying.remove(id);
                        }
                    }
                }
            }
            Action::Kernel(_) | Action::Library(_) => {}
        }
        for (n, id) in instr.results.iter().enumerate() {
            match self.program.accumulates(&instr.action, n) {
                true => self.live.insert(*id),
                false => self.live.remove(id),
            };
        }
        self.live.extend(&instr.operands);
    }
}

#[cfg(test)]
mod tests {
    use super::super::prepare::turns;
    use super::*;
    use dcc_program::text::parse;

    const PROGRAM: &str = "\
program ops eval stage 0/1 mesh(mb=2, tp=2)
memory persistent=64 scratch=1024
area m0 forward->forward bytes=64 slots=1
param b0 f32[4, 4] @p0 weight w
input b9 f32[8/mb, 4] @s640 x
output b4 b4
output b8 b8
section forward
b1 f32[4, 4/tp] @s0 = slice(tp, dim 1) b0
t0 = start all_gather(tp, dim 1) b1
b2 f32[4, 4] @s64 = copy b0
b3 f32[4, 4] @s128 = copy b2
b4 f32[4, 4] @s192 = wait t0
b5 f32[4, 4] @s0 = copy b3
b6 f32[4, 4] @s320 = dot(m k, k n -> m n) b5, b0
b7 f32[4, 4] @s0 = copy b0
b6 += dot(m k, k n -> m n) b7, b9
b8 f32[4, 4] @s384 = copy b6
order forward 0; forward 1
";

    /// Where a workspace of `bytes` is for that instruction.
    #[track_caller]
    fn room(instr: usize, bytes: usize) -> Option<usize> {
        let program = parse(PROGRAM).unwrap();
        let blocks = Blocks::new(&program, 0).unwrap();
        let site = Site::new(&program, &blocks, 0).unwrap();
        let turns = turns(&program, &site, &blocks).unwrap();
        let need = Need { section: 0, instr, place: instr, bytes };
        let found = find(&site, &blocks, &turns, &[need]).unwrap();
        found[0].map(|span| {
            assert_eq!((span.block, span.bytes), (SCRATCH, bytes));
            span.offset
        })
    }

    #[test]
    fn nothing_that_is_needed_is_in_the_way() {
        // The transfer reads 0 and writes 192 while it runs; 640 is the input until its last reader.
        assert_eq!(room(3, 64), Some(256));
        assert_eq!(room(3, 384), Some(256));
        assert_eq!(room(3, 385), None, "the input is filled before its section");
        // An output that is there, the operand and the result.
        assert_eq!(room(5, 64), Some(64));
        assert_eq!(room(5, 65), Some(256));
        // A sum that is added to, though nothing reads it between.
        assert_eq!(room(7, 64), Some(64));
        assert_eq!(room(7, 128), Some(64));
        assert_eq!(room(7, 192), Some(384));
        // Behind all readers but the outputs'.
        assert_eq!(room(9, 192), Some(0));
        assert_eq!(room(9, 512), Some(448));
        assert_eq!(room(9, 1024), None);
    }
}
