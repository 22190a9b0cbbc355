//! Runs library operations, factor by factor.

use super::memory::{POISON, Region, to_bits, to_value};
use super::scalar::{self, Value};
use super::{Fault, Rank, SimulateError, each_index, flat};
use crate::factors::{DimFactors, FactorSpec};
use crate::kernel::{BinaryOp, CompareOp};
use crate::mesh::{Coordinates, Extent, Mesh};
use crate::program::*;
use crate::types::{AxisList, DType, TensorType};
use std::cmp::Ordering;

/// The block of an operand or result.
pub(super) struct Block {
    pub region: Region,
    pub ty: TensorType,
    pub bits: Vec<u64>,
}

impl Block {
    pub fn read(p: &Program, id: BufferId, step: &Step, rank: &mut Rank) -> Fault<Block> {
        let region = Region::of(p.buffer(id), &p.mesh, &step.slots)?;
        Ok(Block { region, ty: p.ty(id).clone(), bits: rank.memory.read(&region)? })
    }

    pub fn filled(p: &Program, id: BufferId, step: &Step, bits: u64) -> Fault<Block> {
        let region = Region::of(p.buffer(id), &p.mesh, &step.slots)?;
        Ok(Block { region, ty: p.ty(id).clone(), bits: vec![bits; region.elements] })
    }

    pub fn value(&self, at: usize) -> Fault<Value> {
        to_value(self.ty.dtype, self.bits[at])
    }

    pub fn add(&mut self, at: usize, value: Value) -> Fault<()> {
        self.bits[at] = to_bits(scalar::binary(BinaryOp::Add, self.ty.dtype, self.value(at)?, value));
        Ok(())
    }

    pub fn write(&self, rank: &mut Rank) -> Fault<()> {
        rank.memory.write(&self.region, &self.bits)
    }
}

/// Extents of a spec's factors on one rank.
pub(super) struct Factors {
    pub extents: Vec<Extent>,
}

impl Factors {
    pub fn new(
        spec: &FactorSpec,
        operands: &[&TensorType],
        result: &TensorType,
        mesh: &Mesh,
        at: &Coordinates,
    ) -> Fault<Factors> {
        let sizes = spec.sizes(operands, result).map_err(SimulateError::fault)?;
        let mut axes: Vec<Option<AxisList>> = vec![None; sizes.len()];
        for (dims, ty) in spec.operands.iter().zip(operands).chain([(&spec.result, &result)]) {
            for (dim, dim_axes) in dims.iter().zip(&ty.sharding.dims) {
                let split = FactorSpec::split_axes(dim, &sizes, dim_axes, mesh);
                for (factor, list) in split.ok_or_else(|| SimulateError::fault("axes do not divide a compound dim"))? {
                    if axes[factor.0 as usize].replace(list.clone()).is_some_and(|other| other != list) {
                        return Err(SimulateError::fault(format!(
                            "factor {} has two shardings",
                            spec.names[factor.0 as usize]
                        )));
                    }
                }
            }
        }
        let extent = |(&d, axes): (&u64, &Option<AxisList>)| mesh.extent(d, axes.as_deref().unwrap_or_default(), at);
        Ok(Factors { extents: sizes.iter().zip(&axes).map(extent).collect() })
    }

    /// Elements of each factor that this rank computes; those in `fixed` stand still.
    pub fn valid(&self, moves: impl Fn(usize) -> bool) -> Vec<u64> {
        self.extents.iter().enumerate().map(|(f, e)| if moves(f) { e.valid } else { e.valid.min(1) }).collect()
    }

    /// Position in the block of an operand with these dims.
    pub fn flat(&self, dims: &[DimFactors], index: &[u64]) -> usize {
        let factors = dims.iter().flatten().map(|f| f.0 as usize);
        factors.fold(0, |at, f| at * self.extents[f].block as usize + index[f] as usize)
    }
}

