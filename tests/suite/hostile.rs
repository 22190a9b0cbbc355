//! Hostile models: real exports and ONNX's node cases, changed at random in their bytes, their protobuf fields and their graphs, by
//! the thousand. Whatever comes of it is no panic, takes no memory beyond 64 MiB and four times the file, and takes no time.
//!
//! `DCC_LONG=1` runs a million of them and asserts seconds; `DCC_HOSTILE=N` runs case N alone and leaves its file.

mod mutate;
mod wire;

use crate::alloc::peak_of;
use crate::onnx_nodes::unhex;
use crate::tidy::root;
use bytes::Bytes;
use dcc::import::proto::tensor_shape_proto::dimension::Value as Dim;
use dcc::import::proto::type_proto::Value as Type;
use dcc::import::{Model, Options, onnx, size_inputs};
use mutate::{Random, mutated};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MOST_BYTES: usize = 64 << 20;
const MOST_SECONDS: f64 = 2.0;
/// Files beyond this are mutated rarely: most of what importing them takes is reading what is not changed.
const SMALL: usize = 40_000;

/// What is mutated: small models of single operators, small exports, large exports.
struct Corpus {
    nodes: Vec<Vec<u8>>,
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
}

impl Corpus {
    fn read() -> Corpus {
        let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/import/nodes.json")).expect("JSON");
        let nodes = cases.iter().map(|case| unhex(case["model"].as_str().expect("hex"))).collect();
        let folders = ["tests/models", "tests/models/attention"].map(|folder| root().join(folder));
        let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("a folder"));
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "onnx"));
        paths.sort();
        let exports = paths.iter().map(|path| std::fs::read(path).expect("a model"));
        let (small, large) = exports.partition(|bytes| bytes.len() < SMALL);
        Corpus { nodes, small, large }
    }

    fn choose(&self, random: &mut Random) -> &[u8] {
        let from = match random.below(100) {
            0..70 => &self.nodes,
            70..98 => &self.small,
            _ => &self.large,
        };
        &from[random.below(from.len())]
    }

    fn case(&self, number: u64) -> (Vec<u8>, Random) {
        let mut random = Random::new(number);
        let (whole, other) = (self.choose(&mut random), self.choose(&mut random));
        (mutated(whole, other, &mut random), random)
    }
}

/// How far a case came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    NoModel,
    Refused,
    Imported,
}

/// All that reads a model before it is compiled, at small sizes.
fn import(bytes: Vec<u8>, random: &mut Random) -> End {
    let Ok(model) = Model::decode(Bytes::from(bytes)) else { return End::NoModel };
    model.external_locations();
    let mut options = Options { global_batch: Some(1 + random.below(4) as u64), ..Options::default() };
    if random.below(2) == 0 {
        options.global_batch = None;
        options.batch_dims = model.graph().input.iter().map(|input| (input.name().to_owned(), None)).collect();
    }
    for input in &model.graph().input {
        let Some(Type::TensorType(tensor)) = input.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else { continue };
        for (at, dim) in tensor.shape.iter().flat_map(|shape| shape.dim.iter().enumerate()) {
            let symbol = match &dim.value {
                Some(Dim::DimValue(_)) => continue,
                Some(Dim::DimParam(symbol)) if !symbol.is_empty() => symbol.clone(),
                _ => format!("{}.{at}", input.name()),
            };
            if at > 0 || options.global_batch.is_none() {
                options.dims.insert(symbol, 4);
            }
        }
    }
    let _ = size_inputs(&model);
    // Only inputs that are initializers too are none.
    options.batch_dims.retain(|name, _| model.graph().initializer.iter().all(|tensor| tensor.name() != name));
    match onnx(&model, &options) {
        Ok(_) => End::Imported,
        Err(error) => {
            assert_ne!(error.code.exit(), 1, "{error}");
            End::Refused
        }
    }
}

