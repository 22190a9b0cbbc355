//! suite
mod bad_models;
mod compile;
mod import;
mod meshes;
mod ops;
mod steps;
