//! Whole training runs against PyTorch: every file of `tests/golden/numbers`, as processes, in f32 and f64, by the one table of
//! tolerances. Losses, gradient norms, learning rates and final parameters; runs with one setting off by 1 % must fall outside.

use crate::command::{Folder, Output, dcc};
use crate::tidy::root;
use crate::tolerance::{Row, Series, numbers, tensor_distance, units};
use dcc::import::proto::ModelProto;
use dcc_kernels::Isa;
use dcc_program::DType;
use dcc_runtime::data::{Convert, Files};
use prost::Message;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// How much of a golden the tests run, in which rows, on which mesh.
struct Case {
    name: &'static str,
    /// `None`: all, which `tests/long.sh` runs of every case.
    steps: Option<usize>,
    rows: &'static [Row],
    /// In `tests/long.sh`.
    long_rows: &'static [Row],
    mesh: &'static str,
    /// Whether its controls are trained too, or only their recorded losses compared; `tests/long.sh` trains all.
    controls: bool,
}

const ALL: Case = Case { name: "", steps: None, rows: &Row::ALL, long_rows: &Row::ALL, mesh: "", controls: false };

const F64: Case = Case { rows: &[Row::F64], ..ALL };

const MESH: Case = Case { long_rows: &[Row::F64], ..F64 };

