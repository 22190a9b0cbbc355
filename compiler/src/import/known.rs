//! Tensors known while compiling: shapes, positions, masks of constants.
//!
//! A dim along which a tensor repeats is stored once, so that a mask over a large batch stays small, and so that
//! `uniform` and `Build::node` see what it is made of. No parameter and no input ever reaches a `Known`.

use dcc_program::{DType, Shape};
use half::{bf16, f16};
use std::sync::Arc;

use super::tensor::Tensor;
use crate::error::{Error, Result};

/// Stored elements beyond which nothing is computed while compiling.
pub const BUDGET: u64 = 1 << 23;

/// Stored elements that are kept when nothing computes with them any more: up to here they may still be an output to compare.
pub(super) const KEPT: usize = 1 << 16;

/// A tensor of known elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    pub dtype: DType,
    pub shape: Shape,
    /// Per dim the size of `shape`, or 1 where all its elements are equal.
    stored: Shape,
    /// Row-major over `stored`: the f64 bits for floats, the i64 bits for integers and bool. What only changes the shape shares them.
    bits: Arc<Vec<u64>>,
}

impl Known {
    pub fn int(dtype: DType, value: i64) -> Known {
        Known { dtype, shape: Shape::new(), stored: Shape::new(), bits: vec![value as u64].into() }
    }

    /// A number in `dtype`: rounded, or truncated to an integer.
    pub fn scalar(dtype: DType, value: f64) -> Known {
        Known { dtype, shape: Shape::new(), stored: Shape::new(), bits: vec![encode(dtype, value)].into() }
    }

    /// A shape or a list of axes: i64, rank 1.
    pub fn ints(values: impl IntoIterator<Item = i64>) -> Known {
        let bits: Vec<u64> = values.into_iter().map(|value| value as u64).collect();
        let shape = Shape::from_slice(&[bits.len() as u64]);
        Known { dtype: DType::I64, stored: shape.clone(), shape, bits: bits.into() }.compressed()
    }

    /// `start + step * i` for the `count` first i.
    pub fn range(dtype: DType, start: f64, step: f64, count: u64) -> Option<Known> {
        Known::build(dtype, &[count], &[count], |at| encode(dtype, start + step * at[0] as f64)).map(Known::compressed)
    }

    /// A tensor without elements.
    pub fn nothing(dtype: DType, shape: &[u64]) -> Known {
        Known { dtype, shape: Shape::from_slice(shape), stored: Shape::from_slice(shape), bits: Vec::new().into() }
    }

    /// A list.
    pub fn floats(dtype: DType, values: impl IntoIterator<Item = f64>) -> Known {
        let bits: Vec<u64> = values.into_iter().map(|value| encode(dtype, value)).collect();
        let shape = Shape::from_slice(&[bits.len() as u64]);
        Known { dtype, stored: shape.clone(), shape, bits: bits.into() }.compressed()
    }

    /// Gives up many elements, which are not to be read again.
    pub(super) fn forget(&mut self) {
        if self.bits.len() > KEPT {
            self.bits = Vec::new().into();
        }
    }

    pub fn splat(&self, shape: &[u64]) -> Option<Known> {
        let bits = vec![self.uniform_bits()?].into();
        Some(Known { dtype: self.dtype, shape: Shape::from_slice(shape), stored: ones(shape.len()), bits })
    }

    /// Reads the elements. Errors: DCC0110 where the data are not at hand.
    pub fn read(tensor: &Tensor, bytes: &[u8]) -> Result<Known> {
        if tensor.elements() > BUDGET {
            return Err(Error::limit(format!("{} elements are too many to compute with while compiling", tensor.elements()))
                .at(format!("tensor `{}`", tensor.name)));
        }
        let width = tensor.dtype.bytes() as usize;
        let bits: Vec<u64> = bytes.chunks_exact(width).map(|chunk| decode(tensor.dtype, chunk)).collect();
        if bits.len() as u64 != tensor.elements() {
            return Err(Error::tensor(format!("{} elements for {:?}", bits.len(), tensor.shape.as_slice()))
                .at(format!("tensor `{}`", tensor.name)));
        }
        let known = Known { dtype: tensor.dtype, shape: tensor.shape.clone(), stored: tensor.shape.clone(), bits: bits.into() };
        Ok(known.compressed())
    }

