//! Reading commands on every kind of file, and what goes out comes back in.

use crate::cli::{linear, linear_case, put, put_model};
use crate::command::{Folder, dcc};
use dcc::import::proto::{ModelProto, type_proto};
use dcc_program::artifact::Artifact;
use prost::Message;
use serde_json::Value;

/// ONNX's number of f16.
const FLOAT16: i32 = 10;

fn words<'a>(command: &'a str, paths: &'a [(&'a str, String)]) -> Vec<String> {
    let replaced = |word: &str| paths.iter().find(|(name, _)| *name == word).map_or(word.to_owned(), |(_, path)| path.clone());
    command.split_whitespace().map(replaced).collect()
}

#[test]
fn every_kind_of_file_can_be_inspected() {
    let folder = linear_case();
    let paths = ["linear.onnx", "linear.dcc", "data", "saved"].map(|name| (name, folder.at(name)));
    let run = |command: &str| dcc(words(command, &paths)).ok();
    run("compile linear.onnx --global-batch-size 8 --dp 2 --embed-weights");
    run("run linear.dcc --data data --steps 2 --save-dir saved --save-every 1");
    let json = |command: &str| -> Value { run(command).json() };
    let model = json("inspect linear.onnx --json");
    assert!(
        model["kind"] == "model" && model["ops"]["MatMul"] == 1 && model["inputs"][0]["type"] == "f32[batch, 3]",
        "{model}"
    );
    let artifact = json("inspect linear.dcc --json");
    let stage = &artifact["train"][0];
    assert!(artifact["kind"] == "artifact" && artifact["mesh"]["dp"] == 2 && stage["memory"]["peak"].as_u64() > Some(0));
    assert_eq!(artifact["tensors"][0]["data"], "embedded");
    let checkpoint = json("inspect saved --json");
    assert!(checkpoint["kind"] == "checkpoint" && checkpoint["run"]["step"] == 2, "the newest: {checkpoint}");
    assert_eq!(checkpoint["tensors"].as_array().map(Vec::len), Some(3), "w and the optimizer's two states of it");
    for (command, parts) in [
        ("inspect linear.onnx", ["kind model", "MatMul 1", "w  f32[3, 4]"]),
        ("inspect linear.dcc", ["linear.onnx --dp 2 --global-batch-size 8", "dp all_reduce", "x  f32[8, 3]"]),
        ("inspect linear.dcc --stage 0", ["stage 0", "start all_reduce", "section"]),
        ("inspect saved", ["optimizer state m, v", "step 2", "w  f32[3, 4]"]),
        ("verify linear.dcc", ["1 stages hold", "1 embedded, 0 in files that are as they were, 0 without data", "hash"]),
    ] {
        let text = run(command).stdout;
        assert!(parts.iter().all(|part| text.contains(part)), "{command}: {text}");
    }
}

/// The control is an artifact that claims another optimizer than it has.
#[test]
fn an_artifact_is_verified_against_one_device() {
    let folder = linear_case();
    let paths = ["linear.onnx", "other.onnx", "linear.dcc", "data"].map(|name| (name, folder.at(name)));
    let run = |command: &str| dcc(words(command, &paths));
    run("compile linear.onnx --data data --global-batch-size 8 --tp 2 --dp 2 --grad-accum 2").ok();
    let verified = run("verify linear.dcc --model linear.onnx --json").ok().json();
    assert!(verified["difference"].as_f64().is_some_and(|difference| difference < 1e-5), "{verified}");
    let text = run("verify linear.dcc --model linear.onnx").ok().stdout;
    assert!(text.contains("4 ranks: losses and gradient norms of 3 steps differ from one device's by at most"), "{text}");
    let mut other = std::fs::read(folder.path().join("linear.onnx")).expect("a model");
    other.extend([0x0a << 3, 0]);
    put(&folder, "other.onnx", other);
    let refused = run("verify linear.dcc --model other.onnx");
    assert!(refused.code.is_some_and(|code| code == 2 || code == 3), "{}", refused.stderr);
    let mut artifact = Artifact::load(&folder.path().join("linear.dcc")).expect("an artifact");
    let flags = artifact.options.get_mut("flags").and_then(Value::as_array_mut).expect("flags");
    flags.extend(["--optimizer", "sgd"].map(Value::from));
    let mut bytes = Vec::new();
    artifact.write(&mut bytes).expect("memory");
    put(&folder, "linear.dcc", bytes);
    let caught = run("verify linear.dcc --model linear.onnx");
    assert!(caught.code == Some(1) && caught.stderr.contains("do not compute what one device does"), "{caught:?}");
    assert_eq!(caught.stdout, "");
}

