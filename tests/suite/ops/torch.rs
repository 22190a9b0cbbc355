//! Results and gradients against PyTorch float64 where the meaning is subtle: ties, zeros, infinities, masks.

use super::*;
use dcc::Result;
use dcc::autodiff::gradients;
use dcc::interp::{Precision, evaluate};
use dcc::ops::{Attention, Cumsum, Gather, StopGradient, TopK};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::{Attention as Attributes, MaskKind};
use dcc_program::{DType, FactorSpec, Reduce};
use serde_json::Value;

const GOLDEN: &str = include_str!("../../golden/ops/torch.json");

pub fn decode(value: &Value) -> Tensor {
    let list = |key: &str| value[key].as_array().expect("a list").iter();
    let shape: Vec<u64> = list("shape").map(|d| d.as_u64().expect("a size")).collect();
    let number = |x: &Value| x.as_f64().unwrap_or_else(|| x.as_str().expect("a number").parse().expect("a number"));
    let dtype = DType::parse(value["dtype"].as_str().expect("a dtype")).expect("a dtype");
    let values: Vec<f64> = list("data").map(number).collect();
    if dtype.is_float() {
        Tensor::floats(dtype, &shape, values)
    } else {
        Tensor::ints(dtype, &shape, values.into_iter().map(|x| x as i64).collect())
    }
}

/// The graph of a case; its inputs are nodes by name.
struct Case<'a> {
    graph: Graph,
    inputs: &'a dyn Fn(&str) -> NodeId,
}

impl Case<'_> {
    fn build(&mut self, name: &str) -> Result<NodeId> {
        let input = self.inputs;
        let g = &mut self.graph;
        match name {
            "attention" => attention(g, input, MaskKind::None, "", false, 0.5),
            "attention_causal" => attention(g, input, MaskKind::None, "", true, 0.3),
            "attention_longer_keys_causal" => attention(g, input, MaskKind::None, "", true, 0.5),
            "attention_boolean" => attention(g, input, MaskKind::Boolean, ", b t s", false, 0.5),
            "attention_additive" => attention(g, input, MaskKind::Additive, ", t s", false, 0.5),
            "gelu" => gelu(g, input("x")),
            "gelu_tanh" => gelu_tanh(g, input("x")),
            "logsumexp" => {
                let (max, sum) = exponentials(g, input("x"))?;
                let sum = g.sum(sum, &[1])?;
                let log = g.unary(UnaryOp::Log, sum)?;
                g.binary(BinaryOp::Add, log, max)
            }
            "softmax" => {
                let (_, exp) = exponentials(g, input("x"))?;
                let sum = g.sum(exp, &[1])?;
                let sum = g.broadcast(sum, &[3, 3], &[0])?;
                g.binary(BinaryOp::Div, exp, sum)
            }
            "amax_ties" => g.reduce(Reduce::Max, input("x"), &[1]),
            "amin_ties" => g.reduce(Reduce::Min, input("x"), &[0, 1]),
            "maximum_ties" => g.binary(BinaryOp::Max, input("input"), input("other")),
            "minimum_ties" => g.binary(BinaryOp::Min, input("input"), input("other")),
            "prod_zeros" => g.reduce(Reduce::Prod, input("x"), &[1]),
            "pow" => g.binary(BinaryOp::Pow, input("input"), input("exponent")),
            "pow_constant" => {
                let mut powers = Vec::new();
                for n in 0..4 {
                    powers.push(g.binary_scalar(BinaryOp::Pow, input("x"), f64::from(n))?);
                }
                powers[1..].iter().try_fold(powers[0], |sum, &power| g.binary(BinaryOp::Add, sum, power))
            }
            "fmod" => g.binary(BinaryOp::Rem, input("input"), input("other")),
            "round" => g.unary(UnaryOp::RoundEven, input("input")),
            "cumsum_reversed" => g.add(Cumsum { dim: 1, exclusive: false, reverse: true }, &[input("x")]),
            "top_k" => first(g, input("x"), (3, true)),
            "sort_descending" => first(g, input("x"), (8, true)),
            "sort_ascending" => first(g, input("x"), (8, false)),
            "embedding" => embedding(g, input("w")),
            "layer_norm" => layer_norm(g, input("x"), input("w"), input("b")),
            "cross_entropy" => cross_entropy(g, input("x"), input("labels")),
            unary => g.unary(UnaryOp::parse(unary).expect("a case of torch.py is built here"), input("input")),
        }
    }
}

