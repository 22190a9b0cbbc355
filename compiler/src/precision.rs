//! Which floats a graph computes in: `--dtype`.
//!
//! `double` widens everything. `mixed` has what costs time and memory, contractions and what lies between them, in a half type, and
//! the rest in f32; `gradients` sums the gradients of parameters, which stay f32 themselves. Micikevicius et al. 2018, arXiv 1710.03740.

mod double;
mod gradients;
mod mixed;
mod scale;

use dcc_program::DType;

pub use double::widen;
pub use gradients::sums;
pub use mixed::narrow;
pub use scale::{LossScale, Scaler};

/// Training in two precisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixed {
    /// What contractions read and write: bf16 or f16.
    pub half: DType,
    /// What gradients of parameters are accumulated and reduced in: f32, or `half`.
    pub gradients: DType,
    /// Of f16, whose small numbers are few.
    pub scale: Option<LossScale>,
}

impl Mixed {
    /// For reports: `bf16, parameters f32, gradients f32`.
    pub fn text(&self) -> String {
        let scale = self.scale.map(|scale| format!(", loss scale from {}", scale.initial)).unwrap_or_default();
        format!("{}, parameters f32, gradients {}{scale}", self.half.name(), self.gradients.name())
    }
}
