//! Undoes what PyTorch's exporter does to parameters, where what it says of each node proves it.
//!
//! Its optimizer makes one initializer of parameters that begin with equal values, such as the gains of fresh norms, stores the
//! transposed copy of a parameter that is read both ways, such as a tied embedding, and deletes biases that are zero. As they
//! are in the file, the first would train as one, the second as two and the last not at all.

use super::fx::FxCall;
use super::parameters::signature::Signature;
use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

/// Elements up to which the exporter merges initializers.
const MERGED: i64 = 1024;

/// Bytes of the largest bias that is made; a larger one is no bias.
const BIAS: u64 = 1 << 24;

/// The graph as the module has its parameters: names of `signature`, each once.
pub fn repair(graph: &mut GraphProto, signature: &Signature) {
    part(graph, signature);
    tie(graph, signature);
    restore(graph, signature);
}

/// Gives parameters and buffers that were merged into another's initializer their own again. The call of a node reads `%p_ln_2_weight`, the
/// node `ln_1.weight`; tied parameters have one argument.
fn part(graph: &mut GraphProto, signature: &Signature) {
    let tensors: BTreeMap<String, TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect();
    let missing: BTreeMap<&str, &str> =
        signature.all().filter(|(name, _)| !tensors.contains_key(*name)).map(|(name, argument)| (argument, name)).collect();
    let mut parted: BTreeMap<&str, TensorProto> = BTreeMap::new();
    for node in graph.node.iter_mut().filter(|_| !missing.is_empty()) {
        let call = FxCall::of(node);
        let mut meant: Vec<&str> = call.values().filter_map(|value| missing.get(value).copied()).collect();
        let other = |input: &str| signature.argument(input).is_some_and(|argument| !call.reads(argument));
        let small = |input: &str| tensors.get(input).is_some_and(|tensor| elements(tensor) <= MERGED);
        let mut others: Vec<usize> = (0..node.input.len()).collect();
        others.retain(|&position| small(&node.input[position]) && other(&node.input[position]));
        let mut renamed: Vec<(usize, &str)> = Vec::new();
        meant.retain(|name| {
            let like: Vec<usize> = others.iter().copied().filter(|&at| leaf(&node.input[at]) == leaf(name)).collect();
            let [position] = like[..] else { return true };
            others.retain(|&other| other != position);
            renamed.push((position, name));
            false
        });
        // What is left stands in the call's order, as the statistics of a norm do.
        if meant.len() == others.len() {
            renamed.extend(others.into_iter().zip(meant));
        }
        for (position, name) in renamed {
            let tensor = &tensors[&node.input[position]];
            parted.entry(name).or_insert_with(|| TensorProto { name: Some(name.to_owned()), ..tensor.clone() });
            node.input[position] = name.to_owned();
        }
    }
    graph.initializer.extend(parted.into_values());
    part_statistics(graph, signature);
}

/// Gives the running statistics of norms that read a parameter in their place their own: a module's second call reads what its
/// first one left, which the call of a node does not name.
fn part_statistics(graph: &mut GraphProto, signature: &Signature) {
    let mut tensors: BTreeMap<String, TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect();
    let mut parted: Vec<TensorProto> = Vec::new();
    for node in graph.node.iter_mut().filter(|node| node.op_type() == "BatchNormalization" && node.input.len() == 5) {
        let (scale, inputs) = node.input[1..].split_first_mut().expect("there are five");
        let Some((module, _)) = scale.rsplit_once('.') else { continue };
        for (statistic, read) in ["running_mean", "running_var"].into_iter().zip(&mut inputs[1..]) {
            let name = format!("{module}.{statistic}");
            if signature.is_parameter(read) != Some(true) || signature.is_parameter(&name) != Some(false) {
                continue;
            }
            if !tensors.contains_key(&name) {
                let Some(tensor) = tensors.get(read.as_str()) else { continue };
                let tensor = TensorProto { name: Some(name.clone()), ..tensor.clone() };
                tensors.insert(name.clone(), tensor.clone());
                parted.push(tensor);
            }
            *read = name;
        }
    }
    graph.initializer.extend(parted);
}

