//! Matrix products.

use dcc_program::kernel::BinaryOp;

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::value::Value;
use crate::ops::Op;

pub const ONNX: &[(&str, Import)] = &[("Gemm", gemm), ("MatMul", matmul)];

/// NumPy's matmul: batch dims broadcast, a vector is a row on the left and a column on the right.
pub(super) fn matmul(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
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
pub(super) fn gemm(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    if a.rank(build)? != 2 || b.rank(build)? != 2 {
        return Err(Error::shape(format!("Gemm of ranks {} and {}", a.rank(build)?, b.rank(build)?)));
    }
    let left = if call.node.flag("transA", false)? { ["k", "m"] } else { ["m", "k"] };
    let right = if call.node.flag("transB", false)? { ["n", "k"] } else { ["k", "n"] };
    let mut y = match parted_rows(build, a)?.filter(|_| left[0] == "m") {
        Some(rows) => product_of_parted_rows(build, (a, &rows), (b, &right))?,
        None => build.dot((a, &left), (b, &right), &["m", "n"])?,
    };
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

/// The rows of a matrix as several dims, where a Reshape made it of a tensor of which it also cut a dim: `[l, b · h, e]` as `[l · b, h · e]`
/// has rows `l`, `b`. So samples, which are no whole stretches of the matrix's rows, stay a dim.
fn parted_rows(build: &Build, matrix: &Value) -> Result<Option<Vec<u64>>> {
    let Value::Node(id) = matrix else { return Ok(None) };
    let (Op::Reshape(_), rows) = (&build.graph[*id].op, matrix.shape(build)?[0]) else { return Ok(None) };
    let source = &build.graph.ty(build.graph[*id].operands[0]).shape;
    let (mut parts, mut count) = (Vec::new(), 1);
    for &size in source {
        let rest = rows / count;
        if !rows.is_multiple_of(count) || size == 0 || rest <= 1 {
            return Ok(None);
        }
        if rest < size {
            parts.push(rest);
            let is_parted = size.is_multiple_of(rest) && parts.iter().filter(|&&part| part > 1).count() > 1;
            return Ok(is_parted.then_some(parts));
        }
        parts.push(size);
        count *= size;
    }
    Ok(None)
}

fn product_of_parted_rows(build: &mut Build, (a, rows): (&Value, &[u64]), (b, right): (&Value, &[&str])) -> Result<Value> {
    let [m, k] = [0, 1].map(|dim| a.shape(build).map(|shape| shape[dim]));
    let parted: Vec<u64> = rows.iter().copied().chain([k?]).collect();
    let a = build.reshape(a, &parted)?;
    let names: Vec<String> = (0..rows.len()).map(|dim| format!("m{dim}")).collect();
    let with = |last| names.iter().map(String::as_str).chain([last]).collect::<Vec<&str>>();
    let y = build.dot((&a, &with("k")), (b, right), &with("n"))?;
    let columns = *y.shape(build)?.last().expect("a product has columns");
    build.reshape(&y, &[m?, columns])
}
