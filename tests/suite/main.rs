//! suite
// Counts what the global allocator does.
#[allow(unsafe_code)]
mod alloc;
mod bad_models;
mod compile;
mod import;
mod meshes;
mod onnx_model;
mod onnx_nodes;
mod ops;
mod plans;
mod ranks;
mod steps;
