//! What is evaluated, on what: a model at the sizes of its inputs, or the graph that an artifact or a checkpoint keeps.

use super::super::data;
use super::super::failure::{self, Failure, Outcome};
use super::super::model::{self, Kind};
use super::{Args, tensors};
use crate::compile::{Evaluation, Options, Subject};
use crate::error::Error;
use crate::import;
use crate::loss::{LABELS, Labels, TARGET};
use crate::train::TrainingOptions;
use dcc_program::artifact::{self, Artifact, Data};
use dcc_program::manifest::{self, Manifest};
use dcc_program::{DType, Shape};
use dcc_runtime::checkpoint::{self, Checkpoint};
use dcc_runtime::data::{Array, Dataset, Files, Input, Layout, Position};
use dcc_runtime::error::Error as RuntimeError;
use dcc_runtime::exec::whole::Tensor;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The arrays of `--inputs`.
pub struct Given {
    arrays: Vec<Array>,
    /// Files that say which input they are by their number only.
    numbered: Vec<(usize, Array)>,
}

/// One evaluation: what, where its files are, on what.
pub struct Call {
    pub subject: Subject,
    /// What the paths of the subject's tensors are relative to.
    pub folder: PathBuf,
    pub checkpoint: Option<Checkpoint>,
    pub arrays: Vec<Array>,
    training: TrainingOptions,
}

impl Given {
    pub fn read(path: &Path) -> Outcome<Given> {
        let numbered = tensors::numbered(path)?;
        // An empty folder is what a model without inputs is given.
        if !numbered.is_empty() || path.is_dir() && std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) {
            return Ok(Given { arrays: Vec::new(), numbered });
        }
        let files = Files::open(&[path.to_owned()], &[])?;
        // A lone .npy of integers has its file's name like any other.
        Ok(Given { arrays: [files.arrays, files.tokens].concat(), numbered })
    }

    /// The arrays by name: each is an input, or what a loss compares with. A numbered one has its own name where that is an input's, else that of the input of its number.
    fn named(self, inputs: &[String]) -> Outcome<Vec<Array>> {
        let mut arrays = self.arrays;
        for (number, array) in self.numbered {
            let own = inputs.contains(&array.name) || [LABELS, TARGET].contains(&array.name.as_str());
            let name = if own { Some(&array.name) } else { inputs.get(number) };
            let Some(name) = name.cloned() else {
                let what = format!("the model has no input {number}, and none named `{}`", array.name);
                return Err(RuntimeError::data_keys(what).at(array.path.display()).into());
            };
            arrays.push(Array { name, ..array });
        }
        let known = |array: &&Array| inputs.contains(&array.name) || [LABELS, TARGET].contains(&array.name.as_str());
        match arrays.iter().find(|array| !known(array)) {
            Some(array) => Err(RuntimeError::data_keys(format!("the inputs have `{}`, which the model has not", array.name))
                .at(array.path.display())
                .help(format!("its inputs: {}", inputs.join(", ")))
                .into()),
            None => Ok(arrays),
        }
    }
}

impl Call {
    pub fn open(args: &Args, given: Given) -> Outcome<Call> {
        let options = args.compile_flags().options()?;
        let kind = model::kind(&args.subject)?;
        if args.model.is_some() && kind != Kind::Checkpoint {
            return Err(Error::usage("--model belongs to a checkpoint").at(args.subject.display()).into());
        }
        let mut checkpoint = match kind {
            Kind::Checkpoint => Some(open_checkpoint(&args.subject)?),
            _ => None,
        };
        let path = if checkpoint.is_some() { args.model.as_ref() } else { Some(&args.subject) };
        let is_model = match path {
            Some(path) => model::kind(path)? == Kind::Model,
            None => false,
        };
        let compiled =
            [("--dim", !args.dim.is_empty()), ("--batch-dim", !args.batch_dim.is_empty()), ("--dtype", args.dtype.is_some())];
        if let Some((flag, _)) = compiled.iter().find(|(_, given)| *given && !is_model) {
            let what = format!("{flag} belongs to a model: a compiled graph has its sizes and dtypes");
            return Err(Error::usage(what).at(args.subject.display()).help("drop the flag, or give the .onnx model").into());
        }
        let mut call = match (path, &mut checkpoint) {
            (Some(path), _) if is_model => of_model(path, given, options)?,
            (Some(path), _) => of_artifact(path, given, options)?,
            (None, Some(checkpoint)) => of_checkpoint(checkpoint, &args.subject, given, options)?,
            (None, None) => unreachable!("what is no checkpoint has its own path"),
        };
        call.checkpoint = checkpoint;
        Ok(call)
    }

