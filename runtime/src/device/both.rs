//! The CPU and a GPU: every instruction runs on both from the operands that the CPU has, and the results are compared. What a GPU computes
//! wrongly is found where it happens, whatever the model and its sizes; the CPU's results go on.

use crate::comm::Label;
use crate::cpu::{self, Cpu};
use crate::cuda::{self, Cuda};
use crate::error::{Error, Result};
use crate::exec::{Bases, Site, Span};
use dcc_program::kernel::Kernel;
use dcc_program::program::{BufferId, Instr, Library};
use dcc_program::types::DType;
use half::{bf16, f16};

pub struct Both {
    pub cpu: Cpu,
    pub gpu: Cuda,
    /// The largest difference, as a fraction of what is allowed, and where it was.
    worst: Option<(f64, Label)>,
    compared: u64,
    raw: Vec<u8>,
}

/// A prepared call of both.
pub struct Call {
    pub cpu: cpu::Call,
    pub gpu: cuda::Call,
    operands: Box<[Span]>,
    results: Box<[Checked]>,
    /// The difference that is allowed, as a fraction of a result's largest element.
    allowed: f64,
}

/// A result whose elements are compared.
struct Checked {
    span: Span,
    dtype: DType,
    /// Elements of each dim, and how many of them mean something.
    block: Vec<usize>,
    valid: Vec<usize>,
}

/// What rounding in that type, and sums in another order, may make of a result.
fn allowed(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 32.0,
        DType::F16 => 1.0 / 256.0,
        DType::F32 => 2e-5,
        DType::F64 => 1e-12,
        _ => 0.0,
    }
}

impl Both {
    pub fn new(cpu: Cpu, gpu: Cuda) -> Both {
        Both { cpu, gpu, worst: None, compared: 0, raw: Vec::new() }
    }

    pub fn kernel(&mut self, site: &Site<'_>, kernel: &Kernel, instr: &Instr) -> Result<Call> {
        let (cpu, gpu) = (self.cpu.kernel(site, kernel, instr)?, self.gpu.texts().kernel(site, kernel, instr)?);
        Call::new(site, instr, cpu, gpu)
    }

    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let (cpu, gpu) = (self.cpu.library(site, library, instr)?, self.gpu.texts().library(site, library, instr)?);
        match (cpu, gpu) {
            (Some(cpu), Some(gpu)) => Call::new(site, instr, cpu, gpu).map(Some),
            (None, None) => Ok(None),
            _ => Err(Error::device("an operation of one device alone")),
        }
    }

    /// Errors: results that differ by more than is allowed.
    pub fn run(&mut self, call: &Call, bases: &Bases, microbatch: u32, label: &Label) -> Result<()> {
        for span in call.operands.iter().chain(call.results.iter().map(|result| &result.span)) {
            self.gpu.put(bases.region(*span).range())?;
        }
        self.gpu.run(&call.gpu, bases, microbatch, label)?;
        self.cpu.run(&call.cpu, bases, microbatch);
        for (n, result) in call.results.iter().enumerate() {
            let range = bases.region(result.span).range();
            self.raw.resize(range.len(), 0);
            self.gpu.read(range.start, &mut self.raw)?;
            let raw = &self.raw;
            let (share, at) = self.cpu.memory_mut().with(range, |own| result.difference(own, raw, call.allowed));
            self.compared += 1;
            if share.is_nan() || share > 1.0 {
                let what = format!(
                    "result {n} of the GPU differs from the CPU's by {share:.1} times what is allowed, most at element {at} of {:?}",
                    result.block
                );
                return Err(Error::device(what).at(label.text()));
            }
            if self.worst.is_none_or(|(worst, _)| share > worst) {
                self.worst = Some((share, *label));
            }
        }
        Ok(())
    }

    /// What was found.
    pub fn summary(&self) -> String {
        let worst = self.worst.map_or(String::new(), |(share, label)| {
            format!(", at most {share:.2} of the allowed difference, in `{}`", label.text())
        });
        format!("{} results of {} and the CPU agree{worst}", self.compared, self.gpu.name())
    }
}

