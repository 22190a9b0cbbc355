//! Numeric translation validation: what every rank computes, tensor by tensor, against what the unpartitioned graph means.
//!
//! The gate knows which programs are sound, not which function they compute. Here all ranks of a small instance (`scale`) run in one
//! thread, in f64, and everything that they write is put together and compared with the value of the graph's node that it is for:
//! Pnueli, Siegel and Singerman 1998 (translation validation), on numbers instead of by proof.
//!
//! Two comparisons: the placed graph gives the outputs of the training graph, so that placing kept the meaning; and every buffer of the
//! programs holds, when it is written, what its node of the placed graph is.

mod observe;
mod scale;

use crate::chunk::{self, Limits};
use crate::compile::{Compiled, vocabularies};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::interp::{self, Bindings, Data, Precision, Tensor};
use crate::lower::{self, Traced};
use crate::ops::Op;
use crate::plan::Schedule;
use crate::schedule;
use crate::{place, recompute};
use dcc_program::philox;
use dcc_program::program::{Mode, ParamKind};
use dcc_program::simulate::{self, Scalars, Simulator};
use dcc_program::{DType, TensorType};
use observe::Observed;
use scale::Scaled;
use std::collections::BTreeMap;

/// Largest difference that is rounding, relative to the size of a tensor.
const BOUND: f64 = 1e-9;
/// The size of a tensor is that of its largest element, at least this part of the largest of all tensors of its section: a gradient that
/// is zero but for rounding has none of its own.
const LEAST_SIZE: f64 = 1e-4;

/// What was compared, and how far it was apart at most.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    pub ranks: u32,
    pub microbatches: u32,
    /// Tensors that ranks write in a step, each counted once however many ranks have a part of it.
    pub tensors: usize,
    /// Relative to the largest element of the tensor.
    pub difference: f64,
    /// What was made smaller, as `12288 → 96`.
    pub scaled: Vec<String>,
}

/// A small instance, ready to run.
pub struct Instance {
    graph: Graph,
    placed: Graph,
    programs: Vec<Traced>,
    scaled: Vec<String>,
    below: BTreeMap<String, u64>,
}

impl Instance {
    /// What was compiled, its dims and its mesh made smaller, and lowered again. Errors: those of placing and lowering.
    pub fn of(compiled: &Compiled) -> Result<Instance> {
        Instance::new(compiled, chunk::is_parted(&compiled.placed))
    }

    /// The same with the classifier's product in chunks where it can be, though it is small.
    pub fn in_chunks(compiled: &Compiled) -> Result<Instance> {
        Instance::new(compiled, true)
    }

    fn new(compiled: &Compiled, in_chunks: bool) -> Result<Instance> {
        let Compiled { training, plan, order, .. } = compiled;
        let keeps_order = plan.schedule == Schedule::Auto;
        let Scaled { graph, plan, changes } = scale::down(&training.graph, plan, keeps_order)?;
        let mut placed = place::place(&graph, &plan)?;
        if in_chunks {
            placed = chunk::apply(placed, &plan, Limits::NONE);
        }
        let placed = recompute::apply(placed, &plan)?;
        let order = if keeps_order { order.clone() } else { schedule::order(&plan) };
        let programs = lower::traced(&placed, &plan, "numeric", Mode::Train, &schedule::turns(&plan, &order))?;
        let below = vocabularies(&graph, &training.classes);
        Ok(Instance { graph, placed, programs, scaled: changes, below })
    }

    /// What the ranks run; a test may change it.
    pub fn programs(&mut self) -> &mut [Traced] {
        &mut self.programs
    }

    /// Whether a product is in chunks.
    pub fn is_parted(&self) -> bool {
        chunk::is_parted(&self.placed)
    }

