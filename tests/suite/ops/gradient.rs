//! Gradients against central differences in f64, and that gradient nodes carry what `place` relies on.

use super::*;
use dcc::autodiff::gradients;
use dcc::graph::{GradOf, Phase};
use dcc::interp::{Precision, evaluate};
use dcc::ops::StopGradient;
use dcc::ops::example::within;
use dcc_program::kernel::{BinaryOp, UnaryOp};
use std::collections::{BTreeMap, BTreeSet};

/// The example's graph with the loss `Σ weights · result`; and the loss's gradients for the operands in `wrt`.
struct Differentiated {
    graph: Graph,
    bindings: Bindings,
    operands: Vec<NodeId>,
    loss: NodeId,
    gradients: BTreeMap<NodeId, NodeId>,
}

fn differentiate(example: &Example) -> Differentiated {
    let (mut graph, operands, y) = graph_of(example);
    let ty = example.result();
    let weights = Tensor { dtype: ty.dtype, ..within(0.5, 1.5, 77, &ty.shape) };
    let w = input(&mut graph, "weights", &weights);
    let product = graph.binary(BinaryOp::Mul, y, w).unwrap();
    let loss = graph.sum(product, &(0..ty.rank()).collect::<Vec<_>>()).unwrap();
    let wrt: Vec<NodeId> = example.wrt.iter().map(|&i| operands[i]).collect();
    let gradients = gradients(&mut graph, loss, &wrt).unwrap();
    Differentiated { graph, bindings: bindings(example).input("weights", weights), operands, loss, gradients }
}

impl Differentiated {
    /// The gradient for operand `i`; zero where nothing depends on it.
    fn analytic(&self, i: usize) -> Tensor {
        let operand = self.operands[i];
        match self.gradients.get(&operand) {
            Some(&dx) => evaluate(&self.graph, &[dx], &self.bindings, Precision::Exact).unwrap().remove(0),
            None => Tensor::zeros(self.graph.ty(operand)),
        }
    }

    fn numeric(&self, i: usize) -> Tensor {
        let name = format!("x{i}");
        let x = self.bindings.inputs[&name].clone();
        let loss_at = |element: usize, value: f64| {
            let mut moved = x.f64s().to_vec();
            moved[element] = value;
            let moved = Tensor::floats(x.dtype, &x.shape, moved);
            let bindings = self.bindings.clone().input(&name, moved);
            evaluate(&self.graph, &[self.loss], &bindings, Precision::Exact).unwrap()[0].f64s()[0]
        };
        let slope = |element: usize| {
            let (at, step) = (x.f64s()[element], 1e-5);
            (loss_at(element, at + step) - loss_at(element, at - step)) / (2.0 * step)
        };
        Tensor::floats(x.dtype, &x.shape, (0..x.len()).map(slope).collect())
    }
}

#[test]
fn gradients_match_finite_differences() {
    for example in computed().filter(|e| !e.wrt.is_empty()) {
        let d = differentiate(&example);
        for &i in &example.wrt {
            close(&d.analytic(i), &d.numeric(i), FINITE_DIFFERENCE)
                .unwrap_or_else(|e| panic!("{} for operand {i}: {e}", describe(&example)));
        }
    }
}

#[test]
fn wrong_gradients_are_found() {
    for example in computed().filter(|e| !e.wrt.is_empty()) {
        let d = differentiate(&example);
        for &i in example.wrt.iter().filter(|&&i| d.gradients.contains_key(&d.operands[i])) {
            let mut wrong = d.analytic(i);
            let Data::Float(values) = &mut wrong.data else { unreachable!("a float has a float gradient") };
            values.iter_mut().for_each(|x| *x = *x * 1.0001 + 1e-4);
            assert!(close(&wrong, &d.numeric(i), FINITE_DIFFERENCE).is_err(), "{}", describe(&example));
        }
    }
}

