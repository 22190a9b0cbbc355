//! Where files are written: never over what is read, through links, and to what is no file as it is.

use crate::cli::{linear_case, refused};
use crate::command::{Folder, Output, dcc, dcc_command, finish, spawn};
use std::os::unix::fs::symlink;

const COMPILE: &str = "compile @/linear.onnx --global-batch-size 8";
const RUN: &str = "run @/linear.onnx --data @/data --global-batch-size 8";

fn words(folder: &Folder, command: &str) -> Vec<String> {
    command.split(' ').map(|word| word.replace("@/", &folder.at(""))).collect()
}

#[track_caller]
fn run(folder: &Folder, command: &str) -> Output {
    dcc(words(folder, command)).ok()
}

#[test]
fn what_is_read_is_not_written_over() {
    let folder = linear_case();
    run(&folder, &format!("{COMPILE} -o @/linear.dcc"));
    let at = |name: &str| folder.path().join(name);
    symlink("linear.onnx", at("soft")).expect("a link");
    std::fs::hard_link(at("linear.onnx"), at("hard")).expect("a link");
    std::fs::hard_link(at("linear.dcc"), at("artifact")).expect("a link");
    symlink("data/x.npy", at("x")).expect("a link");
    let read = || ["linear.onnx", "linear.dcc", "data/x.npy"].map(|name| std::fs::read(at(name)).expect("a file"));
    let before = read();
    for out in ["linear.onnx", "soft", "hard"] {
        refused(&folder, &format!("{COMPILE} -o @/{out}"), 2, "DCC0001", &["--out and the model are the same file"]);
        refused(
            &folder,
            &format!("{RUN} --steps 1 --trace @/{out}"),
            2,
            "DCC0054",
            &["--trace and the model are", "elsewhere"],
        );
    }
    refused(&folder, &format!("{COMPILE} --data @/data -o @/x"), 2, "DCC0001", &["--out and --data are the same file"]);
    let artifact = "run @/linear.dcc --data @/data --steps 1";
    refused(&folder, &format!("{artifact} --metrics-file @/artifact"), 2, "DCC0054", &["--metrics-file and the artifact are"]);
    refused(&folder, &format!("{artifact} --metrics-file @/x"), 2, "DCC0054", &["--metrics-file and --data are"]);
    let both = format!("{artifact} --metrics-file @/new --trace @/new");
    refused(&folder, &both, 2, "DCC0054", &["--trace and --metrics-file are the same file"]);
    let svg = "inspect @/linear.dcc --timeline --svg @/artifact";
    refused(&folder, svg, 2, "DCC0001", &["--svg and the artifact are the same file"]);
    let outputs = "eval @/linear.onnx --inputs @/data --outputs @/soft";
    refused(&folder, outputs, 2, "DCC0001", &["--outputs and MODEL.onnx|ART.dcc|CHECKPOINT are the same file"]);
    assert!(read() == before);
}

#[test]
fn links_are_followed_and_pipes_stay() {
    let folder = linear_case();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("sub")).expect("a folder");
    symlink("sub/real.dcc", at("link.dcc")).expect("a link");
    for _ in 0..2 {
        run(&folder, &format!("{COMPILE} --embed-weights -o @/link.dcc"));
        assert!(at("link.dcc").is_symlink() && at("sub/real.dcc").is_file());
    }
    assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo runs").success());
    let writer = spawn(dcc_command().args(words(&folder, &format!("{COMPILE} --embed-weights -o @/pipe"))));
    let piped = std::fs::read(at("pipe")).expect("a pipe");
    finish(writer).ok();
    assert!(piped == std::fs::read(at("link.dcc")).expect("a file") && !at("pipe").is_file());
}

/// The control is that the first is alive: when it has ended, the folder is free.
#[test]
fn a_folder_of_checkpoints_has_one_run_at_a_time() {
    let folder = linear_case();
    let long =
        format!("{RUN} --dp 2 --threads 1 --steps 100000000 --log-every 1 --save-dir @/saved --metrics-file @/first.jsonl");
    let mut first = spawn(dcc_command().args(words(&folder, &long)));
    let begun = || std::fs::metadata(folder.path().join("first.jsonl")).is_ok_and(|file| file.len() > 0);
    while !begun() {
        assert!(first.try_wait().expect("a child").is_none(), "the first run goes on");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let second =
        dcc(words(&folder, &format!("{RUN} --steps 1 --save-dir @/saved --resume auto --metrics-file @/second.jsonl")));
    let process = first.id();
    first.kill().expect("a child");
    finish(first);
    assert_eq!(second.code, Some(2), "{}", second.stderr);
    for part in ["error[DCC0054]: another run saves checkpoints there", &format!("process {process}"), "saved", "help wait"] {
        assert!(second.stderr.contains(part), "{part} in {}", second.stderr);
    }
    assert!(!folder.path().join("second.jsonl").exists());
    run(&folder, &format!("{RUN} --steps 1 --save-dir @/saved"));
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_first() {
    let folder = linear_case();
    symlink("none/trace", folder.path().join("dangling")).expect("a link");
    for out in ["data", "dangling"] {
        let output = refused(&folder, &format!("{RUN} --steps 1 --trace @/{out}"), 8, "DCC0801", &["cannot write a trace"]);
        assert!(!output.stderr.contains("step 1"), "{}", output.stderr);
    }
}
