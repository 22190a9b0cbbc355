//! Counts that the whole compiler must reach: what tensor parallelism divides, what a stage holds, which collectives a layer
//! needs. All are read off the programs; nothing here is timed.

use crate::compile::compiled;
use crate::onnx_model;
use dcc::Compiled;
use dcc::compile::Options;
use dcc::cost::kept::Kept;
use dcc::import::Model;
use dcc::plan::{Parallel, batch};
use dcc_program::program::{Action, Area, Instr, Library, ParamKind, Place, Program, SectionKind, Transfer};
use dcc_program::{FactorSpec, TensorType};
use prost::Message;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Language models and the sizes of their vocabularies.
const WORDS: [(&str, u64); 4] =
    [("gpt2_tiny.onnx", 211), ("gpt2_tiny_shuffled.onnx", 211), ("llama_tiny.onnx", 211), ("gpt2_50257.onnx", 50257)];

fn parallel(dp: u32, tp: u32, pp: u32) -> Parallel {
    Parallel { dp, tp, pp, ..Parallel::default() }
}

fn compile(model: &str, parallel: Parallel, microbatches: u32) -> Compiled {
    compiled(model, parallel, microbatches).unwrap_or_else(|e| panic!("{model}: {e}"))
}

/// The type as one rank holds it.
fn local(program: &Program, ty: &TensorType) -> TensorType {
    TensorType::new(ty.dtype, ty.local_shape(&program.mesh))
}

/// Multiplications and additions of a contraction over all of its factors.
fn flops(program: &Program, spec: &FactorSpec, instr: &Instr) -> u64 {
    let types: Vec<TensorType> = instr.operands.iter().map(|&id| local(program, program.ty(id))).collect();
    let operands: Vec<&TensorType> = types.iter().take(spec.operands.len()).collect();
    let result = local(program, program.ty(instr.results[0]));
    2 * spec.sizes(&operands, &result).expect("the gate accepted these types").iter().product::<u64>()
}

/// Of the products of a rank in one step.
fn matmul_flops(program: &Program) -> u64 {
    let executions = |section: usize| program.order.iter().filter(|step| step.section as usize == section).count() as u64;
    let of = |instr: &Instr| match &instr.action {
        Action::Library(Library::Dot { spec, .. }) => flops(program, spec, instr),
        _ => 0,
    };
    let sections = program.sections.iter().enumerate();
    sections.map(|(i, section)| executions(i) * section.body.iter().map(of).sum::<u64>()).sum()
}

/// Of the transformer's weights: all but the tables of words.
fn weight_bytes(program: &Program, words: u64) -> u64 {
    let weights = program.params.iter().filter(|param| param.kind == ParamKind::Weight);
    let types = weights.map(|param| program.ty(param.buffer)).filter(|ty| ty.shape.first() != Some(&words));
    types.map(|ty| ty.local_bytes(&program.mesh)).sum()
}

#[test]
fn tensor_parallelism_halves_work_and_weights() {
    for (model, words) in WORDS {
        let whole = compile(model, parallel(1, 1, 1), 1).artifact.train.remove(0);
        let split = compile(model, parallel(1, 2, 1), 1).artifact.train.remove(0);
        let (before, after) = (matmul_flops(&whole), matmul_flops(&split));
        assert!(after as f64 <= 0.55 * before as f64, "{model}: a rank multiplies {after} of {before}");
        let (before, after) = (weight_bytes(&whole, words), weight_bytes(&split, words));
        assert!(after as f64 <= 0.55 * before as f64, "{model}: a rank holds {after} bytes of {before}");
    }
}

/// How many activations, tensors of rank 3, each transfer of a program moves, by section.
fn activation_transfers(program: &Program) -> BTreeMap<(SectionKind, &'static str), usize> {
    transfers(program, 3..=3)
}

/// Of tensors with so many dims.
fn transfers(program: &Program, dims: RangeInclusive<usize>) -> BTreeMap<(SectionKind, &'static str), usize> {
    let mut counts = BTreeMap::new();
    for section in &program.sections {
        for instr in &section.body {
            let Action::Start { transfer, .. } = &instr.action else { continue };
            let name = match transfer {
                Transfer::AllReduce { .. } => "all_reduce",
                Transfer::AllGather { .. } => "all_gather",
                Transfer::ReduceScatter { .. } => "reduce_scatter",
                Transfer::AllToAll { .. } => "all_to_all",
                Transfer::Send { .. } | Transfer::Recv { .. } | Transfer::StageSum { .. } => continue,
            };
            let tensors = instr.operands.iter().filter(|&&id| dims.contains(&program.ty(id).rank())).count();
            if tensors > 0 {
                *counts.entry((section.kind, name)).or_default() += tensors;
            }
        }
    }
    counts
}

