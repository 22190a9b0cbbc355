//! CUDA C++ of a mapped nest: indices, loops, values, stores.
//!
//! A value gets a name in the outermost scope where all that it depends on is known. Within a statement's loop a thread walks in steps of
//! `vector` elements: packs are loaded before the elements' own scope and stored behind it.

mod kept;
pub(super) mod tail;
mod tiles;
mod value;

use super::mapping::{Loops, Mapping, is_narrow};
use crate::library::vector::Ty;
use crate::tile::{Access, Nest, Typing, bit, defines, over_of, pass_of, reachable, value_of};
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode, VarId};
use dcc_program::types::{DType, Reduce};
use kept::Kept;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Steps of a long sum that are added up before they join the total, for accuracy.
const STRETCH: usize = 64;
/// Steps of a loop over single elements that are read together.
const UNROLLED: usize = 4;

/// Which of a kernel's entries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// All of it.
    Whole,
    /// One part of each reduction, into the workspace.
    Parts,
    /// All of it, with the reductions from the workspace.
    Finish,
}

#[derive(Default)]
struct Scope {
    values: BTreeMap<ExprId, String>,
    vars: BTreeMap<VarId, String>,
}

/// The elements that a thread takes side by side.
#[derive(Clone, Copy)]
struct Vector {
    dim: DimId,
    length: usize,
}

pub(super) struct Emitter<'a> {
    nest: &'a Nest,
    typing: &'a Typing,
    mapping: &'a Mapping,
    entry: Entry,
    text: String,
    indent: usize,
    /// Names of the local indices of dims that a loop or thread is at.
    index: Vec<Option<String>>,
    scopes: Vec<Scope>,
    vector: Option<Vector>,
    /// Names of packs: loads, and outputs to be stored.
    packs: BTreeMap<ExprId, String>,
    /// Where in shared memory loads are.
    tiles: BTreeMap<ExprId, String>,
    kept: BTreeMap<ExprId, Kept>,
    /// The statements by loops, and the loop that is at hand.
    passes: Vec<Vec<usize>>,
    pass: usize,
    /// Passes that keep nothing and read nothing that was kept.
    apart: BTreeSet<usize>,
    /// Whether there were more values to keep than registers.
    scarce: bool,
    /// The index of a step's first element in `kept`.
    keeping: Option<String>,
    /// Parameters in use.
    parameters: BTreeSet<usize>,
    names: usize,
    narrow_index: bool,
}

/// The text of an entry, which is at block `block` of its points (and piece `piece` of its sums), and the parameters it reads.
pub(super) fn emit(nest: &Nest, typing: &Typing, mapping: &Mapping, entry: Entry) -> (String, BTreeSet<usize>) {
    emit_by(nest, typing, mapping, entry, Emitter::body)
}

/// What `body` writes, and the parameters it reads.
fn emit_by<'a>(
    nest: &'a Nest,
    typing: &'a Typing,
    mapping: &'a Mapping,
    entry: Entry,
    body: impl FnOnce(&mut Emitter<'a>),
) -> (String, BTreeSet<usize>) {
    let elements = |array: &crate::tile::Array| array.block.iter().product::<usize>();
    let most = nest.inputs.iter().chain(&nest.outputs).map(elements).chain([mapping.points]).max().unwrap_or(0);
    let mut emitter = Emitter {
        nest,
        typing,
        mapping,
        entry,
        text: String::new(),
        indent: 1,
        index: vec![None; nest.extents.len()],
        scopes: vec![Scope::default()],
        vector: None,
        packs: BTreeMap::new(),
        tiles: BTreeMap::new(),
        kept: BTreeMap::new(),
        passes: Vec::new(),
        pass: 0,
        apart: BTreeSet::new(),
        scarce: false,
        keeping: None,
        parameters: BTreeSet::new(),
        names: 0,
        narrow_index: is_narrow(most),
    };
    body(&mut emitter);
    (emitter.text, emitter.parameters)
}

