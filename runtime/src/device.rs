//! What a rank computes on. Its memory is laid out as the host's arena, which holds what ranks exchange, inputs, outputs and parameters
//! while they are loaded and saved; a device with memory of its own has copies, brought up to date by `put` and `get`.

mod both;

use crate::comm::Label;
use crate::cpu::{self, Cpu, Memory};
use crate::cuda::{self, Cuda, Graph, Row};
use crate::error::Result;
use crate::exec::{Bases, Site, Span};
use dcc_program::kernel::Kernel;
use dcc_program::program::{Instr, Library};
use std::ops::Range;

pub use both::Both;

pub enum Device {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
    /// One checks the other.
    Both(Box<Both>),
}

/// A prepared instruction.
pub enum Call {
    Cpu(cpu::Call),
    Cuda(cuda::Call),
    Both(Box<both::Call>),
}

impl Device {
    /// The host's arena.
    pub fn memory(&self) -> &Memory {
        match self {
            Device::Cpu(cpu) => cpu.memory(),
            Device::Cuda(gpu) => gpu.memory(),
            Device::Both(both) => both.cpu.memory(),
        }
    }

    pub fn memory_mut(&mut self) -> &mut Memory {
        match self {
            Device::Cpu(cpu) => cpu.memory_mut(),
            Device::Cuda(gpu) => gpu.memory_mut(),
            Device::Both(both) => both.cpu.memory_mut(),
        }
    }

    /// The rows of a section's calls that the device runs as one from the second time on, between which stands what is none: once, behind
    /// the section's last instruction.
    pub fn rows(&mut self, section: &[Option<&Call>]) -> Result<Vec<Row>> {
        match self {
            Device::Cpu(_) => Ok(Vec::new()),
            // Its calls run alone; kernels are compiled as for a GPU by itself.
            Device::Both(both) => both.gpu.texts().in_rows(&of_gpu(section)).map(|_| Vec::new()),
            Device::Cuda(gpu) => gpu.texts().in_rows(&of_gpu(section)),
        }
    }

    /// Whether the device has memory of its own.
    pub fn is_apart(&self) -> bool {
        matches!(self, Device::Cuda(_))
    }

    /// Copies a range of the host's arena to the device, behind all work so far.
    pub fn put(&mut self, range: Range<usize>) -> Result<()> {
        match self {
            Device::Cpu(_) | Device::Both(_) => Ok(()),
            Device::Cuda(gpu) => gpu.put(range),
        }
    }

    /// Copies a range of the device's memory to the host's arena, behind all work so far.
    pub fn get(&mut self, range: Range<usize>) -> Result<()> {
        match self {
            Device::Cpu(_) | Device::Both(_) => Ok(()),
            Device::Cuda(gpu) => gpu.get(range),
        }
    }

