//! Products of all layouts beside three loops; their bits beside each other.

use super::super::gemm::Grid;
use super::*;
use crate::cpu::isa;

/// Dense row-major strides of `dims` (letters) with the sizes of `sizes`.
fn strides(dims: &str, sizes: &[(char, usize)]) -> Vec<(char, usize)> {
    let size = |c: char| sizes.iter().find(|s| s.0 == c).expect("a listed dim").1;
    let mut stride = 1;
    let mut all = vec![];
    for c in dims.chars().rev() {
        all.push((c, stride));
        stride *= size(c);
    }
    all
}

fn factors(spec: &str, sizes: &[(char, usize)]) -> Vec<Factor> {
    let parts: Vec<Vec<(char, usize)>> = spec.split(' ').map(|dims| strides(dims, sizes)).collect();
    let of = |part: &[(char, usize)], c| part.iter().find(|s| s.0 == c).map(|s| s.1);
    sizes
        .iter()
        .map(|&(c, size)| Factor { size, lhs: of(&parts[0], c), rhs: of(&parts[1], c), out: of(&parts[2], c) })
        .collect()
}

/// Small integers: every sum is exact in f32.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 17) as f32 - 8.0).collect()
}

fn naive(factors: &[Factor], lhs: &[f32], rhs: &[f32], out: &mut [f32]) {
    let mut index = vec![0; factors.len()];
    if factors.iter().any(|f| f.size == 0) {
        return;
    }
    loop {
        let at = |stride: fn(&Factor) -> Option<usize>| -> usize {
            factors.iter().zip(&index).map(|(f, i)| stride(f).unwrap_or(0) * i).sum()
        };
        out[at(|f| f.out)] += lhs[at(|f| f.lhs)] * rhs[at(|f| f.rhs)];
        let Some(d) = (0..index.len()).rev().find(|&d| index[d] + 1 < factors[d].size) else { return };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}

fn check(spec: &str, sizes: &[(char, usize)]) {
    let factors = factors(spec, sizes);
    let [a, b, c] = extents(&factors);
    let (lhs, rhs) = (values(a, 1), values(b, 2));
    for beta in [0.0, 1.0, -2.0] {
        let mut expected: Vec<f32> = if beta == 0.0 { vec![0.0; c] } else { values(c, 3) };
        expected.iter_mut().for_each(|x| *x *= beta);
        naive(&factors, &lhs, &rhs, &mut expected);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let mut out = if beta == 0.0 { vec![f32::NAN; c] } else { values(c, 3) };
                DotGeneral::<f32>::with_isa(&factors, isa).run(&Pool::new(threads), 1.0, beta, &lhs, &rhs, &mut out);
                assert_eq!(out, expected, "{spec} {sizes:?} {isa:?} {threads} threads, beta {beta}");
                let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
                let mut out = if beta == 0.0 { vec![f64::NAN; c] } else { wide(&values(c, 3)) };
                DotGeneral::<f64>::with_isa(&factors, isa).run(
                    &Pool::new(threads),
                    1.0,
                    f64::from(beta),
                    &wide(&lhs),
                    &wide(&rhs),
                    &mut out,
                );
                assert_eq!(out, wide(&expected), "f64 {spec} {sizes:?} {isa:?}");
            }
        }
    }
}

#[test]
fn all_layouts_of_a_matrix_product() {
    for spec in ["mk kn mn", "mk nk mn", "km kn mn", "km nk mn", "mk kn nm", "mk nk nm", "km kn nm", "km nk nm"] {
        check(spec, &[('m', 37), ('n', 45), ('k', 1700)]);
        check(spec, &[('m', 130), ('n', 230), ('k', 40)]);
        check(spec, &[('m', 3), ('n', 129), ('k', 17)]);
        check(spec, &[('m', 210), ('n', 1), ('k', 5)]);
        check(spec, &[('m', 60), ('n', 100), ('k', 1)]);
        check(spec, &[('m', 1), ('n', 1), ('k', 1)]);
    }
}

