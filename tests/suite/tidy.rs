//! What holds of the whole tree: which package may depend on which, sizes, where `unsafe` lives, no leftovers.

use crate::golden;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE_LINES: usize = 1000;
const FUNCTION_LINES: usize = 70;

/// Generated, so longer than a file should be.
const GENERATED: [&str; 1] = ["compiler/src/import/proto.rs"];

/// Where `unsafe` may stand; each of these exports safe functions only.
const UNSAFE: [&str; 9] = [
    "kernels/src/cpu",
    "kernels/src/cuda",
    "kernels/src/library",
    "runtime/program/src/map.rs",
    "runtime/src/comm/shm.rs",
    "runtime/src/cpu",
    "runtime/src/cuda",
    "runtime/src/signal.rs",
    "tests/suite/alloc.rs",
];

/// Packages of the workspace that each may depend on.
const ARROWS: [(&str, &[&str]); 5] = [
    ("dcc-program", &[]),
    ("dcc-kernels", &["dcc-program"]),
    ("dcc-runtime", &["dcc-kernels", "dcc-program"]),
    ("dcc", &["dcc-kernels", "dcc-program", "dcc-runtime"]),
    ("dcc-tests", &["dcc", "dcc-kernels", "dcc-program", "dcc-runtime"]),
];

/// What the runtime must do without, however indirectly.
const NOT_IN_RUNTIME: [&str; 4] = ["dcc", "egg", "prost", "tract"];

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}

/// A file of the tree by its path from the root.
struct File {
    path: String,
    text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Code without line comments, by line number from 1.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(i, line)| (i + 1, line.split("//").next().unwrap_or("")))
    }
}

/// All text files that people wrote, sorted.
fn files() -> Vec<File> {
    let mut files = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() {
                let skipped = ["target", ".git", "__pycache__"].contains(&name.as_str());
                folders.extend((!skipped).then_some(path));
            } else if let Some(path) = relative(&path) {
                let text = [".rs", ".md", ".toml", ".py", ".sh", ".txt", ".proto", ".json", ".csv"];
                if text.iter().any(|end| name.ends_with(end)) || path == ".ci/run" {
                    files.push(File { text: fs::read_to_string(root().join(&path)).expect("UTF-8"), path });
                }
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn relative(path: &Path) -> Option<String> {
    Some(path.strip_prefix(root()).ok()?.to_str()?.to_owned())
}

fn assert_none(what: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

fn metadata() -> Value {
    let host = Command::new("rustc").arg("-vV").output().expect("rustc runs").stdout;
    let host = String::from_utf8(host).expect("UTF-8");
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc names its host");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", host])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().expect(key)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().expect(key)
}

#[test]
fn packages_depend_downwards() {
    let metadata = metadata();
    let names: BTreeMap<&str, &str> = list(&metadata, "packages").iter().map(|p| (text(p, "id"), text(p, "name"))).collect();
    let members: BTreeSet<&str> =
        list(&metadata, "workspace_members").iter().filter_map(|id| Some(names[id.as_str()?])).collect();
    let mut direct: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in list(&metadata["resolve"], "nodes") {
        let normal = |dep: &&Value| list(dep, "dep_kinds").iter().any(|kind| kind["kind"] != "dev");
        let from = names[text(node, "id")];
        let all = members.contains(from) && from == "dcc-tests";
        let deps = list(node, "deps").iter().filter(|dep| all || normal(dep));
        direct.entry(from).or_default().extend(deps.map(|dep| names[text(dep, "pkg")]));
    }
    assert_eq!(members, ARROWS.iter().map(|(name, _)| *name).collect(), "a package without a place in ARROWS");
    for (package, allowed) in ARROWS {
        let inside: Vec<&str> = direct[package].iter().copied().filter(|name| members.contains(name)).collect();
        let wrong: Vec<String> = inside.iter().filter(|name| !allowed.contains(name)).map(|name| (*name).to_owned()).collect();
        assert_none(&format!("{package} may not depend on"), wrong);
    }
    let mut reached = BTreeSet::new();
    let mut queue = VecDeque::from(["dcc-runtime"]);
    while let Some(package) = queue.pop_front() {
        if reached.insert(package) {
            queue.extend(direct.get(package).into_iter().flatten());
        }
    }
    let banned =
        |name: &&&str| NOT_IN_RUNTIME.iter().any(|no| *name == no || name.starts_with(&format!("{no}-")) && *no != "dcc");
    assert_none("the runtime depends on", reached.iter().filter(banned).map(|name| (*name).to_owned()).collect());
}

#[test]
fn files_have_a_header_and_an_end() {
    let rust: Vec<File> = files().into_iter().filter(File::is_rust).collect();
    let bare = rust.iter().filter(|file| !file.text.starts_with("//!")).map(|file| file.path.clone()).collect();
    assert_none("open with `//!`, saying what the file is", bare);
    let long = rust.iter().filter(|file| file.text.lines().count() > FILE_LINES && !GENERATED.contains(&file.path.as_str()));
    assert_none(&format!("longer than {FILE_LINES} lines"), long.map(|file| file.path.clone()).collect());
}

/// Name, first line and length of each function of formatted code.
fn functions(file: &File) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = file.text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let words: Vec<&str> = code.split_whitespace().collect();
        let Some(at) = words.iter().position(|word| *word == "fn") else { continue };
        let qualifier = |word: &&str| {
            word.starts_with("pub") || ["const", "async", "unsafe", "extern", "\"C\"", "crate)", "super)", "in"].contains(word)
        };
        if !words[..at].iter().all(qualifier) || code.ends_with(['}', ';']) {
            continue;
        }
        let close = format!("{}}}", &line[..line.len() - code.len()]);
        let length = lines[start..].iter().position(|line| *line == close).map_or(1, |end| end + 1);
        let name = words.get(at + 1).and_then(|word| word.split(['(', '<']).next()).unwrap_or_default();
        found.push((name.to_owned(), start + 1, length));
    }
    found
}

