//! `dcc eval` as a process: outputs, losses and gradients against PyTorch, against the reference, of a model, its artifact and its
//! checkpoints, from and to every kind of file; and that a failure leaves nothing behind.

use crate::cli::{integers, npy, put};
use crate::command::{Folder, Output, dcc};
use crate::onnx_nodes;
use crate::tidy::root;
use crate::tolerance::{F64, Row, tensor_distance, units};
use bytes::Bytes;
use dcc::import::proto::TensorProto;
use dcc::interp::{Data, Tensor};
use dcc_program::DType;
use dcc_runtime::data::{Array, Convert, Files};
use prost::Message;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by name, their values as f64.
type Tensors = BTreeMap<String, Vec<f64>>;

fn golden(name: &str) -> Value {
    let path = root().join("tests/golden/eval").join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).expect("a golden")).expect("JSON")
}

/// The inputs of a golden by the formula of `samples/forward.py`: name, shape, whether floats, values.
fn inputs(golden: &Value) -> Vec<(String, Vec<u64>, bool, Vec<f64>)> {
    let entries = golden["inputs"].as_object().expect("inputs").iter();
    let input = |(name, entry): (&String, &Value)| {
        let shape: Vec<u64> = serde_json::from_value(entry["shape"].clone()).expect("a shape");
        let value = |i: u64| match entry["modulus"].as_u64() {
            Some(1) => 1.0,
            Some(modulus) => ((i * 37 + 11) % modulus) as f64,
            None => f64::from((((i * 37 + 11) % 101) as f64 / 50.0 - 1.0) as f32),
        };
        let values = (0..shape.iter().product()).map(value).collect();
        (name.clone(), shape, entry["modulus"].is_null(), values)
    };
    entries.map(input).collect()
}

/// A .safetensors of the inputs, those included that only the loss reads where `with_labels`.
fn write_inputs(folder: &Folder, golden: &Value, with_labels: bool) -> String {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, is_float, values) in inputs(golden) {
        if !with_labels && ["labels", "target"].contains(&name.as_str()) {
            continue;
        }
        let start = data.len();
        match is_float {
            true => values.iter().for_each(|&x| data.extend((x as f32).to_le_bytes())),
            false => values.iter().for_each(|&x| data.extend((x as i64).to_le_bytes())),
        }
        let dtype = if is_float { "F32" } else { "I64" };
        header.insert(name, serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let mut text = Value::Object(header).to_string();
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let path = folder.at("inputs.safetensors");
    let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    std::fs::write(&path, bytes).expect("a file");
    path
}

fn arrays(path: &str) -> Vec<Array> {
    let files = Files::open(&[path.into()], &[]).expect("arrays");
    [files.arrays, files.tokens].concat()
}

fn wide(array: &Array) -> Vec<f64> {
    let mut bytes = vec![0; array.bytes.len() / array.dtype.bytes() as usize * 8];
    Convert::new(array.dtype, DType::F64).run(&array.bytes, &mut bytes);
    bytes.chunks_exact(8).map(|b| f64::from_ne_bytes(b.try_into().expect("eight bytes"))).collect()
}

fn read(path: &str) -> Tensors {
    arrays(path).iter().map(|array| (array.name.clone(), wide(array))).collect()
}

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).expect("strings")
}

struct Evaluated {
    outputs: Tensors,
    gradients: Tensors,
    report: Value,
}

/// Outputs, loss and gradients of a golden's model.
fn evaluate(golden: &Value, extra: &[&str]) -> Evaluated {
    let folder = Folder::new();
    let inputs = write_inputs(&folder, golden, true);
    let (outputs, gradients) = (folder.at("outputs.npz"), folder.at("gradients.npz"));
    let text = |key: &str| golden[key].as_str().expect("text");
    let fixed = ["eval", text("model"), "--inputs", &inputs, "--outputs", &outputs, "--gradients", &gradients];
    let fixed = fixed.into_iter().chain(["--loss", text("loss_kind"), "--json"]).map(str::to_owned);
    let words = fixed.chain(strings(&golden["flags"])).chain(extra.iter().map(|&word| word.to_owned()));
    let report = dcc(words).ok().json();
    Evaluated { outputs: read(&outputs), gradients: read(&gradients), report }
}

