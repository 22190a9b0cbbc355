//! Transposed copies that the exporter stored of parameters which are read both ways, such as a tied embedding, and those that it stored
//! once for each call of a module.

use super::transpose;
use crate::import::fx::FxCall;
use crate::import::parameters::signature::Signature;
use crate::import::parameters::trace;
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

/// Makes one tensor of the transposed weights that calls of one linear layer read, such as those of two towers that share it: the call of
/// each names the same parameter.
pub fn merge(graph: &mut GraphProto, signature: &Signature) {
    let there: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    let missing: Vec<(&str, &str)> = signature.parameters().filter(|(name, _)| !there.contains(name)).collect();
    let (turned, _) = trace::transposes(graph, &missing);
    let mut firsts: BTreeMap<(&str, &[i64], i32), &str> = BTreeMap::new();
    let mut copies: BTreeMap<String, String> = BTreeMap::new();
    for tensor in &graph.initializer {
        let Some(weight) = turned.get(tensor.name()) else { continue };
        let first = *firsts.entry((weight, &tensor.dims, tensor.data_type())).or_insert(tensor.name());
        if first != tensor.name() {
            copies.insert(tensor.name().to_owned(), first.to_owned());
        }
    }
    rename(&mut graph.node, &copies);
    graph.initializer.retain(|tensor| !copies.contains_key(tensor.name()));
}

/// Reads of `names` in the nodes and in their inner graphs become reads of what these stand for.
fn rename(nodes: &mut [NodeProto], names: &BTreeMap<String, String>) {
    for node in nodes {
        for input in &mut node.input {
            if let Some(name) = names.get(input) {
                input.clone_from(name);
            }
        }
        let inner = node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs));
        inner.for_each(|graph| rename(&mut graph.node, names));
    }
}
