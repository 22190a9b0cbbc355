//! Both passes against the definition, on every instruction set, all with the same bits.

use super::*;

fn values(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 37 + seed * 101) as f64 * 0.731).sin()).collect()
}

/// Strides of dense (batch, head, group, position, channel), or (batch, position, head, group, channel).
fn strides(shape: &Shape, positions: usize, channels: usize, groups: usize, position_major: bool) -> Strides {
    let (h, g) = (shape.heads, groups);
    if position_major {
        let position = h * g * channels;
        Strides { batch: positions * position, head: g * channels, group: channels, position, channel: 1 }
    } else {
        let group = positions * channels;
        Strides { batch: h * g * group, head: g * group, group, position: channels, channel: 1 }
    }
}

fn base(batch: usize, heads: usize, groups: usize, [queries, keys, channels, width]: [usize; 4], major: bool) -> Shape {
    let mut shape = Shape {
        batch,
        heads,
        groups,
        queries,
        keys,
        channels,
        values: width,
        scale: 0.37,
        causal: None,
        q: Strides::default(),
        k: Strides::default(),
        v: Strides::default(),
        o: Strides::default(),
        lse: Strides::default(),
        mask: Strides::default(),
    };
    shape.q = strides(&shape, queries, channels, groups, major);
    shape.k = Strides { group: 0, ..strides(&shape, keys, channels, 1, major) };
    shape.v = Strides { group: 0, ..strides(&shape, keys, width, 1, major) };
    shape.o = strides(&shape, queries, width, groups, major);
    shape.lse = Strides { channel: 0, ..strides(&shape, queries, 1, groups, false) };
    shape
}

/// O, Lse, dQ, dK, dV by definition; `mask` gives what is added to a score.
fn naive(
    s: &Shape,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dy: &[f64],
    mask: &dyn Fn([usize; 3], usize, usize) -> f64,
) -> [Vec<f64>; 5] {
    let (mut o, mut lse) = (vec![0.0; dy.len()], vec![0.0; s.batch * s.heads * s.groups * s.queries]);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let at = |l: &Strides, [b, h, g]: [usize; 3], p: usize| b * l.batch + h * l.head + g * l.group + p * l.position;
    for number in 0..s.batch * s.heads * s.groups {
        let head = [number / (s.groups * s.heads), number / s.groups % s.heads, number % s.groups];
        let key = [head[0], head[1], 0];
        for t in 0..s.queries {
            let (qt, ot) = (at(&s.q, head, t), at(&s.o, head, t));
            let score = |j: usize| {
                let hidden = s.causal.is_some_and(|offset| j as i64 > t as i64 + offset);
                let dot: f64 = (0..s.channels).map(|e| q[qt + e] * k[at(&s.k, key, j) + e]).sum();
                if hidden { f64::NEG_INFINITY } else { dot * s.scale + mask(head, t, j) }
            };
            let scores: Vec<f64> = (0..s.keys).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = if max.is_finite() { scores.iter().map(|x| (x - max).exp()).sum() } else { 0.0 };
            lse[at(&s.lse, head, t)] = if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY };
            if sum == 0.0 {
                continue;
            }
            let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
            for (j, p) in p.iter().enumerate() {
                (0..s.values).for_each(|f| o[ot + f] += p * v[at(&s.v, key, j) + f]);
            }
            let delta: f64 = (0..s.values).map(|f| dy[ot + f] * o[ot + f]).sum();
            for (j, p) in p.iter().enumerate() {
                let (kj, vj) = (at(&s.k, key, j), at(&s.v, key, j));
                let dp: f64 = (0..s.values).map(|f| dy[ot + f] * v[vj + f]).sum();
                let ds = p * (dp - delta) * s.scale;
                (0..s.values).for_each(|f| dv[vj + f] += p * dy[ot + f]);
                (0..s.channels).for_each(|e| dq[qt + e] += ds * k[kj + e]);
                (0..s.channels).for_each(|e| dk[kj + e] += ds * q[qt + e]);
            }
        }
    }
    [o, lse, dq, dk, dv]
}

