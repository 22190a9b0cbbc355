//! Instruction selection: units become kernels, library calls and transfers on buffers that have no place yet.

use super::units::siblings;
use super::{Stage, emit, part_of};
use crate::error::Result;
use crate::fuse::{Role, Unit};
use crate::graph::{NodeId, Phase};
use crate::ops::Op;
use crate::schedule::Turns;
use crate::train::Output as GraphOutput;
use dcc_program::factors::DimFactors;
use dcc_program::kernel::Kernel;
use dcc_program::program::{
    Action, Buffer, BufferId, Input, Instr, Library, Mode, Output, Param, Place, Program, Scalar, Section, SectionId,
    StageGroup, StoreMode, TokenId, Transfer,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// A program whose buffers have no places, and what `memory` must know to place them.
pub(super) struct Selected {
    pub program: Program,
    /// The buffer whose memory each buffer shares; itself where it has its own.
    pub storage: Vec<BufferId>,
    /// Buffers of parameters, accumulators, scalars.
    pub persistent: Vec<BufferId>,
    /// Sent in their section and waited for in a later execution of it.
    pub sent: Vec<(BufferId, SectionId)>,
    /// How many executions later.
    pub in_flight: BTreeMap<SectionId, u32>,
}

pub(super) struct Selection<'a, 'b> {
    stage: &'b Stage<'a>,
    out: Selected,
    buffers: BTreeMap<NodeId, BufferId>,
    kernels: FxHashMap<Kernel, u32>,
    /// Sums of which a term has been made.
    begun: BTreeSet<NodeId>,
    body: Vec<Instr>,
    tokens: u32,
    /// Waits for sends, at the start of a later execution and at the end of the step.
    pending: Vec<(SectionId, TokenId)>,
}

impl<'a, 'b> Selection<'a, 'b> {
    pub fn new(stage: &'b Stage<'a>, name: &str, mode: Mode, turns: &'b Turns) -> Selection<'a, 'b> {
        let program = Program {
            name: name.to_owned(),
            mode,
            stage: stage.stage,
            stages: stage.plan.stages(),
            mesh: stage.plan.mesh.clone(),
            persistent_bytes: 0,
            scratch_bytes: 0,
            areas: Vec::new(),
            groups: Vec::new(),
            params: Vec::new(),
            inputs: Vec::new(),
            scalars: Vec::new(),
            outputs: Vec::new(),
            buffers: Vec::new(),
            kernels: Vec::new(),
            sections: Vec::new(),
            order: Vec::new(),
        };
        let in_flight = in_flight(stage, turns);
        let out = Selected { program, storage: Vec::new(), persistent: Vec::new(), sent: Vec::new(), in_flight };
        let mut selection = Selection {
            stage,
            out,
            buffers: BTreeMap::new(),
            kernels: FxHashMap::default(),
            begun: BTreeSet::new(),
            body: Vec::new(),
            tokens: 0,
            pending: Vec::new(),
        };
        selection.leaves();
        selection
    }

    fn new_buffer(&mut self, node: NodeId) -> BufferId {
        let id = BufferId(self.out.program.buffers.len() as u32);
        let ty = self.stage.graph.ty(node).clone();
        self.out.program.buffers.push(Buffer { ty, place: Place::Scratch, offset: 0 });
        self.out.storage.push(id);
        id
    }

    /// The buffer of a node's value: an accumulator's for what is added into it, a parameter's for its new value.
    fn buffer(&mut self, node: NodeId) -> BufferId {
        if let Some(&id) = self.buffers.get(&node) {
            return id;
        }
        let into = self.stage.accumulators.get(&node).or_else(|| self.stage.chains.get(&node));
        let id = match into {
            Some(&sum) if sum != node => self.buffer(sum),
            Some(_) => {
                let id = self.new_buffer(node);
                self.out.persistent.push(id);
                id
            }
            None => self.new_buffer(node),
        };
        self.buffers.insert(node, id);
        id
    }

    fn leaves(&mut self) {
        let stage = self.stage;
        for &id in &stage.nodes {
            match &stage.graph[id].op {
                Op::Param(param) => {
                    let buffer = self.buffer(id);
                    self.out.persistent.push(buffer);
                    let trained = stage.updates.values().any(|&leaf| leaf == id);
                    let (name, kind, piece) = (param.name.clone(), param.kind.clone(), param.piece);
                    self.out.program.params.push(Param { buffer, name, kind, piece, trained });
                }
                Op::Scalar(scalar) => {
                    let buffer = self.buffer(id);
                    self.out.persistent.push(buffer);
                    self.out.program.scalars.push(Scalar { buffer, kind: scalar.kind });
                }
                Op::Input(input) => {
                    // Count and forward are fed by the same buffer.
                    let same = self.out.program.inputs.iter().find(|i| i.name == input.name).map(|i| i.buffer);
                    match same {
                        Some(buffer) => {
                            self.buffers.insert(id, buffer);
                        }
                        None => {
                            let buffer = self.buffer(id);
                            self.out.program.inputs.push(Input { buffer, name: input.name.clone() });
                        }
                    }
                }
                _ => {}
            }
        }
        self.out.program.params.sort_by(|a, b| (&a.name, &a.kind, &a.piece).cmp(&(&b.name, &b.kind, &b.piece)));
        self.out.program.inputs.sort_by(|a, b| a.name.cmp(&b.name));
        self.out.program.scalars.sort_by_key(|s| s.kind);
    }

    /// Selects the instructions of one section.
    pub fn section(&mut self, section: SectionId, units: &[Unit]) -> Result<()> {
        if section.kind == Phase::Begin {
            self.zero_accumulators();
        }
        let mut sends =
            self.stage.sends.iter().filter(|(id, _)| self.stage.section(*id) == section).copied().collect::<Vec<_>>();
        let mut done: BTreeSet<NodeId> = BTreeSet::new();
        for &unit in units {
            match unit {
                Unit::Cluster(cluster) => {
                    let cluster = &self.stage.fusion.clusters[cluster.0 as usize];
                    let emitted = emit::cluster(self.stage.graph, &self.stage.fusion, cluster, |n| self.mode(n));
                    done.extend(&cluster.members);
                    self.begun.extend(cluster.members.iter().filter_map(|member| self.stage.chains.get(member)));
                    self.kernel(emitted);
                }
                Unit::Node(id) => {
                    done.extend(siblings(self.stage, id));
                    self.node(id);
                }
            }
            // A value leaves as soon as it and all that leave before it are there.
            while let Some(&(id, to)) = sends.first().filter(|(id, _)| done.contains(id)) {
                self.send(id, to);
                sends.remove(0);
            }
        }
        for (id, to) in sends {
            self.send(id, to);
        }
        if section.kind == Phase::Update {
            self.finish_updates();
            // All that are still under way.
            let waits = self.pending.iter().flat_map(|&(id, token)| (0..self.out.in_flight[&id]).map(move |_| wait(token)));
            let waits: Vec<Instr> = waits.collect();
            self.body.splice(0..0, waits);
        }
        self.push_section(section);
        Ok(())
    }

    /// A section that sends gets a first variant, without the waits for an earlier execution.
    fn push_section(&mut self, id: SectionId) {
        let body = std::mem::take(&mut self.body);
        let SectionId { kind, chunk } = id;
        if body.is_empty() && kind != Phase::Forward {
            return;
        }
        let waits: Vec<Instr> = self.pending.iter().filter(|(of, _)| *of == id).map(|&(_, token)| wait(token)).collect();
        self.out.program.sections.push(Section { kind, chunk, body: body.clone() });
        if !waits.is_empty() && kind.is_per_microbatch() && self.stage.plan.microbatches() > self.out.in_flight[&id] {
            let body = waits.into_iter().chain(body).collect();
            self.out.program.sections.push(Section { kind, chunk, body });
        }
    }

    fn zero_accumulators(&mut self) {
        let sums: Vec<NodeId> = self.stage.accumulators.iter().filter(|(n, into)| n == into).map(|(&n, _)| n).collect();
        for sum in sums {
            let result = self.buffer(sum);
            let into = self.stage.accumulators.iter().filter(|&(&node, &into)| into == sum && node != sum).count();
            let terms = into.max(1) as u32;
            self.push(Action::Library(Library::Zero { terms }), &[result], &[], sum);
        }
    }

    fn mode(&self, node: NodeId) -> StoreMode {
        let begun = self.stage.chains.get(&node).is_some_and(|sum| self.begun.contains(sum));
        match begun || self.stage.accumulators.contains_key(&node) {
            true => StoreMode::Accumulate,
            false => StoreMode::Assign,
        }
    }

    fn push(&mut self, action: Action, results: &[BufferId], operands: &[BufferId], origin: NodeId) {
        self.body.push(Instr {
            results: results.iter().copied().collect(),
            action,
            operands: operands.iter().copied().collect(),
            origin: self.stage.graph.origin(origin).to_owned(),
        });
    }

    fn kernel(&mut self, emitted: emit::Emitted) {
        if emitted.outputs.is_empty() {
            return;
        }
        let next = self.out.program.kernels.len() as u32;
        let id = *self.kernels.entry(emitted.kernel.clone()).or_insert(next);
        if id == next {
            self.out.program.kernels.push(emitted.kernel);
        }
        let origin = emitted.outputs[0];
        let operands: Vec<BufferId> = emitted.inputs.iter().map(|&n| self.buffer(n)).collect();
        let results: Vec<BufferId> = emitted.outputs.iter().map(|&n| self.buffer(n)).collect();
        self.push(Action::Kernel(id), &results, &operands, origin);
    }

    fn node(&mut self, id: NodeId) {
        let stage = self.stage;
        let node = &stage.graph[id];
        let library = match (&node.op, stage.fusion.roles[id.0 as usize]) {
            (_, Role::Inline) => {
                let emitted = emit::single(stage.graph, &stage.fusion, id, self.mode(id));
                return self.kernel(emitted);
            }
            (Op::GradSum(_), _) => return,
            (Op::Reshape(_), _) => {
                let types = [stage.graph.ty(node.operands[0])];
                return self.view(id, Library::Reshape { spec: node.op.rule(&types, &node.ty).spec });
            }
            (Op::ResolveMicrobatches(_), _) => return self.view(id, Library::ResolveMicrobatches),
            (Op::DropMicrobatch(op), _) => return self.view(id, Library::DropMicrobatch { dim: op.dim }),
            (Op::DotGeneral(op), _) => Library::Dot { spec: op.spec.clone(), mode: self.mode(id) },
            (Op::Convolution(op), _) => {
                Library::Convolution { spec: op.spec.clone(), windows: op.windows.clone(), mode: self.mode(id) }
            }
            (Op::ScatterAdd(op), _) => {
                let indexed = op.spec.names[usize::from(op.indexed().0)].clone();
                Library::ScatterAdd { spec: op.spec.clone(), indexed, mode: self.mode(id) }
            }
            (Op::Cumsum(op), _) => Library::Cumsum { dim: op.dim, exclusive: op.exclusive, reverse: op.reverse },
            (Op::TopK(op), _) => Library::TopK { dim: op.dim, k: op.k, largest: op.largest },
            (Op::SliceAxis(op), _) => Library::SliceAxis { axis: op.axis, dim: op.dim },
            (Op::KeepFirst(op), _) => Library::KeepFirst { axis: op.axis },
            (Op::Attention(_) | Op::AttentionGrad(_) | Op::MaxPool(_), _) => return self.several_results(id),
            _ => return self.transfer(id),
        };
        let operands: Vec<BufferId> = node.operands.iter().map(|&o| self.buffer(o)).collect();
        let result = self.buffer(id);
        self.begun.extend(stage.chains.get(&id));
        self.push(Action::Library(library), &[result], &operands, id);
    }

    /// The result shares the operand's memory.
    fn view(&mut self, id: NodeId, library: Library) {
        let operand = self.buffer(self.stage.graph[id].operands[0]);
        let result = self.new_buffer(id);
        self.buffers.insert(id, result);
        self.out.storage[result.0 as usize] = self.out.storage[operand.0 as usize];
        self.push(Action::Library(library), &[result], &[operand], id);
    }

    /// All results in one launch; one that nothing reads still gets a buffer.
    fn several_results(&mut self, id: NodeId) {
        let stage = self.stage;
        let node = &stage.graph[id];
        let operands: Vec<BufferId> = node.operands.iter().map(|&o| self.buffer(o)).collect();
        let (library, count) = match &node.op {
            Op::Attention(op) => (Library::Attention(op.attributes.clone()), 2),
            Op::AttentionGrad(op) => (Library::AttentionGrad(op.attributes.clone()), 3),
            Op::MaxPool(op) => (Library::MaxPool(op.pool.clone()), 2),
            other => unreachable!("{} has one result", other.name()),
        };
        let siblings = siblings(stage, id);
        let results: Vec<BufferId> = (0..count)
            .map(|out| {
                let made = siblings.iter().copied().find(|&s| out_of(&stage.graph[s].op) == out);
                made.map(|s| self.buffer(s)).unwrap_or_else(|| self.unread_result(id, out))
            })
            .collect();
        self.push(Action::Library(library), &results, &operands, id);
    }

    fn unread_result(&mut self, id: NodeId, out: u8) -> BufferId {
        let node = &self.stage.graph[id];
        let types: Vec<_> = node.operands.iter().map(|&o| self.stage.graph.ty(o)).collect();
        let op: Op = match &node.op {
            Op::Attention(op) => crate::ops::Attention { out, ..op.clone() }.into(),
            Op::AttentionGrad(op) => crate::ops::AttentionGrad { out, ..op.clone() }.into(),
            Op::MaxPool(op) => crate::ops::MaxPool { out, ..op.clone() }.into(),
            other => unreachable!("{} has one result", other.name()),
        };
        let mut ty = op.infer(&types).expect("its siblings were inferred");
        let rule = op.rule(&types, &ty);
        let axes_of = |factors: &DimFactors| {
            let found = rule.spec.operands.iter().zip(&types).find_map(|(dims, t)| {
                let at = dims.iter().position(|d| d == factors)?;
                Some(t.sharding.dims[at].clone())
            });
            found.unwrap_or_default()
        };
        ty.sharding.dims = rule.spec.result.iter().map(axes_of).collect();
        // What the result has not is summed over.
        let summed = rule.reduced().flat_map(|factor| axes_of(&[factor].into_iter().collect()));
        ty.sharding = ty.sharding.with_pending(summed.map(|axis| (axis, rule.reduce)));
        let buffer = self.new_buffer(id);
        self.out.program.buffers[buffer.0 as usize].ty = ty;
        buffer
    }

    fn token(&mut self) -> TokenId {
        self.tokens += 1;
        TokenId(self.tokens - 1)
    }

    fn transfer(&mut self, id: NodeId) {
        let stage = self.stage;
        let node = &stage.graph[id];
        let mut operand = node.operands[0];
        let transfer = match &node.op {
            Op::AllReduce(op) => Transfer::AllReduce { reduce: op.reduce, axes: op.axes.clone() },
            Op::ReduceScatter(op) => Transfer::ReduceScatter { axis: op.axis, dim: op.dim },
            Op::AllGather(op) => Transfer::AllGather { axis: op.axis, dim: op.dim },
            Op::AllToAll(op) => Transfer::AllToAll { axis: op.axis, from: op.from, to: op.to },
            Op::Transfer(_) => {
                let (from, chunk) = stage.layout.place(part_of(stage.graph, operand));
                let lane = stage.lane(chunk, stage.section(id).chunk);
                let (token, result) = (self.token(), self.buffer(id));
                self.push(Action::Start { token, transfer: Transfer::Recv { from, lane } }, &[], &[], id);
                return self.push(Action::Wait(token), &[result], &[], id);
            }
            Op::StageSum(op) => {
                let here = |o: &&NodeId| stage.layout.place(part_of(stage.graph, **o)).0 == stage.stage;
                operand = *node.operands.iter().find(here).expect("a stage sum has a part of each of its stages");
                Transfer::StageSum { group: self.group(&op.stages), reduce: op.reduce }
            }
            other => unreachable!("{} is no instruction", other.name()),
        };
        let (token, operand, result) = (self.token(), self.buffer(operand), self.buffer(id));
        self.push(Action::Start { token, transfer }, &[], &[operand], id);
        self.push(Action::Wait(token), &[result], &[], id);
    }

    fn group(&mut self, stages: &[u32]) -> u32 {
        let groups = &mut self.out.program.groups;
        let found = groups.iter().position(|g| g.stages == stages);
        found.unwrap_or_else(|| {
            let name = stages.iter().fold("s".to_owned(), |s, stage| format!("{s}_{stage}"));
            groups.push(StageGroup { name, stages: stages.to_vec() });
            groups.len() - 1
        }) as u32
    }

    /// To a part of the model.
    fn send(&mut self, id: NodeId, to: u32) {
        let (token, operand) = (self.token(), self.buffer(id));
        let section = self.stage.section(id);
        let (to, chunk) = self.stage.layout.place(to);
        let lane = self.stage.lane(section.chunk, chunk);
        self.push(Action::Start { token, transfer: Transfer::Send { to, lane } }, &[], &[operand], id);
        self.out.sent.push((operand, section));
        self.pending.push((section, token));
    }

    /// New values of parameters move into place where they were not computed there.
    fn finish_updates(&mut self) {
        let stage = self.stage;
        for (&new, &leaf) in &stage.updates {
            let (from, to) = (self.buffer(new), self.buffer(leaf));
            self.push(Action::Library(Library::Copy), &[to], &[from], new);
        }
    }

    /// By buffer: the node whose value is written there. A parameter's takes its new value.
    pub fn nodes(&self) -> Vec<Option<NodeId>> {
        let mut nodes = vec![None; self.out.program.buffers.len()];
        let is_term = |node: &NodeId| self.stage.accumulators.contains_key(node) || self.stage.chains.contains_key(node);
        for (&node, buffer) in self.buffers.iter().filter(|(node, _)| !is_term(node)) {
            nodes[buffer.0 as usize] = Some(node);
        }
        for (&new, leaf) in &self.stage.updates {
            nodes[self.buffers[leaf].0 as usize] = Some(new);
        }
        nodes
    }

    /// The selected program with its outputs.
    pub fn finish(mut self) -> Selected {
        let outputs: Vec<(String, NodeId)> = self.stage.outputs.clone();
        for (name, id) in outputs {
            if !matches!(GraphOutput::parse(&name), Some(GraphOutput::New { .. })) {
                let buffer = self.buffer(id);
                self.out.program.outputs.push(Output { buffer, name });
            }
        }
        self.out
    }
}

fn out_of(op: &Op) -> u8 {
    match op {
        Op::Attention(op) => op.out,
        Op::AttentionGrad(op) => op.out,
        Op::MaxPool(op) => op.out,
        _ => 0,
    }
}

/// The wait for a send.
fn wait(token: TokenId) -> Instr {
    Instr { results: Default::default(), action: Action::Wait(token), operands: Default::default(), origin: String::new() }
}

/// By section that sends: how many of its messages may be under way at once.
fn in_flight(stage: &Stage, turns: &Turns) -> BTreeMap<SectionId, u32> {
    let microbatches = stage.plan.microbatches();
    let mut found = BTreeMap::new();
    for &(id, to) in &stage.sends {
        let section = stage.section(id);
        let count = if section.kind.is_per_microbatch() { turns.in_flight(section, to).min(microbatches) } else { 1 };
        let most: &mut u32 = found.entry(section).or_default();
        *most = count.max(*most);
    }
    found
}
