//! The CUDA back end on stand-ins for NVIDIA's libraries: kernels' texts compiled by g++, threads as fibers (`stand_in/`).

use crate::command::{Folder, Output, dcc, dcc_command, finish, spawn};
use crate::stand_in::{FLAGS, StandIns, cxx};
use serde_json::Value;
use std::process::Command;

/// `dcc WORDS` with a stand-in GPU.
fn on_gpu(words: &[&str], environment: &[(&str, &str)]) -> Output {
    let stand_ins = StandIns::get();
    let mut command = dcc_command();
    command.args(words).env("LD_LIBRARY_PATH", stand_ins.path());
    command.env("DCC_STAND_IN_CXX", stand_ins.compiler(FLAGS)).env("DCC_STAND_IN_CACHE", stand_ins.path());
    // No machine code from other runs: it might have another fault, or none.
    let own = Folder::new();
    command.env("XDG_CACHE_HOME", own.path());
    command.envs(environment.iter().copied());
    finish(spawn(&mut command))
}

fn compiled(folder: &Folder, model: &str, flags: &str) -> String {
    let artifact = folder.at("art.dcc");
    let words = ["compile", model, "-o", &artifact].into_iter().chain(flags.split_whitespace());
    dcc(words).ok();
    artifact
}

/// What `dcc verify --kernels cuda` found.
fn checked(artifact: &str, seed: &str) -> Value {
    let found = on_gpu(&["verify", artifact, "--kernels", "cuda", "--json"], &[("DCC_STAND_IN_SEED", seed)]).ok().json();
    found["kernels"].clone()
}

#[test]
fn generated_kernels_of_models_agree_with_float64() {
    for (model, flags) in [
        ("gpt2_tiny", "--global-batch-size 4 --optimizer adamw --grad-clip 1"),
        ("gpt2_tiny_dropout", "--tp 2 --dp 2 --zero 3 --grad-accum 2 --global-batch-size 8"),
        ("llama_tiny", "--global-batch-size 4 --dtype bf16 --optimizer lion"),
        ("gpt2_tiny", "--global-batch-size 4 --dtype bf16 --param-dtype bf16 --dp 2 --zero 1"),
        ("bert_tiny", "--pp 2 --grad-accum 2 --global-batch-size 8 --optimizer lamb"),
        ("cnn", "--global-batch-size 4 --dtype f16 --optimizer adafactor"),
        ("static_mixer", "--dtype f64 --optimizer muon"),
        ("families/moe", "--ep 2 --global-batch-size 4"),
        ("families/t5", "--global-batch-size 4 --dtype bf16"),
    ] {
        let folder = Folder::new();
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), flags);
        for seed in ["1", "2", "3"] {
            let found = checked(&artifact, seed);
            assert!(found["kernels"].as_u64() > Some(10) && found["too_large"] == 0, "{model}: {found}");
            assert!(found["worst"].as_f64().is_some_and(|worst| worst <= 1.0), "{model}: {found}");
            assert!(found["tails"].as_u64() > Some(0), "{model}: {found}");
        }
    }
}

/// Wide rows, long columns and sums over all of a tensor: a block for a row, and reductions in parts.
#[test]
fn kernels_of_large_tensors_agree_with_float64() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/mlp.onnx", "--global-batch-size 4000 --optimizer adamw --grad-clip 1");
    let found = checked(&artifact, "1");
    assert!(found["too_large"] == 0 && found["worst"].as_f64().is_some_and(|worst| worst <= 1.0), "{found}");
}

/// The first steps of a run: losses and gradient norms.
fn steps(run: &dyn Fn(&[&str]) -> Output, artifact: &str, data: &str, more: &[&str]) -> Vec<[f64; 2]> {
    let folder = Folder::new();
    let metrics = folder.at("metrics.jsonl");
    let data = format!("tests/models/data/{data}.npz");
    let words = ["run", artifact, "--data", &data, "--init", "1", "--lr", "0.01", "--metrics-file", &metrics];
    run(&[&words[..], more].concat()).ok();
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    let record = |line: &str| -> Value { serde_json::from_str(line).expect("JSON") };
    let of = |record: Value| ["loss", "grad_norm"].map(|key| record[key].as_f64().unwrap_or(0.0));
    text.lines().map(|line| of(record(line))).collect()
}

