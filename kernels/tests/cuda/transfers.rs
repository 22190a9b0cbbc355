//! What ranks move between each other: reductions of every type over several members, and copies of strided pieces.

use crate::emulation::{Expected, Job, check};
use crate::numbers::{encoded, numbers};
use dcc_kernels::cuda::transfer::{self, Choice, Reduction};
use dcc_kernels::cuda::{Launch, Source};
use dcc_program::types::{DType, Reduce};

/// A kernel of any sizes with these words behind its target, as one of fixed sizes: pointers begin `skip` bytes into their operands. Its
/// entries get names of their own: all jobs are one program.
fn called(source: &Source, choice: &Choice, name: &str, (words, skip): (&[usize], usize), blocks: [u32; 2]) -> Source {
    let old = source.launches[0].entry.split('_').next().expect("a name").to_owned() + "_";
    let rename = |text: &str| text.replace(&format!("\n{old}"), &format!("\n{name}_of_{old}"));
    let entry = rename(&format!("\n{}", source.launches[choice.entry].entry));
    let arity = source.text.split(')').nth(1).map_or(0, |first| first.matches('*').count());
    let any = format!("any_{name}");
    let pointers: Vec<String> = (0..arity).map(|n| format!("{any}{{p{n} + {skip}}}")).collect();
    let words = words.iter().map(|word| format!("{word}LL"));
    let (targets, sources) = pointers.split_at(if old == "copy_" { 2 } else { 1 });
    let given: Vec<String> = targets.iter().cloned().chain(words).chain(sources.iter().cloned()).collect();
    let declared: Vec<String> = (0..arity).map(|n| format!("char* p{n}")).collect();
    let text = format!(
        "{}struct {any} {{ char* at; template <class T> operator T*() const {{ return (T*)at; }} }};\nextern \"C\" __global__ void \
         {name}({}) {{ {}({}); }}\n",
        rename(&source.text),
        declared.join(", "),
        entry.trim(),
        given.join(", ")
    );
    let launch = Launch { entry: name.to_owned(), blocks, threads: transfer::THREADS as u32, shared: 0 };
    Source { text, launches: vec![launch], ..source.clone() }
}

/// Small values, of which sums and products of a few are exact in every type.
fn values(dtype: DType, count: usize, seed: usize) -> Vec<f64> {
    let small = |x: f64| match dtype {
        DType::Bool => f64::from(x > 0.0),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => (x.abs() * 1.5).round(),
        dtype if dtype.is_float() => (x * 8.0).round() / 4.0,
        _ => (x * 1.5).round(),
    };
    numbers(count, seed).into_iter().map(small).collect()
}

fn reduced(reduce: Reduce, dtype: DType, members: usize, own: usize) -> Job {
    let (outer, n, stride, to_stride) = (3, 37, 64, 48);
    let reduction = Reduction { reduce, dtype, members };
    let sources: Vec<Vec<f64>> = (0..members).map(|member| values(dtype, outer * stride, member + 1)).collect();
    let combine = |x: f64, y: f64| match (reduce, dtype) {
        (Reduce::Sum, DType::Bool) | (Reduce::Max, _) => x.max(y),
        (Reduce::Prod, DType::Bool) | (Reduce::Min, _) => x.min(y),
        (Reduce::Sum, _) => x + y,
        (Reduce::Prod, _) => x * y,
    };
    let mut result = values(dtype, outer * to_stride, 99);
    for o in 0..outer {
        for i in 0..n {
            let all = sources.iter().map(|source| source[o * stride + i]);
            result[o * to_stride + i] = all.reduce(combine).expect("members");
        }
    }
    let width = dtype.bytes() as usize;
    let choice = reduction.choose(&[n * width, stride * width, to_stride * width]);
    let unit = choice.unit / width;
    let name = format!("{}_{}_{members}_{own}", reduce.name(), dtype.name());
    let words = [outer, n / unit, stride / unit, to_stride / unit];
    let blocks = transfer::blocks(n / unit, outer);
    let source = called(&reduction.source(), &choice, &name, (&words, 0), blocks);
    let target = values(dtype, outer * to_stride, 99);
    let operands: Vec<Vec<u8>> = std::iter::once(&target).chain(&sources).map(|values| encoded(dtype, values)).collect();
    let operand_bytes = operands.iter().map(Vec::len).collect();
    Job {
        what: name,
        source: Source { operand_bytes, ..source },
        operands,
        expected: vec![Expected { operand: 0, dtype, values: result }],
    }
}

#[test]
fn reductions_of_every_type() {
    let mut jobs = Vec::new();
    for dtype in DType::ALL {
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod] {
            jobs.push(reduced(reduce, dtype, 2 + jobs.len() % 3, jobs.len()));
        }
    }
    check("reductions_of_every_type", &jobs);
}

/// `outer` times `rows` pieces of `bytes`, `skip` bytes into both operands.
fn copied(name: &str, [outer, rows, bytes, skip]: [usize; 4], from: [usize; 2], to: [usize; 2]) -> Job {
    let reach = |strides: [usize; 2]| skip + (outer - 1) * strides[0] + (rows - 1) * strides[1] + bytes;
    let source: Vec<f64> = (0..reach(from)).map(|i| (i * 7 % 251) as f64).collect();
    let mut target = vec![0.0; reach(to)];
    for o in 0..outer {
        for r in 0..rows {
            for b in 0..bytes {
                target[skip + o * to[0] + r * to[1] + b] = source[skip + o * from[0] + r * from[1] + b];
            }
        }
    }
    let choice = transfer::choose_copy(&[skip, bytes, from[0], from[1], to[0], to[1]]);
    let u = choice.unit;
    let words = [outer * rows, rows, bytes / u, from[0] / u, from[1] / u, to[0] / u, to[1] / u];
    let blocks = transfer::blocks(outer * rows * bytes / u, 1);
    let text = called(&transfer::copy_source(), &choice, name, (&words, skip), blocks);
    let byte = |values: &[f64]| encoded(DType::U8, values);
    let operands = vec![vec![0; target.len()], byte(&source)];
    let operand_bytes = operands.iter().map(Vec::len).collect();
    Job {
        what: format!("{name} by {u} bytes"),
        source: Source { operand_bytes, ..text },
        operands,
        expected: vec![Expected { operand: 0, dtype: DType::U8, values: target }],
    }
}

#[test]
fn copies_of_pieces() {
    let jobs = [
        copied("one", [1, 1, 4096, 0], [0, 0], [0, 0]),
        copied("rows", [1, 9, 48, 16], [0, 64], [0, 48]),
        copied("boxes", [5, 4, 24, 8], [200, 40], [160, 32]),
        copied("words", [3, 2, 12, 4], [100, 20], [60, 12]),
        copied("halves", [2, 7, 6, 2], [98, 14], [42, 6]),
        copied("bytes", [3, 3, 5, 1], [33, 11], [15, 5]),
    ];
    check("copies_of_pieces", &jobs);
}
