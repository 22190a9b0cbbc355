//! Arithmetic and movement of known tensors. Every function gives `None` where the result would exceed the budget.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce, Shape};

use super::known::{Known, encode, number, ones, wrap};

impl Known {
    pub fn cast(&self, dtype: DType) -> Option<Known> {
        self.map(dtype, |bits| match (self.dtype.is_float(), dtype.is_float()) {
            (false, false) => wrap(dtype, bits as i64),
            _ => encode(dtype, number(self.dtype, bits)),
        })
    }

    /// Elementwise on floats and integers; `None` too for what has no integer meaning.
    pub fn unary(&self, op: UnaryOp) -> Option<Known> {
        if !FOLDED.contains(&op) {
            return None;
        }
        if matches!(op, UnaryOp::IsNan | UnaryOp::IsInf) {
            let test = |value: f64| if op == UnaryOp::IsNan { value.is_nan() } else { value.is_infinite() };
            return self.map(DType::Bool, |bits| u64::from(test(number(self.dtype, bits))));
        }
        if self.dtype.is_float() {
            // Of a number there is no `not`: the graph refuses the node.
            if op == UnaryOp::Not {
                return None;
            }
            return self.map(self.dtype, |bits| encode(self.dtype, unary(op, f64::from_bits(bits))));
        }
        let apply: fn(i64) -> i64 = match op {
            UnaryOp::Neg => i64::wrapping_neg,
            UnaryOp::Abs => i64::wrapping_abs,
            UnaryOp::Sign => i64::signum,
            UnaryOp::Not if self.dtype == DType::Bool => |value| i64::from(value == 0),
            UnaryOp::Not => |value| !value,
            _ => return None,
        };
        self.map(self.dtype, |bits| wrap(self.dtype, apply(bits as i64)))
    }

    /// Both have the same shape and dtype.
    pub fn binary(&self, op: BinaryOp, other: &Known) -> Option<Known> {
        let dtype = self.dtype;
        if dtype.is_float() {
            return self.zip(other, dtype, |a, b| encode(dtype, binary(op, f64::from_bits(a), f64::from_bits(b))));
        }
        self.zip(other, dtype, |a, b| wrap(dtype, int_binary(op, a as i64, b as i64)))
    }

    pub fn compare(&self, op: CompareOp, other: &Known) -> Option<Known> {
        let float = self.dtype.is_float();
        self.zip(other, DType::Bool, |a, b| {
            let order = match float {
                true => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
                false => Some((a as i64).cmp(&(b as i64))),
            };
            u64::from(match op {
                CompareOp::Eq => order.is_some_and(|order| order.is_eq()),
                CompareOp::Ne => !order.is_some_and(|order| order.is_eq()),
                CompareOp::Lt => order.is_some_and(|order| order.is_lt()),
                CompareOp::Le => order.is_some_and(|order| order.is_le()),
                CompareOp::Gt => order.is_some_and(|order| order.is_gt()),
                CompareOp::Ge => order.is_some_and(|order| order.is_ge()),
            })
        })
    }

    /// `self` is bool; all have the same shape.
    pub fn select(&self, yes: &Known, no: &Known) -> Option<Known> {
        let stored: Shape = (0..self.rank()).map(|d| joint([self.stored(d), yes.stored(d), no.stored(d)])).collect();
        let pick = |at: &[u64]| if self.bits_at(at) != 0 { yes.bits_at(at) } else { no.bits_at(at) };
        Known::build(yes.dtype, &self.shape, &stored, pick).map(Known::compressed)
    }

    /// NumPy broadcasting to a shape that fits.
    pub fn broadcast(&self, shape: &[u64]) -> Known {
        let skip = shape.len() - self.rank();
        let stored = (0..shape.len()).map(|dim| if dim < skip { 1 } else { self.stored(dim - skip) });
        self.with_shape(Shape::from_slice(shape), stored.collect())
    }

    /// The same number of elements under another shape.
    pub fn reshape(&self, shape: &[u64]) -> Option<Known> {
        if self.uniform().is_some() {
            return self.splat(shape);
        }
        let from: Vec<usize> = (0..self.rank()).filter(|&dim| self.shape[dim] != 1).collect();
        let to: Vec<usize> = (0..shape.len()).filter(|&dim| shape[dim] != 1).collect();
        if from.iter().map(|&dim| self.shape[dim]).eq(to.iter().map(|&dim| shape[dim])) {
            let mut stored = ones(shape.len());
            for (&from, &to) in from.iter().zip(&to) {
                stored[to] = self.stored(from);
            }
            return Some(self.with_shape(Shape::from_slice(shape), stored));
        }
        let dense = self.dense()?;
        Some(dense.with_shape(Shape::from_slice(shape), Shape::from_slice(shape)).compressed())
    }

