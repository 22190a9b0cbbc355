//! Products with an elementwise kernel as their tail: bit by bit what the two do one after the other, and near float64.

use crate::emulation::{Bug, Expected, Job, Planted, check_equal, check_planted};
use crate::generated::bound;
use crate::numbers::{decoded, encoded, numbers};
use crate::products::{Strided, convolved, heads, multiplied, plain, types};
use dcc_kernels::cuda::library::product::Beside;
use dcc_kernels::cuda::{Launch, Meaning, Source};
use dcc_kernels::reference::{self, Scalar};
use dcc_program::program::StoreMode;
use dcc_program::types::DType;
use std::fmt::Write;

/// A kernel that reads a product's result as input `given`, and the sizes of its inputs and outputs.
struct Tail {
    kernel: &'static str,
    given: usize,
    sizes: &'static [&'static [u64]],
}

/// Bias and activation, both results kept; the product in f32.
const ACTIVATION: Tail = Tail {
    kernel: "(x0: f32[_, _], x1: f32[_]) -> (y0: bf16[_, _], y1: bf16[_, _]) dims(i, j) outer(i, j)
  e0 = x0[i, j] + x1[j]
  y0[i, j] = bf16(e0)
  y1[i, j] = bf16(gelu_tanh(e0))",
    given: 0,
    sizes: &[&[136, 72], &[72], &[136, 72], &[136, 72]],
};

/// The derivative of an activation, of a product in bf16; not the first input.
const SLOPE: Tail = Tail {
    kernel: "(x0: bf16[_, _], x1: bf16[_, _]) -> (y0: bf16[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = bf16(f32(x1[i, j]) * gelu_slope(f32(x0[i, j])))",
    given: 1,
    sizes: &[&[136, 136], &[136, 136], &[136, 136]],
};

/// Rows that are no packs.
const ODD: Tail = Tail {
    kernel: "(x0: f32[_, _], x1: f32[_, _], x2: f32[_]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = tanh(x1[i, j] + x2[j]) * x0[i, j]",
    given: 1,
    sizes: &[&[70, 41], &[70, 41], &[41], &[70, 41]],
};

/// Added to what is there; a sum in parts.
const RESIDUAL: Tail = Tail {
    kernel: "(x0: f32[_, _], x1: f32[_, _]) -> (y0: f32[_, _], y1: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = x1[i, j] - x0[i, j] * 0.5:f32
  y1[i, j] += x0[i, j]",
    given: 0,
    sizes: &[&[128, 64], &[128, 64], &[128, 64], &[128, 64]],
};

const HALVES_IN_PARTS: Tail = Tail {
    kernel: "(x0: bf16[_, _], x1: f32[_]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = f32(x0[i, j]) * x1[j]",
    given: 0,
    sizes: &[&[40, 48], &[48], &[40, 48]],
};

/// A result whose rows lie side by side: 150 of them, 200 columns.
const TURNED: Tail = Tail {
    kernel: "(x0: f32[_, _], x1: f32[_]) -> (y0: f32[_, _]) dims(j, i) outer(j, i)
  y0[j, i] = max(x0[j, i] + x1[j], 0.0:f32)",
    given: 0,
    sizes: &[&[200, 150], &[200], &[200, 150]],
};

const TURNED_HALVES: Tail = Tail {
    kernel: "(x0: bf16[_, _], x1: f32[_]) -> (y0: bf16[_, _]) dims(j, i) outer(j, i)
  y0[j, i] = bf16(f32(x0[j, i]) + x1[j])",
    given: 0,
    sizes: &[&[200, 152], &[200], &[200, 152]],
};

/// Scores of heads, their scale and a mask for all of them; and dropout.
const SCORES: Tail = Tail {
    kernel: "(x0: f64[_, _, _, _], x1: f64[_, _], x2: i64[]) -> (y0: f64[_, _, _, _]) dims(b, h, t, s) outer(b, h, t, s)
  e0 = x0[b, h, t, s] * 0.25:f64 + x1[t, s]
  y0[b, h, t, s] = select(lt(uniform.3(x2[], 5:i64, position(s) + position(t) * 9:i64), 0.25:f32), 0.0:f64, e0)",
    given: 0,
    sizes: &[&[2, 3, 7, 9], &[7, 9], &[], &[2, 3, 7, 9]],
};

