//! One step of a recurrent cell: its weights, its functions, its formula as ONNX states it.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::elementwise::{above_zero, exponential_below_zero, hard_sigmoid_of, softplus_of};
use super::recurrent::{Cell, State, of_direction};
use super::{Call, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

/// A function of gates, with its parameters.
#[derive(Clone, Debug)]
pub(super) struct Activation {
    name: String,
    alpha: Option<f64>,
    beta: Option<f64>,
}

impl Activation {
    /// The functions of each direction.
    pub fn read(call: &Call, cell: Cell, directions: usize) -> Result<Vec<Vec<Activation>>> {
        let defaults = cell.activations();
        let each = defaults.len();
        let names = match call.node.strings("activations")? {
            Some(names) if names.len() == each * directions => names,
            Some(names) => {
                return Err(attribute_value("activations", format!("{names:?} ({} are needed)", each * directions)));
            }
            None => defaults.iter().cycle().take(each * directions).map(|&name| name.to_owned()).collect(),
        };
        // Values are for those functions that take one, in order.
        let mut alphas = call.node.floats("activation_alpha")?.unwrap_or(&[]).iter();
        let mut betas = call.node.floats("activation_beta")?.unwrap_or(&[]).iter();
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            let (takes_alpha, takes_beta) = parameters(&name)?;
            let next = |list: &mut std::slice::Iter<f32>| list.next().map(|&x| f64::from(x));
            let alpha = if takes_alpha { next(&mut alphas) } else { None };
            let beta = if takes_beta { next(&mut betas) } else { None };
            all.push(Activation { name, alpha, beta });
        }
        Ok(all.chunks(each).map(<[Activation]>::to_vec).collect())
    }

    /// With those of its numbers that are given.
    pub fn of(name: &str, numbers: &[f64]) -> Result<Activation> {
        let mut numbers = numbers.iter().copied();
        let (takes_alpha, takes_beta) = parameters(name)?;
        let mut next = |takes: bool| if takes { numbers.next() } else { None };
        Ok(Activation { name: name.to_owned(), alpha: next(takes_alpha), beta: next(takes_beta) })
    }

    pub fn apply(&self, build: &mut Build, x: &Value) -> Result<Value> {
        let (alpha, beta) = (|default: f64| self.alpha.unwrap_or(default), |default: f64| self.beta.unwrap_or(default));
        match self.name.to_ascii_lowercase().as_str() {
            "sigmoid" => build.unary(UnaryOp::Logistic, x),
            "tanh" => build.unary(UnaryOp::Tanh, x),
            "relu" => {
                let zero = Known::scalar(x.dtype(build)?, 0.0).into();
                above_zero(build, x, &zero)
            }
            "leakyrelu" => {
                let low = build.binary_scalar(BinaryOp::Mul, x, alpha(f64::from(0.01_f32)))?;
                above_zero(build, x, &low)
            }
            "thresholdedrelu" => {
                let dtype = x.dtype(build)?;
                let above = build.compare(CompareOp::Gt, x, &Known::scalar(dtype, alpha(1.0)).into())?;
                build.select(&above, x, &Known::scalar(dtype, 0.0).into())
            }
            "affine" => {
                let scaled = build.binary_scalar(BinaryOp::Mul, x, alpha(1.0))?;
                build.binary_scalar(BinaryOp::Add, &scaled, beta(0.0))
            }
            "scaledtanh" => {
                let scaled = build.binary_scalar(BinaryOp::Mul, x, beta(1.0))?;
                let tanh = build.unary(UnaryOp::Tanh, &scaled)?;
                build.binary_scalar(BinaryOp::Mul, &tanh, alpha(1.0))
            }
            "hardsigmoid" => hard_sigmoid_of(build, x, alpha(f64::from(0.2_f32)), beta(0.5)),
            "elu" => exponential_below_zero(build, x, 1.0, alpha(1.0)),
            "softsign" => {
                let size = build.unary(UnaryOp::Abs, x)?;
                let size = build.binary_scalar(BinaryOp::Add, &size, 1.0)?;
                build.binary(BinaryOp::Div, x, &size)
            }
            _ => softplus_of(build, x),
        }
    }
}

