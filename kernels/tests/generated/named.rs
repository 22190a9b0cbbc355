//! The hot kernels, and those that went wrong once.

use super::*;

#[test]
fn softmax_rows() {
    for (rows, columns) in [(5, 33), (40, 1024), (3, 5000), (7, 1)] {
        let mut b = Build::new(&["i", "j"]).outer(&[0]);
        let x = b.input(F, &[0, 1]);
        let max = b.reduce(Reduce::Max, &[1], x);
        let shifted = b.sub(x, max);
        let e = b.un(UnaryOp::Exp, shifted);
        let sum = b.reduce(Reduce::Sum, &[1], e);
        let y = b.bin(BinaryOp::Div, e, sum);
        b.store(F, &[1], &[0, 1], y);
        let dims = vec![whole(rows), whole(columns)];
        check(&b.kernel, std::slice::from_ref(&dims), std::slice::from_ref(&dims), 1e-6);
    }
}

/// The loss of rows longer than a tile: sums and stores share passes.
#[test]
fn long_rows_in_few_passes() {
    let (rows, columns) = (whole(3), whole(9001));
    let mut b = Build::new(&["i", "j"]).outer(&[0]);
    let (x, label) = (b.input(F, &[0, 1]), b.input(DType::I64, &[0]));
    let max = b.reduce(Reduce::Max, &[1], x);
    let shifted = b.sub(x, max);
    let e = b.un(UnaryOp::Exp, shifted);
    let sum = b.reduce(Reduce::Sum, &[1], e);
    b.store(F, &[], &[0], sum);
    let position = b.kernel.expr(Expr::Position(DimId(1)));
    let (hit, zero) = (b.kernel.expr(Expr::Compare(CompareOp::Eq, position, label)), b.float(F, 0.0));
    let hit = b.kernel.expr(Expr::Select(hit, shifted, zero));
    let target = b.reduce(Reduce::Sum, &[1], hit);
    b.store(F, &[], &[0], target);
    b.store(F, &[1], &[0, 1], e);
    // Reads a sum of the pass before: a pass of its own.
    let p = b.bin(BinaryOp::Div, e, sum);
    let most = b.reduce(Reduce::Max, &[1], p);
    b.store(F, &[], &[0], most);
    let dims = [vec![rows, columns], vec![rows]];
    let results = [vec![rows], vec![rows], vec![rows, columns], vec![rows]];
    check(&b.kernel, &dims, &results, 1e-5);
}

/// A function that one pass over a long row stores and a later one reads again.
#[test]
fn what_a_pass_stores_a_later_one_reads() {
    let (rows, columns) = (whole(3), whole(9001));
    let mut b = Build::new(&["i", "j"]).outer(&[0]);
    let (x, y) = (b.input(F, &[0, 1]), b.input(F, &[0, 1]));
    let e = b.un(UnaryOp::Exp, x);
    let sum = b.reduce(Reduce::Sum, &[1], y);
    b.store(F, &[1], &[0, 1], e);
    let scaled = b.mul(e, sum);
    b.store(F, &[1], &[0, 1], scaled);
    let dims = vec![rows, columns];
    check(&b.kernel, &[dims.clone(), dims.clone()], &[dims.clone(), dims], 1e-5);
}

#[test]
fn layer_norm() {
    for columns in [20, 768, 4500] {
        let mut b = Build::new(&["i", "j"]).outer(&[0]);
        let (x, gain, bias) = (b.input(F, &[0, 1]), b.input(F, &[1]), b.input(F, &[1]));
        let n = b.float(F, 1.0 / columns as f64);
        let (sum, eps) = (b.reduce(Reduce::Sum, &[1], x), b.float(F, 1e-5));
        let mean = b.mul(sum, n);
        let centred = b.sub(x, mean);
        let square = b.mul(centred, centred);
        let sum = b.reduce(Reduce::Sum, &[1], square);
        let variance = b.mul(sum, n);
        let variance = b.add(variance, eps);
        let r = b.un(UnaryOp::Rsqrt, variance);
        let r = b.bind(r);
        let y = b.mul(centred, r);
        let y = b.mul(y, gain);
        let y = b.add(y, bias);
        b.store(F, &[1], &[0, 1], y);
        b.store(F, &[], &[0], mean);
        let (i, j) = (whole(9), whole(columns));
        check(&b.kernel, &[vec![i, j], vec![j], vec![j]], &[vec![i, j], vec![i]], 1e-5);
    }
}

