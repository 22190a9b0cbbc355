//! Hostile models: real exports and ONNX's node cases, changed at random in their bytes, their protobuf fields and their graphs, by
//! the thousand. Whatever comes of it is no panic, takes no memory beyond 64 MiB and four times the file, and takes no time; some are
//! compiled for several devices.
//!
//! `DCC_LONG=1` runs a million of them and asserts seconds; `DCC_HOSTILE=N` runs case N alone and leaves its file.

mod mutate;
mod parts;
mod user;
mod wire;

use crate::alloc::peak_of;
use crate::onnx_nodes::{constant, tensor, unhex};
use crate::ops::torch::decode;
use crate::tidy::root;
use dcc::import::proto::{ModelProto, TensorProto};
use dcc::import::{TensorData, code};
use mutate::{Random, mutated, once_mutated};
use prost::Message;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use user::{compile, import};

const MOST_BYTES: usize = 64 << 20;
const MOST_SECONDS: f64 = 2.0;
/// A compilation has no bar of its own; one that does not end has.
const MOST_SECONDS_COMPILED: f64 = 20.0;
/// Beside so many cases, one is compiled.
const COMPILED: u64 = 64;
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
        let goldens = [
            include_str!("../golden/import/nodes.json"),
            include_str!("../golden/nodes/gradients.json"),
            include_str!("../golden/import/windows.json"),
        ];
        let cases = goldens.iter().flat_map(|text| serde_json::from_str::<Vec<Value>>(text).expect("JSON"));
        let nodes = cases.map(|case| with_constants(&case)).collect();
        let folders = ["tests/models", "tests/models/attention", "tests/models/families"].map(|folder| root().join(folder));
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

    /// A case to compile: a small export, which has parameters to train, changed in few places.
    fn export(&self, number: u64) -> (Vec<u8>, Random) {
        let mut random = Random::new(number);
        let whole = &self.small[random.below(self.small.len())];
        let other = self.choose(&mut random);
        (once_mutated(whole, other, &mut random), random)
    }
}

/// The model of a golden case; inputs that count as known are initializers, as in most exports.
fn with_constants(case: &Value) -> Vec<u8> {
    let bytes = unhex(case["model"].as_str().expect("hex"));
    let mut model = ModelProto::decode(&*bytes).expect("a model");
    let graph = model.graph.as_mut().expect("a graph");
    for name in case["constants"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let at = graph.input.iter().position(|input| input.name() == name).expect("an input");
        let value = match &case["inputs"] {
            Value::Array(inputs) => tensor(&inputs[at]),
            inputs => decode(&inputs[name]),
        };
        let value = constant(name, &value);
        let TensorData::Owned(raw) = value.data else { unreachable!("constants own their data") };
        graph.initializer.push(TensorProto {
            name: Some(name.to_owned()),
            dims: value.shape.iter().map(|&dim| dim as i64).collect(),
            data_type: Some(code(value.dtype)),
            raw_data: Some(raw),
            ..TensorProto::default()
        });
    }
    let is_known = |name: &str| graph.initializer.iter().any(|tensor| tensor.name() == name);
    graph.input.retain(|input| !is_known(input.name()));
    model.encode_to_vec()
}

#[derive(Default)]
struct Tally {
    ends: [u64; 3],
    /// Compiled to programs, and refused on the way.
    compiled: [u64; 2],
    worst_bytes: (f64, u64),
    worst_seconds: (f64, u64),
    worst_compiled: (f64, u64),
    faults: Vec<String>,
}

