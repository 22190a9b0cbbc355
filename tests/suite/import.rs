//! ONNX import: every sample graph comes in, and every bad file gets the error that fits.

use crate::onnx_model::{int_tensor, model, node, opset, size, symbol, tensor, value, with_int, with_tensor};
use bytes::Bytes;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::{AttributeProto, FunctionProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto};
use dcc::import::{Imported, InputInfo, Model, Options, Parameter, TensorData, onnx};
use dcc::interp::{Bindings, Precision, Tensor, outputs};
use dcc_program::DType;
use expect_test::expect_file;
use prost::Message;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn import(path: &Path) -> dcc::Result<Imported> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let model = Model::decode(Bytes::from(bytes))?;
    onnx(&model, &Options { global_batch: Some(8), ..Options::default() })
}

fn models(folder: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned();
    let files = std::fs::read_dir(root.join(folder)).expect("a folder of models");
    let files = files.map(|entry| entry.expect("a file").path());
    let mut models: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|ext| ext == "onnx")).collect();
    models.sort();
    models
}

/// One line per model of a folder: what came in.
fn check(folder: &str, expected: expect_test::ExpectFile) {
    let mut lines = String::new();
    for path in models(folder) {
        let name = path.file_stem().expect("a file").to_string_lossy();
        let imported = import(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let trained = imported.parameters.iter().filter(|parameter| parameter.trained).count();
        let gains = imported.parameters.iter().filter(|parameter| parameter.gain).count();
        let Imported { graph, parameters, opset, warnings, .. } = imported;
        let nodes = graph.live().into_iter().filter(|live| *live).count();
        let parameters = parameters.len();
        writeln!(lines, "{name}: opset {opset}, {nodes} nodes, {parameters} parameters, {trained} trained, {gains} gains")
            .expect("a string");
        for warning in warnings {
            writeln!(lines, "    {warning}").expect("a string");
        }
    }
    expected.assert_eq(&lines);
}

#[test]
fn all_sample_graphs_import() {
    check("samples/mlp", expect_file!["../golden/import/mlp.txt"]);
    check("samples/gpt", expect_file!["../golden/import/gpt.txt"]);
    check("samples/llama", expect_file!["../golden/import/llama.txt"]);
    check("samples/lstm", expect_file!["../golden/import/lstm.txt"]);
    check("samples/resnet", expect_file!["../golden/import/resnet.txt"]);
    check("tests/models", expect_file!["../golden/import/models.txt"]);
    check("tests/models/families", expect_file!["../golden/import/families.txt"]);
    check("tests/models/attention", expect_file!["../golden/import/attention.txt"]);
}

/// Names after `target=` in the lines of one kind of PyTorch's graph signature.
fn signature(model: &Model, kind: &str) -> Option<BTreeSet<String>> {
    let entries = model.graph().metadata_props.iter().chain(&model.proto.metadata_props);
    let text = entries.into_iter().find(|entry| entry.key().ends_with("graph_signature"))?.value();
    let lines = text.lines().filter(|line| line.contains(&format!(": {kind} ")));
    Some(lines.filter_map(|line| Some(line.split_once("target='")?.1.split_once('\'')?.0.to_owned())).collect())
}

/// Trained tensors with their aliases: those that PyTorch names among its parameters, and others.
fn trained(model: &Model, parameters: &BTreeSet<String>) -> (BTreeSet<String>, BTreeSet<String>) {
    let imported = onnx(model, &Options { global_batch: Some(8), ..Options::default() }).expect("imports");
    let trained = imported.parameters.into_iter().filter(|parameter| parameter.trained);
    // A transposed copy has a name of the exporter's.
    let names = |p: Parameter| match p.other_names() {
        names if p.transpose_of.is_some() => names,
        names => [names, vec![p.tensor.name]].concat(),
    };
    trained.flat_map(names).partition(|name| parameters.contains(name))
}

/// What trains is what PyTorch calls `named_parameters`, each under its name or renamed by the exporter (`val_7`), of which a
/// transposed copy is known by the module's name too; those that it merged into others or deleted are back.
#[test]
fn what_trains_is_what_pytorch_trains() {
    // One tensor for several names: the bias of BERT's head is called by two; the exporter lays both biases of a GRU end to end,
    // and each tensor of an LSTM's two directions.
    let shared = |name: &str| match name {
        "bert_tiny" | "bert_tiny_opset20" | "gru_optimized" => 1,
        "static_lstm" => 2 * (1 + 1 + 3),
        // Folded into convolutions, of which `families.txt` has the warning.
        "resnet_optimized" => 15,
        _ => 0,
    };
    let mut renamed = Vec::new();
    let folders = [
        "tests/models",
        "tests/models/attention",
        "tests/models/families",
        "samples/gpt",
        "samples/llama",
        "samples/lstm",
        "samples/resnet",
    ];
    for path in folders.map(models).concat() {
        let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
        let model = Model::decode(Bytes::from(std::fs::read(&path).expect("a model"))).expect("decodes");
        let Some(parameters) = signature(&model, "PARAMETER") else { continue };
        let (named, others) = trained(&model, &parameters);
        assert_eq!(named.len() + others.len() + shared(&name), parameters.len(), "{name}: {others:?}");
        if !others.is_empty() {
            renamed.push(format!("{name}: {}", others.into_iter().collect::<Vec<_>>().join(" ")));
        }
    }
    // Not its initial state, `val_16`.
    let lstm = "static_lstm: val_114 val_115 val_116 val_224 val_225 val_226";
    assert_eq!(renamed, ["gpt2_tiny_optimized: embedding_1", "gru_optimized: val_34 val_35 val_51", lstm]);
}

/// Norms that began equal are one tensor of the file, and as many parameters as the module has; without PyTorch's calls nothing
/// says so.
#[test]
fn merged_norms_are_the_modules_again() {
    let path = models("tests/models").into_iter().find(|path| path.ends_with("llama_tiny_optimized.onnx")).expect("the export");
    let mut file = ModelProto::decode(Bytes::from(std::fs::read(path).expect("a model"))).expect("decodes");
    let norms = |file: &ModelProto| -> usize {
        let model = Model::decode(Bytes::from(file.encode_to_vec())).expect("decodes");
        let imported = onnx(&model, &Options { global_batch: Some(8), ..Options::default() }).expect("imports");
        imported.parameters.iter().filter(|p| p.tensor.name.ends_with("norm.weight") && p.trained).count()
    };
    assert_eq!(norms(&file), 5);
    for node in file.graph.iter_mut().flat_map(|graph| &mut graph.node) {
        node.metadata_props.clear();
    }
    assert_eq!(norms(&file), 1);
}

/// Of what the exporter's optimizer computed before any node that is left, only transposed copies are sure to be a weight; several
/// weights in one tensor, and those that no node reads, are told. The controls are modules that have no such parameter.
#[test]
fn folded_parameters_train_or_are_told() {
    let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
    // Nodes of one operator in a row, each with its call's arguments, that all read one initializer.
    let import = |weights: &[&str], op: &str, calls: &[&str], name: &str, dims: &[i64]| {
        let made = |(i, call): (usize, &&str)| {
            let (from, to) = (["x", "h"][i], if i + 1 == calls.len() { "y" } else { "h" });
            let text = format!("%{to} : [num_users=1] = call_function[target=torch.ops.aten.{call}, kwargs = {{}})");
            NodeProto { metadata_props: vec![entry("pkg.torch.onnx.fx_node", text)], ..node(op, &[from, name], &[to]) }
        };
        let nodes: Vec<NodeProto> = calls.iter().enumerate().map(made).collect();
        let line = |weight: &&str| format!("p_{}: PARAMETER target='{weight}'\n", weight.replace('.', "_"));
        let signature = entry("pkg.torch.export.ExportedProgram.graph_signature", weights.iter().map(line).collect());
        let raw = vec![0; 4 * dims.iter().product::<i64>() as usize];
        let mut file = ModelProto { metadata_props: vec![signature], ..with_tensor(model(&nodes), tensor(name, dims, &raw)) };
        file.graph.as_mut().expect("a graph").input = vec![value("x", &[size(2), size(dims[0])])];
        let imported = onnx(&Model::decode(Bytes::from(file.encode_to_vec())).expect("decodes"), &Options::default());
        let imported = imported.expect("imports");
        let trained = imported.parameters.iter().any(|p| p.tensor.name == name && p.trained);
        (trained, imported.warnings.join(" "))
    };
    let matmul = ["matmul.default](args = (%x, %permute_2)"];
    let (trained, told) = import(&["fc.weight"], "MatMul", &matmul, "permute_2", &[3, 3]);
    assert!(trained && told.contains("transposed by the exporter, it seems out of `fc.weight`"), "{told}");
    assert!(!import(&["x.scale"], "MatMul", &matmul, "permute_2", &[3, 3]).0);
    let linear = ["linear.default](args = (%x, %p_a_weight)", "linear.default](args = (%h, %p_b_weight)"];
    // Equal ones are two again where the exporter merges: small tensors.
    assert_eq!(import(&["a.weight", "b.weight"], "MatMul", &linear, "val_7", &[3, 3]), (true, String::new()));
    let (trained, told) = import(&["a.weight", "b.weight"], "MatMul", &linear, "val_7", &[40, 40]);
    assert!(trained && told.contains("`val_7` in the file: several parameters of the module"), "{told}");
    assert_eq!(import(&["a.weight"], "MatMul", &linear[..1], "val_7", &[3, 3]), (true, String::new()));
    let norm = ["mul.Tensor](args = (%x, %add_4)"];
    let (trained, told) = import(&["norm.weight"], "Mul", &norm, "add_4", &[3]);
    assert!(!trained && told.contains("no node reads `norm.weight`"), "{told}");
    assert!(!import(&[], "Mul", &norm, "add_4", &[3]).1.contains("no node reads"));
}

/// The control: a tensor that the signature calls a buffer does not train.
#[test]
fn buffers_do_not_train() {
    let path = models("tests/models").into_iter().find(|path| path.ends_with("mlp_optimized.onnx")).expect("the export");
    let mut model = Model::decode(Bytes::from(std::fs::read(path).expect("a model"))).expect("decodes");
    let parameters = signature(&model, "PARAMETER").expect("a signature");
    assert_eq!(trained(&model, &parameters).0, parameters);
    for graph in model.proto.graph.iter_mut() {
        for entry in graph.metadata_props.iter_mut().filter(|entry| entry.key().ends_with("graph_signature")) {
            entry.value = Some(entry.value().replace("p_fc_0_weight: PARAMETER", "b_fc_0_weight: BUFFER"));
        }
    }
    let (named, others) = trained(&model, &parameters);
    assert!(named.len() + 1 == parameters.len() && !named.contains("fc.0.weight") && others.is_empty(), "{named:?}");
}

/// The formula of `golden/import/forward.py`.
fn fill(name: &str, count: u64, offset: f64) -> Vec<f64> {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let unit =
        |i: u64| (i.wrapping_mul(2_654_435_761).wrapping_add(hash % (1 << 32)) % (1 << 32)) as f64 / (1_u64 << 32) as f64;
    (0..count).map(|i| f64::from((0.4 * unit(i) - 0.2 + offset) as f32)).collect()
}

fn feed(input: &InputInfo) -> Tensor {
    let shape = &input.shape;
    let count: u64 = shape.iter().product();
    if input.dtype.is_float() {
        return Tensor::floats(input.dtype, shape, fill(&input.name, count, 0.0));
    }
    let element = |i: u64| match input.name.as_str() {
        "attention_mask" => i64::from(!(i / shape[1] % 2 == 1 && i % shape[1] >= shape[1] - 2)),
        "token_type_ids" => (i % 2) as i64,
        "labels" => ((7 * i + 3) % 10) as i64,
        _ => ((7 * i + 3) % 13) as i64,
    };
    Tensor::ints(input.dtype, shape, (0..count).map(element).collect())
}

fn weight(model: &Model, parameter: &Parameter) -> Tensor {
    let dcc::import::Tensor { name, dtype, shape, data } = &parameter.tensor;
    if !matches!(data, TensorData::External { .. }) {
        return parameter.tensor.read(model).expect("data in the file");
    }
    let offset = f64::from(parameter.gain && shape.len() == 1);
    let stored = stored_as(model, data).unwrap_or_else(|| name.clone());
    Tensor::floats(*dtype, shape, fill(&stored, shape.iter().product(), offset))
}

/// The name in the file of what lies there: parameters that the exporter merged have names of their own.
fn stored_as(model: &Model, data: &TensorData) -> Option<String> {
    let TensorData::External { offset, .. } = data else { return None };
    let file = ModelProto::decode(model.bytes().clone()).expect("decoded before");
    let at = |tensor: &&TensorProto| {
        tensor.external_data.iter().any(|entry| entry.key() == "offset" && entry.value() == offset.to_string())
    };
    Some(file.graph?.initializer.iter().find(at)?.name().to_owned())
}

/// Largest error relative to the largest value, f32.
const TOLERANCE: f64 = 1e-5;

/// Compares the forward of a model at `batch` with the numbers in `golden` of a model that computes the same.
fn compare(path: &Path, global_batch: Option<u64>, golden: &serde_json::Value) {
    let name = path.display();
    let model = Model::decode(Bytes::from(std::fs::read(path).expect("a model"))).expect("decodes");
    let imported = onnx(&model, &Options { global_batch, ..Options::default() });
    let imported = imported.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut bindings = Bindings::default();
    for input in &imported.inputs {
        bindings = bindings.input(&input.name, feed(input));
    }
    for parameter in &imported.parameters {
        bindings = bindings.weight(&parameter.tensor.name, weight(&model, parameter));
    }
    for (output, value) in outputs(&imported.graph, &bindings, Precision::Declared).expect("evaluates") {
        let expected = &golden[&output];
        let shape: Vec<u64> = serde_json::from_value(expected["shape"].clone()).expect("a shape");
        assert_eq!(value.shape.as_slice(), shape, "{name} {output}");
        let wanted: Vec<f64> = serde_json::from_value(expected["values"].clone()).expect("numbers");
        let flat = value.to_f64s();
        let got: Vec<f64> = flat.iter().step_by((flat.len() / 24).max(1)).take(24).copied().collect();
        let scale = wanted.iter().fold(0.0_f64, |scale, x| scale.max(x.abs()));
        let error = got.iter().zip(&wanted).fold(0.0_f64, |error, (a, b)| error.max((a - b).abs()));
        assert!(got.len() == wanted.len() && error <= TOLERANCE * scale, "{name} {output}: {got:?} for {wanted:?}");
    }
}

fn golden() -> serde_json::Value {
    serde_json::from_str(include_str!("../golden/import/forward.json")).expect("JSON")
}

#[test]
fn forward_matches_onnxruntime() {
    let golden = golden();
    for path in models("tests/models").into_iter().chain(models("tests/models/attention")) {
        let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
        if let Some(golden) = golden.get(&name) {
            compare(&path, Some(4).filter(|_| name != "static_gpt"), golden);
        }
    }
}

/// A model exported with a batch of 8 computes, at 4, what the same model with a symbolic batch does.
#[test]
fn a_baked_batch_is_scaled() {
    let path = models("tests/models").into_iter().find(|path| path.ends_with("static_gpt.onnx")).expect("the static export");
    compare(&path, Some(4), &golden()["gpt2_tiny"]);
}

/// Nodes after `h = x w` of a file with a batch of 4 and these outputs, imported at another. Its error with its place.
fn rebatched(nodes: &[NodeProto], outputs: &[&str], to: u64) -> Result<(), String> {
    let ints = [("four", vec![4]), ("square", vec![4, 4]), ("line", vec![4, 1]), ("zero", vec![0]), ("one", vec![1])];
    let ints = ints.into_iter().chain([("all", vec![16]), ("last", vec![3, 7, 11, 15])]).collect::<Vec<_>>();
    let all = [&[node("MatMul", &["x", "w"], &["h"])], nodes].concat();
    let ints = ints.iter().map(|(name, values)| int_tensor(name, &[values.len() as i64], values));
    let pairs = int_tensor("pairs", &[4, 2], &[0, 1, 1, 0, 2, 3, 3, 2]);
    let floats = [tensor("w", &[3, 4], &[0; 48]), tensor("p", &[1, 4], &[0; 16])];
    let mut proto = ints.chain([pairs]).chain(floats).fold(model(&all), with_tensor);
    let graph = proto.graph.as_mut().expect("a graph");
    graph.input = vec![value("x", &[size(4), size(3)])];
    graph.output = outputs.iter().map(|output| value(output, &[])).collect();
    let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let imported = onnx(&proto, &Options { global_batch: Some(to), ..Options::default() });
    imported.map(drop).map_err(|error| format!("{} {}: {}", error.code, error.at.unwrap_or_default(), error.what))
}

/// A 4 of a file whose batch is 4 is scaled where it meets the batch, and refused where it might be anything.
#[test]
fn a_number_as_large_as_the_batch_is_proven_or_refused() {
    let total = |of: &str| with_int(node("ReduceSum", &[of], &["total"]), "keepdims", 0);
    let added = |other: &str| node("Add", &["h", other], &["y"]);
    let ones = || node("ConstantOfShape", &["four"], &["ones"]);
    let learned = || node("Expand", &["p", "square"], &["learned"]);
    let proven: [&[NodeProto]; 3] = [
        // Columns of each sample, a mask of samples, and a learned row of each.
        &[node("ConstantOfShape", &["square"], &["zeros"]), with_int(node("Concat", &["h", "zeros"], &["y"]), "axis", 1)],
        &[node("ConstantOfShape", &["line"], &["mask"]), node("Mul", &["h", "mask"], &["y"])],
        &[learned(), node("Tanh", &["learned"], &["bent"]), added("bent")],
    ];
    let unclear: [&[NodeProto]; 4] = [
        &[ones(), total("ones"), added("total")],
        &[learned(), total("learned"), added("total")],
        &[learned(), node("Transpose", &["learned"], &["turned"]), total("turned"), added("total")],
        &[learned(), node("Tanh", &["learned"], &["bent"]), total("bent"), added("total")],
    ];
    for to in [1, 2, 8] {
        for nodes in proven {
            assert_eq!(rebatched(nodes, &["y"], to), Ok(()), "{to}");
        }
        for nodes in unclear {
            let error = rebatched(nodes, &["y"], to).expect_err("a guess");
            assert!(error.starts_with("DCC0112 node 1"), "{to}: {error}");
        }
        // That an output is as large proves nothing, and does no harm.
        let error = rebatched(unclear[1], &["y", "learned"], to).expect_err("a guess");
        assert!(error.starts_with("DCC0112 node 1"), "{to}: {error}");
        assert_eq!(rebatched(&[learned()], &["h", "learned"], to), Ok(()));
    }
    for nodes in proven.iter().chain(&unclear) {
        assert_eq!(rebatched(nodes, &["y"], 4), Ok(()));
    }
}

/// Samples by their numbers: a range is as long as what it indexes, and what the file has of them in numbers is not known to be all.
#[test]
fn numbers_of_samples_follow_the_batch_or_are_refused() {
    let column = |of: &str, to: &str| node("Unsqueeze", &[of, "one"], &[to]);
    let total = with_int(node("ReduceSum", &["read"], &["y"]), "keepdims", 0);
    let read = || {
        let tuples = with_int(node("Concat", &["rows", "columns"], &["tuples"]), "axis", 1);
        [tuples, node("GatherND", &["h", "tuples"], &["read"])]
    };
    let scalar = |name: &str, from: &str| with_int(node("ReduceSum", &[from], &[name]), "keepdims", 0);
    let counted = [
        scalar("start", "zero"),
        scalar("end", "four"),
        scalar("step", "one"),
        node("Range", &["start", "end", "step"], &["numbers"]),
        column("numbers", "rows"),
        node("ConstantOfShape", &["line"], &["zeros"]),
        with_int(node("Cast", &["zeros"], &["columns"]), "to", 7),
    ];
    let counted = [&counted[..], &read(), std::slice::from_ref(&total)].concat();
    let written = [&[node("GatherND", &["h", "pairs"], &["read"])][..], &[total]].concat();
    for to in [1, 2, 8] {
        assert_eq!(rebatched(&counted, &["y"], to), Ok(()), "{to}");
        let error = rebatched(&written, &["y"], to).expect_err("all of the file's samples");
        assert!(error.starts_with("DCC0112 node 1"), "{to}: {error}");
    }
    let flat = [node("Reshape", &["h", "all"], &["line_of_all"]), node("Gather", &["line_of_all", "last"], &["read"])];
    let flat = [&flat[..], &written[1..]].concat();
    for to in [1, 2, 8] {
        let error = rebatched(&flat, &["y"], to).expect_err("one of each of the file's samples");
        assert!(error.starts_with("DCC0112 node 2"), "{to}: {error}");
    }
    for nodes in [&written, &flat] {
        assert_eq!(rebatched(nodes, &["y"], 4), Ok(()));
    }
}

fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Float.into()),
        f: Some(value),
        ..Default::default()
    }
}