fn on_cpu(words: &[&str]) -> Output {
    dcc(words)
}

fn on_stand_in(words: &[&str]) -> Output {
    on_gpu(&[words, &["--device", "cuda"]].concat(), &[])
}

/// The largest difference, relatively; infinite where something is no number.
fn difference(a: &[[f64; 2]], b: &[[f64; 2]]) -> f64 {
    assert!(!a.is_empty() && a.len() == b.len(), "{a:?} {b:?}");
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    let each = pairs.map(|(x, y)| (x - y).abs() / x.abs().max(1.0));
    each.map(|x| if x.is_nan() { f64::INFINITY } else { x }).fold(0.0, f64::max)
}

/// Partitioned models on 1, 2 and 4 ranks, 5 steps: every kernel, collectives through the host, microbatches, in each precision.
#[test]
fn training_on_gpus_equals_the_cpu() {
    for (model, data, flags, bound) in [
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --optimizer adamw --grad-clip 1", 1e-5),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dp 2 --zero 3 --grad-accum 2 --grad-clip 1", 1e-5),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --tp 2 --pp 2 --grad-accum 2", 1e-5),
        ("gpt2_tiny_dropout", "gpt2_tiny_next", "--global-batch-size 4 --tp 2 --sequence-parallel", 1e-5),
        ("llama_tiny", "gpt2_tiny_next", "--global-batch-size 4 --cp 2 --optimizer lamb", 1e-5),
        ("cnn", "mlp", "--global-batch-size 8 --dp 2 --optimizer sgd", 1e-5),
        ("cnn", "mlp", "--global-batch-size 4 --dtype f64", 1e-11),
        ("families/resnet", "mlp", "--global-batch-size 8 --dp 2 --tp 2 --optimizer sgd", 1e-5),
        // Roundings of half floats fall elsewhere where sums have another order.
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dtype bf16 --optimizer sgd", 5e-3),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dtype bf16 --param-dtype bf16 --optimizer sgd", 5e-3),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dtype f16 --optimizer sgd", 5e-3),
    ] {
        let folder = Folder::new();
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), flags);
        let [cpu, gpu] =
            [&on_cpu as &dyn Fn(&[&str]) -> Output, &on_stand_in].map(|run| steps(run, &artifact, data, &["--steps", "5"]));
        let found = difference(&cpu, &gpu);
        assert!(found <= bound, "{model} {flags}: {found:e}\n{cpu:?}\n{gpu:?}");
    }
}

/// Launches of nests that do not need each other are one, and products have tails, which changes no bit. The control runs each by itself, as a trace wants it.
#[test]
fn neighbouring_launches_are_one() {
    let folder = Folder::new();
    for (model, flags, factor) in [
        ("gpt2_tiny", "--global-batch-size 4 --optimizer adamw --grad-clip 1", 2.1),
        ("llama_tiny", "--global-batch-size 4 --optimizer adamw --dtype bf16", 1.2),
        ("gpt2_tiny", "--global-batch-size 4 --dp 2 --zero 3 --grad-accum 2 --grad-clip 1", 1.2),
    ] {
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), flags);
        let [counted, trace] = ["launches", "trace.json"].map(|name| folder.at(name));
        let run = |more: &[&str], count: &str| {
            let environment = [("DCC_STAND_IN_LAUNCHES", counted.as_str())];
            let on = |words: &[&str]| on_gpu(&[words, &["--device", "cuda", "--steps", count], more].concat(), &environment);
            let found = steps(&on, &artifact, "gpt2_tiny_next", &[]);
            let launches: f64 = std::fs::read_to_string(&counted).expect("a count").trim().parse().expect("a number");
            (found, launches)
        };
        let of_a_step = |more: &[&str]| {
            let ((_, fewer), (found, all)) = (run(more, "2"), run(more, "3"));
            (found, all - fewer)
        };
        let (together, alone) = (of_a_step(&[]), of_a_step(&["--trace", &trace]));
        assert_eq!(together.0, alone.0, "{model} {flags}");
        assert!(together.1 * factor < alone.1, "{model} {flags}: {} launches of {}", together.1, alone.1);
        let said = on_gpu(&["verify", &artifact, "--kernels", "sm_90a", "--json"], &[]).ok().json()["kernels"].clone();
        let [launches, without, tails] =
            ["launches", "launches_without_groups", "tails"].map(|key| said[key].as_f64().expect("a count"));
        assert!(tails > 0.0, "{model} {flags}: no product has a tail");
        // Ranks launch what they transfer, too.
        match flags.contains("--dp 2") {
            true => assert_eq!(2.0 * (without - launches), alone.1 - together.1, "{model} {flags}"),
            false => assert_eq!([launches, without], [together.1, alone.1], "{model} {flags}"),
        }
    }
}

