//! Gives every buffer its place: persistent, scratch, or an area for values of several microbatches at once.
//!
//! Scratch is packed by lifetime, first fit over intervals of the line of all instructions, section after section: what forward leaves
//! for backward makes room for gradients as it is used up. Values that are sent, and those of one microbatch that wait while another
//! passes, have areas, keyed by (defining section, last reading section): an area has as many slots as microbatches are alive between the
//! two in this stage's order, and at least as many as messages of its values may be under way.

mod inplace;
mod line;
mod reuse;

pub(super) use inplace::update_in_place;

use super::Turn;
use super::select::Selected;
use crate::error::{Error, Result};
use crate::schedule::Turns;
use dcc_program::program::{Action, Area, BufferId, Instr, Place, Program, SectionId, SectionKind, Step};
use line::Line;
use reuse::Lives;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Offsets are multiples of a cache line.
const ALIGN: u64 = 64;

/// Bytes behind a piece of memory of at least `LARGE`. Sizes are often multiples of a page, so that the same rows of all operands of a kernel
/// would come to lie in the same few sets of the first-level cache, more of them than a set has lines; an odd number of lines spreads them.
const APART: u64 = 17 * ALIGN;
const LARGE: u64 = 64 << 10;

/// Where the values of one piece of memory live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Persistent,
    /// First and last instruction in the line of all.
    Scratch(usize, usize),
    Area(SectionId, SectionId),
}

/// Sections and instructions in which a piece of memory is written and read.
#[derive(Clone, Debug, Default)]
struct Life {
    /// (section, instruction), in order.
    touched: BTreeSet<(SectionId, usize)>,
}

pub(super) fn place(selected: Selected, turns: &Turns) -> Result<Program> {
    let order = &turns.list[..];
    let lives = lives(&selected);
    let bodies = bodies(&selected);
    let mut line = Line::new(&bodies, order);
    let classes = classify(&selected, &lives, &mut line, order);
    let sizes = sizes(&selected);
    let mut places: BTreeMap<BufferId, (Place, u64)> = BTreeMap::new();
    let mut program_bytes = (0, 0);
    // Bytes, and the sections that touch something of them.
    let mut areas: BTreeMap<(SectionId, SectionId), (u64, BTreeSet<SectionId>)> = BTreeMap::new();
    let mut scratch = Lives::new();
    for (&root, &class) in &classes {
        let bytes = sizes[&root];
        match class {
            Class::Persistent => {
                places.insert(root, (Place::Persistent, program_bytes.0));
                program_bytes.0 += bytes;
            }
            Class::Area(from, to) => {
                let (end, touching) = areas.entry((from, to)).or_default();
                places.insert(root, (Place::Area(0), *end));
                *end += bytes;
                touching.extend(lives[&root].touched.iter().map(|(section, _)| *section));
            }
            Class::Scratch(first, last) => _ = scratch.insert(root, (first, last)),
        }
    }
    let joined = reuse::join(&selected, &bodies, &line, &sizes, &mut scratch);
    program_bytes.1 = pack(scratch, &sizes, &mut places);
    for (root, into) in joined {
        let place = places[&into];
        places.insert(root, place);
    }
    let messages = messages(&selected, &classes);
    let keys: Vec<(SectionId, SectionId)> = areas.keys().copied().collect();
    for (root, class) in &classes {
        if let Class::Area(from, to) = class {
            let index = keys.iter().position(|k| k == &(*from, *to)).expect("every class has its area") as u32;
            places.get_mut(root).expect("placed above").0 = Place::Area(index);
        }
    }
    let Selected { mut program, storage, in_flight, .. } = selected;
    program.persistent_bytes = program_bytes.0;
    program.scratch_bytes = program_bytes.1;
    let area = |(&(from, to), &(bytes, ref touching)): (&(SectionId, SectionId), &(u64, BTreeSet<SectionId>))| {
        let none = BTreeMap::new();
        let sent = messages.get(&(from, to)).unwrap_or(&none);
        Area { from, to, bytes, slots: slots((from, to), touching, sent, order) }
    };
    program.areas = areas.iter().map(area).collect();
    for (i, buffer) in program.buffers.iter_mut().enumerate() {
        if let Some(&(place, offset)) = places.get(&storage[i]) {
            buffer.place = place;
            buffer.offset = offset;
        }
    }
    program.order = steps(&program, order, &in_flight)?;
    Ok(program)
}

/// The body of each section that says all of its lifetimes: its last variant.
pub(super) fn bodies(selected: &Selected) -> BTreeMap<SectionId, &[Instr]> {
    selected.program.sections.iter().map(|s| (s.id(), s.body.as_slice())).collect()
}

