//! What PyTorch's exporters do to parameters: small modules as exported, of `samples/damage.py`, train as in PyTorch, or dcc says which
//! parameters do not.

use crate::command::{Folder, dcc};
use crate::onnx_model::{external, model, node, tensor, with_tensor};
use crate::tidy::root;
use crate::tolerance::numbers;
use dcc::import::proto::{ModelProto, NodeProto, TensorProto};
use dcc::import::{BatchNorm, Model, Options, onnx};
use prost::Message;
use serde_json::Value;

fn path(name: &str) -> String {
    root().join("tests/models/damage").join(name).display().to_string()
}

/// Losses of five steps of SGD in float64.
fn losses(module: &str, exporter: &str, flags: &[&str]) -> Vec<f64> {
    losses_of(&path(&format!("{module}_{exporter}.onnx")), module, flags)
}

fn losses_of(model: &str, module: &str, flags: &[&str]) -> Vec<f64> {
    let folder = Folder::new();
    let (metrics, data) = (folder.at("metrics.jsonl"), path(&format!("{module}.npz")));
    let words = ["run", model, "--data", &data, "--loss", "mse", "--steps", "5", "--order", "sequential", "--dtype", "f64"];
    let words = words.into_iter().chain(["--optimizer", "sgd", "--lr", "0.05", "--metrics-file", &metrics]);
    dcc(words.chain(flags.iter().copied())).ok();
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    let loss = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["loss"].as_f64().expect("a loss");
    text.lines().map(loss).collect()
}

/// Largest difference relative to PyTorch's losses.
fn distance(module: &str, found: &[f64]) -> f64 {
    let golden = std::fs::read_to_string(root().join("tests/golden/import/damage.json")).expect("a golden");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let wanted = numbers(&golden[module]);
    assert_eq!(found.len(), wanted.len(), "{module}");
    found.iter().zip(&wanted).fold(0.0, |worst, (a, b)| f64::max(worst, (a - b).abs() / b.abs()))
}

/// Trains it as PyTorch does. The control keeps one parameter, by its name in the module, as it is.
#[track_caller]
fn check(module: &str, exporter: &str, control: &str) {
    let near = distance(module, &losses(module, exporter, &[]));
    assert!(near <= LIMIT, "{module}, {exporter}: {near:e}");
    let far = distance(module, &losses(module, exporter, &["--freeze", control]));
    assert!(far > LIMIT, "{module}, {exporter}, without {control}: {far:e}");
}

/// Of the contract's table, f64.
const LIMIT: f64 = 1e-9;

/// Fresh norms, biases and running statistics are equal, and one tensor in the file.
#[test]
fn what_was_merged_as_equal_trains_apart() {
    for (module, exporter, control) in [
        ("pre_activation", "dynamo", "m.weight"),
        ("pre_activation", "eval", "n.bias"),
        ("layer_norms", "eval", "o.weight"),
        ("bare_layer_norm", "dynamo", "m.bias"),
        ("bare_instance_norm", "dynamo", "n.weight"),
        ("group_norms", "dynamo", "m.weight"),
        ("group_norms", "eval", "onnx::*"),
        ("bare_group_norm", "dynamo", "n.bias"),
        ("equal_layers", "dynamo", "q.weight"),
        ("equal_layers", "eval", "b.bias"),
        ("gammas", "eval", "h"),
        ("detached", "kept", "a.weight"),
    ] {
        check(module, exporter, control);
    }
}

/// A table that is read both ways is in the file twice.
#[test]
fn copies_of_tied_tables_are_computed() {
    for (module, exporter) in [("tied", "eval"), ("tied_turned", "dynamo"), ("tied_part", "dynamo"), ("tied_part", "eval")] {
        check(module, exporter, "emb.weight");
    }
}

/// A module's file as if another tool had written it, which gives folded tensors names of its own.
fn by_tool(module: &str, producer: &str) -> ModelProto {
    let bytes = std::fs::read(path(&format!("{module}_eval.onnx"))).expect("a model");
    let mut file = ModelProto::decode(&bytes[..]).expect("ONNX");
    file.producer_name = Some(producer.to_owned());
    let graph = file.graph.as_mut().expect("a graph");
    let names = graph.initializer.iter_mut().filter_map(|tensor| tensor.name.as_mut());
    let values = graph.node.iter_mut().flat_map(|node| node.input.iter_mut().chain(&mut node.output));
    names.chain(values).for_each(|name| *name = name.replace("onnx::", "const_fold_opt__"));
    file
}