/// Panels as large as blocks get are packed by the first block that reads them, where a step of them is contiguous; columns of several
/// groups of rows, and rows of several groups of columns, among them.
#[test]
fn first_blocks_pack_panels() {
    for sizes in [[600, 100, 500], [61, 2500, 300], [60, 96, 1]] {
        check("km kn mn", &[('m', sizes[0]), ('n', sizes[1]), ('k', sizes[2])]);
    }
    check("btm btn mn", &[('b', 3), ('t', 200), ('m', 48), ('n', 70)]);
    let plan = |spec, rows, columns| DotGeneral::<f32>::new(&factors(spec, &[('m', rows), ('n', columns), ('k', 100)])).gemm;
    let copied = |spec, more: usize| {
        let kernels = plan(spec, 100, 3 * NEAR).kernels;
        // Steps so far apart that columns are packed, however short vectors are.
        let panels = NEAR / kernels.columns + 1;
        let gemm = plan(spec, 5 * kernels.rows, panels * kernels.columns + more);
        let [rows, columns] = gemm.copied(&gemm.rows.panels, &gemm.columns.panels, 0, true);
        [(rows, 5), (columns, panels)]
            .map(|(copied, whole)| if copied == whole { "all" } else { ["none", "some"][copied.min(1)] })
    };
    assert_eq!(copied("km kn mn", 0), ["all", "all"]);
    assert_eq!(copied("km kn mn", 1), ["all", "all"]);
    assert_eq!(copied("mk kn mn", 0), ["none", "all"]);
    assert_eq!(copied("mk nk mn", 0), ["none", "none"]);
}

/// Panels whose steps crowd into few sets of a cache are packed all at once, whole ones and the rest, of rows and of columns.
#[test]
fn crowded_steps_are_packed_at_once() {
    let apart = 1024;
    assert!(are_crowded::<f32>(apart as isize) && !are_crowded::<f32>(apart as isize + 8));
    for sizes in [[31, apart, 40], [apart, 50, 20], [5, apart, 40]] {
        for spec in ["mk kn mn", "km kn mn", "km nk mn", "mk kn nm"] {
            check(spec, &[('m', sizes[0]), ('n', sizes[1]), ('k', sizes[2])]);
        }
    }
    // So far apart, and fewer of them than that.
    let part = |size: usize, strides: [Option<usize>; 3]| Factor { size, lhs: strides[0], rhs: strides[1], out: strides[2] };
    let (m, n, k) = (75, 90, 50);
    let parts =
        [part(m, [Some(1), None, Some(n)]), part(n, [None, Some(1), Some(1)]), part(k, [Some(apart), Some(apart), None])];
    let (lhs, rhs) = (values(k * apart, 1), values(k * apart, 2));
    let mut expected = vec![0.0; m * n];
    naive(&parts, &lhs, &rhs, &mut expected);
    for isa in Isa::available() {
        let mut out = vec![f32::NAN; m * n];
        DotGeneral::<f32>::with_isa(&parts, isa).run(&Pool::new(2), 1.0, 0.0, &lhs, &rhs, &mut out);
        assert_eq!(out, expected, "{isa:?}");
    }
    let copied = |columns| {
        let gemm = DotGeneral::<f32>::new(&factors("km kn mn", &[('m', apart), ('n', columns), ('k', 100)])).gemm;
        gemm.copied(&gemm.rows.panels, &gemm.columns.panels, 0, true).map(|count| count > 0)
    };
    assert_eq!([copied(apart), copied(apart + 8)], [[false, false], [false, true]]);
}

/// Columns side by side are read where they lie by few rows, and by more if their steps are no farther apart than a panel is wide.
#[cfg(target_arch = "x86_64")]
#[test]
fn columns_that_many_rows_read_are_packed() {
    let packed = |rows, columns| {
        let factors = factors("mk kn mn", &[('m', rows), ('n', columns), ('k', 100)]);
        DotGeneral::<f32>::with_isa(&factors, Isa::Avx2).gemm.pack_b
    };
    // Blocks of 6 x 16.
    assert_eq!([packed(24, 48), packed(30, 48), packed(600, 16)], [false, true, false]);
    assert_eq!([packed(12, 320), packed(18, 320)], [false, true]);
}

