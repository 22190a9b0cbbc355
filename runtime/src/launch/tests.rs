//! Real processes: each `worker_…` test is the body of a rank when the launcher under test started it, and nothing otherwise.

use super::*;
use crate::checkpoint::{self, RunState};
use crate::comm::{Comm, DType, Group, GroupId, Hello, Label, Op, Place, Reduce, Region, Transfer};
use crate::slice::Slice;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

fn layout() -> Layout {
    Layout::new(vec![Group(vec![0, 1, 2])], vec![1 << 16; 3])
}

/// `supervise` on three ranks that run the test `worker`; the outcome, all messages, and the seconds it took.
fn supervised(worker: &str, timeout: Duration, stop: &StopSignals) -> (Result<Outcome>, Vec<(u32, Message)>, f64) {
    let arguments = [&format!("launch::tests::{worker}"), "--exact", "--nocapture", "--test-threads=2"];
    let program = std::env::current_exe().unwrap();
    let launch = Launch { layout: layout(), program, arguments: arguments.iter().map(Into::into).collect(), timeout };
    let began = Instant::now();
    let mut messages = Vec::new();
    let outcome = supervise(&launch, stop, &mut |rank, message| messages.push((rank, message)));
    (outcome, messages, began.elapsed().as_secs_f64())
}

fn run(worker: &str) -> (Result<Outcome>, Vec<(u32, Message)>, f64) {
    let (_write, stop) = StopSignals::pipe();
    supervised(worker, Duration::from_secs(30), &stop)
}

/// A rank that trains for `steps` steps; `trouble` is asked at each.
fn worker(steps: u64, timeout: Duration, trouble: impl Fn(&mut Peer, u64) -> Result<()>) {
    let Some(mut worker) = Worker::from_environment().unwrap() else { return };
    let result = train(&mut worker, steps, timeout, trouble);
    std::process::exit(worker.end(result));
}