/// What ranks on GPUs transfer: by what reads where, on one GPU or several, and in whatever order streams come, the bits are the same. The
/// control: streams that wait for no event.
#[test]
fn transfers_between_gpus_are_ordered_by_events_alone() {
    let folder = Folder::new();
    for flags in ["--dp 2 --zero 3 --grad-accum 2 --grad-clip 1", "--tp 2 --pp 2 --grad-accum 2", "--cp 2 --dp 2"] {
        let flags = format!("--global-batch-size 4 {flags}");
        let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", &flags);
        let run = |environment: &[(&str, &str)]| {
            let on = |words: &[&str]| on_gpu(&[words, &["--device", "cuda"]].concat(), environment);
            steps(&on, &artifact, "gpt2_tiny_next", &["--steps", "3"])
        };
        let direct = run(&[]);
        for environment in [
            [("DCC_STAND_IN_SEED", "2"), ("DCC_STAND_IN_DEVICES", "2")],
            [("DCC_STAND_IN_SEED", "3"), ("DCC_STAND_IN_DEVICES", "4")],
            [("DCC_STAND_IN_APART", "1"), ("DCC_STAND_IN_DEVICES", "2")],
        ] {
            assert_eq!(direct, run(&environment), "{flags} {environment:?}");
        }
        let words = ["run", &artifact, "--data", "tests/models/data/gpt2_tiny_next.npz", "--init", "1", "--lr", "0.01"];
        let more = ["--steps", "3", "--device", "cuda", "--json"];
        let unordered = on_gpu(&[&words[..], &more].concat(), &[("DCC_STAND_IN_UNORDERED", "1")]);
        let wrong = unordered.code != Some(0) || unordered.json()["last"]["loss"].as_f64() != Some(direct[2][0]);
        assert!(wrong, "the control of {flags}: {unordered:?}");
    }
}

/// Every kind of transfer, of dims that are not the first and uneven ones too.
#[test]
fn ranks_exchange_by_nccl() {
    let folder = Folder::new();
    let path = StandIns::get().with_more();
    for (model, data, flags) in [
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dp 2 --zero 3 --grad-accum 2 --grad-clip 1"),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --tp 2 --pp 2 --grad-accum 2 --sequence-parallel"),
        ("gpt2_tiny", "gpt2_tiny_next", "--global-batch-size 4 --cp 2 --dp 2 --dtype bf16 --optimizer sgd"),
        ("families/resnet", "mlp", "--global-batch-size 8 --dp 2 --tp 2 --optimizer sgd"),
    ] {
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), flags);
        let on = |words: &[&str]| {
            let more = ["--device", "cuda", "--gpu-comm", "nccl", "--gemm", "own"];
            on_gpu(&[words, &more].concat(), &[("LD_LIBRARY_PATH", &path), ("DCC_STAND_IN_DEVICES", "4")])
        };
        let [cpu, gpu] = [&on_cpu as &dyn Fn(&[&str]) -> Output, &on].map(|run| steps(run, &artifact, data, &["--steps", "3"]));
        let (found, bound) = (difference(&cpu, &gpu), if flags.contains("bf16") { 5e-3 } else { 1e-5 });
        assert!(found <= bound, "{model} {flags}: {found:e}\n{cpu:?}\n{gpu:?}");
    }
    let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", "--global-batch-size 4 --tp 2");
    let words = ["run", &artifact, "--data", "tests/models/data/gpt2_tiny_next.npz", "--init", "1", "--steps", "1"];
    let missing = on_gpu(&[&words[..], &["--device", "cuda", "--gpu-comm", "nccl"]].concat(), &[]);
    assert!(missing.code == Some(8) && missing.stderr.contains("NCCL is not installed"), "{missing:?}");
}

