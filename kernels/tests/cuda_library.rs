//! The library's CUDA kernels on the emulation of `tests/stand_in`, against f64 evaluations written here, with the threads of a block in
//! several orders; and kernels with a planted bug, which must be found.

use dcc_kernels::cuda::library::product::Types;
use dcc_kernels::cuda::library::rows::Rows;
use dcc_kernels::cuda::library::{attention, pool, product, rows, scan, scatter};
use dcc_kernels::cuda::{PRELUDE, Source};
use dcc_kernels::library::attention::{Shape, Strides};
use dcc_kernels::library::convolution::{Form, Plain, Spatial};
use dcc_kernels::library::matmul;
use dcc_kernels::library::pool::{Axis, MaxPool};
use dcc_kernels::library::scatter::{Cumsum, Factor, Indexed};
use dcc_program::program::{MaskKind, StoreMode};
use dcc_program::types::DType;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest |x - y| / (1 + |y|) of a result x and its f64 value y: few roundings of sums of some hundred terms.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::BF16 => 2e-2,
        _ => 0.0,
    }
}

/// A kernel, its operands' bytes before, and what must be in them behind.
struct Job {
    source: Source,
    operands: Vec<Vec<u8>>,
    expected: Vec<Expected>,
    what: String,
}

/// Where an output must have which values.
struct Expected {
    operand: usize,
    dtype: DType,
    values: Vec<f64>,
}

/// A program of all kernels: `program JOB IN OUT` runs one.
struct Program {
    folder: PathBuf,
}

impl Program {
    fn new(name: &str, jobs: &[Job]) -> Program {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the program");
        let file = folder.join("program.cpp");
        std::fs::write(&file, text(jobs)).expect("the program is written");
        let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/stand_in");
        let output = Command::new("g++")
            .args(["-std=c++17", "-O1", "-w", "-fsanitize=address", "-o"])
            .arg(folder.join("program"))
            .arg("-I")
            .arg(&stand_in)
            .args([file, stand_in.join("cuda.cpp")])
            .arg("-ldl")
            .output()
            .expect("g++ is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Program { folder }
    }

    /// What is wrong with the results of job `number`, with threads in the order of `seed`.
    fn run(&self, number: usize, job: &Job, seed: u32) -> Result<f64, String> {
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
            return Err(format!("{}, seed {seed}: {}", job.what, String::from_utf8_lossy(&output.stderr)));
        }
        let bytes = std::fs::read(&to).expect("the results are there");
        let mut rest = &bytes[..];
        let mut results = Vec::new();
        for operand in &job.operands {
            let (own, others) = rest.split_at(operand.len());
            results.push(own);
            rest = others;
        }
        let compared =
            job.expected.iter().map(|expected| compare(&decoded(expected.dtype, results[expected.operand]), expected));
        compared
            .collect::<Result<Vec<f64>, String>>()
            .map(|worst| worst.into_iter().fold(0.0, f64::max))
            .map_err(|what| format!("{}, seed {seed}: {what}", job.what))
    }
}

