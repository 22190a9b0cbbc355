//! Recurrent layers, unrolled over their static number of steps.
//!
//! The products with the inputs of all steps are one; each step adds the product with its state. Legend: `t` steps, `b` samples,
//! `i` inputs, `g` gates times `h` states.

use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::{DType, Shape};

use super::gates::{Activation, Gates};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("GRU", |b, c| recurrent(b, c, Cell::Gru)),
    ("LSTM", |b, c| recurrent(b, c, Cell::Lstm)),
    ("RNN", |b, c| recurrent(b, c, Cell::Rnn)),
];

/// Steps beyond which the unrolled graph would be too large.
const MOST_STEPS: u64 = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    Rnn,
    Gru,
    Lstm,
}

impl Cell {
    pub fn gates(self) -> u64 {
        match self {
            Cell::Rnn => 1,
            Cell::Gru => 3,
            Cell::Lstm => 4,
        }
    }

    /// The functions that ONNX applies where the node names none.
    pub fn activations(self) -> &'static [&'static str] {
        match self {
            Cell::Rnn => &["Tanh"],
            Cell::Gru => &["Sigmoid", "Tanh"],
            Cell::Lstm => &["Sigmoid", "Tanh", "Tanh"],
        }
    }
}

/// What all directions of a node share.
struct Layer {
    cell: Cell,
    /// `[t, b, i]`.
    x: Value,
    steps: u64,
    batch: u64,
    hidden: u64,
    dtype: DType,
    /// For each step `[b, 1]`: whether the sample is that long. `None` where all are.
    active: Option<Vec<Value>>,
}

/// The state after a step; `c` is the LSTM's.
#[derive(Clone)]
pub(super) struct State {
    pub h: Value,
    pub c: Option<Value>,
}

/// Results `Y [t, directions, b, h]`, `Y_h [directions, b, h]`, and an LSTM's `Y_c`; `layout` 1 has samples first.
fn recurrent(build: &mut Build, call: &Call, cell: Cell) -> Result<Vec<Value>> {
    let batch_first = match call.node.int_or("layout", 0)? {
        0 => false,
        1 => true,
        other => return Err(attribute_value("layout", other)),
    };
    let directions: &[bool] = match call.node.string_or("direction", "forward")? {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        other => return Err(attribute_value("direction", format!("`{other}`"))),
    };
    let layer = Layer::read(build, call, cell, batch_first)?;
    let activations = Activation::read(call, cell, directions.len())?;
    let mut outputs = Vec::with_capacity(directions.len());
    let mut last = Vec::with_capacity(directions.len());
    for (direction, &reverse) in directions.iter().enumerate() {
        let gates = Gates::read(build, call, cell, layer.hidden, direction, &activations[direction])?;
        let first = layer.initial(build, call, direction, batch_first)?;
        let (mut ys, state) = layer.run(build, &gates, first, reverse)?;
        let wide = [1, 1, layer.batch, layer.hidden];
        for y in &mut ys {
            *y = build.reshape(y, &wide)?;
        }
        outputs.push(build.concatenate(&ys, 0)?);
        last.push(state);
    }
    let y = build.concatenate(&outputs, 1)?;
    let stacked = |build: &mut Build, pick: fn(&State) -> Option<&Value>| -> Result<Option<Value>> {
        let mut parts = Vec::with_capacity(last.len());
        for state in &last {
            let Some(value) = pick(state) else { return Ok(None) };
            parts.push(build.reshape(value, &[1, layer.batch, layer.hidden])?);
        }
        Ok(Some(build.concatenate(&parts, 0)?))
    };
    let h = stacked(build, |state| Some(&state.h))?;
    let c = stacked(build, |state| state.c.as_ref())?;
    let mut results = vec![if batch_first { build.transpose(&y, &[2, 0, 1, 3])? } else { y }];
    for state in [h, c].into_iter().flatten() {
        results.push(if batch_first { build.transpose(&state, &[1, 0, 2])? } else { state });
    }
    Ok(results)
}

/// The part of a tensor `[directions, …]` that belongs to one direction.
pub(super) fn of_direction(build: &mut Build, value: &Value, direction: usize) -> Result<Value> {
    let shape = value.shape(build)?;
    if shape.first().is_none_or(|&count| count <= direction as u64) {
        return Err(Error::shape(format!("{:?} for direction {direction}", shape.as_slice())));
    }
    let part = build.narrow(value, 0, direction as u64, 1)?;
    build.reshape(&part, &shape[1..])
}

