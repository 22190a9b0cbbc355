//! Transfers of several tensors.

use super::*;

/// The cases that can be tensors of one transfer, as transfers.
fn grouped(cases: Vec<Case>, most: usize) -> Vec<Vec<Case>> {
    let mut transfers: Vec<Vec<Case>> = Vec::new();
    for case in cases {
        let collective = !matches!(case.ops[0].transfer, Transfer::Send { .. } | Transfer::Recv { .. });
        let like = |others: &&mut Vec<Case>| others.len() < most && others[0].ops[0].transfer.is_like(&case.ops[0].transfer);
        match transfers.iter_mut().filter(|_| collective).find(like) {
            Some(others) => others.push(case),
            None => transfers.push(vec![case]),
        }
    }
    transfers
}

/// Starts all transfers of one group of everyone, then waits for them, the last first.
fn run_transfers(transport: Transport, crowded: bool, count: u32, transfers: &[Vec<Case>], arenas: Vec<usize>) {
    let layout = Layout::new(vec![everyone(count)], arenas);
    let peers = world(transport, &layout, PATIENCE);
    if crowded {
        peers[0].segment().crowd();
    }
    ranks(peers, |mut peer| {
        let (arena, rank) = (peer.arena(), peer.rank());
        transfers.iter().for_each(|cases| write_sources(&arena, cases, rank));
        let mut open = Vec::new();
        for cases in transfers {
            let Some(member) = cases[0].members.iter().position(|&m| m == rank) else { continue };
            let ops: Vec<Op> = cases.iter().map(|case| case.ops[member]).collect();
            open.push((start(&mut peer, &ops).unwrap(), cases));
        }
        for (token, cases) in open.into_iter().rev() {
            peer.wait(token).unwrap();
            cases.iter().for_each(|case| check_target(&arena, case, rank));
        }
        peer.finish();
    });
}

#[test]
fn several_tensors_are_one_transfer() {
    for transport in [Transport::Local, Transport::Shm] {
        for count in 2..=4 {
            let mut random = Random(77 + u64::from(count));
            let mut cases: Vec<Case> = (0..120).map(|_| case(&mut random, &[everyone(count)], count)).collect();
            let arenas = place(&mut random, &mut cases, count);
            let transfers = grouped(cases, dcc_program::program::MOST_TENSORS);
            assert!(transfers.iter().any(|tensors| tensors.len() > 3));
            run_transfers(transport, false, count, &transfers, arenas);
        }
    }
}

/// One byte more, and the sources begin elsewhere in an entry, or go in none.
#[test]
fn small_tensors_of_one_transfer_are_found_where_they_are_carried() {
    let count = 3;
    let mut random = Random(5);
    let mut tensor = |bytes: usize, reduced: bool| {
        let (group, members) = (GroupId(0), count as usize);
        if reduced {
            let (reduce, dtype) = (Reduce::Sum, DType::U8);
            let sources: Vec<Vec<u8>> = (0..members).map(|_| elements(&mut random, dtype, bytes)).collect();
            let sum = whole(&sum_of(&sources, reduce, dtype));
            return Case::new(everyone(count).0, Transfer::AllReduce { group, reduce, dtype }, sources, vec![sum; members]);
        }
        let rows = Rows { outer: 1, dim: members, inner: bytes };
        let tensor = random.bytes(rows.global_bytes());
        let sources = (0..members).map(|i| filled(&rows_of(&tensor, rows, i, members))).collect();
        Case::new(everyone(count).0, Transfer::AllGather { group, rows }, sources, vec![whole(&tensor); members])
    };
    let edges = [48, 112, EAGER_BYTES_ALONE, EAGER_BYTES];
    let totals = edges.into_iter().flat_map(|edge| [edge - 1, edge, edge + 1]);
    let totals = totals.flat_map(|bytes| [(bytes, false), (bytes, true)]);
    let mut cases: Vec<Case> = totals.flat_map(|(bytes, reduced)| [tensor(17, reduced), tensor(bytes - 17, reduced)]).collect();
    let arenas = place(&mut random, &mut cases, count);
    let mut cases = cases.into_iter();
    let pairs: Vec<Vec<Case>> = std::iter::from_fn(|| Some(vec![cases.next()?, cases.next()?])).collect();
    for transport in [Transport::Local, Transport::Shm] {
        [false, true].into_iter().for_each(|crowded| run_transfers(transport, crowded, count, &pairs, arenas.clone()));
    }
}

#[test]
fn tensors_that_do_not_fit_each_other_are_no_transfer() {
    let layout = Layout::new(vec![everyone(2)], vec![1 << 16; 2]);
    let mut peers = local::world(&layout, PATIENCE).unwrap();
    let largest = Op {
        transfer: Transfer::AllReduce { group: GroupId(0), reduce: Reduce::Max, dtype: DType::F32 },
        ..all_reduce(64, 64)
    };
    assert!(start(&mut peers[0], &[all_reduce(0, 64), largest]).is_err());
    assert!(start(&mut peers[0], &[]).is_err());
    let many: Vec<Op> = (0..dcc_program::program::MOST_TENSORS + 1).map(|n| all_reduce(64 * n, 64)).collect();
    assert!(start(&mut peers[0], &many).is_err());
    assert!(start(&mut peers[0], &many[1..]).is_ok());
    let region = Region { offset: 0, bytes: 8 };
    let send = Op { transfer: Transfer::Send { to: 1, lane: 0 }, source: region, target: region };
    assert!(start(&mut peers[0], &[send, send]).is_err());
}

/// Other members are told, whichever tensor differs.
#[test]
fn another_number_of_tensors_is_another_transfer() {
    let (error, _) = failing(Transport::Local, Duration::from_secs(60), |mut peer| {
        let token = start(&mut peer, &[all_reduce(0, 64), all_reduce(64, 64)]).unwrap();
        assert!(peer.wait(token).is_err());
    });
    assert!(error.to_string().contains("DCC0603") || error.is_secondary(), "{error}");
}
