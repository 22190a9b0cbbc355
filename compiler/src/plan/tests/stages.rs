//! Where pipelines are cut, and what has to be on one stage.

use super::*;
use crate::graph::NodeId;
use crate::ops::{Attention, Param};
use dcc_program::program::{Attention as Attributes, MaskKind, ParamKind, Piece};
use dcc_program::{FactorSpec, Shape};

/// Stage boundaries as the names of the first parameter each stage reads.
fn check_stages(graph: &Graph, pp: u32, expected: Expect) {
    let plan = match choose(graph, &options(1, 1, pp, 1)) {
        Ok(plan) => plan,
        Err(error) => return expected.assert_eq(&error.to_string()),
    };
    let mut first: BTreeMap<u32, String> = BTreeMap::new();
    for id in Forward::of(graph).order {
        let Some(&stage) = plan.stages.get(&id) else { continue };
        for operand in &graph[id].operands {
            assert!(plan.stages.get(operand).is_none_or(|&s| s <= stage), "a forward edge decreases the stage");
            if let crate::ops::Op::Param(param) = &graph[*operand].op {
                first.entry(stage).or_insert_with(|| param.name.clone());
            }
        }
    }
    let text: Vec<String> = first.iter().map(|(stage, name)| format!("{stage}: {name}")).collect();
    expected.assert_eq(&text.join(", "));
}

