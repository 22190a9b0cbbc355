//! The rules, what they cost, and what the simulator refuses.

mod properties;
mod published;

use super::*;
use crate::plan::Schedule;
use dcc_program::program::SectionKind;
use expect_test::{Expect, expect};

/// Sections that all take 1, of a part that holds 1 until its weight half has run: the paper's worst case.
fn unit() -> PartCost {
    PartCost { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, activation_bytes: 1, weight_bytes: 1 }
}

fn run(rule: Rule, stages: u32, microbatches: u32, part: PartCost, transfer: f64) -> Timeline {
    let order = rule.order(stages, microbatches).expect("an order");
    simulate(&order, &Costs::even(rule.layout(stages).parts(), part, transfer)).expect("it runs")
}

/// Every rule that can order `microbatches` on `stages`.
fn all_rules(stages: u32, microbatches: u32) -> Vec<Rule> {
    let mut rules = vec![Rule::GPipe, Rule::OneFOneB, Rule::ZbH1, Rule::ZbH2, Rule::ZbV, Rule::Interleaved { chunks: 1 }];
    if microbatches.is_multiple_of(stages) {
        rules.extend([Rule::Interleaved { chunks: 2 }, Rule::Interleaved { chunks: 3 }]);
    }
    rules
}

fn check(rule: Rule, stages: u32, microbatches: u32, expected: Expect) {
    expected.assert_eq(&rule.order(stages, microbatches).expect("an order").text());
}

