//! The formulas, in core ops. `log Σ exp` is taken after subtracting a maximum without gradient: exact, and no overflow.

use super::{LABELS, Labels, Loss, LossKind, LossOptions, TARGET, batch_dims, data_input};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Input, Iota, Op, Pad, Slice, StopGradient};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce, Shape};

/// Cross-entropy of `logits` against an input of integer labels: mean over those that are not the ignored one. Against shares of
/// each class: mean over all.
pub fn cross_entropy(graph: &mut Graph, logits: NodeId, options: &LossOptions) -> Result<Loss> {
    let class_dim = class_dim(graph, logits, options)?;
    if has_shares(graph, logits, options)? {
        return against_shares(graph, logits, class_dim, options);
    }
    let mut shape = graph.ty(logits).shape.clone();
    shape.remove(class_dim);
    let batch_dim = sample_dim(graph, logits, Some(class_dim)).map(|b| b - u8::from(usize::from(b) > class_dim));
    let dims = shape.to_vec();
    let input = Input { name: LABELS.to_owned(), dtype: DType::I64, shape, batch_dim };
    let labels = data_input(graph, input)?;
    let ignored = graph.splat_like(options.ignore_index as f64, labels)?;
    let valid = graph.compare(CompareOp::Ne, labels, ignored)?;
    let entropy = Entropy::build(graph, logits, labels, class_dim, options.label_smoothing)?;
    let classes = graph.ty(logits).shape[class_dim];
    let or = match (&options.labels, options.class_dim) {
        (Labels::Given(given), None) => other_dim(&graph.ty(logits).shape, Some(given), class_dim),
        // Of images that are not as ONNX has them.
        (Labels::Unknown, None) if class_dim == 1 => other_dim(&graph.ty(logits).shape, None, class_dim),
        _ => None,
    };
    let report = format!(", classes on dim {class_dim}{}, labels i64{dims:?}, ignoring {}", or_dim(or), options.ignore_index);
    let loss = entropy.mean_of_valid(graph, valid, LossKind::CrossEntropy, report)?;
    Ok(Loss { classes: Some((LABELS.to_owned(), classes)), ..loss })
}

fn or_dim(other: Option<usize>) -> String {
    other.map_or_else(String::new, |other| format!(" (or {other}: --class-dim {other})"))
}

/// Whether labels say how much of each class a sample is: they do if they have the output's shape. Errors: they are to, and do not.
fn has_shares(graph: &Graph, logits: NodeId, options: &LossOptions) -> Result<bool> {
    let shape = &graph.ty(logits).shape;
    match &options.labels {
        Labels::Given(given) if given == shape => Ok(true),
        Labels::Given(given) if options.soft_labels => {
            let (given, shape) = (given.as_slice(), shape.as_slice());
            let what = format!("labels of shape {given:?} are not shares of the classes of an output of shape {shape:?}");
            Err(Error::shape(what).help("soft labels have the output's shape; drop --soft-labels for integer ones"))
        }
        _ => Ok(options.soft_labels),
    }
}

/// Cross-entropy of `logits` against an input of each class's share: `-Σ share log softmax`, the mean over all samples and positions.
fn against_shares(graph: &mut Graph, logits: NodeId, class_dim: usize, options: &LossOptions) -> Result<Loss> {
    if options.ignore_index != LossOptions::default().ignore_index {
        let what = "--ignore-index does not belong to labels that are shares of classes";
        return Err(Error::usage(what).help("drop it, or use integer labels"));
    }
    let ty = graph.ty(logits).clone();
    if ty.shape[class_dim] < 2 {
        let what = format!("labels of shape {:?} are shares of one class: there is nothing to learn", ty.shape.as_slice());
        return Err(Error::shape(what).help("name the array `target` for --loss mse, l1 or bce"));
    }
    let batch_dim = sample_dim(graph, logits, Some(class_dim));
    let input = Input { name: LABELS.to_owned(), dtype: ty.dtype, shape: ty.shape.clone(), batch_dim };
    let shares = data_input(graph, input)?;
    let entropy = Entropy::of_shares(graph, logits, shares, class_dim, options.label_smoothing)?;
    let count = graph.ty(entropy.each).elements();
    let or = options.class_dim.is_none().then(|| other_dim(&ty.shape, None, class_dim)).flatten();
    let (or, dtype) = (or_dim(or), ty.dtype.name());
    let report = format!(", classes on dim {class_dim}{or}, labels {dtype}{:?}: shares of classes", ty.shape.as_slice());
    entropy.mean(graph, None, count, LossKind::CrossEntropy, report)
}

