//! Samples that are read, or written, one by one: by their numbers, or in a loop that an export unrolled.

use super::*;

/// The features of one position of each sample, `h[arange(batch), last]` and `h.transpose(0, 1)[last, arange(batch)]`: samples stay apart.
#[test]
fn a_position_of_each_sample_is_gathered_by_samples() {
    let positions = [
        node("MatMul", &["x", "w"], &["h"]),
        with_ints(node("ReduceMax", &["x"], &["largest"]), "axes", &[-1]),
        with_int(with_int(node("ArgMax", &["largest"], &["column"]), "axis", 1), "keepdims", 0),
    ];
    let samples_first = [
        with_int(node("Concat", &["numbers", "column"], &["tuples"]), "axis", -1),
        node("GatherND", &["h", "tuples"], &["pooled"]),
        node("MatMul", &["pooled", "v"], &["y"]),
    ];
    let positions_first = [
        with_ints(node("Transpose", &["h"], &["turned"]), "perm", &[1, 0, 2]),
        with_int(node("Concat", &["column", "numbers"], &["tuples"]), "axis", -1),
        node("GatherND", &["turned", "tuples"], &["pooled"]),
        node("MatMul", &["pooled", "v"], &["y"]),
    ];
    // The mean goes to that position.
    let assigned = [
        with_ints(node("Transpose", &["h"], &["turned"]), "perm", &[1, 0, 2]),
        with_int(node("Concat", &["column", "numbers"], &["tuples"]), "axis", -1),
        with_int(with_ints(node("ReduceMean", &["h"], &["mean"]), "axes", &[1]), "keepdims", 0),
        node("ScatterND", &["turned", "tuples", "mean"], &["changed"]),
        node("Tanh", &["changed"], &["bent"]),
        with_ints(node("Transpose", &["bent"], &["back"]), "perm", &[1, 0, 2]),
        node("MatMul", &["back", "v"], &["y"]),
    ];
    let numbers: Vec<i64> = (0..8).collect();
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 5]), ("v", &[5, 4])];
    for read in [&samples_first[..], &positions_first, &assigned] {
        let (nodes, tensors) = ([&positions[..], read].concat(), vec![int_tensor("numbers", &[8, 1], &numbers)]);
        let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors, mixed: None };
        let alone = Parallel::default();
        for parallel in [Parallel { dp: 2, ..alone.clone() }, Parallel { pp: 2, ..alone.clone() }, alone] {
            case.agrees(parallel, 2);
        }
    }
}

/// Rows of a weight that is as long as the batch are no samples.
#[test]
fn a_weight_as_long_as_the_batch_is_not_shared_out() {
    let nodes = [
        with_ints(node("ReduceMax", &["x"], &["largest"]), "axes", &[-1]),
        with_int(with_int(node("ArgMax", &["largest"], &["row"]), "axis", 1), "keepdims", 0),
        with_int(node("Concat", &["row", "numbers"], &["tuples"]), "axis", -1),
        node("GatherND", &["w", "tuples"], &["read"]),
        node("MatMul", &["read", "v"], &["y"]),
    ];
    let numbers: Vec<i64> = (0..8).collect();
    let tensors = || vec![int_tensor("numbers", &[8, 1], &numbers)];
    let weights: [(&str, &[i64]); 2] = [("w", &[5, 8, 3]), ("v", &[3, 4])];
    for parallel in [Parallel::default(), Parallel { dp: 2, ..Parallel::default() }] {
        let case =
            Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors: tensors(), mixed: None };
        case.agrees(parallel, 2);
    }
}

/// A loop over samples that the export unrolled: rolled up it has a dim of samples again.
#[test]
fn a_loop_over_samples_is_shared_out() {
    let samples = 8;
    let mut nodes = vec![node("MatMul", &["x", "w"], &["h"])];
    let mut tensors = vec![int_tensor("first", &[1], &[0])];
    let names = |i: i64| [format!("at{i}"), format!("at{}", i + 1), format!("mine{i}"), format!("mean{i}")];
    for i in 0..samples {
        let [start, end, mine, mean] = names(i);
        nodes.push(node("Slice", &["h", &start, &end, "first"], &[&mine]));
        nodes.push(with_int(with_ints(node("ReduceMean", &[&mine], &[&mean]), "axes", &[1]), "keepdims", 0));
    }
    tensors.extend((0..=samples).map(|i| int_tensor(&format!("at{i}"), &[1], &[i])));
    let means: Vec<String> = (0..samples).map(|i| names(i)[3].clone()).collect();
    nodes.push(with_int(node("Concat", &means.iter().map(String::as_str).collect::<Vec<_>>(), &["means"]), "axis", 0));
    nodes.push(node("MatMul", &["means", "v"], &["y"]));
    let weights: [(&str, &[i64]); 2] = [("w", &[6, 5]), ("v", &[5, 4])];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[samples, 5, 6], weights: &weights, tensors, mixed: None };
    for parallel in [Parallel::default(), Parallel { dp: 2, ..Parallel::default() }, Parallel { pp: 2, ..Parallel::default() }]
    {
        case.agrees(parallel, 2);
    }
}

