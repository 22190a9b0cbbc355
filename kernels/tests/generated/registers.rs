//! Passes of arithmetic and choices, which processors with long vectors do in registers: the same bits on all, rows of any length, and what
//! is no number.

use super::*;
use std::collections::BTreeMap;

const SPECIAL: [f32; 10] =
    [0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE, 1e-42, f32::MAX];

const RELATIONS: [CompareOp; 6] = [CompareOp::Eq, CompareOp::Ne, CompareOp::Lt, CompareOp::Le, CompareOp::Gt, CompareOp::Ge];

/// Rows of arithmetic on some matrices, vectors and numbers of rows, and choices by a matrix of bool and by what is compared: sums of some
/// values, stores of others; more of both than registers hold where there are many.
fn random_rows(random: &mut Random, many: bool) -> Kernel {
    let mut b = Build::new(&["i", "j"]).outer(&[0]);
    let inputs = if many { 12 } else { 1 + random.below(4) };
    let mut values: Vec<ExprId> = (0..inputs).map(|_| b.input(F, &[0, 1])).collect();
    values.extend([b.input(F, &[1]), b.input(F, &[0]), b.float(F, 0.75)]);
    let mut flags = vec![b.input(DType::Bool, &[0, 1])];
    let operations = if many { 60 } else { 2 + random.below(10) };
    for n in 0..operations {
        let [x, y] = [(); 2].map(|()| values[random.below(values.len())]);
        // Of the first matrix, so that all of it depends on columns.
        let x = if n == 0 { values[0] } else { x };
        let flag = flags[random.below(flags.len())];
        let value = match random.below(14) {
            10 | 11 => {
                flags.push(b.kernel.expr(Expr::Compare(RELATIONS[random.below(6)], x, y)));
                b.kernel.expr(Expr::Select(flags[flags.len() - 1], y, values[0]))
            }
            12 | 13 => b.kernel.expr(Expr::Select(flag, x, y)),
            9 => b.un(UnaryOp::Sqrt, x),
            0 => b.un(UnaryOp::Neg, x),
            1 => b.bin(BinaryOp::Div, x, y),
            2 | 3 => b.sub(x, y),
            4 | 5 => b.mul(x, y),
            6 => b.un(UnaryOp::Tanh, x),
            _ => b.add(x, y),
        };
        values.push(value);
        if random.below(4) == 0 {
            let sum = b.reduce(Reduce::Sum, &[1], value);
            values.push(sum);
        }
    }
    let stores = if many { 8 } else { 1 + random.below(3) };
    for value in values.iter().rev().take(stores) {
        b.store(F, &[1], &[0, 1], *value);
    }
    if random.below(2) == 0 {
        b.store(DType::Bool, &[1], &[0, 1], flags[flags.len() - 1]);
    }
    b.kernel
}