/// Makes transposed copies of parameters computed again. The call of a node reads the parameter, the node a tensor of the
/// exporter's that has its dims reversed.
fn tie(graph: &mut GraphProto, signature: &Signature) {
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

/// Adds biases that were deleted because they were zero: the call of a node reads `%p_fc_bias`, no node does.
fn restore(graph: &mut GraphProto, signature: &Signature) {
    let tensors: BTreeMap<&str, &TensorProto> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let missing: BTreeMap<&str, &str> = signature
        .parameters()
        .filter(|(name, _)| leaf(name).ends_with("bias") && !tensors.contains_key(name))
        .map(|(name, argument)| (argument, name))
        .collect();
    let mut readers: BTreeMap<&str, Vec<Option<(usize, TensorProto)>>> = BTreeMap::new();
    let moves = |node: &NodeProto| matches!(node.op_type(), "Transpose" | "Reshape" | "Identity" | "Cast");
    for (index, node) in graph.node.iter().enumerate().filter(|(_, node)| !missing.is_empty() && !moves(node)) {
        let Some(&name) = FxCall::of(node).values().find_map(|value| missing.get(value)) else { continue };
        let weight = node.input.get(1).and_then(|input| tensors.get(input.as_str()));
        readers.entry(name).or_default().push(weight.and_then(|weight| Some((index, zeros(name, node, weight)?))));
    }
    // A second node of the call may be the sum with a tensor that nobody recognised as the bias.
    let found: Vec<(usize, TensorProto)> =
        readers.into_values().filter(|readers| readers.len() == 1).flatten().flatten().collect();
    let mut sums: BTreeMap<usize, NodeProto> = BTreeMap::new();
    for (index, tensor) in found {
        let node = &mut graph.node[index];
        match node.op_type() {
            "MatMul" => {
                let product = format!("{} without {}", node.output[0], tensor.name());
                let result = std::mem::replace(&mut node.output[0], product.clone());
                sums.insert(index, made("Add", vec![product, tensor.name().to_owned()], result));
            }
            _ => node.input.push(tensor.name().to_owned()),
        }
        graph.initializer.push(tensor);
    }
    if !sums.is_empty() {
        let nodes = std::mem::take(&mut graph.node).into_iter().enumerate();
        graph.node = nodes.flat_map(|(index, node)| [Some(node), sums.remove(&index)]).flatten().collect();
    }
}

/// The bias that `node`, which has none, would add to its product with `weight`; none where it is no such node.
fn zeros(name: &str, node: &NodeProto, weight: &TensorProto) -> Option<TensorProto> {
    let transposed = node.attribute.iter().any(|attribute| attribute.name() == "transB" && attribute.i() != 0);
    let dim = match (node.op_type(), &weight.dims[..]) {
        ("MatMul", [_, columns]) => *columns,
        ("Gemm", [rows, columns]) if node.input.len() == 2 => *if transposed { rows } else { columns },
        ("Conv", [filters, ..]) if node.input.len() == 2 => *filters,
        ("LayerNormalization", [width]) if node.input.len() == 2 => *width,
        _ => return None,
    };
    let dtype = super::dtype(weight.data_type()).ok()?;
    let bytes = u64::try_from(dim).ok()?.checked_mul(dtype.bytes()).filter(|bytes| *bytes <= BIAS)?;
    let raw_data = Some(vec![0; bytes as usize].into());
    Some(TensorProto {
        name: Some(name.to_owned()),
        dims: vec![dim],
        data_type: weight.data_type,
        raw_data,
        ..Default::default()
    })
}

fn transpose(source: String, result: String) -> NodeProto {
    let perm = AttributeProto {
        name: Some("perm".to_owned()),
        r#type: Some(AttributeType::Ints.into()),
        ints: vec![1, 0],
        ..AttributeProto::default()
    };
    NodeProto { attribute: vec![perm], ..made("Transpose", vec![source], result) }
}

fn made(op: &str, input: Vec<String>, result: String) -> NodeProto {
    let (name, op_type) = (Some(result.clone()), Some(op.to_owned()));
    NodeProto { name, op_type, input, output: vec![result], ..NodeProto::default() }
}

/// `weight` of `ln_1.weight`.
fn leaf(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(_, leaf)| leaf)
}

