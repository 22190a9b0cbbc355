//! What a rank holds in memory, as its process reports it: the plan and little else.

use crate::command::{Folder, dcc};

/// Bytes beyond the plan: machine code, stacks, what is kept of the data, the allocator's slack.
const SLACK: u64 = 32 << 20;

/// The most that any rank holds beyond its plan and what it held when idle.
fn beyond(words: &str, ranks: usize) -> i64 {
    let folder = Folder::new();
    let words = words.split_whitespace().map(str::to_owned);
    let saving = ["--save-dir".to_owned(), folder.at("saved"), "--json".to_owned()];
    let summary = dcc(["run".to_owned()].into_iter().chain(words).chain(saving)).ok().json();
    let reports = summary["ranks"].as_array().expect("a report of each rank");
    assert_eq!(reports.len(), ranks);
    let excess = reports.iter().map(|report| {
        let number = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"));
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