/// Whatever ranks share: one device shares nothing.
#[test]
fn artifacts_of_every_axis_are_verified_against_one_device() {
    let folder = Folder::new();
    let gpt = "tests/models/gpt2_tiny.onnx";
    for (model, flags) in [
        (gpt, "--tp 2 --sequence-parallel"),
        (gpt, "--cp 2 --dp 2 --zero 3 --shard-group 1"),
        (gpt, "--pp 2 --virtual-stages 2"),
        (gpt, "--pp 2 --schedule zb-v"),
        ("tests/models/families/gshard.onnx", "--ep 2 --dp 2 --zero 3"),
    ] {
        let out = folder.at("out.dcc");
        let compile = format!("compile {model} --global-batch-size 8 --dtype f64 {flags} -o {out}");
        dcc(compile.split(' ').map(str::to_owned)).ok();
        let verified = dcc(["verify", &out, "--model", model, "--json"]).ok().json();
        assert!(verified["difference"].as_f64().is_some_and(|difference| difference < 1e-9), "{flags}: {verified}");
    }
}

/// Weights that were trained, exported and trained again give the loss that the run itself would have come to.
#[test]
fn exported_weights_continue_the_run() {
    let folder = linear_case();
    let names = ["linear.onnx", "data", "saved", "out.onnx", "out.safetensors", "long.jsonl", "onnx.jsonl", "tensors.jsonl"];
    let paths = names.map(|name| (name, folder.at(name)));
    let run = |command: &str| dcc(words(command, &paths)).ok();
    let train = "--data data --global-batch-size 16 --order sequential --lr 0.1";
    run(&format!("run linear.onnx {train} --steps 3 --metrics-file long.jsonl"));
    run(&format!("run linear.onnx {train} --steps 2 --save-dir saved"));
    run("export saved --model linear.onnx --onnx out.onnx --safetensors out.safetensors");
    run(&format!("run out.onnx {train} --steps 1 --metrics-file onnx.jsonl"));
    run(&format!("run linear.onnx {train} --steps 1 --weights out.safetensors --metrics-file tensors.jsonl"));
    let losses = |name: &str| -> Vec<Value> { folder.lines(name).iter().map(|line| line["loss"].clone()).collect() };
    let long = losses("long.jsonl");
    assert_eq!([losses("onnx.jsonl"), losses("tensors.jsonl")], [vec![long[2].clone()], vec![long[2].clone()]]);
    assert!(long[0] != long[2], "training changes the loss: {long:?}");
}

