//! A GPU as a rank's device: its arena, the kernels of a rank's programs, prepared calls on them.
//!
//! Instructions are prepared as texts; `finish` compiles all new ones at once. A call is a kernel's number, its operands and what
//! microbatches add to its parameters.

use super::attentions::Trial;
use super::direct::{self, Together};
use super::driver::{Buffer, Gpu, Pinned, is_abandoned};
use super::groups::{AsOne, Launched, Member, Row, Step};
use super::kernels::Kernels;
use super::nccl::{self, UniqueIds};
use super::queue::Graph;
use super::shipped::Shipped;
use super::tails::{Pair, Tail};
use super::vendor::{Chosen, Own, Vendor};
use crate::comm::{Label, Peer};
use crate::cpu::Memory;
use crate::error::{Error, Result};
use crate::exec::{Bases, Bound, Site, Span, World};
use dcc_kernels::cuda::Source;
use dcc_kernels::cuda::group::Argument;
use dcc_kernels::cuda::library::product::Beside;
use dcc_kernels::tile::Nest;
use dcc_program::kernel::Kernel;
use dcc_program::program::Instr;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What kernels move at once: operands begin at multiples of it.
const ALIGN: usize = 16;
/// Of the host's memory that inputs go through.
const STAGING: usize = 32 << 20;

pub struct Cuda {
    gpu: Arc<Gpu>,
    /// The host's arena, and its like on the GPU.
    memory: Memory,
    /// Peers that read it keep it alive.
    arena: Arc<Buffer>,
    staging: Pinned,
    /// What kernels share; the last is as large as any needs. Graphs may still use earlier ones.
    workspaces: Vec<Buffer>,
    texts: Texts,
    /// Kernels of `texts`, in sets that were compiled together.
    compiled: Vec<Kernels>,
    /// The set and the place in it, by kernel; `None`: it was not wanted so far.
    places: Vec<Option<(usize, usize)>>,
    /// The vendor's libraries, and by kernel what they compute in its place.
    vendor: Vendor,
    chosen: Vec<Option<Chosen>>,
    /// By kernel, of products with tails: those that are slower than one after the other.
    apart: BTreeSet<usize>,
    words: Vec<u64>,
}

/// The texts of all kernels that instructions need. No GPU is needed to make them.
#[derive(Default)]
pub struct Texts {
    known: HashMap<Key, usize>,
    /// Of groups, by kernel and launch of each kind and how many there are.
    pub(super) groups: BTreeMap<Vec<((usize, usize), usize)>, usize>,
    /// Of products with tails; `None`: there is no such kernel.
    pub(super) tails: BTreeMap<Pair, Option<usize>>,
    pub(super) sources: Vec<Source>,
    /// Those that run by themselves, are groups or have tails.
    wanted: BTreeSet<usize>,
    /// Those that were in a batch.
    given: BTreeSet<usize>,
    /// Where each program's end.
    ends: Vec<usize>,
    /// Bytes that rows need.
    pub(super) workspace: usize,
    pub(super) launched: Launched,
    /// Of sources: the first instruction's that each was made for. Empty where nobody gave it.
    origins: Vec<String>,
}

/// What a text is made for: a loop nest, or a library operation's description.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Nest(Box<Nest>),
    Library(String),
}

/// A prepared call.
pub struct Call {
    pub(super) kernel: usize,
    pub(super) operands: Box<[Span]>,
    /// The first operands, which it does not write.
    pub(super) reads: usize,
    /// Parameters at microbatch 0, and what each microbatch adds.
    parameters: Box<[(i64, i64)]>,
    flops: u64,
    /// Bytes into operand 0 at which the call begins, and what each microbatch adds.
    skip: (usize, usize),
    /// Whether it defines its result, and one generated kernel reads it and nothing else does.
    pub(super) is_passed_on: bool,
    /// Of a product, the kernel that has its tail too. Where that is taken in rows, the own kernel is taken otherwise: the bits are the same.
    pub(super) tail: Cell<Option<usize>>,
}

impl Call {
    pub fn flops(&self) -> u64 {
        self.flops
    }

    pub(super) fn beginning(mut self, skip: usize, next: usize) -> Call {
        self.skip = (skip, next);
        self
    }
}