#[test]
fn all_instruction_sets_agree_on_rows() {
    let mut random = Random(11);
    for case in 0..300 {
        let kernel = random_rows(&mut random, case % 10 == 0);
        let stores = kernel.outputs.len();
        let columns = if case % 7 == 0 { 4097 + random.below(40) } else { 1 + random.below(100) };
        let rows = 3;
        let sizes = |rank: usize, first: &DimId| match (rank, first.0) {
            (2, _) => vec![whole(rows), whole(columns as u64)],
            (_, 0) => vec![whole(rows)],
            _ => vec![whole(columns as u64)],
        };
        let first_dims = kernel.exprs.iter().filter_map(|expr| match expr {
            Expr::Load { index, input, .. } => match &index[0] {
                Index::Dim(dim) => Some((*input, sizes(index.len(), dim))),
                _ => None,
            },
            _ => None,
        });
        let inputs: Vec<Vec<Extent>> = first_dims.collect::<BTreeMap<_, _>>().into_values().collect();
        let outputs = vec![sizes(2, &DimId(0)); stores];
        let mut nest = Nest::bind(&kernel, &inputs, &outputs).unwrap();
        nest.shared = Some(vec![vec![]; stores]);
        let parameters = Nest::parameters(&kernel, &inputs, &outputs).unwrap();
        let special = case % 3 == 0;
        let mut number = |_: usize| match special {
            true => SPECIAL[random.below(SPECIAL.len())],
            false => (random.below(257) as f32 - 128.0) / 63.0,
        };
        let given: Vec<Vec<u8>> = (inputs.iter().zip(&kernel.inputs))
            .map(|(dims, input)| (dims.iter().map(|e| e.block as usize).product::<usize>(), input.dtype))
            .map(|(size, dtype)| match dtype {
                DType::Bool => (0..size).map(|at| u8::from(at % 3 == 0 || at % 7 == 2)).collect(),
                _ => (0..size).flat_map(|at| number(at).to_le_bytes()).collect(),
            })
            .collect();
        let results = Isa::available().map(|isa| {
            let compiled = Jit::with_isa(isa).unwrap().compile(nest.clone()).unwrap();
            let bytes = |output: &Argument| vec![0; rows as usize * columns * output.dtype.bytes() as usize];
            let mut made: Vec<Vec<u8>> = kernel.outputs.iter().map(bytes).collect();
            let mut slices: Vec<&mut [u8]> = made.iter_mut().map(|output| &mut output[..]).collect();
            let given: Vec<&[u8]> = given.iter().map(|input| &input[..]).collect();
            compiled.run_slices(&Pool::new(1), &parameters, &given, &mut slices);
            made
        });
        // Of two that are no numbers, one may become the result or the other.
        let numbers = |(raw, output): (Vec<u8>, &Argument)| -> Vec<u32> {
            if output.dtype == DType::Bool {
                return raw.into_iter().map(u32::from).collect();
            }
            let bits = raw.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
            bits.map(|bits| if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits }).collect()
        };
        let results: Vec<Vec<Vec<u32>>> =
            results.map(|made| made.into_iter().zip(&kernel.outputs).map(numbers).collect()).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{columns} columns of {kernel:#?}");
    }
}

/// The control: that it is passes in registers that agree. A layer norm takes less than half the calls.
#[test]
fn few_calls_make_a_layer_norm() {
    let mut b = Build::new(&["i", "j"]).outer(&[0]);
    let (x, scale, shift) = (b.input(F, &[0, 1]), b.input(F, &[1]), b.input(F, &[1]));
    let (residual, share) = (b.input(F, &[0, 1]), b.float(F, 1.0 / 192.0));
    let x = b.add(x, residual);
    let sum = b.reduce(Reduce::Sum, &[1], x);
    let mean = b.mul(sum, share);
    let centred = b.sub(x, mean);
    let square = b.mul(centred, centred);
    let squares = b.reduce(Reduce::Sum, &[1], square);
    let factor = b.un(UnaryOp::Rsqrt, squares);
    let normal = b.mul(centred, factor);
    let scaled = b.mul(normal, scale);
    let shifted = b.add(scaled, shift);
    [x, centred, shifted].into_iter().for_each(|value| b.store(F, &[1], &[0, 1], value));
    let (matrix, vector) = (vec![whole(5), whole(192)], vec![whole(192)]);
    let (inputs, outputs) = ([matrix.clone(), vector.clone(), vector, matrix.clone()], vec![matrix; 3]);
    let calls = |isa: Isa| {
        let mut nest = Nest::bind(&b.kernel, &inputs, &outputs).unwrap();
        nest.shared = Some(vec![vec![]; 3]);
        Jit::with_isa(isa).unwrap().compile(nest).unwrap().calls
    };
    let by_passes = calls(Isa::Baseline);
    for isa in Isa::available() {
        let expected = if isa.has_lines() { 1..by_passes / 2 + 1 } else { by_passes..by_passes + 1 };
        assert!(expected.contains(&calls(isa)), "{} of {by_passes} by {isa:?}", calls(isa));
    }
    check(&b.kernel, &inputs, &outputs, 1e-5);
}

