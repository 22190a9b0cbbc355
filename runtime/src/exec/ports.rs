//! Where a program meets the outside: parameters, inputs, outputs, scalars.

use crate::error::Result;
use crate::slice::Slice;
use dcc_program::DType;
use dcc_program::mesh::Extent;
use dcc_program::program::{ParamKind, Piece, ScalarKind};
use std::ops::Range;

/// An input or output of the program on this rank.
#[derive(Clone, Debug)]
pub struct Port {
    pub name: String,
    pub dtype: DType,
    /// By microbatch: which box of the global tensor the rank's buffer holds. One where all microbatches have the same.
    pub slices: Vec<Slice>,
    /// Whether each microbatch has a part of its own.
    pub is_per_microbatch: bool,
}

/// A persistent tensor, or a piece of one, on this rank.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub name: String,
    pub kind: ParamKind,
    pub piece: Option<Piece>,
    pub trained: bool,
    pub dtype: DType,
    /// Global shape of the piece.
    pub shape: Vec<u64>,
    pub extents: Vec<Extent>,
    /// In the arena.
    pub range: Range<usize>,
    /// Whether no rank of this stage with a lower number holds the same part.
    pub is_first_replica: bool,
}

/// How a step gets inputs and hands out outputs. Each is called with port, microbatch, and the rank's buffer.
pub struct Io<'a> {
    pub fill: &'a mut dyn FnMut(&Port, u32, &mut [u8]) -> Result<()>,
    pub take: &'a mut dyn FnMut(&Port, u32, &[u8]) -> Result<()>,
}

/// What the runtime writes before a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    pub learning_rate: f64,
    /// From 1.
    pub step: i64,
    pub seed: i64,
}

impl Scalars {
    /// The value in memory, and how many of the bytes it takes.
    pub(super) fn bytes(&self, kind: ScalarKind, dtype: DType) -> ([u8; 8], usize) {
        let integer = match kind {
            ScalarKind::LearningRate => {
                let mut out = [0; 8];
                match dtype {
                    DType::F32 => out[..4].copy_from_slice(&(self.learning_rate as f32).to_ne_bytes()),
                    _ => out = self.learning_rate.to_ne_bytes(),
                }
                return (out, dtype.bytes() as usize);
            }
            ScalarKind::Step => self.step,
            ScalarKind::Seed => self.seed,
        };
        (integer.to_ne_bytes(), 8)
    }
}

impl Port {
    pub fn slice(&self, microbatch: u32) -> &Slice {
        self.slices.get(microbatch as usize).unwrap_or(&self.slices[0])
    }

    /// The value of a scalar output.
    pub fn scalar(&self, bytes: &[u8]) -> f64 {
        match self.dtype {
            DType::F32 => bytes.first_chunk().map_or(f64::NAN, |b| f64::from(f32::from_ne_bytes(*b))),
            DType::F64 => bytes.first_chunk().map_or(f64::NAN, |b| f64::from_ne_bytes(*b)),
            DType::I64 => bytes.first_chunk().map_or(f64::NAN, |b| i64::from_ne_bytes(*b) as f64),
            _ => f64::NAN,
        }
    }
}

impl Parameter {
    /// Shape of the tensor that this is, or is a piece of, by the size of the model's tensor on the dim that pieces divide. A state's
    /// other dims are its own.
    pub fn whole_shape(&self, tensor: &[u64]) -> Vec<u64> {
        let mut shape = self.shape.to_vec();
        if let Some(piece) = self.piece
            && let (Some(own), Some(&whole)) = (shape.get_mut(usize::from(piece.dim)), tensor.get(usize::from(piece.dim)))
        {
            *own = whole;
        }
        shape
    }

    /// The box that this rank holds of the whole tensor, of which the parameter may be a piece.
    pub fn slice(&self, whole: &[u64]) -> Slice {
        let shift = |dim: usize| self.piece.filter(|piece| usize::from(piece.dim) == dim).map_or(0, |piece| piece.start);
        Slice {
            global: whole.to_vec(),
            start: self.extents.iter().enumerate().map(|(dim, extent)| extent.offset + shift(dim)).collect(),
            extent: self.extents.iter().map(|extent| extent.valid).collect(),
            local: self.extents.iter().map(|extent| extent.block).collect(),
        }
    }
}