const CASES: &[Case] = &[
    Case { name: "mlp_momentum", controls: true, ..ALL },
    Case { name: "mlp_nesterov", controls: true, ..ALL },
    Case { name: "mlp_adamw", controls: true, ..ALL },
    Case { name: "mlp_adam", controls: true, ..ALL },
    Case { name: "mlp_adagrad", controls: true, ..ALL },
    Case { name: "mlp_rmsprop", controls: true, ..ALL },
    Case { name: "mlp_lion", controls: true, ..ALL },
    Case { name: "mlp_lamb", controls: true, ..ALL },
    Case { name: "mlp_lamb", mesh: "--dp 2 --tp 2 --pp 2 --zero 3", ..MESH },
    Case { name: "mlp_adafactor", controls: true, ..ALL },
    Case { name: "mlp_adafactor", mesh: "--dp 2 --tp 2 --zero 1", ..MESH },
    Case { name: "mlp_muon", controls: true, ..ALL },
    Case { name: "mlp_muon", mesh: "--dp 2 --tp 2 --zero 2", ..MESH },
    Case { name: "gpt2_tiny_muon", steps: Some(6), ..F64 },
    Case { name: "mlp_legacy", ..ALL },
    // With dcc's masks.
    Case { name: "mlp_legacy_dropout", controls: true, ..ALL },
    Case { name: "mlp_legacy_dropout", mesh: "--dp 2 --tp 2 --grad-accum 2", ..MESH },
    Case { name: "mlp_smoothing", ..ALL },
    Case { name: "mlp_shares", controls: true, ..ALL },
    Case { name: "mlp_shares", mesh: "--dp 2 --tp 2 --pp 2 --grad-accum 2", ..MESH },
    Case { name: "mlp_sce", ..ALL },
    Case { name: "mlp_sce_legacy", ..ALL },
    Case { name: "mlp_nll", ..ALL },
    Case { name: "sample_mlp_momentum", ..ALL },
    Case { name: "sample_mlp_adamw", ..ALL },
    Case { name: "norm_mlp", controls: true, ..ALL },
    Case { name: "norm_mlp", mesh: "--dp 2 --tp 2 --pp 2", ..MESH },
    Case { name: "norm_mlp_frozen", controls: true, ..ALL },
    // Frozen, microbatches change nothing.
    Case { name: "norm_mlp_frozen", mesh: "--dp 2 --pp 2 --grad-accum 2", ..MESH },
    Case { name: "norm_mlp_legacy", ..ALL },
    Case { name: "norm_mlp_groups", ..ALL },
    Case { name: "norm_mlp_groups", mesh: "--dp 2 --pp 2", ..MESH },
    Case { name: "lstm", ..ALL },
    Case { name: "lstm", mesh: "--tp 2 --pp 2", ..MESH },
    Case { name: "lstm_legacy", ..ALL },
    Case { name: "gru_legacy", ..ALL },
    Case { name: "gru_legacy", mesh: "--dp 2 --grad-accum 2", ..MESH },
    Case { name: "gru", ..F64 },
    Case { name: "two_inputs_mse", ..ALL },
    Case { name: "two_inputs_l1", ..ALL },
    Case { name: "two_inputs_bce", controls: true, ..ALL },
    Case { name: "two_inputs_steps", ..ALL },
    Case { name: "cnn", controls: true, ..ALL },
    Case { name: "cnn_legacy", ..ALL },
    Case { name: "resnet", ..ALL },
    // Evaluation computes kernels and gains together: where their parameters train.
    Case { name: "resnet", mesh: "--pp 2", ..MESH },
    Case { name: "resnet_legacy", ..F64 },
    Case { name: "mobilenet", ..ALL },
    Case { name: "mobilenet_legacy", ..F64 },
    Case { name: "efficientnet", ..ALL },
    Case { name: "efficientnet_legacy", ..F64 },
    Case { name: "convnext", ..ALL },
    Case { name: "convnext_legacy", ..F64 },
    Case { name: "vit", ..ALL },
    Case { name: "vit_legacy", ..F64 },
    Case { name: "swin", ..ALL },
    Case { name: "swin_legacy", ..F64 },
    Case { name: "unet", ..ALL },
    Case { name: "unet_legacy", ..F64 },
    Case { name: "unet_shares", ..ALL },
    Case { name: "unet_shares", mesh: "--dp 2 --tp 2", ..MESH },
    Case { name: "autoencoder", ..ALL },
    Case { name: "autoencoder_legacy", ..F64 },
    Case { name: "moe", ..ALL },
    Case { name: "moe_legacy", ..F64 },
    Case { name: "moe", mesh: "--dp 2 --ep 2", ..MESH },
    Case { name: "gshard", ..ALL },
    Case { name: "gshard", mesh: "--ep 4 --zero 3 --grad-accum 2", ..MESH },
    Case { name: "gshard_legacy", ..F64 },
    Case { name: "gshard_legacy", mesh: "--ep 2 --pp 2", ..MESH },
    Case { name: "dlrm", ..ALL },
    Case { name: "dlrm_legacy", ..F64 },
    Case { name: "two_towers", ..ALL },
    Case { name: "two_towers_legacy", ..F64 },
    Case { name: "t5", ..F64 },
    Case { name: "t5_legacy", ..ALL },
    Case { name: "gpt2_tiny", controls: true, ..ALL },
    Case { name: "gpt2_tiny_opset20", ..ALL },
    Case { name: "gpt2_tiny_mask", ..ALL },
    Case { name: "gpt2_tiny_legacy", ..ALL },
    Case { name: "gpt2_tiny_next", ..ALL },
    Case { name: "gpt2_tiny_tokens", ..ALL },
    Case { name: "gpt2_50257", ..ALL },
    Case { name: "static_gpt", ..ALL },
    Case { name: "llama_tiny", ..ALL },
    Case { name: "llama_tiny_opset20", ..F64 },
    Case { name: "llama_tiny_opset18", ..F64 },
    Case { name: "bert_tiny", ..ALL },
    Case { name: "bert_tiny_opset20", ..F64 },
    Case { name: "bert_tiny_legacy", ..F64 },
    Case { name: "sample_gpt", steps: Some(3), rows: &[Row::F32], mesh: "--tp 2 --pp 2", ..ALL },
    Case { name: "sample_llama", steps: Some(3), rows: &[Row::F32], mesh: "--tp 2 --dp 2", ..ALL },
    // In f32, PyTorch's own distance from f64 grows to 5 % within these steps.
    Case { name: "sample_resnet", rows: &[Row::F64], long_rows: &[Row::F64], mesh: "--dp 2 --pp 2", ..ALL },
    Case { name: "sample_lstm", mesh: "--tp 2", ..ALL },
];