    pub fn transpose(&self, perm: &[usize]) -> Option<Known> {
        let shape: Shape = perm.iter().map(|&dim| self.shape[dim]).collect();
        let stored: Shape = perm.iter().map(|&dim| self.stored(dim)).collect();
        let mut source = vec![0; perm.len()];
        Known::build(self.dtype, &shape, &stored, |at| {
            perm.iter().zip(at).for_each(|(&dim, &index)| source[dim] = index);
            self.bits_at(&source)
        })
    }

    /// Element i of dim d of the result is element `start[d] + i * step[d]`.
    pub fn slice(&self, start: &[i64], step: &[i64], shape: &[u64]) -> Option<Known> {
        let stored: Shape = (0..self.rank()).map(|dim| if self.stored(dim) == 1 { 1 } else { shape[dim] }).collect();
        let known = Known::build(self.dtype, shape, &stored, |at| {
            let source: Shape = at.iter().enumerate().map(|(d, &i)| (start[d] + i as i64 * step[d]) as u64).collect();
            self.bits_at(&source)
        });
        known.map(Known::compressed)
    }

    /// The parts one after the other along `dim`.
    pub fn concatenate(parts: &[&Known], dim: usize) -> Option<Known> {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        let widest = |d: usize| joint(parts.iter().map(|part| part.stored(d)));
        let stored: Shape = (0..shape.len()).map(|d| if d == dim { shape[d] } else { widest(d) }).collect();
        let known = Known::build(parts[0].dtype, &shape, &stored, |at| {
            let mut source = Shape::from_slice(at);
            for part in parts {
                if source[dim] < part.shape[dim] {
                    return part.bits_at(&source);
                }
                source[dim] -= part.shape[dim];
            }
            0
        });
        known.map(Known::compressed)
    }

    /// ONNX Gather: slices along `axis` at `indices`, which are in range or negative from the end.
    pub fn gather(&self, axis: usize, indices: &Known) -> Option<Known> {
        let (size, inner) = (self.shape[axis], indices.rank());
        let join = |mine: &dyn Fn(usize) -> u64, theirs: &dyn Fn(usize) -> u64| -> Shape {
            let tail = (axis + 1..self.rank()).map(mine);
            (0..axis).map(mine).chain((0..inner).map(theirs)).chain(tail).collect()
        };
        let shape = join(&|dim| self.shape[dim], &|dim| indices.shape[dim]);
        let spread = self.stored(axis) != 1;
        let stored = join(&|dim| self.stored(dim), &|dim| if spread { indices.stored(dim) } else { 1 });
        let known = Known::build(self.dtype, &shape, &stored, |at| {
            let index = indices.bits_at(&at[axis..axis + inner]) as i64;
            let mut source = Shape::from_slice(&at[..axis]);
            source.push(wrap_index(index, size));
            source.extend_from_slice(&at[axis + inner..]);
            self.bits_at(&source)
        });
        known.map(Known::compressed)
    }

    /// ONNX GatherND without batch dims: the last dim of `indices` indexes the first dims.
    pub fn gather_nd(&self, indices: &Known) -> Option<Known> {
        let outer = indices.rank() - 1;
        let depth = indices.shape[outer] as usize;
        let shape: Shape = indices.shape[..outer].iter().chain(&self.shape[depth..]).copied().collect();
        let tail = (depth..self.rank()).map(|dim| self.stored(dim));
        let stored: Shape = (0..outer).map(|dim| indices.stored(dim)).chain(tail).collect();
        let known = Known::build(self.dtype, &shape, &stored, |at| {
            let mut index = Shape::from_slice(&at[..outer]);
            index.push(0);
            let mut source = Shape::new();
            for dim in 0..depth {
                index[outer] = dim as u64;
                source.push(wrap_index(indices.bits_at(&index) as i64, self.shape[dim]));
            }
            source.extend_from_slice(&at[outer..]);
            self.bits_at(&source)
        });
        known.map(Known::compressed)
    }

