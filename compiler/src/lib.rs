//! The dcc compiler.

pub mod error;
pub mod import;

pub use error::{Error, Result};
