//! What exporters write for modules of PyTorch that ONNX has no operator for, and what other tools make of such files.

use crate::onnx_model::{external, int_tensor, model, node, size, tensor, value, with_int, with_ints, with_tensor};
use dcc::Compiled;
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::{AttributeProto, NodeProto, TensorProto};
use dcc::loss::{LossKind, LossOptions};
use dcc::numeric::Instance;
use dcc::ops::Op;
use dcc::plan::{Parallel, Zero, batch};
use dcc::train::{TrainingOptions, updates};
use prost::Message;

/// `y` of `x`, f32 of these dims, by an exporter of that name.
struct Case<'a> {
    nodes: &'a [NodeProto],
    x: &'a [i64],
    tensors: Vec<TensorProto>,
    producer: &'a str,
}

impl Case<'_> {
    fn compiled(&self, parallel: Parallel, microbatches: u32) -> Compiled {
        self.with_loss(LossKind::Mse, parallel, microbatches)
    }

    fn with_loss(&self, kind: LossKind, parallel: Parallel, microbatches: u32) -> Compiled {
        let mut proto = self.tensors.iter().cloned().fold(model(self.nodes), with_tensor);
        let dims: Vec<_> = self.x.iter().map(|&dim| size(dim)).collect();
        proto.graph.as_mut().expect("a graph").input = vec![value("x", &dims)];
        proto.producer_name = Some(self.producer.to_owned());
        let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
        let batch = batch::Given { global: Some(self.x[0] as u64), accumulate: Some(microbatches), ..Default::default() };
        let loss = LossOptions { kind, ..Default::default() };
        let training = TrainingOptions { loss, ..Default::default() };
        let options = Options { batch, parallel, training, name: "case.onnx".to_owned(), ..Default::default() };
        compile(&proto, &options).unwrap_or_else(|error| panic!("{error}"))
    }

    fn alone(&self) -> Compiled {
        self.compiled(Parallel::default(), 1)
    }
}

fn number(name: &str, dims: &[i64], value: f32) -> TensorProto {
    tensor(name, dims, &value.to_le_bytes())
}

fn weight(name: &str, dims: &[i64]) -> TensorProto {
    external(name, dims, "weights")
}

fn is_random(compiled: &Compiled) -> bool {
    let eval = &compiled.training.eval;
    let live = eval.live();
    eval.ids().any(|id| live[id.0 as usize] && matches!(eval[id].op, Op::Uniform(_)))
}

/// Which paths a step drops is random, an evaluation has all: of a Bernoulli, a floor and a comparison, whatever the factor stands at.
#[test]
fn evaluation_has_no_masks_whose_mean_is_one() {
    let uniform = || with_ints(node("RandomUniform", &[], &["u"]), "shape", &[8, 1]);
    let forms: [(&str, Vec<NodeProto>); 4] = [
        (
            "mask / keep",
            vec![
                node("Expand", &["/Constant_output_0", "column"], &["p"]),
                node("Bernoulli", &["p"], &["b"]),
                node("Div", &["b", "/Constant_output_0"], &["mask"]),
                node("Mul", &["h", "mask"], &["y"]),
            ],
        ),
        (
            "x / keep",
            vec![
                uniform(),
                node("Add", &["u", "/Constant_output_0"], &["shifted"]),
                node("Floor", &["shifted"], &["mask"]),
                node("Div", &["h", "/Constant_output_0"], &["scaled"]),
                node("Mul", &["scaled", "mask"], &["y"]),
            ],
        ),
        (
            "product / keep",
            vec![
                uniform(),
                node("Less", &["u", "/Constant_output_0"], &["kept"]),
                with_int(node("Cast", &["kept"], &["mask"]), "to", 1),
                node("Mul", &["mask", "h"], &["product"]),
                node("Div", &["product", "/Constant_output_0"], &["y"]),
            ],
        ),
        (
            "half of the positions",
            vec![
                uniform(),
                node("Less", &["u", "/Constant_output_0"], &["kept"]),
                with_int(node("Cast", &["kept"], &["mask"]), "to", 1),
                node("Mul", &["mask", "h"], &["y"]),
            ],
        ),
    ];
    for (form, mask) in forms {
        let mut nodes: Vec<NodeProto> = std::iter::once(node("MatMul", &["x", "w"], &["h"])).chain(mask).collect();
        // Constant factors on the way to the loss do not hide it.
        nodes.last_mut().expect("nodes").output = vec!["dropped".to_owned()];
        nodes.push(with_int(node("ReduceMean", &["dropped", "axes"], &["y"]), "keepdims", 1));
        let sizes = [int_tensor("column", &[2], &[8, 1]), int_tensor("axes", &[1], &[1])];
        let tensors = [weight("w", &[6, 5]), number("/Constant_output_0", &[], 0.8)].into_iter().chain(sizes).collect();
        let compiled = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "pytorch" }.alone();
        let stays = form == "half of the positions";
        assert_eq!(is_random(&compiled), stays, "{form}");
        assert_eq!(compiled.imported.warnings.iter().any(|text| text.contains("random numbers")), stays, "{form}");
        let graph = &compiled.training.graph;
        assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::Uniform(_))), "{form}: training drops");
    }
}