/// Megatron's counts, which the planner knows nothing of: two all_reduces a layer and direction, one before a head that is split by
/// vocabulary, and one after an embedding that is (the tied one of GPT-2).
#[test]
fn a_layer_needs_two_all_reduces_in_each_direction() {
    let models =
        [("gpt2_tiny.onnx", 4, 1), ("gpt2_tiny_shuffled.onnx", 4, 1), ("gpt2_50257.onnx", 4, 1), ("llama_tiny.onnx", 2, 0)];
    for (model, layers, embeddings) in models {
        let program = compile(model, parallel(1, 2, 1), 1).artifact.train.remove(0);
        let expected = BTreeMap::from([
            ((SectionKind::Forward, "all_reduce"), 2 * layers + embeddings),
            ((SectionKind::Backward, "all_reduce"), 2 * layers + 1),
        ]);
        assert_eq!(activation_transfers(&program), expected, "{model}");
    }
}

/// Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: in place of an all_reduce an all_gather and a reduce_scatter. What is
/// gathered for a product that is split by columns is kept as a part, so that backward gathers it once more for the weight's gradient.
/// Words are summed by reduce_scatter where the vocabulary is split; where the width is, it is exchanged for the sequence.
#[test]
fn along_the_sequence_a_layer_needs_two_gathers_and_two_scatters_in_each_direction() {
    let models = [
        ("gpt2_tiny.onnx", 2, 4, true),
        ("gpt2_tiny_shuffled.onnx", 2, 4, true),
        ("gpt2_50257.onnx", 2, 4, true),
        ("gpt2_50257.onnx", 4, 4, true),
        ("llama_tiny.onnx", 2, 2, false),
    ];
    for (model, tp, layers, by_words) in models {
        let along = Parallel { sequence_parallel: true, ..parallel(1, tp, 1) };
        let program = compile(model, along, 1).artifact.train.remove(0);
        let summed = usize::from(by_words);
        let mut expected = BTreeMap::from([
            ((SectionKind::Forward, "all_gather"), 2 * layers + 1),
            ((SectionKind::Forward, "reduce_scatter"), 2 * layers + summed),
            ((SectionKind::Backward, "all_gather"), (2 * layers + summed) + (2 * layers + 1)),
            ((SectionKind::Backward, "reduce_scatter"), 2 * layers + 1),
        ]);
        if !by_words {
            expected.extend([((SectionKind::Forward, "all_to_all"), 1), ((SectionKind::Backward, "all_to_all"), 1)]);
        }
        assert_eq!(activation_transfers(&program), expected, "{model} tp {tp}");
    }
}

/// The same names in another order, other names: the plan is found by what the graph computes.
#[test]
fn names_and_order_do_not_matter() {
    for (model, seeds) in [("gpt2_tiny.onnx", 1..3), ("llama_tiny.onnx", 3..4), ("bert_tiny.onnx", 4..5)] {
        let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
        let read = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let quality = |bytes: Vec<u8>| {
            let batch = batch::Given { global: Some(8), accumulate: Some(1), ..Default::default() };
            let options = Options { name: model.to_owned(), batch, parallel: parallel(1, 2, 1), ..Default::default() };
            let model = Model::decode(bytes.into()).expect("a model");
            let program = dcc::compile(&model, &options).unwrap_or_else(|e| panic!("{path}: {e}")).artifact.train.remove(0);
            (matmul_flops(&program), weight_bytes(&program, 211), activation_transfers(&program))
        };
        let proto = dcc::import::proto::ModelProto::decode(&read[..]).expect("a model");
        let found = quality(read.clone());
        for seed in seeds {
            let other = onnx_model::shuffled(proto.clone(), seed);
            assert_ne!(other, proto);
            assert_eq!(quality(other.encode_to_vec()), found, "{model}, seed {seed}");
        }
    }
}

