//! What several microbatches, or precisions and meshes beside them, must not be refused.

mod parts;
mod samples;

use crate::onnx_model::{
    external, int_tensor, model, node, opset, size, tensor, value, with_int, with_ints, with_string, with_tensor,
};
use dcc::Compiled;
use dcc::compile::{Options, compile};
use dcc::error::Result;
use dcc::import::Model;
use dcc::import::proto::tensor_proto::DataType;
use dcc::import::proto::{NodeProto, TensorProto};
use dcc::loss::{LossKind, LossOptions};
use dcc::numeric::Instance;
use dcc::plan::{Parallel, Zero, batch};
use dcc::precision::Mixed;
use dcc::train::TrainingOptions;
use dcc_program::DType;
use dcc_program::program::{Action, Instr, Library};
use prost::Message;

/// `y` of `x`, f32 of these dims, with weights of these names and dims; trained in 4 microbatches.
struct Case<'a> {
    nodes: &'a [NodeProto],
    x: &'a [i64],
    weights: &'a [(&'a str, &'a [i64])],
    tensors: Vec<TensorProto>,
    mixed: Option<Mixed>,
    loss: LossKind,
}

const MICROBATCHES: u32 = 4;

impl Case<'_> {
    fn compiled(&self, parallel: Parallel, microbatches: u32) -> Compiled {
        self.compile(parallel, microbatches).unwrap_or_else(|error| panic!("{error}"))
    }

    fn compile(&self, parallel: Parallel, microbatches: impl Into<Option<u32>>) -> Result<Compiled> {
        let weights = self.weights.iter().map(|(name, dims)| external(name, dims, "weights"));
        let mut proto = weights.chain(self.tensors.iter().cloned()).fold(model(self.nodes), with_tensor);
        proto.opset_import = vec![opset(23)];
        let dims: Vec<_> = self.x.iter().map(|&dim| size(dim)).collect();
        proto.graph.as_mut().expect("a graph").input = vec![value("x", &dims)];
        let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
        let batch = batch::Given { global: Some(self.x[0] as u64), accumulate: microbatches.into(), ..Default::default() };
        let loss = LossOptions { kind: self.loss, ..Default::default() };
        let training = TrainingOptions { loss, mixed: self.mixed, ..Default::default() };
        let options = Options { batch, parallel, training, name: "case.onnx".to_owned(), ..Default::default() };
        compile(&proto, &options)
    }

    /// Compiles, and compares all tensors with those of one device.
    fn agrees(&self, parallel: Parallel, microbatches: u32) -> Compiled {
        let compiled = self.compiled(parallel, microbatches);
        let instance = Instance::of(&compiled).unwrap_or_else(|error| panic!("{error}"));
        instance.check().unwrap_or_else(|error| panic!("{error}"));
        compiled
    }
}

const BF16: Mixed = Mixed { half: DType::BF16, gradients: DType::F32, parameters: DType::F32, scale: None };

/// The collectives of evaluation.
fn collectives(compiled: &Compiled) -> usize {
    let bodies = compiled.artifact.eval.iter().flat_map(|program| &program.sections).flat_map(|section| &section.body);
    bodies.filter(|instr| matches!(instr.action, Action::Start { .. })).count()
}

/// Without dropout evaluation has nodes that training has not, among them some that are made of nothing but broadcasts.
#[test]
fn evaluation_keeps_samples_apart_where_training_has_no_such_nodes() {
    let training = TensorProto {
        name: Some("training".to_owned()),
        data_type: Some(DataType::Bool.into()),
        raw_data: Some(vec![1].into()),
        ..Default::default()
    };
    let half = TensorProto {
        name: Some("ratio".to_owned()),
        data_type: Some(DataType::Float.into()),
        raw_data: Some(0.5_f32.to_le_bytes().to_vec().into()),
        ..Default::default()
    };
    let nodes = [
        node("MatMul", &["x", "w"], &["h"]),
        node("Dropout", &["h", "ratio", "training"], &["d"]),
        node("TopK", &["d", "k"], &["y", "i"]),
    ];
    let tensors = vec![training, half, int_tensor("k", &[1], &[3])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 6], weights: &[("w", &[6, 5])], tensors, mixed: None };
    case.agrees(Parallel::default(), MICROBATCHES);
    let on_ranks = case.agrees(Parallel { dp: 2, ..Parallel::default() }, 1);
    assert_eq!(collectives(&on_ranks), 1, "the loss alone is summed over ranks");
}

