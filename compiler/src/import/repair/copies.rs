//! Constants that an exporter computed of parameters which are in the file too, found by their elements: a tied table that is read as
//! `h @ table.T`, or a part of it. As they are in the file, the copy would be held constant or train on its own.
//!
//! PyTorch's files say by names what an exporter made. In those of other tools any matrix of a product may be a copy of a table that rows
//! are looked up in.
//!
//! Weights are not read to compile; these few are, where they are there, since nothing else tells.

use super::{elements, ints, made, transpose};
use crate::import::model::Model;
use crate::import::parameters::is_of_module;
use crate::import::parameters::signature::Signature;
use crate::import::parameters::trace::{Trace, is_transpose};
use crate::import::parameters::warnings::{ADVICE, listed};
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use crate::import::tensor::Tensor;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a table up to which every part of it is compared, of a larger one the first and the last.
const SEARCHED: usize = 1 << 24;
/// Elements that are compared, of more every few.
const COMPARED: usize = 1 << 20;
/// Values that differ, for equal elements to be no accident.
const DISTINCT: usize = 4;
/// Since when Slice takes its bounds as inputs.
const SLICE_OPSET: i64 = 10;

/// What to do about files of other tools.
const LATER: &str = "export it after a step of training, when they differ";

/// A matrix: rows, columns, elements and the bytes of one.
struct Matrix {
    name: String,
    rows: usize,
    columns: usize,
    width: usize,
    bytes: Option<Bytes>,
}

/// A rectangle of a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    row: usize,
    column: usize,
    turned: bool,
}

/// What was found, for the user to know.
#[derive(Default)]
pub struct Told {
    /// Copies that are computed now.
    pub tied: Vec<String>,
    /// What may be copies, as far as the data at hand tell.
    pub open: Vec<String>,
}

/// Makes the copies computed.
pub fn tie(model: &mut Model) -> Told {
    let mut notes = Told::default();
    let signature = Signature::of(model);
    let from_torch = model.proto.producer_name() == "pytorch";
    let advice = if signature.is_some() || from_torch { ADVICE } else { LATER };
    let tables = tables(model.graph());
    let copies = copies(model, signature.as_ref(), &tables);
    if copies.is_empty() {
        return notes;
    }
    let is_source = |tensor: &&TensorProto| match &signature {
        Some(signature) => signature.is_parameter(tensor.name()) == Some(true),
        None if from_torch => is_of_module(tensor.name()),
        None => tables.contains(tensor.name()),
    };
    let sources: Vec<Matrix> = model.graph().initializer.iter().filter(is_source).filter_map(|t| matrix(model, t)).collect();
    for copy in copies {
        let opset = model.opset();
        let fits = |part: &Part, source: &Matrix| opset >= SLICE_OPSET || copy.is_whole(*part, source);
        let found: Vec<(&Matrix, Part)> = sources.iter().filter_map(|source| Some((source, copy.find(source)?))).collect();
        if let [(source, part)] = found[..] {
            if fits(&part, source) {
                notes.tied.push(told(&copy, source, part, advice));
                compute(model.proto.graph.as_mut().expect("decode checked that there is a graph"), &copy, source, part);
            }
        } else if found.is_empty() && copy.bytes.is_none() {
            let tables: Vec<&Matrix> = sources.iter().filter(|s| tables.contains(&s.name) && copy.is_turned(s)).collect();
            let seems = tables.len() == 1 && signature.is_some() && is_transpose(&copy.name);
            match tables[..] {
                [source] if seems => {
                    let part = Part { row: 0, column: 0, turned: true };
                    notes.tied.push(told(&copy, source, part, advice));
                    compute(model.proto.graph.as_mut().expect("decode checked that there is a graph"), &copy, source, part);
                }
                [source, ..] if signature.is_none() => notes.open.push(format!(
                    "`{}` may be the transposed copy of `{}`, which the file without its data does not tell: trained apart; if the module has \
                     them tied, put its data beside the model",
                    copy.name, source.name
                )),
                _ => {}
            }
        } else if advice == LATER && found.len() > 1 {
            let names: Vec<&str> = found.iter().map(|(source, _)| &source.name[..]).collect();
            notes.open.push(format!("`{}` has the elements of {}, and is trained apart from them", copy.name, listed(&names)));
        }
    }
    notes
}

