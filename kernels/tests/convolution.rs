//! Convolutions and pools against loops over every element.

use dcc_kernels::library::convolution::{Convolution, Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use dcc_kernels::library::pool::{Axis, MaxPool};
use dcc_kernels::{Isa, Pool};

/// Attributes of one spatial dim.
#[derive(Clone, Copy)]
struct Dim {
    image: usize,
    output: usize,
    taps: usize,
    stride: usize,
    dilation: usize,
    pad: isize,
}

fn dim(image: usize, output: usize, taps: usize, stride: usize, dilation: usize, pad: isize) -> Dim {
    Dim { image, output, taps, stride, dilation, pad }
}

/// Small integers: every sum is exact.
fn numbers(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 13) as f64 - 6.0).collect()
}

/// Calls `found(image, output, tap)` for every triple of flat spatial indices.
fn triples(dims: &[Dim], found: &mut impl FnMut(usize, usize, usize)) {
    fn go(dims: &[Dim], at: (usize, usize, usize), found: &mut impl FnMut(usize, usize, usize)) {
        let Some((d, rest)) = dims.split_first() else { return found(at.0, at.1, at.2) };
        for y in 0..d.output {
            for k in 0..d.taps {
                let x = (d.stride * y + d.dilation * k) as isize - d.pad;
                if (0..d.image as isize).contains(&x) {
                    go(rest, (at.0 * d.image + x as usize, at.1 * d.output + y, at.2 * d.taps + k), found);
                }
            }
        }
    }
    go(dims, (0, 0, 0), found);
}

struct Case {
    n: usize,
    g: usize,
    c: usize,
    o: usize,
    dims: Vec<Dim>,
}

impl Case {
    fn size(&self, of: fn(&Dim) -> usize) -> usize {
        self.dims.iter().map(of).product()
    }

    /// Image n g c x, output n g o y, kernel g o c k.
    fn shapes(&self) -> [usize; 3] {
        let Case { n, g, c, o, .. } = *self;
        [n * g * c * self.size(|d| d.image), n * g * o * self.size(|d| d.output), g * o * c * self.size(|d| d.taps)]
    }

    fn naive(&self, result: usize, tensors: [&[f64]; 3]) -> Vec<f64> {
        let Case { g, c, o, .. } = *self;
        let (xs, ys, ks) = (self.size(|d| d.image), self.size(|d| d.output), self.size(|d| d.taps));
        let mut out = vec![0.0; self.shapes()[result]];
        for (n, group, channel, to) in itertools(self) {
            triples(&self.dims, &mut |x, y, k| {
                let at = [
                    ((n * g + group) * c + channel) * xs + x,
                    ((n * g + group) * o + to) * ys + y,
                    ((group * o + to) * c + channel) * ks + k,
                ];
                let [a, b] = match result {
                    IMAGE => [OUTPUT, KERNEL],
                    OUTPUT => [IMAGE, KERNEL],
                    _ => [IMAGE, OUTPUT],
                };
                out[at[result]] += tensors[a][at[a]] * tensors[b][at[b]];
            });
        }
        out
    }

    /// Whether that result is summed by transformed tiles.
    fn is_transformed(&self, result: usize) -> bool {
        let (plain, spatial) = self.factors();
        let operands = [[OUTPUT, KERNEL], [IMAGE, KERNEL], [IMAGE, OUTPUT]][result];
        Convolution::<f32>::new(Form { result, operands }, &plain, &spatial).is_transformed()
    }

    /// Terms of an element of the result, at most.
    fn summed(&self, result: usize) -> usize {
        match result {
            IMAGE => self.o * self.size(|d| d.taps),
            OUTPUT => self.c * self.size(|d| d.taps),
            _ => self.n * self.size(|d| d.output),
        }
    }