/// A weight of unit columns, and one that is the product of two: what half floats read is computed once a step.
#[test]
fn weights_made_of_weights_train_in_half_floats() {
    let unit = [
        with_ints(node("ReduceL2", &["v"], &["n"]), "axes", &[0]),
        node("Div", &["v", "n"], &["u"]),
        node("MatMul", &["x", "u"], &["y"]),
    ];
    let case =
        |nodes, weights| Case { loss: LossKind::Mse, nodes, x: &[8, 6], weights, tensors: Vec::new(), mixed: Some(BF16) };
    case(&unit, &[("v", &[6, 5])]).compiled(Parallel { dp: 2, ..Parallel::default() }, MICROBATCHES);
    let product = [node("MatMul", &["a", "b"], &["w"]), node("MatMul", &["x", "w"], &["y"])];
    case(&product, &[("a", &[6, 3]), ("b", &[3, 5])]).compiled(Parallel { dp: 2, ..Parallel::default() }, MICROBATCHES);
}

/// Interleaved stages want a multiple of their number.
#[test]
fn chunks_of_three_stages_are_checked_on_fewer_microbatches() {
    let layers = 6;
    let names: Vec<String> = (0..layers).map(|layer| format!("w{layer}")).collect();
    let mut nodes = Vec::new();
    for layer in 0..layers {
        let from = if layer == 0 { "x".to_owned() } else { format!("h{layer}") };
        nodes.push(node("MatMul", &[&from, &names[layer]], &[&format!("p{layer}")]));
        let to = if layer + 1 == layers { "y".to_owned() } else { format!("h{}", layer + 1) };
        nodes.push(node("Tanh", &[&format!("p{layer}")], &[&to]));
    }
    let weights: Vec<(&str, &[i64])> = names.iter().map(|name| (name.as_str(), &[6, 6][..])).collect();
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[12, 6], weights: &weights, tensors: Vec::new(), mixed: None };
    case.agrees(Parallel { pp: 3, virtual_stages: 2, ..Parallel::default() }, 6);
}

/// Rows of samples and positions in one dim: five positions are no even shards, samples are.
#[test]
fn samples_stay_apart_where_positions_cannot() {
    let nodes = [
        node("MatMul", &["x", "q"], &["queries"]),
        node("MatMul", &["x", "k"], &["keys"]),
        with_ints(node("Transpose", &["keys"], &["turned"]), "perm", &[0, 2, 1]),
        node("MatMul", &["queries", "turned"], &["scores"]),
        with_int(node("Softmax", &["scores"], &["shares"]), "axis", -1),
        node("MatMul", &["shares", "x"], &["mixed"]),
        node("Reshape", &["mixed", "rows"], &["flat"]),
        node("MatMul", &["flat", "o"], &["out"]),
        node("Reshape", &["out", "apart"], &["y"]),
    ];
    let tensors = vec![int_tensor("rows", &[2], &[40, 6]), int_tensor("apart", &[3], &[8, 5, 6])];
    let weights: [(&str, &[i64]); 3] = [("q", &[6, 6]), ("k", &[6, 6]), ("o", &[6, 6])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors, mixed: None };
    case.agrees(Parallel { cp: 2, ..Parallel::default() }, MICROBATCHES);
    case.agrees(Parallel { cp: 2, dp: 2, ..Parallel::default() }, 2);
}

