//! `dcc export CHECKPOINT`: trained weights as .safetensors, or back in the user's own ONNX graph.
//!
//! With a model, every initializer is there under its name, in its shape and dtype: what the checkpoint has from there, the rest
//! (what no output depends on, what was folded) from the model. A weight in a Constant node has the name of the node's output.

mod onnx;

use super::failure::{self, Outcome};
use super::model::{self, Source};
use super::output;
use crate::error::Error;
use crate::graph::Graph;
use crate::import::{self, Tensor, TensorData, is_computed};
use crate::ops::Op;
use bytes::Bytes;
use dcc_program::{DType, Shape};
use dcc_runtime::checkpoint::{self, Checkpoint, Key};
use dcc_runtime::data::Convert;
use dcc_runtime::error::Error as RuntimeError;
use dcc_runtime::slice::Slice;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("form").required(true).multiple(true))]
pub struct Args {
    /// The folder of a checkpoint, or of several: then the newest
    checkpoint: PathBuf,
    /// The model that was trained; without it, --safetensors has the checkpoint's own tensors and dtypes
    #[arg(long, value_name = "MODEL.onnx")]
    model: Option<PathBuf>,
    /// Write the model with the trained weights in it
    #[arg(long, value_name = "F.onnx", requires = "model", group = "form")]
    onnx: Option<PathBuf>,
    /// Write the weights alone, tied ones under each of their names
    #[arg(long, value_name = "F.safetensors", group = "form")]
    safetensors: Option<PathBuf>,
}

/// A tensor to export.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    pub dtype: DType,
    pub shape: Shape,
    pub bytes: Bytes,
}

pub fn run(args: &Args) -> Outcome<i32> {
    args.check_places()?;
    let (trained, mut aliases) = weights(&args.checkpoint)?;
    let (mut source, weights) = match &args.model {
        Some(path) => {
            let source = model::open(path)?;
            let weights = into_model(&source, trained, path)?;
            aliases = import::aliases(&source.model);
            (Some(source), weights)
        }
        None => (None, trained),
    };
    if let Some(path) = &args.safetensors {
        let named = under_all_names(&weights, &aliases);
        let count = named.len();
        let views = named.into_iter().map(|(name, weight)| (name, Stored::of(weight)));
        let bytes = safetensors::serialize(views, None).map_err(|error| failure::io("write", path, error))?;
        output::file(path, |file| std::io::Write::write_all(file, &bytes))?;
        output::status("Exported", &format!("{count} tensors to {}", path.display()));
    }
    if let (Some(path), Some(source)) = (&args.onnx, &mut source) {
        onnx::write(&mut source.model.proto, &weights, path)?;
        let training = onnx::in_training_mode(&source.model.proto);
        if training > 0 {
            output::talk(&format!(
                "warning: {training} BatchNormalization and Dropout nodes of {} are in training mode, as they were exported: other \
                 runtimes follow that, `dcc eval` does not",
                path.display()
            ));
        }
        output::status("Exported", &format!("{} tensors to {}", weights.len(), path.display()));
    }
    Ok(0)
}

impl Args {
    /// Errors: one file for two of what is read and what is written.
    fn check_places(&self) -> Outcome<()> {
        let [model, onnx, safetensors] = [&self.model, &self.onnx, &self.safetensors].map(Option::as_deref);
        let read = model.map(|path| ("--model", path)).into_iter().chain([("the checkpoint", &*self.checkpoint)]);
        output::apart(&[("--safetensors", safetensors), ("--onnx", onnx)], &read.collect::<Vec<_>>())
    }
}

/// The weights under their names and all others that they have: what tied modules of PyTorch share, its state dict has several times.
fn under_all_names<'a>(
    weights: &'a BTreeMap<String, Weight>,
    aliases: &'a BTreeMap<String, Vec<String>>,
) -> BTreeMap<&'a str, &'a Weight> {
    let others = aliases.iter().filter_map(|(name, others)| Some((weights.get(name)?, others)));
    let others = others.flat_map(|(weight, others)| others.iter().map(move |other| (other.as_str(), weight)));
    others.chain(weights.iter().map(|(name, weight)| (name.as_str(), weight))).collect()
}