/// Saturating: a tensor that large is refused elsewhere.
fn elements(tensor: &TensorProto) -> i64 {
    tensor.dims.iter().fold(1, |product: i64, &dim| product.saturating_mul(dim))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::proto::StringStringEntryProto;

    fn node(call: &str, inputs: [&str; 2], output: &str) -> NodeProto {
        let key = Some("pkg.torch.onnx.fx_node".to_owned());
        NodeProto {
            op_type: Some("MatMul".to_owned()),
            input: inputs.map(str::to_owned).to_vec(),
            output: vec![output.to_owned()],
            metadata_props: vec![StringStringEntryProto { key, value: Some(call.to_owned()) }],
            ..NodeProto::default()
        }
    }

    fn tensor(name: &str, dims: &[i64]) -> TensorProto {
        TensorProto { name: Some(name.to_owned()), dims: dims.to_vec(), ..TensorProto::default() }
    }

    fn repaired(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> (Vec<String>, Vec<String>) {
        let text = "p_a_weight: PARAMETER target='a.weight'\np_b_weight: PARAMETER target='b.weight'\n";
        let mut graph = GraphProto { node: nodes, initializer, ..GraphProto::default() };
        repair(&mut graph, &Signature::parse(text));
        let nodes = graph.node.iter().map(|node| format!("{} {}", node.op_type(), node.input.join(" "))).collect();
        (nodes, graph.initializer.iter().map(|tensor| tensor.name().to_owned()).collect())
    }

    #[test]
    fn merged_parameters_part() {
        let nodes = |second: &str| {
            vec![node("%y : x(args = (%x, %p_a_weight))", ["x", "a.weight"], "y"), node(second, ["y", "a.weight"], "z")]
        };
        let (parted, tensors) = repaired(nodes("%z : x(args = (%y, %p_b_weight))"), vec![tensor("a.weight", &[8])]);
        assert_eq!((&parted[1][..], &tensors[..]), ("MatMul y b.weight", &["a.weight".to_owned(), "b.weight".to_owned()][..]));
        // Tied: the call reads the one that is there. Too large to be merged: not touched.
        let tied = repaired(nodes("%z : x(args = (%y, %p_a_weight))"), vec![tensor("a.weight", &[8])]);
        let large = repaired(nodes("%z : x(args = (%y, %p_b_weight))"), vec![tensor("a.weight", &[8, 200])]);
        for (nodes, tensors) in [tied, large] {
            assert_eq!((&nodes[1][..], tensors.len()), ("MatMul y a.weight", 1));
        }
    }

    #[test]
    fn norms_that_are_called_again_keep_their_statistics() {
        let text = "p_bn_weight: PARAMETER target='bn.weight'\np_bn_bias: PARAMETER target='bn.bias'\n\
                    b_bn_running_mean: BUFFER target='bn.running_mean' persistent=True\n\
                    b_bn_running_var: BUFFER target='bn.running_var' persistent=True\n";
        let norm = |call: &str, x: &str, y: &str| NodeProto {
            op_type: Some("BatchNormalization".to_owned()),
            input: [x, "bn.weight", "bn.bias", "bn.bias", "bn.weight"].map(str::to_owned).to_vec(),
            ..node(call, [x, x], y)
        };
        let first = norm("%y : n(args = (%x, %p_bn_weight, %p_bn_bias, %b_bn_running_mean, %b_bn_running_var))", "x", "y");
        let second = norm("%z : n(args = (%y, %p_bn_weight, %p_bn_bias, %getitem_3, %getitem_4))", "y", "z");
        let initializer = vec![tensor("bn.weight", &[4]), tensor("bn.bias", &[4])];
        let mut graph = GraphProto { node: vec![first, second], initializer, ..GraphProto::default() };
        repair(&mut graph, &Signature::parse(text));
        for node in &graph.node {
            assert_eq!(node.input[1..], ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]);
        }
        assert_eq!(graph.initializer.len(), 4);
    }

    #[test]
    fn deleted_biases_are_zeros() {
        let text = "p_w_weight: PARAMETER target='w.weight'\np_w_bias: PARAMETER target='w.bias'\n";
        let run = |call: &str| {
            let float = |name: &str, dims: &[i64]| TensorProto { data_type: Some(1), ..tensor(name, dims) };
            let node = vec![node(call, ["x", "val_1"], "y")];
            let mut graph = GraphProto { node, initializer: vec![float("val_1", &[4, 6])], ..GraphProto::default() };
            repair(&mut graph, &Signature::parse(text));
            graph
        };
        let graph = run("%y : linear(args = (%x, %p_w_weight, %p_w_bias))");
        let (bias, sum) = (&graph.initializer[1], &graph.node[1]);
        assert_eq!((bias.name(), &bias.dims[..], bias.raw_data.as_ref().map(|b| b.len())), ("w.bias", &[6][..], Some(24)));
        assert_eq!((sum.op_type(), &sum.input[1][..], &sum.output[0][..]), ("Add", "w.bias", "y"));
        assert_eq!((sum.input[0] == graph.node[0].output[0], sum.input[0] != "y"), (true, true));
        assert_eq!(run("%y : linear(args = (%x, %p_w_weight))").initializer.len(), 1);
    }

    #[test]
    fn transposed_copies_are_tied() {
        let nodes = || {
            vec![
                node("%y : x(args = (%p_a_weight, %x))", ["a.weight", "x"], "y"),
                node("%z : x(args = (%y, %p_a_weight))", ["y", "val_7"], "z"),
            ]
        };
        let (tied, tensors) = repaired(nodes(), vec![tensor("a.weight", &[6, 4]), tensor("val_7", &[4, 6])]);
        assert_eq!(
            (&tied[0][..], &tied[2][..], &tensors[..]),
            ("Transpose a.weight", "MatMul y val_7", &["a.weight".to_owned()][..])
        );
        // Another shape is another tensor.
        let (nodes, tensors) = repaired(nodes(), vec![tensor("a.weight", &[6, 4]), tensor("val_7", &[4, 5])]);
        assert_eq!((nodes.len(), tensors.len()), (2, 2));
    }
}
