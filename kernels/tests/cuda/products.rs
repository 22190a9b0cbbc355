//! Products and convolutions, their loops straight.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{decoded, encoded, numbers};
use dcc_kernels::cuda::library::product::{self, Types};
use dcc_kernels::library::convolution::{Form, Plain, Spatial};
use dcc_kernels::library::matmul;
use dcc_program::program::StoreMode;
use dcc_program::types::DType;

/// A tensor's elements for the strides of a product, its bytes and values.
fn operand(dtype: DType, count: usize, seed: usize) -> (Vec<u8>, Vec<f64>) {
    let bytes = encoded(dtype, &numbers(count, seed));
    let values = decoded(dtype, &bytes);
    (bytes, values)
}

/// Loops of a product or convolution: length, and element strides in lhs, rhs and out.
pub type Strided = (usize, [Option<usize>; 3]);

/// One more than the largest offset in each operand.
fn reach(loops: &[Strided]) -> [usize; 3] {
    std::array::from_fn(|i| 1 + loops.iter().map(|(size, strides)| (size - 1) * strides[i].unwrap_or(0)).sum::<usize>())
}

pub fn multiplied(name: &str, loops: &[Strided], types: Types) -> Job {
    let counts = reach(loops);
    let [(a, x), (b, y)] = [operand(types.operands, counts[0], 3), operand(types.operands, counts[1], 5)];
    let start = if types.mode == StoreMode::Accumulate { 0.5 } else { 0.0 };
    let mut out = vec![start; counts[2]];
    for point in 0..loops.iter().map(|l| l.0).product() {
        let (mut rest, mut at) = (point, [0; 3]);
        for (size, strides) in loops.iter().rev() {
            (0..3).for_each(|i| at[i] += rest % size * strides[i].unwrap_or(0));
            rest /= size;
        }
        out[at[2]] += x[at[0]] * y[at[1]];
    }
    let factor = |&(size, [lhs, rhs, out]): &Strided| matmul::Factor { size, lhs, rhs, out };
    let factors: Vec<matmul::Factor> = loops.iter().map(factor).collect();
    Job {
        what: format!("{loops:?} {types:?}"),
        source: product::dot(&factors, types, counts, name).expect("a source"),
        operands: vec![a, b, encoded(types.result, &vec![0.5; counts[2]])],
        expected: vec![Expected { operand: 2, dtype: types.result, values: out }],
    }
}

pub fn types(operands: DType, result: DType, mode: StoreMode) -> Types {
    Types { operands, result, mode }
}

/// Row-major lhs [m, k], rhs [k, n]; turned, lhs [k, m], rhs [n, k].
pub fn plain([m, n, k]: [usize; 3], turned: bool) -> Vec<Strided> {
    match turned {
        false => vec![(m, [Some(k), None, Some(n)]), (n, [None, Some(1), Some(1)]), (k, [Some(1), Some(n), None])],
        true => vec![(m, [Some(1), None, Some(n)]), (n, [None, Some(k), Some(1)]), (k, [Some(m), Some(1), None])],
    }
}

/// Heads [b, t, h, e] and [b, s, h, e] to scores [b, h, t, s].
pub fn heads() -> Vec<Strided> {
    vec![
        (2, [Some(7 * 3 * 5), Some(9 * 3 * 5), Some(3 * 7 * 9)]),
        (3, [Some(5), Some(5), Some(7 * 9)]),
        (7, [Some(3 * 5), None, Some(9)]),
        (9, [None, Some(3 * 5), Some(1)]),
        (5, [Some(1), Some(1), None]),
    ]
}

