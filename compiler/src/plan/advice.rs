//! What to ask for in place of what no plan has: only what the batch allows.

use super::forward::{Forward, Kind};
use super::{Parallel, Plan, Schedule, tensor};
use crate::error::Error;
use crate::graph::NodeId;
use crate::ops::Op;

/// Samples of a step; 1 where no input counts any.
fn samples(forward: &Forward) -> u64 {
    let of = |id: &NodeId| match &forward.graph[*id].op {
        Op::Input(input) if forward.kind(*id) == Kind::Input => input.batch_dim.map(|dim| input.shape[usize::from(dim)]),
        _ => None,
    };
    forward.order.iter().find_map(of).unwrap_or(1)
}

/// What `ranks` that cannot share by `flag` do instead: share samples, if those divide.
pub(super) fn instead(forward: &Forward, options: &Parallel, flag: &str, ranks: u32) -> String {
    let others = if flag == "--ep" { 1 } else { u64::from(options.ep) };
    let dp = u64::from(options.dp) * u64::from(ranks);
    if !samples(forward).is_multiple_of(dp * others * u64::from(options.microbatches)) {
        return format!("leave out {flag}");
    }
    let given = if options.dp > 1 { format!(" of --dp {} {flag} {ranks}", options.dp) } else { String::new() };
    format!("use --dp {dp} instead{given}")
}

/// What runs where an interleaved schedule cannot group the microbatches: the nearest count that can, of those that the samples and
/// the model allow, or one chunk a rank.
pub(super) fn grouped(forward: &Forward, plan: &Plan, options: &Parallel) -> String {
    let (pp, given) = (u64::from(plan.stages()), u64::from(plan.microbatches()));
    let share = samples(forward) / (u64::from(options.dp) * u64::from(options.ep)).max(1);
    let counts = (1..=share / pp).map(|groups| groups * pp).filter(|&count| share.is_multiple_of(count));
    let nearest = counts.min_by_key(|count| count.abs_diff(given)).and_then(|count| u32::try_from(count).ok());
    let allowed = |&microbatches: &u32| tensor::allows(forward, &Parallel { microbatches, ..options.clone() });
    let count = nearest.filter(allowed).map(|count| format!("use --grad-accum {count}, or "));
    format!("{}leave out --virtual-stages", count.unwrap_or_default())
}

/// One microbatch is none that an interleaved schedule can group.
pub(super) fn beside_chunks(error: Error, options: &Parallel) -> Error {
    let grouped = options.schedule == Schedule::OneFOneB && options.virtual_stages > 1 && options.pp > 1;
    match error.code == Error::plan("").code && grouped {
        true => {
            let help = "use --grad-accum 1 without --virtual-stages, where every device sees its whole batch";
            Error { help: Some(help.to_owned()), ..error }
        }
        false => error,
    }
}
