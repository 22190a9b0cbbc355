//! What dcc and tract make of the models of `tests/models`, and of faults.

use crate::command::Folder;
use crate::onnx_model::{model, node, size, tensor, value};
use crate::tidy::root;
use dcc::cli::verify::model::{Asked, Question, Report, ask};
use dcc_program::program::Program;
use dcc_program::text;
use expect_test::expect_file;
use prost::Message;
use std::collections::BTreeMap;
use std::path::Path;

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

/// How much of a model tract has computed, and what it could not.
fn line(name: &str, report: &Report) -> String {
    let mut text = format!("{name}: {} of {} nodes\n", report.nodes - report.left_out.len(), report.nodes);
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

#[test]
fn every_model_has_the_same_values_in_tract() {
    let entries = std::fs::read_dir(root().join("tests/models")).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "onnx"));
    paths.retain(|path| !LARGE.contains(&path.file_name().unwrap().to_str().unwrap()));
    paths.sort();
    let (mut text, mut worst) = (String::new(), 0.0_f64);
    for path in paths {
        let name = path.file_name().unwrap().to_str().unwrap();
        let report = opinion(&question(&path), &|_| {}).unwrap_or_else(|error| panic!("{name}: {error}"));
        worst = worst.max(report.largest);
        text += &line(name, &report);
    }
    println!("{text}largest difference: {worst:.2} of what is allowed");
    expect_file!["../../golden/verify/models.txt"].assert_eq(&text);
}

const GPT: &str = "tests/models/gpt2_tiny.onnx";

/// Every `from` in the kernels becomes `to`, in programs that `is_met` says.
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
    let error = opinion(&question, &planted("tanh(", "erf(", |_| true)).err().expect("a difference");
    assert!(error.contains("DCC0911") && error.contains("(Tanh, opset 17)") && error.contains("a kernel"), "{error}");
    // One that is wrong only where no value inside the model is an output, so that it is fused with others.
    let alone = |program: &Program| program.outputs.len() == 1;
    let error = opinion(&question, &planted("tanh(", "erf(", alone)).err().expect("a difference");
    assert!(error.contains("DCC0911") && error.contains("(Tanh, opset 17)") && error.contains("fused"), "{error}");
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