/// The weights of a checkpoint, by name, in the dtypes that the model's graph has them in, and other names of theirs; every byte verified.
fn weights(folder: &Path) -> Outcome<(BTreeMap<String, Weight>, BTreeMap<String, Vec<String>>)> {
    let newest = match checkpoint::steps(folder) {
        Ok(mut steps) => steps.pop().map(|(_, path)| path),
        Err(_) => None,
    };
    let mut checkpoint = Checkpoint::open(newest.as_deref().unwrap_or(folder))?;
    let found = checkpoint.tensors().filter(|(key, ..)| key.state.is_none());
    let found: Vec<(Key, DType, Vec<u64>)> = found.map(|(key, dtype, shape)| (key.clone(), dtype, shape.to_vec())).collect();
    let own = own_dtypes(&checkpoint.run().forward);
    let mut weights = BTreeMap::new();
    for (key, dtype, shape) in found {
        let slice = Slice::whole(&shape);
        let mut bytes = vec![0; (slice.elements() * dtype.bytes()) as usize];
        checkpoint.read(&key, dtype, &slice, &mut |at, run| {
            bytes[at as usize..at as usize + run.len()].copy_from_slice(run);
            Ok(())
        })?;
        let weight = Weight { dtype, shape: Shape::from_slice(&shape), bytes: bytes.into() };
        let weight = own.get(&key.name).map(|&own| converted(&weight, own)).unwrap_or(weight);
        weights.insert(key.name, weight);
    }
    Ok((weights, checkpoint.run().aliases.clone()))
}

/// By name, the dtypes of parameters in a forward graph's text: `--param-dtype` may have kept others. None where there is no text.
fn own_dtypes(forward: &str) -> BTreeMap<String, DType> {
    let Ok(graph) = Graph::parse(forward) else { return BTreeMap::new() };
    let param = |node: &crate::graph::Node| match &node.op {
        Op::Param(param) => Some((param.name.clone(), param.dtype)),
        _ => None,
    };
    graph.nodes.iter().filter_map(param).collect()
}

/// All tensors of the model, trained ones with the checkpoint's values in the model's dtype.
fn into_model(source: &Source, mut trained: BTreeMap<String, Weight>, path: &Path) -> Outcome<BTreeMap<String, Weight>> {
    let mut weights = BTreeMap::new();
    let tensors = onnx::tensors(&source.model.proto);
    trained.retain(|name, _| !is_computed(name) || tensors.iter().any(|(known, ..)| known == name));
    if let Some(name) = trained.keys().find(|name| tensors.iter().all(|(known, ..)| known != name)) {
        return Err(RuntimeError::foreign_checkpoint(format!("the model has no `{name}`, which the checkpoint has"))
            .at(path.display())
            .help("give --model the file that was trained; what its functions and inner graphs hold, --safetensors without --model has")
            .into());
    }
    for (name, proto, is_initializer) in tensors {
        let tensor = Tensor::new(&source.model, name, proto)?;
        let weight = match trained.remove(name) {
            Some(weight) if weight.shape != tensor.shape => {
                let (checkpoint, model) = (weight.shape.as_slice(), tensor.shape.as_slice());
                let what = format!("`{name}` has shape {checkpoint:?} in the checkpoint, {model:?} in the model");
                return Err(RuntimeError::foreign_checkpoint(what).at(path.display()).into());
            }
            Some(weight) => converted(&weight, tensor.dtype),
            None if !is_initializer => continue,
            None => untouched(source, &tensor)?,
        };
        weights.insert(name.to_owned(), weight);
    }
    Ok(weights)
}

fn untouched(source: &Source, tensor: &Tensor) -> Outcome<Weight> {
    if let TensorData::External { location, .. } = &tensor.data
        && source.model.file(location).is_none()
    {
        let what = format!("`{}` is not in the checkpoint, and `{location}`, which has it, is missing", tensor.name);
        return Err(Error::external(what).help("put the file beside the model").into());
    }
    Ok(Weight { dtype: tensor.dtype, shape: tensor.shape.clone(), bytes: tensor.bytes(&source.model)? })
}

fn converted(weight: &Weight, dtype: DType) -> Weight {
    let elements = weight.bytes.len() / weight.dtype.bytes() as usize;
    let mut bytes = vec![0; elements * dtype.bytes() as usize];
    Convert::new(weight.dtype, dtype).run(&weight.bytes, &mut bytes);
    Weight { dtype, shape: weight.shape.clone(), bytes: bytes.into() }
}

/// A tensor as `safetensors` wants it.
pub(super) struct Stored<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl Stored<'_> {
    fn of(weight: &Weight) -> Stored<'_> {
        Stored::new(weight.dtype, &weight.shape, &weight.bytes)
    }

    pub(super) fn new<'a>(dtype: DType, shape: &[u64], bytes: &'a [u8]) -> Stored<'a> {
        let dtype = match dtype {
            DType::Bool => Dtype::BOOL,
            DType::U8 => Dtype::U8,
            DType::I8 => Dtype::I8,
            DType::U16 => Dtype::U16,
            DType::I16 => Dtype::I16,
            DType::U32 => Dtype::U32,
            DType::I32 => Dtype::I32,
            DType::U64 => Dtype::U64,
            DType::I64 => Dtype::I64,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
        };
        Stored { dtype, shape: shape.iter().map(|&dim| dim as usize).collect(), bytes }
    }
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