    pub fn gradients(&self) -> Outcome<Evaluation> {
        let mut training = self.training.clone();
        let labels = self.arrays.iter().find(|array| array.name == LABELS);
        training.loss.labels = labels.map_or(Labels::Absent, |array| Labels::Given(Shape::from_slice(&array.shape)));
        self.subject.gradients(&training).map_err(|error| {
            // What is wrong with an output may be what is wrong with the data.
            let wrong = reads(&self.subject.graph).find_map(|input| {
                let array = self.arrays.iter().find(|array| array.name == input.name)?;
                fits(array, input).err()
            });
            wrong.map_or(error.into(), Failure::from)
        })
    }
}

fn fits(array: &Array, input: &crate::ops::Input) -> Result<(), RuntimeError> {
    if array.shape[..] == input.shape[..] {
        return Ok(());
    }
    let (found, due) = (&array.shape, input.shape.as_slice());
    let what = format!("`{}` has shape {found:?}, the model takes {due:?}", input.name);
    Err(RuntimeError::data_shape(what).at(array.path.display()))
}

/// The values of the inputs that a graph reads, in their dtypes. Errors: one is missing, of another shape or out of range.
pub fn bind(arrays: &[Array], evaluation: &Evaluation) -> Outcome<BTreeMap<String, Tensor>> {
    let (mut fed, mut inputs) = (Vec::new(), Vec::new());
    for input in reads(&evaluation.source) {
        let array = arrays.iter().find(|array| array.name == input.name);
        let array = array.ok_or_else(|| RuntimeError::data_keys(format!("input `{}` has no data", input.name)))?;
        fits(array, input)?;
        // One step, fed whole.
        let shape = [1].iter().chain(&array.shape).copied().collect();
        fed.push(Array { shape, ..array.clone() });
        let known = evaluation.inputs.get(&input.name).cloned().unwrap_or_default();
        inputs.push(Input {
            name: input.name.clone(),
            dtype: input.dtype,
            shape: input.shape.to_vec(),
            batch_dim: None,
            vocabulary: known.vocabulary,
            ignore_index: known.ignore_index,
        });
    }
    let options = dcc_runtime::data::Options { layout: Layout::Steps, ..Default::default() };
    let dataset = Dataset::open(&Files { arrays: fed, ..Files::default() }, &inputs, &options)?;
    let value = |(number, input): (usize, &Input)| {
        let mut bytes = vec![0; (input.shape.iter().product::<u64>() * input.dtype.bytes()) as usize];
        dataset.fill(number, Position::default(), 0..1, &mut bytes);
        (input.name.clone(), Tensor { dtype: input.dtype, shape: input.shape.clone(), bytes })
    };
    Ok(inputs.iter().enumerate().map(value).collect())
}

/// Where values cannot be read because the model has inputs that dcc cannot hold: that, which names who reads them.
pub fn fault_of_model(args: &Args) -> Option<failure::Failure> {
    let is_model = model::kind(&args.subject).is_ok_and(|kind| kind == Kind::Model);
    let source = model::open(&args.subject).ok().filter(|_| is_model)?;
    import::check_inputs(&source.model).err().map(Into::into)
}

/// The inputs that a graph reads.
pub fn reads(graph: &crate::Graph) -> impl Iterator<Item = &crate::ops::Input> {
    graph.nodes.iter().filter_map(|node| match &node.op {
        crate::ops::Op::Input(input) => Some(input),
        _ => None,
    })
}

/// The folder of a checkpoint, or of several: then the newest.
fn open_checkpoint(folder: &Path) -> Outcome<Checkpoint> {
    let newest = checkpoint::steps(folder)?.pop().map(|(_, path)| path);
    Ok(Checkpoint::open(newest.as_deref().unwrap_or(folder))?)
}

fn of_model(path: &Path, given: Given, options: Options) -> Outcome<Call> {
    let source = model::open(path)?;
    let (options, arrays) = bound(&source, given, options)?;
    let subject = Subject::of_model(&source.model, &options).map_err(|error| error.at(path.display()))?;
    Ok(Call { subject, folder: source.folder, checkpoint: None, arrays, training: options.training })
}

