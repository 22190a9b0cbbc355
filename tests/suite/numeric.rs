//! Numeric translation validation: all tensors of all ranks are those of the unpartitioned graph, and a fault that is planted in a program
//! is told at the first tensor that it changes.

use crate::command::{Folder, dcc};
use crate::compile::compiled;
use crate::onnx_model::{external, model, node, size, value, with_tensor};
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::import::proto::NodeProto;
use dcc::loss::{LossKind, LossOptions};
use dcc::numeric::Instance;
use dcc::plan::{Parallel, Schedule, Zero, batch};
use dcc::recompute::{Recompute, Repeats};
use dcc::train::TrainingOptions;
use dcc_program::program::{Action, BufferId, Instr, Library, Program, StoreMode, Transfer};
use prost::Message;

#[track_caller]
fn instance(model: &str, parallel: Parallel, microbatches: u32) -> Instance {
    let compiled = compiled(model, parallel, microbatches).unwrap_or_else(|error| panic!("{model}: {error}"));
    Instance::of(&compiled).unwrap_or_else(|error| panic!("{model}: {error}"))
}

#[track_caller]
fn agrees(model: &str, parallel: Parallel, microbatches: u32) {
    let text = format!("{model} {parallel:?}");
    let found = instance(model, parallel, microbatches).check().unwrap_or_else(|error| panic!("{text}: {error}"));
    println!("{model}: {} ranks, {} tensors, largest difference {:.1e}", found.ranks, found.tensors, found.difference);
    assert!(found.tensors > 20, "{text}: only {} tensors", found.tensors);
}

#[test]
fn every_strategy_computes_what_one_device_does() {
    let of = |parallel: Parallel| agrees("gpt2_tiny.onnx", parallel, 4);
    of(Parallel::default());
    of(Parallel { dp: 2, zero: Zero::Parameters, ..Parallel::default() });
    of(Parallel { tp: 2, sequence_parallel: true, ..Parallel::default() });
    of(Parallel { cp: 2, tp: 2, ..Parallel::default() });
    of(Parallel { dp: 2, tp: 2, pp: 2, zero: Zero::Gradients, ..Parallel::default() });
    of(Parallel { pp: 2, schedule: Schedule::ZbV, recompute: Recompute::Fixed(Repeats::FULL), ..Parallel::default() });
    of(Parallel { pp: 2, virtual_stages: 2, recompute: Recompute::Fixed(Repeats::SELECTIVE), ..Parallel::default() });
}

#[test]
fn every_family_computes_what_one_device_does() {
    for model in ["bert_tiny.onnx", "llama_tiny.onnx", "lstm.onnx", "gpt2_tiny_dropout.onnx"] {
        agrees(model, Parallel { dp: 2, tp: 2, ..Parallel::default() }, 2);
    }
    agrees("norm_mlp.onnx", Parallel { dp: 2, tp: 2, ..Parallel::default() }, 1);
    agrees("cnn.onnx", Parallel { tp: 2, pp: 2, ..Parallel::default() }, 1);
    agrees("families/gshard.onnx", Parallel { ep: 2, dp: 2, ..Parallel::default() }, 2);
    agrees("families/moe.onnx", Parallel { ep: 4, tp: 2, zero: Zero::Parameters, ..Parallel::default() }, 1);
}

/// Two branches that end with one bias, the one on a rank's first chunk and the other on its last: both add the same sum to its gradient.
#[test]
fn branches_on_two_chunks_share_a_bias() {
    let product = |x, w, y| node("MatMul", &[x, w], &[y]);
    let nodes = [
        product("x", "w0", "short"),
        node("Add", &["short", "b"], &["beside"]),
        product("x", "w1", "first"),
        node("Tanh", &["first"], &["second"]),
        product("second", "w2", "third"),
        node("Tanh", &["third"], &["fourth"]),
        product("fourth", "w3", "fifth"),
        node("Tanh", &["fifth"], &["sixth"]),
        product("sixth", "w4", "long"),
        node("Add", &["long", "b"], &["behind"]),
        node("Add", &["beside", "behind"], &["y"]),
    ];
    let weights = ["w0", "w1", "w2", "w3", "w4"].map(|name| (name, &[8, 8][..]));
    let weights: Vec<_> = weights.into_iter().chain([("b", &[8][..])]).collect();
    for schedule in [Schedule::OneFOneB, Schedule::ZbV] {
        let loss = LossOptions { kind: LossKind::Mse, ..Default::default() };
        let compiled = written(&nodes, &weights, &[8, 8], loss, (Parallel { pp: 2, schedule, ..Parallel::default() }, 4));
        let found = Instance::of(&compiled).and_then(|instance| instance.check());
        found.unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    }
}

