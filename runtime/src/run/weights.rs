//! What parameters begin with: tensor data of the artifact, `--weights`, `--init`. Each rank reads its own part only.

use super::Job;
use crate::checkpoint::{self, Checkpoint};
use crate::cpu::Memory;
use crate::data::{Array, Convert, Files};
use crate::error::{Error, Result};
use crate::exec::Parameter;
use crate::exec::whole::{self, Parameters};
use crate::init::{Initial, Rule};
use crate::slice::Slice;
use bytes::Bytes;
use dcc_program::artifact::{Data, Tensor};
use dcc_program::manifest;
use dcc_program::program::{ParamKind, Program};
use dcc_program::{DType, Glob};
use std::collections::BTreeMap;

/// Where all values come from.
pub(super) struct Weights<'a> {
    job: &'a Job,
    /// `--weights`, by tensor name, and how each lies in its file.
    given: BTreeMap<String, (Array, Layout)>,
    /// Keys of `--weights` that name nothing here.
    pub unused: Vec<String>,
    seed: Option<u64>,
    all: bool,
    rules: Vec<(Glob, Rule)>,
    /// Mapped so far.
    mapped: BTreeMap<String, Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    AsModel,
    /// The model has a transposed copy.
    Transposed,
}

impl<'a> Weights<'a> {
    /// Errors: `--weights` that cannot be read, or that names a tensor of another shape.
    pub fn new(job: &'a Job) -> Result<Weights<'a>> {
        let flags = &job.flags;
        let mut weights = Weights {
            job,
            given: BTreeMap::new(),
            unused: Vec::new(),
            seed: flags.init,
            all: flags.init_all,
            rules: flags.init_rules()?,
            mapped: BTreeMap::new(),
        };
        if let Some(path) = &flags.weights {
            weights.take(Files::open(std::slice::from_ref(path), &[])?.arrays)?;
            if weights.given.is_empty() {
                let what = format!("--weights: none of its {} tensors is one of the model's", weights.unused.len());
                return Err(Error::data_option(what)
                    .at(path.display())
                    .help("its keys must be names of the model's parameters"));
            }
        }
        weights.check_rules()?;
        Ok(weights)
    }

    /// Trained tensors that `--weights` lacks; none where it is not given.
    pub fn missing(&self) -> Vec<&str> {
        let trained = self.job.manifest.parameters.iter().filter(|(_, parameter)| parameter.trained);
        let lacking = trained.filter(|(name, _)| !self.given.contains_key(*name) && self.job.flags.weights.is_some());
        lacking.map(|(name, _)| name.as_str()).collect()
    }

    /// Errors: a rule for no tensor, or only for such as begin with values that they have.
    fn check_rules(&self) -> Result<()> {
        for (glob, _) in &self.rules {
            let mut matching = self.job.artifact.tensors.iter().filter(|tensor| self.is_named(tensor, glob)).peekable();
            if matching.peek().is_none() {
                return Err(Error::data_option(format!("--init-rule: no tensor matches `{}`", glob.0))
                    .help("`dcc inspect` of the model or artifact lists them"));
            }
            if !matching.any(|tensor| self.is_drawn(tensor)) {
                let what = format!("--init-rule: all that match `{}` begin with the values that they have", glob.0);
                let given = self.job.artifact.tensors.iter().filter(|tensor| self.is_named(tensor, glob));
                let help = match given.into_iter().all(|tensor| self.given.contains_key(&tensor.name)) {
                    true => "drop the rule: --weights has them",
                    false => "--init-all draws them anew; or drop the rule",
                };
                return Err(Error::data_option(what).help(help));
            }
        }
        Ok(())
    }

    /// Whether a tensor begins by `--init`, where that is given.
    fn is_drawn(&self, tensor: &Tensor) -> bool {
        let lacks = matches!(tensor.data, Data::Absent);
        let is_weight = || self.job.manifest.parameters.get(&tensor.name).is_some_and(|parameter| parameter.drawn);
        !self.given.contains_key(&tensor.name) && (lacks || self.all && is_weight())
    }

    /// Whether a pattern matches the tensor's name or another that it has.
    fn is_named(&self, tensor: &Tensor, glob: &Glob) -> bool {
        let others = self.job.manifest.parameters.get(&tensor.name).map(manifest::Parameter::other_names).unwrap_or_default();
        glob.matches(&tensor.name) || others.iter().any(|other| glob.matches(other))
    }

    fn take(&mut self, arrays: Vec<Array>) -> Result<()> {
        let parameters = &self.job.manifest.parameters;
        for array in arrays {
            let artifact = &self.job.artifact;
            let of = |is: &dyn Fn(&manifest::Parameter) -> bool| {
                parameters.iter().find(|(_, parameter)| is(parameter)).and_then(|(name, _)| artifact.tensor(name))
            };
            let same = artifact.tensor(&array.name).or_else(|| of(&|parameter| parameter.aliases.contains(&array.name)));
            let turned = || of(&|parameter| parameter.transpose_of.as_ref() == Some(&array.name));
            let found = same.map(|tensor| (tensor, Layout::AsModel));
            let Some((tensor, layout)) = found.or_else(|| Some((turned()?, Layout::Transposed))) else {
                self.unused.push(array.name.clone());
                continue;
            };
            let mut shape = tensor.shape.to_vec();
            if layout == Layout::Transposed {
                shape.reverse();
            }
            if shape != array.shape[..] {
                let what = format!("`{}` has shape {:?}, the model's {shape:?}", array.name, array.shape);
                return Err(Error::data_shape(what).at(array.path.display()));
            }
            self.given.insert(tensor.name.clone(), (array, layout));
        }
        Ok(())
    }

    /// Writes the rank's part of `parameter`. Errors: no data and no `--init`, files that are missing or changed.
    pub fn load(&mut self, parameter: &Parameter, memory: &mut Memory) -> Result<()> {
        if parameter.kind != ParamKind::Weight {
            memory.zero(parameter.range.clone());
            return Ok(());
        }
        let slice = parameter.slice(&self.job.whole_shape(parameter));
        memory.with(parameter.range.clone(), |local| self.fill(&parameter.name, &slice, parameter.dtype, local))
    }

    /// Writes the values of `slice` of tensor `name`, as `dtype`, into a buffer of the slice's local shape.
    pub fn fill(&mut self, name: &str, slice: &Slice, dtype: DType, local: &mut [u8]) -> Result<()> {
        let job = self.job;
        let tensor = job.artifact.tensor(name);
        let tensor = tensor.ok_or_else(|| Error::artifact(format!("no initial values for `{name}`")))?;
        if tensor.shape[..] != slice.global[..] {
            return Err(Error::artifact(format!("`{name}` is {:?}, the program needs {:?}", tensor.shape, slice.global)));
        }
        match self.given.get(name) {
            Some((array, Layout::AsModel)) => return convert((array.dtype, &array.bytes), slice, dtype, local),
            Some((array, Layout::Transposed)) => return convert((array.dtype, &transposed(array)), slice, dtype, local),
            None => {}
        }
        match (&tensor.data, self.seed) {
            (_, Some(seed)) if self.is_drawn(tensor) => self.initialise(tensor, seed, slice, dtype, local),
            (Data::Absent, None) => {
                return Err(Error::data_option(format!("`{name}` has no data"))
                    .help("give --init SEED for random weights, or --weights F.safetensors"));
            }
            _ => return convert((tensor.dtype, &self.bytes(tensor)?), slice, dtype, local),
        }
        Ok(())
    }

    fn bytes(&mut self, tensor: &Tensor) -> Result<Bytes> {
        if let Some(bytes) = self.mapped.get(&tensor.name) {
            return Ok(bytes.clone());
        }
        let bytes = tensor.bytes(&self.job.folder).map_err(Error::of_artifact)?;
        let bytes = bytes.ok_or_else(|| Error::artifact(format!("`{}` has no data", tensor.name)))?;
        self.mapped.insert(tensor.name.clone(), bytes.clone());
        Ok(bytes)
    }

    fn initialise(&self, tensor: &Tensor, seed: u64, slice: &Slice, dtype: DType, local: &mut [u8]) {
        let given = self.rules.iter().rev().find(|(glob, _)| self.is_named(tensor, glob)).map(|(_, rule)| *rule);
        let rule = given.unwrap_or_else(|| self.default_rule(tensor));
        Initial { name: &tensor.name, seed, rule, stored: tensor.dtype }.fill(slice, dtype, local);
    }

    fn default_rule(&self, tensor: &Tensor) -> Rule {
        let is_gain = self.job.manifest.parameters.get(&tensor.name).is_some_and(|parameter| parameter.gain);
        match tensor.shape.len() {
            _ if is_gain => Rule::Ones,
            0 | 1 => Rule::Zeros,
            _ => Rule::Std(0.02),
        }
    }
}

/// The elements of a matrix, column by column.
fn transposed(array: &Array) -> Vec<u8> {
    let (rows, columns, bytes) = (array.shape[0] as usize, array.shape[1] as usize, array.dtype.bytes() as usize);
    let elements = (0..columns).flat_map(|column| (0..rows).map(move |row| (row * columns + column) * bytes));
    elements.flat_map(|at| &array.bytes[at..at + bytes]).copied().collect()
}

/// Copies `slice` of a whole tensor's elements into its place, as `dtype`.
fn convert((source, bytes): (DType, &[u8]), slice: &Slice, dtype: DType, local: &mut [u8]) -> Result<()> {
    let (from, to) = (source.bytes() as usize, dtype.bytes() as usize);
    if bytes.len() as u64 != slice.global.iter().product::<u64>() * source.bytes() {
        return Err(Error::artifact(format!("{} bytes of {} for {:?}", bytes.len(), source.name(), slice.global)));
    }
    let convert = Convert::new(source, dtype);
    slice.for_each_run(|run| {
        let (global, at, len) = (run.global as usize, run.local as usize, run.len as usize);
        convert.run(&bytes[global * from..(global + len) * from], &mut local[at * to..(at + len) * to]);
    });
    Ok(())
}

/// Initial weights of `programs`, whole: what a run of `job` begins with.
pub fn initial_weights(job: &Job, programs: &[Program]) -> Result<Parameters> {
    let params = programs.iter().flat_map(|p| p.params.iter().map(move |param| (param, p.ty(param.buffer).dtype)));
    let weights = params.filter(|(param, _)| param.kind == ParamKind::Weight);
    whole_weights(job, None, &weights.map(|(param, dtype)| (param.name.clone(), dtype)).collect::<Vec<_>>())
}

/// The weights `wanted`, whole: those of the checkpoint, where one is given and has them, else what a run of `job` begins with.
pub fn whole_weights(job: &Job, mut checkpoint: Option<&mut Checkpoint>, wanted: &[(String, DType)]) -> Result<Parameters> {
    let mut weights = Weights::new(job)?;
    let mut found = Parameters::new();
    for (name, dtype) in wanted {
        let (name, dtype) = (name.clone(), *dtype);
        let key = (name.clone(), ParamKind::Weight);
        if found.contains_key(&key) {
            continue;
        }
        let shape = job.artifact.tensor(&name).map(|tensor| tensor.shape.to_vec()).unwrap_or_default();
        let mut bytes = vec![0; (shape.iter().product::<u64>() * dtype.bytes()) as usize];
        let (saved, slice) = (checkpoint::Key { name: name.clone(), state: None }, Slice::whole(&shape));
        match &mut checkpoint {
            Some(checkpoint) if checkpoint.tensors().any(|(key, ..)| *key == saved) => {
                checkpoint.read(&saved, dtype, &slice, &mut |at, from| {
                    bytes[at as usize..at as usize + from.len()].copy_from_slice(from);
                    Ok(())
                })?;
            }
            _ => weights.fill(&name, &slice, dtype, &mut bytes)?,
        }
        found.insert(key, whole::Tensor { dtype, shape, bytes });
    }
    Ok(found)
}
