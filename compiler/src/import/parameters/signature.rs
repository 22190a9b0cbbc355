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
    /// Buffers that the forward pass changes.
    changed: BTreeSet<String>,
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
        let mut signature = Signature::default();
        for line in text.lines() {
            let Some((argument, rest)) = line.split_once(": ") else { continue };
            let kind = rest.split_whitespace().next().unwrap_or_default();
            if kind == "USER_INPUT" {
                signature.inputs.insert(argument.trim().to_owned());
            }
            let target = rest.split_once("target='").and_then(|(_, rest)| rest.split_once('\''));
            let Some((target, _)) = target else { continue };
            match kind {
                "PARAMETER" | "BUFFER" | "CONSTANT_TENSOR" => {
                    let entry = Entry { argument: argument.trim().to_owned(), trained: kind == "PARAMETER" };
                    signature.entries.insert(target.to_owned(), entry);
                }
                "BUFFER_MUTATION" => {
                    signature.changed.insert(target.to_owned());
                }
                _ => {}
            }
        }
        signature
    }

    /// Whether it is a buffer that each call of the module changes.
    pub fn is_changed(&self, name: &str) -> bool {
        self.changed.contains(name)
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
        let text = "p_fc_weight: PARAMETER target='fc.weight'\nb_mask: BUFFER target='mask' persistent=True\nx: USER_INPUT\n\
                    add: BUFFER_MUTATION target='mask'\n";
        let signature = Signature::parse(text);
        assert_eq!(signature.parameters().collect::<Vec<_>>(), [("fc.weight", "p_fc_weight")]);
        assert_eq!(["fc.weight", "mask", "x"].map(|name| signature.is_parameter(name)), [Some(true), Some(false), None]);
        assert_eq!(["fc.weight", "mask"].map(|name| signature.is_changed(name)), [false, true]);
    }
}
