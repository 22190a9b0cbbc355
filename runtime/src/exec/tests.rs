//! The executor against `simulate`, on ranks as threads; outputs and all parameters after some steps.

use super::whole::{Outcome, Parameters, Run, Tensor};
use super::*;
use dcc_program::DType;
use dcc_program::program::{ParamKind, Program};
use dcc_program::simulate::{self, Simulator};
use dcc_program::text::parse;
use std::collections::BTreeMap;

const MLP: &[&str] = &[include_str!("../../program/tests/programs/mlp_tp2.txt")];
const PIPE: &[&str] = &[
    include_str!("../../program/tests/programs/pipe_stage0.txt"),
    include_str!("../../program/tests/programs/pipe_stage1.txt"),
];
const STEPS: i64 = 3;

/// Numbers in [-1, 1) that look random; integers count up.
fn tensor(ty: &dcc_program::TensorType, seed: u64) -> Tensor {
    let value = |i: u64| ((i + 1) * (2 * seed + 3) * 2_654_435_761 % 2001) as f64 / 1000.5 - 1.0;
    let encode = |i: u64| match ty.dtype {
        DType::F32 => (value(i) as f32).to_ne_bytes().to_vec(),
        DType::F64 => f64::from(value(i) as f32).to_ne_bytes().to_vec(),
        DType::Bool => vec![u8::from(!i.is_multiple_of(3))],
        _ => (i as i64 % 7).to_ne_bytes()[..ty.dtype.bytes() as usize].to_vec(),
    };
    Tensor { dtype: ty.dtype, shape: ty.shape.to_vec(), bytes: (0..ty.elements()).flat_map(encode).collect() }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let value = |bytes: &[u8]| match tensor.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        DType::I64 => i64::from_ne_bytes(bytes.try_into().unwrap()) as f64,
        DType::I32 => f64::from(i32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::Bool => f64::from(bytes[0]),
        other => panic!("no test reads {}", other.name()),
    };
    tensor.bytes.chunks_exact(tensor.dtype.bytes() as usize).map(value).collect()
}

fn simulated(tensor: &Tensor) -> simulate::Tensor {
    simulate::Tensor { shape: tensor.shape.clone(), values: values(tensor) }
}

fn steps() -> Vec<Scalars> {
    (1..=STEPS).map(|step| Scalars { learning_rate: 0.1, step, seed: 7 }).collect()
}

fn weights(programs: &[Program]) -> Parameters {
    let params = programs.iter().flat_map(|p| p.params.iter().map(|param| (param, p.ty(param.buffer))));
    let weights = params.filter(|(param, _)| param.kind == ParamKind::Weight);
    let key = |name: &str| (name.to_owned(), ParamKind::Weight);
    weights.map(|(param, ty)| (key(&param.name), tensor(ty, param.name.len() as u64))).collect()
}

fn inputs(programs: &[Program]) -> BTreeMap<String, Tensor> {
    let all = programs.iter().flat_map(|p| p.inputs.iter().map(|input| (input, p.ty(input.buffer))));
    all.map(|(input, ty)| (input.name.clone(), tensor(ty, 3 * input.name.len() as u64))).collect()
}

fn executed(programs: &[Program], threads: usize) -> Outcome {
    let (parameters, inputs) = (weights(programs), [inputs(programs)]);
    let fresh = Fresh::Poisoned;
    Run { programs, threads, fresh, parameters: &parameters, inputs: &inputs, steps: &steps() }.run().unwrap()
}

/// Largest difference to the simulated programs, relative to the larger of 1 and the value.
fn difference(programs: &[Program], found: &Outcome) -> f64 {
    let mut simulator = Simulator::new(programs).unwrap();
    for ((name, kind), value) in weights(programs) {
        simulator.set(&name, &kind, &simulated(&value)).unwrap();
    }
    let inputs: BTreeMap<String, simulate::Tensor> =
        inputs(programs).iter().map(|(name, value)| (name.clone(), simulated(value))).collect();
    let mut worst: f64 = 0.0;
    let mut compare = |found: &Tensor, expected: &simulate::Tensor| {
        assert_eq!(found.shape, expected.shape);
        for (x, y) in values(found).iter().zip(&expected.values) {
            let difference = (x - y).abs() / y.abs().max(1.0);
            worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference) };
        }
    };
    for (Scalars { learning_rate, step, seed }, outputs) in steps().into_iter().zip(&found.outputs) {
        let expected = simulator.step(&inputs, simulate::Scalars { learning_rate, step, seed }).unwrap();
        assert!(expected.keys().eq(outputs.keys()));
        outputs.iter().for_each(|(name, value)| compare(value, &expected[name]));
    }
    for ((name, kind), value) in &found.parameters {
        compare(value, &simulator.get(name, kind).unwrap());
    }
    worst
}

