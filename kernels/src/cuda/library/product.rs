//! Matrix products and convolutions: one template (`product.cuh`) and, for each instruction, the view through which it reads.
//!
//! A dot's view is a sum of strides by the digits of m, n and k. A convolution is the same with one condition more: the operand that
//! windows move through is zero where they leave it (implicit GEMM: nothing is copied).

use super::gemm::{Gemm, Plain as Matrices};
use super::{THREADS, Terms, entry, entry_of, source};
use crate::cuda::emit::stored;
use crate::cuda::emit::tail::Pointwise;
use crate::cuda::group::Argument;
use crate::cuda::mapping::is_narrow;
use crate::cuda::{Meaning, Source, arguments};
use crate::library::convolution::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use crate::library::matmul::Factor;
use crate::tile::{Array, Nest};
use dcc_program::kernel::StoreMode;
use dcc_program::types::DType;
use std::cmp::Reverse;
use std::fmt::Write;
use std::sync::Arc;

const TEXT: [&str; 2] = [include_str!("tensor.cuh"), include_str!("product.cuh")];

/// Blocks that fill the GPUs of today, and no more parts than keep the workspace small.
const BLOCKS: usize = 264;
const PARTS: usize = 32;
/// Fewest steps of a part.
const STEPS: usize = 256;
/// Threads that add up parts, of which each has several sums only where there are more.
const MANY: usize = 1 << 12;

/// Operands, result and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    pub operands: DType,
    pub result: DType,
    pub mode: StoreMode,
}

/// One digit of m, n, k or the batch: how many it counts to, and its stride in lhs, rhs and out, 0 where that lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digit {
    size: usize,
    strides: [usize; 3],
    /// The window it moves in, and as what.
    window: Option<(usize, usize)>,
}

/// What becomes of a product's result beside its tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Beside {
    /// It is stored, for others.
    Stored,
    /// The tail alone has it.
    Dropped,
}

impl Beside {
    /// Operands of the product, of which the result is the last, that it has with its tail.
    pub fn operands(self) -> usize {
        if self == Beside::Stored { 3 } else { 2 }
    }
}

/// A product or convolution, for which there can be several texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    view: View,
    types: Types,
}

/// A product as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct View {
    /// Of the batch, m, n and k, slowest first.
    groups: [Vec<Digit>; 4],
    windows: Vec<Spatial>,
    /// The operand (0 or 1) or result (2) that windows move through, and its role.
    moved: Option<(usize, usize)>,
    bytes: [usize; 3],
}

const BATCH: usize = 0;
const ROWS: usize = 1;
const COLUMNS: usize = 2;
const SUMS: usize = 3;

/// out = lhs . rhs, or out += lhs . rhs. `elements`: of lhs, rhs and out. Errors: a product that the device does not have.
pub fn dot(factors: &[Factor], types: Types, elements: [usize; 3], name: &str) -> Result<Source, String> {
    let digit = |f: &Factor| {
        let strides = [f.lhs, f.rhs, f.out];
        (strides.map(|s| s.is_some()), Digit { size: f.size, strides: strides.map(|s| s.unwrap_or(0)), window: None })
    };
    let view = View::new(factors.iter().map(digit), vec![], None, elements, types)?;
    Product { view, types }.source(name)
}

