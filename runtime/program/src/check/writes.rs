//! What a kernel's stores cover: each point of an output once, and all of them.

use super::kernel::{Bound, range};
use super::{Checked, Fault, refuse};
use crate::kernel::*;
use crate::types::TensorType;

/// One dim of what a store writes.
struct Span {
    low: i128,
    high: i128,
    /// Points written in `low..=high`.
    count: u128,
    /// All points are `low` modulo this; 0 where there is one point.
    stride: u128,
}

pub(super) fn stores(kernel: &Kernel, outputs: &[&TensorType], bounds: &[Bound]) -> Checked<()> {
    for (n, ty) in outputs.iter().enumerate() {
        let mut written: Vec<(&[Index], Vec<Span>, StoreMode)> = Vec::new();
        for stmt in &kernel.body {
            let Stmt::Store { output, over, index, mode, .. } = stmt else { continue };
            if *output as usize != n {
                continue;
            }
            let spans = spans(kernel, over, index, ty, bounds)?;
            let same = written.iter().any(|(other, ..)| *other == &index[..]);
            if !same && written.iter().any(|(_, other, _)| !disjoint(other, &spans)) {
                return refuse(Fault::Kernel, format!("two stores write the same points of y{n}"));
            }
            if !same {
                written.push((index, spans, *mode));
            }
        }
        let volume = |spans: &[Span]| spans.iter().fold(1u128, |v, s| v.saturating_mul(s.count));
        let covered: u128 = written.iter().map(|(_, spans, _)| volume(spans)).fold(0, u128::saturating_add);
        let assigns = written.iter().any(|(.., mode)| *mode == StoreMode::Assign);
        let all: u128 = ty.shape.iter().map(|&d| u128::from(d)).product();
        if written.is_empty() || (assigns && covered != all) {
            return refuse(Fault::Kernel, format!("stores write {covered} of {all} points of y{n}"));
        }
    }
    Ok(())
}

/// What one store writes, dim by dim; every dim that it iterates must move it to another point.
fn spans(kernel: &Kernel, over: &[DimId], index: &[Index], ty: &TensorType, bounds: &[Bound]) -> Checked<Vec<Span>> {
    let name = |d: &DimId| &kernel.dims[d.0 as usize];
    let mut used = Vec::new();
    let mut spans = Vec::new();
    for (k, (i, &size)) in index.iter().zip(&ty.shape).enumerate() {
        let Index::Affine { terms, offset } = i else {
            used.extend(if let Index::Dim(d) = i { Some(*d) } else { None });
            spans.push(Span { low: 0, high: i128::from(size) - 1, count: size.into(), stride: 1 });
            continue;
        };
        let sharded = terms.iter().any(|(d, _)| !bounds[d.0 as usize].axes.is_empty());
        if sharded || !ty.sharding.dims[k].is_empty() {
            return refuse(Fault::Sharding, format!("dim {k} of an output is stored at a shifted index, and sharded"));
        }
        let (low, high) = range(bounds, terms, *offset);
        if low < 0 || high >= i128::from(size) {
            return refuse(Fault::Bounds, format!("dim {k} of an output is stored at {low}..={high} of {size}"));
        }
        used.extend(terms.iter().map(|(d, _)| *d));
        spans.push(affine(bounds, terms, low, high)?);
    }
    for d in kernel.outer.iter().chain(over) {
        let times = used.iter().filter(|u| *u == d).count();
        if times != 1 {
            return refuse(Fault::Kernel, format!("a store iterates dim {} but indexes {times} dims with it", name(d)));
        }
    }
    Ok(spans)
}

/// Terms in mixed radix: each coefficient steps over all that the smaller ones reach, so that no point is written twice.
fn affine(bounds: &[Bound], terms: &[(DimId, i64)], low: i128, high: i128) -> Checked<Span> {
    let mut steps: Vec<(u128, u128)> =
        terms.iter().map(|&(d, c)| (u128::from(c.unsigned_abs()), u128::from(bounds[d.0 as usize].size))).collect();
    steps.sort_unstable();
    let (mut reach, mut count, mut stride) = (0u128, 1u128, 0u128);
    for (coefficient, size) in steps {
        if coefficient <= reach {
            return refuse(Fault::Kernel, "a store writes a point twice");
        }
        reach += coefficient * (size - 1);
        count *= size;
        stride = gcd(stride, coefficient);
    }
    Ok(Span { low, high, count, stride })
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Whether some dim keeps them apart: other intervals, or other residues of a common stride.
fn disjoint(a: &[Span], b: &[Span]) -> bool {
    a.iter().zip(b).any(|(a, b)| {
        let stride = gcd(a.stride, b.stride);
        a.high < b.low || b.high < a.low || (stride > 1 && a.low.abs_diff(b.low) % stride != 0)
    })
}