    /// Runs a step. Errors: the first tensor, in the order of the graph, that is not what the unpartitioned graph has.
    pub fn check(&self) -> Result<Agreement> {
        let bindings = self.bindings();
        self.placed_means_graph(&bindings)?;
        let observed = self.run(&bindings)?;
        let nodes: Vec<NodeId> = observed.nodes();
        let expected = interp::evaluate(&self.placed, &nodes, &bindings, Precision::Exact)?;
        let mut largest: BTreeMap<_, f64> = BTreeMap::new();
        for (id, value) in nodes.iter().zip(&expected) {
            let most: &mut f64 = largest.entry(self.placed[*id].phase).or_default();
            *most = most.max(magnitude(&numbers(value)));
        }
        let mut worst = 0.0_f64;
        for (&id, value) in nodes.iter().zip(&expected) {
            let expected = numbers(value);
            let size = magnitude(&expected).max(LEAST_SIZE * largest[&self.placed[id].phase]);
            for (rank, found) in observed.of(id) {
                let apart = difference(&found, &expected, size);
                worst = worst.max(apart.map_err(|at| self.differs(id, (rank, at), found[at], expected[at]))?);
            }
        }
        let mesh = &self.programs[0].program.mesh;
        Ok(Agreement {
            ranks: mesh.world(),
            microbatches: mesh.size_of("mb"),
            tensors: nodes.len(),
            difference: worst,
            scaled: self.scaled.clone(),
        })
    }

    fn differs(&self, id: NodeId, (rank, element): (u32, usize), found: f64, expected: f64) -> Error {
        let node = &self.placed[id];
        let (mut index, mut rest) = (Vec::new(), element as u64);
        for &dim in node.ty.shape.iter().rev() {
            index.insert(0, rest % dim);
            rest /= dim;
        }
        let (op, ty, section) = (node.op.name(), self.placed.ty(id).text(&self.programs[0].program.mesh), node.phase.name());
        let what = format!(
            "the ranks do not compute what one device does: the first tensor that differs is %{} = {op} {ty} of section {section}: rank \
             {rank} has {found:?} at {index:?}, not {expected:?}",
            id.0
        );
        Error::internal(what).at(self.placed.origin(id))
    }

    /// Placing keeps what the graph means. Errors: the first output that it changes.
    fn placed_means_graph(&self, bindings: &Bindings) -> Result<()> {
        let expected: BTreeMap<String, Tensor> =
            interp::outputs(&self.graph, bindings, Precision::Exact)?.into_iter().collect();
        let largest = expected.values().map(|value| magnitude(&numbers(value))).fold(0.0, f64::max);
        for (name, found) in interp::outputs(&self.placed, bindings, Precision::Exact)? {
            let (found, expected) = (numbers(&found), numbers(&expected[&name]));
            let size = magnitude(&expected).max(LEAST_SIZE * largest);
            if let Err(element) = difference(&found, &expected, size) {
                let (found, expected) = (found[element], expected[element]);
                let what = format!("placing changes output {name}: element {element} is {found:?}, not {expected:?}");
                return Err(Error::internal(what));
            }
        }
        Ok(())
    }

    /// A step of all ranks.
    fn run(&self, bindings: &Bindings) -> Result<Observed> {
        let broken = |error: simulate::SimulateError| Error::internal(format!("the ranks' programs do not run: {error}"));
        let programs: Vec<_> = self.programs.iter().map(|traced| traced.program.clone()).collect();
        let mut simulator = Simulator::new(&programs).map_err(broken)?;
        for ((name, kind), value) in &bindings.params {
            simulator.set(name, kind, &plain(value)).map_err(broken)?;
        }
        let inputs = bindings.inputs.iter().map(|(name, value)| (name.clone(), plain(value))).collect();
        let scalars = Scalars { learning_rate: bindings.learning_rate, step: bindings.step, seed: bindings.seed };
        let mut observed = Observed::new(&self.programs);
        simulator.step_watched(&inputs, scalars, &mut |written| observed.add(written)).map_err(broken)?;
        Ok(observed)
    }

