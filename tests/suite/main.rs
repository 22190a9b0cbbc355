//! suite
mod import;