/// Stands for the model among flags.
const MODEL: &str = "MODEL";

/// Of `two_inputs`: the loss does not read them, so that an artifact does not have them.
const UNREAD: &str = "side.";

/// In generated code and in the library alike.
#[test]
fn lesser_instructions_train_the_same() {
    let distance = |case: &Case, changed: &[&str]| {
        let golden = case.golden();
        let changed: Vec<String> = changed.iter().map(|&word| word.to_owned()).collect();
        Series::of(&golden, "loss").distance(Row::F32, &case.run(&golden, Row::F32, &changed).column("loss"))
    };
    let (gpt, mlp) = (Case { name: "gpt2_tiny", steps: Some(3), ..ALL }, Case { name: "mlp_adamw", ..ALL });
    for isa in Isa::available() {
        for case in [&gpt, &mlp] {
            let found = distance(case, &["--max-isa", isa.name()]);
            assert!(found <= 1.0, "{} by {isa:?}: {found}", case.name);
        }
    }
    let rate = 1.01 * numbers(&mlp.golden()["lr"]).into_iter().fold(0.0, f64::max);
    let control = distance(&mlp, &["--max-isa", "baseline", "--lr", &rate.to_string()]);
    assert!(control > 1.0, "a rate 1 % off: {control}");
}

fn is_long() -> bool {
    std::env::var_os("DCC_LONG").is_some()
}

/// What a run gave.
struct Run {
    lines: Vec<Value>,
    /// Of all data after the last step, where the golden has it.
    eval_loss: Option<f64>,
    /// Final parameters, where they were saved.
    parameters: BTreeMap<String, Vec<f64>>,
}

impl Run {
    fn column(&self, key: &str) -> Vec<f64> {
        self.lines.iter().map(|line| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"))).collect()
    }
}

impl Case {
    fn golden(&self) -> Value {
        let path = root().join("tests/golden/numbers").join(format!("{}.json", self.name));
        serde_json::from_str(&std::fs::read_to_string(path).expect("a golden")).expect("JSON")
    }

    fn steps(&self) -> Option<usize> {
        self.steps.filter(|_| !is_long())
    }

    fn rows(&self) -> &'static [Row] {
        if is_long() { self.long_rows } else { self.rows }
    }

    fn trains_controls(&self) -> bool {
        self.controls || is_long() && self.mesh.is_empty()
    }

    fn is_whole(&self) -> bool {
        self.steps().is_none()
    }

    /// Trains with the golden's flags and `changed`, which replace those of the same names, `MODEL` the model.
    fn run(&self, golden: &Value, row: Row, changed: &[String]) -> Run {
        let folder = Folder::new();
        let texts = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).expect("flags") };
        let mut flags = texts(&golden["flags"]);
        for pair in changed.chunks(2) {
            if pair[0] == MODEL {
                flags[0].clone_from(&pair[1]);
                continue;
            }
            match flags.iter().position(|flag| *flag == pair[0]) {
                Some(at) => flags[at + 1].clone_from(&pair[1]),
                None => flags.extend_from_slice(pair),
            }
        }
        // The schedule is of the whole run: what is cut off is cut off by the rates.
        let (metrics, saved) = (folder.at("metrics.jsonl"), folder.at("saved"));
        if let Some(steps) = self.steps() {
            let rates: Vec<String> = numbers(&golden["lr"])[..steps].iter().map(f64::to_string).collect();
            std::fs::write(folder.at("rates"), rates.join("\n")).expect("a file");
            replace(&mut flags, "--steps", &steps.to_string());
            replace(&mut flags, "--lr-schedule", &format!("@{}", folder.at("rates")));
            ["--warmup", "--min-lr"].iter().for_each(|flag| remove(&mut flags, flag));
        }
        let mut words = vec!["run".to_owned()];
        words.extend(flags);
        words.extend(self.mesh.split_whitespace().map(str::to_owned));
        words.extend(["--metrics-file", &metrics, "--json"].map(str::to_owned));
        if row == Row::F64 {
            words.extend(["--dtype", "f64"].map(str::to_owned));
        }
        if self.is_whole() {
            words.extend(["--save-dir", &saved].map(str::to_owned));
        }
        if !golden["eval_loss"].is_null() {
            let data = words[1 + words.iter().position(|word| word == "--data").expect("data")].clone();
            words.extend(["--eval-data", &data, "--eval-every", "1000"].map(str::to_owned));
        }
        let output = dcc(&words).ok();
        nothing_is_interpreted(self.name, &output);
        let (evals, lines): (Vec<Value>, Vec<Value>) =
            folder.lines("metrics.jsonl").into_iter().partition(|line: &Value| !line["eval_loss"].is_null());
        let eval_loss = evals.last().and_then(|line| line["eval_loss"].as_f64());
        let parameters = if self.is_whole() { exported(&folder, &saved) } else { BTreeMap::new() };
        Run { lines, eval_loss, parameters }
    }
}

