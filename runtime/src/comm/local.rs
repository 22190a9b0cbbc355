//! Ranks as threads of one process: the same engine as between processes, over private memory.

use super::Patience;
use super::peer::Peer;
use super::segment::{Layout, PAGE, Segment};
use super::shm::Mapping;
use crate::error::Result;
use std::sync::Arc;

/// One end per rank; each goes to its own thread.
pub fn world(layout: &Layout, patience: Patience) -> Result<Vec<Peer>> {
    let control = Mapping::anonymous(layout.control_bytes())?;
    let arena = |&bytes: &usize| Ok(Mapping::anonymous(bytes.max(PAGE).next_multiple_of(PAGE))?.in_huge_pages());
    let arenas = layout.arena_bytes.iter().map(arena);
    let arenas = arenas.collect::<Result<Vec<Mapping>>>()?;
    let segment = Arc::new(Segment::new(layout.clone(), control, arenas));
    segment.initialize();
    Ok((0..layout.world()).map(|rank| Peer::new(segment.clone(), rank, patience)).collect())
}
