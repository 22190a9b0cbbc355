//! Movement of values: reshape, transpose, slice, concatenate, pad.
//!
//! Reshapes and transposes compose as they are added: exporters split and merge dims around every operator, and what comes
//! back to the shape it had vanishes here.

use std::ops::Range;

use dcc_program::{DType, Shape};

use super::build::Build;
use super::known::Known;
use super::value::Value;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::{Concatenate, Op, Reverse, Slice};

/// What one kernel puts together; more parts are put together in groups first.
const MAX_PARTS: usize = 192;

impl Build {
    /// The same elements under another shape.
    pub fn reshape(&mut self, x: &Value, shape: &[u64]) -> Result<Value> {
        let from = x.shape(self)?;
        super::tensor::dims(&shape.iter().map(|&dim| dim as i64).collect::<Vec<i64>>())?;
        if from.iter().product::<u64>() != shape.iter().product::<u64>() {
            return Err(Error::shape(format!(
                "cannot reshape {:?} with {} elements to {shape:?} with {}",
                from.as_slice(),
                from.iter().product::<u64>(),
                shape.iter().product::<u64>()
            )));
        }
        if let Some(known) = x.known().and_then(|known| known.reshape(shape)) {
            return Ok(known.into());
        }
        let id = self.node(x)?;
        Ok(self.reshape_node(id, shape)?.into())
    }

    /// A reshape of the same number of elements, of what is under other reshapes.
    pub(super) fn reshape_node(&mut self, mut id: NodeId, shape: &[u64]) -> Result<NodeId> {
        while let Op::Reshape(_) = self.graph[id].op {
            id = self.graph[id].operands[0];
        }
        match self.reshape_of_broadcast(id, shape)? {
            Some(id) => Ok(id),
            None => self.graph.reshape(id, shape),
        }
    }

    /// A broadcast whose reshape only adds or drops dims of size 1 is another broadcast of the same value.
    fn reshape_of_broadcast(&mut self, id: NodeId, shape: &[u64]) -> Result<Option<NodeId>> {
        let Op::BroadcastInDim(op) = &self.graph[id].op else { return Ok(None) };
        let from = self.graph.ty(id).shape.clone();
        let big = |shape: &[u64]| (0..shape.len()).filter(|&dim| shape[dim] != 1).collect::<Vec<_>>();
        let (old, new) = (big(&from), big(shape));
        if !old.iter().map(|&dim| from[dim]).eq(new.iter().map(|&dim| shape[dim])) {
            return Ok(None);
        }
        let dims: Vec<usize> = op.dims.iter().map(|&dim| usize::from(dim)).filter(|&dim| from[dim] != 1).collect();
        let dims: Vec<usize> = dims.iter().filter_map(|dim| old.iter().position(|d| d == dim)).map(|at| new[at]).collect();
        let inner = self.graph[id].operands[0];
        let dense: Vec<u64> = dims.iter().map(|&dim| shape[dim]).collect();
        let inner = self.reshape_node(inner, &dense)?;
        Ok(Some(self.graph.broadcast(inner, shape, &dims)?))
    }

