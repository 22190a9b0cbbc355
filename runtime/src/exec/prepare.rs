//! From a program to an executor: every instruction prepared, every input and output placed in the order.

use super::blocks::{Bases, Blocks, Span};
use super::ports::{Parameter, Port};
use super::room::{self, Need};
use super::site::Site;
use super::tally::Tally;
use super::world::World;
use super::{Action, Executor, Flight, Fresh, Instruction, Starts, Tensor, Turn};
use crate::comm::Label;
use crate::cuda::Texts;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::metrics::trace::Work;
use crate::slice::Slice;
use dcc_program::program::{self, BufferId, Instr, Program};
use dcc_program::text::print_instr;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

impl Executor {
    /// Prepares `program`, that of `rank`'s stage. Errors: a program that makes no sense (which `check` refuses), or an operation
    /// that this machine cannot do.
    pub fn new(device: &mut Device, world: &World, program: &Program, rank: u32, fresh: Fresh) -> Result<Executor> {
        check_ids(program)?;
        let blocks = world.blocks(program)?;
        if blocks.bytes() > device.memory().bytes() {
            let have = device.memory().bytes();
            return Err(Error::artifact(format!("the plan needs {} bytes, the arena has {have}", blocks.bytes())));
        }
        let site = Site::new(program, &blocks, rank)?;
        let (mut sections, mut needs) = (Vec::new(), Vec::new());
        let mut tokens = Tokens::new(program);
        let runs = |section: usize| program.order.iter().filter(|step| step.section as usize == section).count() as u64;
        let mut tally = Tally::default();
        for (index, section) in program.sections.iter().enumerate() {
            let mut preparing =
                Preparing { device, world, program, site: &site, rank, tokens: &mut tokens, tally: Tally::default() };
            let mut body = Vec::with_capacity(section.body.len());
            for (number, instr) in section.body.iter().enumerate() {
                let action = preparing.action(instr).map_err(|error| error.at(place(program, index, number)))?;
                let text = || format!("{}: {}", section.id().name(), print_instr(program, instr));
                let Some(action) = action else { continue };
                let work = Box::new(work(&site, instr, &action)?);
                needs.extend(Need::of(&action, [index, number, body.len()]));
                body.push(Instruction { action, label: Label::new(&text()), work });
            }
            tally.add(&preparing.tally, runs(index));
            sections.push(body);
        }
        let mut turns = turns(program, &site, &blocks)?;
        let rooms = room::find(&site, &blocks, &turns, &needs)?;
        give_room(device, program, rooms, &needs, &mut sections)?;
        let calls = |body: &Vec<Instruction>| device.rows(&body.iter().map(Instruction::call).collect::<Vec<_>>());
        let rows = sections.iter().map(calls).collect::<Result<Vec<_>>>()?;
        device.finish()?;
        let (flights, transfers) = (tokens.flights(program)?, starts(&sections, &mut turns));
        let inputs = program.inputs.iter().map(|input| port(&site, &input.name, input.buffer)).collect::<Result<_>>()?;
        let outputs = program.outputs.iter().map(|output| port(&site, &output.name, output.buffer)).collect::<Result<_>>()?;
        turns.iter_mut().for_each(|turn| turn.graphs.resize_with(rows[turn.section].len(), || None));
        let mut parameters = parameters(program, &site, &blocks)?;
        parameters.sort_by_key(|parameter| parameter.range.start);
        let persistent = |id| Ok::<Range<usize>, Error>(range(site.span(id)?, &blocks));
        let scalar = |s: &program::Scalar| Ok((s.kind, site.ty(s.buffer).dtype, persistent(s.buffer)?));
        let scalars = program.scalars.iter().map(scalar).collect::<Result<_>>()?;
        let kept = parameters.iter().map(|parameter| parameter.range.clone()).collect();
        Ok(Executor {
            sections,
            rows,
            turns,
            transfers,
            flights,
            inputs,
            outputs,
            parameters,
            kept,
            scalars,
            blocks,
            fresh,
            tally,
        })
    }
}

/// `Starts` of each section and place of its blocks that there are; every turn gets the index of its own.
fn starts(sections: &[Vec<Instruction>], turns: &mut [Turn]) -> Vec<Starts> {
    let is_start = |instruction: &&Instruction| matches!(instruction.action, Action::Start { .. });
    let mut first: Vec<(usize, Bases)> = Vec::new();
    for turn in turns {
        let is_like = |(section, bases): &(usize, Bases)| (*section, bases) == (turn.section, &turn.bases);
        turn.transfers = first.iter().position(is_like).unwrap_or(first.len());
        if turn.transfers == first.len() {
            first.push((turn.section, turn.bases.clone()));
        }
    }
    first.iter().map(|(section, _)| vec![None; sections[*section].iter().filter(is_start).count()]).collect()
}

