//! Small ONNX models, built in place.

use bytes::Bytes;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::tensor_proto::{DataLocation, DataType};
use dcc::import::proto::tensor_shape_proto::{Dimension, dimension};
use dcc::import::proto::type_proto::{Tensor, Value};
use dcc::import::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto,
};
use std::collections::{BTreeMap, BTreeSet};

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let name = Some(format!("/{}", op.to_lowercase()));
    NodeProto { name, op_type: Some(op.to_owned()), input: own(inputs), output: own(outputs), ..NodeProto::default() }
}

pub fn with_int(mut node: NodeProto, name: &str, value: i64) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Int.into()),
        i: Some(value),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

pub fn with_string(mut node: NodeProto, name: &str, value: &str) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::String.into()),
        s: Some(Bytes::copy_from_slice(value.as_bytes())),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

pub fn with_ints(mut node: NodeProto, name: &str, values: &[i64]) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Ints.into()),
        ints: values.to_vec(),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

pub fn value(name: &str, dims: &[dimension::Value]) -> ValueInfoProto {
    let dim = dims.iter().map(|dim| Dimension { value: Some(dim.clone()), denotation: None }).collect();
    let tensor = Tensor { elem_type: Some(DataType::Float.into()), shape: Some(TensorShapeProto { dim }) };
    let ty = TypeProto { value: Some(Value::TensorType(tensor)), denotation: None };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(ty), ..Default::default() }
}

pub fn size(size: i64) -> dimension::Value {
    dimension::Value::DimValue(size)
}

pub fn symbol(name: &str) -> dimension::Value {
    dimension::Value::DimParam(name.to_owned())
}

pub fn tensor(name: &str, dims: &[i64], raw: &[u8]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: dims.to_vec(),
        data_type: Some(DataType::Float.into()),
        raw_data: Some(Bytes::copy_from_slice(raw)),
        ..Default::default()
    }
}

pub fn int_tensor(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    TensorProto { data_type: Some(DataType::Int64.into()), ..tensor(name, dims, &raw) }
}

pub fn external(name: &str, dims: &[i64], location: &str) -> TensorProto {
    let entry = StringStringEntryProto { key: Some("location".to_owned()), value: Some(location.to_owned()) };
    let mut tensor = tensor(name, dims, &[]);
    tensor.raw_data = None;
    tensor.data_location = Some(DataLocation::External.into());
    tensor.external_data.push(entry);
    tensor
}

pub fn opset(version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: None, version: Some(version) }
}

/// `y` from `x`, f32[2, 3], opset 20.
pub fn model(nodes: &[NodeProto]) -> ModelProto {
    let graph = GraphProto {
        node: nodes.to_vec(),
        input: vec![value("x", &[size(2), size(3)])],
        output: vec![value("y", &[])],
        ..Default::default()
    };
    ModelProto { ir_version: Some(10), opset_import: vec![opset(20)], graph: Some(graph), ..Default::default() }
}

pub fn with_tensor(mut model: ModelProto, tensor: TensorProto) -> ModelProto {
    model.graph.as_mut().expect("a graph").initializer.push(tensor);
    model
}

/// Small numbers that look random.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

/// The same model under other names in another order: nodes in a random topological order, every node, value and parameter renamed,
/// parameters listed in another order. Inputs and outputs keep their names.
pub fn shuffled(mut model: ModelProto, seed: u64) -> ModelProto {
    let mut dice = Dice::new(seed);
    let graph = model.graph.as_mut().expect("a graph");
    let fixed: BTreeSet<String> = graph.input.iter().chain(&graph.output).filter_map(|v| v.name.clone()).collect();
    let tensors = graph.initializer.iter().filter_map(|t| t.name.clone());
    let mut names: Vec<String> = tensors.chain(graph.node.iter().flat_map(|n| n.output.clone())).collect();
    names.retain(|name| !name.is_empty() && !fixed.contains(name));
    let mut new: BTreeMap<String, String> = BTreeMap::new();
    for number in 0..names.len() {
        let name = names.swap_remove(dice.below(names.len()));
        new.insert(name, format!("t{number}"));
    }
    let made: BTreeSet<String> = graph.node.iter().flat_map(|n| n.output.clone()).collect();
    let mut done: BTreeSet<String> = BTreeSet::new();
    let mut waiting = std::mem::take(&mut graph.node);
    while !waiting.is_empty() {
        let is_ready = |n: &NodeProto| n.input.iter().all(|x| !made.contains(x) || done.contains(x));
        let ready: Vec<usize> = (0..waiting.len()).filter(|&i| is_ready(&waiting[i])).collect();
        let node = waiting.remove(ready[dice.below(ready.len())]);
        done.extend(node.output.iter().cloned());
        graph.node.push(node);
    }
    let rename = |name: &mut String| {
        if let Some(other) = new.get(name) {
            name.clone_from(other);
        }
    };
    for (number, node) in graph.node.iter_mut().enumerate() {
        node.name = Some(format!("n{number}"));
        node.input.iter_mut().chain(&mut node.output).for_each(rename);
        node.metadata_props.clear();
    }
    graph.initializer.iter_mut().filter_map(|t| t.name.as_mut()).for_each(rename);
    graph.initializer.sort_by(|a, b| a.name.cmp(&b.name));
    graph.value_info.iter_mut().filter_map(|v| v.name.as_mut()).for_each(rename);
    model
}
