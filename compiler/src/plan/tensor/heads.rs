//! The heads of attention, which ranks of `--tp` share where their number divides.

use super::super::forward::Forward;
use super::super::{Parallel, Plan};
use crate::graph::NodeId;
use crate::ops::Op;
use std::collections::BTreeSet;

/// The factors of an attention that count heads.
const FACTORS: [&str; 2] = ["h", "g"];

/// Key heads and query heads per key head of an attention.
pub(super) fn heads(forward: &Forward, id: NodeId) -> Option<(u64, u64)> {
    let Op::Attention(attention) = &forward.graph[id].op else { return None };
    let size = |name: &str| {
        let factor = attention.attributes.spec.names.iter().position(|n| n == name)?;
        Some(forward.rule(id).sizes[factor])
    };
    Some((size(FACTORS[0]).unwrap_or(1), size(FACTORS[1]).unwrap_or(1)))
}

/// Whether `parts` ranks can share the heads: some of the key heads each, or all key heads and some of their query heads.
fn reaches((keys, queries): (u64, u64), parts: u64) -> bool {
    keys.is_multiple_of(parts) || (parts.is_multiple_of(keys) && queries.is_multiple_of(parts / keys))
}

/// Tells of attention that several of the `--tp` ranks compute alike, as its heads do not divide.
pub(in super::super) fn note(forward: &Forward, plan: &Plan, options: &Parallel) -> Option<String> {
    let tp = u64::from(options.tp);
    let attention = || forward.order.iter().filter_map(|&id| Some((id, heads(forward, id)?)));
    let (id, (keys, queries)) = attention().find(|&(_, heads)| tp > 1 && !reaches(heads, tp))?;
    let Op::Attention(op) = &forward.graph[id].op else { return None };
    let factors = op.attributes.spec.names.iter().zip(&plan.strategies.get(&id)?.factors);
    let axes = factors.filter(|(name, _)| FACTORS.contains(&name.as_str())).flat_map(|(_, axes)| axes);
    let tensor = axes.filter(|&&axis| plan.mesh.name(axis).starts_with("tp"));
    let parts: u64 = tensor.map(|&axis| u64::from(plan.mesh.size(axis))).product();
    let all: BTreeSet<(u64, u64)> = attention().map(|(_, heads)| heads).collect();
    let most = all.iter().map(|(keys, queries)| keys * queries).max().unwrap_or(1);
    let good: Vec<u64> = (2..=most.min(4096)).filter(|&parts| all.iter().all(|&heads| reaches(heads, parts))).collect();
    let counts = if queries == 1 { format!("{keys} heads") } else { format!("{} heads over {keys} key heads", keys * queries) };
    let how = if parts == 1 { "each computes it whole".into() } else { format!("{} compute each part alike", tp / parts) };
    let instead = if good.is_empty() { String::new() } else { format!("; `--tp {}` divides heads", listed(&good)) };
    Some(format!("not all ranks of `--tp {tp}` can share attention with {counts}: {how}{instead}"))
}

/// `1, 2 or 4`
fn listed(numbers: &[u64]) -> String {
    match numbers.split_last() {
        Some((last, rest)) if !rest.is_empty() => {
            let rest: Vec<String> = rest.iter().map(u64::to_string).collect();
            format!("{} or {last}", rest.join(", "))
        }
        Some((last, _)) => last.to_string(),
        None => String::new(),
    }
}