/// The indices of long rows are an operation's of the library, which takes rows whole.
#[test]
fn the_first_of_long_rows_train_on_meshes() {
    let nodes = |axis| {
        [
            node("MatMul", &["x", "w"], &["h"]),
            with_int(node("TopK", &["h", "k"], &["t", "i"]), "axis", axis),
            node("MatMul", &["t", "v"], &["y"]),
        ]
    };
    let k = || vec![int_tensor("k", &[1], &[7])];
    let last = nodes(-1);
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 300]), ("v", &[7, 5])];
    let case = |mixed| Case { loss: LossKind::Mse, nodes: &last, x: &[8, 4, 6], weights: &weights, tensors: k(), mixed };
    let meshes = [
        Parallel::default(),
        Parallel { dp: 2, ..Parallel::default() },
        Parallel { tp: 2, ..Parallel::default() },
        Parallel { dp: 2, tp: 2, ..Parallel::default() },
        Parallel { pp: 2, ..Parallel::default() },
    ];
    for parallel in meshes {
        let compiled = case(None).agrees(parallel, 2);
        let mut bodies = compiled.artifact.train.iter().flat_map(|program| &program.sections).flat_map(|section| &section.body);
        let chosen = |instr: &Instr| matches!(instr.action, Action::Library(Library::TopK { .. }));
        assert!(bodies.any(chosen), "compared pair by pair");
    }
    case(Some(BF16)).agrees(Parallel { dp: 2, ..Parallel::default() }, 2);
    // Of the samples: each rank sees them all.
    let first = nodes(0);
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 9]), ("v", &[9, 5])];
    let case = Case { loss: LossKind::Mse, nodes: &first, x: &[72, 6], weights: &weights, tensors: k(), mixed: None };
    case.agrees(Parallel { dp: 2, ..Parallel::default() }, 1);
}

/// A weight that is repeated for each sample and normalised there: its gradient's only term is a broadcast, which lies as samples do.
#[test]
fn a_repeated_weight_is_normalised_by_samples() {
    let nodes = [
        node("Shape", &["x"], &["dims"]),
        node("Expand", &["queries", "dims"], &["repeated"]),
        with_int(node("LayerNormalization", &["repeated", "scale", "shift"], &["normal"]), "axis", -1),
        node("MatMul", &["x", "w"], &["h"]),
        node("Mul", &["normal", "h"], &["weighed"]),
        node("MatMul", &["weighed", "o"], &["y"]),
    ];
    let weights: [(&str, &[i64]); 5] = [("queries", &[5, 6]), ("scale", &[6]), ("shift", &[6]), ("w", &[6, 6]), ("o", &[6, 6])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors: Vec::new(), mixed: None };
    for parallel in [
        Parallel::default(),
        Parallel { dp: 2, ..Parallel::default() },
        Parallel { tp: 2, ..Parallel::default() },
        Parallel { pp: 2, ..Parallel::default() },
    ] {
        case.agrees(parallel, MICROBATCHES);
    }
}

/// Distances in buckets are positions, not features of the table that they look up: a sequence may be split along them.
#[test]
fn a_table_of_distances_leaves_the_sequence_to_be_split() {
    let distances: Vec<i64> = (0..36).map(|at: i64| (at / 6 - at % 6).abs().min(3)).collect();
    let nodes = [
        node("MatMul", &["x", "q"], &["queries"]),
        node("MatMul", &["x", "k"], &["keys"]),
        with_ints(node("Transpose", &["keys"], &["turned"]), "perm", &[0, 2, 1]),
        node("MatMul", &["queries", "turned"], &["scores"]),
        node("Gather", &["table", "distances"], &["bias"]),
        node("Add", &["scores", "bias"], &["biased"]),
        with_int(node("Softmax", &["biased"], &["shares"]), "axis", -1),
        node("MatMul", &["shares", "x"], &["mixed"]),
        node("MatMul", &["mixed", "o"], &["y"]),
    ];
    let tensors = || vec![int_tensor("distances", &[6, 6], &distances)];
    let weights: [(&str, &[i64]); 4] = [("q", &[5, 5]), ("k", &[5, 5]), ("o", &[5, 5]), ("table", &[4])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 6, 5], weights: &weights, tensors: tensors(), mixed: None };
    case.agrees(Parallel { cp: 2, ..Parallel::default() }, 2);
    case.agrees(Parallel { cp: 2, dp: 2, ..Parallel::default() }, 2);
}