pub(super) fn run(p: &Program, library: &Library, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let wanted = match library {
        Library::Zero { .. } => 0,
        Library::Dot { .. } | Library::ScatterAdd { .. } | Library::Convolution { .. } => 2,
        Library::Attention(a) => 3 + usize::from(a.mask != MaskKind::None),
        Library::AttentionGrad(a) => 6 + usize::from(a.mask != MaskKind::None),
        _ => 1,
    };
    let results = match library {
        Library::Attention(_) | Library::MaxPool(_) => 2,
        Library::AttentionGrad(_) => 3,
        _ => 1,
    };
    if instr.operands.len() != wanted || instr.results.len() != results {
        return Err(SimulateError::fault("the operation has other operands"));
    }
    if writes_before_it_has_read(library) {
        for &id in &instr.results {
            rank.memory.poison(&Region::of(p.buffer(id), &p.mesh, &step.slots)?)?;
        }
    }
    match library {
        Library::Dot { spec, mode } => dot(p, spec, *mode, instr, step, rank),
        Library::ScatterAdd { spec, indexed, mode } => scatter_add(p, (spec, indexed, *mode), instr, step, rank),
        Library::Convolution { spec, windows, mode } => {
            super::windows::convolution(p, (spec, windows, *mode), instr, step, rank)
        }
        Library::MaxPool(pool) => super::windows::max_pool(p, pool, instr, step, rank),
        Library::Attention(a) => super::attention::forward(p, a, instr, step, rank),
        Library::AttentionGrad(a) => super::attention::backward(p, a, instr, step, rank),
        Library::Zero { .. } => Block::filled(p, instr.results[0], step, 0)?.write(rank),
        _ => moving(p, library, instr, step, rank),
    }
}

/// Operations whose results may not share memory with their operands: an overlap shows.
fn writes_before_it_has_read(library: &Library) -> bool {
    match library {
        Library::Dot { mode, .. } | Library::ScatterAdd { mode, .. } | Library::Convolution { mode, .. } => {
            *mode == StoreMode::Assign
        }
        Library::MaxPool(_)
        | Library::Attention(_)
        | Library::AttentionGrad(_)
        | Library::SliceAxis { .. }
        | Library::Cumsum { .. }
        | Library::TopK { .. } => true,
        _ => false,
    }
}

/// Operations that move or drop elements of their one operand.
fn moving(p: &Program, library: &Library, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let operand = Block::read(p, instr.operands[0], step, rank)?;
    let mut result = Block::filled(p, instr.results[0], step, POISON)?;
    match library {
        Library::SliceAxis { axis, dim } => {
            let (from, to) = (operand.ty.local_shape(&p.mesh), result.ty.local_shape(&p.mesh));
            let coordinate = if p.mesh.is_microbatch(*axis) { step.microbatch } else { rank.at.get(*axis) };
            let shift = u64::from(coordinate) * to.get(*dim as usize).copied().unwrap_or(0);
            result.bits = window(&operand.bits, &from, &to, *dim as usize, shift)?;
        }
        Library::KeepFirst { axis } if rank.at.get(*axis) != 0 => result.bits.fill(0),
        Library::Cumsum { dim, exclusive, reverse } => {
            cumsum(&operand, &mut result, &p.mesh, (*dim as usize, *exclusive, *reverse))?;
        }
        Library::TopK { dim, k, largest } => top_k(&operand, &mut result, &p.mesh, (*dim as usize, *k, *largest))?,
        _ if operand.bits.len() == result.bits.len() => result.bits = operand.bits,
        _ => return Err(SimulateError::fault("operand and result differ in size")),
    }
    result.write(rank)
}

/// `to`-shaped part of a `from`-shaped block that starts at `shift` of `dim`; what lies beyond is poison.
pub(super) fn window(bits: &[u64], from: &[u64], to: &[u64], dim: usize, shift: u64) -> Fault<Vec<u64>> {
    let mut out = Vec::new();
    each_index(to, |index| {
        let inside = from.get(dim).is_some_and(|&d| index[dim] + shift < d);
        let shifted = index.iter().enumerate().map(|(d, &i)| if d == dim { i + shift } else { i });
        out.push(if inside { bits[flat(shifted, from)] } else { POISON });
        Ok(())
    })?;
    Ok(out)
}

fn cumsum(operand: &Block, result: &mut Block, mesh: &Mesh, (dim, exclusive, reverse): (usize, bool, bool)) -> Fault<()> {
    let shape = operand.ty.local_shape(mesh);
    let n = *shape.get(dim).ok_or_else(|| SimulateError::fault("no such dim"))?;
    let mut rows = shape.clone();
    rows[dim] = 1;
    each_index(&rows, |index| {
        let mut sum = Value::zero(operand.ty.dtype);
        for i in 0..n {
            let mut at = index.to_vec();
            at[dim] = if reverse { n - 1 - i } else { i };
            let at = flat(at, &shape);
            let next = scalar::binary(BinaryOp::Add, operand.ty.dtype, sum, operand.value(at)?);
            result.bits[at] = to_bits(if exclusive { sum } else { next });
            sum = next;
        }
        Ok(())
    })
}

