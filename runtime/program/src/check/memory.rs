//! Runs a stage's order over a model of its memory: every read must find the value it names.
//!
//! Values of one microbatch are read for that microbatch only. An accumulator (a pending sum over `mb`) is zeroed or
//! assigned, added to equally often by each microbatch, and then resolved; nothing else reads it. A value that does not
//! depend on the microbatch may not change from one to the next. What a transfer uses is left alone from start to wait.

use super::exchange::{Event, Trace};
use super::externals::{Roles, is_per_microbatch, write as external_write};
use super::overlap::Span;
use super::track::{Content, Memory};
use super::{CheckError, Checked, Fault, WaitResults, error, refuse, text_of, wait_results};
use crate::program::*;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// A started transfer.
struct Flight {
    step: usize,
    microbatch: u32,
    operands: SmallVec<[((Place, u32), Span); 1]>,
    results: SmallVec<[((Place, u32), Span); 1]>,
    /// Index of its start in the trace, if other stages take part.
    event: Option<usize>,
}

struct Run<'a> {
    p: &'a Program,
    memory: Memory,
    roles: Roles,
    results: WaitResults<'a>,
    flights: BTreeMap<TokenId, VecDeque<Flight>>,
    /// What each step of the order added to each accumulator.
    terms: HashMap<(BufferId, usize), Vec<&'a Instr>>,
    filled: BTreeSet<(usize, u32)>,
    /// Parameters and states that have their new values.
    renewed: BTreeSet<BufferId>,
    trace: Trace,
}

/// Checks one stage; gives what it says to others, in order.
pub(super) fn program(p: &Program) -> Result<Trace, CheckError> {
    let mut run = Run {
        p,
        memory: Memory::default(),
        roles: Roles::new(p),
        results: wait_results(p),
        flights: BTreeMap::new(),
        terms: HashMap::new(),
        filled: BTreeSet::new(),
        renewed: BTreeSet::new(),
        trace: Trace::default(),
    };
    let at_start = |e| error(format!("stage {}, start", p.stage), e);
    run.start_of_step().map_err(at_start)?;
    for k in 0..p.order.len() {
        let section = &p.sections[p.order[k].section as usize];
        let place = || format!("stage {}, {} of microbatch {}", p.stage, section.id().name(), p.order[k].microbatch);
        run.fill_inputs(k, section).map_err(|e| error(place(), e))?;
        for instr in &section.body {
            run.instr(k, section, instr).map_err(|e| error(format!("{}, `{}`", place(), text_of(p, instr)), e))?;
        }
        run.end_of_section(k, section).map_err(|e| error(place(), e))?;
    }
    run.end_of_step().map_err(|e| error(format!("stage {}, end of the step", p.stage), e))?;
    Ok(run.trace)
}

impl<'a> Run<'a> {
    fn block(&self, id: BufferId, k: usize) -> ((Place, u32), Span) {
        let span = Span::of(self.p, id);
        let slot = match span.place {
            Place::Area(a) => self.p.order.get(k).map_or(0, |step| step.slots[a as usize]),
            _ => 0,
        };
        ((span.place, slot), span)
    }

    fn content(&self, id: BufferId, k: usize) -> Content {
        let microbatch = self.p.order.get(k).map_or(0, |s| s.microbatch);
        let microbatch = is_per_microbatch(self.p, self.p.ty(id)).then_some(microbatch);
        Content { names: smallvec![id], microbatch, additions: None, terms: None, step: k, read: k, used: false }
    }

    fn start_of_step(&mut self) -> Checked<()> {
        let known = self.p.params.iter().map(|x| x.buffer).chain(self.p.scalars.iter().map(|x| x.buffer));
        for id in known.collect::<Vec<_>>() {
            let (block, span) = self.block(id, usize::MAX);
            self.memory.write(block, &span, self.content(id, usize::MAX))?;
        }
        self.resident("at the start of the step")
    }

    /// Parameters and scalars are where they belong.
    fn resident(&mut self, when: &str) -> Checked<()> {
        let p = self.p;
        let known = p.params.iter().map(|x| (x.buffer, &x.name[..])).chain(p.scalars.iter().map(|x| (x.buffer, x.kind.name())));
        for (id, name) in known {
            let (block, span) = self.block(id, usize::MAX);
            if let Err((_, what)) = self.memory.find(block, &span, id) {
                return refuse(Fault::Overwritten, format!("{name} is not intact {when}: {what}"));
            }
        }
        Ok(())
    }

