//! Prints programs; the format stands in `text.rs`.

use super::cursor::{escape, quote};
use super::kernel;
use crate::program::*;
use crate::types::TensorType;
use crate::window::windows_text;
use std::fmt::Write;

pub(super) fn program(p: &Program) -> String {
    let mut printer =
        Printer { p, declared: vec![false; p.buffers.len()], section_names: section_names(p), out: String::new() };
    printer.header();
    printer.externals();
    printer.undefined_buffers();
    for i in 0..p.sections.len() {
        printer.section(i);
    }
    printer.order();
    for (i, k) in p.kernels.iter().enumerate() {
        kernel::print(k, i, &mut printer.out);
    }
    printer.out
}

pub(super) fn instruction(p: &Program, instr: &Instr) -> String {
    let mut printer = Printer { p, declared: vec![true; p.buffers.len()], section_names: Vec::new(), out: String::new() };
    printer.instr(instr);
    printer.out
}

/// `forward` for the first section of its kind and chunk, `forward.1` for the second.
pub(super) fn section_names(p: &Program) -> Vec<String> {
    let earlier = |i: usize| p.sections[..i].iter().filter(|s| s.id() == p.sections[i].id()).count();
    let name = |(i, s): (usize, &Section)| match earlier(i) {
        0 => s.id().name(),
        n => format!("{}.{n}", s.id().name()),
    };
    p.sections.iter().enumerate().map(name).collect()
}

fn lane_text(lane: u32) -> String {
    if lane == 0 { String::new() } else { format!(", lane {lane}") }
}

struct Printer<'a> {
    p: &'a Program,
    declared: Vec<bool>,
    section_names: Vec<String>,
    out: String,
}

/// Writing to a string cannot fail.
macro_rules! put {
    ($self:ident, $($arg:tt)*) => { let _ = write!($self.out, $($arg)*); };
}