/// Bias and activation of a convolution's channels.
const CHANNELS: Tail = Tail {
    kernel: "(x0: f32[_, _, _, _, _], x1: f32[_, _]) -> (y0: f32[_, _, _, _, _]) dims(n, g, o, y, x) outer(n, g, o, y, x)
  y0[n, g, o, y, x] = max(x0[n, g, o, y, x] + x1[g, o], 0.0:f32)",
    given: 0,
    sizes: &[&[2, 2, 4, 9, 9], &[2, 4], &[2, 2, 4, 9, 9]],
};

/// The two as one, and one after the other with the product's result in the workspace.
struct Pair {
    whole: Job,
    apart: Job,
}

/// The product with the tail; `None`: the two stay apart.
fn whole(product: &Source, nest: &Source, (given, beside): (usize, Beside), name: &str) -> Option<Source> {
    let (Meaning::Product(product), Meaning::Nest(nest)) = (&product.meaning, &nest.meaning) else { panic!("no product") };
    product.with_tail(nest, given, beside, name).expect("a source")
}

impl Tail {
    /// `product` makes the job of the product with a name. Its result must be of few digits, which are exact in f32.
    fn pair(&self, name: &str, beside: Beside, product: impl Fn(&str) -> Job) -> Pair {
        let product = product(&format!("{name}_product"));
        let (kernel, nest, parameters) = bound(self.kernel, self.sizes);
        let nest_source = Source::new(&nest, &format!("{name}_nest")).expect("a source");
        let dtypes: Vec<DType> = kernel.inputs.iter().chain(&kernel.outputs).map(|argument| argument.dtype).collect();
        let count = |n: usize| self.sizes[n].iter().product::<u64>() as usize;
        let mut own: Vec<Vec<u8>> = (0..dtypes.len())
            .map(|n| {
                encoded(
                    dtypes[n],
                    &numbers(count(n), 40 + n).iter().map(|x| if dtypes[n].is_float() { *x } else { 7.0 }).collect::<Vec<_>>(),
                )
            })
            .collect();
        own[self.given] = encoded(dtypes[self.given], &product.expected[0].values);
        let scalar = |dtype: DType, x: f64| if dtype.is_float() { Scalar::Float(x) } else { Scalar::Int(x as i64) };
        let scalars = |n: usize| decoded(dtypes[n], &own[n]).into_iter().map(|x| scalar(dtypes[n], x)).collect::<Vec<_>>();
        let mut given: Vec<Vec<Scalar>> = (0..dtypes.len()).map(scalars).collect();
        let mut results = given.split_off(kernel.inputs.len());
        reference::run(&nest, &parameters, &given, &mut results);
        let values = |all: &Vec<Scalar>| all.iter().map(|x| if let Scalar::Float(x) = x { *x } else { f64::NAN }).collect();
        let expected = |job_operands: usize| -> Vec<Expected> {
            let first = job_operands - results.len();
            let one = |(n, all): (usize, &Vec<Scalar>)| Expected {
                operand: first + n,
                dtype: dtypes[given.len() + n],
                values: values(all),
            };
            results.iter().enumerate().map(one).collect()
        };
        let mut operands = product.operands[..if beside == Beside::Stored { 3 } else { 2 }].to_vec();
        operands.extend(own.iter().enumerate().filter(|(n, _)| *n != self.given).map(|(_, bytes)| bytes.clone()));
        let what = format!("{name}: {} and {}", product.what, self.kernel);
        let source = whole(&product.source, &nest_source, (self.given, beside), name).expect("a tail");
        assert_eq!(source.operand_bytes, operands.iter().map(Vec::len).collect::<Vec<_>>());
        let apart = self.apart(&product.source, &nest_source, beside);
        let job = |source| Job { what: what.clone(), source, operands: operands.clone(), expected: expected(operands.len()) };
        Pair { whole: job(source), apart: job(apart) }
    }