    /// The runtime writes an input before the first step, of its microbatch, that reads it.
    fn fill_inputs(&mut self, k: usize, section: &Section) -> Checked<()> {
        for (i, input) in self.p.inputs.iter().enumerate() {
            let id = input.buffer;
            if !section.body.iter().any(|instr| instr.operands.contains(&id)) {
                continue;
            }
            let (block, span) = self.block(id, k);
            let key = if is_per_microbatch(self.p, self.p.ty(id)) { self.p.order[k].microbatch } else { block.1 };
            if self.filled.insert((i, key)) {
                self.memory.write(block, &span, self.content(id, k))?;
            }
        }
        Ok(())
    }

    fn instr(&mut self, k: usize, section: &Section, instr: &'a Instr) -> Checked<()> {
        if let Action::Wait(token) = instr.action {
            return self.wait(k, token, instr);
        }
        let resolves = instr.action == Action::Library(Library::ResolveMicrobatches);
        for &id in &instr.operands {
            if resolves { self.resolved(k, id)? } else { self.read(k, section, id)? }
        }
        match &instr.action {
            Action::Start { token, transfer } => self.start(k, *token, transfer, instr),
            action => {
                for (n, &id) in instr.results.iter().enumerate() {
                    external_write(self.p, section.kind, id, &self.roles)?;
                    self.renewed.extend(self.roles.changes(id).then_some(id));
                    self.result(k, section, action, n, id, instr)?;
                }
                Ok(())
            }
        }
    }

    fn read(&mut self, k: usize, section: &Section, id: BufferId) -> Checked<()> {
        let step = &self.p.order[k];
        let (block, span) = self.block(id, k);
        if section.kind.is_pass() && self.renewed.contains(&id) {
            return refuse(Fault::Overwritten, format!("parameter b{} is read after its update", id.0));
        }
        let microbatches = self.p.mesh.size_of("mb");
        let content = self.memory.find(block, &span, id)?;
        (content.read, content.used) = (k, true);
        if let Some(additions) = &content.additions {
            let own = |(mb, n): (usize, &u32)| (*n > 0) == (mb as u32 == step.microbatch);
            if microbatches > 1 && (!section.kind.is_per_microbatch() || !additions.iter().enumerate().all(own)) {
                let done: u32 = additions.iter().map(|&n| u32::from(n > 0)).sum();
                let what =
                    format!("b{} is read after {done} of {microbatches} microbatches were added; only resolve may", id.0);
                return refuse(Fault::Accumulator, what);
            }
        }
        match content.microbatch {
            Some(mb) if !section.kind.is_per_microbatch() || mb != step.microbatch => {
                refuse(Fault::Microbatch, format!("b{} holds the value of microbatch {mb}", id.0))
            }
            _ => Ok(()),
        }
    }

    /// The operand of `resolve`: all microbatches were added, equally often, and as often as was said where it was zeroed.
    fn resolved(&mut self, k: usize, id: BufferId) -> Checked<()> {
        let (block, span) = self.block(id, k);
        let microbatches = self.p.mesh.size_of("mb");
        let content = self.memory.find(block, &span, id)?;
        content.used = true;
        let equal = |a: &Vec<u32>| a[0] > 0 && a.iter().all(|&n| n == a[0]);
        match (&content.additions, content.terms) {
            (Some(additions), Some(terms)) if equal(additions) && additions[0] != terms => {
                let what = format!("b{} is resolved after {} of its {terms} terms", id.0, additions[0]);
                refuse(Fault::Accumulator, what)
            }
            (Some(additions), _) if equal(additions) => Ok(()),
            (None, _) if microbatches == 1 => Ok(()),
            (additions, _) => {
                let done = additions.as_ref().map_or(1, |a| a.iter().filter(|n| **n > 0).count());
                refuse(
                    Fault::Accumulator,
                    format!("b{} is resolved after additions of {done} of {microbatches} microbatches", id.0),
                )
            }
        }
    }

