//! ONNX convolutions and pools, results and gradients, against PyTorch float64.

use crate::onnx_nodes::{tensor, unhex};
use crate::tolerance;
use dcc::autodiff::gradients;
use dcc::graph::NodeId;
use dcc::import::{Model, Options, onnx};
use dcc::interp::{Bindings, Precision, Tensor, evaluate};
use dcc::ops::{Input, Op};
use dcc_program::DType;
use dcc_program::kernel::BinaryOp;
use serde_json::Value;
use std::collections::BTreeMap;

/// Largest difference from PyTorch, relative to one plus the value: of the result, and of the gradients of
/// `Σ result · cos(0, 1, 2, …)`.
fn difference(case: &Value) -> f64 {
    let model = Model::decode(unhex(case["model"].as_str().expect("hex")).into()).expect("a model");
    let inputs = case["inputs"].as_object().expect("inputs");
    let batch_dims = inputs.keys().map(|name| (name.clone(), None)).collect();
    let imported = onnx(&model, &Options { batch_dims, ..Options::default() }).expect("dcc imports it");
    let mut graph = imported.graph;
    let mut bindings = inputs.iter().fold(Bindings::default(), |b, (name, value)| b.input(name, tensor(value)));
    for parameter in &imported.parameters {
        bindings = bindings.weight(&parameter.tensor.name, parameter.tensor.read(&model).expect("a constant"));
    }
    let result = graph.outputs[0].1;
    let ty = graph.ty(result).clone();
    let weights = Tensor::floats(DType::F64, &ty.shape, (0..ty.elements()).map(|i| (i as f64).cos()).collect());
    let shape = ty.shape.clone();
    let w = graph.add(Input { name: "weights".to_owned(), dtype: DType::F64, shape, batch_dim: None }, &[]).expect("an input");
    let product = graph.binary(BinaryOp::Mul, result, w).expect("alike");
    let loss = graph.sum(product, &(0..ty.rank()).collect::<Vec<_>>()).expect("dims");
    let leaf = |id: NodeId| match &graph[id].op {
        Op::Input(input) if inputs.contains_key(&input.name) => Some((input.name.clone(), id)),
        _ => None,
    };
    let leaves: BTreeMap<String, NodeId> = graph.ids().filter_map(leaf).collect();
    let given = gradients(&mut graph, loss, &leaves.values().copied().collect::<Vec<_>>()).expect("gradients");
    let wanted: Vec<NodeId> = [result].into_iter().chain(leaves.values().map(|id| given[id])).collect();
    let found = evaluate(&graph, &wanted, &bindings.input("weights", weights), Precision::Exact).expect("values");
    let expected = [&case["result"]].into_iter().chain(leaves.keys().map(|name| &case["gradients"][name]));
    found.iter().zip(expected).map(|(found, expected)| apart(found, &tensor(expected))).fold(0.0, f64::max)
}

fn apart(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.ty(), expected.ty());
    let pairs = found.f64s().iter().zip(expected.f64s());
    pairs.map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max)
}

#[test]
fn convolutions_and_pools_match_torch() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/import/windows.json")).expect("JSON");
    for case in &cases {
        let off = difference(case);
        assert!(off <= tolerance::F64, "{}: {off:e}", case["name"]);
    }
    // What is compared is what the file says: one element off by 1 % shows.
    for key in ["result", "gradients"] {
        let mut wrong = cases[0].clone();
        let tensor = if key == "result" { &mut wrong[key] } else { &mut wrong[key]["x"] };
        let element = &mut tensor["values"][3];
        *element = (element.as_f64().expect("a number") * 1.01 + 1e-6).into();
        assert!(difference(&wrong) > tolerance::F64, "{key}");
    }
}