/// result = convolution(a, b), or +=. `elements`: of a, b and the result. Errors: as `dot`.
pub fn convolution(
    (form, plain, spatial): (Form, &[Plain], &[Spatial]),
    types: Types,
    elements: [usize; 3],
    name: &str,
) -> Result<Source, String> {
    // Roles in the order lhs, rhs, out.
    let roles = [form.operands[0], form.operands[1], form.result];
    let place = |role: usize| roles.iter().position(|r| *r == role).expect("each tensor has a role");
    let plains = plain.iter().map(|f| {
        let strides = roles.map(|role| f.strides[role]);
        (strides.map(|s| s.is_some()), Digit { size: f.size, strides: strides.map(|s| s.unwrap_or(0)), window: None })
    });
    // Of each window the two that are not the image's count; for the image's gradient, image and tap.
    let counted = if form.result == IMAGE { [IMAGE, KERNEL] } else { [OUTPUT, KERNEL] };
    let moves = spatial.iter().enumerate().flat_map(|(w, s)| {
        counted.map(|role| {
            let mut strides = [0; 3];
            strides[place(role)] = s.strides[role];
            let mut there = [false; 3];
            there[place(role)] = true;
            // The operand that is moved through has both.
            there[place(if form.result == IMAGE { OUTPUT } else { IMAGE })] = true;
            (there, Digit { size: s.sizes[role], strides, window: Some((w, role)) })
        })
    });
    let through = if form.result == IMAGE { OUTPUT } else { IMAGE };
    let view = View::new(plains.chain(moves), spatial.to_vec(), Some((place(through), through)), elements, types)?;
    Product { view, types }.source(name)
}

impl View {
    fn new(
        digits: impl Iterator<Item = ([bool; 3], Digit)>,
        windows: Vec<Spatial>,
        moved: Option<(usize, usize)>,
        elements: [usize; 3],
        types: Types,
    ) -> Result<View, String> {
        let mut groups: [Vec<Digit>; 4] = Default::default();
        for (there, digit) in digits {
            let group = match there {
                [true, true, true] => BATCH,
                [true, false, true] => ROWS,
                [false, true, true] => COLUMNS,
                [true, true, false] => SUMS,
                _ => return Err("a product that sums over a factor of one operand".into()),
            };
            groups[group].push(digit);
        }
        // Neighbours in memory are neighbours in the count.
        for (group, key) in [(BATCH, 2), (ROWS, 2), (COLUMNS, 2), (SUMS, 1)] {
            groups[group].sort_by_key(|digit| std::cmp::Reverse(digit.strides[key]));
            merge(&mut groups[group]);
        }
        let [lhs, rhs, out] = elements;
        let (operand, result) = (types.operands.bytes() as usize, types.result.bytes() as usize);
        Ok(View { groups, windows, moved, bytes: [lhs * operand, rhs * operand, out * result] })
    }

    fn size(&self, group: usize) -> usize {
        self.groups[group].iter().map(|digit| digit.size).product()
    }

    /// The same where every group is one digit, and nothing is moved through.
    fn plain(&self) -> Option<Matrices> {
        if self.moved.is_some() || self.groups.iter().any(|digits| digits.len() > 1) {
            return None;
        }
        let stride = |operand: usize, group: usize| self.groups[group].first().map_or(0, |digit| digit.strides[operand]);
        let strides = |operand: usize, groups: [usize; 3]| groups.map(|group| stride(operand, group));
        let [batch, m, n, k] = [BATCH, ROWS, COLUMNS, SUMS].map(|group| self.size(group));
        let (lhs, rhs) = (strides(0, [BATCH, ROWS, SUMS]), strides(1, [BATCH, SUMS, COLUMNS]));
        Some(Matrices { batch, m, n, k, lhs, rhs, out: strides(2, [BATCH, ROWS, COLUMNS]) })
    }

    /// `most`, if so many elements of an operand lie side by side along `group` wherever one of them is read, and begin at a multiple of it;
    /// else 1.
    fn pack(&self, operand: usize, group: usize, most: usize) -> usize {
        let moved = self.moved.is_some_and(|(place, _)| place == operand);
        let fastest = self.groups[group].iter().rposition(|digit| digit.size > 1);
        let even = |(g, i, digit): (usize, usize, &Digit)| match g == group && Some(i) == fastest {
            true => digit.strides[operand] == 1 && digit.size.is_multiple_of(most),
            false => digit.size == 1 || digit.strides[operand].is_multiple_of(most),
        };
        let all = self.groups.iter().enumerate().flat_map(|(g, digits)| digits.iter().enumerate().map(move |(i, d)| (g, i, d)));
        let evenly = fastest.is_some() && all.into_iter().all(even);
        if evenly && !moved { most } else { 1 }
    }

