//! What dcc and tract make of a model, and of a fault.

use crate::command::Folder;
use crate::onnx_model::{model, node, size, tensor, value};
use dcc::cli::verify::model::{Asked, Question, Report, ask};
use dcc_program::program::Program;
use dcc_program::text;
use prost::Message;
use std::path::Path;

fn asked() -> Asked {
    Asked { init: Some(1), seed: 1, ..Asked::default() }
}

fn question(path: &Path) -> Question {
    Question::open(path, &asked()).unwrap_or_else(|failure| panic!("{}: {}", path.display(), failure.text()))
}

fn opinion(question: &Question, alter: &dyn Fn(&mut [Program])) -> Result<Report, String> {
    ask(question, alter).map_err(|failure| failure.text())
}

/// Every `from` in the kernels becomes `to`.
fn planted(from: &'static str, to: &'static str) -> impl Fn(&mut [Program]) {
    move |programs| {
        for program in programs.iter_mut() {
            *program = text::parse(&text::print(program).replace(from, to)).expect("the text of a program");
        }
    }
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
    let error = opinion(&question(&path), &planted("tanh(", "erf(")).err().expect("a difference");
    assert!(error.contains("(Tanh, opset 20)"), "{error}");
}