/// What a loss has once, whatever the number of microbatches, is counted once: a penalty on weights that a product reads too, scaled
/// and plain, or a weight that weighs the rest of the loss (Kendall et al. 2018, arXiv 1705.07115).
#[test]
fn terms_without_samples_are_counted_once() {
    let error = [
        node("MatMul", &["x", "w"], &["h"]),
        node("Tanh", &["h"], &["t"]),
        node("MatMul", &["t", "v"], &["z"]),
        node("Mul", &["z", "z"], &["squares"]),
        with_int(node("ReduceMean", &["squares"], &["error"]), "keepdims", 0),
    ];
    let penalty = [
        node("Mul", &["w", "w"], &["squared"]),
        with_int(node("ReduceSum", &["squared"], &["all"]), "keepdims", 0),
        node("Mul", &["all", "tenth"], &["penalty"]),
        node("Add", &["error", "penalty"], &["y"]),
    ];
    // Their gradients are made of weights alone, of the first stage and of both.
    let norms = [
        node("Abs", &["w"], &["sizes"]),
        with_int(node("ReduceSum", &["sizes"], &["first"]), "keepdims", 0),
        with_int(node("ReduceL2", &["w"], &["second"]), "keepdims", 0),
        node("Mul", &["w", "v"], &["product"]),
        node("Abs", &["product"], &["overlap"]),
        with_int(node("ReduceSum", &["overlap"], &["third"]), "keepdims", 0),
        node("Sum", &["first", "second", "third"], &["all"]),
        node("Mul", &["all", "tenth"], &["penalty"]),
        node("Add", &["error", "penalty"], &["y"]),
    ];
    let weighed = [
        node("Neg", &["s"], &["less"]),
        node("Exp", &["less"], &["share"]),
        node("Mul", &["share", "error"], &["part"]),
        node("Sub", &["part", "less"], &["y"]),
    ];
    // Both read a weight that is made of another: its gradient is passed on before the update.
    let made = [node("Tanh", &["u"], &["w"])];
    let tenth = || vec![tensor("tenth", &[], &0.1_f32.to_le_bytes())];
    let of = |nodes: &[NodeProto], weights: &[(&str, &[i64])]| {
        for (parallel, microbatches) in [
            (Parallel::default(), MICROBATCHES),
            (Parallel { dp: 2, ..Parallel::default() }, 3),
            (Parallel { dp: 2, zero: Zero::Parameters, ..Parallel::default() }, 2),
            (Parallel { tp: 2, ..Parallel::default() }, 2),
            (Parallel { pp: 2, ..Parallel::default() }, 2),
        ] {
            let case = Case { loss: LossKind::Output, nodes, x: &[12, 6], weights, tensors: tenth(), mixed: None };
            case.agrees(parallel, microbatches);
        }
    };
    of(&[&error[..], &penalty].concat(), &[("w", &[6, 8]), ("v", &[8, 4])]);
    of(&[&error[..], &norms].concat(), &[("w", &[6, 6]), ("v", &[6, 6])]);
    of(&[&error[..], &weighed].concat(), &[("w", &[6, 8]), ("v", &[8, 4]), ("s", &[])]);
    of(&[&made[..], &error, &penalty].concat(), &[("u", &[6, 8]), ("v", &[8, 4])]);
}

