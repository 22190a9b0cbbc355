//! Where an instruction is prepared: a program as seen from one rank.

use super::blocks::{Blocks, Span};
use crate::error::{Error, Result};
use dcc_kernels::tile::Nest;
use dcc_program::kernel::Kernel;
use dcc_program::mesh::{Coordinates, Extent, Mesh};
use dcc_program::program::{Action, BufferId, Instr, Program};
use dcc_program::types::TensorType;

pub struct Site<'a> {
    program: &'a Program,
    blocks: &'a Blocks,
    /// With `mb` = 0.
    at: Coordinates,
    /// By buffer.
    passed_on: Vec<bool>,
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
        Ok(Site { program, blocks, at: mesh.coordinates(rank), passed_on: passed_on(program) })
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

    /// Whether one instruction defines the buffer, one generated kernel reads it, once, and nothing else knows of it.
    pub fn is_passed_on(&self, id: BufferId) -> bool {
        self.passed_on[id.0 as usize]
    }

    pub fn span(&self, id: BufferId) -> Result<Span> {
        self.blocks.span(self.program.buffer(id), self.mesh())
    }

    pub fn extents(&self, id: BufferId, microbatch: u32) -> Result<Vec<Extent>> {
        Ok(self.ty(id).extents(self.mesh(), &self.coordinates(microbatch)).to_vec())
    }
}

/// As `Site::is_passed_on`.
fn passed_on(program: &Program) -> Vec<bool> {
    // Definitions, reads, and reads by kernels, of each buffer.
    let mut uses = vec![[0u32; 3]; program.buffers.len()];
    for instr in program.sections.iter().flat_map(|section| &section.body) {
        let by_kernel = u32::from(matches!(instr.action, Action::Kernel(_)));
        instr.results.iter().for_each(|id| uses[id.0 as usize][0] += 1);
        for id in &instr.operands {
            uses[id.0 as usize][1] += 1;
            uses[id.0 as usize][2] += by_kernel;
        }
    }
    let outside = program.params.iter().map(|param| param.buffer).chain(program.scalars.iter().map(|scalar| scalar.buffer));
    let ports = program.inputs.iter().map(|input| input.buffer).chain(program.outputs.iter().map(|output| output.buffer));
    outside.chain(ports).for_each(|id| uses[id.0 as usize][1] += 1);
    uses.into_iter().map(|uses| uses == [1, 1, 1]).collect()
}

/// A generated kernel as a rank's instruction runs it.
pub struct Bound {
    pub nest: Nest,
    /// Inputs, then outputs.
    pub operands: Vec<Span>,
    /// Global offsets of microbatch 0, and what each microbatch adds.
    pub offsets: Vec<(i64, i64)>,
}

impl Bound {
    /// Errors: operands that do not fit the kernel.
    pub fn new(site: &Site<'_>, kernel: &Kernel, instr: &Instr) -> Result<Bound> {
        let at_microbatch = |index| -> Result<(Vec<Vec<Extent>>, Vec<Vec<Extent>>)> {
            let extents = |ids: &[_]| ids.iter().map(|&id| site.extents(id, index)).collect::<Result<Vec<_>>>();
            Ok((extents(&instr.operands)?, extents(&instr.results)?))
        };
        let parameters = |(inputs, outputs): &(Vec<Vec<Extent>>, Vec<Vec<Extent>>)| {
            Nest::parameters(kernel, inputs, outputs).map_err(Error::artifact)
        };
        let first = at_microbatch(0)?;
        let base = parameters(&first)?;
        let next = if site.microbatches() > 1 { parameters(&at_microbatch(1)?)? } else { base.clone() };
        let nest = Nest::bind(kernel, &first.0, &first.1).map_err(Error::artifact)?;
        let operands = instr.operands.iter().chain(&instr.results).map(|&id| site.span(id)).collect::<Result<Vec<Span>>>()?;
        let offsets = base.iter().zip(&next).map(|(&base, &next)| (base, next - base)).collect();
        Ok(Bound { nest, operands, offsets })
    }
}