/// Names of what trains, and all warnings.
fn imported(model: &Model) -> (Vec<String>, String) {
    let imported = onnx(model, &Options::default()).expect("imports");
    let trained = imported.parameters.iter().filter(|parameter| parameter.trained);
    (trained.map(|parameter| parameter.tensor.name.clone()).collect(), imported.warnings.join("\n"))
}

/// Other tools store a table that is read both ways twice, too, under names that say nothing.
#[test]
fn copies_of_tied_tables_are_known_by_their_elements() {
    let folder = Folder::new();
    let (file, model) = (by_tool("tied", "tf2onnx"), folder.at("model.onnx"));
    std::fs::write(&model, file.encode_to_vec()).expect("a file");
    let near = distance("tied", &losses_of(&model, "tied", &[]));
    let far = distance("tied", &losses_of(&model, "tied", &["--freeze", "emb.weight"]));
    assert!(near <= LIMIT && far > LIMIT, "{near:e} {far:e}");
    let with = |change: &dyn Fn(&mut TensorProto)| {
        let mut file = file.clone();
        let tensors = &mut file.graph.as_mut().expect("a graph").initializer;
        tensors.iter_mut().filter(|tensor| tensor.name() == "const_fold_opt__MatMul_13").for_each(change);
        Model::decode(file.encode_to_vec().into()).expect("decodes")
    };
    let tied = ["emb.weight", "fc.bias", "const_fold_opt__MatMul_12"];
    assert_eq!(imported(&with(&|_| {})).0, tied);
    // The control: another number, and there are two weights.
    let apart = with(&|tensor| {
        let mut raw = tensor.raw_data.take().expect("raw data").to_vec();
        raw[0] ^= 1;
        tensor.raw_data = Some(raw.into());
    });
    assert_eq!(imported(&apart).0, [&tied[..], &["const_fold_opt__MatMul_13"]].concat());
    // In another file: only that one tells.
    let graph = file.graph.as_ref().expect("a graph");
    let raw = graph.initializer.iter().find(|tensor| tensor.dims == [8, 13]).and_then(|tensor| tensor.raw_data.clone());
    let beside = with(&|tensor| *tensor = external(tensor.name(), &tensor.dims, "weights"));
    let doubt = "`const_fold_opt__MatMul_13` may be the transposed copy of `emb.weight`";
    assert!(imported(&beside).1.contains(doubt));
    let (trained, told) = imported(&beside.with_file("weights", raw.expect("raw data")).tied());
    assert!(
        trained == tied && !told.contains(doubt) && told.contains("`const_fold_opt__MatMul_13` in the file: by its elements"),
        "{told}"
    );
}

/// Keras' recurrent cells have one bias, ONNX' two: tf2onnx writes zeros for the other, and for what sequences begin with.
#[test]
fn zeros_that_keras_has_not_do_not_train() {
    let folder = Folder::new();
    let off = |module: &str, file: &ModelProto| {
        let model = folder.at("model.onnx");
        std::fs::write(&model, file.encode_to_vec()).expect("a file");
        distance(module, &losses_of(&model, module, &[]))
    };
    let cell = |module: &str, change: &dyn Fn(&mut NodeProto)| {
        let mut file = by_tool(module, "tf2onnx");
        let nodes = &mut file.graph.as_mut().expect("a graph").node;
        change(nodes.iter_mut().find(|node| ["GRU", "LSTM"].contains(&node.op_type())).expect("a cell"));
        file
    };
    let begun = |module: &str, state: f32| {
        let file = cell(module, &|cell| cell.input[5..].fill("state".to_owned()));
        with_tensor(file, tensor("state", &[1, 6, 6], &[state; 36].map(f32::to_le_bytes).concat()))
    };
    // A GRU's reset gate scales its second bias alone, which Keras has too.
    for module in ["one_bias", "two_biases"] {
        for file in [cell(module, &|cell| cell.input.truncate(4)), begun(module, 0.0)] {
            assert!(off(module, &file) <= LIMIT, "{module}");
        }
    }
    let import = |file: &ModelProto| imported(&Model::decode(file.encode_to_vec().into()).expect("decodes"));
    let told = import(&begun("one_bias", 0.0)).1;
    for line in ["`const_fold_opt__LSTM_119`: biases of recurrent layers", "`state`: zeros and ones that the converter wrote"] {
        assert!(told.contains(line), "{told}");
    }
    // The controls: PyTorch trains both, and what is not zero.
    assert!(off("two_biases", &by_tool("two_biases", "pytorch")) <= LIMIT);
    assert!(off("one_bias", &by_tool("one_bias", "pytorch")) > LIMIT);
    assert!(import(&begun("one_bias", 0.5)).0.contains(&"state".to_owned()));
}