/// What may be a copy.
fn copies(model: &Model, signature: Option<&Signature>, tables: &BTreeSet<String>) -> Vec<Matrix> {
    let from_torch = model.proto.producer_name() == "pytorch";
    let factors = if signature.is_none() && !from_torch { factors(model.graph(), tables) } else { BTreeSet::new() };
    let made = |tensor: &&TensorProto| match signature {
        Some(signature) => signature.is_parameter(tensor.name()).is_none(),
        None if from_torch => !is_of_module(tensor.name()),
        None => factors.contains(tensor.name()),
    };
    let is_float = |tensor: &&TensorProto| crate::import::dtype(tensor.data_type()).is_ok_and(|dtype| dtype.is_float());
    let found: Vec<&TensorProto> =
        model.graph().initializer.iter().filter(made).filter(is_float).filter(|tensor| elements(tensor) > 1).collect();
    if found.is_empty() {
        return Vec::new();
    }
    let constants: Option<BTreeSet<String>> =
        signature.map(|signature| Trace::new(model, signature).constants.into_iter().collect());
    let open = |tensor: &&TensorProto| constants.as_ref().is_none_or(|constants| constants.contains(tensor.name()));
    found.into_iter().filter(open).filter_map(|tensor| matrix(model, tensor)).collect()
}

/// Initializers that rows are looked up in.
fn tables(graph: &GraphProto) -> BTreeSet<String> {
    graph.node.iter().filter(|node| node.op_type() == "Gather").filter_map(|node| node.input.first().cloned()).collect()
}

/// Initializers that are factors of products, as large as one of the `tables`; these themselves are none.
fn factors<'g>(graph: &'g GraphProto, tables: &BTreeSet<String>) -> BTreeSet<&'g str> {
    let sizes: BTreeSet<i64> = graph.initializer.iter().filter(|tensor| tables.contains(tensor.name())).map(elements).collect();
    let products = graph.node.iter().filter(|node| matches!(node.op_type(), "MatMul" | "Gemm" | "FusedMatMul" | "FusedGemm"));
    let read: BTreeSet<&str> = products.flat_map(|node| node.input.iter().take(2)).map(String::as_str).collect();
    let matrices = graph.initializer.iter().filter(|tensor| tensor.dims.len() > 1 && sizes.contains(&elements(tensor)));
    matrices.map(TensorProto::name).filter(|name| read.contains(name) && !tables.contains(*name)).collect()
}

fn matrix(model: &Model, proto: &TensorProto) -> Option<Matrix> {
    let tensor = Tensor::new(model, proto.name(), proto).ok().filter(|tensor| tensor.dtype.is_float())?;
    let dims: Vec<usize> = tensor.shape.iter().filter(|dim| **dim != 1).map(|dim| *dim as usize).collect();
    let (rows, columns) = match dims[..] {
        [] => (1, 1),
        [columns] => (1, columns),
        [rows, ref rest @ ..] => (rows, rest.iter().product()),
    };
    let bytes = tensor.bytes(model).ok();
    Some(Matrix { name: tensor.name.clone(), rows, columns, width: tensor.dtype.bytes() as usize, bytes })
}

impl Matrix {
    fn is_turned(&self, source: &Matrix) -> bool {
        (self.rows, self.columns, self.width) == (source.columns, source.rows, source.width)
    }

    fn is_whole(&self, part: Part, source: &Matrix) -> bool {
        let (rows, columns) = self.dims(part.turned);
        (rows, columns) == (source.rows, source.columns)
    }

