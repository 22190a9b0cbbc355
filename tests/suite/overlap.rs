//! Transfers beside computation, read off the programs: how many start, how far their waits stand behind, and what memory that takes.

use crate::compile::compiled;
use dcc::Compiled;
use dcc::compile::{Options, planned_bytes};
use dcc::plan::{Overlap, Parallel, Plan, Zero, batch};
use dcc::{lower, schedule};
use dcc_program::check;
use dcc_program::program::*;
use std::collections::{BTreeMap, BTreeSet};

const GPT: &str = "gpt2_tiny.onnx";

/// By what is sharded and microbatches: transfers of a step if each tensor has its own, and in buckets.
const COUNTS: [(Zero, u32, usize, usize); 5] = [
    (Zero::Nothing, 1, 70, 20),
    (Zero::Nothing, 2, 70, 20),
    (Zero::State, 1, 138, 38),
    (Zero::Parameters, 1, 173, 58),
    (Zero::Parameters, 2, 344, 114),
];

fn data_parallel(zero: Zero) -> Parallel {
    Parallel { dp: 2, zero, ..Parallel::default() }
}

/// The program, and what it would be if every transfer were waited for at once.
fn both(parallel: Parallel, microbatches: u32) -> (Program, Program) {
    let Compiled { plan, placed, order, mut artifact, .. } = compiled(GPT, parallel, microbatches).expect("it compiles");
    let off = Plan { overlap: Overlap::Off, ..plan };
    let alone = lower::programs(&placed, &off, "model", Mode::Train, &schedule::turns(&off, &order)).expect("it lowers");
    check::programs(&alone).expect("the gate accepts it");
    (artifact.train.remove(0), alone.into_iter().next().expect("one stage"))
}

fn bytes(p: &Program, ids: &[BufferId]) -> u64 {
    ids.iter().map(|&id| p.ty(id).local_bytes(&p.mesh)).sum()
}

/// Starts of a step, and the bytes of all that they hand in.
fn starts(p: &Program) -> (usize, u64) {
    let instrs = p.order.iter().flat_map(|step| &p.sections[step.section as usize].body);
    let starts: Vec<&Instr> = instrs.filter(|i| matches!(i.action, Action::Start { .. })).collect();
    (starts.len(), starts.iter().map(|i| bytes(p, &i.operands)).sum())
}

/// A transfer of a section: its start and wait, and how much is computed in between.
struct Flight<'a> {
    section: SectionKind,
    start: &'a Instr,
    wait: &'a Instr,
    between: usize,
}

fn flights(p: &Program) -> Vec<Flight<'_>> {
    let mut found = Vec::new();
    for section in &p.sections {
        let mut open: BTreeMap<TokenId, (&Instr, usize)> = BTreeMap::new();
        let mut computed = 0;
        for instr in &section.body {
            match &instr.action {
                Action::Start { token, .. } => _ = open.insert(*token, (instr, computed)),
                Action::Wait(token) => {
                    let Some((start, then)) = open.remove(token) else { continue };
                    found.push(Flight { section: section.kind, start, wait: instr, between: computed - then });
                }
                Action::Kernel(_) => computed += 1,
                Action::Library(Library::Reshape { .. } | Library::ResolveMicrobatches) => {}
                Action::Library(_) => computed += 1,
            }
        }
    }
    found
}

fn token(start: &Instr) -> TokenId {
    let Action::Start { token, .. } = start.action else { panic!("no start") };
    token
}

fn is_gather(instr: &Instr) -> bool {
    matches!(instr.action, Action::Start { transfer: Transfer::AllGather { .. }, .. })
}

/// Counts of this model: what a step of PyTorch DDP or of FSDP would send as one message each, were its buckets as small.
#[test]
fn small_tensors_share_a_transfer() {
    for (zero, microbatches, alone, together) in COUNTS {
        let (program, one_by_one) = both(data_parallel(zero), microbatches);
        let ((count, moved), (before, moved_before)) = (starts(&program), starts(&one_by_one));
        assert_eq!((before, count), (alone, together), "{zero:?}, {microbatches} microbatches");
        assert_eq!(moved, moved_before, "{zero:?}, {microbatches} microbatches");
    }
}

/// Latency of 1 µs, 1 GB/s, two ranks: a bucket of 20 kB takes no more.
#[test]
fn a_bucket_takes_no_more_once_latency_is_a_tenth() {
    let (program, _) = both(data_parallel(Zero::Parameters), 1);
    let mut shared = 0;
    for flight in flights(&program) {
        let of = |ids: &[BufferId]| ids[..ids.len() - 1].iter().map(|&id| bytes(&program, &[id])).collect::<Vec<u64>>();
        let larger: u64 = of(&flight.start.operands).into_iter().zip(of(&flight.wait.results)).map(|(a, b)| a.max(b)).sum();
        assert!(larger < 20_000, "{:?}", flight.start);
        assert_eq!(flight.start.operands.len(), flight.wait.results.len());
        shared += usize::from(flight.start.operands.len() > 1);
    }
    assert!(shared > 10);
}

