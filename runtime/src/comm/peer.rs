//! One rank's end of a shared segment: the engine of `local` and `shm`.
//!
//! Started transfers queue per channel; only the head of a queue moves. A transfer is *posted* (peers may read its source), for
//! a large all_reduce *reduced* (peers may read the own chunk of its target), and *done* (this member reads no peer any more);
//! it is complete once all members are done, or, if its source went with what it posted (*eager*), once this one is. Work happens inside
//! waits and between computations: each wait serves every queue, again and again, and after a while sleeps on the rank's doorbell, which
//! peers ring where they find it asleep.

use super::advance::NOT_READ;
use super::mover::{Mover, Stage};
use super::prepared::{Prepared, Transfers};
use super::pull::Pull;
use super::segment::{Awaited, RING, Segment, WAKE};
use super::shm::{self, Arena};
use super::{Comm, Hello, Op, Patience, Place, Stop, Token, TransferId};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

/// Looks in a row where each rank has a core of its own, a few µs.
const SPINS: u32 = 300;
/// Of them, those without a pause between, a fraction of a µs.
const EAGER_SPINS: u32 = 256;
/// How long a rank that is about to sleep goes on looking, at least: much longer than a store takes to be seen.
const DOZE: Duration = Duration::from_micros(5);
/// How long a rank goes on looking while others may run on its core, before it sleeps: a sleeping virtual processor takes about as long to
/// wake as a MiB to move.
const AWAKE: Duration = Duration::from_micros(200);

pub struct Peer {
    pub(super) segment: Arc<Segment>,
    pub(super) rank: u32,
    patience: Patience,
    /// Whether each rank has a core.
    alone: bool,
    pub(super) place: Place,
    pub(super) transfers: Transfers,
    /// The groups, then the lanes of each ordered pair of ranks.
    pub(super) channels: Vec<Channel>,
    /// Channels with started transfers that still need work of this rank.
    active: Vec<u32>,
    pub(super) mover: Box<dyn Mover>,
    /// Whether the mover moves at once: then nothing it does has to be put in order.
    pub(super) is_at_once: bool,
    barriers: u64,
    /// Bytes read from other ranks' memory.
    pub(super) received: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Finished,
}

#[derive(Debug)]
pub(super) struct Channel {
    pub members: Vec<u32>,
    /// Own position in `members`.
    pub index: usize,
    /// Positions that read their peers' memory: all of a group, the second of a pair.
    pub readers: Range<usize>,
    /// Whether others read what this rank posts: all but the receiver of a pair.
    pub is_read: bool,
    pub queue: VecDeque<Head>,
    pub started: u64,
    pub posted: u64,
    /// Transfers that may be posted: a bound that was true once.
    pub room: u64,
    /// Transfers whose work on this rank is over: the sequence number of the queue's head.
    pub finished: u64,
    /// What kept the head from moving when it was last looked at.
    pub need: Option<Need>,
}

/// A started transfer. Its fields are looked at one by one: a copy of all of it would read at once what was just stored in parts.
#[derive(Debug)]
pub(super) struct Head {
    pub transfer: TransferId,
    pub phase: Phase,
    /// Where it was started.
    step: u64,
    microbatch: u32,
}

/// Next thing to do for the head of a queue. Numbers count the peers already served, starting after the own index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Read(usize),
    Gather(usize),
    WriteHeld,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Advance {
    Moved,
    /// Nothing to do until somebody does what the channel's `need` says.
    Waits,
    Idle,
}

/// Whom a wait is for, and for what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub peer: u32,
    /// Of whose queue's head.
    pub channel: Option<u32>,
    pub what: &'static str,
    pub awaited: Awaited,
}

impl Peer {
    pub fn new(segment: Arc<Segment>, rank: u32, patience: Patience) -> Peer {
        let layout = &segment.layout;
        let groups = layout.groups.iter().map(|group| Channel::new(group.0.clone(), 0..group.0.len(), rank));
        let pairs = layout.pairs().map(|(from, to)| Channel::new(vec![from, to], 1..2, rank));
        let channels = groups.chain(pairs).collect();
        Peer {
            rank,
            patience,
            alone: !segment.is_crowded(),
            place: Place::default(),
            transfers: Transfers::default(),
            channels,
            active: Vec::with_capacity(64),
            mover: Box::new(Pull::new(segment.clone(), rank)),
            is_at_once: true,
            barriers: 0,
            received: 0,
            state: State::Running,
            segment,
        }
    }

