//! What the documents promise: README.md's operators are the importer's and its first command is the run whose losses are
//! known; the example of docs/text-format.md is a program that tests read.

use crate::tidy::root;
use expect_test::expect_file;
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