/// Of a product of two means one is made of data alone: it is known before the passes, so that the other may be summed.
#[test]
fn a_mean_of_data_meets_a_mean_of_the_model() {
    let nodes = |due: &str| {
        [
            node("MatMul", &["x", "w"], &["inner"]),
            node("Tanh", &["inner"], &["hidden"]),
            node("MatMul", &["hidden", "v"], &["scores"]),
            with_int(node("Softmax", &["scores"], &["odds"]), "axis", 1),
            with_int(node("ReduceMean", &["odds", "samples"], &["chosen"]), "keepdims", 0),
            with_int(node("ReduceMean", &["x", "samples"], &["found"]), "keepdims", 0),
            node("Mul", &["found", "found"], &["square"]),
            node("Mul", &["chosen", due], &["products"]),
            with_int(node("ReduceSum", &["products"], &["y"]), "keepdims", 0),
        ]
    };
    let parallels = [
        Parallel::default(),
        Parallel { dp: 2, ..Parallel::default() },
        Parallel { dp: 2, zero: Zero::Parameters, ..Parallel::default() },
        Parallel { tp: 2, ..Parallel::default() },
        Parallel { pp: 2, ..Parallel::default() },
    ];
    let matrices = |left: &str, right: &str| {
        [
            node("MatMul", &["x", "w"], &["inner"]),
            node("Tanh", &["inner"], &["hidden"]),
            node("MatMul", &["hidden", "v"], &["scores"]),
            with_int(node("Softmax", &["scores"], &["odds"]), "axis", 1),
            node("ReduceMean", &["odds", "samples"], &["chosen"]),
            node("ReduceMean", &["x", "samples"], &["found"]),
            with_ints(node("Transpose", &[right], &["column"]), "perm", &[1, 0]),
            node("MatMul", &[left, "column"], &["product"]),
            with_int(node("ReduceSum", &["product"], &["y"]), "keepdims", 0),
        ]
    };
    let agrees = |nodes: &[NodeProto], parallel: &Parallel| {
        let weights: [(&str, &[i64]); 2] = [("w", &[6, 8]), ("v", &[8, 6])];
        let tensors = vec![int_tensor("samples", &[1], &[0])];
        let case = Case { loss: LossKind::Output, nodes, x: &[12, 6], weights: &weights, tensors, mixed: None };
        case.agrees(parallel.clone(), 2);
    };
    for parallel in &parallels {
        // Also its square, which is no sum.
        agrees(&nodes("found"), parallel);
        agrees(&nodes("square"), parallel);
    }
    // One of them is a term of the other, in one microbatch too.
    let mixed = [
        node("MatMul", &["x", "w"], &["inner"]),
        node("MatMul", &["inner", "v"], &["scores"]),
        node("ReduceMean", &["scores", "samples"], &["chosen"]),
        node("ReduceMean", &["x", "samples"], &["found"]),
        node("Sub", &["chosen", "found"], &["off"]),
        node("Mul", &["off", "found"], &["products"]),
        with_int(node("ReduceSum", &["products"], &["y"]), "keepdims", 0),
    ];
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 8]), ("v", &[8, 6])];
    for (parallel, microbatches) in parallels[..4].iter().flat_map(|parallel| [(parallel, 1), (parallel, 2)]) {
        let tensors = vec![int_tensor("samples", &[1], &[0])];
        let case = Case { loss: LossKind::Output, nodes: &mixed, x: &[12, 6], weights: &weights, tensors, mixed: None };
        case.agrees(parallel.clone(), microbatches);
    }
    for parallel in &parallels[..4] {
        agrees(&matrices("found", "chosen"), parallel);
        agrees(&matrices("chosen", "found"), parallel);
    }
}