fn lives(selected: &Selected) -> BTreeMap<BufferId, Life> {
    let mut lives: BTreeMap<BufferId, Life> = BTreeMap::new();
    for (id, body) in bodies(selected) {
        let mut flying = FxHashMap::default();
        for (i, instr) in body.iter().enumerate() {
            let mut touched: Vec<BufferId> = instr.results.iter().chain(&instr.operands).copied().collect();
            match instr.action {
                Action::Start { token, .. } => {
                    flying.insert(token, (i, instr.operands.clone()));
                }
                // The operand may not change before the wait, the result is written to from the start on.
                Action::Wait(token) => {
                    let Some((start, operands)) = flying.remove(&token) else { continue };
                    touched.extend(operands);
                    for result in &instr.results {
                        lives.entry(selected.storage[result.0 as usize]).or_default().touched.insert((id, start));
                    }
                }
                _ => {}
            }
            for buffer in touched {
                lives.entry(selected.storage[buffer.0 as usize]).or_default().touched.insert((id, i));
            }
        }
    }
    let inputs = selected.program.inputs.iter().map(|i| i.buffer);
    let outputs = selected.program.outputs.iter().map(|o| o.buffer);
    for buffer in inputs.chain(outputs).chain(selected.persistent.iter().copied()) {
        lives.entry(selected.storage[buffer.0 as usize]).or_default();
    }
    lives
}

fn classify(
    selected: &Selected,
    lives: &BTreeMap<BufferId, Life>,
    line: &mut Line,
    order: &[Turn],
) -> BTreeMap<BufferId, Class> {
    let root = |b: &BufferId| selected.storage[b.0 as usize];
    let persistent: BTreeSet<BufferId> = selected.persistent.iter().map(root).collect();
    let outputs: BTreeSet<BufferId> = selected.program.outputs.iter().map(|o| root(&o.buffer)).collect();
    let inputs: BTreeSet<BufferId> = selected.program.inputs.iter().map(|i| root(&i.buffer)).collect();
    let sent: BTreeSet<BufferId> = selected.sent.iter().map(|(b, _)| root(b)).collect();
    let once = |id: SectionId| !id.kind.is_per_microbatch();
    let runs_backward = order.iter().any(|t| t.0.kind.is_backward());
    let mut class = |id: &BufferId, life: &Life| {
        let Some((&(from, _), &(to, _))) = life.touched.first().zip(life.touched.last()) else {
            return if inputs.contains(id) {
                Class::Area(SectionKind::Forward.into(), SectionKind::Forward.into())
            } else {
                Class::Persistent
            };
        };
        if persistent.contains(id) || (outputs.contains(id) && (once(from) || once(to) || runs_backward)) {
            return Class::Persistent;
        }
        if inputs.contains(id) || outputs.contains(id) {
            return Class::Area(from, to);
        }
        if from != to && matches!(from.kind, SectionKind::Begin | SectionKind::Ready) {
            return Class::Persistent;
        }
        match line.span(&life.touched).filter(|_| !sent.contains(id)) {
            Some((first, last)) => Class::Scratch(first, last),
            None => Class::Area(from, to),
        }
    };
    lives.iter().map(|(id, life)| (*id, class(id, life))).collect()
}

/// Bytes of each piece of memory: those of its largest view, aligned, and what keeps it apart from the next.
fn sizes(selected: &Selected) -> BTreeMap<BufferId, u64> {
    let mut sizes = BTreeMap::new();
    for (i, buffer) in selected.program.buffers.iter().enumerate() {
        let bytes = buffer.ty.local_bytes(&selected.program.mesh).next_multiple_of(ALIGN).max(ALIGN);
        let bytes = if bytes < LARGE { bytes } else { bytes + APART };
        let size: &mut u64 = sizes.entry(selected.storage[i]).or_default();
        *size = bytes.max(*size);
    }
    sizes
}

/// The better of two first fits: by start of life, larger pieces first; and largest first (Pisarchyk and Lee 2020, section 5.2). Returns
/// the bytes of the block.
fn pack(scratch: Lives, sizes: &BTreeMap<BufferId, u64>, places: &mut BTreeMap<BufferId, (Place, u64)>) -> u64 {
    let mut intervals: Vec<(BufferId, usize, usize)> =
        scratch.into_iter().map(|(root, (first, last))| (root, first, last)).collect();
    intervals.sort_by_key(|&(id, first, _)| (first, std::cmp::Reverse(sizes[&id]), id));
    let by_start = first_fit(&intervals, sizes);
    intervals.sort_by_key(|&(id, first, _)| (std::cmp::Reverse(sizes[&id]), first, id));
    let by_size = first_fit(&intervals, sizes);
    let (total, offsets) = if by_size.0 < by_start.0 { by_size } else { by_start };
    places.extend(offsets.into_iter().map(|(id, offset)| (id, (Place::Scratch, offset))));
    total
}

