//! Every generated kernel of an artifact, run by itself on made-up operands, against the same loop nest in float64.

use super::tails::{Same, Tails};
use crate::cli::failure::Outcome;
use dcc_kernels::cuda::Source;
use dcc_kernels::reference::{self, Scalar};
use dcc_kernels::tile::{Nest, Typing};
use dcc_kernels::{Jit, Pool};
use dcc_program::artifact::Artifact;
use dcc_program::kernel::Kernel;
use dcc_program::mesh::Extent;
use dcc_program::program::{Action, Program};
use dcc_program::types::DType;
use dcc_runtime::cuda::{self, Arch, Gpu};
use dcc_runtime::error::Error;
use dcc_runtime::exec::{World, add_texts, texts};
use half::{bf16, f16};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::str::FromStr;
use std::time::Instant;

/// Where the kernels run, or what they are only compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda,
    Arch(Arch),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda),
            other => Arch::parse(other).map(Device::Arch).map_err(|error| error.report().what.clone()),
        }
    }
}

/// Points of loops that the oracle goes through in seconds.
const MOST: usize = 1 << 22;
/// Seeds of operands.
const SEEDS: [u64; 3] = [1, 2, 3];

/// What was found.
pub enum Found {
    Ran {
        /// The device's name.
        on: String,
        kernels: usize,
        /// Too large for the oracle.
        too_large: usize,
        /// The largest difference, as a fraction of what is allowed.
        worst: f64,
        /// Products with tails that give the bits of both apart.
        tails: Same,
    },
    Compiled {
        arch: Arch,
        kernels: usize,
        /// The most of a kernel.
        registers: u32,
        /// Of all.
        spilled_bytes: u32,
        /// Of a training step of the rank with the most of them.
        launches: cuda::Launched,
        /// Where cuDNN is installed, the attentions that it has plans for.
        attentions: Option<cuda::Planned>,
        /// Those that spill, the most first.
        spills: Vec<Spill>,
        seconds: f64,
        /// The same from the files of an earlier run.
        kept_seconds: f64,
    },
}

/// A kernel that has too few registers.
pub struct Spill {
    /// Its entry.
    name: String,
    bytes: u32,
    /// What it is a part of.
    origin: String,
}

/// Kernels that spill, of which a text names the worst.
const NAMED: usize = 5;

/// A kernel with the extents that a rank gives it.
struct Case<'a> {
    nest: Nest,
    parameters: Vec<i64>,
    /// What it is a part of.
    origin: &'a str,
}

/// Errors: no such device, a kernel that it does not take, and the first kernel whose results differ.
pub fn check(artifact: &Artifact, device: Device) -> Outcome<Found> {
    if let Device::Arch(arch) = device {
        return compiled(artifact, arch);
    }
    let cases = cases(artifact)?;
    let (cases, large): (Vec<Case<'_>>, Vec<Case<'_>>) = cases.into_iter().partition(|case| points(&case.nest) <= MOST);
    let (on, results, tails) = match device {
        Device::Cpu => ("this CPU".to_owned(), on_cpu(&cases)?, Ok(Same::default())),
        _ => on_gpu(&cases, &Tails::new(artifact)?)?,
    };
    let mut worst: f64 = 0.0;
    for (case, results) in cases.iter().zip(results) {
        for (seed, got) in SEEDS.into_iter().zip(results) {
            let share = difference(case, seed, &got);
            if share.is_nan() || share > 1.0 {
                let what = format!("a kernel's results differ from float64's by {share:.1} times what is allowed");
                return Err(Error::device(what).at(format!("{on}: {}", case.origin)).into());
            }
            worst = worst.max(share);
        }
    }
    Ok(Found::Ran { on, kernels: cases.len(), too_large: large.len(), worst, tails: tails? })
}