/// A BatchNormalization that the module keeps in evaluation mode stands, if others train; of an export for inference all train.
#[test]
fn batch_norms_that_stand_beside_others() {
    let norm = |x: &str, y: &str, training: i64| {
        let names = ["scale", "bias", "mean", "var"].map(|part| format!("{y}.{part}"));
        let inputs: Vec<&str> = std::iter::once(x).chain(names.iter().map(String::as_str)).collect();
        with_int(node("BatchNormalization", &inputs, &[y]), "training_mode", training)
    };
    let moved = |modes: [i64; 2]| {
        let nodes = [norm("x", "a", modes[0]), norm("a", "y", modes[1])];
        let parts = ["a", "y"].iter().flat_map(|n| ["scale", "bias", "mean", "var"].map(|part| format!("{n}.{part}")));
        let tensors = parts.map(|name| weight(&name, &[6])).collect();
        let compiled = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "pytorch" }.alone();
        let outputs = compiled.training.graph.outputs.iter().map(|(name, _)| name.clone());
        outputs.filter(|name| name.ends_with(".mean")).collect::<Vec<String>>()
    };
    assert_eq!(moved([1, 0]), ["weight:a.mean"]);
    assert_eq!(moved([0, 1]), ["weight:y.mean"]);
    assert_eq!(moved([0, 0]).len(), 2);
    assert_eq!(moved([1, 1]).len(), 2);
}

/// Numbers of a norm, as converters write it out and optimisers of files leave it: epsilon, and what Constant nodes were.
#[test]
fn numbers_of_norms_do_not_train() {
    let nodes = [
        node("MatMul", &["x", "w"], &["h"]),
        node("Mul", &["h", "h"], &["square"]),
        with_int(node("ReduceMean", &["square", "axes"], &["mean"]), "keepdims", 1),
        node("Add", &["mean", "small"], &["shifted"]),
        node("Sqrt", &["shifted"], &["root"]),
        node("Div", &["h", "root"], &["normal"]),
        node("Pow", &["normal", "/norm/Constant_1_output_0"], &["power"]),
        node("Mul", &["power", "gain"], &["y"]),
    ];
    let trained = |producer, epsilon: &str| {
        let mut nodes = nodes.clone();
        nodes[3].input[1] = epsilon.to_owned();
        let tensors = vec![
            weight("w", &[6, 5]),
            number(epsilon, &[1, 1], 1e-3),
            number("/norm/Constant_1_output_0", &[], 2.0),
            number("gain", &[1], 1.5),
            int_tensor("axes", &[1], &[1]),
        ];
        Case { nodes: &nodes, x: &[8, 6], tensors, producer }.alone().training.trained
    };
    assert_eq!(trained("tf2onnx", "const_fold_opt__7"), ["gain", "w"]);
    // A name of TorchScript's says nothing: what is done with it does.
    assert_eq!(trained("pytorch", "norm.eps"), ["gain", "w"]);
}