fn text(jobs: &[Job]) -> String {
    let mut text =
        "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <vector>\n#include \"device.h\"\n".to_owned();
    text += PRELUDE;
    let mut calls = String::new();
    for (number, job) in jobs.iter().enumerate() {
        text += &job.source.text;
        let sizes: Vec<String> = job.source.operand_bytes.iter().map(usize::to_string).collect();
        let mut launches = String::new();
        for launch in &job.source.launches {
            let [x, y] = launch.blocks;
            writeln!(text, "EMULATED_ENTRY({})", launch.entry).expect("text");
            write!(launches, "{{emulated_call_{}, {x}, {y}, {}, {}}}, ", launch.entry, launch.threads, launch.shared)
                .expect("text");
        }
        writeln!(
            calls,
            "    if (job == {number}) return run(files, {{{}}}, {}, {{{launches}}});",
            sizes.join(", "),
            job.source.workspace
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
static int run(char** files, std::vector<size_t> sizes, size_t workspace, std::vector<Launch> launches) {
    FILE *in = fopen(files[0], "rb"), *out = fopen(files[1], "wb");
    std::vector<void*> operands;
    for (size_t bytes : sizes) {
        operands.push_back(memory(bytes));
        if (fread(operands.back(), 1, bytes, in) != bytes) return 3;
    }
    if (workspace) operands.push_back(memory(workspace));
    std::vector<void*> places;
    for (void*& operand : operands) places.push_back(&operand);
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

/// The largest error. Errors: values outside of the tolerance.
fn compare(got: &[f64], expected: &Expected) -> Result<f64, String> {
    assert_eq!(got.len(), expected.values.len(), "elements of operand {}", expected.operand);
    let mut worst: f64 = 0.0;
    for (i, (x, y)) in got.iter().zip(&expected.values).enumerate() {
        let error = if x == y || (x.is_nan() && y.is_nan()) { 0.0 } else { (x - y).abs() / (1.0 + y.abs()) };
        if error.is_nan() || error > tolerance(expected.dtype) {
            return Err(format!("operand {} has {x} at {i}, expected {y}", expected.operand));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

/// Every job under three orders of threads.
fn check(name: &str, jobs: &[Job]) {
    let program = Program::new(name, jobs);
    for (number, job) in jobs.iter().enumerate() {
        let worst = [1, 2, 3].map(|seed| program.run(number, job, seed).unwrap_or_else(|what| panic!("{what}")));
        println!("{}: error {:.1e}", job.what, worst.iter().copied().fold(0.0, f64::max));
    }
}

/// Every job with a text replaced: some order of threads must show it, and none what is wrong with `sound`.
fn check_controls(name: &str, namespace: &str, sound: Vec<Job>, jobs: Vec<(Job, &str, &str)>) {
    let mut planted: Vec<Job> = jobs
        .into_iter()
        .enumerate()
        .map(|(number, (mut job, from, to))| {
            assert!(job.source.text.contains(from), "the text has no `{from}`");
            let guard = format!("DCC_{}", namespace.to_uppercase());
            let own = [(guard, "_"), (format!("namespace {namespace}"), ""), (format!("{namespace}::"), "")];
            let mut text = job.source.text.replacen(from, to, 1);
            for (word, _) in &own {
                let renamed = word
                    .replace(namespace, &format!("{namespace}{number}"))
                    .replace(&own[0].0, &format!("{}{number}", own[0].0));
                text = text.replace(word, &renamed);
            }
            job.source.text = text;
            job.what = format!("`{from}` as `{to}`");
            job
        })
        .collect();
    let controls = planted.len();
    planted.extend(sound);
    let program = Program::new(name, &planted);
    for (number, job) in planted.iter().enumerate() {
        let found = (1..=6).find_map(|seed| program.run(number, job, seed).err());
        assert!(found.is_some() == (number < controls), "{}: {found:?}", job.what);
    }
}

fn half_bits(dtype: DType, x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    if dtype == DType::BF16 {
        return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    }
    let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
    if x.abs() < 2f64.powi(-14) {
        return sign | (x.abs() * 2f64.powi(24)).round_ties_even() as u16;
    }
    sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112 << 23)) >> 13) as u16
}

fn half_value(dtype: DType, bits: u16) -> f64 {
    if dtype == DType::BF16 {
        return f32::from_bits(u32::from(bits) << 16).into();
    }
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

fn encoded(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = |x: &f64| match dtype {
        DType::F32 => (*x as f32).to_le_bytes().to_vec(),
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::I32 => (*x as i32).to_le_bytes().to_vec(),
        DType::I64 => (*x as i64).to_le_bytes().to_vec(),
        DType::U8 => vec![*x as u8],
        _ => half_bits(dtype, *x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |b: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(b.try_into().expect("4 bytes")).into(),
        DType::F64 => f64::from_le_bytes(b.try_into().expect("8 bytes")),
        DType::I32 => i32::from_le_bytes(b.try_into().expect("4 bytes")).into(),
        DType::I64 => i64::from_le_bytes(b.try_into().expect("8 bytes")) as f64,
        DType::U8 => b[0].into(),
        _ => half_value(dtype, u16::from_le_bytes(b.try_into().expect("2 bytes"))),
    };
    bytes.chunks_exact(dtype.bytes() as usize).map(value).collect()
}

/// Exact in every float type.
fn numbers(count: usize, seed: usize) -> Vec<f64> {
    let mut state = seed as u64 * 7919 + 17;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % 257) as f64 / 64.0 - 2.0
    };
    (0..count).map(|_| next()).collect()
}

// Attention.

/// Strides of dense (batch, head, group, position, channel), or (batch, position, head, group, channel).
fn strides(shape: &Shape, positions: usize, channels: usize, groups: usize, position_major: bool) -> Strides {
    let (h, g) = (shape.heads, groups);
    if position_major {
        let position = h * g * channels;
        Strides { batch: positions * position, head: g * channels, group: channels, position, channel: 1 }
    } else {
        let group = positions * channels;
        Strides { batch: h * g * group, head: g * group, group, position: channels, channel: 1 }
    }
}

fn shape(
    [batch, heads, groups]: [usize; 3],
    [queries, keys, channels, values]: [usize; 4],
    causal: Option<i64>,
    major: bool,
) -> Shape {
    let none = Strides::default();
    let scale = 0.25;
    let (q, k, v, o, lse) = (none, none, none, none, none);
    let mut shape = Shape { batch, heads, groups, queries, keys, channels, values, scale, causal, q, k, v, o, lse, mask: none };
    shape.q = strides(&shape, queries, channels, groups, major);
    shape.k = Strides { group: 0, ..strides(&shape, keys, channels, 1, major) };
    shape.v = Strides { group: 0, ..strides(&shape, keys, values, 1, !major) };
    shape.o = strides(&shape, queries, values, groups, major);
    shape.lse = Strides { channel: 0, ..strides(&shape, queries, 1, groups, false) };
    shape.mask = Strides { batch: queries * keys, position: keys, channel: 1, ..none };
    shape
}

/// Values of one attention: its operands as they are stored, and O, Lse, dQ, dK, dV by definition.
struct Attended {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dy: Vec<f64>,
    /// Added to scores of [batch, query, key].
    mask: Vec<f64>,
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn at(l: &Strides, [b, h, g]: [usize; 3], position: usize) -> usize {
    b * l.batch + h * l.head + g * l.group + position * l.position
}

impl Attended {
    fn new(s: &Shape, kind: MaskKind) -> Attended {
        let (queries, keys) = (s.batch * s.heads * s.groups * s.queries, s.batch * s.heads * s.keys);
        let (q, k) = (numbers(queries * s.channels, 1), numbers(keys * s.channels, 2));
        let (v, dy) = (numbers(keys * s.values, 3), numbers(queries * s.values, 4));
        // Query 1 sees nothing.
        let hidden = |i: usize| i / s.keys % s.queries == 1 || (i * 7).is_multiple_of(5);
        let added = |i: usize| if kind == MaskKind::Additive { (i % 9) as f64 / 8.0 } else { 0.0 };
        let mask = |i: usize| if kind != MaskKind::None && hidden(i) { f64::NEG_INFINITY } else { added(i) };
        let mask = (0..s.batch * s.queries * s.keys).map(mask).collect();
        let (o, lse) = (vec![0.0; dy.len()], vec![f64::NEG_INFINITY; queries]);
        let (dq, dk, dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        Attended { q, k, v, dy, mask, o, lse, dq, dk, dv }
    }

    /// Fills in O, Lse and the gradients; the backward pass takes O and Lse as `stored` gives them back.
    fn evaluate(&mut self, s: &Shape, stored: impl Fn(f64) -> f64) {
        for number in 0..s.batch * s.heads * s.groups {
            let head = [number / (s.groups * s.heads), number / s.groups % s.heads, number % s.groups];
            for t in 0..s.queries {
                self.query(s, head, t, &stored);
            }
        }
    }

    fn query(&mut self, s: &Shape, head: [usize; 3], t: usize, stored: &impl Fn(f64) -> f64) {
        let key = [head[0], head[1], 0];
        let (qt, ot) = (at(&s.q, head, t), at(&s.o, head, t));
        let score = |j: usize| {
            let hidden = s.causal.is_some_and(|offset| j as i64 > t as i64 + offset);
            let dot: f64 = (0..s.channels).map(|e| self.q[qt + e] * self.k[at(&s.k, key, j) + e * s.k.channel]).sum();
            if hidden { f64::NEG_INFINITY } else { dot * s.scale + self.mask[(head[0] * s.queries + t) * s.keys + j] }
        };
        let scores: Vec<f64> = (0..s.keys).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return;
        }
        let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        self.lse[at(&s.lse, head, t)] = max + sum.ln();
        let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
        for (j, p) in p.iter().enumerate() {
            (0..s.values).for_each(|f| self.o[ot + f] += p * self.v[at(&s.v, key, j) + f]);
        }
        let dot: f64 = (0..s.values).map(|f| self.dy[ot + f] * stored(self.o[ot + f])).sum();
        for (j, p) in p.iter().enumerate() {
            let (kj, vj) = (at(&s.k, key, j), at(&s.v, key, j));
            let dp: f64 = (0..s.values).map(|f| self.dy[ot + f] * self.v[vj + f]).sum();
            let ds = p * (dp - dot) * s.scale;
            (0..s.values).for_each(|f| self.dv[vj + f] += p * self.dy[ot + f]);
            (0..s.channels).for_each(|e| self.dq[qt + e] += ds * self.k[kj + e * s.k.channel]);
            (0..s.channels).for_each(|e| self.dk[kj + e * s.k.channel] += ds * self.q[qt + e]);
        }
    }
}

/// Both passes of one attention.
fn attend(name: &str, s: &Shape, dtype: DType, kind: MaskKind) -> [Job; 2] {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut a = Attended::new(s, kind);
    a.evaluate(s, |x| decoded(dtype, &encoded(dtype, &[x]))[0]);
    let nothing = |count: usize, dtype: DType| vec![0xff; count * dtype.bytes() as usize];
    let mask = match kind {
        MaskKind::None => None,
        MaskKind::Additive => Some(encoded(wide, &a.mask)),
        MaskKind::Boolean => {
            Some(encoded(DType::U8, &a.mask.iter().map(|x| f64::from(u8::from(*x == 0.0))).collect::<Vec<_>>()))
        }
    };
    let Shape { batch, heads, groups, queries, keys, channels, values, causal, .. } = s;
    let sizes = format!("{batch}x{heads}x{groups}, {queries} queries, {keys} keys, {channels} and {values} channels");
    let what = format!("attention of {} {sizes}, causal {causal:?}, mask {kind:?}", dtype.name());
    let [q, k, v, dy, o] = [&a.q, &a.k, &a.v, &a.dy, &a.o].map(|x| encoded(dtype, x));
    let lse = encoded(wide, &a.lse);
    let results = [nothing(a.o.len(), dtype), nothing(a.lse.len(), wide)];
    let operands: Vec<_> = [q.clone(), k.clone(), v.clone()].into_iter().chain(mask.clone()).chain(results).collect();
    let first = operands.len() - 2;
    let forward = Job {
        source: attention::forward(s, dtype, kind, &format!("{name}_forward")).expect("a source"),
        operands,
        expected: vec![
            Expected { operand: first, dtype, values: a.o },
            Expected { operand: first + 1, dtype: wide, values: a.lse },
        ],
        what: what.clone(),
    };
    let gradients = [a.dq, a.dk, a.dv];
    let results = gradients.each_ref().map(|x| nothing(x.len(), dtype));
    let operands: Vec<_> = [dy, q, k, v, o, lse].into_iter().chain(mask).chain(results).collect();
    let first = operands.len() - 3;
    let expected = gradients.into_iter().enumerate().map(|(i, values)| Expected { operand: first + i, dtype, values });
    let backward = Job {
        source: attention::backward(s, dtype, kind, &format!("{name}_backward")).expect("a source"),
        operands,
        expected: expected.collect(),
        what: format!("gradient of {what}"),
    };
    for job in [&forward, &backward] {
        assert!(job.operands.iter().map(Vec::len).eq(job.source.operand_bytes.iter().copied()), "operands of {}", job.what);
    }
    [forward, backward]
}

#[test]
fn attention_of_whole_floats() {
    let (none, additive, boolean) = (MaskKind::None, MaskKind::Additive, MaskKind::Boolean);
    let cases = [
        (shape([1, 2, 1], [70, 70, 64, 64], Some(0), true), DType::F32, none),
        (shape([2, 1, 3], [5, 37, 20, 12], None, false), DType::F32, additive),
        (shape([1, 1, 2], [33, 40, 128, 128], Some(7), true), DType::F32, boolean),
        (shape([1, 1, 1], [1, 130, 16, 5], Some(129), false), DType::F32, none),
        (shape([1, 1, 1], [20, 19, 256, 256], Some(-3), false), DType::F32, none),
        (shape([2, 2, 2], [35, 50, 24, 40], Some(-4), true), DType::F64, boolean),
        (shape([1, 1, 1], [17, 33, 130, 200], None, true), DType::F64, additive),
    ];
    // Keys by channel, O's queries apart by an odd number.
    let mut crossed = shape([2, 1, 1], [20, 35, 12, 7], Some(15), false);
    crossed.k = Strides { batch: 35 * 12, position: 1, channel: 35, ..Strides::default() };
    let cases = cases.into_iter().chain([(crossed, DType::F32, boolean)]).collect::<Vec<_>>();
    let jobs = cases.iter().enumerate().flat_map(|(i, (s, dtype, kind))| attend(&format!("a{i}"), s, *dtype, *kind));
    check("attention_of_whole_floats", &jobs.collect::<Vec<_>>());
}

#[test]
fn attention_of_halves() {
    let cases = [
        (shape([1, 2, 2], [70, 90, 64, 64], Some(20), true), DType::BF16, MaskKind::None),
        (shape([1, 1, 1], [130, 70, 128, 64], None, false), DType::F16, MaskKind::Additive),
        (shape([2, 1, 1], [17, 66, 32, 96], Some(49), true), DType::BF16, MaskKind::Boolean),
        (shape([1, 1, 1], [9, 20, 12, 5], Some(-2), true), DType::F16, MaskKind::None),
        (shape([2, 1, 2], [75, 140, 64, 40], Some(65), true), DType::BF16, MaskKind::Additive),
    ];
    let jobs = cases.iter().enumerate().flat_map(|(i, (s, dtype, kind))| attend(&format!("a{i}"), s, *dtype, *kind));
    check("attention_of_halves", &jobs.collect::<Vec<_>>());
}

#[test]
fn nan_is_not_hidden() {
    let s = shape([1, 1, 1], [5, 40, 16, 16], None, true);
    let job = |(i, dtype): (usize, &DType)| {
        let [mut job, _] = attend(&format!("a{i}"), &s, *dtype, MaskKind::None);
        job.operands[1][..dtype.bytes() as usize].fill(0xff);
        job.expected.iter_mut().for_each(|expected| expected.values.fill(f64::NAN));
        job
    };
    check("nan_is_not_hidden", &[DType::F32, DType::F64, DType::BF16].iter().enumerate().map(job).collect::<Vec<_>>());
}

#[test]
fn planted_bugs_of_attention() {
    let s = shape([1, 1, 2], [40, 200, 16, 16], Some(160), true);
    let job = |number: usize, pass: usize| {
        let [forward, backward] = attend(&format!("a{number}"), &s, DType::F32, MaskKind::None);
        if pass == 0 { forward } else { backward }
    };
    let before_values = "        __syncthreads();\n        load<typename S::v";
    let before_queries = "            __syncthreads();\n            load<typename S::q";
    let planted = [
        (0, "query + S::OFFSET + 1", "query + S::OFFSET"),
        (0, before_values, "        load<typename S::v"),
        (0, "sum[i] *= rescale;", ""),
        (0, "        __syncthreads();\n        sums.template add", "        sums.template add"),
        (1, before_queries, "            load<typename S::q"),
        (1, "for (int g = 0; g < S::GROUPS; ++g)", "for (int g = 0; g < 1; ++g)"),
        (1, "(key - S::OFFSET) / block * block", "(key - S::OFFSET) / block * block + block"),
        (1, "head.row() + own + i", "head.row() + own"),
    ];
    let jobs = planted.iter().enumerate().map(|(i, (pass, from, to))| (job(i, *pass), *from, *to)).collect();
    let sound = Vec::from(attend("sound", &s, DType::F32, MaskKind::None));
    check_controls("planted_bugs_of_attention", "attention", sound, jobs);
}

#[test]
fn planted_bugs_of_attention_by_tensor_cores() {
    let s = shape([1, 1, 2], [80, 200, 32, 16], Some(120), true);
    let both = |name: &str| attend(name, &s, DType::BF16, MaskKind::None);
    let job = |number: usize, pass: usize| {
        let [forward, backward] = both(&format!("a{number}"));
        if pass == 0 { forward } else { backward }
    };
    let planted = [
        (0, "        tensor::wait<1>();\n        __syncthreads();", "        tensor::wait<1>();"),
        (0, "        tensor::wait<1>();", "        tensor::wait<2>();"),
        (0, "values + now * V_TILE);\n        }\n        __syncthreads();", "values + now * V_TILE);\n        }"),
        (0, "key + KEYS <= limit<S>(query)", "key <= limit<S>(query)"),
        (1, "across = LANES / 2", "across = LANES / 4"),
        (0, "sums.scale(h, half, rescale);", ""),
        (1, "queries + now * Q_TILE);\n        }\n        __syncthreads();", "queries + now * Q_TILE);\n        }"),
        (1, "own < limit<S>(from + STEP - 1)", "own < limit<S>(from)"),
        (1, "number + n / each", "number"),
        (1, "sums.add(d, keys + now * K_TILE);", "sums.add(d, keys);"),
        (1, "log == hidden<float>() ? 0", "false ? 0"),
    ];
    let jobs = planted.iter().enumerate().map(|(i, (pass, from, to))| (job(i, *pass), *from, *to)).collect();
    check_controls("planted_bugs_of_attention_by_tensor_cores", "attention", Vec::from(both("sound")), jobs);
}

// Pools, scatters, running sums, rows.

fn pooled(name: &str, planes: Vec<[usize; 2]>, axes: Vec<Axis>, dtype: DType) -> Job {
    let product = |size: fn(&Axis) -> usize| axes.iter().map(size).product::<usize>();
    let (image, outputs) = (product(|axis| axis.image), product(|axis| axis.outputs));
    let reach = |operand: usize, size: usize| planes.iter().map(|plane| plane[operand] + size).max().unwrap_or(0);
    let mut x = numbers(reach(0, image), 5);
    x[image / 2] = f64::NAN;
    let (mut values, mut places) = (vec![f64::NAN; reach(1, outputs)], vec![-1.0; reach(1, outputs)]);
    for [from, to] in &planes {
        for window in 0..outputs {
            let (mut best, mut place) = (f64::NEG_INFINITY, -1.0);
            for tap in 0..product(|axis| axis.taps) {
                let (mut rest, mut here, mut inside) = ([window, tap], 0, true);
                let mut inner = 1;
                for axis in axes.iter().rev() {
                    let at = (rest[0] % axis.outputs * axis.stride + rest[1] % axis.taps * axis.dilation) as isize - axis.pad;
                    inside &= (0..axis.image as isize).contains(&at);
                    here += at * inner;
                    inner *= axis.image as isize;
                    rest = [rest[0] / axis.outputs, rest[1] / axis.taps];
                }
                if inside {
                    let found = x[from + here as usize];
                    if found > best || found.is_nan() || place < 0.0 {
                        (best, place) = (found, here as f64);
                    }
                }
            }
            (values[to + window], places[to + window]) = (best, place);
        }
    }
    let bytes = |dtype: DType| vec![0xff; reach(1, outputs) * dtype.bytes() as usize];
    Job {
        what: format!("max_pool of {} {axes:?}", dtype.name()),
        operands: vec![encoded(dtype, &x), bytes(dtype), bytes(DType::I32)],
        expected: vec![Expected { operand: 1, dtype, values }, Expected { operand: 2, dtype: DType::I32, values: places }],
        source: pool::max_pool(&MaxPool { planes, axes }, dtype, name).expect("a source"),
    }
}

#[test]
fn pools() {
    let axis = |[image, outputs, taps, stride, dilation]: [usize; 5], pad| Axis { image, outputs, taps, stride, dilation, pad };
    let planes = |count: usize, from: usize, to: usize| (0..count).map(|i| [i * from, i * to]).collect::<Vec<_>>();
    // Channels behind samples in the image, samples behind channels in the output.
    let crossed = (0..6).map(|i| [i * 72, (i % 3 * 2 + i / 3) * 20]).collect();
    let jobs = [
        pooled("p0", planes(5, 49, 16), vec![axis([7, 4, 3, 2, 1], 1), axis([7, 4, 3, 2, 1], 1)], DType::F32),
        pooled("p1", crossed, vec![axis([8, 4, 2, 2, 2], 0), axis([9, 5, 3, 2, 1], 2)], DType::F64),
        pooled("p2", planes(2, 400, 130), vec![axis([400, 130, 5, 3, 1], 1)], DType::BF16),
        pooled(
            "p3",
            planes(1, 60, 27),
            vec![axis([3, 3, 1, 3, 1], 2), axis([4, 3, 2, 1, 1], 0), axis([5, 3, 3, 1, 1], 0)],
            DType::F32,
        ),
    ];
    check("pools", &jobs);
}

/// Sums of updates by [`Factor`]s: their loops, straight.
fn scattered(name: &str, factors: &[Factor], indexed: Indexed, [dtype, index]: [DType; 2], mode: StoreMode) -> Job {
    let reach = |stride: fn(&Factor) -> Option<usize>| {
        1 + factors.iter().filter_map(|f| stride(f).map(|s| (f.size - 1) * s)).sum::<usize>()
    };
    let rows = (indexed.valid - 1) * indexed.stride;
    let (counts, start) = ([reach(|f| f.index), reach(|f| f.update), reach(|f| f.out) + rows], 0.5);
    let beyond = indexed.valid as i64 + 3;
    let indices: Vec<f64> =
        (0..counts[0]).map(|i| (indexed.offset + (i * i / 5 + i * 11) as i64 % beyond - 1) as f64).collect();
    let updates = numbers(counts[1], 6);
    let mut out = vec![if mode == StoreMode::Accumulate { start } else { 0.0 }; counts[2]];
    for point in 0..factors.iter().map(|f| f.size).product() {
        let (mut rest, mut offsets) = (point, [0; 3]);
        for f in factors.iter().rev() {
            let strides = [f.index, f.update, f.out].map(|stride| stride.unwrap_or(0));
            (0..3).for_each(|i| offsets[i] += rest % f.size * strides[i]);
            rest /= f.size;
        }
        let row = indices[offsets[0]] as i64 - indexed.offset;
        if (0..indexed.valid as i64).contains(&row) {
            out[offsets[2] + row as usize * indexed.stride] += updates[offsets[1]];
        }
    }
    Job {
        what: format!("scatter_add of {} by {} {factors:?} {indexed:?} {mode:?}", dtype.name(), index.name()),
        source: scatter::scatter_add((factors, indexed), (dtype, index), mode, name).expect("a source"),
        operands: vec![encoded(index, &indices), encoded(dtype, &updates), encoded(dtype, &vec![start; counts[2]])],
        expected: vec![Expected { operand: 2, dtype, values: out }],
    }
}

fn factor(size: usize, index: Option<usize>, update: usize, out: Option<usize>) -> Factor {
    Factor { size, index, update: Some(update), out }
}

/// An embedding's gradient: tokens [b, t], updates [b, t, c], of rows from 3 on of a table.
fn embedding([b, t, c]: [usize; 3], valid: usize) -> (Vec<Factor>, Indexed) {
    let factors = vec![factor(b, Some(t), t * c, None), factor(t, Some(1), c, None), factor(c, None, 1, Some(1))];
    (factors, Indexed { stride: c, offset: 3, valid })
}

#[test]
fn scatters() {
    let (few, many) = (embedding([2, 700, 70], 5), embedding([3, 100, 40], 300));
    let (assign, accumulate) = (StoreMode::Assign, StoreMode::Accumulate);
    // Indices [b, n], updates [n, b, c, d] -> out [v, d, b, c].
    let crossed = [
        factor(2, Some(30), 10, Some(5)),
        factor(30, Some(1), 20, None),
        factor(5, None, 2, Some(1)),
        factor(2, None, 1, Some(10)),
    ];
    let jobs = [
        scattered("s0", &few.0, few.1, [DType::F32, DType::I64], assign),
        scattered("s1", &many.0, many.1, [DType::F32, DType::I32], accumulate),
        scattered("s2", &crossed, Indexed { stride: 20, offset: -1, valid: 4 }, [DType::F64, DType::I64], accumulate),
        scattered("s3", &many.0, many.1, [DType::BF16, DType::I32], assign),
        scattered("s4", &few.0, few.1, [DType::F64, DType::I32], accumulate),
        scattered(
            "s5",
            &[factor(3000, Some(1), 1, None)],
            Indexed { stride: 1, offset: 0, valid: 100 },
            [DType::F32, DType::I64],
            assign,
        ),
    ];
    // A pool's gradient: planes, windows that share elements; then one whose sources all have one row.
    let planes = [factor(6, Some(49), 49, Some(100)), factor(49, Some(1), 1, None)];
    let pooled = scattered("s6", &planes, Indexed { stride: 1, offset: 0, valid: 100 }, [DType::F32, DType::I32], accumulate);
    let mut crowded = scattered(
        "s7",
        &[factor(300, Some(1), 1, None)],
        Indexed { stride: 1, offset: 0, valid: 9 },
        [DType::F64, DType::I32],
        assign,
    );
    crowded.operands[0] = encoded(DType::I32, &[4.0; 300]);
    crowded.expected[0].values =
        (0..9).map(|row| if row == 4 { decoded(DType::F64, &crowded.operands[1]).iter().sum() } else { 0.0 }).collect();
    let jobs: Vec<Job> = jobs.into_iter().chain([pooled, crowded]).collect();
    assert!(jobs[0].source.launches.len() == 2 && jobs[1].source.launches.len() == 1, "one of parts, one without");
    check("scatters", &jobs);
}

#[test]
fn planted_bugs_of_scatters() {
    let (factors, indexed) = embedding([3, 700, 140], 40);
    let planted = [
        ("if (!(touched >> r & 1))", "if (false)"),
        ("((1u << lane) - 1)", "((1u << lane >> 1) - 1)"),
        ("        __syncthreads();\n        int at", "        int at"),
        ("        __syncthreads();\n        if (!own)", "        if (!own)"),
        ("S::OFFSET + first", "S::OFFSET"),
        ("parts[part * all + n]", "parts[n]"),
    ];
    let few = [factor(3, Some(700), 700, Some(40)), factor(700, Some(1), 1, None)];
    let single = |name: &str| {
        scattered(name, &few, Indexed { stride: 1, offset: 3, valid: 40 }, [DType::F32, DType::I64], StoreMode::Assign)
    };
    let of_few = [
        ("        } while (__syncthreads_or(waits));", "        } while (__syncthreads_or(false));"),
        ("local >= 0 && local < valid;", "local > 0 && local < valid;"),
    ];
    let job = |name: &str| scattered(name, &factors, indexed, [DType::F32, DType::I64], StoreMode::Assign);
    let jobs = planted.iter().enumerate().map(|(i, (from, to))| (job(&format!("s{i}")), *from, *to));
    let of_few = of_few.iter().enumerate().map(|(i, (from, to))| (single(&format!("f{i}")), *from, *to));
    check_controls("planted_bugs_of_scatters", "scatter", vec![job("sound"), single("few")], jobs.chain(of_few).collect());
}

fn summed(name: &str, [outer, size, inner]: [usize; 3], [exclusive, reverse]: [bool; 2], dtype: DType) -> Job {
    let x: Vec<f64> =
        numbers(outer * size * inner, 7).iter().map(|x| if dtype.is_float() { *x } else { (x * 64.0).round() }).collect();
    let mut y = vec![0.0; x.len()];
    for line in 0..outer * inner {
        let base = line / inner * size * inner + line % inner;
        let mut sum = 0.0;
        for step in 0..size {
            let at = base + if reverse { size - 1 - step } else { step } * inner;
            y[at] = if exclusive { sum } else { sum + x[at] };
            sum += x[at];
        }
    }
    let sums = Cumsum { outer, size, inner, exclusive, reverse };
    Job {
        what: format!("cumsum of {} {sums:?}", dtype.name()),
        source: scan::cumsum(&sums, dtype, name).expect("a source"),
        operands: vec![encoded(dtype, &x), vec![0xff; x.len() * dtype.bytes() as usize]],
        expected: vec![Expected { operand: 1, dtype, values: y }],
    }
}

#[test]
fn running_sums() {
    let jobs = [
        summed("c0", [3, 700, 1], [false, false], DType::F32),
        summed("c1", [2, 300, 3], [true, true], DType::F64),
        summed("c2", [4, 30, 70], [false, true], DType::I32),
        summed("c3", [1, 256, 2], [true, false], DType::I64),
        summed("c4", [5, 1, 1], [true, false], DType::F32),
        summed("c5", [2, 1000, 1], [false, true], DType::I32),
    ];
    check("running_sums", &jobs);
}

#[test]
fn planted_bugs_of_running_sums() {
    let planted = [
        ("lane >= by", "lane > by"),
        ("        __syncthreads();\n        C own", "        C own"),
        ("        }\n        __syncthreads();\n        if (step", "        }\n        if (step"),
        ("step + S::EXCLUSIVE < S::SIZE", "true"),
    ];
    let job = |name: &str| summed(name, [2, 600, 1], [true, false], DType::F32);
    let jobs = planted.iter().enumerate().map(|(i, (from, to))| (job(&format!("c{i}")), *from, *to)).collect();
    check_controls("planted_bugs_of_running_sums", "scan", vec![job("sound")], jobs);
}

fn copied(name: &str, rows: Rows) -> Job {
    let Rows { count, bytes, from_stride, to_stride, .. } = rows;
    let reach = |stride: usize| (count - 1) * stride + bytes;
    let from: Vec<f64> = (0..reach(from_stride)).map(|i| (i * 37 % 251) as f64).collect();
    let mut to = vec![9.0; reach(to_stride)];
    let before = encoded(DType::U8, &to);
    (0..count).for_each(|row| to[row * to_stride..][..bytes].copy_from_slice(&from[row * from_stride..][..bytes]));
    Job {
        what: format!("{rows:?}"),
        source: rows::copy(&rows, name).expect("a source"),
        operands: vec![encoded(DType::U8, &from), before],
        expected: vec![Expected { operand: 1, dtype: DType::U8, values: to }],
    }
}

#[test]
fn copies_and_zeros() {
    let zeros = |name: &str, bytes: usize, alignment: usize| Job {
        what: format!("{bytes} zeros"),
        source: rows::zero(bytes, alignment, name).expect("a source"),
        operands: vec![vec![7; bytes]],
        expected: vec![Expected { operand: 0, dtype: DType::U8, values: vec![0.0; bytes] }],
    };
    let jobs = [
        copied("r0", Rows { count: 3, bytes: 4096, from_stride: 8192, to_stride: 4096, alignment: 256 }),
        copied("r1", Rows { count: 50, bytes: 12, from_stride: 24, to_stride: 20, alignment: 256 }),
        copied("r2", Rows { count: 7, bytes: 3, from_stride: 5, to_stride: 3, alignment: 1 }),
        copied("r3", Rows { count: 1, bytes: 10_000, from_stride: 0, to_stride: 0, alignment: 8 }),
        zeros("z0", 5000, 256),
        zeros("z1", 35, 256),
    ];
    check("copies_and_zeros", &jobs);
}

/// A tensor's elements for the strides of a product, its bytes and values.
fn operand(dtype: DType, count: usize, seed: usize) -> (Vec<u8>, Vec<f64>) {
    let bytes = encoded(dtype, &numbers(count, seed));
    let values = decoded(dtype, &bytes);
    (bytes, values)
}

/// Loops of a product or convolution: length, and element strides in lhs, rhs and out.
type Strided = (usize, [Option<usize>; 3]);

/// One more than the largest offset in each operand.
fn reach(loops: &[Strided]) -> [usize; 3] {
    std::array::from_fn(|i| 1 + loops.iter().map(|(size, strides)| (size - 1) * strides[i].unwrap_or(0)).sum::<usize>())
}

fn multiplied(name: &str, loops: &[Strided], types: Types) -> Job {
    let counts = reach(loops);
    let [(a, x), (b, y)] = [operand(types.operands, counts[0], 3), operand(types.operands, counts[1], 5)];
    let start = if types.mode == StoreMode::Accumulate { 0.5 } else { 0.0 };
    let mut out = vec![start; counts[2]];
    for point in 0..loops.iter().map(|l| l.0).product() {
        let (mut rest, mut at) = (point, [0; 3]);
        for (size, strides) in loops.iter().rev() {
            (0..3).for_each(|i| at[i] += rest % size * strides[i].unwrap_or(0));
            rest /= size;
        }
        out[at[2]] += x[at[0]] * y[at[1]];
    }
    let factor = |&(size, [lhs, rhs, out]): &Strided| matmul::Factor { size, lhs, rhs, out };
    let factors: Vec<matmul::Factor> = loops.iter().map(factor).collect();
    Job {
        what: format!("{loops:?} {types:?}"),
        source: product::dot(&factors, types, counts, name).expect("a source"),
        operands: vec![a, b, encoded(types.result, &vec![0.5; counts[2]])],
        expected: vec![Expected { operand: 2, dtype: types.result, values: out }],
    }
}

fn types(operands: DType, result: DType, mode: StoreMode) -> Types {
    Types { operands, result, mode }
}

/// Row-major lhs [m, k], rhs [k, n]; turned, lhs [k, m], rhs [n, k].
fn plain([m, n, k]: [usize; 3], turned: bool) -> Vec<Strided> {
    match turned {
        false => vec![(m, [Some(k), None, Some(n)]), (n, [None, Some(1), Some(1)]), (k, [Some(1), Some(n), None])],
        true => vec![(m, [Some(1), None, Some(n)]), (n, [None, Some(k), Some(1)]), (k, [Some(m), Some(1), None])],
    }
}

#[test]
fn products() {
    let (assign, accumulate) = (StoreMode::Assign, StoreMode::Accumulate);
    let (f32, f64, bf16, f16) = (DType::F32, DType::F64, DType::BF16, DType::F16);
    // Heads [b, t, h, e] and [b, s, h, e] to scores [b, h, t, s].
    let heads = vec![
        (2, [Some(7 * 3 * 5), Some(9 * 3 * 5), Some(3 * 7 * 9)]),
        (3, [Some(5), Some(5), Some(7 * 9)]),
        (7, [Some(3 * 5), None, Some(9)]),
        (9, [None, Some(3 * 5), Some(1)]),
        (5, [Some(1), Some(1), None]),
    ];
    // Rows of two dims that do not follow each other in the result.
    let parted = vec![
        (6, [Some(80), None, Some(4)]),
        (10, [Some(8), None, Some(24)]),
        (4, [None, Some(8), Some(1)]),
        (8, [Some(1), Some(1), None]),
    ];
    let jobs = [
        multiplied("p0", &plain([200, 150, 37], false), types(f32, f32, assign)),
        multiplied("p1", &plain([20, 30, 2100], true), types(f32, f32, accumulate)),
        multiplied("p2", &heads, types(f64, f64, accumulate)),
        multiplied("p3", &plain([130, 70, 100], false), types(bf16, bf16, assign)),
        multiplied("p4", &plain([33, 129, 700], true), types(f16, f32, accumulate)),
        multiplied("p5", &parted, types(f32, f32, assign)),
        multiplied("p6", &parted, types(bf16, f32, accumulate)),
        multiplied("p7", &plain([1, 1, 3], false), types(f64, f64, assign)),
    ];
    assert!(jobs[1].source.launches.len() == 2 && jobs[0].source.launches.len() == 1, "one of parts, one without");
    check("products", &jobs);
}

/// A two-dimensional convolution and both gradients: images [n, g, c, 9, 8], outputs [n, g, o, …], kernels [g, o, c, 3, 2].
fn convolved(name: &str, result: usize, dtype: DType, [stride, dilation, pad]: [usize; 3]) -> Job {
    let (n, g, c, o) = (2, 2, 3, 4);
    let (image, taps) = ([9, 8], [3, 2]);
    let out = [0, 1].map(|d| (image[d] + 2 * pad - dilation * (taps[d] - 1) - 1) / stride + 1);
    let dense = |dims: &[usize]| -> Vec<usize> { (0..dims.len()).map(|i| dims[i + 1..].iter().product()).collect() };
    let [x, y, k] =
        [[n, g, c, image[0], image[1]], [n, g, o, out[0], out[1]], [g, o, c, taps[0], taps[1]]].map(|dims| dense(&dims));
    let plain = [
        Plain { size: n, strides: [Some(x[0]), Some(y[0]), None] },
        Plain { size: g, strides: [Some(x[1]), Some(y[1]), Some(k[0])] },
        Plain { size: c, strides: [Some(x[2]), None, Some(k[2])] },
        Plain { size: o, strides: [None, Some(y[2]), Some(k[1])] },
    ];
    let spatial = [0, 1].map(|d| Spatial {
        sizes: [image[d], out[d], taps[d]],
        strides: [x[3 + d], y[3 + d], k[3 + d]],
        stride,
        dilation,
        pad: pad as isize,
    });
    let counts = [n * x[0], n * y[0], g * k[0]];
    let [first, second] = [[1, 2], [2, 0], [0, 1]][result];
    let (form, roles) = (Form { result, operands: [first, second] }, [first, second, result]);
    let [(a, p), (b, q)] = [operand(dtype, counts[first], 3), operand(dtype, counts[second], 5)];
    let mut sums = vec![0.5; counts[result]];
    let all = plain.iter().map(|f| f.size).product::<usize>();
    for point in 0..all * out[0] * out[1] * taps[0] * taps[1] {
        let (mut rest, mut at, mut inside) = (point, [0; 3], true);
        for s in &spatial {
            let (yi, ki) = (rest % s.sizes[1], rest / s.sizes[1] % s.sizes[2]);
            rest /= s.sizes[1] * s.sizes[2];
            let xi = (s.stride * yi + s.dilation * ki).wrapping_sub(s.pad as usize);
            inside &= xi < s.sizes[0];
            let places = [xi.min(s.sizes[0] - 1), yi, ki];
            places.into_iter().enumerate().for_each(|(role, i)| at[role] += i * s.strides[role]);
        }
        for f in &plain {
            (0..3).for_each(|role| at[role] += rest % f.size * f.strides[role].unwrap_or(0));
            rest /= f.size;
        }
        if inside {
            sums[at[result]] += p[at[first]] * q[at[second]];
        }
    }
    let elements = roles.map(|role| counts[role]);
    let types = types(dtype, dtype, StoreMode::Accumulate);
    Job {
        what: format!("convolution, result {result}, {dtype:?}, stride {stride}, dilation {dilation}, pad {pad}"),
        source: product::convolution((form, &plain, &spatial), types, elements, name).expect("a source"),
        operands: vec![a, b, encoded(dtype, &vec![0.5; counts[result]])],
        expected: vec![Expected { operand: 2, dtype, values: sums }],
    }
}

#[test]
fn convolutions() {
    let mut jobs = Vec::new();
    for (number, geometry) in [[1, 1, 1], [2, 1, 0], [2, 2, 2], [3, 1, 1]].into_iter().enumerate() {
        for result in 0..3 {
            let dtype = [DType::F32, DType::F64, DType::BF16][(number + result) % 3];
            jobs.push(convolved(&format!("c{number}{result}"), result, dtype, geometry));
        }
    }
    check("convolutions", &jobs);
}

#[test]
fn planted_bugs_of_products() {
    let (assign, f32, bf16) = (StoreMode::Assign, DType::F32, DType::BF16);
    let (small, parts) = (plain([70, 40, 60], false), plain([20, 30, 2100], true));
    let halves = plain([130, 70, 100], false);
    let job = |name: &str, loops: &[Strided], dtype| multiplied(name, loops, types(dtype, dtype, assign));
    for (name, job, from, to) in [
        ("b0", job("b0", &small, f32), "bs[bk][bn] = y;\n        }\n        __syncthreads();", "bs[bk][bn] = y;\n        }"),
        (
            "b1",
            job("b1", &small, f32),
            "sums[i][j] += x[i] * y[j];\n        }\n        __syncthreads();",
            "sums[i][j] += x[i] * y[j];\n        }",
        ),
        ("b2", job("b2", &small, f32), "k0 + ak < tile.end", "k0 + ak <= tile.end"),
        ("b3", job("b3", &parts, f32), "part < PARTS", "part + 1 < PARTS"),
        ("b4", job("b4", &parts, f32), "first = blockIdx.y * each", "first = blockIdx.y * (each - step)"),
        ("b5", job("b5", &halves, bf16), "r / 2 * 8];", "r / 2 * 8 + 2];"),
        ("b6", job("b6", &halves, bf16), "tile.m + row + i * 16 + g + r / 2 * 8", "tile.m + row + i * 16 + g"),
    ] {
        let mut planted = job;
        assert!(planted.source.text.contains(from), "the text has no `{from}`");
        planted.source.text = planted.source.text.replacen(from, to, 1);
        let program = Program::new(&format!("products_{name}"), std::slice::from_ref(&planted));
        let found = (1..=6).find_map(|seed| program.run(0, &planted, seed).err());
        assert!(found.is_some(), "{name}: `{from}` as `{to}`");
    }
}
