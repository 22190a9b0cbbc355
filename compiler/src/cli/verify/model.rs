//! A model's values by dcc's compiled kernels and by tract: on the same inputs and weights, node by node.

use super::compare::distance;
use super::made_up::made_up;
use super::second::{self, LeftOut, Opinion, Undefined};
use super::tract::TRACT;
use crate::cli::data::{self, Size};
use crate::cli::eval::subject::{self, Given};
use crate::cli::eval::{self};
use crate::cli::failure::Outcome;
use crate::cli::flags::CompileFlags;
use crate::cli::model::{self, Source};
use crate::compile::{Evaluation, Options, Subject};
use crate::error::Error;
use crate::import::{self, Computed, Exposed, Imported, InputInfo, Model, TensorData};
use dcc_program::program::Program;
use dcc_runtime::data::Array;
use dcc_runtime::exec::whole::{Parameters, Tensor};
use dcc_runtime::run::{Flags, Job, Source as JobSource, whole_weights};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Sizes that symbolic dims are tried with, the batch aside.
const SIZES: [u64; 7] = [16, 32, 64, 224, 8, 4, 1];
const BATCH: u64 = 2;
/// Elements of one value beyond which a model is not handed to tract.
const MOST_ELEMENTS: u64 = 1 << 30;
/// Compilations that look for a fault which shows only where kernels are fused.
const MOST_COMPILATIONS: usize = 200;

pub type Values = BTreeMap<String, Tensor>;

/// What to compute, by whom.
pub struct Question {
    /// The model as dcc reads it.
    pub ours: Model,
    /// As tract is given it.
    pub theirs: Model,
    pub options: Options,
    folder: PathBuf,
    flags: Flags,
    /// The inputs, where they are not made up.
    arrays: Option<Vec<Array>>,
    seed: i64,
}

/// What both make of it.
pub struct Report {
    /// Sizes of the inputs.
    pub inputs: Vec<InputInfo>,
    pub nodes: usize,
    /// Nodes that tract did not run; what they compute was given to it.
    pub left_out: Vec<LeftOut>,
    /// Elements that ONNX leaves undefined, which are not compared.
    pub undefined: Vec<Undefined>,
    /// Values inside the model that agree, and outputs.
    pub values: usize,
    pub outputs: usize,
    /// Largest difference in units of what is allowed.
    pub largest: f64,
    /// Why tract computed nothing.
    pub refused: Option<String>,
}

/// What the user asks.
#[derive(Default)]
pub struct Asked {
    pub inputs: Option<PathBuf>,
    pub dim: Vec<String>,
    pub seed: i64,
    pub init: Option<u64>,
}

impl Question {
    pub fn open(path: &Path, asked: &Asked) -> Outcome<Question> {
        let source = model::open(path)?;
        let flags = CompileFlags { dropout: "off".to_owned(), dim: asked.dim.clone(), ..CompileFlags::default() };
        let (options, arrays) = match &asked.inputs {
            Some(inputs) => {
                let (options, arrays) = subject::bound(&source, Given::read(inputs)?, flags.options()?)?;
                (options, Some(arrays))
            }
            None => (sized(&source, flags.options()?).map_err(|error| error.at(path.display()))?, None),
        };
        let theirs = match asked.init {
            // Weights that are made up have the names that dcc gives to what the exporter merged.
            Some(_) => source.model.clone(),
            None => Model::as_written(source.model.bytes().clone())?,
        };
        let locations = source.model.external_locations();
        let files = locations.iter().filter_map(|location| Some((location, source.model.file(location)?)));
        let theirs = files.fold(theirs, |model, (location, bytes)| model.with_file(location, bytes.clone()));
        let flags = Flags { init: asked.init, ..Flags::default() };
        let folder = source.folder;
        Ok(Question { ours: source.model, theirs, options, folder, flags, arrays, seed: asked.seed })
    }
}

/// Symbolic dims bound to the first sizes that the model can have.
fn sized(source: &Source, options: Options) -> crate::error::Result<Options> {
    let inputs = data::inputs(&source.model);
    let mut options = Options { name: source.name.clone(), external_bytes: source.external_bytes.clone(), ..options };
    options.import.batch_dims = inputs.iter().map(|input| (input.name.clone(), None)).collect();
    let mut first = None;
    for size in SIZES {
        let mut options = options.clone();
        for (dim, symbol) in inputs.iter().flat_map(|input| input.dims.iter().enumerate()) {
            if let Size::Symbol(symbol) = symbol {
                options.import.dims.entry(symbol.clone()).or_insert(if dim == 0 { BATCH } else { size });
            }
        }
        match import::onnx(&source.model, &options.import) {
            Ok(_) => return Ok(options),
            Err(error) => first = first.or(Some(error)),
        }
    }
    let error = first.expect("some size was tried");
    Err(error.help("give sizes by --dim NAME=N, or the inputs themselves by --inputs"))
}