impl Cuda {
    /// GPU `ordinal`, with memory for all of the host's arena and with machine code that was `shipped`; `own`: what the vendor's libraries leave alone; work that stands still for `limit` is an error. Errors: no such GPU, or one
    /// without so much memory.
    pub fn new(ordinal: u32, memory: Memory, limit: Duration, own: Own, shipped: Shipped) -> Result<Cuda> {
        let gpu = Arc::new(Gpu::open(ordinal, shipped)?);
        gpu.stream().set_limit(limit);
        let arena = Arc::new(gpu.allocate(memory.bytes())?);
        let staging = gpu.pinned(STAGING)?;
        let vendor = Vendor::open(&gpu, own)?;
        let (compiled, places, chosen, apart, words) = (Vec::new(), Vec::new(), Vec::new(), BTreeSet::new(), Vec::new());
        Ok(Cuda {
            gpu,
            memory,
            arena,
            staging,
            workspaces: Vec::new(),
            texts: Texts::default(),
            compiled,
            places,
            vendor,
            chosen,
            apart,
            words,
        })
    }

    /// Lets ranks that are threads of this process move what they transfer from GPU to GPU, where all reach each other. Every rank calls it.
    pub fn connect(&self, together: &Together, comm: &mut Peer, world: &World) -> Result<()> {
        direct::connect(together, comm, &self.gpu, &self.arena, world.reductions())
    }