/// Compiles all kernels, those of the library too, of the ranks that differ.
fn compiled(artifact: &Artifact, arch: Arch) -> Outcome<Found> {
    let world = World::new(&[&artifact.train, &artifact.eval])?;
    let (mut seen, mut usage, mut kernels, mut seconds) = (HashSet::new(), cuda::Usage::default(), 0, [0.0; 2]);
    let (mut spills, mut launches, mut attentions) = (Vec::new(), cuda::Launched::default(), None);
    let folder = std::env::temp_dir().join(format!("dcc-kernels-{}", std::process::id()));
    for rank in 0..world.ranks() {
        let stage = world.stage(rank) as usize;
        let mut texts = texts(&world, &artifact.train[stage], rank)?;
        launches = launches.max(texts.launched());
        // What both programs have is compiled once, as in a run.
        if let Some(program) = artifact.eval.get(stage) {
            add_texts(&mut texts, &world, program, rank)?;
        }
        let sources = texts.sources();
        if !seen.insert(cuda::Kernels::text(&sources)) {
            continue;
        }
        let mut images = Vec::new();
        for seconds in &mut seconds {
            let began = Instant::now();
            let made = cuda::images(&sources, arch, Some(&folder), &cuda::Shipped::default());
            *seconds += began.elapsed().as_secs_f64();
            images = made.inspect_err(|_| drop(std::fs::remove_dir_all(&folder)))?;
        }
        let entries: Vec<(&str, cuda::Usage)> = images.iter().flat_map(|(image, _)| image.entries()).collect();
        usage = entries.iter().fold(usage, |usage, (_, own)| usage.and(*own));
        attentions = cuda::planned(&sources, arch).map(|own| own.and(attentions.unwrap_or_default()));
        spills.extend(spilling(&sources, &texts, &entries));
        kernels += sources.len();
    }
    // A folder that could not be written costs time only.
    let _ = std::fs::remove_dir_all(&folder);
    let (cuda::Usage { registers, spilled_bytes }, [seconds, kept_seconds]) = (usage, seconds);
    spills.sort_by_key(|spill| std::cmp::Reverse(spill.bytes));
    Ok(Found::Compiled { arch, kernels, registers, spilled_bytes, launches, attentions, spills, seconds, kept_seconds })
}

/// Those of `entries` that spill, with what they are parts of.
fn spilling(sources: &[Source], texts: &cuda::Texts, entries: &[(&str, cuda::Usage)]) -> Vec<Spill> {
    let launches = sources
        .iter()
        .zip(texts.origins())
        .flat_map(|(source, origin)| source.launches.iter().map(move |launch| (launch.entry.as_str(), origin)));
    let origins: HashMap<&str, &str> = launches.collect();
    let spills = entries.iter().filter(|(_, usage)| usage.spilled_bytes > 0);
    let named = |(name, usage): &(&str, cuda::Usage)| Spill {
        name: (*name).to_owned(),
        bytes: usage.spilled_bytes,
        origin: origins.get(name).copied().unwrap_or_default().to_owned(),
    };
    spills.map(named).collect()
}

