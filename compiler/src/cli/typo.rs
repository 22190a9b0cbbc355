//! Which known name an unknown one was meant to be.

use std::cmp::Reverse;

/// Insertions, deletions, replacements and exchanges of neighbours between two words (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// The nearest of `known` at most `most` changes away; of several the one that begins alike.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>, most: usize) -> Option<&'a str> {
    let near = known.into_iter().map(|other| (distance(word, other), other)).filter(|(distance, _)| *distance <= most);
    let alike = |other: &str| word.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    near.min_by_key(|(distance, other)| (*distance, Reverse(alike(other)))).map(|(_, other)| other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_near_each_other() {
        assert_eq!(distance("steps", "stpes"), 1);
        assert_eq!(distance("lr", ""), 2);
        assert_eq!(distance("weight_decay", "weight-decay"), 1);
        assert_eq!(nearest("stpes", ["seed", "steps", "stage"], 2), Some("steps"));
        assert_eq!(nearest("tpp", ["pp", "tp"], 2), Some("tp"));
        assert_eq!(nearest("banana", ["seed", "steps"], 2), None);
    }
}
