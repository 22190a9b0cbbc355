//! The full counts: every mesh by every schedule by 1 to 8 microbatches over 20 steps. `tests/long.sh` runs them and shows the
//! figures; `cargo test` only sees that there is nothing to do.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::import::Dropout;
use dcc::plan::{Parallel, Schedule};
use dcc_program::DType;

const STEPS: usize = 20;

/// All of dp, tp, pp ∈ {1, 2}³, and one axis of 4.
fn meshes() -> Vec<(u32, u32, u32)> {
    let sizes = || [1, 2].into_iter();
    let cube = sizes().flat_map(move |dp| sizes().flat_map(move |tp| sizes().map(move |pp| (dp, tp, pp))));
    cube.chain([(1, 4, 1), (4, 1, 1), (1, 1, 4)]).collect()
}

/// By both schedules where there are stages, with each number of microbatches that divides what a data-parallel rank has.
fn splits(batch: u64) -> Vec<Split> {
    let mut all = Vec::new();
    for (dp, tp, pp) in meshes() {
        let schedules: &[Schedule] = if pp > 1 { &[Schedule::OneFOneB, Schedule::GPipe] } else { &[Schedule::OneFOneB] };
        for &schedule in schedules {
            let fits = |&m: &u32| batch.is_multiple_of(u64::from(m * dp));
            all.extend((1..=8).filter(fits).map(|m| (Parallel { schedule, ..mesh(dp, tp, pp) }, m)));
        }
    }
    all
}

/// 24 samples have 1, 2, 3, 4, 6 and 8 microbatches, 20 have 5, 28 have 7; 32 have 8 on two ranks, 4 and 8 on four.
#[test]
fn gpt_on_all_meshes() {
    if !is_long() {
        return;
    }
    for dtype in [Some(DType::F64), None] {
        let gpt = Case { model: "gpt2_tiny.onnx", dtype, steps: STEPS, labels: Some(16), clip: Some(0.5), ..CASE };
        Case { batch: 24, ..gpt.clone() }.check(&splits(24));
        let others = |batch, count| splits(batch).into_iter().filter(|split| split.1 == count).collect::<Vec<_>>();
        Case { batch: 20, ..gpt.clone() }.check(&others(20, 5));
        Case { batch: 28, ..gpt.clone() }.check(&others(28, 7));
        let missing = |(parallel, count): &Split| !24_u32.is_multiple_of(count * parallel.dp);
        Case { batch: 32, ..gpt }.check(&splits(32).into_iter().filter(missing).collect::<Vec<_>>());
    }
}

#[test]
fn fifty_thousand_words_on_four_meshes() {
    if !is_long() {
        return;
    }
    let gpt = Case { model: "gpt2_50257.onnx", steps: STEPS, batch: 4, clip: Some(0.5), ..CASE };
    let splits = [(mesh(1, 2, 1), 1), (mesh(1, 4, 1), 2), (mesh(1, 2, 2), 4), (mesh(2, 2, 1), 2)];
    gpt.check(&splits);
    Case { dtype: None, ..gpt }.check(&splits);
}

#[test]
fn dropout_on_all_meshes() {
    if !is_long() {
        return;
    }
    let case = Case { model: "gpt2_tiny_dropout.onnx", steps: STEPS, dropout: Dropout::Rate(0.1), ..CASE };
    let splits: Vec<Split> = splits(8).into_iter().filter(|split| split.1 == 2).collect();
    case.check(&splits);
}

#[test]
fn llama_and_bert_on_all_meshes() {
    if !is_long() {
        return;
    }
    for (model, labels) in [("llama_tiny.onnx", None), ("bert_tiny.onnx", Some(16))] {
        let splits: Vec<Split> = splits(8).into_iter().filter(|split| split.1 == 2).collect();
        Case { model, labels, steps: STEPS, clip: Some(0.5), ..CASE }.check(&splits);
    }
}