fn replace(flags: &mut [String], name: &str, value: &str) {
    let at = flags.iter().position(|flag| flag == name).expect("a flag of the golden");
    value.clone_into(&mut flags[at + 1]);
}

fn remove(flags: &mut Vec<String>, name: &str) {
    if let Some(at) = flags.iter().position(|flag| flag == name) {
        flags.drain(at..at + 2);
    }
}

/// Every operation of every rank is a generated kernel or one of the library.
fn nothing_is_interpreted(name: &str, output: &Output) {
    let summary = output.json();
    let ranks = summary["ranks"].as_array().expect("ranks");
    assert!(!ranks.is_empty(), "{name}: {summary}");
    for rank in ranks {
        let count = |key: &str| rank[key].as_u64().unwrap_or_else(|| panic!("{name}: {key} in {rank}"));
        assert!(count("interp") == 0 && count("jit") > 0 && count("library") > 0, "{name}: {rank}");
    }
}

/// All weights of a checkpoint by name.
pub fn exported(folder: &Folder, saved: &str) -> BTreeMap<String, Vec<f64>> {
    let path = folder.at("weights.safetensors");
    dcc(["export", saved, "--safetensors", &path]).ok();
    let files = Files::open(&[path.into()], &[]).expect("safetensors");
    let wide = |array: &dcc_runtime::data::Array| {
        let mut bytes = vec![0; array.bytes.len() / array.dtype.bytes() as usize * 8];
        Convert::new(array.dtype, DType::F64).run(&array.bytes, &mut bytes);
        let values = bytes.chunks_exact(8).map(|b| f64::from_ne_bytes(b.try_into().expect("eight bytes"))).collect();
        (array.name.clone(), values)
    };
    files.arrays.iter().map(wide).collect()
}

/// The largest distance of a run from the golden, with what it is of, in units of what the row allows.
fn distance(golden: &Value, row: Row, run: &Run) -> (f64, String) {
    let mut rates = 0.0_f64;
    for (found, exact) in run.column("lr").iter().zip(numbers(&golden["lr"])) {
        rates = rates.max(units((found - exact).abs(), Row::F64.allowed(exact, 0.0)));
    }
    let worst = distance_of_results(golden, row, run);
    if rates > worst.0 { (rates, "lr".to_owned()) } else { worst }
}