fn attention(
    g: &mut Graph,
    input: &dyn Fn(&str) -> NodeId,
    mask: MaskKind,
    mask_dims: &str,
    causal: bool,
    scale: f64,
) -> Result<NodeId> {
    let spec = format!("b h t e, b h s e, b h s f{mask_dims} -> b h t f");
    let spec = FactorSpec::parse(&spec).expect("a spec of ours parses");
    let attributes = Attributes { spec, causal, mask, scale: scale.to_bits() };
    let mut operands = vec![input("q"), input("k"), input("v")];
    if mask != MaskKind::None {
        operands.push(input("mask"));
    }
    g.add(Attention { attributes, out: 0 }, &operands)
}

fn gelu(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let scaled = g.scale(x, std::f64::consts::FRAC_1_SQRT_2)?;
    let erf = g.unary(UnaryOp::Erf, scaled)?;
    halved_gate(g, x, erf)
}

fn gelu_tanh(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let cube = g.binary_scalar(BinaryOp::Pow, x, 3.0)?;
    let cube = g.scale(cube, 0.044715)?;
    let inner = g.binary(BinaryOp::Add, x, cube)?;
    let inner = g.scale(inner, (2.0 / std::f64::consts::PI).sqrt())?;
    let tanh = g.unary(UnaryOp::Tanh, inner)?;
    halved_gate(g, x, tanh)
}

/// x/2 · (1 + gate)
fn halved_gate(g: &mut Graph, x: NodeId, gate: NodeId) -> Result<NodeId> {
    let gate = g.binary_scalar(BinaryOp::Add, gate, 1.0)?;
    let half = g.scale(x, 0.5)?;
    g.binary(BinaryOp::Mul, half, gate)
}

/// The maximum of each row of a matrix, without gradient, and exp(x - maximum).
fn exponentials(g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId)> {
    let shape = g.ty(x).shape.clone();
    let max = g.reduce(Reduce::Max, x, &[1])?;
    let max = g.add(StopGradient {}, &[max])?;
    let spread = g.broadcast(max, &shape, &[0])?;
    let shifted = g.binary(BinaryOp::Sub, x, spread)?;
    Ok((max, g.unary(UnaryOp::Exp, shifted)?))
}

/// The first of each row of a matrix, in order.
fn first(g: &mut Graph, x: NodeId, (k, largest): (u64, bool)) -> Result<NodeId> {
    let indices = g.add(TopK { dim: 1, k, largest }, &[x])?;
    let spec = FactorSpec::parse("i v, i j -> i j").expect("a spec of ours parses");
    g.add(Gather { spec }, &[x, indices])
}

/// Rows 1 3 1 and 0 4 1: iota and selects stand for a constant tensor.
fn embedding(g: &mut Graph, w: NodeId) -> Result<NodeId> {
    let mut rows = Vec::new();
    for index in [1, 3, 1, 0, 4, 1] {
        let scalar = g.add(dcc::ops::Const::int(DType::I64, index), &[])?;
        rows.push(g.broadcast(scalar, &[1], &[])?);
    }
    let rows = g.add(dcc::ops::Concatenate { dim: 0 }, &rows)?;
    let rows = g.reshape(rows, &[2, 3])?;
    let spec = FactorSpec::parse("v e, b t -> b t e").expect("a spec of ours parses");
    g.add(Gather { spec }, &[w, rows])
}

fn layer_norm(g: &mut Graph, x: NodeId, w: NodeId, b: NodeId) -> Result<NodeId> {
    let mean = |g: &mut Graph, x: NodeId| {
        let sum = g.sum(x, &[1])?;
        let mean = g.scale(sum, 0.25)?;
        g.broadcast(mean, &[3, 4], &[0])
    };
    let center = mean(g, x)?;
    let centered = g.binary(BinaryOp::Sub, x, center)?;
    let square = g.binary(BinaryOp::Mul, centered, centered)?;
    let variance = mean(g, square)?;
    let variance = g.binary_scalar(BinaryOp::Add, variance, 1e-5)?;
    let scale = g.unary(UnaryOp::Rsqrt, variance)?;
    let normal = g.binary(BinaryOp::Mul, centered, scale)?;
    let (w, b) = (g.broadcast(w, &[3, 4], &[1])?, g.broadcast(b, &[3, 4], &[1])?);
    let product = g.binary(BinaryOp::Mul, normal, w)?;
    g.binary(BinaryOp::Add, product, b)
}