    fn factors(&self) -> (Vec<Plain>, Vec<Spatial>) {
        let Case { n, g, c, o, .. } = *self;
        let (xs, ys, ks) = (self.size(|d| d.image), self.size(|d| d.output), self.size(|d| d.taps));
        let plain = vec![
            Plain { size: n, strides: [Some(g * c * xs), Some(g * o * ys), None] },
            Plain { size: g, strides: [Some(c * xs), Some(o * ys), Some(o * c * ks)] },
            Plain { size: c, strides: [Some(xs), None, Some(ks)] },
            Plain { size: o, strides: [None, Some(ys), Some(c * ks)] },
        ];
        let (mut strides, mut spatial) = ([1; 3], Vec::new());
        for d in self.dims.iter().rev() {
            let sizes = [d.image, d.output, d.taps];
            spatial.insert(0, Spatial { sizes, strides, stride: d.stride, dilation: d.dilation, pad: d.pad });
            (0..3).for_each(|i| strides[i] *= sizes[i]);
        }
        (plain, spatial)
    }

    fn check(&self) {
        let shapes = self.shapes();
        let tensors = [0, 1, 2].map(|i| numbers(shapes[i], i));
        for (result, operands) in [(OUTPUT, [IMAGE, KERNEL]), (IMAGE, [OUTPUT, KERNEL]), (KERNEL, [IMAGE, OUTPUT])] {
            let expected = self.naive(result, [&tensors[0], &tensors[1], &tensors[2]]);
            for operands in [operands, [operands[1], operands[0]]] {
                self.check_f64(Form { result, operands }, operands.map(|i| &tensors[i][..]), &expected);
                self.check_f32(Form { result, operands }, operands.map(|i| &tensors[i][..]), &expected);
            }
        }
    }
}

macro_rules! check {
    ($name:ident, $e:ty) => {
        impl Case {
            fn $name(&self, form: Form, operands: [&[f64]; 2], expected: &[f64]) {
                let (plain, spatial) = self.factors();
                let [a, b] = operands.map(|x| x.iter().map(|x| *x as $e).collect::<Vec<_>>());
                for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let plan = Convolution::<$e>::with_isa(form, &plain, &spatial, isa);
                    let pool = Pool::new(threads);
                    let (mut out, mut workspace) = (vec![<$e>::NAN; expected.len()], vec![<$e>::NAN; plan.workspace()]);
                    plan.run(&pool, false, &a, &b, &mut out, &mut workspace);
                    let same = |times: f64| out.iter().zip(expected).all(|(x, y)| *x as f64 == times * y);
                    assert!(same(1.0), "{form:?}, {threads} threads, {isa:?}");
                    plan.run(&pool, true, &a, &b, &mut out, &mut workspace);
                    let same = |times: f64| out.iter().zip(expected).all(|(x, y)| *x as f64 == times * y);
                    assert!(same(2.0), "{form:?} added, {isa:?}");
                    assert!(expected.is_empty() || expected.iter().all(|y| *y == 0.0) || !same(1.0), "the control");
                }
            }
        }
    };
}
check!(check_f64, f64);
check!(check_f32, f32);

/// Indices n, g, c, o.
fn itertools(case: &Case) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let Case { n, g, c, o, .. } = *case;
    (0..n * g * c * o).map(move |i| (i / (g * c * o), i / (c * o) % g, i / o % c, i % o))
}

