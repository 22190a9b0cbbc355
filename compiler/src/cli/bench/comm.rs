//! `dcc bench comm`: collectives of one process per rank over shared memory, by size.
//!
//! A figure is the median of several rounds, each the mean of many transfers on the slowest rank. Bandwidth is what a link of a ring would
//! carry ("bus bandwidth" of the usual benchmarks of collectives): bytes × 2 (n−1)/n for all_reduce, × (n−1)/n for the others, × 1 for
//! messages, over the time; bytes are those of the whole tensor.

use crate::cli::failure::Outcome;
use crate::cli::flags;
use crate::cli::output;
use crate::error::Error;
use dcc_runtime::comm::{
    Comm, DType, Exchange, Group, GroupId, Layout, Op, Patience, Reduce, Region, Rows, Side, Transfer, TransferId,
};
use dcc_runtime::error as runtime;
use dcc_runtime::launch::{self, Launch, Message, Worker};
use dcc_runtime::signal::StopSignals;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// The first argument of a rank.
pub const RANK: &str = "bench-rank";

const ROUNDS: usize = 7;
/// A round is judged by its first transfers: it has fewer where it would take longer.
const FIRST: usize = 16;
const MOST_NS: f64 = 1e8;
const WARM_NS: u64 = 250_000_000;
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub struct Args {
    /// Numbers of ranks, each a process
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [2, 4], value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// The smallest tensor, with KiB, MiB or GiB; each after it is four times the one before
    #[arg(long, value_name = "SIZE", default_value = "4")]
    min_bytes: String,
    /// The largest tensor, with KiB, MiB or GiB
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_bytes: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Send,
}

/// What a transfer of `bytes` took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Figure {
    ranks: u32,
    kind: Kind,
    bytes: usize,
    microseconds: f64,
    /// GB/s on a link of a ring.
    bandwidth: f64,
}

impl Kind {
    const ALL: [Kind; 5] = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll, Kind::Send];

    fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Send => "send",
        }
    }

    /// Bytes over a link of a ring for each byte of the tensor.
    fn traffic(self, ranks: u32) -> f64 {
        let others = f64::from(ranks - 1) / f64::from(ranks);
        match self {
            Kind::AllReduce => 2.0 * others,
            Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => others,
            Kind::Send => 1.0,
        }
    }
}

pub fn run(args: &Args) -> Outcome<i32> {
    let sizes = Sizes { least: size("--min-bytes", &args.min_bytes)?, most: size("--max-bytes", &args.max_bytes)? };
    if !sizes.least.is_multiple_of(4) {
        return Err(Error::usage(format!("--min-bytes {} is no multiple of 4 bytes", args.min_bytes)).into());
    }
    if sizes.least > sizes.most {
        let what = format!("--min-bytes {} is more than --max-bytes {}", args.min_bytes, args.max_bytes);
        return Err(Error::usage(what).into());
    }
    let stop = StopSignals::block()?;
    let mut figures: Vec<Figure> = Vec::new();
    for &ranks in &args.ranks {
        output::status("Measuring", &format!("collectives of {ranks} ranks, {} B to {} B", sizes.least, sizes.most));
        let mut launch = Launch::of_this_process(layout(ranks, sizes.most), TIMEOUT)?;
        launch.arguments = vec![RANK.into(), sizes.least.to_string().into(), sizes.most.to_string().into()];
        let mut wrong = None;
        let outcome = launch::supervise(&launch, &stop, &mut |_, message| {
            if let Message::Note(line) = message {
                match serde_json::from_str(&line) {
                    Ok(figure) => figures.push(figure),
                    Err(_) => wrong = Some(line),
                }
            }
        })?;
        if outcome == launch::Outcome::Stopped {
            return Ok(launch::STOPPED);
        }
        if let Some(line) = wrong {
            return Err(Error::internal(format!("a rank says: {line}")).into());
        }
    }
    if args.json {
        output::json(&figures)?;
    } else {
        output::data(&table(&figures))?;
    }
    Ok(0)
}

