//! Gives running statistics that a file shares with something else a tensor of their own.
//!
//! Exporters make one initializer of tensors that are equal when they export, such as the bias and the running mean of a fresh norm. A
//! training step moves the two apart. Norms that share both statistics, one module used twice, keep them.

use super::model::is_default_domain;
use super::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What reads a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Other,
    Mean,
    Variance,
}

/// A tensor keeps its name for the first of its roles.
pub fn part_statistics(graph: &mut GraphProto) {
    let roots = roots(graph);
    let mut roles: BTreeMap<String, BTreeSet<Role>> = BTreeMap::new();
    let mut note = |input: &str, role| {
        if let Some(&root) = roots.get(input) {
            roles.entry(root.to_owned()).or_default().insert(role);
        }
    };
    for node in graph.node.iter().filter(|node| !is_identity(node)) {
        node.input.iter().enumerate().for_each(|(position, input)| note(input, role(node, position)));
        inner(node, &mut |input| note(input, Role::Other));
    }
    roles.retain(|_, roles| roles.len() > 1);
    if roles.is_empty() {
        return;
    }
    let roots: HashMap<String, String> = roots.into_iter().map(|(value, root)| (value.to_owned(), root.to_owned())).collect();
    let mut taken: BTreeSet<String> = graph.initializer.iter().map(|tensor| tensor.name().to_owned()).collect();
    taken.extend(graph.node.iter().flat_map(|node| node.output.iter().cloned()));
    let mut parted: BTreeMap<(String, Role), String> = BTreeMap::new();
    let mut made: Vec<TensorProto> = Vec::new();
    for node in &mut graph.node {
        for position in [3, 4] {
            let Some(root) = node.input.get(position).and_then(|input| roots.get(input)) else { continue };
            let role = role(node, position);
            let shared = roles.get(root).is_some_and(|roles| role != Role::Other && roles.first() != Some(&role));
            if !shared {
                continue;
            }
            let name = parted.entry((root.clone(), role)).or_insert_with(|| {
                let name = fresh(node, role, &mut taken);
                let tensor = graph.initializer.iter().find(|tensor| tensor.name() == root).expect("a root is an initializer");
                made.push(TensorProto { name: Some(name.clone()), ..tensor.clone() });
                name
            });
            node.input[position] = name.clone();
        }
    }
    graph.initializer.extend(made);
}

/// The initializers, and what is one under another name.
fn roots(graph: &GraphProto) -> HashMap<&str, &str> {
    let mut roots: HashMap<&str, &str> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor.name())).collect();
    for node in graph.node.iter().filter(|node| is_identity(node)) {
        if let ([from], [to]) = (&node.input[..], &node.output[..])
            && let Some(&root) = roots.get(from.as_str())
        {
            roots.insert(to, root);
        }
    }
    roots
}

fn is_identity(node: &NodeProto) -> bool {
    node.op_type() == "Identity" && is_default_domain(node.domain())
}

/// A norm whose statistics are outputs too moves nothing.
fn role(node: &NodeProto, position: usize) -> Role {
    let moves = node.op_type() == "BatchNormalization" && is_default_domain(node.domain());
    match position {
        3 if moves && node.output.len() == 1 => Role::Mean,
        4 if moves && node.output.len() == 1 => Role::Variance,
        _ => Role::Other,
    }
}

/// What the bodies of a node read.
fn inner(node: &NodeProto, read: &mut impl FnMut(&str)) {
    let mut open: Vec<&GraphProto> = node.attribute.iter().flat_map(|a| a.g.iter().chain(&a.graphs)).collect();
    while let Some(graph) = open.pop() {
        for node in &graph.node {
            node.input.iter().for_each(|input| read(input));
            open.extend(node.attribute.iter().flat_map(|a| a.g.iter().chain(&a.graphs)));
        }
    }
}

/// `norm.running_mean` beside `norm.weight`.
fn fresh(norm: &NodeProto, role: Role, taken: &mut BTreeSet<String>) -> String {
    let module = norm.input[1].rsplit_once('.').map_or(norm.output[0].as_str(), |(module, _)| module);
    let leaf = if role == Role::Mean { "running_mean" } else { "running_var" };
    let mut name = format!("{module}.{leaf}");
    for number in 2.. {
        if taken.insert(name.clone()) {
            break;
        }
        name = format!("{module}.{leaf}#{number}");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};

    fn check(nodes: &[(&str, &[&str])], tensors: &[&str], expected: Expect) {
        let node = |(index, (op, inputs)): (usize, &(&str, &[&str]))| NodeProto {
            op_type: Some((*op).to_owned()),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![format!("y{index}")],
            ..NodeProto::default()
        };
        let tensor = |&name: &&str| TensorProto { name: Some(name.to_owned()), ..TensorProto::default() };
        let mut graph = GraphProto {
            node: nodes.iter().enumerate().map(node).collect(),
            initializer: tensors.iter().map(tensor).collect(),
            ..GraphProto::default()
        };
        part_statistics(&mut graph);
        let nodes = graph.node.iter().map(|node| node.input.join(" "));
        let tensors: Vec<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        expected.assert_eq(&format!("{} | {}", nodes.collect::<Vec<_>>().join(", "), tensors.join(" ")));
    }

    const NORM: &str = "BatchNormalization";

    #[test]
    fn a_norm_of_merged_tensors() {
        let norm: (&str, &[&str]) = (NORM, &["x", "n.weight", "n.bias", "n.bias", "n.weight"]);
        let expected = expect!["x n.weight n.bias n.running_mean n.running_var | n.weight n.bias n.running_mean n.running_var"];
        check(&[norm], &["n.weight", "n.bias"], expected);
        check(
            &[(NORM, &["x", "w", "b", "m", "m"])],
            &["w", "b", "m"],
            expect!["x w b m y0.running_var | w b m y0.running_var"],
        );
    }

    #[test]
    fn a_module_used_twice_keeps_its_statistics() {
        let norm: (&str, &[&str]) = (NORM, &["x", "w", "b", "m", "v"]);
        check(&[norm, norm], &["w", "b", "m", "v"], expect!["x w b m v, x w b m v | w b m v"]);
    }

    #[test]
    fn other_readers_keep_the_tensor() {
        let nodes: [(&str, &[&str]); 3] = [("Identity", &["m"]), (NORM, &["x", "w", "b", "y0", "v"]), ("Add", &["y1", "m"])];
        let expected = expect!["m, x w b y1.running_mean v, y1 m | w b m v y1.running_mean"];
        check(&nodes, &["w", "b", "m", "v"], expected);
    }
}