impl Call {
    fn new(site: &Site<'_>, instr: &Instr, cpu: cpu::Call, gpu: cuda::Call) -> Result<Call> {
        let operands = instr.operands.iter().map(|&id| site.span(id)).collect::<Result<_>>()?;
        let result = |&id: &BufferId| {
            let extents = site.extents(id, 0)?;
            let sizes = |size: fn(&dcc_program::mesh::Extent) -> u64| extents.iter().map(|e| size(e) as usize).collect();
            let dtype = site.ty(id).dtype;
            Ok(Checked { span: site.span(id)?, dtype, block: sizes(|e| e.block), valid: sizes(|e| e.valid) })
        };
        let results = instr.results.iter().map(result).collect::<Result<_>>()?;
        let dtypes = instr.operands.iter().chain(&instr.results).map(|&id| site.ty(id).dtype);
        let allowed = dtypes.map(allowed).fold(0.0, f64::max);
        Ok(Call { cpu, gpu, operands, results, allowed })
    }
}

impl Checked {
    /// The largest difference, as a fraction of what is allowed, and its element.
    fn difference(&self, own: &[u8], other: &[u8], allowed: f64) -> (f64, usize) {
        let width = self.dtype.bytes() as usize;
        let values = |at: usize| [own, other].map(|raw| value(self.dtype, &raw[at * width..(at + 1) * width]));
        let each = || (0..own.len() / width).filter(|at| self.is_valid(*at));
        let finite = each().flat_map(values).filter(|x| x.is_finite());
        let scale = finite.fold(1e-6, |most: f64, x| most.max(x.abs()));
        let mut worst = (0.0, 0);
        for at in each() {
            let [x, y] = values(at);
            let share = match x == y || x.is_nan() && y.is_nan() {
                true => 0.0,
                false if x.is_finite() && y.is_finite() && allowed > 0.0 => (x - y).abs() / (scale * allowed),
                false => f64::INFINITY,
            };
            if share > worst.0 {
                worst = (share, at);
            }
        }
        worst
    }

    fn is_valid(&self, mut at: usize) -> bool {
        self.block.iter().zip(&self.valid).rev().all(|(&block, &valid)| {
            let index = at % block.max(1);
            at /= block.max(1);
            index < valid
        })
    }
}

fn value(dtype: DType, raw: &[u8]) -> f64 {
    let wide = || {
        let mut wide = [0; 8];
        wide[..raw.len()].copy_from_slice(raw);
        wide
    };
    match dtype {
        DType::F64 => f64::from_le_bytes(wide()),
        DType::F32 => f64::from(f32::from_bits(u64::from_le_bytes(wide()) as u32)),
        DType::F16 => f64::from(f16::from_bits(u64::from_le_bytes(wide()) as u16)),
        DType::BF16 => f64::from(bf16::from_bits(u64::from_le_bytes(wide()) as u16)),
        // Equal or not is all that matters.
        _ => u64::from_le_bytes(wide()) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(valid: usize, own: [f32; 4], other: [f32; 4]) -> (f64, usize) {
        let raw = |values: [f32; 4]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let span = Span { block: 0, offset: 0, bytes: 16 };
        let checked = Checked { span, dtype: DType::F32, block: vec![2, 2], valid: vec![2, valid] };
        checked.difference(&raw(own), &raw(other), 0.1)
    }

    #[test]
    fn what_means_something_is_compared() {
        let nan = f32::NAN;
        assert_eq!(found(2, [1.0, 2.0, nan, 4.0], [1.0, 2.0, nan, 4.0]), (0.0, 0));
        assert_eq!(found(2, [1.0, 2.0, 3.0, 4.0], [1.0, 2.2, 3.0, 4.0]).1, 1);
        assert!((found(2, [1.0, 2.0, 3.0, 4.0], [1.0, 2.2, 3.0, 4.0]).0 - 0.5).abs() < 1e-6);
        assert_eq!(found(1, [1.0, 2.0, 3.0, 4.0], [1.0, 9.0, 3.0, nan]), (0.0, 0), "behind the end of a shard");
        assert_eq!(found(2, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, nan, 4.0]), (f64::INFINITY, 2));
        assert_eq!(found(2, [1.0, 2.0, 3.0, f32::INFINITY], [1.0, 2.0, 3.0, f32::MAX]).1, 3);
    }
}