/// Weights that half floats hold train as the same weights in f32 do, and go back as half floats.
#[test]
fn a_model_in_half_floats_trains_in_f32() {
    let folder = linear_case();
    let (mut single, mut half) = (linear(), linear());
    let graph = half.graph.as_mut().expect("a graph");
    for (single, half) in single.graph.as_mut().expect("a graph").initializer.iter_mut().zip(&mut graph.initializer) {
        let (words, _) = half.raw_data().as_chunks::<4>();
        let halves: Vec<half::f16> = words.iter().map(|&word| half::f16::from_f32(f32::from_le_bytes(word))).collect();
        single.raw_data = Some(halves.iter().flat_map(|x| x.to_f32().to_le_bytes()).collect::<Vec<u8>>().into());
        half.raw_data = Some(halves.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into());
        half.data_type = Some(FLOAT16);
    }
    for value in graph.input.iter_mut().chain(&mut graph.output) {
        let Some(type_proto::Value::TensorType(tensor)) = value.r#type.as_mut().and_then(|ty| ty.value.as_mut()) else {
            panic!()
        };
        tensor.elem_type = Some(FLOAT16);
    }
    put_model(&folder, "linear.onnx", &single);
    put_model(&folder, "half.onnx", &half);
    let run = |command: &str| {
        let names = ["linear.onnx", "half.onnx", "data", "saved", "out.onnx", "32.jsonl", "16.jsonl", "bf16.jsonl"];
        dcc(words(command, &names.map(|name| (name, folder.at(name))))).ok()
    };
    let losses = |model: &str, flags: &str, name: &str| -> Vec<Value> {
        run(&format!(
            "run {model} --data data --global-batch-size 16 --steps 3 --optimizer sgd --lr 0.1 {flags} --metrics-file {name}"
        ));
        folder.lines(name).iter().map(|line| line["loss"].clone()).collect()
    };
    let plain = losses("linear.onnx", "", "32.jsonl");
    assert_eq!(losses("half.onnx", "--dtype f32 --save-dir saved", "16.jsonl"), plain);
    assert_ne!(losses("half.onnx", "", "16.jsonl"), plain);
    assert_eq!(losses("half.onnx", "--dtype bf16", "16.jsonl"), losses("linear.onnx", "--dtype bf16", "bf16.jsonl"));
    run("export saved --model half.onnx --onnx out.onnx");
    let bytes = std::fs::read(folder.at("out.onnx")).expect("a file");
    let out = ModelProto::decode(&*bytes).expect("a model");
    assert!(out.graph.expect("a graph").initializer.iter().all(|tensor| tensor.data_type() == FLOAT16));
}

/// Other runtimes run such a file as it is.
#[test]
fn an_export_in_training_mode_is_told() {
    let folder = linear_case();
    let names =
        [("data", "tests/models/data/mlp.npz".to_owned()), ("saved", folder.at("saved")), ("out.onnx", folder.at("out.onnx"))];
    let mut told = ["mlp_legacy_dropout", "mlp"].map(|name| {
        let run = |command: &str| dcc(words(command, &names)).ok();
        let model = format!("tests/models/{name}.onnx");
        let _ = std::fs::remove_dir_all(folder.at("saved"));
        run(&format!("run {model} --data data --init 1 --global-batch-size 8 --steps 1 --save-dir saved"));
        run(&format!("export saved --model {model} --onnx out.onnx")).stderr.contains("Dropout nodes of")
    });
    told.sort_unstable();
    assert_eq!(told, [false, true]);
}

/// A run goes on with what it can of another optimizer's state, and says what it leaves.
#[test]
fn another_optimizer_resumes_with_a_word() {
    let folder = linear_case();
    let run = |command: &str| {
        let names = ["linear.onnx", "data", "saved"].map(|name| (name, folder.at(name)));
        dcc(words(&format!("run linear.onnx --data data --global-batch-size 16 --save-dir saved {command}"), &names))
    };
    run("--optimizer adamw --steps 1").ok();
    let same = run("--optimizer adamw --steps 2 --resume auto").ok();
    assert!(!same.stderr.contains("not used"), "{}", same.stderr);
    let other = run("--optimizer lion --steps 3 --resume auto").ok();
    assert!(other.stderr.contains("note: of the checkpoint, v is not used"), "{}", other.stderr);
    let done = run("--optimizer lion --steps 3 --resume auto").ok();
    assert!(done.stderr.contains("note: no step to do: 3 are done, of 3"), "{}", done.stderr);
    let refused = run("--optimizer adamw --steps 4 --resume auto");
    assert_eq!(refused.code, Some(5), "{}", refused.stderr);
    assert!(refused.stderr.contains("(v): its optimizer keeps m"), "{}", refused.stderr);
}
