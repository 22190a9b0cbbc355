//! Tensors of an ONNX graph, to read and to replace.

use super::Weight;
use crate::cli::failure::Outcome;
use crate::cli::output;
use crate::import::proto::tensor_proto::DataLocation;
use crate::import::proto::{AttributeProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto};
use bytes::Bytes;
use prost::Message;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// Bytes of tensors beyond which they stand beside the model: a protobuf holds 2 GiB at most.
const INLINE: u64 = 1 << 30;

/// Tensors by the name that dcc knows them under, and whether they are initializers.
pub fn tensors(model: &ModelProto) -> Vec<(&str, &TensorProto, bool)> {
    let graph = model.graph.as_ref().expect("a decoded model has a graph");
    let initializers = graph.initializer.iter().map(|tensor| (tensor.name(), tensor, true));
    let constants = graph.node.iter().filter_map(|node| {
        let output = node.output.first().filter(|_| is_constant(node))?;
        let tensor = node.attribute.iter().find_map(|attribute| attribute.t.as_ref().filter(|_| is_value(attribute)))?;
        Some((output.as_str(), tensor, false))
    });
    initializers.chain(constants).collect()
}

/// Writes the model with `weights` in place of its tensors of these names.
pub fn write(model: &mut ModelProto, weights: &BTreeMap<String, Weight>, path: &Path) -> Outcome<()> {
    let total: u64 = weights.values().map(|weight| weight.bytes.len() as u64).sum();
    let mut beside = (total > INLINE).then(|| Beside::new(path));
    let graph = model.graph.as_mut().expect("a decoded model has a graph");
    for tensor in &mut graph.initializer {
        if let Some(weight) = weights.get(tensor.name()) {
            replace(tensor, weight, beside.as_mut());
        }
    }
    for node in graph.node.iter_mut().filter(|node| is_constant(node)) {
        let weight = node.output.first().and_then(|name| weights.get(name));
        let tensor = node.attribute.iter_mut().find(|attribute| is_value(attribute)).and_then(|a| a.t.as_mut());
        if let (Some(weight), Some(tensor)) = (weight, tensor) {
            replace(tensor, weight, beside.as_mut());
        }
    }
    if let Some(beside) = beside {
        let target = path.with_file_name(&beside.location);
        output::file(&target, |file| {
            let mut written = 0;
            for (offset, bytes) in &beside.parts {
                file.write_all(&vec![0; (offset - written) as usize])?;
                file.write_all(bytes)?;
                written = offset + bytes.len() as u64;
            }
            Ok(())
        })?;
    }
    output::file(path, |file| file.write_all(&model.encode_to_vec()))
}

/// How many nodes of the graph say that they are in training mode, which an exporter wrote and other runtimes follow.
pub fn in_training_mode(model: &ModelProto) -> usize {
    let tensors: BTreeMap<&str, &TensorProto> = tensors(model).into_iter().map(|(name, tensor, _)| (name, tensor)).collect();
    let is_true = |name: &String| {
        let tensor = tensors.get(name.as_str());
        tensor
            .is_some_and(|tensor| tensor.raw_data().iter().any(|&byte| byte != 0) || tensor.int32_data.iter().any(|&x| x != 0))
    };
    let trains = |node: &NodeProto| match node.op_type() {
        "BatchNormalization" => {
            node.attribute.iter().any(|attribute| attribute.name() == "training_mode" && attribute.i() != 0)
        }
        "Dropout" => node.input.get(2).is_some_and(is_true),
        _ => false,
    };
    let graph = model.graph.as_ref().expect("a decoded model has a graph");
    graph.node.iter().filter(|node| is_onnx(node) && trains(node)).count()
}

fn is_onnx(node: &NodeProto) -> bool {
    matches!(node.domain(), "" | "ai.onnx")
}

fn is_constant(node: &NodeProto) -> bool {
    node.op_type() == "Constant" && is_onnx(node)
}

fn is_value(attribute: &AttributeProto) -> bool {
    attribute.name() == "value"
}

/// A file of tensors beside the model.
struct Beside {
    location: String,
    /// Offset and bytes, ascending.
    parts: Vec<(u64, Bytes)>,
    end: u64,
}

impl Beside {
    fn new(path: &Path) -> Beside {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Beside { location: format!("{name}.data"), parts: Vec::new(), end: 0 }
    }

    /// Where the bytes will stand.
    fn add(&mut self, bytes: &Bytes) -> u64 {
        let offset = self.end.next_multiple_of(4096);
        self.parts.push((offset, bytes.clone()));
        self.end = offset + bytes.len() as u64;
        offset
    }
}

fn replace(tensor: &mut TensorProto, weight: &Weight, beside: Option<&mut Beside>) {
    *tensor = TensorProto {
        dims: std::mem::take(&mut tensor.dims),
        data_type: tensor.data_type,
        name: tensor.name.take(),
        doc_string: tensor.doc_string.take(),
        metadata_props: std::mem::take(&mut tensor.metadata_props),
        ..TensorProto::default()
    };
    match beside {
        Some(beside) => {
            let offset = beside.add(&weight.bytes);
            let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
            tensor.data_location = Some(DataLocation::External.into());
            tensor.external_data = vec![
                entry("location", beside.location.clone()),
                entry("offset", offset.to_string()),
                entry("length", weight.bytes.len().to_string()),
            ];
        }
        None => tensor.raw_data = Some(weight.bytes.clone()),
    }
}