#[derive(Default)]
struct Tally {
    ends: [u64; 3],
    worst_bytes: (f64, u64),
    worst_seconds: (f64, u64),
    faults: Vec<String>,
}

impl Tally {
    fn case(&mut self, corpus: &Corpus, number: u64) {
        let (bytes, mut random) = corpus.case(number);
        let length = bytes.len();
        let began = Instant::now();
        let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| import(bytes, &mut random))));
        let seconds = began.elapsed().as_secs_f64();
        let share = peak as f64 / (MOST_BYTES + 4 * length) as f64;
        if share > self.worst_bytes.0 {
            self.worst_bytes = (share, number);
        }
        if seconds > self.worst_seconds.0 {
            self.worst_seconds = (seconds, number);
        }
        match result {
            Ok(end) => self.ends[end as usize] += 1,
            Err(_) => self.faults.push(format!("case {number} panics")),
        }
        if share > 1.0 {
            self.faults.push(format!("case {number}: {} MiB for {length} bytes", peak >> 20));
        }
    }

    fn join(mut self, other: Tally) -> Tally {
        for (sum, count) in self.ends.iter_mut().zip(other.ends) {
            *sum += count;
        }
        if other.worst_bytes.0 > self.worst_bytes.0 {
            self.worst_bytes = other.worst_bytes;
        }
        if other.worst_seconds.0 > self.worst_seconds.0 {
            self.worst_seconds = other.worst_seconds;
        }
        self.faults.extend(other.faults);
        self
    }
}

fn run(corpus: &Corpus, cases: u64) -> Tally {
    let next = AtomicU64::new(0);
    let shard = || {
        let mut tally = Tally::default();
        loop {
            let first = next.fetch_add(64, Ordering::Relaxed);
            if first >= cases || tally.faults.len() > 100 {
                return tally;
            }
            (first..cases.min(first + 64)).for_each(|number| tally.case(corpus, number));
        }
    };
    let shards = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..shards).map(|_| scope.spawn(shard)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a shard ends")).fold(Tally::default(), Tally::join)
    })
}

#[test]
fn hostile_models_are_imported_or_refused() {
    let corpus = Corpus::read();
    if let Some(number) = std::env::var("DCC_HOSTILE").ok().and_then(|text| text.parse().ok()) {
        let (bytes, mut random) = corpus.case(number);
        let path = std::env::temp_dir().join(format!("hostile-{number}.onnx"));
        std::fs::write(&path, &bytes).expect("a file");
        println!("{} has {} bytes", path.display(), bytes.len());
        println!("{:?}", import(bytes, &mut random));
        return;
    }
    let is_long = std::env::var_os("DCC_LONG").is_some();
    let cases = if is_long { 1_000_000 } else { 10_000 };
    let began = Instant::now();
    let tally = run(&corpus, cases);
    let [no_model, refused, imported] = tally.ends;
    println!(
        "{cases} mutations in {:.0?}: {no_model} no model, {refused} refused, {imported} imported; most memory {:.0} % of what is \
         allowed (case {}), longest {:.2} s (case {})",
        Duration::from_secs(began.elapsed().as_secs()),
        100.0 * tally.worst_bytes.0,
        tally.worst_bytes.1,
        tally.worst_seconds.0,
        tally.worst_seconds.1
    );
    assert!(tally.faults.is_empty(), "{}", tally.faults.join("\n"));
    assert!(!is_long || tally.worst_seconds.0 < MOST_SECONDS, "a run takes {:.2} s", tally.worst_seconds.0);
    // Mutations that all fail at once, or change nothing, would prove nothing.
    assert!(refused > cases / 5 && imported > cases / 20 && no_model > cases / 100, "{:?}", tally.ends);
}

/// The control: memory that is taken is seen.
#[test]
fn peaks_are_seen() {
    let (_, peak) = peak_of(|| drop(std::hint::black_box(vec![1_u8; 3 << 20])));
    assert!((3 << 20..4 << 20).contains(&peak), "{peak}");
}
