//! Every rule on random tensors, with a control that must fail; the models of all exporters; training graphs.

use super::rules::{Body, Of};
use super::term::{Expr, Facts, Term};
use super::*;
use crate::graph::verify;
use crate::interp::{Bindings, Precision, Tensor, evaluate, outputs};
use crate::ops::{Input, Param};
use crate::precision::widen;
use dcc_program::program::{MaskKind, ParamKind};
use dcc_program::{DType, Shape, TensorType};
use rules::all;
use std::path::Path;

mod examples;

/// Relative: the `--dtype f64` row of the tolerance table.
const TOLERANCE: f64 = 1e-9;

/// Numbers that look random, in [0.5, 1.5), or true and false.
fn noise(ty: &TensorType, seed: u64) -> Tensor {
    let hash = |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(0xd134_2543_de82_ef95));
    let unit = |i: u64| (hash(hash(i) >> 7) >> 11) as f64 / (1u64 << 53) as f64;
    let values = (0..ty.elements()).map(unit);
    match ty.dtype.is_float() {
        true => Tensor::floats(ty.dtype, &ty.shape, values.map(|u| 0.5 + u).collect()),
        false => Tensor::ints(ty.dtype, &ty.shape, values.map(|u| i64::from(u > 0.5)).collect()),
    }
}

fn bind(graph: &Graph) -> Bindings {
    let mut bindings = Bindings { learning_rate: 0.01, step: 1, seed: 3, ..Bindings::default() };
    for (i, node) in graph.nodes.iter().enumerate() {
        match &node.op {
            Op::Input(op) => drop(bindings.inputs.insert(op.name.clone(), noise(&node.ty, i as u64))),
            Op::Param(op) if op.kind == ParamKind::Weight => {
                let seed = op.name.bytes().map(u64::from).sum();
                drop(bindings.params.insert((op.name.clone(), op.kind.clone()), noise(&node.ty, seed)));
            }
            _ => {}
        }
    }
    bindings
}

fn differ(a: &Tensor, b: &Tensor) -> bool {
    let (a, b) = (a.to_f64s(), b.to_f64s());
    let scale = a.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
    a.len() != b.len() || a.iter().zip(&b).any(|(x, y)| (x - y).abs() > TOLERANCE * scale && !(x.is_nan() && y.is_nan()))
}

/// Tries one rule on every node of a graph and evaluates what it says on random tensors. How often it said something, or the
/// first difference.
fn try_rule(rule: &Rule, graph: &Graph) -> std::result::Result<usize, String> {
    let mut egraph = term::Graph::new(Facts);
    let mut ids = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        let args = node.operands.iter().map(|o| ids[o.0 as usize]).collect();
        let given = matches!(node.op, Op::Input(_) | Op::Param(_) | Op::Scalar(_));
        let head = if given { Head::Given(i as u32) } else { Head::Op(node.op.clone()) };
        ids.push(egraph.add(Term { head, ty: node.ty.clone(), args }));
    }
    egraph.rebuild();
    let (mut extended, bindings) = (graph.clone(), bind(graph));
    let mut fired = 0;
    for (i, &id) in ids.iter().enumerate() {
        let id = egraph.find(id);
        for term in &egraph[id].nodes {
            for found in rule.find(&egraph, id, term) {
                fired += 1;
                let other = in_graph(&mut extended, &egraph, &ids, &found);
                let values = evaluate(&extended, &[NodeId(i as u32), other], &bindings, Precision::Exact).unwrap();
                if differ(&values[0], &values[1]) || values[0].ty() != values[1].ty() {
                    return Err(format!("{}: {:?} is not {:?} = {found:?}", rule.name, values[0], values[1]));
                }
            }
        }
    }
    Ok(fired)
}

fn in_graph(graph: &mut Graph, egraph: &term::Graph, ids: &[egg::Id], expr: &Expr) -> NodeId {
    match expr {
        Expr::Class(id) => match ids.iter().position(|&i| egraph.find(i) == egraph.find(*id)) {
            Some(node) => NodeId(node as u32),
            // Numbers that folding made.
            None => {
                let data = &egraph[*id].data;
                in_graph(graph, egraph, ids, &Expr::Splat(data.splat.clone().expect("a number"), data.ty.clone()))
            }
        },
        Expr::Splat(value, ty) => {
            let scalar = graph.add(value.clone(), &[]).unwrap();
            graph.broadcast(scalar, &ty.shape, &[]).unwrap()
        }
        Expr::Node(op, args) => {
            let args: Vec<NodeId> = args.iter().map(|arg| in_graph(graph, egraph, ids, arg)).collect();
            graph.add(op.clone(), &args).unwrap()
        }
    }
}

/// The left side of a rule's text as a graph; its variables are inputs, its constants numbers.
fn left_side(rule: &Rule) -> Graph {
    let Body::Text { from, of, .. } = &rule.body else { panic!("{} is no text", rule.name) };
    let mut graph = Graph::new();
    let dtype = if *of == Of::Bool { DType::Bool } else { DType::F64 };
    let root = pattern_node(&mut graph, from, dtype);
    graph.outputs.push(("y".to_owned(), root));
    graph
}