fn train(
    worker: &mut Worker,
    steps: u64,
    timeout: Duration,
    trouble: impl Fn(&mut Peer, u64) -> Result<()>,
) -> Result<Outcome> {
    let (mut peer, arena) = worker.attach(&layout(), Patience { timeout })?;
    worker.send(&Message::Note(format!("pid {}", std::process::id())))?;
    let artifact = if std::env::args().any(|arg| arg.ends_with("worker_differs")) { u64::from(worker.rank / 2) } else { 0 };
    peer.handshake(&Hello { artifact, ..Hello::default() })?;
    let region = Region { offset: 0, bytes: 40_000 };
    let transfer = Transfer::AllReduce { group: GroupId(0), reduce: Reduce::Sum, dtype: DType::F32 };
    let place = |step| Place { step, microbatch: 0, label: Label::new("forward: start all_reduce.sum tp b6") };
    peer.mark(&place(0));
    let transfer = peer.prepare(&[Op { transfer, source: region, target: region }])?;
    for step in 1..=steps {
        peer.mark(&place(step));
        arena.write(0, &(step as f32).to_ne_bytes());
        trouble(&mut peer, step)?;
        let token = peer.start(transfer)?;
        peer.wait(token)?;
        let mut sum = [0; 4];
        arena.read(0, &mut sum);
        if worker.rank == 2 {
            let loss = f64::from(f32::from_ne_bytes(sum));
            worker.send(&Message::Step(StepRecord { step, loss, ..StepRecord::default() }))?;
        }
        if peer.agree(peer.stop_requested() as u64)? != 0 {
            peer.finish();
            return Ok(Outcome::Stopped);
        }
    }
    peer.finish();
    Ok(Outcome::Finished)
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn worker_trains() {
    worker(3, LONG, |_, _| Ok(()));
}

#[test]
fn worker_trains_forever() {
    worker(u64::MAX, LONG, |_, _| Ok(()));
}

#[test]
fn worker_differs() {
    worker(3, LONG, |_, _| Ok(()));
}

#[test]
fn worker_is_killed() {
    worker(5, LONG, |peer, step| {
        if peer.rank() == 1 && step == 3 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        Ok(())
    });
}

#[test]
fn worker_is_stopped() {
    worker(5, Duration::from_millis(600), |peer, step| {
        if peer.rank() == 1 && step == 3 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
            // The signal may reach another thread first, and this one a little later.
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    });
}

#[test]
fn worker_fails() {
    worker(5, LONG, |peer, step| match (peer.rank(), step) {
        (1, 3) => Err(Error::numerical("the loss is NaN")),
        _ => Ok(()),
    });
}

#[test]
fn worker_panics() {
    worker(5, LONG, |peer, step| {
        assert!((peer.rank(), step) != (1, 3), "a planted bug");
        Ok(())
    });
}

/// Where `worker_saves` saves: the launcher's process id makes it the test's own.
fn save_dir(launcher: u32) -> PathBuf {
    std::env::temp_dir().join(format!("dcc-launch-saves-{launcher}"))
}

#[test]
fn worker_saves() {
    let Some(mut worker) = Worker::from_environment().unwrap() else { return };
    let result = save_always(&mut worker);
    std::process::exit(worker.end(result));
}

fn save_always(worker: &mut Worker) -> Result<Outcome> {
    let (mut peer, arena) = worker.attach(&layout(), Patience { timeout: LONG })?;
    let launcher = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
    let options = checkpoint::Options { dir: save_dir(launcher), keep_last: Some(2) };
    let rank = u64::from(worker.rank);
    let slice = Slice { global: vec![3000, 5], start: vec![1000 * rank, 0], extent: vec![1000, 5], local: vec![1000, 5] };
    let read = |at: u64, out: &mut [u8]| {
        arena.read(at as usize, out);
        Ok(())
    };
    for step in 1.. {
        arena.write(0, &vec![step as u8; 20_000]);
        let key = checkpoint::Key { name: "w".into(), state: None };
        let shard = checkpoint::Shard { key, dtype: DType::F32, slice: slice.clone(), read: &read };
        let path = checkpoint::save(&mut peer, &options, &RunState { step, ..RunState::default() }, &[shard])?;
        worker.send(&Message::Saved { step, path })?;
    }
    Ok(Outcome::Finished)
}

#[test]
fn a_rank_killed_at_any_moment_leaves_whole_checkpoints_only() {
    let dir = save_dir(std::process::id());
    for moment in 0..12u64 {
        let (write, stop) = StopSignals::pipe();
        // Two requests to stop kill all ranks, wherever they are.
        let asker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(60_000 + 7_300 * moment));
            for _ in 0..2 {
                rustix::io::write(&write, &[1; 128]).unwrap();
                std::thread::sleep(Duration::from_millis(150));
            }
            write
        });
        let (outcome, messages, _) = supervised("worker_saves", LONG, &stop);
        drop(asker.join().unwrap());
        assert!(outcome.is_err());
        let reported = messages.iter().filter_map(|(_, message)| match message {
            Message::Saved { step, .. } => Some(*step),
            _ => None,
        });
        let found = checkpoint::steps(&dir).unwrap();
        let newest = reported.max().unwrap_or(0);
        assert!(found.last().map_or(0, |(step, _)| *step) >= newest, "step {newest} was reported as saved: {found:?}");
        for (step, path) in found {
            let mut checkpoint = checkpoint::Checkpoint::open(&path).unwrap();
            checkpoint.verify().unwrap();
            assert_eq!(checkpoint.run().step, step);
            std::fs::remove_dir_all(path).unwrap();
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn ranks_train_and_report() {
    let (outcome, messages, _) = run("worker_trains");
    assert_eq!(outcome, Ok(Outcome::Finished));
    let losses: Vec<f64> = messages
        .iter()
        .filter_map(|(rank, message)| match message {
            Message::Step(record) => Some((*rank, record)),
            _ => None,
        })
        .map(|(rank, record)| {
            assert_eq!(rank, 2);
            record.loss
        })
        .collect();
    assert_eq!(losses, [3.0, 6.0, 9.0]);
    let pids: std::collections::BTreeSet<String> = messages.iter().filter_map(pid).collect();
    assert_eq!(pids.len(), 3, "three processes");
}

fn pid((_, message): &(u32, Message)) -> Option<String> {
    match message {
        Message::Note(text) => text.strip_prefix("pid ").map(str::to_owned),
        _ => None,
    }
}

#[test]
fn a_killed_rank_ends_the_run_within_a_second() {
    let (outcome, _, seconds) = run("worker_is_killed");
    let error = outcome.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit(), 6);
    for part in ["rank 1 was ended by signal 9 (SIGKILL)", "out of memory", "step 3", "forward: start all_reduce.sum tp b6"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(seconds < 5.0, "{seconds} s with start-up on a loaded machine");
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout() {
    let (outcome, _, _) = run("worker_is_stopped");
    let error = outcome.unwrap_err();
    assert_eq!(error.exit(), 7);
    assert!(error.to_string().contains("rank 1 is silent") && error.to_string().contains("step 3"), "{error}");
}

#[test]
fn a_failing_rank_is_reported_with_its_own_error_and_code() {
    let (outcome, ..) = run("worker_fails");
    let error = outcome.unwrap_err();
    assert_eq!(error.exit(), 9);
    assert!(error.to_string().contains("the loss is NaN") && error.to_string().contains("rank 1 at step 3"), "{error}");
    let (outcome, ..) = run("worker_panics");
    assert!(outcome.unwrap_err().to_string().contains("rank 1 panicked"));
}

#[test]
fn different_programs_are_found_before_step_1() {
    let (outcome, messages, _) = run("worker_differs");
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("ranks 0 and 2 differ in their artifact"), "{text}");
    assert!(!messages.iter().any(|(_, message)| matches!(message, Message::Step(_))));
}

#[test]
fn a_request_to_stop_ends_all_ranks_at_one_step() {
    let (write, stop) = StopSignals::pipe();
    let asker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        rustix::io::write(&write, &[1]).unwrap();
        write
    });
    let (outcome, messages, _) = supervised("worker_trains_forever", LONG, &stop);
    drop(asker.join().unwrap());
    assert_eq!(outcome, Ok(Outcome::Stopped));
    assert!(messages.iter().any(|(_, message)| matches!(message, Message::Step(_))));
}

