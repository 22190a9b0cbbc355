//! What a schedule is: for each stage, its passes in the order in which it runs them.
//!
//! The model is cut into *parts* in its own order. A `Layout` says where they lie: one on each stage, or several *chunks* (virtual
//! stages), dealt round after round (Narayanan et al. 2021, arXiv 2104.04473) or there and back again (Qi et al. 2023, arXiv
//! 2401.10241, section 6).
//!
//! What holds of a sound order, which `Order::check` and the simulator test: each microbatch goes forward once through each part, and
//! backward once, either whole or as both halves; a pass never needs one that its own stage runs later, directly or through others.

use std::fmt;

/// What a pass computes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Section {
    Forward,
    /// Both halves at once.
    Backward,
    /// The gradient of the part's input, which the part before waits for.
    BackwardInput,
    /// The gradients of the part's parameters, which only the update waits for.
    BackwardWeight,
}

/// One section of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass {
    pub section: Section,
    /// Which of the stage's parts.
    pub chunk: u32,
    pub microbatch: u32,
}

/// Where the part after that of the last stage lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// On the first stage again.
    Loop,
    /// On the last stage too, and from there back: a V of two chunks.
    V,
}

/// Which stage has which parts of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub stages: u32,
    /// Parts of each stage.
    pub chunks: u32,
    pub path: Path,
}

/// A schedule of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    pub layout: Layout,
    pub microbatches: u32,
    /// By stage, in the order of running.
    pub passes: Vec<Vec<Pass>>,
}

/// Why an order cannot be run, or a rule gives none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("a pipeline needs at least one stage, one chunk and one microbatch")]
    Empty,
    #[error("an interleaved schedule runs groups of {stages} microbatches, one for each stage; {microbatches} is no multiple")]
    Groups { stages: u32, microbatches: u32 },
    #[error(
        "the order is of {stages} stages with {parts} parts; there are {found_stages} lists of passes, and times of {found_parts} parts"
    )]
    Size { stages: u32, parts: u32, found_stages: usize, found_parts: usize },
    #[error("stage {stage} has no {pass}")]
    Unknown { stage: u32, pass: Pass },
    #[error("stage {stage} runs {pass} twice, or whole and in halves")]
    Twice { stage: u32, pass: Pass },
    #[error("stage {stage} never runs {pass}")]
    Missing { stage: u32, pass: Pass },
    #[error("the order never ends: {}", Waits(.0))]
    Deadlock(Vec<Wait>),
    #[error("stage {stage} has memory for {limit_bytes} bytes of activations and needs {needed_bytes} for a single microbatch")]
    Memory { stage: u32, limit_bytes: u64, needed_bytes: u64 },
}

/// A stage that cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub stage: u32,
    pub pass: Pass,
    /// The stage and pass whose result it needs.
    pub on: (u32, Pass),
}

impl Pass {
    pub fn new(section: Section, chunk: u32, microbatch: u32) -> Pass {
        Pass { section, chunk, microbatch }
    }

    /// Small after the first chunk. The papers call the input half B, as the whole.
    pub fn letter(self) -> char {
        let letter = match self.section {
            Section::Forward => 'F',
            Section::Backward | Section::BackwardInput => 'B',
            Section::BackwardWeight => 'W',
        };
        if self.chunk == 0 { letter } else { letter.to_ascii_lowercase() }
    }
}

impl Layout {
    /// One part on each stage.
    pub fn plain(stages: u32) -> Layout {
        Layout { stages, chunks: 1, path: Path::Loop }
    }

    pub fn parts(&self) -> u32 {
        self.stages * self.chunks
    }

    /// The part of the model, counted in its order, that is `chunk` of `stage`.
    pub fn part(&self, stage: u32, chunk: u32) -> u32 {
        chunk * self.stages + self.turned(stage, chunk)
    }

    /// The stage and chunk of `part`.
    pub fn place(&self, part: u32) -> (u32, u32) {
        let (chunk, stage) = (part / self.stages, part % self.stages);
        (self.turned(stage, chunk), chunk)
    }

    fn turned(&self, stage: u32, chunk: u32) -> u32 {
        if self.path == Path::V && chunk % 2 == 1 { self.stages - 1 - stage } else { stage }
    }
}

impl Order {
    /// Every stage's passes are there, once each. Says nothing of their order: `simulate` does.
    pub fn check(&self) -> Result<(), OrderError> {
        let (layout, count) = (self.layout, self.microbatches);
        if layout.parts() == 0 || count == 0 {
            return Err(OrderError::Empty);
        }
        if self.passes.len() != layout.stages as usize {
            let (stages, parts) = (layout.stages, layout.parts());
            return Err(OrderError::Size { stages, parts, found_stages: self.passes.len(), found_parts: parts as usize });
        }
        for (stage, passes) in (0u32..).zip(&self.passes) {
            // Forward, input half, weight half.
            let mut seen = vec![[false; 3]; (layout.chunks * count) as usize];
            for &pass in passes {
                if pass.chunk >= layout.chunks || pass.microbatch >= count {
                    return Err(OrderError::Unknown { stage, pass });
                }
                let seen = &mut seen[(pass.chunk * count + pass.microbatch) as usize];
                for &half in pass.section.halves() {
                    if std::mem::replace(&mut seen[half], true) {
                        return Err(OrderError::Twice { stage, pass });
                    }
                }
            }
            let sections = [Section::Forward, Section::BackwardInput, Section::BackwardWeight];
            for (index, seen) in (0u32..).zip(&seen) {
                if let Some(half) = seen.iter().position(|s| !s) {
                    let pass = Pass::new(sections[half], index / count, index % count);
                    return Err(OrderError::Missing { stage, pass });
                }
            }
        }
        Ok(())
    }

    /// The list of each stage on a line: `F0 F1 B0 W0 B1 W1`.
    pub fn text(&self) -> String {
        let line = |passes: &Vec<Pass>| passes.iter().map(Pass::to_string).collect::<Vec<_>>().join(" ");
        self.passes.iter().map(|passes| line(passes) + "\n").collect()
    }
}

impl Section {
    /// Of forward, input half and weight half, those that it has.
    fn halves(self) -> &'static [usize] {
        match self {
            Section::Forward => &[0],
            Section::Backward => &[1, 2],
            Section::BackwardInput => &[1],
            Section::BackwardWeight => &[2],
        }
    }
}

/// `F0`, in the second chunk `f0`, in the third `f0'`.
impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.letter(), self.microbatch, "'".repeat(self.chunk.saturating_sub(1) as usize))
    }
}

/// A circle of waiting stages in words.
struct Waits<'a>(&'a [Wait]);

impl fmt::Display for Waits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, wait) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}stage {}'s {} waits for stage {}'s {}", wait.stage, wait.pass, wait.on.0, wait.on.1)?;
        }
        Ok(())
    }
}
