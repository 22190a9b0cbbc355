//! Random models: a chain of layers as exporters write them, with branches, residuals, tied and fused weights, dims that divide by
//! nothing. Every op treats samples alike, so that a batch may be split.

use crate::onnx_model::{Dice, external, int_tensor, node, opset, size, tensor, value, with_int, with_ints};
use dcc::import::proto::tensor_proto::DataType;
use dcc::import::proto::type_proto::Value;
use dcc::import::proto::{GraphProto, ModelProto, NodeProto, TensorProto};

/// A model, and what it is trained on.
pub struct Subject {
    pub model: ModelProto,
    /// Shape of the output, batch included.
    pub output: Vec<i64>,
    /// Whether the labels are classes of the last dim, not a target of the output's shape.
    pub classes: bool,
    pub has: Has,
}

/// What can be shared beside samples and widths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Has {
    /// Dims of a sample beside its last.
    pub positions: bool,
    pub attention: bool,
    pub experts: bool,
}

type Shape = Vec<i64>;

struct Builder<'a> {
    dice: &'a mut Dice,
    nodes: Vec<NodeProto>,
    tensors: Vec<TensorProto>,
    /// Each with its dims; the last is where the chain is.
    values: Vec<(String, Shape)>,
    weights: Vec<(String, Shape)>,
    names: usize,
    has: Has,
    /// Experts and causal masks too.
    wide: bool,
}

const WIDTHS: [i64; 7] = [2, 3, 4, 5, 6, 8, 12];

/// A model of a batch of so many samples; `wide`: of layers that seeds of old do not know.
pub fn random(dice: &mut Dice, batch: i64, wide: bool) -> Subject {
    let (nodes, tensors, values, weights) = Default::default();
    let mut builder = Builder { dice, nodes, tensors, values, weights, names: 0, has: Has::default(), wide };
    let input = builder.begin(batch);
    builder.has.positions = builder.here().1.len() > 2;
    let layers = 2 + builder.dice.below(6);
    for _ in 0..layers {
        builder.layer();
    }
    // A model needs a weight.
    builder.linear();
    builder.end(input)
}

