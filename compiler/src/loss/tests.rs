//! Which loss is chosen, and what is refused.

use super::*;
use dcc_program::FactorSpec;

fn model(inputs: &[(&str, DType, &[u64])], output: (DType, &[u64])) -> Graph {
    let mut g = Graph::new();
    for &(name, dtype, shape) in inputs {
        let op = Input { name: name.to_owned(), dtype, shape: Shape::from_slice(shape), batch_dim: Some(0) };
        g.add(op, &[]).unwrap();
    }
    let op = Input { name: "through".to_owned(), dtype: output.0, shape: Shape::from_slice(output.1), batch_dim: Some(0) };
    let y = g.add(op, &[]).unwrap();
    g.outputs.push(("y".to_owned(), y));
    g
}

/// The report of the loss that is chosen, or the error.
fn check(mut graph: Graph, options: LossOptions, expected: &str) {
    let got = match attach(&mut graph, &options) {
        Ok(loss) => loss.report,
        Err(error) => error.what,
    };
    assert_eq!(got, expected);
}

fn of(kind: LossKind) -> LossOptions {
    LossOptions { kind, ..LossOptions::default() }
}

fn given(shape: &[u64]) -> LossOptions {
    LossOptions { labels: Labels::Given(Shape::from_slice(shape)), ..LossOptions::default() }
}

fn f32s(shape: &[u64]) -> (DType, &[u64]) {
    (DType::F32, shape)
}

const TOKENS: (&str, DType, &[u64]) = ("ids", DType::I64, &[2, 3]);

#[test]
fn auto_chooses_by_shapes() {
    check(model(&[], f32s(&[])), of(LossKind::Auto), "output of output y f32[]");
    check(
        model(&[TOKENS], f32s(&[2, 3, 7])),
        given(&[2, 3]),
        "cross-entropy of output y f32[2, 3, 7], classes on dim 2, labels i64[2, 3], ignoring -100",
    );
    check(
        model(&[TOKENS], f32s(&[2, 3, 7])),
        of(LossKind::Auto),
        "next-token of output y f32[2, 3, 7], labels are input ids shifted by one",
    );
    check(
        model(&[], f32s(&[2, 7])),
        of(LossKind::Auto),
        "cross-entropy of output y f32[2, 7], classes on dim 1, labels i64[2], ignoring -100",
    );
    check(model(&[], f32s(&[2, 3, 7])), of(LossKind::Auto), "the loss of output `y` of shape [2, 3, 7] is not clear");
    let absent = LossOptions { labels: Labels::Absent, ..LossOptions::default() };
    check(model(&[], f32s(&[2, 7])), absent, "the loss of output `y` of shape [2, 7] is not clear");
}

#[test]
fn outputs_of_loss_operators_are_losses() {
    let marked = LossOptions { loss_outputs: vec!["y".to_owned()], ..LossOptions::default() };
    check(model(&[], (DType::F32, &[5])), marked, "output of output y f32[5]");
}

#[test]
fn classes_stand_where_the_labels_say() {
    let images = || model(&[], (DType::F32, &[2, 7, 4, 5]));
    let at = |labels: &[u64], class_dim| LossOptions { class_dim, kind: LossKind::CrossEntropy, ..given(labels) };
    let report = "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 1, labels i64[2, 4, 5], ignoring -100";
    check(images(), at(&[2, 4, 5], None), report);
    let report = "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 2, labels i64[2, 7, 5], ignoring -100";
    check(images(), at(&[2, 7, 5], Some(2)), report);
    let both =
        "cross-entropy of output y f32[2, 7, 7], classes on dim 2 (or 1: --class-dim 1), labels i64[2, 7], ignoring -100";
    check(model(&[], f32s(&[2, 7, 7])), at(&[2, 7], None), both);
    let unknown = || LossOptions { kind: LossKind::CrossEntropy, ..LossOptions::default() };
    let guess =
        "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 1 (or 3: --class-dim 3), labels i64[2, 4, 5], ignoring -100";
    check(images(), unknown(), guess);
    let tokens = "cross-entropy of output y f32[2, 7, 5], classes on dim 2, labels i64[2, 7], ignoring -100";
    check(model(&[], f32s(&[2, 7, 5])), unknown(), tokens);
    let square =
        "cross-entropy of output y f32[2, 5, 5, 5], classes on dim 1 (or 3: --class-dim 3), labels i64[2, 5, 5], ignoring -100";
    check(model(&[], (DType::F32, &[2, 5, 5, 5])), at(&[2, 5, 5], None), square);
    let last = "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 3, labels i64[2, 7, 4], ignoring -100";
    check(images(), at(&[2, 7, 4], None), last);
    let samples = "--class-dim 0 is the dim of the samples of an output of shape [2, 7, 4, 5]";
    check(images(), at(&[7, 4, 5], Some(0)), samples);
    check(images(), at(&[9], None), "labels of shape [9] fit no dim of classes of an output of shape [2, 7, 4, 5]");
}

