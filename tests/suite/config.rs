//! Options from `dcc.toml` and variables, through the real binary: what counts, what is recorded, what errors say.

use crate::cli::put;
use crate::command::{Folder, Output, dcc_command, finish, spawn};
use crate::tidy::root;

/// A folder with a `dcc.toml`, `sub/` below it, and a model beside it.
struct Case(Folder);

const FILE: &str = "\
# Of all commands.
loss = \"cross-entropy\"
global-batch-size = 8

[compile]
tp = 2
optimizer = \"sgd\"

[run]
data = \"data.npz\"
steps = 2
lr = 1e-2
init = 3
threads = 1
metrics-file = \"m.jsonl\"
";

impl Case {
    fn new(file: &str) -> Case {
        let folder = Folder::new();
        let models = root().join("tests/models");
        std::fs::copy(models.join("mlp.onnx"), folder.path().join("mlp.onnx")).unwrap();
        std::fs::copy(models.join("data/mlp.npz"), folder.path().join("data.npz")).unwrap();
        put(&folder, "dcc.toml", file);
        std::fs::create_dir(folder.path().join("sub")).unwrap();
        Case(folder)
    }

    fn dcc(&self, inside: &str, environment: &[(&str, &str)], line: &str) -> Output {
        let mut command = dcc_command();
        command.current_dir(self.0.path().join(inside)).args(line.split_whitespace()).envs(environment.iter().copied());
        finish(spawn(&mut command))
    }

    fn rates(&self) -> Vec<f64> {
        self.0.lines("m.jsonl").iter().map(|line| line["lr"].as_f64().expect("a rate")).collect()
    }

