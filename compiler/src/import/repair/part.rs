//! Tensors that the exporter merged because they were equal: parameters, buffers and constants, each again its own.
//!
//! The call of a node reads `%p_ln_2_weight`, the node `ln_1.weight`. Inputs that are the call's arguments are told apart by
//! position; other ones where the call leaves one reading only. What merged initializers of no module's name stand for is told by
//! the calls that read them.

use super::names::{absent, is_plain, positions, reshaped};
use super::{elements, ints, leaf, made};
use crate::import::fx::{FxCall, is_fused};
use crate::import::parameters::signature::Signature;
use crate::import::parameters::warnings::{ADVICE, listed};
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use dcc_program::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Elements up to which the exporter merges initializers.
const MERGED: i64 = 1024;

/// Gives every tensor that was merged into another's initializer its own again. Tied parameters have one argument. Returns what is
/// not sure, for the user to know.
pub fn part(graph: &mut GraphProto, signature: &Signature) -> Vec<String> {
    let tensors: BTreeMap<String, TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect();
    let mut nodes = std::mem::take(&mut graph.node);
    let mut parting = Parting::new(&nodes, tensors, signature);
    for node in nodes.iter_mut().filter(|node| !is_fused(node)) {
        parting.named(node);
        parting.reshaped(node);
        parting.plain(node);
    }
    parting.anonymous(&mut nodes);
    let Parting { made, views, doubts, .. } = parting;
    graph.initializer.extend(made.into_values());
    graph.node = views.into_iter().chain(nodes).collect();
    let told = |(name, nodes): (String, Vec<String>)| {
        format!(
            "{} read `{name}` for a value that the file has not: a view of it, or a tensor that was equal when the exporter merged \
             them; taken for `{name}`; {ADVICE}",
            listed(&nodes)
        )
    };
    doubts.into_iter().map(told).collect()
}

struct Parting<'a> {
    signature: &'a Signature,
    tensors: BTreeMap<String, TensorProto>,
    by_argument: BTreeMap<&'a str, &'a str>,
    /// Values of the exported program that the file has.
    values: BTreeSet<String>,
    /// How many inputs read each initializer.
    reads: BTreeMap<String, usize>,
    made: BTreeMap<String, TensorProto>,
    /// Nodes that give tensors of the module in the shape that readers want.
    views: Vec<NodeProto>,
    /// Nodes by the initializer that they read, which may stand for another tensor there.
    doubts: BTreeMap<String, Vec<String>>,
}