    fn result(
        &mut self,
        k: usize,
        section: &Section,
        action: &Action,
        n: usize,
        id: BufferId,
        instr: &'a Instr,
    ) -> Checked<()> {
        let (block, span) = self.block(id, k);
        let whole = !is_per_microbatch(self.p, self.p.ty(id));
        if section.kind.is_per_microbatch() && whole && self.p.mesh.size_of("mb") > 1 {
            self.unchanging(k, id)?;
        }
        if self.p.accumulates(action, n) {
            self.added_once(k, id, instr)?;
            return self.accumulate(k, id);
        }
        let in_place = instr.operands.first().filter(|o| self.block(**o, k) == (block, span));
        let renames =
            matches!(action, Action::Library(Library::Copy | Library::Reshape { .. } | Library::DropMicrobatch { .. }));
        if let (true, Some(&operand)) = (renames, in_place) {
            let content = self.memory.find(block, &span, operand)?;
            if !content.names.contains(&id) {
                content.names.push(id);
            }
            return Ok(());
        }
        if self.memory.find(block, &span, id).is_ok_and(|before| before.step == k && !before.used) {
            return refuse(Fault::Unused, format!("b{} is written once more before anything has read it", id.0));
        }
        let mut content = self.content(id, k);
        let sums = self.p.mesh.microbatch_axis().is_some_and(|mb| self.p.ty(id).sharding.is_pending(mb));
        if let (Action::Library(Library::Zero { terms }), false, true) = (action, section.kind.is_per_microbatch(), sums) {
            content.additions = Some(vec![0; self.p.mesh.size_of("mb") as usize]);
            content.terms = Some(*terms);
            content.microbatch = None;
        }
        self.memory.write(block, &span, content)
    }

    /// What is the same for all microbatches must not be read, then written anew, by each.
    fn unchanging(&mut self, k: usize, id: BufferId) -> Checked<()> {
        let (block, span) = self.block(id, k);
        match self.memory.find(block, &span, id) {
            Ok(content) if content.step != k && content.read == k => {
                refuse(Fault::Microbatch, format!("b{} changes with each microbatch, but its type is whole", id.0))
            }
            _ => Ok(()),
        }
    }

    /// No term of a sum twice in a section: equal values are one value, and a compiler that adds one twice has lost count. (Sections of two
    /// chunks may each have a term of a value that both hold; how many terms there are is said where the sum is zeroed.)
    fn added_once(&mut self, k: usize, id: BufferId, instr: &'a Instr) -> Checked<()> {
        let terms = self.terms.entry((id, k)).or_default();
        if terms.iter().any(|t| t.action == instr.action && t.operands == instr.operands) {
            return refuse(Fault::Accumulator, format!("adds to b{} what was added already", id.0));
        }
        terms.push(instr);
        Ok(())
    }

    fn accumulate(&mut self, k: usize, id: BufferId) -> Checked<()> {
        let (block, span) = self.block(id, k);
        let (p, step) = (self.p, &self.p.order[k]);
        let is_sum = p.mesh.microbatch_axis().is_some_and(|mb| p.ty(id).sharding.is_pending(mb));
        let whole = !is_per_microbatch(p, p.ty(id));
        let content = match self.memory.find(block, &span, id) {
            Err((Fault::Unwritten, _)) => {
                return refuse(Fault::Accumulator, format!("adds to b{}, which nothing has zeroed", id.0));
            }
            other => other?,
        };
        if whole && content.step != k && p.sections[step.section as usize].kind.is_per_microbatch() && p.mesh.size_of("mb") > 1
        {
            return refuse(Fault::Microbatch, format!("b{} changes with each microbatch, but its type is whole", id.0));
        }
        if !is_sum {
            return match content.microbatch {
                Some(mb) if mb != step.microbatch => {
                    refuse(Fault::Microbatch, format!("adds to b{}, which holds the value of microbatch {mb}", id.0))
                }
                _ => Ok(()),
            };
        }
        if content.additions.is_none() {
            let mut additions = vec![0; p.mesh.size_of("mb") as usize];
            additions[content.microbatch.unwrap_or(0) as usize] = 1;
            content.additions = Some(additions);
            content.microbatch = None;
        }
        content.additions.iter_mut().for_each(|a| a[step.microbatch as usize] += 1);
        content.names.truncate(1);
        Ok(())
    }