/// Bytes of tensors: each four times the one before.
#[derive(Clone, Copy)]
struct Sizes {
    least: usize,
    most: usize,
}

impl Sizes {
    fn iter(self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.least), |bytes| bytes.checked_mul(4)).take_while(move |&bytes| bytes <= self.most)
    }
}

fn size(flag: &str, given: &str) -> Outcome<usize> {
    let size = usize::try_from(flags::size(flag, given)?).ok().filter(|size| (4..=1 << 36).contains(size));
    Ok(size.ok_or_else(|| Error::usage(format!("{flag} {given} is not between 4 bytes and 64 GiB")))?)
}

fn table(figures: &[Figure]) -> String {
    let mut text = String::new();
    for ranks in figures.chunk_by(|a, b| a.ranks == b.ranks) {
        let _ = write!(text, "{} ranks{:>7}", ranks[0].ranks, "bytes");
        Kind::ALL.iter().for_each(|kind| text += &format!("{:>16} µs  GB/s", kind.name()));
        text.push('\n');
        let mut sizes: Vec<usize> = ranks.iter().map(|figure| figure.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for bytes in sizes {
            let _ = write!(text, "{bytes:>14}");
            for figure in Kind::ALL.iter().filter_map(|kind| ranks.iter().find(|f| f.kind == *kind && f.bytes == bytes)) {
                let _ = write!(text, "{:>19.2}{:>6.2}", figure.microseconds, figure.bandwidth);
            }
            text.push('\n');
        }
    }
    text
}

/// One group of all; a tensor and its result in each arena.
fn layout(ranks: u32, most: usize) -> Layout {
    Layout::new(vec![Group((0..ranks).collect())], vec![2 * room(ranks, most); ranks as usize])
}

/// Bytes of an operand: at least an element for each rank, whole pages.
fn room(ranks: u32, most: usize) -> usize {
    most.max(4 * ranks as usize).next_multiple_of(4096)
}

pub fn worker(mut arguments: impl Iterator<Item = OsString>) -> i32 {
    let mut bytes = || arguments.next().and_then(|word| word.to_str()?.parse().ok());
    let sizes = bytes().zip(bytes()).map(|(least, most)| Sizes { least, most });
    match (Worker::from_environment(), sizes) {
        (Ok(Some(mut worker)), Some(sizes)) => {
            let result = measure(&mut worker, sizes);
            worker.end(result.map(|()| launch::Outcome::Finished))
        }
        (Err(error), _) => {
            eprintln!("{error}");
            error.exit()
        }
        _ => 2,
    }
}

fn measure(worker: &mut Worker, sizes: Sizes) -> runtime::Result<()> {
    let most = sizes.most;
    let (mut comm, arena) = worker.attach(&layout(worker.world, most), Patience { timeout: TIMEOUT })?;
    // Pages are there before the clock runs; ones, whose sums are known.
    let ones: Vec<u8> = std::iter::repeat_n(1.0f32.to_ne_bytes(), 1 << 14).flatten().collect();
    (0..arena.bytes()).step_by(ones.len()).for_each(|at| arena.write(at, &ones[..ones.len().min(arena.bytes() - at)]));
    warm_up(&mut comm, room(worker.world, most))?;
    for bytes in sizes.iter() {
        for kind in Kind::ALL {
            let transfers = prepared(&mut comm, kind, bytes, room(worker.world, most))?;
            // As many as move 64 MiB, if there is time.
            let count = ((64 << 20) / bytes).clamp(4, 4096);
            let within = MOST_NS / nanoseconds(&mut comm, &transfers, count.min(FIRST))?;
            let count = count.min(within as usize).max(4);
            let mut rounds = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                // A message goes there and back.
                let each = if kind == Kind::Send { 2.0 } else { 1.0 };
                rounds.push(nanoseconds(&mut comm, &transfers, count)? / each);
            }
            if kind == Kind::AllReduce {
                let mut sum = [0; 4];
                arena.read(room(worker.world, most), &mut sum);
                assert_eq!(f32::from_ne_bytes(sum), worker.world as f32, "the sum of ones");
            }
            rounds.sort_by(f64::total_cmp);
            let (seconds, ranks) = (1e-9 * rounds[ROUNDS / 2], worker.world);
            let bandwidth = 1e-9 * kind.traffic(ranks) * bytes as f64 / seconds;
            if worker.rank == 0 {
                let figure = Figure { ranks, kind, bytes, microseconds: 1e6 * seconds, bandwidth };
                worker.send(&Message::Note(serde_json::to_string(&figure).expect("plain data")))?;
            }
        }
    }
    comm.finish();
    Ok(())
}

