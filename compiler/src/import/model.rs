//! An ONNX model as bytes: decoded without copying tensor data, nothing opened, nothing read.
//!
//! The caller does the I/O: it maps the model file, and, where it wants constants that live beside the model to be known
//! while compiling, the files that `external_locations` names. Weights need not be there.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message;

use super::parameters::signature::Signature;
use super::proto::{AttributeProto, GraphProto, ModelProto, TensorProto, tensor_proto::DataLocation};
use super::repair::{copies, legacy, repair};
use super::schema::{NEWEST_OPSET, OLDEST_OPSET};
use super::statistics::part_statistics;
use crate::error::{Error, Result};

/// A decoded model, with what the exporter did to its parameters undone. Its tensors are slices of `bytes`.
#[derive(Clone, Debug)]
pub struct Model {
    pub proto: ModelProto,
    bytes: Bytes,
    files: BTreeMap<String, Bytes>,
    /// What was undone without proof, for the user to know.
    notes: Vec<String>,
    /// What may be a copy of a parameter, as far as the files given so far tell.
    open: Vec<String>,
}

impl Model {
    /// Decodes the bytes of an ONNX file. Errors: DCC0101 where they are none, DCC0103 for an opset that dcc does not read.
    pub fn decode(bytes: Bytes) -> Result<Model> {
        let mut model = Model::as_written(bytes)?;
        let (signature, from_torch) = (Signature::of(&model), model.proto.producer_name() == "pytorch");
        model.notes = match (signature, &mut model.proto.graph) {
            (Some(signature), Some(graph)) => repair(graph, &signature),
            (None, Some(graph)) if from_torch => legacy::part(graph),
            _ => Vec::new(),
        };
        if let Some(graph) = &mut model.proto.graph {
            part_statistics(graph);
        }
        Ok(model.tied())
    }

    /// With copies of parameters computed from them again. Some are known by their elements only: for the files given so far.
    #[must_use]
    pub fn tied(mut self) -> Model {
        let copies::Told { tied, open } = copies::tie(&mut self);
        self.notes.extend(tied);
        self.open = open;
        self
    }

    /// What reading it found, for the user to know.
    pub(super) fn notes(&self) -> impl Iterator<Item = &String> {
        self.notes.iter().chain(&self.open)
    }

    /// The same, its parameters as the exporter left them.
    pub fn as_written(bytes: Bytes) -> Result<Model> {
        if bytes.starts_with(b"version https://git-lfs") {
            return Err(
                Error::not_onnx("the file is a Git LFS pointer, not the model").help("fetch the model with `git lfs pull`")
            );
        }
        let size = bytes.len();
        let proto = ModelProto::decode(bytes.clone()).map_err(|error| {
            Error::not_onnx(format!("the {size} bytes are not an ONNX model: {error}"))
                .help("compare the file's size with the original: a truncated or damaged file looks like this")
        })?;
        if proto.graph.is_none() {
            return Err(Error::not_onnx(format!("the {size} bytes hold no ONNX graph")).help("pass an .onnx file"));
        }
        let model = Model { proto, bytes, files: BTreeMap::new(), notes: Vec::new(), open: Vec::new() };
        model.check_opset()?;
        Ok(model)
    }

    /// Adds the bytes of an external data file, named as the model names it.
    pub fn with_file(mut self, location: impl Into<String>, bytes: Bytes) -> Model {
        self.files.insert(location.into(), bytes);
        self
    }

    pub fn file(&self, location: &str) -> Option<&Bytes> {
        self.files.get(location)
    }

    /// The bytes of the model file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn graph(&self) -> &GraphProto {
        self.proto.graph.as_ref().expect("decode checked that there is a graph")
    }

    /// The version of the default operator set; of a graph that needs none, the newest.
    pub fn opset(&self) -> i64 {
        default_opset(&self.proto.opset_import).unwrap_or(NEWEST_OPSET)
    }

    /// The value of a metadata property of the graph or the model.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let entries = self.graph().metadata_props.iter().chain(&self.proto.metadata_props);
        entries.into_iter().find(|entry| entry.key() == key).map(|entry| entry.value())
    }

    /// All files that tensors of the model refer to, in the model's own words.
    pub fn external_locations(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        collect_locations(self.graph(), &mut found);
        for function in &self.proto.functions {
            collect_attributes(function.node.iter().flat_map(|node| &node.attribute), &mut found);
        }
        found
    }

    fn check_opset(&self) -> Result<()> {
        let Some(opset) = default_opset(&self.proto.opset_import) else {
            let others = !self.proto.opset_import.is_empty();
            if others && self.graph().node.iter().all(|node| !is_default_domain(node.domain())) {
                return Ok(());
            }
            return Err(Error::opset("the model does not say which opset of the default domain it uses"));
        };
        if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
            let operators: BTreeSet<&str> = self.graph().node.iter().map(|node| node.op_type()).collect();
            let few = operators.into_iter().take(8).collect::<Vec<_>>().join(", ");
            return Err(Error::opset(format!("opset {opset} is not supported, {OLDEST_OPSET} to {NEWEST_OPSET} are"))
                .note(format!("the model has {few}"))
                .help("export with `opset_version=20`, or convert with `onnx.version_converter`"));
        }
        Ok(())
    }
}

/// The version of the default domain among `imports`.
pub(super) fn default_opset(imports: &[super::proto::OperatorSetIdProto]) -> Option<i64> {
    imports.iter().find(|import| is_default_domain(import.domain())).map(|import| import.version())
}

/// ONNX writes its own domain as `` or `ai.onnx`.
pub(super) fn is_default_domain(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

fn collect_locations(graph: &GraphProto, found: &mut BTreeSet<String>) {
    graph.initializer.iter().for_each(|tensor| collect_tensor(tensor, found));
    collect_attributes(graph.node.iter().flat_map(|node| &node.attribute), found);
}

fn collect_attributes<'m>(attributes: impl Iterator<Item = &'m AttributeProto>, found: &mut BTreeSet<String>) {
    for attribute in attributes {
        attribute.t.iter().chain(&attribute.tensors).for_each(|tensor| collect_tensor(tensor, found));
        attribute.g.iter().chain(&attribute.graphs).for_each(|graph| collect_locations(graph, found));
    }
}

fn collect_tensor(tensor: &TensorProto, found: &mut BTreeSet<String>) {
    if tensor.data_location() == DataLocation::External {
        found.extend(
            tensor.external_data.iter().filter(|entry| entry.key() == "location").map(|entry| entry.value().to_owned()),
        );
    }
}
