//! Bytes that a GPT layer keeps for its backward pass, beside those of Korthikanti et al. 2022 (arXiv 2205.05198, table 2 and figure 7).
//!
//! The paper counts 2-byte activations and 1-byte masks; here floats are of 4 bytes, and masks are random numbers of counters, never kept.
//! So all is counted in values, in units of s·b·h on a rank, and the paper's numbers are those of its masks too.

use crate::onnx_model::node;
use dcc::compile::{Options, compile};
use dcc::cost::kept::Kept;
use dcc::import::proto::{ModelProto, NodeProto, TensorProto, ValueInfoProto};
use dcc::import::{self, Dropout, Model};
use dcc::loss::{LossKind, LossOptions};
use dcc::plan::{Parallel, batch};
use dcc::recompute::{Recompute, Repeats};
use dcc::train::TrainingOptions;
use dcc_program::program::SectionKind;
use prost::Message;

/// Tokens of a sample.
const S: u64 = 2048;

/// A model of the paper's, and its bars of figure 7.
#[derive(Clone, Copy, Debug)]
struct Published {
    heads: u64,
    hidden: u64,
    tp: u32,
    /// In percent of tensor parallelism alone.
    sequence: f64,
    selective: f64,
    both: f64,
    full: f64,
}

fn published() -> Vec<Published> {
    let table = include_str!("../anchors/korthikanti_fig7.csv");
    let model = |line: &str| {
        let numbers: Vec<f64> = line.split(',').skip(1).map(|number| number.parse().expect("a number")).collect();
        let [heads, hidden, tp, sequence, selective, both, full] = numbers[..] else { panic!("{line}") };
        Published { heads: heads as u64, hidden: hidden as u64, tp: tp as u32, sequence, selective, both, full }
    };
    table.lines().skip_while(|line| line.starts_with('#')).skip(1).map(model).collect()
}

impl Published {
    /// as/h.
    fn scores(&self) -> f64 {
        (self.heads * S) as f64 / self.hidden as f64
    }

