//! One line of all instructions of a stage, by which values that cross sections share memory as those within one do.

use crate::lower::Turn;
use dcc_program::program::{Instr, SectionId};
use std::collections::{BTreeMap, BTreeSet};

/// The sections in the order in which they first run.
pub(super) struct Line<'a> {
    order: &'a [Turn],
    /// Where each section begins.
    starts: BTreeMap<SectionId, usize>,
    /// By the sections that touch a value: whether its life is one stretch of the line.
    known: BTreeMap<BTreeSet<SectionId>, bool>,
}

impl<'a> Line<'a> {
    pub fn new(bodies: &BTreeMap<SectionId, &[Instr]>, order: &'a [Turn]) -> Line<'a> {
        let (mut starts, mut at) = (BTreeMap::new(), 0);
        for (section, _) in order {
            if let Some(body) = bodies.get(section).filter(|_| !starts.contains_key(section)) {
                starts.insert(*section, at);
                at += body.len();
            }
        }
        Line { order, starts, known: BTreeMap::new() }
    }

    /// All instructions with their places, in order.
    pub fn instructions<'b>(&self, bodies: &'b BTreeMap<SectionId, &'b [Instr]>) -> impl Iterator<Item = (usize, &'b Instr)> {
        let starts: BTreeMap<usize, SectionId> = self.starts.iter().map(|(section, at)| (*at, *section)).collect();
        let of = move |(start, section): (usize, SectionId)| {
            bodies[&section].iter().enumerate().map(move |(i, instr)| (start + i, instr))
        };
        starts.into_iter().flat_map(of)
    }

    /// The first and the last of the instructions that touch a value, if whatever runs while it is alive stands between them: two values
    /// that are alive at once then have stretches that overlap.
    pub fn span(&mut self, touched: &BTreeSet<(SectionId, usize)>) -> Option<(usize, usize)> {
        let sections: BTreeSet<SectionId> = touched.iter().map(|(section, _)| *section).collect();
        if sections.len() > 1 && !self.is_stretch(sections) {
            return None;
        }
        let places = || touched.iter().filter_map(|(section, i)| Some(self.starts.get(section)? + i));
        Some((places().min()?, places().max()?))
    }

    fn is_stretch(&mut self, sections: BTreeSet<SectionId>) -> bool {
        if let Some(&known) = self.known.get(&sections) {
            return known;
        }
        let found = self.stretches(&sections) == Some(true);
        self.known.insert(sections, found);
        found
    }

    /// None where a section never runs.
    fn stretches(&self, sections: &BTreeSet<SectionId>) -> Option<bool> {
        let start = |section: &SectionId| self.starts.get(section).copied();
        let places: BTreeMap<usize, SectionId> =
            sections.iter().map(|section| Some((start(section)?, *section))).collect::<Option<_>>()?;
        let ((first, from), (last, to)) = places.first_key_value().zip(places.last_key_value())?;
        let life = |begin: usize, microbatch: u32| {
            let is_of = |turn: &&Turn| turn.1 == microbatch || !turn.0.kind.is_per_microbatch();
            let length = self.order[begin..].iter().position(|turn| turn.0 == *to && is_of(&turn))?;
            let turns = &self.order[begin..=begin + length];
            let touch: BTreeSet<SectionId> = turns.iter().filter(is_of).map(|turn| turn.0).collect();
            let inner = &turns[1..turns.len() - 1];
            let is_inside = |turn: &Turn| start(&turn.0).is_none_or(|at| *first < at && at < *last);
            Some(sections.is_subset(&touch) && inner.iter().all(is_inside))
        };
        let mut begins = self.order.iter().enumerate().filter(|(_, turn)| turn.0 == *from);
        Some(begins.all(|(begin, turn)| life(begin, turn.1) == Some(true)))
    }
}