    /// The least step in memory of an operand along a group; of equal ones, the one that is less goes on for longer.
    fn along(&self, operand: usize, group: usize) -> (usize, Reverse<usize>) {
        let steps = self.groups[group].iter().filter(|digit| digit.size > 1).map(|digit| {
            let step = match digit.window {
                Some((w, _)) if self.moved.is_some_and(|(place, _)| place == operand) => {
                    self.windows[w].strides[self.moved.expect("it is moved").1]
                }
                _ => digit.strides[operand],
            };
            (step, Reverse(digit.size))
        });
        steps.filter(|(step, _)| *step > 0).min().unwrap_or((usize::MAX, Reverse(0)))
    }

    /// The view as a C++ type.
    fn text(&self, name: &str) -> String {
        let most =
            self.bytes.iter().max().copied().unwrap_or(0).max(self.size(BATCH) * self.size(ROWS).max(self.size(COLUMNS)));
        let index = if is_narrow(most) { "int" } else { "long long" };
        let [batch, m, n, k] = [BATCH, ROWS, COLUMNS, SUMS].map(|group| self.size(group));
        let mut text = format!("struct View_{name} {{\n    typedef {index} Index;\n");
        let _ = writeln!(text, "    static const Index BATCH = {batch}, M = {m}, N = {n}, K = {k};");
        for (operand, (what, names)) in [("lhs", ["b", "m", "", "k"]), ("rhs", ["b", "", "n", "k"])].into_iter().enumerate() {
            let order = if operand == 0 { "Index b, Index m, Index k" } else { "Index b, Index k, Index n" };
            let _ = writeln!(text, "    __device__ static bool {what}({order}, Index& at) {{");
            let mut terms = self.terms(operand, names);
            let windowed = self.moved.is_some_and(|(place, _)| place == operand);
            let conditions = if windowed { self.window_terms(names, &mut terms, &mut text) } else { vec![] };
            let _ = writeln!(text, "        at = {};", sum(&terms));
            let inside = if conditions.is_empty() { "true".to_owned() } else { conditions.join(" && ") };
            let _ = writeln!(text, "        return {inside};\n    }}");
        }
        text += "    __device__ static Index out(Index b, Index m, Index n) {\n";
        let terms = self.terms(2, ["b", "m", "n", ""]);
        let _ = writeln!(text, "        return {};\n    }}\n}};", sum(&terms));
        text
    }

    /// The digits of the groups that have a name, times their strides in an operand.
    fn terms(&self, operand: usize, names: [&str; 4]) -> Vec<String> {
        let mut terms = Vec::new();
        for (group, name) in names.into_iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            for (digit, value) in digits(&self.groups[group], name) {
                if digit.strides[operand] != 0 && digit.size > 1 {
                    terms.push(times(&value, digit.strides[operand]));
                }
            }
        }
        terms
    }

    /// What windows add to the place in the operand that they move through, and the conditions under which that is inside of it.
    fn window_terms(&self, names: [&str; 4], terms: &mut Vec<String>, text: &mut String) -> Vec<String> {
        let Some((_, through)) = self.moved else { return vec![] };
        let mut conditions = Vec::new();
        for (w, window) in self.windows.iter().enumerate() {
            let find = |role: usize| {
                let named = names.into_iter().enumerate().filter(|(_, name)| !name.is_empty());
                let mut all = named.flat_map(|(group, name)| digits(&self.groups[group], name));
                all.find(|(digit, _)| digit.window == Some((w, role))).map_or("0".to_owned(), |found| found.1)
            };
            let (stride, dilation, pad) = (window.stride, window.dilation, window.pad);
            let size = window.sizes[through];
            if through == IMAGE {
                let _ = writeln!(
                    text,
                    "        const Index x{w} = ({}) * {stride} + ({}) * {dilation} - ({pad});",
                    find(OUTPUT),
                    find(KERNEL)
                );
            } else {
                // image = stride · output + dilation · tap − pad, for the output.
                let _ = writeln!(
                    text,
                    "        const Index s{w} = ({}) - ({}) * {dilation} + ({pad}), x{w} = s{w} / {stride};",
                    find(IMAGE),
                    find(KERNEL)
                );
                conditions.push(format!("s{w} >= 0 && s{w} % {stride} == 0"));
            }
            conditions.push(format!("x{w} >= 0 && x{w} < {size}"));
            terms.push(times(&format!("x{w}"), window.strides[through]));
        }
        conditions
    }
}