    /// Running sum along `dim`.
    pub fn cumsum(&self, dim: usize, exclusive: bool, reverse: bool) -> Option<Known> {
        let size = self.shape[dim];
        let mut stored: Shape = (0..self.rank()).map(|d| self.stored(d)).collect();
        stored[dim] = size;
        let mut sums = Known::build(self.dtype, &self.shape, &stored, |at| self.bits_at(at))?.numbers().collect::<Vec<f64>>();
        let inner = stored[dim + 1..].iter().product::<u64>() as usize;
        for block in sums.chunks_exact_mut((size as usize * inner).max(1)) {
            for column in 0..inner {
                let mut sum = 0.0;
                for step in 0..size as usize {
                    let at = if reverse { size as usize - 1 - step } else { step } * inner + column;
                    let value = block[at];
                    block[at] = if exclusive { sum } else { sum + value };
                    sum += value;
                }
            }
        }
        let mut sums = sums.into_iter();
        let known = Known::build(self.dtype, &self.shape, &stored, |_| encode(self.dtype, sums.next().unwrap_or(0.0)));
        known.map(Known::compressed)
    }

    /// Reduces `dims` to size 1.
    pub fn reduce(&self, op: Reduce, dims: &[usize]) -> Option<Known> {
        let shape: Shape = (0..self.rank()).map(|d| if dims.contains(&d) { 1 } else { self.shape[d] }).collect();
        let stored: Shape = (0..self.rank()).map(|d| if dims.contains(&d) { 1 } else { self.stored(d) }).collect();
        let full: Shape = (0..self.rank()).map(|d| if dims.contains(&d) { self.shape[d] } else { 1 }).collect();
        let known = Known::build(self.dtype, &shape, &stored, |at| {
            let part = Known::build(self.dtype, &full, &full, |inner| {
                let source: Shape = at.iter().zip(inner).map(|(a, b)| a + b).collect();
                self.bits_at(&source)
            });
            let part = part.unwrap_or_else(|| self.clone());
            let numbers = part.numbers();
            encode(
                self.dtype,
                match op {
                    Reduce::Sum => numbers.sum(),
                    Reduce::Prod => numbers.product(),
                    Reduce::Max => numbers.fold(f64::NEG_INFINITY, f64::max),
                    Reduce::Min => numbers.fold(f64::INFINITY, f64::min),
                },
            )
        });
        known.filter(|_| self.elements() <= super::known::BUDGET)
    }

    /// What changes nothing in a reduction, and is that of nothing: the least value for a maximum, the greatest for a minimum.
    pub fn neutral(op: Reduce, dtype: DType) -> Known {
        let bits = 8 * dtype.bytes() as u32;
        let (low, high) = match dtype {
            DType::U8 | DType::U16 | DType::U32 => (0, (1_i64 << bits) - 1),
            DType::U64 => (0, -1),
            DType::Bool => (0, 1),
            _ => (i64::MIN >> (64 - bits), i64::MAX >> (64 - bits)),
        };
        match (op, dtype.is_float()) {
            (Reduce::Sum, _) => Known::int(dtype, 0).cast(dtype).expect("one number"),
            (Reduce::Prod, true) => Known::scalar(dtype, 1.0),
            (Reduce::Prod, false) => Known::int(dtype, 1),
            (Reduce::Max, true) => Known::scalar(dtype, f64::NEG_INFINITY),
            (Reduce::Max, false) => Known::int(dtype, low),
            (Reduce::Min, true) => Known::scalar(dtype, f64::INFINITY),
            (Reduce::Min, false) => Known::int(dtype, high),
        }
    }

    fn map(&self, dtype: DType, f: impl Fn(u64) -> u64) -> Option<Known> {
        let stored: Shape = (0..self.rank()).map(|dim| self.stored(dim)).collect();
        Known::build(dtype, &self.shape, &stored, |at| f(self.bits_at(at))).map(Known::compressed)
    }

    fn zip(&self, other: &Known, dtype: DType, f: impl Fn(u64, u64) -> u64) -> Option<Known> {
        let stored: Shape = (0..self.rank()).map(|dim| joint([self.stored(dim), other.stored(dim)])).collect();
        Known::build(dtype, &self.shape, &stored, |at| f(self.bits_at(at), other.bits_at(at))).map(Known::compressed)
    }
}

/// The functions that constants of exported graphs go through; the others are left to run time.
const FOLDED: &[UnaryOp] = &[
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Sign,
    UnaryOp::Exp,
    UnaryOp::Log,
    UnaryOp::Sqrt,
    UnaryOp::Rsqrt,
    UnaryOp::Floor,
    UnaryOp::Ceil,
    UnaryOp::RoundEven,
    UnaryOp::Not,
    UnaryOp::IsNan,
    UnaryOp::IsInf,
];

