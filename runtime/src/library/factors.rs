//! A spec's factors on one rank: what of each is computed here, and how it walks through the operands' blocks.

use crate::error::{Error, Result};
use dcc_program::factors::{DimFactors, FactorSpec};
use dcc_program::mesh::{Coordinates, Extent, Mesh};
use dcc_program::types::{AxisList, TensorType};

pub(super) struct Factors {
    pub extents: Vec<Extent>,
}

impl Factors {
    /// Errors: types that do not fit the spec, or that shard one factor in two ways.
    pub fn new(
        spec: &FactorSpec,
        operands: &[&TensorType],
        result: &TensorType,
        mesh: &Mesh,
        at: &Coordinates,
    ) -> Result<Factors> {
        let sizes = spec.sizes(operands, result).map_err(Error::artifact)?;
        let mut axes: Vec<Option<AxisList>> = vec![None; sizes.len()];
        for (dims, ty) in spec.operands.iter().zip(operands).chain([(&spec.result, &result)]) {
            for (dim, dim_axes) in dims.iter().zip(&ty.sharding.dims) {
                let split = FactorSpec::split_axes(dim, &sizes, dim_axes, mesh);
                for (factor, list) in split.ok_or_else(|| Error::artifact("axes do not divide a compound dim"))? {
                    if axes[usize::from(factor.0)].replace(list.clone()).is_some_and(|other| other != list) {
                        let name = &spec.names[usize::from(factor.0)];
                        return Err(Error::artifact(format!("factor {name} of `{}` has two shardings", spec.text())));
                    }
                }
            }
        }
        let extent = |(&size, axes): (&u64, &Option<AxisList>)| mesh.extent(size, axes.as_deref().unwrap_or_default(), at);
        Ok(Factors { extents: sizes.iter().zip(&axes).map(extent).collect() })
    }

    /// Element strides of an operand with these dims, by factor; none where it lacks the factor.
    pub fn strides(&self, dims: &[DimFactors]) -> Vec<Option<usize>> {
        let mut strides = vec![None; self.extents.len()];
        let mut stride = 1;
        for factor in dims.iter().rev().flat_map(|dim| dim.iter().rev()) {
            let factor = usize::from(factor.0);
            *strides[factor].get_or_insert(0) += stride;
            stride *= self.extents[factor].block as usize;
        }
        strides
    }

    /// Elements of the factor that exist on this rank.
    pub fn valid(&self, factor: usize) -> usize {
        self.extents[factor].valid as usize
    }
}