/// Rows of one to four vectors and of more, whole and not: blocks of three vectors where they load less, of two at the end where one would be left.
#[test]
fn columns_of_any_number_of_vectors() {
    let widths = |n| {
        let gemm = DotGeneral::<f32>::new(&factors("mk nk mn", &[('m', 20), ('n', n), ('k', 7)])).gemm;
        (gemm.kernels.columns / gemm.kernels.lanes, gemm.columns.panels.iter().map(|panel| panel.size).collect::<Vec<_>>())
    };
    if Isa::detect().has_avx512() {
        assert_eq!(widths(33), (3, vec![33]));
        assert_eq!(widths(64), (2, vec![32, 32]));
        assert_eq!(widths(80), (3, vec![48, 32]));
        assert_eq!(widths(97), (3, vec![48, 32, 17]));
        assert_eq!(widths(100 * 48 + 16), (3, [vec![48; 99], vec![32, 32]].concat()));
    }
    for n in [16, 17, 33, 48, 63, 64, 65, 80, 97, 112, 113, 144, 150, 160] {
        for spec in ["mk kn mn", "mk nk mn", "mk kn nm", "mk nk nm"] {
            check(spec, &[('m', 29), ('n', n), ('k', 70)]);
        }
        check("mbk nbk bmn", &[('b', 2), ('m', 9), ('n', n), ('k', 20)]);
    }
}

/// Rows that collide in the cache are copied, several groups of them, in pieces and whole, if its sets have few ways; others are not.
#[test]
fn rows_that_collide() {
    let plan = |factors: &[Factor], ways| {
        let with_ways = |kernels| Kernels { ways, ..kernels };
        let isa = Isa::detect();
        let kernels = with_ways(f32::kernels(isa));
        DotGeneral::<f32>::plan(factors, (kernels, f32::broad_kernels(isa).map(with_ways)), Packing::plain(&kernels))
    };
    for (m, n, k) in [(150, 100, 2048), (90, 70, 512), (40, 33, 1024)] {
        for spec in ["mk kn mn", "mk nk mn", "mk kn nm"] {
            let factors = factors(spec, &[('m', m), ('n', n), ('k', k)]);
            let (lhs, rhs) = (values(m * k, 1), values(n * k, 2));
            let mut expected = vec![0.0; m * n];
            naive(&factors, &lhs, &rhs, &mut expected);
            for (ways, threads) in [(4, 1), (8, 2), (12, 1), (16, 3)] {
                let mut out = vec![f32::NAN; m * n];
                plan(&factors, ways).run(&Pool::new(threads), 1.0, 0.0, &lhs, &rhs, &mut out);
                assert_eq!(out, expected, "{spec} {m} {n} {k}, {ways} ways");
            }
        }
    }
    let read = |k, ways| plan(&factors("mk kn mn", &[('m', 90), ('n', 70), ('k', k)]), ways).gemm;
    for ways in [8, 12, 16] {
        let [far, near] = [read(1024, ways), read(1000, ways)];
        let expected = if far.kernels.rows + 4 > ways { Rows::Copied } else { Rows::InPlace };
        assert_eq!([far.read_a, near.read_a], [expected, Rows::InPlace], "{} rows, {ways} ways", far.kernels.rows);
    }
    assert!(matches!(isa::first_level_ways(), 2..=32));
}

