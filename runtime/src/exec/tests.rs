//! The executor against `simulate`, on ranks as threads; outputs and all parameters after some steps.

use super::*;
use crate::comm::Patience;
use crate::slice::Slice;
use dcc_program::program::{ParamKind, Program};
use dcc_program::simulate::{Scalars as SimulatedScalars, Simulator, Tensor};
use dcc_program::text::parse;
use std::collections::BTreeMap;

const MLP: &str = include_str!("../../program/tests/programs/mlp_tp2.txt");
const PIPE: [&str; 2] = [
    include_str!("../../program/tests/programs/pipe_stage0.txt"),
    include_str!("../../program/tests/programs/pipe_stage1.txt"),
];
const STEPS: i64 = 3;

type Tensors = BTreeMap<String, Tensor>;

/// Numbers in [-1, 1) that look random.
fn tensor(shape: &[u64], seed: u64) -> Tensor {
    let value = |i: u64| ((i + 1) * (2 * seed + 3) * 2_654_435_761 % 2001) as f64 / 1000.5 - 1.0;
    Tensor { shape: shape.to_vec(), values: (0..shape.iter().product::<u64>()).map(value).collect() }
}

fn scalars(step: i64) -> Scalars {
    Scalars { learning_rate: 0.1, step, seed: 7 }
}

/// Weights by name, whole; integer inputs count up, others look random.
fn weights(programs: &[Program]) -> Tensors {
    let params = programs.iter().flat_map(|p| p.params.iter().map(|param| (param, &p.ty(param.buffer).shape)));
    let weights = params.filter(|(param, _)| param.kind == ParamKind::Weight);
    weights.map(|(param, shape)| (param.name.clone(), tensor(shape, param.name.len() as u64))).collect()
}

fn inputs(programs: &[Program]) -> Tensors {
    let all = programs.iter().flat_map(|p| p.inputs.iter().map(|input| (input, p.ty(input.buffer))));
    let value = |(input, ty): (&dcc_program::program::Input, &dcc_program::TensorType)| {
        let mut value = tensor(&ty.shape, 3 * input.name.len() as u64);
        if !ty.dtype.is_float() {
            value.values.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 5) as f64);
        }
        (input.name.clone(), value)
    };
    all.map(value).collect()
}

fn simulated(programs: &[Program]) -> (Tensors, Tensors) {
    let mut simulator = Simulator::new(programs).unwrap();
    let weights = weights(programs);
    weights.iter().for_each(|(name, value)| simulator.set(name, &ParamKind::Weight, value).unwrap());
    let mut outputs = Tensors::new();
    for step in 1..=STEPS {
        let Scalars { learning_rate, step, seed } = scalars(step);
        outputs = simulator.step(&inputs(programs), SimulatedScalars { learning_rate, step, seed }).unwrap();
    }
    let after = weights.keys().map(|name| (name.clone(), simulator.get(name, &ParamKind::Weight).unwrap()));
    let after = after.collect();
    (outputs, after)
}

fn encode(value: f64, dtype: comm::DType, out: &mut [u8]) {
    match dtype {
        comm::DType::F32 => out.copy_from_slice(&(value as f32).to_ne_bytes()),
        comm::DType::F64 => out.copy_from_slice(&value.to_ne_bytes()),
        comm::DType::Bool => out[0] = u8::from(value != 0.0),
        _ => out.copy_from_slice(&(value as i64).to_ne_bytes()[..out.len()]),
    }
}

fn decode(dtype: comm::DType, bytes: &[u8]) -> f64 {
    match dtype {
        comm::DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        comm::DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        comm::DType::I64 => i64::from_ne_bytes(bytes.try_into().unwrap()) as f64,
        other => panic!("no test reads {}", other.name()),
    }
}

fn scatter(whole: &Tensor, slice: &Slice, dtype: comm::DType, local: &mut [u8]) {
    let width = dtype.bytes() as usize;
    slice.for_each_run(|run| {
        for i in 0..run.len {
            let at = (run.local + i) as usize * width;
            encode(whole.values[(run.global + i) as usize], dtype, &mut local[at..at + width]);
        }
    });
}

/// Every rank's part in its place; ranks that hold the same part must agree in every bit.
fn gather(whole: &mut Tensor, slice: &Slice, dtype: comm::DType, local: &[u8]) {
    let width = dtype.bytes() as usize;
    slice.for_each_run(|run| {
        for i in 0..run.len {
            let at = (run.local + i) as usize * width;
            let value = decode(dtype, &local[at..at + width]);
            let slot = &mut whole.values[(run.global + i) as usize];
            assert!(slot.is_nan() || slot.to_bits() == value.to_bits(), "ranks that should agree hold {slot} and {value}");
            *slot = value;
        }
    });
}

