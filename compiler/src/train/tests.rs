//! 20 steps of small models in float64 against PyTorch (tests/golden/steps.json, from samples/steps.py), and names.

use super::*;
use crate::graph::verify;
use crate::interp::{Bindings, Precision, Tensor, outputs};
use crate::loss::LossKind;
use crate::ops::{Gather, Input, Scalar, Uniform};
use crate::optimizer::{AdamDecay, Decay, MuonScale, Optimizer};
use crate::precision::retype;
use dcc_program::kernel::UnaryOp;
use dcc_program::program::ScalarKind;
use dcc_program::{DType, FactorSpec, Shape};
use serde_json::Value;

/// Relative: the `--dtype f64` row of the tolerance table.
const TOLERANCE: f64 = 1e-9;
const B: u64 = 6;
const I: u64 = 5;
const H: u64 = 7;
const C: u64 = 4;
const T: u64 = 8;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../tests/golden/steps.json")).unwrap()
}

fn wave(shape: &[u64], scale: f64, rate: f64, start: f64) -> Tensor {
    let n: u64 = shape.iter().product();
    Tensor::floats(DType::F64, shape, (0..n).map(|i| scale * (rate * i as f64 + start).sin()).collect())
}

fn weight(graph: &mut Graph, name: &str, shape: &[u64]) -> NodeId {
    let op = Param {
        name: name.to_owned(),
        kind: ParamKind::Weight,
        piece: None,
        dtype: DType::F32,
        shape: Shape::from_slice(shape),
    };
    graph.add(op, &[]).unwrap()
}