    /// The same by NCCL.
    pub fn connect_by_nccl(&self, ids: &UniqueIds, comm: &mut Peer, world: &World, limit: Duration) -> Result<()> {
        nccl::connect(ids, comm, &self.gpu, &self.arena, world.channels(), limit)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Where instructions are prepared; `finish` makes them ready.
    pub fn texts(&mut self) -> &mut Texts {
        &mut self.texts
    }

    pub fn kernels(&self) -> usize {
        self.texts.wanted.len()
    }

    /// As `Device::put`.
    pub fn put(&mut self, range: Range<usize>) -> Result<()> {
        let Cuda { gpu, memory, arena, staging, .. } = self;
        memory.with(range.clone(), |bytes| gpu.send(arena, range.start, bytes, staging))
    }

    /// As `Device::get`.
    pub fn get(&mut self, range: Range<usize>) -> Result<()> {
        let Cuda { gpu, memory, arena, .. } = self;
        memory.with(range.clone(), |bytes| gpu.read(arena, range.start, bytes))
    }

    /// As `Device::finish`.
    pub fn finish(&mut self) -> Result<()> {
        let batch = self.texts.batch();
        self.compile(&batch)
    }

    /// Makes every kernel ready to run by itself.
    pub fn finish_alone(&mut self) -> Result<()> {
        self.finish()?;
        self.texts.rest().iter().try_for_each(|batch| self.compile(batch))
    }

    fn compile(&mut self, batch: &[usize]) -> Result<()> {
        self.places.resize(self.texts.sources.len(), None);
        self.chosen.resize_with(self.texts.sources.len(), || None);
        let sources = self.texts.sources_of(batch);
        let wanted = sources.iter().map(|source| source.workspace).chain([self.texts.workspace]).max().unwrap_or(0);
        if self.workspaces.last().map_or(0, Buffer::bytes) < wanted {
            self.workspaces.push(self.gpu.allocate(wanted)?);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let set = self.compiled.len();
        self.compiled.push(Kernels::compile(&self.gpu, &sources)?);
        batch.iter().enumerate().for_each(|(place, &kernel)| self.places[kernel] = Some((set, place)));
        for &kernel in batch {
            self.chosen[kernel] = self.choose(kernel)?;
        }
        for &kernel in batch {
            if let Some(pair) = self.texts.pair(kernel)
                && self.is_better_apart(kernel, pair)?
            {
                self.apart.insert(kernel);
            }
        }
        Ok(())
    }

    /// What a library of the vendor's computes in place of a kernel, where it is faster: operands lie at the arena's begin meanwhile, before it
    /// has contents.
    fn choose(&mut self, kernel: usize) -> Result<Option<Chosen>> {
        let Some(terms) = self.texts.sources[kernel].terms.filter(|terms| self.vendor.has(terms)) else { return Ok(None) };
        let (words, end) = self.laid_out(kernel);
        if !self.has_room(end) {
            return Ok(None);
        }
        let Cuda { gpu, arena, texts, compiled, places, vendor, .. } = self;
        let bytes = &texts.sources[kernel].operand_bytes;
        let (set, place) = places[kernel].expect("it was made ready before");
        let mut own = words.clone();
        // SAFETY: operands lie one after the other inside of the arena, the workspace is as large as that of any kernel.
        let mut own = || unsafe { compiled[set].start(gpu, place, &mut own) };
        vendor.choose(&terms, Trial { gpu, arena, at: &words[..bytes.len()], bytes, own: &mut own })
    }

    /// Whether a product, the vendor's where that was chosen, and the kernel behind it take less time than the own product with its tail. Without
    /// the vendor's library nothing is timed.
    fn is_better_apart(&self, kernel: usize, pair: Pair) -> Result<bool> {
        let Cuda { gpu, texts, vendor, chosen, .. } = self;
        let Some(products) = vendor.products() else { return Ok(false) };
        let (mut words, end) = self.laid_out(kernel);
        let operands = texts.sources[kernel].operand_bytes.len();
        let (result, end) = match pair.beside {
            Beside::Stored => (words[2], end),
            Beside::Dropped => (end, end + texts.sources[pair.product].operand_bytes[2] as u64),
        };
        if !self.has_room(end) {
            return Ok(true);
        }
        let mut of_product = vec![words[0], words[1], result];
        of_product.extend(self.workspaces.last().filter(|_| texts.sources[pair.product].workspace > 0).map(Buffer::address));
        let mut of_nest = words[pair.beside.operands()..operands].to_vec();
        of_nest.insert(pair.given, result);
        of_nest.extend(texts.sources[pair.nest].parameters.iter().map(|_| 0));
        let mut as_one = || self.try_out(kernel, &mut words);
        let mut apart = || {
            match &chosen[pair.product] {
                Some(chosen) => vendor.start(gpu.stream(), chosen, &of_product[..3])?,
                None => self.try_out(pair.product, &mut of_product)?,
            }
            self.try_out(pair.nest, &mut of_nest)
        };
        products.apart_is_faster(gpu.stream(), &texts.name_of(pair), &mut as_one, &mut apart)
    }

    /// What the launches of a kernel get with operands one after the other from the arena's begin on, workspace and parameters, and where the
    /// operands end.
    fn laid_out(&self, kernel: usize) -> (Vec<u64>, u64) {
        let source = &self.texts.sources[kernel];
        let mut at = self.arena.address();
        let mut words: Vec<u64> = Vec::new();
        for bytes in &source.operand_bytes {
            words.push(at);
            at += bytes.next_multiple_of(ALIGN) as u64;
        }
        words.extend(self.workspaces.last().filter(|_| source.workspace > 0).map(Buffer::address));
        words.extend(source.parameters.iter().map(|_| 0));
        (words, at)
    }

    fn has_room(&self, end: u64) -> bool {
        end <= self.arena.address() + self.arena.bytes() as u64
    }

    /// Starts a kernel that is ready, on operands that `laid_out` gave and that have room.
    fn try_out(&self, kernel: usize, words: &mut [u64]) -> Result<()> {
        let (set, place) = self.places[kernel].expect("it was made ready before");
        // SAFETY: operands lie one after the other inside of the arena, the workspace is as large as that of any kernel.
        unsafe { self.compiled[set].start(&self.gpu, place, words) }
    }

    /// Copies what is at byte `at` of the GPU's memory, behind all work so far.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        self.gpu.read(&self.arena, at, into)
    }

    /// The GPU's.
    pub fn name(&self) -> &str {
        self.gpu.name()
    }

    /// Until all work is done.
    pub fn wait(&self) -> Result<()> {
        self.gpu.wait()
    }

    /// Runs the calls of a row as one, and keeps what they are; `label`: what errors name.
    pub fn record(&mut self, row: &Row, calls: &[&Call], bases: &Bases, microbatch: u32, label: &Label) -> Result<Graph> {
        self.gpu.stream().begin_graph()?;
        let started = row.steps.iter().try_for_each(|Step { as_one, members }| match *as_one {
            AsOne::Group(group) => self.start_group(group, members, calls, (bases, microbatch)),
            AsOne::Tail { tail, .. } if !self.apart.contains(&tail.kernel) => {
                self.start_tail(tail, members, calls, (bases, microbatch))
            }
            AsOne::Alone | AsOne::Tail { .. } => {
                members.iter().try_for_each(|own| self.start(calls[own.call], own, (bases, microbatch)))
            }
        });
        let graph = self.gpu.stream().end_graph();
        started?;
        let graph = graph?;
        self.replay(&graph, label)?;
        Ok(graph)
    }

    /// Runs once more what was recorded.
    pub fn replay(&mut self, graph: &Graph, label: &Label) -> Result<()> {
        // SAFETY: graphs are of calls on this device, whose arena, workspace and kernels live as long as it.
        unsafe { self.gpu.stream().run(graph)? };
        self.gpu.stream().name(label)
    }

    /// As `Device::run`; errors name the work by `label`.
    pub fn run(&mut self, call: &Call, bases: &Bases, microbatch: u32, label: &Label) -> Result<()> {
        let launches = 0..self.texts.launches(call);
        self.start(call, &Member { call: 0, launches, workspace: 0 }, (bases, microbatch))?;
        self.gpu.stream().name(label)
    }

    /// Starts the launches that `member` says.
    fn start(&mut self, call: &Call, member: &Member, (bases, microbatch): (&Bases, u32)) -> Result<()> {
        let Cuda { gpu, arena, workspaces, texts, compiled, places, vendor, chosen, apart, words, .. } = self;
        let place = Place { arena, bases, microbatch, workspace: workspaces.last(), member };
        words.clear();
        words.extend((0..call.operands.len()).map(|n| place.word(call, Argument::Operand(n))));
        let own = call.tail.get().is_some_and(|kernel| !apart.contains(&kernel));
        if let (Some(chosen), false) = (&chosen[call.kernel], own) {
            return vendor.start(gpu.stream(), chosen, words);
        }
        words.extend((texts.sources[call.kernel].workspace > 0).then(|| place.word(call, Argument::Workspace)));
        words.extend((0..call.parameters.len()).map(|n| place.word(call, Argument::Parameter(n))));
        let (set, kernel) = places[call.kernel].expect("what runs by itself was made ready");
        // SAFETY: `Texts::call` saw that operands are as large as the kernel uses them, and each lies inside of the arena (rows that begin
        // later end where their span does); the workspace is as large as that of any kernel. The stream runs calls in the program's order,
        // or in one that means the same.
        unsafe { compiled[set].start_some(gpu, kernel, member.launches.clone(), words) }
    }

    /// Starts a product, the first member, with the second as its tail.
    fn start_tail(&mut self, tail: Tail, members: &[Member], calls: &[&Call], at: (&Bases, u32)) -> Result<()> {
        let Tail { kernel, pair } = tail;
        let Cuda { gpu, arena, workspaces, texts, compiled, places, words, .. } = self;
        let [product, nest] = [0, 1].map(|n| (calls[members[n].call], &members[n]));
        let workspace = workspaces.last();
        let word = |(call, member): (&Call, &Member), argument| {
            Place { arena, bases: at.0, microbatch: at.1, workspace, member }.word(call, argument)
        };
        words.clear();
        words.extend((0..pair.beside.operands()).map(|n| word(product, Argument::Operand(n))));
        let others = (0..nest.0.operands.len()).filter(|n| *n != pair.given);
        words.extend(others.map(|n| word(nest, Argument::Operand(n))));
        words.extend((texts.sources[kernel].workspace > 0).then(|| word(product, Argument::Workspace)));
        words.extend((0..nest.0.parameters.len()).map(|n| word(nest, Argument::Parameter(n))));
        let (set, kernel) = places[kernel].expect("it was made ready");
        // SAFETY: as in `start`, for both; `Texts::with_tails` saw that the nest writes neither operand of the product.
        unsafe { compiled[set].start(gpu, kernel, words) }
    }

    fn start_group(&mut self, group: usize, members: &[Member], calls: &[&Call], at: (&Bases, u32)) -> Result<()> {
        let Cuda { gpu, arena, workspaces, texts, compiled, places, words, .. } = self;
        words.clear();
        for member in members {
            let place = Place { arena, bases: at.0, microbatch: at.1, workspace: workspaces.last(), member };
            let call = calls[member.call];
            let arguments = &texts.sources[call.kernel].bodies[member.launches.start].arguments;
            words.extend(arguments.iter().map(|argument| place.word(call, *argument)));
        }
        let (set, kernel) = places[group].expect("groups were made ready");
        // SAFETY: as in `start`, for each member; none writes what another reads or writes.
        unsafe { compiled[set].start(gpu, kernel, words) }
    }
}

/// Where a call's operands are in one execution of its section.
struct Place<'a> {
    arena: &'a Buffer,
    bases: &'a Bases,
    microbatch: u32,
    workspace: Option<&'a Buffer>,
    member: &'a Member,
}