/// Those of the output's shape; `auto` cannot tell them from what a regression predicts.
#[test]
fn labels_may_be_shares_of_classes() {
    let images = || model(&[], (DType::F32, &[2, 7, 4, 5]));
    let at = |labels: &[u64], class_dim| LossOptions { class_dim, kind: LossKind::CrossEntropy, ..given(labels) };
    let soft = |options| LossOptions { soft_labels: true, ..options };
    let report = "cross-entropy of output y f32[2, 7], classes on dim 1, labels f32[2, 7]: shares of classes";
    check(model(&[], f32s(&[2, 7])), at(&[2, 7], None), report);
    check(model(&[], f32s(&[2, 7])), soft(of(LossKind::Auto)), report);
    check(model(&[], f32s(&[2, 7])), soft(given(&[2, 7])), report);
    let last = "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 3, labels f32[2, 7, 4, 5]: shares of classes";
    check(images(), at(&[2, 7, 4, 5], Some(3)), last);
    let guess = "cross-entropy of output y f32[2, 7, 4, 5], classes on dim 1 (or 3: --class-dim 3), labels f32[2, 7, 4, 5]: shares of \
                 classes";
    check(images(), at(&[2, 7, 4, 5], None), guess);
    let unclear = "the loss of output `y` is not clear: labels have its shape [2, 7]";
    check(model(&[], f32s(&[2, 7])), given(&[2, 7]), unclear);
    let short = "labels of shape [2] are not shares of the classes of an output of shape [2, 7]";
    check(model(&[], f32s(&[2, 7])), soft(at(&[2], None)), short);
    let one = "labels of shape [2, 1] are shares of one class: there is nothing to learn";
    check(model(&[], f32s(&[2, 1])), at(&[2, 1], None), one);
    let ignoring = LossOptions { ignore_index: 3, ..at(&[2, 7], None) };
    check(model(&[], f32s(&[2, 7])), ignoring, "--ignore-index does not belong to labels that are shares of classes");
}

#[test]
fn wrong_outputs_are_refused() {
    check(model(&[], (DType::I64, &[2])), of(LossKind::Mse), "the loss cannot be of output `y`: it is i64");
    let named = LossOptions { output: Some("z".to_owned()), ..LossOptions::default() };
    check(model(&[], (DType::F32, &[2])), named, "the model has no output `z`");
    check(
        model(&[("labels", DType::F32, &[2])], (DType::F32, &[2, 7])),
        of(LossKind::Auto),
        "the model has an input `labels` of f32 [2] already",
    );
}