#[test]
fn convolutions_and_their_gradients() {
    let case = |n, g, c, o, dims: &[Dim]| Case { n, g, c, o, dims: dims.to_vec() }.check();
    case(2, 1, 3, 5, &[dim(9, 9, 3, 1, 1, 1), dim(20, 20, 3, 1, 1, 1)]);
    case(3, 1, 4, 6, &[dim(8, 4, 3, 2, 1, 1), dim(9, 5, 3, 2, 1, 1)]);
    case(2, 1, 2, 3, &[dim(7, 5, 3, 1, 1, 0)]);
    case(2, 3, 2, 4, &[dim(11, 4, 3, 3, 2, 2), dim(6, 6, 2, 1, 1, 0)]);
    case(1, 6, 1, 1, &[dim(10, 10, 5, 1, 1, 2), dim(7, 4, 3, 2, 1, 1)]);
    case(2, 1, 2, 2, &[dim(5, 3, 2, 2, 2, 0), dim(6, 2, 1, 4, 1, 0), dim(4, 5, 3, 1, 2, 3)]);
    // Panels of several images, wide ones, and many channels of few.
    case(7, 1, 20, 40, &[dim(2, 2, 3, 1, 1, 1), dim(2, 2, 3, 1, 1, 1)]);
    case(3, 1, 17, 33, &[dim(4, 4, 3, 1, 1, 1), dim(4, 4, 3, 1, 1, 1)]);
    case(3, 1, 16, 8, &[dim(16, 8, 3, 2, 1, 1), dim(16, 8, 3, 2, 1, 1)]);
    case(2, 1, 3, 32, &[dim(16, 8, 7, 2, 1, 3), dim(16, 8, 7, 2, 1, 3)]);
    case(2, 1, 300, 5, &[dim(3, 3, 1, 1, 1, 0), dim(5, 5, 3, 1, 1, 1)]);
    // A kernel shorter than the stride leaves gaps; a negative pad begins inside of the image.
    case(2, 1, 3, 2, &[dim(11, 3, 2, 5, 1, 0), dim(12, 5, 3, 2, 1, -2)]);
    // Stride and dilation with a common factor: half of the phases meet no tap.
    case(2, 1, 2, 3, &[dim(13, 5, 3, 2, 2, 1)]);
}

/// Samples side by side, and small images parted by the taps that meet them.
#[test]
fn vectors_of_samples() {
    let case = |n, g, c, o, dims: &[Dim]| Case { n, g, c, o, dims: dims.to_vec() }.check();
    case(35, 1, 32, 24, &[dim(4, 4, 3, 1, 1, 1), dim(4, 4, 3, 1, 1, 1)]);
    case(19, 2, 24, 40, &[dim(7, 4, 5, 2, 1, 2), dim(6, 3, 5, 2, 1, 1)]);
    case(17, 1, 40, 33, &[dim(9, 9, 3, 1, 2, 2), dim(5, 5, 3, 1, 1, 1)]);
    // Gaps, and a border that rows do not reach; three dims.
    case(16, 1, 96, 96, &[dim(11, 3, 4, 5, 1, 0), dim(12, 5, 3, 2, 1, -2)]);
    case(16, 1, 24, 40, &[dim(3, 3, 3, 1, 1, 1), dim(2, 2, 3, 1, 1, 1), dim(3, 2, 2, 2, 1, 1)]);
    // More than a chunk; fewer than a vector.
    case(530, 1, 48, 48, &[dim(2, 2, 3, 1, 1, 1), dim(2, 2, 3, 1, 1, 1)]);
    case(4, 1, 64, 64, &[dim(2, 2, 3, 1, 1, 1), dim(2, 2, 3, 1, 1, 1)]);
}

/// Kernels' gradients that sum over lines of outputs with zeros between: with a border and without, of groups, in one dim to three, in chunks.
#[test]
fn lines_of_outputs() {
    let case = |n, g, c, o, dims: &[Dim]| Case { n, g, c, o, dims: dims.to_vec() }.check();
    case(2, 1, 16, 8, &[dim(14, 14, 3, 1, 1, 1), dim(15, 15, 3, 1, 1, 1)]);
    case(3, 2, 20, 5, &[dim(12, 10, 3, 1, 1, 0), dim(16, 14, 3, 1, 1, 0)]);
    case(2, 1, 48, 40, &[dim(13, 12, 4, 1, 1, 1), dim(17, 13, 3, 1, 2, 0)]);
    case(2, 1, 33, 4, &[dim(200, 196, 3, 1, 2, 0)]);
    case(1, 1, 4, 6, &[dim(6, 6, 3, 1, 1, 1), dim(7, 8, 2, 1, 1, 1), dim(12, 12, 3, 1, 1, 1)]);
    // Windows that begin inside of the image, or end long behind it.
    case(1, 1, 5, 7, &[dim(20, 14, 3, 1, 1, -2), dim(11, 15, 3, 1, 1, 1)]);
    case(5, 1, 64, 3, &[dim(72, 72, 3, 1, 1, 1), dim(70, 70, 3, 1, 1, 1)]);
}

