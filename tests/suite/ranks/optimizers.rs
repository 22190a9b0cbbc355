//! Every optimizer on every kind of mesh: those that see whole tensors too, where these lie in pieces, shards and on several stages.

use super::zero::{same, sharded};
use super::{CASE, Case, Split, mesh};
use dcc::optimizer::{MuonScale, Optimizer};
use dcc::plan::Zero;

fn splits() -> Vec<Split> {
    let mut splits = vec![(mesh(1, 2, 1), 1), (mesh(1, 1, 2), 2), (mesh(2, 2, 2), 2)];
    splits.extend([Zero::State, Zero::Gradients, Zero::Parameters].map(|zero| (sharded(zero, &mesh(2, 2, 1)), 2)));
    splits.push((sharded(Zero::Parameters, &mesh(4, 1, 1)), 1));
    splits
}

const LAMB: Optimizer = Optimizer::Lamb { betas: (0.9, 0.999), eps: 1e-6 };
const ADAFACTOR: Optimizer = Optimizer::Adafactor { eps: 1e-3 };

fn muon(scale: MuonScale) -> Optimizer {
    Optimizer::Muon { momentum: 0.95, scale, betas: (0.9, 0.999), eps: 1e-8 }
}

/// A GPT of fused weights and tied tables. The keys' biases have no gradient but rounding errors, which Adafactor would divide by their
/// own size.
fn gpt(optimizer: Optimizer) -> Case {
    Case { model: "gpt2_tiny.onnx", optimizer, clip: Some(0.5), freeze: &["*c_attn.bias"], ..CASE }
}

#[test]
fn elements_alone() {
    gpt(Optimizer::Adagrad { eps: 1e-10 }).check(&splits()[2..4]);
    gpt(Optimizer::RmsProp { alpha: 0.99, eps: 1e-8, momentum: 0.9, centered: false }).check(&splits()[2..4]);
    // Signs of what is exactly zero are those of rounding errors: a model without such gradients.
    let lion = Optimizer::Lion { betas: (0.9, 0.99) };
    Case { model: "llama_tiny.onnx", optimizer: lion, clip: Some(0.5), ..CASE }.check(&splits()[2..4]);
}

#[test]
fn lamb_by_norms_of_whole_tensors() {
    gpt(LAMB).check(&splits());
    Case { model: "families/resnet.onnx", batch: 16, optimizer: LAMB, ..CASE }.check(&[(mesh(2, 1, 2), 1)]);
}

#[test]
fn adafactor_by_rows_and_columns_of_whole_tensors() {
    gpt(ADAFACTOR).check(&splits());
    Case { model: "families/resnet.onnx", batch: 16, optimizer: ADAFACTOR, ..CASE }.check(&[(mesh(2, 1, 2), 1)]);
}

#[test]
fn muon_of_whole_matrices() {
    gpt(muon(MuonScale::Original)).check(&splits());
    Case { model: "llama_tiny.onnx", optimizer: muon(MuonScale::MatchRmsAdamw), ..CASE }.check(&splits()[2..4]);
}

/// The trust of a tensor is a sum over shards, sharded or not.
#[test]
fn lamb_has_the_same_bits_in_every_stage_of_zero() {
    let case = Case { dtype: None, batch: 16, ..gpt(LAMB) };
    let trained = |zero| {
        let artifact = case.compiled(&sharded(zero, &mesh(4, 1, 1)), 1).artifact;
        case.trained(&artifact, 1, 1e-2)
    };
    let [nothing, state, gradients, parameters] = Zero::ALL.map(trained);
    for (found, name) in [(state, "ZeRO-1"), (gradients, "ZeRO-2"), (parameters, "ZeRO-3")] {
        same(&found, &nothing, name);
    }
}
