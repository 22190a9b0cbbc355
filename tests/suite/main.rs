//! The tests of the whole: compiler, programs, ranks and tree.

mod activations;
// Counts what the global allocator does.
#[allow(unsafe_code)]
mod alloc;
mod annotations;
#[cfg(target_os = "linux")]
mod artifact;
mod bad_models;
#[cfg(target_os = "linux")]
mod bench;
#[cfg(target_os = "linux")]
mod checkpoints;
#[cfg(target_os = "linux")]
mod cli;
mod command;
mod compile;
#[cfg(target_os = "linux")]
mod config;
#[cfg(target_os = "linux")]
mod cuda;
mod damage;
mod deep;
mod early;
mod eval;
#[cfg(target_os = "linux")]
mod exporters;
mod files;
mod gate;
mod golden;
mod hostile;
mod import;
#[cfg(target_os = "linux")]
mod killed;
#[cfg(target_os = "linux")]
mod memory;
mod meshes;
mod microbatches;
mod mixed;
mod modules;
mod numbers;
mod numeric;
mod onnx_model;
mod onnx_nodes;
mod ops;
mod optimizers;
mod overlap;
mod parameters;
mod pipeline;
#[cfg(target_os = "linux")]
mod places;
mod plans;
mod properties;
mod ranks;
mod readme;
#[cfg(target_os = "linux")]
mod reshard;
mod rewriting;
mod running;
mod seconds;
mod slopes;
mod stand_in;
mod steps;
mod tidy;
mod tolerance;
mod unrolled;
#[cfg(target_os = "linux")]
mod verify;
mod windows;
