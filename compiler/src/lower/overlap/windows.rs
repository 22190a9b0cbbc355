//! How far each transfer of a section may move: its start up to where its operand is written, its wait down to where its result is read.

use super::super::select::Selected;
use dcc_program::DType;
use dcc_program::program::{Action, BufferId, Instr, Library, TokenId, Transfer};
use std::collections::{BTreeMap, BTreeSet};

/// A transfer that starts and ends within a section. Places are gaps: before the instruction of that number.
pub(super) struct Flight {
    /// Of start and wait as the section has them.
    pub start: usize,
    pub wait: usize,
    pub transfer: Transfer,
    pub dtype: DType,
    /// Memory of both ends.
    pub operand: BufferId,
    pub result: BufferId,
    /// Bytes of the larger end: of the whole, as every member has it before or after.
    pub bytes: u64,
    /// The first place where it may start, and the last where it may be waited for.
    pub ready: usize,
    pub due: usize,
    /// Whether the operand is there when the section begins.
    pub is_upfront: bool,
    /// Whether the section reads the result, or overwrites an end.
    pub is_read: bool,
    /// Whether its ends would live longer, were it started earlier or waited for later.
    pub early_costs: bool,
    pub late_costs: bool,
    /// Instructions that come along, before the start and behind the wait.
    pub lead: Vec<usize>,
    pub trail: Vec<usize>,
    /// Earlier transfers that must have ended before this one starts.
    pub after: Vec<usize>,
    /// The longest chain of those.
    pub level: usize,
}

/// Who touches a piece of memory, in order, and whether they write it. Transfers that may move are left out.
type Touches = BTreeMap<BufferId, Vec<(usize, bool)>>;

/// Whether all members run the same program, so that the start may move.
fn moves(transfer: &Transfer) -> bool {
    match transfer {
        Transfer::AllReduce { .. }
        | Transfer::ReduceScatter { .. }
        | Transfer::AllGather { .. }
        | Transfer::AllToAll { .. } => true,
        Transfer::Send { .. } | Transfer::Recv { .. } | Transfer::StageSum { .. } => false,
    }
}

/// In the order of their starts.
pub(super) fn flights(selected: &Selected, scratch: &BTreeSet<BufferId>, body: &[Instr]) -> Vec<Flight> {
    let root = |id: BufferId| selected.storage[id.0 as usize];
    let bytes = |id: BufferId| selected.program.ty(id).local_bytes(&selected.program.mesh);
    let mut waits: BTreeMap<TokenId, usize> = BTreeMap::new();
    for (at, instr) in body.iter().enumerate() {
        if let Action::Wait(token) = instr.action {
            waits.insert(token, at);
        }
    }
    let mut flights = Vec::new();
    let mut moving = BTreeSet::new();
    for (start, instr) in body.iter().enumerate() {
        let Action::Start { token, transfer } = &instr.action else { continue };
        let Some(&wait) = waits.get(token).filter(|_| moves(transfer)) else { continue };
        let (operand, result) = (instr.operands[0], body[wait].results[0]);
        let in_place = root(operand) == root(result);
        moving.extend([start, wait]);
        flights.push(Flight {
            start,
            wait,
            transfer: transfer.clone(),
            dtype: selected.program.ty(operand).dtype,
            operand: root(operand),
            result: root(result),
            bytes: bytes(operand).max(bytes(result)),
            ready: 0,
            due: body.len(),
            is_upfront: false,
            is_read: false,
            early_costs: !in_place && scratch.contains(&root(result)),
            late_costs: !in_place && scratch.contains(&root(operand)),
            lead: Vec::new(),
            trail: Vec::new(),
            after: Vec::new(),
            level: 0,
        });
    }
    let touches = touches(selected, body, &moving, &waits);
    // Waits for messages of an earlier execution come before all else.
    let first = body.iter().take_while(|i| matches!(i.action, Action::Wait(_)) && i.results.is_empty()).count();
    let flown = flights.iter().flat_map(|flight| [flight.operand, flight.result]).collect();
    let section = Instrs { selected, body, touches, flown };
    let mut claimed = BTreeSet::new();
    let writers: Vec<(BufferId, usize)> = flights.iter().map(|flight| (flight.result, flight.start)).collect();
    for flight in &mut flights {
        // Behind the next transfer to the same memory it is another value.
        let next = writers.iter().filter(|(memory, start)| *memory == flight.result && *start > flight.start);
        flight.trail = section.trail(flight, next.map(|(_, start)| *start).min().unwrap_or(body.len()));
        claimed.extend(flight.trail.iter().copied());
    }
    let readers: Vec<(BufferId, usize)> = flights.iter().map(|flight| (flight.operand, flight.start)).collect();
    for flight in &mut flights {
        // Another transfer has the memory by the name that it had before.
        let others = readers.iter().filter(|(memory, start)| *memory == flight.operand && *start < flight.start);
        flight.lead = section.lead(flight, others.map(|(_, start)| *start).min(), &claimed);
        claimed.extend(flight.lead.iter().copied());
        section.window(flight, first);
    }
    chain(&mut flights);
    flights
}

struct Instrs<'a> {
    selected: &'a Selected,
    body: &'a [Instr],
    touches: Touches,
    /// Memory of the ends of transfers that may move.
    flown: BTreeSet<BufferId>,
}