/// A rank whose loss is no number ends, while others compute: with the reason, and nothing else.
#[test]
fn a_rank_that_fails_ends_the_run() {
    let folder = Folder::new();
    for flags in ["--dp 2 --zero 3", "--tp 2 --pp 2 --grad-accum 2", "--cp 2 --dp 2"] {
        let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", &format!("--global-batch-size 4 {flags}"));
        let words = ["run", &artifact, "--data", "tests/models/data/gpt2_tiny_next.npz", "--init", "1", "--lr", "1e30"];
        for seed in ["1", "2", "3"] {
            let found = on_gpu(&[&words[..], &["--steps", "6", "--device", "cuda"]].concat(), &[("DCC_STAND_IN_SEED", seed)]);
            assert!(found.code == Some(9) && found.stderr.contains("the loss of step"), "{flags}: {found:?}");
        }
    }
}

/// Products by the vendor's library, in each type; the control: its results are used.
#[test]
fn the_vendor_s_products_are_taken_where_they_are_faster() {
    let folder = Folder::new();
    let path = StandIns::get().with_more();
    let cache = folder.at("cache");
    let vendor = [("LD_LIBRARY_PATH", path.as_str()), ("XDG_CACHE_HOME", &cache)];
    for (model, data, flags, bound) in [
        ("gpt2_tiny", "gpt2_tiny_next", "--tp 2 --grad-accum 2 --optimizer sgd", 1e-5),
        ("gpt2_tiny", "gpt2_tiny_next", "--dtype bf16 --optimizer sgd", 5e-3),
        ("gpt2_tiny", "gpt2_tiny_next", "--dtype f16 --optimizer sgd", 5e-3),
        ("cnn", "mlp", "--dtype f64", 1e-11),
    ] {
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), &format!("--global-batch-size 4 {flags}"));
        let run = |more: &[&str], scale: &str| {
            let environment = [&vendor[..], &[("DCC_STAND_IN_PRODUCT", scale)]].concat();
            let on = |words: &[&str]| on_gpu(&[words, &["--device", "cuda"], more].concat(), &environment);
            steps(&on, &artifact, data, &["--steps", "3"])
        };
        let cpu = steps(&on_cpu, &artifact, data, &["--steps", "3"]);
        let first = run(&[], "1");
        let found = difference(&cpu, &first);
        assert!(found <= bound, "{model} {flags}: {found:e}");
        assert_eq!(run(&[], "1"), first, "the same choices in the second run");
        assert_ne!(run(&[], "1.1"), first, "the control of {model} {flags}");
        assert_eq!(run(&["--gemm", "own"], "1.1"), run(&["--gemm", "own"], "1"));
    }
    let kept = std::fs::read_to_string(folder.path().join("cache/dcc/kernels/choices")).expect("choices");
    assert!(kept.lines().count() > 20 && kept.contains(" with tail "), "{kept}");
}

/// Attention by the vendor's library: several query heads of a key head, on ranks and without. The controls: its results are used, and where
/// it computes another attention it is left out.
#[test]
fn the_vendor_s_attention_is_taken_where_it_is_faster() {
    let folder = Folder::new();
    let path = StandIns::get().with_more();
    for (number, (model, flags)) in
        [("gpt2_tiny", "--dtype bf16"), ("gpt2_tiny", "--dtype f16 --tp 2"), ("llama_tiny", "--dtype bf16 --grad-accum 2")]
            .into_iter()
            .enumerate()
    {
        let flags = format!("--global-batch-size 4 --optimizer sgd {flags}");
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), &flags);
        let run = |more: &[&str], scale: &str, cache: &str| {
            let cache = folder.at(&format!("{cache}-{number}"));
            let environment =
                [("LD_LIBRARY_PATH", path.as_str()), ("XDG_CACHE_HOME", &cache), ("DCC_STAND_IN_ATTENTION", scale)];
            let on = |words: &[&str]| on_gpu(&[words, &["--device", "cuda", "--gemm", "own"], more].concat(), &environment);
            steps(&on, &artifact, "gpt2_tiny_next", &["--steps", "3"])
        };
        let cpu = steps(&on_cpu, &artifact, "gpt2_tiny_next", &["--steps", "3"]);
        let first = run(&[], "1", "kept");
        let found = difference(&cpu, &first);
        assert!(found <= 5e-3, "{model} {flags}: {found:e}");
        assert_eq!(run(&[], "1", "kept"), first, "the same choices in the second run");
        assert_ne!(run(&[], "1.02", "kept"), first, "the control of {model} {flags}");
        let own = run(&["--attention", "own"], "1.02", "kept");
        assert_eq!(own, run(&["--attention", "own"], "1", "kept"));
        assert_eq!(own, run(&[], "1.1", "other"), "{model} {flags}: another attention is left out");
        let kept = std::fs::read_to_string(folder.path().join(format!("kept-{number}/dcc/kernels/choices"))).expect("choices");
        let chosen =
            kept.lines().filter(|line| line.contains(" attention ") && (line.starts_with("1 ") || line.starts_with("2 ")));
        assert_eq!(chosen.count(), 2, "{kept}");
    }
}

