//! Selection by index.

use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::{DType, FactorSpec, Shape};
use std::collections::BTreeSet;

use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::{Value, axis};
use crate::ops::{Gather, Op};

pub const ONNX: &[(&str, Import)] = &[
    ("Gather", gather),
    ("GatherElements", gather_elements),
    ("GatherND", gather_nd),
    ("NonZero", non_zero),
    ("OneHot", one_hot),
];

/// Indices of the elements that are not zero, a row for each dim. They have to be known: their number is a shape.
fn non_zero(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let known = call.known(build, 0)?;
    let shape = known.shape.clone();
    let dense = known.dense().ok_or_else(|| Error::limit(format!("NonZero of {:?}", shape.as_slice())))?;
    let places: Vec<u64> = (0..).zip(dense.numbers()).filter(|&(_, number)| number != 0.0).map(|(at, _)| at).collect();
    let stride = |dim: usize| shape[dim + 1..].iter().product::<u64>();
    let rows = (0..shape.len()).flat_map(|dim| places.iter().map(move |at| (dim, at)));
    let indices = Known::ints(rows.map(|(dim, at)| (at / stride(dim) % shape[dim]) as i64));
    Ok(vec![build.reshape(&indices.into(), &[shape.len() as u64, places.len() as u64])?])
}

impl Build {
    pub fn gather(&mut self, spec: &FactorSpec, data: NodeId, indices: NodeId) -> Result<Value> {
        Ok(self.graph.add(Gather { spec: spec.clone() }, &[data, indices])?.into())
    }

    /// Indices into a dim of `size` of `data`, those below 0 counted from its end. Errors: DCC0104 for known ones that lie
    /// outside.
    pub(super) fn indices_from_front(&mut self, data: &Value, indices: &Value, size: u64) -> Result<Value> {
        let dtype = indices.dtype(self)?;
        if dtype.is_float() || dtype == DType::Bool {
            return Err(Error::dtype(format!("indices of {}", dtype.name())));
        }
        let indices = if dtype == DType::I32 { indices.clone() } else { self.cast(indices, DType::I64)? };
        let negative = match &indices {
            Value::Known(known) => {
                let outside = known.numbers().find(|&at| at < -(size as f64) || at >= size as f64);
                if let Some(at) = outside {
                    return Err(Error::shape(format!("index {at} into a dim of {size}")));
                }
                known.numbers().any(|at| at < 0.0)
            }
            Value::Node(id) => !(self.is_table(data) && self.never_negative(*id)),
            Value::List(_) => return Err(crate::import::value::not_a_tensor()),
        };
        if !negative {
            return Ok(indices);
        }
        let zero = Known::int(indices.dtype(self)?, 0).into();
        let below = self.compare(CompareOp::Lt, &indices, &zero)?;
        let moved = self.binary_scalar(BinaryOp::Add, &indices, size as f64)?;
        self.select(&below, &moved, &indices)
    }

    /// Whether data are a tensor of the model: inputs that index one, such as tokens, are checked when they are loaded.
    fn is_table(&self, data: &Value) -> bool {
        matches!(data, Value::Node(id) if matches!(self.graph[*id].op, Op::Param(_)))
    }

    /// Whether the value is made of inputs (whose range is checked when data are loaded) and positions only by steps that
    /// keep it at least 0.
    fn never_negative(&self, id: NodeId) -> bool {
        let (mut open, mut seen) = (vec![id], BTreeSet::new());
        while let Some(id) = open.pop() {
            let node = &self.graph[id];
            let from = match &node.op {
                Op::Input(_) | Op::Iota(_) | Op::Compare(_) => node.operands.len(),
                Op::Const(number) if number.value() >= 0.0 => 0,
                Op::Cast(_) | Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Transpose(_) | Op::Slice(_) => 0,
                Op::Concatenate(_) | Op::Cumsum(_) => 0,
                Op::Binary(op) if matches!(op.op, BinaryOp::Add | BinaryOp::Mul | BinaryOp::Max | BinaryOp::Min) => 0,
                Op::Select(_) => 1,
                _ => return false,
            };
            open.extend(node.operands[from..].iter().filter(|&&operand| seen.insert(operand)));
        }
        true
    }
}