/// Runs the programs, one per stage, in f32 and f64; 1 and 2 threads must give the same bits.
#[track_caller]
fn check(texts: &[&str]) {
    for (dtype, bound) in [("f32", 1e-5), ("f64", 1e-12)] {
        let programs: Vec<Program> = texts.iter().map(|text| retyped(text, dtype)).collect();
        let found = executed(&programs, 1);
        let difference = difference(&programs, &found);
        assert!(difference <= bound, "{dtype}: {difference:e}");
        assert_eq!(executed(&programs, 2), found, "{dtype}: threads change the result");
    }
}

/// The same program in another float type: all floats of the text are f32, integers have room to spare.
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
    check(MLP);
}

#[test]
fn a_pipeline_of_two_stages() {
    check(PIPE);
}

/// One section with these instructions; results `b9` and on are outputs. `b0` is f32[6, 4] over microbatches, `b1` i64[6].
#[track_caller]
fn check_ops(mesh: &str, parameters: &str, outputs: &str, body: &str) {
    let outputs: String = outputs.split(' ').map(|id| format!("output {id} {id}\n")).collect();
    check(&[&format!(
        "program ops eval stage 0/1 mesh({mesh})\nmemory persistent=16384 scratch=32768\narea m0 forward->forward bytes=4096 slots=1\n\
         {parameters}{outputs}section forward\n{body}order forward 0\n"
    )]);
}

#[test]
fn slices_and_collectives_of_uneven_shards() {
    let body = "\
b1 f32[5, 3/tp] @s0 = slice(tp, dim 1) b0
t0 = start all_gather(tp, dim 1) b1
b2 f32[5, 3] @s64 = wait t0
b3 f32[5, 3]+tp @s128 = keep_first(tp) b2
t1 = start reduce_scatter(tp, dim 0) b3
b4 f32[5/tp, 3] @s256 = wait t1
t2 = start all_to_all(tp, dim 0 -> 1) b4
b5 f32[5, 3/tp] @s320 = wait t2
b6 f32[5, 3/tp] @s384 = copy b5
b7 f32[15] @s512 = reshape(a b -> (a b)) b2
";
    check_ops("mb=1, tp=2", "param b0 f32[5, 3] @p0 weight w\n", "b2 b5 b6 b7", body);
    check_ops("mb=1, tp=4", "param b0 f32[5, 3] @p0 weight w\n", "b2 b5 b6 b7", body);
}

#[test]
fn scatters_and_running_sums() {
    let parameters = "param b0 f32[6, 3] @p0 weight w\nparam b1 i64[6] @p512 weight i\n";
    let body = "\
b2 f32[5/tp, 3] @s0 = scatter_add(n, n c -> v c; v) b1, b0
b2 += scatter_add(n, n c -> v c; v) b1, b0
b3 f32[6, 3] @s256 = cumsum(dim 0) b0
b4 f32[6, 3] @s512 = cumsum(dim 1, exclusive, reverse) b0
b5 i64[6] @s768 = cumsum(dim 0, reverse) b1
b6 i64[6, 2] @s1024 = top_k(dim 1, k 2, largest) b0
b7 i64[4, 3] @s1152 = top_k(dim 0, k 4) b0
b8 i64[6] @s1280 = top_k(dim 0, k 6, largest) b1
b9 i64[5/tp, 3] @s1344 = top_k(dim 1, k 3) b2
";
    check_ops("mb=1, tp=2", parameters, "b2 b3 b4 b5 b6 b7 b8 b9", body);
}

