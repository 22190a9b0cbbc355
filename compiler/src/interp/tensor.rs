//! Tensors of the reference evaluation: any float dtype as f64, any integer and bool as i64, in row-major order.

use dcc_program::{DType, Shape, TensorType};

/// Values of one global tensor, or of a shard of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Shape,
    pub data: Data,
}

/// The storage that fits the dtype. A u64 stands as the i64 of the same bits.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    Float(Vec<f64>),
    Int(Vec<i64>),
}

/// How float results are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Rounded to the dtype after each op, sums accumulated in f64.
    Declared,
    /// As f64, whatever the dtype.
    Exact,
}

impl Tensor {
    /// Panics unless `values` fills the shape and the dtype is a float.
    pub fn floats(dtype: DType, shape: &[u64], values: Vec<f64>) -> Tensor {
        assert!(dtype.is_float(), "floats of {}", dtype.name());
        Tensor::new(dtype, Shape::from_slice(shape), Data::Float(values))
    }

    /// Panics unless `values` fills the shape and the dtype is an integer or bool.
    pub fn ints(dtype: DType, shape: &[u64], values: Vec<i64>) -> Tensor {
        assert!(!dtype.is_float(), "integers of {}", dtype.name());
        Tensor::new(dtype, Shape::from_slice(shape), Data::Int(values))
    }

    pub(crate) fn new(dtype: DType, shape: Shape, data: Data) -> Tensor {
        let len = match &data {
            Data::Float(v) => v.len(),
            Data::Int(v) => v.len(),
        };
        assert_eq!(len as u64, shape.iter().product::<u64>(), "values of {:?}", shape.as_slice());
        Tensor { dtype, shape, data }
    }

    /// `value` (truncated for integers) everywhere.
    pub fn filled(ty: &TensorType, value: f64) -> Tensor {
        let len = ty.elements() as usize;
        let data = if ty.dtype.is_float() { Data::Float(vec![value; len]) } else { Data::Int(vec![value as i64; len]) };
        Tensor::new(ty.dtype, ty.shape.clone(), data)
    }