/// Slices along one axis; an embedding lookup where data is a matrix.
fn gather(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let data = call.input(0)?;
    let dim = call.axis(0, data.rank(build)?)?;
    let indices = call.input(1)?;
    build.index_samples(data, dim, indices)?;
    let rows = take(build, data, dim, indices)?;
    if call.node.call.divides_by_frequency() {
        let what = "the module divides gradients of its rows by how often the batch has them (`scale_grad_by_freq`), which dcc does not";
        build.warnings.push(format!("{}: {what}", call.node.place()));
    }
    let is_read = |row: &u64| indices.known().is_none_or(|known| known.numbers().any(|at| at == *row as f64));
    match call.node.call.padding_row().filter(is_read) {
        Some(row) => Ok(vec![without_gradient(build, &rows, indices, row)?]),
        None => Ok(vec![rows]),
    }
}

/// The `rows` at `indices`, of which those of `row` pass no gradient on: PyTorch's `padding_idx`.
fn without_gradient(build: &mut Build, rows: &Value, indices: &Value, row: u64) -> Result<Value> {
    let row = Known::int(indices.dtype(build)?, row as i64).into();
    let is_row = build.compare(CompareOp::Eq, indices, &row)?;
    let tail = rows.rank(build)? - indices.rank(build)?;
    let over_rows: Shape = indices.shape(build)?.into_iter().chain(std::iter::repeat_n(1, tail)).collect();
    let is_row = build.reshape(&is_row, &over_rows)?;
    let fixed = build.stop_gradient(rows)?;
    build.select(&is_row, &fixed, rows)
}

/// The slices of `data` along `dim` at `indices`, whose dims take the place of that dim.
pub(super) fn take(build: &mut Build, data: &Value, dim: usize, indices: &Value) -> Result<Value> {
    let shape = data.shape(build)?;
    let indices = build.indices_from_front(data, indices, shape[dim])?;
    let inner = indices.shape(build)?;
    if let (Some(data), Some(indices)) = (data.known(), indices.known())
        && let Some(known) = data.gather(dim, indices)
    {
        return Ok(known.into());
    }
    let joined: Shape = shape[..dim].iter().chain(&inner).chain(&shape[dim + 1..]).copied().collect();
    if let Some((known, (first, count))) = indices.known().and_then(|known| Some((known, known.consecutive()?))) {
        let rows = build.narrow(data, dim, first as u64, count)?;
        let spread = known.varying();
        let kept = (0..inner.len()).map(|d| if spread.contains(&d) { inner[d] } else { 1 });
        let narrow: Shape = shape[..dim].iter().copied().chain(kept).chain(shape[dim + 1..].iter().copied()).collect();
        let rows = build.reshape(&rows, &narrow)?;
        return build.broadcast(&rows, &joined);
    }
    let names = |letter: char, count: usize| (0..count).map(|i| format!("{letter}{i}")).collect::<Vec<String>>();
    let (outer, index, tail) = (names('a', dim), names('i', inner.len()), names('e', shape.len() - dim - 1));
    let text = format!("{0} v {2}, {1} -> {0} {1} {2}", outer.join(" "), index.join(" "), tail.join(" "));
    let (data, indices) = (build.node(data)?, build.node(&indices)?);
    build.gather(&FactorSpec::parse(&text).expect("names are identifiers"), data, indices)
}

