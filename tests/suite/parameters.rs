//! What trains, from wherever the file has it: weights in Constant nodes are parameters like others.

use crate::command::{Folder, dcc};
use crate::onnx_model::{int_tensor, node, with_int};
use crate::tidy::root;
use bytes::Bytes;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::{AttributeProto, ModelProto, NodeProto};
use dcc_runtime::data::Files;
use prost::Message;
use serde_json::Value;

/// The small MLP with weights in the file.
fn mlp() -> ModelProto {
    let bytes = std::fs::read(root().join("tests/models/mlp.onnx")).expect("a model");
    let mut model = ModelProto::decode(&bytes[..]).expect("ONNX");
    for tensor in &mut model.graph.as_mut().expect("a graph").initializer {
        let count: i64 = tensor.dims.iter().product();
        let number = |at: i64| 0.2 * ((at * 37 % 101) as f32 / 50.0 - 1.0);
        tensor.raw_data = Some(Bytes::from((0..count).flat_map(|at| number(at).to_le_bytes()).collect::<Vec<u8>>()));
        tensor.external_data.clear();
        tensor.data_location = None;
    }
    model
}

/// The same with a Constant node for each initializer.
fn with_constants(mut model: ModelProto) -> ModelProto {
    let graph = model.graph.as_mut().expect("a graph");
    for tensor in std::mem::take(&mut graph.initializer) {
        let output = vec![tensor.name().to_owned()];
        let value = AttributeProto {
            name: Some("value".to_owned()),
            r#type: Some(AttributeType::Tensor.into()),
            t: Some(tensor),
            ..AttributeProto::default()
        };
        let op_type = Some("Constant".to_owned());
        graph.node.insert(0, NodeProto { op_type, output, attribute: vec![value], ..NodeProto::default() });
    }
    model
}

/// Losses of ten steps, and the bytes of the final parameters, which the report must name as trained.
fn trained(model: &ModelProto, more: &[&str]) -> (Vec<Value>, Vec<u8>) {
    let folder = Folder::new();
    let [path, metrics, saved, weights] = ["m.onnx", "metrics.jsonl", "saved", "w.safetensors"].map(|name| folder.at(name));
    std::fs::write(&path, model.encode_to_vec()).expect("a file");
    let flags = "--data tests/models/data/mlp.npz --global-batch-size 32 --steps 10 --order sequential --dtype f64 --lr 1e-2";
    let words = ["run", &path, "--metrics-file", &metrics, "--save-dir", &saved];
    dcc(words.into_iter().chain(flags.split(' ')).chain(more.iter().copied())).ok();
    dcc(["export", &saved, "--safetensors", &weights]).ok();
    let losses = folder.lines("metrics.jsonl").into_iter().map(|line| line["loss"].clone()).collect();
    (losses, std::fs::read(weights).expect("a file"))
}

#[test]
fn weights_in_constant_nodes_train() {
    let (plain, constants) = (mlp(), with_constants(mlp()));
    let wanted = trained(&plain, &[]);
    assert_eq!(trained(&constants, &[]), wanted);
    // By the name of the node's output.
    let frozen = trained(&constants, &["--freeze", "fc.1.weight"]);
    assert_eq!(frozen, trained(&plain, &["--freeze", "fc.1.weight"]));
    assert!(frozen.0[0] == wanted.0[0] && frozen.0[9] != wanted.0[9] && frozen.1 != wanted.1);
}

/// The logits times exp(0), exp(1), …, which the import computes and holds like a parameter.
fn with_computed(mut model: ModelProto) -> ModelProto {
    let graph = model.graph.as_mut().expect("a graph");
    let output = graph.output[0].name().to_owned();
    let classes = graph.initializer.iter().rfind(|tensor| tensor.dims.len() == 1).expect("a bias").dims[0];
    let made = graph.node.iter_mut().flat_map(|node| &mut node.output).find(|name| **name == output);
    *made.expect("a node makes the output") = "raw".to_owned();
    graph
        .initializer
        .extend([("first", 0), ("end", classes), ("step", 1)].map(|(name, value)| int_tensor(name, &[], &[value])));
    graph.node.extend([
        node("Range", &["first", "end", "step"], &["range"]),
        with_int(node("Cast", &["range"], &["floats"]), "to", 1),
        node("Exp", &["floats"], &["powers"]),
        node("Mul", &["raw", "powers"], &[&output]),
    ]);
    model
}