/// Cross-entropy of `logits[b, t]` against the token input at `[b, t + 1]`. The last position has no label.
pub fn next_token(graph: &mut Graph, logits: NodeId, options: &LossOptions) -> Result<Loss> {
    let ty = graph.ty(logits).clone();
    let (name, tokens) = token_input(graph, logits)?;
    let shape = graph.ty(tokens).shape.clone();
    let last = shape.len() - 1;
    if shape[last] < 2 {
        let what = format!("input {name} of shape {:?} has no next token to predict", shape.as_slice());
        return Err(Error::shape(what).help("sequences of at least two tokens, or another --loss"));
    }
    let labels = shifted(graph, tokens, last)?;
    let labels = graph.cast(labels, DType::I64)?;
    let position = graph.add(Iota { dtype: DType::I64, shape: shape.clone(), dim: last as u8 }, &[])?;
    let end = graph.splat_like((shape[last] - 1) as f64, position)?;
    let mut valid = graph.compare(CompareOp::Lt, position, end)?;
    // A negative index is never a token, so that the number of labels is known while compiling.
    let known = options.ignore_index < 0;
    if !known {
        let ignored = graph.splat_like(options.ignore_index as f64, labels)?;
        let kept = graph.compare(CompareOp::Ne, labels, ignored)?;
        valid = graph.binary(BinaryOp::And, valid, kept)?;
    }
    let entropy = Entropy::build(graph, logits, labels, ty.rank() - 1, options.label_smoothing)?;
    let report = format!(", labels are input {name} shifted by one");
    let loss = if known {
        let count = shape[..last].iter().product::<u64>() * (shape[last] - 1);
        entropy.mean(graph, Some(valid), count, LossKind::NextToken, report)?
    } else {
        entropy.mean_of_valid(graph, valid, LossKind::NextToken, report)?
    };
    Ok(Loss { classes: Some((name, ty.shape[ty.rank() - 1])), ..loss })
}

/// `x[…, 1:]` with a zero at the end.
fn shifted(graph: &mut Graph, x: NodeId, dim: usize) -> Result<NodeId> {
    let shape = graph.ty(x).shape.clone();
    let zero = Shape::from_elem(0, shape.len());
    let mut one = zero.clone();
    one[dim] = 1;
    let stride = Shape::from_elem(1, shape.len());
    let rest = graph.add(Slice { start: one.clone(), limit: shape, stride }, &[x])?;
    graph.add(Pad { low: zero.clone(), high: one, interior: zero }, &[rest])
}

/// Per label: its cross-entropy, and whether the largest logit is its.
struct Entropy {
    each: NodeId,
    right: NodeId,
}

/// Logits less the largest of their classes, which has no gradient.
struct Scores {
    /// That largest one, for each class.
    max: NodeId,
    z: NodeId,
    /// `log Σ exp z`.
    lse: NodeId,
}

impl Scores {
    fn of(graph: &mut Graph, logits: NodeId, class_dim: usize) -> Result<Scores> {
        let ty = graph.ty(logits).clone();
        let max = graph.reduce(Reduce::Max, logits, &[class_dim])?;
        let max = graph.add(StopGradient {}, &[max])?;
        let max = graph.broadcast(max, &ty.shape, &all_but(ty.rank(), class_dim))?;
        let z = graph.binary(BinaryOp::Sub, logits, max)?;
        let exp = graph.unary(UnaryOp::Exp, z)?;
        let sum = graph.sum(exp, &[class_dim])?;
        let lse = graph.unary(UnaryOp::Log, sum)?;
        Ok(Scores { max, z, lse })
    }

    /// `each`, of which all classes share `smoothing` alike.
    fn smoothed(&self, graph: &mut Graph, each: NodeId, smoothing: f64, class_dim: usize) -> Result<NodeId> {
        if smoothing == 0.0 {
            return Ok(each);
        }
        let total = graph.sum(self.z, &[class_dim])?;
        let mean = graph.scale(total, 1.0 / graph.ty(self.z).shape[class_dim] as f64)?;
        let even = graph.binary(BinaryOp::Sub, self.lse, mean)?;
        let even = graph.scale(even, smoothing)?;
        let sharp = graph.scale(each, 1.0 - smoothing)?;
        graph.binary(BinaryOp::Add, sharp, even)
    }
}