/// Whether a function takes alpha, and beta. Errors: no such function.
fn parameters(name: &str) -> Result<(bool, bool)> {
    Ok(match name.to_ascii_lowercase().as_str() {
        "sigmoid" | "tanh" | "relu" | "softsign" | "softplus" => (false, false),
        "leakyrelu" | "thresholdedrelu" | "elu" => (true, false),
        "affine" | "scaledtanh" | "hardsigmoid" => (true, true),
        _ => return Err(attribute_value("activations", format!("`{name}`"))),
    })
}

/// Weights and functions of one direction.
pub(super) struct Gates<'a> {
    cell: Cell,
    hidden: u64,
    /// `[gates h, i]` and `[gates h, h]`.
    weights: Value,
    recurrence: Value,
    /// `[gates h]` each, of the inputs' and of the state's product.
    biases: Option<(Value, Value)>,
    /// `[3 h]`: of the input, output and forget gate.
    peepholes: Option<Value>,
    activations: &'a [Activation],
    clip: Option<f64>,
    input_forget: bool,
    linear_before_reset: bool,
}

impl<'a> Gates<'a> {
    pub fn read(
        build: &mut Build,
        call: &Call,
        cell: Cell,
        hidden: u64,
        direction: usize,
        activations: &'a [Activation],
    ) -> Result<Gates<'a>> {
        let rows = cell.gates() * hidden;
        let weights = of_direction(build, call.input(1)?, direction)?;
        let recurrence = of_direction(build, call.input(2)?, direction)?;
        let biases = match call.optional(3) {
            None => None,
            Some(biases) => {
                let both = of_direction(build, biases, direction)?;
                if both.shape(build)?.as_slice() != [2 * rows] {
                    return Err(Error::shape(format!("biases {:?} for {rows} gates", biases.shape(build)?.as_slice())));
                }
                let (input, mut state) = (build.narrow(&both, 0, 0, rows)?, build.narrow(&both, 0, rows, rows)?);
                if call.classifier.holds_half(call.node.inputs[3]) {
                    state = build.stop_gradient(&state)?;
                }
                Some((input, state))
            }
        };
        let peepholes = match call.optional(7).filter(|_| cell == Cell::Lstm) {
            Some(peepholes) => Some(of_direction(build, peepholes, direction)?),
            None => None,
        };
        let clip = call.node.float("clip")?;
        let input_forget = cell == Cell::Lstm && call.node.flag("input_forget", false)?;
        let linear_before_reset = cell == Cell::Gru && call.node.flag("linear_before_reset", false)?;
        Ok(Gates { cell, hidden, weights, recurrence, biases, peepholes, activations, clip, input_forget, linear_before_reset })
    }

    /// `[t, b, gates h]`: products with the inputs of all steps, and the biases that add to them alone.
    pub fn of_inputs(&self, build: &mut Build, x: &Value) -> Result<Value> {
        let product = build.dot((x, &["t", "b", "i"]), (&self.weights, &["g", "i"]), &["t", "b", "g"])?;
        let Some((input, state)) = &self.biases else { return Ok(product) };
        let bias = match self.cell {
            // The candidate's state bias is inside of what the reset gate scales.
            Cell::Gru if self.linear_before_reset => {
                let gates = build.narrow(state, 0, 0, 2 * self.hidden)?;
                let gates = build.pad(&gates, 0, 0, self.hidden, 0.0)?;
                build.binary(BinaryOp::Add, input, &gates)?
            }
            _ => build.binary(BinaryOp::Add, input, state)?,
        };
        build.binary(BinaryOp::Add, &product, &bias)
    }

    pub fn step(&self, build: &mut Build, inputs: &Value, state: &State) -> Result<State> {
        match self.cell {
            Cell::Rnn => {
                let product = build.by_rows(&state.h, &self.recurrence)?;
                let sum = build.binary(BinaryOp::Add, inputs, &product)?;
                Ok(State { h: self.activate(build, 0, &sum)?, c: None })
            }
            Cell::Gru => self.gru(build, inputs, &state.h),
            Cell::Lstm => self.lstm(build, inputs, state),
        }
    }

    /// `h' = (1 - z) candidate + z h`, gates in the order z r h. Cho et al. 2014, arXiv 1406.1078; with `linear_before_reset` as
    /// cuDNN and PyTorch have it.
    fn gru(&self, build: &mut Build, inputs: &Value, h: &Value) -> Result<State> {
        let size = self.hidden;
        let two = build.narrow(&self.recurrence, 0, 0, 2 * size)?;
        let last = build.narrow(&self.recurrence, 0, 2 * size, size)?;
        let product = build.by_rows(h, &two)?;
        let open = build.narrow(inputs, 1, 0, 2 * size)?;
        let open = build.binary(BinaryOp::Add, &open, &product)?;
        let z = build.narrow(&open, 1, 0, size)?;
        let z = self.activate(build, 0, &z)?;
        let r = build.narrow(&open, 1, size, size)?;
        let r = self.activate(build, 0, &r)?;
        let from_state = match self.linear_before_reset {
            true => {
                let mut linear = build.by_rows(h, &last)?;
                if let Some((_, bias)) = &self.biases {
                    let bias = build.narrow(bias, 0, 2 * size, size)?;
                    linear = build.binary(BinaryOp::Add, &linear, &bias)?;
                }
                build.binary(BinaryOp::Mul, &r, &linear)?
            }
            false => {
                let kept = build.binary(BinaryOp::Mul, &r, h)?;
                build.by_rows(&kept, &last)?
            }
        };
        let candidate = build.narrow(inputs, 1, 2 * size, size)?;
        let candidate = build.binary(BinaryOp::Add, &candidate, &from_state)?;
        let candidate = self.activate(build, 1, &candidate)?;
        let rest = build.complement(&z)?;
        let (new, old) = (build.binary(BinaryOp::Mul, &rest, &candidate)?, build.binary(BinaryOp::Mul, &z, h)?);
        Ok(State { h: build.binary(BinaryOp::Add, &new, &old)?, c: None })
    }

    /// `c' = f c + i candidate`, `h' = o activation(c')`, gates in the order i o f c. Hochreiter and Schmidhuber 1997.
    fn lstm(&self, build: &mut Build, inputs: &Value, state: &State) -> Result<State> {
        let old = state.c.as_ref().expect("an LSTM's state has a cell");
        let product = build.by_rows(&state.h, &self.recurrence)?;
        let open = build.binary(BinaryOp::Add, inputs, &product)?;
        let gate = |build: &mut Build, at: u64| build.narrow(&open, 1, at * self.hidden, self.hidden);
        let (i, f) = (gate(build, 0)?, gate(build, 2)?);
        let i = self.peep(build, &i, 0, old)?;
        let i = self.activate(build, 0, &i)?;
        let f = match self.input_forget {
            true => build.complement(&i)?,
            false => {
                let f = self.peep(build, &f, 2, old)?;
                self.activate(build, 0, &f)?
            }
        };
        let candidate = gate(build, 3)?;
        let candidate = self.activate(build, 1, &candidate)?;
        let (kept, new) = (build.binary(BinaryOp::Mul, &f, old)?, build.binary(BinaryOp::Mul, &i, &candidate)?);
        let c = build.binary(BinaryOp::Add, &kept, &new)?;
        let o = gate(build, 1)?;
        let o = self.peep(build, &o, 1, &c)?;
        let o = self.activate(build, 0, &o)?;
        // ONNX clips what goes into an activation, the cell's included.
        let shown = self.activate(build, 2, &c)?;
        Ok(State { h: build.binary(BinaryOp::Mul, &o, &shown)?, c: Some(c) })
    }

    /// A gate that sees the cell too.
    fn peep(&self, build: &mut Build, gate: &Value, which: u64, cell: &Value) -> Result<Value> {
        let Some(peepholes) = &self.peepholes else { return Ok(gate.clone()) };
        let weights = build.narrow(peepholes, 0, which * self.hidden, self.hidden)?;
        let seen = build.binary(BinaryOp::Mul, cell, &weights)?;
        build.binary(BinaryOp::Add, gate, &seen)
    }

    fn activate(&self, build: &mut Build, which: usize, x: &Value) -> Result<Value> {
        let mut x = x.clone();
        if let Some(clip) = self.clip {
            for (outside, bound) in [(CompareOp::Lt, -clip), (CompareOp::Gt, clip)] {
                let bound = Known::scalar(x.dtype(build)?, bound).into();
                let beyond = build.compare(outside, &x, &bound)?;
                x = build.select(&beyond, &bound, &x)?;
            }
        }
        self.activations[which].apply(build, &x)
    }
}
