//! Which tensors that PyTorch's older exporter folded are those of one module, called several times.
//!
//! It folds what each call reads, such as a transposed weight, and then writes `Identity` of one for those that are equal: the same
//! weight of other calls, and weights that only begin alike. A node's name tells its module, and of which call: `/fc/MatMul`, `/fc_1/MatMul`.

use crate::import::proto::tensor_proto::DataType;
use crate::import::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes between a product and its bias, at most.
const BETWEEN: usize = 16;

pub(super) struct Calls<'g> {
    readers: BTreeMap<&'g str, Vec<&'g NodeProto>>,
    makers: BTreeMap<&'g str, &'g NodeProto>,
    tensors: BTreeMap<&'g str, &'g TensorProto>,
    /// What an Identity of a tensor stands for.
    copies: BTreeMap<&'g str, &'g str>,
    /// The paths of all nodes, of each module on the way too.
    paths: BTreeSet<&'g str>,
    /// What modules are called, by the names of tensors.
    modules: BTreeSet<&'g str>,
}

impl<'g> Calls<'g> {
    pub fn of(graph: &'g GraphProto) -> Calls<'g> {
        let tensors: BTreeMap<&str, &TensorProto> = graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).collect();
        let names = graph.node.iter().map(NodeProto::name).filter(|name| name.starts_with('/'));
        let paths = names.flat_map(|name| name.match_indices('/').map(|(at, _)| &name[..at])).collect();
        let modules = tensors.keys().filter(|name| !name.contains("::")).flat_map(|name| name.split('.')).collect();
        let (readers, makers, copies) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut calls = Calls { readers, makers, tensors, copies, paths, modules };
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
        let (a, b) = (self.modules_of(from), self.modules_of(to));
        let folded = to.contains("::") && from.contains("::");
        folded && a.iter().any(|module| b.contains(module)) && (self.is_random(from) || self.weights_are_one(from, to))
    }

    /// The modules that read a tensor, of whichever call.
    fn modules_of(&self, name: &str) -> BTreeSet<String> {
        self.reading(name).filter_map(|node| self.module(node.name())).collect()
    }

    /// The module of a node's name without the numbers of its calls: `/layers.0/fc` of `/layers.0/fc_1/MatMul_2`, where there is a first
    /// call `/layers.0/fc`, and no tensor says that `fc_1` is a module itself. None of a node without a path.
    fn module(&self, name: &str) -> Option<String> {
        let (path, _) = name.strip_prefix('/')?.rsplit_once('/').unwrap_or_default();
        let mut module = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let first =
                part.rsplit_once('_').filter(|(_, call)| !call.is_empty() && call.bytes().all(|byte| byte.is_ascii_digit()));
            let first = first.map(|(first, _)| format!("{module}/{first}"));
            let called = first.filter(|first| self.paths.contains(first.as_str()) && !self.modules.contains(part));
            module = called.unwrap_or_else(|| format!("{module}/{part}"));
        }
        Some(module)
    }

    fn reading(&self, name: &str) -> impl Iterator<Item = &&'g NodeProto> {
        self.readers.get(name).into_iter().flatten()
    }

    /// Whether the elements look drawn at random: more than half of them, or of the first thousand, differ. Not so where they are
    /// in another file.
    fn is_random(&self, name: &str) -> bool {
        let Some(tensor) = self.tensors.get(name) else { return false };
        let size = match DataType::try_from(tensor.data_type()).unwrap_or_default() {
            DataType::Float => 4,
            DataType::Double => 8,
            DataType::Float16 | DataType::Bfloat16 => 2,
            _ => return false,
        };
        let elements: Vec<Vec<u8>> = match &tensor.raw_data {
            Some(raw) if !raw.is_empty() => raw.chunks(size).take(1000).map(<[u8]>::to_vec).collect(),
            _ => tensor.float_data.iter().take(1000).map(|value| value.to_le_bytes().to_vec()).collect(),
        };
        let count = elements.len();
        count > 1 && 2 * elements.into_iter().collect::<BTreeSet<_>>().len() > count
    }

    /// Whether what both are added to is of one weight.
    fn weights_are_one(&self, from: &str, to: &str) -> bool {
        let (a, b) = (self.weights(from), self.weights(to));
        a.iter().any(|a| b.iter().any(|b| self.original(a) == self.original(b) && self.is_random(self.original(a))))
    }

    fn original<'n>(&self, name: &'n str) -> &'n str
    where
        'g: 'n,
    {
        self.copies.get(name).copied().unwrap_or(name)
    }

    /// Weights of products and convolutions to which a bias is added, or that read it themselves.
    fn weights(&self, bias: &str) -> Vec<&'g str> {
        let product = |mut node: &'g NodeProto| {
            for _ in 0..BETWEEN {
                node = match node.op_type() {
                    "MatMul" | "Gemm" | "Conv" | "ConvTranspose" => return Some(node),
                    "Add" => node.input.iter().find_map(|input| self.makers.get(input.as_str()))?,
                    "Cast" | "Reshape" | "Transpose" => self.makers.get(node.input.first()?.as_str())?,
                    _ => return None,
                }
            }
            None
        };
        let products = self.reading(bias).filter_map(|node| product(node));
        let inputs = products.flat_map(|node| node.input.iter().map(String::as_str));
        inputs.filter(|&name| name != bias && self.tensors.contains_key(self.original(name))).collect()
    }
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
        of(first, second, &[0.5, -0.25, 0.125, 2.0])
    }

    fn of(first: &str, second: &str, weight: &[f32]) -> BTreeSet<String> {
        let zeros = tensor("onnx::Add_2", &[0.0, 0.0]);
        let graph = GraphProto {
            initializer: vec![tensor("onnx::MatMul_1", weight), zeros, tensor("net.own_1.bias", &[0.0])],
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
        // Layers of an encoder, which begin as copies of one, and other modules, though they be numbered.
        for (first, second) in [("/layers.0/fc", "/layers.1/fc"), ("/a", "/b"), ("/fc_1", "/fc_2"), ("/net/own", "/net/own_1")]
        {
            assert_eq!(tied(first, second), BTreeSet::new(), "{first} {second}");
        }
        assert_eq!(of("/net/fc", "/net/fc_1", &[1.0, 0.0, 0.0, 1.0]), BTreeSet::new(), "parameters that begin as the identity");
    }

    #[test]
    fn cycles_end() {
        let node = |input, output| node("Add", "/Add", [input, "onnx::Add_2"], output);
        let copy = NodeProto { name: None, ..super::tests::node("Identity", "", ["onnx::Add_2", ""], "onnx::Add_4") };
        let graph = GraphProto {
            initializer: vec![tensor("onnx::Add_2", &[0.0, 0.0])],
            node: vec![copy, node("b", "a"), node("a", "b")],
            ..GraphProto::default()
        };
        assert_eq!(Calls::of(&graph).tied(), BTreeSet::new());
    }
}
