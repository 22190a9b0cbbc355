//! What ranks on GPUs move between each other, for any sizes: copies of strided pieces, and reductions over the memory of all members in
//! the order of their numbers. Every member reads its peers' memory and writes its own, so that nothing is added in an order of chance.

use super::emit::stored;
use super::{Launch, Source};

use dcc_program::types::{DType, Reduce};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Blocks along x at most: then each goes on through the rest.
const BLOCKS: usize = 1024;
/// Bytes that a thread moves at once where all addresses and strides are multiples of them.
const WIDE: usize = 16;

/// A reduction over the members of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reduction {
    pub reduce: Reduce,
    pub dtype: DType,
    pub members: usize,
}

/// An entry to launch, and in how many bytes it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub entry: usize,
    pub unit: usize,
}

/// Entries for any sizes: who launches one chooses its blocks.
fn source(text: String, entries: &[String]) -> Source {
    let launch = |entry: &String| Launch { entry: entry.clone(), blocks: [0; 2], threads: THREADS as u32, shared: 0 };
    let launches = entries.iter().map(launch).collect();
    Source { text, launches, ..Source::default() }
}

/// Blocks for `outer` pieces of `units`.
pub fn blocks(units: usize, outer: usize) -> [u32; 2] {
    [units.div_ceil(THREADS).clamp(1, BLOCKS) as u32, outer.clamp(1, usize::from(u16::MAX)) as u32]
}

fn entry(name: &str, arguments: &str, body: &str) -> String {
    format!("extern \"C\" __global__ void __launch_bounds__({THREADS})\n{name}({arguments}) {{\n{body}}}\n")
}

impl Reduction {
    fn units(self) -> [usize; 2] {
        let element = self.dtype.bytes() as usize;
        [WIDE.max(element), element]
    }

    fn entries(self) -> [String; 2] {
        let Reduction { reduce, dtype, members } = self;
        ["wide", "plain"].map(|kind| format!("{}_{}_{members}_{kind}", reduce.name(), dtype.name()))
    }

    /// The entry for addresses and strides of which all are multiples of elements.
    pub fn choose(self, multiples: &[usize]) -> Choice {
        choose(&self.units(), multiples)
    }

    /// Its entries are those that `choose` numbers. Arguments, 8 bytes each: target, pieces, units of a piece, strides in units of sources
    /// and target, the sources.
    pub fn source(self) -> Source {
        let ty = stored(self.dtype);
        let element = self.dtype.bytes() as usize;
        let entries = self.entries().into_iter().zip(self.units());
        let entry = |(name, unit): (String, usize)| {
            let count = unit / element;
            let unit = format!("pack<{ty}, {count}>");
            let sources: Vec<String> = (0..self.members).map(|n| format!("const {unit}* x{n}")).collect();
            let arguments = format!(
                "{unit}* y, long long outer, long long n, long long stride, long long to_stride, {}",
                sources.join(", ")
            );
            let mut steps = String::new();
            for n in 1..self.members {
                steps += &format!("            const {unit} next{n} = x{n}[at];\n");
            }
            for n in 1..self.members {
                let combined = self.combined("sum.x[i]", &format!("next{n}.x[i]"));
                steps += &format!("#pragma unroll\n            for (int i = 0; i < {count}; ++i) sum.x[i] = {combined};\n");
            }
            let body = format!(
                "    for (long long o = blockIdx.y; o < outer; o += gridDim.y)\n        for (long long i = (long long)blockIdx.x \
                 * {THREADS} + threadIdx.x; i < n; i += (long long)gridDim.x * {THREADS}) {{\n            const long long at = o * \
                 stride + i;\n            {unit} sum = x0[at];\n{steps}            y[o * to_stride + i] = sum;\n        }}\n"
            );
            self::entry(&name, &arguments, &body)
        };
        source(entries.map(entry).collect(), &self.entries())
    }

    /// As on the CPU: half floats are rounded after every addition, integers wrap, a bool sum is `or`, a NaN stays.
    fn combined(self, x: &str, y: &str) -> String {
        let ty = stored(self.dtype);
        match (self.dtype, self.reduce) {
            (DType::Bool, Reduce::Sum | Reduce::Max) => format!("{x} || {y}"),
            (DType::Bool, Reduce::Prod | Reduce::Min) => format!("{x} && {y}"),
            (dtype, reduce) if dtype.is_float() => {
                let op = match reduce {
                    Reduce::Sum => "add",
                    Reduce::Prod => "mul",
                    Reduce::Max => "max",
                    Reduce::Min => "min",
                };
                format!("narrow<{ty}>(op::{op}(widen({x}), widen({y})))")
            }
            (_, Reduce::Sum) => format!("({ty})((unsigned long long){x} + (unsigned long long){y})"),
            (_, Reduce::Prod) => format!("({ty})((unsigned long long){x} * (unsigned long long){y})"),
            (_, Reduce::Max) => format!("{x} > {y} ? {x} : {y}"),
            (_, Reduce::Min) => format!("{x} < {y} ? {x} : {y}"),
        }
    }
}

/// What copies move at once, widest first: bytes, and the type.
pub(super) const UNITS: [(usize, &str); 5] =
    [(16, "pack<int, 4>"), (8, "pack<int, 2>"), (4, "int"), (2, "short"), (1, "unsigned char")];

/// The copy for addresses, strides and lengths that are these.
pub fn choose_copy(multiples: &[usize]) -> Choice {
    choose(&UNITS.map(|unit| unit.0), multiples)
}

/// Copies, whose entries are those that `choose_copy` numbers. Arguments, 8 bytes each: target, source, pieces in all, pieces of a row of
/// them, units of a piece, then strides in units: outer and inner of the source, outer and inner of the target.
pub fn copy_source() -> Source {
    let entry = |(bytes, unit): (usize, &str)| {
        let arguments = format!(
            "{unit}* y, const {unit}* x, long long pieces, long long rows, long long n, long long x_outer, long long x_row, \
             long long y_outer, long long y_row"
        );
        // A division of 64 bits takes longer than the memory.
        let body = format!(
            "    const long long all = pieces * n;\n    for (long long i = (long long)blockIdx.x * {THREADS} + threadIdx.x; i < all; i \
             += (long long)gridDim.x * {THREADS}) {{\n        long long piece, at, outer, row;\n        if (all >> 32 == 0) {{\n            \
             piece = (unsigned)i / (unsigned)n;\n            outer = (unsigned)piece / (unsigned)rows;\n        }} else {{\n            \
             piece = i / n;\n            outer = piece / rows;\n        }}\n        at = i - piece * n;\n        row = piece - outer * \
             rows;\n        y[outer * y_outer + row * y_row + at] = x[outer * x_outer + row * x_row + at];\n    }}\n"
        );
        self::entry(&format!("copy_{bytes}"), &arguments, &body)
    };
    source(UNITS.map(entry).concat(), &UNITS.map(|(bytes, _)| format!("copy_{bytes}")))
}

fn choose(units: &[usize], multiples: &[usize]) -> Choice {
    let fits = |unit: &usize| multiples.iter().all(|bytes| bytes.is_multiple_of(*unit));
    let entry = units.iter().position(fits).unwrap_or(units.len() - 1);
    Choice { entry, unit: units[entry] }
}