/// Batch norms as converters write them out: each way to subtract the mean. A control: what is subtracted behind the scale is no mean.
#[test]
fn moments_of_written_norms_do_not_train() {
    let trained = |nodes: &[NodeProto], names: [&str; 2]| {
        let head = [
            node("MatMul", &["x", "w"], &["h"]),
            node("Reshape", &["variance", "row"], &["v"]),
            node("Add", &["v", "small"], &["shifted"]),
            node("Sqrt", &["shifted"], &["root"]),
            node("Div", &["gain", "root"], &["s"]),
        ];
        let vector = |name: &str, value: f32| tensor(name, &[5], &[value; 5].map(f32::to_le_bytes).concat());
        let tensors = vec![
            weight("w", &[6, 5]),
            vector("variance", 0.75),
            vector("mean", 0.25),
            vector("gain", 1.5),
            vector("bias", 0.5),
            number("small", &[], 1e-3),
            int_tensor("row", &[2], &[1, 5]),
        ];
        let compiled = Case { nodes: &[&head[..], nodes].concat(), x: &[8, 6], tensors, producer: "jax2onnx" }.alone();
        let told = format!("{}: running means and variances", names.map(|name| format!("`{name}`")).join(", "));
        (compiled.training.trained, compiled.imported.warnings.iter().any(|text| text.starts_with(&told)))
    };
    let ways = [
        vec![node("Sub", &["h", "mean"], &["d"]), node("Mul", &["d", "s"], &["n"]), node("Add", &["n", "bias"], &["y"])],
        vec![
            node("Neg", &["mean"], &["minus"]),
            node("Mul", &["minus", "s"], &["m"]),
            node("Add", &["m", "bias"], &["b"]),
            node("Mul", &["h", "s"], &["n"]),
            node("Add", &["n", "b"], &["y"]),
        ],
        vec![
            node("Mul", &["mean", "s"], &["m"]),
            node("Sub", &["bias", "m"], &["b"]),
            node("Mul", &["h", "s"], &["n"]),
            node("Add", &["n", "b"], &["y"]),
        ],
    ];
    let weights = ["bias", "gain", "w"].map(str::to_owned);
    for way in ways {
        assert_eq!(trained(&way, ["mean", "variance"]), (weights.to_vec(), true));
    }
    let apart =
        vec![node("Mul", &["h", "s"], &["n"]), node("Sub", &["n", "mean"], &["d"]), node("Add", &["d", "bias"], &["y"])];
    let all = ["bias", "gain", "mean", "variance", "w"].map(str::to_owned);
    assert_eq!(trained(&apart, ["mean", "variance"]), (all.to_vec(), false));
}

/// `torch.stack([x, |x|]).flatten(0, 1)`: a microbatch has both of its samples.
#[test]
fn stacked_samples_are_microbatches() {
    let nodes = [
        node("Abs", &["x"], &["size"]),
        node("Unsqueeze", &["x", "first"], &["a"]),
        node("Unsqueeze", &["size", "first"], &["b"]),
        with_int(node("Concat", &["a", "b"], &["stack"]), "axis", 0),
        node("Reshape", &["stack", "flat"], &["both"]),
        node("Mul", &["both", "w"], &["h"]),
        node("Tanh", &["h"], &["r"]),
        node("Reshape", &["r", "apart"], &["parts"]),
        with_int(with_int(node("Split", &["parts"], &["p", "q"]), "axis", 0), "num_outputs", 2),
        node("Sub", &["p", "q"], &["d"]),
        node("Squeeze", &["d", "first"], &["y"]),
    ];
    let tensors = vec![
        weight("w", &[6]),
        int_tensor("first", &[1], &[0]),
        int_tensor("flat", &[2], &[-1, 6]),
        int_tensor("apart", &[3], &[2, -1, 6]),
    ];
    let case = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "pytorch" };
    let compiled = case.compiled(Parallel { dp: 2, ..Parallel::default() }, 2);
    Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
}

