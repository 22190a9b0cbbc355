//! A static export for another batch size.
//!
//! The file has its batch `from` in the inputs' dims and, as ordinary numbers, in shape operands. The model is imported
//! once as it is, which gives every value its old shape, and once more with inputs of the new batch. In the second round a
//! shape operand is translated: dims that grew in the operand grow in the result, and a literal `from` where a value of the
//! whole batch is made from nothing becomes `to`. Some wrong guesses end in shapes that do not fit, an error at that node. Others would end in
//! wrong numbers (`y / ones(4).sum()`, 4 the channels): a third round, in which nobody sees through what was guessed, proves that each guess
//! meets the batch of an input, or refuses it.

use dcc_program::{Shape, TensorType};
use std::collections::BTreeMap;

use super::build::Build;
use super::value::{Value, broadcast_shape};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Input, Op};

/// Old shapes of the node being imported, in the second round.
#[derive(Clone, Debug)]
pub struct Rescale {
    pub from: u64,
    pub to: u64,
    /// Of the first input and the first output.
    pub input: Shape,
    pub output: Shape,
    /// In a third round, the guesses that it proves.
    pub proves: Option<Guess>,
}

/// What a number of the file's batch may be. Those of one kind are proven at a time, where the others are as they were guessed: that
/// `mask[numbers]` meets the batch is known where the numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guess {
    /// The length of a line of numbers.
    Range,
    /// The first dim of a value that is the same for all.
    Constant,
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

    /// The shape that an expansion to `wanted` means, and whether that is a guess.
    pub fn expand(&self, input: &[u64], wanted: &[u64]) -> Result<(Shape, bool)> {
        let (mut shape, mut guessed) = (Shape::from_slice(wanted), false);
        let skip = wanted.len().saturating_sub(input.len());
        for dim in 0..wanted.len() {
            let old = dim.checked_sub(skip).and_then(|dim| self.input.get(dim)).copied().unwrap_or(1);
            let new = dim.checked_sub(skip).and_then(|dim| input.get(dim)).copied().unwrap_or(1);
            let literal = wanted[dim] == self.from && self.output.get(dim) == Some(&self.from);
            if old != new && wanted[dim] == old {
                shape[dim] = new;
            } else if dim == 0 && literal && old == 1 && new == 1 && self.from != 1 {
                (shape[dim], guessed) = (self.to, true);
            }
        }
        Ok((broadcast_shape(input, &shape)?, guessed))
    }

    /// The shape that a constant of shape `wanted` means, and whether that is a guess.
    pub fn constant(&self, wanted: &[u64]) -> (Shape, bool) {
        let mut shape = Shape::from_slice(wanted);
        let guessed = self.from != 1 && shape.first() == Some(&self.from) && self.output.first() == Some(&self.from);
        if guessed {
            shape[0] = self.to;
        }
        (shape, guessed)
    }

    /// The number of elements that a range of `count` means, and whether that is a guess.
    pub fn count(&self, count: u64) -> (u64, bool) {
        let guessed = count == self.from && self.from != 1 && self.output.first() == Some(&count);
        (if guessed { self.to } else { count }, guessed)
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

/// A line of numbers that a guess is as long as, and the dim of a value that they index.
pub type Indexed = (NodeId, NodeId, usize);

/// Names of inputs that stand for guesses: no ONNX name has the character.
const GUESS: char = '\0';

impl Build {
    /// `value`, whose first dim is a `guess` to be of the batch, if any; where that is proven an input in its place.
    pub fn guessed(&mut self, value: Value, guess: Option<Guess>) -> Result<Value> {
        if guess.is_none() || self.rescale.as_ref().is_none_or(|rescale| rescale.proves != guess) {
            return Ok(value);
        }
        let name = format!("{GUESS}{}", self.graph.nodes.len());
        let input = Input { name, dtype: value.dtype(self)?, shape: value.shape(self)?, batch_dim: None };
        Ok(self.graph.add(input, &[])?.into())
    }

    /// Notes that dim `dim` of `data` is read at `indices`. Errors: DCC0112 where the dim grows with the batch and these do not: all
    /// samples of the file, or as many.
    pub fn index_samples(&mut self, data: &Value, dim: usize, indices: &Value) -> Result<()> {
        let Some(rescale) = &self.rescale else { return Ok(()) };
        let size = data.shape(self)?.get(dim).copied();
        if let Some(old) =
            rescale.input.get(dim).copied().filter(|old| rescale.from > 1 && size.is_some_and(|size| size != *old))
        {
            let all = indices.known().is_some_and(|known| {
                let mut read: Vec<u64> = known.numbers().filter(|&at| at >= 0.0).map(|at| at as u64).collect();
                read.sort_unstable();
                read.dedup();
                read.into_iter().eq(0..old)
            });
            let as_many = !self.has_samples(indices) && indices.shape(self)?.first() == Some(&rescale.from);
            if all || as_many {
                let count = rescale.from;
                return Err(Error::baked_batch(format!("what is read of the {count} samples of the file is in numbers here")));
            }
        }
        if let (Value::Node(data), Value::Node(indices)) = (data, indices)
            && let Some(line) = self.line_of(*indices)
        {
            self.indexed.push((line, *data, dim));
        }
        Ok(())
    }

    /// The guess that `indices` are, seen through what only lays them out.
    fn line_of(&self, mut indices: NodeId) -> Option<NodeId> {
        loop {
            let node = &self.graph[indices];
            match &node.op {
                Op::Input(input) if input.name.starts_with(GUESS) => return Some(indices),
                Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Cast(_) | Op::Transpose(_) => indices = node.operands[0],
                _ => return None,
            }
        }
    }
}

/// A guess of the third round's graph that does not meet the batch of an input, though something is computed along it. A line of
/// numbers meets what they index.
pub(super) fn unproven(graph: &Graph, indexed: &[Indexed]) -> Option<NodeId> {
    let mut sets = Sets::of(graph);
    let live = graph.live();
    for &(line, value, dim) in indexed {
        let (line, place) = (sets.place(line, 0), sets.place(value, dim));
        sets.join(line, place);
    }
    for id in graph.ids().filter(|id| live[id.0 as usize] && !graph[*id].operands.is_empty()) {
        let node = &graph[id];
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
        let spec = node.op.rule(&types, &node.ty).spec;
        // Dims with the same major factor are one.
        let mut places = BTreeMap::new();
        for (value, dims) in node.operands.iter().zip(&spec.operands).chain([(&id, &spec.result)]) {
            for (dim, factors) in dims.iter().enumerate() {
                let Some(factor) = factors.first() else { continue };
                let place = sets.place(*value, dim);
                sets.join(*places.entry(*factor).or_insert(place), place);
            }
        }
    }
    let mut guesses = Vec::new();
    for id in graph.ids() {
        let Op::Input(input) = &graph[id].op else { continue };
        match input.batch_dim {
            Some(dim) => {
                let place = sets.place(id, usize::from(dim));
                sets.join(Sets::BATCH, place);
            }
            None if input.name.starts_with(GUESS) && live[id.0 as usize] => guesses.push(id),
            None => {}
        }
    }
    guesses.into_iter().find(|&id| {
        let place = sets.place(id, 0);
        sets.first(place) != sets.first(Sets::BATCH) && sets.is_used_up(graph, &live, id)
    })
}

/// Dims of values that are the same.
struct Sets {
    /// Where the dims of each value begin.
    begins: Vec<usize>,
    /// Of each dim another that it is the same as, or itself.
    same: Vec<usize>,
}

impl Sets {
    const BATCH: usize = 0;

    fn of(graph: &Graph) -> Sets {
        let mut count = Sets::BATCH + 1;
        let mut begins = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            begins.push(count);
            count += node.ty.rank();
        }
        Sets { begins, same: (0..count).collect() }
    }

    fn place(&self, value: NodeId, dim: usize) -> usize {
        self.begins[value.0 as usize] + dim
    }

    /// Whether some value that is computed of `id` has lost its first dim; an output that only spreads it has not.
    fn is_used_up(&mut self, graph: &Graph, live: &[bool], id: NodeId) -> bool {
        let place = self.place(id, 0);
        let own = self.first(place);
        let mut carries = vec![false; graph.nodes.len()];
        carries[id.0 as usize] = true;
        for user in graph.ids().filter(|user| live[user.0 as usize]) {
            if !graph[user].operands.iter().any(|operand| carries[operand.0 as usize]) {
                continue;
            }
            let has = (0..graph.ty(user).rank()).any(|dim| {
                let place = self.place(user, dim);
                self.first(place) == own
            });
            if !has {
                return true;
            }
            carries[user.0 as usize] = true;
        }
        false
    }

    fn first(&mut self, mut place: usize) -> usize {
        while self.same[place] != place {
            self.same[place] = self.same[self.same[place]];
            place = self.same[place];
        }
        place
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.first(one), self.first(other));
        self.same[one.max(other)] = one.min(other);
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
        Rescale { from, to, input: Shape::from_slice(input), output: Shape::from_slice(output), proves: None }
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
        let check = |old: &[u64], wanted: &[u64], new: &[u64]| {
            rescale(8, 4, old, wanted).expand(new, wanted).map(|(s, g)| (s.to_vec(), g))
        };
        assert_eq!(check(&[1, 16], &[8, 16], &[1, 16]), Ok((vec![4, 16], true)));
        assert_eq!(check(&[8, 1], &[8, 16], &[4, 1]), Ok((vec![4, 16], false)));
        assert_eq!(check(&[1, 1, 8], &[1, 8, 8], &[1, 1, 8]), Ok((vec![1, 8, 8], false)));
    }
}