impl Printer<'_> {
    fn header(&mut self) {
        let p = self.p;
        let mode = match p.mode {
            Mode::Train => "train",
            Mode::Eval => "eval",
        };
        let axes: Vec<String> = p.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
        put!(self, "program {} {mode} stage {}/{} mesh({})\n", quote(&p.name), p.stage, p.stages, axes.join(", "));
        put!(self, "memory persistent={} scratch={}\n", p.persistent_bytes, p.scratch_bytes);
        for (i, area) in p.areas.iter().enumerate() {
            let (from, to) = (area.from.name(), area.to.name());
            put!(self, "area m{i} {from}->{to} bytes={} slots={}\n", area.bytes, area.slots);
        }
        for (i, group) in p.groups.iter().enumerate() {
            let stages: Vec<String> = group.stages.iter().map(u32::to_string).collect();
            put!(self, "group g{i} {} stages({})\n", quote(&group.name), stages.join(", "));
        }
    }

    fn externals(&mut self) {
        let p = self.p;
        for param in &p.params {
            self.out.push_str("param ");
            self.target(param.buffer);
            match &param.kind {
                ParamKind::Weight => self.out.push_str(" weight"),
                ParamKind::State(name) => {
                    put!(self, " state {}", quote(name));
                }
            }
            put!(self, " {}", quote(&param.name));
            if let Some(piece) = param.piece {
                put!(self, " piece(dim {}, {}..{})", piece.dim, piece.start, piece.end);
            }
            self.out.push_str(if param.trained { " trained\n" } else { "\n" });
        }
        for input in &p.inputs {
            self.out.push_str("input ");
            self.target(input.buffer);
            put!(self, " {}\n", quote(&input.name));
        }
        for scalar in &p.scalars {
            self.out.push_str("scalar ");
            self.target(scalar.buffer);
            put!(self, " {}\n", scalar.kind.name());
        }
        for output in &p.outputs {
            put!(self, "output b{} {}\n", output.buffer.0, quote(&output.name));
        }
    }

    /// Buffers that no section defines.
    fn undefined_buffers(&mut self) {
        let mut defined = self.declared.clone();
        let results = self.p.sections.iter().flat_map(|s| &s.body).flat_map(|i| &i.results);
        for id in results {
            if let Some(slot) = defined.get_mut(id.0 as usize) {
                *slot = true;
            }
        }
        for id in (0..self.p.buffers.len()).filter(|&i| !defined[i]) {
            self.out.push_str("buffer ");
            self.target(BufferId(id as u32));
            self.out.push('\n');
        }
    }

    /// `b4`, with type and place where it is mentioned first.
    fn target(&mut self, id: BufferId) {
        put!(self, "b{}", id.0);
        let Some(declared) = self.declared.get_mut(id.0 as usize) else { return };
        if std::mem::replace(declared, true) {
            return;
        }
        let buffer = self.p.buffer(id);
        self.out.push(' ');
        self.tensor_type(&buffer.ty);
        let _ = match buffer.place {
            Place::Persistent => write!(self.out, " @p{}", buffer.offset),
            Place::Scratch => write!(self.out, " @s{}", buffer.offset),
            Place::Area(a) => write!(self.out, " @m{a}+{}", buffer.offset),
        };
    }

    fn tensor_type(&mut self, ty: &TensorType) {
        self.out.push_str(&ty.text(&self.p.mesh));
    }

    fn section(&mut self, index: usize) {
        put!(self, "section {}\n", self.section_names[index]);
        for instr in &self.p.sections[index].body {
            self.instr(instr);
            if !instr.origin.is_empty() {
                put!(self, "  # {}", escape(&instr.origin));
            }
            self.out.push('\n');
        }
    }

    fn instr(&mut self, instr: &Instr) {
        for (i, &result) in instr.results.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { "" });
            self.target(result);
        }
        if let Action::Start { token, .. } = instr.action {
            put!(self, "t{}", token.0);
        }
        let accumulates = matches!(
            instr.action,
            Action::Library(
                Library::Dot { mode: StoreMode::Accumulate, .. }
                    | Library::ScatterAdd { mode: StoreMode::Accumulate, .. }
                    | Library::Convolution { mode: StoreMode::Accumulate, .. }
            )
        );
        if !instr.results.is_empty() || matches!(instr.action, Action::Start { .. }) {
            self.out.push_str(if accumulates { " += " } else { " = " });
        }
        self.action(&instr.action);
        for (i, operand) in instr.operands.iter().enumerate() {
            put!(self, "{}b{}", if i > 0 { ", " } else { " " }, operand.0);
        }
    }

    fn action(&mut self, action: &Action) {
        match action {
            Action::Kernel(n) => {
                put!(self, "fused.{n}");
            }
            Action::Library(library) => self.library(library),
            Action::Start { transfer, .. } => {
                self.out.push_str("start ");
                self.transfer(transfer);
            }
            Action::Wait(token) => {
                put!(self, "wait t{}", token.0);
            }
        }
    }

    fn library(&mut self, library: &Library) {
        let axis = |a: crate::AxisId| self.p.mesh.axes.get(a.0 as usize).map_or("?", |a| &a.name);
        let text = match library {
            Library::Dot { spec, .. } => format!("dot({})", spec.text()),
            Library::ScatterAdd { spec, indexed, .. } => format!("scatter_add({}; {indexed})", spec.text()),
            Library::Convolution { spec, windows, .. } => format!("convolution({}; {})", spec.text(), windows_text(windows)),
            Library::MaxPool(pool) => format!("max_pool({})", pool.text()),
            Library::Attention(a) => format!("attention({})", attention(a)),
            Library::AttentionGrad(a) => format!("attention_grad({})", attention(a)),
            Library::Cumsum { dim, exclusive, reverse } => {
                let exclusive = if *exclusive { ", exclusive" } else { "" };
                format!("cumsum(dim {dim}{exclusive}{})", if *reverse { ", reverse" } else { "" })
            }
            Library::TopK { dim, k, largest } => {
                format!("top_k(dim {dim}, k {k}{})", if *largest { ", largest" } else { "" })
            }
            Library::Reshape { spec } => format!("reshape({})", spec.text()),
            Library::Copy => "copy".to_owned(),
            Library::Zero { terms: 1 } => "zero".to_owned(),
            Library::Zero { terms } => format!("zero(terms {terms})"),
            Library::ResolveMicrobatches => "resolve".to_owned(),
            Library::SliceAxis { axis: a, dim } => format!("slice({}, dim {dim})", axis(*a)),
            Library::KeepFirst { axis: a } => format!("keep_first({})", axis(*a)),
            Library::DropMicrobatch { dim } => format!("drop_mb(dim {dim})"),
        };
        self.out.push_str(&text);
    }

    fn transfer(&mut self, transfer: &Transfer) {
        let axis = |a: crate::AxisId| self.p.mesh.axes.get(a.0 as usize).map_or("?", |a| a.name.as_str());
        let text = match transfer {
            Transfer::AllReduce { reduce, axes } => {
                let axes: Vec<&str> = axes.iter().map(|&a| axis(a)).collect();
                format!("all_reduce.{}({})", reduce.name(), axes.join(", "))
            }
            Transfer::ReduceScatter { axis: a, dim } => format!("reduce_scatter({}, dim {dim})", axis(*a)),
            Transfer::AllGather { axis: a, dim } => format!("all_gather({}, dim {dim})", axis(*a)),
            Transfer::AllToAll { axis: a, from, to } => format!("all_to_all({}, dim {from} -> {to})", axis(*a)),
            Transfer::Send { to, lane } => format!("send(to {to}{})", lane_text(*lane)),
            Transfer::Recv { from, lane } => format!("recv(from {from}{})", lane_text(*lane)),
            Transfer::StageSum { group, reduce } => format!("stage_sum.{}(g{group})", reduce.name()),
        };
        self.out.push_str(&text);
    }

    /// Steps of one section and equal slots whose microbatches count up stand together: `forward 0..3 [0]`.
    fn order(&mut self) {
        const STEPS_PER_LINE: usize = 8;
        let steps = &self.p.order;
        let (mut i, mut printed) = (0, 0);
        while i < steps.len() {
            let step = &steps[i];
            let follows = |k: usize, next: &Step| {
                next.section == step.section
                    && next.slots == step.slots
                    && u32::try_from(k).ok().and_then(|k| step.microbatch.checked_add(k)) == Some(next.microbatch)
            };
            let run = steps[i..].iter().enumerate().take_while(|(k, next)| follows(*k, next)).count();
            let end = if printed % STEPS_PER_LINE == 0 { "order " } else { "; " };
            let name = self.section_names.get(step.section as usize).map_or("?", String::as_str);
            put!(self, "{end}{name}");
            if run > 1 {
                put!(self, " {}..{}", step.microbatch, u64::from(step.microbatch) + run as u64);
            } else if step.microbatch != 0 || self.is_per_microbatch(step) {
                put!(self, " {}", step.microbatch);
            }
            self.slots(step);
            i += run;
            printed += 1;
            if printed % STEPS_PER_LINE == 0 || i == steps.len() {
                self.out.push('\n');
            }
        }
    }

    fn is_per_microbatch(&self, step: &Step) -> bool {
        self.p.sections.get(step.section as usize).is_some_and(|s| s.kind.is_per_microbatch())
    }

    /// Slots are left out where all are 0.
    fn slots(&mut self, step: &Step) {
        if step.slots.len() != self.p.areas.len() || step.slots.iter().any(|&s| s != 0) {
            let slots: Vec<String> = step.slots.iter().map(u32::to_string).collect();
            put!(self, " [{}]", slots.join(" "));
        }
    }
}

fn attention(a: &Attention) -> String {
    let mask = match a.mask {
        MaskKind::None => "",
        MaskKind::Additive => ", mask additive",
        MaskKind::Boolean => ", mask boolean",
    };
    let scale = f64::from_bits(a.scale);
    let scale = if scale.is_finite() { format!("{scale:?}") } else { format!("{:#018x}", a.scale) };
    format!("{}; scale {scale}{}{mask}", a.spec.text(), if a.causal { ", causal" } else { "" })
}