fn pattern_node(graph: &mut Graph, pattern: &pattern::Pattern, dtype: DType) -> NodeId {
    use pattern::Pattern;
    let shape = Shape::from_slice(&[2, 3]);
    match pattern {
        Pattern::Any(name) => graph.add(Input { name: name.clone(), dtype, shape, batch_dim: None }, &[]).unwrap(),
        Pattern::Constant(name) => graph.splat(dtype, 1.0 + name.len() as f64 / 4.0, &shape).unwrap(),
        Pattern::Number(n) => graph.splat(dtype, *n, &shape).unwrap(),
        Pattern::Node(op, args) => {
            let condition = |i: usize| matches!(op, Op::Select(_)) && i == 0;
            let of = |i: usize| if condition(i) { DType::Bool } else { dtype };
            let args: Vec<NodeId> = args.iter().enumerate().map(|(i, arg)| pattern_node(graph, arg, of(i))).collect();
            graph.add(op.clone(), &args).unwrap()
        }
    }
}

#[test]
fn every_algebraic_rule_holds() {
    for rule in all().iter().filter(|r| matches!(r.body, Body::Text { .. })) {
        let fired = try_rule(rule, &left_side(rule)).unwrap();
        assert!(fired > 0, "{} does not find its own left side", rule.name);
    }
}

#[test]
fn every_rule_about_dims_holds() {
    let examples = examples::all();
    for rule in all().iter().filter(|r| matches!(r.body, Body::Code(_))) {
        let mine: Vec<_> = examples.iter().filter(|(name, _)| *name == rule.name).collect();
        assert!(!mine.is_empty(), "{} has no example", rule.name);
        for (_, graph) in mine {
            let fired = try_rule(rule, graph).unwrap();
            assert!(fired > 0, "{} finds nothing in its example", rule.name);
        }
    }
    let known: Vec<&str> = all().iter().map(|r| r.name).collect();
    assert!(examples.iter().all(|(name, _)| known.contains(name)));
}

#[test]
fn a_wrong_rule_fails() {
    for (from, to) in [("(mul ?x 2)", "?x"), ("(add ?x $a)", "(sub ?x $a)"), ("(sub ?x ?y)", "(sub ?y ?x)")] {
        let [from, to] = [from, to].map(|text| Box::new(pattern::Pattern::parse(text)));
        let rule = Rule { name: "wrong", body: Body::Text { from, to, of: Of::Float }, scope: Scope::Pointwise };
        assert!(try_rule(&rule, &left_side(&rule)).is_err());
    }
}

fn import(path: &Path) -> Graph {
    let model = crate::import::Model::decode(std::fs::read(path).unwrap().into()).unwrap();
    let mut options = crate::import::Options { global_batch: Some(2), ..Default::default() };
    for name in ["seq", "sequence", "s", "sequence_length"] {
        options.dims.insert(name.to_owned(), 8);
    }
    crate::import::onnx(&model, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display())).graph
}

fn attentions(graph: &Graph) -> Vec<&crate::ops::Attention> {
    let attention = |n: &'_ crate::graph::Node| matches!(&n.op, Op::Attention(a) if a.out == 0);
    graph.nodes.iter().filter(|n| attention(n)).map(|n| if let Op::Attention(a) = &n.op { a } else { unreachable!() }).collect()
}

/// Simplifies a model in f64; its outputs stay. Returns both graphs.
fn same_outputs(path: &Path) -> (Graph, Graph) {
    let before = widen(&import(path)).unwrap();
    let after = simplify(&before).unwrap();
    verify(&after).unwrap();
    let mut bindings = bind(&before);
    for (name, value) in &mut bindings.inputs {
        // Keys at the end of some rows are masked, but never all of a row.
        if name.contains("mask") {
            let ty = value.ty();
            let rows = ty.shape[1] as usize;
            let keep = (0..ty.elements() as usize).map(|i| i64::from(i % rows < rows - i / rows % 3)).collect();
            *value = Tensor::ints(ty.dtype, &ty.shape, keep);
        }
    }
    let values = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    for ((name, a), (_, b)) in values(&before).iter().zip(&values(&after)) {
        assert!(!differ(a, b) && a.to_f64s().iter().all(|x| x.is_finite()), "{}: {name}", path.display());
    }
    (before, after)
}

#[test]
fn attention_of_every_exporter_is_one_op() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/attention");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "onnx"));
    paths.sort();
    assert!(paths.len() >= 40, "{} models", paths.len());
    for path in paths {
        let (_, after) = same_outputs(&path);
        let found = attentions(&after);
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        assert_eq!(found.len(), 1, "{name}");
        let scale = f64::from_bits(found[0].attributes.scale);
        assert!((scale - 8f64.powf(-0.5)).abs() < 1e-9, "{name}: the scale {scale} has not moved in");
        // The eager exports with a mask of padding add the lowest float, under which a row without a key is uniform.
        let padded = name.starts_with("bert") || name.contains("eager_legacy") && !name.starts_with("nanogpt");
        let constant = name.starts_with("nanogpt_eager");
        assert_eq!(found[0].attributes.causal, !padded && !constant, "{name}");
        assert!(padded || found[0].attributes.mask != MaskKind::Additive, "{name}");
    }
}

