//! Products of half floats against f64: all layouts, odd shapes, f32 and rounded results, every kind of product that there is.

use dcc_kernels::Pool;
use dcc_kernels::cpu::isa::Isa;
use dcc_kernels::library::half::Half;
use dcc_kernels::library::matmul::{DotGeneral, Factor, Product};
use dcc_program::DType;

/// Half types with the kinds of product that each may have.
const KINDS: [(DType, Product); 4] = [
    (DType::BF16, Product::Tiles),
    (DType::BF16, Product::Pairs),
    (DType::BF16, Product::Widened),
    (DType::F16, Product::Widened),
];

/// "mk kn mn" with the sizes of its letters, row-major.
fn factors(spec: &str, sizes: &[(char, usize)]) -> Vec<Factor> {
    let parts: Vec<&str> = spec.split(' ').collect();
    let size = |c: char| sizes.iter().find(|s| s.0 == c).expect("a listed dim").1;
    let stride = |part: &str, c: char| part.find(c).map(|at| part[at + 1..].chars().map(size).product());
    let of = |&(c, size)| Factor { size, lhs: stride(parts[0], c), rhs: stride(parts[1], c), out: stride(parts[2], c) };
    sizes.iter().map(of).collect()
}

fn elements(factors: &[Factor], stride: fn(&Factor) -> Option<usize>) -> usize {
    1 + factors.iter().filter_map(|f| stride(f).map(|s| (f.size - 1) * s)).sum::<usize>()
}

/// Half floats and what they are.
fn values(dtype: DType, count: usize, seed: f32) -> (Vec<u16>, Vec<f64>) {
    let pool = Pool::new(1);
    let half = Half::of(dtype).expect("a half type");
    let reals: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
    let (mut halves, mut wide) = (vec![0; count], vec![0.0; count]);
    half.narrow(&pool, &reals, &mut halves);
    half.widen(&pool, &halves, &mut wide);
    (halves, wide.into_iter().map(f64::from).collect())
}