/// Ops whose float results no example differentiates. A new op has a gradient or is named here.
#[test]
fn only_these_have_no_gradient() {
    let floats: Vec<Example> = computed().filter(|e| e.result().dtype.is_float()).collect();
    let all: BTreeSet<&str> = floats.iter().map(|e| e.op.name()).collect();
    let with: BTreeSet<&str> = floats.iter().filter(|e| !e.wrt.is_empty()).map(|e| e.op.name()).collect();
    let without: Vec<&str> = all.difference(&with).copied().collect();
    let leaves = ["const", "iota", "uniform"];
    let backward = ["attention_grad", "grad_sum"];
    let placed = [
        "all_gather",
        "all_reduce",
        "all_to_all",
        "drop_mb",
        "keep_first",
        "reduce_scatter",
        "resolve_mb",
        "slice_axis",
        "stage_sum",
        "transfer",
    ];
    let mut expected = [&leaves[..], &backward, &placed, &["stop_gradient"]].concat();
    expected.sort_unstable();
    assert_eq!(without, expected);
}

#[test]
fn stop_gradient_stops() {
    let mut graph = Graph::new();
    let x = input(&mut graph, "x", &within(0.0, 1.0, 1, &[]));
    let stopped = graph.add(StopGradient {}, &[x]).unwrap();
    let y = graph.binary(BinaryOp::Mul, stopped, x).unwrap();
    let only = graph.unary(UnaryOp::Exp, stopped).unwrap();
    assert!(gradients(&mut graph, only, &[x]).unwrap().is_empty());
    let dx = gradients(&mut graph, y, &[x]).unwrap()[&x];
    let bindings = Bindings::default().input("x", within(0.25, 0.25, 1, &[]));
    assert_eq!(evaluate(&graph, &[dx], &bindings, Precision::Exact).unwrap()[0].f64s(), [0.25]);
}

/// x·x + exp x: one contribution of each, whose sum is one node.
#[test]
fn a_value_has_one_gradient_sum() {
    let mut graph = Graph::new();
    let x = input(&mut graph, "x", &within(0.0, 1.0, 1, &[]));
    let square = graph.binary(BinaryOp::Mul, x, x).unwrap();
    let exp = graph.unary(UnaryOp::Exp, x).unwrap();
    let y = graph.binary(BinaryOp::Add, square, exp).unwrap();
    let before = graph.cursor();
    let dx = gradients(&mut graph, y, &[x]).unwrap()[&x];
    assert_eq!((graph.cursor().phase, graph.cursor().grad_of), (before.phase, before.grad_of));
    assert_eq!(graph[dx].op.name(), "grad_sum");
    assert_eq!(graph[dx].operands.len(), 2);
    let sums = graph.ids().filter(|&id| matches!(graph[id].op, Op::GradSum(_)));
    let values: Vec<_> = sums.map(|id| graph.grad_of(id)).collect();
    assert_eq!(values, [y, exp, square, x].map(|v| Some(GradOf::Value(v))));
    dcc::graph::verify(&graph).unwrap();
}

/// (x − m) · γ / √(mean (x − m)² + 1) + β for each column of x, with m so many times the column's mean.
fn normalization(times: f64) -> Differentiated {
    let values = [within(-1.0, 1.0, 1, &[4, 3, 5]), within(0.5, 1.5, 2, &[3]), within(-1.0, 1.0, 3, &[3])];
    let mut graph = Graph::new();
    let operands: Vec<NodeId> = values.iter().enumerate().map(|(i, x)| input(&mut graph, &format!("x{i}"), x)).collect();
    let wide = |graph: &mut Graph, x: NodeId| graph.broadcast(x, &[4, 3, 5], &[1]).unwrap();
    let sum = graph.sum(operands[0], &[0, 2]).unwrap();
    let mean = graph.scale(sum, times / 20.0).unwrap();
    let mean = wide(&mut graph, mean);
    let deviation = graph.binary(BinaryOp::Sub, operands[0], mean).unwrap();
    let square = graph.binary(BinaryOp::Mul, deviation, deviation).unwrap();
    let variance = graph.sum(square, &[0, 2]).unwrap();
    let variance = graph.scale(variance, 1.0 / 20.0).unwrap();
    let moved = graph.binary_scalar(BinaryOp::Add, variance, 1.0).unwrap();
    let inverse = graph.unary(UnaryOp::Rsqrt, moved).unwrap();
    let mut y = deviation;
    for (op, factor) in [(BinaryOp::Mul, inverse), (BinaryOp::Mul, operands[1]), (BinaryOp::Add, operands[2])] {
        let factor = wide(&mut graph, factor);
        y = graph.binary(op, y, factor).unwrap();
    }
    let weights = within(0.5, 1.5, 77, &[4, 3, 5]);
    let w = input(&mut graph, "weights", &weights);
    let product = graph.binary(BinaryOp::Mul, y, w).unwrap();
    let loss = graph.sum(product, &[0, 1, 2]).unwrap();
    let gradients = gradients(&mut graph, loss, &operands).unwrap();
    let bindings = (0..).zip(values).fold(Bindings::default(), |all, (i, x)| all.input(&format!("x{i}"), x));
    Differentiated { graph, bindings: bindings.input("weights", weights), operands, loss, gradients }
}

