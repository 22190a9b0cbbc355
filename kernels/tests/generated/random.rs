//! Kernels of chance.

use super::*;

/// One random kernel of a few statements over three dims.
fn random_kernel(random: &mut Random, float: DType) -> (Build, Vec<Vec<u8>>) {
    let mut b = Build::new(&["i", "j", "k"]);
    let outer: Vec<u8> = (0..3).filter(|_| random.below(2) == 0).collect();
    b.kernel.outer = outer.iter().map(|d| DimId(*d)).collect();
    let inner: Vec<u8> = (0..3).filter(|d| !outer.contains(d)).collect();
    // The first input has all dims in some order, so that every loop has a size.
    let mut full = vec![0u8, 1, 2];
    full.rotate_left(random.below(3));
    let mut shapes = vec![full.clone()];
    let mut values = vec![b.input(float, &full)];
    for _ in 0..random.below(3) {
        let dims: Vec<u8> = (0..3).filter(|_| random.below(2) == 0).collect();
        values.push(b.input(float, &dims));
        shapes.push(dims);
    }
    let mut scalars = vec![b.float(float, 0.75)];
    for _ in 0..1 + random.below(3) {
        let value = random_value(random, &mut b, &values, &scalars, Some(float));
        if !inner.is_empty() && random.below(2) == 0 {
            let op = [Reduce::Sum, Reduce::Max, Reduce::Min][random.below(3)];
            let var = b.reduce(op, &inner, value);
            scalars.push(var);
        } else {
            let mut dims: Vec<u8> = outer.iter().chain(&inner).copied().collect();
            let turn = random.below(dims.len());
            dims.rotate_left(turn);
            let mode = [StoreMode::Assign, StoreMode::Accumulate][random.below(2)];
            b.store_as(float, &inner, &dims, value, mode);
            values.push(value);
        }
    }
    let last = random_value(random, &mut b, &values, &scalars, Some(float));
    b.store(float, &inner, &[2, 0, 1], last);
    (b, shapes)
}

/// A random value; with `positions`, of loop dims' positions as well, in that type.
pub(super) fn random_value(
    random: &mut Random,
    b: &mut Build,
    values: &[ExprId],
    scalars: &[ExprId],
    positions: Option<DType>,
) -> ExprId {
    let mut pool: Vec<ExprId> = values.iter().chain(scalars).copied().collect();
    for _ in 0..1 + random.below(5) {
        let (x, y) = (pool[random.below(pool.len())], pool[random.below(pool.len())]);
        let next = match random.below(8) {
            0 => b.un(
                [
                    UnaryOp::Tanh,
                    UnaryOp::Erf,
                    UnaryOp::Logistic,
                    UnaryOp::Abs,
                    UnaryOp::Neg,
                    UnaryOp::Floor,
                    UnaryOp::Gelu,
                    UnaryOp::GeluTanhSlope,
                ][random.below(8)],
                x,
            ),
            1 => b.bin(BinaryOp::Max, x, y),
            2 => {
                let c = b.kernel.expr(Expr::Compare(CompareOp::ALL[random.below(6)], x, y));
                b.kernel.expr(Expr::Select(c, x, y))
            }
            3 if let Some(float) = positions => {
                let p = b.kernel.expr(Expr::Position(DimId(random.below(3) as u8)));
                let p = b.kernel.expr(Expr::Cast(float, p));
                let p = b.un(UnaryOp::Tanh, p);
                b.add(x, p)
            }
            4 => b.sub(x, y),
            5 => b.mul(x, y),
            _ => b.add(x, y),
        };
        pool.push(next);
    }
    let last = pool[pool.len() - 1];
    // Bounded, so that products of sums stay comparable.
    b.un(UnaryOp::Tanh, last)
}

#[test]
fn random_kernels() {
    let mut random = Random(2024);
    for case in 0..150 {
        let float = [F, DType::F64][case % 2];
        let (b, shapes) = random_kernel(&mut random, float);
        let loops = dims_in(&b.kernel);
        let extents: Vec<Extent> = (0..3)
            .map(|_| {
                let valid = [1, 2, 5, 37, 70][random.below(5)];
                Extent { offset: random.below(9) as u64, valid, block: valid + random.below(2) as u64 }
            })
            .collect();
        let inputs: Vec<Vec<Extent>> =
            shapes.iter().map(|dims| dims.iter().map(|d| extents[usize::from(*d)]).collect()).collect();
        let outputs: Vec<Vec<Extent>> =
            loops.iter().map(|dims| dims.iter().map(|d| extents[usize::from(*d)]).collect()).collect();
        check(&b.kernel, &inputs, &outputs, if float == F { 2e-4 } else { 1e-11 });
    }
}