/// A function with an optional input, an attribute passed on by reference and one with a default, called by another one.
#[test]
fn functions_are_inlined() {
    let leaky = NodeProto {
        attribute: vec![AttributeProto { ref_attr_name: Some("slope".to_owned()), ..float("alpha", 0.0) }],
        ..node("LeakyRelu", &["a"], &["b"])
    };
    let clip = node("Clip", &["b", "low"], &["c"]);
    let inner = FunctionProto {
        name: Some("act".to_owned()),
        domain: Some("mine".to_owned()),
        input: vec!["a".to_owned(), "low".to_owned()],
        output: vec!["c".to_owned()],
        attribute_proto: vec![float("slope", 0.5)],
        node: vec![leaky, clip],
        opset_import: vec![opset(20)],
        ..Default::default()
    };
    let call = |attributes: &[AttributeProto], output: &str| NodeProto {
        domain: Some("mine".to_owned()),
        attribute: attributes.to_vec(),
        ..node("act", &["x"], &[output])
    };
    let mut with_functions = model(&[call(&[], "p"), call(&[float("slope", 0.25)], "q"), node("Sub", &["p", "q"], &["y"])]);
    with_functions.functions = vec![inner];
    let imported =
        Model::decode(Bytes::from(with_functions.encode_to_vec())).and_then(|model| onnx(&model, &Options::default()));
    let imported = imported.unwrap_or_else(|error| panic!("{error}"));
    let x = Tensor::floats(DType::F32, &[2, 3], vec![-4.0, -2.0, -1.0, 0.0, 1.0, 2.0]);
    let results = outputs(&imported.graph, &Bindings::default().input("x", x), Precision::Declared).expect("evaluates");
    assert_eq!(results[0].1.f64s(), [-1.0, -0.5, -0.25, 0.0, 0.0, 0.0]);
}

