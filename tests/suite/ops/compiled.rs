//! Every op on the list compiled and run on the CPU, from its own examples, against its meaning.

use super::*;
use dcc::compile::Subject;
use dcc_program::DType;
use dcc_runtime::data::Convert;
use dcc_runtime::exec::whole::{self, Parameters, Run};
use dcc_runtime::exec::{Fresh, Scalars};
use std::collections::BTreeMap;

/// Made by placement alone: a graph of one device has none of them, and programs of meshes are compared in `ranks`.
const PLACED: [&str; 10] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "slice_axis",
    "keep_first",
    "resolve_mb",
    "drop_mb",
    "stage_sum",
    "transfer",
];

/// Relative to 1 + |expected|: sums in another order, elementary functions of the kernels.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

fn wide(dtype: DType) -> DType {
    if dtype.is_float() { DType::F64 } else { DType::I64 }
}

fn stored(tensor: &Tensor) -> whole::Tensor {
    let words: Vec<u8> = match &tensor.data {
        Data::Float(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Data::Int(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    };
    let mut bytes = vec![0; words.len() / 8 * tensor.dtype.bytes() as usize];
    Convert::new(wide(tensor.dtype), tensor.dtype).run(&words, &mut bytes);
    whole::Tensor { dtype: tensor.dtype, shape: tensor.shape.to_vec(), bytes }
}

fn loaded(tensor: &whole::Tensor) -> Tensor {
    let mut bytes = vec![0; tensor.bytes.len() / tensor.dtype.bytes() as usize * 8];
    Convert::new(tensor.dtype, wide(tensor.dtype)).run(&tensor.bytes, &mut bytes);
    let words = bytes.chunks_exact(8).map(|word| word.try_into().expect("eight bytes"));
    match tensor.dtype.is_float() {
        true => Tensor::floats(tensor.dtype, &tensor.shape, words.map(f64::from_ne_bytes).collect()),
        false => Tensor::ints(tensor.dtype, &tensor.shape, words.map(i64::from_ne_bytes).collect()),
    }
}

/// What the compiled program of one op gives.
fn compiled(example: &Example) -> Result<Tensor, String> {
    let (mut graph, _, result) = graph_of(example);
    graph.outputs.push(("y".to_owned(), result));
    let subject = Subject {
        name: "op".to_owned(),
        graph,
        tensors: Vec::new(),
        parameters: BTreeMap::new(),
        loss_outputs: Vec::new(),
        empty_outputs: Vec::new(),
    };
    let evaluation = subject.outputs().map_err(|e| e.to_string())?;
    let inputs = (0..).zip(&example.operands).map(|(i, x)| (format!("x{i}"), stored(x))).collect();
    let steps = [Scalars { learning_rate: 0.0, step: 0, seed: 0 }];
    let parameters = Parameters::new();
    let programs = &evaluation.programs;
    let run = Run { programs, threads: 2, fresh: Fresh::Poisoned, parameters: &parameters, inputs: &[inputs], steps: &steps };
    let mut outcome = run.run().map_err(|e| e.to_string())?;
    let tally = outcome.tallies[0];
    // A reshape is no work.
    if tally.interp > 0 || (tally.jit + tally.library == 0 && example.op.name() != "reshape") {
        return Err(format!("{} by JIT, {} by library, {} interpreted", tally.jit, tally.library, tally.interp));
    }
    outcome.outputs.swap_remove(0).remove("y").map(|y| loaded(&y)).ok_or_else(|| "no output".to_owned())
}

#[test]
fn compiled_programs_compute_what_ops_mean() {
    let (mut wrong, mut seen) = (Vec::new(), std::collections::BTreeSet::new());
    for example in computed().filter(|example| !PLACED.contains(&example.op.name())) {
        let (graph, _, result) = graph_of(&example);
        let declared = dcc::interp::Precision::Declared;
        let expected = dcc::interp::evaluate(&graph, &[result], &bindings(&example), declared).unwrap().swap_remove(0);
        seen.insert(example.op.name());
        match compiled(&example).and_then(|got| close(&got, &expected, tolerance(expected.dtype)).map(|()| got)) {
            Err(what) => wrong.push(format!("{}: {what}", describe(&example))),
            // The control: one element that is off is seen.
            Ok(mut got) => {
                match &mut got.data {
                    Data::Float(values) => values[0] = if values[0].is_finite() { 1.1 * values[0] + 0.1 } else { 0.0 },
                    Data::Int(values) => values[0] ^= 1,
                }
                assert!(close(&got, &expected, tolerance(expected.dtype)).is_err(), "{}", describe(&example));
            }
        }
    }
    assert!(wrong.is_empty(), "{} examples:\n{}", wrong.len(), wrong.join("\n"));
    let missing: Vec<_> = Op::NAMES.iter().filter(|name| !seen.contains(*name) && !PLACED.contains(name)).collect();
    assert_eq!(missing, [&"input", &"param", &"scalar"], "ops that nothing computes");
}
