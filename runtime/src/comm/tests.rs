//! Every transfer on both transports against a direct computation, and every way in which a wait can fail.

mod several;
mod words;

use super::reduce::accumulate;
use super::segment::{EAGER_BYTES, EAGER_BYTES_ALONE};
use super::shm::Arena;
use super::*;
use std::time::Instant;

/// A small generator of its own, so that a failing seed can be named.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).for_each(|i| items.swap(i, self.below(i + 1)));
    }
}

#[derive(Clone, Copy, Debug)]
enum Transport {
    Local,
    Shm,
}

const PATIENCE: Patience = Patience { timeout: Duration::from_secs(20) };

fn world(transport: Transport, layout: &Layout, patience: Patience) -> Vec<Peer> {
    match transport {
        Transport::Local => local::world(layout, patience).unwrap(),
        Transport::Shm => {
            let file = shm::create(layout).unwrap();
            (0..layout.world()).map(|rank| shm::attach(&file, layout, rank, patience).unwrap()).collect()
        }
    }
}

/// Runs `body` as each rank of a world.
fn ranks<T: Send>(peers: Vec<Peer>, body: impl Fn(Peer) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(|| body(peer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Prepares a transfer and starts it, once.
fn start(peer: &mut Peer, ops: &[Op]) -> crate::error::Result<Token> {
    let transfer = peer.prepare(ops)?;
    peer.start(transfer)
}

fn everyone(world: u32) -> Group {
    Group((0..world).collect())
}

/// One transfer of a generated program: per participant its op, what its source holds and what its target must hold
/// (`None`: unspecified).
struct Case {
    members: Vec<u32>,
    ops: Vec<Op>,
    sources: Vec<Vec<u8>>,
    targets: Vec<Vec<Option<u8>>>,
}

/// Member `index`'s block of a tensor `[outer, dim, inner]`, 0xEE behind its end.
fn rows_of(whole: &[u8], rows: Rows, index: usize, members: usize) -> Vec<Option<u8>> {
    let mut out = Vec::new();
    for outer in 0..rows.outer {
        for row in 0..rows.block(members) {
            let row = index * rows.block(members) + row;
            let at = (outer * rows.dim + row) * rows.inner;
            out.extend((0..rows.inner).map(|i| (row < rows.dim).then(|| whole[at + i])));
        }
    }
    out
}

fn filled(bytes: &[Option<u8>]) -> Vec<u8> {
    bytes.iter().map(|byte| byte.unwrap_or(0xEE)).collect()
}

fn whole(bytes: &[u8]) -> Vec<Option<u8>> {
    bytes.iter().copied().map(Some).collect()
}

fn sum_of(sources: &[Vec<u8>], reduce: Reduce, dtype: DType) -> Vec<u8> {
    let mut sum = sources[0].clone();
    sources[1..].iter().for_each(|source| accumulate(reduce, dtype, &mut sum, source));
    sum
}

/// Elements that survive any order of magnitude: small integers, halves for floats.
fn elements(random: &mut Random, dtype: DType, count: usize) -> Vec<u8> {
    (0..count)
        .flat_map(|_| match dtype {
            DType::Bool => vec![random.below(2) as u8],
            DType::F32 => (random.below(1 << 20) as f32 / 977.0 - 400.0).to_ne_bytes().to_vec(),
            DType::F64 => (random.below(1 << 20) as f64 / 977.0 - 400.0).to_ne_bytes().to_vec(),
            DType::F16 => half::f16::from_f32(random.below(1000) as f32 / 16.0).to_ne_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f32(random.below(1000) as f32 / 16.0).to_ne_bytes().to_vec(),
            _ => random.bytes(dtype.bytes() as usize),
        })
        .collect()
}

fn case(random: &mut Random, groups: &[Group], world: u32) -> Case {
    let index = random.below(groups.len());
    let (group, members) = (GroupId(index as u32), groups[index].0.clone());
    let n = members.len();
    let dtype = DType::ALL[random.below(DType::ALL.len())];
    let reduce = [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod][random.below(4)];
    let element = dtype.bytes() as usize;
    let rows = Rows { outer: 1 + random.below(4), dim: 1 + random.below(40), inner: element * (1 + random.below(200)) };
    match random.below(5) {
        0 => {
            // Small, and beyond the size where the algorithm changes.
            let bound = [300, 90_000 / element][random.below(2)];
            let count = random.below(bound);
            let sources: Vec<Vec<u8>> = (0..n).map(|_| elements(random, dtype, count)).collect();
            let sum = whole(&sum_of(&sources, reduce, dtype));
            Case::new(members, Transfer::AllReduce { group, reduce, dtype }, sources, vec![sum; n])
        }
        1 => {
            let tensor = random.bytes(rows.global_bytes());
            let sources = (0..n).map(|i| filled(&rows_of(&tensor, rows, i, n))).collect();
            Case::new(members, Transfer::AllGather { group, rows }, sources, vec![whole(&tensor); n])
        }
        2 => {
            let sources: Vec<Vec<u8>> = (0..n).map(|_| elements(random, dtype, rows.global_bytes() / element)).collect();
            let sum = sum_of(&sources, reduce, dtype);
            let targets = (0..n).map(|i| rows_of(&sum, rows, i, n)).collect();
            Case::new(members, Transfer::ReduceScatter { group, reduce, dtype, rows }, sources, targets)
        }
        3 => {
            let [outer, first, middle, second, inner] = [3, 9, 3, 9, 20].map(|bound| 1 + random.below(bound));
            let split = [Side::First, Side::Second][random.below(2)];
            let exchange = Exchange { outer, first, middle, second, inner, split };
            let tensor = random.bytes(outer * first * middle * second * inner);
            let by_first = Rows { outer, dim: first, inner: middle * second * inner };
            let by_second = Rows { outer: outer * first * middle, dim: second, inner };
            let (before, after) = if split == Side::First { (by_second, by_first) } else { (by_first, by_second) };
            let sources = (0..n).map(|i| filled(&rows_of(&tensor, before, i, n))).collect();
            let targets = (0..n).map(|i| rows_of(&tensor, after, i, n)).collect();
            Case::new(members, Transfer::AllToAll { group, exchange }, sources, targets)
        }
        _ => {
            let from = random.below(world as usize) as u32;
            let to = (from + 1 + random.below((world as usize - 1).max(1)) as u32) % world;
            let len = random.below(5000);
            let bytes = random.bytes(len);
            if from == to {
                return case(random, groups, world);
            }
            let mut case = Case::new(
                vec![from, to],
                Transfer::Send { to, lane: 0 },
                vec![bytes.clone(), vec![]],
                vec![vec![], whole(&bytes)],
            );
            case.ops[1].transfer = Transfer::Recv { from, lane: 0 };
            case
        }
    }
}

impl Case {
    fn new(members: Vec<u32>, transfer: Transfer, sources: Vec<Vec<u8>>, targets: Vec<Vec<Option<u8>>>) -> Case {
        let op = Op { transfer, source: Region::default(), target: Region::default() };
        Case { ops: vec![op; members.len()], members, sources, targets }
    }
}

/// Gives every operand a place of its own in its rank's arena (all_reduce: sometimes in place); the arenas' sizes.
fn place(random: &mut Random, cases: &mut [Case], world: u32) -> Vec<usize> {
    let mut next = vec![0; world as usize];
    for case in cases {
        let in_place = matches!(case.ops[0].transfer, Transfer::AllReduce { .. }) && random.below(2) == 0;
        for (member, op) in case.ops.iter_mut().enumerate() {
            let at = &mut next[case.members[member] as usize];
            op.source = Region { offset: *at, bytes: case.sources[member].len() };
            *at += op.source.bytes;
            op.target = Region { offset: *at, bytes: case.targets[member].len() };
            if in_place {
                op.target = op.source;
            } else {
                *at += op.target.bytes;
            }
        }
    }
    next
}

fn write_sources(arena: &Arena, cases: &[Case], rank: u32) {
    for case in cases {
        if let Some(member) = case.members.iter().position(|&m| m == rank) {
            arena.write(case.ops[member].source.offset, &case.sources[member]);
        }
    }
}

fn check_target(arena: &Arena, case: &Case, rank: u32) {
    let member = case.members.iter().position(|&m| m == rank).unwrap();
    let op = &case.ops[member];
    let mut found = vec![0; op.target.bytes];
    arena.read(op.target.offset, &mut found);
    for (at, (found, expected)) in found.iter().zip(&case.targets[member]).enumerate() {
        assert!(expected.is_none_or(|e| e == *found), "rank {rank} {op:?}: byte {at} is {found}, not {expected:?}");
    }
}

/// Starts in the global order, waits in another order on every rank, a few transfers at a time.
fn run_cases(mut peer: Peer, cases: &[Case], seed: u64) {
    let (arena, rank) = (peer.arena(), peer.rank());
    write_sources(&arena, cases, rank);
    let mut random = Random(seed + u64::from(rank));
    for batch in cases.chunks(7) {
        let mut open = Vec::new();
        for case in batch {
            if let Some(member) = case.members.iter().position(|&m| m == rank) {
                peer.mark(&Place { step: 1, microbatch: 0, label: Label::new(case.ops[member].transfer.name()) });
                open.push((start(&mut peer, &case.ops[member..=member]).unwrap(), case));
            }
        }
        random.shuffle(&mut open);
        for (token, case) in open {
            peer.wait(token).unwrap();
            check_target(&arena, case, rank);
        }
    }
    peer.finish();
}

#[test]
fn every_transfer_matches_a_direct_computation() {
    for transport in [Transport::Local, Transport::Shm] {
        for count in 1..=4 {
            for seed in 0..6 {
                let mut random = Random(1000 * u64::from(count) + seed);
                let mut groups = vec![everyone(count), Group((0..count).rev().collect())];
                groups.extend((count > 2).then(|| Group(vec![0, 2])));
                let mut cases: Vec<Case> = (0..40).map(|_| case(&mut random, &groups, count)).collect();
                let arenas = place(&mut random, &mut cases, count);
                let layout = Layout::new(groups, arenas);
                ranks(world(transport, &layout, PATIENCE), |peer| run_cases(peer, &cases, seed));
            }
        }
    }
}

/// Rank 0 sends `count` regions, one behind the other, from where it writes the next; rank 1 receives them later, to where they are compared.
fn sent(transport: Transport, crowded: bool, count: usize, bytes: usize) {
    let layout = Layout::new(vec![], vec![bytes + 3, count * bytes + 3]);
    let value = |i: usize| (0..bytes).map(|at| (i * 31 + at / 7 + at) as u8).collect::<Vec<u8>>();
    let peers = world(transport, &layout, PATIENCE);
    if crowded {
        peers[0].segment().crowd();
    }
    ranks(peers, |mut peer| {
        let arena = peer.arena();
        if peer.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
        }
        for i in 0..count {
            let (transfer, offset) = match peer.rank() {
                0 => (Transfer::Send { to: 1, lane: 0 }, 3),
                _ => (Transfer::Recv { from: 0, lane: 0 }, 3 + i * bytes),
            };
            let region = Region { offset, bytes };
            if peer.rank() == 0 {
                arena.write(offset, &value(i));
            }
            let token = start(&mut peer, &[Op { transfer, source: region, target: region }]).unwrap();
            peer.wait(token).unwrap();
            if peer.rank() == 1 {
                let mut found = vec![0; bytes];
                arena.read(offset, &mut found);
                assert!(found == value(i), "message {i} of {bytes} bytes");
            }
        }
        peer.finish();
    });
}

#[test]
fn a_source_may_change_once_its_transfer_is_waited_for() {
    for transport in [Transport::Local, Transport::Shm] {
        for bytes in [0, 1, 48, 49, 112, 113, EAGER_BYTES_ALONE, EAGER_BYTES_ALONE + 1, EAGER_BYTES, EAGER_BYTES + 1] {
            for crowded in [false, true] {
                sent(transport, crowded, 5 * segment::RING as usize, bytes);
            }
        }
    }
}

/// Beyond what is copied through the caches, at odd addresses.
#[test]
fn large_messages_arrive_whole() {
    sent(Transport::Shm, false, 2, (17 << 20) + 5);
}

#[test]
fn small_messages_need_no_receiver_yet() {
    let layout = Layout::new(vec![], vec![EAGER_BYTES; 2]);
    let mut peers = local::world(&layout, PATIENCE).unwrap();
    let bytes = peers[0].segment().eager_bytes();
    let region = Region { offset: 0, bytes };
    let op = |transfer| Op { transfer, source: region, target: region };
    peers[0].arena().write(0, &vec![7; bytes]);
    let token = start(&mut peers[0], &[op(Transfer::Send { to: 1, lane: 0 })]).unwrap();
    peers[0].wait(token).unwrap();
    let token = start(&mut peers[1], &[op(Transfer::Recv { from: 0, lane: 0 })]).unwrap();
    peers[1].wait(token).unwrap();
    let mut found = vec![0; bytes];
    peers[1].arena().read(0, &mut found);
    assert_eq!(found, vec![7; bytes]);
    peers.iter_mut().for_each(|peer| peer.finish());
}

fn all_reduce(offset: usize, bytes: usize) -> Op {
    let region = Region { offset, bytes };
    let transfer = Transfer::AllReduce { group: GroupId(0), reduce: Reduce::Sum, dtype: DType::F32 };
    Op { transfer, source: region, target: region }
}

#[test]
fn many_ranks_and_many_open_transfers_share_few_cores() {
    let layout = Layout::new(vec![everyone(12)], vec![200 * 64; 12]);
    ranks(world(Transport::Shm, &layout, PATIENCE), |mut peer| {
        let arena = peer.arena();
        let transfers: Vec<TransferId> = (0..200).map(|i| peer.prepare(&[all_reduce(i * 64, 4)]).unwrap()).collect();
        for step in 0..5u64 {
            (0..200).for_each(|i| arena.write(i * 64, &(i as f32).to_ne_bytes()));
            let tokens: Vec<Token> = transfers.iter().map(|&transfer| peer.start(transfer).unwrap()).collect();
            tokens.iter().rev().for_each(|&token| peer.wait(token).unwrap());
            let mut found = [0; 4];
            arena.read(199 * 64, &mut found);
            assert_eq!(f32::from_ne_bytes(found), 199.0 * 12.0);
            assert_eq!(peer.agree(step + u64::from(peer.rank())).unwrap(), step + 11);
        }
        peer.finish();
    });
}

/// Two ranks, of which rank 1 does `other`; what rank 0's all_reduce ends with, and after how long.
fn failing(transport: Transport, timeout: Duration, other: impl Fn(Peer) + Sync) -> (Error, Duration) {
    let layout = Layout::new(vec![everyone(2)], vec![4096; 2]);
    let began = Instant::now();
    let mut results = ranks(world(transport, &layout, Patience { timeout }), |mut peer| {
        if peer.rank() == 1 {
            other(peer);
            return None;
        }
        let place = |step, microbatch| Place { step, microbatch, label: Label::new("forward: wait t4") };
        peer.mark(&place(1, 0));
        let transfer = peer.prepare(&[all_reduce(0, 64)]).unwrap();
        peer.mark(&place(12, 3));
        let token = peer.start(transfer).unwrap();
        let error = peer.wait(token).unwrap_err();
        Some((error, began.elapsed()))
    });
    results.remove(0).expect("rank 0 fails")
}

use crate::error::Error;

#[test]
fn a_silent_peer_is_named_with_its_place() {
    let timeout = Duration::from_millis(300);
    let (error, after) = failing(Transport::Shm, timeout, |mut peer| {
        peer.mark(&Place { step: 11, microbatch: 0, label: Label::new("backward: dot b7") });
        std::thread::sleep(2 * timeout);
        peer.finish();
    });
    let text = error.to_string();
    for part in ["DCC0701", "rank 1 is silent", "step 11", "backward: dot b7", "step 12, microbatch 3, forward: wait t4"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(after >= timeout && after < 3 * timeout, "{after:?}");
}

#[test]
fn a_failed_peer_ends_the_wait_at_once() {
    for transport in [Transport::Local, Transport::Shm] {
        let (error, after) = failing(transport, Duration::from_secs(60), drop);
        assert!(error.is_secondary() && error.to_string().contains("rank 1 failed"), "{error}");
        assert!(after < Duration::from_secs(5), "{after:?}");
    }
}

#[test]
fn a_peer_that_finished_or_does_something_else_is_an_error_at_once() {
    let (error, _) = failing(Transport::Local, Duration::from_secs(60), |mut peer| peer.finish());
    assert!(error.to_string().contains("rank 1 has finished its program"), "{error}");
    let (error, _) = failing(Transport::Local, Duration::from_secs(60), |mut peer| {
        peer.mark(&Place { step: 12, microbatch: 3, label: Label::new("start all_reduce.max tp b9") });
        let mut op = all_reduce(0, 64);
        op.transfer = Transfer::AllReduce { group: GroupId(0), reduce: Reduce::Max, dtype: DType::F32 };
        let token = start(&mut peer, &[op]).unwrap();
        assert!(peer.wait(token).is_err());
    });
    let text = error.to_string();
    assert!(text.contains("DCC0603") && text.contains("start all_reduce.max tp b9") || error.is_secondary(), "{text}");
}

#[test]
fn a_hang_is_blamed_on_the_rank_that_all_wait_for() {
    let timeout = Duration::from_millis(400);
    let layout = Layout::new(vec![everyone(3)], vec![4096; 3]);
    let errors = ranks(world(Transport::Shm, &layout, Patience { timeout }), |mut peer| {
        // Rank 0 waits for 1, which waits for 2, which sleeps.
        let rank = peer.rank();
        if rank == 2 {
            std::thread::sleep(3 * timeout);
            return None;
        }
        let region = Region { offset: 0, bytes: 64 };
        let op = Op { transfer: Transfer::Recv { from: rank + 1, lane: 0 }, source: region, target: region };
        std::thread::sleep(timeout / 4 * rank);
        let token = start(&mut peer, &[op]).unwrap();
        Some(peer.wait(token).unwrap_err())
    });
    // Whichever of the two gives up first.
    let first = errors.iter().flatten().find(|error| !error.is_secondary()).unwrap();
    assert!(first.to_string().contains("rank 2 is silent"), "{first}");
}

#[test]
fn handshake_names_the_field_and_both_ranks() {
    let layout = Layout::new(vec![everyone(3)], vec![4096; 3]);
    for field in 0..4 {
        let errors = ranks(world(Transport::Shm, &layout, PATIENCE), |mut peer| {
            let mut words = [7; 4];
            words[field] += u64::from(peer.rank() / 2);
            let [build, artifact, run, data] = words;
            let result = peer.handshake(&Hello { build, artifact, run, data });
            peer.finish();
            result.unwrap_err().to_string()
        });
        let expected = format!("ranks 0 and 2 differ in their {}: {:016x} and {:016x}", Hello::FIELDS[field], 7, 8);
        assert!(errors.iter().all(|text| text.contains(&expected)), "{errors:?}");
    }
}

#[test]
fn another_plan_is_refused_when_attaching() {
    let layout = Layout::new(vec![everyone(2)], vec![4096; 2]);
    let file = shm::create(&layout).unwrap();
    let smaller = Layout::new(vec![everyone(2)], vec![4096; 1]);
    let regrouped = Layout::new(vec![Group(vec![1, 0])], vec![4096; 2]);
    for (other, part) in [(smaller, "bytes of shared memory there"), (regrouped, "layout")] {
        let error = shm::attach(&file, &other, 0, PATIENCE).err().expect("another plan is refused");
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn wrong_regions_are_errors_not_accesses() {
    let layout = Layout::new(vec![Group(vec![0])], vec![4096; 2]);
    let mut peers = local::world(&layout, PATIENCE).unwrap();
    assert!(start(&mut peers[0], &[all_reduce(0, 64)]).is_ok());
    assert!(start(&mut peers[0], &[all_reduce(1 << 30, 64)]).is_err());
    assert!(start(&mut peers[0], &[all_reduce(0, 63)]).is_err());
    assert!(start(&mut peers[0], &[all_reduce(usize::MAX, 64)]).is_err());
    assert!(start(&mut peers[1], &[all_reduce(0, 64)]).is_err());
    let region = Region { offset: 0, bytes: 8 };
    for transfer in [Transfer::Send { to: 0, lane: 0 }, Transfer::Send { to: 2, lane: 0 }, Transfer::Recv { from: 9, lane: 0 }]
    {
        assert!(start(&mut peers[0], &[Op { transfer, source: region, target: region }]).is_err());
    }
}

#[test]
fn labels_keep_what_fits() {
    for text in ["", "forward: dot b6", "ä".repeat(32).as_str()] {
        assert_eq!(Label::new(text).text(), text);
    }
    assert_eq!(Label::new(&"ä".repeat(40)).text(), "ä".repeat(32));
}

#[test]
fn messages_that_nobody_receives_end_in_an_error_of_their_receiver() {
    let layout = Layout::new(vec![], vec![64; 2]);
    let mut peers = local::world(&layout, PATIENCE).unwrap();
    peers[1].finish();
    let region = Region { offset: 0, bytes: 8 };
    let op = Op { transfer: Transfer::Send { to: 1, lane: 0 }, source: region, target: Region::default() };
    for sequence in 0..=segment::RING {
        let token = start(&mut peers[0], &[op]).unwrap();
        let sent = peers[0].wait(token);
        assert_eq!(sent.is_ok(), sequence < segment::RING);
        if let Err(error) = sent {
            let text = error.to_string();
            assert!(text.contains("rank 1 has finished its program but has not finished the transfers before it"), "{text}");
        }
    }
    peers[0].finish();
}