/// Depthwise ones, and others of few channels.
#[test]
fn planes_are_swept() {
    let case = |n, g, c, o, dims: &[Dim]| Case { n, g, c, o, dims: dims.to_vec() }.check();
    case(2, 7, 1, 1, &[dim(14, 14, 3, 1, 1, 1), dim(14, 14, 3, 1, 1, 1)]);
    case(3, 5, 1, 1, &[dim(15, 8, 3, 2, 1, 1), dim(14, 7, 5, 2, 1, 2)]);
    case(2, 4, 1, 2, &[dim(7, 7, 7, 1, 1, 3), dim(9, 9, 7, 1, 1, 3)]);
    case(2, 3, 2, 2, &[dim(6, 6, 3, 1, 1, 1), dim(8, 8, 3, 1, 1, 1)]);
    case(2, 6, 1, 1, &[dim(70, 70, 4, 1, 1, 2)]);
    case(1, 3, 1, 1, &[dim(40, 29, 4, 1, 4, 0)]);
    case(2, 3, 1, 1, &[dim(5, 3, 3, 2, 1, 1), dim(6, 6, 3, 1, 1, 1), dim(7, 3, 3, 3, 1, 2)]);
    // Kernels shorter than the stride, negative pads, strides and dilations with common factors and without.
    case(2, 3, 1, 1, &[dim(11, 3, 2, 5, 1, 0), dim(12, 5, 3, 2, 1, -2)]);
    case(2, 3, 1, 1, &[dim(13, 5, 3, 2, 2, 1), dim(17, 4, 3, 4, 3, 0)]);
    case(3, 1, 1, 4, &[dim(9, 1, 2, 8, 8, 0), dim(3, 5, 1, 1, 1, 1)]);
    // Many small planes, which go together, in several chunks.
    case(19, 23, 1, 1, &[dim(3, 3, 3, 1, 1, 1), dim(5, 5, 3, 1, 1, 1)]);
    case(33, 70, 1, 1, &[dim(6, 3, 3, 2, 1, 1), dim(5, 3, 5, 2, 1, 2)]);
    case(37, 9, 1, 2, &[dim(4, 4, 3, 1, 1, 1), dim(2, 2, 1, 1, 1, 0), dim(3, 3, 3, 1, 1, 1)]);
    // Planes of more than one band, of either operand.
    case(2, 2, 1, 1, &[dim(260, 260, 3, 1, 1, 1), dim(300, 300, 3, 1, 1, 1)]);
    case(1, 2, 1, 1, &[dim(519, 260, 3, 2, 1, 1), dim(399, 200, 3, 2, 1, 1)]);
    case(1, 1, 2, 2, &[dim(70_000, 70_000, 5, 1, 1, 2)]);
}

