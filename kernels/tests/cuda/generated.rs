//! Generated kernels, from their loop nests' texts, against the reference evaluator.

use crate::emulation::{Bug, Expected, Job, Planted, check, check_planted};
use crate::numbers::{decoded, encoded, numbers};
use dcc_kernels::Nest;
use dcc_kernels::cuda::Source;
use dcc_kernels::reference::{self, Scalar};
use dcc_program::kernel::Kernel;
use dcc_program::mesh::Extent;
use dcc_program::text;
use dcc_program::types::DType;

/// A kernel's text, and the sizes of its inputs and outputs.
pub struct Case {
    what: &'static str,
    kernel: &'static str,
    sizes: &'static [&'static [u64]],
}

/// y = tanh(x) w, with rows of w, some threads without elements.
pub const ELEMENTWISE: Case = Case {
    what: "elementwise",
    kernel: "(x0: f32[_, _], x1: f32[_]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = tanh(x0[i, j]) * x1[j]",
    sizes: &[&[7, 300], &[300], &[7, 300]],
};

/// y = x + z, x as it lies and z by columns.
const TRANSPOSED: Case = Case {
    what: "transposed",
    kernel: "(x0: bf16[_, _, _], x1: f32[_, _, _]) -> (y0: f32[_, _, _]) dims(b, i, j) outer(b, i, j)
  y0[b, i, j] = f32(x0[b, j, i]) + x1[b, i, j]",
    sizes: &[&[2, 45, 130], &[2, 130, 45], &[2, 130, 45]],
};

/// More operands by columns than a block has room for: 8448 bytes each.
const TRANSPOSED_MANY: Case = Case {
    what: "many transposed",
    kernel: "(x0: f64[_, _], x1: f64[_, _], x2: f64[_, _], x3: f64[_, _], x4: f64[_, _], x5: f64[_, _]) -> (y0: f64[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = x0[j, i] + x1[j, i] * x2[j, i] + x3[j, i] * x4[j, i] - x5[j, i]",
    sizes: &[&[45, 130], &[45, 130], &[45, 130], &[45, 130], &[45, 130], &[45, 130], &[130, 45]],
};

/// Layer norm of rows of halves.
const LAYER_NORM: Case = Case {
    what: "layer norm",
    kernel: "(x0: bf16[_, _], x1: f32[_]) -> (y0: bf16[_, _]) dims(i, j) outer(i)
  v0 = sum j: f32(x0[i, j])
  v1 = v0 * 0.0025:f32
  e0 = f32(x0[i, j]) - v1
  v2 = sum j: e0 * e0
  v3 = rsqrt(v2 * 0.0025:f32 + 1.0e-5:f32)
  for j: y0[i, j] = bf16(e0 * v3 * x1[j])",
    sizes: &[&[9, 400], &[400], &[9, 400]],
};

/// Softmax cross-entropy: a block has a row.
pub const CROSS_ENTROPY: Case = Case {
    what: "cross-entropy",
    kernel: "(x0: f32[_, _], x1: i64[_]) -> (y0: f32[_], y1: f32[_, _]) dims(i, j) outer(i)
  v0 = max j: x0[i, j]
  v1 = sum j: exp(x0[i, j] - v0)
  y0[i] = log(v1) + v0 - x0[i, {x1[i]}]
  for j: y1[i, j] = exp(x0[i, j] - v0) / v1 - select(eq(position(j), x1[i]), 1.0:f32, 0.0:f32)",
    sizes: &[&[3, 5003], &[3], &[3], &[3, 5003]],
};

/// The gradient of a bias: long columns, in parts.
const COLUMNS: Case = Case {
    what: "sums of columns",
    kernel: "(x0: bf16[_, _]) -> (y0: f32[_]) dims(i, j) outer(j)
  v0 = sum i: f32(x0[i, j])
  y0[j] += v0",
    sizes: &[&[2000, 40], &[40]],
};

/// The same with more columns than a block has threads.
pub const WIDE_COLUMNS: Case = Case { what: "sums of wide columns", sizes: &[&[500, 300], &[300]], ..COLUMNS };

/// A norm: all of a tensor, in parts.
pub const NORM: Case = Case {
    what: "norm",
    kernel: "(x0: f32[_, _], x1: f64[]) -> (y0: f64[]) dims(i, j) outer()
  e0 = f64(x0[i, j])
  v0 = sum i, j: e0 * e0
  y0[] = x1[] + v0",
    sizes: &[&[130, 501], &[], &[]],
};