    /// Entries that call those of both.
    fn apart(&self, product: &Source, nest: &Source, beside: Beside) -> Source {
        let mut text = format!("{}{}", product.text, nest.text);
        text += "struct Any {\n    char* at;\n    template <class T> operator T*() const { return (T*)at; }\n};\n";
        let of_product = if beside == Beside::Stored { 3 } else { 2 };
        let count = of_product + nest.operand_bytes.len() - 1;
        let pointers: Vec<String> = (0..count).map(|n| format!("char* p{n}")).collect();
        let first = product.workspace.next_multiple_of(256);
        let result = if beside == Beside::Stored { "Any{p2}".to_owned() } else { format!("Any{{workspace + {first}}}") };
        let mut of_nest: Vec<String> = (of_product..count).map(|n| format!("Any{{p{n}}}")).collect();
        of_nest.insert(self.given, result.clone());
        of_nest.extend(nest.parameters.iter().map(|_| "0".to_owned()));
        let own = product.operand_bytes[..of_product].iter().copied();
        let of_product = ["Any{p0}", "Any{p1}", &result].map(str::to_owned);
        let mut launches = Vec::new();
        for (source, words) in [(product, &of_product[..]), (nest, &of_nest[..])] {
            let mut words = words.to_vec();
            words.extend((source.workspace > 0).then(|| "Any{workspace}".to_owned()));
            for launch in &source.launches {
                let entry = format!("call_{}", launch.entry);
                let _ = writeln!(
                    text,
                    "extern \"C\" __global__ void {entry}({}, char* workspace) {{ {}({}); }}",
                    pointers.join(", "),
                    launch.entry,
                    words.join(", ")
                );
                launches.push(Launch { entry, ..launch.clone() });
            }
        }
        let bytes = nest.operand_bytes[self.given];
        let others = nest.operand_bytes.iter().enumerate().filter(|(n, _)| *n != self.given).map(|(_, bytes)| *bytes);
        let operand_bytes = own.chain(others).collect();
        Source { text, launches, workspace: first + bytes, operand_bytes, ..Source::default() }
    }
}

/// A product of row-major operands, or turned ones, whose result lies column by column.
fn turned([m, n, k]: [usize; 3]) -> Vec<Strided> {
    vec![(m, [Some(k), None, Some(1)]), (n, [None, Some(1), Some(m)]), (k, [Some(1), Some(n), None])]
}

fn pairs(name: &str) -> Vec<Pair> {
    use Beside::{Dropped, Stored};
    let (f32, f64, bf16) = (DType::F32, DType::F64, DType::BF16);
    let product = |loops: Vec<Strided>, operands, result| {
        move |name: &str| multiplied(name, &loops, types(operands, result, StoreMode::Assign))
    };
    let named = |which: &str| format!("{name}_{which}");
    vec![
        ACTIVATION.pair(&named("activation"), Dropped, product(plain([136, 72, 104], false), bf16, f32)),
        SLOPE.pair(&named("slope"), Stored, product(plain([136, 136, 104], true), bf16, bf16)),
        ODD.pair(&named("odd"), Stored, product(plain([70, 41, 37], false), f32, f32)),
        RESIDUAL.pair(&named("residual"), Dropped, product(plain([128, 64, 520], true), f32, f32)),
        HALVES_IN_PARTS.pair(&named("halves"), Stored, product(plain([40, 48, 2104], true), bf16, bf16)),
        TURNED.pair(&named("turned"), Dropped, product(turned([150, 200, 37]), f32, f32)),
        TURNED_HALVES.pair(&named("turned_halves"), Stored, product(turned([152, 200, 40]), bf16, bf16)),
        SCORES.pair(&named("scores"), Dropped, product(heads(), f64, f64)),
        CHANNELS.pair(&named("channels"), Dropped, |name| convolved(name, 1, DType::F32, [1, 1, 1], StoreMode::Assign)),
    ]
}