fn unknown(slice: &Slice) -> Tensor {
    Tensor { shape: slice.global.clone(), values: vec![f64::NAN; slice.global.iter().product::<u64>() as usize] }
}

type Parts = Vec<(String, Slice, comm::DType, Vec<u8>)>;

/// Outputs of the last step and parameters after it.
fn body(rank: &mut ranks::Rank<'_>, programs: &[Program]) -> Result<(Parts, Parts)> {
    let program = &programs[rank.world.stage(rank.rank) as usize];
    let mut executor = Executor::new(&mut rank.cpu, rank.world, program, rank.rank, Fresh::Poisoned)?;
    let (weights, inputs) = (weights(programs), inputs(programs));
    for parameter in executor.parameters() {
        let whole = &weights[&parameter.name];
        let fill = |bytes: &mut [u8]| match &parameter.kind {
            ParamKind::Weight => scatter(whole, &parameter.slice(&whole.shape), parameter.dtype, bytes),
            ParamKind::State(_) => bytes.fill(0),
        };
        rank.cpu.memory_mut().with(parameter.range.clone(), fill);
    }
    let mut outputs = Parts::new();
    for step in 1..=STEPS {
        outputs.clear();
        let mut io = Io {
            fill: &mut |port, microbatch, bytes| {
                scatter(&inputs[&port.name], port.slice(microbatch), port.dtype, bytes);
                Ok(())
            },
            take: &mut |port, microbatch, bytes| {
                outputs.push((port.name.clone(), port.slice(microbatch).clone(), port.dtype, bytes.to_vec()));
                Ok(())
            },
        };
        executor.step(&mut rank.cpu, &mut rank.comm, &scalars(step), &mut io, None)?;
    }
    let read = |parameter: &Parameter| {
        let mut bytes = vec![0; parameter.range.len()];
        rank.cpu.memory().read(parameter.range.start, &mut bytes);
        (parameter.name.clone(), parameter.slice(&parameter.shape), parameter.dtype, bytes)
    };
    let weights = executor.parameters().iter().filter(|p| p.kind == ParamKind::Weight).map(read).collect();
    Ok((outputs, weights))
}

fn join(parts: Vec<Parts>) -> Tensors {
    let mut all = Tensors::new();
    for (name, slice, dtype, bytes) in parts.into_iter().flatten() {
        gather(all.entry(name).or_insert_with(|| unknown(&slice)), &slice, dtype, &bytes);
    }
    all
}

fn executed(programs: &[Program], threads: usize) -> Result<(Tensors, Tensors)> {
    let world = World::new(&[programs])?;
    let results = ranks::local_ranks(&world, threads, Patience::default(), |rank| body(rank, programs))?;
    let (outputs, weights) = results.into_iter().unzip();
    Ok((join(outputs), join(weights)))
}

fn worst(a: &Tensors, b: &Tensors) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let difference = |(a, b): (&Tensor, &Tensor)| {
        assert_eq!(a.shape, b.shape);
        let each = a.values.iter().zip(&b.values).map(|(x, y)| (x - y).abs() / y.abs().max(1.0));
        each.fold(0.0, |most: f64, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
    };
    a.values().zip(b.values()).map(difference).fold(0.0, f64::max)
}

/// Runs the programs, one per stage, in f32 and f64; 1 and 2 threads must give the same bits.
fn check(texts: &[&str]) {
    for (dtype, bound) in [("f32", 1e-5), ("f64", 1e-12)] {
        let programs: Vec<Program> = texts.iter().map(|text| retyped(text, dtype)).collect();
        let expected = simulated(&programs);
        let found = executed(&programs, 1).unwrap();
        let difference = worst(&found.0, &expected.0).max(worst(&found.1, &expected.1));
        assert!(difference <= bound, "{dtype}: {difference:e}");
        assert_eq!(executed(&programs, 2).unwrap(), found, "{dtype}: threads change the result");
    }
}

/// The same programs in another float type: all numbers of the texts are f32.
fn retyped(text: &str, dtype: &str) -> Program {
    let mut program = parse(&text.replace("f32", dtype)).unwrap();
    if dtype == "f64" {
        program.persistent_bytes *= 2;
        program.scratch_bytes *= 2;
        program.areas.iter_mut().for_each(|area| area.bytes *= 2);
        program.buffers.iter_mut().for_each(|buffer| buffer.offset *= 2);
    }
    program
}

#[test]
fn an_mlp_over_two_ranks_and_two_microbatches() {
    check(&[MLP]);
}

#[test]
fn a_pipeline_of_two_stages() {
    check(&[PIPE[0], PIPE[1]]);
}
