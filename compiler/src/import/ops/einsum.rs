//! Einstein summation of any number of operands: diagonals, dims that only one operand has, then products from left to right.

use dcc_program::Reduce;
use dcc_program::kernel::CompareOp;

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[("Einsum", einsum)];

/// An operand with the name of each dim.
#[derive(Clone)]
struct Term {
    value: Value,
    names: Vec<String>,
}

/// The dims of one side's term: letters, and `…` as as many dims as it stands for, named from the last.
fn dims(term: &str, rank: Option<usize>, dots: usize) -> Option<Vec<String>> {
    let (before, after) = match term.split_once("...") {
        Some((before, after)) => (before, Some(after)),
        None => (term, None),
    };
    let letters =
        |part: &str| part.chars().map(|c| c.is_ascii_alphabetic().then(|| c.to_string())).collect::<Option<Vec<String>>>();
    let (mut names, after) = (letters(before)?, after.map(letters));
    if let Some(after) = after {
        let after = after?;
        let count = match rank {
            Some(rank) => rank.checked_sub(names.len() + after.len())?,
            None => dots,
        };
        names.extend((0..count).rev().map(|from_end| format!("dots{from_end}")));
        names.extend(after);
    }
    rank.is_none_or(|rank| rank == names.len()).then_some(names)
}

/// Without `->`: the dims of `…`, then the letters that occur once, in alphabetical order.
fn implicit_output(inputs: &str) -> String {
    let mut letters: Vec<char> =
        inputs.chars().filter(|&c| c.is_ascii_alphabetic() && inputs.matches(c).count() == 1).collect();
    letters.sort_unstable();
    let dots = if inputs.contains("...") { "..." } else { "" };
    format!("{dots}{}", letters.into_iter().collect::<String>())
}

fn einsum(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let equation: String = call.node.string_or("equation", "")?.chars().filter(|c| !c.is_whitespace()).collect();
    let wrong = || Error::attribute(format!("the equation `{equation}` does not fit its operands"));
    let (inputs, output) = match equation.split_once("->") {
        Some((inputs, output)) => (inputs, output.to_owned()),
        None => (equation.as_str(), implicit_output(&equation)),
    };
    let texts: Vec<&str> = inputs.split(',').collect();
    if texts.len() != call.inputs.len() || texts.len() > 32 {
        return Err(wrong());
    }
    let mut terms = Vec::with_capacity(texts.len());
    let mut dots = 0;
    for (position, text) in texts.iter().enumerate() {
        let value = call.input(position)?.clone();
        let names = dims(text, Some(value.rank(build)?), 0).ok_or_else(wrong)?;
        dots = dots.max(names.iter().filter(|name| name.starts_with("dots")).count());
        terms.push(diagonal(build, Term { value, names })?);
    }
    let output = dims(&output, None, dots).ok_or_else(wrong)?;
    let known = |name: &String| terms.iter().any(|term| term.names.contains(name));
    let distinct = (0..output.len()).all(|at| !output[..at].contains(&output[at]));
    if !distinct || !output.iter().all(known) {
        return Err(wrong());
    }
    stretch(build, &mut terms)?;
    let mut rest = terms.into_iter();
    let mut result = rest.next().expect("an equation has a term");
    let mut later: Vec<Term> = rest.collect();
    while !later.is_empty() {
        let mut next = later.remove(0);
        let wanted = |name: &String| output.contains(name) || later.iter().any(|term| term.names.contains(name));
        result = summed(build, result, |name| next.names.contains(name) || wanted(name))?;
        next = summed(build, next, |name| result.names.contains(name) || wanted(name))?;
        let both = result.names.iter().chain(next.names.iter().filter(|name| !result.names.contains(name)));
        let kept: Vec<String> = both.filter(|name| wanted(name)).cloned().collect();
        let names = |names: &[String]| names.iter().map(|name| name.to_owned()).collect::<Vec<String>>();
        let (a, b, out) = (names(&result.names), names(&next.names), names(&kept));
        let [a, b, out] = [&a, &b, &out].map(|names| names.iter().map(String::as_str).collect::<Vec<&str>>());
        let value = build.dot((&result.value, &a), (&next.value, &b), &out)?;
        result = Term { value, names: kept };
    }
    let result = summed(build, result, |name| output.contains(name))?;
    let order: Option<Vec<usize>> = output.iter().map(|name| result.names.iter().position(|n| n == name)).collect();
    Ok(vec![build.transpose(&result.value, &order.ok_or_else(wrong)?)?])
}

/// Dims of size 1 that are longer elsewhere are left out. Errors: DCC0104 where sizes differ otherwise.
fn stretch(build: &mut Build, terms: &mut [Term]) -> Result<()> {
    let mut sizes: Vec<(String, u64)> = Vec::new();
    for term in terms.iter() {
        for (name, &size) in term.names.iter().zip(&term.value.shape(build)?) {
            match sizes.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) if *known == 1 => *known = size,
                Some((_, known)) if *known != size && size != 1 => {
                    return Err(Error::shape(format!("dim {name} is {known} and {size}")));
                }
                Some(_) => {}
                None => sizes.push((name.clone(), size)),
            }
        }
    }
    for term in terms {
        let shape = term.value.shape(build)?;
        let full = |at: &usize| sizes.iter().any(|(name, size)| *name == term.names[*at] && *size == shape[*at]);
        let kept: Vec<usize> = (0..shape.len()).filter(full).collect();
        let left: Vec<u64> = kept.iter().map(|&at| shape[at]).collect();
        term.value = build.reshape(&term.value, &left)?;
        term.names = kept.iter().map(|&at| term.names[at].clone()).collect();
    }
    Ok(())
}

fn summed(build: &mut Build, term: Term, wanted: impl Fn(&String) -> bool) -> Result<Term> {
    let dims: Vec<usize> = (0..term.names.len()).filter(|&at| !wanted(&term.names[at])).collect();
    let value = build.reduce(Reduce::Sum, &term.value, &dims, false)?;
    Ok(Term { value, names: term.names.into_iter().filter(wanted).collect() })
}

/// A name that several dims have stands for their diagonal.
fn diagonal(build: &mut Build, mut term: Term) -> Result<Term> {
    while let Some(second) = (1..term.names.len()).find(|&at| term.names[..at].contains(&term.names[at])) {
        let first = term.names.iter().position(|name| *name == term.names[second]).expect("it was found before");
        let shape = term.value.shape(build)?;
        if shape[first] != shape[second] {
            return Err(Error::shape(format!("the diagonal of dims {first} and {second} of {:?}", shape.as_slice())));
        }
        let (row, column) = (build.positions(&shape, first)?, build.positions(&shape, second)?);
        let same = build.compare(CompareOp::Eq, &row, &column)?;
        let zero = Known::scalar(term.value.dtype(build)?, 0.0).into();
        let kept = build.select(&same, &term.value, &zero)?;
        term.value = build.reduce(Reduce::Sum, &kept, &[second], false)?;
        term.names.remove(second);
    }
    Ok(term)
}
