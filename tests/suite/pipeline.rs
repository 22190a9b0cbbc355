//! Pipelines as processes: ranks that are processes of their own, stages that compute at the same time, and other models' first
//! run on a mesh of eight.

use crate::command::{Folder, dcc};
use dcc::plan::Schedule;
use dcc::schedule::{self, Costs, PartCost, Rule};
use dcc_program::program::SectionKind;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Microseconds from and to.
type Span = (f64, f64);

/// What the ranks of a trace computed in their forward and backward sections.
struct Passes {
    /// By rank: busy spans, ascending.
    busy: BTreeMap<u64, Vec<Span>>,
    /// By rank: microseconds of forward and of backward, all microbatches of all steps.
    time: BTreeMap<u64, [f64; 2]>,
}

impl Passes {
    fn of(trace: &Value) -> Passes {
        let mut passes = Passes { busy: BTreeMap::new(), time: BTreeMap::new() };
        for event in trace["traceEvents"].as_array().expect("events") {
            let name = event["name"].as_str().expect("a name");
            let section = ["forward", "backward"].iter().position(|s| name.starts_with(s));
            let (Some(section), Some(0), Some("X")) = (section, event["tid"].as_u64(), event["ph"].as_str()) else { continue };
            let rank = event["pid"].as_u64().expect("a rank");
            let number = |key: &str| event[key].as_f64().expect("a number");
            let span = (number("ts"), number("ts") + number("dur"));
            passes.busy.entry(rank).or_default().push(span);
            passes.time.entry(rank).or_default()[section] += span.1 - span.0;
        }
        passes.busy.values_mut().for_each(|spans| spans.sort_by(|a, b| a.0.total_cmp(&b.0)));
        passes
    }

    /// Microseconds in which two stages compute at once.
    fn overlap(&self) -> f64 {
        let spans: Vec<&Vec<Span>> = self.busy.values().collect();
        common(spans[0], spans[1])
    }

    /// What that would be if no stage ever waited longer than its schedule makes it, given how long the passes took.
    fn ideal(&self, schedule: Schedule, microbatches: u32, steps: u32) -> f64 {
        let runs = f64::from(microbatches * steps);
        let parts: Vec<PartCost> = self.time.values().map(|time| PartCost::whole(time[0] / runs, time[1] / runs)).collect();
        let stages = parts.len();
        let order = schedule::rule(schedule, 1).order(stages as u32, microbatches).expect("an order");
        let costs = Costs { parts, transfers: vec![0.0; stages - 1] };
        let timeline = schedule::simulate(&order, &costs).expect("it runs");
        let spans = |stage: usize| timeline.events[stage].iter().map(|p| (p.start, p.end)).collect::<Vec<_>>();
        f64::from(steps) * common(&spans(0), &spans(1))
    }
}

/// The length of what two ascending lists of spans have in common.
fn common(a: &[Span], b: &[Span]) -> f64 {
    let (mut i, mut j, mut sum) = (0, 0, 0.0);
    while i < a.len() && j < b.len() {
        sum += (a[i].1.min(b[j].1) - a[i].0.max(b[j].0)).max(0.0);
        if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
    }
    sum
}

fn event(rank: u64, stream: u64, name: &str, from: f64, to: f64) -> Value {
    serde_json::json!({ "ph": "X", "pid": rank, "tid": stream, "name": name, "ts": from, "dur": to - from })
}

