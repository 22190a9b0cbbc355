//! Batch normalisation. Ioffe and Szegedy 2015, arXiv 1502.03167.
//!
//! A training step normalises by the statistics of its batch (of each of its groups) and moves the running ones toward them, as
//! PyTorch does, also where the export has the inference form; evaluation normalises by the running ones. Both stand in the
//! graph, chosen by `training`. A model that gives the running statistics as outputs is computed as ONNX says, in both.

use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Reduce, Shape};

use super::group_norm::{channels, per_channel};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::import::BatchNorm;
use crate::import::build::Build;
use crate::import::node::Node;
use crate::import::value::Value;
use crate::ops::{Iota, Op, Training};
use crate::train::Statistic;

pub const ONNX: &[(&str, Import)] = &[("BatchNormalization", batch_normalization)];

/// Whether the file says that a training step uses the statistics of its batch here: by the attribute, or by the call that PyTorch's
/// exporter made the node of. Exports for inference say it of none.
pub fn trains(node: &Node) -> bool {
    let attribute = node.attributes.iter().any(|attribute| attribute.name == "training_mode" && attribute.proto.i() != 0);
    node.op == "BatchNormalization" && (attribute || node.call.target() == "aten._native_batch_norm_legit_functional")
}

/// Mean and variance of each group: `[groups, 1, channels, 1, …]`, or without groups `[1, channels, 1, …]`.
struct Moments {
    mean: Value,
    variance: Value,
    /// Elements that each is taken over.
    count: u64,
}

fn batch_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = call.input(0)?.shape(build)?;
    if shape.len() < 2 {
        return Err(Error::shape(format!("BatchNormalization of {:?}, which has no channels", shape.as_slice())));
    }
    let spatial = call.node.int_or("spatial", 1)?;
    if spatial != 1 {
        return Err(attribute_value("spatial", spatial));
    }
    // What a training step does is the run's to say.
    let in_training = call.node.flag("training_mode", false)?;
    let (epsilon, momentum) = (call.node.float_or("epsilon", 1e-5)?, call.node.float_or("momentum", 0.9)?);
    let dtype = call.input(0)?.dtype(build)?;
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let x = build.cast(call.input(0)?, wide)?;
    let running = [3, 4].map(|position| call.input(position));
    let [running_mean, running_variance] = [running[0].clone()?, running[1].clone()?];
    let explicit = (1..5).any(|output| call.wants(output));
    let finish = |build: &mut Build, normal: &Value| -> Result<Value> {
        let normal = build.reshape(normal, &shape)?;
        let normal = build.cast(&normal, dtype)?;
        per_channel(build, &normal, call.input(1)?, call.input(2)?)
    };
    if explicit {
        if call.opset() >= 14 && !in_training {
            return Err(Error::attribute("running statistics as outputs, but training_mode = 0"));
        }
        let moments = moments(build, &x, 1)?;
        let normal = normalised(build, &x, &moments.mean, &moments.variance, epsilon)?;
        let y = finish(build, &normal)?;
        return explicit_outputs(build, y, &moments, [running_mean, running_variance], momentum);
    }
    let (old_mean, old_variance) = (build.cast(running_mean, wide)?, build.cast(running_variance, wide)?);
    let mut old = [channels(build, &old_mean, shape.len())?, channels(build, &old_variance, shape.len())?];
    let groups = match build.batch_norm {
        BatchNorm::Groups(groups) if !build.batch_norms_train || trains(call.node) => groups_of(build, &x, groups),
        _ => {
            let normal = normalised(build, &x, &old[0], &old[1], epsilon)?;
            return Ok(vec![finish(build, &normal)?]);
        }
    };
    let mut x = x;
    if groups > 1 {
        if !shape[0].is_multiple_of(groups) {
            let what = format!("{} samples do not divide into {groups} groups of BatchNormalization", shape[0]);
            return Err(Error::batch(what).help("--bn-groups takes a divisor of the global batch size"));
        }
        let mut split = shape.to_vec();
        split[0] /= groups;
        split.insert(0, groups);
        x = build.reshape(&x, &split)?;
        for value in &mut old {
            let mut line = value.shape(build)?;
            line.insert(0, 1);
            *value = build.reshape(value, &line)?;
        }
    }
    let moments = moments(build, &x, groups)?;
    let training: Value = build.graph.add(Training {}, &[])?.into();
    let mean = build.select(&training, &moments.mean, &old[0])?;
    let variance = build.select(&training, &moments.variance, &old[1])?;
    let normal = normalised(build, &x, &mean, &variance, epsilon)?;
    let kept = kept_variance(build, call, &moments)?;
    for (given, new) in [(running_mean, &moments.mean), (running_variance, &kept)] {
        build.statistic(given, new, groups, momentum)?;
    }
    Ok(vec![finish(build, &normal)?])
}

/// What the running variance moves to: PyTorch keeps the unbiased one, ONNX and all others that of the batch.
fn kept_variance(build: &mut Build, call: &Call, moments: &Moments) -> Result<Value> {
    if !call.classifier.is_from_torch() {
        return Ok(moments.variance.clone());
    }
    let count = moments.count as f64;
    build.binary_scalar(BinaryOp::Mul, &moments.variance, count / (count - 1.0).max(1.0))
}

