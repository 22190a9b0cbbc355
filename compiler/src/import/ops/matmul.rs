//! Matrix products.

use dcc_program::kernel::BinaryOp;

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[("Einsum", einsum), ("Gemm", gemm), ("MatMul", matmul)];

/// NumPy's matmul: batch dims broadcast, a vector is a row on the left and a column on the right.
fn matmul(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (mut a, mut b) = (call.input(0)?.clone(), call.input(1)?.clone());
    let (left, right) = (a.shape(build)?, b.shape(build)?);
    if left.is_empty() || right.is_empty() {
        return Err(Error::shape("MatMul of a scalar"));
    }
    let inner = (left[left.len() - 1], right[right.len().saturating_sub(2)]);
    if inner.0 != inner.1 {
        let what = format!("MatMul of {:?} and {:?}: {} and {} differ", left.as_slice(), right.as_slice(), inner.0, inner.1);
        return Err(Error::shape(what));
    }
    let (batch_a, batch_b) = (left.len().saturating_sub(2), right.len().saturating_sub(2));
    let batch = batch_a.max(batch_b);
    let names: Vec<String> = (0..batch).map(|dim| format!("b{dim}")).collect();
    let (mut left_names, mut right_names, mut out) = (Vec::new(), Vec::new(), Vec::new());
    let (mut left_shape, mut right_shape, mut shape) = (Vec::new(), Vec::new(), Vec::new());
    for (dim, name) in names.iter().enumerate() {
        let size = |dims: &[u64], count: usize| (dim + count).checked_sub(batch).map(|dim| dims[dim]);
        let (l, r) = (size(&left, batch_a), size(&right, batch_b));
        let common = l.unwrap_or(1).max(r.unwrap_or(1));
        if l.is_some_and(|l| l != 1 && l != common) || r.is_some_and(|r| r != 1 && r != common) {
            return Err(Error::shape(format!("MatMul of {:?} and {:?}: batch dims do not broadcast", &left[..], &right[..])));
        }
        shape.push(common);
        let sides = [(l, r, &mut left_names, &mut left_shape), (r, l, &mut right_names, &mut right_shape)];
        for (mine, other, side_names, side_shape) in sides {
            if mine == Some(common) && (common != 1 || other.is_none() || other == Some(1)) {
                side_names.push(name.as_str());
                side_shape.push(common);
            }
        }
        out.push(name.as_str());
    }
    if left.len() > 1 {
        left_names.push("m");
        left_shape.push(left[left.len() - 2]);
        out.push("m");
    }
    left_names.push("k");
    left_shape.push(inner.0);
    right_names.push("k");
    right_shape.push(inner.0);
    if right.len() > 1 {
        right_names.push("n");
        right_shape.push(right[right.len() - 1]);
        out.push("n");
    }
    a = build.reshape(&a, &left_shape)?;
    b = build.reshape(&b, &right_shape)?;
    Ok(vec![build.dot((&a, &left_names), (&b, &right_names), &out)?])
}

/// `alpha A' B' + beta C`.
fn gemm(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    if a.rank(build)? != 2 || b.rank(build)? != 2 {
        return Err(Error::shape(format!("Gemm of ranks {} and {}", a.rank(build)?, b.rank(build)?)));
    }
    let left = if call.node.flag("transA", false)? { ["k", "m"] } else { ["m", "k"] };
    let right = if call.node.flag("transB", false)? { ["n", "k"] } else { ["k", "n"] };
    let mut y = build.dot((a, &left), (b, &right), &["m", "n"])?;
    let (alpha, beta) = (call.node.float_or("alpha", 1.0)?, call.node.float_or("beta", 1.0)?);
    if alpha != 1.0 {
        y = build.binary_scalar(BinaryOp::Mul, &y, alpha)?;
    }
    if let Some(bias) = call.optional(2) {
        let bias = if beta == 1.0 { bias.clone() } else { build.binary_scalar(BinaryOp::Mul, bias, beta)? };
        y = build.add_under_reshape(&y, &bias)?;
    }
    Ok(vec![y])
}

/// One or two operands; every letter at most once in each.
fn einsum(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let equation: String = call.node.string_or("equation", "")?.chars().filter(|c| !c.is_whitespace()).collect();
    let unsupported = || Error::attribute(format!("the equation `{equation}` is not supported")).help("write it with MatMul");
    let (inputs, output) = match equation.split_once("->") {
        Some((inputs, output)) => (inputs, output.to_owned()),
        None => (equation.as_str(), implicit_output(&equation)),
    };
    let terms: Vec<&str> = inputs.split(',').collect();
    let distinct = |term: &str| term.chars().enumerate().all(|(i, c)| c.is_ascii_alphabetic() && !term[..i].contains(c));
    if terms.len() != call.inputs.len() || !terms.iter().all(|term| distinct(term)) || !distinct(&output) {
        return Err(unsupported());
    }
    let names = |term: &str| term.chars().map(|c| c.to_string()).collect::<Vec<String>>();
    match terms.as_slice() {
        [one] => {
            let x = call.input(0)?;
            let summed: Vec<usize> = (0..one.len()).filter(|&dim| !output.contains(&one[dim..=dim])).collect();
            let kept: String = one.chars().filter(|&c| output.contains(c)).collect();
            let sum = build.reduce(dcc_program::Reduce::Sum, x, &summed, false)?;
            let perm: Option<Vec<usize>> = output.chars().map(|c| kept.find(c)).collect();
            Ok(vec![build.transpose(&sum, &perm.ok_or_else(unsupported)?)?])
        }
        [a, b] => {
            let here = |term: &str, other: &str| term.chars().all(|c| other.contains(c) || output.contains(c));
            if !here(a, b) || !here(b, a) || !output.chars().all(|c| a.contains(c) || b.contains(c)) {
                return Err(unsupported());
            }
            let (a, b, out) = (names(a), names(b), names(&output));
            let [a, b, out] = [&a, &b, &out].map(|names| names.iter().map(String::as_str).collect::<Vec<&str>>());
            Ok(vec![build.dot((call.input(0)?, &a), (call.input(1)?, &b), &out)?])
        }
        _ => Err(unsupported()),
    }
}

/// Without `->`: the letters that occur once, in alphabetical order.
fn implicit_output(inputs: &str) -> String {
    let mut letters: Vec<char> = inputs.chars().filter(|&c| inputs.matches(c).count() == 1 && c != ',').collect();
    letters.sort_unstable();
    letters.into_iter().collect()
}
