//! What became of parameters that the module has and the file has not, by what the exporter says of each node.
//!
//! A node carries the call of the exported program that it came from. Where that reads `%p_fc_weight` and the node an
//! initializer of no module's name, that is the parameter under a new name (`val_7`: usually transposed); where it reads another
//! parameter's, the two are one tensor (an alias). An initializer that no such call explains was computed by the exporter, under
//! the name of the value of the exported program: rows of a parameter that no call reads any more (`embedding_1`: positions),
//! transposed weights (`permute_2`), else a function of buffers (`unsqueeze_14`: rotary tables).

use super::signature::Signature;
use crate::import::fx::{FxCall, is_fused};
use crate::import::model::Model;
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

const SCOPES: &str = "pkg.torch.onnx.name_scopes";

/// Module names, by initializer.
type Aliases = BTreeMap<String, Vec<String>>;

#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Module names of tied parameters, by the one initializer that stands for them.
    pub aliases: Aliases,
    /// The parameters that initializers are transposed copies of.
    pub transposes: BTreeMap<String, String>,
    /// Initializers that stand for several weights of linear layers at once.
    pub merged: Vec<String>,
    /// Initializers that are a parameter under another name.
    renamed: BTreeSet<String>,
    /// Those that were transposed before any call that is left.
    pub turned: Vec<String>,
    /// Those that are rows of one of the `tables`.
    pub rows: Vec<String>,
    /// Weights without a tensor of their own that no call reads.
    pub tables: Vec<String>,
    /// Other parameters without a tensor that no call reads, and numbers that may have been computed from them.
    pub others: Vec<String>,
    pub numbers: Vec<String>,
    /// Float initializers that nothing explains.
    pub constants: Vec<String>,
    /// Parameters that a call reads, but no tensor of the file stands for.
    pub lost: Vec<String>,
    /// Parameters that are among `renamed`, sorted.
    found: BTreeSet<String>,
    /// Calls read values that the file has not: the exporter's optimizer was at work.
    gaps: bool,
}

impl Trace {
    pub fn new(model: &Model, signature: &Signature) -> Trace {
        let graph = model.graph();
        let names: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        let missing: Vec<(&str, &str)> = signature.parameters().filter(|(name, _)| !names.contains(name)).collect();
        let aliases = find_aliases(model, signature, &missing);
        let aliased: BTreeSet<&str> = aliases.values().flatten().map(String::as_str).collect();
        let anonymous = |tensor: &&TensorProto| {
            let is_float = crate::import::dtype(tensor.data_type()).is_ok_and(|dtype| dtype.is_float());
            is_float && signature.is_parameter(tensor.name()).is_none()
        };
        let (numbers, tensors): (Vec<&TensorProto>, Vec<_>) =
            graph.initializer.iter().filter(anonymous).partition(|tensor| elements(tensor) <= 1);
        let anonymous: BTreeSet<&str> = tensors.into_iter().map(|tensor| tensor.name()).collect();
        let calls: BTreeSet<FxCall> = graph.node.iter().map(FxCall::of).filter(|call| !call.0.is_empty()).collect();
        let unexplained: Vec<(&str, &str)> = missing.iter().filter(|(name, _)| !aliased.contains(name)).copied().collect();
        let (renamed, found) = renamed(model, &calls, &unexplained, &anonymous);
        let open = || missing.iter().filter(|(name, _)| !aliased.contains(name) && !found.contains(name));
        // Without calls nobody knows which are read.
        let is_read = |argument: &str| calls.is_empty() || calls.iter().any(|call| call.reads(argument));
        let lost = open().filter(|(_, argument)| is_read(argument)).map(|(name, _)| (*name).to_owned()).collect();
        let unread = open().filter(|(_, argument)| !is_read(argument)).map(|(name, _)| (*name).to_owned());
        let (tables, others): (Vec<String>, Vec<String>) = unread.partition(|name| name.ends_with(".weight"));
        // A call reads the number as a value of the exported program.
        let numbers = numbers.into_iter().map(|tensor| tensor.name().to_owned()).filter(|name| is_read(name));
        let numbers = if others.is_empty() || calls.is_empty() { Vec::new() } else { numbers.collect() };
        // What a whole call reads besides its values is a number of the operator.
        let values = values(model, signature);
        let folded: BTreeSet<&str> = model
            .graph()
            .node
            .iter()
            .flat_map(|node| {
                let call = FxCall::of(node);
                let whole = !call.0.is_empty() && call.values().skip(1).all(|value| values.contains(value));
                node.input.iter().map(String::as_str).filter(move |input| !whole || call.reads(input))
            })
            .collect();
        let gaps = calls.iter().flat_map(FxCall::values).any(|value| !values.contains(value));
        let unexplained =
            anonymous.into_iter().filter(|name| !renamed.contains(*name) && folded.contains(name)).map(str::to_owned);
        let (rows, constants): (Vec<String>, Vec<_>) =
            unexplained.partition(|name| !tables.is_empty() && name.starts_with("embedding"));
        let (turned, constants): (Vec<String>, Vec<_>) = constants.into_iter().partition(|name| is_transpose(name));
        // More of them than weights are something else.
        let fit = rows.len() + turned.len() <= tables.len();
        let (turned, constants) = if fit { (turned, constants) } else { (Vec::new(), [turned, constants].concat()) };
        let (transposes, merged) = transposes(graph, &missing);
        let [renamed, found] = [renamed, found].map(|names| names.into_iter().map(str::to_owned).collect());
        Trace { lost, tables, rows, others, numbers, constants, renamed, found, aliases, transposes, merged, turned, gaps }
    }

