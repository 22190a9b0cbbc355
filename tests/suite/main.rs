//! suite
mod bad_models;
mod compile;
mod import;
mod meshes;
mod onnx_nodes;
mod ops;
mod steps;