#[test]
fn whole_models_stay_what_they_are() {
    let models = [
        ("gpt2_tiny_opset20", 4),
        ("gpt2_tiny_legacy", 4),
        ("llama_tiny_opset20", 2),
        ("bert_tiny_opset20", 2),
        ("two_inputs", 0),
    ];
    for (name, layers) in models {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/models/{name}.onnx"));
        let (before, after) = same_outputs(&path);
        assert_eq!(attentions(&after).len(), layers, "{name}");
        assert!(elements(&after) <= elements(&before), "{name}");
    }
}

/// Elements that the computed nodes of a graph write.
fn elements(graph: &Graph) -> u64 {
    let source = |op: &Op| {
        matches!(op, Op::Param(_) | Op::Input(_) | Op::Const(_) | Op::Iota(_) | Op::BroadcastInDim(_) | Op::Reshape(_))
    };
    graph.nodes.iter().filter(|n| !source(&n.op)).map(|n| n.ty.elements()).sum()
}

/// Nodes that take a kernel of their own: all but leaves, views and what is fused into others.
fn kernels(graph: &Graph) -> usize {
    let own = |op: &Op| {
        use Op::{Attention, Concatenate, DotGeneral, Gather, Reduce, Slice, Transpose};
        matches!(op, Attention(_) | Concatenate(_) | DotGeneral(_) | Gather(_) | Reduce(_) | Slice(_) | Transpose(_))
    };
    graph.nodes.iter().filter(|n| own(&n.op)).count()
}

#[test]
fn without_rules_there_are_a_third_more_kernels() {
    for (name, percent) in [("gpt2_tiny_opset20", 130), ("llama_tiny_opset20", 130), ("bert_tiny_opset20", 130)] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/models/{name}.onnx"));
        let graph = import(&path);
        let none = Rewriter::new(&graph, Vec::new()).run(false).unwrap();
        let with = simplify(&graph).unwrap();
        assert_eq!(kernels(&none), kernels(&graph));
        assert!(kernels(&none) * 100 >= kernels(&with) * percent, "{name}: {} for {}", kernels(&none), kernels(&with));
    }
}

#[test]
fn equal_graphs_become_equal_graphs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/gpt2_tiny_opset20.onnx");
    let graph = import(&path);
    let (one, two) = (simplify(&graph).unwrap(), simplify(&graph).unwrap());
    assert_eq!(one.nodes, two.nodes);
    assert_eq!(one.outputs, two.outputs);
    let again = simplify(&one).unwrap();
    assert!(again.nodes.len() <= one.nodes.len());
}

#[test]
fn layers_are_solved_once() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/gpt2_124m.onnx");
    let graph = import(&path);
    let rewriter = Rewriter::new(&graph, Vec::new());
    let regions = region::cut(&graph, &rewriter.kinds, Phase::Forward, None);
    let problems: std::collections::HashSet<Problem> = regions.iter().map(|nodes| rewriter.region(nodes).problem).collect();
    assert!(regions.len() >= 24 && problems.len() <= 8, "{} regions, {} problems", regions.len(), problems.len());
}

#[test]
fn a_training_step_stays_what_it_is() {
    use crate::train::{Trainable, TrainingOptions, train_step};
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/attention/gpt2_sdpa_dynamo20.onnx");
    let plain = widen(&import(&path)).unwrap();
    let names = plain.nodes.iter().filter_map(|n| match &n.op {
        Op::Param(Param { name, .. }) => Some(Trainable { name: name.clone(), aliases: Vec::new(), by_default: true }),
        _ => None,
    });
    let names: Vec<Trainable> = names.collect();
    let step = |forward: &Graph| train_step(forward, &names, &TrainingOptions::default()).unwrap().graph;
    let before = step(&plain);
    let train = step(&crate::sources::split(&simplify(&plain).unwrap()).unwrap());
    let after = simplify(&train).unwrap();
    verify(&after).unwrap();
    let bindings = bind(&plain);
    let find = |graph: &Graph, name: &str| -> Tensor {
        let id = graph.output(name).unwrap();
        evaluate(graph, &[id], &bindings, Precision::Exact).unwrap().remove(0)
    };
    for name in ["loss", "grad_norm", "weight:transformer.h.0.mlp.c_fc.weight", "weight:lm_head.weight"] {
        if before.output(name).is_some() {
            assert!(!differ(&find(&before, name), &find(&after, name)), "{name}");
            assert!(!differ(&find(&train, name), &find(&after, name)), "{name}");
        }
    }
    let ties = |graph: &Graph| graph.ids().filter(|&id| graph.grad_of(id).is_some()).count();
    assert!(ties(&after) * 100 >= ties(&train) * 95, "{} of {} gradients keep their forward node", ties(&after), ties(&train));
}