/// Everything was computed by kernels.
fn nothing_is_interpreted(report: &Value) {
    assert!(report["interp"] == 0 && report["jit"].as_u64() > Some(0) && report["library"].as_u64() > Some(0), "{report}");
}

/// The largest distance from PyTorch, in units of what the row allows.
fn distance(golden: &Value, row: Row, found: &Evaluated) -> f64 {
    let loss = golden["loss"].as_f64().expect("a number");
    let mut worst = units((found.report["loss"].as_f64().expect("a loss") - loss).abs(), row.allowed(loss.abs(), 0.0));
    for (key, tensors) in [("outputs", &found.outputs), ("gradients", &found.gradients)] {
        for (name, summary) in golden[key].as_object().expect("tensors") {
            let values = tensors.get(name).unwrap_or_else(|| panic!("{key} have no `{name}`"));
            worst = worst.max(tensor_distance(row, summary, values));
        }
    }
    worst
}

fn check(name: &str) {
    let golden = golden(name);
    for (row, dtype) in [(Row::F32, "f32"), (Row::F64, "f64")] {
        let found = evaluate(&golden, &["--dtype", dtype]);
        nothing_is_interpreted(&found.report);
        let worst = distance(&golden, row, &found);
        println!("{name} {dtype}: {worst:.1e} of what is allowed");
        assert!(worst <= 1.0, "{name} {dtype}: {worst:.3e} times what is allowed");
        if row == Row::F64 {
            let reference = evaluate(&golden, &["--dtype", dtype, "--backend", "interp"]);
            assert!(reference.report["interp"].as_u64() > Some(0) && reference.report["jit"] == 0);
            same(&found.outputs, &reference.outputs);
            same(&found.gradients, &reference.gradients);
        }
    }
}

/// Elementwise, relative to each tensor's largest element, whose scale the gradients of one model share.
#[track_caller]
fn same(found: &Tensors, expected: &Tensors) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let largest = |values: &[f64]| values.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let most = expected.values().map(|values| largest(values)).fold(0.0, f64::max);
    for (name, values) in expected {
        // An exact zero is noise on both sides, as small as the others' rounding.
        let allowed = F64 * largest(values).max(1e-6 * most);
        let pairs = found[name].iter().zip(values);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst <= allowed, "`{name}`: {worst:e}, {allowed:e} allowed");
    }
}

#[test]
fn mlp_and_two_inputs_evaluate_as_in_torch() {
    ["mlp", "two_inputs"].into_iter().for_each(check);
}

#[test]
fn gpt2_evaluates_as_in_torch() {
    check("gpt2_tiny");
}

#[test]
fn llama_and_bert_evaluate_as_in_torch() {
    ["llama_tiny", "bert_tiny"].into_iter().for_each(check);
}

#[test]
fn other_weights_are_found() {
    let mut golden = golden("mlp");
    golden["flags"][1] = "2".into();
    assert!(distance(&golden, Row::F32, &evaluate(&golden, &[])) > 1.0);
}

/// The exporter's optimizer stored transposed copies (`val_131`): a matrix of the module's fits, turned. Gradients are as good as any
/// weights, and have its names. The control has other weights.
#[test]
fn weights_of_the_module_fit_transposed_copies() {
    let folder = Folder::new();
    let inputs = write_inputs(&folder, &golden("llama_tiny"), false);
    let (plain, optimized) = ("tests/models/llama_tiny.onnx", "tests/models/llama_tiny_optimized.onnx");
    let (weights, outputs) = (folder.at("weights.npz"), folder.at("logits.npz"));
    eval(plain, &inputs, &outputs, &["--init", "1", "--loss", "next-token", "--gradients", &weights]).ok();
    let logits = |subject: &str, extra: &[&str]| -> Vec<f32> {
        eval(subject, &inputs, &outputs, extra).ok();
        arrays(&outputs)[0].bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let given = ["--init", "2", "--weights", &weights];
    let (expected, found, other) = (logits(plain, &given), logits(optimized, &given), logits(optimized, &given[..2]));
    let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    let apart = |other: &[f32]| expected.iter().zip(other).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs())) / largest;
    assert!(apart(&found) < 2e-5, "{} of {largest}", apart(&found));
    assert!(apart(&other) > 0.1, "{}", apart(&other));
}

