//! The solver against brute force: all combinations of choices on small random graphs.

use super::account::account;
use super::*;
use crate::cost::Machine;
use crate::graph::Graph;
use crate::plan::testing::{input, param};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Reduce};

/// xorshift64*
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545F4914F6CDD1D) >> 33) as usize % n
    }
}

/// A chain with skips of products, pointwise ops and norms on `[8, width]`, or `[8, 6, width]` with a sequence; small enough to try
/// everything.
fn random_graph(random: &mut Random, sequence: bool) -> Graph {
    let widths = [4, 6, 16];
    let mut g = Graph::new();
    let shape = |width: u64| if sequence { vec![8, 6, width] } else { vec![8, width] };
    let spec = |of: &str| if sequence { of.replace('m', "b t") } else { of.to_owned() };
    let rows: Vec<usize> = (0..shape(4).len() - 1).collect();
    let mut values = vec![input(&mut g, "x", DType::F32, &shape(4), Some(0))];
    let shared = param(&mut g, "shared", &[4, 16]);
    let ops = 2 + random.below(4);
    for index in 0..ops {
        let x = values[values.len() - 1 - random.below(values.len().min(2))];
        let width = *g.ty(x).shape.last().unwrap();
        let other = values.iter().rev().copied().find(|&v| v != x && g.ty(v).shape == g.ty(x).shape);
        let y = match random.below(7) {
            0 if width == 4 => g.dot(&spec("m k, k n -> m n"), x, shared),
            1 if width == 16 => g.dot(&spec("m k, n k -> m n"), x, shared),
            2 => g.unary(UnaryOp::Tanh, x),
            3 => g.unary(UnaryOp::Neg, x),
            4 if other.is_some() => {
                let op = if random.below(2) == 0 { BinaryOp::Add } else { BinaryOp::Mul };
                g.binary(op, x, other.unwrap())
            }
            5 => {
                let op = if random.below(2) == 0 { Reduce::Sum } else { Reduce::Max };
                let sum = g.reduce(op, x, &[rows.len()]).unwrap();
                let sum = g.broadcast(sum, &shape(width), &rows).unwrap();
                g.binary(BinaryOp::Sub, x, sum)
            }
            _ => {
                let to = widths[random.below(widths.len())];
                let weight = param(&mut g, &format!("w{index}"), &[width, to]);
                g.dot(&spec("m k, k n -> m n"), x, weight)
            }
        };
        values.push(y.unwrap());
    }
    let last = *values.last().unwrap();
    let all: Vec<usize> = (0..=rows.len()).collect();
    let loss = g.sum(last, &all).unwrap();
    g.outputs = vec![("loss".into(), loss)];
    g
}

fn problem_of(graph: &Graph, tensor: &[(&str, u32)], machine: &Machine, along: Along) -> Problem {
    let forward = Forward::of(graph);
    let options = Parallel { microbatches: 2, tp: 2, ..Parallel::default() };
    let (plan, samples) = whole(&forward, &options, tensor).unwrap();
    let axes = tensor.iter().filter_map(|(name, _)| plan.mesh.axis(name)).collect();
    let classes = Classes::of(&forward);
    let pins = Pins::default();
    let held = Held { copies: 4.0, in_flight: 2 };
    Builder { forward: &forward, samples: &samples, classes: &classes, pins: &pins, context: None, experts: None, along, held }
        .build(&plan.mesh, axes, *machine)
        .expect("nothing is pinned")
}

fn along(sequence: bool) -> Along {
    if sequence { Along::Sequence } else { Along::Features }
}

/// Cost and bytes of all combinations that fit together.
fn brute_force(problem: &Problem) -> Vec<(Cost, u64)> {
    let mut all = Vec::new();
    let mut choices = vec![0; problem.items.len()];
    loop {
        all.extend(account(problem, &choices).map(|account| (account.cost, account.more)));
        let Some(place) = (0..choices.len()).find(|&i| choices[i] + 1 < problem.class(i).choices.len()) else { return all };
        choices[..place].fill(0);
        choices[place] += 1;
    }
}

fn least_cost(problem: &Problem) -> Cost {
    brute_force(problem).into_iter().map(|(cost, _)| cost).min().expect("nodes can be computed whole")
}