/// Sums that are rounded are the same by all instruction sets and numbers of threads.
#[test]
fn swept_planes_are_the_same_everywhere() {
    let dims = vec![dim(40, 20, 5, 2, 1, 2), dim(33, 33, 3, 1, 1, 1)];
    let case = Case { n: 5, g: 6, c: 1, o: 1, dims };
    let (shapes, (plain, spatial)) = (case.shapes(), case.factors());
    let tensors = [0, 1, 2].map(|i| numbers(shapes[i], i).into_iter().map(|x| (x / 7.0) as f32).collect::<Vec<f32>>());
    for (result, operands) in [(OUTPUT, [IMAGE, KERNEL]), (IMAGE, [OUTPUT, KERNEL]), (KERNEL, [IMAGE, OUTPUT])] {
        let run = |isa: Isa, threads: usize| {
            let plan = Convolution::<f32>::with_isa(Form { result, operands }, &plain, &spatial, isa);
            assert_eq!(plan.workspace(), 0, "the control: products need one");
            let mut out = vec![f32::NAN; shapes[result]];
            let [a, b] = operands.map(|i| &tensors[i][..]);
            plan.run(&Pool::new(threads), false, a, b, &mut out, &mut []);
            out.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        };
        let expected = run(Isa::Baseline, 1);
        let whole = |bits: &u32| f32::from_bits(*bits).fract() == 0.0;
        assert!(!expected.iter().all(whole), "the control");
        for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            assert_eq!(run(isa, threads), expected, "{isa:?}, {threads} threads");
        }
    }
}

/// Windows of 3 × 3 over tiles: planes of odd sizes, cut by chunks of lines, channels that are no whole vectors, in parts, all borders.
#[test]
fn tiles_are_transformed() {
    let case = |n, c, o, dims: &[Dim]| {
        let case = Case { n, g: 1, c, o, dims: dims.to_vec() };
        for result in [IMAGE, OUTPUT, KERNEL] {
            assert!(case.is_transformed(result), "the control: {n} {c} {o}, {result}");
        }
        case.check();
    };
    case(3, 40, 50, &[dim(14, 14, 3, 1, 1, 1), dim(15, 15, 3, 1, 1, 1)]);
    case(2, 64, 96, &[dim(15, 13, 3, 1, 1, 0), dim(17, 15, 3, 1, 1, 0)]);
    case(1, 48, 64, &[dim(30, 32, 3, 1, 1, 2), dim(21, 23, 3, 1, 1, 2)]);
    case(20, 96, 80, &[dim(4, 4, 3, 1, 1, 1), dim(4, 4, 3, 1, 1, 1)]);
    // More channels than are transformed at once, and more than a thread's scratch holds the tiles of.
    case(3, 200, 136, &[dim(6, 6, 3, 1, 1, 1), dim(6, 6, 3, 1, 1, 1)]);
    case(6, 656, 32, &[dim(6, 6, 3, 1, 1, 1), dim(6, 6, 3, 1, 1, 1)]);
}

/// Elements that no window meets may be anything; samples may be those of two factors.
#[test]
fn tiles_read_what_windows_meet() {
    let case = Case { n: 6, g: 1, c: 64, o: 48, dims: vec![dim(16, 13, 3, 1, 1, 0), dim(18, 14, 3, 1, 1, -1)] };
    let (shapes, (mut plain, spatial)) = (case.shapes(), case.factors());
    plain[0].size = 3;
    let strides = plain[0].strides.map(|stride| Some(3 * stride?));
    plain.push(Plain { size: 2, strides });
    let tensors = [0, 1, 2].map(|i| numbers(shapes[i], i));
    let met = |at: usize| (at / 18 % 16) < 15 && (1..17).contains(&(at % 18));
    let spoiled: Vec<f32> = tensors[IMAGE].iter().enumerate().map(|(i, x)| if met(i) { *x as f32 } else { f32::NAN }).collect();
    assert!(spoiled.iter().any(|x| x.is_nan()), "the control");
    for (result, other) in [(OUTPUT, KERNEL), (KERNEL, OUTPUT)] {
        let plan = Convolution::<f32>::new(Form { result, operands: [IMAGE, other] }, &plain, &spatial);
        assert!(plan.is_transformed(), "the control");
        let expected = case.naive(result, [&tensors[0], &tensors[1], &tensors[2]]);
        let other: Vec<f32> = tensors[other].iter().map(|x| *x as f32).collect();
        for threads in [1, 2, 5] {
            let (mut out, mut workspace) = (vec![f32::NAN; shapes[result]], vec![f32::NAN; plan.workspace()]);
            plan.run(&Pool::new(threads), false, &spoiled, &other, &mut out, &mut workspace);
            assert!(out.iter().zip(&expected).all(|(x, y)| f64::from(*x) == *y), "{result}, {threads} threads");
        }
    }
}