fn top_k(operand: &Block, result: &mut Block, mesh: &Mesh, (dim, k, largest): (usize, u64, bool)) -> Fault<()> {
    let (from, to) = (operand.ty.local_shape(mesh), result.ty.local_shape(mesh));
    let n = *from.get(dim).ok_or_else(|| SimulateError::fault("no such dim"))?;
    if k > n || to.get(dim) != Some(&k) || result.ty.dtype != DType::I64 {
        return Err(SimulateError::fault("operand and result of top_k do not fit"));
    }
    let mut rows = from.clone();
    rows[dim] = 1;
    each_index(&rows, |index| {
        let at = |i: u64| index.iter().enumerate().map(move |(d, &at)| if d == dim { i } else { at });
        let row = (0..n).map(|i| operand.value(flat(at(i), &from))).collect::<Fault<Vec<Value>>>()?;
        let mut order: Vec<usize> = (0..row.len()).collect();
        let dtype = operand.ty.dtype;
        match largest {
            true => order.sort_by(|&a, &b| ascending(dtype, row[b], row[a])),
            false => order.sort_by(|&a, &b| ascending(dtype, row[a], row[b])),
        }
        for (place, &i) in (0..k).zip(&order) {
            result.bits[flat(at(place), &to)] = to_bits(Value::Int(i as i64));
        }
        Ok(())
    })
}

/// NaN is above all others.
fn ascending(dtype: DType, a: Value, b: Value) -> Ordering {
    let is_nan = |x: Value| matches!(x, Value::Float(x) if x.is_nan());
    let above = |a: Value, b: Value| {
        let greater = scalar::compare(CompareOp::Gt, dtype, a, b) == Value::Int(1);
        greater || (is_nan(a) && !is_nan(b))
    };
    above(a, b).cmp(&above(b, a))
}

/// The result before anything is added: zero in its valid part, or what is there.
pub(super) fn accumulator(p: &Program, mode: StoreMode, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<Block> {
    match mode {
        StoreMode::Assign => Block::filled(p, instr.results[0], step, 0),
        StoreMode::Accumulate => Block::read(p, instr.results[0], step, rank),
    }
}

fn dot(p: &Program, spec: &FactorSpec, mode: StoreMode, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    let a = Block::read(p, instr.operands[0], step, rank)?;
    let b = Block::read(p, instr.operands[1], step, rank)?;
    let mut result = accumulator(p, mode, instr, step, rank)?;
    let factors = Factors::new(spec, &[&a.ty, &b.ty], &result.ty, &p.mesh, &rank.at)?;
    each_index(&factors.valid(|_| true), |index| {
        let x = a.value(factors.flat(&spec.operands[0], index))?.float()?;
        let y = b.value(factors.flat(&spec.operands[1], index))?.float()?;
        result.add(factors.flat(&spec.result, index), Value::Float(x * y))
    })?;
    result.write(rank)
}

fn scatter_add(
    p: &Program,
    (spec, indexed, mode): (&FactorSpec, &str, StoreMode),
    instr: &Instr,
    step: &Step,
    rank: &mut Rank,
) -> Fault<()> {
    let indices = Block::read(p, instr.operands[0], step, rank)?;
    let updates = Block::read(p, instr.operands[1], step, rank)?;
    let mut result = accumulator(p, mode, instr, step, rank)?;
    let factors = Factors::new(spec, &[&indices.ty, &updates.ty], &result.ty, &p.mesh, &rank.at)?;
    let row = spec.names.iter().position(|n| n == indexed).ok_or_else(|| SimulateError::fault("no such factor"))?;
    let extent = factors.extents[row];
    each_index(&factors.valid(|f| f != row), |index| {
        let target = indices.value(factors.flat(&spec.operands[0], index))?.int()?;
        let local = i128::from(target) - i128::from(extent.offset);
        if !(0..i128::from(extent.valid)).contains(&local) {
            return Ok(());
        }
        let mut at = index.to_vec();
        at[row] = local as u64;
        let value = updates.value(factors.flat(&spec.operands[1], index))?;
        result.add(factors.flat(&spec.result, &at), value)
    })?;
    result.write(rank)
}

/// Zero of a dtype, for results that are added to.
pub(super) fn zeros(p: &Program, id: BufferId, step: &Step) -> Fault<Block> {
    let dtype: DType = p.ty(id).dtype;
    Block::filled(p, id, step, to_bits(Value::zero(dtype)))
}