impl Emitter<'_> {
    fn line(&mut self, text: impl AsRef<str>) {
        let _ = writeln!(self.text, "{}{}", "    ".repeat(self.indent), text.as_ref());
    }

    fn open(&mut self, text: impl AsRef<str>) {
        self.line(format!("{} {{", text.as_ref()));
        self.indent += 1;
        self.scopes.push(Scope::default());
    }

    fn close(&mut self) {
        self.scopes.pop();
        self.indent -= 1;
        self.line("}");
    }

    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}{}", self.names - 1)
    }

    /// The type of indices into operands.
    fn index_type(&self) -> &'static str {
        if self.narrow_index { "int" } else { "long long" }
    }

    fn body(&mut self) {
        let Mapping { group, vector, points, .. } = *self.mapping;
        if let Some(across) = self.mapping.across {
            return self.tiled(across);
        }
        let i = self.index_type();
        let per_point = if group == 1 { vector } else { 1 };
        match group {
            1 => {
                self.line(format!("const {i} point = (({i})block * {} + threadIdx.x){};", super::mapping::BLOCK, times(vector)))
            }
            32 => {
                self.line(format!("const {i} point = ({i})block * {} + threadIdx.x / 32;", self.mapping.threads() / 32));
                self.line("const int lane = threadIdx.x % 32;");
            }
            _ => {
                self.line(format!("const {i} point = block;"));
                self.line("const int lane = threadIdx.x;");
            }
        }
        if self.mapping.blocks(self.nest) * (self.mapping.threads() / group) * per_point != points {
            self.line(format!("if (point >= {points}) return;"));
        }
        let outer = self.mapping.outer.clone();
        self.decode("point", &outer);
        let elementwise = (group == 1 && vector > 1).then(|| outer.last().copied().expect("vectors lie along a dim"));
        match elementwise {
            Some(dim) => self.elements(&(0..self.nest.kernel.body.len()).collect::<Vec<_>>(), Vector { dim, length: vector }),
            None => self.statements(),
        }
    }

    /// Names the local indices of `dims`, which `flat` counts through.
    fn decode(&mut self, flat: &str, dims: &[DimId]) {
        let i = self.index_type();
        let mut inner = 1;
        let all: usize = dims.iter().map(|dim| self.nest.extents[usize::from(dim.0)]).product();
        for dim in dims.iter().rev() {
            let extent = self.nest.extents[usize::from(dim.0)];
            let shifted = if inner == 1 { flat.to_owned() } else { format!("{flat} / {inner}") };
            let own = if extent == 1 {
                self.index[usize::from(dim.0)] = Some("0".to_owned());
                continue;
            } else if inner * extent == all {
                shifted
            } else {
                format!("{shifted} % {extent}")
            };
            let name = format!("i{}", dim.0);
            self.line(format!("const {i} {name} = {own};"));
            self.index[usize::from(dim.0)] = Some(name);
            inner *= extent;
        }
    }

    fn statements(&mut self) {
        self.passes = self.in_passes();
        for n in 0..self.passes.len() {
            self.pass = n;
            let pass = self.passes[n].clone();
            let is_sum = |j: &usize| matches!(self.nest.kernel.body[*j], Stmt::Reduce { .. });
            match (over_of(&self.nest.kernel.body[pass[0]]).is_empty(), self.entry) {
                (true, _) => self.single(pass[0]),
                (false, Entry::Finish) if pass.iter().any(is_sum) => {
                    let (reductions, stores): (Vec<usize>, _) = pass.into_iter().partition(is_sum);
                    reductions.iter().for_each(|j| self.gathered(*j));
                    self.looped(&stores);
                }
                (false, Entry::Parts) => self.looped(&pass.into_iter().filter(is_sum).collect::<Vec<_>>()),
                (false, _) => self.looped(&pass),
            }
        }
    }

    /// The entry's statements in their order, those of one loop together: what needs no loop comes as early as it can, so that loops that do
    /// not need each other are one.
    fn in_passes(&self) -> Vec<Vec<usize>> {
        let kernel = &self.nest.kernel;
        let (mut done, mut passes) = (vec![false; kernel.body.len()], Vec::new());
        for i in 0..kernel.body.len() {
            if done[i] || self.entry == Entry::Parts && !self.counts_for_parts(i) {
                continue;
            }
            let over = over_of(&kernel.body[i]);
            let pass = match over.is_empty() {
                true => vec![i],
                false => pass_of(kernel, i, &|j| over_of(&kernel.body[j]) == over, &|j| done[j]),
            };
            pass.iter().for_each(|j| done[*j] = true);
            passes.push(pass);
            for j in i + 1..kernel.body.len() {
                let is_let = matches!(kernel.body[j], Stmt::Let { .. });
                if is_let && !done[j] && self.entry != Entry::Parts && needs_only(kernel, j, &done) {
                    done[j] = true;
                    passes.push(vec![j]);
                }
            }
        }
        passes
    }

    /// Of the statements that the parts run: reductions over dims of their own, and what these read.
    fn counts_for_parts(&self, i: usize) -> bool {
        match &self.nest.kernel.body[i] {
            Stmt::Reduce { over, .. } => !over.is_empty(),
            Stmt::Let { .. } | Stmt::Store { .. } => false,
        }
    }

    /// A statement without dims of its own.
    fn single(&mut self, i: usize) {
        match &self.nest.kernel.body[i] {
            Stmt::Let { var, value } | Stmt::Reduce { var, value, .. } => {
                let value = self.eval(*value);
                self.define(*var, value);
            }
            Stmt::Store { output, index, value, mode, .. } => {
                let value = self.eval(*value);
                if self.mapping.group == 1 {
                    return self.store(*output, index, &value, *mode);
                }
                // It may lie where others of the point are still reading.
                self.line(if self.mapping.group > 32 { "__syncthreads();" } else { "__syncwarp();" });
                self.open("if (lane == 0)");
                self.store(*output, index, &value, *mode);
                self.close();
            }
        }
    }

    fn define(&mut self, var: VarId, name: String) {
        self.scopes.last_mut().expect("a scope is open").vars.insert(var, name);
    }

    /// Statements over the same dims, in one loop.
    fn looped(&mut self, pass: &[usize]) {
        let Some(first) = pass.first() else { return };
        let kernel = &self.nest.kernel;
        let loops = self.mapping.loops(self.nest, self.typing, over_of(&kernel.body[*first]));
        self.leave_kept(&loops);
        let roots: Vec<ExprId> = pass.iter().map(|j| value_of(&kernel.body[*j])).collect();
        self.prepare(&roots, self.known());
        let long = self.mapping.trips(loops.count / self.mapping.parts) > STRETCH;
        let mut totals = Vec::new();
        for j in pass {
            if let Stmt::Reduce { var, op, value, .. } = &kernel.body[*j] {
                let ty = self.typing.ty(*value);
                let (total, neutral) = (self.name("total"), neutral(*op, ty));
                self.line(format!("{} {total} = {neutral};", computed(ty)));
                let partial = (long && *op == Reduce::Sum && ty == Ty::F32).then(|| self.name("partial"));
                if let Some(partial) = &partial {
                    self.line(format!("float {partial} = 0.0f;"));
                }
                totals.push((*var, *op, ty, total, partial, *j));
            }
        }
        let into: BTreeMap<usize, String> =
            totals.iter().map(|(.., total, partial, j)| (*j, partial.clone().unwrap_or(total.clone()))).collect();
        self.loop_over(
            &loops,
            pass,
            &into,
            totals.iter().any(|t| t.4.is_some()).then(|| {
                let joins =
                    totals.iter().filter_map(|t| t.4.as_ref().map(|partial| format!("{} += {partial}, {partial} = 0.0f", t.3)));
                joins.collect::<Vec<_>>().join(", ")
            }),
        );
        for (var, op, ty, total, partial, j) in totals {
            if let Some(partial) = partial {
                self.line(format!("{total} += {partial};"));
            }
            if self.mapping.group > 1 {
                self.line(format!("{total} = together<{}, {}>({total});", self.mapping.group, functor(op)));
            }
            match self.entry {
                Entry::Parts => self.store_part(j, ty, &total),
                _ => self.define(var, total),
            }
        }
    }

    /// The loop itself: `into` has where reductions accumulate, `join` what happens after each stretch of steps.
    fn loop_over(&mut self, loops: &Loops, pass: &[usize], into: &BTreeMap<usize, String>, join: Option<String>) {
        let Mapping { group, vector, parts, .. } = *self.mapping;
        let (i, count) = (self.index_type(), loops.count);
        let keeps = self.mapping.keeps(count);
        let step = group * vector;
        let lane = if group == 1 { "0".to_owned() } else { format!("lane{}", times(vector)) };
        if keeps {
            let trips = self.mapping.trips(count);
            self.declare_kept(loops);
            let unrolled = self.keeps_any() || self.is_short(loops);
            self.line(if unrolled { "#pragma unroll" } else { "#pragma unroll 1" });
            self.open(format!("for (int trip = 0; trip < {trips}; ++trip)"));
            self.line(format!("const {i} t = {lane} + trip * {step};"));
            if !count.is_multiple_of(step) {
                self.line(format!("if (t >= {count}) break;"));
            }
            self.keeping = Some(format!("trip{}", times(vector)));
        } else if parts > 1 && self.entry == Entry::Parts {
            let chunk = count.div_ceil(parts).next_multiple_of(vector);
            self.line(format!("const {i} first = ({i})piece * {chunk};"));
            self.line(format!("const {i} end = first + {chunk} < {count} ? first + {chunk} : {count};"));
            self.open(format!("for ({i} t = first + {lane}; t < end; t += {step})"));
            self.join(join, &format!("(t - first) / {step}"));
        } else {
            // Single elements: what is read of several steps is under way together. Stores may be to what is read.
            let stores = pass.iter().any(|j| matches!(self.nest.kernel.body[*j], Stmt::Store { .. }));
            if vector == 1 && !stores {
                self.line(format!("#pragma unroll {UNROLLED}"));
            }
            self.open(format!("for ({i} t = {lane}; t < {count}; t += {step})"));
            self.join(join, &format!("t / {step}"));
        }
        self.decode("t", &loops.dims);
        let dim = *loops.dims.last().expect("a loop has dims");
        self.elements_into(pass, Vector { dim, length: vector }, into);
        self.keeping = None;
        self.close();
        loops.dims.iter().for_each(|dim| self.index[usize::from(dim.0)] = None);
    }

    fn join(&mut self, join: Option<String>, step: &str) {
        if let Some(join) = join {
            self.line(format!("if ({step} % {STRETCH} == {}) {join};", STRETCH - 1));
        }
    }

    fn elements(&mut self, pass: &[usize], vector: Vector) {
        self.elements_into(pass, vector, &BTreeMap::new());
    }

    /// The statements at the elements of one step: packs in, values, packs out.
    fn elements_into(&mut self, pass: &[usize], vector: Vector, into: &BTreeMap<usize, String>) {
        let (nest, body) = (self.nest, &self.nest.kernel.body);
        let roots: Vec<ExprId> = pass.iter().map(|j| value_of(&body[*j])).collect();
        if vector.length == 1 {
            self.prepare(&roots, self.known());
            self.at_element(pass, into, &BTreeMap::new());
            return;
        }
        let known = self.known() & !bit(vector.dim);
        self.prepare(&roots, known);
        self.load_packs(&roots, vector);
        let outputs = self.open_packs(pass, vector);
        let base = self.index[usize::from(vector.dim.0)].clone().expect("the step is at an index");
        let i = self.index_type();
        self.vector = Some(vector);
        self.line("#pragma unroll");
        self.open(format!("for (int v = 0; v < {}; ++v)", vector.length));
        let name = format!("{base}v");
        self.line(format!("const {i} {name} = {base} + v;"));
        self.index[usize::from(vector.dim.0)] = Some(name);
        self.at_element(pass, into, &outputs);
        self.close();
        self.vector = None;
        self.index[usize::from(vector.dim.0)] = Some(base);
        for (j, name) in &outputs {
            let Stmt::Store { output, index, .. } = &body[*j] else { continue };
            let at = self.offset(&nest.outputs[usize::from(*output)], index);
            let ty = stored(nest.outputs[usize::from(*output)].dtype);
            self.line(format!("*(pack<{ty}, {}>*)(y{output} + {at}) = {name};", vector.length));
        }
        self.packs.clear();
    }

    /// Everything at one element: all values, then what becomes of them, since outputs may lie where inputs do.
    fn at_element(&mut self, pass: &[usize], into: &BTreeMap<usize, String>, outputs: &BTreeMap<usize, String>) {
        let body = &self.nest.kernel.body;
        let mut values = Vec::new();
        for j in pass {
            let value = self.eval(value_of(&body[*j]));
            if let Stmt::Let { var, .. } = &body[*j] {
                self.define(*var, value.clone());
            }
            values.push(value);
        }
        for (j, value) in pass.iter().zip(values) {
            match &body[*j] {
                Stmt::Let { .. } => {}
                Stmt::Reduce { op, .. } => {
                    let total = &into[j];
                    self.line(format!("{total} = {}::of({total}, {value});", functor(*op)));
                }
                Stmt::Store { output, index, mode, .. } => match outputs.get(j) {
                    Some(pack) => {
                        let array = &self.nest.outputs[usize::from(*output)];
                        let (ty, place) = (stored(array.dtype), format!("{pack}.x[v]"));
                        let sum = accumulated(*mode, &place, &value);
                        self.line(format!("{place} = narrow<{ty}>({sum});"));
                    }
                    None => self.store(*output, index, &value, *mode),
                },
            }
        }
    }

    /// Loads, as packs, what lies side by side along the step.
    fn load_packs(&mut self, roots: &[ExprId], vector: Vector) {
        let nest = self.nest;
        for id in reachable(&nest.kernel, roots) {
            let Expr::Load { input, index, outside } = nest.kernel.get(id).clone() else { continue };
            let array = &nest.inputs[usize::from(input)];
            let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
            let strides = Access::new(nest, array, &index, outside).strides;
            let known = self.remembered(id).is_some() || self.tiles.contains_key(&id);
            if known || !plain || !super::mapping::is_even(&strides, vector.dim, vector.length) || !self.is_wanted(id, roots) {
                continue;
            }
            let (name, at, ty) = (self.name("in"), self.offset(array, &index), stored(array.dtype));
            let length = vector.length;
            self.line(format!("const pack<{ty}, {length}> {name} = *(const pack<{ty}, {length}>*)(x{input} + {at});"));
            self.packs.insert(id, name);
        }
    }

    /// Whether a load is needed for `roots`, where kept values are there.
    fn is_wanted(&self, load: ExprId, roots: &[ExprId]) -> bool {
        let mut stack = roots.to_vec();
        let mut seen = BTreeSet::new();
        while let Some(id) = stack.pop() {
            let filled = self.kept.get(&id).is_some_and(|kept| kept.filled);
            if id == load && !filled {
                return true;
            }
            if !filled && seen.insert(id) {
                stack.extend(crate::tile::children(self.nest.kernel.get(id)));
            }
        }
        false
    }

    /// Names packs for the stores that lie side by side along the step.
    fn open_packs(&mut self, pass: &[usize], vector: Vector) -> BTreeMap<usize, String> {
        let (nest, mut packs) = (self.nest, BTreeMap::new());
        for j in pass {
            let Stmt::Store { output, index, mode, .. } = &nest.kernel.body[*j] else { continue };
            let array = &nest.outputs[usize::from(*output)];
            let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
            let strides = Access::new(nest, array, index, Outside::Never).strides;
            if !plain || !super::mapping::is_even(&strides, vector.dim, vector.length) {
                continue;
            }
            let (name, ty, length) = (self.name("out"), stored(array.dtype), vector.length);
            let at = self.offset(array, index);
            self.line(match mode {
                StoreMode::Assign => format!("pack<{ty}, {length}> {name};"),
                StoreMode::Accumulate => {
                    format!("pack<{ty}, {length}> {name} = *(const pack<{ty}, {length}>*)(y{output} + {at});")
                }
            });
            packs.insert(*j, name);
        }
        packs
    }

    /// Writes one part of reduction `j`.
    fn store_part(&mut self, j: usize, ty: Ty, total: &str) {
        let place = self.part_place(j, "piece");
        let store = format!("*({}*)(workspace + {place}) = {total};", computed(ty));
        let guard = if self.mapping.group > 1 { "if (lane == 0) " } else { "" };
        self.line(format!("{guard}{store}"));
    }

    /// Index of a part in the workspace, in words of 8 bytes.
    fn part_place(&self, j: usize, part: &str) -> String {
        let before = |i: &usize| matches!(&self.nest.kernel.body[*i], Stmt::Reduce { over, .. } if !over.is_empty());
        let number = (0..j).filter(before).count();
        let Mapping { parts, points, .. } = *self.mapping;
        format!("{}LL + (long long)({part}) * {points} + point", number * parts * points)
    }

    /// A reduction's result from its parts, in order.
    fn gathered(&mut self, j: usize) {
        let Stmt::Reduce { var, op, value, .. } = &self.nest.kernel.body[j] else { return };
        let ty = self.typing.ty(*value);
        let (total, c) = (self.name("total"), computed(ty));
        self.line(format!("{c} {total} = {};", neutral(*op, ty)));
        let lane = if self.mapping.group == 1 { "0" } else { "lane" };
        let place = self.part_place(j, "part");
        // So many loads are on their way at once.
        self.line("#pragma unroll 8");
        self.line(format!("for (int part = {lane}; part < {}; part += {})", self.mapping.parts, self.mapping.group));
        self.line(format!("    {total} = {}::of({total}, *(const {c}*)(workspace + {place}));", functor(*op)));
        if self.mapping.group > 1 {
            self.line(format!("{total} = together<{}, {}>({total});", self.mapping.group, functor(*op)));
        }
        self.define(*var, total);
    }
}

