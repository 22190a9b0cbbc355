//! What PyTorch's exporter says of the module's tensors: `graph_signature`, in the file's metadata.

use crate::import::model::Model;
use std::collections::{BTreeMap, BTreeSet};

const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";

/// Parameters, buffers and constants by module name.
#[derive(Clone, Debug, Default)]
pub struct Signature {
    entries: BTreeMap<String, Entry>,
    /// Inputs of the exported program that are the user's.
    inputs: BTreeSet<String>,
}

/// A line of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// The parameter's name as an input of the exported program, such as `p_transformer_wte_weight`.
    argument: String,
    /// Not a buffer or a constant.
    trained: bool,
}

impl Signature {
    pub fn of(model: &Model) -> Option<Signature> {
        model.metadata(SIGNATURE).map(Signature::parse)
    }

    /// Lines such as `p_fc_weight: PARAMETER target='fc.weight'` and `b_mask: BUFFER target='mask' persistent=True`.
    pub fn parse(text: &str) -> Signature {
        let (mut entries, mut inputs) = (BTreeMap::new(), BTreeSet::new());
        for line in text.lines() {
            let Some((argument, rest)) = line.split_once(": ") else { continue };
            let kind = rest.split_whitespace().next().unwrap_or_default();
            if kind == "USER_INPUT" {
                inputs.insert(argument.trim().to_owned());
            }
            let target = rest.split_once("target='").and_then(|(_, rest)| rest.split_once('\''));
            if let (Some((target, _)), "PARAMETER" | "BUFFER" | "CONSTANT_TENSOR") = (target, kind) {
                let entry = Entry { argument: argument.trim().to_owned(), trained: kind == "PARAMETER" };
                entries.insert(target.to_owned(), entry);
            }
        }
        Signature { entries, inputs }
    }

    /// False of buffers and constants; none where the name is not the module's.
    pub fn is_parameter(&self, name: &str) -> Option<bool> {
        self.entries.get(name).map(|entry| entry.trained)
    }

    /// Name and argument.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().filter(|(_, entry)| entry.trained).map(|(name, entry)| (name.as_str(), entry.argument.as_str()))
    }

    /// The same of parameters, buffers and constants.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry.argument.as_str()))
    }

    pub fn is_input(&self, value: &str) -> bool {
        self.inputs.contains(value)
    }

    pub fn inputs(&self) -> impl Iterator<Item = &str> {
        self.inputs.iter().map(String::as_str)
    }

    pub fn argument(&self, name: &str) -> Option<&str> {
        self.entries.get(name).map(|entry| entry.argument.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_kinds_and_targets() {
        let text = "p_fc_weight: PARAMETER target='fc.weight'\nb_mask: BUFFER target='mask' persistent=True\nx: USER_INPUT\n";
        let signature = Signature::parse(text);
        assert_eq!(signature.parameters().collect::<Vec<_>>(), [("fc.weight", "p_fc_weight")]);
        assert_eq!(["fc.weight", "mask", "x"].map(|name| signature.is_parameter(name)), [Some(true), Some(false), None]);
    }
}
