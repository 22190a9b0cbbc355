//! The ONNX operators that dcc imports: one table per family, each entry an operator and the function that builds it.
//!
//! Importers only build core ops; gradient, sharding and kernels follow from these.

mod activation;
mod attention;
pub(super) mod batch_norm;
mod block;
mod compare;
mod constant;
pub(super) mod contrib;
mod conv;
mod einsum;
mod elementwise;
mod fourier;
mod gates;
mod grid;
mod group_norm;
mod index;
mod loss;
mod masked_attention;
mod matmul;
mod movement;
mod norm;
mod optimizer;
mod pool;
mod quantize;
mod random;
mod recurrent;
mod reduce;
mod resize;
mod scatter;
mod sequence;
mod shape;
mod top_k;
mod windows;

use dcc_program::Shape;

use super::build::Build;
use super::known::Known;
use super::model::{Model, is_default_domain};
use super::node::Node;
use super::parameters::Classifier;
use super::value::{Value, axis};
use crate::error::{Error, Result};

pub(super) use quantize::Quantised;

/// Builds one node; gives its results in ONNX's order. Fewer than the node has means that the others are not supported.
pub type Import = fn(&mut Build, &Call) -> Result<Vec<Value>>;

const FAMILIES: &[&[(&str, Import)]] = &[
    activation::ONNX,
    attention::ONNX,
    batch_norm::ONNX,
    block::ONNX,
    compare::ONNX,
    constant::ONNX,
    einsum::ONNX,
    conv::ONNX,
    elementwise::ONNX,
    fourier::ONNX,
    grid::ONNX,
    group_norm::ONNX,
    index::ONNX,
    loss::ONNX,
    matmul::ONNX,
    movement::ONNX,
    norm::ONNX,
    quantize::ONNX,
    pool::ONNX,
    random::ONNX,
    recurrent::ONNX,
    reduce::ONNX,
    scatter::ONNX,
    resize::ONNX,
    sequence::ONNX,
    shape::ONNX,
    top_k::ONNX,
];

/// The importer of an operator; the default domain is ``.
pub fn find(domain: &str, op: &str) -> Option<Import> {
    let families = match domain {
        "" => FAMILIES,
        optimizer::DOMAIN => &[optimizer::ONNX],
        contrib::DOMAIN => &[contrib::ONNX],
        _ => return None,
    };
    families.iter().flat_map(|family| family.iter()).find(|(name, _)| *name == op).map(|&(_, import)| import)
}

/// Operators whose kernels take no halves: these are computed in f32 and rounded once.
const IN_F32: &[&str] = &[
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "CumSum",
    "FusedConv",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "LpPool",
    "MaxPool",
    "ScatterElements",
    "ScatterND",
];

/// Builds the node of `call`.
pub fn build(import: Import, build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let half = |value: &Value| value.dtype(build).ok().filter(|&dtype| computed_in(dtype) != dtype);
    let Some(half) = call.optional(0).and_then(half).filter(|_| IN_F32.contains(&call.node.op)) else {
        return import(build, call);
    };
    let mut inputs = call.inputs.to_vec();
    for value in inputs.iter_mut().flatten().filter(|value| !matches!(value, Value::List(_))) {
        if value.dtype(build)? == half {
            *value = build.cast(value, computed_in(half))?;
        }
    }
    let results = import(build, &Call { inputs: &inputs, ..*call })?;
    let narrow = |value: Value| match value.dtype(build)? {
        dtype if dtype.is_float() => build.cast(&value, half),
        _ => Ok(value),
    };
    results.into_iter().map(narrow).collect()
}

/// Whether dcc imports an operator that a model names so.
pub fn is_supported(domain: &str, op: &str) -> bool {
    let domain = domain_of(domain, op);
    find(domain, op).is_some() || domain.is_empty() && super::control::OPERATORS.contains(&op)
}

/// The domain that an operator is of, the default one as ``.
pub fn domain_of<'a>(domain: &'a str, op: &str) -> &'a str {
    match is_default_domain(domain) {
        true if op == contrib::SIMPLIFIED => contrib::DOMAIN,
        true => "",
        false => domain,
    }
}

/// What an operator is called among all: ONNX Runtime's own with their domain.
pub fn full_name(domain: &str, op: &str) -> String {
    match domain_of(domain, op) {
        contrib::DOMAIN => format!("{}.{op}", contrib::DOMAIN),
        _ => op.to_owned(),
    }
}

