//! Mistakes of users, through the real binary: the right exit code, what, where and how to fix; no panic, no output on stdout,
//! nothing half-written, no process left.

use crate::command::{Folder, Output, dcc, dcc_command, finish, spawn};
use crate::onnx_model::{external, model, node, opset, size, symbol, tensor, value, with_ints, with_tensor};
use dcc::import::proto::ModelProto;
use dcc::import::proto::tensor_proto::DataType;
use dcc::import::proto::type_proto::Value as Type;
use prost::Message;
use std::collections::BTreeSet;
use std::path::Path;

const MLP: &str = "tests/models/mlp.onnx";
const MLP_DATA: &str = "tests/models/data/mlp.npz";
const GPT: &str = "tests/models/gpt2_tiny.onnx";
const TOKENS: &str = "tests/models/data/gpt2_tiny_tokens.npy";

/// All files below a folder.
fn files(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let below = |path: std::path::PathBuf| {
        let own = path.display().to_string();
        if path.is_dir() { files(&path) } else { BTreeSet::from([own]) }
    };
    entries.flat_map(below).collect()
}

/// Processes of ranks that the launcher `pid` started.
pub fn ranks_of(pid: u32) -> Vec<u32> {
    let numbers = std::fs::read_dir("/proc").expect("/proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    let is_rank = |rank: &u32| {
        let environment = std::fs::read(format!("/proc/{rank}/environ")).unwrap_or_default();
        let ending = format!("/{pid}");
        environment.split(|&b| b == 0).any(|v| v.starts_with(b"DCC_WORKER=") && v.ends_with(ending.as_bytes()))
    };
    numbers.filter(is_rank).collect()
}

/// What of ours is in /dev/shm.
pub fn shared_memory() -> Vec<String> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().filter_map(|entry| entry.ok());
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("dcc")).collect()
}

/// Runs a command that must fail: `words` in the message, in `folder` no file more or less than before.
#[track_caller]
pub fn refused(folder: &Folder, command: &str, exit: i32, code: &str, words: &[&str]) -> Output {
    let before = files(folder.path());
    let arguments: Vec<String> = command.split_whitespace().map(|word| word.replace("@/", &folder.at(""))).collect();
    let child = spawn(dcc_command().args(&arguments));
    let pid = child.id();
    let output = finish(child);
    let text = &output.stderr;
    assert_eq!(output.code, Some(exit), "dcc {command}: {text}");
    assert!(text.contains(&format!("error[{code}]: ")), "dcc {command}: {code} in {text}");
    for word in words {
        assert!(text.contains(word), "dcc {command}: {word} in {text}");
    }
    let help = text.lines().find_map(|line| line.trim_start().strip_prefix("help "));
    assert!(help.is_some_and(|help| help.len() > 10), "dcc {command} says how to fix it: {text}");
    assert!(!text.contains("panicked") && !text.contains("DCC100"), "dcc {command}: {text}");
    assert!(!text.contains('\x1b'), "colors are for terminals: {text:?}");
    assert_eq!(output.stdout, "", "dcc {command}");
    assert_eq!(files(folder.path()), before, "dcc {command} leaves files behind");
    assert_eq!(ranks_of(pid), [0; 0], "dcc {command} leaves ranks behind");
    assert_eq!(shared_memory(), [""; 0], "dcc {command}");
    output
}

fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| ((i % 7) as f32 / 7.0 - 0.4).to_le_bytes()).collect()
}

/// `y[batch, 4] = x[batch, 3] · w`.
pub fn linear() -> ModelProto {
    let mut linear = with_tensor(model(&[node("MatMul", &["x", "w"], &["y"])]), tensor("w", &[3, 4], &floats(12)));
    linear.graph.as_mut().expect("a graph").input = vec![value("x", &[symbol("batch"), size(3)])];
    linear
}

fn without_weights(mut model: ModelProto) -> ModelProto {
    model.graph.as_mut().expect("a graph").initializer.clear();
    model
}

pub fn put(folder: &Folder, name: &str, bytes: impl AsRef<[u8]>) {
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(path, bytes).expect("a file");
}

pub fn put_model(folder: &Folder, name: &str, model: &ModelProto) {
    put(folder, name, model.encode_to_vec());
}

