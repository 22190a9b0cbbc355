//! Which tensors that PyTorch's older exporter folded are those of one module, called several times.
//!
//! It folds what each call reads, such as a transposed weight, and then writes `Identity` of one for those that are equal: the same
//! weight of other calls, and weights that only begin alike. A node's name tells its module, and of which call: `/fc/MatMul`, `/fc_1/MatMul`.

use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Calls<'g> {
    readers: BTreeMap<&'g str, Vec<&'g NodeProto>>,
    makers: BTreeMap<&'g str, &'g NodeProto>,
    tensors: BTreeMap<&'g str, &'g TensorProto>,
    /// What an Identity of a tensor stands for.
    copies: BTreeMap<&'g str, &'g str>,
}

impl<'g> Calls<'g> {
    pub fn of(graph: &'g GraphProto) -> Calls<'g> {
        let tensors: BTreeMap<&str, &TensorProto> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).collect();
        let mut calls = Calls { readers: BTreeMap::new(), makers: BTreeMap::new(), tensors, copies: BTreeMap::new() };
        for node in &graph.node {
            match (node.op_type(), &node.input[..], &node.output[..]) {
                ("Identity", [from], [to]) if calls.tensors.contains_key(from.as_str()) => drop(calls.copies.insert(to, from)),
                _ => {
                    node.input.iter().for_each(|input| calls.readers.entry(input).or_default().push(node));
                    calls.makers.extend(node.output.iter().map(|output| (output.as_str(), node)));
                }
            }
        }
        calls
    }

    /// Copies of tensors that are one parameter of the module.
    pub fn tied(&self) -> BTreeSet<String> {
        self.copies.iter().filter(|(to, from)| self.are_one(from, to)).map(|(to, _)| (*to).to_owned()).collect()
    }

    /// Whether both are of one module, and not merely begin alike: random numbers do not, and biases go with their weights.
    fn are_one(&self, from: &str, to: &str) -> bool {
        let (a, b) = (self.modules(from), self.modules(to));
        let folded = to.contains("::") && from.contains("::");
        folded && a.iter().any(|module| b.contains(module)) && (!self.is_uniform(from) || self.weights_are_one(from, to))
    }

    /// The modules that read a tensor, of whichever call.
    fn modules(&self, name: &str) -> BTreeSet<String> {
        self.reading(name).filter_map(|node| module(node.name())).collect()
    }

    fn reading(&self, name: &str) -> impl Iterator<Item = &&'g NodeProto> {
        self.readers.get(name).into_iter().flatten()
    }

    fn is_uniform(&self, name: &str) -> bool {
        let Some(tensor) = self.tensors.get(name) else { return false };
        let size = match tensor.data_type() {
            // Floats of 4, 8 and 2 bytes.
            1 => 4,
            11 => 8,
            10 | 16 => 2,
            _ => return false,
        };
        match &tensor.raw_data {
            Some(raw) if !raw.is_empty() => raw.chunks(size).all(|element| *element == raw[..size.min(raw.len())]),
            _ => {
                tensor.float_data.windows(2).all(|pair| pair[0] == pair[1])
                    && tensor.double_data.windows(2).all(|pair| pair[0] == pair[1])
            }
        }
    }

    /// Whether what both are added to is of one weight.
    fn weights_are_one(&self, from: &str, to: &str) -> bool {
        let (a, b) = (self.weights(from), self.weights(to));
        a.iter().any(|a| b.iter().any(|b| self.original(a) == self.original(b) && !self.is_uniform(self.original(a))))
    }

    fn original<'n>(&self, name: &'n str) -> &'n str
    where
        'g: 'n,
    {
        self.copies.get(name).copied().unwrap_or(name)
    }

    /// Weights of products and convolutions to which a bias is added, or that read it themselves.
    fn weights(&self, bias: &str) -> Vec<&'g str> {
        let product = |mut node: &'g NodeProto| loop {
            match node.op_type() {
                "MatMul" | "Gemm" | "Conv" | "ConvTranspose" => return Some(node),
                "Add" => node = node.input.iter().find_map(|input| self.makers.get(input.as_str()))?,
                "Cast" | "Reshape" | "Transpose" => node = self.makers.get(node.input.first()?.as_str())?,
                _ => return None,
            }
        };
        let products = self.reading(bias).filter_map(|node| product(node));
        let inputs = products.flat_map(|node| node.input.iter().map(String::as_str));
        inputs.filter(|&name| name != bias && self.tensors.contains_key(self.original(name))).collect()
    }
}

/// The module of a node's name without the numbers of its calls: `layers.0/fc` of `/layers.0/fc_1/MatMul_2`. None of a node without a path.
fn module(name: &str) -> Option<String> {
    let (path, _) = name.strip_prefix('/')?.rsplit_once('/').unwrap_or_default();
    let plain = |part: &str| match part.rsplit_once('_') {
        Some((module, call)) if !call.is_empty() && call.bytes().all(|byte| byte.is_ascii_digit()) => module.to_owned(),
        _ => part.to_owned(),
    };
    Some(path.split('/').map(plain).collect::<Vec<_>>().join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn tensor(name: &str, values: &[f32]) -> TensorProto {
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (name, dims) = (Some(name.to_owned()), vec![values.len() as i64]);
        TensorProto { name, dims, data_type: Some(1), raw_data: Some(Bytes::from(raw)), ..TensorProto::default() }
    }

    fn node(op: &str, name: &str, input: [&str; 2], output: &str) -> NodeProto {
        let input = input.iter().filter(|name| !name.is_empty()).map(|&name| name.to_owned()).collect();
        let (name, op_type) = (Some(name.to_owned()), Some(op.to_owned()));
        NodeProto { name, op_type, input, output: vec![output.to_owned()], ..NodeProto::default() }
    }

    /// Two products with one weight and their biases of zeros, under these names.
    fn tied(first: &str, second: &str) -> BTreeSet<String> {
        let graph = GraphProto {
            initializer: vec![tensor("onnx::MatMul_1", &[0.5, -0.25]), tensor("onnx::Add_2", &[0.0, 0.0])],
            node: vec![
                node("Identity", "Identity_0", ["onnx::MatMul_1", ""], "onnx::MatMul_3"),
                node("Identity", "Identity_1", ["onnx::Add_2", ""], "onnx::Add_4"),
                node("MatMul", &format!("{first}/MatMul"), ["x", "onnx::MatMul_1"], "p"),
                node("Add", &format!("{first}/Add"), ["p", "onnx::Add_2"], "y"),
                node("MatMul", &format!("{second}/MatMul"), ["y", "onnx::MatMul_3"], "q"),
                node("Add", &format!("{second}/Add"), ["q", "onnx::Add_4"], "z"),
            ],
            ..GraphProto::default()
        };
        Calls::of(&graph).tied()
    }

    #[test]
    fn calls_of_one_module_have_one_weight() {
        let both = BTreeSet::from(["onnx::Add_4", "onnx::MatMul_3"].map(str::to_owned));
        for (first, second) in [("/net/fc", "/net/fc_1"), ("/net", "/net"), ("", "")] {
            assert_eq!(tied(first, second), both, "{first} {second}");
        }
        // Layers of an encoder, which begin as copies of one, and other modules.
        for (first, second) in [("/layers.0/fc", "/layers.1/fc"), ("/a", "/b")] {
            assert_eq!(tied(first, second), BTreeSet::new(), "{first} {second}");
        }
    }
}
