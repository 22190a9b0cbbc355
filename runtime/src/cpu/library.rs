//! Library operations as prepared calls.

use super::attention::Pass;
use super::call::{Call, Work};
use super::{contraction, indexed, pool, rows};
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_program::program::{Instr, Library, MaskKind};

impl super::Cpu {
    /// `None` where nothing is to be done. Errors: operands that do not fit the operation.
    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let (wanted, results) = arity(library);
        if instr.operands.len() != wanted || instr.results.len() != results {
            return Err(Error::artifact("an operation with too many or too few operands"));
        }
        let result = instr.results[0];
        let work = match library {
            Library::Dot { spec, mode } => Some(contraction::dot(self, site, spec, *mode, instr)?),
            Library::Convolution { spec, windows, mode } => Some(self.convolution(site, (spec, windows), *mode, instr)?),
            Library::MaxPool(pool) => Some(pool::max_pool(site, pool, instr)?),
            Library::ScatterAdd { spec, indexed, mode } => Some(indexed::scatter_add(site, (spec, indexed), *mode, instr)?),
            Library::Cumsum { dim, exclusive, reverse } => Some(indexed::cumsum(site, (*dim, *exclusive, *reverse), instr)?),
            Library::Attention(attention) => Some(self.attention(site, attention, instr, Pass::Forward)?),
            Library::AttentionGrad(attention) => Some(self.attention(site, attention, instr, Pass::Backward)?),
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
        Ok(work.map(Call))
    }
}

/// Operands and results.
pub(crate) fn arity(library: &Library) -> (usize, usize) {
    match library {
        Library::Zero { .. } => (0, 1),
        Library::Dot { .. } | Library::Convolution { .. } | Library::ScatterAdd { .. } => (2, 1),
        Library::MaxPool(_) => (1, 2),
        Library::Attention(a) => (3 + usize::from(a.mask != MaskKind::None), 2),
        Library::AttentionGrad(a) => (6 + usize::from(a.mask != MaskKind::None), 3),
        _ => (1, 1),
    }
}
