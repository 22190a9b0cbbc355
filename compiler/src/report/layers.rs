//! Which layers a stage has, from the names of its parameters: `wte, h.0–5`.

use std::collections::{BTreeMap, BTreeSet};

/// A layer's name up to its number if it has one: `transformer.h`, 3; else the module that holds the tensor.
type Layer<'a> = (Vec<&'a str>, Option<u64>);

/// One text per stage: layers in the order of `stages`' names, runs of numbers as ranges, and of each name as many of its last
/// parts as tell it from the others.
pub fn texts(stages: &[Vec<&str>]) -> Vec<String> {
    let stages: Vec<Vec<Layer>> = stages.iter().map(|names| layers(names)).collect();
    let stems: BTreeSet<&[&str]> = stages.iter().flatten().map(|(stem, _)| stem.as_slice()).collect();
    let short: BTreeMap<&[&str], String> = stems.iter().map(|&stem| (stem, shortest(stem, &stems))).collect();
    stages.iter().map(|layers| text(layers, &short)).collect()
}

fn layers<'a>(names: &[&'a str]) -> Vec<Layer<'a>> {
    let mut found: Vec<Layer> = Vec::new();
    for name in names {
        let parts: Vec<&str> = name.split(['.', '/']).filter(|part| !part.is_empty()).collect();
        let numbered = parts.iter().position(|part| number(part).is_some());
        let layer = match numbered {
            Some(at) => (parts[..at].to_vec(), number(parts[at])),
            None => (parts[..parts.len().saturating_sub(1).max(1).min(parts.len())].to_vec(), None),
        };
        if !found.contains(&layer) {
            found.push(layer);
        }
    }
    found
}

fn number(part: &str) -> Option<u64> {
    part.parse().ok()
}

/// The fewest last parts of `stem` that no other stem ends with.
fn shortest(stem: &[&str], stems: &BTreeSet<&[&str]>) -> String {
    let is_own = |from: &usize| stems.iter().filter(|other| other.ends_with(&stem[*from..])).count() == 1;
    let from = (0..stem.len()).rev().find(is_own).unwrap_or(0);
    stem[from..].join(".")
}

fn text(layers: &[Layer], short: &BTreeMap<&[&str], String>) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut seen: BTreeSet<&[&str]> = BTreeSet::new();
    for (stem, number) in layers {
        if !seen.insert(stem) {
            continue;
        }
        let name = &short[stem.as_slice()];
        let mut numbers: Vec<u64> = layers.iter().filter(|(other, _)| other == stem).filter_map(|(_, n)| *n).collect();
        numbers.sort_unstable();
        match number {
            None => words.push(name.clone()),
            Some(_) => words.extend(runs(&numbers).into_iter().map(|run| join(name, &run))),
        }
    }
    words.join(", ")
}

fn join(name: &str, run: &str) -> String {
    if name.is_empty() { run.to_owned() } else { format!("{name}.{run}") }
}

/// `0–2`, `5` of ascending numbers.
fn runs(numbers: &[u64]) -> Vec<String> {
    let chunks = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[u64]| match run {
        [one] => one.to_string(),
        run => format!("{}–{}", run[0], run[run.len() - 1]),
    };
    chunks.map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_in_short() {
        let gpt = |layers: std::ops::Range<u32>| layers.map(|i| format!("t.h.{i}.ln.weight")).collect::<Vec<_>>();
        let (first, second) = (gpt(0..3), gpt(3..4));
        let first: Vec<&str> = ["t.wte.weight", "t.h.2.b"].into_iter().chain(first.iter().map(String::as_str)).collect();
        let second: Vec<&str> = second.iter().map(String::as_str).chain(["t.ln_f.weight", "t.ln_f.bias"]).collect();
        assert_eq!(texts(&[first, second]), ["wte, h.0–2", "h.3, ln_f"]);
        assert_eq!(texts(&[vec!["fc.0.weight", "fc.1.weight", "fc.3.w"]]), ["fc.0–1, fc.3"]);
        assert_eq!(texts(&[vec!["fc1.weight", "fc1.bias"], vec!["W"], vec![]]), ["fc1", "W", ""]);
        assert_eq!(
            texts(&[vec!["encoder.layer.0.w", "decoder.layer.0.w", "0.w", "1.w"]]),
            ["encoder.layer.0, decoder.layer.0, 0–1"]
        );
    }
}
