//! Node cases of ONNX's optimizers (`onnx.backend.test.case.node` of onnx 1.23: Momentum, Adam, Adagrad) against ours, whose formulas are
//! these: the momentum without dampening, Adam without its corrections, as it is far from the first step, Adagrad before its rate decays.

use crate::tolerance::{Row, units};
use dcc::graph::Graph;
use dcc::interp::{Bindings, Precision, Tensor, evaluate};
use dcc::ops::{Input, Op, Param};
use dcc::optimizer::{AdamDecay, Optimizer, OptimizerOptions, update};
use dcc_program::program::ParamKind;
use dcc_program::{DType, Shape};

/// Where β₁ᵗ and β₂ᵗ are zero.
const FAR: i64 = 1_000_000;

/// One tensor of a case: what it is, before and after; states by our names of them.
type Values = (&'static str, [f64; 2], [f64; 2]);

/// How far the updated tensors are from the case's, in units of what the row of f32 allows: ONNX has these numbers in f32.
fn distance(optimizer: Optimizer, weight_decay: f64, gradient: [f64; 2], tensors: &[Values]) -> f64 {
    let mut graph = Graph::new();
    let shape = Shape::from_slice(&[2]);
    let floats = |values: [f64; 2]| Tensor::floats(DType::F64, &[2], values.to_vec());
    let leaf = Param { name: "x".to_owned(), kind: ParamKind::Weight, piece: None, dtype: DType::F64, shape: shape.clone() };
    let param = graph.add(leaf, &[]).expect("a leaf");
    let input = Input { name: "g".to_owned(), dtype: DType::F64, shape, batch_dim: None };
    let input = graph.add(input, &[]).expect("a leaf");
    let options = OptimizerOptions { optimizer, weight_decay, ..OptimizerOptions::default() };
    let step = update(&mut graph, &options, &[param], &[input], None).expect("a step");
    let mut bindings = Bindings { learning_rate: 0.1, step: FAR, ..Bindings::default() }.input("g", floats(gradient));
    let kind = |name: &str| if name == "x" { ParamKind::Weight } else { ParamKind::State(name.to_owned()) };
    for (name, before, _) in tensors {
        bindings.params.insert(("x".to_owned(), kind(name)), floats(*before));
    }
    assert_eq!(step.updates.len(), tensors.len());
    let wanted: Vec<_> = step.updates.iter().map(|update| update.new).collect();
    let found = evaluate(&graph, &wanted, &bindings, Precision::Exact).expect("values");
    let mut worst = 0.0_f64;
    for (update, found) in step.updates.iter().zip(&found) {
        let Op::Param(leaf) = &graph[update.param].op else { panic!("updates are of parameters") };
        let (_, _, after) = tensors.iter().find(|(name, ..)| kind(name) == leaf.kind).expect("a tensor of the case");
        for (found, exact) in found.f64s().iter().zip(after) {
            worst = worst.max(units((found - exact).abs(), Row::F32.allowed(exact.abs(), 0.0)));
        }
    }
    worst
}

#[test]
fn momentum_is_onnx_s() {
    let (sgd, gradient) = (|nesterov| Optimizer::Sgd { momentum: 0.95, nesterov }, [-0.94, -2.5]);
    let (x, v) = ([1.2, 2.8], [1.7, 3.6]);
    // test_momentum, test_nesterov_momentum, and the second tensor of test_momentum_multiple.
    let standard = [("x", x, [1.132_38, 2.707_72]), ("momentum", v, [0.676_2, 0.922_8])];
    let nesterov = [("x", x, [1.227_535, 2.957_14]), ("momentum", v, [0.687, 0.948])];
    let second = [("x", [1.0, 2.0], [0.719_9, 2.204_8]), ("momentum", [4.0, 1.0], [2.801, -2.048])];
    assert!(distance(sgd(false), 1e-3, gradient, &standard) < 1.0);
    assert!(distance(sgd(true), 1e-2, gradient, &nesterov) < 1.0);
    assert!(distance(sgd(false), 1e-3, [-1.0, -3.0], &second) < 1.0);
    assert!(distance(sgd(true), 1e-3, gradient, &standard) > 1.0 && distance(sgd(false), 2e-3, gradient, &standard) > 1.0);
}

#[test]
fn adam_is_onnx_s() {
    let adam = |beta, eps| Optimizer::Adam { betas: (0.95, beta), eps, decay: AdamDecay::L2 };
    // test_adam, and the second tensor of test_adam_multiple.
    let first = [
        ("x", [1.2, 2.8], [1.025_036_33, 2.661_032_68]),
        ("m", [1.7, 3.6], [1.568_06, 3.295_14]),
        ("v", [0.1, 0.1], [0.803_210_79, 5.622_406_96]),
    ];
    let second = [
        ("x", [1.0, 2.0], [0.628_652_81, 1.974_585_29]),
        ("m", [4.0, 1.0], [3.750_05, 0.800_1]),
        ("v", [1.0, 10.0], [0.999_700_19, 9.848_200_8]),
    ];
    assert!(distance(adam(0.1, 1e-7), 1e-3, [-0.94, -2.5], &first) < 1.0);
    assert!(distance(adam(0.85, 1e-2), 1e-3, [-1.0, -3.0], &second) < 1.0);
    assert!(distance(adam(0.85, 1.1e-2), 1e-3, [-1.0, -3.0], &second) > 1.0);
    assert!(distance(adam(0.101, 1e-7), 1e-3, [-0.94, -2.5], &first) > 1.0);
}

#[test]
fn adagrad_is_onnx_s() {
    let adagrad = |eps| Optimizer::Adagrad { eps };
    // The second tensor of test_adagrad_multiple.
    let values = [("x", [1.0, 2.0], [1.044_685_36, 2.094_861_75]), ("sum", [4.0, 1.0], [4.998_001_1, 9.988_003_73])];
    assert!(distance(adagrad(1e-5), 1e-3, [-1.0, -3.0], &values) < 1.0);
    assert!(distance(adagrad(1e-2), 1e-3, [-1.0, -3.0], &values) > 1.0);
    assert!(distance(adagrad(1e-5), 2e-3, [-1.0, -3.0], &values) > 1.0);
}
