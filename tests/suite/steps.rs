//! Training steps of real models, evaluated by `interp` in f64, against PyTorch float64: import, loss, gradients and optimizer as
//! one, before anything is partitioned. All 20 steps run in the compiled programs' tests; three show a wrong gradient here.

use crate::tolerance::Row;
use bytes::Bytes;
use dcc::import::{Imported, Model, Options, Parameter, TensorData, onnx};
use dcc::interp::{Bindings, Precision, Tensor, evaluate};
use dcc::loss::{Labels, LossOptions};
use dcc::optimizer::{AdamDecay, Optimizer, OptimizerOptions};
use dcc::train::{Output, Trainable, Training, TrainingOptions, train_step, updates};
use dcc_program::{DType, Shape};
use dcc_runtime::init::{Initial, Rule};
use dcc_runtime::slice::Slice;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

const STEPS: usize = 3;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// One golden run: the flags of its command, and PyTorch's numbers.
struct Run {
    flags: Vec<String>,
    golden: Value,
}

impl Run {
    fn load(name: &str) -> Run {
        let path = root().join("tests/golden/numbers").join(format!("{name}.json"));
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("a golden")).expect("JSON");
        let flags = golden["flags"].as_array().expect("flags").iter();
        Run { flags: flags.map(|f| f.as_str().expect("a flag").to_owned()).collect(), golden }
    }

    fn flag(&self, name: &str) -> Option<&str> {
        let at = self.flags.iter().position(|f| f == name)?;
        self.flags.get(at + 1).map(String::as_str)
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.flag(name).map(|text| text.parse().expect("a number"))
    }

    fn batch(&self) -> u64 {
        self.number("--global-batch-size").expect("a batch size") as u64
    }

    /// PyTorch's float64 number of a step.
    fn expected(&self, key: &str, step: usize) -> f64 {
        self.golden["f64"][key][step].as_f64().expect("a number per step")
    }

    fn optimizer(&self) -> OptimizerOptions {
        let pair = |text: &str| {
            let (a, b) = text.split_once(',').expect("two betas");
            (a.parse().expect("a beta"), b.parse().expect("a beta"))
        };
        let optimizer = match self.flag("--optimizer") {
            Some("sgd") => Optimizer::Sgd {
                momentum: self.number("--momentum").unwrap_or(0.0),
                nesterov: self.flags.iter().any(|f| f == "--nesterov"),
            },
            kind => Optimizer::Adam {
                betas: self.flag("--betas").map_or((0.9, 0.999), pair),
                eps: self.number("--eps").unwrap_or(1e-8),
                decay: if kind == Some("adam") { AdamDecay::L2 } else { AdamDecay::Decoupled },
            },
        };
        OptimizerOptions {
            optimizer,
            weight_decay: self.number("--weight-decay").unwrap_or(0.0),
            grad_clip: self.number("--grad-clip"),
            ..OptimizerOptions::default()
        }
    }

    /// The f32 value that a parameter has in the file, or the initial one, in f64.
    fn initial(&self, model: &Model, parameter: &Parameter) -> Tensor {
        if !matches!(parameter.tensor.data, TensorData::External { .. }) {
            return parameter.tensor.read(model).expect("data in the file");
        }
        let (name, shape) = (&parameter.tensor.name, &parameter.tensor.shape);
        let given = self.flag("--init-rule").and_then(|text| text.split_once('='));
        let suffix = |glob: &str| name.ends_with(glob.trim_start_matches('*'));
        let rule = match given {
            Some((glob, rule)) if suffix(glob) => Rule::parse(rule).expect("a rule"),
            _ if shape.len() >= 2 => Rule::Std(0.02),
            _ if parameter.gain => Rule::Ones,
            _ => Rule::Zeros,
        };
        let seed = self.number("--init").expect("a seed") as u64;
        let slice = Slice::whole(shape);
        let mut bytes = vec![0; slice.elements() as usize * 8];
        Initial { name, seed, rule, stored: DType::F32 }.fill(&slice, DType::F64, &mut bytes);
        let value = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Tensor::floats(DType::F64, shape, bytes.chunks_exact(8).map(value).collect())
    }
}

/// The arrays of a .npz.
fn read_npz(path: &str) -> BTreeMap<String, Tensor> {
    let mut file = npyz::npz::NpzArchive::open(root().join(path)).expect("an npz");
    let names: Vec<String> = file.array_names().map(str::to_owned).collect();
    let mut arrays = BTreeMap::new();
    for name in names {
        let array = file.by_name(&name).expect("reads").expect("a named array");
        let shape = array.shape().to_vec();
        let is_float = matches!(array.dtype(), npyz::DType::Plain(t) if t.type_char() == npyz::TypeChar::Float);
        let tensor = if is_float {
            let values: Vec<f32> = array.into_vec().expect("f32");
            Tensor::floats(DType::F64, &shape, values.into_iter().map(f64::from).collect())
        } else {
            let values: Vec<i16> = array.into_vec().expect("i16");
            Tensor::ints(DType::I64, &shape, values.into_iter().map(i64::from).collect())
        };
        arrays.insert(name, tensor);
    }
    arrays
}

