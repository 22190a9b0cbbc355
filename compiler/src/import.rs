//! ONNX.

pub mod proto;
