//! ONNX nodes against PyTorch float64: results, and gradients by autodiff through what the importers build, on several shapes and
//! attribute sets of each differentiable operator.

use super::torch::decode;
use super::*;
use crate::onnx_nodes::{constant, unhex};
use bytes::Bytes;
use dcc::autodiff::gradients;
use dcc::import::{Imported, Model, Options, onnx};
use dcc::interp::{Precision, evaluate};
use dcc_program::kernel::BinaryOp;
use serde_json::Value;
use std::collections::BTreeMap;

const GOLDEN: &str = include_str!("../../golden/nodes/gradients.json");

fn check(case: &Value) -> Result<(), String> {
    let text = |error: dcc::Error| error.to_string();
    let model = Model::decode(Bytes::from(unhex(case["model"].as_str().expect("hex")))).map_err(text)?;
    let fixed: Vec<String> = serde_json::from_value(case["constants"].clone()).expect("names");
    let mut options = Options::default();
    let mut bindings = Bindings::default();
    for (name, value) in case["inputs"].as_object().expect("inputs by name") {
        let value = decode(value);
        options.batch_dims.insert(name.clone(), None);
        if fixed.contains(name) {
            options.constants.insert(name.clone(), constant(name, &value));
        }
        bindings = bindings.input(name, value);
    }
    let Imported { graph, parameters, .. } = onnx(&model, &options).map_err(text)?;
    let mut graph = dcc::train::for_evaluation(&graph).map_err(text)?;
    for parameter in &parameters {
        bindings = bindings.weight(&parameter.tensor.name, parameter.tensor.read(&model).map_err(text)?);
    }
    let run = |graph: &Graph, id: NodeId| {
        evaluate(graph, &[id], &bindings, Precision::Exact).map(|mut v| v.remove(0)).map_err(|e| e.to_string())
    };
    let outputs: Vec<NodeId> = graph.outputs.iter().map(|&(_, id)| id).collect();
    let mut losses = Vec::new();
    for (k, (&id, expected)) in outputs.iter().zip(case["results"].as_array().expect("results")).enumerate() {
        close(&run(&graph, id)?, &decode(expected), TORCH).map_err(|e| format!("result {k}: {e}"))?;
        if graph.ty(id).dtype.is_float() {
            losses.push(weighted(&mut graph, k, id).map_err(text)?);
        }
    }
    let loss = losses[1..].iter().try_fold(losses[0], |sum, &part| graph.binary(BinaryOp::Add, sum, part)).map_err(text)?;
    let expected = case["gradients"].as_object().expect("gradients by name");
    let inputs: BTreeMap<String, NodeId> = graph
        .ids()
        .filter_map(|id| match &graph[id].op {
            Op::Input(input) => Some((input.name.clone(), id)),
            _ => None,
        })
        .collect();
    let wrt: Vec<NodeId> = expected.keys().filter_map(|name| inputs.get(name).copied()).collect();
    let found = gradients(&mut graph, loss, &wrt).map_err(text)?;
    for (name, value) in expected {
        let expected = decode(value);
        let got = match inputs.get(name).and_then(|id| found.get(id)) {
            Some(&id) => run(&graph, id)?,
            None => Tensor::zeros(&expected.ty()),
        };
        close(&got, &expected, TORCH).map_err(|e| format!("gradient of {name}: {e}"))?;
    }
    Ok(())
}

/// `Σ cos(k + i) yᵢ`, the cosines as an expression of positions.
fn weighted(graph: &mut Graph, k: usize, y: NodeId) -> dcc::Result<NodeId> {
    let ty = graph.ty(y).clone();
    let flat = graph.reshape(y, &[ty.elements()])?;
    let line = std::iter::once(ty.elements()).collect();
    let at = graph.add(dcc::ops::Iota { dtype: ty.dtype, shape: line, dim: 0 }, &[])?;
    let at = graph.binary_scalar(BinaryOp::Add, at, k as f64)?;
    let weights = graph.unary(dcc_program::kernel::UnaryOp::Cos, at)?;
    let product = graph.binary(BinaryOp::Mul, flat, weights)?;
    graph.sum(product, &[0])
}

fn cases() -> Vec<Value> {
    serde_json::from_str(GOLDEN).expect("gradients.json is JSON")
}

#[test]
fn nodes_and_their_gradients_match_torch() {
    let wrong: Vec<String> =
        cases().iter().filter_map(|case| check(case).err().map(|e| format!("{}: {e}", case["name"]))).collect();
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Operators that pass no gradient, or step a weight by one.
const WITHOUT: &str = "Adagrad Adam And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Constant ConstantOfShape \
    DequantizeLinear DynamicQuantizeLinear Equal EyeLike Greater GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual Momentum Not \
    OneHot Or QuantizeLinear Range SequenceLength Shape Size Xor";

#[test]
fn each_differentiable_operator_has_three_cases() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let windows: Vec<Value> = serde_json::from_str(include_str!("../../golden/import/windows.json")).expect("JSON");
    for case in cases().iter().chain(&windows).filter(|case| case["gradients"].as_object().is_some_and(|g| !g.is_empty())) {
        let model = Model::decode(Bytes::from(unhex(case["model"].as_str().expect("hex")))).expect("a model");
        let ops: std::collections::BTreeSet<&str> = model.graph().node.iter().map(|node| node.op_type()).collect();
        ops.into_iter().for_each(|op| *counts.entry(op.to_owned()).or_default() += 1);
    }
    let without: Vec<&str> = WITHOUT.split_whitespace().collect();
    let few = dcc::import::supported().into_iter().filter(|op| !without.contains(op) && counts.get(*op) < Some(&3));
    assert_eq!(few.collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Each case with its first result, and with its first gradient, off by 1 %.
#[test]
fn another_number_of_a_node_is_found() {
    for case in cases() {
        let mut wrong = vec![case.clone()];
        off(&mut wrong[0]["results"][0]);
        if let Some(name) = case["gradients"].as_object().and_then(|g| g.keys().next()).cloned() {
            wrong.push(case.clone());
            off(&mut wrong[1]["gradients"][&name]);
        }
        for wrong in wrong {
            assert!(check(&wrong).is_err(), "{}", case["name"]);
        }
    }
}

fn off(tensor: &mut Value) {
    let first = tensor["data"].as_array_mut().and_then(|data| data.first_mut()).expect("an element");
    *first = (first.as_f64().unwrap_or(0.0) * 1.01 + 1e-6).into();
}