/// What is centred by a mean of data beside terms that read the mean as it is: of one microbatch it is known in place, once.
#[test]
fn a_mean_of_data_centres_samples_and_is_a_term() {
    let nodes = [
        with_int(node("ReduceMean", &["x", "samples"], &["found"]), "keepdims", 0),
        node("Sub", &["x", "found"], &["centred"]),
        node("MatMul", &["centred", "w"], &["inner"]),
        node("MatMul", &["inner", "v"], &["scores"]),
        with_int(node("ReduceMean", &["scores", "samples"], &["chosen"]), "keepdims", 0),
        node("Mul", &["chosen", "found"], &["products"]),
        with_int(node("ReduceSum", &["products"], &["first"]), "keepdims", 0),
        node("Mul", &["found", "found"], &["square"]),
        with_int(node("ReduceSum", &["square"], &["length"]), "keepdims", 0),
        with_int(node("ReduceMean", &["scores"], &["score"]), "keepdims", 0),
        node("Mul", &["length", "score"], &["second"]),
        with_int(node("ReduceSum", &["found"], &["third"]), "keepdims", 0),
        node("Add", &["first", "second"], &["two"]),
        node("Add", &["two", "third"], &["y"]),
    ];
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 8]), ("v", &[8, 6])];
    let dp = Parallel { dp: 2, ..Parallel::default() };
    let zero = Parallel { zero: Zero::Parameters, ..dp.clone() };
    for (parallel, microbatches) in [(Parallel::default(), 1), (Parallel::default(), 2), (dp, 1), (zero, 2)] {
        let tensors = vec![int_tensor("samples", &[1], &[0])];
        let case = Case { loss: LossKind::Output, nodes: &nodes, x: &[12, 6], weights: &weights, tensors, mixed: None };
        case.agrees(parallel, microbatches);
    }
}

/// The slope of a root of a mean is known only once all samples are.
#[test]
fn a_root_of_a_mean_over_microbatches_is_refused_by_name() {
    let nodes = [
        node("MatMul", &["x", "w"], &["z"]),
        node("Mul", &["z", "z"], &["squares"]),
        with_int(node("ReduceMean", &["squares"], &["error"]), "keepdims", 0),
        node("Sqrt", &["error"], &["y"]),
    ];
    let case = Case {
        loss: LossKind::Output,
        nodes: &nodes,
        x: &[8, 6],
        weights: &[("w", &[6, 5])],
        tensors: Vec::new(),
        mixed: None,
    };
    case.agrees(Parallel { dp: 2, ..Parallel::default() }, 1);
    let error = case.compile(Parallel::default(), 2).err().expect("the slope needs all of the batch");
    expect_test::expect![[r#"
        error[DCC0301]: a sum over all 2 microbatches, which depends on parameters, is needed before the last of them
          at   node 3 `/sqrt` (Sqrt, opset 23)
          help use one microbatch (--grad-accum 1), or a loss that is linear in means over samples"#]]
    .assert_eq(&error.to_string());
}

/// The gradient of what is made of weights alone, by steps that a sum does not pass through: the update takes them once.
#[test]
fn what_is_made_of_weights_may_round_and_attend() {
    let cast = |from: &str, to: &str, dtype: DataType| with_int(node("Cast", &[from], &[to]), "to", dtype as i64);
    let multiplied = [node("MatMul", &["x", "w"], &["h"]), node("Mul", &["h", "scale"], &["y"])];
    let through = |dtype: DataType| {
        vec![
            node("Tanh", &["v"], &["bent"]),
            cast("bent", "other", dtype),
            node("Mul", &["other", "other"], &["square"]),
            cast("square", "back", DataType::Float),
            node("Sigmoid", &["back"], &["scale"]),
        ]
    };
    let attention = vec![
        node("Reshape", &["v", "heads"], &["q"]),
        node("Attention", &["q", "q", "q"], &["attended"]),
        node("Reshape", &["attended", "row"], &["once"]),
        node("Add", &["once", "v"], &["scale"]),
    ];
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 4]), ("v", &[4])];
    for made in [through(DataType::Float16), through(DataType::Double), attention] {
        let nodes = [&made[..], &multiplied].concat();
        let tensors = || vec![int_tensor("heads", &[4], &[1, 1, 4, 1]), int_tensor("row", &[1], &[4])];
        for (parallel, microbatches) in [
            (Parallel::default(), 4),
            (Parallel { dp: 2, ..Parallel::default() }, 3),
            (Parallel { dp: 2, zero: Zero::Gradients, ..Parallel::default() }, 2),
            (Parallel { tp: 2, ..Parallel::default() }, 2),
        ] {
            let case =
                Case { loss: LossKind::Mse, nodes: &nodes, x: &[12, 6], weights: &weights, tensors: tensors(), mixed: None };
            case.agrees(parallel, microbatches);
        }
    }
}

