//! What the shapes of the data say to the compiler: sizes of symbolic dims, the batch of `--layout steps`, whether there are labels.

use super::failure::Outcome;
use super::flags::CompileFlags;
use crate::compile::Options;
use crate::error::{Code, Error};
use crate::import::proto::tensor_shape_proto::dimension::Value as Dim;
use crate::import::proto::type_proto::Value as Type;
use crate::import::{self, Model, TensorData};
use crate::loss::{LABELS, Labels};
#[cfg(target_os = "linux")]
use dcc_program::program::Program;
use dcc_program::{DType, Shape};
use dcc_runtime::data::{Array, Convert, Files};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The flags of `compile` that name data. Only shapes are read.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DataFlags {
    /// Data that will be trained on: for their shapes, and whether they have labels
    #[arg(long, num_args = 1.., value_name = "FILE", help_heading = "Data")]
    pub data: Vec<PathBuf>,
    /// Rename a key of the data to an input
    #[arg(long, value_name = "KEY=INPUT", value_parser = pair, help_heading = "Data")]
    pub map: Vec<(String, String)>,
    /// What dim 0 of the data counts
    #[arg(long, default_value = "samples", value_parser = ["samples", "steps"], help_heading = "Data")]
    pub layout: String,
    /// An input that the data do not have
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair, help_heading = "Data")]
    pub input: Vec<(String, String)>,
}

/// `A=B`, split at the first `=`.
pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    let (left, right) = text.split_once('=').ok_or_else(|| format!("`{text}` has no `=`"))?;
    Ok((left.to_owned(), right.to_owned()))
}

/// Shapes of what feeds a model.
#[derive(Debug, Default)]
pub struct Shapes {
    /// Whether any data were named.
    named: bool,
    steps: bool,
    /// By input name; dim 0 counts samples or steps.
    arrays: Vec<(String, Vec<u64>)>,
    tokens: bool,
    /// Inputs that are not fed by data, with their file.
    fills: Vec<(String, Option<Array>)>,
}

impl Shapes {
    pub fn read(data: &[PathBuf], map: &[(String, String)], layout: &str, input: &[(String, String)]) -> Outcome<Shapes> {
        let files = Files::open(data, map)?;
        let mut fills = Vec::new();
        for (name, value) in input {
            let array = match value.strip_prefix('@') {
                Some(path) => {
                    let file = Files::open(&[path.into()], &[])?;
                    file.arrays.first().or(file.tokens.first()).cloned()
                }
                None => None,
            };
            fills.push((name.clone(), array));
        }
        Ok(Shapes {
            named: !data.is_empty(),
            steps: layout == "steps",
            arrays: files.arrays.iter().map(|array| (array.name.clone(), array.shape.clone())).collect(),
            tokens: !files.tokens.is_empty(),
            fills,
        })
    }

    /// Of the inputs of compiled programs, as if each step's were given whole.
    #[cfg(target_os = "linux")]
    pub fn of_programs(programs: &[Program]) -> Shapes {
        let all = programs.iter().flat_map(|p| p.inputs.iter().map(move |input| (input.name.clone(), p.ty(input.buffer))));
        let arrays = all.map(|(name, ty)| (name, std::iter::once(1).chain(ty.shape.iter().copied()).collect()));
        Shapes { named: true, steps: true, arrays: arrays.collect(), ..Shapes::default() }
    }

    /// Adds what the shapes say to the options of `flags`.
    pub fn apply(&self, model: &Model, flags: &CompileFlags, options: &mut Options) {
        let inputs = inputs(model);
        for input in &inputs {
            self.bind(input, options);
        }
        self.fix(model, &inputs, options);
        let own = || inputs.iter().find_map(|input| input.fixed(self.batch_dim(input, options)?));
        let product = flags.micro_batch_size.zip(flags.grad_accum);
        let product =
            product.map(|(micro, count)| micro.saturating_mul(u64::from(count) * u64::from(flags.dp) * u64::from(flags.ep)));
        let batch = flags.global_batch_size.or(product).or(options.batch.model).or_else(own);
        options.training.loss.labels = self.labels(&inputs, options, batch.unwrap_or(1));
    }

    /// Makes sizes and choices that a file gives for the whole run part of the program. What is wrong with them the run says.
    fn fix(&self, model: &Model, inputs: &[Input], options: &mut Options) {
        let sizes = crate::import::size_inputs(model).unwrap_or_default();
        for (name, array) in self.fills.iter().filter(|(name, _)| sizes.contains(name)) {
            let Some(input) = inputs.iter().find(|input| input.name == *name && input.dims.len() <= 1) else { continue };
            let tensor = array.as_ref().and_then(|array| constant(array, input.dtype).ok());
            if let Some(tensor) = tensor.filter(|tensor| tensor.shape.len() == input.dims.len()) {
                options.import.constants.insert(name.clone(), tensor);
            }
        }
    }

    /// A question that the data leave open, with what they have.
    pub fn explain(&self, error: Error) -> Error {
        let keys: BTreeSet<String> = self.arrays.iter().map(|(name, _)| format!("`{name}`")).collect();
        match error.code {
            Code::UNCLEAR_LOSS if !keys.is_empty() => error.note(format!("the data have {}", Vec::from_iter(keys).join(", "))),
            _ => error,
        }
    }

