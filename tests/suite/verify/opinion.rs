//! What dcc and tract make of the models of `tests/models`, and of faults.

use crate::command::Folder;
use crate::onnx_model::{model, node, size, tensor, value, with_int, with_tensor};
use crate::tidy::root;
use dcc::cli::verify::model::{Asked, Question, Report, ask};
use dcc_program::program::Program;
use dcc_program::text;
use expect_test::expect_file;
use prost::Message;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Sizes that make nothing but time.
const LARGE: [&str; 3] = ["gpt2_124m.onnx", "gpt2_50257.onnx", "gpt3_175b.onnx"];

fn asked() -> Asked {
    Asked { init: Some(1), seed: 1, ..Asked::default() }
}

fn question(path: &Path) -> Question {
    Question::open(path, &asked()).unwrap_or_else(|failure| panic!("{}: {}", path.display(), failure.text()))
}

fn opinion(question: &Question, alter: &dyn Fn(&mut [Program])) -> Result<Report, String> {
    ask(question, alter).map_err(|failure| failure.text())
}

/// How much of a model tract has computed, what of it was compared, and what it could not.
fn line(name: &str, report: &Report) -> String {
    let Report { nodes, values, outputs, .. } = report;
    let mut text = format!("{name}: {} of {nodes} nodes, {values} values, {outputs} outputs\n", nodes - report.left_out.len());
    for cast in &report.undefined {
        text += &format!("  {} undefined elements: {}\n", cast.elements, cast.place);
    }
    let mut alike: BTreeMap<&str, usize> = BTreeMap::new();
    report.left_out.iter().for_each(|node| *alike.entry(&node.reason).or_default() += 1);
    for (reason, count) in alike {
        text += &format!("  {count} × {reason}\n");
    }
    if let Some(reason) = &report.refused {
        text += &format!("  refused: {reason}\n");
    }
    text
}

/// The models of a folder and of those inside, sorted by name.
fn models(folder: &str) -> Vec<PathBuf> {
    let mut open = vec![root().join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.extension() {
                _ if path.is_dir() => open.push(path),
                Some(extension) if extension == "onnx" => found.push(path),
                _ => {}
            }
        }
    }
    found.retain(|path| !LARGE.iter().any(|large| path.ends_with(large)));
    found.sort();
    found
}

#[test]
fn every_model_has_the_same_values_in_tract() {
    let (mut text, mut worst) = (String::new(), 0.0_f64);
    for path in [models("tests/models"), models("samples")].concat() {
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
        let report = opinion(&question(&path), &|_| {}).unwrap_or_else(|error| panic!("{name}: {error}"));
        worst = worst.max(report.largest);
        text += &line(name, &report);
    }
    println!("{text}largest difference: {worst:.2} of what is allowed");
    expect_file!["../../golden/verify/models.txt"].assert_eq(&text);
}

const GPT: &str = "tests/models/gpt2_tiny.onnx";

/// Every `from` in the programs becomes `to`, in programs that `is_met` says.
fn planted(from: &'static str, to: &'static str, is_met: impl Fn(&Program) -> bool) -> impl Fn(&mut [Program]) {
    move |programs| {
        for program in programs.iter_mut().filter(|program| is_met(program)) {
            *program = text::parse(&text::print(program).replace(from, to)).expect("the text of a program");
        }
    }
}

/// A kernel that computes another function, wherever it stands.
#[test]
fn a_wrong_kernel_is_found_at_its_node() {
    // Its nodes all give tensors, so that what is fused can be followed back through them.
    let question = question(&root().join("tests/models/gpt2_tiny_legacy.onnx"));
    let error = opinion(&question, &planted(" tanh(", " erf(", |_| true)).err().expect("a difference");
    assert!(error.contains("DCC0911") && error.contains("(Tanh, opset 17)") && error.contains("a kernel"), "{error}");
    // One that is wrong only where no value inside the model is an output, so that it is fused with others.
    let alone = |program: &Program| program.outputs.len() == 1;
    let error = opinion(&question, &planted("gelu_tanh(", "tanh(", alone)).err().expect("a difference");
    assert!(error.contains("DCC0911") && error.contains("(Mul, opset 17)") && error.contains("fused"), "{error}");
}

