//! `dcc-run` on real processes: the numbers of threads, checkpoints, stopping, failures, exit codes.
#![cfg(target_os = "linux")]

use dcc_program::artifact::{Artifact, Data, Tensor};
use dcc_program::manifest::{self, Manifest};
use dcc_program::program::{ParamKind, Program};
use dcc_program::text::parse;
use dcc_runtime::launch::Message;
use dcc_runtime::metrics::StepRecord;
use dcc_runtime::run::{self, Flags, Job, Source};
use npyz::WriterBuilder;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const MLP: &[&str] = &[include_str!("../program/tests/programs/mlp_tp2.txt")];
const PIPE: &[&str] =
    &[include_str!("../program/tests/programs/pipe_stage0.txt"), include_str!("../program/tests/programs/pipe_stage1.txt")];

/// A folder with an artifact and data, removed when dropped.
struct Case {
    folder: PathBuf,
}

impl Drop for Case {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Case {
    fn new(name: &str, texts: &[&str]) -> Case {
        let folder = std::env::temp_dir().join(format!("dcc-run-{name}-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("data")).unwrap();
        let train: Vec<Program> = texts.iter().map(|text| parse(text).unwrap()).collect();
        let input = || manifest::Input { batch_dim: Some(0), ..manifest::Input::default() };
        let inputs = ["x", "target"].map(|name| (name.to_owned(), input())).into();
        let options = Manifest { inputs, ..Manifest::default() }.to_options();
        let artifact = Artifact { tensors: tensors(&train), train, options, ..Artifact::default() };
        artifact.write(&mut std::fs::File::create(folder.join("model.dcc")).unwrap()).unwrap();
        npy(&folder.join("data/x.npy"), &[64, 4]);
        npy(&folder.join("data/target.npy"), &[64, 3]);
        Case { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn command(&self, flags: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dcc-run"));
        command.arg(self.path("model.dcc")).arg("--data").arg(self.path("data"));
        command.args(flags.split_ascii_whitespace()).current_dir(&self.folder);
        command
    }

    fn run(&self, flags: &str) -> Output {
        self.command(flags).output().unwrap()
    }

    fn metrics(&self, name: &str) -> Vec<StepRecord> {
        let text = std::fs::read_to_string(self.path(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Step and bits of the loss.
    fn losses(&self, name: &str) -> Vec<(u64, u64)> {
        self.metrics(name).iter().map(|record| (record.step, record.loss.to_bits())).collect()
    }
}

fn tensors(programs: &[Program]) -> Vec<Tensor> {
    let weights = programs.iter().flat_map(|p| p.params.iter().map(move |param| (param, p.ty(param.buffer))));
    let weights = weights.filter(|(param, _)| param.kind == ParamKind::Weight);
    let tensor = |(param, ty): (&dcc_program::program::Param, &dcc_program::TensorType)| Tensor {
        name: param.name.clone(),
        dtype: ty.dtype,
        shape: ty.shape.clone(),
        data: Data::Absent,
    };
    weights.map(tensor).collect()
}

/// Numbers in [-1, 1) that look random, f32.
fn npy(path: &Path, shape: &[u64]) {
    let file = std::fs::File::create(path).unwrap();
    let mut writer = npyz::WriteOptions::new().default_dtype().shape(shape).writer(file).begin_nd().unwrap();
    let value = |i: u64| (((i + 7) * 2_654_435_761 % 2001) as f64 / 1000.5 - 1.0) as f32;
    writer.extend((0..shape.iter().product()).map(value)).unwrap();
    writer.finish().unwrap();
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeed(output: &Output) {
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(output));
}

/// Losses of ranks that are threads of this process.
fn local(case: &Case, threads: usize) -> Vec<(u64, u64)> {
    let flags = Flags {
        data: vec![case.path("data")],
        layout: "samples".into(),
        order: "shuffled".into(),
        resume: "none".into(),
        lr_schedule: "constant".into(),
        steps: Some(5),
        lr: 0.1,
        init: Some(3),
        timeout: 60.0,
        threads: Some(threads),
        ..Flags::default()
    };
    let job = Job::new(&Source::File(&case.path("model.dcc")), &flags).unwrap();
    let messages = run::local(&job).unwrap();
    let step = |message: Message| match message {
        Message::Step(record) => Some((record.step, record.loss.to_bits())),
        _ => None,
    };
    messages.into_iter().flatten().filter_map(step).collect()
}

const COMMON: &str = "--steps 5 --lr 0.1 --init 3 --threads 1";

fn processes_and_threads_agree(name: &str, texts: &[&str]) {
    let case = Case::new(name, texts);
    let output = case.run(&format!("{COMMON} --metrics-file m.jsonl --trace t.json --json"));
    succeed(&output);
    let losses = case.losses("m.jsonl");
    assert_eq!(losses.len(), 5);
    assert!(f64::from_bits(losses[4].1) < f64::from_bits(losses[0].1), "it learns");
    assert_eq!(local(&case, 1), losses, "threads of one process");
    assert_eq!(local(&case, 2), losses, "two compute threads");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let ranks = summary["ranks"].as_array().unwrap();
    let pids: BTreeSet<u64> = ranks.iter().map(|rank| rank["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids.len(), 2, "a process per rank: {summary}");
    for rank in ranks {
        let number = |key: &str| rank[key].as_u64().unwrap_or_else(|| panic!("{key} in {rank}"));
        assert!(number("interp") == 0 && number("jit") > 0 && number("library") > 0 && number("flops") > 0, "{rank}");
        let used = number("resident_bytes") - number("idle_bytes");
        assert!(used <= number("planned_bytes") + (32 << 20), "{rank}");
    }
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(case.path("t.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 50);
}

#[test]
fn tensor_parallel_processes_and_threads_agree() {
    processes_and_threads_agree("tp", MLP);
}

#[test]
fn pipeline_processes_and_threads_agree() {
    processes_and_threads_agree("pp", PIPE);
}

#[test]
fn a_resumed_run_continues_to_the_same_bits() {
    let case = Case::new("resume", PIPE);
    succeed(&case.run("--steps 6 --lr 0.1 --init 3 --save-dir all --metrics-file all.jsonl"));
    succeed(&case.run("--steps 6 --lr 0.1 --init 3 --save-dir part --save-every 2 --metrics-file part.jsonl"));
    std::fs::remove_dir_all(case.path("part/step-00000004")).unwrap();
    std::fs::remove_dir_all(case.path("part/step-00000006")).unwrap();
    succeed(&case.run("--steps 6 --lr 0.1 --save-dir part --save-every 2 --metrics-file part.jsonl --resume auto"));
    assert_eq!(case.losses("all.jsonl"), case.losses("part.jsonl"));
    for rank in ["rank-00000.safetensors", "rank-00001.safetensors"] {
        let read = |dir: &str| std::fs::read(case.path(dir).join("step-00000006").join(rank)).unwrap();
        assert_eq!(read("all"), read("part"), "{rank}");
    }
}

fn wait_for_steps(case: &Case, name: &str, count: usize) {
    let began = Instant::now();
    let lines = || std::fs::read_to_string(case.path(name)).map_or(0, |text| text.lines().count());
    while lines() < count {
        assert!(began.elapsed() < Duration::from_secs(60), "no step in a minute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_request_to_stop_saves_and_exits_75() {
    let case = Case::new("stop", MLP);
    let flags = "--steps 100000000 --lr 1e-4 --init 3 --save-dir saved --metrics-file m.jsonl";
    let mut child = case.command(flags).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_steps(&case, "m.jsonl", 3);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let last = case.metrics("m.jsonl").last().unwrap().step;
    assert!(case.path(&format!("saved/step-{last:08}/MANIFEST")).exists(), "step {last} is saved");
}

#[test]
fn a_killed_rank_ends_the_run() {
    let case = Case::new("kill", PIPE);
    let flags = "--steps 100000000 --lr 1e-4 --init 3 --metrics-file m.jsonl";
    let child = case.command(flags).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_steps(&case, "m.jsonl", 3);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
    let victim: i32 = children.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(victim).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let began = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(6));
    let text = stderr(&output);
    assert!(text.contains("rank 1 was ended by signal 9") && text.contains("at step"), "{text}");
}

#[track_caller]
fn refused(case: &Case, flags: &str, code: i32, words: &[&str]) {
    let output = case.run(flags);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{flags}: {text}");
    assert!(words.iter().all(|word| text.contains(word)), "{flags}: {text}");
    assert!(output.stdout.is_empty() && !text.contains("panicked"), "{flags}: {text}");
}

#[test]
fn mistakes_are_explained() {
    let case = Case::new("mistakes", MLP);
    refused(&case, "--steps 1", 2, &["`fc1.weight` has no data", "--init SEED"]);
    refused(&case, "--init 1", 2, &["--steps N"]);
    refused(&case, "--init 1 --steps 1 --map a=b", 2, &["no key `a`"]);
    refused(&case, "--init 1 --steps 1 --lr-schedule sine", 2, &["sine"]);
    refused(&case, "--init 1 --steps 1 --init-rule *=half", 2, &["half"]);
    refused(&case, "--init 1 --steps 1 --threads 0", 2, &["--threads 0"]);
    refused(&case, "--init 1 --steps 1 --resume nowhere", 2, &["no checkpoint there"]);
    refused(&case, "--init 1 --steps 1 --eval-data data", 2, &["no evaluation program"]);
    refused(&case, "--init 1 --steps 1 --unheard-of", 2, &["--unheard-of"]);
    refused(&case, "--init 1 --steps 9 --lr 1e30", 9, &["loss of step", "rank"]);
    refused(&case, "--init 1 --steps 1 --save-dir /proc/nowhere", 8, &["/proc/nowhere"]);
    let mut bytes = std::fs::read(case.path("model.dcc")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(case.path("model.dcc"), bytes).unwrap();
    refused(&case, "--init 1 --steps 1", 5, &["model.dcc"]);
}