    /// Little-endian bytes of all elements, or `None` beyond the budget.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let dense = self.dense()?;
        Some(dense.bits.iter().flat_map(|&bits| encode_bytes(self.dtype, bits)).collect())
    }

    /// All elements, for reference evaluation.
    pub fn to_tensor(&self) -> crate::interp::Tensor {
        let dense = self.dense().expect("what was read is within the budget");
        match self.dtype.is_float() {
            true => crate::interp::Tensor::floats(self.dtype, &self.shape, dense.numbers().collect()),
            false => crate::interp::Tensor::ints(self.dtype, &self.shape, dense.bits.iter().map(|&bits| bits as i64).collect()),
        }
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The dims along which elements differ.
    pub fn varying(&self) -> Vec<usize> {
        (0..self.rank()).filter(|&dim| self.stored[dim] != 1).collect()
    }

    /// The one value of all elements.
    pub fn uniform(&self) -> Option<f64> {
        self.uniform_bits().map(|bits| number(self.dtype, bits))
    }

    pub fn uniform_int(&self) -> Option<i64> {
        self.uniform_bits().filter(|_| !self.dtype.is_float()).map(|bits| bits as i64)
    }

    fn uniform_bits(&self) -> Option<u64> {
        (self.bits.len() == 1).then(|| self.bits[0])
    }

    /// Start and steps where each element is `start + Σ step * index` over `varying`; `None` for bools and unstructured data.
    pub fn affine(&self) -> Option<(f64, Vec<f64>)> {
        let dims = self.varying();
        if self.dtype == DType::Bool || dims.is_empty() || self.bits.len() < 2 {
            return None;
        }
        let numbers: Vec<f64> = self.numbers().collect();
        let inner = |position: usize| dims[position + 1..].iter().map(|&dim| self.stored[dim] as usize).product::<usize>();
        let strides: Vec<usize> = (0..dims.len()).map(inner).collect();
        let steps: Vec<f64> = strides.iter().map(|&stride| numbers[stride] - numbers[0]).collect();
        let expected = |mut at: usize| {
            let parts = strides.iter().zip(&steps).map(|(&stride, step)| {
                let index = at / stride;
                at %= stride;
                index as f64 * step
            });
            numbers[0] + parts.sum::<f64>()
        };
        (0..numbers.len()).all(|at| numbers[at] == expected(at)).then_some((numbers[0], steps))
    }

    /// The first and the number of the stored elements where these count up by one.
    pub fn consecutive(&self) -> Option<(i64, u64)> {
        let first = *self.bits.first()? as i64;
        let counts = self.bits.iter().enumerate().all(|(at, &bits)| bits as i64 == first.wrapping_add(at as i64));
        (counts && !self.dtype.is_float()).then_some((first, self.bits.len() as u64))
    }

    /// All elements of an integer tensor of rank 0 or 1.
    pub fn to_ints(&self) -> Option<Vec<i64>> {
        if self.dtype.is_float() || self.rank() > 1 {
            return None;
        }
        Some(self.dense()?.bits.iter().map(|&bits| bits as i64).collect())
    }

    /// The stored elements, where the tensor varies along at most one dim.
    pub fn line(&self) -> Option<Vec<f64>> {
        (self.varying().len() <= 1).then(|| self.numbers().collect())
    }

    /// The stored elements.
    pub fn numbers(&self) -> impl Iterator<Item = f64> {
        self.bits.iter().map(|&bits| number(self.dtype, bits))
    }

    pub(super) fn bits_at(&self, index: &[u64]) -> u64 {
        let place = |offset: u64, dim: usize| offset * self.stored[dim] + if self.stored[dim] == 1 { 0 } else { index[dim] };
        self.bits[(0..self.rank()).fold(0, place) as usize]
    }

    pub(super) fn stored(&self, dim: usize) -> u64 {
        self.stored[dim]
    }

    /// Computes each stored element from its index. `None` beyond the budget.
    pub(super) fn build(dtype: DType, shape: &[u64], stored: &[u64], mut f: impl FnMut(&[u64]) -> u64) -> Option<Known> {
        if shape.contains(&0) {
            return Some(Known::nothing(dtype, shape));
        }
        let count = stored.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim)).filter(|&count| count <= BUDGET)?;
        let mut index = vec![0; stored.len()];
        let mut bits = Vec::with_capacity(count as usize);
        for _ in 0..count {
            bits.push(f(&index));
            for dim in (0..stored.len()).rev() {
                index[dim] += 1;
                if index[dim] < stored[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        Some(Known { dtype, shape: Shape::from_slice(shape), stored: Shape::from_slice(stored), bits: bits.into() })
    }

    /// With every element stored.
    pub(super) fn dense(&self) -> Option<Known> {
        match self.stored == self.shape {
            true => Some(self.clone()),
            false => Known::build(self.dtype, &self.shape, &self.shape, |at| self.bits_at(at)),
        }
    }

    /// Stores dims along which the elements repeat once.
    pub(super) fn compressed(mut self) -> Known {
        if self.bits.is_empty() {
            return self;
        }
        for dim in 0..self.rank() {
            let size = self.stored[dim] as usize;
            let inner: usize = self.stored[dim + 1..].iter().product::<u64>() as usize;
            let mut blocks = self.bits.chunks_exact(size * inner);
            if size == 1 || !blocks.all(|block| block.chunks_exact(inner).all(|part| part == &block[..inner])) {
                continue;
            }
            let first = self.bits.chunks_exact(size * inner).flat_map(|block| block[..inner].iter().copied());
            self.bits = Arc::new(first.collect());
            self.stored[dim] = 1;
        }
        self
    }

    /// Without the dims that it does not vary along; `shape` is what is left.
    pub fn repeated_once(&self, shape: &[u64]) -> Known {
        self.with_shape(Shape::from_slice(shape), Shape::from_slice(shape))
    }

    /// As `build`, with these stored dims already known to be right.
    pub(super) fn with_shape(&self, shape: Shape, stored: Shape) -> Known {
        Known { dtype: self.dtype, shape, stored, bits: self.bits.clone() }
    }
}

pub(super) fn ones(rank: usize) -> Shape {
    Shape::from_elem(1, rank)
}

/// The number that `bits` of a `dtype` mean.
pub(super) fn number(dtype: DType, bits: u64) -> f64 {
    if dtype.is_float() { f64::from_bits(bits) } else { bits as i64 as f64 }
}

/// The bits of `value` rounded to `dtype`, but for f32, which is computed in f64 and rounded at run time, so that `--dtype f64`
/// loses nothing; integers truncate and saturate at i64, then wrap to their width.
pub(super) fn encode(dtype: DType, value: f64) -> u64 {
    match dtype {
        DType::F64 | DType::F32 => value.to_bits(),
        DType::F16 => f16::from_f64(value).to_f64().to_bits(),
        DType::BF16 => bf16::from_f64(value).to_f64().to_bits(),
        DType::Bool => u64::from(value != 0.0),
        _ => wrap(dtype, value as i64),
    }
}

/// An integer in the range of its type.
pub(super) fn wrap(dtype: DType, value: i64) -> u64 {
    (match dtype {
        DType::Bool => i64::from(value != 0),
        DType::U8 => i64::from(value as u8),
        DType::I8 => i64::from(value as i8),
        DType::U16 => i64::from(value as u16),
        DType::I16 => i64::from(value as i16),
        DType::U32 => i64::from(value as u32),
        DType::I32 => i64::from(value as i32),
        _ => value,
    }) as u64
}

fn decode(dtype: DType, chunk: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..chunk.len()].copy_from_slice(chunk);
    let word = u64::from_le_bytes(word);
    match dtype {
        DType::F64 => word,
        DType::F32 => f64::from(f32::from_bits(word as u32)).to_bits(),
        DType::F16 => f16::from_bits(word as u16).to_f64().to_bits(),
        DType::BF16 => bf16::from_bits(word as u16).to_f64().to_bits(),
        _ => wrap(dtype, word as i64),
    }
}

fn encode_bytes(dtype: DType, bits: u64) -> impl Iterator<Item = u8> {
    let word = match dtype {
        DType::F32 => u64::from((f64::from_bits(bits) as f32).to_bits()),
        DType::F16 => u64::from(f16::from_f64(f64::from_bits(bits)).to_bits()),
        DType::BF16 => u64::from(bf16::from_f64(f64::from_bits(bits)).to_bits()),
        _ => bits,
    };
    word.to_le_bytes().into_iter().take(dtype.bytes() as usize)
}
