//! Running sums, copies of rows, zeros.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{encoded, numbers};
use dcc_kernels::cuda::library::rows::Rows;
use dcc_kernels::cuda::library::{rows, scan};
use dcc_kernels::library::scatter::Cumsum;
use dcc_program::types::DType;

fn summed(name: &str, [outer, size, inner]: [usize; 3], [exclusive, reverse]: [bool; 2], dtype: DType) -> Job {
    let x: Vec<f64> =
        numbers(outer * size * inner, 7).iter().map(|x| if dtype.is_float() { *x } else { (x * 64.0).round() }).collect();
    let mut y = vec![0.0; x.len()];
    for line in 0..outer * inner {
        let base = line / inner * size * inner + line % inner;
        let mut sum = 0.0;
        for step in 0..size {
            let at = base + if reverse { size - 1 - step } else { step } * inner;
            y[at] = if exclusive { sum } else { sum + x[at] };
            sum += x[at];
        }
    }
    let sums = Cumsum { outer, size, inner, exclusive, reverse };
    Job {
        what: format!("cumsum of {} {sums:?}", dtype.name()),
        source: scan::cumsum(&sums, dtype, name).expect("a source"),
        operands: vec![encoded(dtype, &x), vec![0xff; x.len() * dtype.bytes() as usize]],
        expected: vec![Expected { operand: 1, dtype, values: y }],
    }
}

#[test]
fn running_sums() {
    let jobs = [
        summed("c0", [3, 700, 1], [false, false], DType::F32),
        summed("c1", [2, 300, 3], [true, true], DType::F64),
        summed("c2", [4, 30, 70], [false, true], DType::I32),
        summed("c3", [1, 256, 2], [true, false], DType::I64),
        summed("c4", [5, 1, 1], [true, false], DType::F32),
        summed("c5", [2, 1000, 1], [false, true], DType::I32),
    ];
    check("running_sums", &jobs);
}

/// By a block for each line.
fn of_lines(name: &str) -> Job {
    summed(name, [2, 600, 1], [true, false], DType::F32)
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (Bug::Lane, "lane >= by", "lane > by"),
        (Bug::NoBarrier, "        __syncthreads();\n        C own", "        C own"),
        (
            Bug::DivergentBarrier,
            "        __syncthreads();\n        C own",
            "        if (lane == 31) __syncthreads();\n        C own",
        ),
        (Bug::NoBarrier, "        }\n        __syncthreads();\n        if (step", "        }\n        if (step"),
        (Bug::OutOfBounds, "step + S::EXCLUSIVE < S::SIZE", "true"),
        (Bug::Uninitialised, "if (lane == 31) totals", "if (lane == 31 && warp > 0) totals"),
        (Bug::Tail, "first < S::SIZE; first", "first + S::THREADS < S::SIZE; first"),
    ];
    let one = |(i, (kind, from, to))| Planted { kind, job: of_lines(&format!("c{i}")), from, to };
    bugs.into_iter().enumerate().map(one).collect()
}

#[test]
fn planted_bugs_of_running_sums() {
    check_planted("planted_bugs_of_running_sums", planted(), vec![of_lines("sound")]);
}

fn copied(name: &str, rows: Rows) -> Job {
    let Rows { count, bytes, from_stride, to_stride, .. } = rows;
    let reach = |stride: usize| (count - 1) * stride + bytes;
    let from: Vec<f64> = (0..reach(from_stride)).map(|i| (i * 37 % 251) as f64).collect();
    let mut to = vec![9.0; reach(to_stride)];
    let before = encoded(DType::U8, &to);
    (0..count).for_each(|row| to[row * to_stride..][..bytes].copy_from_slice(&from[row * from_stride..][..bytes]));
    Job {
        what: format!("{rows:?}"),
        source: rows::copy(&rows, name).expect("a source"),
        operands: vec![encoded(DType::U8, &from), before],
        expected: vec![Expected { operand: 1, dtype: DType::U8, values: to }],
    }
}

#[test]
fn copies_and_zeros() {
    let zeros = |name: &str, bytes: usize, alignment: usize| Job {
        what: format!("{bytes} zeros"),
        source: rows::zero(bytes, alignment, name).expect("a source"),
        operands: vec![vec![7; bytes]],
        expected: vec![Expected { operand: 0, dtype: DType::U8, values: vec![0.0; bytes] }],
    };
    let jobs = [
        copied("r0", Rows { count: 3, bytes: 4096, from_stride: 8192, to_stride: 4096, alignment: 256 }),
        copied("r1", Rows { count: 50, bytes: 12, from_stride: 24, to_stride: 20, alignment: 256 }),
        copied("r2", Rows { count: 7, bytes: 3, from_stride: 5, to_stride: 3, alignment: 1 }),
        copied("r3", Rows { count: 1, bytes: 10_000, from_stride: 0, to_stride: 0, alignment: 8 }),
        zeros("z0", 5000, 256),
        zeros("z1", 35, 256),
    ];
    check("copies_and_zeros", &jobs);
}
