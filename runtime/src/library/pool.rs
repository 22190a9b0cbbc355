//! Maxima over windows: planes and windows.

use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_kernels::library::pool::{Axis, MaxPool};
use dcc_program::program::Instr;
use dcc_program::types::DType;
use dcc_program::window::Pool;

/// Planes and windows of a max_pool, and its dtype. Errors: operands that do not fit it.
pub fn geometry(site: &Site<'_>, pool: &Pool, instr: &Instr) -> Result<(MaxPool, DType)> {
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
