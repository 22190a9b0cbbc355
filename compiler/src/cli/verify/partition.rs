//! Partitioned = unpartitioned: the artifact's ranks against the same model compiled for one device, on weights and data that
//! are made up. Where they differ in single precision, both are compiled again in double precision, to tell what is computed otherwise
//! from what rounding alone changes (statistics of few samples, long recurrences).

use super::made_up::made_up;
use crate::cli::again;
use crate::cli::failure::Outcome;
use crate::cli::flags::CompileFlags;
use crate::compile::planned_bytes;
use crate::error::Error;
use crate::plan::Schedule;
use dcc_program::artifact::Artifact;
use dcc_program::manifest::Manifest;
use dcc_program::program::Program;
use dcc_program::{DType, TensorType};
use dcc_runtime::cpu::machine_bytes;
use dcc_runtime::data::Convert;
use dcc_runtime::error::Error as RuntimeError;
use dcc_runtime::exec::whole::{Parameters, Run, Tensor};
use dcc_runtime::exec::{Fresh, Scalars};
use dcc_runtime::run::{Flags, Job, Source, initial_weights};
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: i64 = 3;
/// Largest relative difference of losses and gradient norms, by the least precise floats of a program.
const BOUNDS: [(DType, f64); 4] = [(DType::BF16, 2e-2), (DType::F16, 3e-3), (DType::F32, 1e-5), (DType::F64, 1e-9)];

/// Largest relative difference that was found, and the bound.
pub struct Agreement {
    pub ranks: u32,
    pub difference: f64,
    pub bound: f64,
    /// The difference in f64, where that in f32 is beyond the bound.
    pub in_double: Option<f64>,
}

/// Errors: another model, or results that differ by more than rounding.
pub fn check(artifact: &Artifact, path: &Path, model: &Path) -> Outcome<Agreement> {
    let whole = unpartitioned(artifact, model, same)?;
    let need = bytes(artifact).max(bytes(&whole));
    if let Some(available) = machine_bytes("MemAvailable").filter(|&available| available < need) {
        return Err(Error::too_large(need, available).at(path.display()).into());
    }
    let (difference, text) = apart(artifact, &whole, model)?;
    let bound = bound(artifact);
    let ranks = artifact.train.first().map_or(1, |program| program.mesh.world());
    if difference <= bound {
        return Ok(Agreement { ranks, difference, bound, in_double: None });
    }
    match in_double(artifact, model)? {
        Some(exact) if exact <= BOUNDS[3].1 => Ok(Agreement { ranks, difference, bound, in_double: Some(exact) }),
        _ => Err(Error::internal(format!("the ranks do not compute what one device does: {text}")).at(path.display()).into()),
    }
}

/// How far both are in double precision. `None` where the programs are of another precision than single, or not those that the model is
/// compiled to.
fn in_double(artifact: &Artifact, model: &Path) -> Outcome<Option<f64>> {
    if bound(artifact) != BOUNDS[2].1 || again::compiled(artifact, model, |flags, _| flags)?.artifact.train != artifact.train {
        return Ok(None);
    }
    let ranks = again::compiled(artifact, model, |flags, _| double(flags))?.artifact;
    Ok(Some(apart(&ranks, &unpartitioned(artifact, model, double)?, model)?.0))
}

fn same(flags: CompileFlags) -> CompileFlags {
    flags
}

fn double(flags: CompileFlags) -> CompileFlags {
    CompileFlags { dtype: Some("f64".to_owned()), ..flags }
}

/// The largest difference between results of both, NaN if one is not a number, and where it is.
fn apart(artifact: &Artifact, whole: &Artifact, model: &Path) -> Outcome<(f64, String)> {
    let [found, expected] = [run(artifact, model)?, run(whole, model)?];
    let mut worst: (f64, String) = (0.0, String::new());
    let mut compared = false;
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let scaled = expected.contains_key("loss_scale");
        for (name, expected) in expected {
            let Some(found) = found.get(name) else { continue };
            // With a loss scale, a step that overflows is skipped. Made-up data may leave no number on one device, too.
            let alike = found == expected || found.is_nan() && expected.is_nan();
            if (scaled || alike) && !found.is_finite() && !expected.is_finite() {
                continue;
            }
            compared |= true;
            let difference = difference(*found, *expected);
            if difference.is_nan() || (difference > worst.0 && !worst.0.is_nan()) {
                worst = (difference, format!("{name} of step {}: {found:?}, not {expected:?}", step + 1));
            }
        }
    }
    if !compared {
        let what = "the data that are made up for the comparison give no finite result, on one device too";
        let help = "`dcc verify ARTIFACT --numeric` compares each kernel and collective on values of its own";
        return Err(RuntimeError::numerical(what).help(help).into());
    }
    Ok(worst)
}

fn global_bytes(ty: &TensorType) -> u64 {
    ty.elements() * ty.dtype.bytes()
}