#[test]
fn one_f_one_b_holds_few_microbatches() {
    for (model, pp) in [("gpt2_tiny.onnx", 4), ("gpt2_tiny.onnx", 2), ("llama_tiny.onnx", 3)] {
        holds_few(&compile(model, parallel(1, 1, pp), 8), pp);
    }
    let all = Parallel { schedule: dcc::plan::Schedule::GPipe, ..parallel(1, 1, 2) };
    let compiled = compile("gpt2_tiny.onnx", all, 8);
    let slots = compiled.artifact.train[0].areas.iter().map(|area| area.slots).max();
    assert_eq!(slots, Some(8), "the control: GPipe keeps all");
}

fn holds_few(compiled: &Compiled, stages: u32) {
    for program in &compiled.artifact.train {
        let held = |area: &&Area| area.from.kind == SectionKind::Forward && area.to.kind == SectionKind::Backward;
        let slots: Vec<u32> = program.areas.iter().filter(held).map(|area| area.slots).collect();
        let kept = Kept::of(program).between(SectionKind::Forward.into(), SectionKind::Backward.into());
        assert!(kept > 0, "stage {} keeps nothing", program.stage);
        assert!(slots.iter().all(|&n| n <= stages - program.stage), "stage {} keeps {slots:?} microbatches", program.stage);
        let inputs = program.inputs.iter().filter_map(|input| match program.buffer(input.buffer).place {
            Place::Area(area) => Some(program.areas[area as usize].slots),
            _ => None,
        });
        assert!(
            inputs.max().unwrap_or(0) <= stages - program.stage,
            "stage {} keeps inputs of later microbatches",
            program.stage
        );
    }
}

fn bytes(compiled: &Compiled) -> Vec<u8> {
    let mut bytes = Vec::new();
    compiled.artifact.write(&mut bytes).expect("writing to memory");
    bytes
}

#[test]
fn the_same_model_and_flags_give_the_same_bytes() {
    for model in ["mlp.onnx", "gpt2_tiny.onnx", "llama_tiny.onnx"] {
        let [first, second] = [(); 2].map(|()| bytes(&compile(model, parallel(2, 2, 2), 2)));
        assert!(first == second, "{model}: two compilations differ");
        let other = bytes(&compile(model, parallel(1, 2, 2), 2));
        assert!(first != other, "{model}: another mesh gives the same artifact");
    }
}

/// 50257 = 29 · 1733 words: no shard is like the last.
#[test]
fn vocabularies_split_unevenly() {
    for tp in [2, 4] {
        let compiled = compile("gpt2_50257.onnx", parallel(1, tp, 1), 1);
        let program = &compiled.artifact.train[0];
        let block = 50257_u64.div_ceil(u64::from(tp));
        let shard = |param: &&dcc_program::program::Param| {
            let ty = program.ty(param.buffer);
            ty.shape.first() == Some(&50257) && ty.local_shape(&program.mesh)[0] == block
        };
        assert!(program.params.iter().any(|param| shard(&param)), "tp {tp}: no embedding in blocks of {block}");
    }
}

/// Where there are heads for all ranks, queries, keys, values and results are exchanged, and their gradients; otherwise keys and values are
/// gathered for attention, again for its gradient, and their gradients scattered. Nothing else of a layer moves.
#[test]
fn context_ranks_move_what_attention_reads() {
    let cases = [("gpt2_tiny.onnx", 4, 2), ("gpt2_50257.onnx", 4, 4), ("llama_tiny.onnx", 2, 2)].map(|case| (case, true));
    for ((model, layers, cp), heads) in
        cases.into_iter().chain([("gpt2_tiny.onnx", 4, 8), ("llama_tiny.onnx", 2, 8)].map(|case| (case, false)))
    {
        let program = compile(model, Parallel { cp, ..Parallel::default() }, 1).artifact.train.remove(0);
        let exchanged = [((SectionKind::Forward, "all_to_all"), 4), ((SectionKind::Backward, "all_to_all"), 4)];
        let gathered = [
            ((SectionKind::Forward, "all_gather"), 2),
            ((SectionKind::Backward, "all_gather"), 2),
            ((SectionKind::Backward, "reduce_scatter"), 2),
        ];
        let of_layer: &[_] = if heads { &exchanged } else { &gathered };
        let expected = of_layer.iter().map(|&(key, count)| (key, count * layers)).collect::<BTreeMap<_, _>>();
        assert_eq!(transfers(&program, 4..=5), expected, "{model} cp {cp}");
        assert_eq!(activation_transfers(&program), BTreeMap::new(), "{model} cp {cp}");
    }
}