/// Mean over the labels that are not -100, which a gather gives zero for.
fn cross_entropy(g: &mut Graph, x: NodeId, labels: NodeId) -> Result<NodeId> {
    let (max, exp) = exponentials(g, x)?;
    let sum = g.sum(exp, &[1])?;
    let log = g.unary(UnaryOp::Log, sum)?;
    let lse = g.binary(BinaryOp::Add, log, max)?;
    let spec = FactorSpec::parse("b v, b -> b").expect("a spec of ours parses");
    let target = g.add(Gather { spec }, &[x, labels])?;
    let nll = g.binary(BinaryOp::Sub, lse, target)?;
    let ignored = g.splat(DType::I64, -100.0, &[4])?;
    let valid = g.compare(CompareOp::Ne, labels, ignored)?;
    let zero = g.splat_like(0.0, nll)?;
    let kept = g.select(valid, nll, zero)?;
    let count = g.cast(valid, DType::F64)?;
    let (sum, count) = (g.sum(kept, &[0])?, g.sum(count, &[0])?);
    g.binary(BinaryOp::Div, sum, count)
}

#[test]
fn results_and_gradients_match_torch() {
    let golden: Value = serde_json::from_str(GOLDEN).expect("torch.json is JSON");
    for (name, body) in golden.as_object().expect("cases by name") {
        check(name, body).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

fn check(name: &str, body: &Value) -> std::result::Result<(), String> {
    let mut graph = Graph::new();
    let mut bindings = Bindings::default();
    let mut nodes = std::collections::BTreeMap::new();
    for (key, value) in body["inputs"].as_object().expect("inputs by name") {
        let value = decode(value);
        nodes.insert(key.clone(), input(&mut graph, key, &value));
        bindings = bindings.input(key, value);
    }
    let by_name = |key: &str| nodes[key];
    let mut case = Case { graph, inputs: &by_name };
    let result = case.build(name).map_err(|e| e.to_string())?;
    let mut graph = case.graph;
    let run = |graph: &Graph, id: NodeId, bindings: &Bindings| {
        evaluate(graph, &[id], bindings, Precision::Exact).map(|mut v| v.remove(0)).map_err(|e| e.to_string())
    };
    close(&run(&graph, result, &bindings)?, &decode(&body["result"]), TORCH).map_err(|e| format!("result: {e}"))?;

    let ty = graph.ty(result).clone();
    let weights = Tensor::floats(ty.dtype, &ty.shape, (0..ty.elements()).map(|i| (i as f64).cos()).collect());
    let w = input(&mut graph, "weights", &weights);
    bindings = bindings.input("weights", weights);
    let product = graph.binary(BinaryOp::Mul, result, w).map_err(|e| e.to_string())?;
    let loss = graph.sum(product, &(0..ty.rank()).collect::<Vec<_>>()).map_err(|e| e.to_string())?;
    let expected = body["gradients"].as_object().expect("gradients by name");
    let wrt: Vec<NodeId> = expected.keys().map(|key| nodes[key]).collect();
    let found = gradients(&mut graph, loss, &wrt).map_err(|e| e.to_string())?;
    for (key, value) in expected {
        let expected = decode(value);
        let got = match found.get(&nodes[key]) {
            Some(&id) => run(&graph, id, &bindings)?,
            None => Tensor::zeros(&expected.ty()),
        };
        close(&got, &expected, TORCH).map_err(|e| format!("gradient of {key}: {e}"))?;
    }
    Ok(())
}

#[test]
fn another_number_is_found() {
    let golden: Value = serde_json::from_str(GOLDEN).expect("torch.json is JSON");
    for (name, body) in golden.as_object().expect("cases by name") {
        for key in ["result", "gradients"] {
            let mut wrong = body.clone();
            let tensor = match key {
                "result" => &mut wrong["result"],
                _ => wrong["gradients"].as_object_mut().and_then(|g| g.values_mut().next()).expect("a gradient"),
            };
            let first = tensor["data"].as_array_mut().and_then(|d| d.first_mut()).expect("an element");
            *first = (first.as_f64().unwrap_or(0.0) * 1.01 + 1e-6).into();
            assert!(check(name, &wrong).is_err(), "{name} {key}");
        }
    }
}