#[test]
fn products() {
    let (assign, accumulate) = (StoreMode::Assign, StoreMode::Accumulate);
    let (f32, f64, bf16, f16) = (DType::F32, DType::F64, DType::BF16, DType::F16);
    // Rows of two dims that do not follow each other in the result.
    let parted = vec![
        (6, [Some(80), None, Some(4)]),
        (10, [Some(8), None, Some(24)]),
        (4, [None, Some(8), Some(1)]),
        (8, [Some(1), Some(1), None]),
    ];
    // A batch, and rows and sums of two dims each, apart by multiples of 8.
    let packed = vec![
        (3, [Some(4096), Some(1600), Some(800)]),
        (4, [Some(1024), None, Some(200)]),
        (5, [Some(200), None, Some(40)]),
        (40, [None, Some(40), Some(1)]),
        (5, [Some(40), Some(8), None]),
        (8, [Some(1), Some(1), None]),
    ];
    let jobs = [
        multiplied("p0", &plain([200, 150, 37], false), types(f32, f32, assign)),
        multiplied("p1", &plain([20, 30, 2100], true), types(f32, f32, accumulate)),
        multiplied("p2", &heads(), types(f64, f64, accumulate)),
        multiplied("p3", &plain([130, 70, 100], false), types(bf16, bf16, assign)),
        multiplied("p4", &plain([33, 129, 700], true), types(f16, f32, accumulate)),
        multiplied("p5", &parted, types(f32, f32, assign)),
        multiplied("p6", &parted, types(bf16, f32, accumulate)),
        multiplied("p7", &plain([1, 1, 3], false), types(f64, f64, assign)),
        // Of halves, 8 of which lie side by side: in both operands, in one of them, along other dims.
        multiplied("p8", &plain([136, 72, 104], false), types(bf16, bf16, assign)),
        multiplied("p9", &plain([136, 136, 104], true), types(f16, f16, accumulate)),
        multiplied("p10", &plain([136, 70, 104], false), types(bf16, f32, accumulate)),
        multiplied("p11", &plain([70, 136, 104], true), types(f16, f32, assign)),
        multiplied("p12", &plain([40, 48, 2104], true), types(bf16, bf16, accumulate)),
        multiplied("p13", &packed, types(bf16, f32, assign)),
    ];
    assert!(jobs[1].source.launches.len() == 2 && jobs[0].source.launches.len() == 1, "one of parts, one without");
    check("products", &jobs);
}

/// A two-dimensional convolution and both gradients: images [n, g, c, 9, 8], outputs [n, g, o, …], kernels [g, o, c, 3, 2].
pub fn convolved(name: &str, result: usize, dtype: DType, [stride, dilation, pad]: [usize; 3], mode: StoreMode) -> Job {
    let (n, g, c, o) = (2, 2, 3, 4);
    let (image, taps) = ([9, 8], [3, 2]);
    let out = [0, 1].map(|d| (image[d] + 2 * pad - dilation * (taps[d] - 1) - 1) / stride + 1);
    let dense = |dims: &[usize]| -> Vec<usize> { (0..dims.len()).map(|i| dims[i + 1..].iter().product()).collect() };
    let [x, y, k] =
        [[n, g, c, image[0], image[1]], [n, g, o, out[0], out[1]], [g, o, c, taps[0], taps[1]]].map(|dims| dense(&dims));
    let plain = [
        Plain { size: n, strides: [Some(x[0]), Some(y[0]), None] },
        Plain { size: g, strides: [Some(x[1]), Some(y[1]), Some(k[0])] },
        Plain { size: c, strides: [Some(x[2]), None, Some(k[2])] },
        Plain { size: o, strides: [None, Some(y[2]), Some(k[1])] },
    ];
    let spatial = [0, 1].map(|d| Spatial {
        sizes: [image[d], out[d], taps[d]],
        strides: [x[3 + d], y[3 + d], k[3 + d]],
        stride,
        dilation,
        pad: pad as isize,
    });
    let counts = [n * x[0], n * y[0], g * k[0]];
    let [first, second] = [[1, 2], [2, 0], [0, 1]][result];
    let (form, roles) = (Form { result, operands: [first, second] }, [first, second, result]);
    let [(a, p), (b, q)] = [operand(dtype, counts[first], 3), operand(dtype, counts[second], 5)];
    let start = if mode == StoreMode::Accumulate { 0.5 } else { 0.0 };
    let mut sums = vec![start; counts[result]];
    let all = plain.iter().map(|f| f.size).product::<usize>();
    for point in 0..all * out[0] * out[1] * taps[0] * taps[1] {
        let (mut rest, mut at, mut inside) = (point, [0; 3], true);
        for s in &spatial {
            let (yi, ki) = (rest % s.sizes[1], rest / s.sizes[1] % s.sizes[2]);
            rest /= s.sizes[1] * s.sizes[2];
            let xi = (s.stride * yi + s.dilation * ki).wrapping_sub(s.pad as usize);
            inside &= xi < s.sizes[0];
            let places = [xi.min(s.sizes[0] - 1), yi, ki];
            places.into_iter().enumerate().for_each(|(role, i)| at[role] += i * s.strides[role]);
        }
        for f in &plain {
            (0..3).for_each(|role| at[role] += rest % f.size * f.strides[role].unwrap_or(0));
            rest /= f.size;
        }
        if inside {
            sums[at[result]] += p[at[first]] * q[at[second]];
        }
    }
    let elements = roles.map(|role| counts[role]);
    let types = types(dtype, dtype, mode);
    Job {
        what: format!("convolution, result {result}, {dtype:?}, stride {stride}, dilation {dilation}, pad {pad}"),
        source: product::convolution((form, &plain, &spatial), types, elements, name).expect("a source"),
        operands: vec![a, b, encoded(dtype, &vec![0.5; counts[result]])],
        expected: vec![Expected { operand: 2, dtype, values: sums }],
    }
}