/// Until the system has given ranks that began on one processor others that are free.
fn warm_up(comm: &mut impl Comm, room: usize) -> runtime::Result<()> {
    let (began, transfers) = (Instant::now(), prepared(comm, Kind::AllGather, 4, room)?);
    loop {
        nanoseconds(comm, &transfers, 1024)?;
        // All stop at once.
        if comm.agree(began.elapsed().as_nanos() as u64)? > WARM_NS {
            return Ok(());
        }
    }
}

/// Nanoseconds of all `transfers` on the slowest rank, mean of `count` times.
fn nanoseconds(comm: &mut impl Comm, transfers: &[TransferId], count: usize) -> runtime::Result<f64> {
    comm.agree(0)?;
    let began = Instant::now();
    for _ in 0..count {
        for &transfer in transfers {
            let token = comm.start(transfer)?;
            comm.wait(token)?;
        }
    }
    let all = comm.agree(began.elapsed().as_nanos() as u64)?;
    Ok((all as f64 / count as f64).max(1.0))
}

/// What the rank starts and waits for, one after the other.
fn prepared(comm: &mut impl Comm, kind: Kind, bytes: usize, room: usize) -> runtime::Result<Vec<TransferId>> {
    ops(comm.rank(), comm.world(), kind, bytes, room).into_iter().map(|op| comm.prepare(&[op])).collect()
}

fn ops(rank: u32, ranks: u32, kind: Kind, bytes: usize, room: usize) -> Vec<Op> {
    let (group, reduce, dtype) = (GroupId(0), Reduce::Sum, DType::F32);
    let rows = Rows { outer: 1, dim: (bytes / 4).max(ranks as usize), inner: 4 };
    let exchange = Exchange { outer: 1, first: ranks as usize, middle: 1, second: rows.dim, inner: 4, split: Side::First };
    let region = |at: usize, bytes: usize| Region { offset: at * room, bytes };
    let op = |transfer, source: usize, target: usize| Op { transfer, source: region(0, source), target: region(1, target) };
    let (whole, own) = (rows.global_bytes(), rows.local_bytes(ranks as usize));
    match kind {
        Kind::AllReduce => vec![op(Transfer::AllReduce { group, reduce, dtype }, bytes, bytes)],
        Kind::AllGather => vec![op(Transfer::AllGather { group, rows }, own, whole)],
        Kind::ReduceScatter => vec![op(Transfer::ReduceScatter { group, reduce, dtype, rows }, whole, own)],
        Kind::AllToAll => {
            // As many blocks as ranks, each of a part of the bytes and of an element for each rank.
            let second = rows.dim.div_ceil(ranks as usize).max(ranks as usize);
            let exchange = Exchange { second, ..exchange };
            let (source, target) = exchange.local_bytes(ranks as usize);
            vec![op(Transfer::AllToAll { group, exchange }, source, target)]
        }
        Kind::Send => {
            let send = |to| op(Transfer::Send { to, lane: 0 }, bytes, 0);
            let receive = |from| op(Transfer::Recv { from, lane: 0 }, 0, bytes);
            match rank {
                0 => vec![send(1), receive(1)],
                1 => vec![receive(0), send(0)],
                _ => Vec::new(),
            }
        }
    }
}