/// How many elements to store along a dim where the operands store these: none if one of them is empty.
fn joint(stored: impl IntoIterator<Item = u64>) -> u64 {
    stored.into_iter().reduce(|a, b| if a == 0 || b == 0 { 0 } else { a.max(b) }).unwrap_or(1)
}

/// Negative indices count from the end; what lies outside is clamped, for the caller has checked.
fn wrap_index(index: i64, size: u64) -> u64 {
    let index = if index < 0 { index + size as i64 } else { index };
    index.clamp(0, size.saturating_sub(1) as i64) as u64
}

fn unary(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign => {
            if x == 0.0 || x.is_nan() {
                x
            } else {
                x.signum()
            }
        }
        UnaryOp::Exp => x.exp(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::RoundEven => x.round_ties_even(),
        _ => unreachable!("`FOLDED` lists what is above and what `Known::unary` treats itself"),
    }
}

fn binary(op: BinaryOp, a: f64, b: f64) -> f64 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Rem => a % b,
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Max => {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else {
                a.max(b)
            }
        }
        BinaryOp::Min => {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else {
                a.min(b)
            }
        }
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::RoundStochastic => f64::NAN,
    }
}

fn int_binary(op: BinaryOp, a: i64, b: i64) -> i64 {
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Div => {
            if b == 0 {
                0
            } else {
                a.wrapping_div(b)
            }
        }
        BinaryOp::Rem => {
            if b == 0 {
                0
            } else {
                a.wrapping_rem(b)
            }
        }
        BinaryOp::Pow => a.wrapping_pow(u32::try_from(b).unwrap_or(0)),
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
        BinaryOp::And => a & b,
        BinaryOp::Or => a | b,
        BinaryOp::Xor => a ^ b,
        // No operator of ONNX.
        BinaryOp::RoundStochastic => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ints(values: &[i64], shape: &[u64]) -> Known {
        Known::ints(values.iter().copied()).reshape(shape).expect("fits")
    }

    #[test]
    fn a_repeated_dim_is_stored_once() {
        let rows = ints(&[0, 1, 2, 3], &[1, 4]).broadcast(&[1 << 40, 4]);
        assert_eq!(rows.varying(), [1]);
        let sum = rows.binary(BinaryOp::Add, &rows).expect("four elements");
        assert_eq!((sum.shape.as_slice(), sum.affine()), (&[1 << 40, 4][..], Some((0.0, vec![2.0]))));
        assert_eq!(rows.cumsum(1, false, false).expect("small").line(), Some(vec![0.0, 1.0, 3.0, 6.0]));
    }

    #[test]
    fn positions_of_two_dims_stay_affine() {
        let (rows, columns) = (ints(&[0, 8, 16], &[3, 1]).broadcast(&[3, 8]), Known::range(DType::I64, 0.0, 1.0, 8));
        let columns = columns.expect("small").broadcast(&[3, 8]);
        let flat = rows.binary(BinaryOp::Add, &columns).expect("small");
        assert_eq!(flat.affine(), Some((0.0, vec![8.0, 1.0])));
        assert_eq!(flat.consecutive(), Some((0, 24)));
    }

    #[test]
    fn nothing_with_something_is_nothing() {
        let (empty, one) = (ints(&[], &[0]), Known::int(DType::I64, 1).broadcast(&[0]));
        assert_eq!(empty.binary(BinaryOp::Add, &one).expect("empty").numbers().count(), 0);
        assert_eq!(one.select(&empty, &one).expect("empty").numbers().count(), 0);
    }

    #[test]
    fn movement_of_known_tensors() {
        let x = ints(&[0, 1, 2, 3, 4, 5], &[2, 3]);
        assert_eq!(x.transpose(&[1, 0]).expect("small").numbers().collect::<Vec<_>>(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(x.slice(&[1, 2], &[1, -1], &[1, 3]).expect("small").numbers().collect::<Vec<_>>(), [5.0, 4.0, 3.0]);
        assert_eq!(x.gather(1, &Known::ints([-1])).expect("small").numbers().collect::<Vec<_>>(), [2.0, 5.0]);
        assert_eq!(x.reduce(Reduce::Max, &[0]).expect("small").numbers().collect::<Vec<_>>(), [3.0, 4.0, 5.0]);
    }
}
