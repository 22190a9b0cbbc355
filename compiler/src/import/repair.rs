//! Undoes what PyTorch's exporters do to parameters, where what the file says of each node proves it.
//!
//! The optimizer of the newer exporter makes one initializer of tensors that begin with equal values, such as the gains of fresh
//! norms, stores the transposed copy of a parameter that is read both ways, such as a tied embedding, or one for each call of a module,
//! and deletes biases that are zero. As they are in the file, the first would train as one, the second as several and the last not at all.

mod calls;
pub mod copies;
pub mod legacy;
mod names;
mod part;
mod restore;
mod statistics;
mod tie;

use super::parameters::signature::Signature;
use super::proto::attribute_proto::AttributeType;
use super::proto::tensor_proto::DataType;
use super::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};

/// The graph as the module has its parameters: names of `signature`, each once. Returns what is not
/// sure, for the user to know.
pub fn repair(graph: &mut GraphProto, signature: &Signature) -> Vec<String> {
    let doubts = part::part(graph, signature);
    statistics::part(graph, signature);
    tie::tie(graph, signature);
    tie::merge(graph, signature);
    restore::restore(graph, signature);
    doubts
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

/// A node that the file does not have, named after what it gives.
fn made(op: &str, input: Vec<String>, result: String) -> NodeProto {
    let (name, op_type) = (Some(result.clone()), Some(op.to_owned()));
    NodeProto { name, op_type, input, output: vec![result], ..NodeProto::default() }
}

/// A vector of a graph.
fn ints(name: String, numbers: &[i64]) -> TensorProto {
    let raw: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    TensorProto {
        name: Some(name),
        dims: vec![numbers.len() as i64],
        data_type: Some(DataType::Int64.into()),
        raw_data: Some(raw.into()),
        ..TensorProto::default()
    }
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
        let data_type = Some(DataType::Float.into());
        TensorProto { name: Some(name.to_owned()), dims: dims.to_vec(), data_type, ..TensorProto::default() }
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
            let node = vec![node(call, ["x", "val_1"], "y")];
            let mut graph = GraphProto { node, initializer: vec![tensor("val_1", &[4, 6])], ..GraphProto::default() };
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

    /// A linear layer that is called twice has a transposed weight for each call.
    #[test]
    fn copies_for_each_call_are_merged() {
        let linear = |result: &str, weight: &str| {
            format!(
                "%{result} : x = call_function[target=torch.ops.aten.linear.default](args = (%x, %p_{weight}_weight), kwargs = {{}})"
            )
        };
        let merged = |second: &str, dims: &[i64]| {
            let nodes = vec![node(&linear("y", "a"), ["x", "val_1"], "y"), node(&linear("z", second), ["x", "val_2"], "z")];
            let (nodes, tensors) = repaired(nodes, vec![tensor("val_1", &[40, 60]), tensor("val_2", dims)]);
            (nodes[1].clone(), tensors.len())
        };
        assert_eq!(merged("a", &[40, 60]), ("MatMul x val_1".to_owned(), 1));
        // Another parameter, another shape.
        for (second, dims) in [("b", [40, 60]), ("a", [40, 50])] {
            assert_eq!(merged(second, &dims), ("MatMul x val_2".to_owned(), 2));
        }
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