/// The same of all but the learning rates.
fn distance_of_results(golden: &Value, row: Row, run: &Run) -> (f64, String) {
    let mut worst = (0.0, "nothing".to_owned());
    let mut note = |found: f64, what: String| {
        if found > worst.0 {
            worst = (found, what);
        }
    };
    for key in ["loss", "grad_norm"] {
        note(Series::of(golden, key).distance(row, &run.column(key)), key.to_owned());
    }
    if let Some(exact) = golden["eval_loss"].as_f64() {
        let found = run.eval_loss.expect("evaluated after the last step");
        let torch_off = golden["eval_loss_f32"].as_f64().map_or(0.0, |rounded| (rounded - exact).abs());
        note(units((found - exact).abs(), row.allowed(exact, torch_off)), "eval_loss".to_owned());
    }
    for (name, summary) in golden["parameters"].as_object().expect("parameters") {
        match run.parameters.get(name) {
            Some(values) => note(tensor_distance(row, summary, values), name.clone()),
            None => assert!(run.parameters.is_empty() || name.starts_with(UNREAD), "no final `{name}`"),
        }
    }
    worst
}

/// All cases of a golden.
fn check(name: &str) {
    let cases: Vec<&Case> = CASES.iter().filter(|case| case.name == name).collect();
    assert!(!cases.is_empty(), "{name}");
    cases.into_iter().for_each(check_case);
}

fn check_case(case: &Case) {
    let (name, golden) = (case.name, case.golden());
    for &row in case.rows() {
        let run = case.run(&golden, row, &[]);
        let steps = case.steps().unwrap_or(numbers(&golden["lr"]).len());
        assert_eq!(run.lines.len(), steps, "{name}");
        let (found, what) = distance(&golden, row, &run);
        let (row, mesh) = (row.name(), case.mesh);
        println!("{name} {row} {mesh} {steps} steps: {found:.1e} of what is allowed, in {what}");
        assert!(found <= 1.0, "{name} {row} {mesh}: {found:.3e} times what is allowed, in {what}");
    }
    for control in golden["controls"].as_array().expect("controls") {
        let what = &control["changed"];
        let recorded = Series::of(&golden, "loss").distance(Row::F64, &numbers(&control["f64"]["loss"]));
        assert!(recorded > 1.0, "{name}: {what} would be accepted: {recorded:.1e}");
        let changed: Vec<String> = serde_json::from_value(control["flags"].clone()).expect("flags");
        if case.trains_controls() && !changed.is_empty() {
            check_control(case, &golden, control, &changed);
        }
    }
    if is_long() && case.trains_controls() && case.rows().contains(&Row::F32) {
        check_rate(case, &golden);
    }
}

/// A control is further off than is allowed, and is what PyTorch makes of it.
fn check_control(case: &Case, golden: &Value, control: &Value, changed: &[String]) {
    let (name, what) = (case.name, &control["changed"]);
    let run = case.run(golden, Row::F64, changed);
    let (found, _) = distance_of_results(golden, Row::F64, &run);
    let own = series_of(control).distance(Row::F64, &run.column("loss"));
    println!("{name} f64, {what}: {found:.1e} of what is allowed, {own:.1e} from PyTorch's");
    assert!(found > 1.0, "{name}: {what} is accepted");
    assert!(own <= 1.0, "{name}: {what} is not what PyTorch makes of it: {own:.1e}");
}

/// The f32 row is wider, but not as wide as a rate off by 1 %.
fn check_rate(case: &Case, golden: &Value) {
    let name = case.name;
    let flags: Vec<String> = serde_json::from_value(golden["flags"].clone()).expect("flags");
    let at = flags.iter().position(|flag| flag == "--lr").expect("a rate");
    let rate = flags[at + 1].parse::<f64>().expect("a number") * 1.01;
    let run = case.run(golden, Row::F32, &["--lr".to_owned(), rate.to_string()]);
    let (found, what) = distance_of_results(golden, Row::F32, &run);
    println!("{name} f32, lr x 1.01: {found:.1e} of what is allowed, in {what}");
    assert!(found > 1.0, "{name}: in f32, lr x 1.01 is accepted: {found:.1e}");
}