    /// As its source has them.
    fn dims(&self, turned: bool) -> (usize, usize) {
        if turned { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }

    /// The one part of `source` that it is a copy of.
    fn find(&self, source: &Matrix) -> Option<Part> {
        let (own, theirs) = (self.bytes.as_ref()?, source.bytes.as_ref()?);
        if self.width != source.width || !self.is_telling() {
            return None;
        }
        let mut found: Option<Part> = None;
        for turned in [false, true] {
            let (rows, columns) = self.dims(turned);
            if rows > source.rows || columns > source.columns || (rows != source.rows && columns != source.columns) {
                continue;
            }
            let (down, right) = (source.rows - rows, source.columns - columns);
            let all = theirs.len() <= SEARCHED;
            let offsets = |free: usize| (0..=free).filter(move |&at| all || at == 0 || at == free);
            for part in offsets(down).flat_map(|row| offsets(right).map(move |column| Part { row, column, turned })) {
                if self.equals(own, source, theirs, part) {
                    if found.is_some() {
                        return None;
                    }
                    found = Some(part);
                }
            }
        }
        found
    }

    fn equals(&self, own: &Bytes, source: &Matrix, theirs: &Bytes, part: Part) -> bool {
        let count = self.rows * self.columns;
        (0..count).step_by((count / COMPARED).max(1)).all(|at| {
            let (row, column) = (at / self.columns, at % self.columns);
            let (row, column) = if part.turned { (column, row) } else { (row, column) };
            let there = (part.row + row) * source.columns + part.column + column;
            own[at * self.width..][..self.width] == theirs[there * self.width..][..self.width]
        })
    }

    fn is_telling(&self) -> bool {
        let Some(bytes) = &self.bytes else { return false };
        let mut values: BTreeSet<&[u8]> = BTreeSet::new();
        bytes.chunks(self.width).take(COMPARED).any(|value| values.insert(value) && values.len() == DISTINCT)
    }
}

fn told(copy: &Matrix, source: &Matrix, part: Part, advice: &str) -> String {
    let what = match (copy.is_whole(part, source), part.turned) {
        (true, true) => "the transposed copy of",
        (true, false) => "a copy of",
        (false, _) => "a copy of a part of",
    };
    let by = if copy.bytes.is_some() { "by its elements" } else { "by its name and shape, without the data" };
    format!(
        "{} in the file: {by} {what} {}, and computed from it again; if the module has them apart, {advice}",
        listed(&[&copy.name]),
        listed(&[&source.name])
    )
}

/// Puts nodes in the place of `copy`.
fn compute(graph: &mut GraphProto, copy: &Matrix, source: &Matrix, part: Part) {
    let dims: BTreeMap<String, Vec<i64>> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.dims.clone())).collect();
    let shape = dims[&source.name].clone();
    let mut builder = Builder { graph, copy: &copy.name, nodes: Vec::new(), value: source.name.clone(), shape };
    let (rows, columns) = copy.dims(part.turned);
    if !copy.is_whole(part, source) {
        builder.reshape(&[source.rows as i64, source.columns as i64]);
        let starts = [part.row as i64, part.column as i64];
        let ends = [(part.row + rows) as i64, (part.column + columns) as i64];
        builder.add("Slice", &[("starts", &starts), ("ends", &ends)]);
        builder.shape = vec![rows as i64, columns as i64];
    }
    if part.turned {
        builder.reshape(&[rows as i64, columns as i64]);
        let result = builder.name("transposed");
        builder.nodes.push(transpose(std::mem::replace(&mut builder.value, result.clone()), result));
        builder.shape = vec![columns as i64, rows as i64];
    }
    builder.reshape(&dims[&copy.name]);
    let Builder { mut nodes, value, .. } = builder;
    nodes.push(made("Identity", vec![value], copy.name.clone()));
    graph.initializer.retain(|tensor| tensor.name() != copy.name);
    graph.node.splice(0..0, nodes);
}

/// Nodes in a row.
struct Builder<'g> {
    graph: &'g mut GraphProto,
    copy: &'g str,
    nodes: Vec<NodeProto>,
    /// What the last one gives.
    value: String,
    shape: Vec<i64>,
}

impl Builder<'_> {
    fn name(&self, of: &str) -> String {
        format!("{} {of} {}", self.copy, self.nodes.len())
    }

    fn reshape(&mut self, shape: &[i64]) {
        if self.shape != shape {
            self.add("Reshape", &[("shape", shape)]);
            self.shape = shape.to_vec();
        }
    }

    /// A node with integers that the graph then holds.
    fn add(&mut self, op: &str, operands: &[(&str, &[i64])]) {
        let mut inputs = vec![self.value.clone()];
        for (of, numbers) in operands {
            let tensor = ints(self.name(of), numbers);
            inputs.push(tensor.name().to_owned());
            self.graph.initializer.push(tensor);
        }
        self.value = self.name(op);
        self.nodes.push(made(op, inputs, self.value.clone()));
    }
}
