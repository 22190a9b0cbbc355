//! suite
mod bad_models;
mod import;
mod meshes;
mod ops;
mod steps;