/// Each in turn as low as it has room among those that live when it does. Bytes of all, and offsets.
fn first_fit(intervals: &[(BufferId, usize, usize)], sizes: &BTreeMap<BufferId, u64>) -> (u64, Vec<(BufferId, u64)>) {
    // Start, end, first and last instruction; by start.
    let mut placed: Vec<(u64, u64, usize, usize)> = Vec::new();
    let (mut total, mut offsets) = (0, Vec::new());
    for &(id, first, last) in intervals {
        let bytes = sizes[&id];
        let mut offset = 0;
        for &(start, end, _, _) in placed.iter().filter(|other| other.2 <= last && first <= other.3) {
            if start >= offset + bytes {
                break;
            }
            offset = offset.max(end);
        }
        let at = placed.partition_point(|other| *other < (offset, offset + bytes, first, last));
        placed.insert(at, (offset, offset + bytes, first, last));
        offsets.push((id, offset));
        total = total.max(offset + bytes);
    }
    (total, offsets)
}

/// By area, the sections that send its values, and how many messages of each may be under way at once.
fn messages(
    selected: &Selected,
    classes: &BTreeMap<BufferId, Class>,
) -> BTreeMap<(SectionId, SectionId), BTreeMap<SectionId, u32>> {
    let mut found: BTreeMap<(SectionId, SectionId), BTreeMap<SectionId, u32>> = BTreeMap::new();
    for (buffer, section) in &selected.sent {
        if let Some(&Class::Area(from, to)) = classes.get(&selected.storage[buffer.0 as usize]) {
            found.entry((from, to)).or_default().insert(*section, selected.in_flight[section]);
        }
    }
    found
}

/// What still needs the slot of a microbatch.
struct Waits {
    /// Its run of the section that writes it first.
    run: u32,
    /// Sections that are still to come.
    sections: BTreeSet<SectionId>,
    /// Messages under way: the section that sends them, and the run of it that begins when they have arrived.
    messages: Vec<(SectionId, u32)>,
}

/// Most microbatches alive at once from section `from` to the last of those `touching`, which `to` need not be: the weight half of one
/// chunk may run before the input half of another; what is sent lives until it has arrived, at the latest before the section that sends
/// it has run as many times as its messages may be under way. Slot of a microbatch: when `from` runs of it, among its runs, modulo this.
fn slots(
    (from, to): (SectionId, SectionId),
    touching: &BTreeSet<SectionId>,
    sent: &BTreeMap<SectionId, u32>,
    order: &[Turn],
) -> u32 {
    let mut most = sent.values().copied().max().unwrap_or(1);
    if from == to || !from.kind.is_per_microbatch() || !to.kind.is_per_microbatch() {
        return most;
    }
    let mut alive: BTreeMap<u32, Waits> = BTreeMap::new();
    let mut runs: BTreeMap<SectionId, u32> = BTreeMap::new();
    for &(section, microbatch) in order {
        let run = *runs.entry(section).and_modify(|run| *run += 1).or_insert(0);
        alive.values_mut().for_each(|waits| waits.messages.retain(|&(of, due)| of != section || due > run));
        alive.retain(|_, waits| !waits.sections.is_empty() || !waits.messages.is_empty());
        if section == from {
            alive.insert(microbatch, Waits { run, sections: touching.clone(), messages: Vec::new() });
            let earliest = alive.values().map(|waits| waits.run).min().unwrap_or(run);
            most = most.max(run - earliest + 1);
        }
        if let Some(waits) = alive.get_mut(&microbatch) {
            waits.sections.remove(&section);
            waits.messages.extend(sent.get(&section).map(|under_way| (section, run + under_way)));
        }
        alive.retain(|_, waits| !waits.sections.is_empty() || !waits.messages.is_empty());
    }
    most
}

/// When each section runs of each microbatch, among its runs: searched orders need not take microbatches by number.
fn runs(order: &[Turn]) -> BTreeMap<Turn, u32> {
    let mut next: BTreeMap<SectionId, u32> = BTreeMap::new();
    let mut runs = BTreeMap::new();
    for &(section, microbatch) in order {
        let run = next.entry(section).or_default();
        runs.insert((section, microbatch), *run);
        *run += 1;
    }
    runs
}

/// The first executions of a section that sends, as many as messages may be under way, are of its first variant: they have none
/// to wait for.
fn steps(program: &Program, order: &[Turn], in_flight: &BTreeMap<SectionId, u32>) -> Result<Vec<Step>> {
    let runs = runs(order);
    let mut steps = Vec::new();
    for &(id, microbatch) in order {
        let variants: Vec<usize> = (0..program.sections.len()).filter(|&i| program.sections[i].id() == id).collect();
        let section = match &variants[..] {
            [] => continue,
            [first, ..] if runs[&(id, microbatch)] < in_flight.get(&id).copied().unwrap_or(1) => *first as u32,
            [.., last] => *last as u32,
        };
        let slot = |area: &Area| runs.get(&(area.from, microbatch)).copied().unwrap_or(microbatch) % area.slots;
        let slots: SmallVec<[u32; 4]> = program.areas.iter().map(slot).collect();
        steps.push(Step { section, microbatch, slots });
    }
    match steps.is_empty() {
        true => Err(Error::internal("a stage without work")),
        false => Ok(steps),
    }
}