#[test]
fn several_dims_in_any_order() {
    check("bmk bkn bmn", &[('b', 9), ('m', 13), ('n', 18), ('k', 21)]);
    check("bthe hen btn", &[('b', 2), ('t', 7), ('h', 3), ('e', 4), ('n', 33)]);
    check("bhte hen btn", &[('b', 2), ('t', 7), ('h', 3), ('e', 4), ('n', 33)]);
    check("btc che bhte", &[('b', 2), ('t', 15), ('c', 40), ('h', 3), ('e', 6)]);
    check("bhte bhse bhts", &[('b', 2), ('h', 5), ('t', 9), ('s', 11), ('e', 8)]);
    check("mbk nbk bmn", &[('b', 3), ('m', 13), ('n', 18), ('k', 21)]);
    check("btm btn mn", &[('b', 30), ('t', 20), ('m', 18), ('n', 21)]);
    check("m n mn", &[('m', 20), ('n', 40)]);
    check("k k ", &[('k', 1700)]);
}

/// A block for each thread, which packs once for itself, and a part of each that others may take.
#[test]
fn threads_have_a_block_each() {
    let grid = |spec: &str, sizes: &[(char, usize)], threads| DotGeneral::<f32>::new(&factors(spec, sizes)).gemm.grid(threads);
    let deep = [('m', 256), ('n', 256), ('k', 8192)];
    assert_eq!(grid("mk kn mn", &deep, 1), Grid { items: 1, blocks: [1, 1], left: None });
    for threads in [2, 3, 4, 16] {
        let Grid { items, blocks: [down, across], left } = grid("mk kn mn", &deep, threads);
        assert_eq!((items, down * across, left.is_some()), (1, threads, true));
    }
    // No thread reads the many rows of a tall product for others' columns.
    let tall = DotGeneral::<f32>::new(&factors("mk kn mn", &[('m', 8192), ('n', 64), ('k', 256)]));
    assert_eq!(tall.gemm.grid(4).blocks, if tall.swapped { [1, 4] } else { [4, 1] });
    let batch = [('b', 64), ('m', 128), ('n', 128), ('k', 64)];
    assert_eq!(grid("bmk bkn bmn", &batch, 4).blocks, [1, 1]);
}