const MLP: &str = "tests/models/mlp.onnx";
const WEIGHTS: [&str; 4] = ["--init", "1", "--init-rule", "*.weight=std:0.1"];

/// `dcc eval SUBJECT --inputs … --outputs …`.
fn eval(subject: &str, inputs: &str, outputs: &str, extra: &[&str]) -> Output {
    dcc(["eval", subject, "--inputs", inputs, "--outputs", outputs].iter().chain(extra))
}

fn proto(path: &Path) -> TensorProto {
    TensorProto::decode(Bytes::from(std::fs::read(path).expect("a file"))).expect("a tensor")
}

#[test]
fn every_kind_of_file_holds_the_same_bits() {
    let folder = Folder::new();
    let inputs = write_inputs(&folder, &golden("mlp"), false);
    let outputs: Vec<String> = ["a.npz", "a.safetensors", "a"].iter().map(|name| folder.at(name)).collect();
    outputs.iter().for_each(|path| drop(eval(MLP, &inputs, path, &WEIGHTS).ok()));
    let (npz, safetensors) = (arrays(&outputs[0]), arrays(&outputs[1]));
    let tensor = proto(&folder.path().join("a/output_0.pb"));
    assert!(npz.len() == 1 && npz[0].name == "logits" && npz[0].shape == [5, 10] && npz[0].dtype == DType::F32);
    assert_eq!(npz[0].bytes, safetensors[0].bytes);
    assert_eq!(npz[0].bytes, tensor.raw_data.clone().expect("raw data"));
    assert!(tensor.name() == "logits" && tensor.dims == [5, 10] && tensor.data_type() == 1);
    // Inputs as ONNX's own tests have them: the name may be missing, the number counts.
    std::fs::create_dir(folder.path().join("in")).expect("a folder");
    let image = &arrays(&inputs)[0];
    let dims = image.shape.iter().map(|&dim| dim as i64).collect();
    let tensor = TensorProto { dims, data_type: Some(1), raw_data: Some(image.bytes.clone()), ..TensorProto::default() };
    std::fs::write(folder.path().join("in/input_0.pb"), tensor.encode_to_vec()).expect("a file");
    let again = folder.at("again.npz");
    eval(MLP, &folder.at("in"), &again, &WEIGHTS).ok();
    assert_eq!(arrays(&again)[0].bytes, npz[0].bytes);
}

/// An output of another shape than the labels say may come of other data than the model takes.
#[test]
fn data_of_another_shape_are_told_before_labels() {
    let folder = Folder::new();
    put(&folder, "in/image.npy", npy("<f4", "5, 3", &[0; 60]));
    put(&folder, "in/labels.npy", npy("<i8", "4,", &integers([1, 2, 3, 4])));
    let gradients = || dcc(["eval", MLP, "--init", "1", "--inputs", &folder.at("in"), "--gradients", &folder.at("g.npz")]);
    let told = gradients().stderr;
    assert!(told.contains("`image` has shape [5, 3], the model takes [5, 64]"), "{told}");
    put(&folder, "in/image.npy", npy("<f4", "5, 64", &[0; 4 * 5 * 64]));
    let told = gradients().stderr;
    assert!(told.contains("labels of shape [4] fit no dim of classes of an output of shape [5, 10]"), "{told}");
}

