//! The dcc compiler: from an ONNX graph to one training program per pipeline stage.

pub mod annotations;
pub mod autodiff;
pub mod chunk;
pub mod cli;
pub mod compile;
pub mod cost;
pub mod error;
pub mod fuse;
pub mod graph;
pub mod import;
pub mod interp;
pub mod loss;
pub mod lower;
pub mod numeric;
pub mod ops;
pub mod optimizer;

pub mod place;
pub mod plan;
pub mod precision;
pub mod recompute;

pub mod report;
pub mod rewrite;
pub mod schedule;
pub mod sources;
pub mod train;
pub mod trim;

pub use compile::{Compiled, Options, compile};
pub use error::{Error, Result};
pub use graph::{Graph, NodeId};
