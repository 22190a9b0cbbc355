//! Whole tensors in, whole tensors out: a program set on ranks that are threads of this process.
//!
//! For evaluation and for tests. Ranks that hold the same part of a result must agree in every bit.

use super::ranks::{Rank, local_ranks};
use super::{Executor, Fresh, Io, Parameter, Port, Scalars, Tally, World};
use crate::comm::{DType, Patience};
use crate::error::{Error, Result};
use crate::slice::Slice;
use dcc_program::program::{ParamKind, Program};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Row-major elements in native byte order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// Parameters and states by initializer name, pieces joined.
pub type Parameters = BTreeMap<(String, ParamKind), Tensor>;

/// What some steps gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Of each step.
    pub outputs: Vec<BTreeMap<String, Tensor>>,
    /// After the last step.
    pub parameters: Parameters,
    /// Of each rank.
    pub tallies: Vec<Tally>,
}

/// A run on local ranks.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// One per stage.
    pub programs: &'a [Program],
    /// Compute threads of each rank.
    pub threads: usize,
    pub fresh: Fresh,
    /// States that are missing start at zero.
    pub parameters: &'a Parameters,
    /// Step t takes `inputs[t % len]`.
    pub inputs: &'a [BTreeMap<String, Tensor>],
    pub steps: &'a [Scalars],
}

impl Tensor {
    /// All bits set, which is NaN.
    fn unknown(dtype: DType, shape: &[u64]) -> Tensor {
        let bytes = vec![0xff; (shape.iter().product::<u64>() * dtype.bytes()) as usize];
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    fn cut(&self, slice: &Slice, local: &mut [u8]) {
        let width = self.dtype.bytes() as usize;
        slice.for_each_run(|run| {
            let (from, to, len) = (run.global as usize * width, run.local as usize * width, run.len as usize * width);
            local[to..to + len].copy_from_slice(&self.bytes[from..from + len]);
        });
    }

    /// Writes one rank's part; whether parts that are known already agree.
    fn join(&mut self, known: &mut [bool], slice: &Slice, local: &[u8]) -> bool {
        let width = self.dtype.bytes() as usize;
        let mut agree = true;
        slice.for_each_run(|run| {
            for i in 0..run.len {
                let (to, from) = ((run.global + i) as usize, (run.local + i) as usize * width);
                let (old, new) = (&mut self.bytes[to * width..(to + 1) * width], &local[from..from + width]);
                agree &= !std::mem::replace(&mut known[to], true) || old == new;
                old.copy_from_slice(new);
            }
        });
        agree
    }
}

/// Results on the way to being whole.
#[derive(Default)]
struct Joined(BTreeMap<(usize, String, Option<ParamKind>), (Tensor, Vec<bool>)>);

impl Joined {
    fn add(&mut self, key: (usize, String, Option<ParamKind>), dtype: DType, slice: &Slice, local: &[u8]) -> Result<()> {
        let fresh = || {
            let tensor = Tensor::unknown(dtype, &slice.global);
            let known = vec![false; slice.global.iter().product::<u64>() as usize];
            (tensor, known)
        };
        let what = key.1.clone();
        let (tensor, known) = self.0.entry(key).or_insert_with(fresh);
        match tensor.join(known, slice, local) {
            true => Ok(()),
            false => Err(Error::mismatch(format!("ranks that should agree on `{what}` do not"))),
        }
    }
}

impl Run<'_> {
    /// Errors: inputs or parameters that are missing or of another type, ranks that disagree.
    pub fn run(&self) -> Result<Outcome> {
        let world = World::new(&[self.programs])?;
        let joined = Mutex::new(Joined::default());
        let tallies = local_ranks(&world, self.threads, Patience::default(), |rank| self.rank(rank, &joined))?;
        let joined = joined.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut outcome = Outcome { outputs: vec![BTreeMap::new(); self.steps.len()], parameters: Parameters::new(), tallies };
        for ((step, name, kind), (tensor, _)) in joined.0 {
            match kind {
                Some(kind) => drop(outcome.parameters.insert((name, kind), tensor)),
                None => drop(outcome.outputs[step].insert(name, tensor)),
            }
        }
        Ok(outcome)
    }

    fn rank(&self, rank: &mut Rank<'_>, joined: &Mutex<Joined>) -> Result<Tally> {
        let program = &self.programs[rank.world.stage(rank.rank) as usize];
        let mut executor = Executor::new(&mut rank.device, rank.world, program, rank.rank, self.fresh)?;
        for parameter in executor.parameters() {
            let key = (parameter.name.clone(), parameter.kind.clone());
            let value = self.parameters.get(&key);
            if value.is_none() && parameter.kind == ParamKind::Weight {
                return Err(Error::artifact(format!("no initial values for `{}`", parameter.name)));
            }
            rank.device.memory_mut().with(parameter.range.clone(), |local| match value {
                Some(value) => fits(value, parameter).map(|()| value.cut(&parameter.slice(&value.shape), local)),
                None => {
                    local.fill(0);
                    Ok(())
                }
            })?;
        }
        executor.put_parameters(&mut rank.device)?;
        let lock = || joined.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (step, scalars) in self.steps.iter().enumerate() {
            let inputs = &self.inputs[step % self.inputs.len()];
            let mut io = Io {
                fill: &mut |port, microbatch, local| {
                    let value = inputs.get(&port.name);
                    let value = value.ok_or_else(|| Error::data_keys(format!("input `{}` has no data", port.name)))?;
                    check_input(value, port)?;
                    value.cut(port.slice(microbatch), local);
                    Ok(())
                },
                take: &mut |port, microbatch, local| {
                    lock().add((step, port.name.clone(), None), port.dtype, port.slice(microbatch), local)
                },
            };
            executor.step(&mut rank.device, &mut rank.comm, scalars, &mut io, None)?;
        }
        executor.get_parameters(&mut rank.device)?;
        for parameter in executor.parameters() {
            let whole = self.parameters.get(&(parameter.name.clone(), ParamKind::Weight));
            let shape = parameter.whole_shape(whole.map_or(&[], |whole| &whole.shape));
            let key = (0, parameter.name.clone(), Some(parameter.kind.clone()));
            let slice = parameter.slice(&shape);
            rank.device.memory_mut().with(parameter.range.clone(), |local| lock().add(key, parameter.dtype, &slice, local))?;
        }
        Ok(*executor.tally())
    }
}

fn fits(value: &Tensor, parameter: &Parameter) -> Result<()> {
    let size = |dim: usize| parameter.piece.filter(|piece| usize::from(piece.dim) == dim).map(|piece| piece.end);
    let whole = |(dim, &due): (usize, &u64)| size(dim).map_or(value.shape[dim] == due, |end| value.shape[dim] >= end);
    let fits = value.dtype == parameter.dtype
        && value.shape.len() == parameter.shape.len()
        && parameter.shape.iter().enumerate().all(whole);
    if fits { Ok(()) } else { Err(Error::data_shape(format!("`{}` has another type in the program", parameter.name))) }
}

fn check_input(value: &Tensor, port: &Port) -> Result<()> {
    let due = &port.slices[0].global;
    if value.dtype == port.dtype && value.shape == *due {
        return Ok(());
    }
    let (found, wanted) = (value.dtype.name(), port.dtype.name());
    Err(Error::data_shape(format!("input `{}` is {found}{:?}, the program needs {wanted}{due:?}", port.name, value.shape)))
}