pub fn npy(dtype: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}");
    let header = format!("{header:<117}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

pub fn integers(values: impl IntoIterator<Item = i64>) -> Vec<u8> {
    values.into_iter().flat_map(i64::to_le_bytes).collect()
}

/// A folder with `linear.onnx` and `data/`, 16 samples.
pub fn linear_case() -> Folder {
    let folder = Folder::new();
    put_model(&folder, "linear.onnx", &linear());
    put(&folder, "data/x.npy", npy("<f4", "16, 3", &floats(48)));
    put(&folder, "data/labels.npy", npy("<i8", "16,", &integers((0..16).map(|i| i % 4))));
    folder
}

#[test]
fn damaged_and_foreign_models() {
    let folder = Folder::new();
    let bytes = linear().encode_to_vec();
    put(&folder, "empty.onnx", b"");
    put(&folder, "cut.onnx", &bytes[..bytes.len() / 2]);
    put(&folder, "text.onnx", "this is no model at all");
    put_model(&folder, "unknown.onnx", &model(&[node("Det", &["x"], &["y"])]));
    put_model(&folder, "misspelt.onnx", &model(&[node("Reluu", &["x"], &["y"])]));
    for (name, version) in [("old", 3), ("new", 99)] {
        put_model(&folder, &format!("{name}.onnx"), &ModelProto { opset_import: vec![opset(version)], ..linear() });
    }
    let cycle = [node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"]), node("Neg", &["b"], &["y"])];
    put_model(&folder, "cycle.onnx", &model(&cycle));
    put_model(&folder, "huge.onnx", &with_tensor(without_weights(linear()), tensor("w", &[1 << 62, 16], &[])));
    put_model(&folder, "short.onnx", &with_tensor(without_weights(linear()), tensor("w", &[3, 4], &[0; 20])));
    let check = |name: &str, code: &str, words: &[&str]| {
        refused(&folder, &format!("compile @/{name}.onnx --global-batch-size 8 -o @/out.dcc"), 3, code, words);
    };
    check("empty", "DCC0101", &["the 0 bytes hold no ONNX graph", "empty.onnx"]);
    check("cut", "DCC0101", &["not an ONNX model", "cut.onnx", "truncated"]);
    check("text", "DCC0101", &["not an ONNX model", "text.onnx"]);
    check("unknown", "DCC0102", &["operator Det of opset 20 is not supported", "node 0 `/det`", "README.md"]);
    check("misspelt", "DCC0103", &["ONNX has no operator `Reluu`", "node 0"]);
    check("old", "DCC0103", &["opset 3 is not supported, 7 to", "opset_version=20"]);
    check("new", "DCC0103", &["opset 99 is not supported", "version_converter"]);
    check("cycle", "DCC0107", &["2 nodes form a cycle", "node 0 `/add`", "node 1 `/relu`"]);
    check("huge", "DCC0108", &["[4611686018427387904, 16] has more elements than can be addressed", "tensor `w`"]);
    check("short", "DCC0109", &["20 bytes of raw data for dims and dtype that need 48", "tensor `w`"]);
    let out = "--global-batch-size 8 -o @/out.dcc";
    refused(&folder, &format!("compile @/absent.onnx {out}"), 8, "DCC0801", &["No such file", "absent.onnx", "check the path"]);
    refused(&folder, &format!("compile @/ {out}"), 2, "DCC0001", &["compile takes a model: this is a folder", ".onnx"]);
    refused(&folder, "run @/ --steps 1", 2, "DCC0001", &["this is a folder", "--resume"]);
}

#[test]
fn external_data_that_are_missing_or_escape() {
    let folder = linear_case();
    let with = |name: &str, location: &str| {
        put_model(&folder, name, &with_tensor(without_weights(linear()), external("w", &[3, 4], location)));
    };
    with("up.onnx", "../w.bin");
    with("absolute.onnx", "/etc/hostname");
    with("link.onnx", "link.bin");
    with("short.onnx", "short.bin");
    with("missing.onnx", "missing.bin");
    std::os::unix::fs::symlink("/etc/hostname", folder.path().join("link.bin")).expect("a link");
    put(&folder, "short.bin", [0; 20]);
    for (name, words) in [
        ("up", ["`../w.bin` leaves the model's folder", "must lie in the model's folder"]),
        ("absolute", ["`/etc/hostname` is not relative", "must lie in the model's folder"]),
        ("link", ["`link.bin` leaves the model's folder", "must lie in the model's folder"]),
        ("short", ["bytes 0..48 of `short.bin`, which has 20", "tensor `w`"]),
    ] {
        let command = format!("compile @/{name}.onnx --global-batch-size 8 -o @/out.dcc");
        refused(&folder, &command, 3, "DCC0110", &words);
    }
    let words = ["`w` has no data", "missing.bin is missing", "--init SEED", "--weights"];
    refused(&folder, "run @/missing.onnx --global-batch-size 8 --data @/data --steps 1", 2, "DCC0054", &words);
}

#[test]
fn data_that_do_not_fit() {
    let folder = linear_case();
    let x = npy("<f4", "16, 3", &floats(48));
    let labels = npy("<i8", "16,", &integers((0..16).map(|i| i % 4)));
    let data = |name: &str, arrays: &[(&str, Vec<u8>)]| {
        arrays.iter().for_each(|(key, bytes)| put(&folder, &format!("{name}/{key}.npy"), bytes));
    };
    let both = |name: &str, x: &[u8], labels: &[u8]| data(name, &[("x", x.to_vec()), ("labels", labels.to_vec())]);
    data("key", &[("x", x.clone()), ("labels", labels.clone()), ("y", x.clone())]);
    data("label", &[("x", x.clone()), ("label", labels.clone())]);
    data("nothing", &[("labels", labels.clone())]);
    both("shape", &npy("<f4", "12, 4", &floats(48)), &npy("<i8", "12,", &integers((0..12).map(|i| i % 4))));
    both("complex", &npy("<c8", "8, 3", &floats(48)), &labels);
    both("fraction", &x, &npy("<f4", "16,", &floats(16)));
    both("class", &x, &npy("<i8", "16,", &integers((0..16).map(|i| i % 5))));
    both("negative", &x, &npy("<i8", "16,", &integers((0..16).map(|i| -i))));
    both("few", &npy("<f4", "4, 3", &floats(12)), &npy("<i8", "4,", &integers(0..4)));
    both("uneven", &x, &npy("<i8", "12,", &integers((0..12).map(|i| i % 4))));
    both("cut", &x[..x.len() - 9], &labels);
    both("empty", &npy("<f4", "0, 3", &[]), &npy("<i8", "0,", &[]));
    put(&folder, "empty.npz", b"");
    put(&folder, "zip.npz", b"PK\x03\x04 and then nothing");
    let check = |name: &str, exit: i32, code: &str, words: &[&str]| {
        let command = format!("run @/linear.onnx --data @/{name} --global-batch-size 8 --steps 1 --threads 1");
        refused(&folder, &command, exit, code, words);
    };
    check("key", 2, "DCC0051", &["the data have `y`, which is no input", "y.npy", "inputs: labels, x", "--map y=INPUT"]);
    check("label", 2, "DCC0003", &["the loss of output `y`", "no key `labels`", "`label`", "--loss KIND"]);
    check("nothing", 2, "DCC0051", &["input `x` has no data", "--input x="]);
    check("shape", 2, "DCC0052", &["`x` has shape [12, 4], input `x` needs [samples, 3]", "x.npy"]);
    check("complex", 2, "DCC0050", &["numpy dtype `<c8`", "x.npy"]);
    check("fraction", 2, "DCC0053", &["labels.npy"]);
    check("class", 2, "DCC0053", &["value 4 (element 4) is not an index below 4 nor the ignored -100", "labels.npy"]);
    check("negative", 2, "DCC0053", &["value -1 (element 1) is not an index below 4", "labels.npy"]);
    check("few", 2, "DCC0052", &["the data have 4 samples, one batch needs 8", "--global-batch-size", "labels.npy", "x.npy"]);
    check("uneven", 2, "DCC0052", &["`labels` has 12 samples, `x` 16", "labels.npy", "x.npy"]);
    check("cut", 5, "DCC0520", &["x.npy"]);
    check("empty", 2, "DCC0052", &["the data have 0 samples"]);
    check("empty.npz", 2, "DCC0050", &["empty.npz", ".safetensors"]);
    check("zip.npz", 5, "DCC0520", &["zip.npz"]);
    check("absent.npz", 8, "DCC0801", &["absent.npz", "check the path"]);
    // Labels of a loss that the model itself has.
    data("digits", &[("image", npy("<f4", "16, 64", &floats(1024))), ("labels", npy("<i8", "16,", &integers(-1..15)))]);
    let own_loss = "run tests/models/mlp_sce.onnx --data @/digits --global-batch-size 8 --steps 1 --init 1";
    refused(&folder, own_loss, 2, "DCC0053", &["is not an index below 10", "labels.npy"]);
    put(&folder, "tokens.npy", npy("<i8", "40,", &integers((0..40).map(|i| if i == 33 { 211 } else { i }))));
    put(&folder, "short.npy", npy("<i8", "9,", &integers(0..9)));
    let gpt = |name: &str, words: &[&str]| {
        let command = format!("run {GPT} --data @/{name} --global-batch-size 2 --steps 1 --init 1");
        refused(&folder, &command, 2, if name == "short.npy" { "DCC0052" } else { "DCC0053" }, words);
    };
    gpt("tokens.npy", &["value 211 (element 33) is not an index below 211", "tokens.npy"]);
    gpt("short.npy", &["one batch needs 2", "short.npy"]);
}

/// Data of an input that the loss does not depend on, and sizes that a file gives for the whole run.
#[test]
fn inputs_that_no_step_reads() {
    let folder = linear_case();
    let mut model = linear();
    let graph = model.graph.as_mut().expect("a graph");
    let mut shape = value("shape", &[size(2)]);
    if let Some(Type::TensorType(tensor)) = shape.r#type.as_mut().and_then(|ty| ty.value.as_mut()) {
        tensor.elem_type = Some(DataType::Int64.into());
    }
    graph.input.extend([value("unread", &[symbol("batch")]), shape]);
    graph.node[0].output[0] = "flat".to_owned();
    graph.node.push(node("Reshape", &["flat", "shape"], &["y"]));
    put_model(&folder, "linear.onnx", &model);
    put(&folder, "data/unread.npy", npy("<f4", "16,", &floats(16)));
    put(&folder, "shape.npy", npy("<i8", "2,", &integers([-1, 4])));
    let command = "run @/linear.onnx --data @/data --global-batch-size 8 --steps 2 --threads 1 --batch-dim shape=none";
    let words = format!("{command} --input shape=@@/shape.npy");
    dcc(words.split(' ').map(|word| word.replace("@/", &folder.at("")))).ok();
}

#[test]
fn plans_that_do_not_exist() {
    let folder = Folder::new();
    let check = |flags: &str, code: &str, words: &[&str]| {
        refused(&folder, &format!("compile {MLP} {flags} -o @/out.dcc"), 4, code, words);
    };
    let batch = "--global-batch-size 8";
    check("--global-batch-size 8 --tp 1000", "DCC0312", &["--tp 1000 has nothing to split", "leave out --tp"]);
    check(&format!("{batch} --cp 2"), "DCC0313", &["--cp 2 has no sequence to split", "--dp 2"]);
    check(
        &format!("{batch} --ep 2"),
        "DCC0314",
        &["--ep 2 has no experts to split", "one weight of shape [experts, in, out]", "--dp 2"],
    );
    let experts = "compile tests/models/families/moe.onnx --global-batch-size 8 --ep 8 -o @/out.dcc";
    refused(&folder, experts, 4, "DCC0314", &["--ep 8 has too few experts", "no weight stacks more than 4", "--ep 4 or less"]);
    check(&format!("{batch} --dp 2 --ep 3"), "DCC0302", &["8 does not divide by --dp 2 × --ep 3", "8 = 6 × 1 + 2"]);
    let along = format!("{batch} --tp 2 --sequence-parallel");
    check(&along, "DCC0312", &["--sequence-parallel has nothing to split", "neither of samples nor of weights"]);
    check(&format!("{batch} --pp 9"), "DCC0303", &["--pp 9 needs 9 stages; the model has work for 3", "--pp 3"]);
    check(
        &format!("{batch} --memory-limit 10KiB"),
        "DCC0401",
        &["the plan needs", "KiB on a rank, 10.0 KiB are allowed", "--pp"],
    );
    let least = |schedule: &str| {
        let line =
            format!("compile {MLP} {batch} --pp 2 --grad-accum 4 --schedule {schedule} --memory-limit 10KiB -o @/out.dcc");
        let output = dcc(line.split(' ').map(|word| word.replace("@/", &folder.at(""))));
        output.stderr.lines().next().unwrap_or_default().to_owned()
    };
    assert_eq!(least("auto"), least("1f1b"));
    let chunks = "--pp 2 --virtual-stages 2";
    check(
        &format!("{batch} {chunks} --grad-accum 1"),
        "DCC0303",
        &["groups of 2 microbatches", "1 is no multiple", "--grad-accum 2, or leave out --virtual-stages"],
    );
    check(
        &format!("{batch} {chunks} --grad-accum 2"),
        "DCC0303",
        &["--pp 2 of 2 virtual stages each needs 4 stages", "work for 3"],
    );
    check(&format!("{batch} --pp 2 --schedule zb-v"), "DCC0303", &["--pp 2 of 2 virtual stages each needs 4 stages"]);
    check(&format!("{batch} --dp 3"), "DCC0302", &["8 does not divide by --dp 3", "8 = 3 × 2 + 2"]);
    check(&format!("{batch} --micro-batch-size 3"), "DCC0302", &["--micro-batch-size 3", "can be 1, 2, 4, 8"]);
    check(&format!("{batch} --micro-batch-size 2 --grad-accum 2"), "DCC0302", &["2", "8"]);
    check(&format!("{batch} --tp 2 --param nothing=Shard(0)@tp"), "DCC0304", &["matches no parameter", "fc.0.weight"]);
    let gpt = format!("compile {GPT} --global-batch-size 8 --tp 3 -o @/out.dcc --param *c_attn*=Shard(9)@tp");
    refused(&folder, &gpt, 4, "DCC0304", &["Shard(9)", "has no dim 9"]);
}

/// Four terabytes of weights: compiled without being read, and not verified whole.
#[test]
fn a_model_that_this_machine_cannot_hold() {
    let folder = Folder::new();
    let wide = 1 << 20;
    let mut huge = with_tensor(model(&[node("MatMul", &["x", "w"], &["y"])]), external("w", &[wide, wide], "absent.bin"));
    let graph = huge.graph.as_mut().expect("a graph");
    graph.input = vec![value("x", &[symbol("batch"), size(wide)])];
    graph.output = vec![value("y", &[symbol("batch"), size(wide)])];
    put_model(&folder, "huge.onnx", &huge);
    let words = |text: &str| text.split(' ').map(|word| word.replace("@/", &folder.at(""))).collect::<Vec<String>>();
    dcc(words("compile @/huge.onnx --loss mse --global-batch-size 2 --dp 2 -o @/huge.dcc")).ok();
    let verify = "verify @/huge.dcc --model @/huge.onnx";
    refused(&folder, verify, 8, "DCC0812", &["all ranks need", "TiB in one process", "--numeric"]);
    dcc(words(&format!("{verify} --numeric"))).ok();
}

#[test]
fn wrong_flags() {
    let folder = linear_case();
    dcc(["compile", &folder.at("linear.onnx"), "--global-batch-size", "8"]).ok();
    let run = "run @/linear.onnx --data @/data --global-batch-size 8";
    let check = |flags: &str, code: &str, words: &[&str]| {
        refused(&folder, &format!("{run} {flags}"), 2, code, words);
    };
    check("--steps 1 --thraeds 2", "DCC0001", &["'--thraeds'", "'--threads'"]);
    check("--steps 99999999999999999999", "DCC0001", &["number too large", "--steps"]);
    check("--steps -1", "DCC0001", &["--steps"]);
    check("--steps 1 --dp 0", "DCC0001", &["--dp 0: an axis has at least one rank"]);
    check("--steps 1 --dp 4294967295 --tp 2", "DCC0001", &["more than 16777216 ranks"]);
    check("--steps 1 --cp 0", "DCC0001", &["--cp 0: an axis has at least one rank"]);
    check("--steps 1 --ep 0", "DCC0001", &["--ep 0: an axis has at least one rank"]);
    check("--steps 1 --sequence-parallel", "DCC0001", &["--sequence-parallel without ranks that share a layer", "--tp 2"]);
    check("--steps 1 --pp 2 --virtual-stages 0", "DCC0001", &["--virtual-stages 0: a rank has 1 to 32 chunks"]);
    let gpipe = "--steps 1 --pp 2 --schedule gpipe --virtual-stages 2";
    check(gpipe, "DCC0001", &["--virtual-stages 2 does not belong to --schedule gpipe", "--schedule 1f1b"]);
    check("--steps 1 --dtype f8", "DCC0001", &["'f8'", "bf16"]);
    check("--steps 1 --grad-dtype bf16", "DCC0001", &["--grad-dtype bf16 with no --dtype", "--dtype bf16"]);
    check("--steps 1 --dtype f16 --grad-dtype bf16", "DCC0001", &["--grad-dtype bf16 with --dtype f16"]);
    check("--steps 1 --param-dtype bf16", "DCC0001", &["--param-dtype bf16 with no --dtype", "--dtype bf16"]);
    check("--steps 1 --dtype f16 --param-dtype bf16", "DCC0001", &["--param-dtype bf16 with --dtype f16"]);
    check("--steps 1 --dtype f32 --param-dtype bf16", "DCC0001", &["--param-dtype bf16 with --dtype f32"]);
    check("--steps 1 --dtype bf16 --param-dtype f16", "DCC0001", &["'f16'", "bf16"]);
    check("--steps 1 --dtype bf16 --loss-scale 8", "DCC0001", &["a loss scale with --dtype bf16", "--dtype f16"]);
    check("--steps 1 --dtype f16 --loss-scale 0", "DCC0001", &["--loss-scale 0 is no positive number"]);
    for growth in ["0.5", "1e300", "nan"] {
        let flags = format!("--steps 1 --dtype f16 --loss-scale-growth {growth}");
        let growth = growth.replace("1e300", &1e300_f64.to_string()).replace("nan", "NaN");
        check(&flags, "DCC0001", &[&format!("--loss-scale-growth {growth} is no number from 1 on that f32 holds")]);
    }
    check("--steps 1 --dtype f16 --loss-scale-backoff 1", "DCC0001", &["--loss-scale-backoff 1 is not between 0 and 1"]);
    check("--steps 1 --dtype f16 --loss-scale-interval 0", "DCC0001", &["--loss-scale-interval 0"]);
    check("--steps 1 --loss mean", "DCC0001", &["'mean'", "cross-entropy"]);
    check("--steps 1 --lr fast", "DCC0001", &["'fast'", "--lr"]);
    check("--steps 1 --momentum 0.9", "DCC0001", &["--momentum does not belong to --optimizer adamw", "--optimizer sgd"]);
    check("--steps 1 --memory-limit lots", "DCC0001", &["--memory-limit lots is no size", "KiB, MiB, GiB"]);
    check("", "DCC0054", &["--steps N or --epochs N"]);
    check("--steps 1 --shard-group 2", "DCC0001", &["add --dp, a multiple of 2, and --zero 1, 2 or 3"]);
    check("--steps 1 --shard-group 2 --zero 1", "DCC0001", &["--dp 1", "add --dp, a multiple of 2"]);
    check("--steps 1 --shard-group 2 --zero 1 --dp 3", "DCC0001", &["--shard-group can be 1, 3"]);
    check("--steps 1 --threads 0", "DCC0054", &["--threads 0"]);
    check("--steps 1 --threads 100000", "DCC0054", &["--threads 100000: this machine's processors serve"]);
    check("--steps 1 --threads 18446744073709551615", "DCC0054", &["processors serve", "without --threads"]);
    check("--steps 1 --max-isa avx3", "DCC0001", &["'avx3'", "'avx2'"]);
    check("--steps 1 --timeout -3", "DCC0054", &["--timeout -3: not a number of seconds"]);
    check("--steps 1 --lr-schedule sine", "DCC0054", &["sine"]);
    check("--steps 1 --resume auto", "DCC0054", &["--save-dir"]);
    check("--steps 1 --resume @/data", "DCC0054", &["no checkpoint there"]);
    let open = "run @/linear.onnx --data @/data --steps 1";
    refused(&folder, open, 2, "DCC0002", &["the size of `batch`", "--steps 1 --global-batch-size B"]);
    for huge in ["18446744073709551615", "0"] {
        let command = format!("{open} --global-batch-size {huge}");
        refused(&folder, &command, 2, "DCC0001", &[&format!("--global-batch-size {huge}"), "4294967296 samples"]);
    }
    let words = ["--tp belongs to `dcc compile`", "linear.dcc", "drop the flag"];
    refused(&folder, "run @/linear.dcc --data @/data --steps 1 --tp 2", 2, "DCC0001", &words);
    refused(&folder, "compile @/linear.dcc -o @/again.dcc", 2, "DCC0001", &["an artifact, which is compiled already"]);
    refused(&folder, "verify @/data", 2, "DCC0001", &["verify takes artifacts and models", "dcc export --onnx"]);
    refused(&folder, "verify @/linear.onnx --model @/linear.onnx", 2, "DCC0001", &["--model belongs to an artifact"]);
    refused(&folder, "verify @/linear.dcc --seed 2", 2, "DCC0001", &["--seed belongs to a model"]);
    refused(&folder, "explain DCC9999", 2, "DCC0001", &["no error code of dcc"]);
    refused(&folder, "inspect @/linear.onnx --stage 0", 2, "DCC0001", &["only artifacts have programs"]);
    refused(&folder, "inspect @/linear.onnx --timeline", 2, "DCC0001", &["only artifacts have programs"]);
    refused(&folder, "inspect @/linear.dcc --svg @/step.svg", 2, "DCC0001", &["--timeline"]);
    refused(&folder, "inspect @/linear.onnx --why w --model @/linear.onnx", 2, "DCC0001", &["only artifacts have a plan"]);
    refused(&folder, "inspect @/linear.dcc --why w", 2, "DCC0001", &["--model"]);
    refused(&folder, "inspect @/linear.dcc --stage 5", 2, "DCC0001", &["the artifact has 1 stages"]);
}

/// Flags that would change nothing in the run that they are given for.
#[test]
fn flags_without_a_part() {
    let folder = linear_case();
    put(&folder, "targets/x.npy", npy("<f4", "16, 3", &floats(48)));
    put(&folder, "targets/target.npy", npy("<f4", "16, 4", &floats(64)));
    put(&folder, "rates", "1e-3\n1e-3\n-1e-3\n1e-3\n");
    let run = "run @/linear.onnx --data @/targets --loss mse --global-batch-size 8 --steps 4 --threads 1";
    let check = |flags: &str, code: &str, words: &[&str]| {
        refused(&folder, &format!("{run} {flags}"), 2, code, words);
    };
    let of_loss = [
        ("--label-smoothing 0.1", "or next-token"),
        ("--ignore-index 3", "or next-token"),
        ("--class-dim 1", ""),
        ("--soft-labels", ""),
    ];
    for (flag, of) in of_loss {
        let name = flag.split(' ').next().unwrap_or(flag);
        let what = format!("{name} does not belong to --loss mse");
        check(flag, "DCC0001", &[&what, "output y", "use --loss cross-entropy", of]);
    }
    check("--dim nope=4", "DCC0001", &["the model has no symbolic dim `nope`", "its symbolic dims: `batch`"]);
    check("--min-lr 1e-5", "DCC0054", &["--min-lr is what the schedules linear and cosine end at"]);
    check("--lr-schedule @@/rates", "DCC0054", &["line 3: `-1e-3` is not a rate", "rates"]);
    check("--lr -1", "DCC0054", &["error[DCC0054]: --lr -1 is not a rate"]);
    let drawn = "--init-rule: all that match `*` begin with the values that they have";
    check("--init 1 --init-rule *=zeros", "DCC0054", &[drawn, "--init-all draws them anew"]);
    for (flag, help) in [("--save-every", "at the end"), ("--keep-last", "all checkpoints are kept")] {
        check(&format!("--save-dir @/saved {flag} 0"), "DCC0054", &[&format!("{flag} 0: it is 1 or more"), help]);
    }
    check("--eval-data @/targets --eval-every 0", "DCC0054", &["--eval-every 0: it is 1 or more", "at the end alone"]);
    put(&folder, "rates", "1e-3\n1e-3\n1e-3\n1e-3\n");
    check("--lr-schedule @@/rates --warmup 1", "DCC0054", &["--warmup has no part in --lr-schedule @FILE"]);
    check("--lr-schedule @@/rates --min-lr 1e-4", "DCC0054", &["--min-lr has no part in --lr-schedule @FILE"]);
    // What is harmless is told.
    let told = |flags: &str, text: &str| {
        let words = format!("{run} {flags}");
        let output = dcc(words.split(' ').map(|word| word.replace("@/", &folder.at("")))).ok();
        assert!(output.stderr.contains(&format!("warning: {text}")), "{flags}: {}", output.stderr);
    };
    told("--zero 3", "`--zero 3` changes nothing without `--dp`");
    told("--fsdp --tp 2", "`--zero 3` changes nothing without `--dp`");
    told("--schedule zb-h1", "`--schedule zb-h1` changes nothing without `--pp`");
    told("--param w=Shard(0)@tp", "`--param w=Shard(0)@tp` changes nothing without `--tp`");
    told("--dropout 0.5", "`--dropout 0.5` changes nothing: the model has no Dropout node");
    told("--bn-groups 2", "`--bn-groups 2` changes nothing: the model has no BatchNormalization of samples");
    told("--batch-norm local", "`--batch-norm local` changes nothing");
    let pins = "--tp 2 --param w=Shard(1)@tp --param w=Replicate";
    told(pins, "`--param w=Shard(1)@tp` does not count: a later flag says Replicate");
}

/// A model is not written over by what is trained from it.
#[test]
fn exports_onto_the_model() {
    let folder = linear_case();
    let run = "run @/linear.onnx --data @/data --global-batch-size 8 --steps 1 --save-dir @/saved";
    dcc(run.split(' ').map(|word| word.replace("@/", &folder.at("")))).ok();
    std::os::unix::fs::symlink("linear.onnx", folder.path().join("link.onnx")).expect("a link");
    let before = std::fs::read(folder.path().join("linear.onnx")).expect("a model");
    for (out, flag) in [("linear.onnx", "--onnx"), ("link.onnx", "--onnx"), ("linear.onnx", "--safetensors")] {
        let export = format!("export @/saved --model @/linear.onnx {flag} @/{out}");
        refused(&folder, &export, 2, "DCC0001", &[&format!("{flag} and --model are the same file"), "elsewhere"]);
    }
    let both = "export @/saved --model @/linear.onnx --onnx @/out --safetensors @/out";
    refused(&folder, both, 2, "DCC0001", &["--onnx and --safetensors are the same file"]);
    assert!(std::fs::read(folder.path().join("linear.onnx")).expect("a model") == before);
}

/// Outputs that cannot be written are found before the work, or leave nothing.
#[test]
fn places_that_cannot_be_written() {
    let folder = linear_case();
    put(&folder, "file", b"");
    let compile = "compile @/linear.onnx --global-batch-size 8";
    refused(&folder, &format!("{compile} -o @/nowhere/out.dcc"), 8, "DCC0801", &["nowhere", "its folders must exist"]);
    refused(&folder, &format!("{compile} -o /proc/out.dcc"), 8, "DCC0801", &["/proc/out.dcc"]);
    refused(&folder, &format!("{compile} -o @/data"), 8, "DCC0801", &["is a directory", "data"]);
    let run = "run @/linear.onnx --data @/data --global-batch-size 8 --steps 3";
    for (flag, path) in [
        ("--save-dir", "/proc/nowhere"),
        ("--save-dir", "@/file/saved"),
        ("--metrics-file", "@/nowhere/m.jsonl"),
        ("--trace", "@/nowhere/trace.json"),
    ] {
        let output = refused(&folder, &format!("{run} {flag} {path}"), 8, "DCC0801", &[&path.replace("@/", "")]);
        assert!(!output.stderr.contains("step 1"), "found before the first step: {}", output.stderr);
    }
}

#[test]
fn damaged_artifacts() {
    let folder = linear_case();
    dcc(["compile", &folder.at("linear.onnx"), "--global-batch-size", "8", "--embed-weights"]).ok();
    let whole = std::fs::read(folder.path().join("linear.dcc")).expect("an artifact");
    for part in 1..8 {
        let mut bytes = whole.clone();
        let at = bytes.len() * part / 8;
        bytes[at] ^= 1 << part;
        put(&folder, "linear.dcc", &bytes);
        let command = ["verify @/linear.dcc", "inspect @/linear.dcc", "run @/linear.dcc --data @/data --steps 1"][part % 3];
        refused(&folder, command, 5, "DCC0501", &["linear.dcc", "compile the model again"]);
    }
    put(&folder, "linear.dcc", &whole[..whole.len() - 100]);
    refused(&folder, "verify @/linear.dcc", 5, "DCC0501", &["cut off", "linear.dcc"]);
    // Large weights stay in the model's file; another file under its name is not taken.
    let run = |source: &str| format!("run @/{source} --data {MLP_DATA} --steps 1 --init 1");
    let bytes = std::fs::read(crate::tidy::root().join("samples/mlp/model.onnx")).expect("a model");
    put(&folder, "mlp.onnx", bytes);
    put(&folder, "weights.bin", vec![0; 5_000_000]);
    dcc(["compile", &folder.at("mlp.onnx"), "--global-batch-size", "8"]).ok();
    put(&folder, "weights.bin", vec![0; 4_999_999]);
    refused(&folder, &run("mlp.dcc"), 5, "DCC0501", &["weights.bin has 4999999 bytes, 5000000 when it was compiled"]);
    refused(&folder, "verify @/mlp.dcc", 5, "DCC0501", &["weights.bin has 4999999 bytes", "compile again"]);
}

#[test]
fn damaged_and_foreign_checkpoints() {
    let folder = linear_case();
    let run = "run @/linear.onnx --data @/data --global-batch-size 8 --steps 4 --resume @/saved";
    let words = ["run", &folder.at("linear.onnx"), "--data", &folder.at("data"), "--global-batch-size", "8", "--steps", "2"];
    dcc(words.into_iter().chain(["--save-dir", &folder.at("saved")])).ok();
    let step = folder.path().join("saved/step-00000002");
    let tensors = step.join("rank-00000.safetensors");
    let check = |path: &Path, change: &dyn Fn(&mut Vec<u8>), words: &[&str]| {
        let whole = std::fs::read(path).expect("a file");
        let mut bytes = whole.clone();
        change(&mut bytes);
        std::fs::write(path, bytes).expect("a file");
        refused(&folder, run, 5, "DCC0510", words);
        refused(&folder, "inspect @/saved/step-00000002", 5, "DCC0510", words);
        refused(&folder, "export @/saved --safetensors @/out.safetensors", 5, "DCC0510", words);
        std::fs::write(path, whole).expect("a file");
    };
    check(&tensors, &|bytes| *bytes.last_mut().expect("bytes") ^= 1, &["rank-00000.safetensors"]);
    check(&tensors, &|bytes| bytes.truncate(bytes.len() - 8), &["rank-00000.safetensors"]);
    check(&step.join("MANIFEST"), &|bytes| bytes[20] ^= 1, &["step-00000002"]);
    check(&step.join("MANIFEST"), &|bytes| bytes.clear(), &["step-00000002"]);
    // Whole again, but of another model.
    let other = format!("run {MLP} --data {MLP_DATA} --global-batch-size 8 --steps 4 --init 1 --resume @/saved");
    refused(&folder, &other, 5, "DCC0511", &["fc.0"]);
    let export = format!("export @/saved --model {MLP} --onnx @/out.onnx");
    refused(&folder, &export, 5, "DCC0511", &["the model has no `w`"]);
    refused(&folder, "export @/data --safetensors @/out.safetensors", 5, "DCC0510", &["no MANIFEST"]);
}

#[test]
fn losses_that_are_no_numbers() {
    let folder = linear_case();
    put(&folder, "targets/x.npy", npy("<f4", "16, 3", &floats(48)));
    put(&folder, "targets/target.npy", npy("<f4", "16, 4", &floats(64)));
    let run = "run @/linear.onnx --data @/targets --global-batch-size 8 --steps 9 --loss mse --lr 1e30 --optimizer sgd";
    let output = refused(&folder, run, 9, "DCC0901", &["the loss of step 2 is", "rank 0 at step 2", "smaller --lr"]);
    assert!(output.stderr.contains("lr 1e30"), "{}", output.stderr);
    let vast = "run @/linear.onnx --data @/targets --global-batch-size 8 --steps 1 --loss mse --init 1 --init-all --init-rule *=std:1e30";
    let output = refused(&folder, vast, 9, "DCC0901", &["the loss of step 1 is inf", "no step was made yet", "--dtype f64"]);
    assert!(!output.stderr.contains("--lr"), "{}", output.stderr);
    let run = "run @/linear.onnx --data @/data --global-batch-size 16 --steps 9";
    for (value, what) in [(f32::NAN, "NaN"), (f32::INFINITY, "an infinity")] {
        let mut values = floats(48);
        values[..4].copy_from_slice(&value.to_le_bytes());
        put(&folder, "data/x.npy", npy("<f4", "16, 3", &values));
        let input = format!("input `x` has {what} in its batch");
        let output =
            refused(&folder, run, 9, "DCC0901", &["the loss of step 1 is", &input, "rank 0 at step 1", "out of the data"]);
        assert!(!output.stderr.contains("--lr"), "{}", output.stderr);
    }
    put(&folder, "data/x.npy", npy("<f4", "16, 3", &floats(48)));
    put(&folder, "data/labels.npy", npy("<i8", "16,", &integers([-100; 16])));
    refused(&folder, run, 9, "DCC0901", &["is NaN: all `labels` of its batch are -100, which does not count"]);
}

/// What is on stdout is data, and the same mistake is explained by its code.
#[test]
fn pages_say_what_to_type() {
    let list = dcc(["explain"]).ok().stdout;
    assert!(list.lines().count() > 50, "{list}");
    for line in list.lines().step_by(6) {
        let (code, title) = line.split_once("  ").expect("code and title");
        let page = dcc(["explain", code]).ok().stdout;
        assert!(page.starts_with(&format!("{code}: {title}")) && page.contains("has exit code"), "{page}");
    }
    assert!(dcc(["explain", "312"]).ok().stdout.contains("Attention is split by whole heads"));
    let tokens = dcc(["run", GPT, "--data", TOKENS, "--global-batch-size", "4", "--steps", "2", "--init", "1"]).ok();
    assert!(tokens.stdout.is_empty() && tokens.stderr.contains("step 2/2  loss 5."), "{}", tokens.stderr);
}

/// What an operation needs beside the planned memory is more than any machine has.
#[test]
fn workspaces_beyond_the_machine() {
    let folder = Folder::new();
    let far = 1 << 20;
    let conv = with_ints(node("Conv", &["x", "w"], &["y"]), "dilations", &[far, far]);
    let conv = with_ints(conv, "pads", &[far; 4]);
    let mut wide = with_tensor(model(&[conv]), tensor("w", &[3, 2, 3, 3], &[0; 216]));
    wide.graph.as_mut().expect("a graph").input = vec![value("x", &[4, 2, 5, 5].map(size))];
    put_model(&folder, "wide.onnx", &wide);
    put(&folder, "data/x.npy", npy("<f4", "4, 2, 5, 5", &[0; 800]));
    let run = "run @/wide.onnx --data @/data --loss output --steps 1 --threads 1";
    refused(&folder, run, 8, "DCC0803", &["a workspace of", "convolution(", "dilations count"]);
}
