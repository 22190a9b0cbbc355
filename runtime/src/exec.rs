//! Executes a program on one rank: everything is worked out when it is loaded, a step only walks through prepared calls.
//!
//! Before: a program that passed `check`, the rank's arena, the world's communicators. After each step: what `simulate` says, to
//! rounding. From the second step on nothing is allocated.

mod blocks;
mod ports;
mod prepare;
pub mod ranks;
mod room;
mod site;
mod tally;
#[cfg(test)]
mod tests;
pub mod whole;
mod world;

pub use blocks::{Bases, Blocks, Span};
pub use ports::{Io, Parameter, Port, Scalars};
pub use prepare::{add_texts, texts};
pub use site::{Bound, Site};
pub use tally::Tally;
pub use world::World;

use crate::comm::{self, Comm, Label, Op, Place, Region, Token, TransferId};
use crate::cuda::{Graph, Row};
use crate::device::{Call, Device};
use crate::error::Result;
use crate::metrics::now_ns;
use crate::metrics::trace::{Stream, Trace, Work};
use dcc_program::program::ScalarKind;
use std::collections::VecDeque;
use std::ops::Range;

/// A program as one rank runs it.
pub struct Executor {
    /// One per `Program::sections`.
    sections: Vec<Vec<Instruction>>,
    /// Of each section, what a device with memory of its own runs as one from the second step on.
    rows: Vec<Vec<Row>>,
    turns: Vec<Turn>,
    transfers: Vec<Starts>,
    /// Those in flight: by token, oldest first.
    flights: Vec<VecDeque<Flight>>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    parameters: Vec<Parameter>,
    /// What holds from step to step, in ascending order of address.
    kept: Vec<Range<usize>>,
    /// Kind, dtype, and where it lies.
    scalars: Vec<(ScalarKind, comm::DType, Range<usize>)>,
    blocks: Blocks,
    fresh: Fresh,
    tally: Tally,
}

/// What a step finds in memory that no earlier step may hand on to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// Whatever is there.
    AsIs,
    /// NaN: tests see every read of what was not written.
    Poisoned,
}

struct Instruction {
    action: Action,
    /// What errors and the launcher's watch name.
    label: Label,
    work: Box<Work>,
}

impl Instruction {
    fn call(&self) -> Option<&Call> {
        match &self.action {
            Action::Compute(call) => Some(call),
            Action::Start { .. } | Action::Wait(_) => None,
        }
    }
}

enum Action {
    Compute(Call),
    /// `number`: among those of its section.
    Start {
        tensors: Vec<Tensor>,
        number: usize,
        token: usize,
    },
    Wait(usize),
}

/// What the starts of a section are to the communicator, where its blocks lie in one place; `None` before the first of each.
type Starts = Vec<Option<TransferId>>;

/// A transfer in flight.
struct Flight {
    token: Token,
    /// What is copied to the device when it lands, where transfers go through the host.
    targets: Vec<Range<usize>>,
}

/// Of a transfer.
struct Tensor {
    transfer: comm::Transfer,
    source: Option<Span>,
    target: Option<Span>,
}

/// One execution of a section.
struct Turn {
    section: usize,
    microbatch: u32,
    bases: Bases,
    /// The index of its `Starts`.
    transfers: usize,
    label: Label,
    /// Input ports to fill before, output ports to read after: index, arena bytes.
    fills: Vec<(usize, Range<usize>)>,
    takes: Vec<(usize, Range<usize>)>,
    /// One per row of the section: the row as it was recorded.
    graphs: Vec<Option<Graph>>,
}

impl Executor {
    /// Runs one step. `step` counts from 1; `io` gives inputs and takes outputs. Errors: of `io` and of `comm`.
    pub fn step(
        &mut self,
        device: &mut Device,
        comm: &mut dyn Comm,
        scalars: &Scalars,
        io: &mut Io<'_>,
        mut trace: Option<&mut Trace>,
    ) -> Result<()> {
        // A trace has the time of each call.
        let together = trace.is_none();
        if !together {
            device.finish_alone()?;
        }
        self.prepare_memory(device)?;
        for (kind, dtype, range) in &self.scalars {
            let (bytes, len) = scalars.bytes(*kind, *dtype);
            device.memory().write(range.start, &bytes[..len]);
            device.put(range.start..range.start + len)?;
        }
        let received = comm.received();
        let mut place = Place { step: scalars.step.max(0) as u64, ..Place::default() };
        for turn in &mut self.turns {
            place.microbatch = turn.microbatch;
            place.label = turn.label;
            comm.mark(&place);
            for (port, range) in &turn.fills {
                device.memory_mut().with(range.clone(), |bytes| (io.fill)(&self.inputs[*port], turn.microbatch, bytes))?;
                device.put(range.clone())?;
            }
            let mut body = self.sections[turn.section].iter().enumerate();
            let mut graphs = std::mem::take(&mut turn.graphs);
            let mut next = self.rows[turn.section].iter().zip(&mut graphs).filter(|_| together).peekable();
            while let Some((at, instruction)) = body.next() {
                place.label = instruction.label;
                comm.mark(&place);
                match next.next_if(|(row, _)| row.calls().start == at) {
                    Some((row, graph)) => {
                        run_row(row, graph, &self.sections[turn.section], turn, device)?;
                        comm.progress()?;
                        body.nth(row.calls().len() - 2);
                    }
                    None => {
                        let flights = Flights { transfers: &mut self.transfers[turn.transfers], open: &mut self.flights };
                        run(instruction, turn, device, comm, flights, &mut trace)?;
                    }
                }
            }
            turn.graphs = graphs;
            for (port, range) in &turn.takes {
                device.get(range.clone())?;
                device.memory_mut().with(range.clone(), |bytes| (io.take)(&self.outputs[*port], turn.microbatch, bytes))?;
            }
        }
        self.tally.received_bytes = comm.received() - received;
        Ok(())
    }