/// Workspaces in planned memory where there is room, else beside it.
fn give_room(
    device: &mut Device,
    program: &Program,
    rooms: Vec<Option<Span>>,
    needs: &[Need],
    sections: &mut [Vec<Instruction>],
) -> Result<()> {
    for (need, room) in needs.iter().zip(rooms) {
        match (room, &mut sections[need.section][need.place].action) {
            (Some(room), Action::Compute(call)) => call.work_in(room),
            _ => device.reserve(need.bytes).map_err(|error| error.at(place(program, need.section, need.instr)))?,
        }
    }
    Ok(())
}

/// An instruction of a program, for messages.
fn place(program: &Program, section: usize, number: usize) -> String {
    let section = &program.sections[section];
    format!("stage {}, {}: {}", program.stage, section.id().name(), print_instr(program, &section.body[number]))
}

/// The texts of all kernels of `rank`'s program for GPUs. Errors: as `Executor::new`.
pub fn texts(world: &World, program: &Program, rank: u32) -> Result<Texts> {
    let mut texts = Texts::default();
    add_texts(&mut texts, world, program, rank)?;
    Ok(texts)
}

/// As `texts`, beside those of other programs of that rank.
pub fn add_texts(texts: &mut Texts, world: &World, program: &Program, rank: u32) -> Result<()> {
    check_ids(program)?;
    let blocks = world.blocks(program)?;
    let site = Site::new(program, &blocks, rank)?;
    let mut sections = Vec::new();
    for section in &program.sections {
        let mut calls = Vec::new();
        for instr in &section.body {
            match &instr.action {
                program::Action::Kernel(number) => {
                    calls.push(Some(texts.kernel(&site, &program.kernels[*number as usize], instr)?));
                }
                program::Action::Library(library) => calls.extend(texts.library(&site, library, instr)?.map(Some)),
                program::Action::Start { .. } | program::Action::Wait(_) => calls.push(None),
            }
            texts.give_origin(&instr.origin);
        }
        sections.push(calls);
    }
    // Behind all sections' kernels, as an executor does: the order gives them their names.
    for (index, calls) in sections.iter().enumerate() {
        let rows = texts.in_rows(&calls.iter().map(Option::as_ref).collect::<Vec<_>>())?;
        let runs = program.order.iter().filter(|step| step.section as usize == index).count();
        texts.count(calls, &rows, runs);
    }
    Ok(())
}

/// What a trace says about an instruction.
fn work(site: &Site<'_>, instr: &Instr, action: &Action) -> Result<Work> {
    let text = print_instr(site.program(), instr);
    let (_, action_text) = text.split_once(" = ").or(text.split_once(" += ")).unwrap_or(("", &text));
    // Operands are numbers of buffers: nothing that two equal pieces of work share.
    let is_buffer = |at: &usize| action_text[at + 2..].starts_with(|next: char| next.is_ascii_digit());
    let from = action_text.rfind(')').unwrap_or(0);
    let names = action_text[from..].match_indices(" b").map(|(at, _)| from + at);
    let end = names.filter(is_buffer).min().unwrap_or(action_text.len());
    let shape = |id: &BufferId| -> Result<String> {
        let blocks: Vec<String> = site.extents(*id, 0)?.iter().map(|extent| extent.block.to_string()).collect();
        Ok(format!("{}[{}]", site.ty(*id).dtype.name(), blocks.join(", ")))
    };
    let shapes = |ids: &[BufferId]| Ok::<String, Error>(ids.iter().map(shape).collect::<Result<Vec<_>>>()?.join(", "));
    let kernel = match (action, &instr.action) {
        (Action::Wait(_), _) => "wait".to_owned(),
        (_, program::Action::Library(_)) => {
            format!("{} {} -> {}", &action_text[..end], shapes(&instr.operands)?, shapes(&instr.results)?)
        }
        _ if instr.results.is_empty() => format!("{} {}", &action_text[..end], shapes(&instr.operands)?),
        _ => format!("{} -> {}", &action_text[..end], shapes(&instr.results)?),
    };
    let ids = instr.operands.iter().chain(&instr.results);
    let bytes = ids.map(|id| Ok(site.span(*id)?.bytes as u64)).sum::<Result<u64>>()?;
    let flops = if let Action::Compute(call) = action { call.flops() } else { 0 };
    Ok(Work { kernel, origin: instr.origin.clone(), flops, bytes })
}