/// Dropout by counted random numbers.
pub const DROPOUT: Case = Case {
    what: "dropout",
    kernel: "(x0: f32[_], x1: i64[]) -> (y0: f32[_]) dims(i) outer(i)
  y0[i] = select(lt(uniform.3(x1[], 5:i64, position(i)), 0.25:f32), 0.0:f32, x0[i] * 1.3333334:f32)",
    sizes: &[&[3000], &[], &[3000]],
};

/// What updates parameters in bf16; its result stays f32, whose tolerance sees each last digit.
const ROUNDING: Case = Case {
    what: "stochastic rounding",
    kernel: "(x0: f32[_], x1: i64[]) -> (y0: f32[_]) dims(i) outer(i)
  y0[i] = round_stochastic(x0[i] * 0.333251953125:f32, uniform.3(x1[], 5:i64, position(i)))",
    sizes: &[&[3000], &[], &[3000]],
};

/// Norms of a stream that each layer adds to, all results at the end: more values of a row than a thread can hold.
const STREAM: Case = Case {
    what: "norms of a stream",
    kernel: "(x0: f32[_, _], x1: bf16[_, _], x2: f32[_, _], x3: bf16[_, _], x4: f32[_, _], x5: f32[_]) \
         -> (y0: f32[_], y1: f32[_, _], y2: f32[_, _], y3: bf16[_, _], y4: f32[_, _], y5: f32[_, _]) dims(i, j) outer(i)
  e0 = x0[i, j] + f32(x1[i, j])
  e1 = e0 + x2[i, j]
  e2 = tanh(e1 + f32(x3[i, j]))
  e3 = e2 * x4[i, j]
  e4 = e3 + x5[j]
  v0 = sum j: e0
  v1 = v0 * 0.00012207031:f32
  e5 = e0 - v1
  v2 = sum j: e5 * e5
  y0[i] = v2
  v3 = sum j: e1
  v4 = v3 * 0.00012207031:f32
  e6 = e1 - v4
  v5 = sum j: e6 * e6
  v6 = max j: e2
  v7 = sum j: e3
  v8 = v7 * 0.00012207031:f32
  e7 = e3 - v8
  v9 = sum j: e7 * e7
  v10 = sum j: exp(e4 - v6)
  for j: y1[i, j] = e5 * v2
  for j: y2[i, j] = e6 * rsqrt(v5)
  for j: y3[i, j] = bf16(e2 - v6)
  for j: y4[i, j] = e7 * rsqrt(v9)
  for j: y5[i, j] = exp(e4 - v6) / v10",
    sizes: &[
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
        &[8192],
        &[2],
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
        &[2, 8192],
    ],
};

/// A statistic that replaces the one that the row is scaled by.
const RUNNING: Case = Case {
    what: "a running statistic",
    kernel: "(x0: f32[_, _], x1: f32[_]) -> (y0: f32[_, _], y1: f32[_]) dims(i, j) outer(i)
  v0 = max j: x0[i, j]
  for j: y0[i, j] = (x0[i, j] - v0) * x1[i]
  y1[i] = x1[i] + v0",
    sizes: &[&[3, 5003], &[3], &[3, 5003], &[3]],
};

const ROWS: &[u64] = &[2, 8192];

/// As many values, of more operands than a thread can have under way.
const LONG: Case = Case {
    what: "sums of many operands",
    kernel: "(x0: f32[_, _], x1: f32[_, _], x2: f32[_, _], x3: f32[_, _], x4: f32[_, _], x5: f32[_, _], x6: f32[_, _]) \
         -> (y0: f32[_, _], y1: f32[_, _], y2: f32[_, _], y3: f32[_, _], y4: f32[_, _]) dims(i, j) outer(i)
  e0 = x0[i, j] + x1[i, j]
  e1 = e0 + x2[i, j]
  e2 = e1 * x3[i, j]
  e3 = e2 + x4[i, j]
  e4 = e3 - x5[i, j]
  e5 = e4 + x6[i, j]
  v0 = max j: e0
  v1 = min j: e2
  v2 = max j: e3
  v3 = min j: e4
  v4 = max j: e5
  for j: y0[i, j] = e0 - v0
  for j: y1[i, j] = e2 - v1
  for j: y2[i, j] = e3 - v2
  for j: y3[i, j] = e4 - v3
  for j: y4[i, j] = e5 - v4",
    sizes: &[ROWS; 12],
};