/// Small images behind channels: tiles are of both.
#[test]
fn batch_norm_of_small_images() {
    for (samples, channels, size) in [(16, 70, 16), (3, 300, 4), (90, 40, 49), (1, 9, 2), (5, 33, 100)] {
        let [n, c, s] = [samples, channels, size].map(whole);
        let image = || vec![n, c, s];
        // Several sums of the same values, and what follows from them.
        let mut b = Build::new(&["n", "c", "s"]).outer(&[1]);
        let (dy, x, mean) = (b.input(F, &[0, 1, 2]), b.input(F, &[0, 1, 2]), b.input(F, &[1]));
        let centred = b.sub(x, mean);
        let product = b.mul(dy, centred);
        let (first, second) = (b.reduce(Reduce::Sum, &[0, 2], dy), b.reduce(Reduce::Sum, &[0, 2], product));
        let most = b.reduce(Reduce::Max, &[0, 2], centred);
        let scale = b.float(F, 1.0 / (samples * size) as f64);
        let second = b.mul(second, scale);
        let both = b.bind(second);
        let both = b.add(both, most);
        b.store(F, &[], &[1], first);
        b.store(F, &[], &[1], both);
        let shifted = b.add(centred, both);
        b.store(F, &[0, 2], &[0, 1, 2], shifted);
        let (inputs, outputs) = ([image(), image(), vec![c]], [vec![c], vec![c], image()]);
        check(&b.kernel, &inputs, &outputs, 2e-5);
        assert!(samples == 1 || is_paired(&b.kernel, &inputs, &outputs), "{channels} x {size}");

        // Values of channels alone and of places alone, in an image.
        let mut b = Build::new(&["n", "c", "s"]).outer(&[0, 1, 2]);
        let (x, scale, shift) = (b.input(F, &[0, 1, 2]), b.input(F, &[1]), b.input(F, &[1]));
        let (place, sample) = (b.input(F, &[2]), b.input(F, &[0]));
        let gain = b.un(UnaryOp::Tanh, scale);
        let gain = b.mul(gain, shift);
        let y = b.mul(x, gain);
        let place = b.un(UnaryOp::Exp, place);
        let y = b.add(y, place);
        let y = b.mul(y, sample);
        let y = b.add(y, gain);
        let zero = b.float(F, 0.0);
        let negative = b.kernel.expr(Expr::Compare(CompareOp::Le, y, zero));
        let y = b.kernel.expr(Expr::Select(negative, shift, y));
        b.store(DType::Bool, &[], &[0, 1, 2], negative);
        b.store(F, &[], &[0, 1, 2], y);
        let inputs = [image(), vec![c], vec![c], vec![s], vec![n]];
        check(&b.kernel, &inputs, &[image(), image()], 2e-5);
        assert!(is_paired(&b.kernel, &inputs, &[image(), image()]), "{channels} x {size}");
    }
}

/// A product that outer loops know is not made again from operands that it has overwritten.
#[test]
fn a_product_that_is_known_is_added_as_it_is() {
    let mut b = Build::new(&["n", "j"]).outer(&[1]);
    let (x, y, z) = (b.input(F, &[1]), b.input(F, &[1]), b.input(F, &[0, 1]));
    let e = b.un(UnaryOp::Exp, x);
    let product = b.mul(e, y);
    let sum = b.add(product, z);
    let sum = b.un(UnaryOp::Tanh, sum);
    let sum = b.reduce(Reduce::Sum, &[0], sum);
    b.store(F, &[], &[1], sum);
    check(&b.kernel, &[vec![whole(300)], vec![whole(300)], vec![whole(5), whole(300)]], &[vec![whole(300)]], 1e-5);
}

#[test]
fn bias_gelu_residual_and_bias_gradient() {
    let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
    let (x, bias, r) = (b.input(F, &[0, 1]), b.input(F, &[1]), b.input(F, &[0, 1]));
    let x = b.add(x, bias);
    let (c, k, half, one) = (b.float(F, 0.044715), b.float(F, 0.797_884_56), b.float(F, 0.5), b.float(F, 1.0));
    let x2 = b.mul(x, x);
    let x3 = b.mul(x2, x);
    let x3 = b.mul(x3, c);
    let u = b.add(x, x3);
    let u = b.mul(u, k);
    let t = b.un(UnaryOp::Tanh, u);
    let t = b.add(t, one);
    let y = b.mul(x, half);
    let y = b.mul(y, t);
    let y = b.add(y, r);
    b.store(F, &[], &[0, 1], y);
    let (i, j) = (whole(40), whole(300));
    check(&b.kernel, &[vec![i, j], vec![j], vec![i, j]], &[vec![i, j]], 1e-6);

    let mut b = Build::new(&["i", "j"]).outer(&[1]);
    let dy = b.input(F, &[0, 1]);
    let sum = b.reduce(Reduce::Sum, &[0], dy);
    b.store_as(F, &[], &[1], sum, StoreMode::Accumulate);
    for i in [1, 63, 64, 300] {
        check(&b.kernel, &[vec![whole(i), j]], &[vec![j]], 1e-6);
        check(&b.kernel, &[vec![whole(i), whole(3)]], &[vec![whole(3)]], 1e-6);
    }
}

