//! A counting allocator: the most bytes that some work holds; and from the second step on, a rank's thread allocates nothing, be it the step alone or all that `dcc run`
//! does from one step to the next: data, the step, what is said about it.

use crate::command::Folder;
use crate::ranks;
use dcc_program::DType;
use dcc_program::artifact::{Artifact, Data, Tensor};
use dcc_program::manifest::{self, Manifest};
use dcc_program::text;
use dcc_runtime::comm::{Patience, Stop};
use dcc_runtime::exec::ranks::local_ranks;
use dcc_runtime::exec::{Executor, Fresh, Io, Scalars, World};
use dcc_runtime::launch::Message;
use dcc_runtime::metrics::{Context, Display, MetricsFile, StepRecord};
use dcc_runtime::run::{self, Flags, Job, Source};
use npyz::WriterBuilder;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;

struct Counting;

thread_local! {
    /// Allocations of this thread.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has taken and not given back, and the most at any time: less than nothing where another's are given.
    static BYTES: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

/// Notes that this thread has so many bytes more.
fn take(bytes: i64) {
    // A thread that ends has no counter any more.
    let _ = BYTES.try_with(|counter| {
        let (held, most) = counter.get();
        counter.set((held + bytes, most.max(held + bytes)));
    });
}

// SAFETY: the system's allocator does all the work; counting touches nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        take(layout.size() as i64);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        take(layout.size() as i64);
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        take(size as i64 - layout.size() as i64);
        // SAFETY: the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        take(-(layout.size() as i64));
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    COUNT.with(|count| count.get())
}

/// What `work` gives, and the most bytes that it held on this thread.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = BYTES.with(|counter| counter.replace((0, 0)));
    let result = work();
    let (held, most) = BYTES.with(|counter| counter.get());
    BYTES.with(|counter| counter.set((before.0 + held, before.1.max(before.0 + most))));
    (result, most as usize)
}

/// Allocations of each rank in each of four steps.
fn counts(model: &'static str, (dp, tp, pp): (u32, u32, u32), dtype: Option<DType>) -> Vec<Vec<u64>> {
    let artifact = ranks::compiled(model, &ranks::mesh(dp, tp, pp), 2, dtype).artifact;
    let world = World::new(&[&artifact.train]).unwrap();
    let counts = local_ranks(&world, 1, Patience::default(), |rank| {
        let program = &artifact.train[rank.world.stage(rank.rank) as usize];
        let mut executor = Executor::new(&mut rank.device, rank.world, program, rank.rank, Fresh::AsIs)?;
        let mut counts = Vec::with_capacity(8);
        for step in 1..=4 {
            let before = allocations();
            let mut io = Io {
                fill: &mut |_, _, bytes| {
                    bytes.fill(0);
                    Ok(())
                },
                take: &mut |_, _, _| Ok(()),
            };
            let scalars = Scalars { learning_rate: 0.0, step, seed: 0 };
            executor.step(&mut rank.device, &mut rank.comm, &scalars, &mut io, None)?;
            counts.push(allocations() - before);
        }
        Ok(counts)
    });
    counts.unwrap()
}

#[test]
fn steps_allocate_nothing() {
    let cases = [
        ("gpt2_tiny.onnx", (1, 2, 2), None),
        ("gpt2_tiny.onnx", (2, 1, 1), Some(DType::F64)),
        ("gpt2_tiny_dropout.onnx", (1, 1, 1), None),
        ("mlp.onnx", (2, 2, 1), None),
        ("mlp.onnx", (1, 1, 2), Some(DType::F64)),
    ];
    for (model, mesh, dtype) in cases {
        for (rank, counts) in counts(model, mesh, dtype).iter().enumerate() {
            assert_eq!(counts[1..], [0, 0, 0], "{model} {mesh:?} {dtype:?} rank {rank}: {counts:?}");
        }
    }
    let before = allocations();
    drop(Box::new(std::hint::black_box(7)));
    assert_eq!(allocations() - before, 1, "the control");
}

/// Steps of a whole run.
const STEPS: u64 = 5;

/// Trains as `dcc run` does, ranks as threads, metrics written by the rank that has them: the allocations of each rank from one
/// step boundary to the next.
fn whole_run(artifact: &Artifact, data: &str, layout: &str) -> Vec<Vec<u64>> {
    let folder = Folder::new();
    let text = |text: &str| text.to_owned();
    let flags = Flags {
        data: vec![data.into()],
        layout: text(layout),
        order: text("shuffled"),
        resume: text("none"),
        lr_schedule: text("cosine"),
        steps: Some(STEPS),
        lr: 1e-3,
        init: Some(1),
        init_all: true,
        timeout: 60.0,
        threads: Some(1),
        ..Flags::default()
    };
    let job = Job::new(&Source::Built { artifact, folder: folder.path() }, &flags).unwrap();
    let metrics = Mutex::new(MetricsFile::open(&folder.path().join("metrics.jsonl"), 0).unwrap());
    let ranks = job.world().unwrap().ranks();
    let marks: Vec<Mutex<Vec<u64>>> = (0..ranks).map(|_| Mutex::new(Vec::with_capacity(STEPS as usize))).collect();
    let tell = |_: u32, message: &Message| match message {
        Message::Step(record) => metrics.lock().unwrap().write(record),
        _ => Ok(()),
    };
    let at_boundary = |rank: u32| {
        marks[rank as usize].lock().unwrap().push(allocations());
        Stop::Continue
    };
    run::watched(&job, &tell, &at_boundary).unwrap();
    assert_eq!(folder.lines("metrics.jsonl").len() as u64, STEPS);
    let counts = |marks: &Mutex<Vec<u64>>| marks.lock().unwrap().windows(2).map(|pair| pair[1] - pair[0]).collect();
    marks.iter().map(counts).collect()
}

