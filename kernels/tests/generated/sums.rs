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
