//! Biases that the exporter deleted because they were zero.

use super::{leaf, made};
use crate::import::fx::FxCall;
use crate::import::parameters::signature::Signature;
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::BTreeMap;

/// Bytes of the largest bias that is made; a larger one is no bias.
const BIAS: u64 = 1 << 24;

/// Adds biases that were deleted because they were zero: the call of a node reads `%p_fc_bias`, no node does.
pub fn restore(graph: &mut GraphProto, signature: &Signature) {
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
    let dtype = crate::import::dtype(weight.data_type()).ok()?;
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
