//! `dcc bench`: its figures are there and make sense.

use crate::command::dcc;
use crate::tidy::root;
use dcc::import::proto::ModelProto;
use prost::Message;
use serde_json::Value;

#[track_caller]
fn number(of: &Value, key: &str) -> f64 {
    of[key].as_f64().unwrap_or_else(|| panic!("{key} in {of}"))
}

fn list<'a>(of: &'a Value, key: &str) -> &'a [Value] {
    of[key].as_array().unwrap_or_else(|| panic!("{key} in {of}"))
}

#[track_caller]
fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found}, expected {expected}");
}

#[test]
fn products_are_counted_and_timed() {
    let words = "bench gemm --shapes 64x48x32:nt 5x1x3:tn 32x256x128 --dtype f32 f64 bf16 --threads 1 --json";
    let report = dcc(words.split(' ')).ok().json();
    let peak = number(&report, "peak_gflops");
    assert!(peak > 0.0 && number(&report, "peak_gbps") > 0.0 && report["threads"] == 1, "{report}");
    let figures = list(&report, "figures");
    let kinds: Vec<(&str, &str)> =
        figures.iter().map(|f| (f["dtype"].as_str().expect("a dtype"), f["layout"].as_str().expect("a layout"))).collect();
    let expected = ["f32", "f64", "bf16"].map(|dtype| ["nt", "tn", "nn"].map(|layout| (dtype, layout)));
    assert_eq!(kinds, expected.concat());
    for figure in figures {
        let sizes = ["m", "n", "k"].map(|size| number(figure, size));
        near(number(figure, "flops"), 2.0 * sizes.iter().product::<f64>());
        near(number(figure, "gflops"), number(figure, "flops") / (1e3 * number(figure, "microseconds")));
        near(number(figure, "peak_fraction"), number(figure, "gflops") / peak);
        assert!(figure["dtype"] != "f32" || number(figure, "peak_fraction") < 1.2, "more than the peak: {figure}");
    }
}

/// Multiplications and additions of a step of a chain of products without anything else: forward, each weight's gradient, and the
/// gradient of each layer's input but the first's.
fn flops_of(model: &str, batch: f64) -> f64 {
    let bytes = std::fs::read(root().join(model)).expect("a model");
    let graph = ModelProto::decode(&bytes[..]).expect("a model").graph.expect("a graph");
    let sizes = graph.initializer.iter().filter(|tensor| tensor.dims.len() == 2);
    let layers: Vec<f64> = sizes.map(|tensor| tensor.dims.iter().product::<i64>() as f64).collect();
    2.0 * batch * layers.iter().enumerate().map(|(i, size)| if i == 0 { 2.0 * size } else { 3.0 * size }).sum::<f64>()
}

const STEP: &str =
    "bench step tests/models/mlp.onnx --data tests/models/data/mlp.npz --global-batch-size 8 --init 3 --threads 1 --json";

#[test]
fn a_step_is_taken_apart() {
    let expected = flops_of("tests/models/mlp.onnx", 8.0);
    for (flags, ranks) in [("--steps 8", 1), ("--steps 5 --dp 2", 2)] {
        let report = dcc(STEP.split(' ').chain(flags.split(' '))).ok().json();
        assert_eq!(report["steps"], if ranks == 1 { 5 } else { 2 }, "three warm up");
        assert_eq!(list(&report, "ranks").len(), ranks);
        for rank in list(&report, "ranks") {
            let kernels = list(rank, "kernels");
            let sum = |key: &str| kernels.iter().map(|kernel| number(kernel, key)).sum::<f64>();
            near(sum("flops"), expected / ranks as f64);
            near(number(rank, "flops"), expected / ranks as f64);
            near(number(rank, "gflops"), number(rank, "flops") / (1e6 * number(rank, "step_ms")));
            let share = sum("share");
            assert!(share > 0.0 && share <= 1.0, "{share} of {rank}");
            for kernel in kernels {
                let (work, speed, peak) = match number(kernel, "flops") {
                    0.0 => ("bytes", "gbps", "peak_gbps"),
                    _ => ("flops", "gflops", "peak_gflops"),
                };
                let nanoseconds = (1e6 * number(kernel, "milliseconds")).max(1.0);
                assert!((number(kernel, speed) - number(kernel, work) / nanoseconds).abs() <= 1e-9 * number(kernel, speed));
                assert!((number(kernel, "peak_fraction") - number(kernel, speed) / number(&report, peak)).abs() < 1e-9);
                assert!(number(kernel, "runs") >= 1.0 && number(kernel, "share") > 0.0, "{kernel}");
            }
            let whole = |kernel: &Value| {
                let name = kernel["kernel"].as_str().expect("a name");
                name.matches('(').count() == name.matches(')').count()
            };
            assert!(kernels.iter().all(whole), "{rank}");
            let has = |what: &str| kernels.iter().any(|kernel| kernel["kernel"].as_str().expect("a name").starts_with(what));
            assert!(has("dot(") && has("fused.") && has("start all_reduce") == (ranks == 2), "{rank}");
        }
    }
}

