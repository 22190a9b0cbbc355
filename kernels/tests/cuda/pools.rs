//! Pools, their windows straight.

use crate::emulation::{Expected, Job, check};
use crate::numbers::{encoded, numbers};
use dcc_kernels::cuda::library::pool;
use dcc_kernels::library::pool::{Axis, MaxPool};
use dcc_program::types::DType;

fn pooled(name: &str, planes: Vec<[usize; 2]>, axes: Vec<Axis>, dtype: DType) -> Job {
    let product = |size: fn(&Axis) -> usize| axes.iter().map(size).product::<usize>();
    let (image, outputs) = (product(|axis| axis.image), product(|axis| axis.outputs));
    let reach = |operand: usize, size: usize| planes.iter().map(|plane| plane[operand] + size).max().unwrap_or(0);
    let mut x = numbers(reach(0, image), 5);
    x[image / 2] = f64::NAN;
    let (mut values, mut places) = (vec![f64::NAN; reach(1, outputs)], vec![-1.0; reach(1, outputs)]);
    for [from, to] in &planes {
        for window in 0..outputs {
            let (mut best, mut place) = (f64::NEG_INFINITY, -1.0);
            for tap in 0..product(|axis| axis.taps) {
                let (mut rest, mut here, mut inside) = ([window, tap], 0, true);
                let mut inner = 1;
                for axis in axes.iter().rev() {
                    let at = (rest[0] % axis.outputs * axis.stride + rest[1] % axis.taps * axis.dilation) as isize - axis.pad;
                    inside &= (0..axis.image as isize).contains(&at);
                    here += at * inner;
                    inner *= axis.image as isize;
                    rest = [rest[0] / axis.outputs, rest[1] / axis.taps];
                }
                if inside {
                    let found = x[from + here as usize];
                    if found > best || found.is_nan() || place < 0.0 {
                        (best, place) = (found, here as f64);
                    }
                }
            }
            (values[to + window], places[to + window]) = (best, place);
        }
    }
    let bytes = |dtype: DType| vec![0xff; reach(1, outputs) * dtype.bytes() as usize];
    Job {
        what: format!("max_pool of {} {axes:?}", dtype.name()),
        operands: vec![encoded(dtype, &x), bytes(dtype), bytes(DType::I32)],
        expected: vec![Expected { operand: 1, dtype, values }, Expected { operand: 2, dtype: DType::I32, values: places }],
        source: pool::max_pool(&MaxPool { planes, axes }, dtype, name).expect("a source"),
    }
}

#[test]
fn pools() {
    let axis = |[image, outputs, taps, stride, dilation]: [usize; 5], pad| Axis { image, outputs, taps, stride, dilation, pad };
    let planes = |count: usize, from: usize, to: usize| (0..count).map(|i| [i * from, i * to]).collect::<Vec<_>>();
    // Channels behind samples in the image, samples behind channels in the output.
    let crossed = (0..6).map(|i| [i * 72, (i % 3 * 2 + i / 3) * 20]).collect();
    let jobs = [
        pooled("p0", planes(5, 49, 16), vec![axis([7, 4, 3, 2, 1], 1), axis([7, 4, 3, 2, 1], 1)], DType::F32),
        pooled("p1", crossed, vec![axis([8, 4, 2, 2, 2], 0), axis([9, 5, 3, 2, 1], 2)], DType::F64),
        pooled("p2", planes(2, 400, 130), vec![axis([400, 130, 5, 3, 1], 1)], DType::BF16),
        pooled(
            "p3",
            planes(1, 60, 27),
            vec![axis([3, 3, 1, 3, 1], 2), axis([4, 3, 2, 1, 1], 0), axis([5, 3, 3, 1, 1], 0)],
            DType::F32,
        ),
    ];
    check("pools", &jobs);
}
