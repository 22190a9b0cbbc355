//! Runs one rank's program of a dcc artifact: devices, collectives, launch, data, checkpoints.

pub mod comm;
pub mod error;
pub mod lr;
