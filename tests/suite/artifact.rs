//! Artifacts as files: the same model and flags give the same bytes; one with its weights inside trains anywhere as `dcc run`
//! does, with the runtime alone.

use crate::command::{self, Folder, dcc, dcc_command, dcc_run};
use crate::tidy::root;
use std::path::Path;

/// Copies a model of `tests/models` into a folder, as `model.onnx`.
fn copy(model: &str, folder: &Folder) {
    std::fs::copy(root().join("tests/models").join(model), folder.at("model.onnx")).expect("the model");
}

/// The artifact that a process of its own compiles in a folder of its own.
fn compiled(model: &str, flags: &str) -> Vec<u8> {
    let folder = Folder::new();
    copy(model, &folder);
    let words = ["compile", "model.onnx", "-o", "out.dcc"].into_iter().chain(flags.split_whitespace());
    command::finish(command::spawn(dcc_command().args(words).current_dir(folder.path()))).ok();
    std::fs::read(folder.at("out.dcc")).expect("the artifact")
}

/// Hash maps of two processes iterate in different orders, so that what depends on one shows.
#[test]
fn the_same_model_and_flags_give_the_same_file() {
    let cases = [
        ("mlp.onnx", "--tp 2 --global-batch-size 8"),
        ("two_inputs.onnx", "--dp 2 --pp 2 --global-batch-size 8 --grad-accum 2 --loss mse --dtype f64"),
        ("gpt2_tiny.onnx", "--dp 2 --tp 2 --pp 2 --global-batch-size 8 --grad-clip 1"),
        ("gpt2_tiny_dropout.onnx", "--tp 4 --global-batch-size 8 --optimizer sgd --momentum 0.9"),
        ("llama_tiny.onnx", "--pp 4 --schedule gpipe --global-batch-size 8 --weight-decay 0.1"),
        ("bert_tiny.onnx", "--tp 2 --pp 2 --global-batch-size 8 --loss cross-entropy"),
    ];
    for (model, flags) in cases {
        let first = compiled(model, flags);
        assert!(first == compiled(model, flags), "{model} {flags}: two processes give different artifacts");
    }
    let [a, b] = ["--tp 2 --global-batch-size 8", "--tp 2 --global-batch-size 4"].map(|flags| compiled("mlp.onnx", flags));
    assert!(a != b, "the control: another batch is another artifact");
}

/// The data that `tests/models/mlp.onnx` refers to: small numbers that look random, f32.
fn weights(path: &Path) {
    let value = |i: u64| (((i + 7).wrapping_mul(2_654_435_761) % 2001) as f32 / 1000.5 - 1.0) * 0.1;
    let bytes: Vec<u8> = (0..1 << 16).flat_map(|i| value(i).to_le_bytes()).collect();
    std::fs::write(path, bytes).expect("weights");
}

/// Losses and norms of all steps, then the files of the last checkpoint by name.
fn trace(folder: &Folder) -> (Vec<(String, String)>, Vec<(String, Vec<u8>)>) {
    let lines = folder.lines("metrics.jsonl").into_iter();
    let steps = lines.map(|line| (line["loss"].to_string(), line["grad_norm"].to_string())).collect();
    let saved = std::fs::read_dir(folder.path().join("saved/step-00000004")).expect("a checkpoint");
    let files = saved.map(|file| file.expect("a file").path()).filter(|path| path.extension() == Some("safetensors".as_ref()));
    let named = |path: std::path::PathBuf| {
        (path.file_name().expect("a name").to_string_lossy().into_owned(), std::fs::read(&path).expect("a checkpoint's file"))
    };
    let mut files: Vec<_> = files.map(named).collect();
    files.sort();
    (steps, files)
}

#[test]
fn an_artifact_with_weights_trains_anywhere() {
    let [here, there, other] = [(); 3].map(|()| Folder::new());
    copy("mlp.onnx", &here);
    weights(&here.path().join("weights.bin"));
    let mesh = ["--tp", "2", "--pp", "2", "--global-batch-size", "8", "--grad-accum", "2", "--optimizer", "adamw"];
    let train = |folder: &Folder, lr: &str| {
        let words = ["--data", "tests/models/data/mlp.npz", "--steps", "4", "--threads", "1", "--lr", lr];
        let files = ["--save-dir".to_owned(), folder.at("saved"), "--metrics-file".to_owned(), folder.at("metrics.jsonl")];
        words.map(str::to_owned).into_iter().chain(files).collect::<Vec<String>>()
    };
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>();
    let model = here.at("model.onnx");
    dcc([words(&["run", &model]), words(&mesh), train(&here, "0.01")].concat()).ok();
    dcc([words(&["compile", &model, "--embed-weights", "-o", &here.at("model.dcc")]), words(&mesh)].concat()).ok();
    std::fs::copy(here.at("model.dcc"), there.at("moved.dcc")).expect("the artifact");
    for gone in ["weights.bin", "model.onnx", "model.dcc"] {
        std::fs::remove_file(here.at(gone)).expect("was there");
    }
    dcc_run([vec![there.at("moved.dcc")], train(&there, "0.01")].concat()).ok();
    let (expected, found) = (trace(&here), trace(&there));
    assert!(expected.0.len() == 4 && expected.1.len() == 4, "4 steps of 4 ranks");
    assert_eq!(found.0, expected.0, "losses and norms");
    assert!(found.1 == expected.1, "weights and optimizer state, to the bit");
    dcc_run([vec![there.at("moved.dcc")], train(&other, "0.0101")].concat()).ok();
    assert!(trace(&other).1 != expected.1, "the control: another rate gives other weights");
}
