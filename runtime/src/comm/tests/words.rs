//! What transfers are told apart by: tokens and signatures.

use super::*;
use crate::comm::prepared::signature;

#[test]
fn a_token_tells_its_channel_and_number() {
    for started in [1, 5, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 40) + 12345] {
        for before in [1, 2, 1000].into_iter().filter(|&before| before <= started) {
            for (channel, eager) in [(0, false), (7, true), (u32::MAX, true)] {
                let token = Token::new(channel, started - before, eager);
                assert_eq!((token.channel(), token.is_eager(), token.sequence(started)), (channel, eager, started - before));
            }
        }
    }
}

#[test]
fn signatures_differ_wherever_transfers_do() {
    let group = GroupId(0);
    let rows = Rows { outer: 2, dim: 3, inner: 4 };
    let exchange = Exchange { outer: 1, first: 2, middle: 3, second: 4, inner: 5, split: Side::First };
    let mut transfers = vec![Transfer::Send { to: 1, lane: 0 }];
    for dtype in [DType::F32, DType::BF16] {
        for reduce in [Reduce::Sum, Reduce::Max] {
            transfers.push(Transfer::AllReduce { group, reduce, dtype });
            transfers.push(Transfer::ReduceScatter { group, reduce, dtype, rows });
        }
    }
    for rows in [rows, Rows { outer: 3, dim: 2, inner: 4 }, Rows { outer: 4, dim: 3, inner: 2 }] {
        transfers.push(Transfer::AllGather { group, rows });
    }
    for exchange in [exchange, Exchange { split: Side::Second, ..exchange }, Exchange { first: 3, middle: 2, ..exchange }] {
        transfers.push(Transfer::AllToAll { group, exchange });
    }
    let op = |transfer, bytes| Op { transfer, source: Region { offset: 8, bytes }, target: Region::default() };
    let ops = transfers.iter().flat_map(|&transfer| [0, 24, 48].map(|bytes| op(transfer, bytes)));
    let lists: Vec<Vec<Op>> = ops.clone().map(|one| vec![one]).chain(ops.map(|one| vec![one, one])).collect();
    let mut signatures: Vec<u64> = lists.iter().map(|list| signature(list)).collect();
    signatures.sort_unstable();
    assert!(signatures.windows(2).all(|pair| pair[0] != pair[1]));
    // Where operands lie is each member's own affair, and a message is one to both of its ends.
    assert_eq!(
        signature(&[op(transfers[1], 24)]),
        signature(&[Op { source: Region { offset: 64, bytes: 24 }, ..op(transfers[1], 24) }])
    );
    let received = Op { target: Region { offset: 0, bytes: 24 }, ..op(Transfer::Recv { from: 0, lane: 0 }, 0) };
    assert_eq!(signature(&[op(transfers[0], 24)]), signature(&[received]));
}