/// A kernel's text, bound to the sizes of its inputs and outputs; the parameters are zeros.
pub fn bound(kernel: &str, sizes: &[&[u64]]) -> (Kernel, Nest, Vec<i64>) {
    let program = format!(
        "program k train stage 0/1 mesh(dp=1)\nmemory persistent=0 scratch=0\nsection update\norder update\nkernel fused.0{kernel}\n"
    );
    let kernel = text::parse(&program).unwrap_or_else(|error| panic!("{error}: {program}")).kernels.remove(0);
    let whole = |size: &u64| Extent { offset: 0, valid: *size, block: *size };
    let extents: Vec<Vec<Extent>> = sizes.iter().map(|sizes| sizes.iter().map(whole).collect()).collect();
    let (inputs, outputs) = extents.split_at(kernel.inputs.len());
    let nest = Nest::bind(&kernel, inputs, outputs).expect("sizes that fit");
    let parameters = Nest::parameters(&kernel, inputs, outputs).expect("sizes that fit");
    assert!(parameters.iter().all(|offset| *offset == 0), "the program passes zeros");
    (kernel, nest, parameters)
}

impl Case {
    fn job(&self, name: &str) -> Job {
        self.job_of(name, 0)
    }

    /// With other operands for each `seed`.
    pub fn job_of(&self, name: &str, seed: usize) -> Job {
        let (kernel, nest, parameters) = bound(self.kernel, self.sizes);
        let dtypes: Vec<DType> = kernel.inputs.iter().chain(&kernel.outputs).map(|argument| argument.dtype).collect();
        let operands: Vec<Vec<u8>> = dtypes
            .iter()
            .zip(self.sizes)
            .enumerate()
            .map(|(n, (dtype, sizes))| {
                let made = numbers(sizes.iter().product::<u64>() as usize, 100 * seed + n);
                let made = if dtype.is_float() { made } else { made.iter().map(|x| (x * 64.0).abs()).collect() };
                encoded(*dtype, &made)
            })
            .collect();
        let scalar = |dtype: &DType, x: f64| if dtype.is_float() { Scalar::Float(x) } else { Scalar::Int(x as i64) };
        let scalars =
            |(dtype, bytes): (&DType, &Vec<u8>)| decoded(*dtype, bytes).into_iter().map(|x| scalar(dtype, x)).collect();
        let mut given: Vec<Vec<Scalar>> = dtypes.iter().zip(&operands).map(scalars).collect();
        let mut results = given.split_off(kernel.inputs.len());
        reference::run(&nest, &parameters, &given, &mut results);
        let float = |x: &Scalar| if let Scalar::Float(x) = x { *x } else { panic!("an integer result") };
        let expected = results.iter().enumerate().map(|(n, values)| Expected {
            operand: given.len() + n,
            dtype: dtypes[given.len() + n],
            values: values.iter().map(float).collect(),
        });
        let expected = expected.collect();
        Job { what: self.what.to_owned(), source: Source::new(&nest, name).expect("a source"), operands, expected }
    }
}

/// `RUNNING` with its second result where its second operand is.
fn running(name: &str) -> Job {
    let mut job = RUNNING.job(name);
    let (before, body) = job.source.text.split_once("{\n").expect("a kernel has a body");
    job.source.text = format!("{before}{{\n    y1 = (float*)x1;\n{body}");
    job.expected[1].operand = 1;
    job
}

const ALL: [(&str, Case); 11] = [
    ("elementwise", ELEMENTWISE),
    ("transposed", TRANSPOSED),
    ("transposed_many", TRANSPOSED_MANY),
    ("layer_norm", LAYER_NORM),
    ("cross_entropy", CROSS_ENTROPY),
    ("columns", COLUMNS),
    ("norm", NORM),
    ("dropout", DROPOUT),
    ("stochastic_rounding", ROUNDING),
    ("stream", STREAM),
    ("many_operands", LONG),
];

fn jobs() -> Vec<Job> {
    ALL.iter().map(|(name, case)| case.job(name)).chain([running("running")]).collect()
}

