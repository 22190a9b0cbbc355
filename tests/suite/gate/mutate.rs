//! One change to a program, as a compiler could get it wrong.
//!
//! `STRUCTURE` has what the gate answers for: which instructions run, when, how often, in which order, on which memory; who
//! tells whom what; how values are sharded and what is still pending. `FUNCTION` has what it cannot know, because a program
//! of another function is as sound: another operand of the same type, another kernel, another constant. What the gate promises
//! of those is less: every mesh computes the same.

use dcc_program::AxisId;
use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, Expr, Stmt, StoreMode};
use dcc_program::program::*;
use dcc_program::types::{AxisList, Reduce};
use std::collections::BTreeMap;

/// xorshift64*: the same mutants on every run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }

    fn of<T: Clone>(&mut self, items: &[T]) -> Option<T> {
        items.get(self.below(items.len())).cloned()
    }
}

/// `None` where there is nothing to change.
pub type Change = fn(&mut Program, &mut Random) -> Option<()>;
pub type Mutation = (&'static str, Change);

pub const STRUCTURE: &[Mutation] = &[
    ("an instruction dropped", drop_one),
    ("an instruction repeated", repeat),
    ("an instruction repeated elsewhere", repeat_elsewhere),
    ("neighbours swapped", swap),
    ("an instruction moved", move_within),
    ("an instruction in another section", move_across),
    ("a transfer skipped", skip_transfer),
    ("a transfer done twice", repeat_transfer),
    ("another token", token),
    ("another transfer", transfer),
    ("another operation", operation),
    ("another result", result),
    ("another offset", offset),
    ("another block", place),
    ("another size of a block", size),
    ("another slot", slot),
    ("another order", order),
    ("another sharding", sharding),
    ("another pending sum", pending),
    ("another dtype", dtype),
    ("another part of a parameter", parameter),
    ("another group or mesh", mesh),
];

pub const FUNCTION: &[Mutation] = &[
    ("another operand", operand),
    ("another kernel", kernel),
    ("another expression", expression),
    ("another shape", shape),
    ("another output", output),
];

/// Section and instruction.
type Site = (usize, usize);

fn sites(p: &Program, wanted: impl Fn(&Instr) -> bool) -> Vec<Site> {
    let all = p.sections.iter().enumerate().flat_map(|(s, section)| (0..section.body.len()).map(move |i| (s, i)));
    all.filter(|&(s, i)| wanted(&p.sections[s].body[i])).collect()
}

fn any(p: &Program, r: &mut Random) -> Option<Site> {
    r.of(&sites(p, |_| true))
}

fn at(p: &mut Program, (s, i): Site) -> &mut Instr {
    &mut p.sections[s].body[i]
}

fn drop_one(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    p.sections[s].body.remove(i);
    Some(())
}

fn repeat(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    let instr = at(p, (s, i)).clone();
    p.sections[s].body.insert(i + 1, instr);
    Some(())
}

fn repeat_elsewhere(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    let instr = at(p, (s, i)).clone();
    let to = r.below(p.sections[s].body.len() + 1);
    p.sections[s].body.insert(to, instr);
    Some(())
}

fn swap(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    let body = &mut p.sections[s].body;
    (i + 1 < body.len()).then(|| body.swap(i, i + 1))
}

fn move_within(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    let instr = p.sections[s].body.remove(i);
    let to = r.below(p.sections[s].body.len() + 1);
    p.sections[s].body.insert(to, instr);
    (to != i).then_some(())
}

fn move_across(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = any(p, r)?;
    let to = r.below(p.sections.len());
    let instr = p.sections[s].body.remove(i);
    let place = r.below(p.sections[to].body.len() + 1);
    p.sections[to].body.insert(place, instr);
    (to != s).then_some(())
}

fn is_start(instr: &Instr) -> bool {
    matches!(instr.action, Action::Start { .. })
}

fn token_of(instr: &Instr) -> Option<TokenId> {
    match instr.action {
        Action::Start { token, .. } | Action::Wait(token) => Some(token),
        _ => None,
    }
}

/// The transfer is gone from all sections; who read its result reads its operand.
fn skip_transfer(p: &mut Program, r: &mut Random) -> Option<()> {
    let site = r.of(&sites(p, is_start))?;
    let start = at(p, site).clone();
    let token = token_of(&start)?;
    let waits = sites(p, |i| i.action == Action::Wait(token));
    let results = waits.first().map(|&w| at(p, w).results.clone()).unwrap_or_default();
    for section in &mut p.sections {
        section.body.retain(|i| token_of(i) != Some(token));
        for (&result, &operand) in results.iter().zip(&start.operands) {
            let operands = section.body.iter_mut().flat_map(|i| &mut i.operands);
            operands.filter(|o| **o == result).for_each(|o| *o = operand);
        }
    }
    Some(())
}

/// The same transfer once more, under a token of its own, after the first.
fn repeat_transfer(p: &mut Program, r: &mut Random) -> Option<()> {
    let (s, i) = r.of(&sites(p, is_start))?;
    let token = token_of(at(p, (s, i)))?;
    let fresh = TokenId(1 + p.sections.iter().flat_map(|s| &s.body).filter_map(token_of).map(|t| t.0).max()?);
    let body = &mut p.sections[s].body;
    let wait = body[i..].iter().position(|x| x.action == Action::Wait(token)).map(|n| i + n)?;
    let (mut again, mut ends) = (body[i].clone(), body[wait].clone());
    if let Action::Start { token, .. } = &mut again.action {
        *token = fresh;
    }
    ends.action = Action::Wait(fresh);
    body.insert(wait + 1, again);
    body.insert(wait + 2, ends);
    Some(())
}

fn token(p: &mut Program, r: &mut Random) -> Option<()> {
    let with = sites(p, |i| token_of(i).is_some());
    let tokens: Vec<TokenId> = with.iter().filter_map(|&(s, i)| token_of(&p.sections[s].body[i])).collect();
    let (site, other) = (r.of(&with)?, r.of(&tokens)?);
    let instr = at(p, site);
    let old = token_of(instr)?;
    match &mut instr.action {
        Action::Start { token, .. } | Action::Wait(token) => *token = other,
        _ => {}
    }
    (old != other).then_some(())
}

fn axis(p: &Program, r: &mut Random) -> AxisId {
    AxisId(r.below(p.mesh.axes.len()) as u8)
}

fn dim(r: &mut Random) -> u8 {
    r.below(4) as u8
}

/// Another of the same or of another kind, in all variants of its section or in one.
fn transfer(p: &mut Program, r: &mut Random) -> Option<()> {
    let site = r.of(&sites(p, is_start))?;
    let Action::Start { token, transfer: old } = at(p, site).action.clone() else { return None };
    let (a, d, stages, groups) = (axis(p, r), dim(r), p.stages, p.groups.len() as u32);
    let reduce = r.of(&[Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod])?;
    let new = match r.below(8) {
        0 => Transfer::AllReduce { reduce, axes: [a].into_iter().collect() },
        1 => Transfer::AllReduce { reduce: Reduce::Sum, axes: [a, axis(p, r)].into_iter().take(r.below(3)).collect() },
        2 => Transfer::ReduceScatter { axis: a, dim: d },
        3 => Transfer::AllGather { axis: a, dim: d },
        4 => Transfer::AllToAll { axis: a, from: d, to: dim(r) },
        5 => Transfer::Send { to: r.below(stages as usize + 1) as u32, lane: 0 },
        6 => Transfer::Recv { from: r.below(stages as usize + 1) as u32, lane: 0 },
        _ => Transfer::StageSum { group: r.below(groups as usize + 1) as u32, reduce },
    };
    let everywhere = r.below(2) == 0;
    for (s, i) in sites(p, |i| is_start(i) && token_of(i) == Some(token)) {
        if everywhere || (s, i) == site {
            at(p, (s, i)).action = Action::Start { token, transfer: new.clone() };
        }
    }
    (old != new).then_some(())
}

/// Another mode, axis or dim of a library operation; a copy in place of one that does something.
fn operation(p: &mut Program, r: &mut Random) -> Option<()> {
    let site = r.of(&sites(p, |i| matches!(i.action, Action::Library(_))))?;
    let (a, d, to_copy) = (axis(p, r), dim(r), r.below(2) == 0);
    let instr = at(p, site);
    let Action::Library(library) = &mut instr.action else { return None };
    let old = library.clone();
    let flip =
        |mode: &mut StoreMode| *mode = if *mode == StoreMode::Assign { StoreMode::Accumulate } else { StoreMode::Assign };
    match library {
        Library::Dot { mode, .. } | Library::ScatterAdd { mode, .. } | Library::Convolution { mode, .. } => flip(mode),
        _ if to_copy => *library = Library::Copy,
        Library::SliceAxis { axis, dim } => (*axis, *dim) = (a, d),
        Library::KeepFirst { axis } => *axis = a,
        Library::Zero { terms } => *terms = 1 + (*terms + r.below(2) as u32) % 3,
        Library::ResolveMicrobatches => *library = Library::Copy,
        Library::DropMicrobatch { dim } | Library::Cumsum { dim, .. } => *dim = d,
        Library::TopK { dim, k, .. } if *dim == d => *k += 1,
        Library::TopK { dim, .. } => *dim = d,
        _ => return None,
    }
    (*library != old).then_some(())
}

/// A buffer of the same type, other than `id`.
fn alike(p: &Program, id: BufferId, r: &mut Random) -> Option<BufferId> {
    let ids = (0..p.buffers.len() as u32).map(BufferId);
    let same: Vec<BufferId> = ids.filter(|&b| b != id && p.ty(b) == p.ty(id)).collect();
    r.of(&same)
}

fn result(p: &mut Program, r: &mut Random) -> Option<()> {
    let site = r.of(&sites(p, |i| !i.results.is_empty()))?;
    let n = r.below(at(p, site).results.len());
    let old = at(p, site).results[n];
    let new = alike(p, old, r)?;
    at(p, site).results[n] = new;
    Some(())
}

/// Where another buffer of its block begins, or a little before or after.
fn offset(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.buffers.len());
    let place = p.buffers[n].place;
    let others: Vec<u64> = p.buffers.iter().filter(|b| b.place == place).map(|b| b.offset).collect();
    let old = p.buffers[n].offset;
    let near = [old + 64, old.saturating_sub(64), old + 4, old + 1, old + 512, old.saturating_sub(512), old * 2, 0];
    p.buffers[n].offset = if r.below(2) == 0 { r.of(&others)? } else { r.of(&near)? };
    (p.buffers[n].offset != old).then_some(())
}

