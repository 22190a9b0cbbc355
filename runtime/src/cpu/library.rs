//! Library operations as prepared calls.

use super::call::{Call, Work};
use super::factors::Factors;
use super::memory::Memory;
use crate::error::{Error, Result};
use crate::exec::{Bases, Site, Span};
use dcc_kernels::Pool;
use dcc_kernels::library::matmul::{DotGeneral, Factor};
use dcc_program::factors::FactorSpec;
use dcc_program::program::{BufferId, Instr, Library, StoreMode};
use dcc_program::types::DType;

/// Bytes of one chunk of a copy.
const CHUNK: usize = 256 << 10;

/// `out = lhs · rhs`, or `out += lhs · rhs`.
pub(super) struct Contraction {
    plan: Plan,
    mode: StoreMode,
    lhs: Span,
    rhs: Span,
    out: Span,
}

enum Plan {
    F32(DotGeneral<f32>),
    F64(DotGeneral<f64>),
}

/// `count` rows of `bytes` each, from one span to another.
pub(super) struct Rows {
    from: Span,
    to: Span,
    count: usize,
    bytes: usize,
    from_stride: usize,
    to_stride: usize,
    /// Byte of `from` where the first row begins.
    skip: usize,
}

impl super::Cpu {
    /// `None` where nothing is to be done. Errors: operands that do not fit the operation.
    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let (wanted, results) = arity(library);
        if instr.operands.len() != wanted || instr.results.len() != results {
            return Err(Error::artifact("an operation with too many or too few operands"));
        }
        let result = instr.results[0];
        let work = match library {
            Library::Dot { spec, mode } => Some(dot(site, spec, *mode, instr)?),
            Library::Zero => Some(Work::Zero(site.span(result)?)),
            Library::KeepFirst { axis } if site.coordinates(0).get(*axis) != 0 => Some(Work::Zero(site.span(result)?)),
            Library::SliceAxis { axis, dim } => slice(site, (axis.0.into(), usize::from(*dim)), instr.operands[0], result)?,
            Library::Reshape { .. }
            | Library::Copy
            | Library::KeepFirst { .. }
            | Library::ResolveMicrobatches
            | Library::DropMicrobatch { .. } => copy(site.span(instr.operands[0])?, site.span(result)?)?,
            Library::ScatterAdd { .. } | Library::Attention(_) | Library::AttentionGrad(_) | Library::Cumsum { .. } => {
                return Err(Error::device("this operation has no CPU kernel"));
            }
        };
        Ok(work.map(Call))
    }
}

/// Operands and results.
fn arity(library: &Library) -> (usize, usize) {
    use dcc_program::program::MaskKind;
    match library {
        Library::Zero => (0, 1),
        Library::Dot { .. } | Library::ScatterAdd { .. } => (2, 1),
        Library::Attention(a) => (3 + usize::from(a.mask != MaskKind::None), 2),
        Library::AttentionGrad(a) => (6 + usize::from(a.mask != MaskKind::None), 3),
        _ => (1, 1),
    }
}

fn dot(site: &Site<'_>, spec: &FactorSpec, mode: StoreMode, instr: &Instr) -> Result<Work> {
    let types = [instr.operands[0], instr.operands[1], instr.results[0]].map(|id| site.ty(id));
    let [lhs, rhs, out] = types;
    if lhs.dtype != out.dtype || rhs.dtype != out.dtype {
        return Err(Error::artifact("a dot of operands with different dtypes"));
    }
    let factors = Factors::new(spec, &[lhs, rhs], out, site.mesh(), &site.coordinates(0))?;
    let [a, b, c] = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
    let factor = |f: usize| Factor { size: factors.valid(f), lhs: a[f], rhs: b[f], out: c[f] };
    let plan: Vec<Factor> = (0..spec.names.len()).map(factor).collect();
    let count = |f: &Factor| [f.lhs, f.rhs, f.out].iter().flatten().count();
    if plan.iter().any(|f| count(f) < 2) {
        return Err(Error::artifact(format!("`{}` sums over a factor of one operand", spec.text())));
    }
    let plan = match out.dtype {
        DType::F32 => Plan::F32(DotGeneral::new(&plan)),
        DType::F64 => Plan::F64(DotGeneral::new(&plan)),
        other => return Err(Error::device(format!("no matrix product of {} on this device", other.name()))),
    };
    let [lhs, rhs, out] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
    if out.overlaps(&lhs) || out.overlaps(&rhs) {
        return Err(Error::artifact("a dot that overwrites its operands"));
    }
    Ok(Work::Dot(Contraction { plan, mode, lhs, rhs, out }))
}

impl Contraction {
    pub fn flops(&self) -> u64 {
        match &self.plan {
            Plan::F32(plan) => plan.flops() as u64,
            Plan::F64(plan) => plan.flops() as u64,
        }
    }