#[test]
fn an_artifact_and_a_checkpoint_evaluate_as_their_model() {
    let folder = Folder::new();
    let inputs = write_inputs(&folder, &golden("mlp"), false);
    let value = |subject: &str, extra: &[&str]| {
        let path = folder.at("value.npz");
        nothing_is_interpreted(&eval(subject, &inputs, &path, &[extra, &["--json"]].concat()).ok().json());
        arrays(&path)[0].bytes.clone()
    };
    let artifact = folder.at("mlp.dcc");
    dcc(["compile", MLP, "-o", &artifact, "--global-batch-size", "5", "--tp", "2", "--loss", "cross-entropy"]).ok();
    let of_model = value(MLP, &WEIGHTS);
    assert_eq!(value(&artifact, &WEIGHTS), of_model);
    let refused = eval(&artifact, &inputs, &folder.at("no.npz"), &["--dtype", "f64"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("--dtype"), "{}", refused.stderr);
    let (saved, trained) = (folder.at("saved"), folder.at("trained.onnx"));
    let run = ["run", &artifact, "--data", "tests/models/data/mlp.npz", "--steps", "2", "--save-dir", &saved];
    dcc(run.iter().chain(&WEIGHTS)).ok();
    dcc(["export", &saved, "--model", MLP, "--onnx", &trained]).ok();
    let after = value(&trained, &[]);
    assert_ne!(after, of_model, "it has learned");
    assert_eq!(value(&saved, &[]), after);
    assert_eq!(value(&saved, &["--model", MLP]), after);
    assert_eq!(value(&saved, &["--model", &artifact]), after);
}

/// Largest difference relative to the largest element of each tensor.
fn apart(found: &Tensors, expected: &Tensors) -> f64 {
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |most: f64, x| most.max(x.abs()));
    let of = |(name, values): (&String, &Vec<f64>)| {
        let differences = &mut found[name].iter().zip(values).map(|(a, b)| a - b);
        largest(differences) / largest(&mut values.iter().copied())
    };
    expected.iter().map(of).fold(0.0, f64::max)
}

/// Kernels round where the reference does, which computes in f64 between; an artifact and its checkpoint keep the precision.
#[test]
fn half_precision_evaluates_as_the_reference() {
    let gpt2 = golden("gpt2_tiny");
    let exact = evaluate(&gpt2, &["--dtype", "f64"]);
    for (dtype, rounding) in [("bf16", 2.0_f64.powi(-8)), ("f16", 2.0_f64.powi(-11))] {
        let found = evaluate(&gpt2, &["--dtype", dtype]);
        nothing_is_interpreted(&found.report);
        let reference = evaluate(&gpt2, &["--dtype", dtype, "--backend", "interp"]);
        let [near, far] = [apart(&found.outputs, &reference.outputs), apart(&found.outputs, &exact.outputs)];
        println!("{dtype}: {near:.1e} from the reference, {far:.1e} from f64");
        assert!(near < 4.0 * rounding, "{dtype}: {near:e} from the reference");
        assert!(far > rounding / 4.0 && far < 16.0 * rounding, "{dtype}: {far:e} from f64");
    }
    let folder = Folder::new();
    let inputs = write_inputs(&folder, &golden("mlp"), false);
    let value = |subject: &str, extra: &[&str]| {
        let path = folder.at("value.npz");
        eval(subject, &inputs, &path, &[extra, &WEIGHTS].concat()).ok();
        arrays(&path)[0].bytes.clone()
    };
    let artifact = folder.at("mlp.dcc");
    let flags = ["--global-batch-size", "5", "--loss", "cross-entropy", "--dtype", "bf16"];
    dcc(["compile", MLP, "-o", &artifact].iter().chain(&flags)).ok();
    assert_eq!(value(&artifact, &[]), value(MLP, &["--dtype", "bf16"]));
    assert_ne!(value(&artifact, &[]), value(MLP, &[]));
}

/// The bytes of a reference tensor.
fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let (wide, words): (DType, Vec<u8>) = match &tensor.data {
        Data::Float(values) => (DType::F64, values.iter().flat_map(|x| x.to_ne_bytes()).collect()),
        Data::Int(values) => (DType::I64, values.iter().flat_map(|x| x.to_ne_bytes()).collect()),
    };
    let mut bytes = vec![0; tensor.len() * tensor.dtype.bytes() as usize];
    Convert::new(wide, tensor.dtype).run(&words, &mut bytes);
    bytes
}

