//! Running statistics of BatchNorm as exporters leave them, trained on several meshes, against PyTorch float64.

use crate::onnx_nodes::unhex;
use crate::ranks::mesh;
use crate::tolerance;
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::import::proto::ModelProto;
use dcc::loss::{LossKind, LossOptions};
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, batch};
use dcc::train::TrainingOptions;
use dcc_program::DType;
use dcc_program::program::ParamKind;
use dcc_runtime::exec::whole::{Outcome, Parameters, Run, Tensor};
use dcc_runtime::exec::{Fresh, Scalars};
use prost::Message;
use serde_json::Value;
use std::collections::BTreeMap;

const BATCH: u64 = 8;
const WIDTH: u64 = 4;
/// Who wrote the golden's files.
const PRODUCER: &str = "pytorch";

fn cases() -> Vec<Value> {
    serde_json::from_str(include_str!("../golden/running/running.json")).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn tensor(values: &[f64], shape: &[u64]) -> Tensor {
    let bytes = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
    Tensor { dtype: DType::F64, shape: shape.to_vec(), bytes }
}

fn decode(tensor: &Tensor) -> Vec<f64> {
    tensor.bytes.chunks_exact(8).map(|bytes| f64::from_ne_bytes(bytes.try_into().expect("eight bytes"))).collect()
}

fn trained(case: &Value, parallel: &Parallel, rate: f64) -> Outcome {
    trained_by(case, PRODUCER, parallel, rate)
}

/// The same as written by another tool.
fn trained_by(case: &Value, producer: &str, parallel: &Parallel, rate: f64) -> Outcome {
    let mut proto = ModelProto::decode(&unhex(case["model"].as_str().expect("hex"))[..]).expect("a model");
    assert_eq!(proto.producer_name.replace(producer.to_owned()).as_deref(), Some(PRODUCER));
    let model = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false };
    let options = Options {
        name: "model".to_owned(),
        batch: batch::Given { global: Some(BATCH), accumulate: Some(1), ..Default::default() },
        parallel: parallel.clone(),
        dtype: Some(DType::F64),
        training: TrainingOptions {
            loss: LossOptions { kind: LossKind::Mse, ..LossOptions::default() },
            optimizer: OptimizerOptions { optimizer, ..OptimizerOptions::default() },
            ..TrainingOptions::default()
        },
        ..Options::default()
    };
    let compiled = compile(&model, &options).unwrap_or_else(|e| panic!("{}: {e}", case["name"]));
    let weights = compiled.imported.parameters.iter().map(|parameter| {
        let values = parameter.tensor.read(&model).expect("the file has it");
        ((parameter.tensor.name.clone(), ParamKind::Weight), tensor(values.f64s(), &values.shape))
    });
    let parameters: Parameters = weights.collect();
    let [x, target] = ["x", "target"].map(|name| numbers(&case["data"][name]));
    let rows = (BATCH * WIDTH) as usize;
    let part = |values: &[f64], step: usize| tensor(&values[step * rows..(step + 1) * rows], &[BATCH, WIDTH]);
    let steps = numbers(&case["losses"]).len();
    let step_inputs = |step| BTreeMap::from([("x".to_owned(), part(&x, step)), ("target".to_owned(), part(&target, step))]);
    let inputs: Vec<BTreeMap<String, Tensor>> = (0..steps).map(step_inputs).collect();
    let scalars: Vec<Scalars> = (1..=steps as i64).map(|step| Scalars { learning_rate: rate, step, seed: 0 }).collect();
    let programs = &compiled.artifact.train[..];
    let run = Run { programs, threads: 1, fresh: Fresh::Poisoned, parameters: &parameters, inputs: &inputs, steps: &scalars };
    run.run().unwrap_or_else(|e| panic!("{}: {e}", case["name"]))
}

/// Largest difference of a loss or an element of a tensor at the end, relative to one plus its value.
fn difference(case: &Value, found: &Outcome) -> f64 {
    let apart = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max)
    };
    let losses: Vec<f64> = found.outputs.iter().flat_map(|outputs| decode(&outputs["loss"])).collect();
    let mut worst = apart(&losses, &numbers(&case["losses"]));
    for (name, expected) in case["tensors"].as_object().expect("tensors") {
        let key = (name.clone(), ParamKind::Weight);
        let value = found.parameters.get(&key).unwrap_or_else(|| panic!("{}: no {name}", case["name"]));
        worst = worst.max(apart(&decode(value), &numbers(expected)));
    }
    worst
}

#[test]
fn statistics_move_as_in_torch() {
    for case in cases() {
        for parallel in [mesh(1, 1, 1), mesh(2, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2)] {
            let off = difference(&case, &trained(&case, &parallel, 0.05));
            assert!(off <= tolerance::F64, "{} on {parallel:?}: {off:e}", case["name"]);
        }
        let off = difference(&case, &trained(&case, &mesh(1, 1, 1), 0.0505));
        assert!(off > tolerance::F64, "{}: a learning rate 1 % off makes a difference of only {off:e}", case["name"]);
    }
}

/// Of 8 samples the variance is 7 eighths of what PyTorch takes it for. Four steps keep `0.75^4` of the first one, which is 1.
#[test]
fn variances_of_other_tools_are_those_of_the_batch() {
    let case = cases().into_iter().find(|case| case["name"] == "of an input").expect("there is one");
    let key = ("n.running_var".to_owned(), ParamKind::Weight);
    let moved = |producer| {
        let found = trained_by(&case, producer, &mesh(1, 1, 1), 0.05);
        decode(&found.parameters[&key]).into_iter().map(|variance| variance - 0.75_f64.powi(4)).collect::<Vec<_>>()
    };
    let (unbiased, own) = (moved(PRODUCER), moved("paddle2onnx"));
    for (unbiased, own) in unbiased.iter().zip(&own) {
        assert!((own / unbiased - 7.0 / 8.0).abs() < 1e-12 && *own > 0.1, "{own} beside {unbiased}");
    }
}