/// Bytes of a run of all ranks in this process, and of the whole weights that they begin with.
fn bytes(artifact: &Artifact) -> u64 {
    let of_stage = |program: &Program| {
        let ranks = program.mesh.world() / program.mesh.size_of("pp");
        planned_bytes(program) * u64::from(ranks)
    };
    let weight = |program: &Program| program.params.iter().map(|param| global_bytes(program.ty(param.buffer))).sum::<u64>();
    artifact.train.iter().map(|program| of_stage(program) + weight(program)).sum()
}

fn bound(artifact: &Artifact) -> f64 {
    let has = |dtype: DType| artifact.train.iter().flat_map(|p| &p.buffers).any(|buffer| buffer.ty.dtype == dtype);
    let outputs = artifact.train.iter().flat_map(|p| p.outputs.iter().map(|output| p.ty(output.buffer).dtype));
    // Under f64 random numbers are f32.
    let is_f64 = outputs.into_iter().all(|dtype| dtype == DType::F64);
    let least = BOUNDS.into_iter().find(|&(dtype, _)| has(dtype) && !(is_f64 && dtype == DType::F32));
    least.map_or(0.0, |(_, bound)| bound)
}

/// The model compiled with the artifact's own flags, as `change` leaves them, but for one device and one microbatch.
fn unpartitioned(artifact: &Artifact, model: &Path, change: fn(CompileFlags) -> CompileFlags) -> Outcome<Artifact> {
    let size = |axis: &str| artifact.train.first().map_or(1, |program| u64::from(program.mesh.size_of(axis)));
    let groups = size("mb") * size("rep") * size("dp") * size("ep");
    let compiled = again::compiled(artifact, model, |flags, manifest| {
        let flags = change(flags);
        // What a rank has of a microbatch, as parts of the batch.
        let (batch_norm, bn_groups) = match flags.batch_norm.as_str() {
            "local" => ("batch".to_owned(), Some(groups)),
            _ => (flags.batch_norm, flags.bn_groups),
        };
        CompileFlags {
            dp: 1,
            cp: 1,
            ep: 1,
            tp: 1,
            pp: 1,
            sequence_parallel: false,
            zero: 0,
            fsdp: false,
            shard_group: None,
            schedule: Schedule::default().name().to_owned(),
            virtual_stages: None,
            recompute: "none".to_owned(),
            param: Vec::new(),
            memory_limit: None,
            global_batch_size: Some(manifest.batch),
            micro_batch_size: None,
            grad_accum: Some(1),
            batch_norm,
            bn_groups,
            ..flags
        }
    })?;
    Ok(compiled.artifact)
}

/// Scalar results of a few training steps.
fn run(artifact: &Artifact, model: &Path) -> Outcome<Vec<BTreeMap<String, f64>>> {
    let flags = Flags { init: Some(1), init_all: true, ..Flags::default() };
    let folder = model.parent().unwrap_or(Path::new(""));
    let job = Job::new(&Source::Built { artifact, folder }, &flags)?;
    let parameters: Parameters = initial_weights(&job, &artifact.train)?;
    let inputs: Vec<BTreeMap<String, Tensor>> = (0..STEPS).map(|step| inputs(artifact, &job.manifest, step)).collect();
    let steps: Vec<Scalars> = (1..=STEPS).map(|step| Scalars { learning_rate: 1e-3, step, seed: 1 }).collect();
    let programs = &artifact.train[..];
    let run = Run { programs, threads: 1, fresh: Fresh::Poisoned, parameters: &parameters, inputs: &inputs, steps: &steps };
    let outputs = run.run()?.outputs;
    let scalars = |outputs: BTreeMap<String, Tensor>| {
        let scalar = |(name, tensor): (String, Tensor)| Some((name, *numbers(&tensor).first()?));
        outputs.into_iter().filter_map(scalar).collect()
    };
    Ok(outputs.into_iter().map(scalars).collect())
}

/// Made-up data of one step, the same for every plan; indices below their tables.
fn inputs(artifact: &Artifact, manifest: &Manifest, step: i64) -> BTreeMap<String, Tensor> {
    let all = artifact.train.iter().flat_map(|p: &Program| p.inputs.iter().map(move |input| (&input.name, p.ty(input.buffer))));
    let tensor = |(name, ty): (&String, &TensorType)| {
        let below = manifest.inputs.get(name).and_then(|input| input.vocabulary);
        (name.clone(), made_up(name, ty.dtype, &ty.shape, below, (1, step)))
    };
    all.map(tensor).collect()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let mut bytes = vec![0; tensor.bytes.len() / tensor.dtype.bytes() as usize * 8];
    Convert::new(tensor.dtype, DType::F64).run(&tensor.bytes, &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

fn difference(found: f64, expected: f64) -> f64 {
    match found == expected {
        true => 0.0,
        false => (found - expected).abs() / expected.abs().max(1e-3),
    }
}