/// But for biases that backward adds again to what forward kept without them: those stay until then.
#[test]
fn parameters_are_gathered_one_bucket_ahead() {
    for microbatches in [1, 2] {
        let (program, _) = both(data_parallel(Zero::Parameters), microbatches);
        let reads = |section: &Section, id: BufferId| section.body.iter().any(|instr| instr.operands.contains(&id));
        let outside = |flight: &Flight| program.sections.iter().filter(|s| s.kind != flight.section).collect::<Vec<_>>();
        let kept = |flight: &Flight, id: BufferId| outside(flight).into_iter().any(|section| reads(section, id));
        let dropped = |flight: &Flight| !flight.wait.results.iter().all(|&id| kept(flight, id));
        let tokens: Vec<(SectionKind, TokenId)> =
            flights(&program).iter().filter(|f| dropped(f)).map(|f| (f.section, token(f.start))).collect();
        let gathers = flights(&program).into_iter().filter(|f| is_gather(f.start));
        let lasting = gathers.flat_map(|f| f.wait.results.iter().copied().filter(|&id| kept(&f, id)).collect::<Vec<_>>());
        assert!(lasting.map(|id| bytes(&program, &[id])).max() <= Some(4 * 256), "what is kept is small");
        for section in program.sections.iter().filter(|section| section.kind.is_pass()) {
            let mut open = BTreeSet::new();
            for instr in &section.body {
                match instr.action {
                    Action::Start { token, .. } if is_gather(instr) && tokens.contains(&(section.kind, token)) => {
                        open.insert(token);
                        assert_eq!(open.len(), 1, "{} has more than one under way", section.id().name());
                    }
                    Action::Wait(token) => _ = open.remove(&token),
                    _ => {}
                }
            }
        }
        let gathers: Vec<Flight> = flights(&program).into_iter().filter(|f| is_gather(f.start) && dropped(f)).collect();
        for kind in [SectionKind::Forward, SectionKind::Backward] {
            let of: Vec<usize> = gathers.iter().filter(|f| f.section == kind).map(|f| f.between).collect();
            // The first is needed at once, and so may the second be: two embeddings.
            assert!(of.len() > 4 && of[2..].iter().all(|&between| between > 0), "{kind:?}: {of:?}");
        }
    }
}

/// With one microbatch; of several, the sum is there when backward ends.
#[test]
fn gradients_are_reduced_while_backward_goes_on() {
    for zero in [Zero::Nothing, Zero::State, Zero::Gradients, Zero::Parameters] {
        let (program, _) = both(data_parallel(zero), 1);
        let of_gradients = |f: &Flight| f.section == SectionKind::Backward && !is_gather(f.start);
        let between: Vec<usize> = flights(&program).into_iter().filter(of_gradients).map(|f| f.between).collect();
        let hidden = between.iter().filter(|&&n| n > 0).count();
        assert!(between.len() > 4 && hidden + 1 >= between.len(), "{zero:?}: {between:?}");
    }
}

#[test]
fn all_reduces_end_where_they_began() {
    for microbatches in [1, 2] {
        let (program, _) = both(data_parallel(Zero::Nothing), microbatches);
        let place = |id: BufferId| (program.buffer(id).place, program.buffer(id).offset);
        for flight in flights(&program) {
            for (&operand, &result) in flight.start.operands.iter().zip(&flight.wait.results) {
                assert_eq!(place(operand), place(result), "{:?}", flight.start);
            }
        }
    }
}

/// Under a limit that has no room for what is under way, nothing is.
#[test]
fn a_limit_comes_first() {
    let parallel = data_parallel(Zero::Parameters);
    let (program, alone) = both(parallel.clone(), 2);
    let (with, without) = (planned_bytes(&program), planned_bytes(&alone));
    assert!(with > without, "{with} bytes, {without} without: no limit lies between");
    for (limit, expected) in [(with, with), (with - 1, without), (without, without)] {
        let batch = batch::Given { global: Some(8), accumulate: Some(2), ..Default::default() };
        let options = Options { batch, parallel: parallel.clone(), memory_limit: Some(limit), ..Default::default() };
        let compiled = crate::compile::of(GPT, options).expect("there is room");
        assert_eq!(planned_bytes(&compiled.artifact.train[0]), expected);
    }
}

/// One bucket that is gathered ahead, and one that is scattered behind.
#[test]
fn what_is_under_way_takes_no_more_than_two_buckets() {
    for zero in [Zero::Nothing, Zero::State, Zero::Gradients, Zero::Parameters] {
        for microbatches in [1, 2] {
            let (program, alone) = both(data_parallel(zero), microbatches);
            let largest = |gathers: bool| {
                let of = flights(&program).into_iter().filter(|f| is_gather(f.start) == gathers);
                of.map(|f| bytes(&program, &f.start.operands).max(bytes(&program, &f.wait.results))).max().unwrap_or(0)
            };
            let (with, without) = (planned_bytes(&program), planned_bytes(&alone));
            let room = largest(true) + largest(false);
            assert!(with <= without + room, "{zero:?}: {with} bytes, {without} without, buckets of {room}");
        }
    }
}
