//! One persistent layout for the programs of a rank: evaluation finds every parameter where training has it.

use dcc_program::program::{Param, Place, Program};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Moves the persistent buffers of `program`: parameters to where `first` has them, all else behind what `first` keeps, which
/// is the state of its optimizer among others.
pub fn share(first: &Program, program: &mut Program) {
    let stands = |param: &Param| {
        let same = |other: &&Param| other.name == param.name && other.kind == param.kind && other.piece == param.piece;
        first.params.iter().find(same).map(|other| first.buffer(other.buffer).offset)
    };
    let mut moved: BTreeMap<u64, u64> = BTreeMap::new();
    for param in &program.params {
        if let Some(offset) = stands(param) {
            moved.insert(program.buffer(param.buffer).offset, offset);
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
}