fn filled(name: &str, size: usize, value: f32) -> TensorProto {
    tensor(name, &[size as i64], &vec![value.to_le_bytes(); size].concat())
}

/// Rows that inputs are standardised by are no weights. The controls: what is subtracted alone, or further on.
#[test]
fn what_standardises_inputs_does_not_train() {
    let trained = |nodes: &[NodeProto]| {
        let tensors = vec![weight("w", &[6, 5]), filled("mean", 6, 0.25), filled("deviation", 6, 0.75), filled("b", 5, 0.0)];
        let nodes = [nodes, &[node("Add", &["h", "b"], &["y"])]].concat();
        let compiled = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "tf2onnx" }.alone();
        let told = compiled.imported.warnings.iter().any(|text| text.starts_with("`deviation`, `mean`: means and deviations"));
        (compiled.training.trained.join(" "), told)
    };
    let centred = node("Sub", &["x", "mean"], &["d"]);
    let product = |from: &str| node("MatMul", &[from, "w"], &["h"]);
    let ways = [
        vec![centred.clone(), node("Div", &["d", "deviation"], &["n"]), product("n")],
        vec![node("Reciprocal", &["deviation"], &["s"]), centred.clone(), node("Mul", &["s", "d"], &["n"]), product("n")],
    ];
    for way in ways {
        assert_eq!(trained(&way), ("b w".to_owned(), true));
    }
    let alone = [centred, node("Mul", &["x", "deviation"], &["m"]), node("Add", &["m", "d"], &["n"]), product("n")];
    assert_eq!(trained(&alone), ("b deviation mean w".to_owned(), false));
    let further = [
        node("Abs", &["x"], &["a"]),
        node("Sub", &["a", "mean"], &["d"]),
        node("Div", &["d", "deviation"], &["n"]),
        product("n"),
    ];
    assert_eq!(trained(&further), ("b deviation mean w".to_owned(), false));
}

/// A group norm as Paddle writes it: an instance norm of groups by ones and zeros, and its own gain behind. The controls: an instance
/// norm, and one by other numbers.
#[test]
fn inner_gains_of_group_norms_do_not_train() {
    let trained = |nodes: &[NodeProto], gain: f32| {
        let tensors = vec![
            weight("w", &[4, 2, 3, 3]),
            filled("ones", 2, gain),
            filled("zeros", 2, 0.0),
            tensor("gain", &[4, 1, 1], &[1.5_f32; 4].map(f32::to_le_bytes).concat()),
            int_tensor("split", &[3], &[0, 2, -1]),
            int_tensor("whole", &[4], &[8, 4, 4, 4]),
        ];
        let nodes = [&[node("Conv", &["x", "w"], &["h"])], nodes].concat();
        Case { nodes: &nodes, x: &[8, 2, 6, 6], tensors, producer: "" }.alone().training.trained.join(" ")
    };
    let norm = |from: &str, to: &str| node("InstanceNormalization", &[from, "ones", "zeros"], &[to]);
    let groups = [
        node("Reshape", &["h", "split"], &["g"]),
        norm("g", "n"),
        node("Reshape", &["n", "whole"], &["r"]),
        node("Mul", &["r", "gain"], &["y"]),
    ];
    assert_eq!(trained(&groups, 1.0), "gain w");
    assert_eq!(trained(&groups, 0.5), "gain ones w zeros");
    let plain = [
        node("Split", &["h"], &["g", "rest"]),
        norm("g", "n"),
        node("Concat", &["n", "rest"], &["r"]),
        node("Mul", &["r", "gain"], &["y"]),
    ];
    let plain = plain.map(|node| if ["Split", "Concat"].contains(&node.op_type()) { with_int(node, "axis", 1) } else { node });
    assert_eq!(trained(&plain, 1.0), "gain ones w zeros");
}