/// What becomes of the sums.
struct Out {
    /// `Out` of `product.cuh`, and what it is made of.
    ty: String,
    fields: String,
    /// Its own text, where it has one.
    text: String,
    /// What entries get for it: pointers, and behind the workspace numbers.
    pointers: Vec<String>,
    numbers: Vec<String>,
    /// Sums that it takes at once.
    vector: usize,
}

impl Product {
    pub fn types(&self) -> &Types {
        &self.types
    }

    /// Multiplications of one run.
    pub fn multiplications(&self) -> usize {
        [BATCH, ROWS, COLUMNS, SUMS].map(|group| self.view.size(group)).iter().product()
    }

    /// The product alone.
    pub fn source(&self, name: &str) -> Result<Source, String> {
        let Product { view, types } = self;
        let result = stored(types.result);
        let pairs = types.operands.bytes() == 2 && view.pack(2, COLUMNS, 2) == 2;
        let out = Out {
            ty: stored_as(types.result, types.mode, pairs),
            fields: "c".to_owned(),
            text: String::new(),
            pointers: vec![format!("{result}* c")],
            numbers: Vec::new(),
            vector: 1,
        };
        let terms = view.plain().and_then(|plain| Gemm::new(&plain, types)).map(Terms::Product);
        let source = self.written(&out, view.bytes.to_vec(), name)?;
        Ok(Source { terms, meaning: Meaning::Product(Arc::new(self.clone())), ..source })
    }

    /// The product with a tail: its result is rounded as it would be stored and goes through the statements of `nest`, which reads it as input
    /// `input`. Operands are lhs, rhs, the result if it is stored too, and the nest's others. `None`: the nest does more than that, or its
    /// threads had better lie otherwise. Errors: more blocks than a grid has.
    pub fn with_tail(&self, nest: &Nest, input: usize, beside: Beside, name: &str) -> Result<Option<Source>, String> {
        let Product { view, types } = self;
        let nest = nest.clone().simplified();
        let Some(tail) = Pointwise::new(&nest, input) else { return Ok(None) };
        let points: usize = [BATCH, ROWS, COLUMNS].map(|group| view.size(group)).iter().product();
        let bytes = |array: &Array| array.block.iter().product::<usize>() * array.dtype.bytes() as usize;
        let same = (tail.points(), tail.array().dtype, bytes(tail.array())) == (points, types.result, view.bytes[2]);
        if !same || points == 0 || types.mode != StoreMode::Assign {
            return Ok(None);
        }
        let along_n = view.along(2, COLUMNS) <= view.along(2, ROWS);
        let group = if along_n { COLUMNS } else { ROWS };
        let fits = |vector: &usize| *vector <= 1 || view.pack(2, group, *vector) == *vector;
        // Few sums of parts want many threads.
        let most = if self.parts() > 1 { (points / MANY).clamp(1, tail.vector()) } else { tail.vector() };
        let vector = (0..).map(|shift| (tail.vector() >> shift).max(1)).find(|vector| *vector <= most && fits(vector));
        let vector = vector.expect("one fits");
        let (mut body, parameters) = tail.text(vector);
        let parameters: Vec<usize> = parameters.into_iter().collect();
        let declared = |arguments: Vec<(Argument, String, String)>| -> Vec<[String; 2]> {
            arguments.into_iter().map(|(_, ty, name)| [ty, name]).collect()
        };
        let other = |argument: &(Argument, String, String)| argument.0 != Argument::Operand(input);
        let mut pointers = declared(arguments(&nest, &[], false).into_iter().filter(other).collect());
        if beside == Beside::Stored {
            let result = stored(types.result);
            pointers.insert(0, [format!("{result}*"), "c".to_owned()]);
            body = format!(
                "        pack<{result}, {vector}> stored;\n        #pragma unroll\n        for (int v = 0; v < {vector}; ++v) stored.x[v] = \
                 narrow<{result}>(sum[v]);\n        *(pack<{result}, {vector}>*)(c + at) = stored;\n{body}"
            );
        }
        let all = arguments(&nest, &parameters, false);
        let numbers = declared(all.into_iter().filter(|argument| matches!(argument.0, Argument::Parameter(_))).collect());
        let fields: String = pointers.iter().chain(&numbers).map(|[ty, name]| format!("    {ty} {name};\n")).collect();
        let names: Vec<&str> = pointers.iter().chain(&numbers).map(|[_, name]| name.as_str()).collect();
        let words = |all: &[[String; 2]]| all.iter().map(|[ty, name]| format!("{ty} {name}")).collect();
        let out = Out {
            ty: format!("Tail_{name}"),
            fields: names.join(", "),
            text: format!(
                "struct Tail_{name} {{\n    static constexpr bool IS_TAIL = true, ALONG_N = {along_n}, IN_PAIRS = false;\n    static \
                 constexpr int VECTOR = {vector};\n{fields}    __device__ __forceinline__ void operator()(const \
                 View_{name}::Index at, const {} (&sum)[{vector}]) const {{\n{body}    }}\n}};\n",
                self.sums()?
            ),
            pointers: words(&pointers),
            numbers: words(&numbers),
            vector,
        };
        let others = nest.inputs.iter().enumerate().filter(|(n, _)| *n != input).map(|(_, array)| array);
        let others = others.chain(&nest.outputs).map(bytes);
        let own = &view.bytes[..beside.operands()];
        let source = self.written(&out, own.iter().copied().chain(others).collect(), name)?;
        Ok(Some(Source { parameters, ..source }))
    }