    pub fn run(&self, memory: &Memory, pool: &Pool, bases: &Bases) {
        match &self.plan {
            Plan::F32(plan) => {
                let (lhs, rhs, out) = self.operands(memory, bases);
                plan.run(pool, 1.0, if self.mode == StoreMode::Accumulate { 1.0 } else { 0.0 }, lhs, rhs, out);
            }
            Plan::F64(plan) => {
                let (lhs, rhs, out) = self.operands(memory, bases);
                plan.run(pool, 1.0, if self.mode == StoreMode::Accumulate { 1.0 } else { 0.0 }, lhs, rhs, out);
            }
        }
    }

    /// As slices of `E`, the dtype that `dot` saw all three have.
    fn operands<'a, E>(&self, memory: &'a Memory, bases: &Bases) -> (&'a [E], &'a [E], &'a mut [E]) {
        let elements = |span: Span| (memory.pointer(span, bases).cast::<E>(), span.bytes / size_of::<E>());
        let [(lhs, lhs_len), (rhs, rhs_len), (out, out_len)] = [self.lhs, self.rhs, self.out].map(elements);
        // SAFETY: `pointer` checked the spans against the arena; spans are aligned to their elements, of which any bits are valid;
        // `dot` saw that `out` overlaps no operand, and the program's order keeps transfers away.
        unsafe {
            (
                std::slice::from_raw_parts(lhs, lhs_len),
                std::slice::from_raw_parts(rhs, rhs_len),
                std::slice::from_raw_parts_mut(out, out_len),
            )
        }
    }
}

/// All bytes of `from`, unless they are in place already.
fn copy(from: Span, to: Span) -> Result<Option<Work>> {
    if from.bytes != to.bytes {
        return Err(Error::artifact(format!("{} bytes do not become {}", from.bytes, to.bytes)));
    }
    if from == to || from.bytes == 0 {
        return Ok(None);
    }
    if from.overlaps(&to) {
        return Err(Error::artifact("a copy onto a part of itself"));
    }
    Ok(Some(Work::Rows(Rows { from, to, count: 1, bytes: to.bytes, from_stride: 0, to_stride: 0, skip: 0 })))
}

/// The rank's own block along `dim`; what lies behind the whole's last row stays unspecified.
fn slice(site: &Site<'_>, (axis, dim): (usize, usize), operand: BufferId, result: BufferId) -> Result<Option<Work>> {
    let (whole, part) = (site.ty(operand).local_shape(site.mesh()), site.ty(result).local_shape(site.mesh()));
    let alike = |d: usize| d == dim || whole[d] == part[d];
    if dim >= part.len() || whole.len() != part.len() || !(0..part.len()).all(alike) {
        return Err(Error::artifact("a slice that does not fit its operand"));
    }
    let (from, to) = (site.span(operand)?, site.span(result)?);
    if from.overlaps(&to) {
        return Err(Error::artifact("a slice onto its own operand"));
    }
    let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
    let inner = product(&part[dim + 1..]) * site.ty(result).dtype.bytes() as usize;
    let coordinate = site.coordinates(0).0.get(axis).copied().unwrap_or(0);
    let first = u64::from(coordinate) * part[dim];
    let rows = part[dim].min(whole[dim].saturating_sub(first)) as usize;
    let count = if rows == 0 { 0 } else { product(&part[..dim]) };
    let stride = |shape: &[u64]| shape[dim] as usize * inner;
    let skip = if rows == 0 { 0 } else { first as usize * inner };
    Ok(Some(Work::Rows(Rows {
        from,
        to,
        count,
        bytes: rows * inner,
        from_stride: stride(&whole),
        to_stride: stride(&part),
        skip,
    })))
}

impl Rows {
    pub fn run(&self, memory: &Memory, pool: &Pool, bases: &Bases) {
        let from = memory.pointer(self.from, bases) as usize + self.skip;
        let to = memory.pointer(self.to, bases) as usize;
        let total = self.count * self.bytes;
        // Many short rows make a chunk, or a long row several.
        let per_row = self.bytes.div_ceil(CHUNK).max(1);
        let together = if per_row > 1 { 1 } else { (CHUNK / self.bytes.max(1)).max(1) };
        let chunks = self.count.div_ceil(together) * per_row;
        pool.run(chunks, total / 20, &|_, chunk| {
            let (group, part) = (chunk / per_row, chunk % per_row);
            let begin = part * CHUNK;
            let bytes = (self.bytes - begin).min(CHUNK);
            for row in group * together..self.count.min((group + 1) * together) {
                let (from, to) = (from + row * self.from_stride + begin, to + row * self.to_stride + begin);
                // SAFETY: rows lie inside of both spans, which `pointer` checked and which do not overlap; chunks are disjoint.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
            }
        });
    }
}
