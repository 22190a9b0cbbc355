//! Where an instruction is prepared: a program as seen from one rank.

use super::blocks::{Blocks, Span};
use crate::error::{Error, Result};
use dcc_program::mesh::{Coordinates, Extent, Mesh};
use dcc_program::program::{BufferId, Program};
use dcc_program::types::TensorType;

pub struct Site<'a> {
    program: &'a Program,
    blocks: &'a Blocks,
    /// With `mb` = 0.
    at: Coordinates,
}

impl<'a> Site<'a> {
    /// Errors: buffers that lie outside of their blocks, microbatches of different sizes.
    pub(super) fn new(program: &'a Program, blocks: &'a Blocks, rank: u32) -> Result<Site<'a>> {
        let mesh = &program.mesh;
        let microbatches = u64::from(mesh.size_of("mb"));
        for buffer in &program.buffers {
            blocks.span(buffer, mesh)?;
            let split = |axes: &[_]| mesh.microbatch_axis().is_some_and(|mb| axes.contains(&mb));
            let mut dims = buffer.ty.shape.iter().zip(&buffer.ty.sharding.dims);
            if dims.any(|(size, axes)| {
                split(axes) && (axes.first() != mesh.microbatch_axis().as_ref() || size % microbatches != 0)
            }) {
                return Err(Error::artifact(format!("{} has microbatches of different sizes", buffer.ty.text(mesh))));
            }
        }
        Ok(Site { program, blocks, at: mesh.coordinates(rank) })
    }

    pub fn program(&self) -> &'a Program {
        self.program
    }

    pub fn mesh(&self) -> &'a Mesh {
        &self.program.mesh
    }

    pub fn microbatches(&self) -> u32 {
        self.mesh().size_of("mb")
    }

    /// The rank's place in the mesh while it works on a microbatch.
    pub fn coordinates(&self, microbatch: u32) -> Coordinates {
        let mut at = self.at.clone();
        if let Some(mb) = self.mesh().microbatch_axis() {
            at.0[usize::from(mb.0)] = microbatch;
        }
        at
    }

    /// # Panics
    /// If there is no such buffer; `Executor::new` saw that there is.
    pub fn ty(&self, id: BufferId) -> &'a TensorType {
        self.program.ty(id)
    }

    pub fn span(&self, id: BufferId) -> Result<Span> {
        self.blocks.span(self.program.buffer(id), self.mesh())
    }

    pub fn extents(&self, id: BufferId, microbatch: u32) -> Result<Vec<Extent>> {
        Ok(self.ty(id).extents(self.mesh(), &self.coordinates(microbatch)).to_vec())
    }
}