    pub fn zeros(ty: &TensorType) -> Tensor {
        Tensor::filled(ty, 0.0)
    }

    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.iter().copied())
    }

    pub fn len(&self) -> usize {
        match &self.data {
            Data::Float(v) => v.len(),
            Data::Int(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values of a float tensor.
    pub fn f64s(&self) -> &[f64] {
        match &self.data {
            Data::Float(v) => v,
            Data::Int(_) => panic!("{} is no float", self.dtype.name()),
        }
    }

    /// The values of an integer or bool tensor.
    pub fn i64s(&self) -> &[i64] {
        match &self.data {
            Data::Int(v) => v,
            Data::Float(_) => panic!("{} is no integer", self.dtype.name()),
        }
    }

    /// All values as f64.
    pub fn to_f64s(&self) -> Vec<f64> {
        match &self.data {
            Data::Float(v) => v.clone(),
            Data::Int(v) if self.dtype == DType::U64 => v.iter().map(|&x| x as u64 as f64).collect(),
            Data::Int(v) => v.iter().map(|&x| x as f64).collect(),
        }
    }

    pub fn strides(&self) -> Vec<usize> {
        strides(&self.shape)
    }

    /// The tensor of type `result` whose element at an index is this one's at `base + Σ index·stride`.
    pub(crate) fn read(&self, result: &TensorType, base: usize, strides: &[isize]) -> Tensor {
        let data = match &self.data {
            Data::Float(v) => Data::Float(offsets(&result.shape, base, strides).map(|o| v[o]).collect()),
            Data::Int(v) => Data::Int(offsets(&result.shape, base, strides).map(|o| v[o]).collect()),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    /// Writes this tensor's elements into `target` at `base + Σ index·stride`.
    pub(crate) fn write(&self, target: &mut Tensor, base: usize, strides: &[isize]) {
        let at = offsets(&self.shape, base, strides);
        match (&self.data, &mut target.data) {
            (Data::Float(from), Data::Float(to)) => from.iter().zip(at).for_each(|(&x, o)| to[o] = x),
            (Data::Int(from), Data::Int(to)) => from.iter().zip(at).for_each(|(&x, o)| to[o] = x),
            _ => panic!("{} written into {}", self.dtype.name(), target.dtype.name()),
        }
    }

    /// Floats as the dtype holds them under `precision`.
    pub(crate) fn rounded(mut self, precision: Precision) -> Tensor {
        if precision == Precision::Exact {
            return self;
        }
        if let Data::Float(values) = &mut self.data {
            let dtype = self.dtype;
            match dtype {
                DType::F32 => values.iter_mut().for_each(|x| *x = f64::from(*x as f32)),
                DType::F16 => values.iter_mut().for_each(|x| *x = half::f16::from_f64(*x).to_f64()),
                DType::BF16 => values.iter_mut().for_each(|x| *x = half::bf16::from_f64(*x).to_f64()),
                _ => {}
            }
        }
        self
    }
}

/// Row-major strides, in elements.
pub(crate) fn strides(shape: &[u64]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d] as usize;
    }
    strides
}

/// `x` wrapped to the width of the integer `dtype`.
pub(crate) fn wrap(dtype: DType, x: i64) -> i64 {
    match dtype {
        DType::Bool => i64::from(x != 0),
        DType::U8 => i64::from(x as u8),
        DType::I8 => i64::from(x as i8),
        DType::U16 => i64::from(x as u16),
        DType::I16 => i64::from(x as i16),
        DType::U32 => i64::from(x as u32),
        DType::I32 => i64::from(x as i32),
        _ => x,
    }
}

/// `base + Σ index·stride` for each index of `shape`, in row-major order.
pub(crate) fn offsets(shape: &[u64], base: usize, strides: &[isize]) -> Offsets {
    assert_eq!(shape.len(), strides.len(), "a stride per dim");
    // Dims that continue one another run as one: the innermost is what the loop is fast at.
    let mut dims: Vec<(usize, isize)> = Vec::new();
    for (&size, &stride) in shape.iter().zip(strides) {
        match dims.last_mut() {
            _ if size == 1 => {}
            Some((outer, above)) if *above == stride * size as isize => (*outer, *above) = (*outer * size as usize, stride),
            _ => dims.push((size as usize, stride)),
        }
    }
    let left = shape.iter().product::<u64>() as usize;
    let (inner, stride) = dims.pop().unwrap_or((1, 0));
    Offsets { index: vec![0; dims.len()], dims, inner, stride, row: base as isize, column: 0, left }
}

/// See [`offsets`].
pub(crate) struct Offsets {
    /// Size and stride of all dims but the innermost.
    dims: Vec<(usize, isize)>,
    index: Vec<usize>,
    inner: usize,
    stride: isize,
    /// Offset of the innermost dim's element 0.
    row: isize,
    column: usize,
    left: usize,
}

impl Iterator for Offsets {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        if self.column == self.inner {
            self.column = 0;
            for d in (0..self.dims.len()).rev() {
                let (size, stride) = self.dims[d];
                self.index[d] += 1;
                self.row += stride;
                if self.index[d] < size {
                    break;
                }
                self.row -= stride * size as isize;
                self.index[d] = 0;
            }
        }
        let offset = self.row + self.stride * self.column as isize;
        self.column += 1;
        self.left -= 1;
        Some(offset as usize)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Offsets {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_follow_strides() {
        assert_eq!(offsets(&[2, 3], 0, &[3, 1]).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(offsets(&[3, 2], 0, &[1, 3]).collect::<Vec<_>>(), [0, 3, 1, 4, 2, 5]);
        assert_eq!(offsets(&[2, 1, 2], 5, &[0, 9, -1]).collect::<Vec<_>>(), [5, 4, 5, 4]);
        assert_eq!(offsets(&[], 4, &[]).collect::<Vec<_>>(), [4]);
        assert_eq!(offsets(&[2, 0], 0, &[0, 1]).count(), 0);
    }

    #[test]
    fn values_round_to_their_dtype() {
        let x = Tensor::floats(DType::F32, &[1], vec![0.1]);
        assert_eq!(x.clone().rounded(Precision::Declared).f64s(), [f64::from(0.1f32)]);
        assert_eq!(x.rounded(Precision::Exact).f64s(), [0.1]);
    }
}