impl Tally {
    fn case(&mut self, corpus: &Corpus, number: u64) {
        let (bytes, mut random) = corpus.case(number);
        let length = bytes.len();
        let began = own_seconds();
        let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| import(bytes, &mut random))));
        let seconds = own_seconds() - began;
        let share = peak as f64 / (MOST_BYTES + 4 * length) as f64;
        worst(&mut self.worst_bytes, (share, number));
        worst(&mut self.worst_seconds, (seconds, number));
        match result {
            Ok(end) => self.ends[end as usize] += 1,
            Err(_) => self.fault(format!("case {number} panics")),
        }
        if share > 1.0 {
            self.fault(format!("case {number}: {} MiB for {length} bytes", peak >> 20));
        }
        if number.is_multiple_of(COMPILED) {
            self.compile(corpus, number);
        }
    }

    fn compile(&mut self, corpus: &Corpus, number: u64) {
        let (bytes, mut random) = corpus.export(number);
        let began = own_seconds();
        match catch_unwind(AssertUnwindSafe(|| compile(bytes, &mut random))) {
            Ok(is_whole) => self.compiled[usize::from(!is_whole)] += 1,
            Err(_) => self.fault(format!("case {number} panics when compiled")),
        }
        worst(&mut self.worst_compiled, (own_seconds() - began, number));
    }

    fn fault(&mut self, what: String) {
        println!("{what}");
        self.faults.push(what);
    }

    fn join(mut self, other: Tally) -> Tally {
        let counts = self.ends.iter_mut().chain(&mut self.compiled);
        counts.zip(other.ends.into_iter().chain(other.compiled)).for_each(|(sum, count)| *sum += count);
        worst(&mut self.worst_bytes, other.worst_bytes);
        worst(&mut self.worst_seconds, other.worst_seconds);
        worst(&mut self.worst_compiled, other.worst_compiled);
        self.faults.extend(other.faults);
        self
    }
}

/// Seconds that this thread has computed: what another program takes of the machine counts for no case.
fn own_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The larger of both, and whose it is.
fn worst(known: &mut (f64, u64), new: (f64, u64)) {
    if new.0 > known.0 {
        *known = new;
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
            if first.is_multiple_of(64_000) && first > 0 {
                println!("mutations in progress: {first} begun");
            }
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
        let began = own_seconds();
        let (end, peak) = peak_of(|| import(bytes, &mut random));
        println!("{end:?}, {} MiB, {:.2} s", peak >> 20, own_seconds() - began);
        let (bytes, mut random) = corpus.export(number);
        std::fs::write(path.with_extension("compiled.onnx"), &bytes).expect("a file");
        println!("compiled: {}", compile(bytes, &mut random));
        return;
    }
    let is_long = std::env::var_os("DCC_LONG").is_some();
    let cases = if is_long { 1_000_000 } else { 10_000 };
    let began = Instant::now();
    let tally = run(&corpus, cases);
    let [no_model, refused, imported] = tally.ends;
    let [whole, other] = tally.compiled;
    println!(
        "{cases} mutations in {:.0?}: {no_model} no model, {refused} refused, {imported} imported; most memory {:.0} % of what is \
         allowed (case {}), longest {:.2} s (case {})",
        Duration::from_secs(began.elapsed().as_secs()),
        100.0 * tally.worst_bytes.0,
        tally.worst_bytes.1,
        tally.worst_seconds.0,
        tally.worst_seconds.1
    );
    println!(
        "of these mutations {} were compiled, {whole} to programs; longest {:.2} s (case {})",
        whole + other,
        tally.worst_compiled.0,
        tally.worst_compiled.1
    );
    assert!(tally.faults.is_empty(), "{}", tally.faults.join("\n"));
    assert!(!is_long || tally.worst_seconds.0 < MOST_SECONDS, "a run takes {:.2} s", tally.worst_seconds.0);
    assert!(!is_long || tally.worst_compiled.0 < MOST_SECONDS_COMPILED, "a compilation takes {:.2} s", tally.worst_compiled.0);
    // Mutations that all fail at once, or change nothing, would prove nothing.
    assert!(refused > cases / 5 && imported > cases / 20 && no_model > cases / 100, "{:?}", tally.ends);
    assert!(whole > cases / COMPILED / 20, "{:?}", tally.compiled);
}

/// The control: memory that is taken is seen.
#[test]
fn peaks_are_seen() {
    let (_, peak) = peak_of(|| drop(std::hint::black_box(vec![1_u8; 3 << 20])));
    assert!((3 << 20..4 << 20).contains(&peak), "{peak}");
}
