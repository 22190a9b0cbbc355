//! All ranks of a run as threads of this process: for tests, and for commands too short for processes.

use super::World;
use crate::comm::{Comm, Patience, Peer, local};
use crate::cpu::{Cpu, Memory};
use crate::device::Device;
use crate::error::{Error, Result};
use std::thread::Builder;

/// What a rank's thread works with.
pub struct Rank<'a> {
    pub rank: u32,
    pub world: &'a World,
    pub comm: Peer,
    pub device: Device,
}

/// Calls `body` on a thread per rank, each with `threads` compute threads; the results in the order of ranks. Errors: that of the
/// rank which failed first of itself.
pub fn local_ranks<T: Send>(
    world: &World,
    threads: usize,
    patience: Patience,
    body: impl Fn(&mut Rank<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    ranks_on(world, patience, |comm| Ok(Device::Cpu(Cpu::new(Memory::new(comm.arena()), threads)?)), body)
}

/// The same on any devices, each made on its rank's thread.
pub fn ranks_on<T: Send>(
    world: &World,
    patience: Patience,
    device: impl Fn(&mut Peer) -> Result<Device> + Sync,
    body: impl Fn(&mut Rank<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let peers = local::world(world.layout(), patience)?;
    let start = |mut comm: Peer| -> Result<T> {
        let device = device(&mut comm)?;
        let mut rank = Rank { rank: comm.rank(), world, comm, device };
        let result = body(&mut rank)?;
        rank.comm.finish();
        Ok(result)
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let spawn = |comm: Peer| {
            let name = format!("rank {}", comm.rank());
            Builder::new().name(name).spawn_scoped(scope, || start(comm)).map_err(|e| Error::system("start a thread", e))
        };
        let handles: Vec<_> = peers.into_iter().map(spawn).collect();
        let join = |handle: std::thread::ScopedJoinHandle<'_, Result<T>>| {
            handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(|handle| handle.and_then(join)).collect()
    });
    let cause = |error: &Error| !error.is_secondary();
    if let Some(error) = results.iter().filter_map(|r| r.as_ref().err()).find(|error| cause(error)) {
        return Err(error.clone());
    }
    results.into_iter().collect()
}
