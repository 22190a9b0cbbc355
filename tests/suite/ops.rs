//! Every op on the list, from its own examples: a new op cannot miss a test. Each comparison has a control that must fail.

mod compiled;
mod gradient;
mod nodes;
mod sharding;
pub mod torch;
mod trim;

use dcc::graph::{Graph, NodeId};
use dcc::interp::{Bindings, Data, Tensor};
use dcc::ops::{Example, Input, Op};
use dcc_program::TensorType;

/// Central differences in f64 with a step of 1e-5, relative to 1 + |value|.
const FINITE_DIFFERENCE: f64 = 1e-6;
/// The same sums in another order.
const REORDERED: f64 = 1e-12;
/// PyTorch in float64.
const TORCH: f64 = 1e-9;

fn is_bound(op: &Op) -> bool {
    matches!(op, Op::Input(_) | Op::Param(_) | Op::Scalar(_))
}

/// Examples whose op is computed, not bound.
fn computed() -> impl Iterator<Item = Example> {
    Op::examples().into_iter().filter(|e| !is_bound(&e.op))
}

/// `op{attributes} of shapes`, for messages.
fn describe(example: &Example) -> String {
    let shapes: Vec<String> = example.operands.iter().map(|x| format!("{}{:?}", x.dtype.name(), x.shape)).collect();
    format!("{}{} of {}", example.op.name(), example.op.attributes(), shapes.join(", "))
}

/// Whether both hold the same values, floats to `tolerance` relative to 1 + |expected|; NaN equals NaN.
fn close(got: &Tensor, expected: &Tensor, tolerance: f64) -> Result<(), String> {
    if got.ty() != expected.ty() {
        return Err(format!("{:?}, expected {:?}", got.ty(), expected.ty()));
    }
    let near = |a: f64, b: f64| b.is_finite() && (a - b).abs() <= tolerance * (1.0 + b.abs());
    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || near(a, b);
    let wrong = match (&got.data, &expected.data) {
        (Data::Float(a), Data::Float(b)) => a.iter().zip(b).position(|(&a, &b)| !same(a, b)),
        (a, b) => {
            if a == b {
                None
            } else {
                Some(0)
            }
        }
    };
    match wrong {
        Some(i) => Err(format!("element {i} is {}, expected {}", got.to_f64s()[i], expected.to_f64s()[i])),
        None => Ok(()),
    }
}

/// A graph that applies the example's op to inputs `x0 x1 …`; their nodes and the result.
fn graph_of(example: &Example) -> (Graph, Vec<NodeId>, NodeId) {
    let mut graph = Graph::new();
    let operands: Vec<NodeId> = (0..).zip(&example.operands).map(|(i, x)| input(&mut graph, &format!("x{i}"), x)).collect();
    let result = graph.add(example.op.clone(), &operands).unwrap();
    (graph, operands, result)
}

fn input(graph: &mut Graph, name: &str, like: &Tensor) -> NodeId {
    let input = Input { name: name.to_owned(), dtype: like.dtype, shape: like.shape.clone(), batch_dim: None };
    graph.add(input, &[]).unwrap()
}

fn bindings(example: &Example) -> Bindings {
    (0..).zip(&example.operands).fold(Bindings::default(), |b, (i, x)| b.input(&format!("x{i}"), x.clone()))
}

#[test]
fn every_op_has_examples() {
    let examples = Op::examples();
    let without: Vec<_> = Op::NAMES.iter().filter(|name| !examples.iter().any(|e| e.op.name() == **name)).collect();
    assert!(without.is_empty(), "{without:?}");
}

#[test]
fn values_have_the_inferred_type() {
    for example in computed() {
        assert_eq!(example.eval().ty(), example.result(), "{}", describe(&example));
    }
}

#[test]
fn texts_round_trip() {
    for example in Op::examples() {
        let op = &example.op;
        assert_eq!(Op::parse(op.name(), &op.attributes()).as_ref(), Ok(op));
        let (mut graph, _, result) = graph_of(&example);
        graph.outputs.push(("y".to_owned(), result));
        let text = graph.to_string();
        let parsed = Graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(parsed.nodes, graph.nodes, "{text}");
        assert_eq!(parsed.to_string(), text);
        dcc::graph::verify(&parsed).unwrap();
    }
}

#[test]
fn evaluation_of_a_graph_is_that_of_its_ops() {
    for example in computed() {
        let (graph, _, result) = graph_of(&example);
        let got = dcc::interp::evaluate(&graph, &[result], &bindings(&example), dcc::interp::Precision::Exact).unwrap();
        close(&got[0], &example.eval(), 0.0).unwrap_or_else(|e| panic!("{}: {e}", describe(&example)));
    }
}

/// The sets that `linear` claims: parts of those operands, with the others whole, give parts of the result.
fn check_linear(example: &Example, set: &[usize]) -> Result<(), String> {
    let result = example.result();
    let eval = |operands: &[Tensor]| example.op.eval(&operands.iter().collect::<Vec<_>>(), &result);
    let mut sum = Tensor::zeros(&result);
    for part in 0..3u32 {
        let mut operands = example.operands.clone();
        for &i in set {
            operands[i] = part_of(&example.operands[i], part, i as u32);
        }
        if let (Data::Float(sum), Data::Float(part)) = (&mut sum.data, eval(&operands).data) {
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
    }
    close(&sum, &eval(&example.operands), REORDERED)
}

/// One of three parts that sum to `whole`.
fn part_of(whole: &Tensor, part: u32, seed: u32) -> Tensor {
    let random = |part: u32| dcc::ops::example::floats(100 + 10 * seed + part, &whole.shape);
    let (a, b) = (random(0), random(1));
    let values = match part {
        0 => a.f64s().to_vec(),
        1 => b.f64s().to_vec(),
        _ => (0..whole.len()).map(|i| whole.f64s()[i] - a.f64s()[i] - b.f64s()[i]).collect(),
    };
    Tensor::floats(whole.dtype, &whole.shape, values)
}

#[test]
fn linear_claims_hold() {
    let mut checked = 0;
    for example in computed().filter(|e| e.result().dtype.is_float()) {
        let types: Vec<TensorType> = example.operands.iter().map(Tensor::ty).collect();
        for set in example.op.linear(&types.iter().collect::<Vec<_>>()) {
            if set.iter().all(|&i| example.operands[i].dtype.is_float()) {
                check_linear(&example, &set).unwrap_or_else(|e| panic!("{} in {set:?}: {e}", describe(&example)));
                checked += 1;
            }
        }
    }
    assert!(checked > 60, "{checked}");
}

#[test]
fn wrong_linear_claims_are_found() {
    let wrong = [("add", vec![0]), ("mul", vec![0, 1]), ("div", vec![1]), ("max", vec![0, 1]), ("exp", vec![0])];
    for (name, set) in wrong {
        let named = |e: &Example| e.op.attributes().contains(&format!("\"{name}\"")) && e.result().dtype.is_float();
        let example = computed().find(named).unwrap();
        assert!(check_linear(&example, &set).is_err(), "{name} in {set:?}");
    }
}

fn types(tensors: &[Tensor]) -> Vec<TensorType> {
    tensors.iter().map(Tensor::ty).collect()
}