/// The full names of all operators that dcc imports, sorted.
pub fn supported() -> Vec<String> {
    let families = FAMILIES.iter().chain(&[optimizer::ONNX]).map(|family| ("", *family));
    let all = families.chain([(contrib::DOMAIN, contrib::ONNX)]);
    let mut names: Vec<String> =
        all.flat_map(|(domain, family)| family.iter().map(move |(name, _)| full_name(domain, name))).collect();
    names.extend(super::control::OPERATORS.iter().map(|&name| name.to_owned()));
    names.sort_unstable();
    names
}

/// One node with the meaning of its inputs.
#[derive(Clone, Copy)]
pub struct Call<'a, 'm> {
    pub node: &'a Node<'m>,
    pub inputs: &'a [Option<Value>],
    pub model: &'m Model,
    pub classifier: &'a Classifier,
    /// The name of the first output.
    pub output: &'a str,
    /// By value: whether an output of the model depends on it.
    pub live: &'a [bool],
}

impl Call<'_, '_> {
    pub fn opset(&self) -> i64 {
        self.node.opset
    }

    pub fn input(&self, position: usize) -> Result<&Value> {
        self.optional(position).ok_or_else(|| Error::graph(format!("input {position} of {} is missing", self.node.op)))
    }

    pub fn optional(&self, position: usize) -> Option<&Value> {
        self.inputs.get(position)?.as_ref()
    }

    /// Whether an output of the model depends on this one of the node.
    pub fn wants(&self, output: usize) -> bool {
        self.node.outputs.get(output).copied().flatten().is_some_and(|id| self.live[id.0 as usize])
    }

    /// An input that has to be known. Errors: DCC0110 where it is a constant whose file is absent, else DCC0111.
    pub fn known(&self, build: &Build, position: usize) -> Result<&Known> {
        let value = self.input(position)?;
        if let Some(known) = value.known() {
            return Ok(known);
        }
        if let Some((name, location)) = build.absent(value) {
            let what =
                format!("input {position} of {}, the constant `{name}`, lies in `{location}`, which is absent", self.node.op);
            return Err(Error::external(what).help("put the file beside the model"));
        }
        let what =
            format!("input {position} of {} has to be known while compiling, but depends on parameters or data", self.node.op);
        Err(Error::data_dependent(what)
            .help("export with static shapes for it, or give the input that it depends on as a constant"))
    }

    pub fn known_ints(&self, build: &Build, position: usize) -> Result<Vec<i64>> {
        let ints = self.known(build, position)?.to_ints();
        ints.ok_or_else(|| Error::dtype(format!("input {position} of {} is not a list of integers", self.node.op)))
    }

    pub fn known_number(&self, build: &Build, position: usize) -> Result<f64> {
        let number = self.known(build, position)?.uniform();
        number.ok_or_else(|| Error::shape(format!("input {position} of {} is not one number", self.node.op)))
    }

    /// A list that older opsets have as attribute `name` and newer ones as an input.
    pub fn ints_either(&self, build: &Build, name: &str, position: usize) -> Result<Option<Vec<i64>>> {
        if let Some(ints) = self.node.ints(name)? {
            return Ok(Some(ints.to_vec()));
        }
        self.optional(position).map(|_| self.known_ints(build, position)).transpose()
    }

    /// The attribute `axis`, counted from the front.
    pub fn axis(&self, default: i64, rank: usize) -> Result<usize> {
        axis(self.node.int_or("axis", default)?, rank)
    }
}

/// Axes counted from the front, sorted, each once.
fn axes(given: &[i64], rank: usize) -> Result<Vec<usize>> {
    let mut axes = given.iter().map(|&one| axis(one, rank)).collect::<Result<Vec<usize>>>()?;
    axes.sort_unstable();
    if axes.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Error::shape(format!("axes {given:?} repeat one of {rank} dims")));
    }
    Ok(axes)
}

/// Checked sizes from known integers. Errors: DCC0108.
fn sizes(ints: &[i64]) -> Result<Shape> {
    super::tensor::dims(ints)
}

pub(in crate::import) use attention::computed_in;
pub(in crate::import) use optimizer::DOMAIN as OPTIMIZERS;

fn attribute_value(name: &str, value: impl std::fmt::Display) -> Error {
    Error::attribute(format!("{name} = {value} is not supported"))
}