/// What dcc computes from, and what it computed.
struct Device<'a> {
    question: &'a Question,
    alter: &'a dyn Fn(&mut [Program]),
    inputs: Values,
}

/// What computes some values; nothing where there is nothing to compute.
type Compiled = Option<(Subject, Evaluation)>;

/// Both opinions. `alter` changes compiled programs before they run: tests plant faults. Errors: a difference, at its node.
pub fn ask(question: &Question, alter: &dyn Fn(&mut [Program])) -> Outcome<Report> {
    let exposed = import::Options { exposed: Exposed::All, ..question.options.import.clone() };
    let imported = import::onnx(&question.ours, &exposed)?;
    let mut device = Device { question, alter, inputs: Values::new() };
    let plain = device.compiled(Exposed::Outputs)?;
    device.inputs = device.made_up(&imported, &plain)?;
    let outputs = device.compute(&plain)?;
    let shown = device.compute(&device.compiled(Exposed::All)?)?;
    let named = |value: &Computed| Some((value.name.clone(), shown.get(value.output.as_ref()?)?.clone()));
    let computed: Values = imported.values.iter().filter_map(named).collect();
    let weights = device.weights_made_up(&imported, &plain)?;
    let largest = imported.values.iter().max_by_key(|value| value.shape.iter().product::<u64>());
    let opinion = match largest.filter(|value| value.shape.iter().product::<u64>() > MOST_ELEMENTS) {
        Some(value) => {
            let what = format!("`{}` of {} would have {:?} elements", value.name, value.place, value.shape.as_slice());
            Opinion { refused: Some(what), ..Opinion::default() }
        }
        None => second::opinion(question, &device.inputs, &weights, &computed)?,
    };
    let mut report = Report {
        inputs: imported.inputs.clone(),
        nodes: opinion.nodes,
        left_out: opinion.left_out,
        undefined: opinion.undefined,
        values: 0,
        outputs: 0,
        largest: 0.0,
        refused: opinion.refused,
    };
    for value in &imported.values {
        let Some((ours, theirs)) = computed.get(&value.name).zip(opinion.values.get(&value.name)) else { continue };
        let units = match distance(ours, theirs) {
            Ok(units) => units,
            Err(what) => return Err(device.difference(value, &what, theirs)?.into()),
        };
        report.values += 1;
        report.largest = report.largest.max(units);
    }
    for (name, ours) in &outputs {
        let Some((value, theirs)) = imported.values.iter().find(|v| v.name == *name).zip(opinion.values.get(name)) else {
            continue;
        };
        let units = match distance(ours, theirs) {
            Ok(units) => units,
            Err(_) => return Err(device.fused(value, &imported.values, &opinion.values)?.into()),
        };
        report.outputs += 1;
        report.largest = report.largest.max(units);
    }
    Ok(report)
}