#[test]
fn options_of_other_losses_are_refused() {
    let smooth = |kind| LossOptions { label_smoothing: 0.1, ..of(kind) };
    let ignoring = |kind| LossOptions { ignore_index: 3, ..of(kind) };
    let classes = |kind| LossOptions { class_dim: Some(1), ..of(kind) };
    let shares = |kind| LossOptions { soft_labels: true, ..of(kind) };
    for kind in [LossKind::Mse, LossKind::L1, LossKind::Bce, LossKind::Output] {
        let refused = |flag: &str| format!("{flag} does not belong to --loss {kind}");
        check(model(&[], f32s(&[2, 7])), smooth(kind), &refused("--label-smoothing"));
        check(model(&[], f32s(&[2, 7])), ignoring(kind), &refused("--ignore-index"));
        check(model(&[], f32s(&[2, 7])), classes(kind), &refused("--class-dim"));
        check(model(&[], f32s(&[2, 7])), shares(kind), &refused("--soft-labels"));
    }
    check(model(&[], f32s(&[])), smooth(LossKind::Auto), "--label-smoothing does not belong to --loss output");
    let tokens = || model(&[TOKENS], f32s(&[2, 3, 7]));
    check(tokens(), classes(LossKind::Auto), "--class-dim does not belong to --loss next-token");
    for options in [smooth(LossKind::NextToken), ignoring(LossKind::NextToken)] {
        check(tokens(), options, "next-token of output y f32[2, 3, 7], labels are input ids shifted by one");
    }
}

#[test]
fn tokens_are_what_indexes_the_vocabulary() {
    let mut g = model(&[TOKENS, ("mask", DType::I64, &[2, 3])], (DType::F32, &[2, 3, 7]));
    check(g.clone(), of(LossKind::NextToken), "next-token cannot tell which of [\"ids\", \"mask\"] are the tokens");
    let table = Input { name: "table".to_owned(), dtype: DType::F32, shape: Shape::from_slice(&[7, 2]), batch_dim: None };
    let table = g.add(table, &[]).unwrap();
    let gather = crate::ops::Gather { spec: FactorSpec::parse("v e, b t -> b t e").unwrap() };
    g.add(gather, &[table, NodeId(0)]).unwrap();
    check(g, of(LossKind::NextToken), "next-token of output y f32[2, 3, 7], labels are input ids shifted by one");
}

#[test]
fn one_token_has_no_next() {
    let g = model(&[("ids", DType::I64, &[2, 1])], f32s(&[2, 1, 7]));
    check(g, of(LossKind::NextToken), "input ids of shape [2, 1] has no next token to predict");
}

#[test]
fn the_batch_is_traced_through_reshapes_and_transposes() {
    let mut g = Graph::new();
    let op = Input { name: "x".to_owned(), dtype: DType::F32, shape: Shape::from_slice(&[3, 4, 5]), batch_dim: Some(1) };
    let x = g.add(op, &[]).unwrap();
    let x = g.transpose(x, &[1, 0, 2]).unwrap();
    let flat = g.reshape(x, &[12, 5]).unwrap();
    let back = g.reshape(flat, &[4, 15]).unwrap();
    let sum = g.sum(back, &[0]).unwrap();
    let dims = batch_dims(&g);
    let at = |id: NodeId| dims[id.0 as usize].iter().copied().collect::<Vec<_>>();
    assert_eq!([at(x), at(flat), at(back), at(sum)], [vec![0], vec![0], vec![0], vec![]]);
}

/// Where each image meets each text, targets lie by the first of the two.
#[test]
fn a_batch_against_itself_has_its_samples_first() {
    for (kind, target) in [(LossKind::Mse, TARGET), (LossKind::CrossEntropy, LABELS)] {
        let mut g = model(&[("text", DType::F32, &[4, 5])], f32s(&[4, 5]));
        let by_text = g.dot("m k, n k -> m n", NodeId(0), NodeId(1)).unwrap();
        g.outputs[0].1 = g.transpose(by_text, &[1, 0]).unwrap();
        attach(&mut g, &of(kind)).unwrap();
        let inputs = g.ids().filter_map(|id| if let Op::Input(input) = &g[id].op { Some(input) } else { None });
        let batch_dim = inputs.filter(|input| input.name == target).map(|input| input.batch_dim).collect::<Vec<_>>();
        assert_eq!(batch_dim, [Some(0)], "{target}");
    }
}