/// Controls that are no flag: the model with one kind of attribute off by 1 %.
#[test]
fn attributes_off_by_one_percent_are_seen() {
    let cases = [
        ("norm_mlp", "epsilon", "epsilon of the norms x 1.01"),
        ("convnext", "epsilon", "epsilon of the norms x 1.01"),
        ("gpt2_tiny", "scale", "scale of attention x 1.01"),
    ];
    for (name, attribute, what) in cases {
        let case = CASES.iter().find(|case| case.name == name).expect("a case");
        let golden = case.golden();
        let folder = Folder::new();
        let path = folder.at("model.onnx");
        std::fs::write(&path, changed_model(golden["flags"][0].as_str().expect("a model"), attribute)).expect("a file");
        let control = golden["controls"].as_array().expect("controls").iter().find(|c| c["changed"] == what).expect("recorded");
        check_control(case, &golden, control, &[MODEL.to_owned(), path]);
    }
}

/// A model whose attributes of this name are 1 % larger.
fn changed_model(path: &str, attribute: &str) -> Vec<u8> {
    let bytes = std::fs::read(root().join(path)).expect("a model");
    let mut model = ModelProto::decode(&bytes[..]).expect("ONNX");
    let nodes = &mut model.graph.as_mut().expect("a graph").node;
    let mut found = nodes.iter_mut().flat_map(|node| &mut node.attribute).filter(|a| a.name() == attribute).peekable();
    assert!(found.peek().is_some(), "{path} has no {attribute}");
    found.for_each(|attribute| attribute.f = Some((f64::from(attribute.f()) * 1.01) as f32));
    model.encode_to_vec()
}

/// Statistics of what a rank holds of a microbatch are those of as many groups of the batch.
#[test]
fn local_statistics_are_those_of_groups() {
    let case = Case { name: "norm_mlp_groups", ..F64 };
    let mut golden = case.golden();
    let flags = golden["flags"].as_array_mut().expect("flags");
    for flag in ["--bn-groups", "--grad-accum"] {
        let at = flags.iter().position(|f| f == flag).expect("of the golden");
        flags.drain(at..at + 2);
    }
    flags.extend(["--batch-norm", "local"].map(Value::from));
    for (mesh, is_near) in [("--grad-accum 2", true), ("--dp 2 --grad-accum 1", true), ("--grad-accum 1", false)] {
        let run = Case { name: case.name, mesh, ..F64 }.run(&golden, Row::F64, &[]);
        let (found, what) = distance(&golden, Row::F64, &run);
        assert_eq!(found <= 1.0, is_near, "{mesh}: {found:.1e} times what is allowed, in {what}");
    }
}

/// The projections of `tolerance` look at every element; goldens of models up to 1 M parameters have them.
#[test]
fn every_element_of_the_families_is_compared() {
    for name in FAMILIES {
        let golden = Case { name, ..F64 }.golden();
        for (parameter, summary) in golden["parameters"].as_object().expect("parameters") {
            assert!(summary["f64"]["projections"].is_array(), "{name}: {parameter}");
        }
    }
}

/// A control's losses as a series of their own.
fn series_of(control: &Value) -> Series {
    let both = serde_json::json!({ "f32": control["f64"], "f64": control["f64"] });
    Series::of(&both, "loss")
}

#[test]
fn every_golden_has_a_case() {
    let folder = std::fs::read_dir(root().join("tests/golden/numbers")).expect("a folder");
    let names: BTreeSet<String> =
        folder.map(|entry| entry.expect("an entry").file_name().to_string_lossy().replace(".json", "")).collect();
    let cases: BTreeSet<String> = CASES.iter().map(|case| case.name.to_owned()).collect();
    assert_eq!(names, cases);
}

#[test]
fn mlps_train_as_in_torch() {
    CASES.iter().filter(|case| case.name.contains("mlp")).for_each(check_case);
}

#[test]
fn recurrent_layers_train_as_in_torch() {
    ["lstm", "lstm_legacy", "gru", "gru_legacy"].into_iter().for_each(check);
}

#[test]
fn cnns_train_as_in_torch() {
    CASES.iter().filter(|case| case.name.starts_with("cnn")).for_each(|case| check(case.name));
}

