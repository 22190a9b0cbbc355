//! Schedules of pipelines: each trains as one device does, in the order, the memory and with the bubble of its rule.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::cost::kept::Kept;
use dcc::import::Dropout;
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::schedule::{self, Costs, Order, PartCost, Rule};
use dcc_program::program::{Action, Area, Library, ParamKind, Program, SectionId, SectionKind, Transfer};
use std::collections::BTreeSet;

/// Schedules that run the backward pass in halves.
const HALVES: [Schedule; 3] = [Schedule::ZbH1, Schedule::ZbH2, Schedule::Auto];

fn by(schedule: Schedule, (dp, tp, pp): (u32, u32, u32)) -> Parallel {
    Parallel { schedule, ..mesh(dp, tp, pp) }
}

/// Tied embeddings, clipping, labels of which some microbatches ignore all; fewer microbatches than stages, and no multiple of them.
#[test]
fn gpt_trains_alike_by_every_schedule() {
    let gpt = Case { model: "gpt2_tiny.onnx", batch: 12, steps: 2, labels: Some(16), clip: Some(0.5), ..CASE };
    let mut splits: Vec<Split> = Vec::new();
    for schedule in HALVES {
        splits.extend([((1, 1, 2), 3), ((1, 1, 4), 2), ((2, 1, 2), 3), ((1, 2, 2), 4)].map(|(m, n)| (by(schedule, m), n)));
    }
    splits.push((by(Schedule::Auto, (1, 1, 4)), 6));
    splits.extend([(by(Schedule::ZbH1, (1, 1, 1)), 3), (by(Schedule::ZbH1, (1, 1, 2)), 1)]);
    for zero in [Zero::State, Zero::Gradients, Zero::Parameters] {
        splits.push((Parallel { zero, ..by(Schedule::ZbH1, (2, 1, 2)) }, 3));
    }
    gpt.check(&splits);
    let masks = Case { model: "gpt2_tiny_dropout.onnx", steps: 2, dropout: Dropout::Rate(0.1), ..CASE };
    masks.check(&[(by(Schedule::ZbH2, (1, 1, 4)), 8)]);
}

fn interleaved(mesh: (u32, u32, u32), virtual_stages: u32) -> Parallel {
    Parallel { virtual_stages, ..by(Schedule::OneFOneB, mesh) }
}

/// Several chunks on each rank, dealt round after round or there and back. Of the latter the first rank has both ends: the tied
/// embedding.
#[test]
fn gpt_trains_alike_in_chunks() {
    let gpt = Case { model: "gpt2_tiny.onnx", batch: 12, steps: 2, labels: Some(16), clip: Some(0.5), ..CASE };
    let mut splits: Vec<Split> =
        [((1, 1, 2), 2, 4), ((1, 1, 2), 3, 2), ((1, 1, 4), 2, 4), ((2, 1, 2), 2, 6), ((1, 2, 2), 2, 2)]
            .map(|(mesh, chunks, count)| (interleaved(mesh, chunks), count))
            .to_vec();
    splits.extend(
        [((1, 1, 2), 3), ((1, 1, 4), 6), ((1, 1, 4), 2), ((2, 1, 2), 3), ((1, 2, 2), 1)]
            .map(|(m, n)| (by(Schedule::ZbV, m), n)),
    );
    for zero in [Zero::Gradients, Zero::Parameters] {
        splits.push((Parallel { zero, ..by(Schedule::ZbV, (2, 1, 2)) }, 3));
    }
    splits.push((Parallel { zero: Zero::Parameters, ..interleaved((2, 1, 2), 2) }, 2));
    gpt.check(&splits);
    let masks = Case { model: "gpt2_tiny_dropout.onnx", steps: 2, dropout: Dropout::Rate(0.1), ..CASE };
    masks.check(&[(by(Schedule::ZbV, (1, 1, 2)), 4), (interleaved((1, 1, 2), 2), 8)]);
    let resnet = Case { model: "families/resnet.onnx", batch: 8, steps: 2, clip: Some(0.5), ..CASE };
    resnet.check(&[(by(Schedule::ZbV, (1, 1, 2)), 1), (by(Schedule::ZbV, (2, 1, 2)), 1)]);
    Case { model: "cnn.onnx", ..CASE }.check(&[(interleaved((1, 1, 2), 2), 4), (by(Schedule::ZbV, (1, 1, 2)), 4)]);
}