#[test]
fn what_the_import_computes_is_not_exported() {
    let folder = Folder::new();
    let [path, saved, trained] = ["m.onnx", "saved", "t.onnx"].map(|name| folder.at(name));
    std::fs::write(&path, with_computed(mlp()).encode_to_vec()).expect("a file");
    let flags = "--data tests/models/data/mlp.npz --global-batch-size 32 --steps 2";
    dcc(["run", &path, "--save-dir", &saved].into_iter().chain(flags.split(' '))).ok();
    dcc(["export", &saved, "--model", &path, "--onnx", &trained]).ok();
    let names = |path: &str| -> Vec<String> {
        let model = ModelProto::decode(&std::fs::read(path).expect("a file")[..]).expect("ONNX");
        model.graph.expect("a graph").initializer.iter().map(|tensor| tensor.name().to_owned()).collect()
    };
    assert_eq!(names(&trained), names(&path));
    // The control: the checkpoint has the constant.
    let all = folder.at("all.safetensors");
    dcc(["export", &saved, "--safetensors", &all]).ok();
    assert!(String::from_utf8_lossy(&std::fs::read(all).expect("a file")).contains("\"constant."));
}

/// The head of GPT-2 is its table of tokens: the file has it once, the module's state dict twice.
#[test]
fn tied_weights_are_exported_under_each_name() {
    let folder = Folder::new();
    let (model, saved) = ("tests/models/gpt2_tiny.onnx", folder.at("saved"));
    let flags = "--data tests/models/data/gpt2_tiny_tokens.npy --global-batch-size 4 --steps 1 --init 1";
    dcc(["run", model, "--save-dir", &saved].into_iter().chain(flags.split(' '))).ok();
    let tensor = |more: &[&str], name: &str| {
        let path = folder.at("all.safetensors");
        dcc(["export", &saved, "--safetensors", &path].iter().chain(more)).ok();
        let files = Files::open(&[path.into()], &[]).expect("safetensors");
        let array = files.arrays.iter().find(|array| array.name == name).unwrap_or_else(|| panic!("no {name}"));
        (array.shape.clone(), array.bytes.to_vec())
    };
    for more in [&[][..], &["--model", model]] {
        assert!(tensor(more, "transformer.wte.weight") == tensor(more, "lm_head.weight"), "{more:?}");
    }
    assert!(tensor(&[], "transformer.wpe.weight") != tensor(&[], "lm_head.weight"));
    // As given weights, both are the one.
    let again = format!("run {model} {flags} --weights {}", folder.at("all.safetensors"));
    let told = dcc(again.split(' ')).ok().stderr;
    assert!(!told.contains("none of the model's"), "{told}");
}

/// What `--init-all` draws anew: weights, and no constant, which the model is nothing without.
#[test]
fn constants_are_not_drawn_anew() {
    let folder = Folder::new();
    let path = folder.at("m.onnx");
    std::fs::write(&path, with_computed(mlp()).encode_to_vec()).expect("a file");
    let arrays = |name: &str, more: &[&str]| {
        let saved = folder.at(name);
        let flags = "--data tests/models/data/mlp.npz --global-batch-size 32 --steps 1 --lr 1e-9 --init 1";
        dcc(["run", &path, "--save-dir", &saved].iter().copied().chain(flags.split(' ')).chain(more.iter().copied())).ok();
        let all = folder.at("all.safetensors");
        dcc(["export", &saved, "--safetensors", &all]).ok();
        let files = Files::open(&[all.into()], &[]).expect("safetensors");
        let bytes: Vec<(String, Vec<u8>)> =
            files.arrays.iter().map(|array| (array.name.clone(), array.bytes.to_vec())).collect();
        bytes
    };
    let (given, drawn) = (arrays("given", &[]), arrays("drawn", &["--init-all"]));
    let is_constant = |(name, _): &&(String, Vec<u8>)| name.starts_with("constant.");
    assert!(given.iter().any(|array| is_constant(&array)) && given.len() == drawn.len());
    for (given, drawn) in given.iter().zip(&drawn) {
        assert_eq!(given.0, drawn.0, "tensors in the order of the file");
        assert_eq!(given == drawn, is_constant(&given), "{}", given.0);
    }
}