/// Runs both passes on NaN-preset memory.
fn run<E: Real>(s: &Shape, isa: Isa, threads: usize, inputs: [&[f64]; 4], mask: Mask<E>) -> [Vec<E>; 5] {
    let [q, k, v, dy] = inputs.map(|x| x.iter().map(|x| E::from_f64(*x)).collect::<Vec<E>>());
    let empty = |count: usize| vec![E::from_f64(f64::NAN); count];
    let (attention, pool) = (Attention::<E>::with_isa(s, isa), Pool::new(threads));
    let (mut o, mut lse) = (empty(dy.len()), empty(s.batch * s.heads * s.groups * s.queries));
    let inputs = Inputs { q: &q, k: &k, v: &v, mask };
    attention.forward(&pool, inputs, &mut o, &mut lse, &mut empty(attention.forward_workspace()));
    let (mut dq, mut dk, mut dv) = (empty(q.len()), empty(k.len()), empty(v.len()));
    let given = Gradient { output_gradient: &dy, output_gradient_strides: s.o, inputs, o: &o, lse: &lse };
    let results = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv, dq_strides: s.q, dk_strides: s.k, dv_strides: s.v };
    attention.backward(&pool, &given, results, &mut empty(attention.backward_workspace()));
    [o, lse, dq, dk, dv]
}

fn close<E: Real>(got: &[Vec<E>; 5], expected: &[Vec<f64>; 5], tolerance: f64, what: &str) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        for (j, (x, y)) in got.iter().zip(expected).enumerate() {
            let x = x.to_f64();
            assert!((x - y).abs() <= tolerance * (1.0 + y.abs()) || x == *y, "{what}: result {i}[{j}] is {x}, expected {y}");
        }
    }
}

/// `kind` 0: no mask, 1: additive (with -∞), 2: boolean.
fn check(s: &Shape, kind: usize) {
    let mut s = s.clone();
    let count = |l: &Strides, p, c| {
        1 + (s.batch - 1) * l.batch + (s.heads - 1) * l.head + (s.groups - 1) * l.group + (p - 1) * l.position + c - 1
    };
    let q = values(count(&s.q, s.queries, s.channels), 1);
    let (k, v) = (values(count(&s.k, s.keys, s.channels), 2), values(count(&s.v, s.keys, s.values), 3));
    let dy = values(count(&s.o, s.queries, s.values), 4);
    // The mask repeats over heads; query 1 sees nothing.
    s.mask = Strides { batch: s.queries * s.keys, position: s.keys, channel: 1, ..Strides::default() };
    let keep = |b: usize, t: usize, j: usize| t != 1 && !(b * 5 + t * 3 + j * 7).is_multiple_of(4);
    let all: Vec<(usize, usize, usize)> =
        (0..s.batch * s.queries * s.keys).map(|i| (i / (s.queries * s.keys), i / s.keys % s.queries, i % s.keys)).collect();
    let boolean: Vec<u8> = all.iter().map(|(b, t, j)| u8::from(keep(*b, *t, *j))).collect();
    let additive: Vec<f64> =
        all.iter().map(|(b, t, j)| if keep(*b, *t, *j) { (*j as f64 * 0.3).cos() } else { f64::NEG_INFINITY }).collect();
    let single: Vec<f32> = additive.iter().map(|x| *x as f32).collect();
    let adds = |[b, _, _]: [usize; 3], t: usize, j: usize| match kind {
        0 => 0.0,
        1 => additive[(b * s.queries + t) * s.keys + j],
        _ if keep(b, t, j) => 0.0,
        _ => f64::NEG_INFINITY,
    };
    let expected = naive(&s, &q, &k, &v, &dy, &adds);
    let inputs = [&q[..], &k[..], &v[..], &dy[..]];
    let mut bits: Option<[Vec<f32>; 5]> = None;
    for isa in Isa::available() {
        for threads in [1, 3] {
            let mask = [Mask::None, Mask::Additive(&single[..]), Mask::Boolean(&boolean[..])][kind];
            let got = run::<f32>(&s, isa, threads, inputs, mask);
            close(&got, &expected, 1e-4, &format!("{isa:?} {s:?} mask {kind}"));
            let first = bits.get_or_insert_with(|| got.clone());
            let same = |(x, y): (&Vec<f32>, &Vec<f32>)| x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits());
            assert!(first.iter().zip(&got).all(same), "{isa:?} on {threads} threads: other bits");
            let mask = [Mask::None, Mask::Additive(&additive[..]), Mask::Boolean(&boolean[..])][kind];
            close(&run::<f64>(&s, isa, threads, inputs, mask), &expected, 1e-12, &format!("f64 {isa:?} {s:?} mask {kind}"));
        }
    }
}