/// A weight (standardised, for a convolution) is the same for all groups of samples.
fn groups_of(build: &Build, x: &Value, groups: u64) -> u64 {
    if build.has_samples(x) { groups } else { 1 }
}

fn moments(build: &mut Build, x: &Value, groups: u64) -> Result<Moments> {
    let shape = x.shape(build)?;
    let channel = if groups > 1 { 2 } else { 1 };
    let dims: Vec<usize> = (0..shape.len()).filter(|&dim| dim != channel && (groups == 1 || dim != 0)).collect();
    let count = dims.iter().map(|&dim| shape[dim]).product();
    let mean = build.mean(x, &dims, true)?;
    let centred = build.binary(BinaryOp::Sub, x, &mean)?;
    let square = build.binary(BinaryOp::Mul, &centred, &centred)?;
    Ok(Moments { mean, variance: build.mean(&square, &dims, true)?, count })
}

fn normalised(build: &mut Build, x: &Value, mean: &Value, variance: &Value, epsilon: f64) -> Result<Value> {
    let centred = build.binary(BinaryOp::Sub, x, mean)?;
    let shifted = build.binary_scalar(BinaryOp::Add, variance, epsilon)?;
    let scale = build.unary(UnaryOp::Rsqrt, &shifted)?;
    build.binary(BinaryOp::Mul, &centred, &scale)
}

/// Y, the running statistics after the batch, and (up to opset 13) those of the batch: ONNX's own, with the biased variance.
fn explicit_outputs(build: &mut Build, y: Value, moments: &Moments, running: [&Value; 2], momentum: f64) -> Result<Vec<Value>> {
    let mut results = vec![y];
    let mut of_batch = Vec::with_capacity(2);
    for (old, new) in running.into_iter().zip([&moments.mean, &moments.variance]) {
        let dtype = old.dtype(build)?;
        let new = build.reshape(new, &old.shape(build)?)?;
        let new = build.cast(&new, dtype)?;
        let kept = build.binary_scalar(BinaryOp::Mul, old, momentum)?;
        let part = build.binary_scalar(BinaryOp::Mul, &new, 1.0 - momentum)?;
        results.push(build.binary(BinaryOp::Add, &kept, &part)?);
        of_batch.push(new);
    }
    results.extend(of_batch);
    Ok(results)
}

impl Build {
    /// Makes `given`, where it is a tensor of the model, a running average of `new`, which has one value per channel and group:
    /// each group in turn moves it by `1 - momentum`.
    fn statistic(&mut self, given: &Value, new: &Value, groups: u64, momentum: f64) -> Result<()> {
        let Value::Node(id) = given else { return Ok(()) };
        let Op::Param(param) = self.graph[*id].op.clone() else { return Ok(()) };
        let mut new = new.clone();
        if groups > 1 {
            let weights = self.weights_of_groups(groups, momentum, new.dtype(self)?)?;
            let mut line = Shape::from_elem(1, new.rank(self)?);
            line[0] = groups;
            let weights = self.reshape(&weights.into(), &line)?;
            let weighted = self.binary(BinaryOp::Mul, &new, &weights)?;
            new = self.reduce(Reduce::Sum, &weighted, &[0], false)?;
        }
        let new = self.reshape(&new, &param.shape)?;
        let new = self.cast(&new, param.dtype)?;
        let new = self.node(&new)?;
        if let Some(parameter) = self.parameters.iter_mut().find(|parameter| parameter.tensor.name == param.name) {
            parameter.trained = false;
        }
        let keep = momentum.powi(i32::try_from(groups).unwrap_or(i32::MAX));
        let share = 1.0 - momentum;
        let Some(at) = self.statistics.iter().position(|(statistic, _)| statistic.name == param.name) else {
            self.statistics.push((Statistic { name: param.name, keep, share }, new));
            return Ok(());
        };
        // A module that is called again moves on from where its last call left it.
        let (before, value) = self.statistics[at].clone();
        let before_share = self.graph.scale(value, before.share * keep)?;
        let part = self.graph.scale(new, share)?;
        let both = self.graph.binary(BinaryOp::Add, before_share, part)?;
        self.statistics[at] = (Statistic { name: param.name, keep: before.keep * keep, share: 1.0 }, both);
        Ok(())
    }

    /// `momentum` to the power of how many groups follow.
    fn weights_of_groups(&mut self, groups: u64, momentum: f64, dtype: DType) -> Result<NodeId> {
        let place = self.graph.add(Iota { dtype, shape: Shape::from_slice(&[groups]), dim: 0 }, &[])?;
        let last = self.graph.splat_like((groups - 1) as f64, place)?;
        let following = self.graph.binary(BinaryOp::Sub, last, place)?;
        let momentum = self.graph.splat_like(momentum, place)?;
        self.graph.binary(BinaryOp::Pow, momentum, following)
    }
}
