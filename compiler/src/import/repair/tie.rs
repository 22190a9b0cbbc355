//! Transposed copies that the exporter stored of parameters which are read both ways, such as a tied embedding.

use super::transpose;
use crate::import::fx::FxCall;
use crate::import::parameters::signature::Signature;
use crate::import::proto::{GraphProto, NodeProto};
use std::collections::{BTreeMap, BTreeSet};

/// Makes transposed copies of parameters computed again. The call of a node reads the parameter, the node a tensor of the
/// exporter's that has its dims reversed.
pub fn tie(graph: &mut GraphProto, signature: &Signature) {
    let dims: BTreeMap<&str, &[i64]> = graph.initializer.iter().map(|tensor| (tensor.name(), &tensor.dims[..])).collect();
    let parameters: BTreeMap<&str, &str> = signature.parameters().map(|(name, argument)| (argument, name)).collect();
    let mut copies: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for node in &graph.node {
        let read: Vec<&str> = FxCall::of(node).values().filter_map(|value| parameters.get(value).copied()).collect();
        for input in node.input.iter().filter(|input| signature.is_parameter(input).is_none()) {
            let Some((input, [rows, columns])) = dims.get_key_value(input.as_str()) else { continue };
            let whole = |name: &&str| {
                let dims = dims.get(name).copied();
                dims == Some(&[*columns, *rows]) && node.input.iter().all(|input| input != name)
            };
            // Where a parameter is missing, the tensor may be that one.
            let all_there = read.iter().all(|name| dims.contains_key(name));
            let mut sources = read.iter().copied().filter(whole);
            let source = match (sources.next(), sources.next(), all_there) {
                (Some(source), None, true) => Some(source),
                _ => None,
            };
            copies.entry(input).or_default().insert(source);
        }
    }
    let one = |(copy, sources): (&str, BTreeSet<Option<&str>>)| match sources.into_iter().collect::<Vec<_>>()[..] {
        [Some(source)] => Some((copy.to_owned(), source.to_owned())),
        _ => None,
    };
    let copies: BTreeMap<String, String> = copies.into_iter().filter_map(one).collect();
    graph.initializer.retain(|tensor| !copies.contains_key(tensor.name()));
    let transposes: Vec<NodeProto> = copies.into_iter().map(|(copy, source)| transpose(source, copy)).collect();
    graph.node.splice(0..0, transposes);
}
