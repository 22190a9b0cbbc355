//! Programs of a real model, what they are fed, and what they compute.

use dcc_program::program::{ParamKind, Program};
use dcc_program::simulate::{Scalars, Simulator, Tensor};
use std::collections::BTreeMap;

pub struct Subject {
    pub name: &'static str,
    pub programs: Vec<Program>,
    parameters: Vec<(String, ParamKind, Tensor)>,
    inputs: BTreeMap<String, Tensor>,
    /// Of the programs as they are.
    pub expected: Results,
}

/// Outputs and new values of parameters and optimizer state after one step.
#[derive(Clone, Debug)]
pub struct Results(BTreeMap<String, Vec<f64>>);

impl Results {
    /// Whether all values are equal to rounding, each tensor against its largest. A function may overflow, then on both sides.
    pub fn same(&self, other: &Results) -> bool {
        let close = |a: &Vec<f64>, b: &Vec<f64>| {
            let scale = a.iter().filter(|x| x.is_finite()).fold(1e-3f64, |m, x| m.max(x.abs()));
            let equal = |(x, y): (&f64, &f64)| match x.is_finite() {
                true => (x - y).abs() <= 1e-9 * scale,
                false => !y.is_finite(),
            };
            a.len() == b.len() && a.iter().zip(b).all(equal)
        };
        self.0.len() == other.0.len() && self.0.iter().all(|(name, a)| other.0.get(name).is_some_and(|b| close(a, b)))
    }

    pub fn finite(&self) -> bool {
        self.0.values().flatten().all(|x| x.is_finite())
    }
}

/// Numbers in (-1, 1) that look random.
fn noise(seed: u64, count: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    });
    next.skip(8).take(count as usize).collect()
}

impl Subject {
    /// `classes`: integers of inputs are below it.
    pub fn new(name: &'static str, programs: Vec<Program>, classes: u64) -> Subject {
        let (parameters, inputs) = (parameters(&programs), inputs(&programs, classes));
        let mut subject = Subject { name, programs, parameters, inputs, expected: Results(BTreeMap::new()) };
        subject.expected = subject.run(&subject.programs).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(subject.expected.finite(), "{name}: {:?}", subject.expected);
        subject
    }

    /// One step of `programs`, all ranks, in f64. Errors: what the simulator finds wrong, such as ranks that wait for ever.
    pub fn run(&self, programs: &[Program]) -> Result<Results, String> {
        let mut simulator = Simulator::new(programs).map_err(|e| e.to_string())?;
        for (name, kind, value) in &self.parameters {
            simulator.set(name, kind, value).map_err(|e| e.to_string())?;
        }
        let scalars = Scalars { learning_rate: 0.1, step: 3, seed: 7 };
        let outputs = simulator.step(&self.inputs, scalars).map_err(|e| e.to_string())?;
        let mut results: BTreeMap<String, Vec<f64>> = outputs.into_iter().map(|(name, t)| (name, t.values)).collect();
        for (name, kind, _) in &self.parameters {
            let value = simulator.get(name, kind).map_err(|e| e.to_string())?;
            results.insert(format!("{name} {kind:?}"), value.values);
        }
        Ok(Results(results))
    }
}

/// Values of all parameters and of the optimizer's state, whole; variances are positive.
fn parameters(programs: &[Program]) -> Vec<(String, ParamKind, Tensor)> {
    let mut shapes: BTreeMap<(String, ParamKind), Vec<u64>> = BTreeMap::new();
    for p in programs {
        for param in &p.params {
            let mut shape = p.ty(param.buffer).shape.to_vec();
            if let Some(piece) = param.piece {
                shape[usize::from(piece.dim)] = piece.end;
            }
            let whole = shapes.entry((param.name.clone(), param.kind.clone())).or_insert_with(|| shape.clone());
            whole.iter_mut().zip(shape).for_each(|(a, b)| *a = b.max(*a));
        }
    }
    let value = |(seed, ((name, kind), shape)): (u64, ((String, ParamKind), Vec<u64>))| {
        let positive = kind == ParamKind::State("v".to_owned());
        let about = if name.contains("ln_") && kind == ParamKind::Weight { 1.0 } else { 0.0 };
        let values = noise(seed, shape.iter().product());
        let values = values.into_iter().map(|x| if positive { 0.1 + 0.05 * x } else { about + 0.3 * x }).collect();
        (name, kind, Tensor { shape, values })
    };
    (1..).zip(shapes).map(value).collect()
}

fn inputs(programs: &[Program], classes: u64) -> BTreeMap<String, Tensor> {
    let all = programs.iter().flat_map(|p| p.inputs.iter().map(|input| (input.name.clone(), p.ty(input.buffer))));
    let value = |(name, ty): (String, &dcc_program::TensorType)| {
        let values = noise(name.len() as u64 + 100, ty.elements());
        let integer = |x: f64| ((x + 1.0) / 2.0 * classes as f64).floor();
        let values = values.into_iter().map(|x| if ty.dtype.is_float() { x } else { integer(x) }).collect();
        (name, Tensor { shape: ty.shape.to_vec(), values })
    };
    all.map(value).collect()
}
