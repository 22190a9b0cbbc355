//! Reading commands on every kind of file, and what goes out comes back in.

use crate::cli::{linear_case, put};
use crate::command::{Folder, dcc};
use dcc_program::artifact::Artifact;
use serde_json::Value;

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