#[test]
fn transposes_slices_and_pads() {
    let (i, j, k) = (whole(70), whole(130), whole(5));
    for dtype in [F, DType::F64, DType::I32, DType::Bool, DType::BF16] {
        let mut b = Build::new(&["i", "j", "k"]).outer(&[0, 1, 2]);
        let x = b.input(dtype, &[0, 1, 2]);
        b.store(dtype, &[], &[1, 0, 2], x);
        check(&b.kernel, &[vec![i, j, k]], &[vec![j, i, k]], 0.0);
        let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
        let x = b.input(dtype, &[1, 0]);
        b.store(dtype, &[], &[0, 1], x);
        check(&b.kernel, &[vec![j, i]], &[vec![i, j]], 0.0);
    }
    let affine = |dim: u8, times, offset| Index::Affine { terms: vec![(DimId(dim), times)], offset };
    for (times, offset, size) in [(1, -3, 130), (1, 4, 100), (2, 1, 300), (-1, 129, 130), (3, -20, 50)] {
        let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
        let x = b.indexed(F, vec![affine(0, 1, -2), affine(1, times, offset)], Outside::Zero);
        b.store(F, &[], &[0, 1], x);
        check(&b.kernel, &[vec![whole(66), whole(size)]], &[vec![i, j]], 0.0);
    }
}

#[test]
fn vocabulary_shards() {
    // Embedding: rows outside of this shard are zero. Loss: the target's logit, then the gradient by comparing positions.
    let (t, c) = (whole(50), whole(24));
    let vocabulary = Extent { offset: 4, valid: 5, block: 6 };
    let mut b = Build::new(&["t", "c"]).outer(&[0, 1]);
    let token = b.input(DType::I64, &[0]);
    let row = b.indexed(F, vec![Index::Expr(token), Index::Dim(DimId(1))], Outside::Zero);
    b.store(F, &[], &[0, 1], row);
    check(&b.kernel, &[vec![t], vec![vocabulary, c]], &[vec![t, c]], 0.0);

    let mut b = Build::new(&["t", "v"]).outer(&[0]);
    let label = b.input(DType::I32, &[0]);
    let label = b.kernel.expr(Expr::Cast(DType::I64, label));
    let logits = b.input(F, &[0, 1]);
    let target =
        b.kernel.expr(Expr::Load { input: 1, index: vec![Index::Dim(DimId(0)), Index::Expr(label)], outside: Outside::Zero });
    let max = b.reduce(Reduce::Max, &[1], logits);
    let shifted = b.sub(logits, max);
    let e = b.un(UnaryOp::Exp, shifted);
    let sum = b.reduce(Reduce::Sum, &[1], e);
    let position = b.kernel.expr(Expr::Position(DimId(1)));
    let hit = b.kernel.expr(Expr::Compare(CompareOp::Eq, position, label));
    let (one, zero) = (b.float(F, 1.0), b.float(F, 0.0));
    let hot = b.kernel.expr(Expr::Select(hit, one, zero));
    let p = b.bin(BinaryOp::Div, e, sum);
    let g = b.sub(p, hot);
    b.store(F, &[1], &[0, 1], g);
    let loss = b.un(UnaryOp::Log, sum);
    let loss = b.add(loss, max);
    let loss = b.sub(loss, target);
    b.store(F, &[], &[0], loss);
    check(&b.kernel, &[vec![t], vec![t, vocabulary]], &[vec![t, vocabulary], vec![t]], 1e-6);
}

/// Random numbers of the elements of a tensor that is 100 wide, the kernel's dims its rows and columns.
fn uniform(b: &mut Build, id: u32) -> ExprId {
    let (seed, step) = (b.int(1 << 40 | 5), b.int(3));
    let (s, c) = (b.kernel.expr(Expr::Position(DimId(0))), b.kernel.expr(Expr::Position(DimId(1))));
    let width = b.int(100);
    let row = b.mul(s, width);
    let element = b.add(row, c);
    b.kernel.expr(Expr::Uniform { id, seed, step, element })
}