fn sources(cases: &[Case<'_>]) -> Outcome<Vec<Source>> {
    let source = |(n, case): (usize, &Case<'_>)| Source::new(&case.nest, &format!("kernel{n}"));
    Ok(cases.iter().enumerate().map(source).collect::<Result<_, String>>().map_err(Error::device)?)
}

pub fn text(found: &Found) -> String {
    match found {
        Found::Ran { on, kernels, too_large, worst, tails } => {
            let large = if *too_large == 0 { String::new() } else { format!(", {too_large} are too large for float64") };
            let tails = match tails {
                Same { tails: 0, too_large: 0 } => String::new(),
                Same { tails, too_large: 0 } => format!("; {tails} products give the same bits with their tails as without"),
                Same { tails, too_large } => {
                    format!("; {tails} products give the same bits with their tails as without, {too_large} are too large")
                }
            };
            format!("{kernels} kernels by themselves on {on} are within {worst:.2} of what is allowed{large}{tails}\n")
        }
        Found::Compiled { arch, kernels, registers, spilled_bytes, launches, attentions, spills, seconds, kept_seconds } => {
            let attentions = attentions.filter(|found| found.asked > 0).map_or(String::new(), |found| {
                let version = [found.version / 10_000, found.version / 100 % 100, found.version % 100].map(|n| n.to_string());
                format!("  cuDNN {} has plans for {} of {} attentions\n", version.join("."), found.planned, found.asked)
            });
            let named =
                spills.iter().take(NAMED).map(|Spill { name, bytes, origin }| format!("  {bytes} bytes: {name}, {origin}\n"));
            let more = spills.len().saturating_sub(NAMED);
            let more = if more > 0 { format!("  and {more} more\n") } else { String::new() };
            format!(
                "{kernels} kernels compile for {} in {seconds:.1} s, once kept in {kept_seconds:.2} s: at most {registers} registers, \
                 {spilled_bytes} bytes spilled\n{}{more}  a training step has {} launches, {} without groups and tails; {} products have a tail\n{attentions}",
                arch.name(),
                named.collect::<String>(),
                launches.in_rows,
                launches.alone,
                launches.tails
            )
        }
    }
}

pub fn json(found: &Found) -> Value {
    match found {
        Found::Ran { on, kernels, too_large, worst, tails } => {
            json!({"device": on, "kernels": kernels, "too_large": too_large, "worst": worst, "tails": tails.tails,
                "tails_too_large": tails.too_large})
        }
        Found::Compiled { arch, kernels, registers, spilled_bytes, launches, attentions, spills, seconds, kept_seconds } => {
            json!({
                "arch": arch.name(), "kernels": kernels, "registers": registers, "spilled_bytes": spilled_bytes, "launches": launches.in_rows,
                "cudnn": attentions.map(|found| json!({"version": found.version, "attentions": found.asked, "planned": found.planned})),
                "launches_without_groups": launches.alone, "tails": launches.tails, "seconds": seconds,
                "kept_seconds": kept_seconds, "spills": spills.iter().map(|Spill { name, bytes, origin }| {
                    json!({"kernel": name, "bytes": bytes, "origin": origin})
                }).collect::<Vec<_>>(),
            })
        }
    }
}

/// Each different kernel with sizes, of all ranks.
fn cases(artifact: &Artifact) -> Outcome<Vec<Case<'_>>> {
    let world = World::new(&[&artifact.train, &artifact.eval])?;
    let mut found: Vec<Case<'_>> = Vec::new();
    let mut seen = HashSet::new();
    for rank in 0..world.ranks() {
        for set in [&artifact.train, &artifact.eval] {
            let program = &set[world.stage(rank) as usize];
            for instr in program.sections.iter().flat_map(|section| &section.body) {
                let Action::Kernel(number) = instr.action else { continue };
                let kernel = &program.kernels[number as usize];
                let extents = |ids: &[_]| ids.iter().map(|&id| extents(program, rank, id)).collect::<Vec<_>>();
                let (inputs, outputs) = (extents(&instr.operands), extents(&instr.results));
                let (nest, parameters) = bound(kernel, &inputs, &outputs)?;
                if seen.insert((nest.clone(), parameters.clone())) {
                    found.push(Case { nest, parameters, origin: instr.origin.as_str() });
                }
            }
        }
    }
    Ok(found)
}

fn extents(program: &Program, rank: u32, id: dcc_program::program::BufferId) -> Vec<Extent> {
    program.ty(id).extents(&program.mesh, &program.mesh.coordinates(rank)).to_vec()
}

fn bound(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>]) -> Outcome<(Nest, Vec<i64>)> {
    let nest = Nest::bind(kernel, inputs, outputs).map_err(Error::artifact)?;
    Ok((nest, Nest::parameters(kernel, inputs, outputs).map_err(Error::artifact)?))
}

/// Points that the oracle visits.
fn points(nest: &Nest) -> usize {
    nest.extents.iter().product::<usize>() * nest.kernel.body.len()
}

/// Elements of every operand, inputs first.
pub(super) fn elements(nest: &Nest) -> impl Iterator<Item = (DType, usize)> + '_ {
    nest.inputs.iter().chain(&nest.outputs).map(|array| (array.dtype, array.block.iter().product()))
}

/// Made-up operands, exact in every float type; outputs too, since some are added to.
fn operands(case: &Case<'_>, seed: u64) -> Vec<Vec<Scalar>> {
    made_up(elements(&case.nest), seed)
}

