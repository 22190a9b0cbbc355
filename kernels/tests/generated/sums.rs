//! Sums of products, which are added up without being stored where nothing else needs them.

use super::*;

/// Rows of one tile and of several, a sum over all, factors that are one, two and widened ones.
#[test]
fn of_what_nothing_stores() {
    for columns in [7, 300, 5000] {
        let mut b = Build::new(&["i", "j"]).outer(&[0]);
        let (x, y) = (b.input(F, &[0, 1]), b.input(F, &[0, 1]));
        let wide = |b: &mut Build, x| b.kernel.expr(Expr::Cast(DType::F64, x));
        let (xs, ys) = (wide(&mut b, x), wide(&mut b, y));
        let (square, product) = (b.mul(x, x), b.mul(x, y));
        let (wide_square, wide_product) = (b.mul(xs, xs), b.mul(xs, ys));
        for (dtype, value) in [(F, square), (F, product), (DType::F64, wide_square), (DType::F64, wide_product)] {
            let sum = b.reduce(Reduce::Sum, &[1], value);
            b.store(dtype, &[], &[0], sum);
        }
        let dims = vec![whole(3), whole(columns)];
        check(&b.kernel, &[dims.clone(), dims], &vec![vec![whole(3)]; 4], 1e-5);
    }
    let mut b = Build::new(&["i", "j"]);
    let x = b.input(F, &[0, 1]);
    let wide = b.kernel.expr(Expr::Cast(DType::F64, x));
    let square = b.mul(wide, wide);
    let sum = b.reduce(Reduce::Sum, &[0, 1], square);
    b.store(DType::F64, &[], &[], sum);
    // Products of f32 are exact in f64.
    check(&b.kernel, &[vec![whole(70), whole(900)]], &[vec![]], 1e-14);
}

/// Very many addends that are all alike, so that what rounding loses adds up: of everything, of columns, of the rows of several.
#[test]
fn of_very_many() {
    for (outer, over, [rows, columns]) in
        [(&[][..], &[0, 1][..], [1 << 10, 1 << 11]), (&[1], &[0], [1 << 16, 24]), (&[0], &[1], [2, 1 << 20])]
    {
        let mut b = Build::new(&["i", "j"]).outer(outer);
        let (x, zero, tenth) = (b.input(F, &[0, 1]), b.float(F, 0.0), b.float(F, f64::from(0.1f32)));
        let nothing = b.mul(x, zero);
        let value = b.add(nothing, tenth);
        let extents = [rows, columns];
        let count: u64 = over.iter().map(|dim| extents[usize::from(*dim)]).product();
        let (sum, plain, part) =
            (b.reduce(Reduce::Sum, over, value), b.reduce(Reduce::Sum, over, x), b.float(F, 1.0 / count as f64));
        for total in [sum, plain] {
            let mean = b.mul(total, part);
            b.store(F, &[], outer, mean);
        }
        let result: Vec<Extent> = outer.iter().map(|dim| whole(extents[usize::from(*dim)])).collect();
        check(&b.kernel, &[vec![whole(rows), whole(columns)]], &[result.clone(), result], 1e-7);
    }
}

/// What is read once more is as it was.
#[test]
fn of_what_others_read() {
    let mut b = Build::new(&["i", "j"]).outer(&[0]);
    let x = b.input(F, &[0, 1]);
    let square = b.mul(x, x);
    let wide = b.kernel.expr(Expr::Cast(DType::F64, x));
    let wide_square = b.mul(wide, wide);
    let sums = [square, wide_square].map(|value| b.reduce(Reduce::Sum, &[1], value));
    b.store(F, &[], &[0], sums[0]);
    b.store(DType::F64, &[], &[0], sums[1]);
    b.store(F, &[1], &[0, 1], square);
    b.store(DType::F64, &[1], &[0, 1], wide);
    let (rows, dims) = (vec![whole(3)], vec![whole(3), whole(5000)]);
    check(&b.kernel, std::slice::from_ref(&dims), &[rows.clone(), rows, dims.clone(), dims.clone()], 1e-5);
}