#[test]
fn rules_of_whole_backwards() {
    check(
        Rule::GPipe,
        2,
        3,
        expect![[r#"
        F0 F1 F2 B0 B1 B2
        F0 F1 F2 B0 B1 B2
    "#]],
    );
    check(
        Rule::OneFOneB,
        3,
        4,
        expect![[r#"
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
    "#]],
    );
    check(
        Rule::OneFOneB,
        4,
        2,
        expect![[r#"
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 B0 F1 B1
    "#]],
    );
    check(
        Rule::Interleaved { chunks: 2 },
        2,
        4,
        expect![[r#"
            F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
            F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3
        "#]],
    );
}

/// Of the first two the paper's figure 3 with a stage and microbatches fewer.
#[test]
fn rules_of_halves() {
    check(
        Rule::ZbH1,
        3,
        5,
        expect![[r#"
        F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
        F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4
    "#]],
    );
    check(
        Rule::ZbH2,
        3,
        5,
        expect![[r#"
        F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
        F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
    "#]],
    );
    check(
        Rule::ZbV,
        2,
        4,
        expect![[r#"
            F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 B2 w3 B3 W2 W3
            F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 B2 b3 B3 w2 W2 w3 W3
        "#]],
    );
}

/// The sections of a program stand in the order of the rule; a stage of ZB-H2 is ahead by more than one message.
#[test]
fn programs_have_the_same_order() {
    for (schedule, found) in [
        (Schedule::GPipe, Rule::GPipe),
        (Schedule::OneFOneB, Rule::OneFOneB),
        (Schedule::ZbH1, Rule::ZbH1),
        (Schedule::ZbH2, Rule::ZbH2),
    ] {
        assert_eq!(rule(schedule, 1), found);
        let order = found.order(4, 8).expect("an order");
        let backward = if schedule.has_halves() { Backward::Halves } else { Backward::Whole };
        let turns = order.turns(backward);
        for (turns, passes) in turns.iter().zip(&order.passes) {
            let names: Vec<&str> = turns.list.iter().map(|turn| turn.0.kind.name()).collect();
            assert_eq!(names.len(), 3 + 8 + passes.len());
            assert!(names.contains(&"backward") != schedule.has_halves());
        }
        let ahead: Vec<u32> =
            (0..).zip(&turns).map(|(stage, turns)| turns.in_flight(SectionKind::Forward.into(), stage + 1)).collect();
        assert_eq!(ahead, if found == Rule::ZbH2 { [2, 2, 2, 1] } else { [1; 4] }, "{found:?}");
    }
}

#[test]
fn every_order_is_sound() {
    for stages in 1..=8 {
        for microbatches in 1..=16 {
            for rule in all_rules(stages, microbatches) {
                let found = run(rule, stages, microbatches, unit(), 0.25);
                assert!(found.cost > 0.0 && found.length() >= found.cost, "{rule:?} {stages} {microbatches}");
            }
        }
    }
}

/// Forward 1, backward 2, no transfers, against the papers' formulas. `F` and `B` of a stage are shared by its chunks.
#[test]
fn bubbles_are_those_of_the_papers() {
    let close = |a: f64, b: f64, what: &str| assert!((a - b).abs() < 1e-9, "{what}: {a}, not {b}");
    for (p, m) in [(2, 4), (4, 8), (4, 12), (8, 16), (3, 9)] {
        let (stages, count) = (f64::from(p), f64::from(m));
        let work = 3.0 * count;
        for rule in [Rule::GPipe, Rule::OneFOneB] {
            close(run(rule, p, m, unit(), 0.0).cost, work + 3.0 * (stages - 1.0), "GPipe, 1F1B");
        }
        for chunks in 1..=3 {
            let part = PartCost::whole(1.0 / f64::from(chunks), 2.0 / f64::from(chunks));
            let found = run(Rule::Interleaved { chunks }, p, m, part, 0.0);
            close(found.cost / work - 1.0, (stages - 1.0) / (f64::from(chunks) * count), "interleaved: (p-1)/(vm)");
        }
        // T_W takes half: (p-1)(T_F + T_B - T_W) and (p-1)(T_F + T_B - 2 T_W).
        let part = PartCost { backward_weight: 0.5, ..unit() };
        close(run(Rule::ZbH1, p, m, part, 0.0).cost, 2.5 * count + 1.5 * (stages - 1.0), "ZB-H1");
        close(run(Rule::ZbH2, p, m, part, 0.0).cost, 2.5 * count + (stages - 1.0), "ZB-H2");
        close(run(Rule::ZbH2, p, m, unit(), 0.0).bubble, 0.0, "ZB-H2");
        close(run(Rule::ZbV, p, m, unit(), 0.0).bubble, 0.0, "ZB-V");
    }
    // With fewer microbatches than slots, ZB-V too has a bubble.
    assert_eq!(run(Rule::ZbV, 4, 4, unit(), 0.0).cost, 6.0 * 4.0 + 3.0);
}

#[test]
fn memory_is_that_of_the_papers() {
    for (p, m) in [(2, 4), (4, 8), (8, 24), (5, 15)] {
        let peaks = |rule| run(rule, p, m, unit(), 0.0).peak_bytes;
        let by_stage = |bytes: &dyn Fn(u32) -> u32| (0..p).map(|i| u64::from(bytes(i))).collect::<Vec<_>>();
        assert_eq!(peaks(Rule::GPipe), by_stage(&|_| m));
        assert_eq!(peaks(Rule::OneFOneB), by_stage(&|i| p - i));
        // Nothing is freed before the weight half: the same on every stage.
        assert_eq!(peaks(Rule::ZbH1), by_stage(&|_| p));
        assert_eq!(peaks(Rule::ZbH2), by_stage(&|_| 2 * p - 1));
        // In parts of half the size.
        assert_eq!(peaks(Rule::ZbV), by_stage(&|_| 2 * p));
        assert_eq!(peaks(Rule::Interleaved { chunks: 2 }), by_stage(&|i| p + 2 * (p - i - 1) + 1));
        // If all is freed by the input half, weight halves cost nothing.
        let part = PartCost { weight_bytes: 0, ..unit() };
        assert_eq!(run(Rule::ZbH1, p, m, part, 0.0).peak_bytes, by_stage(&|i| p - i));
        assert_eq!(run(Rule::ZbH2, p, m, part, 0.0).peak_bytes, by_stage(&|i| 2 * (p - i) - 1));
    }
}

#[test]
fn a_group_of_microbatches_lacks_some() {
    let error = Rule::Interleaved { chunks: 2 }.order(4, 6).unwrap_err();
    expect!["an interleaved schedule runs groups of 4 microbatches, one for each stage; 6 is no multiple"]
        .assert_eq(&error.to_string());
    assert_eq!(Rule::ZbV.order(0, 1), Err(OrderError::Empty));
    assert_eq!(Rule::GPipe.order(1, 0), Err(OrderError::Empty));
    assert_eq!(Rule::Interleaved { chunks: 0 }.order(1, 1), Err(OrderError::Empty));
}

/// A sound order, broken in each way that there is.
#[test]
fn broken_orders_are_refused() {
    let check = |change: &dyn Fn(&mut Order), expected: Expect| {
        let mut order = Rule::ZbH1.order(2, 2).expect("an order");
        let costs = Costs::even(2, unit(), 0.0);
        assert!(simulate(&order, &costs).is_ok());
        change(&mut order);
        expected.assert_eq(&simulate(&order, &costs).unwrap_err().to_string());
    };
    let weight = |m| Pass::new(Section::BackwardWeight, 0, m);
    check(&|o| _ = o.passes[1].pop(), expect!["stage 1 never runs W1"]);
    check(&|o| o.passes[0].push(weight(0)), expect!["stage 0 runs W0 twice, or whole and in halves"]);
    check(&|o| o.passes[0].push(weight(2)), expect!["stage 0 has no W2"]);
    check(&|o| o.passes[0].push(Pass::new(Section::Forward, 1, 0)), expect!["stage 0 has no f0"]);
    check(&|o| o.passes[0].push(Pass::new(Section::Backward, 0, 0)), expect!["stage 0 runs B0 twice, or whole and in halves"]);
    check(
        &|o| _ = o.passes.pop(),
        expect!["the order is of 2 stages with 2 parts; there are 1 lists of passes, and times of 2 parts"],
    );
    check(&|o| o.microbatches = 0, expect!["a pipeline needs at least one stage, one chunk and one microbatch"]);
    // Its own stage runs later what a pass needs.
    check(&|o| o.passes[1].swap(0, 1), expect!["the order never ends: stage 1's B0 waits for stage 1's F0"]);
    check(&|o| o.passes[1].rotate_right(1), expect!["the order never ends: stage 1's W1 waits for stage 1's B1"]);
    // The first stage wants the second microbatch back before it sends the first, which the second stage wants first.
    check(
        &|o| {
            let at = |s: &[Pass], pass| s.iter().position(|&p| p == pass).expect("a pass");
            let (forward, backward) = (Pass::new(Section::Forward, 0, 1), Pass::new(Section::BackwardInput, 0, 0));
            let (a, b) = (at(&o.passes[0], forward), at(&o.passes[0], backward));
            o.passes[0].swap(a, b);
            let (a, b) = (at(&o.passes[1], forward), at(&o.passes[1], backward));
            o.passes[1].swap(a, b);
        },
        expect!["the order never ends: stage 0's B0 waits for stage 1's B0, stage 1's F1 waits for stage 0's F1"],
    );
    let order = Rule::GPipe.order(2, 2).expect("an order");
    let error = simulate(&order, &Costs::even(3, unit(), 0.0)).unwrap_err();
    expect!["the order is of 2 stages with 2 parts; there are 2 lists of passes, and times of 3 parts"]
        .assert_eq(&error.to_string());
}

#[test]
fn a_stage_that_cannot_hold_a_microbatch() {
    let costs = Costs::even(4, unit(), 0.0);
    let layout = Rule::ZbV.layout(2);
    let error = search(&Problem { layout, microbatches: 3, costs: &costs, limit_bytes: &[2, 1] }).unwrap_err();
    expect!["stage 1 has memory for 1 bytes of activations and needs 2 for a single microbatch"].assert_eq(&error.to_string());
    let order = search(&Problem { layout, microbatches: 3, costs: &costs, limit_bytes: &[2, 2] }).expect("one at a time");
    assert_eq!(peak_bytes(&order, &costs), [2, 2]);
    let error = search(&Problem { layout, microbatches: 3, costs: &costs, limit_bytes: &[2] }).unwrap_err();
    assert!(matches!(error, OrderError::Size { .. }));
}
