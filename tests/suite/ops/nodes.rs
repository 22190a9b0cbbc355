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
use std::collections::{BTreeMap, BTreeSet};

const GOLDEN: [&str; 2] = [include_str!("../../golden/nodes/gradients.json"), include_str!("../../golden/nodes/contrib.json")];

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
    GOLDEN.iter().flat_map(|golden| serde_json::from_str::<Vec<Value>>(golden).expect("JSON")).collect()
}

#[test]
fn nodes_and_their_gradients_match_torch() {
    let wrong: Vec<String> =
        cases().iter().filter_map(|case| check(case).err().map(|e| format!("{}: {e}", case["name"]))).collect();
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Operators that pass no gradient, or step a weight by one.
const WITHOUT: &str = "Adagrad Adam And ArgMax ArgMin Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Constant ConstantOfShape \
    DequantizeLinear DynamicQuantizeLinear Equal EyeLike Greater GreaterOrEqual HammingWindow HannWindow Hardmax IsInf IsNaN Less LessOrEqual MelWeightMatrix Momentum NonZero Not \
    OneHot Or QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range SequenceEmpty SequenceLength Shape Size Xor";

/// Those whose attributes do not change what they compute, or which have none.
const PLAIN: &str = "Abs Acos Acosh Add Asin Asinh Atan Atanh CastLike Ceil Cos Cosh Div Dropout Erf Exp Floor GlobalAveragePool \
    GlobalMaxPool HardSwish Identity Log MatMul Max Mean Min Mish Mod Mul Neg PRelu Reciprocal Relu Round SequenceConstruct SequenceErase SequenceInsert Sigmoid \
    Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh Where \
    com.microsoft.BiasGelu com.microsoft.FastGelu com.microsoft.Gelu";
/// Those with two: exact or approximate, batch or time first.
const PAIRS: &str = "Gelu ReverseSequence";

/// What an operator is tested on: shapes of all that it has gradients by, and attributes with the inputs that the compiler knows.
#[derive(Default)]
struct Tested {
    shapes: BTreeSet<String>,
    attributes: BTreeSet<String>,
}

fn tested(cases: &[Value]) -> BTreeMap<String, Tested> {
    let mut tested: BTreeMap<String, Tested> = BTreeMap::new();
    for case in cases {
        let Some(gradients) = case["gradients"].as_object().filter(|gradients| !gradients.is_empty()) else { continue };
        let shapes: Vec<String> = gradients.values().map(|gradient| gradient["shape"].to_string()).collect();
        let constants = case["constants"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let known: Vec<String> = constants.map(|name| format!("{name} {}", case["inputs"][name]["data"])).collect();
        let model = Model::decode(Bytes::from(unhex(case["model"].as_str().expect("hex")))).expect("a model");
        for node in &model.graph().node {
            let of = tested.entry(dcc::import::full_name(node.domain(), node.op_type())).or_default();
            of.shapes.insert(shapes.join(" "));
            of.attributes.insert(format!("{:?} {known:?}", node.attribute));
        }
    }
    tested
}

/// Operators with fewer than three shapes, or attributes than three or as many as there can be.
fn too_few(cases: &[Value]) -> Vec<String> {
    let has = |list: &str, op: &str| list.split_whitespace().any(|name| name == op);
    let tested = tested(cases);
    let differentiable = dcc::import::supported().into_iter().filter(|op| !has(WITHOUT, op));
    let mut few = Vec::new();
    for op in differentiable {
        let (shapes, attributes) = tested.get(&op).map_or((0, 0), |of| (of.shapes.len(), of.attributes.len()));
        let least = if has(PLAIN, &op) { 1 } else { 3 - usize::from(has(PAIRS, &op)) };
        if shapes < 3 || attributes < least {
            few.push(format!("{op}: {shapes} shapes, {attributes} sets of attributes"));
        }
    }
    few
}

#[test]
fn each_differentiable_operator_has_three_shapes_and_attribute_sets() {
    let mut cases = cases();
    cases.extend(serde_json::from_str::<Vec<Value>>(include_str!("../../golden/import/windows.json")).expect("JSON"));
    assert_eq!(too_few(&cases), Vec::<String>::new());
    let total: usize = tested(&cases).values().map(|of| of.shapes.len()).sum();
    println!("{} cases of {} operators, {total} different shapes in all", cases.len(), tested(&cases).len());
    // The control: without the cases of one operator, or with the attributes of one of them for all, it is named.
    let pad = |case: &&Value| case["name"].as_str().is_some_and(|name| name.starts_with("Pad "));
    let without: Vec<Value> = cases.iter().filter(|case| !pad(case)).cloned().collect();
    assert_eq!(too_few(&without), ["Pad: 0 shapes, 0 sets of attributes"]);
    let one = cases.iter().find(pad).expect("Pad has cases").clone();
    assert_eq!(too_few(&[without, vec![one; 3]].concat()), ["Pad: 1 shapes, 1 sets of attributes"]);
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