impl Device<'_> {
    /// Values of all inputs of the model.
    fn made_up(&self, imported: &Imported, plain: &Compiled) -> Outcome<Values> {
        let mut values = Values::new();
        for input in &imported.inputs {
            let below = plain.as_ref().and_then(|(_, e)| e.inputs.get(&input.name)?.vocabulary);
            let tensor = made_up(&input.name, input.dtype, &input.shape, below, (self.question.seed, 0));
            values.insert(input.name.clone(), tensor);
        }
        if let (Some(arrays), Some((_, evaluation))) = (&self.question.arrays, plain) {
            values.extend(subject::bind(arrays, evaluation)?);
        }
        Ok(values)
    }

    /// The weights that the file has no data for.
    fn weights_made_up(&self, imported: &Imported, plain: &Compiled) -> Outcome<Values> {
        let missing = |parameter: &&import::Parameter| match &parameter.tensor.data {
            TensorData::External { location, .. } => self.question.ours.file(location).is_none(),
            _ => false,
        };
        let wanted = imported.parameters.iter().filter(missing).map(|p| (p.tensor.name.clone(), p.tensor.dtype));
        let wanted: Vec<_> = wanted.collect();
        let Some((subject, evaluation)) = plain else { return Ok(Values::new()) };
        Ok(self.weights(subject, evaluation, &wanted)?.into_iter().map(|((name, _), tensor)| (name, tensor)).collect())
    }

    fn weights(
        &self,
        subject: &Subject,
        evaluation: &Evaluation,
        wanted: &[(String, dcc_program::DType)],
    ) -> Outcome<Parameters> {
        let artifact = subject.artifact(evaluation);
        let source = JobSource::Built { artifact: &artifact, folder: &self.question.folder };
        Ok(whole_weights(&Job::new(&source, &self.question.flags)?, None, wanted)?)
    }

    fn compiled(&self, exposed: Exposed) -> Outcome<Compiled> {
        let mut options = self.question.options.clone();
        options.import.exposed = exposed;
        let subject = Subject::of_model(&self.question.ours, &options)?;
        if subject.graph.outputs.is_empty() {
            return Ok(None);
        }
        let mut evaluation = subject.outputs()?;
        (self.alter)(&mut evaluation.programs);
        Ok(Some((subject, evaluation)))
    }

    /// By compiled kernels, as `dcc eval` does.
    fn compute(&self, compiled: &Compiled) -> Outcome<Values> {
        let Some((subject, evaluation)) = compiled else { return Ok(Values::new()) };
        let weights = self.weights(subject, evaluation, &eval::weights_of_programs(evaluation))?;
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let results = eval::compute(evaluation, self.read_by(evaluation), &weights, threads)?;
        Ok(results.values.into_iter().map(|value| (value.name, value.tensor)).collect())
    }

    /// The same value by the reference.
    fn interpret(&self, name: &str) -> Outcome<Option<Tensor>> {
        let Some((subject, evaluation)) = self.compiled(only(name))? else { return Ok(None) };
        let weights = self.weights(&subject, &evaluation, &eval::weights_of_graph(&evaluation))?;
        let results = eval::interpret(&evaluation, &self.read_by(&evaluation), &weights)?;
        Ok(results.values.into_iter().find(|value| value.name == name).map(|value| value.tensor))
    }

    fn read_by(&self, evaluation: &Evaluation) -> Values {
        let read: BTreeSet<&str> = subject::reads(&evaluation.source).map(|input| input.name.as_str()).collect();
        self.inputs.iter().filter(|(name, _)| read.contains(name.as_str())).map(|(n, t)| (n.clone(), t.clone())).collect()
    }

    /// The error that names a node.
    fn difference(&self, value: &Computed, what: &str, theirs: &Tensor) -> Outcome<Error> {
        let ours = self.compute(&self.compiled(only(&value.name))?)?.remove(&value.name);
        let reference = self.interpret(&value.name)?;
        let near = |a: &Option<Tensor>, b: &Tensor| a.as_ref().is_some_and(|a| distance(a, b).is_ok());
        let side = match (near(&reference, theirs), ours.is_some_and(|ours| near(&reference, &ours))) {
            (true, _) => "dcc's reference computes what tract does: a kernel or what leads to it is wrong",
            (_, true) => "dcc's reference computes what its kernels do: the import of the node is wrong, or tract is",
            _ => "dcc's reference agrees with neither",
        };
        Ok(Error::second_opinion(format!("dcc and tract differ in `{}`: {what}", value.name)).at(&value.place).note(side))
    }

    /// Values inside the model agree where each is an output, but this output does not where it stands alone: follows what
    /// differs back to a node that reads nothing which does.
    fn fused(&self, output: &Computed, values: &[Computed], theirs: &Values) -> Outcome<Error> {
        let mut at = output;
        // Of each value that was computed alone, how it differs.
        let mut found: BTreeMap<&str, Option<String>> = BTreeMap::new();
        loop {
            let mut next = None;
            let mut open: Vec<&String> = at.reads.iter().rev().collect();
            let mut met = BTreeSet::new();
            while let Some(name) = open.pop().filter(|_| next.is_none() && found.len() < MOST_COMPILATIONS) {
                let Some(value) = values.iter().find(|value| value.name == *name).filter(|_| met.insert(name)) else {
                    continue;
                };
                let Some(theirs) = theirs.get(name).filter(|_| value.output.is_some()) else {
                    // A value that cannot be compared: those that it is computed from.
                    open.extend(value.reads.iter().rev());
                    continue;
                };
                if !found.contains_key(name.as_str()) {
                    found.insert(&value.name, self.differs_alone(name, theirs)?);
                }
                next = Some(value).filter(|_| found[name.as_str()].is_some());
            }
            match next {
                Some(value) => at = value,
                None => break,
            }
        }
        let what = match found.remove(at.name.as_str()) {
            Some(what) => what,
            None => self.differs_alone(&at.name, &theirs[&at.name])?,
        };
        let what = what.unwrap_or_else(|| "it differs together with the other outputs only".to_owned());
        let note = "it agrees where every value inside the model is computed for itself: kernels are fused wrongly";
        Ok(self.difference(at, &what, &theirs[&at.name])?.note(note))
    }

    /// How a value that is the only output differs from `theirs`.
    fn differs_alone(&self, name: &str, theirs: &Tensor) -> Outcome<Option<String>> {
        let ours = self.compute(&self.compiled(only(name))?)?.remove(name);
        Ok(ours.and_then(|ours| distance(&ours, theirs).err()))
    }
}

fn only(name: &str) -> Exposed {
    Exposed::Only([name.to_owned()].into())
}

/// The error of a dcc that has no second opinion.
pub fn check_built(path: &Path) -> Result<(), Error> {
    match cfg!(feature = "tract") {
        true => Ok(()),
        false => Err(Error::left_out(format!("a model is verified against {TRACT}, which this dcc was built without"))
            .at(path.display())
            .help("`cargo build --release --bin dcc --features tract` builds one with it")),
    }
}