/// The same of library kernels and of a gather: other windows, another layout, another row, another scale.
#[test]
fn a_wrong_library_kernel_is_found_at_its_node() {
    let cases = [
        ("cnn.onnx", "k1 -> n o y0 y1; x0 = 1 y0 + 1 k0 - 1", "k1 -> n o y0 y1; x0 = 1 y0 + 1 k0 - 0", "`node_conv2d` (Conv,"),
        ("cnn.onnx", "x0 = 2 y0 + 1 k0 - 0", "x0 = 2 y0 + 1 k0 - 1", "(ConvTranspose,"),
        ("cnn.onnx", "taps 3 stride 2 dilation 1 pad 1, 8", "taps 3 stride 2 dilation 1 pad 0, 8", "(MaxPool,"),
        ("bert_tiny_opset20.onnx", "{x0[i0, i1]}", "{x0[i0, 0]}", "(Gather,"),
        ("families/vit.onnx", "scale 0.25", "scale 0.26", "kernels are fused wrongly"),
    ];
    // Operands of other types the gate refuses: of these products, one is by a square matrix.
    let turned = |programs: &mut [Program]| {
        for program in programs {
            let turn = |line: &str| match line.contains("`node_linear_1`") {
                true => line.replace("m k, n k -> m n", "m k, k n -> m n"),
                false => line.to_owned(),
            };
            let lines: Vec<String> = text::print(program).lines().map(turn).collect();
            *program = text::parse(&(lines.join("\n") + "\n")).expect("the text of a program");
        }
    };
    let error = opinion(&question(&root().join("tests/models/mlp.onnx")), &turned).err().expect("a difference");
    assert!(error.contains("`node_linear_1` (Gemm,") && error.contains("a kernel"), "{error}");
    for (name, from, to, place) in cases {
        let question = question(&root().join("tests/models").join(name));
        let error =
            opinion(&question, &planted(from, to, |_| true)).err().unwrap_or_else(|| panic!("{name}: {to} is accepted"));
        assert!(error.contains("DCC0911") && error.contains(place) && error.contains("a kernel"), "{name}, {to}: {error}");
    }
}

/// An attribute that dcc reads otherwise, so that it infers another shape.
#[test]
fn a_wrong_shape_is_found_at_its_node() {
    let nodes =
        [node("Relu", &["x"], &["a"]), with_int(node("Flatten", &["a"], &["b"]), "axis", 1), node("Tanh", &["b"], &["y"])];
    let folder = Folder::new();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, model(&nodes).encode_to_vec()).unwrap();
    let mut question = question(&path);
    assert_eq!(opinion(&question, &|_| {}).unwrap().values, 3);
    question.ours.proto.graph.as_mut().unwrap().node[1].attribute[0].i = Some(0);
    let error = opinion(&question, &|_| {}).err().expect("a difference");
    assert!(error.contains("(Flatten, opset 20)") && error.contains("dcc's is f32[1, 6], tract's f32[2, 3]"), "{error}");
}

