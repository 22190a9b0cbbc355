//! suite
mod import;
mod meshes;
mod ops;