/// Random kernels over samples, channels and small images: operands have some of these dims, in this order.
#[test]
fn random_kernels_of_small_images() {
    let (mut random, mut paired) = (Random(77), 0);
    for case in 0..150 {
        let float = [F, DType::F64][case % 2];
        let mut b = Build::new(&["n", "c", "s"]);
        let outer: Vec<u8> = if random.below(2) == 0 { vec![1] } else { vec![0, 1, 2] };
        b.kernel.outer = outer.iter().map(|d| DimId(*d)).collect();
        let inner: Vec<u8> = (0..3).filter(|d| !outer.contains(d)).collect();
        let mut shapes = vec![vec![0u8, 1, 2]];
        for _ in 0..1 + random.below(3) {
            shapes.push((0..3).filter(|_| random.below(2) == 0).collect());
        }
        let mut values: Vec<ExprId> = shapes.iter().map(|dims| b.input(float, dims)).collect();
        let mut scalars = vec![b.float(float, 0.75)];
        for _ in 0..1 + random.below(4) {
            let value = random_value(&mut random, &mut b, &values, &scalars, None);
            match random.below(4) {
                0 if inner.is_empty() => scalars.push(b.bind(value)),
                1 => {
                    let mode = [StoreMode::Assign, StoreMode::Accumulate][random.below(2)];
                    b.store_as(float, &inner, &[0, 1, 2], value, mode);
                    values.push(value);
                }
                _ if !inner.is_empty() => {
                    let op = [Reduce::Sum, Reduce::Max, Reduce::Min][random.below(3)];
                    scalars.push(b.reduce(op, &inner, value));
                }
                _ => {}
            }
        }
        let last = random_value(&mut random, &mut b, &values, &scalars, None);
        b.store(float, &inner, &[0, 1, 2], last);
        let extents = [[1, 3, 16, 70][random.below(4)], [2, 5, 64, 130][random.below(4)], [1, 2, 9, 16, 50][random.below(5)]];
        let bind = |dims: &Vec<u8>| dims.iter().map(|d| whole(extents[usize::from(*d)])).collect::<Vec<Extent>>();
        let inputs: Vec<Vec<Extent>> = shapes.iter().map(bind).collect();
        let outputs: Vec<Vec<Extent>> = dims_in(&b.kernel).iter().map(bind).collect();
        check(&b.kernel, &inputs, &outputs, if float == F { 2e-4 } else { 1e-11 });
        paired += usize::from(is_paired(&b.kernel, &inputs, &outputs));
    }
    assert!(paired > 40, "{paired}");
}

/// The dims of each output.
pub(super) fn dims_in(kernel: &Kernel) -> Vec<Vec<u8>> {
    let mut all = vec![vec![]; kernel.outputs.len()];
    for stmt in &kernel.body {
        if let Stmt::Store { output, index, .. } = stmt {
            all[usize::from(*output)] = index.iter().map(|i| if let Index::Dim(d) = i { d.0 } else { 0 }).collect();
        }
    }
    all
}

/// Random kernels of values that are rounded to half floats, widened again, kept and stored on the way.
#[test]
fn random_kernels_that_round() {
    let (mut random, mut kept) = (Random(4711), 0);
    for _ in 0..150 {
        let mut b = Build::new(&["i", "j"]).outer(&[0, 1]);
        let mut values: Vec<(ExprId, DType)> =
            [F, DType::BF16, DType::F16].map(|dtype| (b.input(dtype, &[0, 1]), dtype)).to_vec();
        let shapes = values.len();
        for _ in 0..3 + random.below(4) {
            let [x, y] = [0, 1].map(|_| {
                let (value, _) = values[random.below(values.len())];
                b.kernel.expr(Expr::Cast(F, value))
            });
            let op = [UnaryOp::Logistic, UnaryOp::Tanh, UnaryOp::Neg, UnaryOp::Erf][random.below(4)];
            let next = if random.below(3) == 0 { b.add(x, y) } else { b.un(op, x) };
            let dtype = [F, DType::BF16, DType::F16][random.below(3)];
            let mut next = b.kernel.expr(Expr::Cast(dtype, next));
            if random.below(3) != 0 {
                next = b.bind(next);
                kept += 1;
            }
            if random.below(3) != 0 {
                b.store(dtype, &[], &[0, 1], next);
            }
            values.push((next, dtype));
        }
        let (last, dtype) = values[values.len() - 1];
        b.store(dtype, &[], &[0, 1], last);
        let dims = vec![whole(3), whole([1, 5, 300][random.below(3)])];
        // A sum of f32 may round to another half float than one of f64.
        check(&b.kernel, &vec![dims.clone(); shapes], &vec![dims; b.kernel.outputs.len()], 0.05);
    }
    assert!(kept > 300, "{kept}");
}