/// A launcher in a process of its own, which prints the process ids of its ranks.
#[test]
fn worker_launches() {
    if std::env::var_os("DCC_TEST_LAUNCHER").is_none() || std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let arguments = ["launch::tests::worker_trains_forever", "--exact", "--nocapture", "--test-threads=2"];
    let program = std::env::current_exe().unwrap();
    let launch = Launch { layout: layout(), program, arguments: arguments.iter().map(Into::into).collect(), timeout: LONG };
    let (_write, stop) = StopSignals::pipe();
    let _ = supervise(&launch, &stop, &mut |rank, message| {
        if let Some(pid) = pid(&(rank, message)) {
            println!("\npid {pid}");
        }
    });
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["launch::tests::worker_launches", "--exact", "--nocapture"])
        .env("DCC_TEST_LAUNCHER", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(std::result::Result::ok);
    let pids: Vec<String> = lines.filter_map(|line| line.strip_prefix("pid ").map(str::to_owned)).take(3).collect();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let is_running = |pid: &String| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !status.is_empty() && !status.contains(") Z ")
    };
    let began = Instant::now();
    while pids.iter().any(is_running) {
        assert!(began.elapsed() < Duration::from_secs(5), "ranks outlive their launcher: {pids:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(pids.len(), 3);
}

#[test]
fn a_variable_set_by_hand_is_refused() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["launch::tests::worker_trains", "--exact"])
        .env(VARIABLE, "0/1/1")
        .output()
        .unwrap();
    assert!(!output.status.success());
}