#[test]
fn functions_fit_a_screen() {
    let mut long = Vec::new();
    for file in files().iter().filter(|file| file.is_rust() && !GENERATED.contains(&file.path.as_str())) {
        for (name, line, length) in functions(file).into_iter().filter(|found| found.2 > FUNCTION_LINES) {
            long.push(format!("{}:{line} `{name}` has {length}", file.path));
        }
    }
    assert_none(&format!("functions of more than {FUNCTION_LINES} lines"), long);
}

#[test]
fn the_function_scanner_sees_length() {
    let text =
        "impl A {\n    pub(crate) fn f<T>(\n        x: T,\n    ) -> T {\n        x\n    }\n    fn g() {}\n}\nfn h() {\n}\n";
    let file = File { path: "a.rs".into(), text: text.into() };
    assert_eq!(functions(&file), [("f".to_owned(), 2, 5), ("h".to_owned(), 9, 2)]);
}

#[test]
fn unsafe_stays_in_its_modules() {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is_rust() && file.path != "tests/suite/tidy.rs") {
        let within = |at: &str| file.path == at || file.path == format!("{at}.rs") || file.path.starts_with(&format!("{at}/"));
        if UNSAFE.iter().any(|at| within(at)) {
            continue;
        }
        let forms = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern", "unsafe("];
        let here = file.code().filter(|(_, code)| forms.iter().any(|form| code.contains(form)));
        found.extend(here.map(|(line, _)| format!("{}:{line}", file.path)));
    }
    assert_none("`unsafe` outside of its modules", found);
}

#[test]
fn no_leftovers() {
    let banned = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("dbg", "!("),
        concat!("#[", "ignore"),
        concat!("..", "/shared"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/wo", "rk/"),
        concat!("FIX", "ME"),
        concat!("<<<<", "<<< "),
    ];
    let mut found = Vec::new();
    for file in files().iter().filter(|file| !file.path.starts_with("samples/gpt/text.txt")) {
        for (line, text) in file.text.lines().enumerate() {
            found.extend(banned.iter().filter(|no| text.contains(**no)).map(|no| format!("{}:{} `{no}`", file.path, line + 1)));
        }
    }
    assert_none("leftovers", found);
}

#[test]
fn every_source_file_is_compiled() {
    let files = files();
    let modules: BTreeMap<&str, Vec<&str>> =
        files.iter().filter(|file| file.is_rust()).map(|file| (file.path.as_str(), declared(&file.text))).collect();
    let metadata = metadata();
    let targets = list(&metadata, "packages").iter().flat_map(|package| list(package, "targets"));
    let roots = targets.filter_map(|target| relative(Path::new(text(target, "src_path"))));
    let mut queue: Vec<(String, String)> = roots
        .map(|path| {
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
            (path, folder)
        })
        .collect();
    let mut reached = BTreeSet::new();
    while let Some((path, folder)) = queue.pop() {
        let Some(children) = modules.get(path.as_str()) else { continue };
        if reached.insert(path) {
            queue.extend(children.iter().map(|child| (format!("{folder}/{child}.rs"), format!("{folder}/{child}"))));
        }
    }
    let lost = modules.keys().filter(|path| !reached.contains(**path)).map(|path| (*path).to_owned());
    assert_none("no module names", lost.collect());
}

/// Names of modules in files of their own.
fn declared(text: &str) -> Vec<&str> {
    text.lines().filter_map(module).collect()
}

fn module(line: &str) -> Option<&str> {
    let line = line.trim();
    let line = match line.strip_prefix("pub") {
        Some(rest) => rest.trim_start_matches("(crate)").trim_start_matches("(super)").trim_start(),
        None => line,
    };
    line.strip_prefix("mod ")?.strip_suffix(';')
}

/// A golden is read by the folder's runner in `golden.rs`, or its name stands in a test.
#[test]
fn every_golden_is_read() {
    let files = files();
    let is_test = |file: &&File| file.is_rust() && file.text.contains("golden") && file.path != "tests/suite/tidy.rs";
    let tests: Vec<&File> = files.iter().filter(is_test).collect();
    let mut unread = Vec::new();
    for file in files.iter().filter(|file| file.path.starts_with("tests/golden/") && !file.path.ends_with(".py")) {
        let path = file.path.trim_start_matches("tests/golden/");
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        let by_folder = golden::reads(folder) && name.ends_with(".txt");
        if !by_folder && !tests.iter().any(|test| names(&test.text, path) || names(&test.text, stem)) {
            unread.push(path.to_owned());
        }
    }
    assert_none("goldens that no test reads", unread);
}

/// Whether `word` stands in `text`, not as a part of a longer name.
fn names(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let free = |(at, _): (usize, &str)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part);
    text.match_indices(word).any(free)
}