/// Every instruction on both devices; a wrong one is named.
#[test]
fn both_devices_are_compared_instruction_by_instruction() {
    let folder = Folder::new();
    for (model, data, flags) in [
        ("gpt2_tiny_dropout", "gpt2_tiny_next", "--global-batch-size 4 --tp 2 --dp 2 --zero 3 --optimizer adamw --grad-clip 1"),
        ("llama_tiny", "gpt2_tiny_next", "--global-batch-size 4 --dtype bf16 --optimizer lion"),
        ("cnn", "mlp", "--global-batch-size 8 --dtype f16 --grad-accum 2"),
    ] {
        let artifact = compiled(&folder, &format!("tests/models/{model}.onnx"), flags);
        let data = format!("tests/models/data/{data}.npz");
        let words = ["run", &artifact, "--data", &data, "--init", "1", "--lr", "0.01", "--steps", "2", "--device", "both"];
        let found = on_gpu(&words, &[]).ok();
        assert!(
            found.stderr.contains("rank 0: ") && found.stderr.contains("results of stand-in and the CPU agree"),
            "{found:?}"
        );
        let wrong = on_gpu(&words, &[("DCC_STAND_IN_FAULT", "blockIdx.x=>(blockIdx.x / 2)")]);
        assert!(wrong.code == Some(8) && wrong.stderr.contains("of the GPU differs from the CPU's by"), "{wrong:?}");
    }
}

/// Work that stands still is an error that names it; so is one on a rank that others wait for.
#[test]
fn a_stuck_gpu_is_named() {
    let folder = Folder::new();
    for (flags, launch) in [("--global-batch-size 4", "40"), ("--global-batch-size 4 --tp 2", "90")] {
        let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", flags);
        let words = ["run", &artifact, "--data", "tests/models/data/gpt2_tiny_next.npz", "--init", "1", "--lr", "0.01"];
        let more = ["--steps", "3", "--device", "cuda", "--timeout", "3"];
        let found = on_gpu(&[&words[..], &more].concat(), &[("DCC_STAND_IN_STUCK", launch)]);
        let named =
            ["the GPU has done nothing for 3.0 s", "ward: b", "--timeout"].iter().all(|part| found.stderr.contains(part));
        assert!(found.code == Some(7) && named, "{found:?}");
    }
}

/// The control of the comparison, and of products: one in a thousand is enough.
#[test]
fn a_wrong_product_is_seen_in_losses() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/mlp.onnx", "--global-batch-size 8");
    let cpu = steps(&on_cpu, &artifact, "mlp", &["--steps", "3"]);
    let fault = ("DCC_STAND_IN_FAULT", "sums[i][j] += x[i] * y[j]?=>sums[i][j] += x[i] * y[j] * 1.001f");
    let wrong = |words: &[&str]| on_gpu(&[words, &["--device", "cuda"]].concat(), &[fault]);
    assert!(difference(&cpu, &steps(&wrong, &artifact, "mlp", &["--steps", "3"])) > 1e-5);
}