impl Instrs<'_> {
    fn of(&self, memory: BufferId) -> &[(usize, bool)] {
        self.touches.get(&memory).map_or(&[], Vec::as_slice)
    }

    fn root(&self, id: BufferId) -> BufferId {
        self.selected.storage[id.0 as usize]
    }

    /// Another name of the same memory.
    fn is_view(&self, at: usize) -> bool {
        let instr = &self.body[at];
        let renames = matches!(
            instr.action,
            Action::Library(Library::Reshape { .. } | Library::ResolveMicrobatches | Library::DropMicrobatch { .. })
        );
        renames && self.root(instr.operands[0]) == self.root(instr.results[0])
    }

    /// Reads one piece of memory, and writes what nothing else in the section touches, such as what is summed over microbatches.
    fn only_reads(&self, at: usize, memory: BufferId) -> bool {
        let instr = &self.body[at];
        let own = |id: &BufferId| {
            let written = self.root(*id);
            written != memory && !self.flown.contains(&written) && self.of(written).iter().all(|touch| touch.0 == at)
        };
        let computes = matches!(instr.action, Action::Kernel(_) | Action::Library(_));
        computes && instr.operands.iter().all(|id| self.root(*id) == memory) && instr.results.iter().all(own)
    }

    /// What is done with the result that can be done whenever it is there.
    fn trail(&self, flight: &Flight, end: usize) -> Vec<usize> {
        let after = self.of(flight.result).iter().map(|touch| touch.0).filter(|&at| at > flight.wait && at < end);
        let mut trail: Vec<usize> = after.take_while(|&at| self.is_view(at) || self.only_reads(at, flight.result)).collect();
        trail.dedup();
        trail
    }

    /// Names that the operand was given just before, for this transfer alone: what others read, of other transfers from the `first` start
    /// on, stays where it is.
    fn lead(&self, flight: &Flight, first: Option<usize>, claimed: &BTreeSet<usize>) -> Vec<usize> {
        let alone = |at: usize| first.is_none_or(|first| first > at) && self.readers(self.body[at].results[0]) == 1;
        let mut before: Vec<usize> =
            self.of(flight.operand).iter().map(|touch| touch.0).filter(|&at| at < flight.start).collect();
        before.dedup();
        let (mut name, mut lead) = (self.body[flight.start].operands[0], Vec::new());
        for at in before.into_iter().rev() {
            let names = self.is_view(at) && self.body[at].results[0] == name;
            if !names || claimed.contains(&at) || !alone(at) {
                break;
            }
            name = self.body[at].operands[0];
            lead.push(at);
        }
        lead.reverse();
        lead
    }

    /// Instructions of the section that read a buffer by this name.
    fn readers(&self, id: BufferId) -> usize {
        self.body.iter().filter(|instr| instr.operands.contains(&id)).count()
    }

    fn window(&self, flight: &mut Flight, first: usize) {
        let (operand, result, start) = (flight.operand, flight.result, flight.start);
        let along = |at: &usize| flight.lead.contains(at) || flight.trail.contains(at);
        let writes = self.of(operand).iter().filter(|(_, writes)| *writes);
        let conflicts: Vec<usize> = writes.chain(self.of(result)).map(|touch| touch.0).filter(|at| !along(at)).collect();
        // Whoever reads the operand by a name that it loses does so before.
        let loses = |at: &usize| matches!(self.body[*at].action, Action::Library(Library::ResolveMicrobatches));
        let renamed = flight.lead.iter().any(loses);
        let readers = self.of(operand).iter().map(|touch| touch.0).filter(|at| renamed && !along(at));
        let ready = conflicts.iter().copied().chain(readers).filter(|&at| at < start).map(|at| at + 1).max().unwrap_or(0);
        let due = conflicts.iter().copied().filter(|&at| at > start).min();
        flight.ready = ready.max(first).min(start);
        flight.is_upfront = flight.ready == first;
        if let Some(due) = due {
            (flight.due, flight.is_read) = (due, true);
        }
    }
}

fn touches(selected: &Selected, body: &[Instr], moving: &BTreeSet<usize>, waits: &BTreeMap<TokenId, usize>) -> Touches {
    let root = |id: &BufferId| selected.storage[id.0 as usize];
    let mut touches = Touches::new();
    for (at, instr) in body.iter().enumerate().filter(|(at, _)| !moving.contains(at)) {
        instr.operands.iter().for_each(|id| touches.entry(root(id)).or_default().push((at, false)));
        let mut written: Vec<BufferId> = instr.results.to_vec();
        if let Action::Start { token, .. } = instr.action {
            written.extend(waits.get(&token).into_iter().flat_map(|&wait| &body[wait].results));
        }
        written.iter().for_each(|id| touches.entry(root(id)).or_default().push((at, true)));
    }
    touches
}

/// Which transfers read what others bring. Such a chain starts no earlier than it did.
fn chain(flights: &mut [Flight]) {
    // By memory: who had it, and whether as result.
    let mut users: BTreeMap<BufferId, Vec<(usize, bool)>> = BTreeMap::new();
    for n in 0..flights.len() {
        let (operand, result) = (flights[n].operand, flights[n].result);
        let mut after = BTreeSet::new();
        for (memory, writes) in [(operand, false), (result, true)] {
            let before = users.get(&memory).into_iter().flatten();
            after.extend(before.filter(|(_, wrote)| writes || *wrote).map(|(user, _)| *user));
        }
        users.entry(operand).or_default().push((n, false));
        users.entry(result).or_default().push((n, true));
        if let Some(level) = after.iter().map(|&before| flights[before].level).max() {
            flights[n].level = level + 1;
            (flights[n].ready, flights[n].is_upfront) = (flights[n].start, false);
        }
        for &before in &after {
            (flights[before].due, flights[before].is_read) = (flights[before].due.min(flights[n].start), true);
        }
        flights[n].after = after.into_iter().collect();
    }
}
