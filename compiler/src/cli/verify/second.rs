//! The second opinion on a model: all its values by tract. A node that tract cannot run is left out, and its results are given, as
//! are elements that ONNX leaves undefined.

use super::model::{Question, Values};
use super::tract::{self, Refusal};
use super::undefined::undefined;
use crate::error::Result;
use crate::import::{Normal, Parts, Tensor, TensorData};
use bytes::Bytes;
use dcc_program::{DType, Shape};
use dcc_runtime::exec::whole;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that are left out one by one before tract is given up.
const MOST_LEFT_OUT: usize = 64;
/// Integers of up to so many elements may be shapes, which tract needs while it reads a model.
const MOST_SIZES: u64 = 256;

/// What tract makes of a model.
#[derive(Default)]
pub struct Opinion {
    /// Its values.
    pub values: Values,
    /// All nodes that outputs depend on.
    pub nodes: usize,
    /// Nodes that tract does not run, and why.
    pub left_out: Vec<LeftOut>,
    /// Casts of numbers that their results cannot hold.
    pub undefined: Vec<Undefined>,
    /// Why there are no values at all.
    pub refused: Option<String>,
}

pub struct LeftOut {
    pub place: String,
    pub reason: String,
}

/// What is not compared of a node's result.
pub struct Undefined {
    pub place: String,
    pub elements: usize,
}

/// A cast of floats of which its result cannot hold some. What follows it reads dcc's result.
struct UndefinedCast {
    result: String,
    undefined: Vec<bool>,
}

struct Writer<'a> {
    normal: Normal<'a>,
    /// By number.
    casts: BTreeMap<usize, UndefinedCast>,
    question: &'a Question,
    /// By dcc.
    computed: &'a Values,
    inputs: &'a Values,
    weights: &'a Values,
}

/// Runs `question.theirs` on these inputs and weights; `computed` are dcc's values of the same. Errors: as of writing it.
pub fn opinion(question: &Question, inputs: &Values, weights: &Values, computed: &Values) -> Result<Opinion> {
    let normal = Normal::new(&question.theirs)?;
    let casts = casts(&normal, inputs, computed);
    let writer = Writer { normal, casts, question, computed, inputs, weights };
    let total = writer.normal.nodes().count();
    let foreign = |node: &&(usize, i64)| node.1 != question.theirs.opset();
    let opsets: Vec<(usize, i64)> = writer.normal.nodes().map(|(number, node)| (number, node.opset)).collect();
    let mut left: BTreeMap<usize, String> =
        opsets.iter().filter(foreign).map(|(n, opset)| (*n, format!("opset {opset} in a model of another"))).collect();
    let mut refused = None;
    let mut values = Values::new();
    loop {
        writer.leave_out_readers(&mut left);
        let without: BTreeSet<usize> = left.keys().copied().collect();
        let refusal = match writer.run(&without)? {
            Ok(found) => {
                values = found;
                break;
            }
            Err(refusal) => writer.located(refusal, &without)?,
        };
        match refusal.node.filter(|node| !without.contains(node)) {
            Some(node) if left.len() < MOST_LEFT_OUT || refusal.lacks_operator() => {
                let operator = writer.normal.operator(node);
                let alike = |other: usize| refusal.lacks_operator() && writer.normal.operator(other) == operator;
                let also = writer.normal.nodes().map(|(number, _)| number).filter(|&number| number == node || alike(number));
                left.extend(also.map(|number| (number, refusal.reason.clone())));
            }
            _ => {
                refused = Some(refusal.reason);
                break;
            }
        }
    }
    let left_out = left.into_iter().map(|(node, reason)| LeftOut { place: writer.normal.place(node), reason }).collect();
    let undefined = writer.casts.iter().map(|(&node, cast)| {
        let elements = cast.undefined.iter().filter(|undefined| **undefined).count();
        Undefined { place: writer.normal.place(node), elements }
    });
    Ok(Opinion { values, nodes: total, left_out, undefined: undefined.collect(), refused })
}

fn casts(normal: &Normal, inputs: &Values, computed: &Values) -> BTreeMap<usize, UndefinedCast> {
    let cast = |(number, _)| {
        let is_cast = matches!(normal.operator(number), "Cast" | "CastLike");
        let operand = normal.reads(number).next().filter(|_| is_cast)?;
        let operand = computed.get(operand).or(inputs.get(operand))?;
        let result = normal.computes(number).next()?;
        let undefined = undefined(operand, computed.get(result)?.dtype)?;
        Some((number, UndefinedCast { result: result.to_owned(), undefined }))
    };
    normal.nodes().filter_map(cast).collect()
}

impl UndefinedCast {
    /// Puts dcc's elements where there are no others.
    fn define(&self, theirs: &mut whole::Tensor, ours: &whole::Tensor) {
        if (theirs.dtype, &theirs.shape) == (ours.dtype, &ours.shape) {
            let size = ours.dtype.bytes() as usize;
            let elements = theirs.bytes.chunks_mut(size).zip(ours.bytes.chunks(size)).zip(&self.undefined);
            elements.filter(|(_, undefined)| **undefined).for_each(|((theirs, ours), _)| theirs.copy_from_slice(ours));
        }
    }
}

