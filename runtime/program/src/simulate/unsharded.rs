//! What a program means: the same one for one rank per stage and one microbatch.

use crate::program::Program;

/// Every axis but `pp` of size 1, offsets stretched so that the larger blocks fit. What a set of programs computes on its mesh,
/// it must compute like this.
pub fn unsharded(program: &Program) -> Program {
    let mut p = program.clone();
    let factor: u64 = p.mesh.axes.iter().filter(|a| a.name != "pp").map(|a| u64::from(a.size)).product();
    p.mesh.axes.iter_mut().filter(|a| a.name != "pp").for_each(|a| a.size = 1);
    p.buffers.iter_mut().for_each(|b| b.offset *= factor);
    p.areas.iter_mut().for_each(|a| a.bytes *= factor);
    p.persistent_bytes *= factor;
    p.scratch_bytes *= factor;
    p.order.retain(|step| step.microbatch == 0);
    p
}
