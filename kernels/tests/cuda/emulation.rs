//! Kernels' texts as programs for this CPU: g++ with `tests/stand_in`, under AddressSanitizer.

use crate::numbers::{compare, decoded};
use dcc_kernels::cuda::{PRELUDE, Source};
use dcc_program::types::DType;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Orders of a block's threads that every kernel runs in.
const SEEDS: [u32; 3] = [1, 2, 3];

/// A kernel, its operands' bytes before, and what must be in them behind.
pub struct Job {
    pub source: Source,
    pub operands: Vec<Vec<u8>>,
    pub expected: Vec<Expected>,
    pub what: String,
}

/// Where an output must have which values.
pub struct Expected {
    pub operand: usize,
    pub dtype: DType,
    pub values: Vec<f64>,
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// Threads read what others have not written, or write what others have not read.
    NoBarrier,
    /// Some threads leave out a barrier.
    DivergentBarrier,
    /// As `NoBarrier`, among the lanes of a warp.
    NoWarpBarrier,
    /// Shared memory is read before its asynchronous copy is awaited.
    NoWait,
    /// Of two tiles in shared memory the wrong one.
    WrongTile,
    /// What lies behind the last whole step is left out, or taken twice.
    Tail,
    OutOfBounds,
    /// Shared memory is read that nobody wrote.
    Uninitialised,
    /// A part of a sum is left out.
    MissingPart,
    /// A causal mask ends one key early, or late.
    CausalBound,
    /// A value of another lane than meant.
    Lane,
    /// A factor is left out.
    Scale,
    /// A sum of halves in halves.
    Precision,
    /// Another element than meant.
    Index,
    /// NaN where there must be none.
    Empty,
}

impl Bug {
    pub const ALL: [Bug; 15] = [
        Bug::NoBarrier,
        Bug::DivergentBarrier,
        Bug::NoWarpBarrier,
        Bug::NoWait,
        Bug::WrongTile,
        Bug::Tail,
        Bug::OutOfBounds,
        Bug::Uninitialised,
        Bug::MissingPart,
        Bug::CausalBound,
        Bug::Lane,
        Bug::Scale,
        Bug::Precision,
        Bug::Index,
        Bug::Empty,
    ];
}

/// A job with a bug: `from` in its text, or in the prelude, becomes `to`.
pub struct Planted {
    pub kind: Bug,
    pub job: Job,
    pub from: &'static str,
    pub to: &'static str,
}

/// Every job under every order of threads.
pub fn check(name: &str, jobs: &[Job]) {
    let texts = jobs.iter().map(|job| (job, format!("{PRELUDE}{}", job.source.text))).collect::<Vec<_>>();
    let program = Program::new(name, &texts);
    for (number, job) in jobs.iter().enumerate() {
        let worst = SEEDS.map(|seed| program.run(number, job, seed).unwrap_or_else(|what| panic!("{what}")));
        println!("{}: error {:.1e}", job.what, worst.iter().copied().fold(0.0, f64::max));
    }
}

/// What each whole leaves in memory is, bit by bit, what the jobs beside it do alone, and what it must be.
pub fn check_equal(name: &str, pairs: &[(&Job, Vec<&Job>)]) {
    let jobs: Vec<&Job> = pairs.iter().flat_map(|(whole, alone)| alone.iter().chain([whole])).copied().collect();
    let texts: Vec<_> = jobs.iter().map(|job| (*job, format!("{PRELUDE}{}", job.source.text))).collect();
    let program = Program::new(name, &texts);
    let mut number = 0;
    for (whole, alone) in pairs {
        let own = number..number + alone.len();
        number = own.end + 1;
        for seed in SEEDS {
            let results = |number: usize| program.results(number, jobs[number], seed).unwrap_or_else(|what| panic!("{what}"));
            let each: Vec<Vec<u8>> = own.clone().flat_map(results).collect();
            assert!(each == results(own.end), "{}, seed {seed}: other bits", whole.what);
        }
        program.run(own.end, whole, SEEDS[0]).unwrap_or_else(|what| panic!("{what}"));
    }
}

/// Some order of threads must show each bug, and none anything wrong with the same texts without them.
pub fn check_planted(name: &str, planted: Vec<Planted>, sound: Vec<Job>) {
    check(&format!("{name}_without"), &sound);
    let texts = planted.iter().map(|Planted { job, from, to, .. }| {
        let text = format!("{PRELUDE}{}", job.source.text);
        assert!(text.contains(from), "{}: the text has no `{from}`", job.what);
        (job, text.replacen(from, to, 1))
    });
    let program = Program::new(name, &texts.collect::<Vec<_>>());
    for (number, Planted { kind, job, from, to }) in planted.iter().enumerate() {
        let found = SEEDS.iter().find_map(|seed| program.run(number, job, *seed).err());
        let Some(found) = found else { panic!("{}: not found: {kind:?}, `{from}` as `{to}`", job.what) };
        let says = |line: &&str| line.contains("seed") || line.contains("ERROR") || line.contains("stand-in");
        println!("{kind:?}: {}", found.lines().rfind(says).unwrap_or_default());
    }
}

/// A program of all kernels: `program JOB IN OUT` runs one.
struct Program {
    folder: PathBuf,
}