impl Refusal {
    fn lacks_operator(&self) -> bool {
        self.reason.contains("nimplemented")
    }
}

impl Writer<'_> {
    /// Leaves out what reads a result of a node left out that cannot be given, such as a sequence.
    fn leave_out_readers(&self, left: &mut BTreeMap<usize, String>) {
        let mut absent: BTreeMap<&str, usize> = BTreeMap::new();
        for (number, _) in self.normal.nodes() {
            if let Some(node) = self.normal.reads(number).find_map(|name| absent.get(name)) {
                let reason = || format!("reads what node {node} computes, which is no tensor");
                left.entry(number).or_insert_with(reason);
            }
            if left.contains_key(&number) {
                let names = self.normal.computes(number).filter(|name| !self.computed.contains_key(*name));
                absent.extend(names.map(|name| (name, number)));
            }
        }
    }

    /// The values of all nodes but those `without`, whose results are dcc's.
    fn run(&self, without: &BTreeSet<usize>) -> Result<std::result::Result<Values, Refusal>> {
        let mut given: BTreeMap<String, whole::Tensor> = self.inputs.clone();
        let mut constants: BTreeMap<String, Tensor> = BTreeMap::new();
        for (name, tensor) in &self.question.options.import.constants {
            given.remove(name);
            constants.insert(name.clone(), tensor.clone());
        }
        for name in without.iter().flat_map(|&node| self.normal.computes(node)) {
            let Some(value) = self.computed.get(name) else { continue };
            match !value.dtype.is_float() && value.shape.iter().product::<u64>() <= MOST_SIZES {
                true => drop(constants.insert(name.to_owned(), constant(name, value))),
                false => drop(given.insert(name.to_owned(), value.clone())),
            }
        }
        let casts = self.casts.iter().filter(|(number, _)| !without.contains(number));
        let beside: BTreeMap<usize, String> = casts.map(|(number, _)| (*number, format!("dcc.{number}.cast"))).collect();
        for cast in beside.keys().map(|number| &self.casts[number]) {
            given.insert(cast.result.clone(), self.computed[&cast.result].clone());
        }
        let kept = self.normal.nodes().filter(|(number, _)| !without.contains(number));
        let names = kept.flat_map(|(number, _)| self.normal.computes(number));
        let outputs: Vec<String> = names.filter(|name| self.computed.contains_key(*name)).map(str::to_owned).collect();
        let renamed =
            |name: &String| beside.iter().find(|(number, _)| self.casts[number].result == *name).map(|(_, other)| other);
        let written: Vec<String> = outputs.iter().map(|name| renamed(name).unwrap_or(name).clone()).collect();
        let types: BTreeMap<String, (DType, Vec<u64>)> =
            given.iter().map(|(name, tensor)| (name.clone(), (tensor.dtype, tensor.shape.clone()))).collect();
        let parts = Parts {
            weight: &|tensor| self.weight(tensor),
            inputs: &types,
            constants: &constants,
            dtype: &|name| self.inputs.get(name).or(self.computed.get(name)).map(|tensor| tensor.dtype),
            without,
            beside: &beside,
            outputs: &written,
        };
        let bytes = self.normal.write(&parts)?.encode_to_vec();
        let found = tract::run(bytes, given.into_values().collect());
        Ok(found.map(|found| {
            let mut values: Values = outputs.into_iter().zip(found).collect();
            for cast in beside.keys().map(|number| &self.casts[number]) {
                if let Some(theirs) = values.get_mut(&cast.result) {
                    cast.define(theirs, &self.computed[&cast.result]);
                }
            }
            values
        }))
    }

    /// The data of the file, or what dcc makes up in their place.
    fn weight(&self, tensor: &Tensor) -> Result<Bytes> {
        match self.weights.get(&tensor.name) {
            Some(made) => Ok(made.bytes.clone().into()),
            None => tensor.bytes(&self.question.theirs),
        }
    }

    /// A refusal that names no node, with the first node that tract does not run after those before it.
    fn located(&self, refusal: Refusal, without: &BTreeSet<usize>) -> Result<Refusal> {
        if refusal.node.is_some() {
            return Ok(refusal);
        }
        let nodes: Vec<usize> = self.normal.nodes().map(|(number, _)| number).filter(|n| !without.contains(n)).collect();
        let (mut runs, mut fails) = (0, nodes.len());
        while fails - runs > 1 {
            let middle = (runs + fails) / 2;
            let without = without.iter().chain(&nodes[middle..]).copied().collect();
            match self.run(&without)? {
                Ok(_) => runs = middle,
                Err(_) => fails = middle,
            }
        }
        let node = nodes.get(fails.saturating_sub(1)).copied();
        Ok(Refusal { node, ..refusal })
    }
}

fn constant(name: &str, value: &whole::Tensor) -> Tensor {
    let data = TensorData::Owned(value.bytes.clone().into());
    Tensor { name: name.to_owned(), dtype: value.dtype, shape: Shape::from_slice(&value.shape), data }
}