/// Elements along one axis, one index per element of the result.
fn gather_elements(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut data = call.input(0)?.clone();
    let shape = data.shape(build)?;
    let dim = call.axis(0, shape.len())?;
    let wanted = call.input(1)?.shape(build)?;
    if wanted.len() != shape.len() {
        return Err(Error::shape(format!("indices {:?} into {:?}", wanted.as_slice(), shape.as_slice())));
    }
    let (indices, kept) = build.unrepeated(call.input(1)?, dim)?;
    let indices = build.indices_from_front(&data, &indices, shape[dim])?;
    for other in (0..shape.len()).filter(|&other| other != dim) {
        data = build.narrow(&data, other, 0, wanted[other])?;
    }
    let name = |d: usize, own: &str| if d == dim { own.to_owned() } else { format!("d{d}") };
    let names = |own: &str| (0..shape.len()).map(|d| name(d, own)).collect::<Vec<_>>().join(" ");
    let places = kept.iter().map(|&d| name(d, "i")).collect::<Vec<_>>().join(" ");
    let text = format!("{}, {places} -> {}", names("v"), names("i"));
    let (data, indices) = (build.node(&data)?, build.node(&indices)?);
    Ok(vec![build.gather(&FactorSpec::parse(&text).expect("names are identifiers"), data, indices)?])
}

/// Index tuples into the first `depth` dims (after the batch dims), as positions in what those dims merge to.
pub(super) struct Tuples {
    pub depth: usize,
    /// For each dim of a tuple its indices.
    pub parts: Vec<Value>,
    pub offsets: Value,
}

impl Build {
    /// Indices without the dims along which they only repeat, and the dims that stay, `dim` among them: rows are found once, not by element.
    pub(super) fn unrepeated(&mut self, indices: &Value, dim: usize) -> Result<(Value, Vec<usize>)> {
        let shape = indices.shape(self)?;
        let all: Vec<usize> = (0..shape.len()).collect();
        match indices {
            Value::Known(known) if !shape.contains(&0) => {
                let mut kept = known.varying();
                if !kept.contains(&dim) {
                    kept.push(dim);
                    kept.sort_unstable();
                }
                let mut once = indices.clone();
                for other in all.into_iter().filter(|other| !kept.contains(other)) {
                    once = self.narrow(&once, other, 0, 1)?;
                }
                let stay: Vec<u64> = kept.iter().map(|&d| shape[d]).collect();
                Ok((self.reshape(&once, &stay)?, kept))
            }
            Value::Node(id) => match &self.graph[*id].op {
                Op::BroadcastInDim(op) if op.dims.iter().any(|&to| usize::from(to) == dim) => {
                    let kept = op.dims.iter().map(|&to| usize::from(to)).collect();
                    Ok((self.graph[*id].operands[0].into(), kept))
                }
                _ => Ok((indices.clone(), all)),
            },
            _ => Ok((indices.clone(), all)),
        }
    }

    /// Reads the tuples along the last dim of `indices` into dims of `data` from `batch` on. Errors: DCC0104.
    pub(super) fn tuples(&mut self, data: &Value, indices: &Value, batch: usize) -> Result<Tuples> {
        let (shape, index_shape) = (data.shape(self)?, indices.shape(self)?);
        let depth = index_shape.last().copied().unwrap_or(0) as usize;
        if depth == 0 || batch + depth > shape.len() {
            return Err(Error::shape(format!("index tuples {:?} into {:?}", index_shape.as_slice(), shape.as_slice())));
        }
        let outer = index_shape.len() - 1;
        let mut parts = Vec::with_capacity(depth);
        let mut offsets: Option<Value> = None;
        for (dim, &size) in shape[batch..batch + depth].iter().enumerate() {
            let part = self.narrow(indices, outer, dim as u64, 1)?;
            let part = self.reshape(&part, &index_shape[..outer])?;
            // Of the operand itself, not of one whose dims were moved.
            if batch == 0 {
                self.index_samples(data, dim, &part)?;
            }
            let part = self.indices_from_front(data, &part, size)?;
            let wide = self.cast(&part, DType::I64)?;
            parts.push(part);
            offsets = Some(match offsets {
                None => wide,
                Some(offsets) => {
                    let row = self.binary_scalar(BinaryOp::Mul, &offsets, size as f64)?;
                    self.binary(BinaryOp::Add, &row, &wide)?
                }
            });
        }
        Ok(Tuples { depth, parts, offsets: offsets.expect("depth is at least 1") })
    }
}

