//! One persistent layout for the programs of a rank: evaluation finds every parameter where training has it.

use crate::error::{Error, Result};
use dcc_program::program::{Param, Place, Program};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Moves the persistent buffers of the program of `stage`: parameters to where its one of `training` has them, all else behind
/// what that keeps, which is the state of its optimizer among others.
/// Errors: a parameter that training changes, though not where `program` would read it.
pub fn share(training: &[Program], stage: usize, program: &mut Program) -> Result<()> {
    let first = &training[stage];
    let mut moved: BTreeMap<u64, u64> = BTreeMap::new();
    for param in &program.params {
        let (here, of) = (program.buffer(param.buffer), |other: &Param| other.name == param.name && other.kind == param.kind);
        let same = |other: &&Param| of(other) && other.piece == param.piece && first.buffer(other.buffer).ty == here.ty;
        if let Some(other) = first.params.iter().find(same) {
            moved.insert(here.offset, first.buffer(other.buffer).offset);
        } else if training.iter().flat_map(|program| &program.params).any(|other| other.trained && of(other)) {
            let what = format!("evaluation on stage {stage} would read initial values of a parameter that trains elsewhere");
            return Err(Error::internal(what).at(&param.name));
        }
    }
    let is_persistent = |place: Place| place == Place::Persistent;
    let mut starts: Vec<u64> = program.buffers.iter().filter(|b| is_persistent(b.place)).map(|b| b.offset).collect();
    starts.sort_unstable();
    starts.dedup();
    let mut end = first.persistent_bytes;
    for (at, &start) in starts.iter().enumerate() {
        if let Entry::Vacant(place) = moved.entry(start) {
            place.insert(end);
            end += starts.get(at + 1).copied().unwrap_or(program.persistent_bytes) - start;
        }
    }
    for buffer in program.buffers.iter_mut().filter(|buffer| is_persistent(buffer.place)) {
        buffer.offset = moved[&buffer.offset];
    }
    program.persistent_bytes = end;
    Ok(())
}