impl Entropy {
    fn build(graph: &mut Graph, logits: NodeId, labels: NodeId, class_dim: usize, smoothing: f64) -> Result<Entropy> {
        let ty = graph.ty(logits).clone();
        let scores = Scores::of(graph, logits, class_dim)?;
        let class = graph.add(Iota { dtype: DType::I64, shape: ty.shape.clone(), dim: class_dim as u8 }, &[])?;
        let labels_up = graph.broadcast(labels, &ty.shape, &all_but(ty.rank(), class_dim))?;
        let hit = graph.compare(CompareOp::Eq, class, labels_up)?;
        let zero = graph.splat_like(0.0, scores.z)?;
        let picked = graph.select(hit, scores.z, zero)?;
        let target = graph.sum(picked, &[class_dim])?;
        let each = graph.binary(BinaryOp::Sub, scores.lse, target)?;
        let each = scores.smoothed(graph, each, smoothing, class_dim)?;
        let best = first_largest(graph, logits, scores.max, class, class_dim)?;
        let right = graph.compare(CompareOp::Eq, best, labels)?;
        Ok(Entropy { each, right })
    }

    /// Against `shares` of the shape of `logits`. They need not add up to one; what is smoothed is taken from each.
    fn of_shares(graph: &mut Graph, logits: NodeId, shares: NodeId, class_dim: usize, smoothing: f64) -> Result<Entropy> {
        let ty = graph.ty(logits).clone();
        let scores = Scores::of(graph, logits, class_dim)?;
        let all = graph.sum(shares, &[class_dim])?;
        let most = graph.binary(BinaryOp::Mul, all, scores.lse)?;
        let products = graph.binary(BinaryOp::Mul, shares, scores.z)?;
        let target = graph.sum(products, &[class_dim])?;
        let each = graph.binary(BinaryOp::Sub, most, target)?;
        let each = scores.smoothed(graph, each, smoothing, class_dim)?;
        let class = graph.add(Iota { dtype: DType::I64, shape: ty.shape.clone(), dim: class_dim as u8 }, &[])?;
        let best = first_largest(graph, logits, scores.max, class, class_dim)?;
        let largest = graph.reduce(Reduce::Max, shares, &[class_dim])?;
        let largest = graph.broadcast(largest, &ty.shape, &all_but(ty.rank(), class_dim))?;
        let due = first_largest(graph, shares, largest, class, class_dim)?;
        let right = graph.compare(CompareOp::Eq, best, due)?;
        Ok(Entropy { each, right })
    }

    /// Means over the `valid` ones, which the step counts.
    fn mean_of_valid(self, graph: &mut Graph, valid: NodeId, kind: LossKind, report: String) -> Result<Loss> {
        let dtype = graph.ty(self.each).dtype;
        let (total, right) = self.sums(graph, Some(valid))?;
        let ones = graph.cast(valid, dtype)?;
        let dims: Vec<usize> = (0..graph.ty(valid).rank()).collect();
        let count = graph.sum(ones, &dims)?;
        let value = graph.binary(BinaryOp::Div, total, count)?;
        let accuracy = graph.binary(BinaryOp::Div, right, count)?;
        Ok(Loss { kind, value, count, accuracy: Some(accuracy), classes: None, report })
    }

    /// Means over the `valid` ones, or all, of which there are `count`.
    fn mean(self, graph: &mut Graph, valid: Option<NodeId>, count: u64, kind: LossKind, report: String) -> Result<Loss> {
        let dtype = graph.ty(self.each).dtype;
        let (total, right) = self.sums(graph, valid)?;
        let value = graph.scale(total, 1.0 / count as f64)?;
        let accuracy = graph.scale(right, 1.0 / count as f64)?;
        let count = graph.splat(dtype, count as f64, &[])?;
        Ok(Loss { kind, value, count, accuracy: Some(accuracy), classes: None, report })
    }

    /// Of all that count: the cross-entropies, and how many are right.
    fn sums(&self, graph: &mut Graph, valid: Option<NodeId>) -> Result<(NodeId, NodeId)> {
        let dtype = graph.ty(self.each).dtype;
        let dims: Vec<usize> = (0..graph.ty(self.each).rank()).collect();
        let right = match valid {
            Some(valid) => graph.binary(BinaryOp::And, self.right, valid)?,
            None => self.right,
        };
        let right = graph.cast(right, dtype)?;
        let right = graph.sum(right, &dims)?;
        let each = match valid {
            Some(valid) => {
                let zero = graph.splat_like(0.0, self.each)?;
                graph.select(valid, self.each, zero)?
            }
            None => self.each,
        };
        Ok((graph.sum(each, &dims)?, right))
    }
}