/// A linear layer whose ranks each take half of the features: of every row of the data, a part.
const HALVES: &str = "\
program halves train stage 0/1 mesh(mb=2, tp=2)
memory persistent=56 scratch=48
area m0 forward->backward bytes=128 slots=1
param b0 f32[4/tp, 3] @p0 weight w trained
input b1 f32[8/mb, 4/tp] @m0+0 x
input b2 f32[8/mb, 3] @m0+32 target
scalar b3 f32[] @p52 lr
output b10 loss
section begin
b4 f32[4/tp, 3]+mb @p24 = zero
b5 f32[]+mb @p48 = zero
section forward
b6 f32[8/mb, 3]+tp @s0 = dot(m k, k n -> m n) b1, b0
t0 = start all_reduce.sum(tp) b6
b7 f32[8/mb, 3] @s0 = wait t0
b5, b8 f32[8/mb, 3] @m0+80 = fused.0 b7, b2
section backward
b4 += dot(m k, m n -> k n) b1, b8
section update
b9 f32[4/tp, 3] @p24 = resolve b4
b10 f32[] @p48 = resolve b5
b0 = fused.1 b0, b9, b3
order begin; forward 0; backward 0; forward 1; backward 1; update
kernel fused.0(x0: f32[_, _], x1: f32[_, _]) -> (y0: f32[], y1: f32[_, _]) dims(i, j) outer()
  e0 = x0[i, j] - x1[i, j]
  v0 = sum i, j: e0 * e0
  y0[] += v0 * 0.041666666666666664:f32
  for i, j: y1[i, j] = e0 * 0.08333333333333333:f32
kernel fused.1(x0: f32[_, _], x1: f32[_, _], x2: f32[]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = x0[i, j] - x2[] * x1[i, j]
";

fn halves() -> Artifact {
    let train = vec![text::parse(HALVES).unwrap()];
    let input = || manifest::Input { batch_dim: Some(0), ..manifest::Input::default() };
    let inputs = ["x", "target"].map(|name| (name.to_owned(), input())).into();
    let options = Manifest { inputs, ..Manifest::default() }.to_options();
    let ty = train[0].ty(train[0].params[0].buffer);
    let weight = Tensor { name: "w".to_owned(), dtype: ty.dtype, shape: ty.shape.clone(), data: Data::Absent };
    Artifact { tensors: vec![weight], train, options, ..Artifact::default() }
}

/// A file of small floats.
pub fn npy(path: &Path, shape: &[u64]) {
    let file = std::fs::File::create(path).unwrap();
    let mut writer = npyz::WriteOptions::new().default_dtype().shape(shape).writer(file).begin_nd().unwrap();
    writer.extend((0..shape.iter().product()).map(|i: u64| (i % 7) as f32)).unwrap();
    writer.finish().unwrap();
}

#[test]
fn runs_allocate_nothing() {
    let check = |name: &str, artifact: &Artifact, data: &str, layout: &str| {
        for (rank, counts) in whole_run(artifact, data, layout).iter().enumerate() {
            // The first also looks at the memory in use: the control.
            assert!(counts[0] > 0, "{name}, rank {rank}: {counts:?}");
            assert_eq!(counts[1..], [0; STEPS as usize - 2], "{name}, rank {rank}: {counts:?}");
        }
    };
    let data = |name: &str| format!("{}/models/data/{name}", env!("CARGO_MANIFEST_DIR"));
    let compiled = |model, (dp, tp, pp), dtype| ranks::compiled(model, &ranks::mesh(dp, tp, pp), 2, dtype).artifact;
    // Samples, of another dtype than the model computes in; tokens; steps.
    check("mlp", &compiled("mlp.onnx", (2, 2, 1), Some(DType::F64)), &data("mlp.npz"), "samples");
    check("gpt2", &compiled("gpt2_tiny.onnx", (1, 1, 2), None), &data("gpt2_tiny_tokens.npy"), "samples");
    let folder = Folder::new();
    npy(&folder.path().join("x.npy"), &[64, 4]);
    npy(&folder.path().join("target.npy"), &[64, 3]);
    check("halves", &halves(), &folder.path().display().to_string(), "samples");
    npy(&folder.path().join("x.npy"), &[3, 8, 4]);
    npy(&folder.path().join("target.npy"), &[3, 8, 3]);
    check("halves in steps", &halves(), &folder.path().display().to_string(), "steps");
}

/// The launcher formats a log line every so many steps, into strings; between them it allocates nothing.
#[test]
fn the_display_allocates_only_for_its_lines() {
    let mut display = Display::new(1000, 500);
    let context = Context { steps: 1000, memory: Some((1 << 20, 1 << 21)), ..Context::default() };
    let mut count = |step: u64| {
        let record =
            StepRecord { step, loss: 1.5, grad_norm: Some(0.5), lr: 0.1, step_ms: 10.0, samples: 8, ..StepRecord::default() };
        let before = allocations();
        display.step(&record, &context);
        allocations() - before
    };
    let counts = [1, 2, 3, 499, 500, 501].map(&mut count);
    println!("allocations of a log line: {}", counts[4]);
    assert!(counts[1..4] == [0, 0, 0] && counts[5] == 0 && counts[4] > 0, "{counts:?}");
}