#[test]
fn adamw_in_place_and_dropout() {
    let n = whole(3000);
    let mut b = Build::new(&["i"]).outer(&[0]);
    let (p, m, v, g) = (b.input(F, &[0]), b.input(F, &[0]), b.input(F, &[0]), b.input(F, &[0]));
    let step = b.indexed(DType::I64, vec![], Outside::Never);
    let (b1, b2, c1, c2, lr, eps, one) = (
        b.float(F, 0.9),
        b.float(F, 0.999),
        b.float(F, 0.1),
        b.float(F, 0.001),
        b.float(F, 1e-3),
        b.float(F, 1e-8),
        b.float(F, 1.0),
    );
    let step = b.kernel.expr(Expr::Cast(F, step));
    let p1 = b.bin(BinaryOp::Pow, b1, step);
    let correction = b.sub(one, p1);
    let (x, y) = (b.mul(m, b1), b.mul(g, c1));
    let m2 = b.add(x, y);
    let g2 = b.mul(g, g);
    let (x, y) = (b.mul(v, b2), b.mul(g2, c2));
    let v2 = b.add(x, y);
    let root = b.un(UnaryOp::Sqrt, v2);
    let root = b.add(root, eps);
    let hat = b.bin(BinaryOp::Div, m2, correction);
    let update = b.bin(BinaryOp::Div, hat, root);
    let update = b.mul(update, lr);
    let p2 = b.sub(p, update);
    for value in [p2, m2, v2] {
        b.store(F, &[], &[0], value);
    }
    let mut positive = b.kernel.clone();
    check(&positive, &[vec![n], vec![n], vec![n], vec![n], vec![]], &[vec![n], vec![n], vec![n]], 1e-5);
    positive.body.rotate_left(1);
    check(&positive, &[vec![n], vec![n], vec![n], vec![n], vec![]], &[vec![n], vec![n], vec![n]], 1e-5);

    let mut b = Build::new(&["s", "c"]).outer(&[0, 1]);
    let x = b.input(F, &[0, 1]);
    let u = uniform(&mut b, 9);
    let (rate, zero) = (b.float(F, 0.1), b.float(F, 0.0));
    let keep = b.kernel.expr(Expr::Compare(CompareOp::Ge, u, rate));
    let y = b.kernel.expr(Expr::Select(keep, x, zero));
    b.store(F, &[], &[0, 1], y);
    b.store(F, &[], &[0, 1], u);
    let (s, c) = (Extent { offset: 30, valid: 13, block: 15 }, Extent { offset: 34, valid: 33, block: 34 });
    check(&b.kernel, &[vec![s, c]], &[vec![s, c], vec![s, c]], 0.0);
}

/// To the bits of the reference, whole and in shards, and not as it is to nearest: a control.
#[test]
fn stochastic_rounding() {
    let rounded = |is_nearest: bool| {
        let mut b = Build::new(&["s", "c"]).outer(&[0, 1]);
        let x = b.input(F, &[0, 1]);
        let u = uniform(&mut b, u32::MAX);
        // What f32 and not bf16 holds.
        let third = b.float(F, f64::from(1.0_f32 / 3.0));
        let x = b.mul(x, third);
        let y = if is_nearest { x } else { b.bin(BinaryOp::RoundStochastic, x, u) };
        let half = b.kernel.expr(Expr::Cast(DType::BF16, y));
        b.store(DType::BF16, &[], &[0, 1], half);
        b.kernel
    };
    let (s, c) = (Extent { offset: 30, valid: 13, block: 15 }, Extent { offset: 34, valid: 33, block: 34 });
    for extents in [vec![s, c], vec![whole(40), whole(100)]] {
        check(&rounded(false), std::slice::from_ref(&extents), std::slice::from_ref(&extents), 0.0);
    }
    let extents = vec![s, c];
    let control = || {
        let (kernel, meant) = (rounded(true), rounded(false));
        check_as(&kernel, &meant, std::slice::from_ref(&extents), std::slice::from_ref(&extents), 0.0);
    };
    assert!(std::panic::catch_unwind(control).is_err(), "rounding to nearest passes");
}

#[test]
fn more_values_than_long_tiles_hold() {
    let (mut b, n) = (Build::new(&["i", "j"]).outer(&[0]), 3000);
    let x = b.input(F, &[0, 1]);
    // All of these live until the last statement uses them again.
    let values: Vec<ExprId> = (0..150)
        .map(|k| {
            let c = b.float(F, 0.01 * f64::from(k));
            b.mul(x, c)
        })
        .collect();
    let mut total = b.reduce(Reduce::Max, &[1], x);
    for pass in 0..2 {
        for value in &values {
            let scaled = b.bin([BinaryOp::Max, BinaryOp::Min][pass], total, *value);
            total = scaled;
        }
    }
    b.store(F, &[1], &[0, 1], total);
    let dims = vec![whole(2), whole(n)];
    check(&b.kernel, std::slice::from_ref(&dims), std::slice::from_ref(&dims), 1e-6);
}