fn all_but(rank: usize, dim: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != dim).collect()
}

/// The first class whose `x` is the largest, `max`, as argmax has it. `class` counts them.
fn first_largest(graph: &mut Graph, x: NodeId, max: NodeId, class: NodeId, class_dim: usize) -> Result<NodeId> {
    let largest = graph.compare(CompareOp::Ge, x, max)?;
    let none = graph.splat_like(graph.ty(x).shape[class_dim] as f64, class)?;
    let first = graph.select(largest, class, none)?;
    graph.reduce(Reduce::Min, first, &[class_dim])
}

/// Mean of the elementwise loss between `output` and an input `target` of the same shape.
pub fn against_target(graph: &mut Graph, kind: LossKind, output: NodeId) -> Result<Loss> {
    let ty = graph.ty(output).clone();
    let batch_dim = sample_dim(graph, output, None);
    let input = Input { name: TARGET.to_owned(), dtype: ty.dtype, shape: ty.shape.clone(), batch_dim };
    let target = data_input(graph, input)?;
    let each = match kind {
        LossKind::Bce => binary_cross_entropy(graph, output, target)?,
        _ => {
            let difference = graph.binary(BinaryOp::Sub, output, target)?;
            match kind {
                LossKind::L1 => graph.unary(UnaryOp::Abs, difference)?,
                _ => graph.binary(BinaryOp::Mul, difference, difference)?,
            }
        }
    };
    let report = format!(", target {}{:?}", ty.dtype.name(), ty.shape.as_slice());
    mean_of_all(graph, each, kind, report)
}

/// `log(1 + exp x) - x t`, as `m + log(exp(-m) + exp(x - m)) - x t` with `m = max(x, 0)` without gradient: the gradient is
/// `logistic x - t` everywhere.
fn binary_cross_entropy(graph: &mut Graph, x: NodeId, target: NodeId) -> Result<NodeId> {
    let max = graph.binary_scalar(BinaryOp::Max, x, 0.0)?;
    let max = graph.add(StopGradient {}, &[max])?;
    let minus = graph.unary(UnaryOp::Neg, max)?;
    let one = graph.unary(UnaryOp::Exp, minus)?;
    let shifted = graph.binary(BinaryOp::Sub, x, max)?;
    let other = graph.unary(UnaryOp::Exp, shifted)?;
    let sum = graph.binary(BinaryOp::Add, one, other)?;
    let log = graph.unary(UnaryOp::Log, sum)?;
    let softplus = graph.binary(BinaryOp::Add, max, log)?;
    let product = graph.binary(BinaryOp::Mul, x, target)?;
    graph.binary(BinaryOp::Sub, softplus, product)
}

/// The output itself, its mean where it has dims.
pub fn mean_output(graph: &mut Graph, output: NodeId) -> Result<Loss> {
    mean_of_all(graph, output, LossKind::Output, String::new())
}

fn mean_of_all(graph: &mut Graph, each: NodeId, kind: LossKind, report: String) -> Result<Loss> {
    let ty = graph.ty(each).clone();
    let dims: Vec<usize> = (0..ty.rank()).collect();
    let total = graph.sum(each, &dims)?;
    let n = ty.elements() as f64;
    let value = if dims.is_empty() { total } else { graph.scale(total, 1.0 / n)? };
    let count = graph.splat(ty.dtype, n, &[])?;
    Ok(Loss { kind, value, count, accuracy: None, classes: None, report })
}

fn without(shape: &Shape, dim: usize) -> Shape {
    let mut rest = shape.clone();
    rest.remove(dim);
    rest
}

/// Dims that may count classes, the usual one first: dim 1 of images, as ONNX and PyTorch have them, else the last.
fn usual_dims(shape: &Shape) -> [usize; 2] {
    let last = shape.len() - 1;
    if shape.len() > 3 { [1, last] } else { [last, 1] }
}

/// Another dim than `taken` without which `shape` is that of the labels, if they are known.
fn other_dim(shape: &Shape, labels: Option<&Shape>, taken: usize) -> Option<usize> {
    let fits = |dim: usize| labels.is_none_or(|labels| *labels == without(shape, dim));
    usual_dims(shape).into_iter().find(|&dim| dim > 0 && dim != taken && fits(dim))
}