/// Whether statement `i` needs no variable but those of statements that are `done`.
fn needs_only(kernel: &Kernel, i: usize, done: &[bool]) -> bool {
    let is_there = |var: &VarId| kernel.body.iter().zip(done).any(|(stmt, done)| *done && defines(stmt) == Some(*var));
    reachable(kernel, &[value_of(&kernel.body[i])])
        .into_iter()
        .all(|id| if let Expr::Var(var) = kernel.get(id) { is_there(var) } else { true })
}

fn times(n: usize) -> String {
    if n == 1 { String::new() } else { format!(" * {n}") }
}

/// What a store writes.
fn accumulated(mode: StoreMode, place: &str, value: &str) -> String {
    match mode {
        StoreMode::Assign => value.to_owned(),
        StoreMode::Accumulate => format!("op::add(widen({place}), {value})"),
    }
}

/// The C++ type that values are computed in.
pub(super) fn computed(ty: Ty) -> &'static str {
    match ty {
        Ty::F32 => "float",
        Ty::F64 => "double",
        Ty::I64 => "long long",
        Ty::Bool => "bool",
    }
}

/// The C++ type of elements in memory.
pub(super) fn stored(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        DType::U8 => "unsigned char",
        DType::I8 => "signed char",
        DType::U16 => "unsigned short",
        DType::I16 => "short",
        DType::U32 => "unsigned int",
        DType::I32 => "int",
        DType::U64 => "unsigned long long",
        DType::I64 => "long long",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}

fn functor(op: Reduce) -> &'static str {
    match op {
        Reduce::Sum => "Sum",
        Reduce::Prod => "Prod",
        Reduce::Max => "Max",
        Reduce::Min => "Min",
    }
}

fn neutral(op: Reduce, ty: Ty) -> String {
    let bits = crate::library::vector::reduce::neutral(op, ty);
    value::literal(ty, if ty == Ty::F32 { f64::from(f32::from_bits(bits as u32)).to_bits() } else { bits })
}