impl Differentiated {
    /// Sums of the backward pass over what has all dims, that a gradient needs.
    fn whole_sums(&self) -> usize {
        let mut graph = self.graph.clone();
        graph.outputs = self.gradients.values().enumerate().map(|(i, id)| (i.to_string(), *id)).collect();
        let live = graph.live();
        let sums = |id: &NodeId| matches!(graph[*id].op, Op::Reduce(_)) && graph[*id].phase == Phase::Backward;
        graph.ids().filter(|id| live[id.0 as usize] && sums(id)).count()
    }
}

/// Those of γ and β: the sums that the deviation's and the mean's gradients need are multiples of them. The control, a column's mean and a
/// half: what it takes off does not cancel.
#[test]
fn a_normalization_sums_its_gradient_twice() {
    for (times, sums) in [(1.0, 2), (1.5, 3)] {
        let d = normalization(times);
        dcc::graph::verify(&d.graph).unwrap();
        for i in 0..3 {
            close(&d.analytic(i), &d.numeric(i), FINITE_DIFFERENCE).unwrap_or_else(|e| panic!("{times}, operand {i}: {e}"));
        }
        assert_eq!(d.whole_sums(), sums, "{times}");
    }
}

/// An infinite slope in the branch that is not taken: √x at 0.
#[test]
fn the_unselected_branch_gets_zero() {
    let example = Example::new(
        dcc::ops::Select {},
        [Tensor::ints(dcc_program::DType::Bool, &[2], vec![1, 0]), within(1.0, 2.0, 1, &[2]), within(1.0, 2.0, 2, &[2])],
    );
    let mut d = differentiate(&example);
    d.bindings = d.bindings.input("weights", Tensor::floats(dcc_program::DType::F64, &[2], vec![1.0, f64::INFINITY]));
    assert_eq!(d.analytic(1).f64s(), [1.0, 0.0]);
    assert_eq!(d.analytic(2).f64s(), [0.0, f64::INFINITY]);
}

/// What `autodiff` promises to `place`: every backward node has a `grad_of`; where it names an op, shardable factors of one name
/// have one size (sizes differ from dim to dim in the examples); where it names a value, the shapes are equal.
#[test]
fn gradients_keep_factor_names() {
    for example in computed().filter(|e| !e.wrt.is_empty()) {
        let Differentiated { graph, .. } = differentiate(&example);
        let rule = |id: NodeId| {
            let node = &graph[id];
            let types: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
            node.op.rule(&types, &node.ty).sized(&types, &node.ty)
        };
        for id in graph.ids().filter(|&id| graph[id].phase == Phase::Backward && graph.ty(id).rank() > 0) {
            let what = || format!("%{} {} of {}", id.0, graph[id].op.name(), describe(&example));
            match graph.grad_of(id) {
                Some(GradOf::Value(v)) => assert_eq!(graph.ty(v).shape, graph.ty(id).shape, "{}", what()),
                Some(GradOf::Op(f)) => {
                    let (mine, theirs) = (rule(id), rule(f));
                    let mut shared = 0;
                    for factor in mine.spec.ids().filter(|&factor| !mine.is_whole(factor)) {
                        let name = &mine.spec.names[usize::from(factor.0)];
                        let Some(other) = theirs.spec.names.iter().position(|n| n == name) else { continue };
                        assert_eq!(mine.size(factor), theirs.sizes[other], "factor {name} of {}", what());
                        shared += 1;
                    }
                    let shardable = mine.spec.ids().filter(|&factor| !mine.is_whole(factor)).count();
                    assert_eq!(shared, shardable, "a factor without a name in the forward op: {}", what());
                }
                None => panic!("no grad_of: {}", what()),
            }
        }
    }
}