/// Rows of one sequential batch.
fn batch(whole: &Tensor, step: usize, size: u64) -> Tensor {
    let row = whole.len() / whole.shape[0] as usize;
    let rows = step * size as usize * row..(step + 1) * size as usize * row;
    let mut shape = whole.shape.clone();
    shape[0] = size;
    if whole.dtype.is_float() {
        Tensor::floats(whole.dtype, &shape, whole.f64s()[rows].to_vec())
    } else {
        Tensor::ints(whole.dtype, &shape, whole.i64s()[rows].to_vec())
    }
}

/// The training step of the run in f64, its initial bindings, and the data.
fn prepare(run: &Run) -> (Training, Bindings, BTreeMap<String, Tensor>) {
    let bytes = std::fs::read(root().join(&run.flags[0])).expect("a model");
    let model = Model::decode(Bytes::from(bytes)).expect("decodes");
    let Imported { graph, inputs, parameters, .. } =
        onnx(&model, &Options { global_batch: Some(run.batch()), ..Options::default() }).expect("imports");
    let data = read_npz(run.flag("--data").expect("data"));
    let mut bindings = Bindings::default();
    for input in inputs.iter().filter(|input| !data.contains_key(&input.name)) {
        let ones = dcc_program::TensorType::new(input.dtype, input.shape.iter().copied());
        bindings = bindings.input(&input.name, Tensor::filled(&ones, 1.0));
    }
    let labels = data.get("labels").map_or(Labels::Absent, |labels| {
        let mut shape: Shape = labels.shape.clone();
        shape[0] = run.batch();
        Labels::Given(shape)
    });
    for parameter in &parameters {
        bindings = bindings.weight(&parameter.tensor.name, run.initial(&model, parameter));
    }
    let trainable =
        parameters.iter().map(|p| Trainable { name: p.tensor.name.clone(), aliases: p.aliases.clone(), by_default: p.trained });
    let options = TrainingOptions {
        loss: LossOptions { labels, label_smoothing: run.number("--label-smoothing").unwrap_or(0.0), ..Default::default() },
        optimizer: run.optimizer(),
        ..TrainingOptions::default()
    };
    let graph = dcc::precision::retype(&graph, DType::F64).expect("in f64");
    (train_step(&graph, &trainable.collect::<Vec<_>>(), &options).expect("a training step"), bindings, data)
}

fn check(run: &Run) -> Result<(), String> {
    let (training, mut bindings, data) = prepare(run);
    let graph = &training.graph;
    let updates = updates(graph);
    let mut wanted = vec![graph.output(&Output::Loss.text()).expect("a loss")];
    wanted.push(graph.output(&Output::GradNorm.text()).expect("a norm"));
    wanted.extend(updates.iter().map(|update| update.new));
    for step in 0..STEPS {
        for (name, whole) in &data {
            bindings = bindings.input(name, batch(whole, step, run.batch()));
        }
        bindings.learning_rate = run.golden["lr"][step].as_f64().expect("a rate per step");
        bindings.step = step as i64 + 1;
        let values = evaluate(graph, &wanted, &bindings, Precision::Exact).map_err(|e| e.to_string())?;
        for (key, value) in ["loss", "grad_norm"].into_iter().zip(&values) {
            let (got, expected) = (value.f64s()[0], run.expected(key, step));
            if (got - expected).abs() > Row::F64.allowed(expected.abs(), 0.0) {
                return Err(format!("{key} of step {}: {got}, PyTorch {expected}", step + 1));
            }
        }
        for (update, value) in updates.iter().zip(&values[2..]) {
            let dcc::ops::Op::Param(param) = &graph[update.param].op else { unreachable!("updates are of parameters") };
            bindings.params.insert((param.name.clone(), param.kind.clone()), value.clone());
        }
    }
    Ok(())
}

#[test]
fn steps_match_torch() {
    let mlps = ["mlp_adam", "mlp_adamw", "mlp_momentum", "mlp_nesterov", "mlp_smoothing", "mlp_legacy"];
    let transformers = ["gpt2_tiny", "gpt2_tiny_legacy", "gpt2_tiny_opset20", "llama_tiny", "bert_tiny"];
    for name in mlps.into_iter().chain(transformers) {
        check(&Run::load(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn training_graphs_print_and_parse() {
    for name in ["mlp_adamw", "llama_tiny"] {
        let graph = prepare(&Run::load(name)).0.graph;
        let text = graph.to_string();
        let parsed = dcc::Graph::parse(&text).expect("parses");
        assert_eq!(parsed.to_string(), text);
        assert_eq!(parsed.nodes, graph.nodes);
        assert!(graph.ids().all(|id| (parsed.grad_of(id), parsed.origin(id)) == (graph.grad_of(id), graph.origin(id))));
        dcc::graph::verify(&parsed).expect("holds");
    }
}

#[test]
fn another_hyperparameter_is_found() {
    let mut run = Run::load("mlp_adam");
    let at = run.flags.iter().position(|f| f == "--eps").expect("a flag") + 1;
    run.flags[at] = "1.01e-6".to_owned();
    assert!(check(&run).is_err());
}
