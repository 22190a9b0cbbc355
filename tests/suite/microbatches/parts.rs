//! Parts of values that hold no data, and values that need the whole batch.

use super::*;

/// The part of a padded value that is padding alone is a number, of which a function is one too: 0 is tanh(0), and 0 · tanh(0).
#[test]
fn functions_of_padding_are_numbers() {
    for function in ["Tanh", "Sin", "Erf"] {
        let nodes = [
            node("MatMul", &["x", "w"], &["h"]),
            node("Pad", &["h", "pads"], &["padded"]),
            with_int(node("Split", &["padded", "sizes"], &["none", "own"]), "axis", 1),
            node(function, &["none"], &["a"]),
            node("Mul", &["a", "a"], &["aa"]),
            with_int(node("ReduceMean", &["aa"], &["of_none"]), "keepdims", 0),
            node(function, &["own"], &["b"]),
            node("Mul", &["b", "b"], &["bb"]),
            with_int(node("ReduceMean", &["bb"], &["of_own"]), "keepdims", 0),
            node("Add", &["of_none", "of_own"], &["y"]),
        ];
        let tensors = vec![int_tensor("pads", &[4], &[0, 1, 0, 1]), int_tensor("sizes", &[2], &[1, 8])];
        let (x, weights): (&[i64], &[(&str, &[i64])]) = (&[8, 6], &[("w", &[6, 7])]);
        let case = Case { loss: LossKind::Output, nodes: &nodes, x, weights, tensors, mixed: None };
        let compiled = case.agrees(Parallel::default(), 1);
        let is_function = |op: &str| compiled.training.graph.to_string().contains(op);
        assert!(is_function(&format!("op:{}", function.to_lowercase())), "the control: of what is no padding it is computed");
    }
}

/// PyTorch's assignment to an empty slice: the weight stays as it is.
#[test]
fn nothing_is_scattered_at_no_index() {
    let nodes = [node("ScatterND", &["w", "nowhere", "nothing"], &["same"]), node("MatMul", &["x", "same"], &["y"])];
    let nothing = tensor("nothing", &[0, 5], &[]);
    let tensors = vec![int_tensor("nowhere", &[0, 1], &[]), nothing];
    let case = Case { loss: LossKind::Mse, nodes: &nodes, x: &[8, 6], weights: &[("w", &[6, 5])], tensors, mixed: None };
    assert_eq!(case.agrees(Parallel::default(), 1).training.trained, ["w"]);
}

/// Nobody has said that there are microbatches, which a pipeline has by default.
#[test]
fn a_pipeline_has_one_microbatch_where_the_batch_is_needed_whole() {
    let whole = [
        node("MatMul", &["x", "v"], &["h"]),
        node("Tanh", &["h"], &["t"]),
        with_int(node("CumSum", &["t", "zero"], &["sums"]), "reverse", 0),
        node("MatMul", &["sums", "w"], &["y"]),
    ];
    let apart = [whole[0].clone(), whole[1].clone(), node("MatMul", &["t", "w"], &["y"])];
    let compile = |nodes: &[NodeProto], microbatches: Option<u32>| {
        let tensors = vec![int_tensor("zero", &[], &[0])];
        let case =
            Case { loss: LossKind::Mse, nodes, x: &[8, 6], weights: &[("v", &[6, 5]), ("w", &[5, 4])], tensors, mixed: None };
        case.compile(Parallel { pp: 2, ..Parallel::default() }, microbatches)
    };
    let told = |compiled: &Compiled| compiled.imported.warnings.iter().any(|told| told.contains("a step is one microbatch"));
    let one = compile(&whole, None).expect("one microbatch");
    assert!(one.batch.accumulate == 1 && told(&one), "{:?}", one.imported.warnings);
    let two = compile(&apart, None).expect("two microbatches");
    assert!(two.batch.accumulate == 2 && !told(&two), "the control");
    let error = compile(&whole, Some(2)).err().expect("two were asked for");
    assert!(error.to_string().contains("needs the samples of all 2 microbatches at once"), "{error}");
}