/// A second run compiles nothing; what is damaged is made again.
#[test]
fn machine_code_is_kept() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/mlp.onnx", "--global-batch-size 8");
    let cache = folder.at("cache");
    let words = ["verify", &artifact, "--kernels", "cuda"];
    let (kept, no_compiler) = (("XDG_CACHE_HOME", cache.as_str()), ("DCC_STAND_IN_FAULT", "nothing of the kind=>"));
    assert!(on_gpu(&words, &[kept, no_compiler]).stderr.contains("nothing of the kind"), "the control");
    on_gpu(&words, &[kept]).ok();
    on_gpu(&words, &[kept, no_compiler]).ok();
    for file in std::fs::read_dir(folder.path().join("cache/dcc/kernels")).expect("a folder") {
        std::fs::write(file.expect("a file").path(), "damaged").expect("written");
    }
    assert_eq!(on_gpu(&words, &[kept, no_compiler]).code, Some(8));
    on_gpu(&words, &[kept]).ok();
}

/// NVRTC is where an artifact is compiled, and not where it runs.
#[test]
fn machine_code_comes_with_an_artifact() {
    let folder = Folder::new();
    let without = Folder::new();
    std::os::unix::fs::symlink(StandIns::get().path().join("libcuda.so"), without.at("libcuda.so")).expect("a link");
    let model = "tests/models/gpt2_tiny.onnx";
    let flags = "--global-batch-size 4 --tp 2 --grad-clip 1";
    let data = "tests/models/data/gpt2_tiny_next.npz";
    let trace = folder.at("trace.json");
    let evaluated = ["--eval-data", data, "--steps", "2"];
    let traced = [&evaluated[..], &["--trace", &trace]].concat();
    let bare = |words: &[&str]| {
        on_gpu(&[words, &["--device", "cuda"]].concat(), &[("LD_LIBRARY_PATH", &without.path().display().to_string())])
    };
    let with = |arch: &str| {
        let artifact = folder.at(&format!("{arch}.dcc"));
        let words = ["compile", model, "-o", &artifact, "--arch", arch].into_iter().chain(flags.split_whitespace());
        on_gpu(&words.collect::<Vec<_>>(), &[]).ok();
        artifact
    };
    let expected = steps(&on_stand_in, &compiled(&folder, model, flags), "gpt2_tiny_next", &evaluated);
    for arch in ["sm_90a", "sm_80,compute_80"] {
        let artifact = with(arch);
        assert_eq!(steps(&bare, &artifact, "gpt2_tiny_next", &evaluated), expected, "{arch}");
        // Each kernel by itself.
        assert_eq!(steps(&bare, &artifact, "gpt2_tiny_next", &traced), expected, "{arch}");
        let text = dcc(["inspect", &artifact]).ok().stdout;
        assert!(text.contains(&format!("code      {}", arch.replace(',', ", "))), "{text}");
    }
    // Code for another generation, and none.
    for (artifact, says) in
        [(with("sm_80"), "other GPUs than sm_90a: sm_80"), (compiled(&folder, model, flags), "--arch sm_90a")]
    {
        let error = bare(&["run", &artifact, "--data", data, "--init", "1", "--steps", "1"]);
        assert_ne!(error.code, Some(0));
        assert!(error.stderr.contains("NVRTC") && error.stderr.contains(says), "{}", error.stderr);
    }
}

/// What is saved on a GPU goes on on the CPU.
#[test]
fn checkpoints_of_gpus_are_those_of_the_cpu() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", "--global-batch-size 4 --tp 2 --optimizer adamw");
    let saved = folder.at("saved");
    let whole = steps(&on_cpu, &artifact, "gpt2_tiny_next", &["--steps", "5"]);
    let first = steps(&on_stand_in, &artifact, "gpt2_tiny_next", &["--steps", "3", "--save-dir", &saved]);
    let rest = steps(&on_cpu, &artifact, "gpt2_tiny_next", &["--steps", "5", "--save-dir", &saved, "--resume", "auto"]);
    assert!(difference(&whole, &[first, rest].concat()) <= 1e-5);
}