/// What is assigned to a part of each sample, by positions that are known, that count samples, or that the data say.
#[test]
fn assignments_to_samples_keep_them_apart() {
    let numbers: Vec<i64> = (0..8).collect();
    let score = [
        node("MatMul", &["x", "w"], &["h"]),
        with_ints(node("ReduceMax", &["x"], &["largest"]), "axes", &[-1]),
        with_int(with_int(node("ArgMax", &["largest"], &["column"]), "axis", 1), "keepdims", 0),
        with_int(with_ints(node("ReduceMean", &["h"], &["mean"]), "axes", &[1]), "keepdims", 0),
    ];
    // h[arange, column] = mean, and += mean.
    let by_data = |reduction: &str| {
        let assign = with_string(node("ScatterND", &["h", "tuples", "mean"], &["changed"]), "reduction", reduction);
        vec![with_int(node("Concat", &["numbers", "column"], &["tuples"]), "axis", -1), assign]
    };
    // h[:, 1:3] = h[:, 2:4], written for all samples at once.
    let by_all = vec![
        node("Slice", &["h", "two", "four", "one"], &["later"]),
        with_int(node("ScatterElements", &["h", "places", "later"], &["inner"]), "axis", 1),
        node("ScatterND", &["h", "numbers", "inner"], &["changed"]),
    ];
    let tensors = || {
        let places: Vec<i64> = (0..8 * 2 * 5).map(|i| 1 + i / 5 % 2).collect();
        let one = |name: &str, value| int_tensor(name, &[1], &[value]);
        vec![
            int_tensor("numbers", &[8, 1], &numbers),
            int_tensor("places", &[8, 2, 5], &places),
            one("one", 1),
            one("two", 2),
            one("four", 4),
        ]
    };
    for change in [by_data("none"), by_data("add"), by_all] {
        let nodes = [&score[..], &change, &[node("MatMul", &["changed", "v"], &["y"])]].concat();
        let weights: [(&str, &[i64]); 2] = [("w", &[6, 5]), ("v", &[5, 4])];
        let case =
            Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 5, 6], weights: &weights, tensors: tensors(), mixed: None };
        for parallel in
            [Parallel::default(), Parallel { dp: 2, ..Parallel::default() }, Parallel { pp: 2, ..Parallel::default() }]
        {
            case.agrees(parallel, 2);
        }
    }
}

/// Two views of each sample go through one tower as one batch: ranks and microbatches have both views of their own samples.
#[test]
fn views_of_a_sample_stay_together() {
    let tower = |between: &str| {
        vec![
            node("Sin", &["x"], &["view"]),
            with_int(node("Concat", &["x", "view"], &["both"]), "axis", 0),
            node("MatMul", &["both", "w"], &["h"]),
            node("Tanh", &["h"], &["t"]),
            if between.is_empty() { node("Identity", &["t"], &["u"]) } else { node(between, &["t", "zero"], &["u"]) },
            node("MatMul", &["u", "v"], &["z"]),
            with_int(node("Split", &["z", "halves"], &["a", "b"]), "axis", 0),
            node("Sub", &["a", "b"], &["apart"]),
            node("Mul", &["apart", "apart"], &["squares"]),
            with_int(node("ReduceMean", &["squares"], &["y"]), "keepdims", 0),
        ]
    };
    let case = |nodes: &[NodeProto], parallel: Parallel, microbatches: u32| {
        let tensors = vec![int_tensor("zero", &[], &[0]), int_tensor("halves", &[2], &[8, 8])];
        let (x, weights): (&[i64], &[(&str, &[i64])]) = (&[8, 6], &[("w", &[6, 12]), ("v", &[12, 5])]);
        let case = Case { loss: LossKind::Output, nodes, x, weights, tensors, mixed: None };
        case.compile(parallel.clone(), microbatches).map(|_| case.agrees(parallel, microbatches))
    };
    let nodes = tower("");
    let flops = |compiled: Compiled| dcc::report::stages(&compiled.artifact.train)[0].flops;
    let of = |parallel, microbatches| case(&nodes, parallel, microbatches).unwrap_or_else(|error| panic!("{error}"));
    let two = Parallel { dp: 2, ..Parallel::default() };
    assert_eq!(flops(of(two.clone(), 1)) * 2, flops(of(Parallel::default(), 1)));
    for parallel in [Parallel::default(), two, Parallel { pp: 2, ..Parallel::default() }] {
        of(parallel, MICROBATCHES / 2);
    }
    let error = case(&tower("CumSum"), Parallel::default(), 2).err().expect("each sum is of all samples before");
    assert!(error.to_string().contains("needs the samples of all 2 microbatches at once"), "{error}");
}
