//! From a dataset to the input buffers of a rank.

use super::Flags;
use crate::data::{Convert, Dataset, Files, Input, Position};
use crate::error::{Error, Result};
use crate::exec::Port;
use crate::slice::Slice;
use dcc_program::DType;
use dcc_program::manifest::Manifest;
use dcc_program::map::Pages;
use dcc_program::program::Program;
use std::path::PathBuf;

/// The data of one program set.
pub(super) struct Feed {
    inputs: Vec<Input>,
    dataset: Dataset,
    /// What reading them takes.
    pages: Vec<Pages>,
    /// Rows that are wider than the rank's part of them.
    staging: Vec<u8>,
    /// That part.
    part: Slice,
}

impl Feed {
    /// `programs`: of all stages, since data belong to the whole model. Errors: data that do not fit.
    pub fn open(programs: &[Program], manifest: &Manifest, files: &[PathBuf], flags: &Flags, seed: u64) -> Result<Feed> {
        let inputs = inputs(programs, manifest)?;
        let (mut files, mut options) = (Files::open(files, &flags.map)?, flags.data_options(seed)?);
        // What the model takes and the loss does not depend on.
        files.arrays.retain(|array| !manifest.unused.contains(&array.name));
        options.fills.retain(|(name, _)| !manifest.unused.contains(name));
        let dataset = Dataset::open(&files, &inputs, &options)?;
        let staging = Vec::with_capacity(inputs.iter().map(whole_bytes).max().unwrap_or(0));
        let feed = Feed { inputs, dataset, pages: files.pages, staging, part: Slice::whole(&[]) };
        // All values were looked at.
        feed.release();
        Ok(feed)
    }

    /// Gives back the memory that reading has taken.
    fn release(&self) {
        self.pages.iter().for_each(Pages::release);
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Samples of one step: the size of the batch dim, 1 where no input has one.
    pub fn samples(&self) -> u64 {
        self.inputs.iter().find_map(|input| Some(input.shape[input.batch_dim?])).unwrap_or(1)
    }

    /// Tokens of one step; none where no input is integers `[batch, sequence]`.
    pub fn tokens(&self) -> Option<u64> {
        let sequence = |input: &&Input| !input.dtype.is_float() && input.shape.len() == 2 && input.batch_dim == Some(0);
        self.inputs.iter().find(sequence).map(|input| input.shape.iter().product())
    }

    /// Where the data stand after `steps` more steps.
    pub fn advance(&self, position: Position, steps: u64) -> Position {
        Position { steps: position.steps + steps, samples: position.samples + steps * self.samples() }
    }

    /// What of the batch at `position` leaves no number for a loss: an input that has NaN, or no label that counts. Infinite ones may mask.
    pub fn fault(&self, position: Position) -> Option<String> {
        let fault = (0..self.inputs.len()).find_map(|index| self.fault_of(index, position));
        self.release();
        fault
    }

    fn fault_of(&self, index: usize, position: Position) -> Option<String> {
        let input = &self.inputs[index];
        if !input.dtype.is_float() && input.ignore_index.is_none() {
            return None;
        }
        let mut bytes = vec![0; whole_bytes(input)];
        self.dataset.fill(index, position, 0..input.batch_dim.map_or(1, |dim| input.shape[dim]), &mut bytes);
        let mut numbers = vec![0; bytes.len() / input.dtype.bytes() as usize * 8];
        Convert::new(input.dtype, DType::F64).run(&bytes, &mut numbers);
        let mut numbers = numbers.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        let name = &input.name;
        match input.ignore_index {
            Some(ignored) if numbers.all(|number| number == ignored as f64) => {
                Some(format!("all `{name}` of its batch are {ignored}, which does not count"))
            }
            Some(_) => None,
            // Masks have -∞.
            None => {
                let bad = numbers.find(|number| number.is_nan() || *number == f64::INFINITY)?;
                let what = if bad.is_nan() { "NaN" } else { "an infinity" };
                Some(format!("input `{name}` has {what} in its batch"))
            }
        }
    }

    /// Fills the rank's buffer of an input for one microbatch of the batch at `position`. Allocates nothing from the second
    /// step on, and leaves none of the data's files in memory: they may be larger than what a rank has.
    pub fn fill(&mut self, port: &Port, microbatch: u32, position: Position, out: &mut [u8]) -> Result<()> {
        let filled = self.copy(port, microbatch, position, out);
        self.release();
        filled
    }

    fn copy(&mut self, port: &Port, microbatch: u32, position: Position, out: &mut [u8]) -> Result<()> {
        let known = self.inputs.iter().position(|input| input.name == port.name);
        let index = known.ok_or_else(|| Error::artifact(format!("input `{}` of one stage only", port.name)))?;
        let (input, slice) = (&self.inputs[index], port.slice(microbatch));
        let batch = input.batch_dim;
        let rows = batch.map_or(0..1, |dim| slice.start[dim]..slice.start[dim] + slice.extent[dim]);
        let is_whole = |dim: usize| Some(dim) == batch || slice.extent[dim] == slice.global[dim];
        if (0..slice.global.len()).all(is_whole) && slice.local == slice.extent {
            self.dataset.fill(index, position, rows, out);
            return Ok(());
        }
        // As many rows, otherwise whole: the box of which the rank holds a part.
        let part = &mut self.part;
        part.copy_from(slice);
        if let Some(dim) = batch {
            (part.global[dim], part.start[dim]) = (slice.extent[dim], 0);
        }
        let element = port.dtype.bytes() as usize;
        self.staging.resize(part.global.iter().product::<u64>() as usize * element, 0);
        self.dataset.fill(index, position, rows, &mut self.staging);
        part.for_each_run(|run| {
            let (from, to, len) = (run.global as usize * element, run.local as usize * element, run.len as usize * element);
            out[to..to + len].copy_from_slice(&self.staging[from..from + len]);
        });
        Ok(())
    }
}

fn whole_bytes(input: &Input) -> usize {
    (input.shape.iter().product::<u64>() * input.dtype.bytes()) as usize
}

/// Inputs of all stages, sorted by name.
fn inputs(programs: &[Program], manifest: &Manifest) -> Result<Vec<Input>> {
    let mut found: Vec<Input> = Vec::new();
    for program in programs {
        for input in &program.inputs {
            let ty = program.ty(input.buffer);
            let known = manifest.inputs.get(&input.name).cloned().unwrap_or_default();
            let batch_dim = known.batch_dim.map(usize::from).filter(|&dim| dim < ty.rank());
            let bound = Input {
                name: input.name.clone(),
                dtype: ty.dtype,
                shape: ty.shape.to_vec(),
                batch_dim,
                vocabulary: known.vocabulary,
                ignore_index: known.ignore_index,
            };
            match found.iter().find(|other| other.name == bound.name) {
                Some(other) if *other != bound => {
                    return Err(Error::artifact(format!("stages disagree on input `{}`", bound.name)));
                }
                Some(_) => {}
                None => found.push(bound),
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}