/// Elements (or slices) at index tuples: a slice where the indices are a grid of positions, else one gather of the tuples'
/// offsets. The first `batch_dims` are shared with the indices.
fn gather_nd(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (data, indices) = (call.input(0)?, call.input(1)?);
    let (shape, index_shape) = (data.shape(build)?, indices.shape(build)?);
    let given = call.node.int_or("batch_dims", 0)?;
    let batch = usize::try_from(given).ok().filter(|&batch| batch < index_shape.len() && batch < shape.len());
    let batch = batch.filter(|&batch| index_shape[..batch] == shape[..batch]);
    let batch = batch.ok_or_else(|| attribute_value("batch_dims", given))?;
    Ok(vec![gather_tuples(build, data, indices, batch)?])
}

/// Elements (or slices) of `data` at the tuples along the last dim of `indices`; the first `batch` dims are shared.
fn gather_tuples(build: &mut Build, data: &Value, indices: &Value, batch: usize) -> Result<Value> {
    let (shape, index_shape) = (data.shape(build)?, indices.shape(build)?);
    let Tuples { depth, parts, offsets } = build.tuples(data, indices, batch)?;
    let (outer, rest) = (index_shape.len() - 1, batch + depth);
    if batch == 0 {
        let joined: Vec<u64> = index_shape[..outer].iter().chain(&shape[depth..]).copied().collect();
        if let Some(value) = grid(build, data, &parts, &joined)? {
            return Ok(value);
        }
        if let (Some(data), Some(indices)) = (data.known(), indices.known())
            && let Some(known) = data.gather_nd(indices)
        {
            return Ok(known.into());
        }
    }
    // What is made of weights alone has no samples to share.
    if let Some(shared) = Shared::of(&parts, &shape, batch).filter(|_| build.has_samples(data)) {
        let (data, rest) = (shared.first(build, data)?, shared.without(build, indices)?);
        return gather_tuples(build, &data, &rest, batch + 1);
    }
    let rows: u64 = shape[batch..rest].iter().product();
    let flat: Vec<u64> = shape[..batch].iter().copied().chain([rows]).chain(shape[rest..].iter().copied()).collect();
    let data = build.reshape(data, &flat)?;
    let names = |letter: char, count: usize| (0..count).map(|i| format!("{letter}{i}")).collect::<Vec<_>>().join(" ");
    let (shared, index, tail) = (names('b', batch), names('i', outer - batch), names('e', shape.len() - rest));
    let text = format!("{shared} v {tail}, {shared} {index} -> {shared} {index} {tail}");
    let spec = FactorSpec::parse(&text).expect("names are identifiers");
    let (data, offsets) = (build.node(&data)?, build.node(&offsets)?);
    build.gather(&spec, data, offsets)
}

/// A dim of data that index tuples count all through along a dim of their own, the first after the batch dims (`x[arange(batch), last]`,
/// `x[:, at, arange(batch)]`): both share it.
pub(super) struct Shared {
    batch: usize,
    /// Which index of the tuples it is.
    at: usize,
}

impl Shared {
    /// Of tuples with these indices into dims of `shape` from `batch` on.
    pub fn of(parts: &[Value], shape: &[u64], batch: usize) -> Option<Shared> {
        let counts = |at: &usize| {
            let known = parts[*at].known();
            known.is_some_and(|known| {
                let all = known.shape.get(batch) == Some(&shape[batch + at]) && known.varying() == [batch];
                all && known.affine() == Some((0.0, vec![1.0]))
            })
        };
        let at = (0..parts.len()).filter(|_| parts.len() > 1).find(counts)?;
        Some(Shared { batch, at })
    }

    /// Data with the dim before all others that the tuples index.
    pub fn first(&self, build: &mut Build, data: &Value) -> Result<Value> {
        let mut order: Vec<usize> = (0..data.rank(build)?).collect();
        order[self.batch..=self.batch + self.at].rotate_right(1);
        build.transpose(data, &order)
    }

    /// Such data with the dim where it was.
    pub fn back(&self, build: &mut Build, data: &Value) -> Result<Value> {
        let mut order: Vec<usize> = (0..data.rank(build)?).collect();
        order[self.batch..=self.batch + self.at].rotate_left(1);
        build.transpose(data, &order)
    }

