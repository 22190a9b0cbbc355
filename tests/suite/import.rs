//! ONNX import: every sample graph comes in, and every bad file gets the error that fits.

use bytes::Bytes;
use dcc::import::{Imported, Model, Options, onnx};
use expect_test::expect_file;
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
    check("tests/models", expect_file!["../golden/import/models.txt"]);
    check("tests/models/attention", expect_file!["../golden/import/attention.txt"]);
}