/// One sum of samples is the gradient of a bias and, by another name, of a row of a table: each is scattered at once.
#[test]
fn a_gradient_of_two_names_is_scattered_by_both() {
    let nodes = [
        node("MatMul", &["x", "w"], &["h"]),
        node("Add", &["h", "bias"], &["shifted"]),
        node("Gather", &["table", "zeros"], &["rows"]),
        node("Add", &["shifted", "rows"], &["sum"]),
        with_int(node("LayerNormalization", &["sum", "scale", "shift"], &["normal"]), "axis", -1),
        node("MatMul", &["normal", "v"], &["y"]),
    ];
    let tensors = || vec![int_tensor("zeros", &[12, 5], &[0; 60])];
    let weights: [(&str, &[i64]); 6] =
        [("w", &[6, 8]), ("bias", &[8]), ("table", &[4, 8]), ("scale", &[8]), ("shift", &[8]), ("v", &[8, 4])];
    for zero in [Zero::Nothing, Zero::State, Zero::Gradients, Zero::Parameters] {
        let case =
            Case { loss: LossKind::Mse, nodes: &nodes, x: &[12, 5, 6], weights: &weights, tensors: tensors(), mixed: None };
        case.agrees(Parallel { dp: 2, zero, ..Parallel::default() }, 1);
        case.agrees(Parallel { dp: 2, zero, ..Parallel::default() }, 3);
    }
}

/// Zeros in memory beside a sum over samples are no partial sum.
#[test]
fn a_sum_of_samples_is_padded_by_zeros() {
    let nodes = [
        node("MatMul", &["x", "w"], &["h"]),
        with_int(with_ints(node("ReduceMean", &["h"], &["sum"]), "axes", &[0]), "keepdims", 0),
        node("ConstantOfShape", &["three"], &["zeros"]),
        with_int(node("Concat", &["sum", "zeros"], &["padded"]), "axis", 0),
        node("MatMul", &["x", "v"], &["z"]),
        node("Add", &["z", "padded"], &["shifted"]),
        node("Tanh", &["shifted"], &["y"]),
    ];
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 5]), ("v", &[6, 8])];
    let tensors = vec![int_tensor("three", &[1], &[3])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 6], weights: &weights, tensors, mixed: None };
    case.agrees(Parallel::default(), 1);
    case.agrees(Parallel { dp: 2, ..Parallel::default() }, 1);
}

/// Statistics of a weight, which standardise it, are the same for all microbatches.
#[test]
fn a_weight_is_standardised_once() {
    let nodes = [
        node("Reshape", &["w", "flat"], &["rows"]),
        with_int(
            node("BatchNormalization", &["rows", "scale", "shift", "mean", "variance"], &["standard"]),
            "training_mode",
            1,
        ),
        node("Reshape", &["standard", "square"], &["u"]),
        node("MatMul", &["x", "u"], &["h"]),
        node("Tanh", &["h"], &["t"]),
        node("MatMul", &["t", "v"], &["y"]),
    ];
    let tensors = || vec![int_tensor("flat", &[3], &[1, 6, 5]), int_tensor("square", &[2], &[6, 5])];
    let lines: [(&str, &[i64]); 4] = [("scale", &[6]), ("shift", &[6]), ("mean", &[6]), ("variance", &[6])];
    let weights: Vec<(&str, &[i64])> = [("w", &[6_i64, 5][..]), ("v", &[5, 4])].into_iter().chain(lines).collect();
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 6], weights: &weights, tensors: tensors(), mixed: None };
    for parallel in [Parallel::default(), Parallel { dp: 2, ..Parallel::default() }, Parallel { pp: 2, ..Parallel::default() }]
    {
        case.agrees(parallel, 2);
    }
}

