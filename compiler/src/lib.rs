//! The dcc compiler: from an ONNX graph to one training program per pipeline stage.

pub mod autodiff;
pub mod error;
pub mod graph;
pub mod import;
pub mod interp;
pub mod ops;
pub mod place;
pub mod plan;

pub use error::{Error, Result};
pub use graph::{Graph, NodeId};