/// Each call of a norm moves the running statistics on from where the last one left them; a step stores them once.
#[test]
fn a_norm_that_is_called_twice_has_one_running_mean() {
    let norm = |x: &str, y: &str| node("BatchNormalization", &[x, "scale", "bias", "mean", "variance"], &[y]);
    let ones: Vec<u8> = [1f32; 3].iter().flat_map(|x| x.to_le_bytes()).collect();
    let twice = ["scale", "bias", "mean", "variance"]
        .iter()
        .fold(model(&[norm("x", "p"), norm("p", "y")]), |model, name| with_tensor(model, tensor(name, &[3], &ones)));
    let model = Model::decode(Bytes::from(twice.encode_to_vec())).expect("a model");
    let imported = onnx(&model, &Options::default()).unwrap_or_else(|error| panic!("{error}"));
    let statistics = imported.graph.outputs.iter().filter_map(|(name, _)| dcc::train::Statistic::parse(name));
    let found: Vec<(String, f64)> = statistics.map(|statistic| (statistic.name, statistic.keep)).collect();
    assert_eq!(found.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), ["mean", "variance"]);
    assert!(found.iter().all(|(_, keep)| (keep - 0.81).abs() < 1e-6), "{found:?}");
}

/// Random tensors have the range, mean and variance that their nodes say; another seed gives other numbers, the same one the same.
#[test]
fn random_tensors_are_as_their_nodes_say() {
    let sample = |op: &str, attributes: &[AttributeProto], seed: i64| {
        let node = NodeProto { attribute: attributes.to_vec(), ..node(op, &["x"], &["y"]) };
        let mut random = model(&[node]);
        random.graph.as_mut().expect("a graph").input = vec![value("x", &[symbol("a"), symbol("b")])];
        let model = Model::decode(Bytes::from(random.encode_to_vec())).expect("a model");
        let dims = [("a".to_owned(), 64), ("b".to_owned(), 64)].into();
        let imported = onnx(&model, &Options { dims, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"));
        let bindings = Bindings { seed, ..Bindings::default() };
        let bindings = bindings.input("x", Tensor::floats(DType::F32, &[64, 64], vec![0.25; 64 * 64]));
        outputs(&imported.graph, &bindings, Precision::Declared).expect("evaluates")[0].1.f64s().to_vec()
    };
    let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / numbers.len() as f64;
    let spread = |numbers: &[f64]| mean(&numbers.iter().map(|x| (x - mean(numbers)).powi(2)).collect::<Vec<_>>());
    let near = |a: f64, b: f64| (a - b).abs() < 0.05 * (1.0 + b.abs());
    let uniform = sample("RandomUniformLike", &[float("low", 2.0), float("high", 5.0)], 1);
    assert!(uniform.iter().all(|x| (2.0..5.0).contains(x)) && near(mean(&uniform), 3.5) && near(spread(&uniform), 0.75));
    let normal = sample("RandomNormalLike", &[float("mean", -1.0), float("scale", 2.0)], 1);
    assert!(near(mean(&normal), -1.0) && near(spread(&normal), 4.0), "{} {}", mean(&normal), spread(&normal));
    let bernoulli = sample("Bernoulli", &[], 1);
    assert!(bernoulli.iter().all(|x| [0.0, 1.0].contains(x)) && near(mean(&bernoulli), 0.25));
    assert_eq!(sample("Bernoulli", &[], 1), bernoulli);
    assert_ne!(sample("Bernoulli", &[], 2), bernoulli);
}

/// What an exporter calls `?` in two places need not be one size; the scales of a Resize are no weights.
#[test]
fn open_dims_and_scales() {
    let scales: Vec<u8> = [1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut resize = with_tensor(model(&[node("Resize", &["x", "", "scales"], &["y"])]), tensor("scales", &[2], &scales));
    resize.graph.as_mut().expect("a graph").input = vec![value("x", &[symbol("?"), symbol("?")])];
    let dims = [("x.0".to_owned(), 2), ("x.1".to_owned(), 3)].into();
    let model = Model::decode(Bytes::from(resize.encode_to_vec())).expect("a model");
    let imported = onnx(&model, &Options { dims, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"));
    let is_there = imported.parameters.iter().any(|parameter| parameter.trained || parameter.tensor.name == "scales");
    assert_eq!((is_there, &imported.outputs[0].shape[..]), (false, &[2, 6][..]));
    let error = onnx(&model, &Options::default()).expect_err("two sizes are open").to_string();
    assert!(error.contains("`x.0`") && error.contains("`x.1`"), "{error}");
}
