//! A static export for another batch size.
//!
//! The file has its batch `from` in the inputs' dims and, as ordinary numbers, in shape operands. The model is imported
//! once as it is, which gives every value its old shape, and once more with inputs of the new batch. In the second round a
//! shape operand is translated: dims that grew in the operand grow in the result, and a literal `from` where a value of the
//! whole batch is made from nothing becomes `to`. A wrong guess ends in shapes that do not fit, an error at that node.

use dcc_program::Shape;

use super::value::broadcast_shape;
use crate::error::{Error, Result};

/// Old shapes of the node being imported, in the second round.
#[derive(Clone, Debug)]
pub struct Rescale {
    pub from: u64,
    pub to: u64,
    /// Of the first input and the first output.
    pub input: Shape,
    pub output: Shape,
}

impl Rescale {
    fn scaled(&self, size: u64) -> Option<u64> {
        size.checked_mul(self.to).filter(|size| self.from != 0 && size.is_multiple_of(self.from)).map(|size| size / self.from)
    }

    /// The shape that a reshape of an operand of `input` means.
    pub fn reshape(&self, input: &[u64]) -> Result<Shape> {
        let mut shape = self.output.clone();
        if input == self.input.as_slice() {
            return Ok(shape);
        }
        let unclear =
            || Error::baked_batch(format!("a reshape of {:?} to {:?} for {input:?}", &self.input[..], &self.output[..]));
        for (ins, outs) in groups(&self.input, &self.output).ok_or_else(unclear)? {
            let (old, new): (u64, u64) = (self.input[ins.clone()].iter().product(), input[ins.clone()].iter().product());
            if old == new {
                continue;
            }
            let first = ins.start;
            let only_first = input[first + 1..ins.end] == self.input[first + 1..ins.end];
            let grown = outs.clone().next().and_then(|dim| Some((dim, self.scaled(shape[dim])?)));
            let (dim, size) = grown.filter(|_| only_first && self.scaled(old) == Some(new)).ok_or_else(unclear)?;
            shape[dim] = size;
        }
        Ok(shape)
    }

    /// The shape that an expansion to `wanted` means.
    pub fn expand(&self, input: &[u64], wanted: &[u64]) -> Result<Shape> {
        let mut shape = Shape::from_slice(wanted);
        let skip = wanted.len().saturating_sub(input.len());
        for dim in 0..wanted.len() {
            let old = dim.checked_sub(skip).and_then(|dim| self.input.get(dim)).copied().unwrap_or(1);
            let new = dim.checked_sub(skip).and_then(|dim| input.get(dim)).copied().unwrap_or(1);
            let literal = wanted[dim] == self.from && self.output.get(dim) == Some(&self.from);
            if old != new && wanted[dim] == old {
                shape[dim] = new;
            } else if dim == 0 && literal && old == 1 && new == 1 && self.from != 1 {
                shape[dim] = self.to;
            }
        }
        broadcast_shape(input, &shape)
    }

    /// The shape that a constant of shape `wanted` means.
    pub fn constant(&self, wanted: &[u64]) -> Shape {
        let mut shape = Shape::from_slice(wanted);
        if self.from != 1 && shape.first() == Some(&self.from) && self.output.first() == Some(&self.from) {
            shape[0] = self.to;
        }
        shape
    }

    /// The number of elements that a range of `count` means.
    pub fn count(&self, count: u64) -> u64 {
        if count == self.from && self.from != 1 && self.output.first() == Some(&count) { self.to } else { count }
    }

    /// The end that a slice of dim `dim` of size `size` means.
    pub fn end(&self, dim: usize, size: u64, start: i64, end: i64) -> Result<i64> {
        let old = self.input[dim];
        if old == size {
            return Ok(end);
        }
        match start == 0 && (end >= old as i64) {
            true => Ok(end.max(size as i64)),
            false => Err(Error::baked_batch(format!("a slice {start}..{end} of the batch of {old}"))),
        }
    }
}

type Group = (std::ops::Range<usize>, std::ops::Range<usize>);

/// Runs of dims with equal products, as short as they can be; a dim of size 1 without a partner joins what follows it, or
/// at the end what precedes it.
fn groups(from: &[u64], to: &[u64]) -> Option<Vec<Group>> {
    let (mut i, mut j) = (0, 0);
    let mut groups: Vec<Group> = Vec::new();
    while i < from.len() && j < to.len() {
        let (first_in, first_out) = (i, j);
        while i + 1 < from.len() && from[i] == 1 && to[j] != 1 {
            i += 1;
        }
        while j + 1 < to.len() && to[j] == 1 && from[i] != 1 {
            j += 1;
        }
        let (mut left, mut right) = (from[i], to[j]);
        (i, j) = (i + 1, j + 1);
        while left != right {
            if left < right {
                left *= *from.get(i)?;
                i += 1;
            } else {
                right *= *to.get(j)?;
                j += 1;
            }
        }
        groups.push((first_in..i, first_out..j));
    }
    let rest = from[i..].iter().chain(&to[j..]).all(|&size| size == 1);
    if let Some(last) = groups.last_mut() {
        *last = (last.0.start..from.len(), last.1.start..to.len());
    }
    rest.then_some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rescale(from: u64, to: u64, input: &[u64], output: &[u64]) -> Rescale {
        Rescale { from, to, input: Shape::from_slice(input), output: Shape::from_slice(output) }
    }

    #[test]
    fn a_reshape_keeps_the_batch_in_front() {
        let check = |from, to, old: &[u64], wanted: &[u64], new: &[u64]| {
            rescale(from, to, old, wanted).reshape(new).map(|shape| shape.to_vec()).map_err(|error| error.code.0)
        };
        assert_eq!(check(8, 4, &[8, 16, 64], &[128, 64], &[4, 16, 64]), Ok(vec![64, 64]));
        assert_eq!(check(8, 4, &[128, 64], &[8, 16, 4, 16], &[64, 64]), Ok(vec![4, 16, 4, 16]));
        assert_eq!(check(1, 4, &[1, 16, 64], &[16, 64], &[4, 16, 64]), Ok(vec![64, 64]));
        assert_eq!(check(1, 4, &[16, 64], &[1, 16, 64], &[64, 64]), Ok(vec![4, 16, 64]));
        assert_eq!(check(8, 4, &[16, 8], &[128], &[16, 4]), Err(112));
    }

    #[test]
    fn expansions_grow_with_the_operand_or_from_nothing() {
        let check =
            |old: &[u64], wanted: &[u64], new: &[u64]| rescale(8, 4, old, wanted).expand(new, wanted).map(|s| s.to_vec());
        assert_eq!(check(&[1, 16], &[8, 16], &[1, 16]), Ok(vec![4, 16]));
        assert_eq!(check(&[8, 1], &[8, 16], &[4, 1]), Ok(vec![4, 16]));
        assert_eq!(check(&[1, 1, 8], &[1, 8, 8], &[1, 1, 8]), Ok(vec![1, 8, 8]));
    }
}