impl Program {
    fn new(name: &str, jobs: &[(&Job, String)]) -> Program {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the program");
        let file = folder.join("program.cpp");
        std::fs::write(&file, text(jobs)).expect("the program is written");
        let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/stand_in");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-w", "-fsanitize=address", "-o"])
            .arg(folder.join("program"))
            .arg("-I")
            .arg(&stand_in)
            .args([file, stand_in.join("cuda.cpp")])
            .arg("-ldl")
            .output()
            .unwrap_or_else(|error| panic!("these tests need a C++ compiler, `{compiler}`: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Program { folder }
    }

    /// The largest error of the results of job `number`, with threads in the order of `seed`. Errors: what is wrong with them.
    fn run(&self, number: usize, job: &Job, seed: u32) -> Result<f64, String> {
        let results = self.results(number, job, seed)?;
        let mut worst: f64 = 0.0;
        for Expected { operand, dtype, values } in &job.expected {
            let compared = compare(*dtype, &decoded(*dtype, &results[*operand]), values);
            worst = worst.max(compared.map_err(|what| format!("{}, seed {seed}: operand {operand} has {what}", job.what))?);
        }
        Ok(worst)
    }

    /// The operands behind job `number`. Errors: it does not end well.
    fn results(&self, number: usize, job: &Job, seed: u32) -> Result<Vec<Vec<u8>>, String> {
        let [from, to] = ["in", "out"].map(|name| self.folder.join(format!("{number}.{name}")));
        std::fs::write(&from, job.operands.concat()).expect("the operands are written");
        let mut command = Command::new(self.folder.join("program"));
        command
            .arg(number.to_string())
            .args([&from, &to])
            .env("DCC_STAND_IN_SEED", seed.to_string())
            .env("ASAN_OPTIONS", "detect_leaks=0");
        let output = command.output().expect("the program starts");
        if !output.status.success() {
            return Err(format!("{}, seed {seed}: {}", job.what, String::from_utf8_lossy(&output.stderr).trim()));
        }
        let bytes = std::fs::read(&to).expect("the results are there");
        let mut rest = &bytes[..];
        let mut results = Vec::new();
        for operand in &job.operands {
            let (own, others) = rest.split_at(operand.len());
            results.push(own.to_vec());
            rest = others;
        }
        Ok(results)
    }
}

/// Each job's text in a namespace of its own, so that no two share a template.
fn text(jobs: &[(&Job, String)]) -> String {
    let mut text =
        "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <vector>\n#include \"device.h\"\n".to_owned();
    let mut calls = String::new();
    for (number, (job, own)) in jobs.iter().enumerate() {
        for guard in own.lines().filter_map(|line| line.strip_prefix("#ifndef ")) {
            text += &if guard == "DCC_EMULATED" { String::new() } else { format!("#undef {guard}\n") };
        }
        writeln!(text, "namespace job{number} {{\n{own}").expect("text");
        let mut launches = String::new();
        for launch in &job.source.launches {
            let [x, y] = launch.blocks;
            writeln!(text, "EMULATED_ENTRY({})", launch.entry).expect("text");
            write!(
                launches,
                "{{job{number}::emulated_call_{}, {x}, {y}, {}, {}}}, ",
                launch.entry, launch.threads, launch.shared
            )
            .expect("text");
        }
        text += "}\n";
        let sizes: Vec<String> = job.source.operand_bytes.iter().map(usize::to_string).collect();
        let (sizes, workspace) = (sizes.join(", "), job.source.workspace);
        let parameters = "0, ".repeat(job.source.parameters.len());
        writeln!(
            calls,
            "    if (job == {number}) return run(files, {{{sizes}}}, {workspace}, {{{parameters}}}, {{{launches}}});"
        )
        .expect("text");
    }
    text += r#"
struct Launch { void (*call)(void**); unsigned x, y, threads, shared; };
extern "C" int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
static void* memory(size_t bytes) {
    void* at = nullptr;
    if (posix_memalign(&at, 256, bytes)) abort();
    memset(at, 0xff, bytes);
    return at;
}
static int run(char** files, std::vector<size_t> sizes, size_t workspace, std::vector<long long> parameters, std::vector<Launch> launches) {
    FILE *in = fopen(files[0], "rb"), *out = fopen(files[1], "wb");
    std::vector<void*> operands;
    for (size_t bytes : sizes) {
        operands.push_back(memory(bytes));
        if (fread(operands.back(), 1, bytes, in) != bytes) return 3;
    }
    if (workspace) operands.push_back(memory(workspace));
    std::vector<void*> places;
    for (void*& operand : operands) places.push_back(&operand);
    for (long long& parameter : parameters) places.push_back(&parameter);
    emulated_state = emulated_device();
    for (Launch& launch : launches) {
        emulated::Function function{launch.call, launch.shared};
        if (cuLaunchKernel(&function, launch.x, launch.y, 1, launch.threads, 1, 1, launch.shared, nullptr, places.data(), nullptr)) return 4;
    }
    for (size_t i = 0; i < sizes.size(); ++i) fwrite(operands[i], 1, sizes[i], out);
    fclose(out);
    return 0;
}
int main(int, char** arguments) {
    const int job = atoi(arguments[1]);
    char** files = arguments + 2;
"#;
    text + &calls + "    return 2;\n}\n"
}