impl Place<'_> {
    fn word(&self, call: &Call, argument: Argument) -> u64 {
        match argument {
            Argument::Operand(n) => {
                let (span, arena) = (call.operands[n], self.arena);
                let offset = self.bases.offset(span);
                assert!(offset + span.bytes <= arena.bytes(), "{span:?} outside of an arena of {} bytes", arena.bytes());
                let skip = if n == 0 { call.skip.0 + call.skip.1 * self.microbatch as usize } else { 0 };
                arena.address() + (offset + skip) as u64
            }
            Argument::Workspace => self.workspace.map_or(0, Buffer::address) + self.member.workspace as u64,
            Argument::Parameter(n) => {
                let (base, step) = call.parameters[n];
                (base + step * i64::from(self.microbatch)) as u64
            }
        }
    }
}

impl Drop for Cuda {
    /// What is freed next may still be in use.
    fn drop(&mut self) {
        if !is_abandoned() {
            let _ = self.gpu.wait();
            // Of libraries whose handles and stream are still there.
            self.chosen.clear();
            self.vendor = Vendor::none();
        }
    }
}

impl Texts {
    /// Those of kernels that are wanted so far.
    pub fn sources(&self) -> Vec<Source> {
        self.sources_of(&self.wanted.iter().copied().collect::<Vec<_>>())
    }