    /// The C++ type of sums. Errors: of a dtype that has none.
    fn sums(&self) -> Result<&'static str, String> {
        match self.types.operands {
            DType::F64 => Ok("double"),
            DType::F32 | DType::F16 | DType::BF16 => Ok("float"),
            other => Err(format!("no matrix product of {} on this device", other.name())),
        }
    }

    /// Elements of a block along m and along n.
    fn tile(&self) -> usize {
        let [m, n] = [ROWS, COLUMNS].map(|group| self.view.size(group));
        let bytes = self.types.operands.bytes();
        if bytes == 2 || m.min(n) > 64 && bytes == 4 { 128 } else { 64 }
    }

    fn tiles(&self) -> usize {
        let [batch, m, n] = [BATCH, ROWS, COLUMNS].map(|group| self.view.size(group));
        m.div_ceil(self.tile()) * n.div_ceil(self.tile()) * batch
    }

    /// Parts of each sum.
    fn parts(&self) -> usize {
        (BLOCKS / self.tiles().max(1)).min(self.view.size(SUMS) / STEPS).clamp(1, PARTS)
    }

    fn written(&self, out: &Out, operand_bytes: Vec<usize>, name: &str) -> Result<Source, String> {
        let Product { view, types } = self;
        let halves = types.operands.bytes() == 2;
        let sums = self.sums()?;
        let [batch, m, n] = [BATCH, ROWS, COLUMNS].map(|group| view.size(group));
        let (tile, tiles, parts) = (self.tile(), self.tiles(), self.parts());
        let operand = stored(types.operands);
        let (along_k, along_n) = (view.along(0, SUMS) <= view.along(0, ROWS), view.along(1, COLUMNS) <= view.along(1, SUMS));
        let packs = [view.pack(0, if along_k { SUMS } else { ROWS }, 8), view.pack(1, if along_n { COLUMNS } else { SUMS }, 8)];
        let Out { ty, fields, pointers, numbers, vector, .. } = out;
        // Parts of sums are nobody's result.
        let first = if parts > 1 { stored_as(types.result, StoreMode::Assign, false) } else { ty.clone() };
        let call = match halves {
            true => {
                format!("halves::product<View_{name}, {operand}, {first}, {along_k}, {along_n}, {}, {}>", packs[0], packs[1])
            }
            false => format!(
                "product<View_{name}, {operand}, {operand}, {first}, {sums}, {tile}, {}, {along_k}, {along_n}>",
                tile / 16
            ),
        };
        let workspace = if parts > 1 { vec![format!("{sums}* workspace")] } else { Vec::new() };
        let operands = ["a", "b"].map(|name| format!("const {operand}* {name}"));
        let arguments = [&operands[..], pointers, &workspace, numbers].concat().join(", ");
        let body = match parts {
            1 => format!("    const {ty} out{{{fields}}};\n    {call}(a, b, out, ({sums}*)0);\n"),
            _ => format!("    {call}(a, b, {first}{{0}}, workspace);\n"),
        };
        let shared = if halves { shared(along_k) + shared(!along_n) } else { 0 };
        // What goes through registers takes those of a second block.
        let resident = if halves && packs == [8, 8] { 2 } else { 1 };
        let mut entries = vec![entry_of(name, &arguments, &body, ([tiles, parts], THREADS, shared), resident)?];
        if parts > 1 {
            let body = format!(
                "    const {ty} out{{{fields}}};\n    sum_of_parts<View_{name}, {ty}, {sums}, {parts}>(out, workspace);\n"
            );
            let blocks = (batch * m * n / vector).div_ceil(THREADS);
            entries.push(entry(&format!("{name}_sum"), &arguments, &body, ([blocks, 1], THREADS, 0))?);
        }
        let bytes = if sums == "double" { 8 } else { 4 };
        let workspace = if parts > 1 { parts * batch * m * n * bytes } else { 0 };
        let text = TEXT.concat() + &view.text(name) + &out.text;
        Ok(source(text, entries, workspace, operand_bytes))
    }
}

