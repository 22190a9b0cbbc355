//! The first elements of rows, in order.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{decoded, encoded, numbers};
use dcc_kernels::cuda::library::top_k;
use dcc_kernels::library::top_k::TopK;
use dcc_program::types::DType;

/// Few values, so that most are equal to others; of most floats infinities, NaN and -0 among them.
fn values(count: usize, dtype: DType) -> Vec<f64> {
    let special = [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
    let of = |(i, x): (usize, f64)| match dtype {
        DType::F32 | DType::F64 | DType::BF16 if i % 7 < special.len() => special[(i * i + i / 7) % special.len()],
        _ if dtype.is_float() => x,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => 100.0 + (x * 32.0).round(),
        _ => (x * 32.0).round(),
    };
    numbers(count, 9).into_iter().enumerate().map(of).collect()
}

fn chosen(name: &str, [outer, size, inner]: [usize; 3], (k, largest): (usize, bool), dtype: DType) -> Job {
    let plan = TopK { outer, size, inner, k, largest };
    let operand = encoded(dtype, &values(outer * size * inner, dtype));
    let x = decoded(dtype, &operand);
    let mut indices = vec![0.0; outer * k * inner];
    for line in 0..outer * inner {
        let (base, column) = (line / inner, line % inner);
        let at = |i: usize| x[(base * size + i) * inner + column];
        let above = |a: usize, b: usize| at(a) > at(b) || (at(a).is_nan() && !at(b).is_nan());
        for i in 0..size {
            let ahead = |j: usize| if largest { above(j, i) } else { above(i, j) };
            let behind = |j: usize| if largest { above(i, j) } else { above(j, i) };
            let place = (0..size).filter(|&j| ahead(j) || (!behind(j) && j < i)).count();
            if place < k {
                indices[(base * k + place) * inner + column] = i as f64;
            }
        }
    }
    Job {
        what: format!("top_k of {} {plan:?}", dtype.name()),
        source: top_k::top_k(&plan, dtype, name).expect("a source"),
        operands: vec![operand, vec![0xff; indices.len() * 8]],
        expected: vec![Expected { operand: 1, dtype: DType::I64, values: indices }],
    }
}

#[test]
fn first_elements() {
    let jobs = [
        chosen("t0", [3, 100, 1], (7, true), DType::F32),
        chosen("t1", [2, 300, 3], (300, false), DType::F64),
        chosen("t2", [2, 65, 2], (65, true), DType::BF16),
        chosen("t3", [1, 130, 1], (4, false), DType::F16),
        chosen("t4", [2, 90, 1], (90, true), DType::I32),
        chosen("t5", [1, 77, 1], (77, false), DType::U8),
        chosen("t6", [2, 1, 2], (1, true), DType::I8),
        chosen("t7", [2, 50, 1], (50, false), DType::U64),
        chosen("t8", [1, 70, 1], (20, true), DType::U32),
    ];
    check("first_elements", &jobs);
}

/// Rows of several tiles.
#[test]
fn first_elements_of_long_rows() {
    let jobs = [
        chosen("l0", [2, 2100, 1], (2100, true), DType::F64),
        chosen("l1", [1, 4200, 2], (9, false), DType::I64),
        chosen("l2", [1, 4100, 1], (40, false), DType::F32),
    ];
    check("first_elements_of_long_rows", &jobs);
}

pub fn planted() -> Vec<Planted> {
    let short = |name: &str| chosen(name, [2, 100, 1], (100, true), DType::F32);
    let long = |name: &str| chosen(name, [1, 2100, 1], (20, false), DType::F64);
    let bugs: [(Bug, &str, &str, bool); 8] = [
        (Bug::NoBarrier, "            __syncthreads();\n        }\n    }\n}", "        }\n    }\n}", false),
        (
            Bug::DivergentBarrier,
            "            __syncthreads();\n        }",
            "            if (threadIdx.x < 32) __syncthreads();\n        }",
            false,
        ),
        (Bug::Tail, "if (at < S::SIZE)", "if (at + 1 < S::SIZE)", false),
        (Bug::Index, "(a == b && a_index < b_index)", "(a == b && a_index > b_index)", false),
        (Bug::Empty, "x != x ? ~0u : ", "", false),
        (Bug::Index, "x == 0 ? sign : ", "", false),
        (Bug::WrongTile, "if (tile == own) continue;", "", true),
        (Bug::MissingPart, "tile = n * S::TILES;", "tile = n * S::TILES + 1;", true),
    ];
    let one = |(i, (kind, from, to, tiles))| {
        let name = format!("k{i}");
        Planted { kind, job: if tiles { long(&name) } else { short(&name) }, from, to }
    };
    bugs.into_iter().enumerate().map(one).collect()
}

#[test]
fn planted_bugs_of_first_elements() {
    let sound =
        [chosen("sound0", [2, 100, 1], (100, true), DType::F32), chosen("sound1", [1, 2100, 1], (20, false), DType::F64)];
    check_planted("planted_bugs_of_first_elements", planted(), sound.into());
}
