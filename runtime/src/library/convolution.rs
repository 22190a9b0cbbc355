//! Convolutions and their gradients: what moves in windows, and what does not.

use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_kernels::library::convolution::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use dcc_program::factors::FactorSpec;
use dcc_program::program::Instr;
use dcc_program::types::DType;
use dcc_program::window::Window;

/// A convolution's loops: what moves in windows, what does not, and the dtypes of operands and result.
pub struct Geometry {
    pub form: Form,
    pub plain: Vec<Plain>,
    pub spatial: Vec<Spatial>,
    pub dtypes: [DType; 3],
}

impl Geometry {
    /// Errors: operands that do not fit the windows.
    pub fn new(site: &Site<'_>, (spec, windows): (&FactorSpec, &[Window]), instr: &Instr) -> Result<Geometry> {
        let ids = [instr.operands[0], instr.operands[1], instr.results[0]];
        let types = ids.map(|id| site.ty(id));
        let [a, b, result] = types;
        if b.dtype != a.dtype || !super::results_of(a.dtype).contains(&result.dtype) {
            return Err(Error::artifact("a convolution of operands with different dtypes"));
        }
        let factors = Factors::new(spec, &[a, b], result, site.mesh(), &site.coordinates(0))?;
        let roles = roles(spec, windows)?;
        let strides = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
        let by_role = |f: usize| roles.map(|tensor| strides[tensor][f]);
        let spatial = windows.iter().map(|window| {
            let factor = |name: &str| spec.names.iter().position(|n| n == name).expect("`roles` saw it");
            let [x, y, k] = window.names().map(factor);
            Spatial {
                sizes: [x, y, k].map(|f| factors.valid(f)),
                strides: [(x, IMAGE), (y, OUTPUT), (k, KERNEL)].map(|(f, role)| by_role(f)[role].expect("`roles` saw it")),
                stride: window.stride as usize,
                dilation: window.dilation as usize,
                pad: window.pad as isize,
            }
        });
        let spatial: Vec<Spatial> = spatial.collect();
        let moves = |f: &usize| windows.iter().any(|w| w.names().contains(&&spec.names[*f][..]));
        let plain = (0..spec.names.len()).filter(|f| !moves(f)).map(|f| Plain { size: factors.valid(f), strides: by_role(f) });
        let plain: Vec<Plain> = plain.collect();
        if plain.iter().any(|f| f.strides.iter().flatten().count() < 2) {
            return Err(Error::artifact(format!("`{}` sums over a factor of one operand", spec.text())));
        }
        let role = |tensor: usize| roles.iter().position(|&t| t == tensor).expect("each tensor has a role");
        let form = Form { result: role(2), operands: [role(0), role(1)] };
        let [a, b, result] = [site.span(ids[0])?, site.span(ids[1])?, site.span(ids[2])?];
        if result.overlaps(&a) || result.overlaps(&b) {
            return Err(Error::artifact("a convolution that overwrites its operands"));
        }
        Ok(Geometry { form, plain, spatial, dtypes: types.map(|ty| ty.dtype) })
    }
}

/// Which tensor (operands 0 and 1, result 2) is image, output and kernel: the one that has those factors of all windows.
fn roles(spec: &FactorSpec, windows: &[Window]) -> Result<[usize; 3]> {
    let tensors = [&spec.operands[0], &spec.operands[1], &spec.result];
    let has = |tensor: usize, name: &str| tensors[tensor].iter().flatten().any(|f| spec.names[usize::from(f.0)] == name);
    let of = |role: usize| (0..3).find(|&tensor| windows.iter().all(|w| has(tensor, w.names()[role])));
    match (of(IMAGE), of(OUTPUT), of(KERNEL)) {
        (Some(x), Some(y), Some(k)) if x != y && x != k && y != k => Ok([x, y, k]),
        _ => Err(Error::artifact(format!("the windows of `{}` do not tell image, output and kernel apart", spec.text()))),
    }
}
