//! Recurrences over many steps: what every step adds to a weight's gradient is one product, and what each adds to the inputs' gradient is
//! written to its place.

use crate::alloc::peak_of;
use crate::onnx_model::{external, model, node, size, value, with_int, with_tensor};
use dcc::Compiled;
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::loss::{LossKind, LossOptions};
use dcc::numeric::Instance;
use dcc::ops::Op;
use dcc::plan::{Parallel, Schedule, batch};
use dcc::train::TrainingOptions;
use prost::Message;

/// Two layers of a plain recurrence, `steps` of `samples`, 4 inputs and 6 states.
fn recurrence(steps: i64, samples: u64, parallel: Parallel, microbatches: u32) -> Compiled {
    let layer = |x: &str, layer: &str| {
        let [w, r, y] = ["w", "r", "y"].map(|name| format!("{name}{layer}"));
        with_int(node("RNN", &[x, &w, &r], &[&y]), "hidden_size", 6)
    };
    let nodes = [layer("x", "0"), node("Squeeze", &["y0"], &["h"]), layer("h", "1"), node("Squeeze", &["y1"], &["y"])];
    let weights = [("w0", [1, 6, 4]), ("r0", [1, 6, 6]), ("w1", [1, 6, 6]), ("r1", [1, 6, 6])];
    let mut proto =
        weights.iter().fold(model(&nodes), |proto, (name, dims)| with_tensor(proto, external(name, dims, "weights")));
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(steps), size(samples as i64), size(4)])];
    let proto = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let batch = batch::Given { global: Some(samples), accumulate: Some(microbatches), ..Default::default() };
    let training = TrainingOptions { loss: LossOptions { kind: LossKind::Mse, ..Default::default() }, ..Default::default() };
    let mut options = Options { batch, parallel, training, name: "recurrence.onnx".to_owned(), ..Default::default() };
    options.import.batch_dims.insert("x".to_owned(), Some(1));
    compile(&proto, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// The products that a microbatch's gradients of square weights are made of.
fn products(compiled: &Compiled) -> usize {
    let placed = &compiled.placed;
    let live = placed.live();
    let is_product =
        |id: &dcc::graph::NodeId| matches!(placed[*id].op, Op::DotGeneral(_)) && placed.ty(*id).shape[..] == [1, 6, 6];
    placed.ids().filter(|id| live[id.0 as usize] && is_product(id)).count()
}

#[track_caller]
fn agrees(steps: i64, samples: u64, parallel: Parallel, microbatches: u32) -> Compiled {
    let text = format!("{steps} steps, {parallel:?}");
    let compiled = recurrence(steps, samples, parallel, microbatches);
    let instance = Instance::of(&compiled).unwrap_or_else(|error| panic!("{text}: {error}"));
    let found = instance.check().unwrap_or_else(|error| panic!("{text}: {error}"));
    assert!(found.tensors > steps as usize, "{text}: only {} tensors", found.tensors);
    compiled
}

#[test]
fn steps_share_one_product_for_a_weights_gradient() {
    // Of both recurrent weights, and of the second layer's inputs'.
    assert_eq!(products(&agrees(10, 2, Parallel::default(), 1)), 3);
    // The control: of many samples a step's product is worth its while, and all operands would be copied for less.
    assert_eq!(products(&agrees(10, 64, Parallel::default(), 1)), 2 * 10 + 1);
}

#[test]
fn steps_share_products_on_every_mesh() {
    let of = |parallel: Parallel, microbatches: u32| agrees(9, 4, parallel, microbatches);
    of(Parallel { dp: 2, ..Parallel::default() }, 2);
    of(Parallel { tp: 2, ..Parallel::default() }, 1);
    of(Parallel { pp: 2, schedule: Schedule::ZbV, ..Parallel::default() }, 2);
    of(Parallel { dp: 2, pp: 2, ..Parallel::default() }, 2);
}

/// More steps than a kernel has arguments: gradients of the second layer's inputs are put together in groups.
#[test]
fn more_steps_than_a_kernel_takes_are_groups() {
    let compiled = agrees(200, 2, Parallel::default(), 1);
    assert_eq!(products(&compiled), 2 * 2 + 1);
    let most = compiled.placed.nodes.iter().map(|node| node.operands.len()).max();
    assert!(most <= Some(192), "{most:?} operands");
}

/// All states are alive until the sequence of them is put together: plans are found among few of their layouts.
#[test]
fn long_recurrences_are_planned_for_tensor_parallel_ranks() {
    let (_, bytes) = peak_of(|| recurrence(64, 4, Parallel { tp: 2, ..Parallel::default() }, 1));
    assert!(bytes < 256 << 20, "it took {} MiB", bytes >> 20);
}
