//! Masks that are no Dropout nodes: exporters write out DropPath, StochasticDepth, Dropout2d and their like as a comparison of random numbers, a
//! Bernoulli or a floor, and a product. An evaluation has the mean in their place, as those modules do.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::interp::Tensor;
use crate::ops::{Binary, BroadcastInDim, Op, Training};
use dcc_program::TensorType;
use dcc_program::kernel::BinaryOp;
use std::collections::{BTreeMap, BTreeSet};

/// Steps of a search for where a mask changes, beyond f32's bits.
const BISECTIONS: u32 = 40;
/// Nodes from a random number to a mask, constants among them, at most.
const STEPS: usize = 64;
/// Random numbers at which a mask is looked at.
const SAMPLES: u32 = 64;

/// What a node is a function of.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    Constants,
    /// Of constants and this one, element by element.
    Uniform(NodeId),
    Other,
}

/// `x · mask` as `select(training, x · mask, x)`, where elements of the mask are zero or one number, by their own random number, and the mean
/// of the mask, and of a constant factor or divisor that x or the product has, is one. Masks of another mean stay: of a masked
/// autoencoder, say. To be done before constants are moved about.
pub fn marked(graph: &Graph) -> Result<Graph> {
    let sources = sources(graph);
    let product = |id: NodeId| masked(graph, &sources, id);
    graph.map(|out, id, node, operands| {
        let masked = out.add_typed(node.op.clone(), operands, node.ty.clone());
        // An operand of what an operand was made of, unless that was marked itself.
        let of = |out: &Graph, at: usize, position: usize| {
            let is_same = out[operands[at]].op == graph[node.operands[at]].op;
            is_same.then(|| out[operands[at]].operands[position])
        };
        let whole = match (product(id), scaled(graph, id)) {
            (Some((x, mean)), _) if is_one(mean) => Some(operands[x]),
            (Some((x, mean)), _) => match scaled(graph, node.operands[x]) {
                Some((inner, factor)) if is_one(mean * factor) => of(out, x, inner),
                _ => None,
            },
            (None, Some((inner, factor))) => match product(node.operands[inner]) {
                Some((x, mean)) if is_one(mean * factor) => of(out, inner, x),
                _ => None,
            },
            (None, None) => None,
        };
        let Some(whole) = whole else { return Ok(masked) };
        let training = out.add(Training {}, &[])?;
        let training = out.add(BroadcastInDim { shape: node.ty.shape.clone(), dims: Default::default() }, &[training])?;
        out.select(training, masked, whole)
    })
}

fn is_one(x: f64) -> bool {
    (x - 1.0).abs() < 1e-6
}

/// The position of the other operand of a product with a mask, and the mask's mean.
fn masked(graph: &Graph, sources: &[Source], id: NodeId) -> Option<(usize, f64)> {
    let node = &graph[id];
    let Op::Binary(Binary { op: BinaryOp::Mul }) = node.op else { return None };
    let source = |position: usize| sources[node.operands[position].0 as usize];
    [0, 1].into_iter().find_map(|x| match (source(x), source(1 - x)) {
        (Source::Other, Source::Uniform(uniform)) => Some((x, mean(graph, node.operands[1 - x], uniform)?)),
        _ => None,
    })
}

/// The operand that a node is a constant multiple of, and the factor.
fn scaled(graph: &Graph, id: NodeId) -> Option<(usize, f64)> {
    let node = &graph[id];
    let Op::Binary(Binary { op }) = node.op else { return None };
    let [a, b] = [0, 1].map(|position| super::splat(graph, node.operands[position]));
    match (op, a, b) {
        (BinaryOp::Mul, None, Some(factor)) => Some((0, factor)),
        (BinaryOp::Mul, Some(factor), None) => Some((1, factor)),
        (BinaryOp::Div, None, Some(divisor)) => Some((0, 1.0 / divisor)),
        _ => None,
    }
}

fn sources(graph: &Graph) -> Vec<Source> {
    let mut sources: Vec<Source> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        let of_operands = || {
            node.operands.iter().map(|operand| sources[operand.0 as usize]).fold(Source::Constants, |all, one| {
                match (all, one) {
                    (all, Source::Constants) => all,
                    (Source::Constants, one) => one,
                    (Source::Uniform(a), Source::Uniform(b)) if a == b => all,
                    _ => Source::Other,
                }
            })
        };
        sources.push(match &node.op {
            Op::Const(_) => Source::Constants,
            Op::Uniform(_) => Source::Uniform(id),
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) => of_operands(),
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Slice(_) => of_operands(),
            _ => Source::Other,
        });
    }
    sources
}

/// The mean of what is zero for random numbers on one side of a threshold and one number on the other.
fn mean(graph: &Graph, mask: NodeId, uniform: NodeId) -> Option<f64> {
    let steps = steps(graph, mask, uniform)?;
    let at = |u: f64| value(graph, &steps, uniform, u);
    let seen = (0..SAMPLES).map(|i| at((f64::from(i) + 0.5) / f64::from(SAMPLES))).collect::<Option<Vec<f64>>>()?;
    let (first, last) = (seen[0], seen[seen.len() - 1]);
    let changes = seen.windows(2).filter(|pair| pair[0] != pair[1]).count();
    if changes != 1 || first * last != 0.0 {
        return None;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..BISECTIONS {
        let middle = (low + high) / 2.0;
        if at(middle)? == first { low = middle } else { high = middle }
    }
    Some(first * low + last * (1.0 - low))
}

/// The nodes from the random number to the mask, operands first. `None`: so many that it is no mask.
fn steps(graph: &Graph, mask: NodeId, uniform: NodeId) -> Option<Vec<NodeId>> {
    let (mut steps, mut open) = (BTreeSet::from([mask]), vec![mask]);
    while let Some(id) = open.pop() {
        let operands = graph[id].operands.iter().filter(|_| id != uniform);
        open.extend(operands.filter(|&&operand| steps.insert(operand)));
        if steps.len() > STEPS {
            return None;
        }
    }
    Some(steps.into_iter().collect())
}

/// What the last of `steps` is where the random number is `u`. `None`: beyond the finite numbers.
fn value(graph: &Graph, steps: &[NodeId], uniform: NodeId, u: f64) -> Option<f64> {
    let mut values: BTreeMap<NodeId, Tensor> = BTreeMap::new();
    for &id in steps {
        let node = &graph[id];
        let ty = TensorType::new(node.ty.dtype, []);
        let operands = || node.operands.iter().map(|operand| &values[operand]).collect::<Vec<&Tensor>>();
        let value = match node.op {
            _ if id == uniform => Tensor::filled(&ty, u),
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Slice(_) => operands()[0].clone(),
            _ => node.op.eval(&operands(), &ty),
        };
        values.insert(id, value);
    }
    values.last_key_value()?.1.to_f64s().first().copied().filter(|x| x.is_finite())
}