    /// This rank's memory, of `Layout::arena_bytes[rank]` bytes or a little more.
    pub fn arena(&self) -> Arena {
        Arena::new(self.segment.clone(), self.rank)
    }

    /// From here on `mover` moves what is transferred, instead of one between the host's arenas. Before the first transfer is prepared.
    pub fn set_mover(&mut self, mover: Box<dyn Mover>) {
        self.is_at_once = mover.is_at_once();
        self.mover = mover;
    }

    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Serves every queue once; whether anything moved.
    fn serve(&mut self) -> Result<Advance> {
        let mut moved = Advance::Idle;
        let mut next = 0;
        while next < self.active.len() {
            let channel = self.active[next];
            while let Advance::Moved = self.advance(channel)? {
                moved = Advance::Moved;
                if self.channels[channel as usize].queue.is_empty() {
                    break;
                }
            }
            if self.channels[channel as usize].queue.is_empty() {
                // In order: what serves whole transfers starts them so on all ranks that have them in one order.
                self.active.remove(next);
            } else {
                next += 1;
            }
        }
        Ok(moved)
    }

    /// Serves queues and sleeps until `need` has no answer left.
    fn block(&mut self, need: impl Fn(&Peer) -> Option<Need>) -> Result<()> {
        let mut rest = Rest::new(self);
        let result = self.serve_until(need, &mut rest);
        rest.end(self);
        result
    }

    fn serve_until(&mut self, need: impl Fn(&Peer) -> Option<Need>, rest: &mut Rest) -> Result<()> {
        let (mut since, mut sign) = (None, None);
        let mut finished = None;
        loop {
            if let Some(dead) = self.segment.dead() {
                return Err(self.peer_failed(dead));
            }
            let moved = self.serve()?;
            let Some(need) = need(self) else { return Ok(()) };
            if let Advance::Moved = moved {
                rest.end(self);
                continue;
            }
            // A finished peer has posted all that it ever will: what is still missing after one more look never comes.
            if self.segment.is_finished(need.peer) {
                match finished.replace(need.peer) {
                    Some(before) if before == need.peer => return Err(self.deserted(&need)),
                    _ => continue,
                }
            }
            let Some(bell) = rest.begin(self, &need) else { continue };
            // A peer that goes on, if slowly, is not silent: it may be saving a checkpoint.
            let culprit = self.segment.culprit(self.rank, need.peer);
            let seen = (culprit, self.segment.beats(culprit));
            if sign != Some(seen) {
                (sign, since) = (Some(seen), Some(Instant::now()));
            }
            let waited = since.map_or(Duration::ZERO, |since| since.elapsed());
            if waited >= self.patience.timeout {
                return Err(self.silent(&need, culprit, waited));
            }
            self.segment.set_waiting_on(self.rank, Some(need.peer));
            shm::sleep(self.segment.bell(self.rank), bell, WAKE.min(self.patience.timeout - waited));
            self.segment.set_waiting_on(self.rank, None);
            rest.end(self);
        }
    }

    fn peer_failed(&self, dead: u32) -> Error {
        Error::peer(format!("rank {dead} failed, so rank {} cannot go on", self.rank))
            .at(format!("rank {} at {}", self.rank, self.place))
    }

    fn deserted(&self, need: &Need) -> Error {
        Error::mismatch(format!(
            "rank {} has finished its program but {}, which rank {} waits for",
            need.peer, need.what, self.rank
        ))
        .at(format!("rank {} at {}", self.rank, self.place_of(need)))
    }

    /// Where the rank said last that it is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Where the transfer was started that a wait is for.
    fn place_of(&self, need: &Need) -> Place {
        let head = need.channel.and_then(|channel| self.channels[channel as usize].queue.front());
        head.map_or(self.place, |head| self.started_at(head))
    }