/// What takes too long to run is made smaller; an uneven vocabulary stays uneven.
#[test]
fn a_large_model_is_made_smaller() {
    let compiled = compiled("gpt2_50257.onnx", Parallel { dp: 2, tp: 2, ..Parallel::default() }, 2).expect("it compiles");
    let found = Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
    let vocabulary = found.scaled.iter().find(|change| change.starts_with("50257")).expect("it is smaller");
    let to: u64 = vocabulary.rsplit(' ').next().and_then(|size| size.parse().ok()).expect("a size");
    assert!(to % 2 == 1 && to < 5000, "{vocabulary}");
}

/// Logits of so many classes at 16 positions of each sample, by two products.
fn classifier((samples, classes): (u64, i64), parallel: Parallel, microbatches: u32) -> dcc::Compiled {
    let nodes = [
        node("MatMul", &["x", "w"], &["inner"]),
        node("Tanh", &["inner"], &["hidden"]),
        node("MatMul", &["hidden", "v"], &["products"]),
        node("Add", &["products", "b"], &["y"]),
    ];
    let weights = [("w", &[8, 8][..]), ("v", &[8, classes]), ("b", &[classes])];
    let loss = LossOptions { kind: LossKind::CrossEntropy, class_dim: Some(2), ..Default::default() };
    written(&nodes, &weights, &[samples as i64, 16, 8], loss, (parallel, microbatches))
}

/// A model of these nodes, whose input `x` has these dims, of which the first counts samples.
fn written(
    nodes: &[NodeProto],
    weights: &[(&str, &[i64])],
    x: &[i64],
    loss: LossOptions,
    (parallel, microbatches): (Parallel, u32),
) -> dcc::Compiled {
    let mut proto =
        weights.iter().fold(model(nodes), |proto, (name, dims)| with_tensor(proto, external(name, dims, "weights")));
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &x.iter().map(|&dim| size(dim)).collect::<Vec<_>>())];
    let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let batch = batch::Given { global: Some(x[0] as u64), accumulate: Some(microbatches), ..Default::default() };
    let training = TrainingOptions { loss, ..Default::default() };
    let options = Options { batch, parallel, training, name: "written.onnx".to_owned(), ..Default::default() };
    compile(&proto, &options).unwrap_or_else(|error| panic!("{error}"))
}

const FEW: (u64, i64) = (8, 65);

/// 16 MiB of logits.
const MANY: (u64, i64) = (64, 4096);

/// The classifier's products and the loss, some positions after the others.
#[test]
fn a_classifier_computes_in_chunks_what_it_does_at_once() {
    let in_chunks = |parallel: Parallel, microbatches: u32| {
        let text = format!("{parallel:?}");
        let compiled = classifier(FEW, parallel, microbatches);
        let instance = Instance::in_chunks(&compiled).unwrap_or_else(|error| panic!("{text}: {error}"));
        let found = instance.check().unwrap_or_else(|error| panic!("{text}: {error}"));
        println!("{text}: {} tensors, largest difference {:.1e}", found.tensors, found.difference);
        instance.is_parted()
    };
    let fixed = |repeats| Parallel { recompute: Recompute::Fixed(repeats), ..Parallel::default() };
    let zero = |zero| Parallel { dp: 2, zero, ..Parallel::default() };
    let alone = [Parallel::default(), fixed(Repeats::SELECTIVE), fixed(Repeats::FULL)];
    for parallel in alone.into_iter().chain([zero(Zero::Nothing), zero(Zero::Parameters)]) {
        let parted = [1, 2].map(|microbatches| in_chunks(parallel.clone(), microbatches));
        assert_eq!(parted, [true; 2], "{parallel:?}: the classifier is whole");
    }
}

