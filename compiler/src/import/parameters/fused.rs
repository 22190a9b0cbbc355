//! Weights that an exporter computed of others: what they were made of does not train.

use super::signature::Signature;
use super::warnings::{ADVICE, listed};
use crate::import::fx::{FxCall, is_fused};
use crate::import::model::Model;
use crate::import::proto::{NodeProto, TensorProto};
use std::collections::BTreeSet;

#[derive(Clone, Debug, Default)]
pub struct Fused {
    /// Nodes that a BatchNorm was folded into.
    norms: Vec<String>,
    /// Parameters of these norms that the file has not.
    parameters: Vec<String>,
    /// Weights of the older exporter's making that are no transposed copy.
    computed: Vec<String>,
    /// Those that are one.
    transposed: Vec<String>,
    /// Nodes that read what a `detach` gave, which the exporter's optimizer removed.
    attached: Vec<String>,
}

impl Fused {
    pub fn of(model: &Model, signature: Option<&Signature>) -> Fused {
        let nodes = || model.graph().node.iter();
        let names: BTreeSet<&str> = model.graph().initializer.iter().map(|tensor| tensor.name()).collect();
        let is_float = |tensor: &&TensorProto| crate::import::dtype(tensor.data_type()).is_ok_and(|dtype| dtype.is_float());
        let floats: BTreeSet<&str> = model.graph().initializer.iter().filter(is_float).map(|tensor| tensor.name()).collect();
        let noted = |node: &&NodeProto| is_fused(node);
        let made = |input: &String| input.contains("::") && floats.contains(input.as_str());
        // A convolution's own weights keep their names.
        let convolves = |node: &&NodeProto| {
            matches!(node.op_type(), "Conv" | "ConvTranspose") && node.input.len() == 3 && node.input[1..].iter().all(made)
        };
        let norms = nodes().filter(|node| noted(node) || convolves(node)).map(|node| node.name().to_owned()).collect();
        let calls: BTreeSet<&str> =
            nodes().filter(noted).map(FxCall::of).flat_map(|call| call.values().collect::<Vec<_>>()).collect();
        let parameters = signature.into_iter().flat_map(Signature::parameters);
        let parameters = parameters.filter(|(name, argument)| calls.contains(argument) && !names.contains(name));
        let parameters = parameters.map(|(name, _)| name.to_owned()).collect();
        let readers = nodes().filter(|node| !convolves(node));
        let weights = readers.flat_map(|node| {
            let made = node.input.iter().filter(move |input| made(input));
            made.map(|input| (node.op_type() == "MatMul", input.clone()))
        });
        let weights: BTreeSet<(bool, String)> = weights.collect();
        let (transposed, computed): (Vec<_>, Vec<_>) = weights.into_iter().partition(|(product, _)| *product);
        let name = |(_, name): (bool, String)| name;
        let (transposed, computed) = (transposed.into_iter().map(name).collect(), computed.into_iter().map(name).collect());
        let attached = attached(model, &names);
        Fused { norms, parameters, computed, transposed, attached }
    }

    pub fn warnings(&self) -> Vec<String> {
        let Fused { norms, parameters, computed, transposed, attached } = self;
        let without = match parameters.is_empty() {
            true => String::new(),
            false => format!(", without {}", listed(parameters)),
        };
        let lines = [
            (!norms.is_empty()).then(|| {
                let (count, nodes) = (norms.len(), listed(norms));
                format!(
                    "{count} BatchNorms are folded into the layers before them ({nodes}), which train as they are{without}, so \
                     training differs from PyTorch's; {ADVICE}"
                )
            }),
            (!computed.is_empty()).then(|| {
                format!(
                    "{} in the file: computed by the exporter, which folded constants. What is a parameter in another shape trains as \
                     in PyTorch; what was made of several parameters or of a part, as by a weight norm, does not; {ADVICE}",
                    listed(computed)
                )
            }),
            (!transposed.is_empty()).then(|| {
                format!(
                    "{} in the file: weights of linear layers, transposed by the exporter, known by these names only; {ADVICE}",
                    listed(transposed)
                )
            }),
            (!attached.is_empty()).then(|| {
                format!(
                    "gradients pass through {}, which read values that the module detaches: the exporter dropped `detach`, so training \
                     differs from PyTorch's; {ADVICE}",
                    listed(attached)
                )
            }),
        ];
        lines.into_iter().flatten().collect()
    }
}

/// Nodes whose calls read `%detach_1`, which no node gives, and that read no constant in its place.
fn attached(model: &Model, initializers: &BTreeSet<&str>) -> Vec<String> {
    let given: BTreeSet<&str> = model.graph().node.iter().flat_map(|node| &node.output).map(String::as_str).collect();
    let detached = |value: &str| {
        let numbered = value.strip_prefix("detach").map(|rest| rest.trim_start_matches('_'));
        numbered.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit())) && !given.contains(value)
    };
    let reads = |node: &&NodeProto| FxCall::of(node).values().skip(1).any(detached);
    let computes = |node: &&NodeProto| node.input.iter().all(|input| !initializers.contains(input.as_str()));
    model.graph().node.iter().filter(reads).filter(computes).map(|node| node.name().to_owned()).collect()
}