/// Sums, and sums of magnitudes.
fn exact(factors: &[Factor], lhs: &[f64], rhs: &[f64]) -> Vec<[f64; 2]> {
    let mut out = vec![[0.0; 2]; elements(factors, |f| f.out)];
    let mut index = vec![0; factors.len()];
    loop {
        let at = |stride: fn(&Factor) -> Option<usize>| -> usize {
            factors.iter().zip(&index).map(|(f, i)| stride(f).unwrap_or(0) * i).sum()
        };
        let product = lhs[at(|f| f.lhs)] * rhs[at(|f| f.rhs)];
        let sums = &mut out[at(|f| f.out)];
        *sums = [sums[0] + product, sums[1] + product.abs()];
        let Some(d) = (0..index.len()).rev().find(|&d| index[d] + 1 < factors[d].size) else { return out };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}

/// The largest error, in units of what rounding may do: of every sum in f32, and of the result in its own type.
fn error(dtype: DType, depth: usize, got: &[f32], exact: &[[f64; 2]], rounded: bool) -> f64 {
    let unit = if dtype == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    let of = |(got, [sum, magnitude]): (&f32, &[f64; 2])| {
        let most = magnitude * depth as f64 / f64::from(1 << 24) + if rounded { sum.abs() * unit + 6e-8 } else { 0.0 };
        (f64::from(*got) - sum).abs() / most.max(1e-12)
    };
    got.iter().zip(exact).map(of).fold(0.0, f64::max)
}

fn check(spec: &str, sizes: &[(char, usize)]) {
    check_factors(&format!("{spec} {sizes:?}"), &factors(spec, sizes));
}

fn check_factors(case: &str, factors: &[Factor]) {
    let depth: usize = factors.iter().filter(|f| f.out.is_none()).map(|f| f.size).product();
    for (dtype, product) in KINDS {
        let Some(plan) = DotGeneral::with_product(factors, dtype, product) else { continue };
        let (lhs, a) = values(dtype, elements(factors, |f| f.lhs), 0.1);
        let (rhs, b) = values(dtype, elements(factors, |f| f.rhs), 0.7);
        let expected = exact(factors, &a, &b);
        let half = Half::of(dtype).expect("a half type");
        let run = |threads, lhs: &[u16]| {
            let pool = Pool::new(threads);
            let (mut out, mut rounded) = (vec![f32::NAN; expected.len()], vec![0xffff; expected.len()]);
            plan.run(&pool, 1.0, 0.0, lhs, &rhs, &mut out);
            plan.run_rounded(&pool, 1.0, lhs, &rhs, &mut rounded, &mut vec![f32::NAN; plan.workspace()]);
            let mut twice = out.clone();
            plan.run(&pool, 1.0, 1.0, lhs, &rhs, &mut twice);
            (out, rounded, twice)
        };
        let (out, rounded, twice) = run(1, &lhs);
        let what = format!("{case} {dtype:?} {product:?}");
        assert!(error(dtype, depth + 1, &out, &expected, false) < 1.0, "{what}");
        let doubled: Vec<[f64; 2]> = expected.iter().map(|e| e.map(|x| 2.0 * x)).collect();
        assert!(error(dtype, depth + 1, &twice, &doubled, false) < 1.0, "{what} added");
        // Rounded once, from the same sums.
        let mut once = vec![0; out.len()];
        half.narrow(&Pool::new(1), &out, &mut once);
        assert_eq!(rounded, once, "{what}");
        assert!(
            [2, 3].into_iter().all(|threads| run(threads, &lhs) == (out.clone(), rounded.clone(), twice.clone())),
            "{what}"
        );
        // The control: one factor of one product is another.
        let mut other = lhs.clone();
        let last = other.len() - 1;
        other[last] = 0x4240;
        let (out, ..) = run(1, &other);
        assert!(error(dtype, depth + 1, &out, &expected, false) > 1.0, "{what}: a wrong factor passes");
    }
}

#[test]
fn all_layouts_of_a_matrix_product() {
    for spec in ["mk kn mn", "mk nk mn", "km kn mn", "km nk mn", "mk kn nm", "mk nk nm", "km kn nm", "km nk nm"] {
        check(spec, &[('m', 37), ('n', 45), ('k', 66)]);
        check(spec, &[('m', 37), ('n', 45), ('k', 67)]);
        check(spec, &[('m', 3), ('n', 129), ('k', 17)]);
        check(spec, &[('m', 96), ('n', 64), ('k', 32)]);
        check(spec, &[('m', 50), ('n', 1), ('k', 5)]);
        check(spec, &[('m', 1), ('n', 1), ('k', 1)]);
        check(spec, &[('m', 14), ('n', 35), ('k', 1025)]);
        check(spec, &[('m', 13), ('n', 40), ('k', 1538)]);
        check(spec, &[('m', 30), ('n', 70), ('k', 2048)]);
        check(spec, &[('m', 48), ('n', 33), ('k', 2080)]);
    }
}

#[test]
fn several_dims_in_any_order() {
    check("bmk bkn bmn", &[('b', 9), ('m', 13), ('n', 18), ('k', 21)]);
    check("bthe hen btn", &[('b', 2), ('t', 7), ('h', 3), ('e', 4), ('n', 33)]);
    check("bhte hen btn", &[('b', 2), ('t', 7), ('h', 3), ('e', 5), ('n', 33)]);
    check("btc che bhte", &[('b', 2), ('t', 15), ('c', 40), ('h', 3), ('e', 6)]);
    check("bhte bhse bhts", &[('b', 2), ('h', 5), ('t', 9), ('s', 11), ('e', 8)]);
    check("mbk nbk bmn", &[('b', 3), ('m', 13), ('n', 18), ('k', 21)]);
    check("btm btn mn", &[('b', 31), ('t', 21), ('m', 18), ('n', 21)]);
    check("bmt bnt mn", &[('b', 33), ('t', 19), ('m', 18), ('n', 40)]);
    check("m n mn", &[('m', 20), ('n', 40)]);
    check("abk kn anb", &[('a', 4), ('b', 8), ('k', 64), ('n', 40)]);
    check("abk kcn acbn", &[('a', 4), ('b', 8), ('k', 2080), ('n', 40), ('c', 3)]);
    check("k k ", &[('k', 700)]);
}

/// A shard's rows are as long as the longest shard's, one more than is summed; windows overlap.
#[test]
fn rows_of_odd_strides() {
    for (stride, depth) in [(33, 32), (32, 32), (65, 64), (1, 32), (3, 64), (2, 32)] {
        let (far, near) = (Some(stride), Some(1));
        let of = |lhs, rhs, out, size| Factor { size, lhs, rhs, out };
        let by_rows = [of(far, None, Some(32), 32), of(None, near, Some(1), 32), of(Some(1), Some(32), None, depth)];
        check_factors(&format!("rows {stride} apart, {depth} steps"), &by_rows);
        let by_columns = [of(near, None, Some(32), 32), of(None, far, Some(1), 32), of(Some(32), Some(1), None, depth)];
        check_factors(&format!("columns {stride} apart, {depth} steps"), &by_columns);
    }
}

/// Runs of the contracted dim that do not follow one another.
#[test]
fn several_runs() {
    for run in [96, 288, 300, 1025] {
        let factors = [
            Factor { size: 48, lhs: Some(4 * run), rhs: None, out: Some(40) },
            Factor { size: 40, lhs: None, rhs: Some(1), out: Some(1) },
            Factor { size: 2, lhs: Some(2 * run), rhs: Some(40 * run), out: None },
            Factor { size: run, lhs: Some(1), rhs: Some(40), out: None },
        ];
        check_factors(&format!("two runs of {run}"), &factors);
    }
}

#[test]
fn empty_dims() {
    for (dtype, product) in KINDS {
        let factors = factors("mk kn mn", &[('m', 4), ('n', 5), ('k', 0)]);
        let Some(plan) = DotGeneral::with_product(&factors, dtype, product) else { continue };
        let (mut out, mut rounded) = ([f32::NAN; 20], [1; 20]);
        plan.run(&Pool::new(1), 1.0, 0.0, &[], &[], &mut out);
        plan.run_rounded(&Pool::new(1), 1.0, &[], &[], &mut rounded, &mut []);
        assert_eq!((out, rounded), ([0.0; 20], [0; 20]), "{dtype:?} {product:?}");
    }
}

/// Infinities and NaN reach the rounded result.
#[test]
fn what_is_no_number() {
    for (dtype, product) in KINDS {
        let factors = factors("mk kn mn", &[('m', 2), ('n', 3), ('k', 3)]);
        let Some(plan) = DotGeneral::with_product(&factors, dtype, product) else { continue };
        let half = Half::of(dtype).expect("a half type");
        let (mut lhs, mut rhs, mut rounded, mut wide) = ([0; 6], [0; 9], [0; 6], [0.0; 6]);
        let pool = Pool::new(1);
        half.narrow(&pool, &[1.0, f32::INFINITY, 2.0, 1.0, f32::NAN, 2.0], &mut lhs);
        half.narrow(&pool, &[1.0; 9], &mut rhs);
        plan.run_rounded(&pool, 1.0, &lhs, &rhs, &mut rounded, &mut []);
        half.widen(&pool, &rounded, &mut wide);
        assert!(wide[..3].iter().all(|x| *x == f32::INFINITY) && wide[3..].iter().all(|x| x.is_nan()), "{dtype:?}: {wide:?}");
    }
}

/// The instructions for bf16 are used where there are any, and only for it.
#[test]
fn pairs_and_tiles_are_for_bf16() {
    let factors = factors("mk kn mn", &[('m', 4), ('n', 5), ('k', 6)]);
    let has = |dtype, product| DotGeneral::with_product(&factors, dtype, product).is_some();
    assert!(!has(DType::F16, Product::Pairs) && !has(DType::F16, Product::Tiles));
    assert!(DotGeneral::of_halves(&factors, DType::F32).is_none());
    assert_eq!(has(DType::BF16, Product::Pairs), Isa::has_bf16_products());
    assert_eq!(has(DType::BF16, Product::Tiles), Isa::detect() == Isa::Amx);
}