impl Layer {
    fn read(build: &mut Build, call: &Call, cell: Cell, batch_first: bool) -> Result<Layer> {
        let mut x = call.input(0)?.clone();
        if batch_first {
            x = build.transpose(&x, &[1, 0, 2])?;
        }
        let (shape, recurrence) = (x.shape(build)?, call.input(2)?.shape(build)?);
        let (&[steps, batch, _], &[_, rows, hidden]) = (&shape[..], &recurrence[..]) else {
            let what = format!("sequences {:?} and recurrent weights {:?}", shape.as_slice(), recurrence.as_slice());
            return Err(Error::shape(what));
        };
        let declared = call.node.int_or("hidden_size", hidden as i64)?;
        if declared != hidden as i64 || rows != cell.gates() * hidden {
            let what = format!("recurrent weights {:?} for a hidden size of {declared}", recurrence.as_slice());
            return Err(Error::shape(what));
        }
        if steps == 0 || steps > MOST_STEPS {
            return Err(Error::limit(format!("{steps} steps, 1 to {MOST_STEPS} are supported")));
        }
        let dtype = x.dtype(build)?;
        let active = match call.optional(4) {
            Some(lengths) if lengths.uniform() != Some(steps as f64) => Some(active(build, lengths, steps, batch)?),
            _ => None,
        };
        Ok(Layer { cell, x, steps, batch, hidden, dtype, active })
    }

    fn initial(&self, build: &mut Build, call: &Call, direction: usize, batch_first: bool) -> Result<State> {
        let size = [self.batch, self.hidden];
        let read = |build: &mut Build, position: usize| -> Result<Value> {
            let Some(value) = call.optional(position) else {
                return Ok(Known::scalar(self.dtype, 0.0).broadcast(&size).into());
            };
            let value = if batch_first { build.transpose(value, &[1, 0, 2])? } else { value.clone() };
            let part = of_direction(build, &value, direction)?;
            match part.shape(build)? == Shape::from_slice(&size) {
                true => Ok(part),
                false => Err(Error::shape(format!("an initial state {:?}, not {size:?}", &part.shape(build)?[..]))),
            }
        };
        let h = read(build, 5)?;
        let c = if self.cell == Cell::Lstm { Some(read(build, 6)?) } else { None };
        Ok(State { h, c })
    }

    /// The outputs in the order of the steps, and the last state.
    fn run(&self, build: &mut Build, gates: &Gates, first: State, reverse: bool) -> Result<(Vec<Value>, State)> {
        let inputs = gates.of_inputs(build, &self.x)?;
        let width = inputs.shape(build)?[2];
        let mut state = first;
        let mut ys = Vec::with_capacity(self.steps as usize);
        let order: Vec<u64> = if reverse { (0..self.steps).rev().collect() } else { (0..self.steps).collect() };
        for step in order {
            let part = build.narrow(&inputs, 0, step, 1)?;
            let part = build.reshape(&part, &[self.batch, width])?;
            let mut next = gates.step(build, &part, &state)?;
            let mut y = next.h.clone();
            if let Some(active) = &self.active {
                let active = &active[step as usize];
                let zero = Known::scalar(self.dtype, 0.0).broadcast(&[self.batch, self.hidden]).into();
                y = build.select(active, &next.h, &zero)?;
                next.h = build.select(active, &next.h, &state.h)?;
                next.c = match (&next.c, &state.c) {
                    (Some(new), Some(old)) => Some(build.select(active, new, old)?),
                    _ => None,
                };
            }
            ys.push(y);
            state = next;
        }
        if reverse {
            ys.reverse();
        }
        Ok((ys, state))
    }
}

/// For each step which samples have it.
fn active(build: &mut Build, lengths: &Value, steps: u64, batch: u64) -> Result<Vec<Value>> {
    let lengths = build.cast(lengths, DType::I64)?;
    let lengths = build.reshape(&lengths, &[batch, 1])?;
    (0..steps).map(|step| build.compare(CompareOp::Gt, &lengths, &Known::int(DType::I64, step as i64).into())).collect()
}

impl Build {
    /// `a b` of `[b, k]` by rows of `[g, k]`.
    pub(super) fn by_rows(&mut self, a: &Value, weights: &Value) -> Result<Value> {
        self.dot((a, &["b", "k"]), (weights, &["g", "k"]), &["b", "g"])
    }

    /// `1 - x`.
    pub(super) fn complement(&mut self, x: &Value) -> Result<Value> {
        let one = Known::scalar(x.dtype(self)?, 1.0).into();
        self.binary(BinaryOp::Sub, &one, x)
    }
}
