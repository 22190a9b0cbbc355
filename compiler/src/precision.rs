//! Which floats a graph computes in: `--dtype`.
//!
//! `whole` has everything in one. `mixed` has what costs time and memory, contractions and what lies between them, in a half type, and
//! the rest in f32; `gradients` sums the gradients of parameters, which stay f32 themselves, unless `stored` keeps them in the half type
//! too. Micikevicius et al. 2018, arXiv 1710.03740.

mod gradients;
mod mixed;
mod scale;
mod stored;
mod whole;

use dcc_program::DType;

pub use gradients::sums;
pub use mixed::narrow;
pub use scale::{LossScale, Scaler};
pub use stored::Stored;
pub use whole::retype;

/// Training in two precisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixed {
    /// What contractions read and write: bf16 or f16.
    pub half: DType,
    /// What gradients of parameters are accumulated and reduced in: f32, or `half`.
    pub gradients: DType,
    /// What parameters that contractions alone read are kept in: f32, or bf16, which updates round to stochastically.
    pub parameters: DType,
    /// Of f16, whose small numbers are few.
    pub scale: Option<LossScale>,
}

impl Mixed {
    /// For reports: `bf16, parameters f32, gradients f32`.
    pub fn text(&self) -> String {
        let scale = self.scale.map(|scale| format!(", loss scale from {}", scale.initial)).unwrap_or_default();
        let [half, parameters, gradients] = [self.half, self.parameters, self.gradients].map(DType::name);
        format!("{half}, parameters {parameters}, gradients {gradients}{scale}")
    }
}
