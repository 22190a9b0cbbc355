//! The schedules that have names, by their rules.
//!
//! - GPipe (Huang et al. 2018, arXiv 1811.06965): all forwards, then all backwards.
//! - 1F1B (Narayanan et al. 2020, arXiv 2006.09503, "PipeDream-Flush"): stage i of p starts with p−i−1 forwards, then alternates, so
//!   that it holds the activations of at most p−i microbatches.
//! - Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): several chunks on each stage, 1/v of the bubble.
//! - ZB-H1, ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2): the backward in halves, weight halves put off. H1 has the memory of
//!   1F1B and a third of its bubble, H2 twice the memory and, if all sections take equally long, none.
//! - ZB-V (the same, section 6): two chunks on each stage, there and back: the memory of 1F1B and, then too, no bubble.

use super::greedy::{self, Policy};
use super::order::{Layout, Order, OrderError, Pass, Path, Section};
use super::problem::Problem;
use super::simulate::{Costs, PartCost};

/// A rule by which stages order their passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    GPipe,
    OneFOneB,
    Interleaved { chunks: u32 },
    ZbH1,
    ZbH2,
    ZbV,
}

impl Rule {
    pub fn layout(self, stages: u32) -> Layout {
        match self {
            Rule::Interleaved { chunks } => Layout { stages, chunks, path: Path::Loop },
            Rule::ZbV => Layout { stages, chunks: 2, path: Path::V },
            _ => Layout::plain(stages),
        }
    }

    /// Errors: nothing to order; microbatches that an interleaved schedule cannot group.
    pub fn order(self, stages: u32, microbatches: u32) -> Result<Order, OrderError> {
        let layout = self.layout(stages);
        if layout.parts() == 0 || microbatches == 0 {
            return Err(OrderError::Empty);
        }
        if self == Rule::ZbV {
            return Ok(zb_v(layout, microbatches));
        }
        if layout.chunks > 1 && !microbatches.is_multiple_of(stages) {
            return Err(OrderError::Groups { stages, microbatches });
        }
        let passes = |stage: u32| {
            let after = stages - stage - 1;
            match self {
                Rule::GPipe => alternate(layout, microbatches, microbatches),
                Rule::Interleaved { chunks: 2.. } => alternate(layout, microbatches, 2 * after + (layout.chunks - 1) * stages),
                Rule::ZbH1 => halve(&alternate(layout, microbatches, after), stage),
                Rule::ZbH2 => halve(&alternate(layout, microbatches, 2 * after), 2 * stage),
                _ => alternate(layout, microbatches, after),
            }
        };
        Ok(Order { layout, microbatches, passes: (0..stages).map(passes).collect() })
    }
}

/// `warm_up` forwards, then a forward and a backward in turn. Of several chunks, each takes as many microbatches as there are stages
/// before the next has them, from the first chunk forward and from the last backward.
fn alternate(layout: Layout, microbatches: u32, warm_up: u32) -> Vec<Pass> {
    let (group, chunks) = (if layout.chunks == 1 { 1 } else { layout.stages }, layout.chunks);
    let count = microbatches * chunks;
    let pass = |section, index: u32| {
        let chunk = index / group % chunks;
        let chunk = if section == Section::Forward { chunk } else { chunks - 1 - chunk };
        Pass::new(section, chunk, index / (group * chunks) * group + index % group)
    };
    let warm_up = warm_up.min(count);
    let mut out: Vec<Pass> = (0..warm_up).map(|index| pass(Section::Forward, index)).collect();
    for index in 0..count {
        if warm_up + index < count {
            out.push(pass(Section::Forward, warm_up + index));
        }
        out.push(pass(Section::Backward, index));
    }
    out
}

/// Splits the backwards; at most `behind` weight halves are put off, as long as there are input halves to run.
fn halve(passes: &[Pass], behind: u32) -> Vec<Pass> {
    let (mut out, mut inputs, mut weights) = (Vec::with_capacity(2 * passes.len()), 0, 0);
    for &pass in passes {
        if pass.section == Section::Forward {
            out.push(pass);
            continue;
        }
        out.push(Pass { section: Section::BackwardInput, ..pass });
        inputs += 1;
        if inputs - weights > behind {
            out.push(Pass::new(Section::BackwardWeight, pass.chunk, weights));
            weights += 1;
        }
    }
    out.extend((weights..inputs).map(|m| Pass::new(Section::BackwardWeight, 0, m)));
    out
}

/// What comes of running, on stages whose sections all take equally long, backwards before forwards and weight halves in between, in
/// the memory of 1F1B. The paper gives ZB-V by a picture and by the search for it; this is the picture.
fn zb_v(layout: Layout, microbatches: u32) -> Order {
    let part = PartCost { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, activation_bytes: 1, weight_bytes: 1 };
    let costs = Costs::even(layout.parts(), part, 0.0);
    let limit = vec![u64::from(layout.parts()); layout.stages as usize];
    let problem = Problem { layout, microbatches, costs: &costs, limit_bytes: &limit };
    greedy::order(&problem, &Policy::default()).expect("a slot for each part suffices")
}
