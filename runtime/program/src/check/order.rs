//! When sections run: `begin` first, `count` of all microbatches before `ready`, `ready` before forward and backward, a
//! microbatch's forward before its backward, of which the input half before the weight half, `update` last; what runs once per step once, all microbatches alike. Variants of
//! a section differ in transfers only, so that all microbatches go through the same function.

use super::{Checked, Fault, refuse};
use crate::program::*;
use std::collections::{BTreeSet, HashMap};

/// Instructions of one step, sections inlined in order.
const MAX_INSTRS: u64 = 1 << 26;

pub(super) fn program(p: &Program) -> Checked<()> {
    let microbatches = p.mesh.size_of("mb");
    for (i, step) in p.order.iter().enumerate() {
        let Some(section) = p.sections.get(step.section as usize) else {
            return refuse(Fault::Malformed, format!("step {i} runs section {} of {}", step.section, p.sections.len()));
        };
        let last = if section.kind.is_per_microbatch() { microbatches } else { 1 };
        if step.microbatch >= last {
            let (name, mb) = (section.id().name(), step.microbatch);
            return refuse(Fault::Order, format!("{name} runs for microbatch {mb} of {last}"));
        }
        let fits = step.slots.len() == p.areas.len() && step.slots.iter().zip(&p.areas).all(|(&s, a)| s < a.slots);
        if !fits {
            return refuse(Fault::Bounds, format!("step {i} names slots {:?}, which the areas have not", step.slots));
        }
    }
    let body = |s: &Step| p.sections[s.section as usize].body.len() as u64;
    let expanded: u64 = p.order.iter().map(body).sum();
    if expanded > MAX_INSTRS {
        return refuse(Fault::Order, format!("the order expands to {expanded} instructions, more than {MAX_INSTRS}"));
    }
    counts(p, microbatches)?;
    phases(p)?;
    variants(p)
}

fn counts(p: &Program, microbatches: u32) -> Checked<()> {
    let mut runs = vec![0u32; p.sections.len()];
    let mut seen = std::collections::HashSet::new();
    for step in &p.order {
        runs[step.section as usize] += 1;
        if !seen.insert((step.section, step.microbatch)) {
            let name = p.sections[step.section as usize].id().name();
            return refuse(Fault::Order, format!("{name} runs twice for microbatch {}", step.microbatch));
        }
    }
    if let Some(i) = runs.iter().position(|&n| n == 0) {
        return refuse(Fault::Order, format!("a section {} never runs", p.sections[i].id().name()));
    }
    let per_microbatch = p.sections.iter().filter(|s| s.kind.is_per_microbatch()).map(Section::id);
    for id in per_microbatch.collect::<BTreeSet<_>>() {
        let mut done = vec![false; microbatches as usize];
        let runs = p.order.iter().filter(|s| p.sections[s.section as usize].id() == id);
        runs.for_each(|s| done[s.microbatch as usize] = true);
        if let Some(mb) = done.iter().position(|d| !d) {
            return refuse(Fault::Order, format!("{} never runs for microbatch {mb}", id.name()));
        }
    }
    Ok(())
}

fn phases(p: &Program) -> Checked<()> {
    let phase = |kind: SectionKind| match kind {
        SectionKind::Begin => 0,
        SectionKind::Count => 1,
        SectionKind::Ready => 2,
        SectionKind::Update => 4,
        _ => 3,
    };
    if let Some(s) = p.sections.iter().find(|s| s.chunk > 0 && !s.kind.is_pass()) {
        return refuse(Fault::Order, format!("{} is of no chunk", s.id().name()));
    }
    let ids: Vec<(SectionId, u32)> = p.order.iter().map(|s| (p.sections[s.section as usize].id(), s.microbatch)).collect();
    if let Some(w) = ids.windows(2).find(|w| phase(w[0].0.kind) > phase(w[1].0.kind)) {
        return refuse(Fault::Order, format!("{} runs after {}", w[1].0.name(), w[0].0.name()));
    }
    let has = |kind: SectionKind| p.sections.iter().any(|s| s.kind == kind);
    let halves = [SectionKind::BackwardInput, SectionKind::BackwardWeight];
    if let (true, Some(half)) = (has(SectionKind::Backward), halves.into_iter().find(|&half| has(half))) {
        return refuse(Fault::Order, format!("a program with backward has no {}", half.name()));
    }
    // Of each microbatch, which of its passes through a chunk has run: they come in the order of the list of kinds.
    let mut last: HashMap<(u32, u32), SectionKind> = HashMap::new();
    for (id, microbatch) in ids.into_iter().filter(|(id, _)| id.kind.is_pass()) {
        match last.insert((id.chunk, microbatch), id.kind) {
            Some(before) if before > id.kind => {
                let (name, before) = (id.name(), before.name());
                return refuse(Fault::Order, format!("{name} of microbatch {microbatch} runs after its {before}"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn variants(p: &Program) -> Checked<()> {
    let is_transfer = |i: &&Instr| matches!(i.action, Action::Start { .. } | Action::Wait(_));
    let work = |s: &'_ Section| -> Vec<_> {
        let computes = s.body.iter().filter(|i| !is_transfer(i));
        computes.map(|i| (i.results.clone(), i.action.clone(), i.operands.clone())).collect()
    };
    for (n, section) in p.sections.iter().enumerate() {
        let Some(first) = p.sections[..n].iter().find(|s| s.id() == section.id()) else { continue };
        if work(first) != work(section) {
            let name = section.id().name();
            return refuse(Fault::Order, format!("two sections {name} do not compute the same"));
        }
    }
    Ok(())
}
