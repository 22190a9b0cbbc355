//! Updates written at computed places: the inverse of gathering.
//!
//! Sums go through the core's `scatter_add`; an overwrite is one too, of updates and of ones that say where they landed. Other
//! reductions compare every place with every index, which fuses into one reduction.

use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::{DType, FactorSpec, Reduce, Shape};

use super::index::{Shared, Tuples};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;
use crate::ops::ScatterAdd;

pub const ONNX: &[(&str, Import)] = &[
    ("Scatter", scatter_elements),
    ("ScatterElements", scatter_elements),
    ("ScatterND", scatter_nd),
    ("TensorScatter", tensor_scatter),
];

/// What updates do to what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Combine {
    Set,
    With(Reduce),
}

impl Combine {
    fn read(call: &Call) -> Result<Combine> {
        Ok(match call.node.string_or("reduction", "none")? {
            "none" => Combine::Set,
            "add" => Combine::With(Reduce::Sum),
            "mul" => Combine::With(Reduce::Prod),
            "max" => Combine::With(Reduce::Max),
            "min" => Combine::With(Reduce::Min),
            other => return Err(attribute_value("reduction", format!("`{other}`"))),
        })
    }
}

/// Rows of `data` along `row`, and for each update the row that it goes to.
struct Rows<'a> {
    data: &'a Value,
    row: usize,
    indices: &'a Value,
    updates: &'a Value,
    /// The factor of each dim of indices, updates and data; `v` is that of the rows.
    factors: [Vec<String>; 3],
}

fn spec(operands: &[&[String]], result: &[String]) -> FactorSpec {
    let operands: Vec<String> = operands.iter().map(|names| names.join(" ")).collect();
    FactorSpec::parse(&format!("{} -> {}", operands.join(", "), result.join(" "))).expect("names are identifiers")
}

fn check_dtypes(build: &Build, data: &Value, updates: &Value) -> Result<()> {
    let (from, into) = (updates.dtype(build)?, data.dtype(build)?);
    if from == into { Ok(()) } else { Err(Error::dtype(format!("updates of {} into {}", from.name(), into.name()))) }
}

/// `data` with `updates` at the elements from `start` on of one dim.
fn put(build: &mut Build, data: &Value, updates: &Value, (dim, start): (usize, u64), combine: Combine) -> Result<Value> {
    let (all, count) = (data.shape(build)?[dim], updates.shape(build)?[dim]);
    let changed = match combine {
        Combine::Set => updates.clone(),
        Combine::With(op) => {
            let there = build.narrow(data, dim, start, count)?;
            build.binary(binary(op), &there, updates)?
        }
    };
    let before = build.narrow(data, dim, 0, start)?;
    let behind = build.narrow(data, dim, start + count, all - start - count)?;
    build.concatenate(&[before, changed, behind], dim)
}

/// Where `count` updates go along a dim of `size`, if that is one after the other; each index is of the update in its place of `dim`.
fn run(index: &Value, dim: usize, count: u64, size: u64) -> Option<u64> {
    let known = index.known()?;
    let (start, stored) = known.consecutive()?;
    let start = u64::try_from(start).ok().filter(|&start| start.saturating_add(count) <= size)?;
    (known.varying().iter().all(|&varying| varying == dim) && stored == count).then_some(start)
}

