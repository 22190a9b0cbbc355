//! Every rule on random tensors, with a control that must fail.

use super::rules::{Body, Of};
use super::solve::{Local, Problem};
use super::term::{Expr, Facts, Head, Term};
use super::*;
use crate::interp::{Bindings, Precision, Tensor, evaluate};
use crate::ops::{Binary, BroadcastInDim, Const, Input};
use dcc_program::kernel::BinaryOp;
use dcc_program::program::ParamKind;
use dcc_program::{DType, Shape, TensorType};
use rules::all;

mod examples;
mod interleaving;
mod models;
mod resembling;
mod rolling;

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
                let value = noise(&node.ty, seed);
                // Matrices are centred, so that products of many stay small.
                let centred = |value: &Tensor| value.to_f64s().into_iter().map(|x| (x - 1.0) / 2.0).collect();
                let value = match node.ty.rank() {
                    0 | 1 => value,
                    _ => Tensor::floats(node.ty.dtype, &node.ty.shape, centred(&value)),
                };
                bindings.params.insert((op.name.clone(), op.kind.clone()), value);
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
        Pattern::Any(name) | Pattern::Varying(name) => {
            graph.add(Input { name: name.clone(), dtype, shape, batch_dim: None }, &[]).unwrap()
        }
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

/// A table that regions make each for itself, divided by a number: what stands for the division is not what stands for the number.
#[test]
fn what_regions_share_may_be_an_output() {
    let mut graph = Graph::new();
    let shape = Shape::from_slice(&[4, 3]);
    let x =
        graph.add(Input { name: "x".to_owned(), dtype: DType::F64, shape: shape.clone(), batch_dim: Some(0) }, &[]).unwrap();
    let table = graph.add(crate::ops::Iota { dtype: DType::F64, shape, dim: 0 }, &[]).unwrap();
    let sixteen = graph.splat_like(16.0, table).unwrap();
    let quotient = graph.binary(dcc_program::kernel::BinaryOp::Div, table, sixteen).unwrap();
    let sum = graph.binary(dcc_program::kernel::BinaryOp::Add, quotient, x).unwrap();
    graph.outputs = vec![("quotient".to_owned(), quotient), ("sum".to_owned(), sum)];
    let (bindings, simple) = (bind(&graph), simplify(&graph).unwrap());
    let outputs: Vec<NodeId> = simple.outputs.iter().map(|&(_, id)| id).collect();
    let expected = evaluate(&graph, &[quotient, sum], &bindings, Precision::Exact).unwrap();
    let found = evaluate(&simple, &outputs, &bindings, Precision::Exact).unwrap();
    assert!(!differ(&found[1], &expected[1]), "{simple}");
    assert!(!differ(&found[0], &expected[0]), "{simple}");
}

/// The scales of `std(x) = sqrt(mean * n / (n - 1))`, and a chain of divisions: what equals them is no more than a few terms each.
#[test]
fn numbers_that_meet_are_folded_and_make_no_others() {
    let ty = TensorType::new(DType::F32, [2, 3]);
    let terms_of = |factors: &[(BinaryOp, f64)]| {
        let local = |head: Head, args: &[u32]| Local { head, ty: ty.clone(), args: args.iter().copied().collect() };
        let mut terms = vec![local(Head::Given(0), &[])];
        for &(op, factor) in factors {
            let last = terms.len() as u32 - 1;
            let number = TensorType::new(DType::F32, []);
            terms.push(Local { ty: number, ..local(Head::Op(Const::of(DType::F32, factor).into()), &[]) });
            let wide = BroadcastInDim { shape: ty.shape.clone(), dims: Default::default() };
            terms.push(local(Head::Op(wide.into()), &[last + 1]));
            terms.push(local(Head::Op(Binary { op }.into()), &[last, last + 2]));
        }
        let outputs = vec![terms.len() as u32 - 1];
        let problem = Problem { terms, outputs };
        let solution = solve::solve(&problem, &all());
        let left = solution.terms.iter().filter(|term| matches!(term.head, Head::Op(Op::Binary(_)))).count();
        (solve::saturated(&problem, &all()).0.total_number_of_nodes(), left)
    };
    let (deviation, left) = terms_of(&[(BinaryOp::Mul, 1.0 / 6.0), (BinaryOp::Mul, 6.0), (BinaryOp::Div, 5.0)]);
    assert!(deviation < 60 && left == 1, "{deviation} terms, {left} left");
    let divisions: Vec<(BinaryOp, f64)> = (3..11).map(|by| (BinaryOp::Div, f64::from(by))).collect();
    let (chain, left) = terms_of(&divisions);
    assert!(chain < 400 && left == 1, "{chain} terms, {left} left");
}
