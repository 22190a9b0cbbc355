//! Library operations as prepared calls.

use super::call::{Call, Work};
use super::{attention, contraction, convolution, indexed, pool};
use crate::error::{Error, Result};
use crate::exec::Site;
use crate::library::attention::Pass;
use crate::library::{arity, rows};
use dcc_program::program::{Instr, Library};

impl super::Cpu {
    /// `None` where nothing is to be done. Errors: operands that do not fit the operation.
    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let (wanted, results) = arity(library);
        if instr.operands.len() != wanted || instr.results.len() != results {
            return Err(Error::artifact("an operation with too many or too few operands"));
        }
        let result = instr.results[0];
        let work = match library {
            Library::Dot { spec, mode } => return contraction::dot(&mut self.plans, site, spec, *mode, instr).map(Some),
            Library::Convolution { spec, windows, mode } => {
                return convolution::convolution(&mut self.plans, site, (spec, windows), *mode, instr).map(Some);
            }
            Library::MaxPool(pool) => Some(pool::max_pool(site, pool, instr)?),
            Library::ScatterAdd { spec, indexed, mode } => Some(indexed::scatter_add(site, (spec, indexed), *mode, instr)?),
            Library::Cumsum { dim, exclusive, reverse } => Some(indexed::cumsum(site, (*dim, *exclusive, *reverse), instr)?),
            Library::TopK { dim, k, largest } => Some(indexed::top_k(site, (*dim, *k, *largest), instr)?),
            Library::Attention(attention) => return attention::attention(site, attention, instr, Pass::Forward).map(Some),
            Library::AttentionGrad(attention) => return attention::attention(site, attention, instr, Pass::Backward).map(Some),
            Library::Zero { .. } => Some(Work::Zero(site.span(result)?)),
            Library::KeepFirst { axis } if site.coordinates(0).get(*axis) != 0 => Some(Work::Zero(site.span(result)?)),
            Library::SliceAxis { axis, dim } => {
                rows::slice(site, (axis.0.into(), usize::from(*dim)), instr.operands[0], result)?.map(Work::Rows)
            }
            Library::Reshape { .. }
            | Library::Copy
            | Library::KeepFirst { .. }
            | Library::ResolveMicrobatches
            | Library::DropMicrobatch { .. } => rows::copy(site.span(instr.operands[0])?, site.span(result)?)?.map(Work::Rows),
        };
        Ok(work.map(Call::from))
    }
}