    /// Whether an initializer that the signature does not name stands for a parameter.
    pub fn trains(&self, name: &str) -> bool {
        let among = |names: &[String]| names.iter().any(|other| other == name);
        self.renamed.contains(name) || among(&self.rows) || among(&self.turned)
    }

    /// Parameters that no call reads, if more than those that rows, numbers and transposed copies are of, and the exporter's
    /// optimizer was at work.
    pub fn unread(&self) -> Vec<String> {
        let explained = self.rows.len() + self.turned.len() + self.numbers.len();
        let all = self.tables.iter().chain(&self.others);
        let optimized = self.gaps || explained + self.renamed.len() + self.constants.len() > 0;
        if optimized && all.clone().count() > explained { all.cloned().collect() } else { Vec::new() }
    }

    /// Renamed parameters of which it is not known how they lie in the module.
    pub fn unnamed(&self) -> Vec<String> {
        let known = |name: &&String| self.transposes.contains_key(*name) || self.merged.contains(*name);
        self.renamed.iter().filter(|name| !known(name)).cloned().collect()
    }

    /// The parameters that these are, as far as that is known.
    pub fn unnamed_of(&self) -> Vec<String> {
        let known = |name: &&String| self.transposes.values().any(|other| other == *name);
        self.found.iter().filter(|name| !known(name)).cloned().collect()
    }
}

/// Values of the exported program that the file has.
fn values<'a>(model: &'a Model, signature: &'a Signature) -> BTreeSet<&'a str> {
    let nodes = model.graph().node.iter();
    let made = nodes.flat_map(|node| node.output.iter().map(String::as_str).chain(FxCall::of(node).values().next()));
    made.chain(signature.all().map(|(_, argument)| argument)).chain(signature.inputs()).collect()
}

/// Saturating: a tensor that large is refused elsewhere.
pub fn elements(tensor: &TensorProto) -> i64 {
    tensor.dims.iter().fold(1, |product: i64, &dim| product.saturating_mul(dim))
}

/// Whether it has the name of a transposed value of the exported program: `t`, `permute_2`.
pub fn is_transpose(name: &str) -> bool {
    let op = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('_');
    matches!(op, "t" | "permute" | "transpose" | "numpy_T")
}

/// The weights of linear layers that matrix products read transposed, by initializer, and the initializers that are of several:
/// the call reads `%p_fc_weight` as its second argument, the node `val_7`.
pub fn transposes(graph: &GraphProto, missing: &[(&str, &str)]) -> (BTreeMap<String, String>, Vec<String>) {
    let names: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in graph.node.iter().filter(|node| node.op_type() == "MatMul") {
        let call = FxCall::of(node);
        let Some(weight) = node.input.get(1).filter(|input| names.contains(input.as_str())) else { continue };
        let second = call.values().nth(2).filter(|_| call.0.contains("aten.linear."));
        let named = missing.iter().find(|(_, argument)| second == Some(argument));
        if let Some((name, _)) = named {
            found.entry(weight).or_default().insert(name);
        }
    }
    let (one, several): (Vec<_>, Vec<_>) = found.into_iter().partition(|(_, names)| names.len() == 1);
    let first = |names: BTreeSet<&str>| names.into_iter().next().unwrap_or_default().to_owned();
    let one = one.into_iter().map(|(tensor, names)| (tensor.to_owned(), first(names))).collect();
    (one, several.into_iter().map(|(tensor, _)| tensor.to_owned()).collect())
}

