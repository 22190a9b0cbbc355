//! Maxima over windows.

use super::Running;
use super::call::Work;
use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_kernels::library::pool::{Axis, MaxPool};
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

/// Planes and windows of a max_pool, and its dtype. Errors: operands that do not fit it.
pub(crate) fn geometry(site: &Site<'_>, pool: &Pool, instr: &Instr) -> Result<(MaxPool, DType)> {
    let [image, values, places] = [instr.operands[0], instr.results[0], instr.results[1]];
    let types = [image, values, places].map(|id| site.ty(id));
    let dtype = types[0].dtype;
    if types[1].dtype != dtype || types[2].dtype != DType::I32 || types[1].sharding != types[2].sharding {
        return Err(Error::artifact("a max_pool with results of other types"));
    }
    if !matches!(dtype, DType::F32 | DType::F64) {
        return Err(Error::device(format!("no max_pool of {} on this device", dtype.name())));
    }
    let spec = &pool.spec;
    let factors = Factors::new(spec, &[types[0]], types[1], site.mesh(), &site.coordinates(0))?;
    let find = |name: &str| spec.names.iter().position(|n| n == name);
    let (Some(x), Some(y)) = (find("x"), find("y")) else {
        return Err(Error::artifact(format!("`{}` has no factors x and y", spec.text())));
    };
    let [from, to] = [&spec.operands[0], &spec.result].map(|dims| factors.strides(dims));
    if from[x] != Some(1) || to[y] != Some(1) {
        return Err(Error::device(format!("max_pool `{}`, whose planes are not its last dim, on this device", spec.text())));
    }
    if pool.sizes() != [factors.valid(x) as u64, factors.valid(y) as u64] {
        return Err(Error::artifact("a max_pool of planes of other sizes"));
    }
    let mut planes = vec![[0; 2]];
    for f in (0..spec.names.len()).filter(|&f| f != x && f != y) {
        let (Some(from), Some(to)) = (from[f], to[f]) else {
            return Err(Error::artifact(format!("`{}` has a factor on one side alone", spec.text())));
        };
        planes = planes.iter().flat_map(|p| (0..factors.valid(f)).map(move |i| [p[0] + i * from, p[1] + i * to])).collect();
    }
    let axis = |dim: &dcc_program::window::PoolDim| Axis {
        image: dim.image as usize,
        outputs: dim.outputs as usize,
        taps: dim.taps as usize,
        stride: dim.stride as usize,
        dilation: dim.dilation as usize,
        pad: dim.pad as isize,
    };
    Ok((MaxPool { planes, axes: pool.dims.iter().map(axis).collect() }, dtype))
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
