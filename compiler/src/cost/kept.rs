//! Bytes that values take from one section to another.

use dcc_program::program::{Place, Program, Section, SectionId};
use std::collections::{BTreeMap, BTreeSet};

/// What a rank's program keeps between sections, of one microbatch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// By the section that makes it and the last that reads it: of areas and in scratch.
    pub bytes: BTreeMap<(SectionId, SectionId), u64>,
    /// Most bytes of scratch that are kept between two sections.
    pub scratch: u64,
}

impl Kept {
    pub fn of(program: &Program) -> Kept {
        let mut kept = Kept::default();
        for area in program.areas.iter().filter(|area| area.from != area.to) {
            *kept.bytes.entry((area.from, area.to)).or_default() += area.bytes;
        }
        let sections = in_order(program);
        let mut scratch = Scratch::default();
        for (at, section) in sections.iter().enumerate() {
            scratch.pass(program, at, section);
        }
        let pieces = scratch.pieces();
        for piece in &pieces {
            let [from, to] = [piece.from, piece.to].map(|at| sections[at].id());
            *kept.bytes.entry((from, to)).or_default() += piece.bytes;
        }
        let alive = |at: usize| pieces.iter().filter(|piece| piece.from <= at && at < piece.to).map(|piece| piece.bytes).sum();
        kept.scratch = (0..sections.len()).map(alive).max().unwrap_or(0);
        kept
    }

    pub fn between(&self, from: SectionId, to: SectionId) -> u64 {
        self.bytes.get(&(from, to)).copied().unwrap_or(0)
    }
}

/// Each section once, where it first runs, by its last variant, which has all that others have.
fn in_order(program: &Program) -> Vec<&Section> {
    let mut seen = BTreeSet::new();
    let first = program.order.iter().filter_map(|step| program.sections.get(step.section as usize)).map(Section::id);
    let ids: Vec<SectionId> = first.filter(|&id| seen.insert(id)).collect();
    ids.into_iter().filter_map(|id| program.sections.iter().rfind(|section| section.id() == id)).collect()
}

/// Bytes that lie from the section in which they are written to the last in which they are read.
struct Piece {
    bytes: u64,
    from: usize,
    to: usize,
}

#[derive(Default)]
struct Scratch {
    /// By where they start, pieces of the block as they were last written.
    now: BTreeMap<u64, Piece>,
    past: Vec<Piece>,
}

impl Scratch {
    fn pass(&mut self, program: &Program, at: usize, section: &Section) {
        let span = |id: &dcc_program::program::BufferId| {
            let buffer = program.buffer(*id);
            (buffer.place == Place::Scratch).then(|| (buffer.offset, buffer.ty.local_bytes(&program.mesh)))
        };
        for instr in &section.body {
            for (start, bytes) in instr.operands.iter().filter_map(span) {
                self.overlapping(start, bytes).into_iter().for_each(|key| self.now.get_mut(&key).expect("just found").to = at);
            }
            for (start, bytes) in instr.results.iter().filter_map(span) {
                self.write(start, bytes, at);
            }
        }
    }

    fn overlapping(&self, start: u64, bytes: u64) -> Vec<u64> {
        let before = self.now.range(..start).next_back().filter(|(key, piece)| *key + piece.bytes > start);
        before.into_iter().chain(self.now.range(start..start + bytes)).map(|(key, _)| *key).collect()
    }

    fn write(&mut self, start: u64, bytes: u64, at: usize) {
        for key in self.overlapping(start, bytes) {
            let Piece { bytes: old, from, to } = self.now.remove(&key).expect("just found");
            let (end, cut) = (key + old, start + bytes);
            let mut left = |key: u64, bytes: u64| _ = self.now.insert(key, Piece { bytes, from, to });
            if key < start {
                left(key, start - key);
            }
            if end > cut {
                left(cut, end - cut);
            }
            self.past.push(Piece { bytes: end.min(cut) - key.max(start), from, to });
        }
        self.now.insert(start, Piece { bytes, from: at, to: at });
    }

    fn pieces(self) -> Vec<Piece> {
        self.past.into_iter().chain(self.now.into_values()).filter(|piece| piece.from < piece.to).collect()
    }
}