#[test]
fn collectives_are_timed_by_size() {
    let figures = dcc(["bench", "comm", "--ranks", "2", "3", "--max-bytes", "4KiB", "--json"]).ok().json();
    let figures = figures.as_array().expect("a list");
    for ranks in [2, 3] {
        for kind in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"] {
            let of = |figure: &&Value| figure["ranks"] == ranks && figure["kind"] == kind;
            let mine: Vec<&Value> = figures.iter().filter(of).collect();
            let sizes: Vec<u64> = mine.iter().map(|figure| figure["bytes"].as_u64().expect("bytes")).collect();
            assert_eq!(sizes, [4, 16, 64, 256, 1024, 4096], "{ranks} {kind}");
            for figure in mine {
                let number = |key: &str| figure[key].as_f64().expect("a number");
                let others = f64::from(ranks - 1) / f64::from(ranks);
                let traffic = if kind == "send" { 1.0 } else { others * if kind == "all_reduce" { 2.0 } else { 1.0 } };
                let bandwidth = traffic * number("bytes") / (1e3 * number("microseconds"));
                assert!(number("microseconds") > 0.0 && (number("bandwidth") / bandwidth - 1.0).abs() < 1e-9, "{figure}");
            }
        }
    }
    let figures = dcc(["bench", "comm", "--ranks", "2", "--min-bytes", "12", "--max-bytes", "200", "--json"]).ok().json();
    let sends = figures.as_array().expect("a list").iter().filter(|figure| figure["kind"] == "send");
    assert_eq!(sends.map(|figure| figure["bytes"].as_u64().expect("bytes")).collect::<Vec<_>>(), [12, 48, 192]);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (words, what) in [
        ("comm --ranks 1", "1 is not in 2..=64"),
        ("comm --max-bytes lots", "--max-bytes lots is no size"),
        ("comm --min-bytes 8KiB --max-bytes 4KiB", "--min-bytes 8KiB is more than --max-bytes 4KiB"),
        ("comm --min-bytes 6", "--min-bytes 6 is no multiple of 4 bytes"),
        ("gemm --shapes 2x3", "--shapes 2x3 is no MxNxK"),
        ("gemm --shapes 2x3x0", "--shapes 2x3x0 is no MxNxK"),
        ("gemm --shapes 2x3x4:xx", "--shapes 2x3x4:xx is no MxNxK"),
        ("gemm --shapes 1000000x1000000x1", "more than 64 GiB"),
        ("gemm --dtype f8", "'f8'"),
        ("gemm --threads 0", "--threads 0"),
        ("gemm --max-isa avx3", "'avx3'"),
        ("step tests/models/mlp.onnx --data tests/models/data/mlp.npz --tp 0", "--tp 0"),
    ] {
        let output = dcc(["bench"].into_iter().chain(words.split(' ')));
        assert_eq!(output.code, Some(2), "{}", output.stderr);
        assert!(output.stderr.contains(what), "{}", output.stderr);
    }
}
