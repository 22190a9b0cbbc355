//! What a rank holds in memory, as its process reports it: the plan and little else.

use crate::alloc::npy;
use crate::command::{Folder, dcc};
use crate::onnx_model::{external, model, node, size, value, with_tensor};
use prost::Message;
use serde_json::Value;

/// Bytes beyond the plan: machine code, stacks, what is kept of the data, the allocator's slack.
const SLACK: u64 = 32 << 20;

fn number(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"))
}

/// The most that any rank holds beyond its plan and what it held when idle.
fn beyond(words: &str, ranks: usize) -> i64 {
    let folder = Folder::new();
    let words = words.split_whitespace().map(str::to_owned);
    let saving = ["--save-dir".to_owned(), folder.at("saved"), "--json".to_owned()];
    let summary = dcc(["run".to_owned()].into_iter().chain(words).chain(saving)).ok().json();
    let reports = summary["ranks"].as_array().expect("a report of each rank");
    assert_eq!(reports.len(), ranks);
    let excess = reports.iter().map(|report| {
        let number = |key: &str| number(report, key);
        let (held, planned) = (number("resident_bytes") - number("idle_bytes"), number("planned_bytes"));
        assert!(held >= number("parameter_bytes"), "a rank holds at least its parameters: {report}");
        assert!(held <= planned + SLACK, "{report}");
        held as i64 - planned as i64
    });
    excess.max().expect("a rank")
}

fn print(what: &str, beyond: i64) {
    println!("{what}: resident - idle - planned is at most {:.1} MiB on any rank", beyond as f64 / f64::from(1 << 20));
}

#[test]
fn ranks_of_the_gpt_sample_hold_what_is_planned() {
    let run = "samples/gpt/model.onnx --data samples/gpt/tokens.npy --init 1 --steps 2 --grad-clip 1 --weight-decay 0.1";
    print("GPT sample, tp 2 x pp 2", beyond(&format!("{run} --tp 2 --pp 2 --global-batch-size 4"), 4));
    let eval = "--eval-data samples/gpt/eval.npy --eval-every 100 --steps 1";
    print("GPT sample, one device", beyond(&format!("{} --global-batch-size 2 {eval}", run.replace("--steps 2", "")), 1));
}

#[test]
fn ranks_of_the_mlp_sample_hold_what_is_planned() {
    let run = "samples/mlp/model.onnx --data samples/mlp/digits.npz --init 1 --steps 3 --global-batch-size 64";
    print("MLP sample, dp 2 x tp 2", beyond(&format!("{run} --dp 2 --tp 2"), 4));
    print("MLP sample, one device, f64", beyond(&format!("{run} --dtype f64"), 1));
}

/// Bytes of a rank, the mean over ranks.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Weights and optimizer state, where they were loaded.
    parameters: f64,
    /// What the arena has for them, and for gradients that microbatches add up in.
    states: f64,
    /// What the arena has for all else.
    temporary: f64,
    /// Resident set, less what it was before anything was loaded.
    resident: f64,
}

const WIDTH: i64 = 2048;
const RANKS: f64 = 4.0;

/// Two steps of a chain of square products on four data-parallel ranks, of two microbatches of a sample each.
fn chain(folder: &Folder, layers: u64, zero: usize) -> Held {
    let name = |n: u64| format!("h{n}");
    let nodes = (0..layers).map(|n| node("MatMul", &[&name(n), &format!("w{n}")], &[&name(n + 1)]));
    let mut chain = model(&nodes.collect::<Vec<_>>());
    let graph = chain.graph.as_mut().expect("a graph");
    graph.input = vec![value(&name(0), &[size(8), size(WIDTH)])];
    graph.output = vec![value(&name(layers), &[])];
    let chain = (0..layers).fold(chain, |chain, n| with_tensor(chain, external(&format!("w{n}"), &[WIDTH; 2], "weights")));
    std::fs::write(folder.at("chain.onnx"), chain.encode_to_vec()).expect("a file");
    let data = folder.path().join("data");
    std::fs::create_dir_all(&data).expect("a folder");
    for file in ["h0.npy", "target.npy"] {
        npy(&data.join(file), &[16, WIDTH as u64]);
    }
    let words = "--loss mse --optimizer adam --init 1 --steps 2 --dp 4 --grad-accum 2 --threads 1 --json";
    let words = format!("run {} --data {} {words} --zero {zero}", folder.at("chain.onnx"), data.display());
    let summary = dcc(words.split_whitespace()).ok().json();
    let ranks = summary["ranks"].as_array().expect("a report of each rank");
    assert_eq!(ranks.len() as f64, RANKS);
    let mean = |of: &dyn Fn(&Value) -> u64| ranks.iter().map(of).sum::<u64>() as f64 / RANKS;
    Held {
        parameters: mean(&|rank| number(rank, "parameter_bytes")),
        states: mean(&|rank| number(rank, "persistent_bytes")),
        temporary: mean(&|rank| number(rank, "planned_bytes") - number(rank, "persistent_bytes")),
        resident: mean(&|rank| number(rank, "resident_bytes") - number(rank, "idle_bytes")),
    }
}

/// f32 Adam, rows of table 1 of arXiv 1910.02054: 16, 4 + 4 + 8/N, 4 + 12/N and 16/N bytes for each parameter, of what the runtime maps and
/// of what is resident besides buffers that hold no state. From a chain to a longer one, so that what both have alike is left out: machine
/// code, and the layers that are gathered at a time. Gradients wait for the second microbatch. Where ranks sum them whole, there is a shard
/// of each beside it for a while, in memory that activations, of which there are none to speak of here, have had before.
#[test]
fn a_parameter_takes_what_the_paper_says() {
    let folder = Folder::new();
    let due = [16.0, 8.0 + 8.0 / RANKS, 4.0 + 12.0 / RANKS, 16.0 / RANKS];
    let kept = [12.0, 4.0 + 8.0 / RANKS, 4.0 + 8.0 / RANKS, 12.0 / RANKS];
    let shards = [4.0 / RANKS, 4.0 / RANKS, 0.0, 0.0];
    for zero in 0..due.len() {
        // Layers of about the same bytes, in which what else a layer takes does not count.
        let longer = (48.0 / due[zero]) as u64;
        let psi = (longer * (WIDTH * WIDTH) as u64) as f64;
        let [few, many] = [4, 4 + longer].map(|layers| chain(&folder, layers, zero));
        let more = |of: fn(&Held) -> f64| (of(&many) - of(&few)) / psi;
        let (states, temporary) = (more(|held| held.states), more(|held| held.temporary));
        let resident = more(|held| held.resident - held.temporary);
        println!("--zero {zero}: {states:.3} bytes mapped, {resident:.3} resident, {} due; {temporary:.3} besides", due[zero]);
        assert_eq!(more(|held| held.parameters), kept[zero], "--zero {zero}: bytes of weights and optimizer state");
        assert!(temporary < shards[zero] + 0.04, "--zero {zero}: {temporary} bytes that hold no state");
        for (found, what) in [(states, "mapped"), (resident, "resident")] {
            let off = |due: f64| (found / due - 1.0).abs();
            assert!(off(due[zero]) < 0.01, "--zero {zero}: {found:.4} bytes {what} where {} are due", due[zero]);
            // A control: no other stage's formula.
            let others = (0..due.len()).filter(|&other| other != zero);
            others.for_each(|other| assert!(off(due[other]) > 0.1, "{found:.4} bytes {what} are as due of --zero {other}"));
        }
    }
}
