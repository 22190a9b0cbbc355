//! The models of all exporters: what their patterns become, that they stay what they are, how much there is to solve.

use super::*;
use crate::graph::verify;
use crate::import::Imported;
use crate::import::proto::type_proto::Value as Type;
use crate::interp::outputs;
use crate::loss::LossKind;
use crate::ops::Param;
use crate::precision::retype;
use crate::sources;
use crate::train::{Trainable, TrainingOptions, train_step};
use dcc_program::kernel::UnaryOp;
use dcc_program::program::MaskKind;
use expect_test::expect;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(name)
}

fn model(name: &str) -> PathBuf {
    folder("models").join(format!("{name}.onnx"))
}

/// The models of a folder, sorted by name.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "onnx"));
    paths.sort();
    paths
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

fn imported(path: &Path) -> Imported {
    let model = crate::import::Model::decode(std::fs::read(path).unwrap().into()).unwrap();
    let mut options = crate::import::Options { global_batch: Some(2), ..Default::default() };
    let types = model.graph().input.iter().filter_map(|input| input.r#type.as_ref()?.value.as_ref());
    let shapes = types.filter_map(|ty| if let Type::TensorType(ty) = ty { ty.shape.as_ref() } else { None });
    let symbols = shapes.flat_map(|shape| &shape.dim).filter_map(|dim| crate::import::symbol(dim.value.as_ref()));
    let sequences = symbols.filter(|name| ["seq", "sequence", "s", "sequence_length"].contains(name));
    options.dims = sequences.map(|name| (name.to_owned(), 8)).collect();
    crate::import::onnx(&model, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn import(path: &Path) -> Graph {
    imported(path).graph
}

fn attentions(graph: &Graph) -> Vec<&crate::ops::Attention> {
    let attention = |n: &'_ crate::graph::Node| matches!(&n.op, Op::Attention(a) if a.out == 0);
    graph.nodes.iter().filter(|n| attention(n)).map(|n| if let Op::Attention(a) = &n.op { a } else { unreachable!() }).collect()
}

/// Inputs and weights; keys at the end of some rows are masked, but never all of a row.
fn bind_masked(graph: &Graph) -> Bindings {
    let mut bindings = bind(graph);
    for (name, value) in &mut bindings.inputs {
        if name.contains("mask") {
            let ty = value.ty();
            let rows = ty.shape[1] as usize;
            let keep = (0..ty.elements() as usize).map(|i| i64::from(i % rows < rows - i / rows % 3)).collect();
            *value = Tensor::ints(ty.dtype, &ty.shape, keep);
        }
    }
    bindings
}

/// Simplifies a model in f64; its outputs stay. Returns both graphs.
fn same_outputs(path: &Path) -> (Graph, Graph) {
    let before = retype(&import(path), DType::F64).unwrap();
    let after = simplify(&before).unwrap();
    verify(&after).unwrap();
    let bindings = bind_masked(&before);
    let values = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    for ((name, a), (_, b)) in values(&before).iter().zip(&values(&after)) {
        assert!(!differ(a, b) && a.to_f64s().iter().all(|x| x.is_finite()), "{}: {name}", path.display());
    }
    (before, after)
}

#[test]
fn attention_of_every_exporter_is_one_op() {
    let paths = paths(&folder("models/attention"));
    assert!(paths.len() >= 40, "{} models", paths.len());
    for path in paths {
        let (_, after) = same_outputs(&path);
        let found = attentions(&after);
        let name = stem(&path);
        assert_eq!(found.len(), 1, "{name}");
        // Exporters write the scale as f32.
        let scale = f64::from_bits(found[0].attributes.scale) * 8f64.sqrt();
        assert!((scale - 1.0).abs() < f64::from(f32::EPSILON), "{name}: the scale {scale} · √8 has not moved in");
        // The eager exports with a mask of padding add the lowest float, under which a row without a key is uniform.
        let padded = name.starts_with("bert") || name.contains("eager_legacy") && !name.starts_with("nanogpt");
        let constant = name.starts_with("nanogpt_eager");
        assert_eq!(found[0].attributes.causal, !padded && !constant, "{name}");
        assert!(padded || found[0].attributes.mask != MaskKind::Additive, "{name}");
        // Heads of keys are never written out once for each head of queries.
        let grouped = found[0].attributes.spec.names.iter().any(|n| n == "g");
        assert_eq!(grouped, name.starts_with("llama"), "{name}");
    }
}

/// What patterns of a model have become: attentions, norms by their `rsqrt`, activations, and what none of them needs.
fn patterns(graph: &Graph) -> String {
    let count = |wanted: &dyn Fn(&Op) -> bool| graph.nodes.iter().filter(|n| wanted(&n.op)).count();
    let unary = |wanted: UnaryOp| count(&|op| matches!(op, Op::Unary(u) if u.op == wanted));
    let named = |name: &str| count(&|op| op.name() == name);
    let binary = |name: &str| count(&|op| matches!(op, Op::Binary(b) if b.op.name() == name));
    format!(
        "attention {}, rsqrt {} of {} sums, tanh {}, erf {}, logistic {}, dot {}, transpose {}, div {}, sqrt {}, pow {}",
        attentions(graph).len(),
        unary(UnaryOp::Rsqrt),
        named("reduce"),
        unary(UnaryOp::Tanh),
        unary(UnaryOp::Erf),
        unary(UnaryOp::Logistic),
        named("dot_general"),
        named("transpose"),
        binary("div"),
        unary(UnaryOp::Sqrt),
        binary("pow"),
    )
}

/// Models beyond a million weights take the interpreter too long.
fn is_small(graph: &Graph) -> bool {
    let weight = |n: &&crate::graph::Node| matches!(n.op, Op::Param(_));
    graph.nodes.iter().filter(weight).map(|n| n.ty.elements()).sum::<u64>() < 1 << 20
}

#[test]
fn whole_models_stay_what_they_are() {
    let mut found = String::new();
    for path in paths(&folder("models")) {
        if is_small(&import(&path)) {
            let (before, after) = same_outputs(&path);
            assert!(elements(&after) <= elements(&before), "{}", path.display());
            found += &format!("{}: {}\n", stem(&path), patterns(&after));
        }
    }
    expect![[r#"
        bert_tiny: attention 2, rsqrt 6 of 12 sums, tanh 0, erf 0, logistic 0, dot 14, transpose 0, div 0, sqrt 0, pow 0
        bert_tiny_opset20: attention 2, rsqrt 6 of 12 sums, tanh 0, erf 0, logistic 0, dot 14, transpose 0, div 0, sqrt 0, pow 0
        cnn: attention 0, rsqrt 0 of 1 sums, tanh 0, erf 0, logistic 0, dot 2, transpose 0, div 0, sqrt 0, pow 0
        cnn_legacy: attention 0, rsqrt 0 of 1 sums, tanh 0, erf 0, logistic 0, dot 2, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_dropout: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_legacy: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_mask: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_opset18: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_opset20: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_optimized: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gpt2_tiny_shuffled: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        gru_legacy: attention 0, rsqrt 0 of 0 sums, tanh 16, erf 0, logistic 32, dot 35, transpose 1, div 0, sqrt 0, pow 0
        gru_optimized: attention 0, rsqrt 0 of 0 sums, tanh 8, erf 0, logistic 16, dot 18, transpose 1, div 0, sqrt 0, pow 0
        llama_tiny: attention 2, rsqrt 5 of 5 sums, tanh 0, erf 0, logistic 2, dot 15, transpose 0, div 0, sqrt 0, pow 0
        llama_tiny_opset20: attention 2, rsqrt 5 of 5 sums, tanh 0, erf 0, logistic 2, dot 15, transpose 0, div 0, sqrt 0, pow 0
        llama_tiny_optimized: attention 2, rsqrt 5 of 5 sums, tanh 0, erf 0, logistic 2, dot 15, transpose 0, div 0, sqrt 0, pow 0
        lstm: attention 0, rsqrt 0 of 0 sums, tanh 32, erf 0, logistic 48, dot 19, transpose 1, div 0, sqrt 0, pow 0
        lstm_legacy: attention 0, rsqrt 0 of 0 sums, tanh 32, erf 0, logistic 48, dot 19, transpose 1, div 0, sqrt 0, pow 0
        mlp: attention 0, rsqrt 0 of 0 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        mlp_legacy: attention 0, rsqrt 0 of 0 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        mlp_legacy_dropout: attention 0, rsqrt 0 of 0 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        mlp_nll: attention 0, rsqrt 0 of 4 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 1, sqrt 0, pow 0
        mlp_optimized: attention 0, rsqrt 0 of 0 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        mlp_sce: attention 0, rsqrt 0 of 4 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 1, sqrt 0, pow 0
        mlp_sce_legacy: attention 0, rsqrt 0 of 4 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 1, sqrt 0, pow 0
        norm_mlp: attention 0, rsqrt 2 of 4 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        norm_mlp_legacy: attention 0, rsqrt 2 of 4 sums, tanh 0, erf 0, logistic 0, dot 3, transpose 0, div 0, sqrt 0, pow 0
        static_bert_classifier: attention 2, rsqrt 5 of 10 sums, tanh 1, erf 0, logistic 0, dot 14, transpose 0, div 0, sqrt 0, pow 0
        static_gpt: attention 4, rsqrt 9 of 18 sums, tanh 4, erf 0, logistic 0, dot 17, transpose 0, div 0, sqrt 0, pow 0
        static_mixer: attention 0, rsqrt 2 of 5 sums, tanh 0, erf 0, logistic 0, dot 6, transpose 1, div 0, sqrt 0, pow 0
        static_neox: attention 2, rsqrt 3 of 6 sums, tanh 0, erf 0, logistic 0, dot 9, transpose 0, div 0, sqrt 0, pow 0
        two_inputs: attention 0, rsqrt 1 of 4 sums, tanh 1, erf 0, logistic 1, dot 6, transpose 0, div 1, sqrt 0, pow 0
    "#]].assert_eq(&found);
}

/// In the dtype of their numbers, which exporters round: of another one the same text is another function.
#[test]
fn gelu_of_every_exporter_is_one_op() {
    let mut found = 0;
    for path in paths(&folder("models")) {
        let (name, before) = (stem(&path), import(&path));
        let count = |graph: &Graph, op| graph.nodes.iter().filter(|n| matches!(&n.op, Op::Unary(u) if u.op == op)).count();
        let after = simplify(&before).unwrap();
        let [erf, gelu, tanh] = [UnaryOp::Erf, UnaryOp::Gelu, UnaryOp::GeluTanh].map(|op| count(&after, op));
        assert!(
            erf == 0 && gelu == count(&before, UnaryOp::Erf) + count(&before, UnaryOp::Gelu),
            "{name}: {erf} erf, {gelu} gelu"
        );
        let layers = attentions(&after).len();
        let is_tanh = name.starts_with("gpt") || name == "static_gpt";
        assert_eq!(tanh, if is_tanh { layers } else { 0 }, "{name}");
        found += gelu + tanh;
    }
    assert!(found >= 50, "{found}");
}

/// Elements that the computed nodes of a graph write.
fn elements(graph: &Graph) -> u64 {
    let source = |op: &Op| {
        matches!(op, Op::Param(_) | Op::Input(_) | Op::Const(_) | Op::Iota(_) | Op::BroadcastInDim(_) | Op::Reshape(_))
    };
    graph.nodes.iter().filter(|n| !source(&n.op)).map(|n| n.ty.elements()).sum()
}

#[test]
fn equal_graphs_become_equal_graphs() {
    for name in ["gpt2_tiny_legacy", "llama_tiny_opset20", "bert_tiny_opset20", "mlp_nll"] {
        let graph = import(&model(name));
        let (one, two) = (simplify(&graph).unwrap(), simplify(&graph).unwrap());
        assert_eq!(one.to_string(), two.to_string(), "{name}");
        // The text is all: what it says is the same graph.
        assert_eq!(simplify(&Graph::parse(&graph.to_string()).unwrap()).unwrap().nodes.len(), one.nodes.len(), "{name}");
        assert!(simplify(&one).unwrap().nodes.len() <= one.nodes.len(), "{name}");
    }
}

/// What there is to solve in a model: regions and different problems.
fn problems(graph: &Graph) -> (usize, usize) {
    let rewriter = Rewriter::new(graph, Vec::new());
    let regions = region::cut(graph, &rewriter.kinds, Phase::Forward, None);
    let problems: std::collections::HashSet<Problem> = regions.iter().map(|nodes| rewriter.region(nodes).problem).collect();
    (regions.len(), problems.len())
}

#[test]
fn layers_are_solved_once() {
    let (small, small_problems) = problems(&import(&model("gpt2_124m")));
    let (large, large_problems) = problems(&import(&model("gpt3_175b")));
    assert!(small >= 24 && small_problems <= 8, "{small} regions, {small_problems} problems");
    assert!(large >= 7 * small && large_problems <= 8, "{large} regions, {large_problems} problems");
}

/// Layers on a residual stream that all turn their queries by angles which are a parameter: two values that pass through all.
fn rotating(layers: usize) -> Graph {
    use dcc_program::kernel::BinaryOp::{Add, Mul, Sub};
    let mut graph = Graph::new();
    let shape = Shape::from_slice(&[4, 8]);
    let input = Input { name: "x".to_owned(), dtype: DType::F64, shape: shape.clone(), batch_dim: Some(0) };
    let mut x = graph.add(input, &[]).unwrap();
    let angles = Param { name: "angles".to_owned(), kind: ParamKind::Weight, piece: None, dtype: DType::F64, shape };
    let angles = graph.add(angles, &[]).unwrap();
    let turns = [UnaryOp::Cos, UnaryOp::Sin].map(|op| graph.unary(op, angles).unwrap());
    for _ in 0..layers {
        let [q, k, v] =
            [UnaryOp::Tanh, UnaryOp::Erf, UnaryOp::Logistic].map(|op| (0..8).fold(x, |from, _| graph.unary(op, from).unwrap()));
        let [cos, sin] = turns.map(|turn| graph.binary(Mul, q, turn).unwrap());
        let turned = graph.binary(Sub, cos, sin).unwrap();
        let scores = graph.binary(Mul, turned, k).unwrap();
        let read = graph.binary(Mul, scores, v).unwrap();
        x = graph.binary(Add, x, read).unwrap();
    }
    graph.outputs = vec![("x".to_owned(), x)];
    graph
}

/// Even the last layer, behind which nothing reads the angles any more, and layers that are few enough for all to be one region.
#[test]
fn what_all_layers_read_does_not_move_their_cuts() {
    for layers in [2, 5, 12] {
        let (regions, problems) = problems(&rotating(layers));
        assert!(regions == layers && problems <= 3, "{layers} layers: {regions} regions, {problems} problems");
    }
}

/// The training step of a model as `compile` makes it up to planning, and the parameters' names.
fn step(forward: &Graph, imported: &Imported) -> Graph {
    let trainable =
        |p: &crate::import::Parameter| Trainable { name: p.tensor.name.clone(), aliases: Vec::new(), by_default: p.trained };
    let mut options = TrainingOptions::default();
    options.loss.loss_outputs = imported.outputs.iter().filter(|o| o.is_loss).map(|o| o.name.clone()).collect();
    if imported.inputs.len() > 1 && options.loss.loss_outputs.is_empty() && !forward.nodes.iter().any(is_gather) {
        options.loss.kind = LossKind::Mse;
    }
    let trainable: Vec<Trainable> = imported.parameters.iter().map(trainable).collect();
    train_step(forward, &trainable, &options).unwrap().graph
}

fn is_gather(node: &crate::graph::Node) -> bool {
    matches!(node.op, Op::Gather(_))
}

/// Rewriting before and after gradients leaves loss, norm and every new weight as they are.
fn same_step(path: &Path) {
    let imported = imported(path);
    let plain = retype(&imported.graph, DType::F64).unwrap();
    let before = step(&plain, &imported);
    let train = step(&sources::split(&simplify(&plain).unwrap()).unwrap(), &imported);
    let after = simplify(&train).unwrap();
    verify(&after).unwrap();
    assert_eq!(after.to_string(), simplify(&train).unwrap().to_string(), "{}", path.display());
    let bindings = bind_masked(&before);
    let values = |graph: &Graph| {
        let whole = |op: &Op| matches!(op, Op::Param(Param { piece: None, .. }));
        let pieces = graph.nodes.iter().filter(|n| matches!(n.op, Op::Param(_)) && !whole(&n.op)).count();
        (outputs(graph, &bindings, Precision::Exact).unwrap(), pieces)
    };
    let ((old, _), (new, pieces)) = (values(&before), values(&after));
    let mut compared = 0;
    for (name, a) in &old {
        if let Some((_, b)) = new.iter().find(|(n, _)| n == name) {
            // What is zero but for rounding (the gradient of a bias of keys) has no digits to compare.
            let zero = |x: &Tensor| x.to_f64s().iter().all(|x| x.abs() < 1e-12);
            assert!(!differ(a, b) || (zero(a) && zero(b)), "{}: {name}", path.display());
            compared += 1;
        }
    }
    assert!(compared + pieces >= old.len() && compared > 2, "{}: {compared} of {}", path.display(), old.len());
    let ties = |graph: &Graph| graph.ids().filter(|&id| graph.grad_of(id).is_some()).count();
    assert!(ties(&after) * 100 >= ties(&train) * 95, "{} of {} gradients keep their forward node", ties(&after), ties(&train));
}

macro_rules! steps {
    ($($name:ident),+ $(,)?) => {
        mod training_steps_stay_what_they_are {
            $(#[test]
            fn $name() {
                super::same_step(&super::model(stringify!($name)));
            })+
        }
    };
}

steps! { gpt2_tiny_legacy, gpt2_tiny_mask, llama_tiny, llama_tiny_opset20, bert_tiny, bert_tiny_opset20, mlp_sce, mlp_legacy, two_inputs }