    fn batch_dim(&self, input: &Input, options: &Options) -> Option<usize> {
        let dim = options.import.batch_dims.get(&input.name).copied().unwrap_or(Some(0));
        dim.map(usize::from).filter(|&dim| dim < input.dims.len())
    }

    /// Sizes of the symbolic dims of one input, and its batch under `--layout steps`.
    fn bind(&self, input: &Input, options: &mut Options) {
        let batch = self.batch_dim(input, options);
        let array = self.arrays.iter().find(|(name, _)| *name == input.name).map(|(_, shape)| &shape[..]);
        let fill =
            self.fills.iter().find(|(name, _)| *name == input.name).and_then(|(_, array)| Some(&array.as_ref()?.shape[..]));
        let size = |dim: usize| match (array, fill, batch) {
            (Some(shape), ..) if self.steps => shape.get(dim + 1).copied(),
            // Dim 0 of the array counts the samples that the batch dim, wherever it is, takes some of.
            (Some(shape), _, Some(batch)) if dim < batch => shape.get(dim + 1).copied(),
            (Some(shape), ..) => shape.get(dim).copied(),
            (None, Some(shape), _) => shape.get(dim).copied(),
            (None, None, _) => None,
        };
        for (dim, symbol) in input.dims.iter().enumerate() {
            if let Size::Symbol(symbol) = symbol
                && Some(dim) != batch
                && let Some(size) = size(dim)
            {
                options.import.dims.entry(symbol.clone()).or_insert(size);
            }
        }
        if self.steps && array.is_some() && options.batch.model.is_none() {
            options.batch.model = batch.and_then(size);
        }
    }

    fn labels(&self, inputs: &[Input], options: &Options, batch: u64) -> Labels {
        if !self.named {
            return Labels::Unknown;
        }
        if let Some((_, shape)) = self.arrays.iter().find(|(name, _)| name == LABELS) {
            let mut shape = Shape::from_slice(shape);
            if self.steps {
                shape.remove(0);
            } else if let Some(samples) = shape.first_mut() {
                *samples = batch;
            }
            return Labels::Given(shape);
        }
        let fed = |input: &&Input| {
            self.arrays.iter().any(|(name, _)| *name == input.name) || self.fills.iter().any(|(name, _)| *name == input.name)
        };
        let tokens = inputs.iter().filter(|input| input.is_integer && input.dims.len() == 2).find(|input| !fed(input));
        match tokens.and_then(|input| input.size(1, options)) {
            Some(sequence) if self.tokens => Labels::Given(Shape::from_slice(&[batch, sequence])),
            _ => Labels::Absent,
        }
    }
}

/// An array as a tensor of the model.
pub(super) fn constant(array: &Array, dtype: DType) -> Outcome<import::Tensor> {
    let convert = Convert::new(array.dtype, dtype);
    let mut bytes = vec![0; array.bytes.len() / array.dtype.bytes() as usize * dtype.bytes() as usize];
    convert.check(&array.bytes, &Default::default()).map_err(|error| error.at(format!("input `{}`", array.name)))?;
    convert.run(&array.bytes, &mut bytes);
    let data = TensorData::Owned(bytes.into());
    Ok(import::Tensor { name: array.name.clone(), dtype, shape: Shape::from_slice(&array.shape), data })
}

pub(super) enum Size {
    Fixed(u64),
    Symbol(String),
}

/// An input as the file declares it.
pub(super) struct Input {
    pub name: String,
    pub dtype: DType,
    is_integer: bool,
    pub dims: Vec<Size>,
}

impl Input {
    fn fixed(&self, dim: usize) -> Option<u64> {
        match self.dims.get(dim)? {
            Size::Fixed(size) => Some(*size),
            Size::Symbol(_) => None,
        }
    }

    fn size(&self, dim: usize, options: &Options) -> Option<u64> {
        match self.dims.get(dim)? {
            Size::Fixed(size) => Some(*size),
            Size::Symbol(name) => options.import.dims.get(name).copied(),
        }
    }
}

/// Inputs that are no initializers. What is wrong with them the importer says.
pub(super) fn inputs(model: &Model) -> Vec<Input> {
    let graph = model.graph();
    let given = graph.input.iter().filter(|info| graph.initializer.iter().all(|tensor| tensor.name() != info.name()));
    let declared = given.filter_map(|info| {
        let Some(Type::TensorType(tensor)) = info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else { return None };
        let dims = tensor.shape.as_ref()?.dim.iter().enumerate().map(|(position, dim)| match &dim.value {
            Some(Dim::DimValue(size @ 0..)) => Size::Fixed(*size as u64),
            other => {
                let symbol = crate::import::symbol(other.as_ref()).map(str::to_owned);
                Size::Symbol(symbol.unwrap_or_else(|| format!("{}.{position}", info.name())))
            }
        });
        let dtype = crate::import::dtype(tensor.elem_type()).ok()?;
        let is_integer = !dtype.is_float() && dtype != DType::Bool;
        Some(Input { name: info.name().to_owned(), dtype, is_integer, dims: dims.collect() })
    });
    declared.collect()
}
