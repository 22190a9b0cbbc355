//! Faults planted by hand into the programs of a GPT-2 block, tensor- and pipeline-parallel: each is refused by the message that
//! fits.

use dcc_program::check::{self, Fault};
use dcc_program::program::*;
use dcc_program::types::Reduce;
use dcc_program::{AxisId, DType};

/// The stages' programs, about to be spoilt.
type Set = Vec<Program>;
/// Stage, section, instruction.
type Site = (usize, usize, usize);

/// What is done, how the gate calls it, words of the message, and the deed.
type Planted = (&'static str, Fault, &'static str, fn(&mut Set));

/// The number of faults in a GPT-2 block by tp and pp, all refused as they should be.
pub fn check(programs: &[Program]) -> usize {
    refused(programs, FAULTS)
}

/// The same of updates within the backward pass, ZeRO-1.
pub fn check_early(programs: &[Program]) -> usize {
    refused(programs, EARLY)
}

fn refused(programs: &[Program], faults: &[Planted]) -> usize {
    check::programs(programs).expect("the gate accepts what it is to refuse once spoilt");
    let mut wrong = Vec::new();
    for (name, fault, words, plant) in faults {
        let mut set = programs.to_vec();
        plant(&mut set);
        match check::programs(&set) {
            Ok(()) => wrong.push(format!("{name} is accepted")),
            Err(e) if e.code == *fault && e.message.contains(words) => {}
            Err(e) => wrong.push(format!("{name} is refused as {:?}: {e}", e.code)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    faults.len()
}

const EARLY: &[Planted] = &[
    ("a parameter read after its update", Fault::Overwritten, "is read after its update", |p| {
        let lasting = lasting(p);
        let changed = |i: &Instr| i.results.iter().copied().find(|id| lasting.contains(id));
        let update = find(p, SectionKind::Backward, |i| changed(i).is_some());
        let renewed = changed(instr(p, update)).expect("a parameter or state");
        read_behind(p, update, renewed);
    }),
    ("a parameter read after a transfer has renewed it", Fault::Overwritten, "is read after its update", |p| {
        let lasting = lasting(p);
        let brings = |i: &Instr| matches!(i.action, Action::Wait(_)) && i.results.iter().any(|id| lasting.contains(id));
        let wait = find(p, SectionKind::Update, brings);
        let renewed = instr(p, wait).results[0];
        let Action::Wait(awaited) = instr(p, wait).action else { unreachable!("a wait") };
        let start = find(p, SectionKind::Update, |i| matches!(i.action, Action::Start { token, .. } if token == awaited));
        let pair = [instr(p, start).clone(), instr(p, wait).clone()];
        body(p, wait).remove(wait.2);
        body(p, start).remove(start.2);
        let backward = find(p, SectionKind::Backward, |_| true);
        body(p, backward).extend(pair);
        check::programs(p).expect("updated in the backward pass it is sound");
        let last = (backward.0, backward.1, body(p, backward).len() - 1);
        read_behind(p, last, renewed);
    }),
];

/// What a step changes and keeps.
fn lasting(p: &Set) -> Vec<BufferId> {
    p[0].params.iter().filter(|x| x.trained || x.kind != ParamKind::Weight).map(|x| x.buffer).collect()
}

/// A copy of a buffer, right behind an instruction.
fn read_behind(p: &mut Set, site: Site, id: BufferId) {
    let (from, program) = (p[site.0].buffer(id).clone(), &mut p[site.0]);
    let bytes = from.ty.local_bytes(&program.mesh);
    let copy = BufferId(program.buffers.len() as u32);
    let offset = program.scratch_bytes.next_multiple_of(64);
    program.scratch_bytes = offset + bytes;
    program.buffers.push(Buffer { place: Place::Scratch, offset, ..from });
    let read = Instr {
        operands: [id].into_iter().collect(),
        results: [copy].into_iter().collect(),
        action: Action::Library(Library::Copy),
        ..instr(p, site).clone()
    };
    body(p, site).insert(site.2 + 1, read);
}

const FAULTS: &[Planted] = &[
    ("a collective dropped", Fault::Pending, "+tp", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        skip(p, site);
    }),
    ("a collective started twice", Fault::InFlight, "in flight", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        repeat(p, site);
    }),
    ("a sum over stages done twice by one of them", Fault::Unmatched, "number 1 is sum of", |p| {
        let site = find(p, SectionKind::Update, is_stage_sum);
        let wait = wait_of(p, site);
        let pair = [instr(p, site).clone(), instr(p, wait).clone()];
        body(p, site).splice(wait.2 + 1..wait.2 + 1, pair);
    }),
    ("sums over stages in another order on one of them", Fault::Unmatched, "number 0", |p| {
        let start = find(p, SectionKind::Update, is_stage_sum);
        let wait = wait_of(p, start);
        let mut late = [instr(p, start).clone(), instr(p, wait).clone()];
        let copy = Instr { results: late[1].results.clone(), action: Action::Library(Library::Copy), ..late[0].clone() };
        let fresh = Buffer { place: Place::Persistent, offset: p[0].persistent_bytes, ..p[0].buffer(copy.results[0]).clone() };
        late[1].results[0] = BufferId(p[0].buffers.len() as u32);
        p[0].buffers.push(fresh);
        p[0].persistent_bytes += 1 << 16;
        body(p, wait).remove(wait.2);
        *instr(p, start) = copy;
        body(p, start).extend(late);
    }),
    ("send instead of receive", Fault::Malformed, "operands", |p| {
        let site = find(p, SectionKind::Backward, |i| matches!(transfer(i), Some(Transfer::Recv { .. })));
        set_transfer(p, site, Transfer::Send { to: 1, lane: 0 });
    }),
    ("a message to a stage that is not there", Fault::Malformed, "exchanges with stage 2 of 2", |p| {
        sends(p).into_iter().for_each(|site| set_transfer(p, site, Transfer::Send { to: 2, lane: 0 }));
    }),
    ("a message to itself", Fault::Malformed, "exchanges with stage 0", |p| {
        sends(p).into_iter().for_each(|site| set_transfer(p, site, Transfer::Send { to: 0, lane: 0 }));
    }),
    ("another axis", Fault::Sharding, "no sum over dp is pending", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let dp = p[0].mesh.axis("dp").expect("an axis dp");
        set_transfer(p, site, Transfer::AllReduce { reduce: Reduce::Sum, axes: [dp].into_iter().collect() });
    }),
    ("an axis that no rank communicates along", Fault::Sharding, "`mb` is no axis", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        set_transfer(p, site, Transfer::AllReduce { reduce: Reduce::Sum, axes: [AxisId(0)].into_iter().collect() });
    }),
    ("a maximum instead of a sum", Fault::Sharding, "no max over tp is pending", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let tp = p[0].mesh.axis("tp").expect("an axis tp");
        set_transfer(p, site, Transfer::AllReduce { reduce: Reduce::Max, axes: [tp].into_iter().collect() });
    }),
    ("a gather instead of a sum", Fault::Sharding, "not the last axis of dim 0", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let axis = p[0].mesh.axis("tp").expect("an axis tp");
        set_transfer(p, site, Transfer::AllGather { axis, dim: 0 });
    }),
    ("a group without this stage", Fault::Unmatched, "no member of group", |p| {
        p.iter_mut().for_each(|p| p.groups[0].stages = vec![1]);
    }),
    ("a group of other stages", Fault::Unmatched, "in one program", |p| p[1].groups[0].stages = vec![1]),
    ("a message that nobody sends", Fault::Unmatched, "receives", |p| {
        for site in sends(p).into_iter().rev() {
            body(p, site).remove(site.2);
        }
        p[0].sections.iter_mut().for_each(|s| s.body.retain(|i| !is_send_wait(i)));
    }),
    ("microbatches in another order on one stage", Fault::Unmatched, "of microbatch", |p| {
        for step in p[1].order.iter_mut().filter(|_| true) {
            step.microbatch = 1 - step.microbatch.min(1);
        }
        let last = p[1].order.len() - 1;
        p[1].order[0].microbatch = 0;
        p[1].order[last].microbatch = 0;
    }),
    ("a wait before its start", Fault::Unwaited, "not in flight", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let wait = wait_of(p, site);
        body(p, site).swap(site.2, wait.2);
    }),
    ("a start without wait", Fault::Unwaited, "nothing waits for it", |p| {
        p[0].sections.iter_mut().for_each(|s| s.body.retain(|i| !is_send_wait(i)));
    }),
    ("a token of another transfer", Fault::Malformed, "stands for two transfers", |p| {
        let (a, b) = (all_reduce(p, SectionKind::Backward), find(p, SectionKind::Update, is_stage_sum));
        let token = token(instr(p, b));
        set_token(instr(p, a), token);
    }),
    ("gradients awaited before activations are sent", Fault::Deadlock, "waits in a circle", |p| {
        // Stage 0 receives, in forward, what stage 1 can send only after that forward.
        let recv = find(p, SectionKind::Backward, |i| matches!(transfer(i), Some(Transfer::Recv { .. })));
        let wait = wait_of(p, recv);
        let pair: Vec<Instr> = [recv, wait].iter().map(|&site| instr(p, site).clone()).collect();
        let block = p[0].buffer(pair[1].results[0]).clone();
        let area = p[0].areas.iter().position(|a| a.to.kind == SectionKind::Backward).expect("an area that lasts");
        let id = pair[1].results[0].0 as usize;
        p[0].buffers[id] =
            Buffer { place: Place::Area(area as u32), offset: p[0].areas[area].bytes.next_multiple_of(64), ..block };
        p[0].areas[area].bytes += 1 << 16;
        body(p, recv).drain(recv.2..=wait.2);
        for section in p[0].sections.iter_mut().filter(|s| s.kind == SectionKind::Forward) {
            section.body.splice(0..0, pair.clone());
        }
    }),
    ("live buffers that overlap", Fault::Overwritten, "has overwritten it", |p| {
        let (long, short) = two_of_area(p);
        p[0].buffers[short].offset = p[0].buffers[long].offset;
    }),
    ("memory used again while it is needed", Fault::Overwritten, "has overwritten it", |p| {
        let (first, last) = scratch_that_lives(p);
        p[0].buffers[first].offset = p[0].buffers[last].offset;
        p[0].scratch_bytes *= 2;
    }),
    ("operand and result that share a part", Fault::InPlace, "share", |p| {
        let dot = find(p, SectionKind::Forward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        let (from, to) = (instr(p, dot).operands[0], instr(p, dot).results[0]);
        let from = p[0].buffer(from).clone();
        let to = &mut p[0].buffers[to.0 as usize];
        (to.place, to.offset) = (from.place, from.offset + 64);
    }),
    ("one slot for two microbatches in flight", Fault::Microbatch, "the value of microbatch 1", |p| {
        for area in 0..p[0].areas.len() {
            if p[0].areas[area].slots > 1 {
                p[0].areas[area].slots = 1;
                p[0].order.iter_mut().for_each(|step| step.slots[area] = 0);
            }
        }
    }),
    ("the slot of another microbatch", Fault::Microbatch, "holds the value of microbatch", |p| {
        let area = p[0].areas.iter().position(|a| a.slots > 1).expect("two slots");
        let backward = |s: &SectionKind| *s == SectionKind::Backward;
        let kinds: Vec<SectionKind> = p[0].sections.iter().map(|s| s.kind).collect();
        let steps = p[0].order.iter_mut().filter(|s| backward(&kinds[s.section as usize]));
        steps.for_each(|s| s.slots[area] = 1 - s.slots[area]);
    }),
    ("a slot that is not there", Fault::Bounds, "which the areas have not", |p| p[0].order[1].slots[0] = 9),
    ("parameters written over", Fault::Overwritten, "has overwritten it", |p| {
        let zero = find(p, SectionKind::Begin, |i| matches!(i.action, Action::Library(Library::Zero { .. })));
        let id = instr(p, zero).results[0];
        let (old, new) = (p[0].buffer(id).clone(), p[0].buffer(p[0].params[0].buffer).offset);
        let there = p[0].buffers.iter_mut().filter(|b| b.place == old.place && b.offset == old.offset);
        there.for_each(|b| b.offset = new);
    }),
    ("a buffer outside of its block", Fault::Bounds, "do not fit into its block", |p| p[1].scratch_bytes = 64),
    ("an offset that its elements cannot have", Fault::Bounds, "not aligned", |p| {
        let dot = find(p, SectionKind::Forward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        let id = instr(p, dot).results[0].0 as usize;
        p[0].buffers[id].offset += 2;
    }),
    ("one place for two microbatches that wait for backward", Fault::Microbatch, "holds the value of microbatch 1", |p| {
        let id = two_of_area(p).0;
        p[0].buffers[id].place = Place::Scratch;
        p[0].buffers[id].offset = p[0].scratch_bytes;
        p[0].scratch_bytes += 1 << 16;
    }),
    ("a read before the write", Fault::Unwritten, "read before it is written", |p| {
        let site = find(p, SectionKind::Update, |i| matches!(i.action, Action::Kernel(_)));
        body(p, site).rotate_right(1);
    }),
    ("a dropped operation", Fault::Unwritten, "read before it is written", |p| {
        let dot = find(p, SectionKind::Backward, |i| {
            matches!(i.action, Action::Library(Library::Dot { mode: StoreMode::Assign, .. }))
        });
        body(p, dot).remove(dot.2);
    }),
    ("a buffer that is not there", Fault::Malformed, "b9999 of", |p| {
        let dot = find(p, SectionKind::Backward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        instr(p, dot).operands[0] = BufferId(9999);
    }),
    ("a kernel that is not there", Fault::Malformed, "fused.999 of", |p| {
        let site = find(p, SectionKind::Backward, |i| matches!(i.action, Action::Kernel(_)));
        instr(p, site).action = Action::Kernel(999);
    }),
    ("the operand of a transfer written to", Fault::InFlight, "is written to while t", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let partial = instr(p, site).operands[0];
        let zero = Instr {
            results: [partial].into_iter().collect(),
            action: Action::Library(Library::Zero { terms: 1 }),
            ..instr(p, site).clone()
        };
        body(p, site).insert(site.2 + 1, Instr { operands: Default::default(), ..zero });
    }),
    ("the result of a transfer read before its wait", Fault::InFlight, "is read while t", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let wait = wait_of(p, site);
        let result = instr(p, wait).results[0];
        let reader = body(p, site).iter().position(|i| i.operands.contains(&result)).expect("a reader");
        let early = body(p, site).remove(reader);
        body(p, site).insert(wait.2, early);
    }),
    ("a wait behind the reader of what it brings", Fault::InFlight, "is read while t", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let wait = wait_of(p, site);
        let result = instr(p, wait).results[0];
        let late = body(p, site).remove(wait.2);
        let reader = body(p, site)[wait.2..].iter().position(|i| i.operands.contains(&result)).expect("a reader");
        body(p, site).insert(wait.2 + reader + 1, late);
    }),
    ("a collective that nothing waits for", Fault::Unwaited, "nothing waits for it", |p| {
        let wait = wait_of(p, all_reduce(p, SectionKind::Backward));
        body(p, wait).remove(wait.2);
    }),
    ("memory of a transfer given to another value before its wait", Fault::InFlight, "is written to while t", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let wait = wait_of(p, site);
        let (size, used) = {
            let result = p[site.0].buffer(p[site.0].sections[site.1].body[wait.2].results[0]);
            (result.ty.local_bytes(&p[site.0].mesh), result.offset)
        };
        let fits = |b: &Buffer| b.place == Place::Scratch && b.ty.local_bytes(&p[site.0].mesh) <= size;
        let later = |i: &Instr| matches!(i.action, Action::Kernel(_)) && fits(p[site.0].buffer(i.results[0]));
        let next = p[site.0].sections[site.1].body[wait.2..].iter().position(later).expect("a kernel") + wait.2;
        let again = instr(p, (site.0, site.1, next)).results[0].0 as usize;
        p[site.0].buffers[again].offset = used;
        let zero = Instr { results: [BufferId(again as u32)].into_iter().collect(), ..instr(p, wait).clone() };
        body(p, site).insert(wait.2, Instr { action: Action::Library(Library::Zero { terms: 1 }), ..zero });
    }),
    ("an accumulator that is not zeroed", Fault::Accumulator, "nothing has zeroed", |p| {
        let zero = find(p, SectionKind::Begin, |i| matches!(i.action, Action::Library(Library::Zero { .. })));
        body(p, zero).remove(zero.2);
    }),
    ("a term of a gradient lost", Fault::Accumulator, "after 1 of its 2 terms", |p| {
        let zero = find(p, SectionKind::Begin, |i| matches!(i.action, Action::Library(Library::Zero { .. })));
        instr(p, zero).action = Action::Library(Library::Zero { terms: 2 });
    }),
    ("an accumulator zeroed by each microbatch", Fault::Accumulator, "1 of 2 microbatches", |p| {
        let zero = find(p, SectionKind::Begin, |i| matches!(i.action, Action::Library(Library::Zero { .. })));
        let instr = body(p, zero).remove(zero.2);
        let backward = p[0].sections.iter_mut().find(|s| s.kind == SectionKind::Backward).expect("a backward");
        backward.body.insert(0, instr);
    }),
    ("a sum over microbatches read without resolve", Fault::Microbatch, "belongs to no microbatch, but reads", |p| {
        let resolve = find(p, SectionKind::Update, |i| i.action == Action::Library(Library::ResolveMicrobatches));
        instr(p, resolve).action = Action::Library(Library::Copy);
    }),
    ("a sum resolved by each microbatch", Fault::Accumulator, "1 of 2 microbatches", |p| {
        let resolve = find(p, SectionKind::Update, |i| i.action == Action::Library(Library::ResolveMicrobatches));
        let instr = body(p, resolve).remove(resolve.2);
        p[0].sections.iter_mut().find(|s| s.kind == SectionKind::Backward).expect("a backward").body.push(instr);
    }),
    ("a gradient assigned instead of added", Fault::Accumulator, "1 of 2 microbatches", |p| {
        let site = find(p, SectionKind::Backward, accumulates);
        if let Action::Library(Library::Dot { mode, .. }) = &mut instr(p, site).action {
            *mode = StoreMode::Assign;
        }
    }),
    ("a term of a sum assigned over the one before", Fault::Unused, "written once more before anything has read it", |p| {
        let first = |i: &Instr| matches!(i.action, Action::Library(Library::Dot { mode: StoreMode::Assign, .. }));
        let begun: Vec<BufferId> =
            p[0].sections.iter().flat_map(|s| &s.body).filter(|i| first(i)).map(|i| i.results[0]).collect();
        let site = find(p, SectionKind::Backward, |i| accumulates(i) && begun.contains(&i.results[0]));
        if let Action::Library(Library::Dot { mode, .. }) = &mut instr(p, site).action {
            *mode = StoreMode::Assign;
        }
    }),
    ("a gradient added twice", Fault::Accumulator, "what was added already", |p| {
        let site = find(p, SectionKind::Backward, accumulates);
        repeat(p, site);
    }),
    ("a backward left out", Fault::Order, "backward never runs for microbatch", |p| {
        let backward = position(p, SectionKind::Backward);
        p[0].order.remove(backward);
    }),
    ("update before the last backward", Fault::Order, "backward runs after update", |p| {
        let last = p[0].order.len() - 1;
        p[0].order.swap(last, last - 1);
    }),
    ("microbatches that go different ways", Fault::Order, "do not compute the same", |p| {
        let site = find(p, SectionKind::Forward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        let (old, other) = (instr(p, site).operands[1], site.1);
        let ids = (0..p[0].buffers.len() as u32).map(BufferId);
        let like = ids.filter(|&b| b != old).find(|&b| p[0].ty(b) == p[0].ty(old)).expect("another weight of that type");
        assert!(p[0].sections.iter().filter(|s| s.kind == SectionKind::Forward).count() > 1, "two variants of forward");
        p[0].sections[other].body[site.2].operands[1] = like;
    }),
    ("a partial result declared as whole", Fault::Pending, "declared as", |p| {
        let site = all_reduce(p, SectionKind::Backward);
        let id = instr(p, site).operands[0].0 as usize;
        let ty = &mut p[0].buffers[id].ty;
        ty.sharding = ty.sharding.with_pending([]);
    }),
    ("a shard declared as the tensor", Fault::Sharding, "16/tp and 16", |p| {
        let id = sharded_weight(p);
        p[0].buffers[id].ty.sharding.dims.iter_mut().for_each(|axes| axes.clear());
        p[0].persistent_bytes *= 2;
    }),
    ("a tensor declared as a shard", Fault::Sharding, "tp", |p| {
        let tp = p[0].mesh.axis("tp").expect("an axis tp");
        let gain = p[0].params.iter().find(|x| x.name.contains("ln_1.weight")).expect("a gain").buffer;
        p[0].buffers[gain.0 as usize].ty.sharding.dims[0].push(tp);
    }),
    ("another dtype", Fault::Declared, "declared as f64", |p| {
        let dot = find(p, SectionKind::Forward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        let id = instr(p, dot).results[0].0 as usize;
        p[0].buffers[id].ty.dtype = DType::F64;
        p[0].buffers[id].offset = 0;
        p[0].scratch_bytes *= 4;
    }),
    ("another shape", Fault::Type, "factor", |p| {
        let dot = find(p, SectionKind::Forward, |i| matches!(i.action, Action::Library(Library::Dot { .. })));
        let id = instr(p, dot).results[0].0 as usize;
        p[0].buffers[id].ty.shape[1] -= 1;
    }),
    ("an operand that the kernel does not take", Fault::Type, "the kernel takes", |p| {
        let site = find(p, SectionKind::Update, |i| matches!(i.action, Action::Kernel(_)) && i.operands.len() == 6);
        instr(p, site).operands.swap(3, 4);
    }),
    ("operands sharded differently", Fault::Sharding, "", |p| {
        let site = find(p, SectionKind::Backward, |i| matches!(i.action, Action::Library(Library::SliceAxis { .. })));
        if let Action::Library(Library::SliceAxis { axis, .. }) = &mut instr(p, site).action {
            *axis = AxisId(0);
        }
    }),
    ("a parameter updated in backward", Fault::External, "outside of the update section", |p| {
        let site = find(p, SectionKind::Backward, |i| matches!(i.action, Action::Kernel(_)));
        let weight = p[0].params.iter().find(|x| x.kind == ParamKind::Weight).expect("a weight").buffer;
        let update = updates(p, weight);
        let fresh = Buffer { offset: p[0].persistent_bytes, ..p[0].buffer(weight).clone() };
        let id = BufferId(p[0].buffers.len() as u32);
        p[0].buffers.push(fresh);
        p[0].persistent_bytes += 1 << 16;
        instr(p, update).results.iter_mut().filter(|r| **r == weight).for_each(|r| *r = id);
        let copy = Instr { action: Action::Library(Library::Copy), ..instr(p, site).clone() };
        body(p, site).push(Instr { results: [weight].into_iter().collect(), operands: [weight].into_iter().collect(), ..copy });
    }),
    ("a parameter that is not updated", Fault::External, "nothing updates it", |p| {
        let update = updates(p, p[0].params[0].buffer);
        body(p, update).remove(update.2);
    }),
    ("a parameter updated twice", Fault::External, "is updated 2 times", |p| {
        let update = updates(p, p[0].params[0].buffer);
        repeat(p, update);
    }),
];

fn find(p: &Set, kind: SectionKind, wanted: impl Fn(&Instr) -> bool) -> Site {
    let sections = p[0].sections.iter().enumerate().filter(|(_, s)| s.kind == kind);
    let mut all = sections.flat_map(|(n, s)| s.body.iter().enumerate().map(move |(i, instr)| ((0, n, i), instr)));
    all.find(|(_, instr)| wanted(instr)).unwrap_or_else(|| panic!("{} has no such instruction", kind.name())).0
}

fn body(p: &mut Set, (stage, section, _): Site) -> &mut Vec<Instr> {
    &mut p[stage].sections[section].body
}

fn instr(p: &mut Set, site: Site) -> &mut Instr {
    &mut body(p, site)[site.2]
}

fn repeat(p: &mut Set, site: Site) {
    let again = instr(p, site).clone();
    body(p, site).insert(site.2 + 1, again);
}

fn transfer(instr: &Instr) -> Option<&Transfer> {
    match &instr.action {
        Action::Start { transfer, .. } => Some(transfer),
        _ => None,
    }
}

fn token(instr: &Instr) -> TokenId {
    match instr.action {
        Action::Start { token, .. } | Action::Wait(token) => token,
        _ => panic!("an instruction without token"),
    }
}

fn set_token(instr: &mut Instr, new: TokenId) {
    match &mut instr.action {
        Action::Start { token, .. } | Action::Wait(token) => *token = new,
        _ => panic!("an instruction without token"),
    }
}

fn set_transfer(p: &mut Set, site: Site, new: Transfer) {
    let token = token(instr(p, site));
    instr(p, site).action = Action::Start { token, transfer: new };
}

fn is_stage_sum(instr: &Instr) -> bool {
    matches!(transfer(instr), Some(Transfer::StageSum { .. }))
}

/// A wait that gives nothing.
fn is_send_wait(instr: &Instr) -> bool {
    matches!(instr.action, Action::Wait(_)) && instr.results.is_empty()
}

fn accumulates(instr: &Instr) -> bool {
    matches!(instr.action, Action::Library(Library::Dot { mode: StoreMode::Accumulate, .. }))
}

fn all_reduce(p: &Set, kind: SectionKind) -> Site {
    find(p, kind, |i| matches!(transfer(i), Some(Transfer::AllReduce { .. })))
}

fn sends(p: &Set) -> Vec<Site> {
    let all = p[0].sections.iter().enumerate().flat_map(|(n, s)| s.body.iter().enumerate().map(move |(i, x)| ((0, n, i), x)));
    all.filter(|(_, x)| matches!(transfer(x), Some(Transfer::Send { .. }))).map(|(site, _)| site).collect()
}

fn wait_of(p: &Set, (stage, section, i): Site) -> Site {
    let body = &p[stage].sections[section].body;
    let wait = Action::Wait(token(&body[i]));
    (stage, section, body.iter().position(|x| x.action == wait).expect("a wait in the same section"))
}

/// The transfer goes; who read its result reads its operand.
fn skip(p: &mut Set, start: Site) {
    let wait = wait_of(p, start);
    let (operand, result) = (instr(p, start).operands[0], instr(p, wait).results[0]);
    let body = body(p, start);
    body.remove(wait.2);
    body.remove(start.2);
    let operands = body.iter_mut().flat_map(|i| &mut i.operands).filter(|o| **o == result);
    operands.for_each(|o| *o = operand);
}

fn updates(p: &Set, id: BufferId) -> Site {
    find(p, SectionKind::Update, |i| i.results.contains(&id))
}

fn position(p: &Set, kind: SectionKind) -> usize {
    p[0].order.iter().position(|s| p[0].sections[s.section as usize].kind == kind).expect("a step of that kind")
}

/// Two buffers of an area that forward writes, one after the other, and backward reads.
fn two_of_area(p: &Set) -> (usize, usize) {
    let reads = |id: &BufferId| {
        let backward = p[0].sections.iter().filter(|s| s.kind == SectionKind::Backward).flat_map(|s| &s.body);
        backward.flat_map(|i| &i.operands).any(|o| o == id)
    };
    let forward = p[0].sections.iter().find(|s| s.kind == SectionKind::Forward).expect("a forward");
    let kept = forward.body.iter().flat_map(|i| &i.results).filter(|id| reads(id));
    let kept: Vec<usize> = kept.map(|id| id.0 as usize).collect();
    (kept[0], kept[kept.len() - 1])
}

/// A buffer of scratch that lives over the definition of another, and that one.
fn scratch_that_lives(p: &Set) -> (usize, usize) {
    let forward = p[0].sections.iter().find(|s| s.kind == SectionKind::Forward).expect("a forward");
    let in_scratch = |id: &BufferId| p[0].buffer(*id).place == Place::Scratch;
    for (i, instr) in forward.body.iter().enumerate() {
        for first in instr.results.iter().filter(|id| in_scratch(id)) {
            let last = forward.body.iter().rposition(|x| x.operands.contains(first)).unwrap_or(0);
            let between = forward.body.iter().take(last).skip(i + 1).flat_map(|x| &x.results);
            if let Some(second) = between.into_iter().find(|id| in_scratch(id)) {
                return (first.0 as usize, second.0 as usize);
            }
        }
    }
    panic!("no scratch that lives over another's definition")
}

/// A weight that is sharded over tp.
fn sharded_weight(p: &Set) -> usize {
    let tp = p[0].mesh.axis("tp").expect("an axis tp");
    let weights = p[0].params.iter().filter(|x| x.kind == ParamKind::Weight);
    weights.map(|x| x.buffer.0 as usize).find(|&id| p[0].buffers[id].ty.sharding.uses(tp)).expect("a sharded weight")
}