    /// Result dim i is dim `perm[i]`.
    pub fn transpose(&mut self, x: &Value, perm: &[usize]) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.transpose(perm)) {
            return Ok(known.into());
        }
        let id = self.node(x)?;
        Ok(self.transpose_node(id, perm)?.into())
    }

    fn transpose_node(&mut self, id: NodeId, perm: &[usize]) -> Result<NodeId> {
        let node = &self.graph[id];
        match &node.op {
            Op::Transpose(inner) => {
                let perm: Vec<usize> = perm.iter().map(|&dim| usize::from(inner.perm[dim])).collect();
                let source = node.operands[0];
                self.transpose_node(source, &perm)
            }
            Op::Reshape(_) => {
                let source = node.operands[0];
                let (from, to) = (self.graph.ty(source).shape.clone(), node.ty.shape.clone());
                let Some(groups) = merged(&from, &to) else { return self.graph.transpose(id, perm) };
                let fine: Vec<usize> = perm.iter().flat_map(|&dim| groups[dim].clone()).collect();
                let moved = self.transpose_node(source, &fine)?;
                let shape: Vec<u64> = perm.iter().map(|&dim| to[dim]).collect();
                self.reshape_node(moved, &shape)
            }
            _ => self.graph.transpose(id, perm),
        }
    }

    /// Element i of dim d is element `start[d] + i * step[d]`; `shape` is that of the result, all of it inside.
    pub fn slice(&mut self, x: &Value, start: &[i64], step: &[i64], shape: &[u64]) -> Result<Value> {
        let from = x.shape(self)?;
        if from.as_slice() == shape && step.iter().all(|&step| step == 1) {
            return Ok(x.clone());
        }
        if let Some(known) = x.known().and_then(|known| known.slice(start, step, shape)) {
            return Ok(known.into());
        }
        let mut id = self.node(x)?;
        let back: Vec<usize> = (0..from.len()).filter(|&dim| step[dim] < 0 && from[dim] > 0).collect();
        if !back.is_empty() {
            id = self.graph.add(Reverse { dims: back.iter().map(|&dim| dim as u8).collect() }, &[id])?;
        }
        let first = |dim: usize| if back.contains(&dim) { from[dim] as i64 - 1 - start[dim] } else { start[dim] };
        let starts: Shape = (0..from.len()).map(|dim| first(dim).max(0) as u64).collect();
        let stride: Shape = step.iter().map(|step| step.unsigned_abs()).collect();
        let limit = |dim: usize| starts[dim] + shape[dim].checked_sub(1).map_or(0, |last| last * stride[dim] + 1);
        let op = Slice { limit: (0..from.len()).map(limit).collect(), start: starts.clone(), stride: stride.clone() };
        Ok(self.graph.add(op, &[id])?.into())
    }

    /// `size` elements from `start` of one dim.
    pub fn narrow(&mut self, x: &Value, dim: usize, start: u64, size: u64) -> Result<Value> {
        let mut shape = x.shape(self)?;
        let mut starts = vec![0; shape.len()];
        let end = start.saturating_add(size);
        if shape.get(dim).is_none_or(|&all| end > all) {
            return Err(Error::shape(format!("elements {start}..{end} of dim {dim} of {:?}", shape.as_slice())));
        }
        if let Some((part, start)) = self.part_of(x, dim, start, size)? {
            return self.narrow(&part, dim, start, size);
        }
        starts[dim] = start as i64;
        shape[dim] = size;
        self.slice(x, &starts, &vec![1; shape.len()], &shape)
    }

    /// The parts one after the other along `dim`.
    pub fn concatenate(&mut self, parts: &[Value], dim: usize) -> Result<Value> {
        let mut filled: Vec<&Value> = Vec::new();
        for part in parts {
            if part.rank(self)? <= dim {
                return Err(Error::shape(format!("axis {dim} of a tensor of rank {}", part.rank(self)?)));
            }
            if part.shape(self)?[dim] != 0 {
                filled.push(part);
            }
        }
        match filled.as_slice() {
            [] => return Ok(parts[0].clone()),
            [one] => return Ok((*one).clone()),
            _ => {}
        }
        self.check_concatenate(&filled, dim)?;
        let known: Option<Vec<&Known>> = filled.iter().map(|part| part.known()).collect();
        if let Some(known) = known.and_then(|known| Known::concatenate(&known, dim)) {
            return Ok(known.into());
        }
        let mut ids = filled.iter().map(|part| self.node(part)).collect::<Result<Vec<NodeId>>>()?;
        while ids.len() > MAX_PARTS {
            let join = |part: &[NodeId]| match part {
                [one] => Ok(*one),
                _ => self.graph.add(Concatenate { dim: dim as u8 }, part),
            };
            ids = ids.chunks(MAX_PARTS).map(join).collect::<Result<_>>()?;
        }
        let id = self.graph.add(Concatenate { dim: dim as u8 }, &ids)?;
        if ids.len() == filled.len() {
            self.joined.insert(id, filled.into_iter().cloned().collect());
        }
        Ok(id.into())
    }

    /// Of what was concatenated, the part that has elements `start..start + size` of `dim` among others, and their place in it.
    fn part_of(&self, x: &Value, dim: usize, mut start: u64, size: u64) -> Result<Option<(Value, u64)>> {
        let Value::Node(id) = x else { return Ok(None) };
        let along = |op: &Op| matches!(op, Op::Concatenate(op) if usize::from(op.dim) == dim);
        let Some(parts) = self.joined.get(id).filter(|_| along(&self.graph[*id].op)) else { return Ok(None) };
        for part in parts {
            let count = part.shape(self)?[dim];
            if start < count {
                return Ok((start + size <= count).then(|| (part.clone(), start)));
            }
            start -= count;
        }
        Ok(None)
    }

    fn check_concatenate(&self, parts: &[&Value], dim: usize) -> Result<()> {
        let (dtype, first) = (parts[0].dtype(self)?, parts[0].shape(self)?);
        for part in parts {
            let shape = part.shape(self)?;
            let fits = shape.len() == first.len() && (0..first.len()).all(|d| d == dim || shape[d] == first[d]);
            if !fits {
                let what = format!("cannot concatenate {:?} and {:?} along {dim}", first.as_slice(), shape.as_slice());
                return Err(Error::shape(what));
            }
            if part.dtype(self)? != dtype {
                return Err(Error::dtype(format!("cannot concatenate {} and {}", dtype.name(), part.dtype(self)?.name())));
            }
        }
        Ok(())
    }

    /// `low` and `high` elements `value` around dim `dim`.
    pub fn pad(&mut self, x: &Value, dim: usize, low: u64, high: u64, value: f64) -> Result<Value> {
        let value = Known::scalar(x.dtype(self)?, value).into();
        self.pad_with(x, dim, low, high, &value)
    }

    /// The same with a value of one element.
    pub fn pad_with(&mut self, x: &Value, dim: usize, low: u64, high: u64, value: &Value) -> Result<Value> {
        let shape = x.shape(self)?;
        let value = self.reshape(value, &[])?;
        let mut parts = Vec::with_capacity(3);
        for count in [low, high] {
            let mut side = shape.clone();
            side[dim] = count;
            match count {
                0 => {}
                _ => parts.push(self.broadcast(&value, &side)?),
            }
        }
        parts.insert(usize::from(low > 0), x.clone());
        self.concatenate(&parts, dim)
    }

    /// A bool that is true where the index along `column` is at most that along `row` plus `offset`.
    pub fn lower_triangle(&mut self, shape: &[u64], row: usize, column: usize, offset: i64) -> Result<Value> {
        let (row_size, column_size) = (shape[row], shape[column]);
        let ramp = |size: u64, start: i64| {
            Known::range(DType::I64, start as f64, 1.0, size).ok_or_else(|| Error::limit(format!("{size} positions")))
        };
        let rows = ramp(row_size, offset)?.reshape(&along(shape.len(), row, row_size)).expect("dims of size 1 fold");
        let columns = ramp(column_size, 0)?.reshape(&along(shape.len(), column, column_size)).expect("dims of size 1 fold");
        let triangle = self.compare(dcc_program::kernel::CompareOp::Le, &columns.into(), &rows.into())?;
        self.broadcast(&triangle, shape)
    }
}