    /// The tuples without its index.
    pub fn without(&self, build: &mut Build, indices: &Value) -> Result<Value> {
        let (last, depth) = (indices.rank(build)? - 1, indices.shape(build)?.last().copied().unwrap_or(0));
        let at = self.at as u64;
        let before = build.narrow(indices, last, 0, at)?;
        let behind = build.narrow(indices, last, at + 1, depth - at - 1)?;
        build.concatenate(&[before, behind], last)
    }
}

/// Where each index is one number or counts up along a result dim of its own: the part of data that they span, its dims
/// moved to those and repeated along the others.
fn grid(build: &mut Build, data: &Value, parts: &[Value], joined: &[u64]) -> Result<Option<Value>> {
    let (shape, outer) = (data.shape(build)?, joined.len() + parts.len() - data.rank(build)?);
    let mut part = data.clone();
    let mut targets = Vec::with_capacity(shape.len());
    for (dim, index) in parts.iter().enumerate() {
        let Some(line) = index.known().and_then(Known::line) else { return Ok(None) };
        let varying = index.known().map(Known::varying).unwrap_or_default();
        if line.is_empty() || line.windows(2).any(|pair| pair[1] - pair[0] != 1.0) {
            return Ok(None);
        }
        let target = varying.first().copied();
        if target.is_some() && targets.contains(&target) {
            return Ok(None);
        }
        part = build.narrow(&part, dim, line[0] as u64, line.len() as u64)?;
        targets.push(target);
    }
    targets.extend((outer..joined.len()).map(Some));
    let fixed: Vec<u64> = (0..shape.len()).filter(|&d| targets[d].is_some()).map(|d| joined[targets[d].unwrap_or(0)]).collect();
    let moved: Vec<usize> = targets.iter().flatten().copied().collect();
    part = build.reshape(&part, &fixed)?;
    let mut order: Vec<usize> = (0..moved.len()).collect();
    order.sort_unstable_by_key(|&at| moved[at]);
    part = build.transpose(&part, &order)?;
    let wide: Vec<u64> = (0..joined.len()).map(|dim| if moved.contains(&dim) { joined[dim] } else { 1 }).collect();
    part = build.reshape(&part, &wide)?;
    Ok(Some(build.broadcast(&part, joined)?))
}

/// `values[1]` where the index along a new axis is the element, `values[0]` elsewhere, all of it for indices outside.
fn one_hot(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let depth = call.known_number(build, 1)?;
    if !(1.0..=1e12).contains(&depth) {
        return Err(Error::limit(format!("one-hot vectors of {depth} elements")));
    }
    let depth = depth as u64;
    let indices = build.cast(call.input(0)?, DType::I64)?;
    let below = build.compare(CompareOp::Lt, &indices, &Known::int(DType::I64, 0).into())?;
    let moved = build.binary_scalar(BinaryOp::Add, &indices, depth as f64)?;
    let indices = build.select(&below, &moved, &indices)?;
    let mut shape = indices.shape(build)?;
    let dim = axis(call.node.int_or("axis", -1)?, shape.len() + 1)?;
    shape.insert(dim, 1);
    let indices = build.reshape(&indices, &shape)?;
    let line: Vec<u64> = (0..shape.len()).map(|d| if d == dim { depth } else { 1 }).collect();
    let classes = Known::range(DType::I64, 0.0, 1.0, depth).and_then(|line_values| line_values.reshape(&line));
    let classes = classes.ok_or_else(|| Error::limit(format!("one-hot vectors of {depth} elements")))?;
    let hit = build.compare(CompareOp::Eq, &indices, &classes.into())?;
    let values = call.input(2)?;
    let (off, on) = (build.narrow(values, 0, 0, 1)?, build.narrow(values, 0, 1, 1)?);
    let (off, on) = (build.reshape(&off, &[])?, build.reshape(&on, &[])?);
    Ok(vec![build.select(&hit, &on, &off)?])
}
