//! What holds for any times: bounds, and that the search is no worse than what it could have taken.

use super::super::*;
use super::all_rules;
use std::collections::BTreeSet;

/// A linear congruential generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }

    fn costs(&mut self, layout: Layout) -> Costs {
        let mut part = || {
            let activation_bytes = 1 + self.below(6);
            let mut time = || self.below(40) as f64 / 8.0;
            let (forward, backward_input, backward_weight) = (time(), time(), time());
            let weight_bytes = self.below(activation_bytes + 1);
            PartCost { forward, backward_input, backward_weight, activation_bytes, weight_bytes }
        };
        let parts: Vec<PartCost> = (0..layout.parts()).map(|_| part()).collect();
        let transfers = (1..layout.parts()).map(|_| self.below(8) as f64 / 8.0).collect();
        Costs { parts, transfers }
    }

    /// From enough for one microbatch to enough for all.
    fn limits(&mut self, layout: Layout, costs: &Costs, microbatches: u32) -> Vec<u64> {
        let bytes = |s: u32| (0..layout.chunks).map(|c| costs.parts[layout.part(s, c) as usize].activation_bytes).sum::<u64>();
        (0..layout.stages).map(|s| bytes(s) * (1 + self.below(u64::from(microbatches))) + self.below(2)).collect()
    }
}

/// A pass neither starts before what it needs has arrived nor while another runs.
fn check(order: &Order, costs: &Costs, timeline: &Timeline) {
    let layout = order.layout;
    let end = |part: u32, forward: bool, m: u32| {
        let (stage, chunk) = layout.place(part);
        let wanted = |p: Pass| p.chunk == chunk && p.microbatch == m && (p.section == Section::Forward) == forward;
        let found =
            timeline.events[stage as usize].iter().find(|e| wanted(e.pass) && e.pass.section != Section::BackwardWeight);
        found.expect("it ran").end
    };
    for (stage, events) in (0u32..).zip(&timeline.events) {
        assert!(events.windows(2).all(|two| two[0].end <= two[1].start));
        for event in events {
            let (pass, part) = (event.pass, layout.part(stage, event.pass.chunk));
            let needed = match pass.section {
                Section::Forward if part == 0 => 0.0,
                Section::Forward => end(part - 1, true, pass.microbatch) + costs.transfers[part as usize - 1],
                Section::BackwardWeight => end(part, false, pass.microbatch),
                _ if part + 1 == layout.parts() => end(part, true, pass.microbatch),
                _ => end(part + 1, false, pass.microbatch) + costs.transfers[part as usize],
            };
            assert!(event.start >= needed, "stage {stage}: {pass}");
        }
    }
}

#[test]
fn simulated_times_respect_what_passes_need_and_the_bounds() {
    let mut random = Random(1);
    for _ in 0..60 {
        let (stages, microbatches) = (1 + random.below(6) as u32, 1 + random.below(8) as u32);
        for rule in all_rules(stages, microbatches) {
            let layout = rule.layout(stages);
            let costs = random.costs(layout);
            let order = rule.order(stages, microbatches).expect("an order");
            let timeline = simulate(&order, &costs).expect("it runs");
            check(&order, &costs, &timeline);
            let problem = Problem { layout, microbatches, costs: &costs, limit_bytes: &[] };
            assert!(timeline.cost >= problem.lower_bound() * (1.0 - 1e-12), "{rule:?}");
            assert!((0.0..1.0).contains(&timeline.bubble) || timeline.cost == 0.0);
        }
    }
}

#[test]
fn the_search_is_never_worse_than_a_schedule_that_fits() {
    let mut random = Random(2);
    let mut fitted = BTreeSet::new();
    for case in 0..60 {
        let (stages, microbatches) = (1 + random.below(5) as u32, 1 + random.below(9) as u32);
        let layout = [
            Layout::plain(stages),
            Rule::ZbV.layout(stages),
            Rule::Interleaved { chunks: 2 }.layout(stages),
            Rule::Interleaved { chunks: 3 }.layout(stages),
        ][case % 4];
        let costs = random.costs(layout);
        let limit_bytes = random.limits(layout, &costs, microbatches);
        let problem = Problem { layout, microbatches, costs: &costs, limit_bytes: &limit_bytes };
        let order = search(&problem).expect("an order");
        let found = simulate(&order, &costs).expect("it runs");
        check(&order, &costs, &found);
        assert!(found.peak_bytes.iter().zip(&limit_bytes).all(|(peak, limit)| peak <= limit), "case {case}");
        assert!(found.cost >= problem.lower_bound() * (1.0 - 1e-12), "case {case}");
        for rule in rules(layout) {
            let Ok(named) = rule.order(stages, microbatches) else { continue };
            if problem.fits(&named) {
                fitted.insert(format!("{rule:?}"));
                let cost = simulate(&named, &costs).expect("it runs").cost;
                assert!(found.cost <= cost * (1.0 + 1e-9), "case {case}: {} and {rule:?} {cost}", found.cost);
            }
        }
        assert_eq!(search(&problem).expect("an order"), order, "case {case}: the same again");
    }
    assert_eq!(fitted.len(), 7, "{fitted:?}");
}

/// All orders of two stages and two microbatches in halves, with forwards, and input halves, in turn.
fn all_orders() -> Vec<Order> {
    let mut lists: Vec<Vec<Pass>> = vec![Vec::new()];
    for _ in 0..6 {
        let longer = |list: &Vec<Pass>| {
            let count = |section| list.iter().filter(|p| p.section == section).count() as u32;
            let (f, b) = (count(Section::Forward), count(Section::BackwardInput));
            let weight = |m: u32| Pass::new(Section::BackwardWeight, 0, m);
            let mut next: Vec<Pass> = (0..b).map(weight).filter(|w| !list.contains(w)).collect();
            next.extend((f < 2).then(|| Pass::new(Section::Forward, 0, f)));
            next.extend((b < f).then(|| Pass::new(Section::BackwardInput, 0, b)));
            next.into_iter().map(|pass| [&list[..], &[pass]].concat()).collect::<Vec<_>>()
        };
        lists = lists.iter().flat_map(longer).collect();
    }
    let order =
        |a: &Vec<Pass>, b: &Vec<Pass>| Order { layout: Layout::plain(2), microbatches: 2, passes: vec![a.clone(), b.clone()] };
    lists.iter().flat_map(|a| lists.iter().map(move |b| order(a, b))).collect()
}

/// Of small cases the search finds the best there is.
#[test]
fn the_search_equals_brute_force() {
    let mut random = Random(3);
    let (orders, layout) = (all_orders(), Layout::plain(2));
    let (mut equal, cases) = (0, 60);
    for case in 0..cases {
        let costs = random.costs(layout);
        let limit_bytes = random.limits(layout, &costs, 2);
        let problem = Problem { layout, microbatches: 2, costs: &costs, limit_bytes: &limit_bytes };
        let found = simulate(&search(&problem).expect("an order"), &costs).expect("it runs").cost;
        let all = orders.iter().filter(|order| problem.fits(order));
        let best = all.filter_map(|order| Some(simulate(order, &costs).ok()?.cost)).fold(f64::INFINITY, f64::min);
        assert!(found >= best * (1.0 - 1e-12), "case {case}: {found} is less than the least, {best}");
        equal += u32::from(found <= best * (1.0 + 1e-12));
    }
    assert_eq!(equal, cases);
}