/// The comparison sees a wrong constant.
#[test]
#[should_panic(expected = "expected")]
fn control() {
    let mut b = Build::new(&["i"]).outer(&[0]);
    let x = b.input(F, &[0]);
    let c = b.float(F, 1.01);
    let y = b.mul(x, c);
    b.store(F, &[], &[0], y);
    let nest = |kernel: &Kernel| Nest::bind(kernel, &[vec![whole(9)]], &[vec![whole(9)]]).unwrap();
    let mut wrong = b.kernel.clone();
    wrong.exprs[usize::try_from(c.0).unwrap()] = Expr::Const { dtype: F, bits: 1f64.to_bits() };
    let mut expected = vec![vec![Scalar::Float(0.0); 9]];
    reference::run(&nest(&b.kernel), &[0; 3], &[vec![Scalar::Float(1.0); 9]], &mut expected);
    let (input, mut output) = ([1f32; 10].map(f32::to_le_bytes).concat(), vec![0u8; 40]);
    Jit::new().unwrap().compile(nest(&wrong)).unwrap().run_slices(&Pool::new(1), &[0; 3], &[&input], &mut [&mut output]);
    compare(&scalars(F, &output)[..9], &expected[0], 1e-6, "control");
}

/// What is stored as bf16 is rounded once; what is computed on from a rounded value, from just that.
#[test]
fn casts_that_stores_make() {
    let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
    let (x, y) = (b.input(F, &[0, 1]), b.input(F, &[0, 1]));
    let product = b.bin(BinaryOp::Mul, x, y);
    let kept = b.bind(product);
    let half = b.kernel.expr(Expr::Cast(DType::BF16, kept));
    let stored = b.bind(half);
    b.store(F, &[], &[0, 1], kept);
    b.store(DType::BF16, &[], &[0, 1], stored);
    let sum = b.bin(BinaryOp::Add, x, y);
    let rounded = b.kernel.expr(Expr::Cast(DType::BF16, sum));
    let only_stored = b.bind(rounded);
    b.store(DType::BF16, &[], &[0, 1], only_stored);
    let both = b.kernel.expr(Expr::Cast(DType::BF16, x));
    let both = b.bind(both);
    let wide = b.kernel.expr(Expr::Cast(F, both));
    b.store(DType::BF16, &[], &[0, 1], both);
    b.store(F, &[], &[0, 1], wide);
    let (rows, columns) = (7, 300);
    let dims = vec![whole(rows), whole(columns)];
    let (inputs, outputs) = (vec![dims.clone(); 2], vec![dims; 5]);
    let nest = Nest::bind(&b.kernel, &inputs, &outputs).unwrap();
    let parameters = Nest::parameters(&b.kernel, &inputs, &outputs).unwrap();
    let count = (rows * columns) as usize;
    let real = |seed: f32| (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect::<Vec<f32>>();
    let (a, c) = (real(0.1), real(0.7));
    let raw = |all: &[f32]| all.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let bf16 = |all: Vec<f32>| {
        let round = |x: &f32| ((x.to_bits() + 0x7fff + (x.to_bits() >> 16 & 1)) >> 16) as u16;
        all.iter().map(round).collect::<Vec<u16>>()
    };
    let half = |all: &[u16]| all.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let each = |f: fn(f32, f32) -> f32| a.iter().zip(&c).map(|(a, c)| f(*a, *c)).collect::<Vec<f32>>();
    let (products, x) = (each(|a, c| a * c), bf16(a.clone()));
    let widened: Vec<f32> = x.iter().map(|x| f32::from_bits(u32::from(*x) << 16)).collect();
    let expected = [raw(&products), half(&bf16(products)), half(&bf16(each(|a, c| a + c))), half(&x), raw(&widened)];
    for isa in Isa::available() {
        let compiled = Jit::with_isa(isa).unwrap().compile(nest.clone()).unwrap();
        let mut out = [4, 2, 2, 2, 4].map(|bytes| vec![0u8; count * bytes]);
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(|c| &mut c[..]).collect();
        compiled.run_slices(&Pool::new(1), &parameters, &[&raw(&a), &raw(&c)], &mut slices);
        assert!(out == expected, "{isa:?}");
    }
}
