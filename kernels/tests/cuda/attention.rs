//! Attention and its gradient, by plain threads and by tensor cores, against their definitions.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{decoded, encoded, numbers};
use dcc_kernels::cuda::library::attention;
use dcc_kernels::library::attention::{Shape, Strides};
use dcc_program::program::MaskKind;
use dcc_program::types::DType;

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

fn shape(
    [batch, heads, groups]: [usize; 3],
    [queries, keys, channels, values]: [usize; 4],
    causal: Option<i64>,
    major: bool,
) -> Shape {
    let none = Strides::default();
    let scale = 0.25;
    let (q, k, v, o, lse) = (none, none, none, none, none);
    let mut shape = Shape { batch, heads, groups, queries, keys, channels, values, scale, causal, q, k, v, o, lse, mask: none };
    shape.q = strides(&shape, queries, channels, groups, major);
    shape.k = Strides { group: 0, ..strides(&shape, keys, channels, 1, major) };
    shape.v = Strides { group: 0, ..strides(&shape, keys, values, 1, !major) };
    shape.o = strides(&shape, queries, values, groups, major);
    shape.lse = Strides { channel: 0, ..strides(&shape, queries, 1, groups, false) };
    shape.mask = Strides { batch: queries * keys, position: keys, channel: 1, ..none };
    shape
}