    /// Compile flags that an artifact keeps.
    fn flags(&self, artifact: &str) -> String {
        let value = self.dcc("", &[], &format!("inspect {artifact} --json")).ok().json();
        let flags = value["options"]["flags"].as_array().expect("flags");
        flags.iter().map(|flag| flag.as_str().expect("a word")).collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn flag_before_variable_before_file_before_default() {
    let case = Case::new(FILE);
    // From a folder below, and paths of the file are relative to it.
    let output = case.dcc("sub", &[], "run ../mlp.onnx --json").ok();
    assert!(output.stderr.contains("world 2 = dp 1 × tp 2 × pp 1"), "{}", output.stderr);
    assert!(output.stderr.contains("Options loss cross-entropy") || output.stderr.contains("tp 2"), "{}", output.stderr);
    assert!(output.stderr.contains("from ../dcc.toml"), "{}", output.stderr);
    assert_eq!(case.rates(), [1e-2, 1e-2]);
    case.dcc("", &[("DCC_LR", "0.5")], "run mlp.onnx --steps 1").ok();
    assert_eq!(case.rates(), [0.5]);
    case.dcc("", &[("DCC_LR", "0.5")], "run mlp.onnx --steps 1 --lr 0.25").ok();
    assert_eq!(case.rates(), [0.25]);
    let line = "run mlp.onnx --config none --data data.npz --steps 1 --init 3 --global-batch-size 8 --metrics-file m.jsonl";
    let output = case.dcc("", &[], line).ok();
    assert!(output.stderr.contains("world 1") && !output.stderr.contains("Options"), "{}", output.stderr);
    assert_eq!(case.rates(), [1e-3]);
    let output = case.dcc("sub", &[("DCC_CONFIG", "none")], "run ../mlp.onnx --data ../data.npz --steps 1 --init 3");
    assert!(output.code == Some(2) && output.stderr.contains("--global-batch-size"), "{output:?}");
    put(&case.0, "other.toml", "lr = 0.125");
    case.dcc(
        "sub",
        &[],
        &line
            .replace("none", "../other.toml")
            .replace(" data.npz", " ../data.npz")
            .replace("mlp.onnx", "../mlp.onnx")
            .replace("m.jsonl", "../m.jsonl"),
    )
    .ok();
    assert_eq!(case.rates(), [0.125]);
}

#[test]
fn artifacts_keep_what_was_configured() {
    let case = Case::new(FILE);
    case.dcc("", &[("DCC_MOMENTUM", "0.9")], "compile mlp.onnx --weight-decay 0.1").ok();
    let flags = case.flags("mlp.dcc");
    for part in
        ["--tp 2", "--optimizer sgd", "--momentum 0.9", "--weight-decay 0.1", "--loss cross-entropy", "--global-batch-size 8"]
    {
        assert!(flags.contains(part), "{part} in {flags}");
    }
    // What is compiled already takes run's keys, not compile's; typed, they are a mistake.
    let output = case.dcc("", &[], "run mlp.dcc").ok();
    assert!(output.stderr.contains("not used: ") && output.stderr.contains("tp (dcc.toml:6)"), "{}", output.stderr);
    assert_eq!(case.rates(), [1e-2, 1e-2]);
    let output = case.dcc("", &[], "run mlp.dcc --tp 2");
    assert!(output.code == Some(2) && output.stderr.contains("--tp belongs to `dcc compile`"), "{output:?}");
    put(&case.0, "dcc.toml", "[verify]\nseed = 4\nmodel = 'mlp.onnx'\ndim = { batch = 8 }");
    let output = case.dcc("", &[], "verify mlp.dcc --json").ok();
    assert!(output.json()["difference"].is_number(), "{}", output.stdout);
}

#[test]
fn mistakes_name_their_place() {
    let check = |file: &str, environment: &[(&str, &str)], line: &str, parts: &[&str]| {
        let case = Case::new(file);
        let output = case.dcc("", environment, line);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{}", output.stderr);
        assert!(output.stderr.contains("error[DCC00"), "{}", output.stderr);
        parts.iter().for_each(|part| assert!(output.stderr.contains(part), "{part} in {}", output.stderr));
        assert!(!case.0.path().join("mlp.dcc").exists());
    };
    let compile = "compile mlp.onnx --global-batch-size 8";
    check("[compile]\ntpp = 2", &[], compile, &["unknown key `tpp` of [compile]", "at   dcc.toml:2", "did you mean `tp`?"]);
    check("tp = \"many\"", &[], compile, &["invalid value 'many' for '--tp <N>'", "note --tp=many is from dcc.toml:1"]);
    check("tp = 0", &[], compile, &["--tp 0: an axis has at least one rank", "note --tp=0 is from dcc.toml:1"]);
    check("", &[("DCC_OPTIMIZER", "adamv")], compile, &["'adamv'", "adamw", "note --optimizer=adamv is from DCC_OPTIMIZER"]);
    check("[compile]\nmomentum = 0.9", &[], compile, &["--momentum does not belong", "note --momentum=0.9 is from dcc.toml:2"]);
    check("[run]\nsteps = 2\nepochs = 1", &[], "run mlp.onnx", &["cannot be used with", "dcc.toml:2", "dcc.toml:3"]);
    // Help, and pages of codes, do not read it.
    let case = Case::new("tpp = 2");
    assert!(case.dcc("", &[], "compile --help").ok().stdout.contains("--tp"));
    assert!(case.dcc("", &[], "explain DCC0001").ok().stdout.contains("DCC0001"));
    assert_eq!(case.dcc("", &[], "config show").code, Some(2));
    let output = case.dcc("", &[], "compile mlp.onnx --config absent.toml");
    assert!(output.code == Some(8) && output.stderr.contains("absent.toml"), "{output:?}");
    let output = Case::new("").dcc("", &[("DCC_STPES", "3")], "config show");
    assert!(output.stderr.contains("did you mean DCC_STEPS?"), "{output:?}");
}

#[test]
fn what_counts_is_shown_with_its_origin() {
    let case = Case::new(FILE);
    let shown = case.dcc("sub", &[("DCC_RUN_TP", "4"), ("DCC_FSDP", "1")], "config show run --origin").ok().stdout;
    for (key, value, origin) in [
        ("tp", "4", "DCC_RUN_TP"),
        ("fsdp", "true", "DCC_FSDP"),
        ("optimizer", "\"sgd\"", "../dcc.toml:7"),
        ("loss", "\"cross-entropy\"", "../dcc.toml:2"),
        ("lr", "1e-2", "../dcc.toml:12"),
        ("data", "[\"../data.npz\"]", "../dcc.toml:10"),
    ] {
        let line =
            shown.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap_or_else(|| panic!("{key} in {shown}"));
        assert!(line.starts_with(&format!("{key} = {value} ")) && line.ends_with(&format!("# {origin}")), "{line}");
    }
    assert!(!shown.contains("weight-decay"), "{shown}");
    let shown = case.dcc("", &[], "config show run --origin --all").ok().stdout;
    assert!(shown.contains("weight-decay = 0 ") && shown.contains("# default") && shown.contains("# not set"), "{shown}");
    // It is a file that says the same.
    let all = case.dcc("", &[], "config show --all").ok().stdout;
    put(&case.0, "dcc.toml", all.replace("fsdp = false\n", ""));
    assert_eq!(case.dcc("", &[], "config show --all").ok().stdout, all);
    let value = case.dcc("", &[], "config show compile --json").ok().json();
    let tp = value["options"].as_array().unwrap().iter().find(|option| option["key"] == "tp").expect("tp").clone();
    assert_eq!((&tp["values"][0], &tp["variable"], &value["schema"]), (&"2".into(), &"DCC_COMPILE_TP".into(), &1.into()));
}
