//! Small changes to an order, kept where they make it better: hill climbing along the chain of passes that decides the cost (as for
//! job shops: van Laarhoven, Aarts, Lenstra 1992).

use super::order::{Order, Pass, Section};
use super::search::Best;
use super::simulate::{self, Event};

/// A pass of an order: stage and place in its list.
type Place = (usize, usize);

/// Changes the best order until no change along its chain helps, or the budget is spent.
pub(super) fn improve(best: &mut Best) {
    while !best.done() {
        let (order, before) = (best.order.clone(), best.score);
        let events = simulate::events(&order, best.problem.costs).expect("the best order runs");
        if !moves(&order, &events).into_iter().any(|(from, to)| {
            best.offer(moved(&order, from, to));
            best.done() || best.score.better(&before)
        }) {
            return;
        }
    }
}

/// `order` with the pass at `from` at the place `to` of its list.
fn moved(order: &Order, from: Place, to: usize) -> Order {
    let mut order = order.clone();
    let passes = &mut order.passes[from.0];
    let pass = passes.remove(from.1);
    passes.insert(to, pass);
    order
}

/// What may shorten the chain: each of its passes before the one before it, and each that another of its stage follows later, into a
/// gap or to the end. All keep a microbatch's own passes in order.
fn moves(order: &Order, events: &[Vec<Event>]) -> Vec<(Place, usize)> {
    let mut out = Vec::new();
    for (stage, place) in chain(order, events) {
        let passes = &order.passes[stage];
        if place > 0 && !depends(passes[place], passes[place - 1]) {
            out.push(((stage, place), place - 1));
        }
        if place > 0 && passes[place - 1].section == Section::BackwardWeight {
            let gaps = (place + 1..passes.len()).filter(|&p| events[stage][p].start > events[stage][p - 1].end);
            out.extend(gaps.take(2).chain([passes.len()]).map(|gap| ((stage, place - 1), gap - 1)));
        }
        // A weight half from later fills the gap before.
        let gap = place > 0 && events[stage][place].start > events[stage][place - 1].end;
        if gap {
            let weight = (place + 1..passes.len()).find(|&p| {
                passes[p].section == Section::BackwardWeight
                    && !passes[place..p].iter().any(|&before| depends(passes[p], before))
            });
            out.extend(weight.map(|weight| ((stage, weight), place)));
        }
    }
    out
}

/// The passes that decide when the stage that takes the longest ends, from its last back to one that starts at once.
fn chain(order: &Order, events: &[Vec<Event>]) -> Vec<Place> {
    let longest = (0..events.len()).max_by(|&a, &b| simulate::span(&events[a]).total_cmp(&simulate::span(&events[b])));
    let mut out = Vec::new();
    let mut now = longest.and_then(|stage| Some((stage, events[stage].len().checked_sub(1)?)));
    while let Some((stage, place)) = now {
        out.push((stage, place));
        let event = events[stage][place];
        let follows = place > 0 && events[stage][place - 1].end >= event.start;
        now = if follows { Some((stage, place - 1)) } else { source(order, stage, event.pass) };
    }
    out
}

/// Where the pass that `pass` waits for on another stage lies.
fn source(order: &Order, stage: usize, pass: Pass) -> Option<Place> {
    let layout = order.layout;
    let part = layout.part(stage as u32, pass.chunk);
    let part = match pass.section {
        Section::Forward => part.checked_sub(1)?,
        Section::BackwardWeight => return None,
        _ => (part + 1 < layout.parts()).then_some(part + 1)?,
    };
    let (from, chunk) = layout.place(part);
    let forward = pass.section == Section::Forward;
    let is = |p: &Pass| {
        let kind = if forward {
            p.section == Section::Forward
        } else {
            matches!(p.section, Section::Backward | Section::BackwardInput)
        };
        kind && p.chunk == chunk && p.microbatch == pass.microbatch
    };
    Some((from as usize, order.passes[from as usize].iter().position(is)?))
}

/// Whether `pass` must stay behind `before` on its stage: it needs the result, or its message is read after that one's.
fn depends(pass: Pass, before: Pass) -> bool {
    let sends = pass.section != Section::BackwardWeight && before.section != Section::BackwardWeight;
    let alike = (pass.section == Section::Forward) == (before.section == Section::Forward);
    pass.chunk == before.chunk && (pass.microbatch == before.microbatch || sends && alike)
}
