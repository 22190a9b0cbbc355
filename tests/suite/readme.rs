//! What the documents promise: README.md's operators are the importer's and its first command is the run whose losses are
//! known; the example of docs/text-format.md is a program that tests read; docs/your-model.md's commands print what it shows.

use crate::command::{Folder, dcc, dcc_command, finish, spawn};
use crate::tidy::root;
use expect_test::expect_file;
use npyz::WriterBuilder;
use npyz::npz::{NpzArchive, NpzWriter};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

const BEGIN: &str = "<!-- operators: written by `UPDATE_EXPECT=1 cargo test -p dcc-tests readme` -->\n";
const END: &str = "<!-- end of operators -->\n";
const COLUMNS: usize = 128;

fn readme() -> String {
    std::fs::read_to_string(root().join("README.md")).expect("README.md")
}

fn operators() -> String {
    let (mut out, mut column) = (String::new(), 0);
    for (i, name) in dcc::import::supported().into_iter().enumerate() {
        let separator = match (i, column + name.len() + 1 > COLUMNS) {
            (0, _) => "",
            (_, true) => "\n",
            (_, false) => " ",
        };
        column = if separator == "\n" { 0 } else { column + separator.len() } + name.len();
        write!(out, "{separator}{name}").expect("a string");
    }
    out + "\n"
}

#[test]
fn readme_lists_the_operators() {
    let readme = readme();
    let (before, rest) = readme.split_once(BEGIN).expect("where the list begins");
    let (_, after) = rest.split_once(END).expect("where the list ends");
    expect_file![root().join("README.md")].assert_eq(&format!("{before}{BEGIN}{}{END}{after}", operators()));
}

/// Flags and their values; a bare word counts as a flag.
fn flags<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let value = if word.starts_with("--") { words.next_if(|next| !next.starts_with("--")) } else { None };
        found.insert(word.to_owned(), value.unwrap_or_default().to_owned());
    }
    found
}

#[test]
fn the_first_command_is_the_golden_run() {
    let readme = readme();
    let start = readme.find("cargo run --release --bin dcc -- run ").expect("the first command");
    let command = readme[start..].split("```").next().expect("the end of its block").replace("\\\n", " ");
    let (_, arguments) = command.split_once("-- run ").expect("arguments");
    let mut given = flags(arguments.split_whitespace());
    assert_eq!(given.remove("--tp").as_deref(), Some("2"));
    assert_eq!(given.remove("--pp").as_deref(), Some("2"));
    let golden = std::fs::read_to_string(root().join("tests/golden/numbers/sample_gpt.json")).expect("the golden");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let mut expected = flags(golden["flags"].as_array().expect("flags").iter().filter_map(Value::as_str));
    for (flag, default) in [("--lr", "1e-3"), ("--optimizer", "adamw")] {
        assert_eq!(expected.remove(flag).as_deref(), Some(default), "the default of {flag}, left out in README.md");
    }
    assert_eq!(given, expected);
}

#[test]
fn the_example_of_the_text_is_a_program() {
    let document = std::fs::read_to_string(root().join("docs/text-format.md")).expect("docs/text-format.md");
    let example = document.split("```\n").nth(1).expect("the example").trim_end_matches("…\n");
    let program = std::fs::read_to_string(root().join("runtime/program/tests/programs/mlp_tp2.txt")).expect("the program");
    assert!(example.lines().count() > 30 && program.starts_with(example), "docs/text-format.md shows another program");
}

/// Samples of the digits, with labels where the guide has them.
fn digits(path: &str, samples: std::ops::Range<usize>, has_labels: bool) {
    let mut digits = NpzArchive::open(root().join("samples/mlp/digits.npz")).expect("the digits");
    let images: Vec<f32> = digits.by_name("image").expect("reads").expect("images").into_vec().expect("f32");
    let labels: Vec<i64> = digits.by_name("labels").expect("reads").expect("labels").into_vec().expect("i64");
    let mut file = NpzWriter::create(path).expect("a file");
    let count = samples.len() as u64;
    let image = file.array("image", Default::default()).expect("an array").default_dtype().shape(&[count, 1, 8, 8]);
    let mut image = image.begin_nd().expect("a header");
    image.extend(&images[samples.start * 64..samples.end * 64]).expect("values");
    image.finish().expect("an array");
    if has_labels {
        let array = file.array("labels", Default::default()).expect("an array").default_dtype().shape(&[count]);
        let mut array = array.begin_nd().expect("a header");
        array.extend(&labels[samples]).expect("values");
        array.finish().expect("an array");
    }
}

/// The commands of a document, each with the lines that it shows of what they print.
fn shown(document: &str) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let mut continues = false;
    for line in document.lines().filter(|line| line.starts_with("    ")).map(str::trim) {
        let (text, goes_on) = line.strip_suffix('\\').map_or((line, false), |text| (text, true));
        match (text.strip_prefix("$ dcc "), found.last_mut()) {
            (Some(command), _) => found.push((command.to_owned(), Vec::new())),
            (None, Some((command, _))) if continues => *command += text,
            (None, Some((_, lines))) => lines.push(text.to_owned()),
            (None, None) => {}
        }
        continues = goes_on;
    }
    found
}

/// With the module's graph, drawn weights and the guide's data: what does not depend on the weights is printed as shown.
#[test]
fn the_guide_for_a_model_of_ones_own_holds() {
    let folder = Folder::new();
    let [train, test, x] = ["train.npz", "test.npz", "x.npz"].map(|name| folder.at(name));
    digits(&train, 0..1500, true);
    digits(&test, 1500..1797, true);
    digits(&x, 1500..1797, false);
    let (model, start) = ("tests/models/families/your_model.onnx", folder.at("start"));
    let run = ["run", model, "--data", &train, "--global-batch-size", "100", "--steps", "1", "--lr", "1e-9", "--init", "1"];
    dcc(run.into_iter().chain(["--init-rule", "*.weight=std:0.1", "--init-rule", "norm.weight=ones", "--save-dir", &start]))
        .ok();
    dcc(["export", &start, "--model", model, "--onnx", &folder.at("model.onnx")]).ok();
    let document = std::fs::read_to_string(root().join("docs/your-model.md")).expect("the guide");
    let commands = shown(&document);
    assert_eq!(commands.len(), 5, "{commands:?}");
    for (command, lines) in commands {
        if command.starts_with("verify ") && !cfg!(feature = "tract") {
            continue;
        }
        let output = finish(spawn(dcc_command().args(command.split_whitespace()).current_dir(folder.path()))).ok();
        let printed = output.stdout + &output.stderr;
        let fixed = |line: &&String| {
            ["Planning ", "loss ", "trains ", "frozen ", "Exported ", "Wrote "].iter().any(|w| line.starts_with(w))
        };
        for line in lines.iter().filter(fixed) {
            assert!(printed.contains(line.as_str()), "dcc {command}: no line `{line}` in\n{printed}");
        }
        if command.starts_with("run ") {
            let accuracy =
                printed.lines().filter_map(|line| line.split_once("accuracy ")).next_back().expect("an evaluation").1;
            assert!(accuracy.parse::<f64>().expect("a number") > 0.95, "{printed}");
        }
    }
    assert!(folder.path().join("y.npz").exists() && folder.path().join("trained.onnx").exists());
}