/// Warnings of a compilation, or the error's notes.
fn told(module: &str, exporter: &str) -> Vec<String> {
    let folder = Folder::new();
    let (model, artifact) = (path(&format!("{module}_{exporter}.onnx")), folder.at("a.dcc"));
    let output = dcc(["compile", &model, "--loss", "mse", "--json", "-o", &artifact]);
    if output.code != Some(0) {
        return vec![output.stderr];
    }
    output.json()["warnings"].as_array().expect("a list").iter().map(|text| text.as_str().expect("text").to_owned()).collect()
}

/// What cannot be undone is said of every parameter, with what to do.
#[test]
fn what_does_not_train_is_named() {
    for (module, exporter, names) in [
        ("gammas", "dynamo", &["`alpha`", "`beta`"][..]),
        ("folded_norm", "dynamo", &["`n.weight`", "`n.bias`", "`node_Conv_"]),
        ("folded_norm", "eval", &["1 BatchNorms are folded", "`/a/Conv`"]),
        ("weight_norm", "dynamo", &["`a.parametrizations.weight.original0`", "`a.parametrizations.weight.original1`"]),
        ("weight_norm", "eval", &["`onnx::Gemm_"]),
        ("warp", "dynamo", &["no parameter trains", "`theta`"]),
        ("detached", "dynamo", &["the exporter dropped `detach`"]),
    ] {
        let told = told(module, exporter).join("\n");
        for name in names.iter().chain(&["dynamo=True, optimize=False"]) {
            assert!(told.contains(name), "{module}, {exporter}: {name} in {told:?}");
        }
    }
    // The controls keep all.
    assert_eq!(told("bare_layer_norm", "dynamo"), Vec::<String>::new());
    assert_eq!(told("detached", "kept"), Vec::<String>::new());
}

/// The older exporter's files do not tell buffers from parameters.
#[test]
fn what_may_be_a_buffer_is_named() {
    let lines = told("buffers", "train");
    assert!(lines.len() == 1 && lines[0].starts_with("`pe`, `mean`, `scale` train"), "{lines:?}");
    let frozen = losses("buffers", "train", &["--freeze", "pe", "--freeze", "mean", "--freeze", "scale"]);
    assert!(distance("buffers", &frozen) <= LIMIT && distance("buffers", &losses("buffers", "train", &[])) > LIMIT);
}

/// Tools that simplify a file leave node names only: running statistics are parted by them, a parameter may be tied.
#[test]
fn norms_are_known_by_their_nodes() {
    let norm = |name: &str, from: &str, to: &str, read: [&str; 4]| {
        let inputs = [&[from], &read[..]].concat();
        NodeProto { name: Some(name.to_owned()), ..node("BatchNormalization", &inputs, &[to]) }
    };
    let nodes = [
        norm("/n/BatchNormalization", "x", "h", ["n.weight", "n.bias", "n.bias", "n.weight"]),
        norm("/m/BatchNormalization", "h", "y", ["n.weight", "m.bias", "n.bias", "n.weight"]),
    ];
    let mut file =
        ["n.weight", "n.bias", "m.bias"].iter().fold(model(&nodes), |m, name| with_tensor(m, tensor(name, &[3], &[0; 12])));
    file.producer_name = Some("pytorch".to_owned());
    let read = Model::decode(file.encode_to_vec().into()).expect("decodes");
    let inputs: Vec<&[String]> = read.graph().node.iter().map(|node| &node.input[1..]).collect();
    assert_eq!(inputs[0], ["n.weight", "n.bias", "n.running_mean", "n.running_var"]);
    assert_eq!(inputs[1], ["n.weight", "m.bias", "m.running_mean", "m.running_var"]);
    let imported = onnx(&read, &Options { batch_norm: BatchNorm::Frozen, ..Options::default() }).expect("imports");
    assert!(imported.warnings.iter().any(|line| line.contains("`m.weight` is not in the file")), "{:?}", imported.warnings);
    // The control: another exporter's names say nothing, and what is merged is one module's.
    file.producer_name = None;
    let read = Model::decode(file.encode_to_vec().into()).expect("decodes");
    assert_eq!(read.graph().node[1].input[3..], ["n.running_mean", "n.running_var"]);
}