/// One parameter, one accumulator, to which both chunks add, and no sum over stages but the norm's.
#[test]
fn chunks_of_a_rank_share_a_parameter() {
    let compiled = compiled(Schedule::ZbV, 2, 3);
    let program = &compiled.artifact.train[0];
    let weights = program.params.iter().filter(|p| p.kind == ParamKind::Weight && p.name.contains("lm_head"));
    let weight = weights.collect::<Vec<_>>();
    assert_eq!(weight.len(), 1, "{weight:?}");
    assert!(!compiled.artifact.train[1].params.iter().any(|p| p.name.contains("lm_head")), "the other rank does without");
    let shape = &program.ty(weight[0].buffer).shape;
    let instrs = || program.sections.iter().flat_map(|s| s.body.iter().map(move |i| (s.id(), i)));
    let zeros = instrs().filter(|(_, i)| matches!(i.action, Action::Library(Library::Zero { terms: 2 })));
    let sums: Vec<_> = zeros.map(|(_, i)| i.results[0]).filter(|&b| program.ty(b).shape == *shape).collect();
    let [sum] = sums[..] else { panic!("one accumulator of two terms, not {sums:?}") };
    let adding: BTreeSet<u32> =
        instrs().filter(|(s, i)| s.kind.is_backward() && i.results.contains(&sum)).map(|(s, _)| s.chunk).collect();
    assert_eq!(adding, BTreeSet::from([0, 1]));
    let sums = instrs().filter(|(_, i)| matches!(i.action, Action::Start { transfer: Transfer::StageSum { .. }, .. }));
    assert!(sums.count() <= 1, "only the norm is summed over stages");
}

/// Convolutions and BatchNorm, whose single microbatch has sums that are resolved in place.
#[test]
fn convolutions_train_alike_by_every_schedule() {
    let resnet = Case { model: "families/resnet.onnx", batch: 8, steps: 2, clip: Some(0.5), ..CASE };
    let of = |meshes: &[(u32, u32, u32)], count| {
        let all = |&mesh: &(u32, u32, u32)| HALVES[..2].iter().map(move |&schedule| (by(schedule, mesh), count));
        meshes.iter().flat_map(all).collect::<Vec<Split>>()
    };
    resnet.check(&of(&[(1, 1, 2), (1, 1, 4), (2, 1, 2)], 1));
    Case { model: "cnn.onnx", ..CASE }.check(&of(&[(1, 1, 2), (1, 2, 2)], 4));
    Case { model: "mlp.onnx", ..CASE }.check(&of(&[(1, 1, 2), (2, 1, 2)], 4));
    Case { model: "mlp.onnx", dtype: None, ..CASE }.check(&of(&[(1, 1, 2)], 8));
}

/// In `tests/long.sh`: every schedule by 1 to 8 microbatches on every pipeline of up to eight ranks, 20 steps.
#[test]
fn all_schedules_on_all_pipelines() {
    if !is_long() {
        return;
    }
    for (model, labels) in [("gpt2_tiny.onnx", Some(16)), ("llama_tiny.onnx", None)] {
        for (batch, counts) in [(24, &[1, 2, 3, 4, 6, 8][..]), (20, &[5])] {
            let case = Case { model, labels, batch, steps: 20, clip: Some(0.5), ..CASE };
            let meshes = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 4)];
            let mut splits: Vec<Split> = Vec::new();
            for mesh in meshes {
                let counts = counts.iter().filter(|&&count| batch % u64::from(count * mesh.0) == 0);
                splits.extend(counts.clone().flat_map(|&count| Schedule::ALL.map(|schedule| (by(schedule, mesh), count))));
                let grouped = counts.filter(|&&count| count % mesh.2 == 0);
                splits.extend(grouped.flat_map(|&count| [2, 3].map(|chunks| (interleaved(mesh, chunks), count))));
            }
            case.check(&splits);
        }
    }
}

fn compiled(schedule: Schedule, pp: u32, microbatches: u32) -> dcc::Compiled {
    let case = Case { model: "gpt2_tiny.onnx", batch: 24, dtype: None, ..CASE };
    case.compiled(&by(schedule, (1, 1, pp)), microbatches)
}

/// What `order` takes where forward, input half and weight half are alike; a whole backward is both.
fn bubble(order: &Order) -> f64 {
    let part = PartCost { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, ..PartCost::default() };
    schedule::simulate(order, &Costs::even(order.layout.parts(), part, 0.0)).expect("it runs").bubble
}