/// Attention over `from`, with the projections and the heads of `name`.
fn attention(name: &str, from: &str, to: &str) -> Vec<NodeProto> {
    let own = |what: &str| format!("{name}_{what}");
    let mut nodes = Vec::new();
    for what in ["q", "k", "v"] {
        let [weight, flat, apart, turned] = ["w", "flat", "apart", "turned"].map(|step| own(&format!("{what}_{step}")));
        let order: &[i64] = if what == "k" { &[0, 2, 3, 1] } else { &[0, 2, 1, 3] };
        nodes.push(node("MatMul", &[from, &weight], &[&flat]));
        nodes.push(node("Reshape", &[&flat, &own("heads")], &[&apart]));
        nodes.push(with_ints(node("Transpose", &[&apart], &[&turned]), "perm", order));
    }
    let [scores, shares, mixed, back, joined] = ["scores", "shares", "mixed", "back", "joined"].map(own);
    nodes.push(node("MatMul", &[&own("q_turned"), &own("k_turned")], &[&scores]));
    nodes.push(with_int(node("Softmax", &[&scores], &[&shares]), "axis", -1));
    nodes.push(node("MatMul", &[&shares, &own("v_turned")], &[&mixed]));
    nodes.push(with_ints(node("Transpose", &[&mixed], &[&back]), "perm", &[0, 2, 1, 3]));
    nodes.push(node("Reshape", &[&back, "rows"], &[&joined]));
    nodes.push(node("MatMul", &[&joined, &own("o_w")], &[to]));
    nodes
}

/// As the stages of a pyramid have them: two heads are shared by two ranks, three are computed by both.
#[test]
fn heads_that_ranks_cannot_share_are_whole_beside_others() {
    let nodes = [attention("two", "x", "h"), attention("three", "h", "y")].concat();
    let line = |name: &str, values: &[i64]| int_tensor(name, &[values.len() as i64], values);
    let tensors = || vec![line("two_heads", &[8, 5, 2, 4]), line("three_heads", &[8, 5, 3, 4]), line("rows", &[8, 5, -1])];
    let names: Vec<(String, [i64; 2])> = [("two", 8), ("three", 12)]
        .into_iter()
        .flat_map(|(name, width)| ["q_w", "k_w", "v_w", "o_w"].map(|what| (name, what, width)))
        .map(|(name, what, width)| (format!("{name}_{what}"), if what == "o_w" { [width, 6] } else { [6, width] }))
        .collect();
    let weights: Vec<(&str, &[i64])> = names.iter().map(|(name, dims)| (name.as_str(), &dims[..])).collect();
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors: tensors(), mixed: None };
    case.agrees(Parallel { tp: 2, ..Parallel::default() }, 1);
    case.agrees(Parallel { tp: 2, dp: 2, ..Parallel::default() }, 2);
    let three = attention("three", "x", "y");
    let alone =
        Case { loss: LossKind::Mse, nodes: &three, x: &[8, 5, 6], weights: &weights[4..], tensors: tensors(), mixed: None };
    let compiled = alone.agrees(Parallel { tp: 2, ..Parallel::default() }, 1);
    let told =
        |warning: &String| warning.contains("can share attention with 3 heads: each computes it whole; `--tp 3` divides heads");
    assert!(compiled.imported.warnings.iter().any(told), "{:?}", compiled.imported.warnings);
}