impl Builder<'_> {
    fn name(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}{}", self.names)
    }

    fn here(&self) -> (String, Shape) {
        self.values.last().expect("there is an input").clone()
    }

    /// The result of a node, which has `shape`.
    fn push(&mut self, op: &str, inputs: &[&str], shape: Shape, with: impl FnOnce(NodeProto) -> NodeProto) -> String {
        let name = self.name("v");
        let mut made = with(node(op, inputs, &[&name]));
        made.name = Some(format!("/{name}/{op}"));
        self.nodes.push(made);
        self.values.push((name.clone(), shape));
        name
    }

    fn plain(&mut self, op: &str, inputs: &[&str], shape: Shape) -> String {
        self.push(op, inputs, shape, |node| node)
    }

    /// A weight of that shape: a new one, or now and then one that is there.
    fn weight(&mut self, shape: &[i64], kind: &str) -> String {
        let same: Vec<String> =
            self.weights.iter().filter(|(n, s)| s == shape && n.starts_with(kind)).map(|w| w.0.clone()).collect();
        if !same.is_empty() && self.dice.once_in(3) {
            let at = self.dice.below(same.len());
            return same[at].clone();
        }
        let name = self.name(kind);
        self.tensors.push(external(&name, shape, "absent.bin"));
        self.weights.push((name.clone(), shape.to_vec()));
        name
    }

    fn ints(&mut self, values: &[i64]) -> String {
        let name = self.name("c");
        self.tensors.push(int_tensor(&name, &[values.len() as i64], values));
        name
    }

    /// The input, and what the first layer reads of it.
    fn begin(&mut self, batch: i64) -> dcc::import::proto::ValueInfoProto {
        let dims = |shape: &[i64]| shape.iter().map(|&n| size(n)).collect::<Vec<_>>();
        let width = self.dice.of(&WIDTHS);
        let length = self.dice.of(&[3, 4, 6, 7]);
        match self.dice.below(4) {
            0 => {
                let mut tokens = value("x", &dims(&[batch, length]));
                if let Some(Value::TensorType(tensor)) = tokens.r#type.as_mut().and_then(|ty| ty.value.as_mut()) {
                    tensor.elem_type = Some(DataType::Int64.into());
                }
                let rows = self.dice.of(&[5, 8, 11]);
                let table = self.weight(&[rows, width], "table");
                self.plain("Gather", &[&table, "x"], vec![batch, length, width]);
                tokens
            }
            1 => {
                let side = self.dice.of(&[4, 5, 6]);
                self.values.push(("x".to_owned(), vec![batch, width, side, side]));
                value("x", &dims(&[batch, width, side, side]))
            }
            2 => {
                self.values.push(("x".to_owned(), vec![batch, width]));
                value("x", &dims(&[batch, width]))
            }
            _ => {
                self.values.push(("x".to_owned(), vec![batch, length, width]));
                value("x", &dims(&[batch, length, width]))
            }
        }
    }

    fn layer(&mut self) {
        let rank = self.here().1.len();
        match self.dice.below(if self.wide { 20 } else { 16 }) {
            0..=3 => self.linear(),
            4 | 5 => self.activation(),
            6 => self.residual(),
            7 => self.norm(),
            8 => self.softmax(),
            9 if rank > 2 => self.transposed(),
            10 if rank > 2 => self.merged(),
            11 => self.cut(),
            12 => self.split(),
            13 if rank > 2 => self.reduced(),
            14 | 16 if rank == 3 => self.attention(),
            17.. if rank == 3 => self.experts(),
            15 if rank == 4 => self.convolution(),
            _ => self.gain(),
        }
    }

    fn linear(&mut self) {
        let (x, mut shape) = self.here();
        let width = self.dice.of(&WIDTHS);
        let last = shape.len() - 1;
        let from = std::mem::replace(&mut shape[last], width);
        if shape.len() == 2 && self.dice.once_in(2) {
            let (w, b) = (self.weight(&[width, from], "w"), self.weight(&[width], "b"));
            self.push("Gemm", &[&x, &w, &b], shape, |node| with_int(node, "transB", 1));
            return;
        }
        let w = self.weight(&[from, width], "w");
        let y = self.plain("MatMul", &[&x, &w], shape.clone());
        if self.dice.once_in(2) {
            let b = self.weight(&[width], "b");
            self.plain("Add", &[&y, &b], shape);
        }
    }

    fn activation(&mut self) {
        let (x, shape) = self.here();
        let op = self.dice.of(&["Relu", "Tanh", "Sigmoid", "Gelu", "Softplus", "Erf"]);
        self.plain(op, &[&x], shape);
    }

    /// With an earlier value of the same shape, or itself.
    fn residual(&mut self) {
        let (x, shape) = self.here();
        let alike: Vec<String> = self.values.iter().filter(|(_, s)| *s == shape).map(|v| v.0.clone()).collect();
        let at = self.dice.below(alike.len());
        let op = self.dice.of(&["Add", "Add", "Sub", "Mul"]);
        self.plain(op, &[&x, &alike[at]], shape);
    }

    fn norm(&mut self) {
        let (x, shape) = self.here();
        let width = *shape.last().expect("a dim");
        let (gain, shift) = (self.weight(&[width], "gain"), self.weight(&[width], "b"));
        self.push("LayerNormalization", &[&x, &gain, &shift], shape, |node| with_int(node, "axis", -1));
    }

    fn softmax(&mut self) {
        let (x, shape) = self.here();
        let axis = 1 + self.dice.below(shape.len() - 1);
        self.push("Softmax", &[&x], shape, |node| with_int(node, "axis", axis as i64));
    }

    fn transposed(&mut self) {
        let (x, shape) = self.here();
        let mut perm: Vec<i64> = (0..shape.len() as i64).collect();
        let (a, b) = (1 + self.dice.below(shape.len() - 1), 1 + self.dice.below(shape.len() - 1));
        perm.swap(a, b);
        let to = perm.iter().map(|&d| shape[d as usize]).collect();
        self.push("Transpose", &[&x], to, |node| with_ints(node, "perm", &perm));
    }

    /// Two neighbouring dims as one, and perhaps apart again otherwise.
    fn merged(&mut self) {
        let (x, mut shape) = self.here();
        let at = 1 + self.dice.below(shape.len() - 2);
        let size = shape.remove(at) * shape[at];
        shape[at] = size;
        let parts: Vec<i64> = (2..size).filter(|n| size % n == 0).collect();
        if !parts.is_empty() && self.dice.once_in(2) {
            let part = self.dice.of(&parts);
            shape[at] = size / part;
            shape.insert(at, part);
        }
        let to = self.ints(&shape);
        self.plain("Reshape", &[&x, &to], shape);
    }

    /// A slice along a dim.
    fn cut(&mut self) {
        let (x, mut shape) = self.here();
        let axis = 1 + self.dice.below(shape.len() - 1);
        if shape[axis] < 3 {
            return self.gain();
        }
        let start = self.dice.below(2) as i64;
        let end = shape[axis] - self.dice.below(2) as i64;
        shape[axis] = end - start;
        let (starts, ends, axes) = (self.ints(&[start]), self.ints(&[end]), self.ints(&[axis as i64]));
        self.plain("Slice", &[&x, &starts, &ends, &axes], shape);
    }

    /// A product with a fused weight, in two parts: multiplied (a gate) or put together in the other order.
    fn split(&mut self) {
        let (x, mut shape) = self.here();
        let last = shape.len() - 1;
        let (width, from) = (self.dice.of(&WIDTHS), shape[last]);
        let fused = self.weight(&[from, 2 * width], "w");
        shape[last] = 2 * width;
        let y = self.plain("MatMul", &[&x, &fused], shape.clone());
        let sizes = self.ints(&[width, width]);
        let (a, b) = (self.name("v"), self.name("v"));
        self.nodes.push(with_int(node("Split", &[&y, &sizes], &[&a, &b]), "axis", last as i64));
        shape[last] = width;
        if self.dice.once_in(3) {
            shape[last] = 2 * width;
            self.push("Concat", &[&b, &a], shape, |node| with_int(node, "axis", last as i64));
            return;
        }
        let gate = self.plain("Sigmoid", &[&a], shape.clone());
        self.plain("Mul", &[&gate, &b], shape);
    }

    fn reduced(&mut self) {
        let (x, mut shape) = self.here();
        let axis = 1 + self.dice.below(shape.len() - 1);
        let op = self.dice.of(&["ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"]);
        let keep = self.dice.below(2) as i64;
        let axes = self.ints(&[axis as i64]);
        match keep {
            1 => shape[axis] = 1,
            _ => drop(shape.remove(axis)),
        }
        self.push(op, &[&x, &axes], shape, |node| with_int(node, "keepdims", keep));
    }

    /// Heads as exporters write them.
    fn attention(&mut self) {
        self.has.attention = true;
        let (x, shape) = self.here();
        let (batch, length, from) = (shape[0], shape[1], shape[2]);
        let (heads, size) = (self.dice.of(&[1, 2, 3, 4]), self.dice.of(&[2, 3, 4]));
        let width = heads * size;
        let split = self.ints(&[batch, length, heads, size]);
        let mut parts = Vec::new();
        for perm in [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]] {
            let w = self.weight(&[from, width], "w");
            let y = self.plain("MatMul", &[&x, &w], vec![batch, length, width]);
            let y = self.plain("Reshape", &[&y, &split], vec![batch, length, heads, size]);
            let full = [batch, length, heads, size];
            let to = perm.iter().map(|&d: &i64| full[d as usize]).collect();
            parts.push(self.push("Transpose", &[&y], to, |node| with_ints(node, "perm", &perm)));
        }
        let scores = vec![batch, heads, length, length];
        let mut s = self.plain("MatMul", &[&parts[0], &parts[1]], scores.clone());
        if self.wide && self.dice.once_in(2) {
            let above = |i: i64| if i % length > i / length { -1e4f32 } else { 0.0 };
            let bytes: Vec<u8> = (0..length * length).flat_map(|i| above(i).to_le_bytes()).collect();
            let name = self.name("c");
            self.tensors.push(tensor(&name, &[length, length], &bytes));
            s = self.plain("Add", &[&s, &name], scores.clone());
        }
        let s = self.push("Softmax", &[&s], scores, |node| with_int(node, "axis", -1));
        let y = self.plain("MatMul", &[&s, &parts[2]], vec![batch, heads, length, size]);
        let y = self.push("Transpose", &[&y], vec![batch, length, heads, size], |node| with_ints(node, "perm", &[0, 2, 1, 3]));
        let joined = self.ints(&[batch, length, width]);
        let y = self.plain("Reshape", &[&y, &joined], vec![batch, length, width]);
        let w = self.weight(&[width, from], "w");
        let y = self.plain("MatMul", &[&y, &w], shape.clone());
        self.plain("Add", &[&x, &y], shape);
    }

    /// Experts that all compute all positions, weighed by a router.
    fn experts(&mut self) {
        self.has.experts = true;
        let (x, shape) = self.here();
        let (batch, length, from) = (shape[0], shape[1], shape[2]);
        let (experts, width) = (self.dice.of(&[2, 3, 4]), self.dice.of(&WIDTHS));
        let all = vec![batch, experts, length, width];
        let axes = self.ints(&[1]);
        let each = self.plain("Unsqueeze", &[&x, &axes], vec![batch, 1, length, from]);
        let up = self.weight(&[experts, from, width], "stack");
        let y = self.plain("MatMul", &[&each, &up], all.clone());
        let y = self.plain("Tanh", &[&y], all);
        let down = self.weight(&[experts, width, from], "stack");
        let all = vec![batch, experts, length, from];
        let y = self.plain("MatMul", &[&y, &down], all.clone());
        let router = self.weight(&[from, experts], "router");
        let scores = vec![batch, length, experts];
        let s = self.plain("MatMul", &[&x, &router], scores.clone());
        let s = self.push("Softmax", &[&s], scores, |node| with_int(node, "axis", -1));
        let turned = vec![batch, experts, length];
        let s = self.push("Transpose", &[&s], turned, |node| with_ints(node, "perm", &[0, 2, 1]));
        let last = self.ints(&[3]);
        let s = self.plain("Unsqueeze", &[&s, &last], vec![batch, experts, length, 1]);
        let y = self.plain("Mul", &[&y, &s], all);
        self.push("ReduceSum", &[&y, &axes], shape, |node| with_int(node, "keepdims", 0));
    }

    fn convolution(&mut self) {
        let (x, mut shape) = self.here();
        let kernel = self.dice.of(&[1, 2, 3]).min(shape[2]).min(shape[3]);
        let depthwise = self.dice.once_in(3);
        let group = if depthwise { shape[1] } else { 1 };
        let to = if depthwise { shape[1] } else { self.dice.of(&WIDTHS) };
        let stride = self.dice.of(&[1, 1, 2]);
        let pad = if kernel == 3 { self.dice.below(2) as i64 } else { 0 };
        let w = self.weight(&[to, shape[1] / group, kernel, kernel], "kernel");
        shape[1] = to;
        for side in &mut shape[2..] {
            *side = (*side + 2 * pad - kernel) / stride + 1;
        }
        self.push("Conv", &[&x, &w], shape, |node| {
            let node = with_ints(with_ints(node, "strides", &[stride; 2]), "pads", &[pad; 4]);
            with_int(node, "group", group)
        });
    }

    /// A weight of the last dims, broadcast.
    fn gain(&mut self) {
        let (x, shape) = self.here();
        let from = 1 + self.dice.below(shape.len() - 1);
        let kind = self.dice.of(&["gain", "b"]);
        let w = self.weight(&shape[from..], kind);
        self.plain(if kind == "b" { "Add" } else { "Mul" }, &[&x, &w], shape);
    }

    fn end(self, input: dcc::import::proto::ValueInfoProto) -> Subject {
        let (last, output) = self.here();
        let classes = output.len() < 4 && self.dice.once_in(3);
        let dims: Vec<_> = output.iter().map(|&n| size(n)).collect();
        let graph = GraphProto {
            node: self.nodes,
            initializer: self.tensors,
            input: vec![input],
            output: vec![value(&last, &dims)],
            ..Default::default()
        };
        let model =
            ModelProto { ir_version: Some(10), opset_import: vec![opset(20)], graph: Some(graph), ..Default::default() };
        Subject { model, output, classes, has: self.has }
    }
}