fn property<'a>(node: &'a NodeProto, key: &str) -> &'a str {
    node.metadata_props.iter().find(|entry| entry.key() == key).map_or("", |entry| entry.value())
}

/// Initializers that are read where a call reads a missing parameter, and those of the parameters that are surely among them.
fn renamed<'a>(
    model: &'a Model,
    calls: &BTreeSet<FxCall<'a>>,
    missing: &[(&'a str, &str)],
    anonymous: &BTreeSet<&'a str>,
) -> (BTreeSet<&'a str>, BTreeSet<&'a str>) {
    // Without calls all of them may be.
    if calls.is_empty() {
        return (anonymous.clone(), BTreeSet::new());
    }
    // Each with the number of parameters that it is made of.
    let mut read: BTreeMap<FxCall, BTreeMap<&str, usize>> = BTreeMap::new();
    for node in &model.graph().node {
        let call = FxCall::of(node);
        // A value that the call itself names was computed by an earlier call.
        let inputs = node.input.iter().enumerate().filter_map(|(i, input)| Some((i, *anonymous.get(input.as_str())?)));
        let inputs = inputs.filter(|(_, input)| !call.reads(input)).map(|(i, input)| (input, parts(node, i)));
        read.entry(call).or_default().extend(inputs);
    }
    let (mut renamed, mut found) = (BTreeSet::new(), BTreeSet::new());
    for (call, tensors) in read.into_iter().filter(|(_, tensors)| !tensors.is_empty()) {
        let named: Vec<&str> = missing.iter().filter(|(_, a)| call.reads(a)).map(|(name, _)| *name).collect();
        let weights: Vec<&str> = named.iter().filter(|name| name.ends_with("weight")).copied().collect();
        let parts: usize = tensors.values().sum();
        let states = tensors.values().filter(|&&parts| parts == 0).count();
        // Initial states are parameters where the call reads as many more.
        let learned = named.len() == parts + states;
        if learned || named.len() == parts {
            found.extend(named.iter().copied());
        } else if weights.len() == parts {
            found.extend(weights);
        }
        if !named.is_empty() {
            renamed.extend(tensors.into_iter().filter(|&(_, parts)| parts > 0 || learned).map(|(tensor, _)| tensor));
        }
    }
    (renamed, found)
}

/// How many of PyTorch's parameters one input of a node holds. A recurrent layer has one tensor each of input weights, recurrent
/// weights and biases: of every direction, and biases of both weights end to end. Its initial states are zeros mostly.
fn parts(node: &NodeProto, input: usize) -> usize {
    let directions = node.attribute.iter().find(|a| a.name() == "direction");
    let both = 1 + usize::from(directions.is_some_and(|a| a.s() == b"bidirectional"));
    match (node.op_type(), input) {
        ("GRU" | "LSTM" | "RNN", 1 | 2) => both,
        ("GRU" | "LSTM" | "RNN", 3) => 2 * both,
        ("GRU" | "LSTM" | "RNN", 5 | 6) => 0,
        _ => 1,
    }
}

/// Initializers that stand for other parameters too: a node came from a call on `%p_wte` or belongs to the module `wte`, but
/// reads `lm_head.weight`.
fn find_aliases(model: &Model, signature: &Signature, missing: &[(&str, &str)]) -> Aliases {
    let initializers: BTreeSet<&str> = model.graph().initializer.iter().map(|tensor| tensor.name()).collect();
    let mut aliases = Aliases::new();
    // A BatchNorm's call reads its gain, the convolution that it was folded into its own weight.
    for node in model.graph().node.iter().filter(|node| !is_fused(node)) {
        let call = FxCall::of(node);
        // `['', 'transformer', 'transformer.wte', 'embedding']`: modules from outside in, then the operator.
        let innermost = property(node, SCOPES).rsplit('\'').nth(3).unwrap_or_default();
        for &(name, argument) in missing {
            let (module, leaf) = name.rsplit_once('.').unwrap_or(("", name));
            let called = call.reads(argument);
            let inside = innermost == module && !module.is_empty();
            let own = |input: &str| signature.argument(input).is_some_and(|argument| call.reads(argument));
            let stands = |input: &&String| {
                let same_leaf = input.rsplit_once('.').is_some_and(|(_, other)| other == leaf);
                initializers.contains(input.as_str()) && same_leaf && (called && !own(input) || inside && own(input))
            };
            let mut others = node.input.iter().filter(stands);
            if let (Some(one), None) = (others.next(), others.next()) {
                let names = aliases.entry(one.clone()).or_default();
                if names.iter().all(|known| known != name) {
                    names.push(name.to_owned());
                }
            }
        }
    }
    aliases
}