/// The numbers that OneHot writes are the operator's.
#[test]
fn what_one_hot_writes_does_not_train() {
    let nodes = [
        with_int(node("Cast", &["x"], &["at"]), "to", 7),
        node("OneHot", &["at", "depth", "values"], &["hot"]),
        node("MatMul", &["hot", "w"], &["y"]),
    ];
    let values = tensor("values", &[2], &[0.0_f32, 1.0].map(f32::to_le_bytes).concat());
    let tensors = vec![weight("w", &[6, 4]), values, int_tensor("depth", &[1], &[6])];
    assert_eq!(Case { nodes: &nodes, x: &[8], tensors, producer: "tf2onnx" }.alone().training.trained, ["w"]);
}

/// Two branches of which the first adds a bias: its gradient is that of their sum, which the later stage has.
#[test]
fn a_gradient_of_a_later_stage_is_of_an_earlier_bias() {
    let turned = |from: &str, to: &str| with_ints(node("Transpose", &[from], &[to]), "perm", &[0, 2, 3, 1]);
    let padded = |weight: &str, to: &str| with_ints(node("Conv", &["x", weight], &[to]), "pads", &[1, 1, 1, 1]);
    let nodes = [
        padded("a", "p"),
        padded("k", "q"),
        turned("p", "pt"),
        turned("q", "qt"),
        node("Add", &["pt", "b"], &["pb"]),
        node("Add", &["pb", "qt"], &["y"]),
    ];
    let tensors = vec![weight("a", &[3, 2, 3, 3]), weight("k", &[3, 2, 3, 3]), weight("b", &[3])];
    let case = Case { nodes: &nodes, x: &[8, 2, 6, 6], tensors, producer: "jax2onnx" };
    for parallel in [Parallel { pp: 2, ..Parallel::default() }, Parallel { pp: 2, dp: 2, ..Parallel::default() }] {
        let compiled = case.compiled(parallel, 2);
        Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// A loss of logits says so where the output is a softmax or sigmoid of them already.
#[test]
fn normalised_outputs_are_told() {
    let told = |last: &str, kind: LossKind| {
        let nodes = [node("MatMul", &["x", "w"], &["h"]), node(last, &["h"], &["s"]), node("Identity", &["s"], &["y"])];
        let case = Case { nodes: &nodes, x: &[8, 6], tensors: vec![weight("w", &[6, 4])], producer: "tf2onnx" };
        case.with_loss(kind, Parallel::default(), 1)
            .imported
            .warnings
            .iter()
            .any(|text| text.starts_with(&format!("output `y` is a {last}")))
    };
    for (last, kind) in [("Softmax", LossKind::CrossEntropy), ("Sigmoid", LossKind::Bce)] {
        assert!(told(last, kind) && !told(last, LossKind::Mse) && !told("Relu", kind), "{last}");
    }
}

/// One bias stands alone like an epsilon: before an Identity, or under a root, where only a small number is none.
#[test]
fn single_biases_train() {
    let trained = |last: &str, bias: f32| {
        let nodes = [node("MatMul", &["x", "w"], &["h"]), node("Add", &["h", "b"], &["sum"]), node(last, &["sum"], &["y"])];
        let tensors = vec![weight("w", &[6, 1]), number("b", &[1], bias)];
        Case { nodes: &nodes, x: &[8, 6], tensors, producer: "other" }.alone().training.trained
    };
    assert_eq!(trained("Identity", 1e-3), ["b", "w"]);
    assert_eq!(trained("Sqrt", 0.5), ["b", "w"]);
    assert_eq!(trained("Sqrt", 1e-3), ["w"]);
}

/// Rows of a matrix that a Reshape made of `[positions, samples · heads, width]`, as `nn.MultiheadAttention` has them.
#[test]
fn samples_inside_of_rows_are_microbatches() {
    let nodes = [
        with_ints(node("Transpose", &["x"], &["turned"]), "perm", &[1, 0, 2]),
        node("Reshape", &["turned", "heads"], &["headed"]),
        node("Tanh", &["headed"], &["mixed"]),
        node("Reshape", &["mixed", "rows"], &["flat"]),
        node("Gemm", &["flat", "w", "b"], &["out"]),
        node("Reshape", &["out", "apart"], &["deep"]),
        with_ints(node("Transpose", &["deep"], &["y"]), "perm", &[1, 0, 2]),
    ];
    let tensors = vec![
        int_tensor("heads", &[3], &[5, 16, 3]),
        int_tensor("rows", &[2], &[40, 6]),
        int_tensor("apart", &[3], &[5, 8, 6]),
        weight("w", &[6, 6]),
        weight("b", &[6]),
    ];
    let case = Case { nodes: &nodes, x: &[8, 5, 6], tensors, producer: "pytorch" };
    for (parallel, microbatches) in [(Parallel::default(), 4), (Parallel { tp: 2, dp: 2, ..Parallel::default() }, 2)] {
        let compiled = case.compiled(parallel, microbatches);
        Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// A loss in the model divides by the sum of the labels' weights, which are constants, of the whole batch.
#[test]
fn constants_weigh_what_is_counted() {
    let kind = |name: &str, text: &str| AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::String.into()),
        s: Some(text.as_bytes().to_vec().into()),
        ..Default::default()
    };
    let mut loss = node("SoftmaxCrossEntropyLoss", &["h", "labels", "weights"], &["y"]);
    loss.attribute.push(kind("reduction", "mean"));
    let nodes = [node("MatMul", &["x", "w"], &["h"]), with_int(node("ArgMax", &["x"], &["labels"]), "axis", 1), loss];
    let mut nodes = nodes.to_vec();
    nodes[1] = with_int(nodes[1].clone(), "keepdims", 0);
    let weights: Vec<u8> = (1..=6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    // An integer divisor makes it known that these train nothing.
    let tensors = vec![weight("w", &[6, 6]), tensor("weights", &[6], &weights)];
    let case = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "pytorch" };
    let mut proto = case.tensors.iter().cloned().fold(model(case.nodes), with_tensor);
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(8), size(6)])];
    let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let selection =
        dcc::train::Selection { freeze: vec![dcc::train::Names::Glob(dcc_program::Glob::new("weights"))], train: vec![] };
    let loss = LossOptions { kind: LossKind::Output, ..Default::default() };
    let options = |selection| Options {
        batch: batch::Given { global: Some(8), accumulate: Some(4), ..Default::default() },
        training: TrainingOptions { loss: loss.clone(), selection, ..Default::default() },
        name: "case.onnx".to_owned(),
        ..Default::default()
    };
    let compiled = compile(&proto, &options(selection)).unwrap_or_else(|error| panic!("{error}"));
    Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
    // Weights that train have gradients that a count would not see.
    let error = compile(&proto, &options(Default::default())).map(|_| ()).expect_err("weights train");
    assert!(error.to_string().contains("depends on parameters"), "{error}");
}

