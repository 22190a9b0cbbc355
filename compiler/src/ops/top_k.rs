//! `top_k`: where the first elements of each row are, in order. Values are gathered from there, so that their gradient is a scatter.

use super::example::{Example, floats, ints};
use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use crate::interp::{Data, Tensor, strides};
use dcc_program::{DType, TensorType};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// The indices, i64, of the `k` first elements along `dim`, in order; all of them with `k` the size of `dim`. Of equal elements the first
/// comes first; NaN is above all others, as in PyTorch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TopK {
    pub dim: u8,
    pub k: u64,
    /// From the largest to the smallest.
    pub largest: bool,
}

impl TopK {
    /// The `k` first of rows of `size` elements `inner` apart, by `order`, which is ascending.
    fn choose<T: Copy>(&self, x: &[T], [size, inner, k]: [usize; 3], order: impl Fn(T, T) -> Ordering) -> Vec<i64> {
        let block = (size * inner).max(1);
        let mut out = vec![0; x.len() / block * k * inner];
        for (n, row) in x.chunks_exact(block).enumerate() {
            for column in 0..inner {
                let at = |i: usize| row[i * inner + column];
                let mut places: Vec<usize> = (0..size).collect();
                places.sort_by(|&a, &b| if self.largest { order(at(b), at(a)) } else { order(at(a), at(b)) });
                for (place, &i) in places.iter().take(k).enumerate() {
                    out[(n * k + place) * inner + column] = i as i64;
                }
            }
        }
        out
    }
}

impl OpDef for TopK {
    const NAME: &'static str = "top_k";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let dim = usize::from(self.dim);
        if dim >= x.rank() || self.k > x.shape[dim] {
            return Err(Error::shape(format!("top_k of {} along dim {dim} of {:?}", self.k, x.shape.as_slice())));
        }
        if x.dtype == DType::Bool {
            return Err(Error::dtype("top_k of bool"));
        }
        let mut shape = x.shape.clone();
        shape[dim] = self.k;
        Ok(TensorType::new(DType::I64, shape))
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        Rule::shifted(result.rank(), 1, |dim| dim == usize::from(self.dim))
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let x = operands[0];
        let dim = usize::from(self.dim);
        let row = [x.shape[dim] as usize, strides(&x.shape)[dim], result.shape[dim] as usize];
        let indices = match &x.data {
            Data::Float(values) => {
                self.choose(values, row, |a, b| a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan())))
            }
            Data::Int(values) if x.dtype == DType::U64 => self.choose(values, row, |a, b| (a as u64).cmp(&(b as u64))),
            Data::Int(values) => self.choose(values, row, |a, b| a.cmp(&b)),
        };
        Tensor::ints(DType::I64, &result.shape, indices)
    }

    fn examples() -> Vec<Example> {
        let of = |dim, k, largest, x| Example::new(TopK { dim, k, largest }, [x]);
        let unsigned = Tensor::ints(DType::U64, &[4], vec![3, -1, 0, 3]);
        let floats_with_nan = [0.5, f64::NAN, f64::INFINITY, -0.0, 0.0, f64::NEG_INFINITY, f64::NAN, 0.5];
        vec![
            of(1, 2, true, floats(1, &[3, 5])),
            of(0, 5, false, floats(1, &[5, 3])),
            of(1, 3, false, floats(1, &[2, 5, 3])),
            // With ties.
            of(1, 7, true, ints(-2, 2, 1, &[3, 7])),
            of(0, 3, true, unsigned),
            of(0, 8, true, Tensor::floats(DType::F64, &[8], floats_with_nan.to_vec())),
            of(0, 8, false, Tensor::floats(DType::F64, &[8], floats_with_nan.to_vec())),
        ]
    }
}