/// Two stages, two microbatches, forward 1 and backward 2 long: 1F1B has both busy for 5 of 9.
#[test]
fn overlap_is_measured_against_the_schedule() {
    let stage0 = [("forward: a", 0.0, 1.0), ("forward: a", 1.0, 2.0), ("backward: b", 4.0, 6.0), ("backward: b", 7.0, 9.0)];
    let stage1 = [("forward: a", 1.0, 2.0), ("backward: b", 2.0, 4.0), ("forward: a", 4.0, 5.0), ("backward: b", 5.0, 7.0)];
    let events = |rank: u64, all: &[(&str, f64, f64)]| all.iter().map(|e| event(rank, 0, e.0, e.1, e.2)).collect::<Vec<_>>();
    let mut all = events(0, &stage0);
    all.extend(events(1, &stage1));
    // Neither waiting nor the update counts.
    all.extend([event(0, 1, "forward: wait", 2.0, 4.0), event(1, 0, "update: adamw", 7.0, 9.0)]);
    let passes = Passes::of(&serde_json::json!({ "traceEvents": all }));
    assert_eq!(passes.overlap(), 3.0);
    assert_eq!(passes.ideal(Schedule::OneFOneB, 2, 1), 3.0);
    assert_eq!(passes.ideal(Schedule::GPipe, 1, 1), 0.0);
}

/// Trains `model` for `steps` steps and reads its trace and summary.
fn traced(words: &[&str]) -> (Value, Value) {
    let folder = Folder::new();
    let trace = folder.at("trace.json");
    let mut all = vec!["run"];
    all.extend(words);
    all.extend(["--json", "--trace", &trace]);
    let summary = dcc(&all).ok().json();
    let text = std::fs::read_to_string(&trace).expect("a trace");
    (serde_json::from_str(&text).expect("JSON"), summary)
}

const GPT: [&str; 8] =
    ["tests/models/static_gpt.onnx", "--data", "tests/models/data/gpt2_tiny.npz", "--init", "1", "--seed", "3", "--threads=1"];

/// Every rank is a process, and every stage passes on each microbatch once forward and once backward.
#[test]
fn stages_are_processes_that_send_every_microbatch() {
    let words = [&GPT[..], &["--tp", "2", "--pp", "2", "--grad-accum", "4", "--steps", "2"]].concat();
    let (trace, summary) = traced(&words);
    let ranks = summary["ranks"].as_array().expect("ranks");
    let pids: BTreeSet<u64> = ranks.iter().map(|rank| rank["pid"].as_u64().expect("a pid")).collect();
    assert!(pids.len() == 4 && !pids.contains(&u64::from(std::process::id())), "{pids:?}");
    let mut sends: BTreeMap<(u64, SectionKind), usize> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events") {
        let name = event["name"].as_str().expect("a name");
        for kind in [SectionKind::Forward, SectionKind::Backward] {
            if name.starts_with(kind.name()) && name.contains("start") && name.contains("send") {
                *sends.entry((event["pid"].as_u64().expect("a rank"), kind)).or_default() += 1;
            }
        }
    }
    let stage = |rank: &Value| rank["stage"].as_u64().expect("a stage");
    let due = ranks.iter().map(|rank| {
        let kind = if stage(rank) == 0 { SectionKind::Forward } else { SectionKind::Backward };
        ((rank["rank"].as_u64().expect("a rank"), kind), 8)
    });
    assert_eq!(sends, due.collect());
}

/// Time on the wall, so only in `tests/long.sh`: at two stages both compute at once for most of what the schedule allows; with one
/// microbatch they never do.
#[test]
fn stages_compute_at_once() {
    if std::env::var_os("DCC_LONG").is_none() {
        return;
    }
    let gpt = ["samples/gpt/model.onnx", "--data", "samples/gpt/tokens.npy", "--init", "1", "--threads", "1", "--pp", "2"];
    let passes = |more: &[&str]| {
        let words = [&gpt[..], &["--global-batch-size", "8", "--steps", "6"], more].concat();
        Passes::of(&traced(&words).0)
    };
    for (schedule, name) in [(Schedule::OneFOneB, "1f1b"), (Schedule::GPipe, "gpipe")] {
        let found = passes(&["--grad-accum", "8", "--schedule", name]);
        let (overlap, ideal) = (found.overlap(), found.ideal(schedule, 8, 6));
        println!(
            "{name}, 8 microbatches: both stages compute for {:.1} ms of {:.1} ms, {:.0} % of the ideal",
            overlap / 1e3,
            ideal / 1e3,
            100.0 * overlap / ideal
        );
        assert!(overlap >= 0.6 * ideal, "{name}: {overlap} of {ideal} µs");
    }
    let found = passes(&["--grad-accum", "1", "--schedule", "gpipe"]);
    // What a stage still does after it has sent: gradients of its weights.
    let busy: f64 = found.time.values().flatten().sum();
    println!("gpipe, 1 microbatch: {:.1} ms of {:.1} ms", found.overlap() / 1e3, busy / 1e3);
    assert!(found.overlap() <= 0.05 * busy, "the control: {} of {busy} µs", found.overlap());
}