/// The `Out` that stores a result, two elements at a time where they lie in pairs.
fn stored_as(dtype: DType, mode: StoreMode, pairs: bool) -> String {
    format!("Stored<{}, {}, {pairs}>", stored(dtype), mode == StoreMode::Accumulate)
}

/// Bytes of shared memory for the tiles of an operand of halves; see `Tiles` in `product.cuh`.
fn shared(along_k: bool) -> usize {
    let (tile, step, stages) = (128, 32, 3);
    let (rows, width) = if along_k { (tile, step) } else { (step, tile) };
    stages * rows * (width + 8) * 2
}

/// Each digit of a group and its value, of the number `name`.
fn digits<'a>(group: &'a [Digit], name: &str) -> Vec<(&'a Digit, String)> {
    let mut inner = 1;
    let mut all = Vec::new();
    for (place, digit) in group.iter().enumerate().rev() {
        let shifted = if inner == 1 { name.to_owned() } else { format!("{name} / {inner}") };
        let value = if place == 0 { shifted } else { format!("{shifted} % {}", digit.size) };
        all.push((digit, value));
        inner *= digit.size;
    }
    all
}

/// Makes one of neighbouring digits that every operand holds as one.
fn merge(digits: &mut Vec<Digit>) {
    digits.retain(|digit| digit.size != 1 || digit.window.is_some());
    let mut at = 0;
    while at + 1 < digits.len() {
        let (major, minor) = (digits[at], digits[at + 1]);
        let dense = (0..3).all(|i| major.strides[i] == minor.strides[i] * minor.size);
        if dense && major.window.is_none() && minor.window.is_none() {
            digits[at] = Digit { size: major.size * minor.size, ..minor };
            digits.remove(at + 1);
        } else {
            at += 1;
        }
    }
}

fn times(value: &str, stride: usize) -> String {
    if stride == 1 { value.to_owned() } else { format!("({value}) * {stride}") }
}

fn sum(terms: &[String]) -> String {
    if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }
}
