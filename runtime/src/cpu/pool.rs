//! Maxima over windows.

use super::Running;
use super::call::Work;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use crate::library::pool::geometry;
use dcc_kernels::library::pool::MaxPool;
use dcc_program::program::Instr;
use dcc_program::types::DType;
use dcc_program::window::Pool;

/// Values and places of the maxima of an image.
pub(super) struct Pooling {
    plan: MaxPool,
    image: Span,
    values: Span,
    places: Span,
    dtype: DType,
}

pub(super) fn max_pool(site: &Site<'_>, pool: &Pool, instr: &Instr) -> Result<Work> {
    let (plan, dtype) = geometry(site, pool, instr)?;
    let [image, values, places] = [instr.operands[0], instr.results[0], instr.results[1]];
    let [image, values, places] = [site.span(image)?, site.span(values)?, site.span(places)?];
    if values.overlaps(&image) || places.overlaps(&image) || values.overlaps(&places) {
        return Err(Error::artifact("a max_pool that overwrites its operand"));
    }
    Ok(Work::MaxPool(Pooling { plan, image, values, places, dtype }))
}

impl Pooling {
    pub fn run(&self, on: &Running<'_>) {
        // SAFETY: `max_pool` saw the dtypes, and that neither result overlaps the image or the other.
        unsafe {
            let places = on.memory.elements_mut(self.places, on.bases);
            match self.dtype {
                DType::F32 => {
                    let values = on.memory.elements_mut(self.values, on.bases);
                    self.plan.run(on.pool, f32::NEG_INFINITY, on.memory.elements(self.image, on.bases), values, places);
                }
                _ => {
                    let values = on.memory.elements_mut(self.values, on.bases);
                    self.plan.run(on.pool, f64::NEG_INFINITY, on.memory.elements(self.image, on.bases), values, places);
                }
            }
        }
    }
}