/// What `inspect` shows is the order of the schedule, when its passes run, and the bytes that are planned.
#[test]
fn a_step_is_shown_as_it_is_simulated() {
    let folder = Folder::new();
    let [artifact, svg] = ["model.dcc", "step.svg"].map(|name| folder.at(name));
    let words = ["--pp", "2", "--grad-accum", "4", "--schedule", "zb-h1"];
    dcc([&["compile", GPT[0], "-o", &artifact], &words[..]].concat()).ok();
    let shown = dcc(["inspect", &artifact, "--timeline", "--json", "--svg", &svg]).ok().json();
    let programs = dcc(["inspect", &artifact, "--json"]).ok().json();
    let due = Rule::ZbH1.order(2, 4).expect("an order").text();
    let mut passes = 0;
    for (index, line) in due.lines().enumerate() {
        let stage = &shown["stages"][index];
        let events = stage["passes"].as_array().expect("passes");
        let names: Vec<&str> = events.iter().map(|event| event["pass"].as_str().expect("a name")).collect();
        assert_eq!(names.join(" "), line);
        let time = |event: &Value, key: &str| event[key].as_f64().expect("seconds");
        assert!(events.windows(2).all(|pair| time(&pair[0], "end") <= time(&pair[1], "start")), "{events:?}");
        assert!(time(stage, "busy") <= time(&shown, "seconds"));
        let memory = &programs["train"][index]["memory"];
        assert_eq!([&stage["planned_bytes"], &stage["activation_bytes"]], [&memory["peak"], &memory["activations"]]);
        passes += events.len();
    }
    let drawn = std::fs::read_to_string(&svg).expect("a drawing");
    assert!(drawn.starts_with("<svg") && drawn.matches("<title>").count() == passes, "{passes} passes: {drawn}");
    let text = dcc(["inspect", &artifact, "--timeline"]).ok().stdout;
    let words = ["2 stages, 4 microbatches", "stage 1  ", "F0", "W", "bubble", "first start", "planned"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

/// The planner's choice beside the others, each compiled: Megatron's column of the first weight of an MLP, which costs least.
#[test]
fn a_sharding_is_told_with_what_others_would_cost() {
    let folder = Folder::new();
    let (artifact, model, name) = (folder.at("model.dcc"), "tests/models/gpt2_tiny.onnx", "transformer.h.0.mlp.c_fc.weight");
    dcc(["compile", model, "-o", &artifact, "--global-batch-size", "8", "--grad-accum", "2", "--tp", "2"]).ok();
    let shown = dcc(["inspect", &artifact, "--why", name, "--model", model, "--json"]).ok().json();
    let ways = shown["shardings"].as_array().expect("shardings");
    let names: Vec<&str> = ways.iter().map(|way| way["sharding"].as_str().expect("a name")).collect();
    assert_eq!(names, ["Replicate", "Shard(0)@tp", "Shard(1)@tp"]);
    let chosen: Vec<bool> = ways.iter().map(|way| way["chosen"] == true).collect();
    assert_eq!(chosen, [false, false, true]);
    let number = |way: &Value, key: &str| way[key].as_f64().expect("a number");
    for other in &ways[..2] {
        assert!(number(other, "memory") > number(&ways[2], "memory"), "{other}");
        assert!(number(other, "busy") > number(&ways[2], "busy"), "{other}");
        assert!(number(other, "traffic") > number(&ways[2], "traffic"), "{other}");
    }
    let text = dcc(["inspect", &artifact, "--why", name, "--model", model]).ok().stdout;
    let words = ["stage 0: f32[", "/tp]", "forward: ", "backward: ", "update: ", "as it is", "Replicate", "+"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    // A tied weight, by its second name.
    let tied = dcc(["inspect", &artifact, "--why", "transformer.wte.weight", "--model", model]).ok().stdout;
    assert!(tied.starts_with("lm_head.weight, also transformer.wte.weight\n"), "{tied}");
    let typo = dcc(["inspect", &artifact, "--why", "transformer.h.0.mlp.c_fc.wieght", "--model", model]);
    assert!(typo.code == Some(2) && typo.stderr.contains(&format!("did you mean `{name}`?")), "{}", typo.stderr);
}

/// The mission's command: no flag but the mesh, then eight processes train.
#[test]
fn other_models_train_on_eight_ranks() {
    for model in ["static_gpt", "static_mixer", "static_bert_classifier", "static_neox"] {
        let folder = Folder::new();
        let (path, artifact) = (format!("tests/models/{model}.onnx"), folder.at("model.dcc"));
        dcc(["compile", &path, "-o", &artifact, "--tp", "4", "--pp", "2"]).ok();
        let data = folder.at("data");
        write_data(model, &data);
        let metrics = folder.at("metrics.jsonl");
        let words = ["run", &artifact, "--data", &data, "--init", "1", "--steps", "3", "--json", "--metrics-file", &metrics];
        let summary = dcc(words).ok().json();
        let ranks = summary["ranks"].as_array().expect("ranks");
        let pids: BTreeSet<u64> = ranks.iter().map(|rank| rank["pid"].as_u64().expect("a pid")).collect();
        assert_eq!(pids.len(), 8, "{model}");
        let losses: Vec<f64> = folder.lines("metrics.jsonl").iter().map(|l| l["loss"].as_f64().expect("a loss")).collect();
        assert!(losses.len() == 3 && losses.iter().all(|loss| loss.is_finite()), "{model}: {losses:?}");
        assert!(losses[2] < losses[0], "{model} learns: {losses:?}");
    }
}

/// Eight samples of what the model reads, the same for every step, so that the loss must fall: a folder with a `.npy` per input.
fn write_data(model: &str, folder: &str) {
    std::fs::create_dir(folder).expect("a folder");
    let array = |name: &str, dtype: &str, shape: &str, bytes: Vec<u8>| {
        let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
        let width = (10 + header.len() + 1).next_multiple_of(64) - 10;
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((width as u16).to_le_bytes());
        file.extend(format!("{header:<0$}\n", width - 1).bytes());
        file.extend(bytes);
        std::fs::write(format!("{folder}/{name}.npy"), file).expect("a file");
    };
    let integers = |name: &str, shape: &str, count: i64, of: &dyn Fn(i64) -> i64| {
        array(name, "<i8", shape, (0..count).flat_map(|i| of(i).to_le_bytes()).collect());
    };
    let words = |i: i64| i * i * 7 % 31;
    match model {
        "static_gpt" => integers("input_ids", "(8, 16)", 128, &words),
        "static_neox" => integers("input_ids", "(8, 12)", 96, &words),
        "static_bert_classifier" => {
            integers("input_ids", "(8, 12)", 96, &words);
            integers("attention_mask", "(8, 12)", 96, &|_| 1);
            integers("labels", "(8,)", 8, &|i| i % 3);
        }
        _ => {
            integers("labels", "(8,)", 8, &|i| i % 7);
            let value = |i: i32| ((i * i % 97) as f32 - 48.0) / 48.0;
            array("patches", "<f4", "(8, 10, 12)", (0..960).flat_map(|i| value(i).to_le_bytes()).collect());
        }
    }
}