/// An optimizer's update: its variables are values of the one pass that it is, where processors have long vectors, and its outputs lie where
/// its inputs do.
#[test]
fn an_update_is_one_pass() {
    let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
    let [mean, gradient, square, weight] = [(); 4].map(|()| b.input(F, &[0, 1]));
    let (rate, correction) = (b.input(F, &[]), b.input(F, &[]));
    let moved = |b: &mut Build, from, to, share: f64| {
        let (kept, new) = (b.float(F, 1.0 - share), b.float(F, share));
        let (kept, new) = (b.mul(from, kept), b.mul(to, new));
        let sum = b.add(kept, new);
        b.bind(sum)
    };
    let power = b.mul(gradient, gradient);
    let (mean, square) = (moved(&mut b, mean, gradient, 0.1), moved(&mut b, square, power, 0.001));
    let root = b.un(UnaryOp::Sqrt, square);
    let (root, small) = (b.bin(BinaryOp::Div, root, correction), b.float(F, 1e-8));
    let root = b.add(root, small);
    let step = b.bin(BinaryOp::Div, mean, root);
    let step = b.mul(step, rate);
    let weight = b.sub(weight, step);
    let weight = b.bind(weight);
    [mean, square, weight].into_iter().for_each(|value| b.store(F, &[], &[0, 1], value));
    let (matrix, single) = (vec![whole(37), whole(133)], vec![]);
    let inputs = [[(); 4].map(|()| matrix.clone()).to_vec(), vec![single.clone(), single]].concat();
    let outputs = vec![matrix; 3];
    let calls = |isa: Isa| {
        let mut nest = Nest::bind(&b.kernel, &inputs, &outputs).unwrap();
        nest.shared = Some(vec![vec![0], vec![2], vec![3]]);
        Jit::with_isa(isa).unwrap().compile(nest).unwrap().calls
    };
    // The first of two clears what is read outside of operands.
    for isa in Isa::available() {
        let calls = calls(isa);
        assert!((calls == 2) == isa.has_lines() && calls >= 2, "{calls} by {isa:?}");
    }
    check(&b.kernel, &inputs, &outputs, 1e-5);
}

/// As a layer norm, a chain of norms of channels with the slopes of their rectifiers, of more tiles than pointers have registers: one pass, and
/// where several channels are a tile, the repeated numbers of theirs.
#[test]
fn few_calls_make_rectifiers() {
    let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
    let zero = b.float(F, 0.0);
    let mut sum = b.input(F, &[0, 1]);
    for _ in 0..4 {
        let (x, mean, scale) = (b.input(F, &[0, 1]), b.input(F, &[0]), b.input(F, &[0]));
        let centred = b.sub(x, mean);
        let normal = b.mul(centred, scale);
        let value = b.add(normal, sum);
        let below = b.kernel.expr(Expr::Compare(CompareOp::Le, value, zero));
        sum = b.kernel.expr(Expr::Select(below, zero, value));
        b.store(DType::Bool, &[], &[0, 1], below);
        b.store(F, &[], &[0, 1], sum);
    }
    for (columns, most) in [(200, 2), (64, 10)] {
        let (matrix, column) = (vec![whole(5), whole(columns)], vec![whole(5)]);
        let norm = [matrix.clone(), column.clone(), column];
        let inputs: Vec<Vec<Extent>> = [matrix.clone()].into_iter().chain(std::iter::repeat_n(norm, 4).flatten()).collect();
        let calls = |isa: Isa| {
            let mut nest = Nest::bind(&b.kernel, &inputs, &vec![matrix.clone(); 8]).unwrap();
            nest.shared = Some(vec![vec![]; 8]);
            Jit::with_isa(isa).unwrap().compile(nest).unwrap().calls
        };
        let by_passes = calls(Isa::Baseline);
        assert!(by_passes > 2 * most, "{by_passes} for {columns} columns");
        for isa in Isa::available() {
            let expected = if isa.has_avx512() { 1..most + 1 } else { by_passes..by_passes + 1 };
            assert!(expected.contains(&calls(isa)), "{} of {by_passes} by {isa:?} for {columns} columns", calls(isa));
        }
    }
}