#[test]
fn stages_are_balanced_and_cut_where_little_crosses() {
    check_stages(&gpt(&Sizes { layers: 4, ..SMALL }), 2, expect!["0: wte, 1: h.2.attn.q.weight"]);
    check_stages(
        &gpt(&Sizes { layers: 4, vocabulary: 50257, ..SMALL }),
        4,
        expect!["0: wte, 1: h.1.mlp.fc.weight, 2: h.2.mlp.fc.weight, 3: wte"],
    );
    check_stages(
        &gpt(&Sizes { layers: 2, ..SMALL }),
        4,
        expect!["0: wte, 1: h.0.mlp.fc.weight, 2: h.1.attn.q.weight, 3: h.1.mlp.fc.weight"],
    );
    check_stages(&mlp(8, &[4, 8, 8, 8, 3]), 4, expect!["0: fc0.weight, 1: fc1.weight, 2: fc2.weight, 3: fc3.weight"]);
    check_stages(
        &mlp(8, &[4, 8, 8, 8, 3]),
        5,
        expect![[r#"
            error[DCC0303]: --pp 5 needs 5 stages; the model has work for 4
              note 4 products and lookups depend on the batch, each stage computes at least one
              help use --pp 4 or less"#]],
    );
}

/// Layers that all read one value per sample, and a tail of small ones: the fewest bytes cross where a stage would have nothing to do.
#[test]
fn stages_are_balanced_where_little_crosses_at_one_end_only() {
    let (batch, tokens, width) = (32, 32, 64);
    let mut g = Graph::new();
    let mut h = input(&mut g, "x", DType::F32, &[batch, tokens, width], Some(0));
    let mask = input(&mut g, "mask", DType::F32, &[batch, tokens, width], Some(0));
    let mask = g.unary(UnaryOp::Exp, mask).unwrap();
    for layer in 0..8 {
        let weight = param(&mut g, &format!("fc{layer}.weight"), &[width, width]);
        h = g.dot("b t k, k n -> b t n", h, weight).unwrap();
        h = g.binary(BinaryOp::Add, h, mask).unwrap();
        h = g.unary(UnaryOp::Tanh, h).unwrap();
    }
    h = g.sum(h, &[1]).unwrap();
    let head = param(&mut g, "head", &[width, width]);
    h = g.dot("b k, k n -> b n", h, head).unwrap();
    for _ in 0..24 {
        h = g.unary(UnaryOp::Tanh, h).unwrap();
    }
    let last = param(&mut g, "last", &[width, 4]);
    h = g.dot("b k, k n -> b n", h, last).unwrap();
    let loss = g.sum(h, &[0, 1]).unwrap();
    g.outputs = vec![("loss".into(), loss)];
    check_stages(&g, 2, expect!["0: fc0.weight, 1: fc4.weight"]);
}

/// An encoder that two inputs go through: wide layers lie on one stage for both calls; of narrow ones, whose weights are less than what
/// is between them, each stage has one call.
#[test]
fn calls_of_one_module_are_cut_by_layer() {
    let towers = |batch: u64, width: u64| {
        let mut g = Graph::new();
        let weights: Vec<NodeId> = (0..4).map(|layer| param(&mut g, &format!("fc{layer}.weight"), &[width, width])).collect();
        let mut ends = Vec::new();
        for name in ["left", "right"] {
            let mut h = input(&mut g, name, DType::F32, &[batch, 16, width], Some(0));
            for &weight in &weights {
                h = g.dot("b t k, k n -> b t n", h, weight).unwrap();
                h = g.unary(UnaryOp::Tanh, h).unwrap();
            }
            ends.push(g.sum(h, &[1]).unwrap());
        }
        let scores = g.dot("b k, b k -> b", ends[0], ends[1]).unwrap();
        let loss = g.sum(scores, &[0]).unwrap();
        g.outputs = vec![("loss".into(), loss)];
        g
    };
    check_stages(&towers(2, 256), 2, expect!["0: fc0.weight, 1: fc2.weight"]);
    check_stages(&towers(256, 16), 2, expect!["0: fc0.weight, 1: fc0.weight"]);
}

/// The pieces of a weight lie on stages of their own; evaluation, which begins otherwise, reads each where it is.
#[test]
fn evaluation_reads_pieces_where_they_are() {
    let model = |begin: UnaryOp| {
        let mut g = Graph::new();
        let x = input(&mut g, "x", DType::F32, &[64, 64], Some(0));
        let mut h = g.unary(begin, x).unwrap();
        let mut dots = Vec::new();
        for start in [0, 64] {
            let (name, piece) = ("w".to_owned(), Some(Piece { dim: 0, start, end: start + 64 }));
            let (kind, shape) = (ParamKind::Weight, Shape::from_slice(&[64, 64]));
            let w = g.add(Param { name, kind, piece, dtype: DType::F32, shape }, &[]).unwrap();
            h = g.dot("m k, k n -> m n", h, w).unwrap();
            dots.push(h);
            h = g.unary(UnaryOp::Tanh, h).unwrap();
        }
        let loss = g.sum(h, &[0, 1]).unwrap();
        g.outputs = vec![("loss".into(), loss)];
        (g, dots)
    };
    let ((training, dots), (evaluation, others)) = (model(UnaryOp::Exp), model(UnaryOp::Neg));
    let plan = choose(&training, &options(1, 1, 2, 1)).unwrap();
    let stages = |plan: &Plan, dots: &[NodeId]| dots.iter().map(|dot| plan.stages[dot]).collect::<Vec<u32>>();
    assert_eq!(stages(&plan, &dots), [0, 1]);
    assert_eq!(stages(&follow(&evaluation, &plan, &training), &others), [0, 1]);
}

/// One launch gives both results of an attention, though a later stage reads the second.
#[test]
fn results_of_one_launch_are_on_one_stage() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", DType::F32, &[8, 16, 2, 32], Some(0));
    let spec = FactorSpec::parse("b t h e, b s h e, b s h f -> b t h f").unwrap();
    let attributes = Attributes { spec, causal: false, mask: MaskKind::None, scale: 1f64.to_bits() };
    let both = [0, 1].map(|out| g.add(Attention { attributes: attributes.clone(), out }, &[x, x, x]).unwrap());
    let mut h = both[0];
    for layer in 0..6 {
        let weight = param(&mut g, &format!("fc{layer}.weight"), &[32, 32]);
        h = g.dot("b t h k, k n -> b t h n", h, weight).unwrap();
        h = g.unary(UnaryOp::Tanh, h).unwrap();
    }
    h = g.sum(h, &[3]).unwrap();
    h = g.binary(BinaryOp::Add, h, both[1]).unwrap();
    let loss = g.sum(h, &[0, 1, 2]).unwrap();
    g.outputs = vec![("loss".into(), loss)];
    let plan = choose(&g, &options(1, 1, 2, 1)).unwrap();
    assert_eq!(both.map(|id| plan.stages[&id]), [0, 0]);
}

/// Where chunks are what is too many, pipelines of one chunk a rank remain.
#[test]
fn what_is_left_of_too_many_chunks_is_told() {
    let refused = |pp: u32, layers: &[u64]| {
        let options = Parallel { schedule: Schedule::ZbV, virtual_stages: 2, ..options(1, 1, pp, 4) };
        choose(&mlp(8, layers), &options).unwrap_err().help.expect("a way out")
    };
    assert_eq!(refused(3, &[4, 8, 8, 8, 3]), "use --schedule 1f1b without --virtual-stages, or --pp 2 or less");
    assert_eq!(refused(2, &[4, 8, 8, 3]), "use --schedule 1f1b without --virtual-stages");
    assert_eq!(refused(8, &[4, 8, 8, 3]), "use --pp 3 or less with --schedule 1f1b without --virtual-stages");
    assert_eq!(refused(8, &[4, 3]), "leave out --pp");
}