/// An index that repeats along a dim finds rows, not elements.
#[test]
fn repeated_indices_move_rows() {
    let scatter = |index: &str| {
        let mut scatter = node("ScatterElements", &["zeros", index, "h"], &["y"]);
        scatter.attribute.push(AttributeProto {
            name: Some("reduction".to_owned()),
            r#type: Some(AttributeType::String.into()),
            s: Some(b"add".to_vec().into()),
            ..Default::default()
        });
        scatter
    };
    let places = [2, 0, 2, 1, 3, 2, 0, 1];
    let wide: Vec<i64> = places.iter().flat_map(|&place| [place; 5]).collect();
    let indices = |nodes: &[NodeProto]| {
        let zeros: Vec<u8> = vec![0; 4 * 8 * 5];
        let tensors = vec![
            weight("w", &[6, 5]),
            tensor("zeros", &[8, 5], &zeros),
            int_tensor("column", &[8, 1], &places),
            int_tensor("wide", &[8, 5], &wide),
            int_tensor("shape", &[2], &[8, 5]),
        ];
        let compiled = Case { nodes, x: &[8, 6], tensors, producer: "pytorch" }.alone();
        Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
        let graph = compiled.forward;
        let found = graph.nodes.iter().find(|node| matches!(node.op, Op::ScatterAdd(_))).expect("a scatter");
        graph.ty(found.operands[0]).rank()
    };
    let expanded = [node("MatMul", &["x", "w"], &["h"]), node("Expand", &["column", "shape"], &["index"]), scatter("index")];
    assert_eq!(indices(&expanded), 1);
    assert_eq!(indices(&[node("MatMul", &["x", "w"], &["h"]), scatter("wide")]), 1);
}

