//! What parameters begin with: tensor data of the artifact, `--weights`, `--init`. Each rank reads its own part only.

use super::Job;
use crate::cpu::Memory;
use crate::data::{Array, Convert, Files};
use crate::error::{Error, Result};
use crate::exec::Parameter;
use crate::init::{Initial, Rule};
use bytes::Bytes;
use dcc_program::artifact::{Data, Tensor};
use dcc_program::manifest;
use dcc_program::program::ParamKind;
use dcc_program::{DType, Glob};
use std::collections::BTreeMap;

/// Where all values come from.
pub(super) struct Weights<'a> {
    job: &'a Job,
    /// `--weights`, by tensor name.
    given: BTreeMap<String, Array>,
    /// Keys of `--weights` that name nothing here.
    pub unused: Vec<String>,
    seed: Option<u64>,
    all: bool,
    rules: Vec<(Glob, Rule)>,
    /// Mapped so far.
    mapped: BTreeMap<String, Bytes>,
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
        }
        Ok(weights)
    }

    fn take(&mut self, arrays: Vec<Array>) -> Result<()> {
        let parameters = &self.job.manifest.parameters;
        for array in arrays {
            let is_alias = |(_, parameter): &(&String, &manifest::Parameter)| parameter.aliases.contains(&array.name);
            let artifact = &self.job.artifact;
            let by_alias = || parameters.iter().find(is_alias).and_then(|(name, _)| artifact.tensor(name));
            let Some(tensor) = artifact.tensor(&array.name).or_else(by_alias) else {
                self.unused.push(array.name.clone());
                continue;
            };
            if tensor.shape[..] != array.shape[..] {
                let what = format!("`{}` has shape {:?}, the model's {:?}", array.name, array.shape, tensor.shape);
                return Err(Error::data_shape(what).at(array.path.display()));
            }
            self.given.insert(tensor.name.clone(), array);
        }
        Ok(())
    }

    /// Writes the rank's part of `parameter`. Errors: no data and no `--init`, files that are missing or changed.
    pub fn load(&mut self, parameter: &Parameter, memory: &mut Memory) -> Result<()> {
        if parameter.kind != ParamKind::Weight {
            memory.zero(parameter.range.clone());
            return Ok(());
        }
        let tensor = self.job.artifact.tensor(&parameter.name);
        let tensor = tensor.ok_or_else(|| Error::artifact(format!("no initial values for `{}`", parameter.name)))?;
        if let Some(array) = self.given.get(&parameter.name) {
            return copy(parameter, tensor, (array.dtype, &array.bytes), memory);
        }
        match (&tensor.data, self.seed) {
            (_, Some(seed)) if self.all && tensor.dtype.is_float() => self.initialise(parameter, tensor, seed, memory),
            (Data::Absent, Some(seed)) => self.initialise(parameter, tensor, seed, memory),
            (Data::Absent, None) => Err(Error::data_option(format!("`{}` has no data", tensor.name))
                .help("give --init SEED for random weights, or --weights F.safetensors")),
            _ => {
                let bytes = self.bytes(tensor)?;
                copy(parameter, tensor, (tensor.dtype, &bytes), memory)
            }
        }
    }

    fn bytes(&mut self, tensor: &Tensor) -> Result<Bytes> {
        if let Some(bytes) = self.mapped.get(&tensor.name) {
            return Ok(bytes.clone());
        }
        let bytes = tensor.bytes(&self.job.folder).map_err(super::artifact_error)?;
        let bytes = bytes.ok_or_else(|| Error::artifact(format!("`{}` has no data", tensor.name)))?;
        self.mapped.insert(tensor.name.clone(), bytes.clone());
        Ok(bytes)
    }

    fn initialise(&self, parameter: &Parameter, tensor: &Tensor, seed: u64, memory: &mut Memory) -> Result<()> {
        let given = self.rules.iter().find(|(glob, _)| glob.matches(&tensor.name)).map(|(_, rule)| *rule);
        let rule = given.unwrap_or_else(|| self.default_rule(tensor));
        let initial = Initial { name: &tensor.name, seed, rule, stored: tensor.dtype };
        let slice = parameter.slice(&tensor.shape);
        memory.with(parameter.range.clone(), |local| initial.fill(&slice, parameter.dtype, local));
        Ok(())
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

/// Converts the rank's part of `tensor`, given whole, into its place.
fn copy(parameter: &Parameter, tensor: &Tensor, (dtype, bytes): (DType, &[u8]), memory: &mut Memory) -> Result<()> {
    let slice = parameter.slice(&tensor.shape);
    let (from, to) = (dtype.bytes() as usize, parameter.dtype.bytes() as usize);
    if bytes.len() as u64 != tensor.shape.iter().product::<u64>() * dtype.bytes() {
        return Err(Error::artifact(format!("`{}` has {} bytes", tensor.name, bytes.len())));
    }
    let convert = Convert::new(dtype, parameter.dtype);
    memory.with(parameter.range.clone(), |local| {
        slice.for_each_run(|run| {
            let (global, at, len) = (run.global as usize, run.local as usize, run.len as usize);
            convert.run(&bytes[global * from..(global + len) * from], &mut local[at * to..(at + len) * to]);
        });
    });
    Ok(())
}