/// The usual dim if the labels have the output's shape without it or are not known, else the other. Errors: labels that fit neither.
fn class_dim(graph: &Graph, logits: NodeId, options: &LossOptions) -> Result<usize> {
    let shape = graph.ty(logits).shape.clone();
    if shape.len() < 2 && options.class_dim.is_none() {
        return Err(Error::shape(format!("cross-entropy of shape {:?} has no dim of classes", shape.as_slice())));
    }
    if let Some(dim) = options.class_dim {
        if dim >= shape.len() {
            return Err(Error::usage(format!("--class-dim {dim} of an output of {} dims", shape.len())));
        }
        if batch_dims(graph)[logits.0 as usize].iter().eq([&(dim as u8)]) {
            let what = format!("--class-dim {dim} is the dim of the samples of an output of shape {:?}", shape.as_slice());
            return Err(Error::usage(what).help("name the dim along which each sample has its scores"));
        }
        return Ok(dim);
    }
    let dims = usual_dims(&shape);
    let Labels::Given(given) = &options.labels else { return Ok(dims[0]) };
    if *given == shape {
        return Ok(dims[0]);
    }
    dims.into_iter().find(|&dim| *given == without(&shape, dim)).ok_or_else(|| {
        let (given, shape) = (given.as_slice(), shape.as_slice());
        let what = format!("labels of shape {given:?} fit no dim of classes of an output of shape {shape:?}");
        let help =
            "labels have the output's shape without one dim, which --class-dim D names, or with it where they are shares";
        Error::shape(what).help(help)
    })
}

/// The dim of `output`, not that of the classes, that counts samples: of several the first. Where the trace breaks off, the inputs'
/// own batch dim if the size is the same.
fn sample_dim(graph: &Graph, output: NodeId, classes: Option<usize>) -> Option<u8> {
    let traced = &batch_dims(graph)[output.0 as usize];
    let shape = &graph.ty(output).shape;
    let of_inputs = || {
        graph.nodes.iter().find_map(|n| match &n.op {
            Op::Input(i) => i.batch_dim.filter(|&b| shape.get(usize::from(b)) == i.shape.get(usize::from(b))),
            _ => None,
        })
    };
    let dims = if traced.is_empty() { of_inputs().into_iter().collect() } else { traced.clone() };
    dims.into_iter().find(|&dim| Some(usize::from(dim)) != classes)
}

/// The integer input that the model looks tokens up by: of the shape of `logits` without its classes. Of several, the one that
/// reaches a gather as indices into as many rows as there are classes.
fn token_input(graph: &Graph, logits: NodeId) -> Result<(String, NodeId)> {
    let shape = &graph.ty(logits).shape;
    let (&classes, rest) = shape.split_last().ok_or_else(|| Error::shape("next-token of a scalar output"))?;
    let fits = |input: &Input| !input.dtype.is_float() && input.dtype != DType::Bool && input.shape.as_slice() == rest;
    let candidates: Vec<(String, NodeId)> = graph
        .ids()
        .filter_map(|id| match &graph[id].op {
            Op::Input(input) if fits(input) && !rest.is_empty() => Some((input.name.clone(), id)),
            _ => None,
        })
        .collect();
    let looked_up: Vec<_> = candidates.iter().filter(|(_, id)| indexes_rows(graph, *id, classes)).cloned().collect();
    match (candidates.as_slice(), looked_up.as_slice()) {
        ([one], _) | (_, [one]) => Ok(one.clone()),
        ([], _) => Err(Error::shape(format!("next-token finds no integer input of shape {rest:?}"))),
        _ => {
            let names: Vec<&str> = candidates.iter().map(|(n, _)| n.as_str()).collect();
            Err(Error::unbound(format!("next-token cannot tell which of {names:?} are the tokens")).help("give labels"))
        }
    }
}

/// Whether `input`, possibly cast or reshaped, indexes a table of `rows`.
fn indexes_rows(graph: &Graph, input: NodeId, rows: u64) -> bool {
    let mut same = vec![false; graph.nodes.len()];
    same[input.0 as usize] = true;
    for id in graph.ids() {
        let node = &graph[id];
        let from = |i: usize| node.operands.get(i).is_some_and(|o| same[o.0 as usize]);
        match &node.op {
            Op::Cast(_) | Op::Reshape(_) | Op::Select(_) if (0..node.operands.len()).any(from) => same[id.0 as usize] = true,
            Op::Binary(_) if node.ty.dtype != DType::Bool && (from(0) || from(1)) => same[id.0 as usize] = true,
            Op::Gather(g) if from(1) => {
                let table = &graph.ty(node.operands[0]).shape;
                let indexed = g.indexed();
                let dim = g.spec.operands[0].iter().position(|d| d.contains(&indexed));
                if dim.is_some_and(|d| table[d] == rows) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}
