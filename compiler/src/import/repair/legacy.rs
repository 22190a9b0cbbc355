//! What PyTorch's older exporter merged because it was equal: gains of fresh norms, biases, running statistics.
//!
//! It writes one of them and `Identity(n.weight) -> m.weight` for the others: parameters that are one object in the module have one
//! name only. Tools that simplify the file drop the Identity; then the node `/m/LayerNormalization` reads `n.weight`.

use super::calls::Calls;
use super::leaf;
use crate::import::parameters::warnings::{ADVICE, listed};
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

/// What `torch.nn` calls the tensors of norms.
const LEAVES: &[&str] = &["weight", "bias", "running_mean", "running_var"];

/// Gives each that is sure to be one its own tensor. Returns what is not sure, for the user to know.
pub fn part(graph: &mut GraphProto) -> Vec<String> {
    let mut told: Vec<String> = identities(graph).into_iter().collect();
    told.extend(norms(graph));
    told
}

/// Tells which copies are taken for one parameter that several calls read.
fn identities(graph: &mut GraphProto) -> Option<String> {
    let outputs: BTreeSet<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
    let mut tensors: BTreeMap<String, TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect();
    let before = tensors.len();
    if before != graph.initializer.len() {
        return None;
    }
    let tied = Calls::of(graph).tied();
    let mut parted = Vec::new();
    graph.node.retain(|node| {
        let ("Identity", [from], [to]) = (node.op_type(), &node.input[..], &node.output[..]) else { return true };
        let own = is_of_module(to) && !tied.contains(to) && !outputs.contains(to) && scope(node).is_empty();
        let Some(tensor) = tensors.get(from).filter(|_| own) else {
            return true;
        };
        let own = TensorProto { name: Some(to.clone()), ..tensor.clone() };
        tensors.insert(to.clone(), own.clone());
        parted.push(own);
        false
    });
    graph.initializer.extend(parted);
    (!tied.is_empty()).then(|| {
        let names = listed(&tied.iter().collect::<Vec<_>>());
        format!("{names}: copies of one parameter for several calls of a module, and train as one; if the module has them apart, {ADVICE}")
    })
}

/// A name that a module has, or that the exporter gives to a tensor it folds; values of nodes are `/fc/MatMul_output_0` or `17`.
fn is_of_module(name: &str) -> bool {
    !name.starts_with('/') && !name.bytes().all(|byte| byte.is_ascii_digit())
}

/// Norms of other modules than their tensors', which have norms too: running statistics are given their own.
fn norms(graph: &mut GraphProto) -> Vec<String> {
    let tensors: BTreeMap<String, TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect();
    let own: BTreeSet<String> = graph
        .node
        .iter()
        .flat_map(|node| parameters(node).map(|(input, _)| (scope(node), input)).collect::<Vec<_>>())
        .filter(|(scope, input)| input.rsplit_once('.').is_some_and(|(module, _)| module == scope))
        .map(|(_, input)| input.to_owned())
        .collect();
    let mut parted: BTreeMap<String, TensorProto> = BTreeMap::new();
    let mut tied: BTreeMap<String, String> = BTreeMap::new();
    for node in &mut graph.node {
        let module = scope(node);
        let wanted: Vec<(usize, String)> = parameters(node)
            .enumerate()
            .map(|(at, (input, leaf))| (at + 1, input, format!("{module}.{leaf}")))
            .filter(|(_, input, name)| input != name && own.contains(*input) && !tensors.contains_key(name))
            .filter(|(_, input, _)| LEAVES.contains(&leaf(input)) && tensors.contains_key(*input))
            .map(|(at, _, name)| (at, name))
            .collect();
        for (at, name) in wanted.into_iter().filter(|_| !module.is_empty()) {
            // A running statistic is no parameter; a parameter may be tied.
            if at > 2 {
                let tensor = TensorProto { name: Some(name.clone()), ..tensors[&node.input[at]].clone() };
                node.input[at].clone_from(&name);
                parted.insert(name, tensor);
            } else {
                tied.insert(name, node.input[at].clone());
            }
        }
    }
    graph.initializer.extend(parted.into_values());
    let told = |(name, read): (String, String)| {
        format!(
            "`{name}` is not in the file, whose nodes read `{read}` for it: tied in the module, or merged by a tool because they were \
             equal; they train as one, and if the module has them apart, {ADVICE}"
        )
    };
    tied.into_iter().map(told).collect()
}

/// The parameters of a norm that is a module: what it reads, and what the module calls it.
fn parameters(node: &NodeProto) -> impl Iterator<Item = (&str, &'static str)> {
    let leaves: &[&str] = match node.op_type() {
        "BatchNormalization" => LEAVES,
        "InstanceNormalization" | "LayerNormalization" | "GroupNormalization" => &LEAVES[..2],
        _ => &[],
    };
    node.input.iter().skip(1).map(String::as_str).zip(leaves.iter().copied())
}

/// The module of a node by its name: `layers.0.norm` of `/layers/layers.0/norm/LayerNormalization_1`; empty where it has none.
fn scope(node: &NodeProto) -> String {
    let mut path: Vec<&str> = node.name().split('/').collect();
    if path.len() < 3 || !path[0].is_empty() {
        return String::new();
    }
    path.pop();
    path.remove(0);
    // A list that is called itself is there twice.
    let twice = |pair: &[&str]| pair[1].strip_prefix(pair[0]).is_some_and(|rest| rest.starts_with('.'));
    let kept = (0..path.len()).filter(|&at| !path.get(at..at + 2).is_some_and(twice));
    kept.map(|at| path[at]).collect::<Vec<_>>().join(".")
}