/// Values of one attention: its operands as they are stored, and O, Lse, dQ, dK, dV by definition.
struct Attended {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dy: Vec<f64>,
    /// Added to scores of [batch, query, key].
    mask: Vec<f64>,
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn at(l: &Strides, [b, h, g]: [usize; 3], position: usize) -> usize {
    b * l.batch + h * l.head + g * l.group + position * l.position
}

impl Attended {
    fn new(s: &Shape, kind: MaskKind) -> Attended {
        let (queries, keys) = (s.batch * s.heads * s.groups * s.queries, s.batch * s.heads * s.keys);
        let (q, k) = (numbers(queries * s.channels, 1), numbers(keys * s.channels, 2));
        let (v, dy) = (numbers(keys * s.values, 3), numbers(queries * s.values, 4));
        // Query 1 sees nothing.
        let hidden = |i: usize| i / s.keys % s.queries == 1 || (i * 7).is_multiple_of(5);
        let added = |i: usize| if kind == MaskKind::Additive { (i % 9) as f64 / 8.0 } else { 0.0 };
        let mask = |i: usize| if kind != MaskKind::None && hidden(i) { f64::NEG_INFINITY } else { added(i) };
        let mask = (0..s.batch * s.queries * s.keys).map(mask).collect();
        let (o, lse) = (vec![0.0; dy.len()], vec![f64::NEG_INFINITY; queries]);
        let (dq, dk, dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        Attended { q, k, v, dy, mask, o, lse, dq, dk, dv }
    }

    /// Fills in O, Lse and the gradients; the backward pass takes O and Lse as `stored` gives them back.
    fn evaluate(&mut self, s: &Shape, stored: impl Fn(f64) -> f64) {
        for number in 0..s.batch * s.heads * s.groups {
            let head = [number / (s.groups * s.heads), number / s.groups % s.heads, number % s.groups];
            for t in 0..s.queries {
                self.query(s, head, t, &stored);
            }
        }
    }

    fn query(&mut self, s: &Shape, head: [usize; 3], t: usize, stored: &impl Fn(f64) -> f64) {
        let key = [head[0], head[1], 0];
        let (qt, ot) = (at(&s.q, head, t), at(&s.o, head, t));
        let score = |j: usize| {
            let hidden = s.causal.is_some_and(|offset| j as i64 > t as i64 + offset);
            let dot: f64 = (0..s.channels).map(|e| self.q[qt + e] * self.k[at(&s.k, key, j) + e * s.k.channel]).sum();
            if hidden { f64::NEG_INFINITY } else { dot * s.scale + self.mask[(head[0] * s.queries + t) * s.keys + j] }
        };
        let scores: Vec<f64> = (0..s.keys).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return;
        }
        let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        self.lse[at(&s.lse, head, t)] = max + sum.ln();
        let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
        for (j, p) in p.iter().enumerate() {
            (0..s.values).for_each(|f| self.o[ot + f] += p * self.v[at(&s.v, key, j) + f]);
        }
        let dot: f64 = (0..s.values).map(|f| self.dy[ot + f] * stored(self.o[ot + f])).sum();
        for (j, p) in p.iter().enumerate() {
            let (kj, vj) = (at(&s.k, key, j), at(&s.v, key, j));
            let dp: f64 = (0..s.values).map(|f| self.dy[ot + f] * self.v[vj + f]).sum();
            let ds = p * (dp - dot) * s.scale;
            (0..s.values).for_each(|f| self.dv[vj + f] += p * self.dy[ot + f]);
            (0..s.channels).for_each(|e| self.dq[qt + e] += ds * self.k[kj + e * s.k.channel]);
            (0..s.channels).for_each(|e| self.dk[kj + e * s.k.channel] += ds * self.q[qt + e]);
        }
    }
}

/// Both passes of one attention.
fn attend(name: &str, s: &Shape, dtype: DType, kind: MaskKind) -> [Job; 2] {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut a = Attended::new(s, kind);
    a.evaluate(s, |x| decoded(dtype, &encoded(dtype, &[x]))[0]);
    let nothing = |count: usize, dtype: DType| vec![0xff; count * dtype.bytes() as usize];
    let mask = match kind {
        MaskKind::None => None,
        MaskKind::Additive => Some(encoded(wide, &a.mask)),
        MaskKind::Boolean => {
            Some(encoded(DType::U8, &a.mask.iter().map(|x| f64::from(u8::from(*x == 0.0))).collect::<Vec<_>>()))
        }
    };
    let Shape { batch, heads, groups, queries, keys, channels, values, causal, .. } = s;
    let sizes = format!("{batch}x{heads}x{groups}, {queries} queries, {keys} keys, {channels} and {values} channels");
    let what = format!("attention of {} {sizes}, causal {causal:?}, mask {kind:?}", dtype.name());
    let [q, k, v, dy, o] = [&a.q, &a.k, &a.v, &a.dy, &a.o].map(|x| encoded(dtype, x));
    let lse = encoded(wide, &a.lse);
    let results = [nothing(a.o.len(), dtype), nothing(a.lse.len(), wide)];
    let operands: Vec<_> = [q.clone(), k.clone(), v.clone()].into_iter().chain(mask.clone()).chain(results).collect();
    let first = operands.len() - 2;
    let forward = Job {
        source: attention::forward(s, dtype, kind, &format!("{name}_forward")).expect("a source"),
        operands,
        expected: vec![
            Expected { operand: first, dtype, values: a.o },
            Expected { operand: first + 1, dtype: wide, values: a.lse },
        ],
        what: what.clone(),
    };
    let gradients = [a.dq, a.dk, a.dv];
    let results = gradients.each_ref().map(|x| nothing(x.len(), dtype));
    let operands: Vec<_> = [dy, q, k, v, o, lse].into_iter().chain(mask).chain(results).collect();
    let first = operands.len() - 3;
    let expected = gradients.into_iter().enumerate().map(|(i, values)| Expected { operand: first + i, dtype, values });
    let backward = Job {
        source: attention::backward(s, dtype, kind, &format!("{name}_backward")).expect("a source"),
        operands,
        expected: expected.collect(),
        what: format!("gradient of {what}"),
    };
    for job in [&forward, &backward] {
        assert!(job.operands.iter().map(Vec::len).eq(job.source.operand_bytes.iter().copied()), "operands of {}", job.what);
    }
    [forward, backward]
}

#[test]
fn attention_of_whole_floats() {
    let (none, additive, boolean) = (MaskKind::None, MaskKind::Additive, MaskKind::Boolean);
    let cases = [
        (shape([1, 2, 1], [70, 70, 64, 64], Some(0), true), DType::F32, none),
        (shape([2, 1, 3], [5, 37, 20, 12], None, false), DType::F32, additive),
        (shape([1, 1, 2], [33, 40, 128, 128], Some(7), true), DType::F32, boolean),
        (shape([1, 1, 1], [1, 130, 16, 5], Some(129), false), DType::F32, none),
        (shape([1, 1, 1], [20, 19, 256, 256], Some(-3), false), DType::F32, none),
        (shape([2, 2, 2], [35, 50, 24, 40], Some(-4), true), DType::F64, boolean),
        (shape([1, 1, 1], [17, 33, 130, 200], None, true), DType::F64, additive),
    ];
    // Keys by channel, O's queries apart by an odd number.
    let mut crossed = shape([2, 1, 1], [20, 35, 12, 7], Some(15), false);
    crossed.k = Strides { batch: 35 * 12, position: 1, channel: 35, ..Strides::default() };
    let cases = cases.into_iter().chain([(crossed, DType::F32, boolean)]).collect::<Vec<_>>();
    let jobs = cases.iter().enumerate().flat_map(|(i, (s, dtype, kind))| attend(&format!("a{i}"), s, *dtype, *kind));
    check("attention_of_whole_floats", &jobs.collect::<Vec<_>>());
}

#[test]
fn attention_of_halves() {
    let cases = [
        (shape([1, 2, 2], [70, 90, 64, 64], Some(20), true), DType::BF16, MaskKind::None),
        (shape([1, 1, 1], [130, 70, 128, 64], None, false), DType::F16, MaskKind::Additive),
        (shape([2, 1, 1], [17, 66, 32, 96], Some(49), true), DType::BF16, MaskKind::Boolean),
        (shape([1, 1, 1], [9, 20, 12, 5], Some(-2), true), DType::F16, MaskKind::None),
        (shape([2, 1, 2], [75, 140, 64, 40], Some(65), true), DType::BF16, MaskKind::Additive),
    ];
    let jobs = cases.iter().enumerate().flat_map(|(i, (s, dtype, kind))| attend(&format!("a{i}"), s, *dtype, *kind));
    check("attention_of_halves", &jobs.collect::<Vec<_>>());
}

#[test]
fn nan_is_not_hidden() {
    let s = shape([1, 1, 1], [5, 40, 16, 16], None, true);
    let job = |(i, dtype): (usize, &DType)| {
        let [mut job, _] = attend(&format!("a{i}"), &s, *dtype, MaskKind::None);
        job.operands[1][..dtype.bytes() as usize].fill(0xff);
        job.expected.iter_mut().for_each(|expected| expected.values.fill(f64::NAN));
        job
    };
    check("nan_is_not_hidden", &[DType::F32, DType::F64, DType::BF16].iter().enumerate().map(job).collect::<Vec<_>>());
}

/// Of pass 0 or 1 of an attention, by name.
fn plant(bugs: &[(Bug, usize, &'static str, &'static str)], name: &str, attended: impl Fn(&str) -> [Job; 2]) -> Vec<Planted> {
    let one = |(number, (kind, pass, from, to)): (usize, &(Bug, usize, &'static str, &'static str))| {
        let [forward, backward] = attended(&format!("{name}{number}"));
        Planted { kind: *kind, job: if *pass == 0 { forward } else { backward }, from, to }
    };
    bugs.iter().enumerate().map(one).collect()
}

fn by_threads(name: &str) -> [Job; 2] {
    attend(name, &shape([1, 1, 2], [40, 200, 16, 16], Some(160), true), DType::F32, MaskKind::None)
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (Bug::CausalBound, 0, "query + S::OFFSET + 1", "query + S::OFFSET"),
        (Bug::NoBarrier, 0, "        __syncthreads();\n        load<typename S::v", "        load<typename S::v"),
        (Bug::Scale, 0, "sum[i] *= rescale;", ""),
        (Bug::Scale, 0, "C x = dot * C(S::scale() * LOG2_E)", "C x = dot * C(LOG2_E)"),
        (Bug::NoBarrier, 0, "        __syncthreads();\n        sums.template add", "        sums.template add"),
        (Bug::Lane, 0, "int across = 8; across > 0", "int across = 4; across > 0"),
        (Bug::OutOfBounds, 0, "if (own + i >= S::QUERIES) continue;", ""),
        (Bug::NoBarrier, 1, "            __syncthreads();\n            load<typename S::q", "            load<typename S::q"),
        (
            Bug::DivergentBarrier,
            1,
            "            __syncthreads();\n            load<typename S::q",
            "            if (threadIdx.x < 128) __syncthreads();\n            load<typename S::q",
        ),
        (
            Bug::NoWarpBarrier,
            1,
            "tile[i * APART + j * 16] = x[i][j];\n        __syncwarp();",
            "tile[i * APART + j * 16] = x[i][j];",
        ),
        (
            Bug::NoWarpBarrier,
            1,
            "        __syncwarp();\n#pragma unroll\n        for (int i = 0; i < EACH; ++i)",
            "        for (int i = 0; i < EACH; ++i)",
        ),
        (Bug::Uninitialised, 1, "logs[i] = log_of<S>(head, lse, from + i);", ""),
        (Bug::MissingPart, 1, "for (int g = 0; g < S::GROUPS; ++g)", "for (int g = 0; g < 1; ++g)"),
        (Bug::CausalBound, 1, "(key - S::OFFSET) / block * block", "(key - S::OFFSET) / block * block + block"),
        (Bug::Index, 1, "head.row() + own + i", "head.row() + own"),
    ];
    plant(&bugs, "planted", by_threads)
}