#[test]
fn generated_kernels() {
    let jobs = jobs();
    let launches: Vec<usize> = jobs.iter().map(|job| job.source.launches.len()).collect();
    assert_eq!(launches, [1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1], "some in parts, some not");
    let tiles: Vec<usize> = jobs.iter().map(|job| job.source.text.matches("DCC_SHARED_ARRAY").count()).collect();
    assert_eq!(tiles, [0, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0], "operands that lie across their results, as many as fit");
    check("generated_kernels", &jobs);
}

/// Between the loops of a text, the 32-bit registers of arrays that are filled before and read behind.
fn held(text: &str) -> Vec<usize> {
    let loops: Vec<&str> = text.split("for (int trip").collect();
    let mut held = vec![0; loops.len()];
    for declared in text.lines().filter(|line| line.trim_end().ends_with("];")) {
        let words: Vec<&str> = declared.trim().split([' ', '[', ']']).collect();
        let [ty, name, count, ..] = words[..] else { continue };
        if !name.starts_with("kept") {
            continue;
        }
        let used = |text: &&str| text.contains(&format!("{name}[trip"));
        let (first, last) = (loops.iter().position(used), loops.iter().rposition(used));
        let (Some(first), Some(last)) = (first, last) else { panic!("{name} is not used") };
        let each = if matches!(ty, "double" | "long long") { 2 } else { 1 };
        held[first..last].iter_mut().for_each(|all| *all += each * count.parse::<usize>().expect("a count"));
    }
    held
}

#[test]
fn no_more_is_held_than_there_are_registers() {
    let loops = |text: &str| text.matches("for (int trip").count();
    let text = STREAM.job("stream").source.text;
    assert_eq!(loops(&text), 3, "sums, then sums that need them, then results");
    let most = held(&text).into_iter().max();
    assert_eq!(most, Some(64), "four values of 16 elements each, of six that are read again\n{text}");
    let long = LONG.job("many_operands").source.text;
    assert!(!long.contains("kept") && long.matches("#pragma unroll 1").count() == 2, "{long}");
    // What fits is read from memory once.
    let norm = LAYER_NORM.job("norm").source.text;
    assert!(held(&norm).into_iter().max() > Some(0) && norm.matches("x0 +").count() == 1, "{norm}");
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (Bug::OutOfBounds, ELEMENTWISE, "if (point >= 2100) return;", ""),
        (Bug::Scale, LAYER_NORM, ", 0.0025f);", ", 1.0f);"),
        (Bug::Precision, COLUMNS, "{ return op::OP(x, y); }", "{ return widen(narrow<bf16>(op::OP(x, y))); }"),
        (Bug::Lane, LAYER_NORM, "across = 16; across > 0", "across = 8; across > 0"),
        (Bug::NoBarrier, CROSS_ENTROPY, "        __syncthreads();\n        x = parts[0];", "        x = parts[0];"),
        (Bug::NoBarrier, LAYER_NORM, "x = F::of(x, parts[warp]);\n        __syncthreads();", "x = F::of(x, parts[warp]);"),
        (Bug::Uninitialised, CROSS_ENTROPY, "if (threadIdx.x % 32 == 0) parts", "if (threadIdx.x == 0) parts"),
        (Bug::MissingPart, COLUMNS, "for (int part = lane; part", "for (int part = lane + 1; part"),
        (Bug::Tail, COLUMNS, "? first +", "? 1 + first +"),
        (Bug::NoBarrier, TRANSPOSED, "\n    __syncthreads();\n", "\n"),
        (Bug::Index, TRANSPOSED, "[column][r]", "[r][column]"),
        (Bug::Index, STREAM, "mul(kept6[trip * 4 + v], e22)", "mul(kept18[trip * 4 + v], e22)"),
        (Bug::Precision, ROUNDING, "(u * 65536.0f)", "(0.5f * 65536.0f)"),
        (Bug::Index, DROPOUT, "(unsigned)element % 4", "(unsigned)element / 4 % 4"),
    ];
    let one = |(n, (kind, case, from, to)): (usize, (Bug, Case, &'static str, &'static str))| Planted {
        kind,
        job: case.job(&format!("planted{n}")),
        from,
        to,
    };
    let late = ("    __syncthreads();\n    if (lane == 0) {", "    if (lane == 0) {");
    let early = Planted { kind: Bug::NoBarrier, job: running("planted_running"), from: late.0, to: late.1 };
    bugs.into_iter().enumerate().map(one).chain([early]).collect()
}

#[test]
fn planted_bugs_of_generated_kernels() {
    check_planted("planted_bugs_of_generated_kernels", planted(), jobs());
}