    /// Made-up parameters and data of the first step: matrices about 0, as large as keeps activations of their size; all else about 1,
    /// as gains and variances are; state is zero.
    fn bindings(&self) -> Bindings {
        let mut bindings = Bindings { learning_rate: 1e-2, step: 3, seed: 7, ..Bindings::default() };
        let mut shapes: BTreeMap<(String, ParamKind), TensorType> = BTreeMap::new();
        for id in self.graph.ids() {
            match &self.graph[id].op {
                Op::Input(input) => {
                    let ty = self.graph.ty(id);
                    let below = self.below.get(&input.name).copied();
                    bindings.inputs.insert(input.name.clone(), made_up(&input.name, ty, 1.0, 0.0, below));
                }
                Op::Param(param) => {
                    let mut ty = self.graph.ty(id).clone();
                    let whole = shapes.entry((param.name.clone(), param.kind.clone())).or_insert_with(|| ty.clone());
                    if let Some(piece) = param.piece {
                        ty.shape[usize::from(piece.dim)] = piece.end;
                    }
                    whole.shape.iter_mut().zip(&ty.shape).for_each(|(a, &b)| *a = b.max(*a));
                }
                _ => {}
            }
        }
        for ((name, kind), ty) in shapes {
            let fan = ty.shape.iter().skip(1).product::<u64>().max(ty.shape.first().copied().unwrap_or(1)).max(1) as f64;
            let value = match (&kind, ty.rank()) {
                (ParamKind::Weight, 0 | 1) => made_up(&name, &ty, 0.1, 1.0, None),
                (ParamKind::Weight, _) => made_up(&name, &ty, (3.0 / fan).sqrt(), 0.0, None),
                // Of the optimizer, in the middle of training: positive, as variances are, and each different.
                _ if ty.dtype.is_float() => made_up(&format!("{name} {kind:?}"), &ty, 0.05, 0.1, None),
                _ => Tensor::zeros(&ty),
            };
            bindings.params.insert((name, kind), value);
        }
        bindings
    }
}

/// Floats within `spread` of `about`; integers below `below`, which is 2 where nothing bounds them.
fn made_up(name: &str, ty: &TensorType, spread: f64, about: f64, below: Option<u64>) -> Tensor {
    let hash = u32::from_le_bytes(*blake3::hash(name.as_bytes()).as_bytes().first_chunk().expect("32 bytes"));
    let random = |i: u64| f64::from(philox::uniform(hash, 1, 1, i));
    let count = ty.elements();
    match ty.dtype.is_float() {
        true => Tensor::floats(ty.dtype, &ty.shape, (0..count).map(|i| about + spread * (2.0 * random(i) - 1.0)).collect()),
        false => {
            let below = if ty.dtype == DType::Bool { 2.0 } else { below.unwrap_or(2) as f64 };
            Tensor::ints(ty.dtype, &ty.shape, (0..count).map(|i| (random(i) * below) as i64).collect())
        }
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    match &tensor.data {
        Data::Float(values) => values.clone(),
        Data::Int(values) => values.iter().map(|&value| value as f64).collect(),
    }
}

fn plain(tensor: &Tensor) -> simulate::Tensor {
    simulate::Tensor { shape: tensor.shape.to_vec(), values: numbers(tensor) }
}

fn magnitude(values: &[f64]) -> f64 {
    values.iter().filter(|value| value.is_finite()).fold(0.0, |most, value| most.max(value.abs()))
}

/// The largest difference, relative to `size`. Errors: the first element that is off by more than rounding.
fn difference(found: &[f64], expected: &[f64], size: f64) -> std::result::Result<f64, usize> {
    let mut worst = 0.0_f64;
    for (element, (&a, &b)) in found.iter().zip(expected).enumerate() {
        // What overflows, or is no number, does and is on both sides.
        if a == b || a.is_nan() && b.is_nan() {
            continue;
        }
        let apart = (a - b).abs() / size;
        if apart.is_nan() || apart > BOUND {
            return Err(element);
        }
        worst = worst.max(apart);
    }
    Ok(worst)
}