    pub(super) fn sources_of(&self, kernels: &[usize]) -> Vec<Source> {
        kernels.iter().map(|&kernel| self.sources[kernel].clone()).collect()
    }

    /// Ends a program: what is wanted and was in no batch before, to be compiled together. The same for every run of an artifact, as are
    /// those of `rest`, so that code may come with it.
    pub(super) fn batch(&mut self) -> Vec<usize> {
        if self.ends.last() != Some(&self.sources.len()) {
            self.ends.push(self.sources.len());
        }
        let new: Vec<usize> = self.wanted.difference(&self.given).copied().collect();
        self.given.extend(&new);
        new
    }

    /// Wants all that programs have: a batch of each.
    pub(super) fn rest(&mut self) -> Vec<Vec<usize>> {
        let (mut first, mut batches) = (0, Vec::new());
        if self.given.len() == self.sources.len() {
            return batches;
        }
        for &end in &self.ends {
            let new: Vec<usize> = (first..end).filter(|kernel| !self.given.contains(kernel)).collect();
            self.given.extend(&new);
            self.wanted.extend(&new);
            batches.push(new);
            first = end;
        }
        batches
    }

    /// What each of `sources` was made for.
    pub fn origins(&self) -> impl Iterator<Item = &str> {
        self.wanted.iter().map(|&kernel| self.origin(kernel))
    }

    pub(super) fn origin(&self, kernel: usize) -> &str {
        self.origins.get(kernel).map_or("", String::as_str)
    }

    /// The call runs by itself.
    pub fn want(&mut self, call: &Call) {
        self.wanted.insert(call.kernel);
    }

    /// Adds a kernel of several, the first of which is `first`.
    pub(super) fn add(&mut self, source: Source, first: usize, members: usize) {
        let origin = self.origins.get(first).map(|origin| format!("{origin} and {} more", members - 1));
        self.wanted.insert(self.sources.len());
        self.sources.push(source);
        self.origins.resize(self.sources.len() - 1, String::new());
        self.origins.push(origin.unwrap_or_default());
    }

    /// Says what the texts that were made since the last such call are for.
    pub fn give_origin(&mut self, origin: &str) {
        self.origins.resize(self.sources.len(), origin.to_owned());
    }

    /// As `Device::kernel`.
    pub fn kernel(&mut self, site: &Site<'_>, kernel: &Kernel, instr: &Instr) -> Result<Call> {
        let Bound { nest, operands, offsets } = Bound::new(site, kernel, instr)?;
        let source = |key: &Key, name: &str| match key {
            Key::Nest(nest) => Source::new(nest, name),
            Key::Library(_) => unreachable!("it was made above"),
        };
        let mut call = self.call(Key::Nest(Box::new(nest)), operands, 0, source)?;
        call.parameters = self.sources[call.kernel].parameters.iter().map(|&n| offsets[n]).collect();
        call.reads = instr.operands.len();
        Ok(call)
    }

    /// A call of the kernel that was made for `key`, or is made now by `source`.
    pub(super) fn call(
        &mut self,
        key: Key,
        spans: Vec<Span>,
        flops: u64,
        source: impl FnOnce(&Key, &str) -> std::result::Result<Source, String>,
    ) -> Result<Call> {
        let kernel = match self.known.get(&key) {
            Some(&known) => known,
            None => {
                let number = self.sources.len();
                self.sources.push(source(&key, &format!("kernel{number}")).map_err(Error::device)?);
                self.known.insert(key, number);
                number
            }
        };
        let wanted = &self.sources[kernel].operand_bytes;
        let fits = |(span, &bytes): (&Span, &usize)| span.bytes >= bytes && span.offset.is_multiple_of(ALIGN);
        if spans.len() != wanted.len() || !spans.iter().zip(wanted).all(fits) {
            return Err(Error::artifact("a kernel's operands have other types than the kernel, or lie where it does not read"));
        }
        let (operands, parameters, tail) = (spans.into(), Box::default(), Cell::new(None));
        Ok(Call { kernel, operands, reads: 0, parameters, flops, skip: (0, 0), is_passed_on: false, tail })
    }
}