    pub(super) fn started_at(&self, head: &Head) -> Place {
        Place { step: head.step, microbatch: head.microbatch, label: self.transfers[head.transfer].label }
    }

    /// A wait for a silent peer ends as an error that names it, or the rank that it waits for in turn.
    fn silent(&self, need: &Need, culprit: u32, waited: Duration) -> Error {
        let seconds = waited.as_secs_f64();
        let last = match self.segment.is_finished(culprit) {
            true => "has finished its program".to_owned(),
            false => format!("was last at {}", self.segment.place(culprit)),
        };
        let via = if culprit == need.peer { String::new() } else { format!(", behind rank {}", need.peer) };
        Error::hang(format!("rank {culprit} is silent: rank {} waited {seconds:.1} s for it{via}; it {last}", self.rank))
            .at(format!("rank {}: rank {} {} ({})", self.rank, need.peer, need.what, self.place_of(need)))
            .help("if a rank may take that long, raise --timeout")
    }

    /// Whom the transfer of `token` still needs; `None` once it is complete.
    fn missing(&self, token: Token) -> Option<Need> {
        let channel = token.channel();
        let state = &self.channels[channel as usize];
        let sequence = token.sequence(state.started);
        if state.finished <= sequence {
            return Some(state.need.expect("an unfinished head that cannot move needs somebody"));
        }
        let member = (!token.is_eager()).then(|| self.undone(channel, sequence))??;
        let awaited = self.segment.slot(channel, member).stage(Stage::Done, sequence);
        Some(Need { peer: state.members[member], channel: None, what: NOT_READ, awaited })
    }

    /// A member that still reads transfer `sequence`.
    pub(super) fn undone(&self, channel: u32, sequence: u64) -> Option<usize> {
        let mut readers = self.channels[channel as usize].readers.clone();
        readers.find(|&member| self.segment.slot(channel, member).done().load(Acquire) <= sequence)
    }
}

impl Comm for Peer {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.segment.layout.world()
    }

    fn mark(&mut self, place: &Place) {
        self.place = *place;
        self.segment.mark(self.rank, place);
    }

    fn prepare(&mut self, ops: &[Op]) -> Result<TransferId> {
        let prepared = Prepared::new(ops, self.rank, self.place.label, &self.segment, self.is_at_once);
        let wrong = |what| Error::mismatch(what).at(format!("rank {} at {}", self.rank, self.place));
        Ok(self.transfers.push(prepared.map_err(wrong)?))
    }

    fn start(&mut self, transfer: TransferId) -> Result<Token> {
        let Prepared { channel, eager, .. } = self.transfers[transfer];
        let token = Token::new(channel, self.channels[channel as usize].started, eager);
        if eager && self.deliver(transfer)? {
            return Ok(token);
        }
        let state = &mut self.channels[channel as usize];
        let Place { step, microbatch, .. } = self.place;
        state.queue.push_back(Head { transfer, phase: Phase::Read(0), step, microbatch });
        state.started += 1;
        if state.queue.len() == 1 {
            self.active.push(channel);
        }
        self.post(channel)?;
        Ok(token)
    }

    fn progress(&mut self) -> Result<()> {
        self.serve().map(drop)
    }

    fn wait(&mut self, token: Token) -> Result<()> {
        self.block(|peer| peer.missing(token))?;
        if self.is_at_once {
            return Ok(());
        }
        self.mover.land(token.channel(), self.channels[token.channel() as usize].readers.clone())
    }

    fn is_on_device(&self) -> bool {
        self.mover.is_on_device()
    }

    fn agree(&mut self, value: u64) -> Result<u64> {
        let count = self.barriers;
        self.barriers += 1;
        self.segment.agreed_value(self.rank, count).store(value, Relaxed);
        self.segment.agreed(self.rank).store(count + 1, Release);
        self.segment.ring_all();
        self.block(|peer| {
            let late = |&rank: &u32| peer.segment.agreed(rank).load(Acquire) <= count;
            let rank = (0..peer.segment.layout.world()).find(late)?;
            let awaited = peer.segment.agreement(rank, count);
            Some(Need { peer: rank, channel: None, what: "has not come to the step boundary", awaited })
        })?;
        let ranks = 0..self.segment.layout.world();
        Ok(ranks.map(|rank| self.segment.agreed_value(rank, count).load(Relaxed)).max().unwrap_or(value))
    }

    fn handshake(&mut self, hello: &Hello) -> Result<()> {
        self.segment.set_hello(self.rank, hello.words());
        self.agree(0)?;
        for rank in 1..self.segment.layout.world() {
            let (ours, theirs) = (self.segment.hello(0), self.segment.hello(rank));
            if let Some(field) = (0..ours.len()).find(|&field| ours[field] != theirs[field]) {
                let name = Hello::FIELDS[field];
                return Err(Error::handshake(format!(
                    "ranks 0 and {rank} differ in their {name}: {:016x} and {:016x}",
                    ours[field], theirs[field]
                )));
            }
        }
        Ok(())
    }

    fn received(&self) -> u64 {
        self.received
    }

    fn stop_requested(&self) -> Stop {
        self.segment.stop_requested()
    }

    fn finish(&mut self) {
        self.state = State::Finished;
        self.segment.set_finished(self.rank);
        self.segment.ring_all();
    }
}