    fn start(&mut self, k: usize, token: TokenId, transfer: &Transfer, instr: &Instr) -> Checked<()> {
        let results = self.results.get(&token).copied().unwrap_or_default();
        let kind = self.p.sections[self.p.order[k].section as usize].kind;
        for &id in results {
            external_write(self.p, kind, id, &self.roles)?;
            self.renewed.extend(self.roles.changes(id).then_some(id));
        }
        let targets: SmallVec<[_; 1]> = results.iter().map(|&id| self.block(id, k)).collect();
        for ((block, span), &id) in targets.iter().zip(results) {
            // Nobody else may be using it.
            let content = self.content(id, k);
            self.memory.write(*block, span, content)?;
            self.memory.lock(*block, span, token, true);
        }
        let operands = instr.operands.iter().map(|&id| self.block(id, k));
        let operands: SmallVec<[_; 1]> = operands.filter(|operand| !targets.contains(operand)).collect();
        for (block, span) in &operands {
            self.memory.lock(*block, span, token, false);
        }
        let ty = instr.operands.first().or(results.first()).map(|&id| self.p.ty(id).clone());
        let microbatch = self.p.order[k].microbatch;
        let event = ty.and_then(|ty| Event::of(self.p, transfer, ty, k)).map(|event| self.trace.push(event));
        let flight = Flight { step: k, microbatch, operands, results: targets, event };
        self.flights.entry(token).or_default().push_back(flight);
        Ok(())
    }

    fn wait(&mut self, k: usize, token: TokenId, instr: &Instr) -> Checked<()> {
        let Some(flight) = self.flights.entry(token).or_default().pop_front() else {
            return refuse(Fault::Unwaited, format!("t{} is waited for, but not in flight", token.0));
        };
        for (held, writes) in [(&flight.operands, false), (&flight.results, true)] {
            for (block, span) in held {
                self.memory.unlock(*block, span, token, writes);
            }
        }
        if let Some(start) = flight.event {
            self.trace.push(Event::wait(start, k));
        }
        for (n, &id) in instr.results.iter().enumerate() {
            let target = self.block(id, k);
            if flight.results.get(n) != Some(&target) {
                return refuse(Fault::InFlight, format!("t{} started towards another slot than it is waited for in", token.0));
            }
            let other = is_per_microbatch(self.p, self.p.ty(id)) && flight.microbatch != self.p.order[k].microbatch;
            if flight.step != k && other {
                let mb = flight.microbatch;
                return refuse(Fault::Microbatch, format!("t{} brings the value of microbatch {mb}", token.0));
            }
            self.memory.write(target.0, &target.1, self.content(id, k))?;
        }
        Ok(())
    }

    fn end_of_section(&mut self, k: usize, section: &Section) -> Checked<()> {
        if self.p.mode == Mode::Eval {
            for output in &self.p.outputs {
                if section.body.iter().any(|i| i.results.contains(&output.buffer)) {
                    self.read(k, section, output.buffer)?;
                }
            }
        }
        self.memory.rest()
    }

    fn end_of_step(&mut self) -> Checked<()> {
        if let Some((token, _)) = self.flights.iter().find(|(_, f)| !f.is_empty()) {
            return refuse(Fault::Unwaited, format!("t{} is never waited for", token.0));
        }
        self.resident("at the end of the step")?;
        for output in self.p.outputs.iter().filter(|_| self.p.mode == Mode::Train) {
            let (block, span) = self.block(output.buffer, usize::MAX);
            if let Err((fault, what)) = self.memory.find(block, &span, output.buffer) {
                return refuse(fault, format!("output {} is not there: {what}", output.name));
            }
        }
        let defined = |id: BufferId| self.p.sections.iter().flat_map(|s| &s.body).any(|i| i.results.contains(&id));
        match self.p.outputs.iter().find(|o| !defined(o.buffer)) {
            Some(o) if self.p.mode == Mode::Eval => refuse(Fault::Unwritten, format!("nothing defines output {}", o.name)),
            _ => Ok(()),
        }
    }
}
