//! Programs run by the simulator against plain loops over whole tensors.

use dcc_program::program::ParamKind;
use dcc_program::simulate::{Scalars, SimulateError, Simulator, Tensor};
use dcc_program::text::parse;
use std::collections::BTreeMap;

const MLP: &str = include_str!("programs/mlp_tp2.txt");

/// Numbers in [-1, 1) that look random.
fn tensor(shape: &[u64], seed: u64) -> Tensor {
    let n = shape.iter().product::<u64>();
    let value = |i: u64| ((i + 1) * (2 * seed + 3) * 2_654_435_761 % 2001) as f64 / 1000.5 - 1.0;
    Tensor { shape: shape.to_vec(), values: (0..n).map(value).collect() }
}

/// `a` of m × k times `b` of k × n, either of them transposed.
fn matmul(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize), (ta, tb): (bool, bool)) -> Vec<f64> {
    let a_at = |i: usize, l: usize| if ta { a[l * m + i] } else { a[i * k + l] };
    let b_at = |l: usize, j: usize| if tb { b[j * k + l] } else { b[l * n + j] };
    (0..m * n).map(|at| (0..k).map(|l| a_at(at / n, l) * b_at(l, at % n)).sum()).collect()
}

/// Loss and weights after one step of SGD on mean squared error, unsharded.
fn reference(x: &Tensor, t: &Tensor, w1: &Tensor, w2: &Tensor, lr: f64) -> (f64, Vec<f64>, Vec<f64>) {
    let h = matmul(&x.values, &w1.values, (8, 4, 6), (false, false));
    let a: Vec<f64> = h.iter().map(|h| h.max(0.0)).collect();
    let y = matmul(&a, &w2.values, (8, 6, 3), (false, false));
    let d: Vec<f64> = y.iter().zip(&t.values).map(|(y, t)| y - t).collect();
    let loss = d.iter().map(|d| d * d).sum::<f64>() / 24.0;
    let dy: Vec<f64> = d.iter().map(|d| d / 12.0).collect();
    let dw2 = matmul(&a, &dy, (6, 8, 3), (true, false));
    let da = matmul(&dy, &w2.values, (8, 3, 6), (false, true));
    let dh: Vec<f64> = da.iter().zip(&h).map(|(d, &h)| if h > 0.0 { *d } else { 0.0 }).collect();
    let dw1 = matmul(&x.values, &dh, (4, 8, 6), (true, false));
    let update = |w: &Tensor, g: Vec<f64>| w.values.iter().zip(g).map(|(w, g)| w - lr * g).collect();
    (loss, update(w1, dw1), update(w2, dw2))
}

fn run(text: &str) -> Result<(f64, Vec<f64>, Vec<f64>), SimulateError> {
    let mut simulator = Simulator::new(&[parse(text).unwrap()])?;
    simulator.set("fc1.weight", &ParamKind::Weight, &tensor(&[4, 6], 1))?;
    simulator.set("fc2.weight", &ParamKind::Weight, &tensor(&[6, 3], 2))?;
    let inputs = BTreeMap::from([("x".to_owned(), tensor(&[8, 4], 3)), ("target".to_owned(), tensor(&[8, 3], 4))]);
    let outputs = simulator.step(&inputs, Scalars { learning_rate: 0.1, step: 1, seed: 0 })?;
    let mut weight = |name: &str| simulator.get(name, &ParamKind::Weight).map(|t| t.values);
    Ok((outputs["loss"].values[0], weight("fc1.weight")?, weight("fc2.weight")?))
}

fn is_close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-14 * y.abs().max(1.0))
}

#[test]
fn mlp_at_tp_2_matches_the_unsharded_step() {
    let (loss, w1, w2) = run(MLP).unwrap();
    let expected = reference(&tensor(&[8, 4], 3), &tensor(&[8, 3], 4), &tensor(&[4, 6], 1), &tensor(&[6, 3], 2), 0.1);
    assert!(is_close(&[loss], &[expected.0]), "{loss} {}", expected.0);
    assert!(is_close(&w1, &expected.1) && is_close(&w2, &expected.2));
}

/// Controls: a fault in the program shows.
#[test]
fn faults_show() {
    let dropped = MLP
        .replace("t0 = start all_reduce.sum(tp) b10\nb11 f32[8/mb, 3] @s0 = wait t0\n", "")
        .replace("fused.1 b11", "fused.1 b10")
        .replace("b18", "b11");
    let overlapping = MLP.replace("@s48 = dot(m n", "@s44 = dot(m n");
    for text in [dropped, overlapping] {
        assert_ne!(text, MLP);
        let good = run(MLP).unwrap();
        assert!(run(&text).is_err() || !run(&text).is_ok_and(|r| is_close(&r.1, &good.1)));
    }
}