/// Chunks have every pair of panels of every product once, whatever is cut and however many threads there are.
#[test]
fn chunks_are_all_of_the_products() {
    for (m, n, b) in [(1, 1, 1), (1, 100, 1), (20, 20, 3), (40, 7, 1), (100, 100, 1), (100, 33, 5), (300, 200, 2)] {
        let sizes = [('b', b), ('m', m), ('n', n), ('k', 1 << 20)];
        let gemm = DotGeneral::<f32>::new(&factors("bmk bkn bmn", &sizes)).gemm;
        let (rows, columns) = (gemm.rows.panels.len(), gemm.columns.panels.len());
        for threads in 1..=17 {
            let grid = gemm.grid(threads);
            let mut seen = vec![0; b * rows * columns];
            for chunk in 0..gemm.chunks(&grid) {
                let (items, [down, across]) = gemm.chunk(&grid, chunk);
                assert!(!items.is_empty() && !down.is_empty() && !across.is_empty(), "{sizes:?} {grid:?} {chunk}");
                for item in items {
                    down.clone().for_each(|i| across.clone().for_each(|j| seen[(item * rows + i) * columns + j] += 1));
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "{sizes:?} {grid:?}");
        }
    }
}

/// Panels end where stretches of C do, unless there would be many more of them.
#[test]
fn rows_cross_stretches_of_c() {
    let sizes = [('a', 6), ('b', 8), ('k', 70), ('n', 40), ('c', 3)];
    for spec in ["abk kn anb", "abk nk anb", "kab kn anb", "abk kcn acbn", "kab nkc acbn"] {
        let sizes: Vec<_> = sizes.into_iter().filter(|size| spec.contains(size.0)).collect();
        check(spec, &sizes);
        for isa in Isa::available() {
            let plan = DotGeneral::<f32>::with_isa(&factors(spec, &sizes), isa);
            let (rows, most) = (&plan.gemm.rows, plan.gemm.kernels.rows);
            // Rows that fill stretches of eight need not cross them.
            assert_eq!(!rows.stretches.is_empty(), !plan.swapped && 8 % most != 0, "{spec} {isa:?}: {:?}", rows.panels);
            assert!(plan.swapped || rows.panels.len() == 48_usize.div_ceil(most), "{spec} {isa:?}: {:?}", rows.panels);
            assert!(!plan.swapped || spec.ends_with("anb"), "{spec} {isa:?}");
        }
    }
    let plan = DotGeneral::<f32>::new(&factors("abk kcn acbn", &[('a', 3), ('b', 120), ('k', 70), ('n', 40), ('c', 3)]));
    assert!(plan.gemm.rows.is_whole() && plan.gemm.rows.stretches.is_empty());
}

#[test]
fn empty_dims() {
    check("mk kn mn", &[('m', 4), ('n', 5), ('k', 0)]);
    check("mk kn mn", &[('m', 0), ('n', 5), ('k', 3)]);
    check("bmk bkn bmn", &[('b', 0), ('m', 2), ('n', 5), ('k', 3)]);
}

/// Random reals: instruction sets, threads and batching must agree in every bit.
#[test]
fn same_bits_for_all_threads_and_instruction_sets() {
    let sizes = [('m', 300), ('n', 530), ('k', 1700)];
    for spec in ["mk kn mn", "mk nk mn", "km kn mn"] {
        let factors = factors(spec, &sizes);
        let real = |count: usize| (0..count).map(|i| ((i as f32) * 0.37).sin()).collect::<Vec<f32>>();
        let [a, b, c] = extents(&factors);
        let (lhs, rhs) = (real(a), real(b));
        let run = |isa, threads| {
            let mut out = vec![0.0; c];
            DotGeneral::<f32>::with_isa(&factors, isa).run(&Pool::new(threads), 0.5, 0.0, &lhs, &rhs, &mut out);
            out
        };
        let expected = run(Isa::detect(), 1);
        for isa in Isa::available().filter(|isa| *isa != Isa::Baseline) {
            assert!([1, 2, 4].iter().all(|threads| run(isa, *threads) == expected), "{spec} {isa:?}");
        }
    }
}

/// Of few rows, whichever operand has them: each sum's chains end where vectors do or not, columns fill tiles or not.
#[test]
fn few_rows_are_sums_of_chains() {
    for m in 1..=9 {
        for (n, k) in [(16, 64), (45, 100), (131, 77)] {
            for spec in ["mk nk mn", "mk nk nm", "nk mk mn", "bmk nk bmn", "bmk bnk mbn"] {
                let sizes = [('m', m), ('n', n), ('k', k), ('b', 2)];
                let sizes: Vec<_> = sizes.into_iter().filter(|size| spec.contains(size.0)).collect();
                check(spec, &sizes);
                let factors = factors(spec, &sizes);
                let rows = if spec == "bmk nk bmn" { 2 * m } else { m };
                assert_eq!(DotGeneral::<f32>::new(&factors).few.is_some(), rows <= 8, "{spec} {sizes:?}");
                let real = |count: usize| (0..count).map(|i| ((i as f32) * 0.37).sin()).collect::<Vec<f32>>();
                let [a, b, c] = extents(&factors);
                let run = |isa, threads| {
                    let mut out = vec![0.0; c];
                    let plan = DotGeneral::<f32>::with_isa(&factors, isa);
                    plan.run(&Pool::new(threads), 0.5, 0.0, &real(a), &real(b), &mut out);
                    out
                };
                let expected = run(Isa::detect(), 1);
                assert!(Isa::available().all(|isa| run(isa, 3) == expected), "{spec} {sizes:?}");
            }
        }
    }
    let planned = |spec: &str, k: usize| DotGeneral::<f32>::new(&factors(spec, &[('m', 3), ('n', 40), ('k', k)])).few.is_some();
    assert_eq!([planned("mk nk mn", 64), planned("mk nk mn", 63), planned("mk kn mn", 64)], [true, false, false]);
}