/// ONNX does not say what a cast makes of numbers that its result cannot hold. The others are compared, and what follows.
#[test]
fn undefined_casts_are_no_difference() {
    const UINT8: i64 = 2;
    let code = |to| match to {
        "u8" => UINT8,
        "i32" => 6,
        _ => 7,
    };
    // A known operand, which tract folds into a size: those have 32 bits.
    let cast = |from, into, to| with_int(node("Cast", &[from], &[into]), "to", to);
    let known = [node("Log", &["c"], &["a"]), cast("a", "b", 7), node("Min", &["b", "k"], &["d"])];
    let nodes = [&known[..], &[cast("d", "e", 1), node("Add", &["e", "x"], &["y"])]].concat();
    let mut three = tensor("k", &[], &3_i64.to_le_bytes());
    three.data_type = Some(7);
    let zero = tensor("c", &[2, 3], &[0.0_f32, 1.0, 8.0, 0.0, 20.0, 3.0].map(f32::to_le_bytes).concat());
    let folder = Folder::new();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, with_tensor(with_tensor(model(&nodes), zero), three).encode_to_vec()).unwrap();
    let report = opinion(&question(&path), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.values, report.undefined[0].elements), (5, 2));
    for (factor, to) in [(300.0_f32, "u8"), (1e20, "i32"), (f32::INFINITY, "i64"), (1e3, "u8")] {
        let [times, small] = [node("Mul", &["x", "c"], &["a"]), node("Mul", &["d", "e"], &["f"])];
        let nodes = [times, cast("a", "b", code(to)), cast("b", "d", 1), small, node("Tanh", &["f"], &["y"])];
        let folder = Folder::new();
        let path = folder.path().join("m.onnx");
        let whole = with_tensor(model(&nodes), tensor("c", &[], &factor.to_le_bytes()));
        let whole = with_tensor(whole, tensor("e", &[], &0.005_f32.to_le_bytes()));
        std::fs::write(&path, whole.encode_to_vec()).unwrap();
        let question = question(&path);
        let report = opinion(&question, &|_| {}).unwrap_or_else(|error| panic!("{factor} as {to}: {error}"));
        let elements: Vec<usize> = report.undefined.iter().map(|cast| cast.elements).collect();
        assert!(report.values == 5 && report.left_out.is_empty(), "{factor} as {to}: {}", report.values);
        assert!(elements.len() == 1 && (1..=6).contains(&elements[0]), "{factor} as {to}: {elements:?}");
        if factor == 300.0 {
            assert!(elements[0] < 6, "{elements:?}");
            for (from, to, place) in [("tanh(", "erf(", "(Tanh,"), ("u8(", "u8(0.5:f32 * ", "(Cast,")] {
                let error = opinion(&question, &planted(from, to, |_| true)).err().expect("a difference");
                assert!(error.contains("DCC0911") && error.contains(place), "{error}");
            }
        }
    }
}

/// An attribute that dcc reads otherwise.
#[test]
fn a_wrong_import_is_found_at_its_node() {
    let mut question = question(&root().join(GPT));
    let graph = question.ours.proto.graph.as_mut().unwrap();
    let norm = graph.node.iter_mut().filter(|node| node.op_type() == "LayerNormalization").nth(1).unwrap();
    let name = norm.name().to_owned();
    norm.attribute.iter_mut().find(|a| a.name() == "epsilon").unwrap().f = Some(1e-2);
    let error = opinion(&question, &|_| {}).err().expect("a difference");
    let sides = "the import of the node is wrong, or tract is";
    assert!(error.contains("DCC0911") && error.contains(&format!("`{name}`")) && error.contains(sides), "{error}");
}

/// A node that tract has not is left out, and what follows it is compared all the same.
#[test]
fn what_tract_cannot_run_is_said() {
    let mut celu =
        model(&[node("Relu", &["x"], &["a"]), node("CenterCropPad", &["a", "s"], &["b"]), node("Tanh", &["b"], &["y"])]);
    let graph = celu.graph.as_mut().unwrap();
    let mut sizes = tensor("s", &[2], &[3_i64.to_le_bytes(), 5_i64.to_le_bytes()].concat());
    sizes.data_type = Some(7);
    graph.initializer.push(sizes);
    graph.input = vec![value("x", &[size(2), size(3)])];
    let folder = Folder::new();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, celu.encode_to_vec()).unwrap();
    let report = opinion(&question(&path), &|_| {}).unwrap();
    assert_eq!((report.nodes, report.left_out.len(), report.values, report.outputs), (3, 1, 2, 1));
    assert!(report.left_out[0].place.contains("CenterCropPad"), "{}", report.left_out[0].place);
    let error = opinion(&question(&path), &planted("tanh(", "erf(", |_| true)).err().expect("a difference");
    assert!(error.contains("(Tanh, opset 20)"), "{error}");
}
