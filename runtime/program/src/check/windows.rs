//! Types of convolutions and pools. Elements outside of a factor's size count as absent, so no window can read out of bounds.

use super::contract::{Factors, accumulated, axes_text, same_dtype};
use super::derive::declared;
use super::linear::{passed, reduced};
use super::{Checked, Fault, refuse};
use crate::factors::{FactorId, FactorSpec};
use crate::mesh::Mesh;
use crate::types::{DType, Reduce, TensorType};
use crate::window::{Pool, Window};

fn factor(spec: &FactorSpec, name: &str) -> Checked<FactorId> {
    let found = spec.names.iter().position(|n| n == name);
    found.map(|i| FactorId(i as u8)).ok_or_else(|| (Fault::Malformed, format!("a window of the unknown factor {name}")))
}

/// The windows' factors, which no rank has a part of.
fn moved(spec: &FactorSpec, windows: &[Window], factors: &Factors, mesh: &Mesh) -> Checked<Vec<FactorId>> {
    let mut all = Vec::new();
    for window in windows {
        if window.stride == 0 || window.dilation == 0 {
            return refuse(Fault::Malformed, format!("the window `{}` does not move", window.text()));
        }
        for name in window.names() {
            let id = factor(spec, name)?;
            if all.contains(&id) {
                return refuse(Fault::Malformed, format!("factor {name} is in two places of windows"));
            }
            if !factors.of(id).is_empty() {
                let axes = axes_text(factors.of(id), mesh);
                return refuse(Fault::Sharding, format!("factor {name} of a window is sharded over {axes}"));
            }
            all.push(id);
        }
    }
    Ok(all)
}

pub(super) fn convolution(
    spec: &FactorSpec,
    windows: &[Window],
    operands: &[&TensorType],
    result: &TensorType,
    mesh: &Mesh,
) -> Checked<()> {
    let factors = Factors::new(spec, operands, result, mesh)?;
    let moved = moved(spec, windows, &factors, mesh)?;
    for f in spec.ids() {
        let has = [spec.in_operand(0, f), spec.in_operand(1, f), spec.in_result(f)];
        let count = has.into_iter().filter(|&has| has).count();
        // A window relates a dim of each tensor to one of each other; any other factor is contracted, repeated or shared.
        if if moved.contains(&f) { count != 1 } else { count < 2 } {
            let name = &spec.names[usize::from(f.0)];
            return refuse(Fault::Type, format!("factor {name} is in {count} tensors of {}", spec.text()));
        }
    }
    for window in moved.chunks_exact(3) {
        let tensor = |f: &FactorId| (spec.in_operand(0, *f), spec.in_operand(1, *f));
        let places = [tensor(&window[0]), tensor(&window[1]), tensor(&window[2])];
        if places[0] == places[1] || places[0] == places[2] || places[1] == places[2] {
            return refuse(Fault::Malformed, format!("a window has two factors of one tensor in {}", spec.text()));
        }
    }
    let lists = factors.exclusive(spec, mesh)?;
    let pending = passed(operands, &[&[0], &[1]], &lists, mesh)?;
    let pending = reduced(pending, factors.missing(spec, &spec.result, |_| true), Reduce::Sum);
    let dtype = accumulated(same_dtype(operands)?, result);
    declared(&factors.result(spec, &spec.result, (dtype, pending), mesh)?, result, mesh)
}

pub(super) fn max_pool(pool: &Pool, operand: &TensorType, results: &[&TensorType], mesh: &Mesh) -> Checked<()> {
    let spec = &pool.spec;
    let factors = Factors::new(spec, &[operand], results[0], mesh)?;
    let [x, y] = [factor(spec, "x")?, factor(spec, "y")?];
    for f in spec.ids() {
        if (spec.in_operand(0, f), spec.in_result(f)) != (f != y, f != x) {
            let name = &spec.names[usize::from(f.0)];
            return refuse(Fault::Type, format!("factor {name} is not where a pool has it in {}", spec.text()));
        }
    }
    if pool.dims.iter().any(|dim| dim.stride == 0 || dim.dilation == 0) || pool.sizes() != [factors.size(x), factors.size(y)] {
        let (x, y) = (factors.size(x), factors.size(y));
        return refuse(Fault::Type, format!("the dims of the pool {} are not {x} and {y} elements", pool.text()));
    }
    if !factors.of(x).is_empty() {
        return refuse(Fault::Sharding, format!("factor x of a pool is sharded over {}", axes_text(factors.of(x), mesh)));
    }
    factors.exclusive(spec, mesh)?;
    passed(&[operand], &[], &[], mesh)?;
    let dtype = same_dtype(&[operand])?;
    for (result, dtype) in results.iter().zip([dtype, DType::I32]) {
        declared(&factors.result(spec, &spec.result, (dtype, Vec::new()), mesh)?, result, mesh)?;
    }
    Ok(())
}