/// Samples over ranks, unevenly: a convolution, what adds to it, both of its gradients; a pool and its gradient.
#[test]
fn convolutions_and_pools_of_uneven_shards() {
    let parameters = "\
param b0 f32[5/tp, 6, 9] @p0 weight x
param b1 f32[5, 6, 3] @p1024 weight kernel
param b2 f32[5/tp, 5, 5] @p2048 weight dy
";
    let body = "\
b3 f32[5/tp, 5, 5] @s0 = convolution(n c x, o c k -> n o y; x = 2 y + 1 k - 1) b0, b1
b3 += convolution(n c x, o c k -> n o y; x = 2 y + 1 k - 1) b0, b1
b4 f32[5/tp, 6, 9] @s512 = convolution(n o y, o c k -> n c x; x = 2 y + 1 k - 1) b2, b1
b5 f32[5, 6, 3]+tp @s1536 = convolution(n c x, n o y -> o c k; x = 2 y + 1 k - 1) b0, b2
t0 = start all_reduce.sum(tp) b5
b6 f32[5, 6, 3] @s2048 = wait t0
b7 f32[5/tp, 6, 4] @s2560, b8 i32[5/tp, 6, 4] @s3072 = max_pool(n c x -> n c y; 3 -> 2 taps 2 stride 2 dilation 1 pad 1, 3 -> 2 taps 2 stride 1 dilation 1 pad 0) b0
b9 f32[5/tp, 6, 9] @s3392 = scatter_add(n c y, n c y -> n c x; x) b8, b7
";
    check_ops("mb=1, tp=2", parameters, "b3 b4 b6 b7 b8 b9", body);
}

/// Workspaces of an odd number of elements, where there is room for them in scratch.
#[test]
fn convolutions_with_bordered_copies() {
    let parameters = "\
param b0 f32[1, 3, 17, 17] @p0 weight x
param b1 f32[4, 3, 7, 7] @p4096 weight kernel
param b2 f32[1, 4, 9, 9] @p8192 weight dy
";
    let body = "\
b3 f32[1, 4, 9, 9] @s0 = convolution(n c x0 x1, o c k0 k1 -> n o y0 y1; x0 = 2 y0 + 1 k0 - 3, x1 = 2 y1 + 1 k1 - 3) b0, b1
b4 f32[4, 3, 7, 7] @s2048 = convolution(n c x0 x1, n o y0 y1 -> o c k0 k1; x0 = 2 y0 + 1 k0 - 3, x1 = 2 y1 + 1 k1 - 3) b0, b2
";
    check_ops("mb=1", parameters, "b3 b4", body);
}

/// A pass forward and one backward, at `mesh`, with heads over `tp`.
#[track_caller]
fn check_attention(options: &str, mask: &str) {
    let mut parameters: String = ["q", "k", "v", "d"]
        .iter()
        .enumerate()
        .map(|(i, name)| format!("param b{i} f32[2, 5, 4/tp, 3] @p{} weight {name}\n", i * 512))
        .collect();
    let (mut spec, mut operand) = ("b t h e, b s h e, b s h f -> b t h f", "");
    if !mask.is_empty() {
        parameters += &format!("param b4 {mask}[5, 5] @p2048 weight mask\n");
        (spec, operand) = ("b t h e, b s h e, b s h f, t s -> b t h f", ", b4");
    }
    let [o, l, q, k, v] = [0, 1, 2, 3, 4].map(|i| format!("b{}", i + if mask.is_empty() { 4 } else { 5 }));
    let body = format!(
        "{o} f32[2, 5, 4/tp, 3] @s0, {l} f32[2, 5, 4/tp] @s512 = attention({spec}; {options}) b0, b1, b2{operand}\n\
         {q} f32[2, 5, 4/tp, 3] @s1024, {k} f32[2, 5, 4/tp, 3] @s1536, {v} f32[2, 5, 4/tp, 3] @s2048 = \
         attention_grad({spec}; {options}) b3, b0, b1, b2, {o}, {l}{operand}\n"
    );
    check_ops("mb=1, tp=2", &parameters, &format!("{o} {l} {q} {k} {v}"), &body);
}

#[test]
fn attention_of_a_shard_of_the_heads() {
    check_attention("scale 0.5", "");
    check_attention("scale 0.5, causal", "");
    check_attention("scale 0.25, mask additive", "f32");
    check_attention("scale 0.25, mask boolean", "bool");
}

/// Control: the same comparison sees a fault.
#[test]
fn a_wrong_program_differs() {
    let programs = [retyped(MLP[0], "f64")];
    let mut wrong = programs.clone();
    for section in &mut wrong[0].sections {
        section.body.retain(|instr| !instr.origin.contains("/Relu") || instr.operands.len() == 2);
    }
    let found = executed(&programs, 1);
    assert!(difference(&programs, &found) < 1e-12);
    assert!(difference(&wrong, &found) > 1e-3);
}