/// The options for a model that is given these inputs, and the inputs by name.
pub fn bound(source: &model::Source, given: Given, options: Options) -> Outcome<(Options, Vec<Array>)> {
    let inputs = data::inputs(&source.model);
    let names: Vec<String> = inputs.iter().map(|input| input.name.clone()).collect();
    let arrays = given.named(&names)?;
    let mut options = Options { name: source.name.clone(), external_bytes: source.external_bytes.clone(), ..options };
    bind_sizes(&inputs, &arrays, &mut options)?;
    for name in import::size_inputs(&source.model)? {
        let declared = inputs.iter().find(|input| input.name == name).map(|input| input.dtype);
        if let (Some(array), Some(dtype)) = (arrays.iter().find(|array| array.name == name), declared) {
            options.import.constants.insert(name, data::constant(array, dtype)?);
        }
    }
    Ok((options, arrays))
}

/// Symbolic dims have the sizes of the arrays. A static export that is given another number of samples is scaled to it.
fn bind_sizes(inputs: &[data::Input], arrays: &[Array], options: &mut Options) -> Outcome<()> {
    let mut batch = None;
    let mut is_static = true;
    for input in inputs {
        let array = arrays.iter().find(|array| array.name == input.name);
        for (dim, size) in input.dims.iter().enumerate() {
            let found = array.and_then(|array| array.shape.get(dim).copied());
            match (size, found) {
                (data::Size::Symbol(symbol), Some(found)) => {
                    let bound = *options.import.dims.entry(symbol.clone()).or_insert(found);
                    if bound != found {
                        let what = format!("dim {dim} of `{}` is {found}, but `{symbol}` is {bound}", input.name);
                        return Err(RuntimeError::data_shape(what).into());
                    }
                    is_static = false;
                }
                (data::Size::Symbol(_), None) => is_static = false,
                (data::Size::Fixed(size), Some(found)) if *size != found && dim == batch_dim(input, options) => {
                    batch = batch.or(Some(found));
                }
                (data::Size::Fixed(_), _) => {}
            }
        }
    }
    match batch.filter(|_| is_static) {
        Some(batch) => options.batch.global = Some(batch),
        // All sizes are known, so none has to count samples.
        None => options.import.batch_dims = inputs.iter().map(|input| (input.name.clone(), None)).collect(),
    }
    Ok(())
}

fn batch_dim(input: &data::Input, options: &Options) -> usize {
    options.import.batch_dims.get(&input.name).copied().flatten().map_or(0, usize::from)
}

fn of_artifact(path: &Path, given: Given, options: Options) -> Outcome<Call> {
    let artifact = Artifact::load(path).map_err(|error| failure::artifact(error, path))?;
    let damaged = |what: String| RuntimeError::artifact(what).at(path.display());
    if artifact.forward.is_empty() {
        return Err(damaged("this artifact keeps no forward graph".to_owned()).help("compile the model again").into());
    }
    let manifest = Manifest::from_options(&artifact.options).map_err(damaged)?;
    let subject = Subject::of_text(&manifest.model, &artifact.forward, artifact.tensors, manifest.parameters)?;
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    of_graph(subject, folder, given, options)
}

fn of_checkpoint(checkpoint: &mut Checkpoint, path: &Path, given: Given, options: Options) -> Outcome<Call> {
    let run = checkpoint.run().clone();
    if run.forward.is_empty() {
        let what = "this checkpoint keeps no forward graph";
        return Err(RuntimeError::checkpoint(what).at(path.display()).help("name the model with --model").into());
    }
    let weights = checkpoint.tensors().filter(|(key, ..)| key.state.is_none());
    let tensor = |(key, dtype, shape): (&checkpoint::Key, DType, &[u64])| artifact::Tensor {
        name: key.name.clone(),
        dtype,
        shape: Shape::from_slice(shape),
        data: Data::Absent,
    };
    let tensors: Vec<artifact::Tensor> = weights.map(tensor).collect();
    let entry = |tensor: &artifact::Tensor| {
        let parameter = manifest::Parameter { trained: tensor.dtype.is_float(), ..Default::default() };
        (tensor.name.clone(), parameter)
    };
    let parameters = tensors.iter().map(entry).collect();
    of_graph(Subject::of_text(&run.description, &run.forward, tensors, parameters)?, PathBuf::new(), given, options)
}

fn of_graph(subject: Subject, folder: PathBuf, given: Given, options: Options) -> Outcome<Call> {
    let names: Vec<String> = reads(&subject.graph).map(|input| input.name.clone()).collect();
    let arrays = given.named(&names)?;
    Ok(Call { subject, folder, checkpoint: None, arrays, training: options.training })
}