/// Made-up values of so many elements each.
pub(super) fn made_up(arrays: impl Iterator<Item = (DType, usize)>, seed: u64) -> Vec<Vec<Scalar>> {
    let mut state = seed;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut scalar = |dtype: DType| match dtype {
        DType::Bool => Scalar::Int(below(2) as i64),
        dtype if dtype.is_float() => Scalar::Float((below(257) as f64 - 128.0) / 64.0),
        _ => Scalar::Int(below(11) as i64),
    };
    arrays.map(|(dtype, count)| (0..count).map(|_| scalar(dtype)).collect()).collect()
}

/// How far results are from float64's, or from those of values rounded as the device does, as a fraction of what is allowed.
fn difference(case: &Case<'_>, seed: u64, got: &[Vec<Scalar>]) -> f64 {
    let mut given = operands(case, seed);
    let start = given.split_off(case.nest.inputs.len());
    let run = |given: &[Vec<Scalar>]| {
        let mut results = start.clone();
        reference::run(&case.nest, &case.parameters, given, &mut results);
        results
    };
    let exact = run(&given);
    let mut rounded = start.clone();
    reference::run_rounded(&case.nest, &case.parameters, &given, &mut rounded);
    let allowed = allowed(&case.nest);
    let worst = |spread: &dyn Fn(usize, usize) -> f64| {
        let mut worst: f64 = 0.0;
        for (n, array) in case.nest.outputs.iter().enumerate() {
            for (i, got) in got[n].iter().enumerate() {
                let more = spread(n, i);
                let share = [exact[n][i], rounded[n][i]].map(|want| share(array.dtype, want, *got, (allowed, more)));
                worst = worst.max(share[0].min(share[1]));
            }
        }
        worst
    };
    let plain = worst(&|_, _| 0.0);
    if plain <= 1.0 {
        return plain;
    }
    // What nearly cancels (a sum that is divided by) magnifies rounding: as much as it magnifies changes of the operands.
    let changed: Vec<_> = (0..CHANGES).map(|change| run(&moved(&given, allowed / 16.0, seed ^ change << 32))).collect();
    let float = |scalar: Scalar| if let Scalar::Float(x) = scalar { x } else { 0.0 };
    worst(&|n, i| 4.0 * changed.iter().map(|results| (float(results[n][i]) - float(exact[n][i])).abs()).fold(0.0, f64::max))
}

/// Ways to change operands a little.
const CHANGES: u64 = 4;

/// The floats among `operands`, each changed by up to `most` of itself.
fn moved(operands: &[Vec<Scalar>], most: f64, seed: u64) -> Vec<Vec<Scalar>> {
    let mut state = seed | 1;
    let mut change = |scalar: &Scalar| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match *scalar {
            Scalar::Float(x) => Scalar::Float(x * (1.0 + most * ((state >> 40) as f64 / f64::from(1 << 23) - 1.0))),
            other => other,
        }
    };
    operands.iter().map(|values| values.iter().map(&mut change).collect()).collect()
}

/// A difference as a fraction of what is allowed, relatively (of results below 1, absolutely) and more; infinite where one is not a number.
fn share(dtype: DType, want: Scalar, got: Scalar, (allowed, more): (f64, f64)) -> f64 {
    match (want, got) {
        (Scalar::Float(x), Scalar::Float(y)) if x == y || x.is_nan() && y.is_nan() => 0.0,
        // Beyond what the type holds.
        (Scalar::Float(x), Scalar::Float(y)) if y.is_infinite() && x.signum() == y.signum() && x.abs() > largest(dtype) => 0.0,
        (Scalar::Float(x), Scalar::Float(y)) if x.is_finite() && y.is_finite() => {
            (x - y).abs() / (allowed * (1.0 + x.abs()) + more)
        }
        (x, y) if x == y => 0.0,
        _ => f64::INFINITY,
    }
}

/// The difference that rounding to the coarsest type of a kernel's values may make, relatively (of results below 1, absolutely).
fn allowed(nest: &Nest) -> f64 {
    let values = Typing::new(&nest.kernel).dtypes;
    let rounding = values.iter().chain(nest.outputs.iter().map(|array| &array.dtype)).map(|dtype| match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        DType::F32 => 4e-6,
        _ => 1e-13,
    });
    rounding.fold(0.0, f64::max)
}

fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::BF16 | DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
    }
}

pub(super) fn bytes(dtype: DType, values: &[Scalar]) -> Vec<u8> {
    let mut raw = Vec::new();
    for value in values {
        match (dtype, *value) {
            (DType::F32, Scalar::Float(x)) => raw.extend((x as f32).to_le_bytes()),
            (DType::F64, Scalar::Float(x)) => raw.extend(x.to_le_bytes()),
            (DType::BF16, Scalar::Float(x)) => raw.extend(bf16::from_f64(x).to_le_bytes()),
            (DType::F16, Scalar::Float(x)) => raw.extend(f16::from_f64(x).to_le_bytes()),
            (dtype, Scalar::Int(x)) => raw.extend(&x.to_le_bytes()[..dtype.bytes() as usize]),
            (dtype, Scalar::Float(x)) => unreachable!("{x} as {}", dtype.name()),
        }
    }
    raw
}

fn scalars(dtype: DType, raw: &[u8]) -> Vec<Scalar> {
    let scalar = |b: &[u8]| match (dtype, b.len()) {
        (DType::F32, _) => Scalar::Float(f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()),
        (DType::BF16, _) => Scalar::Float(bf16::from_le_bytes([b[0], b[1]]).into()),
        (DType::F16, _) => Scalar::Float(f16::from_le_bytes([b[0], b[1]]).into()),
        (DType::F64, _) => Scalar::Float(f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])),
        (_, n) => {
            let signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64) && b[n - 1] & 0x80 != 0;
            let mut word = [if signed { 0xff } else { 0 }; 8];
            word[..n].copy_from_slice(b);
            Scalar::Int(i64::from_le_bytes(word))
        }
    };
    raw.chunks_exact(dtype.bytes() as usize).map(scalar).collect()
}

/// Per case and seed, the outputs.
type Results = Vec<Vec<Vec<Vec<Scalar>>>>;

fn raw_operands(case: &Case<'_>, seed: u64) -> Vec<Vec<u8>> {
    operands(case, seed).iter().zip(elements(&case.nest)).map(|(values, (dtype, _))| bytes(dtype, values)).collect()
}

fn outputs(case: &Case<'_>, raw: &[Vec<u8>]) -> Vec<Vec<Scalar>> {
    case.nest.outputs.iter().zip(&raw[case.nest.inputs.len()..]).map(|(array, raw)| scalars(array.dtype, raw)).collect()
}

fn on_cpu(cases: &[Case<'_>]) -> Outcome<Results> {
    let mut jit = Jit::new().map_err(Error::device)?;
    let pool = Pool::new(1);
    let mut results = Vec::new();
    for case in cases {
        let code = jit.compile(case.nest.clone()).map_err(Error::device)?;
        let run = |seed| {
            let mut raw = raw_operands(case, seed);
            let (inputs, results) = raw.split_at_mut(case.nest.inputs.len());
            let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            let mut results: Vec<&mut [u8]> = results.iter_mut().map(Vec::as_mut_slice).collect();
            code.run_slices(&pool, &case.parameters, &inputs, &mut results);
            outputs(case, &raw)
        };
        results.push(SEEDS.into_iter().map(run).collect());
    }
    Ok(results)
}

/// The GPU, the results of the cases, and what was found of tails.
fn on_gpu(cases: &[Case<'_>], tails: &Tails) -> Outcome<(String, Results, Outcome<Same>)> {
    let gpu = Gpu::open(0, cuda::Shipped::default())?;
    let sources = [sources(cases)?, tails.sources()?].concat();
    let kernels = cuda::Kernels::compile(&gpu, &sources)?;
    let mut results = Vec::new();
    for (n, case) in cases.iter().enumerate() {
        let run = |seed| {
            let mut raw = raw_operands(case, seed);
            kernels.run(&gpu, n, &mut raw, &case.parameters)?;
            Ok::<_, Error>(outputs(case, &raw))
        };
        results.push(SEEDS.into_iter().map(run).collect::<Result<_, _>>()?);
    }
    let same = tails.check(&gpu, &kernels, cases.len());
    Ok((gpu.name().to_owned(), results, same))
}