/// What `dcc eval` makes of one of ONNX's node tests, or what it says.
fn evaluate_node(case: &Value) -> Result<(), String> {
    let folder = Folder::new();
    std::fs::write(folder.path().join("m.onnx"), onnx_nodes::unhex(case["model"].as_str().expect("hex"))).expect("a file");
    std::fs::create_dir(folder.path().join("in")).expect("a folder");
    for (number, input) in case["inputs"].as_array().expect("inputs").iter().enumerate() {
        let input = onnx_nodes::tensor(input);
        let tensor = TensorProto {
            dims: input.shape.iter().map(|&dim| dim as i64).collect(),
            data_type: Some(dcc::import::code(input.dtype)),
            raw_data: Some(bytes_of(&input).into()),
            ..TensorProto::default()
        };
        std::fs::write(folder.path().join(format!("in/input_{number}.pb")), tensor.encode_to_vec()).expect("a file");
    }
    let output = eval(&folder.at("m.onnx"), &folder.at("in"), &folder.at("out"), &["--json"]);
    if output.code != Some(0) {
        return Err(output.stderr);
    }
    let report = output.json();
    if report["interp"] != 0 {
        return Err(format!("interpreted: {report}"));
    }
    for (number, wanted) in case["outputs"].as_array().expect("outputs").iter().enumerate() {
        let (found, wanted) = (proto(&folder.path().join(format!("out/output_{number}.pb"))), onnx_nodes::tensor(wanted));
        let dims: Vec<u64> = found.dims.iter().map(|&dim| dim as u64).collect();
        if (dims.as_slice(), found.data_type()) != (&wanted.shape[..], dcc::import::code(wanted.dtype)) {
            return Err(format!("type {} of {dims:?}", found.data_type()));
        }
        let bytes = found.raw_data.clone().unwrap_or_default();
        let array = Array { name: String::new(), dtype: wanted.dtype, shape: dims, bytes, path: Path::new("").to_owned() };
        let pairs = wide(&array).into_iter().zip(wanted.to_f64s());
        if let Some((a, b)) = pairs.into_iter().find(|&(a, b)| !onnx_nodes::near(a, b)) {
            return Err(format!("{a}, not {b}"));
        }
    }
    Ok(())
}

/// All node tests that the importer takes, compiled: inputs that say shapes or axes are bound for the call.
#[test]
fn compiled_operators_compute_what_onnx_says() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/import/nodes.json")).expect("JSON");
    let refused = include_str!("../golden/import/nodes_refused.txt");
    let is_imported =
        |case: &&Value| !refused.lines().any(|line| line.split(':').next() == case["name"].as_str().map(str::trim));
    let (mut wrong, mut right) = (Vec::new(), 0);
    for case in cases.iter().filter(is_imported) {
        match evaluate_node(case) {
            Ok(()) => right += 1,
            Err(what) => wrong.push(format!("{}: {what}", case["name"])),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(right > 320, "{right} right");
}

#[test]
fn what_fails_leaves_nothing() {
    let folder = Folder::new();
    let golden = golden("gpt2_tiny");
    let (inputs, outputs) = (write_inputs(&folder, &golden, false), folder.at("o.npz"));
    let gpt2 = "tests/models/gpt2_tiny.onnx";
    let refused = |subject: &str, inputs: &str, extra: &[&str], code: i32, words: &[&str]| {
        let Output { code: found, stdout, stderr } = eval(subject, inputs, &outputs, extra);
        assert_eq!(found, Some(code), "{stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
        assert!(stdout.is_empty() && !Path::new(&outputs).exists(), "{stdout}");
    };
    refused(gpt2, &inputs, &["--json"], 2, &["has no data", "--init SEED"]);
    refused(MLP, &inputs, &WEIGHTS, 2, &["`input_ids`", "image"]);
    refused(gpt2, &inputs, &["--init", "1", "--gradients", &folder.at("no/g.npz")], 8, &["g.npz"]);
    refused(gpt2, &inputs, &["--init", "1", "--loss", "mse"], 2, &["--gradients"]);
    refused(gpt2, &inputs, &["--init", "1", "--gradients", &folder.at("g.txt")], 2, &[".txt", ".npz"]);
    refused(gpt2, &folder.at("nothing"), &["--init", "1"], 8, &["nothing"]);
    let mut far = golden.clone();
    far["inputs"]["input_ids"]["modulus"] = 300.into();
    refused(gpt2, &write_inputs(&folder, &far, false), &["--init", "1"], 2, &["DCC0053", "211"]);
    far["inputs"]["input_ids"]["shape"] = serde_json::json!([3, 15]);
    refused(gpt2, &write_inputs(&folder, &far, false), &["--init", "1"], 2, &["[3, 15]"]);
}