fn place(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.buffers.len());
    let mut places = vec![Place::Persistent, Place::Scratch];
    places.extend((0..p.areas.len() as u32).map(Place::Area));
    let (old, new) = (p.buffers[n].place, r.of(&places)?);
    p.buffers[n].place = new;
    if r.below(2) == 0 {
        p.buffers[n].offset = 0;
    }
    (old != new).then_some(())
}

fn size(p: &mut Program, r: &mut Random) -> Option<()> {
    let less = [64, 4, 128][r.below(3)];
    let area = r.below(p.areas.len());
    match r.below(5) {
        0 => p.persistent_bytes = p.persistent_bytes.checked_sub(less)?,
        1 => p.scratch_bytes = p.scratch_bytes.checked_sub(less)?,
        2 => p.areas.get_mut(area)?.bytes = p.areas[area].bytes.checked_sub(less)?,
        3 => p.areas.get_mut(area)?.slots += 1,
        _ => {
            // One slot less, and all steps in those that are left.
            let slots = p.areas.get(area)?.slots.checked_sub(1).filter(|&n| n > 0)?;
            p.areas[area].slots = slots;
            p.order.iter_mut().for_each(|step| step.slots[area] %= slots);
        }
    }
    Some(())
}

fn slot(p: &mut Program, r: &mut Random) -> Option<()> {
    let (step, area) = (r.below(p.order.len()), r.below(p.areas.len()));
    let old = *p.order[step].slots.get(area)?;
    p.order[step].slots[area] = r.below(p.areas[area].slots as usize + 1) as u32;
    (p.order[step].slots[area] != old).then_some(())
}

