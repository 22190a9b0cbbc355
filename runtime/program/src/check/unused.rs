//! Nothing is computed or kept in vain: where it is, what was to use it has been lost, such as one term of a sum.

use super::{CheckError, Checked, Fault, error, refuse, text_of};
use crate::program::*;
use std::collections::HashSet;

pub(super) fn program(p: &Program) -> Result<(), CheckError> {
    let mut read: HashSet<BufferId> = p.outputs.iter().map(|x| x.buffer).collect();
    read.extend(p.params.iter().map(|x| x.buffer));
    read.extend(p.sections.iter().flat_map(|s| &s.body).flat_map(|i| &i.operands));
    for section in &p.sections {
        for instr in &section.body {
            let at = || format!("stage {}, section {}, `{}`", p.stage, section.id().name(), text_of(p, instr));
            // Several results of one launch are computed together; those of one transfer are moved for their own sakes.
            let unread = |id: &&BufferId| !read.contains(id);
            let in_vain = match instr.action {
                Action::Wait(_) => instr.results.iter().find(unread),
                _ => instr.results.first().filter(|_| instr.results.iter().all(|id| unread(&id))),
            };
            if let Some(id) = in_vain {
                return Err(error(at(), (Fault::Unused, format!("nothing reads b{}", id.0))));
            }
        }
    }
    kept(p).map_err(|e| error(format!("stage {}", p.stage), e))
}

/// What an area holds is read in the last section that the area is for, or a transfer of it is waited for there.
fn kept(p: &Program) -> Checked<()> {
    let place = |id: BufferId| (p.buffer(id).place, p.buffer(id).offset);
    let started = |token: TokenId| {
        let all = p.sections.iter().flat_map(|s| &s.body);
        all.filter(move |i| matches!(i.action, Action::Start { token: t, .. } if t == token)).flat_map(|i| &i.operands)
    };
    let mut read = HashSet::new();
    for section in &p.sections {
        for instr in &section.body {
            read.extend(instr.operands.iter().map(|&id| (section.id(), place(id))));
            if let Action::Wait(token) = instr.action {
                read.extend(started(token).map(|&id| (section.id(), place(id))));
            }
        }
    }
    let outputs: HashSet<_> = p.outputs.iter().map(|x| place(x.buffer)).collect();
    let written = p.sections.iter().flat_map(|s| &s.body).flat_map(|i| &i.results);
    for &id in written {
        let Place::Area(area) = p.buffer(id).place else { continue };
        let Area { from, to, .. } = p.areas[area as usize];
        if from != to && !outputs.contains(&place(id)) && !read.contains(&(to, place(id))) {
            return refuse(Fault::Unused, format!("b{} is kept for {}, which does not read it", id.0, to.name()));
        }
    }
    Ok(())
}