#[test]
fn products_with_tails() {
    let pairs = pairs("one");
    let launches: Vec<usize> = pairs.iter().map(|pair| pair.whole.source.launches.len()).collect();
    assert_eq!(launches, [1, 1, 1, 2, 2, 1, 1, 1, 1], "some of parts");
    let vector = |pair: &Pair| {
        let (_, behind) =
            pair.whole.source.text.split_once("IN_PAIRS = false;\n    static constexpr int VECTOR = ").expect("a tail");
        behind[..1].to_owned()
    };
    assert_eq!(pairs.iter().map(vector).collect::<String>(), "481212811", "elements at once");
    check_equal("products_with_tails", &pairs.iter().map(|pair| (&pair.whole, vec![&pair.apart])).collect::<Vec<_>>());
}

/// What stays apart: sums over rows, an operand that is read at two places, one that lies across, a product that adds to what is there.
#[test]
fn what_is_no_tail() {
    let product = |mode| multiplied("apart_product", &plain([40, 64, 30], false), types(DType::F32, DType::F32, mode)).source;
    let tail = |mode, kernel: &str, sizes: &[&[u64]]| {
        let (_, nest, _) = bound(kernel, sizes);
        whole(&product(mode), &Source::new(&nest, "apart_nest").expect("a source"), (0, Beside::Dropped), "apart").is_some()
    };
    let square: [&[u64]; 2] = [&[40, 64], &[40, 64]];
    let doubled = "(x0: f32[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)\n  y0[i, j] = x0[i, j] * 2.0:f32";
    assert!(tail(StoreMode::Assign, doubled, &square), "the control");
    assert!(!tail(StoreMode::Accumulate, doubled, &square));
    let normed =
        "(x0: f32[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i)\n  v0 = sum j: x0[i, j]\n  for j: y0[i, j] = x0[i, j] / v0";
    assert!(!tail(StoreMode::Assign, normed, &square));
    let shifted =
        "(x0: f32[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)\n  y0[i, j] = x0[i, j] + x0[i, {63:i64 - position(j)}]";
    assert!(!tail(StoreMode::Assign, shifted, &square));
    let across = "(x0: f32[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)\n  y0[j, i] = x0[i, j]";
    assert!(!tail(StoreMode::Assign, across, &[&[40, 64], &[64, 40]]));
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (
            Bug::NoBarrier,
            0,
            "            __syncthreads();\n            through<V, Out, ROWS, TILE, THREADS, APART>",
            "            through<V, Out, ROWS, TILE, THREADS, APART>",
        ),
        (Bug::NoBarrier, 0, "++pass) {\n            __syncthreads();", "++pass) {"),
        (
            Bug::Index,
            0,
            "tile.m + pass * ROWS, tile.n);\n        }\n    } else {\n        const I first_m",
            "tile.m, tile.n);\n        }\n    } else {\n        const I first_m",
        ),
        (
            Bug::NoBarrier,
            2,
            "            __syncthreads();\n            through<V, Out, ROWS, TILE, THREADS, TILE + PACK>",
            "            through<V, Out, ROWS, TILE, THREADS, TILE + PACK>",
        ),
        (Bug::OutOfBounds, 2, "m + row >= V::M || n + column >= V::N", "n + column >= V::N"),
        (Bug::Uninitialised, 2, "if (i / PACK != pass) continue;", "if (i / PACK != pass || i == 1) continue;"),
        (Bug::MissingPart, 3, "part < PARTS", "part + 1 < PARTS"),
        (Bug::Tail, 3, "if (first >= all) return;", "if (first + VECTOR >= all) return;"),
        (Bug::Index, 5, "(row + (Tail::ALONG_N ? 0 : v)) * APART", "row * APART"),
    ];
    let one = |(n, (kind, which, from, to)): (usize, (Bug, usize, &'static str, &'static str))| {
        let pair = pairs(&format!("planted{n}")).into_iter().nth(which).expect("one of them");
        Planted { kind, job: pair.whole, from, to }
    };
    bugs.into_iter().enumerate().map(one).collect()
}

#[test]
fn planted_bugs_of_tails() {
    check_planted("planted_bugs_of_tails", planted(), vec![pairs("sound").swap_remove(0).whole]);
}
