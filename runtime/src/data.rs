//! Training data: files to inputs, the order of samples, and each rank's slice of a microbatch.
//!
//! `Files` knows what is there; `Dataset` binds it to the program's inputs, checks every value once, and from then on fills
//! slots without allocating and without failing. The order depends on the seed and the global sample index only.

mod bind;
mod convert;
mod file;
mod order;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use bytes::Bytes;
use dcc_program::DType;
use std::ops::Range;
use std::path::PathBuf;

pub use convert::{Convert, not_finite};
pub use file::{Array, Files};
pub use order::Order;

/// How arrays are cut into steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Dim 0 counts samples.
    #[default]
    Samples,
    /// Dim 0 counts optimizer steps; slice t is fed whole.
    Steps,
}

/// `--input NAME=…`: what feeds an input that the files do not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fill {
    Zeros,
    Ones,
    /// The index along the last dim.
    Arange,
    /// A .npy of the input's shape; a batch dim of size 1 is repeated.
    File(PathBuf),
}

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub layout: Layout,
    pub order: Order,
    pub seed: u64,
    pub fills: Vec<(String, Fill)>,
}

/// An input of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    pub name: String,
    pub dtype: DType,
    /// Of one step, all microbatches and ranks together.
    pub shape: Vec<u64>,
    pub batch_dim: Option<usize>,
    /// Its values index this many rows or classes.
    pub vocabulary: Option<u64>,
    /// A value outside of the vocabulary that is allowed.
    pub ignore_index: Option<i64>,
}

/// What has been consumed: the same in every plan, so a checkpoint may be resumed under another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// Steps under `Layout::Steps`.
    pub steps: u64,
    /// Samples under `Layout::Samples`.
    pub samples: u64,
}

/// Files bound to inputs.
#[derive(Debug)]
pub struct Dataset {
    feeds: Vec<Feed>,
    order: order::Permutation,
    /// Samples, or steps, in one pass; `None` where all inputs are filled.
    len: Option<u64>,
    layout: Layout,
    fingerprint: u64,
}

/// How one input is fed.
#[derive(Debug)]
struct Feed {
    kind: Kind,
    /// The first sample or step of each part, and its row-major source elements; no part is empty.
    parts: Vec<(u64, Bytes)>,
    convert: Convert,
    /// Elements of the input before, along and behind its batch dim; `batch` is 1 without one.
    outer: u64,
    batch: u64,
    inner: u64,
}

#[derive(Debug)]
enum Kind {
    /// A sample is a row of a part, from `shift` elements after its beginning on.
    Samples { shift: u64 },
    /// A step is a slice of a part; there are this many.
    Steps(u64),
}

/// Rows that dp rank `r` of `ranks` feeds in microbatch `i` of `microbatches`: `i·B/M + r·B/(M·D)` and on.
pub fn rows(batch: u64, (i, microbatches): (u64, u64), (r, ranks): (u64, u64)) -> Range<u64> {
    let count = batch / (microbatches * ranks);
    let start = i * (batch / microbatches) + r * count;
    start..start + count
}

impl Dataset {
    /// Errors: a key without input or the reverse, a shape or dtype that does not fit, a value out of range.
    pub fn open(files: &Files, inputs: &[Input], options: &Options) -> Result<Dataset> {
        bind::bind(files, inputs, options)
    }

    /// Samples (steps under `Layout::Steps`) in one pass over the data; `None` where all inputs are filled.
    pub fn len(&self) -> Option<u64> {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == Some(0)
    }

    /// Equal on ranks, and in a resumed run, that read the same data in the same order.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The fingerprint that the same data would have in another order.
    pub fn fingerprint_in(&self, order: Order, seed: u64) -> u64 {
        bind::fingerprint(&self.feeds, self.layout, order, seed)
    }

    /// Writes rows `rows` of the batch at `position` of input number `input` (its whole slice without a batch dim) into `out`,
    /// which holds the input's shape with that many rows, in its dtype.
    pub fn fill(&self, input: usize, position: Position, rows: Range<u64>, out: &mut [u8]) {
        let feed = &self.feeds[input];
        let rows = if feed.batch == 1 { 0..1 } else { rows };
        match &feed.kind {
            Kind::Steps(steps) => feed.fill_slice(position.steps % steps, rows, out),
            Kind::Samples { shift } => {
                for (at, row) in rows.clone().enumerate() {
                    let (part, sample) = feed.part(self.order.sample(position.samples + row));
                    let start = sample * feed.outer * feed.inner + shift;
                    feed.fill_row(part, start, (at as u64, rows.end - rows.start), out);
                }
            }
        }
    }
}

impl Feed {
    /// The part that has a sample or step, and its number there.
    fn part(&self, number: u64) -> (&Bytes, u64) {
        let (first, part) = &self.parts[self.parts.partition_point(|(first, _)| *first <= number) - 1];
        (part, number - first)
    }

    /// The sample whose elements begin at `start`, as row `at` of `count` along the batch dim.
    fn fill_row(&self, part: &Bytes, start: u64, (at, count): (u64, u64), out: &mut [u8]) {
        for outer in 0..self.outer {
            self.copy(part, start + outer * self.inner, (outer * count + at) * self.inner, self.inner, out);
        }
    }

    fn fill_slice(&self, step: u64, rows: Range<u64>, out: &mut [u8]) {
        let count = rows.end - rows.start;
        let (part, step) = self.part(step);
        for outer in 0..self.outer {
            let from = ((step * self.outer + outer) * self.batch + rows.start) * self.inner;
            self.copy(part, from, outer * count * self.inner, count * self.inner, out);
        }
    }

    fn copy(&self, part: &Bytes, from: u64, to: u64, elements: u64, out: &mut [u8]) {
        let range = |at: u64, size: usize| at as usize * size..(at + elements) as usize * size;
        let (source, target) = (self.convert.source.bytes() as usize, self.convert.target.bytes() as usize);
        self.convert.run(&part[range(from, source)], &mut out[range(to, target)]);
    }
}

impl Fill {
    /// `ones`, `zeros`, `arange` or `@FILE.npy`.
    pub fn parse(text: &str) -> Result<Fill> {
        match (text, text.strip_prefix('@')) {
            ("ones", _) => Ok(Fill::Ones),
            ("zeros", _) => Ok(Fill::Zeros),
            ("arange", _) => Ok(Fill::Arange),
            (_, Some(path)) => Ok(Fill::File(path.into())),
            _ => Err(Error::data_option(format!("`{text}` is nothing to fill an input with"))
                .help("use ones, zeros, arange or @FILE.npy")),
        }
    }
}
