//! What a run must know of a compiled model beside its programs; stands in `Artifact::options` as JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// File name of the model.
    pub model: String,
    /// BLAKE3 of the model file, hex: `dcc export` writes back into that very graph.
    pub model_hash: String,
    /// Samples of one optimizer step.
    pub batch: u64,
    /// What the loss is, for people.
    pub loss: String,
    pub parameters: BTreeMap<String, Parameter>,
    /// Inputs of the programs, labels included.
    pub inputs: BTreeMap<String, Input>,
    /// Inputs of the model that no program reads: data may have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unused: Vec<String>,
    /// The compile options as flags, in order.
    pub flags: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parameter {
    pub trained: bool,
    /// `--init-all` draws it: no constant or table of the model.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub drawn: bool,
    /// Scales a normalised value: `--init` makes it ones.
    pub gain: bool,
    /// Other names of it in the PyTorch module.
    pub aliases: Vec<String>,
    /// The module's parameter that it is the transposed copy of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transpose_of: Option<String>,
}

/// Where an artifact does not say it.
fn yes() -> bool {
    true
}

impl Parameter {
    pub fn other_names(&self) -> Vec<String> {
        self.aliases.iter().chain(&self.transpose_of).cloned().collect()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// The dim that counts samples.
    pub batch_dim: Option<u8>,
    /// Values must be below this: rows of the table, or classes, that they index.
    pub vocabulary: Option<u64>,
    /// A value outside of the vocabulary that is allowed: labels that do not count.
    pub ignore_index: Option<i64>,
}

impl Manifest {
    pub fn to_options(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => unreachable!("a manifest is a JSON object"),
        }
    }

    /// Errors: what is missing or wrong in the JSON.
    pub fn from_options(options: &serde_json::Map<String, serde_json::Value>) -> Result<Manifest, String> {
        serde_json::from_value(serde_json::Value::Object(options.clone())).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_round_trip() {
        let mut manifest = Manifest { model: "m.onnx".to_owned(), batch: 8, ..Manifest::default() };
        manifest.inputs.insert("x".to_owned(), Input { vocabulary: Some(5), ..Input::default() });
        assert_eq!(Manifest::from_options(&manifest.to_options()), Ok(manifest));
        assert!(Manifest::from_options(&Default::default()).is_err());
    }
}