/// What tiles round is of the size of what a chain of multiply-adds rounds, and the same by all instruction sets and threads.
#[test]
fn tiles_round_as_little_as_products() {
    let case = Case { n: 12, g: 1, c: 32, o: 48, dims: vec![dim(14, 14, 3, 1, 1, 1), dim(14, 14, 3, 1, 1, 1)] };
    let (shapes, (plain, spatial)) = (case.shapes(), case.factors());
    let mut state = 1u64;
    let mut normal = |_| {
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        f64::from(((0..12).map(|_| uniform()).sum::<f64>() - 6.0) as f32)
    };
    let tensors = [0, 1, 2].map(|i: usize| (0..shapes[i]).map(&mut normal).collect::<Vec<f64>>());
    for (result, operands) in [(OUTPUT, [IMAGE, KERNEL]), (IMAGE, [OUTPUT, KERNEL]), (KERNEL, [IMAGE, OUTPUT])] {
        assert!(case.is_transformed(result), "the control");
        let exact = case.naive(result, [&tensors[0], &tensors[1], &tensors[2]]);
        let summed = case.summed(result);
        let run = |isa: Isa, threads: usize| {
            let plan = Convolution::<f32>::with_isa(Form { result, operands }, &plain, &spatial, isa);
            let (mut out, mut workspace) = (vec![f32::NAN; shapes[result]], vec![f32::NAN; plan.workspace()]);
            let [a, b] = operands.map(|i| tensors[i].iter().map(|x| *x as f32).collect::<Vec<f32>>());
            plan.run(&Pool::new(threads), false, &a, &b, &mut out, &mut workspace);
            out
        };
        let out = run(Isa::detect(), 1);
        let size = |of: &dyn Fn(usize) -> f64| (0..exact.len()).map(|i| of(i).powi(2)).sum::<f64>().sqrt();
        let error = size(&|i| f64::from(out[i]) - exact[i]) / size(&|i| exact[i]);
        // What a chain of as many random terms rounds grows with the root of their number; about half of this.
        let chain = f64::from(f32::EPSILON) / 4.0 * (summed as f64).sqrt();
        assert!(error < chain, "{result}: {error:e} of {chain:e}");
        assert!(error > 1e-9, "the control: {error:e}");
        for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 2), (isa, 5)]) {
            let same = run(isa, threads).iter().zip(&out).all(|(x, y)| x.to_bits() == y.to_bits());
            assert!(same, "{isa:?}, {threads} threads");
        }
    }
}

/// A rank's shard may be empty: of five channels over four ranks, the last has none.
#[test]
fn nothing_of_a_dim() {
    let dims = [dim(6, 6, 3, 1, 1, 1), dim(5, 3, 1, 2, 1, 0), dim(6, 6, 3, 1, 1, 1)];
    for (n, g, c, o) in [(2, 1, 3, 0), (2, 1, 0, 4), (0, 1, 3, 4), (2, 0, 1, 1), (2, 1, 32, 0), (2, 1, 0, 32), (0, 1, 32, 32)] {
        Case { n, g, c, o, dims: dims[..2].to_vec() }.check();
        Case { n, g, c, o, dims: dims[1..].to_vec() }.check();
        Case { n, g, c, o, dims: vec![dims[0], dims[2]] }.check();
        Case { n, g, c, o, dims: vec![dim(6, 3, 3, 2, 1, 1); 2] }.check();
    }
}