fn combinations(problem: &Problem) -> f64 {
    (0..problem.items.len()).map(|i| problem.class(i).choices.len() as f64).product()
}

#[test]
fn the_solver_finds_what_brute_force_finds() {
    let mut random = Random(0x9E3779B97F4A7C15);
    let (mut tried, mut sharded, mut kept) = (0, 0, 0);
    while tried < 250 {
        let sequence = tried % 2 == 1;
        let graph = random_graph(&mut random, sequence);
        // Between "never shard" and "always shard".
        let link = [2e7, 1e8, 1e9, 1e10][random.below(4)];
        let machine = Machine { flops: 1e9, memory: 1e9, link, latency: 1e-9 };
        let problem = problem_of(&graph, &[("tp", 2)], &machine, along(sequence));
        if combinations(&problem) > 30_000.0 {
            continue;
        }
        let Solved { choices, cost, .. } = frontier::front(&problem, 1).pop().unwrap();
        assert_eq!(account(&problem, &choices).unwrap().cost, cost, "the parts of the cost add up");
        assert_eq!(cost, least_cost(&problem), "graph {tried}");
        let chosen = || choices.iter().enumerate().map(|(i, &c)| (problem.class(i), &problem.class(i).choices[c]));
        sharded += usize::from(chosen().any(|(_, c)| c.factors.iter().any(|f| !f.is_empty())));
        kept += usize::from(chosen().any(|(class, c)| !class.scalar && !c.keep.is_empty()));
        tried += 1;
    }
    assert!(sharded > 100 && sharded < 250 && kept > 2, "the cases are varied: {sharded} sharded, {kept} keep pendings");
}

#[test]
fn two_axes_too() {
    let mut random = Random(0xD1B54A32D192ED03);
    let mut tried = 0;
    while tried < 30 {
        let sequence = tried % 2 == 1;
        let graph = random_graph(&mut random, sequence);
        let machine = Machine { flops: 1e9, memory: 1e9, link: 1e9, latency: 1e-9 };
        let problem = problem_of(&graph, &[("tp0", 2), ("tp1", 2)], &machine, along(sequence));
        if combinations(&problem) <= 30_000.0 {
            let cost = frontier::front(&problem, 1).pop().unwrap().cost;
            assert_eq!(cost, least_cost(&problem), "graph {tried}");
            tried += 1;
        }
    }
}

/// What all combinations that no other beats in both cost and bytes are, the solver finds, where levels are as fine as bytes.
#[test]
fn memory_is_an_axis() {
    let mut random = Random(0x2545F4914F6CDD1D);
    let (mut tried, mut points, mut lost) = (0, 0, 0);
    while tried < 200 {
        let graph = random_graph(&mut random, tried % 2 == 1);
        let link = [1e6, 1e7, 1e8][random.below(3)];
        let machine = Machine { flops: 1e9, memory: 1e9, link, latency: 1e-9 };
        let problem = problem_of(&graph, &[("tp", 2)], &machine, Along::Memory);
        if combinations(&problem) > 30_000.0 {
            continue;
        }
        let mut all = brute_force(&problem);
        all.sort_unstable_by_key(|&(cost, bytes)| (bytes, cost));
        let mut least = Cost::MAX;
        all.retain(|&(cost, _)| {
            let beats = cost < least;
            least = least.min(cost);
            beats
        });
        let found = |levels| frontier::front(&problem, levels);
        let exact: Vec<(Cost, u64)> = found(1 << 40).iter().map(|solved| (solved.cost, solved.more)).collect();
        assert_eq!(exact, all, "graph {tried}");
        let coarse = found(2);
        for solved in &coarse {
            let account = account(&problem, &solved.choices).unwrap();
            assert_eq!((account.cost, account.more), (solved.cost, solved.more), "the parts add up");
        }
        // A control: what levels lump together is lost.
        lost += all.len() - coarse.len().min(all.len());
        points += all.len();
        tried += 1;
    }
    assert!(2 * points > 3 * tried, "{points} ways in {tried} graphs");
    assert!(lost > 0, "two levels are as good as all");
}