/// A shape of ones but for `size` at `dim`.
fn along(rank: usize, dim: usize, size: u64) -> Vec<u64> {
    (0..rank).map(|d| if d == dim { size } else { 1 }).collect()
}

/// Where `to` only merges neighbouring dims of `from`: the dims that each of its dims is made of.
pub(super) fn merged(from: &[u64], to: &[u64]) -> Option<Vec<Range<usize>>> {
    let mut at = 0;
    let mut groups = Vec::with_capacity(to.len());
    for (position, &size) in to.iter().enumerate() {
        let start = at;
        let mut product = 1;
        while at < from.len() && (product < size || (from[at] == 1 && at == start)) {
            product *= from[at];
            at += 1;
        }
        if position + 1 == to.len() {
            while at < from.len() && from[at] == 1 {
                at += 1;
            }
        }
        if product != size || start == at {
            return None;
        }
        groups.push(start..at);
    }
    (at == from.len()).then_some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::Dropout;
    use crate::ops::Input;

    #[test]
    fn no_concatenation_has_more_parts_than_a_kernel_reads() {
        for (count, expected) in [(192, vec![192]), (193, vec![192, 2]), (400, vec![192, 192, 16, 3])] {
            let mut build = Build::new(Dropout::default());
            let mut part = |i: usize| {
                let input =
                    Input { name: format!("x{i}"), dtype: DType::F32, shape: Shape::from_slice(&[2, 1]), batch_dim: None };
                build.graph.add(input, &[]).expect("an input").into()
            };
            let parts: Vec<Value> = (0..count).map(&mut part).collect();
            let whole = build.concatenate(&parts, 1).expect("alike");
            assert_eq!(whole.shape(&build).expect("a tensor")[..], [2, count as u64]);
            let nodes = build.graph.nodes.iter().filter(|node| matches!(node.op, Op::Concatenate(_)));
            assert_eq!(nodes.map(|node| node.operands.len()).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn merges_are_found() {
        assert_eq!(merged(&[2, 4, 8, 16], &[8, 8, 16]), Some(vec![0..2, 2..3, 3..4]));
        assert_eq!(merged(&[2, 4, 8, 3], &[64, 3]), Some(vec![0..3, 3..4]));
        assert_eq!(merged(&[1, 4, 1], &[1, 4]), Some(vec![0..1, 1..3]));
        assert_eq!(merged(&[8, 8], &[2, 4, 8]), None);
        assert_eq!(merged(&[6, 4], &[8, 3]), None);
    }
}