#[test]
fn convolutional_families_train_as_in_torch() {
    ["resnet", "resnet_legacy", "mobilenet", "efficientnet", "unet", "unet_legacy", "unet_shares", "autoencoder"]
        .into_iter()
        .for_each(check);
}

#[test]
fn convolutional_families_of_the_older_exporter_train_as_in_torch() {
    ["mobilenet_legacy", "efficientnet_legacy", "autoencoder_legacy"].into_iter().for_each(check);
}

#[test]
fn vision_transformers_train_as_in_torch() {
    ["convnext", "convnext_legacy", "vit", "vit_legacy", "swin", "swin_legacy"].into_iter().for_each(check);
}

#[test]
fn experts_tables_towers_and_t5_train_as_in_torch() {
    let names = [
        "moe",
        "moe_legacy",
        "gshard",
        "gshard_legacy",
        "dlrm",
        "dlrm_legacy",
        "two_towers",
        "two_towers_legacy",
        "t5",
        "t5_legacy",
    ];
    names.into_iter().for_each(check);
}

/// Of which `cargo test` takes one for each family, `tests/long.sh` all.
const MESHES: [&str; 5] = ["--dp 2 --tp 2", "--tp 2 --pp 2", "--dp 2", "--tp 2", "--pp 2"];

/// Where each sample meets each other: stages without microbatches.
const WHOLE_BATCH: [&str; 5] = ["--dp 2 --tp 2", "--tp 2 --pp 2 --grad-accum 1", "--dp 2", "--tp 2", "--pp 2 --grad-accum 1"];

const FAMILIES: [&str; 18] = [
    "resnet",
    "mobilenet",
    "efficientnet",
    "convnext",
    "vit",
    "swin",
    "unet",
    "autoencoder",
    "moe",
    "gshard",
    "dlrm",
    "llama_tiny_opset18",
    "t5_legacy",
    "lstm",
    "gru_legacy",
    "bert_tiny",
    "two_towers",
    "llama_tiny_opset20",
];

#[test]
fn families_on_meshes_train_as_in_torch() {
    for (at, name) in FAMILIES.into_iter().enumerate() {
        let meshes = if name == "two_towers" { WHOLE_BATCH } else { MESHES };
        let meshes = if is_long() { &meshes[..] } else { &meshes[at % MESHES.len()..][..1] };
        for mesh in meshes {
            check_case(&Case { name, mesh, ..MESH });
        }
    }
    check_case(&Case { name: "two_towers", mesh: "--tp 2 --pp 2 --grad-accum 1", ..MESH });
    // The decoder's bias reaches one stage, what its gradient is chosen against belongs to the other.
    check_case(&Case { name: "t5_legacy", mesh: "--pp 2 --grad-accum 1", ..MESH });
}

#[test]
fn two_inputs_train_as_in_torch() {
    CASES.iter().filter(|case| case.name.starts_with("two_inputs")).for_each(check_case);
}

#[test]
fn gpt2_trains_as_in_torch() {
    ["gpt2_tiny", "gpt2_tiny_mask", "gpt2_tiny_next", "static_gpt"].into_iter().for_each(check);
}

#[test]
fn gpt2_of_other_exporters_trains_as_in_torch() {
    ["gpt2_tiny_legacy", "gpt2_tiny_opset20", "gpt2_tiny_tokens"].into_iter().for_each(check);
}

#[test]
fn llama_and_bert_train_as_in_torch() {
    ["llama_tiny", "llama_tiny_opset20", "llama_tiny_opset18"].into_iter().for_each(check);
    ["bert_tiny", "bert_tiny_opset20", "bert_tiny_legacy"].into_iter().for_each(check);
}

#[test]
fn gpt2_with_50257_words_trains_as_in_torch() {
    check("gpt2_50257");
}

#[test]
fn language_samples_on_four_ranks_train_as_in_torch() {
    check("sample_gpt");
    check("sample_llama");
}

#[test]
fn the_small_samples_train_as_in_torch() {
    check("sample_resnet");
    check("sample_lstm");
}