/// The loss reads half of a weight, or trains half of it: all of it is updated, as PyTorch does, and saved.
#[test]
fn a_weight_that_is_read_in_part_trains_whole() {
    let halves = |nodes: &[NodeProto]| {
        let head = [
            node("MatMul", &["x", "w"], &["both"]),
            with_int(with_int(node("Split", &["both"], &["left", "right"]), "axis", 1), "num_outputs", 2),
        ];
        let nodes = [&head[..], nodes].concat();
        let case = Case { nodes: &nodes, x: &[8, 6], tensors: vec![weight("w", &[6, 4])], producer: "pytorch" };
        for parallel in [Parallel::default(), Parallel { dp: 2, zero: Zero::Parameters, ..Parallel::default() }] {
            let compiled = case.compiled(parallel, 2);
            Instance::of(&compiled).and_then(|instance| instance.check()).unwrap_or_else(|error| panic!("{error}"));
            let graph = &compiled.training.graph;
            // The weight, and its two moments.
            let updated: u64 = updates(graph).iter().map(|update| graph.ty(update.param).elements()).sum();
            assert_eq!(updated, 3 * 6 * 4);
        }
    };
    halves(&[node("Identity", &["left"], &["y"]), node("Relu", &["right"], &["z"])]);
    // No slope passes a sign.
    halves(&[node("Sign", &["right"], &["signs"]), node("Mul", &["left", "signs"], &["y"])]);
}

/// Other tools make weights and numbers of the graph initializers alike, and repeat these along dims. Zeros and ones are what biases and
/// gains begin as.
#[test]
fn numbers_that_train_are_told() {
    let nodes = [node("MatMul", &["x", "w"], &["h"]), node("Add", &["h", "three"], &["y"])];
    let told = |producer: &str, dims: &[i64], value: f32| {
        let count = dims.iter().product::<i64>() as usize;
        let three = tensor("three", dims, &vec![value.to_le_bytes(); count].concat());
        let warnings =
            Case { nodes: &nodes, x: &[8, 6], tensors: vec![weight("w", &[6, 4]), three], producer }.alone().imported.warnings;
        warnings.iter().any(|text| text.starts_with("`three` trains, and is one number"))
    };
    assert!(told("tf2onnx", &[1, 1], 3.0) && told("tf2onnx", &[4], 3.0));
    assert!(!told("tf2onnx", &[], 3.0) && !told("pytorch", &[1, 1], 3.0) && !told("tf2onnx", &[4], 0.0));
}

/// A batch norm whose running mean has moved and whose gain has not may have none.
#[test]
fn gains_of_trained_norms_that_are_ones_are_told() {
    let nodes = [node("MatMul", &["x", "w"], &["h"]), node("BatchNormalization", &["h", "s", "b", "mean", "variance"], &["y"])];
    let told = |mean: f32| {
        let rows = [("s", 1.0), ("b", 0.5), ("mean", mean), ("variance", 1.0)];
        let tensors = rows.map(|(name, value)| filled(name, 4, value)).into_iter().chain([weight("w", &[6, 4])]).collect();
        let compiled = Case { nodes: &nodes, x: &[8, 6], tensors, producer: "tf2onnx" }.alone();
        compiled.imported.warnings.iter().any(|text| text.starts_with("`s`, `b` train, and are one number each"))
    };
    assert!(told(0.25) && !told(0.0));
}
