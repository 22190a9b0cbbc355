//! Convolutions and pools, tap by tap.

use super::library::{Block, Factors, accumulator};
use super::memory::{POISON, to_bits};
use super::scalar::Value;
use super::{Fault, Rank, SimulateError, each_index};
use crate::factors::FactorSpec;
use crate::program::*;
use crate::window::{Pool, Window};

fn factor(spec: &FactorSpec, name: &str) -> Fault<usize> {
    spec.names.iter().position(|n| n == name).ok_or_else(|| SimulateError::fault(format!("no factor {name}")))
}

pub(super) fn convolution(
    p: &Program,
    (spec, windows, mode): (&FactorSpec, &[Window], StoreMode),
    instr: &Instr,
    step: &Step,
    rank: &mut Rank,
) -> Fault<()> {
    let a = Block::read(p, instr.operands[0], step, rank)?;
    let b = Block::read(p, instr.operands[1], step, rank)?;
    let mut result = accumulator(p, mode, instr, step, rank)?;
    let factors = Factors::new(spec, &[&a.ty, &b.ty], &result.ty, &p.mesh, &rank.at)?;
    let triples = windows.iter().map(|w| Ok([factor(spec, &w.image)?, factor(spec, &w.output)?, factor(spec, &w.tap)?]));
    let triples: Vec<[usize; 3]> = triples.collect::<Fault<_>>()?;
    each_index(&factors.valid(|f| triples.iter().all(|t| t[0] != f)), |index| {
        let mut index = index.to_vec();
        for (window, [image, output, tap]) in windows.iter().zip(&triples) {
            let Some(at) = window.image_at(index[*output], index[*tap], factors.extents[*image].valid) else { return Ok(()) };
            index[*image] = at;
        }
        let x = a.value(factors.flat(&spec.operands[0], &index))?.float()?;
        let y = b.value(factors.flat(&spec.operands[1], &index))?.float()?;
        result.add(factors.flat(&spec.result, &index), Value::Float(x * y))
    })?;
    result.write(rank)
}

pub(super) fn max_pool(p: &Program, pool: &Pool, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let x = Block::read(p, instr.operands[0], step, rank)?;
    let mut value = Block::filled(p, instr.results[0], step, POISON)?;
    let mut place = Block::filled(p, instr.results[1], step, POISON)?;
    let factors = Factors::new(&pool.spec, &[&x.ty], &value.ty, &p.mesh, &rank.at)?;
    let (image, output) = (factor(&pool.spec, "x")?, factor(&pool.spec, "y")?);
    let taps: Vec<u64> = pool.dims.iter().map(|dim| dim.taps).collect();
    each_index(&factors.valid(|f| f != image), |index| {
        let (mut best, mut index) = ((f64::NEG_INFINITY, -1), index.to_vec());
        each_index(&taps, |taps| {
            let (mut at, mut rest) = (0, index[output]);
            let mut below: u64 = pool.dims.iter().map(|dim| dim.outputs).product();
            for (dim, &tap) in pool.dims.iter().zip(taps) {
                below /= dim.outputs;
                let Some(inside) = dim.image_at(rest / below, tap) else { return Ok(()) };
                (at, rest) = (at * dim.image + inside, rest % below);
            }
            index[image] = at;
            let found = x.value(factors.flat(&pool.spec.operands[0], &index))?.float()?;
            if found > best.0 || found.is_nan() || best.1 < 0 {
                best = (found, at as i64);
            }
            Ok(())
        })?;
        let to = factors.flat(&pool.spec.result, &index);
        (value.bits[to], place.bits[to]) = (to_bits(Value::Float(best.0)), to_bits(Value::Int(best.1)));
        Ok(())
    })?;
    value.write(rank)?;
    place.write(rank)
}