/// What is compiled in chunks is checked in chunks.
#[test]
fn much_is_in_chunks_as_it_is() {
    let few = Instance::of(&classifier(FEW, Parallel::default(), 1)).expect("it is placed");
    assert!(!few.is_parted(), "so few logits in chunks");
    let many = Instance::of(&classifier(MANY, Parallel::default(), 1)).expect("it is placed");
    assert!(many.is_parted(), "so many logits at once");
    let found = many.check().unwrap_or_else(|error| panic!("{error}"));
    assert!(found.scaled.iter().any(|change| change.starts_with("4096 ")), "{found:?}");
}

#[test]
fn faults_in_chunks_are_named() {
    let told = |change: fn(&mut [dcc::lower::Traced])| {
        let instance = Instance::in_chunks(&classifier(FEW, Parallel::default(), 1));
        told_of(instance.unwrap_or_else(|error| panic!("{error}")), change)
    };
    // The second chunk of the weight's gradient takes the place of the first.
    let sum = told(|programs| {
        let mut terms = instructions(programs).filter_map(|instr| match &mut instr.action {
            Action::Library(Library::Dot { mode, .. }) if *mode == StoreMode::Accumulate => Some(mode),
            _ => None,
        });
        *terms.next().expect("a sum in place") = StoreMode::Assign;
    });
    assert!(sum.contains("grad_sum") && sum.contains("section backward") && sum.contains("node 2 "), "{sum}");
    // Logits of a chunk by the weight's gradient instead of the weight.
    let logits = told(|programs| {
        let mode = |instr: &Instr| match &instr.action {
            Action::Library(Library::Dot { mode, .. }) => Some(*mode),
            _ => None,
        };
        let sum = instructions(programs).find(|instr| mode(instr) == Some(StoreMode::Accumulate)).expect("a sum").results[0];
        let types: Vec<_> = programs[0].program.buffers.iter().map(|buffer| buffer.ty.clone()).collect();
        let is_chunk = |buffer: &BufferId| types[buffer.0 as usize].shape[1..] == [1, FEW.1 as u64];
        let mut products = instructions(programs).filter(|instr| mode(instr).is_some() && instr.results.iter().all(is_chunk));
        products.nth(1).expect("a second chunk").operands[1] = sum;
    });
    assert!(logits.contains(" dot_general ") && logits.contains("section backward") && logits.contains("node 2 "), "{logits}");
}

/// 96 layers of 12288 in 16 stages: of all the sizes some are left, and the positions that loss and logits differ by.
#[test]
fn a_model_that_no_machine_here_holds_is_checked() {
    let parallel = Parallel { dp: 8, tp: 8, pp: 16, ..Parallel::default() };
    let found = instance("gpt3_175b.onnx", parallel, 1);
    let found = found.check().unwrap_or_else(|error| panic!("{error}"));
    assert!(found.ranks == 64 && found.tensors > 10_000, "{found:?}");
    let has = |change: &str| found.scaled.iter().any(|scaled| scaled.starts_with(change));
    assert!(["12288 ", "2048 ", "2047 ", "dp 8 ", "tp 8 "].into_iter().all(has), "{:?}", found.scaled);
}

/// The instructions of all sections.
fn instructions(programs: &mut [dcc::lower::Traced]) -> impl Iterator<Item = &mut Instr> {
    programs.iter_mut().flat_map(|traced| &mut traced.program.sections).flat_map(|section| &mut section.body)
}

/// What checking an instance says after `change`.
#[track_caller]
fn told(parallel: Parallel, change: impl FnOnce(&mut [dcc::lower::Traced])) -> String {
    told_of(instance("gpt2_tiny.onnx", parallel, 2), change)
}