    fn prepare_memory(&self, device: &mut Device) -> Result<()> {
        if self.fresh == Fresh::AsIs {
            return Ok(());
        }
        let mut at = self.blocks.persistent().start;
        for range in &self.kept {
            poison(device, at..range.start.max(at))?;
            at = at.max(range.end);
        }
        poison(device, at..self.blocks.scratch().end)
    }

    /// Leaves these parameters of another program of the rank alone too when memory is poisoned.
    pub fn keep(&mut self, parameters: &[Parameter]) {
        self.kept.extend(parameters.iter().map(|parameter| parameter.range.clone()));
        self.kept.sort_by_key(|range| range.start);
    }

    /// Brings the device's copies of all parameters up to date, once they are loaded.
    pub fn put_parameters(&self, device: &mut Device) -> Result<()> {
        self.parameters.iter().try_for_each(|parameter| device.put(parameter.range.clone()))
    }

    /// Brings the host's copies of all parameters up to date.
    pub fn get_parameters(&self, device: &mut Device) -> Result<()> {
        self.parameters.iter().try_for_each(|parameter| device.get(parameter.range.clone()))
    }

    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Arena bytes that outlive the passes of a step: parameters, what microbatches add up in, scalars.
    pub fn persistent_bytes(&self) -> usize {
        self.blocks.persistent().len()
    }

    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// What one step does, counted.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }
}

/// What starts and waits of one execution of a section go by.
struct Flights<'a> {
    transfers: &'a mut Starts,
    open: &'a mut [VecDeque<Flight>],
}

fn run_row(row: &Row, graph: &mut Option<Graph>, section: &[Instruction], turn: &Turn, device: &mut Device) -> Result<()> {
    let label = &section[row.calls().start].label;
    if let Some(graph) = graph {
        return device.replay(graph, label);
    }
    let calls: Vec<&Call> = section[row.calls()].iter().filter_map(Instruction::call).collect();
    *graph = Some(device.record(row, &calls, &turn.bases, turn.microbatch, label)?);
    Ok(())
}

fn poison(device: &mut Device, range: Range<usize>) -> Result<()> {
    device.memory().poison(range.clone());
    device.put(range)
}

fn run(
    instruction: &Instruction,
    turn: &Turn,
    device: &mut Device,
    comm: &mut dyn Comm,
    flights: Flights<'_>,
    trace: &mut Option<&mut Trace>,
) -> Result<()> {
    let began = trace.as_ref().map(|_| now_ns());
    let stream = match &instruction.action {
        Action::Compute(call) => {
            device.run(call, &turn.bases, turn.microbatch, &instruction.label)?;
            if trace.is_some() {
                device.wait()?;
            }
            Stream::Compute
        }
        Action::Start { tensors, number, token } => {
            let region = |span: &Option<Span>| span.map_or(Region::default(), |span| turn.bases.region(span));
            let op = |t: &Tensor| Op { transfer: t.transfer, source: region(&t.source), target: region(&t.target) };
            let transfer = match flights.transfers[*number] {
                Some(transfer) => transfer,
                None => {
                    let ops: Vec<Op> = tensors.iter().map(op).collect();
                    *flights.transfers[*number].insert(comm.prepare(&ops)?)
                }
            };
            let staged = device.is_apart() && !comm.is_on_device();
            if staged {
                tensors.iter().try_for_each(|tensor| device.get(region(&tensor.source).range()))?;
            }
            let targets = if staged { tensors.iter().map(|t| region(&t.target).range()).collect() } else { Vec::new() };
            flights.open[*token].push_back(Flight { token: comm.start(transfer)?, targets });
            Stream::Comm
        }
        Action::Wait(token) => {
            let flight = flights.open[*token].pop_front().expect("every wait has a start before it: seen when loading");
            comm.wait(flight.token)?;
            flight.targets.into_iter().try_for_each(|range| device.put(range))?;
            Stream::Comm
        }
    };
    if let (Some(trace), Some(began)) = (trace, began) {
        trace.span(stream, &instruction.label.text(), began, Some(&instruction.work))?;
    }
    if let Action::Compute(_) = instruction.action {
        comm.progress()?;
    }
    Ok(())
}
