//! suite
mod import;
mod ops;