fn input(graph: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> NodeId {
    let op = Input { name: name.to_owned(), dtype, shape: Shape::from_slice(shape), batch_dim: Some(0) };
    graph.add(op, &[]).unwrap()
}

/// `tanh(x w0 + w1) w2 + w3`
fn mlp() -> Result<Graph> {
    let mut g = Graph::new();
    let x = input(&mut g, "x", DType::F32, &[B, I]);
    let w =
        [weight(&mut g, "w0", &[I, H]), weight(&mut g, "w1", &[H]), weight(&mut g, "w2", &[H, C]), weight(&mut g, "w3", &[C])];
    let h = g.dot("b i, i h -> b h", x, w[0])?;
    let bias = g.broadcast(w[1], &[B, H], &[1])?;
    let h = g.binary(BinaryOp::Add, h, bias)?;
    let h = g.unary(UnaryOp::Tanh, h)?;
    let y = g.dot("b h, h c -> b c", h, w[2])?;
    let bias = g.broadcast(w[3], &[B, C], &[1])?;
    let y = g.binary(BinaryOp::Add, y, bias)?;
    g.outputs.push(("y".to_owned(), y));
    Ok(g)
}

/// `tanh(w0[ids] w1) w0ᵀ`
fn language_model() -> Result<Graph> {
    let mut g = Graph::new();
    let ids = input(&mut g, "ids", DType::I64, &[B, T]);
    let (table, inner) = (weight(&mut g, "w0", &[C, H]), weight(&mut g, "w1", &[H, H]));
    let e = g.add(Gather { spec: FactorSpec::parse("c h, b t -> b t h").unwrap() }, &[table, ids])?;
    let h = g.dot("b t h, h k -> b t k", e, inner)?;
    let h = g.unary(UnaryOp::Tanh, h)?;
    let y = g.dot("b t h, c h -> b t c", h, table)?;
    g.outputs.push(("logits".to_owned(), y));
    Ok(g)
}

fn trainable(graph: &Graph) -> Vec<Trainable> {
    let name = |n: &crate::graph::Node| match &n.op {
        Op::Param(p) => Some(Trainable { name: p.name.clone(), aliases: Vec::new(), by_default: true }),
        _ => None,
    };
    graph.nodes.iter().filter_map(name).collect()
}

/// The options of a golden case, with `setting` times `factor`.
fn options(case: &Value, setting: &str, factor: f64) -> (f64, TrainingOptions) {
    let number = |key: &str, default: f64| {
        let value = case[key].as_f64().unwrap_or(default);
        if key == setting { value * factor } else { value }
    };
    let text = |key: &str| case[key].as_str().unwrap_or_default();
    let betas = |second: f64| (case["betas"][0].as_f64().unwrap_or(0.9), case["betas"][1].as_f64().unwrap_or(second));
    let eps = |default| number("eps", default);
    let adam = |decay| Optimizer::Adam { betas: betas(0.999), eps: eps(1e-8), decay };
    let optimizer = match text("optimizer") {
        "sgd" => Optimizer::Sgd { momentum: number("momentum", 0.0), nesterov: case["nesterov"] == true },
        "adam" => adam(AdamDecay::L2),
        "adamw" => adam(AdamDecay::Decoupled),
        "adagrad" => Optimizer::Adagrad { eps: eps(1e-10) },
        "rmsprop" => Optimizer::RmsProp {
            alpha: number("alpha", 0.99),
            eps: eps(1e-8),
            momentum: number("momentum", 0.0),
            centered: case["centered"] == true,
        },
        "lion" => Optimizer::Lion { betas: betas(0.99) },
        "lamb" => Optimizer::Lamb { betas: betas(0.999), eps: eps(1e-6) },
        "adafactor" => Optimizer::Adafactor { eps: eps(1e-3) },
        "muon" => {
            let scale = match text("muon_scale") {
                "match-rms-adamw" => MuonScale::MatchRmsAdamw,
                _ => MuonScale::Original,
            };
            Optimizer::Muon { momentum: number("momentum", 0.95), scale, betas: betas(0.999), eps: eps(1e-8) }
        }
        other => panic!("no optimizer {other}"),
    };
    let mut options = TrainingOptions::default();
    options.loss.kind = LossKind::parse(text("loss")).unwrap();
    options.loss.label_smoothing = number("label_smoothing", 0.0);
    options.optimizer.optimizer = optimizer;
    options.optimizer.weight_decay = number("weight_decay", 0.0);
    options.optimizer.grad_clip = case["grad_clip"].as_f64().map(|_| number("grad_clip", 0.0));
    options.optimizer.decay = if text("decay") == "matrices" { Decay::Matrices } else { Decay::All };
    (number("lr", 0.0), options)
}

fn bind_batch(bindings: Bindings, loss: LossKind, t: u64) -> Bindings {
    let start = 0.37 * t as f64;
    let ids: Vec<i64> = (0..(B * T) as i64).map(|i| (i * i + 3 * i + t as i64) % C as i64).collect();
    let class = |i: i64| if i % 5 == 0 { -100 } else { (i * i) % C as i64 };
    let labels = (0..B as i64).map(|i| class(i + t as i64)).collect();
    let target = wave(&[B, C], 1.0, 1.3, 1.0 + start);
    let sign = Tensor::floats(DType::F64, &[B, C], target.f64s().iter().map(|&x| f64::from(u8::from(x > 0.0))).collect());
    bindings
        .input("x", wave(&[B, I], 1.0, 1.3, start))
        .input("ids", Tensor::ints(DType::I64, &[B, T], ids))
        .input("labels", Tensor::ints(DType::I64, &[B], labels))
        .input("target", if loss == LossKind::Bce { sign } else { target })
}

struct Run {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    weights: Vec<Vec<f64>>,
}

fn run(case: &Value, setting: &str, factor: f64) -> Result<Run> {
    let (learning_rate, options) = options(case, setting, factor);
    let forward = if options.loss.kind == LossKind::NextToken { language_model()? } else { mlp()? };
    let forward = retype(&forward, DType::F64)?;
    let trainable = trainable(&forward);
    let training = train_step(&forward, &trainable, &options)?;
    verify(&training.graph)?;
    let mut bindings = Bindings { learning_rate, ..Bindings::default() };
    for (k, t) in trainable.iter().enumerate() {
        let leaf = forward.nodes.iter().find(|n| matches!(&n.op, Op::Param(p) if p.name == t.name)).unwrap();
        bindings = bindings.weight(&t.name, wave(&leaf.ty.shape, 0.4, 0.7, k as f64));
    }
    let mut run = Run { loss: Vec::new(), grad_norm: Vec::new(), weights: Vec::new() };
    for t in 0..20 {
        bindings = bind_batch(bindings, options.loss.kind, t);
        bindings.step = t as i64 + 1;
        for (name, value) in outputs(&training.graph, &bindings, Precision::Exact)? {
            match Output::parse(&name).unwrap() {
                Output::Loss => run.loss.push(value.f64s()[0]),
                Output::GradNorm => run.grad_norm.push(value.f64s()[0]),
                Output::New { name, kind, .. } => drop(bindings.params.insert((name, kind), value)),
                other => panic!("{other:?} of a training graph"),
            }
        }
    }
    let weight = |t: &Trainable| bindings.params[&(t.name.clone(), ParamKind::Weight)].f64s().to_vec();
    run.weights = trainable.iter().map(weight).collect();
    Ok(run)
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn close(got: &[f64], want: &[f64]) -> bool {
    let scale = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
    got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() <= TOLERANCE * scale)
}

/// Losses, norms and weights are PyTorch's; with one setting changed by 1 % they are PyTorch's with that change and not these.
fn check(name: &str) {
    let case = &golden()["cases"][name];
    let got = run(&case["options"], "", 1.0).unwrap();
    let loss = numbers(&case["loss"]);
    assert!(close(&got.loss, &loss), "{name}: losses {:?} for {loss:?}", got.loss);
    assert!(close(&got.grad_norm, &numbers(&case["grad_norm"])), "{name}: norms {:?}", got.grad_norm);
    for (k, weights) in case["weights"].as_array().unwrap().iter().enumerate() {
        assert!(close(&got.weights[k], &numbers(weights)), "{name}: w{k} {:?}", got.weights[k]);
    }
    for (setting, last) in case["controls"].as_object().unwrap() {
        let control = run(&case["options"], setting, 1.01).unwrap();
        let last = last.as_f64().unwrap();
        assert!(close(&control.loss[19..], &[last]), "{name}: {setting} {:?} for {last}", control.loss);
        assert!(!close(&control.loss, &loss), "{name}: {setting} off by 1 % goes unseen");
    }
}

#[test]
fn sgd_with_momentum() {
    check("sgd_momentum");
}

#[test]
fn sgd_with_nesterov_and_l2() {
    check("sgd_nesterov_l2");
}

#[test]
fn sgd_clipped_against_l1() {
    check("sgd_plain_clip");
}

#[test]
fn adam_with_l2_and_clipping() {
    check("adam_l2_clip");
}

#[test]
fn adamw_with_smoothed_labels() {
    check("adamw");
}

#[test]
fn adamw_that_decays_matrices() {
    check("adamw_matrices");
}

#[test]
fn adagrad() {
    check("adagrad");
}

#[test]
fn rms_prop() {
    check("rmsprop");
    check("rmsprop_centered");
}

#[test]
fn lion() {
    check("lion");
}

#[test]
fn lamb() {
    check("lamb");
    check("lamb_tied");
}

#[test]
fn adafactor() {
    check("adafactor");
    check("adafactor_tied");
}

#[test]
fn muon() {
    check("muon");
    check("muon_tied");
}

#[test]
fn next_token_with_a_tied_table() {
    check("next_token_tied");
}

#[test]
fn every_case_of_the_goldens_is_checked() {
    let names = golden()["cases"].as_object().unwrap().len();
    assert_eq!(names, include_str!("tests.rs").matches("    check(\"").count());
}

#[test]
fn outputs_are_named_both_ways() {
    let piece = Some(Piece { dim: 1, start: 768, end: 1536 });
    let state = |kind: &str| ParamKind::State(kind.to_owned());
    let new = |kind, piece| Output::New { name: "h.0:attn[1].weight".to_owned(), kind, piece };
    let all = [
        (Output::Loss, "loss"),
        (Output::GradNorm, "grad_norm"),
        (Output::EvalLoss, "eval_loss"),
        (Output::EvalAccuracy, "eval_accuracy"),
        (Output::EvalCount, "eval_count"),
        (new(ParamKind::Weight, None), "weight:h.0:attn[1].weight"),
        (new(state("m"), piece), "state.m[1,768,1536]:h.0:attn[1].weight"),
        (Output::Gradient { name: "w".to_owned(), piece }, "grad[1,768,1536]:w"),
    ];
    for (output, text) in all {
        assert_eq!(output.text(), text);
        assert_eq!(Output::parse(text), Some(output));
    }
    for text in ["", "weight", "weights:w", "weight[1]:w", "state:w", "grad[a,0,1]:w"] {
        assert_eq!(Output::parse(text), None, "{text}");
    }
}

#[test]
fn updates_are_found_by_their_leaves() {
    let forward = mlp().unwrap();
    let options = TrainingOptions { selection: select(&[], &["w[01]"]), ..TrainingOptions::default() };
    let training = train_step(&forward, &trainable(&forward), &options).unwrap();
    assert_eq!((training.trained, training.frozen), (vec!["w2".into(), "w3".into()], vec!["w0".into(), "w1".into()]));
    let found = updates(&training.graph);
    let names: Vec<String> = found.iter().map(|u| Output::new_value(param(&training.graph, u.param)).text()).collect();
    assert_eq!(names, ["weight:w2", "state.m:w2", "state.v:w2", "weight:w3", "state.m:w3", "state.v:w3"]);
    assert!(found.iter().all(|u| training.graph.ty(u.param) == training.graph.ty(u.new)));
}

fn select(train: &[&str], freeze: &[&str]) -> Selection {
    let globs = |texts: &[&str]| texts.iter().map(|t| Names::Glob(Glob::new(t))).collect();
    Selection { train: globs(train), freeze: globs(freeze) }
}

/// By another name of the parameter too; a pattern that matches none is an error.
#[test]
fn decay_spares_parameters_by_any_of_their_names() {
    let forward = mlp().unwrap();
    let mut all = trainable(&forward);
    all[0].aliases.push("layers.0.weight".to_owned());
    let step = |patterns: &[&str]| {
        let no_decay = patterns.iter().map(|text| Glob::new(text)).collect();
        let optimizer = OptimizerOptions { weight_decay: 0.1, no_decay, ..OptimizerOptions::default() };
        train_step(&forward, &all, &TrainingOptions { optimizer, ..TrainingOptions::default() })
    };
    let text = |patterns: &[&str]| step(patterns).unwrap().graph.to_string();
    assert_eq!(text(&["layers.*"]), text(&[&all[0].name]));
    assert_ne!(text(&["layers.*"]), text(&[]));
    assert_eq!(step(&["z*"]).unwrap_err().what, "no parameter matches `z*`");
}

#[test]
fn names_select_what_trains() {
    let one = |name: &str, alias: &str, by_default| Trainable { name: name.into(), aliases: vec![alias.into()], by_default };
    let all = [one("a.w", "first.weight", true), one("a.b", "first.bias", true), one("buffer", "", false)];
    let check = |selection: Selection, want: &[&str]| {
        let got = selection.apply(&all).unwrap();
        assert_eq!(got.iter().map(String::as_str).collect::<Vec<_>>(), want);
    };
    check(select(&[], &[]), &["a.b", "a.w"]);
    check(select(&[], &["*.bias"]), &["a.w"]);
    check(select(&["buffer", "a.w"], &[]), &["a.w", "buffer"]);
    let file = Names::File { path: "f".into(), names: ["first.weight".to_owned()].into() };
    check(Selection { train: vec![file], freeze: Vec::new() }, &["a.w"]);
    let error = select(&[], &["z*"]).apply(&all).unwrap_err();
    assert_eq!(error.what, "no parameter matches `z*`");
    let file = Names::File { path: "f".into(), names: ["z".to_owned()].into() };
    assert_eq!(Selection { train: vec![file], freeze: Vec::new() }.apply(&all).unwrap_err().at.as_deref(), Some("f"));
}

#[test]
fn nothing_to_train_is_an_error() {
    let forward = mlp().unwrap();
    let options = TrainingOptions { selection: select(&[], &["*"]), ..TrainingOptions::default() };
    let error = train_step(&forward, &trainable(&forward), &options).unwrap_err();
    assert_eq!(error.what, "no parameter trains: none is selected");
}

/// Dropout of a tenth, as ONNX's becomes.
fn dropped(g: &mut Graph, x: NodeId, id: u32) -> NodeId {
    let scalar = |g: &mut Graph, kind| g.add(Scalar { kind, dtype: DType::I64 }, &[]).unwrap();
    let (seed, step) = (scalar(g, ScalarKind::Seed), scalar(g, ScalarKind::Step));
    let uniform = g.add(Uniform { id, shape: g.ty(x).shape.clone() }, &[seed, step]).unwrap();
    let rate = g.splat_like(0.1, uniform).unwrap();
    let kept = g.compare(CompareOp::Ge, uniform, rate).unwrap();
    let scaled = g.scale(x, 1.0 / 0.9).unwrap();
    let zero = g.splat_like(0.0, x).unwrap();
    g.select(kept, scaled, zero).unwrap()
}

#[test]
fn evaluation_has_no_dropout() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", DType::F32, &[B, C]);
    let w = weight(&mut g, "w", &[C, C]);
    let h = g.dot("b i, i c -> b c", x, w).unwrap();
    let y = dropped(&mut g, h, 0);
    g.outputs.push(("y".to_owned(), y));
    let eval = without_dropout(&g).unwrap();
    let ops: Vec<&str> = eval.nodes.iter().map(|n| n.op.name()).collect();
    assert_eq!(ops, ["input", "param", "dot_general"]);
    // Where all is f64 but the random numbers, which are cast.
    let eval = without_dropout(&crate::precision::retype(&g, DType::F64).unwrap()).unwrap();
    assert!(eval.live().iter().zip(&eval.nodes).all(|(live, node)| !live || !matches!(node.op, Op::Uniform(_))));
}