#[test]
fn convolutions() {
    let mut jobs = Vec::new();
    for (number, geometry) in [[1, 1, 1], [2, 1, 0], [2, 2, 2], [3, 1, 1]].into_iter().enumerate() {
        for result in 0..3 {
            let dtype = [DType::F32, DType::F64, DType::BF16][(number + result) % 3];
            jobs.push(convolved(&format!("c{number}{result}"), result, dtype, geometry, StoreMode::Accumulate));
        }
    }
    check("convolutions", &jobs);
}

/// Without parts, in parts, and of halves, whose lhs is copied to shared memory asynchronously.
fn subjects(name: &str) -> [Job; 3] {
    let job = |which: &str, loops: &[Strided], dtype| {
        multiplied(&format!("{name}{which}"), loops, types(dtype, dtype, StoreMode::Assign))
    };
    [
        job("whole", &plain([70, 40, 60], false), DType::F32),
        job("parts", &plain([20, 30, 2100], true), DType::F32),
        job("halves", &plain([130, 70, 104], false), DType::BF16),
    ]
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (Bug::NoBarrier, 0, "bs[bk][bn] = y;\n        }\n        __syncthreads();", "bs[bk][bn] = y;\n        }"),
        (
            Bug::NoBarrier,
            0,
            "sums[i][j] += x[i] * y[j];\n        }\n        __syncthreads();",
            "sums[i][j] += x[i] * y[j];\n        }",
        ),
        (Bug::Tail, 0, "k0 + ak < tile.end", "k0 + ak <= tile.end"),
        (Bug::OutOfBounds, 0, "if (m < V::M && n < V::N) put", "if (n < V::N) put"),
        (Bug::Uninitialised, 0, "as[ak][am] = x;", "if (am > 0) as[ak][am] = x;"),
        (Bug::MissingPart, 1, "part < PARTS", "part + 1 < PARTS"),
        (Bug::Tail, 1, "first = blockIdx.y * each", "first = blockIdx.y * (each - step)"),
        (Bug::NoWait, 2, "tensor::wait<STAGES - 2>();", "tensor::wait<STAGES - 1>();"),
        (Bug::NoBarrier, 2, "tensor::wait<STAGES - 2>();\n        __syncthreads();", "tensor::wait<STAGES - 2>();"),
        (Bug::WrongTile, 2, "start(ahead, next, slice);", "start(ahead, now, slice);"),
        (
            Bug::Uninitialised,
            2,
            "finish(tile.first + stage * STEP, stage, slice);",
            "if (slice > 0) finish(tile.first + stage * STEP, stage, slice);",
        ),
        (Bug::Lane, 2, "i + lane / 16 * 8", "i + lane / 8 % 2 * 8"),
        (Bug::Index, 2, "first_m + i * 16 + half * 8", "first_m + i * 16"),
        (Bug::Tail, 2, "i < (LHS ? V::M : V::N) && k < tile.end", "k < tile.end"),
    ];
    let one = |(number, (kind, which, from, to)): (usize, (Bug, usize, &'static str, &'static str))| {
        let [whole, parts, halves] = subjects(&format!("b{number}"));
        Planted { kind, job: [whole, parts, halves].into_iter().nth(which).expect("one of three"), from, to }
    };
    bugs.into_iter().enumerate().map(one).collect()
}

#[test]
fn planted_bugs_of_products() {
    check_planted("planted_bugs_of_products", planted(), subjects("sound").into());
}
