//! Kernels of many texts in one piece of machine code.

use super::cache;
use super::driver::{Gpu, Kernel};
use super::{Target, nvrtc};
use crate::error::{Error, Result};
use dcc_kernels::cuda::{PRELUDE, Source};
use std::ops::Range;

/// Compiled kernels, in the order of their sources.
pub struct Kernels {
    all: Vec<Compiled>,
}

struct Compiled {
    source: Source,
    /// One per launch.
    entries: Vec<Kernel>,
}

impl Kernels {
    /// All that NVRTC needs of `sources`, whose names differ.
    pub fn text(sources: &[Source]) -> String {
        std::iter::once(PRELUDE).chain(sources.iter().map(|source| source.text.as_str())).collect()
    }

    /// Compiles all `sources`, whose names differ, for `gpu`, or takes them from what it was opened with or from earlier runs. Errors: NVRTC is missing or refuses a text.
    pub fn compile(gpu: &Gpu, sources: &[Source]) -> Result<Kernels> {
        let (mut all, mut rest) = (Vec::new(), sources);
        for (image, count) in cache::images(sources, gpu.arch(), cache::folder().as_deref(), gpu.shipped())? {
            let (part, others) = rest.split_at(count);
            rest = others;
            let launches = || part.iter().flat_map(|source| &source.launches);
            let names: Vec<&str> = launches().map(|launch| launch.entry.as_str()).collect();
            let entries = match gpu.load(&image, &names) {
                // What was shipped may be of a newer NVRTC than the driver takes: the one that is here may suit it.
                Err(error) if !gpu.shipped().targets().is_empty() && nvrtc::is_there() => {
                    let made = cache::compiled(&Kernels::text(part), Target::Code(gpu.arch()), cache::folder().as_deref())?;
                    gpu.load(&made, &names).map_err(|_| error)?
                }
                loaded => loaded?,
            };
            entries.iter().zip(launches()).try_for_each(|(entry, launch)| gpu.allow_shared(entry, launch.shared))?;
            let mut entries = entries.into_iter();
            all.extend(part.iter().map(|source| Compiled {
                source: source.clone(),
                entries: entries.by_ref().take(source.launches.len()).collect(),
            }));
        }
        Ok(Kernels { all })
    }

    /// Kernel `number`'s, one per launch.
    pub fn entries(&self, number: usize) -> &[Kernel] {
        &self.all[number].entries
    }

    pub fn source(&self, number: usize) -> &Source {
        &self.all[number].source
    }

    /// Starts kernel `number` behind all work so far.
    ///
    /// # Safety
    /// `words` are what its source says that each launch gets; what they point to is as large as it says, and alive until it is done.
    pub unsafe fn start(&self, gpu: &Gpu, number: usize, words: &mut [u64]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.start_some(gpu, number, 0..self.all[number].entries.len(), words) }
    }

    /// As `start`, some of the launches.
    ///
    /// # Safety
    /// As `start`.
    pub unsafe fn start_some(&self, gpu: &Gpu, number: usize, launches: Range<usize>, words: &mut [u64]) -> Result<()> {
        let Compiled { source, entries } = &self.all[number];
        assert!(source.table == 0 || source.table == words.len(), "{} words for a table of {}", words.len(), source.table);
        for (entry, launch) in entries[launches.clone()].iter().zip(&source.launches[launches]) {
            let shape = (launch.blocks, launch.threads, launch.shared);
            // SAFETY: the caller's; a table is as long as the kernel's argument.
            unsafe {
                match source.table {
                    0 => entry.launch(gpu.stream(), shape, words)?,
                    _ => entry.launch_table(gpu.stream(), shape, words)?,
                }
            }
        }
        Ok(())
    }

    /// Runs kernel `number` by itself: `operands` are the bytes of inputs, then outputs, which it writes; `parameters` those of
    /// `Nest::parameters`. Errors: of the GPU, operands of other sizes.
    pub fn run(&self, gpu: &Gpu, number: usize, operands: &mut [Vec<u8>], parameters: &[i64]) -> Result<()> {
        let source = self.source(number);
        let fits = operands.len() == source.operand_bytes.len()
            && operands.iter().zip(&source.operand_bytes).all(|(operand, &bytes)| operand.len() == bytes)
            && source.parameters.iter().all(|&n| n < parameters.len());
        if !fits {
            return Err(Error::artifact("a kernel's operands have other types than the kernel"));
        }
        let mut buffers = Vec::new();
        for operand in operands.iter() {
            let buffer = gpu.allocate(operand.len())?;
            gpu.write(&buffer, 0, operand)?;
            buffers.push(buffer);
        }
        let workspace = (source.workspace > 0).then(|| gpu.allocate(source.workspace)).transpose()?;
        let pointers = buffers.iter().chain(&workspace).map(|buffer| buffer.address());
        let mut words: Vec<u64> = pointers.chain(source.parameters.iter().map(|&n| parameters[n] as u64)).collect();
        // SAFETY: all buffers have the source's sizes, and live until `wait`.
        unsafe { self.start(gpu, number, &mut words)? };
        gpu.wait()?;
        for (buffer, operand) in buffers.iter().zip(operands) {
            gpu.read(buffer, 0, operand)?;
        }
        Ok(())
    }
}
