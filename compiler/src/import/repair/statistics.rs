//! Running statistics of norms whose modules are called again.

use crate::import::parameters::signature::Signature;
use crate::import::proto::{GraphProto, TensorProto};
use std::collections::BTreeMap;

/// Gives the running statistics of norms that read a parameter in their place their own: a module's second call reads what its
/// first one left, which the call of a node does not name.
pub fn part(graph: &mut GraphProto, signature: &Signature) {
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
