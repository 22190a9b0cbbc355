//! One ONNX node after inlining, and its attributes.
//!
//! An attribute counts as honoured once an importer has read it; `unread` names the others, which are errors: nothing in a
//! model is accepted and ignored.

use std::cell::Cell;

use bytes::Bytes;

use super::fx::FxCall;
use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, TensorProto};
use super::tensor::Tensor;
use crate::error::{Error, Result};

/// Index into `Flat::values`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A node whose inputs and outputs are values; an omitted optional one is `None`.
#[derive(Clone, Debug)]
pub struct Node<'m> {
    /// Position in the file, of the call where the node comes from a function.
    pub index: usize,
    /// With the names of the calls that it was inlined from.
    pub name: String,
    pub op: &'m str,
    /// Empty for the default domain.
    pub domain: &'m str,
    pub opset: i64,
    pub inputs: Vec<Option<ValueId>>,
    pub outputs: Vec<Option<ValueId>>,
    pub attributes: Vec<Attribute<'m>>,
    /// The graphs among its attributes, by name.
    pub bodies: Vec<(&'m str, Body<'m>)>,
    /// Outer values that its bodies read.
    pub captures: Vec<ValueId>,
    /// The PyTorch call that the exporter made it of, where the file says so.
    pub call: FxCall<'m>,
    /// Why its operator cannot be imported: nothing that is wanted may depend on it.
    pub refused: Option<Error>,
}

/// The position in the file of the node whose [`Node::place`] is `place`.
pub fn index_of(place: &str) -> Option<usize> {
    let (index, _) = place.strip_prefix("node ")?.split_once(' ')?;
    index.parse().ok()
}

/// A graph inside a node: a branch, or what a loop repeats.
#[derive(Clone, Debug)]
pub struct Body<'m> {
    pub inputs: Vec<ValueId>,
    pub initializers: Vec<(ValueId, Tensor)>,
    /// Those that an output depends on, in order.
    pub nodes: Vec<Node<'m>>,
    pub outputs: Vec<ValueId>,
}

#[derive(Clone, Debug)]
pub struct Attribute<'m> {
    pub name: &'m str,
    pub proto: &'m AttributeProto,
    read: Cell<bool>,
}

impl<'m> Attribute<'m> {
    pub fn new(name: &'m str, proto: &'m AttributeProto) -> Attribute<'m> {
        Attribute { name, proto, read: Cell::new(false) }
    }
}

impl<'m> Node<'m> {
    /// What error messages and origins call the node.
    pub fn place(&self) -> String {
        let op = if self.domain.is_empty() { self.op.to_owned() } else { format!("{}.{}", self.domain, self.op) };
        match self.name.is_empty() {
            true => format!("node {} ({op}, opset {})", self.index, self.opset),
            false => format!("node {} `{}` ({op}, opset {})", self.index, self.name, self.opset),
        }
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>> {
        Ok(self.typed(name, AttributeType::Int)?.map(|proto| proto.i()))
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    /// An int that means yes or no.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.int(name)?.map_or(default, |value| value != 0))
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.typed(name, AttributeType::Float)?.map(|proto| f64::from(proto.f())))
    }

    /// ONNX's defaults are f32 too.
    pub fn float_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.float(name)?.unwrap_or(f64::from(default as f32)))
    }

    pub fn ints(&self, name: &str) -> Result<Option<&'m [i64]>> {
        Ok(self.typed(name, AttributeType::Ints)?.map(|proto| proto.ints.as_slice()))
    }

    pub fn floats(&self, name: &str) -> Result<Option<&'m [f32]>> {
        Ok(self.typed(name, AttributeType::Floats)?.map(|proto| proto.floats.as_slice()))
    }

    pub fn tensor(&self, name: &str) -> Result<Option<&'m TensorProto>> {
        Ok(self.typed(name, AttributeType::Tensor)?.and_then(|proto| proto.t.as_ref()))
    }

    pub fn string_or(&self, name: &str, default: &'m str) -> Result<&'m str> {
        static EMPTY: Bytes = Bytes::new();
        let Some(proto) = self.typed(name, AttributeType::String)? else { return Ok(default) };
        let bytes = proto.s.as_ref().unwrap_or(&EMPTY);
        std::str::from_utf8(bytes).map_err(|_| Error::attribute(format!("attribute `{name}` is not UTF-8")))
    }

    pub fn strings(&self, name: &str) -> Result<Option<Vec<String>>> {
        let Some(proto) = self.typed(name, AttributeType::Strings)? else { return Ok(None) };
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec());
        let all: std::result::Result<Vec<String>, _> = proto.strings.iter().map(text).collect();
        all.map(Some).map_err(|_| Error::attribute(format!("attribute `{name}` is not UTF-8")))
    }

    /// A graph attribute. Errors: there is none of that name.
    pub fn body(&self, name: &str) -> Result<&Body<'m>> {
        self.ignore(name);
        let found = self.bodies.iter().find(|(own, _)| *own == name).map(|(_, body)| body);
        found.ok_or_else(|| Error::attribute(format!("{} without its graph `{name}`", self.op)))
    }

    /// What it reads, its bodies included.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> {
        self.inputs.iter().flatten().chain(&self.captures).copied()
    }

    /// The names of the attributes that nobody has read.
    pub fn unread(&self) -> impl Iterator<Item = &'m str> {
        self.attributes.iter().filter(|attribute| !attribute.read.get()).map(|attribute| attribute.name)
    }

    /// Marks an attribute as honoured, for those without influence on the result.
    pub fn ignore(&self, name: &str) {
        let _ = self.find(name);
    }

    fn find(&self, name: &str) -> Option<&'m AttributeProto> {
        let attribute = self.attributes.iter().find(|attribute| attribute.name == name)?;
        attribute.read.set(true);
        Some(attribute.proto)
    }

    fn typed(&self, name: &str, wanted: AttributeType) -> Result<Option<&'m AttributeProto>> {
        let Some(proto) = self.find(name) else { return Ok(None) };
        let found = proto.r#type();
        if found != wanted {
            return Err(Error::attribute(format!(
                "attribute `{name}` has type {}, not {}",
                found.as_str_name(),
                wanted.as_str_name()
            )));
        }
        Ok(Some(proto))
    }
}
