//! The model as ONNX again, for another reader: functions inlined, nodes that no output needs gone, everything where inference has it,
//! sizes and weights given, every value with a name of its own.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::flatten::{Flat, flatten};
use super::model::Model;
use super::node::{Body, Node, ValueId};
use super::proto::tensor_proto::DataLocation;
use super::proto::tensor_shape_proto::{Dimension, dimension::Value as Dim};
use super::proto::type_proto::{Tensor as TensorType, Value as Type};
use super::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto,
};
use super::tensor::{Tensor, code};
use crate::error::Result;
use dcc_program::DType;

/// A flattened model that can be written.
pub struct Normal<'m> {
    model: &'m Model,
    flat: Flat<'m>,
    names: Vec<String>,
    live: Vec<bool>,
}

/// What the writer is given.
pub struct Parts<'a> {
    /// The bytes of an initializer.
    pub weight: &'a dyn Fn(&Tensor) -> Result<Bytes>,
    /// Types of the values that are given from outside: the model's inputs, and what nodes that are left out would compute.
    pub inputs: &'a BTreeMap<String, (DType, Vec<u64>)>,
    /// Inputs whose value is part of the model.
    pub constants: &'a BTreeMap<String, Tensor>,
    /// The types of other values, where they are known.
    pub dtype: &'a dyn Fn(&str) -> Option<DType>,
    /// Nodes that are left out, by number.
    pub without: &'a BTreeSet<usize>,
    /// Other names for the first results of nodes, by number: what reads these reads what is given.
    pub beside: &'a BTreeMap<usize, String>,
    /// The values that are its outputs.
    pub outputs: &'a [String],
}

impl<'m> Normal<'m> {
    /// Errors: of the graph.
    pub fn new(model: &'m Model) -> Result<Normal<'m>> {
        let flat = flatten(model)?;
        let live = flat.live(flat.outputs.iter().map(|(_, id)| *id));
        let names = flat.names();
        Ok(Normal { model, flat, names, live })
    }

    /// The nodes that outputs need, by number, with what they compute. Their names in what is written are `dcc.<number>.`
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &Node<'m>)> {
        let needed = |node: &Node| node.outputs.iter().flatten().any(|id| self.live[id.0 as usize]);
        self.flat.nodes.iter().enumerate().filter(move |(_, node)| needed(node))
    }

    /// The values that a node computes, those that nothing reads too.
    pub fn computes(&self, number: usize) -> impl Iterator<Item = &str> {
        self.flat.nodes[number].outputs.iter().flatten().map(|id| self.name(*id))
    }

    /// The values that a node reads.
    pub fn reads(&self, number: usize) -> impl Iterator<Item = &str> {
        self.flat.nodes[number].reads().map(|id| self.name(id))
    }