/// The same in blocks that have room for two channels, as ranks have: nothing is read, and nothing but sums over nothing written.
#[test]
fn nothing_of_a_block() {
    let spatial = [Spatial { sizes: [6, 3, 3], strides: [1, 1, 1], stride: 2, dilation: 1, pad: 1 }];
    let forms = [(IMAGE, [OUTPUT, KERNEL]), (OUTPUT, [IMAGE, KERNEL]), (KERNEL, [IMAGE, OUTPUT])];
    for (channels, outputs) in [(0, 2), (2, 0)] {
        let plain = [
            Plain { size: 2, strides: [Some(12), Some(6), None] },
            Plain { size: channels, strides: [Some(6), None, Some(3)] },
            Plain { size: outputs, strides: [None, Some(3), Some(6)] },
        ];
        for (result, operands) in forms {
            let convolution = Convolution::<f32>::new(Form { result, operands }, &plain, &spatial);
            let empty = [channels, outputs, 0][result] == 0;
            for accumulate in [false, true] {
                let mut found = [7.0; 24];
                let mut workspace = vec![0.0; convolution.workspace()];
                convolution.run(&Pool::new(1), accumulate, &[1.0; 24], &[1.0; 24], &mut found, &mut workspace);
                let count = if empty || accumulate { 0 } else { [24, 12, 12][result] };
                let expected: Vec<f32> = (0..24).map(|at| if at < count { 0.0 } else { 7.0 }).collect();
                assert_eq!(found[..], expected[..], "result {result} of {channels} and {outputs} channels");
            }
        }
    }
}

/// More samples than one chunk of bordered copies takes.
#[test]
fn many_samples_in_chunks() {
    Case { n: 5, g: 1, c: 2, o: 2, dims: vec![dim(500, 500, 3, 1, 1, 1), dim(402, 402, 1, 1, 1, 0)] }.check();
}

#[test]
fn kernels_in_turns() {
    Case { n: 3, g: 1, c: 384, o: 320, dims: vec![dim(2, 2, 3, 1, 1, 1), dim(3, 2, 3, 2, 1, 1)] }.check();
    Case { n: 1, g: 2, c: 40, o: 300, dims: vec![dim(9, 4, 7, 1, 1, 0), dim(5, 3, 7, 1, 1, 2)] }.check();
}

#[test]
fn pools_take_the_first_of_equal_ones() {
    let axes = vec![
        Axis { image: 5, outputs: 3, taps: 3, stride: 2, dilation: 1, pad: 1 },
        Axis { image: 6, outputs: 2, taps: 2, stride: 3, dilation: 2, pad: 0 },
    ];
    let mut x: Vec<f32> = (0..60).map(|i| ((i * 7) % 5) as f32).collect();
    x[20] = f32::NAN;
    x[31] = f32::NEG_INFINITY;
    let pool = MaxPool { planes: vec![[0, 6], [30, 0]], axes: axes.clone() };
    for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let (mut values, mut places) = ([0.0; 12], [0; 12]);
        pool.run_with(isa, &Pool::new(threads), f32::NEG_INFINITY, &x, &mut values, &mut places);
        for (from, to) in [(0, 6), (30, 0)] {
            for output in 0..6 {
                let (mut best, mut place) = (f32::NEG_INFINITY, -1);
                for tap in 0..6 {
                    let at = |a: &Axis, y: usize, k: usize| (a.stride * y + a.dilation * k) as isize - a.pad;
                    let (i, j) = (at(&axes[0], output / 2, tap / 2), at(&axes[1], output % 2, tap % 2));
                    if (0..5).contains(&i) && (0..6).contains(&j) {
                        let found = x[from + (i * 6 + j) as usize];
                        if found > best || found.is_nan() || place < 0 {
                            (best, place) = (found, (i * 6 + j) as i32);
                        }
                    }
                }
                assert_eq!((values[to + output].to_bits(), places[to + output]), (best.to_bits(), place));
            }
        }
    }
}