impl Rows<'_> {
    fn combine(&self, build: &mut Build, combine: Combine) -> Result<Value> {
        let dtype = self.data.dtype(build)?;
        // What the scatter kernel adds exactly: floats as they are, small integers as f64.
        let exact = dtype.is_float() || dtype.bytes() <= 4;
        match combine {
            Combine::Set if exact => self.set(build, dtype),
            Combine::With(Reduce::Sum) if exact => {
                let wide = summed_as(dtype);
                let sum = self.scatter(build, self.updates, wide)?;
                let data = build.cast(self.data, wide)?;
                let sum = build.binary(BinaryOp::Add, &data, &sum)?;
                build.cast(&sum, dtype)
            }
            Combine::Set => self.compared(build, None),
            Combine::With(op) => self.compared(build, Some(op)),
        }
    }

    fn set(&self, build: &mut Build, dtype: DType) -> Result<Value> {
        let wide = summed_as(dtype);
        let written = self.scatter(build, self.updates, wide)?;
        let written = build.cast(&written, dtype)?;
        let shape = self.updates.shape(build)?;
        let ones: Value = Known::scalar(DType::F32, 1.0).broadcast(&shape).into();
        let count = self.scatter(build, &ones, DType::F32)?;
        let hit = build.compare(CompareOp::Gt, &count, &Known::scalar(DType::F32, 0.0).into())?;
        build.select(&hit, &written, self.data)
    }

    fn scatter(&self, build: &mut Build, updates: &Value, wide: DType) -> Result<Value> {
        let updates = build.cast(updates, wide)?;
        let (indices, updates) = (build.node(self.indices)?, build.node(&updates)?);
        let [index, update, data] = &self.factors;
        let size = self.data.shape(build)?[self.row];
        let op = ScatterAdd { spec: spec(&[index, update], data), size };
        Ok(build.graph.add(op, &[indices, updates])?.into())
    }

    /// Compares each row's number with each index and reduces over those; without a reduction the one update that hits.
    fn compared(&self, build: &mut Build, op: Option<Reduce>) -> Result<Value> {
        let dtype = self.data.dtype(build)?;
        let [index, update, data] = &self.factors;
        let summed: Vec<&String> = update.iter().filter(|name| !data.contains(name)).collect();
        let all: Vec<&String> = data.iter().chain(summed.iter().copied()).collect();
        let place = |names: &[String], build: &mut Build, value: &Value| -> Result<Value> {
            let shape = value.shape(build)?;
            let mut order: Vec<usize> = (0..names.len()).collect();
            order.sort_by_key(|&dim| all.iter().position(|name| **name == names[dim]));
            let moved = build.transpose(value, &order)?;
            let find = |name: &String| names.iter().position(|n| n == name);
            let wide: Vec<u64> = all.iter().map(|name| find(name).map_or(1, |dim| shape[dim])).collect();
            build.reshape(&moved, &wide)
        };
        let (indices, updates) = (place(index, build, self.indices)?, place(update, build, self.updates)?);
        let mut sizes = self.data.shape(build)?;
        sizes.extend(std::iter::repeat_n(1, summed.len()));
        let rows = build.positions(&sizes, self.row)?;
        let rows = build.cast(&rows, indices.dtype(build)?)?;
        let hit = build.compare(CompareOp::Eq, &indices, &rows)?;
        let dims: Vec<usize> = (data.len()..all.len()).collect();
        let neutral = match op {
            Some(op) => Known::neutral(op, dtype),
            None => Known::int(dtype, 0),
        };
        let chosen = build.select(&hit, &updates, &neutral.into())?;
        let reduced = build.reduce(op.unwrap_or(Reduce::Sum), &chosen, &dims, false)?;
        match op {
            None => {
                let hits = build.reduce(Reduce::Max, &hit, &dims, false)?;
                build.select(&hits, &reduced, self.data)
            }
            Some(op) => build.binary(binary(op), self.data, &reduced),
        }
    }
}

fn summed_as(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => DType::F32,
        _ => DType::F64,
    }
}

fn binary(op: Reduce) -> BinaryOp {
    match op {
        Reduce::Sum => BinaryOp::Add,
        Reduce::Prod => BinaryOp::Mul,
        Reduce::Max => BinaryOp::Max,
        Reduce::Min => BinaryOp::Min,
    }
}

/// One index per update, along one axis. Where the indices cover less than data in another dim, the rest stays as it is.
fn scatter_elements(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (data, updates) = (call.input(0)?, call.input(2)?);
    let (shape, wanted) = (data.shape(build)?, updates.shape(build)?);
    let dim = call.axis(0, shape.len())?;
    let given = call.input(1)?;
    let (indices, kept) = build.unrepeated(given, dim)?;
    let indices = build.indices_from_front(data, &indices, shape[dim])?;
    let fits = wanted.len() == shape.len() && (0..shape.len()).all(|d| d == dim || wanted[d] <= shape[d]);
    if given.shape(build)? != wanted || !fits {
        let what = format!("updates {:?} at indices {:?} into {:?}", &wanted[..], &given.shape(build)?[..], &shape[..]);
        return Err(Error::shape(what));
    }
    let combine = Combine::read(call)?;
    check_dtypes(build, data, updates)?;
    if wanted.contains(&0) {
        return Ok(vec![data.clone()]);
    }
    let mut part = data.clone();
    for other in (0..shape.len()).filter(|&other| other != dim) {
        part = build.narrow(&part, other, 0, wanted[other])?;
    }
    let names = |own: &str| -> Vec<String> {
        (0..shape.len()).map(|d| if d == dim { own.to_owned() } else { format!("d{d}") }).collect()
    };
    let factors = [kept.iter().map(|&d| names("i")[d].clone()).collect(), names("i"), names("v")];
    let place = kept.iter().position(|&kept| kept == dim).unwrap_or(0);
    let mut y = match run(&indices, place, wanted[dim], shape[dim]) {
        Some(start) => put(build, &part, updates, (dim, start), combine)?,
        None => Rows { data: &part, row: dim, indices: &indices, updates, factors }.combine(build, combine)?,
    };
    // Puts the changed part back, dim by dim.
    for other in (0..shape.len()).rev().filter(|&other| other != dim && wanted[other] != shape[other]) {
        let mut around = data.clone();
        for outer in (0..other).filter(|&outer| outer != dim) {
            around = build.narrow(&around, outer, 0, wanted[outer])?;
        }
        let rest = build.narrow(&around, other, wanted[other], shape[other] - wanted[other])?;
        y = build.concatenate(&[y, rest], other)?;
    }
    Ok(vec![y])
}