#[test]
fn against_the_definition() {
    for major in [false, true] {
        check(&base(2, 2, 1, [5, 7, 4, 4], major), 0);
        check(&base(2, 3, 2, [60, 150, 16, 24], major), 0);
        // One key more than whole panels, whose scores are dot products.
        check(&base(2, 2, 1, [65, 65, 64, 40], major), 0);
        let causal = |offset, sizes| Shape { causal: Some(offset), ..base(1, 2, 2, sizes, major) };
        check(&causal(0, [140, 140, 16, 16]), 0);
        check(&causal(10, [20, 30, 8, 5]), 1);
        check(&causal(-3, [20, 30, 8, 5]), 2);
        // The first block of queries sees nothing.
        check(&causal(-50, [70, 60, 8, 8]), 0);
    }
}

#[test]
fn more_than_a_thread_holds() {
    let long = base(1, 1, 1, [6, 3100, 64, 64], true);
    assert!(Attention::<f32>::new(&long).backward_workspace() > 0);
    check(&long, 0);
    // Blocks become smaller where the values have many channels: 96 rows of these would be too many.
    let wide = base(1, 1, 1, [96, 3, 4, 1024], false);
    let (q, k, v, dy) = (values(96 * 4, 1), values(3 * 4, 2), values(3 * 1024, 3), values(96 * 1024, 4));
    let expected = naive(&wide, &q, &k, &v, &dy, &|_, _, _| 0.0);
    for isa in Isa::available() {
        close(&run::<f64>(&wide, isa, 2, [&q, &k, &v, &dy], Mask::None), &expected, 1e-11, &format!("f64 {isa:?} {wide:?}"));
    }
}

#[test]
fn masks_of_both_kinds() {
    for kind in [1, 2] {
        check(&base(2, 2, 2, [13, 141, 8, 8], true), kind);
    }
}

#[test]
fn nan_is_not_hidden() {
    let s = base(1, 1, 1, [2, 3, 4, 4], false);
    let (x, bad) = (values(16, 1), [f64::NAN; 12]);
    let [o, lse, ..] = run::<f32>(&s, Isa::detect(), 1, [&x[..8], &bad, &x[..12], &x[..8]], Mask::None);
    assert!(o.iter().chain(&lse).all(|x| x.is_nan()));
}

/// A key of NaN, in the first block of keys or in the last: all results of the queries that see it are NaN, those of others are not.
#[test]
fn nan_is_where_it_is_seen() {
    for bad in [40, 290] {
        let mut s = base(1, 1, 1, [300, 300, 4, 4], false);
        s.causal = Some(0);
        let (x, mut k) = (values(1200, 1), values(1200, 2));
        k[bad * 4] = f64::NAN;
        let [o, lse, dq, ..] = run::<f32>(&s, Isa::detect(), 1, [&x, &k, &x, &x], Mask::None);
        for t in 0..300 {
            let found = o[4 * t..][..4].iter().chain(&lse[t..=t]);
            assert!(found.into_iter().all(|x| x.is_nan() == (t >= bad)), "query {t}, key {bad}");
            assert!(t < bad || dq[4 * t..][..4].iter().all(|x| x.is_nan()), "query {t}, key {bad}");
        }
    }
}