fn order(p: &mut Program, r: &mut Random) -> Option<()> {
    let before = p.order.clone();
    let (i, j) = (r.below(p.order.len()), r.below(p.order.len()));
    match r.below(6) {
        0 => p.order.swap(i, j),
        1 => _ = p.order.remove(i),
        2 => p.order.insert(j, before[i].clone()),
        3 => {
            let step = p.order.remove(i);
            p.order.insert(j, step);
        }
        4 => p.order[i].microbatch = r.below(p.mesh.size_of("mb") as usize) as u32,
        _ => p.order[i].section = r.below(p.sections.len()) as u32,
    }
    (p.order != before).then_some(())
}

fn sharding(p: &mut Program, r: &mut Random) -> Option<()> {
    let (n, a) = (r.below(p.buffers.len()), axis(p, r));
    let dims = &mut p.buffers[n].ty.sharding.dims;
    let before = dims.clone();
    let d = r.below(dims.len());
    let list = dims.get_mut(d)?;
    match r.below(4) {
        0 => list.push(a),
        1 => *list = AxisList::new(),
        2 => *list = [a].into_iter().collect(),
        _ => {
            let taken = std::mem::take(list);
            let to = r.below(before.len());
            dims[to] = taken;
        }
    }
    (p.buffers[n].ty.sharding.dims != before).then_some(())
}