/// One index tuple per update, of its element or slice.
fn scatter_nd(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (data, indices, updates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let combine = Combine::read(call)?;
    check_dtypes(build, data, updates)?;
    Ok(vec![scatter_tuples(build, [data, indices, updates], combine, 0)?])
}

/// `data` with updates at the tuples along the last dim of `indices`; all three share the first `batch` dims.
fn scatter_tuples(build: &mut Build, operands: [&Value; 3], combine: Combine, batch: usize) -> Result<Value> {
    let [data, indices, updates] = operands;
    let shape = data.shape(build)?;
    let Tuples { depth, parts, offsets } = build.tuples(data, indices, batch)?;
    let (outer, rest) = (offsets.shape(build)?, batch + depth);
    let wanted: Shape = outer.iter().chain(&shape[rest..]).copied().collect();
    if updates.shape(build)? != wanted {
        let what = format!("updates {:?} where indices want {:?}", updates.shape(build)?.as_slice(), wanted.as_slice());
        return Err(Error::shape(what));
    }
    // PyTorch's assignment to an empty slice.
    if wanted.contains(&0) {
        return Ok(data.clone());
    }
    let has_samples = operands.iter().any(|operand| build.has_samples(operand));
    if let Some(shared) = Shared::of(&parts, &shape, batch).filter(|_| has_samples) {
        let (data, rest) = (shared.first(build, data)?, shared.without(build, indices)?);
        let changed = scatter_tuples(build, [&data, &rest, updates], combine, batch + 1)?;
        return shared.back(build, &changed);
    }
    if depth == 1
        && outer.len() == batch + 1
        && let Some(start) = run(&parts[0], batch, outer[batch], shape[batch])
    {
        return put(build, data, updates, (batch, start), combine);
    }
    let rows: u64 = shape[batch..rest].iter().product();
    let flat: Vec<u64> = shape[..batch].iter().copied().chain([rows]).chain(shape[rest..].iter().copied()).collect();
    let flat_data = build.reshape(data, &flat)?;
    let names = |letter: char, count: usize| (0..count).map(move |i| format!("{letter}{i}"));
    let (shared, index, tail) = (names('b', batch), names('i', outer.len() - batch), names('e', shape.len() - rest));
    let of_index: Vec<String> = shared.clone().chain(index).collect();
    let of_update = of_index.iter().cloned().chain(tail.clone()).collect();
    let factors = [of_index, of_update, shared.chain(["v".to_owned()]).chain(tail).collect()];
    let rows = Rows { data: &flat_data, row: batch, indices: &offsets, updates, factors };
    let y = rows.combine(build, combine)?;
    build.reshape(&y, &shape)
}

/// A cache with new rows written from `write_indices` on, one per sample; from the front again at the end if `circular`.
fn tensor_scatter(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (past, update) = (call.input(0)?, call.input(1)?);
    let (shape, new) = (past.shape(build)?, update.shape(build)?);
    let dim = call.axis(-2, shape.len())?;
    let fits = new.len() == shape.len() && (0..shape.len()).all(|d| new[d] == shape[d] || d == dim && new[d] <= shape[d]);
    if dim == 0 || !fits {
        return Err(Error::shape(format!("rows {:?} along {dim} into a cache {:?}", new.as_slice(), shape.as_slice())));
    }
    let starts: Value = match call.optional(2) {
        Some(starts) => build.cast(starts, DType::I64)?,
        None => Known::int(DType::I64, 0).broadcast(&shape[..1]).into(),
    };
    let starts = build.reshape(&starts, &[shape[0], 1])?;
    let places = build.positions(&[1, shape[dim]], 1)?;
    let mut row = build.binary(BinaryOp::Sub, &places, &starts)?;
    let (zero, count): (Value, Value) = (Known::int(DType::I64, 0).into(), Known::int(DType::I64, new[dim] as i64).into());
    match call.node.string_or("mode", "linear")? {
        "linear" => {}
        "circular" => {
            row = build.binary_scalar(BinaryOp::Rem, &row, shape[dim] as f64)?;
            let below = build.compare(CompareOp::Lt, &row, &zero)?;
            let wrapped = build.binary_scalar(BinaryOp::Add, &row, shape[dim] as f64)?;
            row = build.select(&below, &wrapped, &row)?;
        }
        other => return Err(attribute_value("mode", format!("`{other}`"))),
    }
    let (from, to) = (build.compare(CompareOp::Ge, &row, &zero)?, build.compare(CompareOp::Lt, &row, &count)?);
    let hit = build.binary(BinaryOp::And, &from, &to)?;
    let row = build.select(&hit, &row, &zero)?;
    let names = |own: &str| -> Vec<String> {
        (0..shape.len()).map(|d| if d == dim { own.to_owned() } else { format!("d{d}") }).collect()
    };
    let spec = spec(&[&names("v"), &["d0".to_owned(), "s".to_owned()]], &names("s"));
    let (update, row) = (build.node(update)?, build.node(&row)?);
    let written = build.gather(&spec, update, row)?;
    let mut wide = vec![1; shape.len()];
    (wide[0], wide[dim]) = (shape[0], shape[dim]);
    let hit = build.reshape(&hit, &wide)?;
    Ok(vec![build.select(&hit, &written, past)?])
}