impl<'a> Parting<'a> {
    fn new(nodes: &[NodeProto], tensors: BTreeMap<String, TensorProto>, signature: &'a Signature) -> Parting<'a> {
        let mut reads = BTreeMap::new();
        let mut values = BTreeSet::new();
        for node in nodes {
            node.input.iter().filter(|input| tensors.contains_key(*input)).for_each(|input| {
                *reads.entry(input.clone()).or_insert(0) += 1;
            });
            values.extend(node.output.iter().cloned());
            values.extend(FxCall::of(node).values().next().map(str::to_owned));
        }
        let by_argument = signature.all().map(|(name, argument)| (argument, name)).collect();
        let (made, views, doubts) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        Parting { signature, tensors, by_argument, values, reads, made, views, doubts }
    }

    /// Whether the exporter may have merged it.
    fn is_small_float(&self, name: &str) -> bool {
        let float = |tensor: &TensorProto| crate::import::dtype(tensor.data_type()).is_ok_and(DType::is_float);
        self.tensors.get(name).is_some_and(|tensor| elements(tensor) <= MERGED && float(tensor))
    }

    /// Whether the file has every value that the call reads: an input of the node that is none of them is a constant.
    fn is_whole(&self, call: &FxCall) -> bool {
        let known =
            |value: &str| self.values.contains(value) || self.signature.is_input(value) || self.by_argument.contains_key(value);
        !call.0.is_empty() && call.values().skip(1).all(known)
    }

    /// The tensor `name`, as `from` is where the file has none.
    fn give(&mut self, node: &mut NodeProto, input: usize, name: &str) {
        if !self.tensors.contains_key(name) && !self.made.contains_key(name) {
            let tensor = TensorProto { name: Some(name.to_owned()), ..self.tensors[&node.input[input]].clone() };
            self.made.insert(name.to_owned(), tensor);
        }
        node.input[input] = name.to_owned();
    }

    /// A constant in place of an input.
    fn fix(&mut self, node: &mut NodeProto, input: usize) {
        let name = format!("{} of {}", node.input[input], result(node));
        let like = &self.tensors[&node.input[input]];
        let filled = absent(node.op_type(), input).and_then(|one| filled(like, one));
        let tensor = TensorProto { name: Some(name.clone()), ..filled.unwrap_or_else(|| like.clone()) };
        self.made.insert(name.clone(), tensor);
        node.input[input] = name;
    }

    /// Initializers that have a name of the module's.
    fn named(&mut self, node: &mut NodeProto) {
        let text = FxCall::of(node).0.to_owned();
        let call = FxCall(&text);
        let arguments = call.arguments();
        let placed = positions(node, &call);
        for &(input, argument) in placed {
            let Some(current) = node.input.get(input).cloned() else { continue };
            if !self.is_small_float(&current) || self.signature.argument(&current).is_none() {
                continue;
            }
            match arguments.get(argument).map(|argument| (*argument, argument.strip_prefix('%'))) {
                Some((_, Some(value))) => match self.by_argument.get(value).copied() {
                    Some(name) if name != current => self.give(node, input, name),
                    Some(_) => {}
                    // What an earlier call of the norm left: see `statistics`.
                    None if node.op_type() == "BatchNormalization" && input > 2 => {}
                    None => self.doubt(node, input),
                },
                // `None`, or left out.
                _ => self.fix(node, input),
            }
        }
        if placed.is_empty() {
            self.unplaced(node, &call);
        }
    }

    /// The same where inputs stand in no known place.
    fn unplaced(&mut self, node: &mut NodeProto, call: &FxCall) {
        let mut own: Vec<&str> = call.values().skip(1).collect();
        let mut others: Vec<usize> = Vec::new();
        for (position, input) in node.input.iter().enumerate().filter(|(_, input)| self.is_small_float(input)) {
            let Some(argument) = self.signature.argument(input) else { continue };
            match own.iter().position(|value| *value == argument) {
                Some(at) => drop(own.swap_remove(at)),
                None if self.reads[input] > 1 => others.push(position),
                None => {}
            }
        }
        if others.is_empty() || call.0.is_empty() {
            return;
        }
        let mut meant: Vec<&str> = Vec::new();
        for name in call.values().skip(1).filter_map(|value| self.by_argument.get(value).copied()) {
            if !self.tensors.contains_key(name) && !meant.contains(&name) {
                meant.push(name);
            }
        }
        // The sum of a linear layer's product and its bias.
        if (call.target(), node.op_type()) == ("aten.linear", "Add") {
            meant = meant.pop().into_iter().collect();
        }
        let mut renamed: Vec<(usize, &str)> = Vec::new();
        meant.retain(|name| {
            let like: Vec<usize> = others.iter().copied().filter(|&at| leaf(&node.input[at]) == leaf(name)).collect();
            let [position] = like[..] else { return true };
            others.retain(|&other| other != position);
            renamed.push((position, name));
            false
        });
        if meant.len() == others.len() {
            renamed.extend(others.drain(..).zip(meant.drain(..)));
        }
        renamed.into_iter().for_each(|(position, name)| self.give(node, position, name));
        for position in others {
            match meant.is_empty() && self.is_whole(call) {
                true => self.fix(node, position),
                false => self.doubt(node, position),
            }
        }
    }

    /// Gains and biases that a decomposed operator reads in another shape.
    fn reshaped(&mut self, node: &mut NodeProto) {
        let Some(argument) = reshaped(node, &FxCall::of(node)) else { return };
        let Some(name) = self.by_argument.get(argument).map(|name| (*name).to_owned()) else { return };
        let anonymous = |input: &String| self.is_anonymous(input);
        let Some(input) = node.input.iter().position(anonymous) else { return };
        let tensor = self.tensors[&node.input[input]].clone();
        let view = format!("{} of {}", node.input[input], result(node));
        let shape = format!("shape of {view}");
        self.made.insert(shape.clone(), ints(shape.clone(), &tensor.dims));
        let flat = TensorProto { name: Some(name.clone()), dims: vec![elements(&tensor)], ..tensor };
        if !self.tensors.contains_key(&name) {
            self.made.entry(name.clone()).or_insert(flat);
        }
        self.views.push(made("Reshape", vec![name, shape], view.clone()));
        node.input[input] = view;
    }

    fn is_anonymous(&self, input: &str) -> bool {
        self.tensors.contains_key(input) && self.is_small_float(input) && self.signature.argument(input).is_none()
    }

    /// The one parameter that a call reads as it is, under a name of the exporter's.
    fn plain(&mut self, node: &mut NodeProto) {
        let text = FxCall::of(node).0.to_owned();
        let call = FxCall(&text);
        let missing = |name: &&str| !self.tensors.contains_key(*name);
        let mut meant = call.values().skip(1).filter_map(|value| self.by_argument.get(value).copied()).filter(missing);
        let (Some(name), None, true) = (meant.next(), meant.next(), is_plain(node, &call)) else { return };
        // A number of the call's is an initializer too.
        if !call.arguments().iter().all(|argument| argument.starts_with('%')) {
            return;
        }
        let others: Vec<usize> =
            (0..node.input.len()).filter(|&at| self.is_anonymous(&node.input[at]) && !call.reads(&node.input[at])).collect();
        if let [input] = others[..] {
            self.give(node, input, name);
        }
    }

    /// Initializers of no module's name that stand for different tensors: one for each set of parameters that the calls which read
    /// it name, and one for the calls that name none.
    fn anonymous(&mut self, nodes: &mut [NodeProto]) {
        let mut readers: BTreeMap<String, BTreeMap<Vec<&str>, Vec<(usize, usize)>>> = BTreeMap::new();
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| !is_fused(node)) {
            let call = FxCall::of(node);
            for (input, name) in node.input.iter().enumerate().filter(|(_, name)| self.is_anonymous(name)) {
                let lost = |value: &str| self.by_argument.get(value).copied().filter(|name| !self.has(name));
                let meant: Vec<&str> = call.values().skip(1).filter_map(lost).collect();
                if !call.0.is_empty() && !call.reads(name) && (!meant.is_empty() || self.is_whole(&call)) {
                    readers.entry(name.clone()).or_default().entry(meant).or_default().push((at, input));
                }
            }
        }
        let several = readers.into_iter().filter(|(_, meanings)| meanings.len() > 1);
        let several: Vec<(String, Vec<Vec<(usize, usize)>>)> =
            several.map(|(name, meanings)| (name, meanings.into_values().collect())).collect();
        for (name, mut meanings) in several {
            // The last keeps the name; what no parameter is of comes first.
            meanings.pop();
            for (number, places) in meanings.into_iter().enumerate() {
                let copy = format!("{name} of {number}");
                places.into_iter().for_each(|(node, input)| self.give(&mut nodes[node], input, &copy));
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.made.contains_key(name)
    }

    /// Where an initializer has other readers, this one may mean another tensor.
    fn doubt(&mut self, node: &NodeProto, input: usize) {
        let name = &node.input[input];
        if self.reads[name] > 1 {
            self.doubts.entry(name.clone()).or_default().push(node.name().to_owned());
        }
    }
}

/// The name of what a node gives.
fn result(node: &NodeProto) -> &str {
    node.output.first().map_or("", String::as_str)
}

/// Ones or zeros like a tensor; none of a dtype that norms do not have.
fn filled(like: &TensorProto, one: bool) -> Option<TensorProto> {
    let element: &[u8] = match (crate::import::dtype(like.data_type()).ok()?, one) {
        (DType::F32, true) => &[0, 0, 0x80, 0x3f],
        (DType::F64, true) => &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
        (DType::F16, true) => &[0, 0x3c],
        (DType::BF16, true) => &[0x80, 0x3f],
        (DType::F32, false) => &[0; 4],
        (DType::F64, false) => &[0; 8],
        (DType::F16 | DType::BF16, false) => &[0; 2],
        _ => return None,
    };
    let raw_data = Some(element.repeat(usize::try_from(elements(like)).ok()?).into());
    let (dims, data_type) = (like.dims.clone(), like.data_type);
    Some(TensorProto { dims, data_type, raw_data, ..TensorProto::default() })
}