/// What is zero but where a number is that of a point: in the first tile, in later ones and in none, on a shard too; beside it what is
/// zero nowhere, and functions that one pass computes and others read.
#[test]
fn of_one_addend() {
    for (columns, scale, shift) in
        [(whole(9001), 1000, -1000), (Extent { offset: 900, valid: 5000, block: 5003 }, 700, 0), (whole(3), 1, -2)]
    {
        let mut b = Build::new(&["i", "j"]).outer(&[0]);
        let (x, label) = (b.input(F, &[0, 1]), b.input(DType::I64, &[0]));
        let (scale, shift) = (b.int(scale), b.int(shift));
        let number = b.mul(label, scale);
        let number = b.add(number, shift);
        let position = b.kernel.expr(Expr::Position(DimId(1)));
        let exp = b.un(UnaryOp::Exp, x);
        let sum = b.reduce(Reduce::Sum, &[1], exp);
        b.store(F, &[], &[0], sum);
        let cases = [
            (position, number, x, 0.0),
            (number, position, exp, 0.0),
            (position, number, x, 1.0),
            (position, position, x, 0.0),
        ];
        for (left, right, chosen, other) in cases {
            let (hit, other) = (b.kernel.expr(Expr::Compare(CompareOp::Eq, left, right)), b.float(F, other));
            let value = b.kernel.expr(Expr::Select(hit, chosen, other));
            let total = b.reduce(Reduce::Sum, &[1], value);
            b.store(F, &[], &[0], total);
        }
        let log = b.un(UnaryOp::Log1p, exp);
        let scaled = b.mul(log, sum);
        b.store(F, &[1], &[0, 1], scaled);
        let most = b.reduce(Reduce::Max, &[1], scaled);
        b.store(F, &[], &[0], most);
        let rows = vec![whole(11)];
        let dims = vec![whole(11), columns];
        let mut results = vec![rows.clone(); 5];
        results.extend([dims.clone(), rows.clone()]);
        check(&b.kernel, &[dims, rows], &results, 1e-5);
    }
}

/// Sums over rows for each column: of an operand and of products, of one loop and of two, beyond a stretch of partial sums and below,
/// columns fewer than a vector and more than a tile; next to them what is not summed by rows: a shifted operand, a factor without
/// columns, halves.
#[test]
fn of_columns() {
    for (samples, rows, columns) in [(1, 1, 5), (2, 65, 192), (3, 64, 33), (1, 300, 700), (5, 7, 1000)] {
        let mut b = Build::new(&["n", "i", "j"]).outer(&[2]);
        let (x, y) = (b.input(F, &[0, 1, 2]), b.input(F, &[0, 1, 2]));
        let (wide, once, single) = (b.input(DType::F64, &[0, 1, 2]), b.input(F, &[1, 2]), b.input(F, &[0, 1]));
        let (half, turned) = (b.input(DType::BF16, &[0, 1, 2]), b.input(F, &[0, 2, 1]));
        let shifted = Index::Affine { terms: [(DimId(2), 1)].into_iter().collect(), offset: -1 };
        let shifted = b.indexed(F, vec![Index::Dim(DimId(0)), Index::Dim(DimId(1)), shifted], Outside::Zero);
        let products = [(x, y), (x, x), (wide, wide), (x, once), (x, single), (x, turned)].map(|(x, y)| b.mul(x, y));
        let values = [x, wide, half, turned, shifted].into_iter().chain(products);
        for value in values.collect::<Vec<_>>() {
            let dtype = if value == wide || value == products[2] { DType::F64 } else { F };
            let sum = b.reduce(Reduce::Sum, &[0, 1], value);
            b.store(dtype, &[], &[2], sum);
        }
        let largest = b.reduce(Reduce::Max, &[0, 1], y);
        b.store(F, &[], &[2], largest);
        let [n, i, j] = [samples, rows, columns].map(whole);
        let all = vec![n, i, j];
        let inputs = [all.clone(), all.clone(), all.clone(), vec![i, j], vec![n, i], all.clone(), vec![n, j, i], all];
        check(&b.kernel, &inputs, &vec![vec![j]; 12], 1e-5);
    }
}

/// Each alone is a pass of its own.
#[test]
fn of_columns_alone() {
    for is_product in [false, true] {
        let mut b = Build::new(&["n", "i", "j"]).outer(&[2]);
        let (x, y) = (b.input(F, &[0, 1, 2]), b.input(F, &[0, 1, 2]));
        let value = if is_product { b.mul(x, y) } else { x };
        let sum = b.reduce(Reduce::Sum, &[0, 1], value);
        b.store(F, &[], &[2], sum);
        let all = vec![whole(3), whole(130), whole(200)];
        check(&b.kernel, &[all.clone(), all], &[vec![whole(200)]], 1e-5);
    }
}
