//! Mixed precision against PyTorch's autocast: every file of `tests/golden/autocast`, as processes.
//!
//! Rounding makes runs differ, more so with every step. A run is good that differs from PyTorch's in f32 hardly more, on average, than
//! PyTorch's own run under `torch.autocast` does. The same with the learning rate off by 5 % must differ by more.

use crate::command::{Folder, dcc};
use crate::numbers::exported;
use crate::tidy::root;
use crate::tolerance::{AUTOCAST, numbers, of_half};
use dcc_program::DType;
use serde_json::Value;
use std::collections::BTreeMap;

struct Golden(Value);

/// With it a gradient is much of the sum that it is subtracted in.
const RATE: f64 = 64.0;

impl Golden {
    fn of(name: &str) -> Golden {
        let path = root().join("tests/golden/autocast").join(format!("{name}.json"));
        Golden(serde_json::from_str(&std::fs::read_to_string(path).expect("a golden")).expect("JSON"))
    }

    /// The losses of `dcc run` with the golden's flags, initial values `seed`, the learning rate times `rate`, and more flags.
    fn losses(&self, seed: u64, rate: f64, more: &str) -> Vec<f64> {
        let folder = Folder::new();
        let mut flags: Vec<String> = serde_json::from_value(self.0["flags"].clone()).expect("flags");
        let at = |name: &str| 1 + flags.iter().position(|flag| flag == name).expect("a flag");
        let (init, lr) = (at("--init"), at("--lr"));
        flags[init] = seed.to_string();
        flags[lr] = (flags[lr].parse::<f64>().expect("a number") * rate).to_string();
        let metrics = folder.at("metrics.jsonl");
        let mut words = vec!["run".to_owned()];
        words.extend(flags);
        words.extend(more.split_whitespace().map(str::to_owned));
        words.extend(["--metrics-file".to_owned(), metrics]);
        dcc(&words).ok();
        folder.lines("metrics.jsonl").iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
    }

    /// By parameter, the gradient of the first batch: what one step of gradient descent changes.
    fn gradients(&self, more: &str) -> BTreeMap<String, Vec<f64>> {
        let descends = |rate: f64| {
            let (folder, saved) = (Folder::new(), "saved");
            let flags: Vec<String> = serde_json::from_value(self.0["flags"].clone()).expect("flags");
            let same = ["--data", "--init", "--init-rule", "--global-batch-size", "--order"];
            let pairs = flags[1..].chunks(2).filter(|pair| same.contains(&&pair[0][..]));
            let saved = folder.at(saved);
            let descent = format!("--optimizer sgd --lr {rate:e} --steps 1 --save-dir {saved} {more}");
            let words: Vec<&str> = ["run", &flags[0]]
                .into_iter()
                .chain(pairs.flatten().map(|word| &word[..]))
                .chain(descent.split_whitespace())
                .collect();
            dcc(words).ok();
            exported(&folder, &saved)
        };
        let (before, after) = (descends(f64::from(f32::MIN_POSITIVE)), descends(RATE));
        let gradient = |(name, from): (String, Vec<f64>)| {
            let change = from.iter().zip(&after[&name]).map(|(from, to)| (from - to) / RATE).collect();
            (name, change)
        };
        before.into_iter().map(gradient).collect()
    }

    /// The losses of each of the golden's initial values.
    fn all_losses(&self, rate: f64, more: &str) -> Vec<Vec<f64>> {
        let seeds: Vec<u64> = serde_json::from_value(self.0["seeds"].clone()).expect("seeds");
        seeds.into_iter().map(|seed| self.losses(seed, rate, more)).collect()
    }

    /// PyTorch's, in f32 or under autocast.
    fn expected(&self, dtype: &str) -> Vec<Vec<f64>> {
        self.0[dtype].as_array().expect("runs").iter().map(numbers).collect()
    }