    pub fn operator(&self, number: usize) -> &'m str {
        self.flat.nodes[number].op
    }

    pub fn place(&self, number: usize) -> String {
        self.flat.nodes[number].place()
    }

    /// The output of the model and the value that it is.
    pub fn outputs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.flat.outputs.iter().map(|(name, id)| (*name, self.name(*id)))
    }

    fn name(&self, id: ValueId) -> &str {
        &self.names[id.0 as usize]
    }

    /// Errors: as `weight` gives them.
    pub fn write(&self, parts: &Parts) -> Result<ModelProto> {
        let mut graph = GraphProto { name: Some("model".to_owned()), ..GraphProto::default() };
        for (id, tensor) in self.flat.initializers.iter().filter(|(id, _)| self.live[id.0 as usize]) {
            graph.initializer.push(initializer(self.name(*id), tensor, (parts.weight)(tensor)?));
        }
        for (name, tensor) in parts.constants {
            graph.initializer.push(initializer(name, tensor, (parts.weight)(tensor)?));
        }
        let inputs = parts.inputs.iter();
        graph.input = inputs.map(|(name, (dtype, shape))| value_info(name, Some((*dtype, shape)))).collect();
        for (number, node) in self.nodes().filter(|(number, _)| !parts.without.contains(number)) {
            let name = format!("dcc.{number}.{}", node.name);
            let mut proto = self.node(node, name, parts)?;
            if let Some(beside) = parts.beside.get(&number) {
                proto.output[0].clone_from(beside);
            }
            graph.node.push(proto);
        }
        graph.output = parts.outputs.iter().map(|name| value_info(name, None)).collect();
        let opset = OperatorSetIdProto { domain: None, version: Some(self.model.opset()) };
        let ir_version = self.model.proto.ir_version;
        Ok(ModelProto { ir_version, opset_import: vec![opset], graph: Some(graph), ..ModelProto::default() })
    }

    fn node(&self, node: &Node, name: String, parts: &Parts) -> Result<NodeProto> {
        let named = |ids: &[Option<ValueId>]| -> Vec<String> {
            ids.iter().map(|id| id.map_or(String::new(), |id| self.name(id).to_owned())).collect()
        };
        let mut proto = NodeProto {
            name: Some(name),
            op_type: Some(node.op.to_owned()),
            input: named(&node.inputs),
            output: named(&node.outputs),
            ..NodeProto::default()
        };
        for attribute in &node.attributes {
            let mut written =
                AttributeProto { name: Some(attribute.name.to_owned()), ref_attr_name: None, ..attribute.proto.clone() };
            if let (Some(graph), Some((_, body))) =
                (&attribute.proto.g, node.bodies.iter().find(|(name, _)| *name == attribute.name))
            {
                written.g = Some(self.body(body, graph, parts)?);
            }
            if let Some(tensor) = attribute.proto.t.as_ref().filter(|t| t.data_location() == DataLocation::External) {
                let tensor = Tensor::new(self.model, tensor.name(), tensor)?;
                written.t = Some(initializer(&tensor.name, &tensor, (parts.weight)(&tensor)?));
            }
            proto.attribute.push(written);
        }
        for_inference(node.op, &mut proto);
        // Exporters write casts of i64 to i64, for some readers a cast to a size of a tensor.
        if node.op == "Cast"
            && let (Some(own), Some(to)) = ((parts.dtype)(&proto.input[0]), node.int("to")?)
            && i64::from(code(own)) == to
        {
            proto.op_type = Some("Identity".to_owned());
            proto.attribute.clear();
        }
        Ok(proto)
    }

    /// A graph inside of a node; `written` has the types of its inputs.
    fn body(&self, body: &Body, written: &GraphProto, parts: &Parts) -> Result<GraphProto> {
        let rename =
            |info: &ValueInfoProto, id: &ValueId| ValueInfoProto { name: Some(self.name(*id).to_owned()), ..info.clone() };
        let mut graph = GraphProto { name: written.name.clone(), ..GraphProto::default() };
        graph.input = written.input.iter().zip(&body.inputs).map(|(info, id)| rename(info, id)).collect();
        graph.output = written.output.iter().zip(&body.outputs).map(|(info, id)| rename(info, id)).collect();
        for (id, tensor) in &body.initializers {
            graph.initializer.push(initializer(self.name(*id), tensor, (parts.weight)(tensor)?));
        }
        for node in &body.nodes {
            graph.node.push(self.node(node, node.name.clone(), parts)?);
        }
        Ok(graph)
    }
}

/// BatchNormalization by its running statistics, Dropout that drops nothing.
fn for_inference(op: &str, node: &mut NodeProto) {
    match op {
        "BatchNormalization" => {
            node.attribute.retain(|attribute| attribute.name() != "training_mode");
            node.output.truncate(1);
        }
        "Dropout" => node.input.truncate(2),
        _ => {}
    }
}

fn initializer(name: &str, tensor: &Tensor, bytes: Bytes) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: tensor.shape.iter().map(|&dim| dim as i64).collect(),
        data_type: Some(code(tensor.dtype)),
        raw_data: Some(bytes),
        ..TensorProto::default()
    }
}

fn value_info(name: &str, ty: Option<(DType, &Vec<u64>)>) -> ValueInfoProto {
    let ty = ty.map(|(dtype, shape)| {
        let dim = shape.iter().map(|&size| Dimension { value: Some(Dim::DimValue(size as i64)), denotation: None });
        let tensor = TensorType { elem_type: Some(code(dtype)), shape: Some(TensorShapeProto { dim: dim.collect() }) };
        TypeProto { value: Some(Type::TensorType(tensor)), denotation: None }
    });
    ValueInfoProto { name: Some(name.to_owned()), r#type: ty, ..ValueInfoProto::default() }
}
