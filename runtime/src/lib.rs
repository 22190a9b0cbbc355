//! Runs one rank's program of a dcc artifact: devices, collectives, launch, data, checkpoints.

pub mod checkpoint;
pub mod comm;
#[cfg(target_os = "linux")]
pub mod command;
// Hands kernels raw memory of the arena.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub mod cpu;
// Calls NVIDIA's libraries.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub mod cuda;
pub mod data;
#[cfg(target_os = "linux")]
pub mod device;
pub mod error;
#[cfg(target_os = "linux")]
pub mod exec;
pub mod init;
#[cfg(target_os = "linux")]
pub mod launch;
#[cfg(target_os = "linux")]
mod library;
pub mod lr;
pub mod metrics;
pub mod parallel;
pub mod places;
#[cfg(target_os = "linux")]
pub mod run;
// Masks signals, which no safe interface offers.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub mod signal;
pub mod slice;