/// Every number names something.
fn check_ids(program: &Program) -> Result<()> {
    let buffers = program.buffers.len() as u32;
    let bodies = || program.sections.iter().flat_map(|section| &section.body);
    let used = bodies().flat_map(|instr| instr.operands.iter().chain(&instr.results));
    let outside = program.params.iter().map(|p| &p.buffer).chain(program.inputs.iter().map(|p| &p.buffer));
    let outside = outside.chain(program.outputs.iter().map(|p| &p.buffer)).chain(program.scalars.iter().map(|p| &p.buffer));
    let kernels = program.kernels.len() as u32;
    let good_kernel = |instr: &Instr| !matches!(instr.action, program::Action::Kernel(n) if n >= kernels);
    let microbatches = program.mesh.size_of("mb");
    let sections = program.sections.len() as u32;
    let good = used.chain(outside).all(|id| id.0 < buffers)
        && bodies().all(good_kernel)
        && program.order.iter().all(|step| step.section < sections && step.microbatch < microbatches);
    if good { Ok(()) } else { Err(Error::artifact(format!("program {} names what it does not have", program.name))) }
}

/// What preparing an instruction needs.
struct Preparing<'a> {
    device: &'a mut Device,
    world: &'a World,
    program: &'a Program,
    site: &'a Site<'a>,
    rank: u32,
    tokens: &'a mut Tokens,
    /// Of one run of the section.
    tally: Tally,
}

impl Preparing<'_> {
    /// `None` where nothing is to be done.
    fn action(&mut self, instr: &Instr) -> Result<Option<Action>> {
        Ok(match &instr.action {
            program::Action::Kernel(number) => {
                self.tally.jit += 1;
                let kernel = &self.program.kernels[*number as usize];
                Some(Action::Compute(self.device.kernel(self.site, kernel, instr)?))
            }
            program::Action::Library(library) => {
                let call = self.device.library(self.site, library, instr)?;
                self.tally.library += u64::from(call.is_some());
                self.tally.flops += call.as_ref().map_or(0, |call| call.flops());
                call.map(Action::Compute)
            }
            program::Action::Start { token, transfer } => {
                let count = self.tokens.results.get(&token.0).map_or(0, |results| results.len()).max(instr.operands.len());
                let tensors = (0..count).map(|n| self.tensor(token.0, transfer, instr, n)).collect::<Result<Vec<Tensor>>>()?;
                self.tally.transfers += 1;
                Some(Action::Start { tensors, number: self.tally.transfers as usize - 1, token: self.tokens.index(token.0)? })
            }
            program::Action::Wait(token) => Some(Action::Wait(self.tokens.index(token.0)?)),
        })
    }
}

impl Preparing<'_> {
    /// One of the tensors of a transfer.
    fn tensor(&mut self, token: u32, transfer: &program::Transfer, instr: &Instr, n: usize) -> Result<Tensor> {
        let result = self.tokens.results.get(&token).and_then(|results| results.get(n).copied());
        let operand = instr.operands.get(n).copied();
        let [source, target] = [operand, result].map(|id| id.map(|id| self.site.span(id)).transpose());
        let (source, target) = (source?, target?);
        let [from, to] = [operand, result].map(|id| id.map(|id| self.site.ty(id)));
        let transfer = self.world.transfer(self.program, self.rank, transfer, from, to)?;
        self.tally.transfer_bytes += [source, target].iter().flatten().map(|span| span.bytes as u64).max().unwrap_or(0);
        Ok(Tensor { transfer, source, target })
    }
}

/// Tokens of a program, numbered in the order of their waits.
struct Tokens {
    /// What each token's wait defines.
    results: HashMap<u32, Vec<BufferId>>,
    index: HashMap<u32, usize>,
}

impl Tokens {
    fn new(program: &Program) -> Tokens {
        let mut tokens = Tokens { results: HashMap::new(), index: HashMap::new() };
        for instr in program.sections.iter().flat_map(|section| &section.body) {
            if let program::Action::Wait(token) = instr.action {
                let next = tokens.index.len();
                tokens.index.entry(token.0).or_insert(next);
                tokens.results.insert(token.0, instr.results.to_vec());
            }
        }
        tokens
    }

    fn index(&self, token: u32) -> Result<usize> {
        self.index.get(&token).copied().ok_or_else(|| Error::artifact(format!("t{token} is never waited for")))
    }