/// Most microbatches that a stage holds from forward to a backward section, by the simulator.
fn held(order: &Order, stage: usize, until: SectionKind) -> u64 {
    let weight_bytes = u64::from(until == SectionKind::BackwardWeight);
    let part = PartCost { activation_bytes: 1, weight_bytes, ..PartCost::default() };
    schedule::simulate(order, &Costs::even(order.layout.parts(), part, 0.0)).expect("it runs").peak_bytes[stage]
}

/// What runs is what the rule says and the simulator ran; areas have a slot for each microbatch that it finds alive, and none more.
#[test]
fn programs_have_the_order_and_the_slots_of_the_rule() {
    for (parallel, rule) in [
        (by(Schedule::GPipe, (1, 1, 1)), Rule::GPipe),
        (by(Schedule::OneFOneB, (1, 1, 1)), Rule::OneFOneB),
        (by(Schedule::ZbH1, (1, 1, 1)), Rule::ZbH1),
        (by(Schedule::ZbH2, (1, 1, 1)), Rule::ZbH2),
        (by(Schedule::ZbV, (1, 1, 1)), Rule::ZbV),
        (interleaved((1, 1, 1), 2), Rule::Interleaved { chunks: 2 }),
    ] {
        for (pp, microbatches) in [(2, 6), (4, 4)] {
            let case = Case { model: "gpt2_tiny.onnx", batch: 12, dtype: None, ..CASE };
            let compiled = case.compiled(&Parallel { pp, ..parallel.clone() }, microbatches);
            let found = Order::of_programs(&compiled.artifact.train).expect("the programs of a pipeline");
            let due = rule.order(pp, microbatches).expect("an order");
            assert_eq!((found.text(), found.layout), (due.text(), due.layout), "{rule:?}");
            assert_eq!(bubble(&found), bubble(&due), "{rule:?}");
            if due.layout.chunks == 1 {
                for (stage, program) in compiled.artifact.train.iter().enumerate() {
                    slots(program, |until| held(&due, stage, until));
                }
            }
        }
    }
}

fn slots(program: &Program, held: impl Fn(SectionKind) -> u64) {
    let kept = |area: &&Area| area.from.kind == SectionKind::Forward && area.to.kind.is_backward();
    let bytes = Kept::of(program).bytes;
    let until: Vec<SectionId> = bytes
        .keys()
        .filter(|(from, to)| from.kind == SectionKind::Forward && to.kind.is_backward())
        .map(|ends| ends.1)
        .collect();
    assert!(!until.is_empty(), "stage {} keeps nothing", program.stage);
    let areas: Vec<&Area> = program.areas.iter().filter(kept).collect();
    for until in until.iter().filter(|until| held(until.kind) > 1) {
        assert!(areas.iter().any(|area| area.to == *until), "stage {} has no slots for {}", program.stage, until.name());
    }
    for area in areas {
        assert_eq!(u64::from(area.slots), held(area.to.kind), "stage {}, until {}", program.stage, area.to.name());
    }
}

/// A search in the memory that it is given, or in twice that of 1F1B: within the limit, and no slower than the rule that fits.
#[test]
fn the_search_keeps_to_the_memory_limit() {
    let case = Case { model: "gpt2_tiny.onnx", batch: 24, dtype: None, ..CASE };
    let parallel = by(Schedule::Auto, (1, 1, 4));
    let peak = |compiled: &dcc::Compiled| compiled.artifact.train.iter().map(dcc::compile::planned_bytes).max().unwrap_or(0);
    let machine = parallel.machine;
    let time = |order: &Order, compiled: &dcc::Compiled| {
        let costs = dcc::cost::sections::costs(&compiled.artifact.train, order.layout, &machine);
        schedule::simulate(order, &costs).expect("it runs").cost
    };
    let free = case.compiled(&parallel, 8);
    let few = compiled(Schedule::ZbH1, 4, 8);
    let limited = case.limited(&parallel, 8, peak(&few)).expect("ZB-H1 fits");
    assert!(peak(&limited) <= peak(&few));
    let [fast, slow, rule] = [&free, &limited, &few].map(|c| time(&c.order, &free));
    println!("4 stages, 8 microbatches: {fast:.3e} s free, {slow:.3e} s in ZB-H1's memory, {rule:.3e} s by ZB-H1");
    assert!(fast <= rule && slow <= rule);
    let error = case.limited(&parallel, 8, peak(&few) / 4).err().expect("too little memory");
    assert_eq!(error.code.to_string(), "DCC0401", "{error}");
}
