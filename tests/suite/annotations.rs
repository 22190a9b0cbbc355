//! ONNX's multi-device annotations: what a plan writes is read back as that plan, and what a model asks for is had or refused.

use crate::command::{Folder, dcc, dcc_command};
use crate::tidy::root;
use dcc::annotations::annotate;
use dcc::import::Model;
use dcc::import::proto::*;
use dcc::plan::{Parallel, Pin, batch};
use dcc::{Compiled, Options, compile};
use prost::Message;
use std::process::Stdio;

fn model(path: &str) -> Model {
    let bytes = std::fs::read(root().join("tests/models").join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    Model::decode(bytes.into()).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn planned(model: &Model, parallel: Parallel) -> dcc::Result<Compiled> {
    let batch = batch::Given { global: Some(8), accumulate: Some(2), ..Default::default() };
    compile(model, &Options { name: "model.onnx".into(), batch, parallel, ..Default::default() })
}

fn mesh(dp: u32, tp: u32, pp: u32, pins: &[&str]) -> Parallel {
    let pins = pins.iter().map(|pin| Pin::parse(pin).unwrap_or_else(|e| panic!("{e}"))).collect();
    Parallel { dp, tp, pp, pins, ..Parallel::default() }
}

fn written(model: &Model, compiled: &Compiled) -> ModelProto {
    let bytes = annotate(model, compiled).encode_to_vec();
    ModelProto::decode(&bytes[..]).expect("what was encoded")
}

fn read(proto: &ModelProto) -> Model {
    Model::decode(proto.encode_to_vec().into()).expect("what was encoded")
}

fn text(compiled: &Compiled) -> String {
    compiled.plan.text(&compiled.training.graph)
}

/// Plans that flags turned from what the planner would do come back from the file without the flags.
#[test]
fn plans_come_back() {
    let cases: [(&str, u32, u32, u32, &[&str]); 7] = [
        ("gpt2_tiny.onnx", 2, 2, 2, &["*h.0.mlp.c_fc.weight=Replicate", "*h.1.mlp.c_proj.weight=Replicate"]),
        ("gpt2_tiny.onnx", 1, 2, 1, &["lm_head.weight=Replicate"]),
        ("llama_tiny.onnx", 1, 2, 2, &["*layers.1.mlp.down_proj.weight=Replicate"]),
        ("bert_tiny.onnx", 2, 2, 1, &["*layer.0.*.dense.weight=Replicate"]),
        ("mlp.onnx", 2, 2, 1, &["fc.1.weight=Shard(0)@tp"]),
        ("families/convnext.onnx", 1, 2, 2, &["*.1.*weight=Replicate"]),
        ("families/t5_legacy.onnx", 1, 2, 2, &["*decoder*wo.weight=Replicate"]),
    ];
    for (path, dp, tp, pp, pins) in cases {
        let model = model(path);
        let free = planned(&model, mesh(dp, tp, pp, &[])).unwrap_or_else(|e| panic!("{path}: {e}"));
        let pinned = planned(&model, mesh(dp, tp, pp, pins)).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert!(text(&pinned) != text(&free), "{path}: the flags change nothing");
        for (plan, what) in [(&free, "free"), (&pinned, "pinned")] {
            comes_back(&model, plan, mesh(dp, tp, pp, &[]), &format!("{path}, {what}"));
        }
    }
}

/// The plan of `compiled`, written and read again.
#[track_caller]
fn comes_back(model: &Model, compiled: &Compiled, parallel: Parallel, what: &str) {
    let annotated = read(&written(model, compiled));
    let again = planned(&annotated, parallel).unwrap_or_else(|e| panic!("{what}: {e}"));
    let (now, then) = (text(&again), text(compiled));
    let other: Vec<_> = now.lines().zip(then.lines()).filter(|(a, b)| a != b).collect();
    assert!(other.is_empty() && now == then, "{what}: {other:#?}");
    assert!(again.artifact.train == compiled.artifact.train, "{what}: the programs differ");
    assert_eq!(again.imported.warnings, compiled.imported.warnings, "{what}: every annotation speaks of a value");
    let twice = written(&annotated, &again);
    assert!(twice == written(model, compiled), "{what}: written anew it is another file");
}

/// What is cut along sequences comes back too; inputs lie whole on the ranks that share them.
#[test]
fn plans_along_sequences_come_back() {
    for path in ["gpt2_tiny.onnx", "bert_tiny.onnx"] {
        let model = model(path);
        for (cp, sequence_parallel, (dp, tp, pp)) in
            [(1, true, (1, 2, 2)), (2, false, (2, 1, 1)), (2, false, (1, 2, 1)), (2, true, (1, 2, 1))]
        {
            let parallel = Parallel { cp, sequence_parallel, ..mesh(dp, tp, pp, &[]) };
            let what = format!("{path} {parallel:?}");
            let compiled = planned(&model, parallel.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
            comes_back(&model, &compiled, parallel, &what);
        }
    }
}

/// What is cut along experts comes back too.
#[test]
fn plans_of_experts_come_back() {
    for path in ["families/moe.onnx", "families/gshard.onnx"] {
        let model = model(path);
        for (ep, (dp, tp, pp)) in [(2, (1, 1, 1)), (4, (1, 1, 1)), (2, (2, 1, 1)), (2, (1, 2, 1)), (2, (1, 1, 2))] {
            let parallel = Parallel { ep, ..mesh(dp, tp, pp, &[]) };
            let what = format!("{path} {parallel:?}");
            let compiled = planned(&model, parallel.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
            comes_back(&model, &compiled, parallel, &what);
        }
    }
}

/// The same by the command: from its file come the programs that the flags made.
#[test]
fn the_command_writes_what_plans_come_back_from() {
    let (model, folder) = ("tests/models/mlp.onnx", Folder::new());
    let words = |model: &str, pins: &[&str], emit: &str| {
        let words = ["compile", model, "--global-batch-size", "8", "--tp", "2", "--emit", emit];
        words.iter().chain(pins).map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let pins = ["--param", "fc.1.weight=Shard(0)@tp"];
    let path = folder.at("mlp.onnx");
    let file = std::fs::File::create(&path).expect("a file");
    let status = dcc_command().args(words(model, &pins, "annotated.onnx")).stdout(file).stderr(Stdio::null()).status();
    assert!(status.expect("a command").success());
    let programs = |model: &str, pins: &[&str]| dcc(words(model, pins, "programs")).ok().stdout;
    assert_eq!(programs(&path, &[]), programs(model, &pins));
    assert_ne!(programs(&path, &[]), programs(model, &[]));
}

/// Stages that no cost would choose.
#[test]
fn stages_are_as_annotated() {
    let model = model("gpt2_tiny.onnx");
    let free = planned(&model, mesh(1, 1, 2, &[])).expect("a plan");
    let mut proto = written(&model, &free);
    let nodes = &mut proto.graph.as_mut().expect("a graph").node;
    // All but the embeddings on the second stage.
    let first = nodes.iter().position(|node| node.op_type() == "LayerNormalization").expect("a layer norm");
    for node in &mut nodes[first..] {
        node.device_configurations.iter_mut().for_each(|c| {
            c.sharding_spec.clear();
            c.pipeline_stage = c.pipeline_stage.map(|_| 1);
        });
    }
    let early = planned(&read(&proto), mesh(1, 1, 2, &[])).expect("a plan");
    let on_first = |compiled: &Compiled| compiled.plan.stages.values().filter(|&&stage| stage == 0).count();
    assert!(on_first(&early) * 4 < on_first(&free), "{} of {}", on_first(&early), on_first(&free));
    let held = |compiled: &Compiled| compiled.artifact.train[0].params.iter().any(|p| p.name.contains("h.0.attn"));
    assert!(held(&free) && !held(&early));
}

fn configurations(proto: &mut ModelProto) -> impl Iterator<Item = &mut NodeDeviceConfigurationProto> {
    let nodes = &mut proto.graph.as_mut().expect("a graph").node;
    nodes.iter_mut().flat_map(|node| &mut node.device_configurations)
}

fn specs(proto: &mut ModelProto) -> impl Iterator<Item = &mut ShardingSpecProto> {
    configurations(proto).flat_map(|c| &mut c.sharding_spec)
}

/// The first spec of a tensor.
fn spec<'p>(proto: &'p mut ModelProto, tensor: &str) -> &'p mut ShardingSpecProto {
    specs(proto).find(|spec| spec.tensor_name() == tensor).unwrap_or_else(|| panic!("{tensor} is annotated"))
}

#[test]
fn what_cannot_be_had_is_refused() {
    let model = model("mlp.onnx");
    let two = mesh(1, 2, 1, &[]);
    let plan = planned(&model, two.clone()).expect("a plan");
    let weight = plan.imported.parameters.iter().find(|p| p.tensor.shape.len() == 2).expect("a weight").tensor.name.clone();
    let check = |code: u32, says: &str, change: &dyn Fn(&mut ModelProto)| {
        let mut proto = written(&model, &plan);
        planned(&read(&proto), two.clone()).unwrap_or_else(|e| panic!("before: {e}"));
        change(&mut proto);
        let error = planned(&read(&proto), two.clone()).map(|_| ()).expect_err(says);
        assert_eq!(u32::from(error.code.0), code, "{error}");
        assert!(error.to_string().contains(says) && error.at.is_some(), "{says}: {error}");
    };
    let cut = |axis: i64, size: i64, shards: i64| ShardedDimProto {
        axis: Some(axis),
        simple_sharding: vec![SimpleShardedDimProto {
            num_shards: Some(shards),
            dim: Some(simple_sharded_dim_proto::Dim::DimValue(size)),
        }],
    };
    let set = |proto: &mut ModelProto, dims: Vec<ShardedDimProto>| {
        let spec = spec(proto, &weight);
        spec.sharded_dim = dims;
        spec.device.clear();
    };
    check(106, "is not one of the model's", &|proto| proto.configuration[0].name = Some("another".into()));
    check(106, "neither reads nor makes", &|proto| spec(proto, &weight).tensor_name = Some("another".into()));
    check(106, "number of shards that is none", &|proto| set(proto, vec![cut(0, 8, 0)]));
    check(106, "more shards than", &|proto| set(proto, vec![cut(0, 8, 2), cut(1, 8, 2)]));
    check(106, "devices other than 0 to 1", &|proto| spec(proto, &weight).device = vec![7]);
    check(304, "axis 2 is annotated", &|proto| set(proto, vec![cut(2, 8, 2)]));
    check(304, "is annotated with 7 elements", &|proto| set(proto, vec![cut(-1, 7, 2)]));
    check(304, "annotated for stage 1", &|proto| {
        let staged = configurations(proto).find(|c| c.pipeline_stage.is_some());
        staged.expect("a stage").pipeline_stage = Some(1);
    });
    check(304, "held by [[1], [0]]", &|proto| {
        let sharded = specs(proto).find(|spec| spec.device.len() == 2);
        sharded.expect("a sharded tensor").device.reverse();
    });
    let input = plan.imported.inputs[0].name.clone();
    check(304, "no plan gives it", &|proto| {
        let spec = spec(proto, &input);
        spec.sharded_dim = vec![ShardedDimProto {
            axis: Some(0),
            simple_sharding: vec![SimpleShardedDimProto { num_shards: Some(2), dim: None }],
        }];
        spec.device.clear();
    });
}

/// Of another number of devices: said, and not followed.
#[test]
fn other_meshes_are_told_of() {
    let model = model("mlp.onnx");
    let plan = planned(&model, mesh(1, 2, 1, &["fc.1.weight=Shard(0)@tp"])).expect("a plan");
    let annotated = read(&written(&model, &plan));
    let other = planned(&annotated, mesh(4, 1, 1, &[])).expect("a plan");
    assert_eq!(text(&other), text(&planned(&model, mesh(4, 1, 1, &[])).expect("a plan")));
    let warned = |compiled: &Compiled| compiled.imported.warnings.iter().any(|w| w.contains("annotations are not used"));
    assert!(warned(&other) && !warned(&plan));
    // Flags count before annotations.
    let flags = planned(&annotated, mesh(1, 2, 1, &["fc.1.weight=Replicate"])).map(|compiled| text(&compiled));
    let unannotated = planned(&model, mesh(1, 2, 1, &["fc.1.weight=Replicate"])).map(|compiled| text(&compiled));
    assert!(unannotated.is_ok() && flags.is_ok_and(|text| text != self::text(&plan)));
}