#[track_caller]
fn told_of(mut instance: Instance, change: impl FnOnce(&mut [dcc::lower::Traced])) -> String {
    instance.check().unwrap_or_else(|error| panic!("{error}"));
    change(instance.programs());
    match instance.check() {
        Ok(found) => panic!("a fault is not found: {found:?}"),
        Err(error) => format!("{error} {}", error.at.clone().unwrap_or_default()),
    }
}

#[test]
fn the_first_tensor_that_differs_is_named() {
    let forward = told(Parallel { tp: 2, ..Parallel::default() }, |programs| repeat_operand(programs, "forward"));
    assert!(forward.contains("the first tensor that differs") && forward.contains("section forward"), "{forward}");
    // A sum over ranks that takes the largest instead.
    let sum = told(Parallel { tp: 2, ..Parallel::default() }, |programs| {
        let reduce = instructions(programs).find_map(|instr| match &mut instr.action {
            Action::Start { transfer: Transfer::AllReduce { reduce, .. }, .. } => Some(reduce),
            _ => None,
        });
        *reduce.expect("an all_reduce") = dcc_program::Reduce::Max;
    });
    assert!(sum.contains("the first tensor that differs") && sum.contains("all_reduce"), "{sum}");
    let update = told(Parallel { dp: 2, ..Parallel::default() }, |programs| repeat_operand(programs, "update"));
    assert!(update.contains("the first tensor that differs") && update.contains("section update"), "{update}");
}

/// A kernel of a section reads one operand twice instead of it and another of its type.
fn repeat_operand(programs: &mut [dcc::lower::Traced], section: &str) {
    let program: &mut Program = &mut programs[0].program;
    let types: Vec<_> = program.buffers.iter().map(|buffer| buffer.ty.clone()).collect();
    let ty = |buffer: BufferId| &types[buffer.0 as usize];
    let kernels = program.sections.iter_mut().filter(|s| s.kind.name() == section).flat_map(|s| &mut s.body);
    for instr in kernels.filter(|instr| matches!(instr.action, Action::Kernel(_))) {
        let first = instr.operands[0];
        let same = |other: &BufferId| *other != first && ty(*other) == ty(first) && !instr.results.contains(other);
        if let Some(at) = instr.operands.iter().position(same) {
            instr.operands[at] = first;
            return;
        }
    }
    panic!("no kernel of {section} reads two tensors of one type");
}

#[test]
fn an_artifact_is_checked_by_its_command() {
    let folder = Folder::new();
    let artifact = folder.at("a.dcc");
    let flags = ["--global-batch-size", "8", "--tp", "2", "--pp", "2", "--dtype", "bf16"];
    dcc(["compile", "tests/models/gpt2_tiny.onnx", "-o", &artifact].into_iter().chain(flags)).ok();
    let words = ["verify", &artifact, "--model", "tests/models/gpt2_tiny.onnx", "--numeric"];
    let text = dcc(words).ok().stdout;
    assert!(text.contains("tensors of 4 ranks are those of the unpartitioned graph"), "{text}");
    assert!(!text.contains("losses"), "the whole model is trained too: {text}");
    let found = dcc(words.into_iter().chain(["--json"])).ok().json();
    assert!(found["numeric"]["tensors"].as_u64().is_some_and(|tensors| tensors > 100), "{found}");
    // One whose kernels concatenate.
    let (joined, model) = (folder.at("b.dcc"), "tests/models/llama_tiny.onnx");
    dcc(["compile", model, "-o", &joined, "--global-batch-size", "8", "--dp", "2"]).ok();
    let text = dcc(["verify", &joined, "--model", model, "--numeric"]).ok().stdout;
    assert!(text.contains("tensors of 2 ranks are those of the unpartitioned graph"), "{text}");
    let alone = dcc(["verify", &artifact, "--numeric"]);
    assert!(alone.code == Some(2) && alone.stderr.contains("--model"), "{}", alone.stderr);
}
