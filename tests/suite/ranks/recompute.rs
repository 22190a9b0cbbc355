//! Recomputation: the same training from less memory, as much of it as a limit demands and no more.

use super::{CASE, Case, Split, compiled, is_long, mesh};
use dcc::compile::{Options, compile, planned_bytes};
use dcc::import::Model;
use dcc::plan::{Parallel, Schedule, Zero, batch};
use dcc::recompute::{Lasting, Recompute, Repeats};
use dcc_program::program::{Action, BufferId, Instr, Library, Program, SectionKind};
use dcc_runtime::exec::whole::Outcome;

fn repeating(repeats: Repeats, parallel: &Parallel) -> Parallel {
    Parallel { recompute: Recompute::Fixed(repeats), ..parallel.clone() }
}

/// Everything and what is quick, in part and as a whole, on every axis, with one and several microbatches in flight.
#[test]
fn every_mesh_trains_as_one_device() {
    let all = thinned(&ladder());
    let of = |repeats: &[Repeats], (parallel, microbatches): &Split| -> Vec<Split> {
        repeats.iter().map(|&repeats| (repeating(repeats, parallel), *microbatches)).collect()
    };
    let both = [Repeats::SELECTIVE, Repeats::FULL];
    let products =
        [Lasting::Throughout, Lasting::Segment(9), Lasting::Between].map(|lasting| Repeats::Products { flops: 64, lasting });
    let ways = [&both[..], &products[..]].concat();
    let mut splits = of(&all, &(mesh(1, 1, 1), 1));
    for split in [(mesh(2, 2, 1), 2), (mesh(1, 1, 2), 4), (mesh(1, 2, 2), 2)] {
        splits.extend(of(&ways, &split));
    }
    splits.extend(of(&ways, &(Parallel { zero: Zero::Parameters, ..mesh(2, 1, 2) }, 2)));
    for schedule in [Schedule::ZbH1, Schedule::ZbV] {
        splits.extend(of(&ways, &(Parallel { schedule, ..mesh(1, 1, 2) }, 4)));
    }
    Case { model: "gpt2_tiny.onnx", ..CASE }.check(&splits);
    let few: Vec<Split> = [(mesh(1, 1, 1), 1), (mesh(2, 1, 2), 2)].iter().flat_map(|split| of(&ways, split)).collect();
    for model in ["gpt2_tiny_dropout.onnx", "llama_tiny.onnx", "bert_tiny.onnx", "mlp.onnx", "cnn.onnx"] {
        Case { model, ..CASE }.check(&few);
    }
    let one: Vec<Split> =
        [mesh(2, 1, 1), mesh(1, 2, 1)].iter().flat_map(|parallel| of(&ways, &(parallel.clone(), 1))).collect();
    Case { model: "families/resnet.onnx", ..CASE }.check(&one);
}

fn activations(program: &Program) -> u64 {
    dcc::report::memory(program).activations
}

/// Of what is quick nothing computes a product with a weight, and of everything each product once more.
#[test]
fn less_is_kept_the_more_is_computed() {
    let products = |program: &Program| {
        let backward = program.sections.iter().rfind(|section| section.kind == SectionKind::Backward);
        let is_product = |action: &Action| matches!(action, Action::Library(Library::Dot { .. }));
        backward.map_or(0, |section| section.body.iter().filter(|instr| is_product(&instr.action)).count())
    };
    for model in ["gpt2_tiny.onnx", "llama_tiny.onnx"] {
        let of = |repeats| {
            let artifact = compiled(model, &repeating(repeats, &mesh(1, 1, 1)), 1, None).artifact;
            (activations(&artifact.train[0]), products(&artifact.train[0]))
        };
        let [(all, none), (quick, selective), (few, full)] = [Repeats::NONE, Repeats::SELECTIVE, Repeats::FULL].map(of);
        assert!(few < quick && quick < all, "{model}: {few}, {quick}, {all} bytes");
        assert!(selective == none && full > none, "{model}: {none}, {selective}, {full} products");
    }
}

/// What a layer makes again for its weights' gradient is made in one pass with its own gradient, both where they are read from.
#[test]
fn activations_are_made_again_beside_their_gradients() {
    let in_place = |program: &Program, instr: &Instr| {
        let at = |id: &BufferId| (program.buffers[id.0 as usize].place, program.buffers[id.0 as usize].offset);
        instr.results.iter().all(|result| instr.operands.iter().any(|operand| at(operand) == at(result)))
    };
    let pairs = |model, repeats| {
        let compiled = compiled(model, &repeating(repeats, &mesh(1, 1, 1)), 2, None);
        let program = &compiled.artifact.train[0];
        let backward = program.sections.iter().filter(|section| section.kind == SectionKind::Backward).flat_map(|s| &s.body);
        let kernels = backward.filter(|instr| matches!(instr.action, Action::Kernel(_)) && instr.results.len() == 2);
        let ranks = |instr: &&Instr| instr.results.iter().all(|id| program.ty(*id).rank() == 3);
        kernels.filter(ranks).filter(|instr| in_place(program, instr)).count()
    };
    for (model, layers) in [("gpt2_tiny.onnx", 4), ("bert_tiny.onnx", 2)] {
        assert_eq!([Repeats::SELECTIVE, Repeats::NONE].map(|repeats| pairs(model, repeats)), [layers, 0], "{model}");
    }
}