    /// A queue per token, as long as it ever gets. Errors: a wait without start, a start without wait.
    fn flights(&self, program: &Program) -> Result<Vec<VecDeque<Flight>>> {
        let mut open = vec![(0usize, 0usize); self.index.len()];
        for step in &program.order {
            for instr in &program.sections[step.section as usize].body {
                match &instr.action {
                    program::Action::Start { token, .. } => {
                        let (now, most) = &mut open[self.index(token.0)?];
                        *now += 1;
                        *most = (*most).max(*now);
                    }
                    program::Action::Wait(token) => {
                        let (now, _) = &mut open[self.index(token.0)?];
                        let waits = || Error::artifact(format!("t{} is waited for before it is started", token.0));
                        *now = now.checked_sub(1).ok_or_else(waits)?;
                    }
                    _ => {}
                }
            }
        }
        match open.iter().any(|(now, _)| *now != 0) {
            true => Err(Error::artifact("a transfer is started and never waited for")),
            false => Ok(open.into_iter().map(|(_, most)| VecDeque::with_capacity(most)).collect()),
        }
    }
}

impl Tally {
    fn add(&mut self, other: &Tally, times: u64) {
        self.jit += other.jit * times;
        self.library += other.library * times;
        self.transfers += other.transfers * times;
        self.transfer_bytes += other.transfer_bytes * times;
        self.flops += other.flops * times;
    }
}

/// Executions in order. An input is filled before the first that reads it: of its microbatch, or (one that does not depend on the
/// microbatch) in each slot. An output is read after each that defines it.
pub(super) fn turns(program: &Program, site: &Site<'_>, blocks: &Blocks) -> Result<Vec<Turn>> {
    let reads = |section: &program::Section, id| section.body.iter().any(|instr| instr.operands.contains(&id));
    let defines = |section: &program::Section, id| section.body.iter().any(|instr| instr.results.contains(&id));
    let mut filled = BTreeSet::new();
    let mut turns = Vec::new();
    for step in &program.order {
        let section = &program.sections[step.section as usize];
        let bases = blocks.bases(step)?;
        let place = |id| {
            Ok::<Range<usize>, Error>({
                let region = bases.region(site.span(id)?);
                region.offset..region.offset + region.bytes
            })
        };
        let mut fills = Vec::new();
        for (index, input) in program.inputs.iter().enumerate().filter(|(_, input)| reads(section, input.buffer)) {
            let at = place(input.buffer)?;
            let per_microbatch = site.ty(input.buffer).is_per_microbatch(&program.mesh);
            let key = if per_microbatch { step.microbatch as usize } else { at.start };
            if filled.insert((index, key)) {
                fills.push((index, at));
            }
        }
        let outputs = program.outputs.iter().enumerate().filter(|(_, output)| defines(section, output.buffer));
        let takes = outputs.map(|(index, output)| Ok((index, place(output.buffer)?))).collect::<Result<_>>()?;
        let label = Label::new(&section.id().name());
        turns.push(Turn {
            section: step.section as usize,
            microbatch: step.microbatch,
            bases,
            transfers: 0,
            label,
            fills,
            takes,
            graphs: Vec::new(),
        });
    }
    Ok(turns)
}

fn port(site: &Site<'_>, name: &str, id: BufferId) -> Result<Port> {
    let ty = site.ty(id);
    let is_per_microbatch = ty.is_per_microbatch(site.mesh());
    let count = if is_per_microbatch { site.microbatches() } else { 1 };
    let slice = |microbatch| {
        let extents = site.extents(id, microbatch)?;
        Ok(Slice {
            global: ty.shape.to_vec(),
            start: extents.iter().map(|extent| extent.offset).collect(),
            extent: extents.iter().map(|extent| extent.valid).collect(),
            local: extents.iter().map(|extent| extent.block).collect(),
        })
    };
    let slices = (0..count).map(slice).collect::<Result<_>>()?;
    Ok(Port { name: name.to_owned(), dtype: ty.dtype, slices, is_per_microbatch })
}

fn parameters(program: &Program, site: &Site<'_>, blocks: &Blocks) -> Result<Vec<Parameter>> {
    let mesh = &program.mesh;
    let at = site.coordinates(0);
    let parameter = |param: &program::Param| {
        let ty = site.ty(param.buffer);
        let elsewhere = |axis| !ty.sharding.uses(axis) && mesh.name(axis) != "pp" && at.get(axis) != 0;
        Ok(Parameter {
            name: param.name.clone(),
            kind: param.kind.clone(),
            piece: param.piece,
            trained: param.trained,
            dtype: ty.dtype,
            shape: ty.shape.to_vec(),
            extents: site.extents(param.buffer, 0)?,
            range: range(site.span(param.buffer)?, blocks),
            is_first_replica: !mesh.space().any(elsewhere),
        })
    };
    program.params.iter().map(parameter).collect()
}

/// Arena bytes of a persistent span.
fn range(span: Span, blocks: &Blocks) -> Range<usize> {
    let start = blocks.persistent().start + span.offset;
    start..start + span.bytes
}