/// Bugs planted in kernels' texts, of which none is in all: no kernel passes that has one.
#[test]
fn planted_bugs_are_found() {
    let folder = Folder::new();
    let plain = compiled(&folder, "tests/models/gpt2_tiny.onnx", "--global-batch-size 4 --optimizer adamw --grad-clip 1");
    let other = Folder::new();
    let halves = compiled(&other, "tests/models/gpt2_tiny_dropout.onnx", "--global-batch-size 4 --dtype bf16");
    for (artifact, fault) in [
        (&plain, "across = 16?=>across = 8"),
        (&plain, "x = F::of(x, exchanged(x, across))?=>x = exchanged(x, across)"),
        (&plain, "__syncthreads();\n        x = parts?=>x = parts"),
        (&plain, "GELU_SCALE = 0.797?=>GELU_SCALE = 0.787"),
        (&plain, "op::rsqrt(?=>op::sqrt("),
        (&plain, "op::exp(?=>op::expm1("),
        (&plain, "blockIdx.x?=>(blockIdx.x / 2)"),
        (&plain, "trip < ?=>trip + 1 < "),
        (&plain, " + v;?=> + v / 2;"),
        (&halves, "bits + 0x7fff + (bits >> 16 & 1)?=>bits + 0x17fff"),
        (&halves, "word >> 8?=>word >> 9"),
        (&halves, "round < 10?=>round < 9"),
    ] {
        let found = on_gpu(&["verify", artifact, "--kernels", "cuda"], &[("DCC_STAND_IN_FAULT", fault)]);
        let named = found.stderr.contains("a kernel's results differ from float64's");
        assert!(found.code.is_some_and(|code| code > 2) && named, "{fault}: {}{}", found.stdout, found.stderr);
    }
    let fault = "tail(V::out(batch, m + row, n + column), x)?=>tail(V::out(batch, m + row, n), x)";
    let found = on_gpu(&["verify", &plain, "--kernels", "cuda"], &[("DCC_STAND_IN_FAULT", fault)]);
    assert!(found.stderr.contains("other bits with the kernel behind it"), "{}{}", found.stdout, found.stderr);
}

/// Every access of every kernel, under AddressSanitizer: operands are allocated one by one. The control reads past one.
#[test]
fn kernels_stay_inside_of_their_operands() {
    let folder = Folder::new();
    let artifact =
        compiled(&folder, "tests/models/gpt2_tiny.onnx", "--global-batch-size 4 --tp 2 --optimizer adamw --grad-clip 1");
    let sanitizer = sanitizer();
    let compiler = StandIns::get().compiler("-O1 -fsanitize=address");
    let environment = [
        ("DCC_STAND_IN_CXX", compiler.as_str()),
        ("LD_PRELOAD", &sanitizer),
        ("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0:detect_stack_use_after_return=0"),
    ];
    on_gpu(&["verify", &artifact, "--kernels", "cuda"], &environment).ok();
    let beyond = [&environment[..], &[("DCC_STAND_IN_FAULT", "widen(x0[?=>widen(x0[(1 << 20) + ")]].concat();
    let found = on_gpu(&["verify", &artifact, "--kernels", "cuda"], &beyond);
    assert!(found.code != Some(0) && found.stderr.contains("AddressSanitizer"), "{}", found.stderr);
}

/// The file of AddressSanitizer's runtime.
fn sanitizer() -> String {
    let asked = Command::new(cxx()).arg("-print-file-name=libasan.so").output().expect("a C++ compiler");
    String::from_utf8_lossy(&asked.stdout).trim().to_owned()
}

#[test]
fn the_cpu_s_kernels_agree_with_float64_too() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/gpt2_tiny.onnx", "--global-batch-size 4 --grad-clip 1");
    let text = dcc(["verify", &artifact, "--kernels", "cpu"]).ok().stdout;
    assert!(text.contains("kernels by themselves on this CPU are within"), "{text}");
}

#[test]
fn a_machine_without_a_gpu_says_so() {
    let folder = Folder::new();
    let artifact = compiled(&folder, "tests/models/mlp.onnx", "--global-batch-size 4");
    let mut command = dcc_command();
    command.args(["verify", &artifact, "--kernels", "cuda"]).env_remove("LD_LIBRARY_PATH");
    let found = finish(spawn(&mut command));
    let refused = found.code == Some(8) && found.stderr.contains("no NVIDIA driver is installed");
    assert!(refused || found.stdout.contains("kernels by themselves on NVIDIA"), "{found:?}");
    let refused = on_gpu(&["verify", &artifact, "--kernels", "cuda"], &[("DCC_STAND_IN_DEVICES", "0")]);
    assert!(refused.code == Some(8) && refused.stderr.contains("the NVIDIA driver does not start"), "{refused:?}");
}