    /// Of each run, the mean over steps of the distance from PyTorch's f32 losses.
    fn off(&self, runs: &[Vec<f64>]) -> Vec<f64> {
        let exact = self.expected("f32");
        assert_eq!(runs.len(), exact.len());
        let apart = |(losses, exact): (&Vec<f64>, &Vec<f64>)| {
            assert_eq!(losses.len(), exact.len());
            losses.iter().zip(exact).map(|(x, y)| (x - y).abs()).sum::<f64>() / exact.len() as f64
        };
        runs.iter().zip(&exact).map(apart).collect()
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The mean distance over steps and initial values.
fn check(name: &str, dtypes: &[&str]) {
    let golden = Golden::of(name);
    for dtype in dtypes {
        let theirs = golden.off(&golden.expected(dtype));
        let allowed = AUTOCAST * mean(&theirs);
        let scale = golden.0["loss_scale"].as_f64().filter(|_| *dtype == "f16").map(|scale| format!(" --loss-scale {scale}"));
        let flags = format!("--dtype {dtype}{}", scale.unwrap_or_default());
        let ours = golden.off(&golden.all_losses(1.0, &flags));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            println!("{name} {dtype}: distance {ours:.2e}, autocast's {theirs:.2e}");
        }
        let off = mean(&ours);
        println!("{name} {dtype}: mean distance {off:.2e}, {:.2} of autocast's", off / allowed * AUTOCAST);
        assert!(off <= allowed, "{name} {dtype}: {off:e} off where {allowed:e} are allowed");
        assert!(off > allowed / 30.0, "{name} {dtype}: {off:e} off is no mixed precision");
        let control = mean(&golden.off(&golden.all_losses(1.05, &flags)));
        assert!(control > allowed, "{name} {dtype}: a rate off by 5 % is accepted: {control:e}");
    }
}

#[test]
fn gpt_trains_as_near_as_under_autocast() {
    check("gpt2_tiny", &["bf16", "f16"]);
}

#[test]
fn convolutions_train_as_near_as_under_autocast() {
    check("cnn", &["bf16", "f16"]);
}

/// Of each parameter, how far its gradient of the first batch is from that in f32, beside what PyTorch's is under autocast: on average no
/// further, none much further. (Losses of 200 steps part by chance more than by precision: another loss scale, which is exact, may double
/// or halve their distance.)
#[test]
fn gradients_are_as_near_as_under_autocast() {
    for name in ["gpt2_tiny", "cnn", "sample_gpt"] {
        let golden = Golden::of(name);
        let exact = golden.gradients("");
        let off = |found: &BTreeMap<String, Vec<f64>>, name: &str| {
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            norm(&mut found[name].iter().zip(&exact[name]).map(|(x, y)| x - y)) / norm(&mut exact[name].iter().copied())
        };
        for (dtype, flags) in [("bf16", "--dtype bf16"), ("f16", "--dtype f16 --loss-scale 8192")] {
            let found = golden.gradients(flags);
            let autocast = golden.0["gradients"][dtype].as_object().expect("parameters");
            let ratios: Vec<(f64, &String)> = autocast
                .iter()
                .map(|(name, allowed)| (off(&found, name) / allowed.as_f64().expect("a number"), name))
                .collect();
            let mean = (ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
            let (most, worst) = ratios
                .iter()
                .copied()
                .fold((0.0, &ratios[0].1[..]), |most, (ratio, name)| if ratio > most.0 { (ratio, name) } else { most });
            println!("{name} {dtype}: {mean:.2} of autocast's distance, at most {most:.2} ({worst})");
            assert!((0.1..=1.1).contains(&mean), "{name} {dtype}: {mean}");
            assert!(most <= 1.5, "{name} {dtype}, {worst}: {most}");
        }
    }
}

/// Masks that train, grouped and transposed convolutions, recurrences, tables, experts: as in f32 but for rounding, which is less than
/// a quarter of what other initial values make.
#[test]
fn every_family_trains_in_half_precision() {
    for name in ["t5", "swin", "vit", "moe", "dlrm", "gru", "resnet", "unet", "bert_tiny", "llama_tiny"] {
        let path = root().join("tests/golden/numbers").join(format!("{name}.json"));
        let mut golden = Golden(serde_json::from_str(&std::fs::read_to_string(path).expect("a golden")).expect("JSON"));
        let flags = golden.0["flags"].as_array_mut().expect("flags");
        let steps = 1 + flags.iter().position(|flag| flag == "--steps").expect("a number of steps");
        flags[steps] = "4".into();
        let plain = golden.losses(1, 1.0, "");
        for dtype in [DType::BF16, DType::F16] {
            let flags = format!("--dtype {}", dtype.name());
            let apart = |losses: &[f64]| plain.iter().zip(losses).fold(0.0, |most, (x, y)| f64::max(most, (y / x - 1.0).abs()));
            let off = apart(&golden.losses(1, 1.0, &flags));
            let control = apart(&golden.losses(2, 1.0, &flags));
            println!("{name} {}: {off:.1e}, other initial values {control:.1e}", dtype.name());
            let bound = (4.0 * of_half(dtype)).min(control / 4.0);
            assert!(off > 0.0 && off <= bound, "{name} {}: {off:e}, other initial values {control:e}", dtype.name());
        }
    }
}

/// The sample of README.md, which takes minutes.
#[test]
fn the_sample_trains_as_near_as_under_autocast() {
    if std::env::var_os("DCC_LONG").is_some() {
        check("sample_gpt", &["bf16", "f16"]);
    }
}

/// The scale of each step, and whether it was skipped.
fn scales(more: &str) -> Vec<(f64, bool)> {
    let folder = Folder::new();
    let metrics = folder.at("metrics.jsonl");
    let base = "run MODEL --data DATA --init 1 --global-batch-size 32 --dtype f16 --lr 1e-3 --order sequential";
    let [model, data] = ["tests/models/mlp.onnx", "tests/models/data/mlp.npz"];
    let words = base.replace("MODEL", model).replace("DATA", data);
    let words = format!("{words} {more} --metrics-file {metrics}");
    dcc(words.split_whitespace()).ok();
    let lines = folder.lines("metrics.jsonl");
    lines.iter().map(|line| (line["loss_scale"].as_f64().expect("a scale"), line["grad_norm"].is_null())).collect()
}

#[test]
fn the_scale_grows_and_backs_off() {
    let check = |flags: &str, expected: &[(f64, bool)]| assert_eq!(scales(flags), expected, "{flags}");
    let steady = [(65536.0, false); 3];
    check("--steps 3", &steady);
    check("--steps 3 --tp 2 --pp 2", &steady);
    check("--steps 5 --loss-scale 1024 --loss-scale-interval 2", &[1024.0, 1024.0, 2048.0, 2048.0, 4096.0].map(|s| (s, false)));
    // Not to what f32 does not hold.
    check("--steps 3 --loss-scale 1024 --loss-scale-interval 1 --loss-scale-growth 1e38", &[(1024.0, false); 3]);
    let (large, half) = (2.0_f64.powi(40), 2.0_f64.powi(39));
    let found = scales(&format!("--steps 2 --loss-scale {large}"));
    assert_eq!(found, [(large, true), (half, true)]);
    let quarter = scales(&format!("--steps 2 --loss-scale {large} --loss-scale-backoff 0.25 --dp 2 --zero 2"));
    assert_eq!(quarter, [(large, true), (large / 4.0, true)]);
}

/// Parameters in bf16 go on to the bit, whatever the ranks share, and are exported in the model's f32, as they are.
#[test]
fn parameters_in_bf16_go_on_to_the_bit() {
    let (folder, numbers) = (Folder::new(), "--dtype bf16 --param-dtype bf16");
    let [model, data, metrics] = ["tests/models/mlp.onnx", "tests/models/data/mlp.npz", &folder.at("m.jsonl")];
    let run = |steps: u32, saved: &str, more: &str| -> Vec<f64> {
        let words = format!("run {model} --data {data} --init 1 --global-batch-size 32 --steps {steps} --lr 0.001");
        let words = format!("{words} --metrics-file {metrics} --save-dir {} --resume auto {more}", folder.at(saved));
        dcc(words.split_whitespace()).ok();
        folder.lines("m.jsonl").iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
    };
    let whole = run(6, "whole", &format!("{numbers} --dp 2"));
    run(3, "parts", &format!("{numbers} --dp 2"));
    let parts = run(6, "parts", &format!("{numbers} --dp 2 --zero 3"));
    assert!(whole == parts && whole.len() == 6, "{whole:?}, in parts {parts:?}");
    let seeded = run(6, "seeded", &format!("{numbers} --dp 2 --seed 2 --order sequential"));
    let again = run(6, "again", &format!("{numbers} --dp 2 --seed 3 --order sequential"));
    assert!(seeded[0] == again[0] && seeded != again, "a control: of another seed other numbers are rounded by");
    let holds = |saved: &str| {
        let weights = exported(&folder, &folder.at(saved));
        let narrow = |values: &Vec<f64>| values.iter().all(|x| (*x as f32).to_bits() & 0xffff == 0);
        weights.values().filter(|values| narrow(values)).count()
    };
    let (stored, masters) = (holds("whole"), run(6, "masters", "--dtype bf16 --dp 2"));
    assert!(stored > holds("masters"), "{stored} tensors are of bf16 numbers, whose losses are {masters:?} in f32");
    let path = folder.at("trained.onnx");
    dcc(["export", &folder.at("whole"), "--model", model, "--onnx", &path]).ok();
    let listed = dcc(["inspect", &path]).ok().stdout;
    assert!(!listed.contains("bf16"), "{listed}");
}

/// Checkpoints have f32 parameters and the scale: f16 goes on to the bit, in the middle of an interval of the scale, and any precision
/// continues any other.
#[test]
fn checkpoints_go_on_in_any_precision() {
    let folder = Folder::new();
    let [model, data, metrics] = ["tests/models/mlp.onnx", "tests/models/data/mlp.npz", &folder.at("m.jsonl")];
    let run = |steps: u32, saved: &str, more: &str| -> Vec<Value> {
        let words =
            format!("run {model} --data {data} --init 1 --global-batch-size 32 --steps {steps} --metrics-file {metrics}");
        let words = format!("{words} --save-dir {} --resume auto {more}", folder.at(saved));
        dcc(words.split_whitespace()).ok();
        folder.lines("m.jsonl")
    };
    let f16 = "--dtype f16 --dp 2 --zero 1 --loss-scale-interval 2";
    let whole = run(6, "whole", f16);
    run(3, "parts", f16);
    let parts = run(6, "parts", f16);
    let of = |lines: &[Value], step: usize| ["loss", "grad_norm", "loss_scale"].map(|key| lines[step][key].as_f64());
    assert!((0..6).all(|step| of(&whole, step) == of(&parts, step)), "{whole:?} {parts:?}");
    assert_eq!(of(&whole, 5)[2], Some(262_144.0));
    let plain = run(8, "plain", "");
    for (saved, first, then) in [
        ("a", "", "--dtype f16"),
        ("b", f16, "--dtype bf16 --tp 2"),
        ("c", "--dtype bf16", "--dtype f32"),
        ("d", "--dtype bf16 --param-dtype bf16", "--dp 2"),
        ("e", "", "--dtype bf16 --param-dtype bf16 --tp 2"),
    ] {
        run(4, saved, first);
        let then = run(8, saved, then);
        let [found, expected] = [&then, &plain].map(|lines| of(lines, 7)[0].expect("a loss"));
        assert!((found / expected - 1.0).abs() < 1e-2 && then.len() == 8, "{first} then {saved}: {found}, {expected} in f32");
    }
}