/// Weights are gathered once for computing again and for the gradient.
#[test]
fn sharded_parameters_are_gathered_no_more_often() {
    let case = Case { model: "gpt2_tiny.onnx", steps: 1, ..CASE };
    let received = |repeats| {
        let parallel = Parallel { zero: Zero::Parameters, ..mesh(2, 1, 1) };
        let Outcome { tallies, .. } = case.trained(&case.compiled(&repeating(repeats, &parallel), 2).artifact, 1, 1e-3);
        tallies.iter().map(|tally| tally.received_bytes).sum::<u64>()
    };
    let [none, selective, full] = [Repeats::NONE, Repeats::SELECTIVE, Repeats::FULL].map(received);
    assert_eq!(selective, none);
    // Biases, which no gradient reads, are gathered again: not so weights and tables.
    assert!(full > none && full - none < none / 100, "{full} bytes beside {none}");
}

/// What a model computes again in one microbatch, and the bytes that it needs.
fn limited(model: &str, samples: u64, recompute: Recompute, memory_limit: Option<u64>) -> dcc::Result<(Repeats, u64)> {
    let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let model = Model::decode(std::fs::read(path).expect("the model is there").into()).expect("it is a model");
    let options = Options {
        batch: batch::Given { global: Some(samples), accumulate: Some(1), ..Default::default() },
        parallel: Parallel { recompute, ..Parallel::default() },
        memory_limit,
        ..Options::default()
    };
    compile(&model, &options).map(|made| (made.plan.repeats, planned_bytes(&made.artifact.train[0])))
}

/// From nothing to everything.
fn ladder() -> Vec<Repeats> {
    Repeats::quick().into_iter().chain(Repeats::slower()).collect()
}

/// Of the ladder's rungs those of what is quick and each seventh of the others, or all where the slow variants run.
fn thinned<T: Copy>(rungs: &[T]) -> Vec<T> {
    let (quick, slower) = rungs.split_at(Repeats::quick().len());
    quick.iter().chain(slower.iter().step_by(if is_long() { 1 } else { 7 })).copied().collect()
}

/// The least of what is quick that fits, else something that does; an error with the bytes where nothing does.
#[test]
fn a_limit_sets_how_much() {
    let of = |recompute, memory_limit| limited("gpt2_tiny.onnx", 32, recompute, memory_limit);
    let ladder = ladder();
    let all: Vec<u64> = ladder.iter().map(|&rung| of(Recompute::Fixed(rung), None).expect("it compiles").1).collect();
    let least = *all.iter().min().expect("the ladder has rungs");
    assert!(all[8] * 4 < all[0] * 3 && least < all[8], "{all:?}");
    for limit in thinned(&all) {
        let (repeats, bytes) = of(Recompute::Budget, Some(limit)).expect("it fits");
        let rung = ladder.iter().position(|&rung| rung == repeats).expect("it is on the ladder");
        assert!(bytes == all[rung] && bytes <= limit, "{limit} bytes: {}", repeats.text());
        // Nothing before it of what is quick would do.
        assert!(all[..rung.min(9)].iter().all(|&bytes| bytes > limit), "{limit} bytes: {}", repeats.text());
    }
    let error = of(Recompute::Budget, Some(least - 1)).unwrap_err();
    assert_eq!(error.code.0, 401, "{error}");
    assert_eq!(of(Recompute::Fixed(Repeats::NONE), Some(all[0] - 1)).unwrap_err().code.0, 401);
}

/// A residual network trains in less memory than any way to compute everything again needs: in products at a price, once a segment.
#[test]
fn products_at_a_price_need_less_than_everything() {
    let of = |recompute, memory_limit| limited("families/resnet.onnx", 64, recompute, memory_limit);
    let whole = ladder().into_iter().filter(|repeats| matches!(repeats, Repeats::Whole(_)));
    let least = whole.map(|repeats| of(Recompute::Fixed(repeats), None).expect("it compiles").1).min().expect("there are some");
    let (repeats, bytes) = of(Recompute::Budget, Some(least * 9 / 10)).expect("it fits");
    let Repeats::Products { lasting: Lasting::Segment(_), .. } = repeats else { panic!("{}", repeats.text()) };
    assert!(bytes <= least * 9 / 10 && of(Recompute::Fixed(repeats), None).expect("it compiles").1 == bytes);
    assert_eq!(of(Recompute::Fixed(Repeats::FULL), Some(least * 9 / 10)).unwrap_err().code.0, 401);
}