fn pending(p: &mut Program, r: &mut Random) -> Option<()> {
    let (n, a) = (r.below(p.buffers.len()), axis(p, r));
    let sharding = &mut p.buffers[n].ty.sharding;
    let before = sharding.clone();
    let reduce = if r.below(3) == 0 { Reduce::Max } else { Reduce::Sum };
    *sharding = match r.below(2) {
        0 => before.with_pending([]),
        _ => before.with_pending(before.pending.iter().copied().chain([(a, reduce)])),
    };
    (p.buffers[n].ty.sharding != before).then_some(())
}

fn dtype(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.buffers.len());
    let old = p.buffers[n].ty.dtype;
    p.buffers[n].ty.dtype = r.of(&[DType::F32, DType::F64, DType::I64, DType::I32, DType::Bool, DType::BF16])?;
    (p.buffers[n].ty.dtype != old).then_some(())
}

fn shape(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.buffers.len());
    let shape = &mut p.buffers[n].ty.shape;
    let before = shape.clone();
    let (i, j) = (r.below(shape.len()), r.below(shape.len()));
    let size = *shape.get(i)?;
    match r.below(3) {
        0 => shape.swap(i, j),
        1 => shape[i] = size + 1,
        _ => shape[i] = size.div_ceil(2),
    }
    (p.buffers[n].ty.shape != before).then_some(())
}

fn parameter(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.params.len());
    let param = p.params.get_mut(n)?;
    let before = param.clone();
    match (&mut param.piece, r.below(3)) {
        (Some(piece), 0) => {
            let size = piece.end - piece.start;
            piece.start = piece.start.checked_sub(size)?;
            piece.end -= size;
        }
        (Some(piece), 1) => piece.end += 1,
        _ => param.trained = !param.trained,
    }
    (*param != before).then_some(())
}

fn mesh(p: &mut Program, r: &mut Random) -> Option<()> {
    let (axis, group) = (r.below(p.mesh.axes.len()), r.below(p.groups.len()));
    match r.below(3) {
        0 => p.mesh.axes[axis].size += 1,
        1 => p.stage = r.below(p.stages as usize + 1) as u32,
        _ => _ = p.groups.get_mut(group)?.stages.pop(),
    }
    Some(())
}

fn operand(p: &mut Program, r: &mut Random) -> Option<()> {
    let site = r.of(&sites(p, |i| !i.operands.is_empty()))?;
    let n = r.below(at(p, site).operands.len());
    let old = at(p, site).operands[n];
    at(p, site).operands[n] = alike(p, old, r)?;
    Some(())
}

fn kernel(p: &mut Program, r: &mut Random) -> Option<()> {
    let mut alike: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (n, k) in (0..).zip(&p.kernels) {
        alike.entry(format!("{:?} {:?}", k.inputs, k.outputs)).or_default().push(n);
    }
    let site = r.of(&sites(p, |i| matches!(i.action, Action::Kernel(_))))?;
    let Action::Kernel(old) = at(p, site).action else { return None };
    let same = alike.into_values().find(|same| same.contains(&old))?;
    let new = r.of(&same)?;
    at(p, site).action = Action::Kernel(new);
    (new != old).then_some(())
}

fn expression(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.kernels.len());
    let kernel = p.kernels.get_mut(n)?;
    let before = kernel.clone();
    let (e, s) = (r.below(kernel.exprs.len()), r.below(kernel.body.len()));
    let stmt = kernel.body.get_mut(s)?;
    match (r.below(3), stmt, kernel.exprs.get_mut(e)?) {
        (0, Stmt::Reduce { op, .. }, _) => *op = Reduce::Max,
        (1, Stmt::Store { mode, .. }, _) => *mode = StoreMode::Accumulate,
        (_, _, Expr::Binary(op, ..)) => *op = r.of(&[BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max])?,
        (_, _, Expr::Const { dtype, bits }) if dtype.is_float() => *bits = 0.25f64.to_bits(),
        (_, _, Expr::Load { index, .. }) if index.len() > 1 => index.swap(0, 1),
        _ => {}
    }
    (p.kernels[n] != before).then_some(())
}

fn output(p: &mut Program, r: &mut Random) -> Option<()> {
    let n = r.below(p.outputs.len());
    let old = p.outputs.get(n)?.buffer;
    p.outputs[n].buffer = alike(p, old, r)?;
    Some(())
}
