//! Planning and checking at the size of GPT-3, 96 layers of 12288, in seconds. The file has no weights.

use dcc::compile::{Compiled, Options, compile};
use dcc::import::Model;
use dcc::plan::{self, Parallel, batch};
use dcc_program::check;
use dcc_program::program::ParamKind;
use rustix::time::{ClockId, clock_gettime};

const LAYERS: usize = 96;

fn compiled(parallel: Parallel, batch: u64) -> Compiled {
    let path = format!("{}/models/gpt3_175b.onnx", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let options = Options { batch: batch::Given { global: Some(batch), ..Default::default() }, parallel, ..Options::default() };
    compile(&Model::decode(bytes.into()).expect("a model"), &options).unwrap_or_else(|e| panic!("{e}"))
}

/// Seconds by the clock on the wall; beside other tests, whose time is not to count, seconds of this thread, which does all the work.
fn now() -> f64 {
    let long = std::env::var_os("DCC_LONG").is_some();
    let time = clock_gettime(if long { ClockId::Monotonic } else { ClockId::ThreadCPUTime });
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The least of three.
fn within(what: &str, bar: f64, mut work: impl FnMut()) {
    let seconds = [(); 3].map(|()| {
        let began = now();
        work();
        now() - began
    });
    let least = seconds.into_iter().fold(f64::INFINITY, f64::min);
    println!("{what}: {least:.2} s (bar {bar} s)");
    assert!(0.001 < least && least < bar, "{what}: {seconds:?} s");
}

#[test]
fn gpt3_is_planned_and_checked_in_seconds() {
    let whole = compiled(Parallel { dp: 8, tp: 8, pp: 16, ..Parallel::default() }, 1024);
    // The graph is that of one device.
    let graph = &whole.training.graph;
    for sequence_parallel in [false, true] {
        let parallel = Parallel { tp: 8, sequence_parallel, ..Parallel::default() };
        let what = format!("planning {LAYERS} layers, tp 8{}", if sequence_parallel { ", sequence parallel" } else { "" });
        within(&what, 2.0, || {
            let plan = plan::choose(graph, &parallel).expect("a plan");
            let tp = plan.mesh.axis("tp").expect("the axis");
            let split = plan.strategies.values().filter(|strategy| strategy.factors.iter().any(|axes| axes.contains(&tp)));
            // Four products of weights in each layer, and what is between them.
            assert!(split.count() > 4 * LAYERS);
        });
    }
    let mut programs = whole.artifact.train;
    let (stages, ranks) = (programs.len(), programs[0].mesh.world());
    let weights = programs.iter().flat_map(|program| &program.params).filter(|param| param.kind == ParamKind::Weight);
    assert!(stages == 16 && ranks == 1024 && weights.count() > 12 * LAYERS);
    let what = format!("checking {LAYERS} layers, {stages} stages, {ranks} ranks");
    within(&what, 5.0, || check::programs(&programs).expect("they are sound"));
    // A control: it looks at the last instruction of the last stage.
    let section = programs[15].sections.last_mut().expect("a section");
    section.body.pop();
    check::programs(&programs).expect_err("an instruction is missing");
}