    /// The file's first layers in this model's widths, without weights.
    fn model(&self, layers: usize, dropout: bool) -> ModelProto {
        let path = format!("{}/models/gpt3_175b.onnx", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let mut model = ModelProto::decode(&*bytes).expect("a model");
        let graph = model.graph.as_mut().expect("a graph");
        graph.initializer.iter_mut().for_each(|tensor| self.widen(tensor));
        let next = format!("h.{layers}.ln_1.weight");
        let norm = graph.node.iter().find(|node| node.input.get(1) == Some(&next)).expect("it has more layers");
        graph.output[0] = ValueInfoProto { name: Some(norm.input[0].clone()), ..ValueInfoProto::default() };
        let dropped = |node: &&NodeProto| {
            let projects = node.op_type() == "Add" && node.input.iter().any(|name| name.ends_with("c_proj.bias"));
            dropout && (projects || node.op_type() == "Softmax")
        };
        let names: Vec<String> = graph.node.iter().filter(dropped).map(|node| node.output[0].clone()).collect();
        names.iter().for_each(|name| drop_out(&mut graph.node, name));
        model
    }

    fn widen(&self, tensor: &mut TensorProto) {
        let (heads, hidden) = (self.heads as i64, self.hidden as i64);
        for dim in tensor.dims.iter_mut().filter(|dim| **dim > 0 && **dim % 12288 == 0) {
            *dim = *dim / 12288 * hidden;
        }
        tensor.external_data.retain(|entry| entry.key() == "location");
        let shape = match tensor.name() {
            "split_heads" => vec![0, S as i64, heads, hidden / heads],
            "merge_heads" => vec![0, S as i64, hidden],
            _ => return,
        };
        tensor.raw_data = Some(shape.iter().flat_map(|size| size.to_le_bytes()).collect::<Vec<u8>>().into());
    }

    /// Values that a rank keeps of a microbatch of one sample, over s·b·h.
    fn kept(&self, layers: usize, dropout: bool, sequence_parallel: bool, repeats: Repeats) -> f64 {
        let model = Model::decode(self.model(layers, dropout).encode_to_vec().into()).expect("a model");
        let loss = LossOptions { kind: LossKind::Output, ..Default::default() };
        let options = Options {
            batch: batch::Given { global: Some(2), accumulate: Some(2), ..Default::default() },
            import: import::Options { dropout: if dropout { Dropout::Rate(0.1) } else { Dropout::Off }, ..Default::default() },
            training: TrainingOptions { loss, ..Default::default() },
            parallel: Parallel { tp: self.tp, sequence_parallel, recompute: Recompute::Fixed(repeats), ..Default::default() },
            ..Default::default()
        };
        let program = compile(&model, &options).unwrap_or_else(|e| panic!("{self:?}: {e}")).artifact.train.remove(0);
        let bytes = Kept::of(&program).between(SectionKind::Forward.into(), SectionKind::Backward.into());
        bytes as f64 / 4.0 / (S * self.hidden) as f64
    }

    /// Of one layer among several.
    fn of_layer(&self, dropout: bool, along: bool, repeats: Repeats) -> f64 {
        self.kept(3, dropout, along, repeats) - self.kept(2, dropout, along, repeats)
    }
}

/// A Dropout between `name` and all that read it.
fn drop_out(nodes: &mut Vec<NodeProto>, name: &str) {
    let at = nodes.iter().position(|node| node.output.iter().any(|output| output == name)).expect("a node makes it");
    let dropped = format!("{name}_dropped");
    for input in nodes.iter_mut().flat_map(|node| &mut node.input).filter(|input| *input == name) {
        input.clone_from(&dropped);
    }
    nodes.insert(at + 1, node("Dropout", &[name], &[&dropped]));
}

/// Values that a layer of several keeps, by the paper's terms: inputs of norms and of the products behind them, which tensor parallelism
/// leaves whole (`unsplit`); what it splits; scores.
#[derive(Clone, Copy, Debug)]
struct Terms {
    unsplit: f64,
    split: f64,
    /// Of as/h.
    scores: f64,
}

impl Terms {
    fn of(self, model: &Published, along: bool) -> f64 {
        let t = f64::from(model.tp);
        let unsplit = if along { self.unsplit / t } else { self.unsplit };
        unsplit + self.split / t + self.scores * model.scores() / t
    }
}

#[track_caller]
fn assert_near(found: f64, expected: f64, what: &str) {
    // Rows of statistics: means, deviations, sums.
    assert!((found / expected - 1.0).abs() < 2e-3, "{what}: {found} values, not {expected}");
}

/// With dropout, scores are kept: once as probabilities, once with some dropped.
#[test]
fn a_layer_keeps_the_terms_of_the_paper() {
    // Table 2 in values: norms' inputs 2, products' inputs 2, two masks 1 | Q, K, V 3, context 1, GELU's input 4 and output 4 | 2 and a mask.
    let paper = Terms { unsplit: 5.0, split: 12.0, scores: 2.5 };
    let masks = Terms { unsplit: 1.0, split: 0.0, scores: 0.5 };
    for model in published() {
        for along in [false, true] {
            let what = format!("{model:?}, along the sequence: {along}");
            let expected = [paper, masks].map(|terms| terms.of(&model, along));
            let kept = model.of_layer(true, along, Repeats::NONE);
            assert_near(kept, expected[0] - expected[1], &what);
            // Attention as one kernel keeps no scores.
            let kept = model.of_layer(false, along, Repeats::NONE);
            let scores = Terms { unsplit: 0.0, split: 0.0, scores: 2.0 }.of(&model, along);
            assert_near(kept, expected[0] - expected[1] - scores, &what);
        }
    }
}

/// The paper recomputes scores alone. dcc's selective recomputation makes again all that is made quickly: from the norms' inputs their
/// outputs, from GELU's input its output, with the scores their product with the values.
#[test]
fn selective_recomputation_keeps_less_than_the_paper() {
    for model in published() {
        for along in [false, true] {
            let what = format!("{model:?}, along the sequence: {along}");
            let paper = Terms { unsplit: 5.0, split: 12.0, scores: 0.0 }.of(&model, along);
            // Masks 1, products' inputs 2 | GELU's output 4, context 1.
            let less = Terms { unsplit: 3.0, split: 5.0, scores: 0.0 }.of(&model, along);
            assert_near(model.of_layer(true, along, Repeats::SELECTIVE), paper - less, &what);
            // The result of attention is kept where it is one kernel.
            let context = Terms { unsplit: 0.0, split: 1.0, scores: 0.0 }.of(&model, along);
            assert_near(model.of_layer(false, along, Repeats::SELECTIVE), paper - less + context, &what);
        }
    }
}

/// Figure 7 to three points, of what is measured and the differences that the tests above account for.
#[test]
fn ratios_are_those_of_figure_7() {
    let mut worst = 0.0_f64;
    for model in published() {
        let add = |unsplit, split, scores, along| Terms { unsplit, split, scores }.of(&model, along);
        let kept = |along| model.of_layer(true, along, Repeats::NONE) + add(1.0, 0.0, 0.5, along);
        let selective = |along| model.of_layer(true, along, Repeats::SELECTIVE) + add(3.0, 5.0, 0.0, along);
        let all = kept(false);
        let bars = [(kept(true), model.sequence), (selective(false), model.selective), (selective(true), model.both)];
        for (found, published) in bars {
            let off = (100.0 * found / all - published).abs();
            assert!(off <= 3.0, "{model:?}: {:.2} %, not {published} %", 100.0 * found / all);
            worst = worst.max(off);
        }
        // Full recomputation keeps one value a layer in the paper. Here segments are as long as memory likes, of several layers each.
        let layers = 16;
        let most = (model.full + 3.0) / 100.0 * all * layers as f64;
        for along in [false, true] {
            let found = model.kept(layers, true, along, Repeats::FULL);
            assert!(found <= most, "{model:?}: {found} values of {layers} layers, not {most}");
        }
        let raw = |along, repeats| model.of_layer(true, along, repeats);
        let percent = [(true, Repeats::NONE), (false, Repeats::SELECTIVE), (true, Repeats::SELECTIVE)]
            .map(|(along, repeats)| 100.0 * raw(along, repeats) / raw(false, Repeats::NONE));
        println!(
            "h {}: along the sequence {:.1} %, selective {:.1} %, both {:.1} %",
            model.hidden, percent[0], percent[1], percent[2]
        );
    }
    println!("differences accounted for, at most {worst:.2} points from figure 7");
}