    /// Compute threads of this process.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.threads(),
            Device::Cuda(_) => 1,
            Device::Both(both) => both.cpu.threads(),
        }
    }

    /// Distinct kernels compiled so far.
    pub fn kernels(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.kernels(),
            Device::Cuda(gpu) => gpu.kernels(),
            Device::Both(both) => both.gpu.kernels(),
        }
    }

    /// Prepares a generated kernel for the operands of `instr` on this rank. Errors: operands that do not fit it.
    pub fn kernel(&mut self, site: &Site<'_>, kernel: &Kernel, instr: &Instr) -> Result<Call> {
        match self {
            Device::Cpu(cpu) => cpu.kernel(site, kernel, instr).map(Call::Cpu),
            Device::Cuda(gpu) => gpu.texts().kernel(site, kernel, instr).map(Call::Cuda),
            Device::Both(both) => both.kernel(site, kernel, instr).map(|call| Call::Both(Box::new(call))),
        }
    }

    /// Prepares a library operation; `None` where nothing is to be done. Errors: operands that do not fit, an operation that the device
    /// does not have.
    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        Ok(match self {
            Device::Cpu(cpu) => cpu.library(site, library, instr)?.map(Call::Cpu),
            Device::Cuda(gpu) => gpu.texts().library(site, library, instr)?.map(Call::Cuda),
            Device::Both(both) => both.library(site, library, instr)?.map(|call| Call::Both(Box::new(call))),
        })
    }

    /// Has as much memory beside the arena as this for the workspace of any one call. Errors: there is not as much.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        match self {
            Device::Cpu(cpu) => cpu.reserve(bytes),
            // Its kernels keep what they need where threads have it.
            Device::Cuda(_) => Ok(()),
            Device::Both(both) => both.cpu.reserve(bytes),
        }
    }

    /// Makes what was prepared ready to run: once, behind the last of a program's instructions.
    pub fn finish(&mut self) -> Result<()> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(gpu) => gpu.finish(),
            Device::Both(both) => both.gpu.finish_alone(),
        }
    }

    /// Makes every call ready to run by itself, those of rows too.
    pub fn finish_alone(&mut self) -> Result<()> {
        match self {
            Device::Cpu(_) | Device::Both(_) => Ok(()),
            Device::Cuda(gpu) => gpu.finish_alone(),
        }
    }

    /// Runs a prepared call in one execution of its section. `label`: what errors name.
    pub fn run(&mut self, call: &Call, bases: &Bases, microbatch: u32, label: &Label) -> Result<()> {
        match (self, call) {
            (Device::Cpu(cpu), Call::Cpu(call)) => {
                cpu.run(call, bases, microbatch);
                Ok(())
            }
            (Device::Cuda(gpu), Call::Cuda(call)) => gpu.run(call, bases, microbatch, label),
            (Device::Both(both), Call::Both(call)) => both.run(call, bases, microbatch, label),
            _ => unreachable!("calls run on the device that prepared them"),
        }
    }
}

impl Device {
    /// Runs the calls of a row in one execution of its section. What is given back runs them once more with `replay`. `label`: what errors
    /// name.
    pub fn record(&mut self, row: &Row, calls: &[&Call], bases: &Bases, microbatch: u32, label: &Label) -> Result<Graph> {
        match self {
            Device::Cpu(_) | Device::Both(_) => unreachable!("it has no rows"),
            Device::Cuda(gpu) => {
                let own: Vec<&cuda::Call> = calls.iter().map(|call| call.cuda()).collect();
                gpu.record(row, &own, bases, microbatch, label)
            }
        }
    }

    /// Runs once more what was recorded on this device.
    pub fn replay(&mut self, graph: &Graph, label: &Label) -> Result<()> {
        match self {
            Device::Cpu(_) | Device::Both(_) => unreachable!("it records nothing"),
            Device::Cuda(gpu) => gpu.replay(graph, label),
        }
    }

    /// Until all that was started is done.
    pub fn wait(&self) -> Result<()> {
        match self {
            Device::Cpu(_) | Device::Both(_) => Ok(()),
            Device::Cuda(gpu) => gpu.wait(),
        }
    }

    /// What a device that checks another found so far.
    pub fn summary(&self) -> Option<String> {
        match self {
            Device::Cpu(_) | Device::Cuda(_) => None,
            Device::Both(both) => Some(both.summary()),
        }
    }
}

fn of_gpu<'a>(section: &[Option<&'a Call>]) -> Vec<Option<&'a cuda::Call>> {
    section.iter().map(|call| call.map(Call::cuda)).collect()
}

impl Call {
    /// The GPU's.
    fn cuda(&self) -> &cuda::Call {
        match self {
            Call::Cuda(call) => call,
            Call::Both(both) => &both.gpu,
            Call::Cpu(_) => unreachable!("calls run on the device that prepared them"),
        }
    }

    /// Bytes of workspace that it needs in the host's memory: of the arena, where `work_in` names some, else beside it.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Call::Cpu(call) => call.workspace_bytes(),
            Call::Cuda(_) => 0,
            Call::Both(call) => call.cpu.workspace_bytes(),
        }
    }

    /// As `cpu::Call::work_in`.
    pub fn work_in(&mut self, span: Span) {
        match self {
            Call::Cpu(call) => call.work_in(span),
            Call::Cuda(_) => unreachable!("it needs no workspace"),
            Call::Both(call) => call.cpu.work_in(span),
        }
    }

    /// Multiplications and additions of matrix products in one run.
    pub fn flops(&self) -> u64 {
        match self {
            Call::Cpu(call) => call.flops(),
            Call::Cuda(call) => call.flops(),
            Call::Both(call) => call.cpu.flops(),
        }
    }
}
