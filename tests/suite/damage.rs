//! Bytes changed at random, in a model and in an artifact: whatever comes of it is no panic, and what has a hash is refused.

use dcc::compile::{Compiled, Options, compile};
use dcc::import::{self, Model};
use dcc::plan::{Parallel, batch};
use dcc_program::artifact::Artifact;
use dcc_program::check;

/// Numbers that look random, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    /// Cut off in one of five cases, else with one bit or byte changed.
    fn damaged(&mut self, whole: &[u8]) -> Vec<u8> {
        let mut bytes = whole.to_vec();
        let at = self.below(bytes.len());
        match self.below(5) {
            0 => bytes.truncate(at),
            1 => bytes[at] = self.below(256) as u8,
            _ => bytes[at] ^= 1 << self.below(8),
        }
        bytes
    }
}

fn compiled(bytes: Vec<u8>) -> dcc::Result<Compiled> {
    let batch = batch::Given { global: Some(4), ..Default::default() };
    let parallel = Parallel { tp: 2, pp: 2, ..Parallel::default() };
    let options =
        Options { name: "model.onnx".to_owned(), batch, parallel, import: import::Options::default(), ..Default::default() };
    compile(&Model::decode(bytes.into())?, &options)
}

fn model(name: &str) -> Vec<u8> {
    let path = crate::tidy::root().join("tests/models").join(name);
    std::fs::read(path).expect("a model")
}

#[test]
fn damaged_models_compile_or_are_refused() {
    for (name, seed) in [("mlp.onnx", 1), ("mlp_sce.onnx", 2), ("two_inputs.onnx", 3)] {
        let (whole, mut random, mut refused) = (model(name), Random(seed), 0);
        for case in 0..70 {
            if let Err(error) = compiled(random.damaged(&whole)) {
                // An input that a bit turned into an invariant broken is a bug, whatever the input.
                assert_ne!(error.code.exit(), 1, "{name}, case {case}: {error}");
                refused += 1;
            }
        }
        assert!((10..70).contains(&refused), "{name}: {refused} of 70 refused");
    }
}

#[test]
fn damaged_artifacts_are_refused() {
    let artifact = compiled(model("mlp.onnx")).expect("a good model").artifact;
    let mut whole = Vec::new();
    artifact.write(&mut whole).expect("memory");
    assert!(Artifact::decode(whole.clone().into()).is_ok());
    let mut random = Random(4);
    for case in 0..200 {
        let bytes = random.damaged(&whole);
        let same = bytes == whole;
        assert_eq!(Artifact::decode(bytes.into()).is_ok(), same, "case {case}");
    }
}

/// Text of programs that a hash would not protect: parsed and checked, or refused.
#[test]
fn damaged_programs_are_refused_or_sound() {
    let artifact = compiled(model("mlp.onnx")).expect("a good model").artifact;
    let texts: Vec<String> = artifact.train.iter().map(dcc_program::text::print).collect();
    let (mut random, mut accepted) = (Random(5), 0);
    for _ in 0..150 {
        let mut changed = texts.clone();
        let stage = random.below(changed.len());
        let damaged = random.damaged(changed[stage].as_bytes());
        changed[stage] = String::from_utf8_lossy(&damaged).into_owned();
        let programs: Result<Vec<_>, _> = changed.iter().map(|text| dcc_program::text::parse(text)).collect();
        accepted += usize::from(programs.is_ok_and(|programs| check::programs(&programs).is_ok()));
    }
    assert!(accepted < 100, "{accepted} of 150: names may change, instructions may not");
}