/// What a wait does while there is nothing to do: it looks in a row, then lets others run between looks, then sleeps.
struct Rest {
    spins: u32,
    since: Option<Instant>,
    /// The doorbell when this rank said that it is about to sleep, and when that was.
    armed: Option<(u32, Instant)>,
}

impl Rest {
    fn new(peer: &Peer) -> Rest {
        Rest { spins: if peer.alone { SPINS } else { 0 }, since: None, armed: None }
    }

    /// What the doorbell must still be for the rank to sleep; `None`: serve once more.
    fn begin(&mut self, peer: &Peer, need: &Need) -> Option<u32> {
        if self.spins > 0 {
            // Where no queue is served but the one that the need is of, only its counter is looked at.
            let others = peer.active.len() > usize::from(need.channel.is_some());
            let last = if others { self.spins - 1 } else { 0 };
            while self.spins > last {
                if peer.segment.has_come(need.awaited) {
                    peer.segment.fetch(need.awaited);
                    break;
                }
                self.spins -= 1;
                if self.spins < SPINS - EAGER_SPINS {
                    std::hint::spin_loop();
                }
            }
            return None;
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() < AWAKE {
            std::thread::yield_now();
            return None;
        }
        let Some((bell, since)) = self.armed else {
            peer.segment.sleeping(peer.rank).store(1, SeqCst);
            self.armed = Some((peer.segment.bell(peer.rank).load(SeqCst), Instant::now()));
            return None;
        };
        (since.elapsed() >= DOZE).then_some(bell)
    }

    /// The rank is awake, and will look as long as at first before it sleeps.
    fn end(&mut self, peer: &Peer) {
        if self.armed.is_some() {
            peer.segment.sleeping(peer.rank).store(0, SeqCst);
        }
        *self = Rest::new(peer);
    }
}

impl Drop for Peer {
    /// A rank that ends early, by an error or a panic, ends its peers' waits.
    fn drop(&mut self) {
        if self.state == State::Running {
            self.segment.declare_dead(self.rank);
        }
    }
}

impl Channel {
    fn new(members: Vec<u32>, readers: Range<usize>, rank: u32) -> Channel {
        let index = members.iter().position(|&member| member == rank).unwrap_or(0);
        Channel {
            members,
            index,
            is_read: readers.clone().any(|reader| reader != index),
            readers,
            queue: VecDeque::new(),
            started: 0,
            posted: 0,
            room: 0,
            finished: 0,
            need: None,
        }
    }

    /// Whether one more may be posted. What peers are done with is looked up when the room that was last seen is used up.
    pub fn has_room(&mut self, segment: &Segment, own: u32) -> bool {
        if self.posted >= self.room {
            let done = |member| segment.slot(own, member).done().load(Acquire);
            self.room = RING + self.readers.clone().map(done).min().unwrap_or(self.posted);
        }
        self.posted < self.room
    }
}