#[test]
fn evaluation_of_one_position_has_no_dropout() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", DType::F32, &[B, T, C]);
    let w = weight(&mut g, "w", &[C, C]);
    // The second one is of one position, whose constants the first one has for all.
    let first = dropped(&mut g, x, 0);
    let mixed = g.sum(first, &[1]).unwrap();
    let mixed = g.broadcast(mixed, &[B, T, C], &[0, 2]).unwrap();
    let h = g.dot("b t i, i c -> b t c", mixed, w).unwrap();
    let last = dropped(&mut g, h, 1);
    let (start, stride) = (Shape::from_slice(&[0, 2, 0]), Shape::from_elem(1, 3));
    let slice = crate::ops::Slice { start, limit: Shape::from_slice(&[B, 3, C]), stride };
    let one = g.add(slice, &[last]).unwrap();
    g.outputs.push(("y".to_owned(), one));
    let needed = crate::trim::trim(&g).unwrap();
    let uniforms = |graph: &Graph| graph.nodes.iter().filter(|n| matches!(n.op, Op::Uniform(_))).count();
    assert_eq!((uniforms(&needed), uniforms(&without_dropout(&needed).unwrap())), (2, 0));
    let select = needed.nodes.iter().rfind(|n| matches!(n.op, Op::Select(_))).unwrap();
    assert_eq!(select.ty.shape.as_slice(), [B, 1, C]);
    // Random numbers are those of the whole.
    let bindings = Bindings { seed: 3, step: 1, ..Bindings::default() }
        .input("x", wave(&[B, T, C], 1.0, 0.7, 0.0))
        .weight("w", wave(&[C, C], 1.0, 0.3, 0.0));
    let of = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    assert_eq!(of(&needed), of(&g));
}

#[test]
fn accuracy_counts_the_valid_labels() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", DType::F32, &[4, 3]);
    g.outputs.push(("y".to_owned(), x));
    let eval = eval_step(&g, &LossOptions::default()).unwrap();
    // Right, wrong, ignored, and a tie whose first is the label.
    let logits = vec![0.0, 2.0, 1.0, 3.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.5, 0.5, 0.0];
    let bindings = Bindings::default()
        .input("x", Tensor::floats(DType::F32, &[4, 3], logits))
        .input("labels", Tensor::ints(DType::I64, &[4], vec![1, 2, -100, 0]));
    let got: Vec<(String, f64)> =
        outputs(&eval, &bindings, Precision::Exact).unwrap().into_iter().map(|(n, t)| (n, t.f64s()[0])).collect();
    assert_eq!(got[1], ("eval_count".to_owned(), 3.0));
    assert_eq!(got[2], ("eval_accuracy".to_owned(), 2.0 / 3.0));
}
