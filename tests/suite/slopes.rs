//! Gradients that ONNX leaves open, where functions have corners and steps: PyTorch's, whose numbers these are.

use crate::onnx_model::{model, node, size, tensor, value, with_tensor};
use dcc::autodiff::gradients;
use dcc::import::proto::{NodeProto, StringStringEntryProto, TensorProto};
use dcc::import::{Model, Options, onnx};
use dcc::interp::{Bindings, Precision, Tensor, evaluate};
use dcc::ops::{Input, Op};
use dcc_program::DType;
use prost::Message;

/// `y` of `x`, and the gradient of its sum for x.
fn at(x: &[f64], nodes: &[NodeProto], tensors: &[TensorProto]) -> (Vec<f64>, Vec<f64>) {
    let mut proto = tensors.iter().cloned().fold(model(nodes), with_tensor);
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(x.len() as i64)])];
    let model = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let mut graph = onnx(&model, &Options::default()).unwrap_or_else(|error| panic!("{error}")).graph;
    let input = graph.ids().find(|&id| matches!(graph[id].op, Op::Input(Input { .. }))).expect("x");
    let y = graph.outputs[0].1;
    let sum = graph.sum(y, &[0]).expect("floats");
    let bindings = Bindings::default().input("x", Tensor::floats(DType::F32, &[x.len() as u64], x.to_vec()));
    let value = |graph: &_, id| evaluate(graph, &[id], &bindings, Precision::Exact).expect("a value").remove(0).f64s().to_vec();
    let values = value(&graph, y);
    let slopes = match gradients(&mut graph, sum, &[input]).expect("gradients").get(&input) {
        Some(&slope) => value(&graph, slope),
        None => vec![0.0; x.len()],
    };
    (values, slopes)
}

fn number(name: &str, value: f32) -> TensorProto {
    tensor(name, &[], &value.to_le_bytes())
}

fn byte(name: &str, value: i8) -> TensorProto {
    TensorProto { data_type: Some(3), ..tensor(name, &[], &value.to_le_bytes()) }
}

#[test]
fn a_bound_passes_nothing() {
    let clip = [node("Clip", &["x", "low", "high"], &["y"])];
    let bounds = [number("low", 0.0), number("high", 6.0)];
    let relu6 = at(&[-1.0, 0.0, 3.0, 6.0, 7.0], &clip, &bounds);
    assert_eq!(relu6, (vec![0.0, 0.0, 3.0, 6.0, 6.0], vec![0.0, 0.0, 1.0, 0.0, 0.0]));
    // Of PyTorch's exporter; of others equal values share.
    let clamp = |call: &str| {
        let text = format!("%c : [num_users=1] = call_function[target=torch.ops.{call}](args = (%x, %low), kwargs = {{}})");
        let entry = StringStringEntryProto { key: Some("pkg.torch.onnx.fx_node".to_owned()), value: Some(text) };
        let max = NodeProto { metadata_props: vec![entry], ..node("Max", &["x", "low"], &["y"]) };
        at(&[-1.0, 0.0, 3.0], &[max], &bounds)
    };
    assert_eq!(clamp("aten.clamp.Tensor"), (vec![0.0, 0.0, 3.0], vec![0.0, 0.0, 1.0]));
    assert_eq!(clamp("aten.maximum.default"), (vec![0.0, 0.0, 3.0], vec![0.0, 0.5, 1.0]));
    let relu = at(&[-1.0, 0.0, 3.0], &[node("Relu", &["x"], &["y"])], &[]);
    assert_eq!(relu, (vec![0.0, 0.0, 3.0], vec![0.0, 0.0, 1.0]));
}

/// `fake_quantize_per_tensor_affine(x, 0.5, 1, -128, 127)`: -64.5 is the last value that is not cut below, 63 above.
#[test]
fn quantisers_pass_gradients_straight_through() {
    let trip = |of: &[&str]| [node("QuantizeLinear", &["x", "scale", "zero"], &["q"]), node("DequantizeLinear", of, &["y"])];
    let tensors = [number("scale", 0.5), byte("zero", 1), number("other", 0.25)];
    let x = [-80.0, -64.5, -0.7, 0.2, 1.0, 63.0, 63.5];
    let (values, slopes) = at(&x, &trip(&["q", "scale", "zero"]), &tensors);
    assert_eq!(values, [-64.5, -64.5, -0.5, 0.0, 1.0, 63.0, 63.0]);
    assert_eq!(slopes, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
    let (_, of_another_scale) = at(&x, &trip(&["q", "other", "zero"]), &tensors);
    assert_eq!(of_another_scale, [0.0; 7]);
}
