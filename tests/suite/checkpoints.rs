//! `dcc checkpoint`: what it lists, shows, finds wrong and converts.

use crate::cli::put;
use crate::command::{Folder, dcc};
use crate::onnx_model::{external, model, node, tensor, with_int, with_tensor};
use prost::Message;
use std::path::Path;

const RUN: &str = "run tests/models/mlp.onnx --data tests/models/data/mlp.npz --global-batch-size 8 --init 3 --threads 1";
const MESH: &str = "--dp 2 --tp 2 --zero 3 --momentum 0.9 --optimizer sgd";

fn run(folder: &Folder, line: &str) -> crate::command::Output {
    dcc(line.split_whitespace().map(|word| word.replace("@/", &folder.at(""))))
}

/// Steps 1 to 3 of a run, each saved.
fn trained() -> Folder {
    let folder = Folder::new();
    run(&folder, &format!("{RUN} {MESH} --steps 3 --save-every 1 --save-dir @/saved")).ok();
    folder
}

fn bytes(folder: &Folder, name: &str) -> Vec<u8> {
    std::fs::read(folder.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[track_caller]
fn refused(folder: &Folder, line: &str, exit: i32, parts: &[&str]) {
    let output = run(folder, line);
    assert_eq!((output.code, output.stdout.as_str()), (Some(exit), ""), "{line}: {}", output.stderr);
    parts.iter().for_each(|part| assert!(output.stderr.contains(part), "{line}: {part} in {}", output.stderr));
    assert!(output.stderr.contains("\n  help "), "{line}: {}", output.stderr);
}

#[test]
fn listed_shown_and_verified() {
    let folder = trained();
    // A save that was cut off, one without manifest, one whose index is damaged.
    put(&folder, "saved/.step-00000009.partial/rank-00000.safetensors", b"");
    put(&folder, "saved/step-00000008/index.json", b"{}");
    for name in ["MANIFEST", "index.json"] {
        put(&folder, &format!("saved/step-00000007/{name}"), bytes(&folder, &format!("saved/step-00000003/{name}")));
    }
    let listed = run(&folder, "checkpoint list @/saved --json").ok().json();
    let all = listed["checkpoints"].as_array().expect("a list");
    let conditions: Vec<(u64, &str)> =
        all.iter().map(|entry| (entry["step"].as_u64().unwrap(), entry["condition"].as_str().unwrap())).collect();
    let complete = |step| (step, "complete");
    assert_eq!(conditions, [complete(1), complete(2), complete(3), (7, "damaged"), (8, "incomplete"), (9, "incomplete")]);
    assert_eq!((&all[0]["files"], &all[0]["dtypes"][0]), (&4.into(), &"f32".into()));
    assert!(all[0]["plan"].as_str().unwrap().contains("dp 2") && all[0]["bytes"].as_u64().unwrap() > 1000, "{listed}");
    let text = run(&folder, "checkpoint list @/saved").ok().stdout;
    assert!(
        text.lines().count() == 6 && text.contains("       3  complete") && text.contains("rank-00000.safetensors has 0 bytes"),
        "{text}"
    );

    for name in ["step-00000007", "step-00000008", ".step-00000009.partial"] {
        std::fs::remove_dir_all(folder.path().join("saved").join(name)).unwrap();
    }
    let value = run(&folder, "checkpoint inspect @/saved --json").ok().json();
    assert_eq!((&value["step"], &value["seed"]), (&3.into(), &0.into()), "{value}");
    assert_eq!((&value["optimizer"], &value["model"]), (&"sgd".into(), &"mlp.onnx".into()), "{value}");
    assert_eq!((&value["position"]["samples"], &value["mesh"]["tp"]), (&24.into(), &2.into()), "{value}");
    let tensors = value["tensors"].as_array().expect("tensors");
    let states = tensors.iter().filter(|tensor| tensor["kind"] == "state" && tensor["state"] == "momentum").count();
    assert!(states > 0 && tensors.len() == 2 * states, "{value}");
    let blocks = |tensor: &serde_json::Value| tensor["blocks"].as_array().unwrap().len();
    assert!(tensors.iter().any(|tensor| blocks(tensor) == 4), "sharded over dp and tp: {value}");
    let text = run(&folder, "checkpoint inspect @/saved/step-00000002").ok().stdout;
    for part in [
        "step       2",
        "optimizer  sgd",
        "data       16 samples consumed",
        "files      4 of ranks",
        "rank-00003",
        "f32[",
        "momentum",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let verified = run(&folder, "checkpoint verify @/saved --finite --json").ok().json();
    assert_eq!(verified["checkpoints"].as_array().unwrap().len(), 3);
    assert!(run(&folder, "checkpoint verify @/saved/step-00000003").ok().stdout.contains("step 3, 4 files of "));
}

#[test]
fn damage_is_named() {
    let folder = trained();
    let file = "saved/step-00000003/rank-00002.safetensors";
    let good = bytes(&folder, file);
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    put(&folder, file, &bad);
    // The last tensor of that rank's file.
    let value = run(&folder, "checkpoint inspect @/saved --json").ok().json();
    let of_file = |tensor: &&serde_json::Value| {
        tensor["blocks"].as_array().unwrap().iter().any(|b| b["file"] == "rank-00002.safetensors")
    };
    let offset = |tensor: &serde_json::Value| {
        let blocks = tensor["blocks"].as_array().unwrap().iter();
        blocks.filter(|b| b["file"] == "rank-00002.safetensors").map(|b| b["offset"].as_u64().unwrap()).max().unwrap()
    };
    let last = value["tensors"].as_array().unwrap().iter().filter(of_file).max_by_key(|tensor| offset(tensor)).unwrap();
    let name = format!("`{}`", last["name"].as_str().unwrap());
    let parts = ["error[DCC0510]", "rank-00002.safetensors is not what was written", &name, "step-00000003"];
    refused(&folder, "checkpoint verify @/saved", 5, &parts);
    refused(&folder, "checkpoint verify @/saved/step-00000003", 5, &parts);
    refused(&folder, "checkpoint convert @/saved --save-dir @/out", 5, &parts);
    refused(&folder, "checkpoint convert @/saved --safetensors @/out.safetensors", 5, &parts);
    assert!(!folder.path().join("out").exists() && !folder.path().join("out.safetensors").exists());
    run(&folder, "checkpoint verify @/saved/step-00000002").ok();
    put(&folder, file, &good[..good.len() - 4]);
    refused(&folder, "checkpoint inspect @/saved", 5, &["rank-00002.safetensors has", "were written"]);
    put(&folder, file, &good);
    std::fs::remove_file(folder.path().join("saved/step-00000003/MANIFEST")).unwrap();
    refused(&folder, "checkpoint verify @/saved/step-00000003", 5, &["no MANIFEST: not a checkpoint, or not a complete one"]);
    let saved = folder.path().join("saved/step-00000001");
    crate::reshard::changed(&saved, &folder.path().join("nan"), |_, tensors| {
        let weight = tensors.iter_mut().find(|(key, _)| key.name == "fc.1.weight" && key.state.is_none()).unwrap().1;
        weight.1[40..44].copy_from_slice(&f32::NAN.to_ne_bytes());
    });
    run(&folder, "checkpoint verify @/nan").ok();
    let parts = ["1 of the values of `fc.1.weight` in rank-00000.safetensors are not finite", "nan/step-00000001"];
    refused(&folder, "checkpoint verify @/nan --finite", 9, &parts);
    // The newest that is complete.
    assert!(run(&folder, "checkpoint inspect @/saved").ok().stdout.contains("step       2"));
    refused(&folder, "checkpoint verify @/saved", 5, &["no MANIFEST", "step-00000003"]);
    refused(&folder, "checkpoint inspect @/absent", 8, &["absent"]);
    refused(&folder, "checkpoint verify @/", 2, &["no checkpoint there", "--save-dir"]);
}

#[test]
fn a_new_run_takes_a_new_folder() {
    let folder = trained();
    let again = |steps| format!("{RUN} {MESH} --steps {steps} --save-dir @/saved");
    refused(&folder, &again(2), 2, &["checkpoints of an earlier run, the newest of step 3", "--resume auto"]);
    run(&folder, &format!("{} --resume auto", again(4))).ok();
    let rules = format!("{RUN} {MESH} --steps 1 --init-rule no.such=zeros");
    refused(&folder, &rules, 2, &["no tensor matches `no.such`"]);
}

/// What a run that goes on does not take from its flags, or takes otherwise than the run before.
#[test]
fn what_a_resumed_run_leaves_out_is_told() {
    let folder = trained();
    put(&folder, "w.safetensors", b"never read");
    let again = |more: &str| format!("{RUN} {MESH} --steps 4 {more}");
    for flag in ["--init-all", "--weights @/w.safetensors"] {
        let name = flag.split(' ').next().unwrap_or(flag);
        let note = format!("note: {name} is not used: training goes on from step 3 of the checkpoint");
        let told = run(&folder, &again(&format!("{flag} --resume auto --save-dir @/saved"))).ok().stderr;
        assert!(told.contains(&note) && told.contains("step 4/4"), "{told}");
        std::fs::remove_dir_all(folder.path().join("saved/step-00000004")).unwrap();
        let told = run(&folder, &again(&format!("{flag} --resume @/saved"))).ok().stderr;
        assert!(told.contains(&note) && told.contains("step 4/4"), "{told}");
    }
    let new = run(&folder, &again("--init-all --resume auto --save-dir @/new")).ok().stderr;
    assert!(new.contains("step 1/4") && !new.contains("is not used"), "{new}");
    for more in ["", "--dtype f64"] {
        let plain = run(&folder, &again(&format!("--resume @/saved {more}"))).ok().stderr;
        assert!(!plain.contains("note: "), "{plain}");
    }
    let back = run(&folder, &again("--resume @/saved/step-00000001 --save-dir @/saved")).ok().stderr;
    assert!(
        back.contains("note: --save-dir has checkpoints of another run, up to step 3, and this one goes on from step 1"),
        "{back}"
    );
    let other = run(&folder, &again("--resume @/saved --seed 9 --order sequential")).ok().stderr;
    let note = "note: the data are those of the checkpoint, but with --seed 9 in place of 0 and --order sequential in place of \
                shuffled";
    assert!(other.contains(note), "{other}");
}

/// What training leaves as it is may be infinite, as masks are.
#[test]
fn what_training_changes_is_finite() {
    let folder = Folder::new();
    let mask: Vec<u8> = [0.0, 0.0, f32::NEG_INFINITY].iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
    let nodes = [
        node("MatMul", &["x", "w"], &["scores"]),
        node("Add", &["scores", "mask"], &["masked"]),
        with_int(node("Softmax", &["masked"], &["y"]), "axis", 1),
    ];
    let proto = [external("w", &[3, 3], "weights"), tensor("mask", &[3], &mask)].into_iter().fold(model(&nodes), with_tensor);
    put(&folder, "m.onnx", proto.encode_to_vec());
    let train = "run @/m.onnx --input x=ones --input target=zeros --loss mse --optimizer sgd --init 1 --threads 1 --steps 1";
    run(&folder, &format!("{train} --freeze mask --save-dir @/saved")).ok();
    run(&folder, "checkpoint verify @/saved --finite").ok();
    run(&folder, &format!("{train} --freeze w --save-dir @/changed")).ok();
    refused(&folder, "checkpoint verify @/changed --finite", 9, &["1 of the values of `mask`", "are not finite"]);
}

/// A step that leaves a weight without a number is not saved, and the loss that it had tells nothing of that.
#[test]
fn weights_that_are_no_longer_finite_are_not_saved() {
    let folder = Folder::new();
    for mesh in ["", "--dp 2 --zero 3", "--pp 2"] {
        let line = format!("{RUN} {mesh} --steps 2 --save-every 1 --optimizer sgd --save-dir @/saved");
        let schedule = "--lr 1e-3 --lr-schedule @@/rates";
        put(&folder, "rates", b"1e-3\n1e300\n");
        refused(&folder, &format!("{line} {schedule}"), 9, &["not finite after step 2: it is not saved", "--grad-clip"]);
        let left: Vec<_> =
            std::fs::read_dir(folder.path().join("saved")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["step-00000001"], "{mesh}");
        std::fs::remove_dir_all(folder.path().join("saved")).unwrap();
    }
}

/// What can be resumed in place of what cannot.
#[test]
fn what_there_is_to_go_on_from_is_told() {
    let folder = trained();
    let from = |flags: &str| format!("{RUN} --steps 4 {flags}");
    let beside = ["no checkpoint there", "saved has step-00000001, step-00000002, step-00000003"];
    refused(&folder, &from(&format!("{MESH} --resume @/saved/step-00000009")), 2, &beside);
    let other =
        ["DCC0511", "its optimizer keeps momentum", "dcc export", "--safetensors W.safetensors", "--weights W.safetensors"];
    refused(&folder, &from("--optimizer adamw --resume @/saved"), 5, &other);
    run(&folder, "export @/saved --safetensors @/w.safetensors").ok();
    run(&folder, &from("--optimizer adamw --weights @/w.safetensors")).ok();
}

#[test]
fn converted_checkpoints_go_on() {
    let folder = trained();
    let source = "@/saved/step-00000002";
    run(&folder, &format!("checkpoint convert {source} --save-dir @/one --safetensors @/all.safetensors")).ok();
    let value = run(&folder, "checkpoint inspect @/one --json").ok().json();
    assert_eq!((value["files"].as_array().unwrap().len(), &value["step"]), (1, &2.into()));
    assert!(
        value["tensors"].as_array().unwrap().iter().all(|tensor| tensor["blocks"].as_array().unwrap().len() == 1),
        "{value}"
    );
    // Back into the very files that its plan wrote.
    let compile = format!("compile tests/models/mlp.onnx --global-batch-size 8 --loss cross-entropy {MESH} -o @/like.dcc");
    run(&folder, &compile).ok();
    run(&folder, "checkpoint convert @/one --like @/like.dcc --save-dir @/back").ok();
    for rank in 0..4 {
        let name = format!("step-00000002/rank-0000{rank}.safetensors");
        assert!(bytes(&folder, &format!("back/{name}")) == bytes(&folder, &format!("saved/{name}")), "{name}");
    }
    run(&folder, "checkpoint verify @/back").ok();
    // The run goes on from either to the bits of the run that nobody interrupted.
    for from in ["one", "back"] {
        run(&folder, &format!("{RUN} {MESH} --steps 3 --resume @/{from} --save-dir @/{from}-on")).ok();
        for rank in 0..4 {
            let name = format!("step-00000003/rank-0000{rank}.safetensors");
            assert!(bytes(&folder, &format!("{from}-on/{name}")) == bytes(&folder, &format!("saved/{name}")), "{from}: {name}");
        }
    }
    let file = bytes(&folder, "all.safetensors");
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).expect("a header");
    let header = header.as_object().unwrap();
    let (states, weights): (Vec<_>, Vec<_>) =
        header.keys().filter(|key| *key != "__metadata__").partition(|key| key.ends_with(":momentum"));
    assert_eq!((states.len(), &header["__metadata__"]["step"]), (weights.len(), &"2".into()), "{header:?}");
    let end = header.values().filter_map(|entry| entry["data_offsets"][1].as_u64()).max().unwrap() as usize;
    assert_eq!(8 + length + end, file.len());
    // Its weights start another run.
    run(&folder, &format!("{RUN} --steps 1 --weights @/all.safetensors")).ok();
    refused(&folder, &format!("checkpoint convert {source} --save-dir @/one"), 2, &["is there already", "step-00000002"]);
    refused(&folder, &format!("checkpoint convert {source}"), 2, &["--save-dir <DIR>"]);
    let other =
        format!("{} -o @/other.dcc", compile.replace("--momentum 0.9 --optimizer sgd", "").replace(" -o @/like.dcc", ""));
    run(&folder, &other).ok();
    refused(&folder, &format!("checkpoint convert {source} --like @/other.dcc --save-dir @/other"), 5, &["DCC0511", "(m)"]);
    assert!(!Path::new(&folder.at("other")).join("step-00000002").exists());
    assert!(std::fs::read_dir(folder.at("other")).map_or(true, |mut entries| entries.next().is_none()), "nothing is left");
}