#[test]
fn planted_bugs_of_attention() {
    check_planted("planted_bugs_of_attention", planted(), by_threads("sound").into());
}

fn by_tensor_cores(name: &str) -> [Job; 2] {
    attend(name, &shape([1, 1, 2], [80, 200, 32, 16], Some(120), true), DType::BF16, MaskKind::None)
}

pub fn planted_in_tensor_cores() -> Vec<Planted> {
    let bugs = [
        (Bug::NoBarrier, 0, "            tensor::wait<1>();\n            __syncthreads();", "            tensor::wait<1>();"),
        (Bug::NoWait, 0, "        tensor::wait<1>();", "        tensor::wait<2>();"),
        (Bug::NoBarrier, 0, "values + now * V_TILE);\n            __syncthreads();", "values + now * V_TILE);"),
        (Bug::CausalBound, 0, "key + KEYS <= limit<S>(query)", "key <= limit<S>(query)"),
        (Bug::Lane, 1, "across = LANES / 2", "across = LANES / 4"),
        (Bug::Scale, 0, "sums.scale(h, half, rescale);", ""),
        (
            Bug::NoBarrier,
            1,
            "queries + now * Q_TILE);\n        }\n        __syncthreads();",
            "queries + now * Q_TILE);\n        }",
        ),
        (Bug::CausalBound, 1, "own < limit<S>(from + STEP - 1)", "own < limit<S>(from)"),
        (Bug::Index, 1, "number + n / each", "number"),
        (Bug::WrongTile, 1, "use(from, keys + now * K_TILE, ", "use(from, keys, "),
        (Bug::Empty, 1, "log == hidden<float>() ? 0", "false ? 0"),
    ];
    plant(&bugs, "planted", by_tensor_cores)
}

#[test]
fn planted_bugs_of_attention_by_tensor_cores() {
    check_planted("planted_bugs_of_attention_by_tensor_cores", planted_in_tensor_cores(), by_tensor_cores("sound").into());
}
