//! Which layers a stage has, from the names of its parameters: `wte, h.0–5`.

/// One text per stage; what all names begin with is left out.
pub fn texts(stages: &[Vec<&str>]) -> Vec<String> {
    let stages: Vec<Vec<Vec<&str>>> = stages.iter().map(|names| layers(names)).collect();
    let common = common_prefix(stages.iter().flatten());
    stages.iter().map(|layers| text(layers, common)).collect()
}

/// The distinct layers of parameter names, in order: up to the first number, else all but the leaf.
fn layers<'a>(names: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut found: Vec<Vec<&str>> = Vec::new();
    for name in names {
        let parts: Vec<&str> = name.split('.').collect();
        let end = match parts.iter().position(|part| number(part).is_some()) {
            Some(at) => at + 1,
            None => (parts.len() - 1).max(1),
        };
        if !found.iter().any(|layer| layer[..] == parts[..end]) {
            found.push(parts[..end].to_vec());
        }
    }
    found.sort_by_key(|layer| layer.last().and_then(|part| number(part)).unwrap_or(0));
    found.sort_by_key(|layer| names.iter().position(|name| name.starts_with(&layer[..layer.len() - 1].join("."))));
    found
}

fn number(part: &str) -> Option<u64> {
    part.parse().ok()
}

/// Parts that all layers share, besides a last one.
fn common_prefix<'a>(layers: impl Iterator<Item = &'a Vec<&'a str>> + Clone) -> usize {
    let Some(first) = layers.clone().next() else { return 0 };
    let shared = |layer: &Vec<&str>| {
        let same = layer.iter().zip(first).take_while(|(a, b)| a == b && number(a).is_none()).count();
        let stem = if number(layer[layer.len() - 1]).is_some() { 2 } else { 1 };
        same.min(layer.len().saturating_sub(stem))
    };
    layers.map(shared).min().unwrap_or(0)
}

fn text(layers: &[Vec<&str>], common: usize) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut at = 0;
    while at < layers.len() {
        let layer = &layers[at];
        let (stem, last) = (&layer[common..layer.len() - 1], layer[layer.len() - 1]);
        let follows = |other: &Vec<&str>, steps: u64| {
            let next = number(last).map(|n| n + steps);
            other[..other.len() - 1] == layer[..layer.len() - 1] && next.is_some() && number(other[other.len() - 1]) == next
        };
        let count = (1..layers.len() - at).take_while(|&i| follows(&layers[at + i], i as u64)).count();
        let name = stem.iter().chain([&last]).copied().collect::<Vec<_>>().join(".");
        words.push(if count == 0 { name } else { format!("{name}–{}", layers[at + count][layer.len() - 1]) });
        at += count + 1;
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_in_short() {
        let gpt = |layers: std::ops::Range<u32>| layers.map(|i| format!("t.h.{i}.ln.weight")).collect::<Vec<_>>();
        let (first, second) = (gpt(0..3), gpt(3..4));
        let first: Vec<&str> = std::iter::once("t.wte.weight").chain(first.iter().map(String::as_str)).collect();
        let second: Vec<&str> = second.iter().map(String::as_str).chain(["t.ln_f.weight", "t.ln_f.bias"]).collect();
        assert_eq!(texts(&[first, second]), ["wte, h.0–2", "h.3, ln_f"]);
        assert_eq!(texts(&[vec!["fc.0.weight", "fc.1.weight"]]), ["fc.0–1"]);
        assert_eq!(texts(&[vec!["fc1.weight", "fc1.bias"], vec!["W"], vec![]]), ["fc1", "W", ""]);
    }
}
