//! Additions at computed places, in the order of their sources.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{decoded, encoded, numbers};
use dcc_kernels::cuda::library::scatter;
use dcc_kernels::library::scatter::{Factor, Indexed};
use dcc_program::program::StoreMode;
use dcc_program::types::DType;

/// Sums of updates by [`Factor`]s: their loops, straight.
fn scattered(name: &str, factors: &[Factor], indexed: Indexed, [dtype, index]: [DType; 2], mode: StoreMode) -> Job {
    let reach = |stride: fn(&Factor) -> Option<usize>| {
        1 + factors.iter().filter_map(|f| stride(f).map(|s| (f.size - 1) * s)).sum::<usize>()
    };
    let rows = (indexed.valid - 1) * indexed.stride;
    let (counts, start) = ([reach(|f| f.index), reach(|f| f.update), reach(|f| f.out) + rows], 0.5);
    let beyond = indexed.valid as i64 + 3;
    let indices: Vec<f64> =
        (0..counts[0]).map(|i| (indexed.offset + (i * i / 5 + i * 11) as i64 % beyond - 1) as f64).collect();
    let updates = numbers(counts[1], 6);
    let mut out = vec![if mode == StoreMode::Accumulate { start } else { 0.0 }; counts[2]];
    for point in 0..factors.iter().map(|f| f.size).product() {
        let (mut rest, mut offsets) = (point, [0; 3]);
        for f in factors.iter().rev() {
            let strides = [f.index, f.update, f.out].map(|stride| stride.unwrap_or(0));
            (0..3).for_each(|i| offsets[i] += rest % f.size * strides[i]);
            rest /= f.size;
        }
        let row = indices[offsets[0]] as i64 - indexed.offset;
        if (0..indexed.valid as i64).contains(&row) {
            out[offsets[2] + row as usize * indexed.stride] += updates[offsets[1]];
        }
    }
    Job {
        what: format!("scatter_add of {} by {} {factors:?} {indexed:?} {mode:?}", dtype.name(), index.name()),
        source: scatter::scatter_add((factors, indexed), (dtype, index), mode, name).expect("a source"),
        operands: vec![encoded(index, &indices), encoded(dtype, &updates), encoded(dtype, &vec![start; counts[2]])],
        expected: vec![Expected { operand: 2, dtype, values: out }],
    }
}

fn factor(size: usize, index: Option<usize>, update: usize, out: Option<usize>) -> Factor {
    Factor { size, index, update: Some(update), out }
}

/// An embedding's gradient: tokens [b, t], updates [b, t, c], of rows from 3 on of a table.
fn embedding([b, t, c]: [usize; 3], valid: usize) -> (Vec<Factor>, Indexed) {
    let factors = vec![factor(b, Some(t), t * c, None), factor(t, Some(1), c, None), factor(c, None, 1, Some(1))];
    (factors, Indexed { stride: c, offset: 3, valid })
}

#[test]
fn scatters() {
    let (few, many) = (embedding([2, 700, 70], 5), embedding([3, 100, 40], 300));
    let (assign, accumulate) = (StoreMode::Assign, StoreMode::Accumulate);
    // Indices [b, n], updates [n, b, c, d] -> out [v, d, b, c].
    let crossed = [
        factor(2, Some(30), 10, Some(5)),
        factor(30, Some(1), 20, None),
        factor(5, None, 2, Some(1)),
        factor(2, None, 1, Some(10)),
    ];
    let jobs = [
        scattered("s0", &few.0, few.1, [DType::F32, DType::I64], assign),
        scattered("s1", &many.0, many.1, [DType::F32, DType::I32], accumulate),
        scattered("s2", &crossed, Indexed { stride: 20, offset: -1, valid: 4 }, [DType::F64, DType::I64], accumulate),
        scattered("s3", &many.0, many.1, [DType::BF16, DType::I32], assign),
        scattered("s4", &few.0, few.1, [DType::F64, DType::I32], accumulate),
        scattered(
            "s5",
            &[factor(3000, Some(1), 1, None)],
            Indexed { stride: 1, offset: 0, valid: 100 },
            [DType::F32, DType::I64],
            assign,
        ),
    ];
    // A pool's gradient: planes, windows that share elements; then one whose sources all have one row.
    let planes = [factor(6, Some(49), 49, Some(100)), factor(49, Some(1), 1, None)];
    let pooled = scattered("s6", &planes, Indexed { stride: 1, offset: 0, valid: 100 }, [DType::F32, DType::I32], accumulate);
    let mut crowded = scattered(
        "s7",
        &[factor(300, Some(1), 1, None)],
        Indexed { stride: 1, offset: 0, valid: 9 },
        [DType::F64, DType::I32],
        assign,
    );
    crowded.operands[0] = encoded(DType::I32, &[4.0; 300]);
    crowded.expected[0].values =
        (0..9).map(|row| if row == 4 { decoded(DType::F64, &crowded.operands[1]).iter().sum() } else { 0.0 }).collect();
    let jobs: Vec<Job> = jobs.into_iter().chain([pooled, crowded]).collect();
    assert!(jobs[0].source.launches.len() == 2 && jobs[1].source.launches.len() == 1, "one of parts, one without");
    check("scatters", &jobs);
}

/// Of many columns, in parts.
fn of_many(name: &str) -> Job {
    let (factors, indexed) = embedding([3, 700, 140], 40);
    scattered(name, &factors, indexed, [DType::F32, DType::I64], StoreMode::Assign)
}

/// Of one column.
fn of_few(name: &str) -> Job {
    let factors = [factor(3, Some(700), 700, Some(40)), factor(700, Some(1), 1, None)];
    let indexed = Indexed { stride: 1, offset: 3, valid: 40 };
    scattered(name, &factors, indexed, [DType::F32, DType::I64], StoreMode::Assign)
}

pub fn planted() -> Vec<Planted> {
    let many = [
        (Bug::Uninitialised, "if (!(touched >> r & 1))", "if (false)"),
        (Bug::Index, "((1u << lane) - 1)", "((1u << lane >> 1) - 1)"),
        (Bug::NoBarrier, "        __syncthreads();\n        int at", "        int at"),
        (Bug::NoBarrier, "        __syncthreads();\n        if (!own)", "        if (!own)"),
        (
            Bug::DivergentBarrier,
            "        __syncthreads();\n        if (!own)",
            "        if (own) __syncthreads();\n        if (!own)",
        ),
        (Bug::Index, "S::OFFSET + first", "S::OFFSET"),
        (Bug::MissingPart, "parts[part * all + n]", "parts[n]"),
    ];
    let few = [
        (Bug::MissingPart, "        } while (__syncthreads_or(waits));", "        } while (__syncthreads_or(false));"),
        (Bug::Index, "local >= 0 && local < valid;", "local > 0 && local < valid;"),
        (Bug::OutOfBounds, "local >= 0 && local < valid;", "local >= 0;"),
    ];
    let many =
        many.into_iter().enumerate().map(|(i, (kind, from, to))| Planted { kind, job: of_many(&format!("s{i}")), from, to });
    let few =
        few.into_iter().enumerate().map(|(i, (kind, from, to))| Planted { kind, job: of_few(&format!("f{i}")), from, to });
    many.chain(few).collect()
}

#[test]
fn planted_bugs_of_scatters() {
    check_planted("planted_bugs_of_scatters", planted(), vec![of_many("sound"), of_few("few")]);
}
