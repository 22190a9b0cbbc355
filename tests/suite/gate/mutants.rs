//! Hundreds of mutants of real programs, checked and run: what the gate accepts ends and gives the same results.

use super::mutate::{Change, FUNCTION, Mutation, Random, STRUCTURE};
use super::subject::Subject;
use dcc::numeric::Instance;
use dcc_program::check;
use dcc_program::program::Program;
use dcc_program::simulate::unsharded;
use std::collections::BTreeMap;

/// Refused, accepted.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    pub refused: usize,
    pub accepted: usize,
}

/// What an accepted mutant must be.
#[derive(Clone, Copy, PartialEq)]
pub enum Promise {
    /// It gives the results of the program it was made from.
    Same,
    /// It may be another function; one rank per stage and one microbatch give its results.
    SameOnEveryMesh,
}

/// `count` mutants of each subject; the first that breaks the promise ends it with its text.
pub fn check(subjects: &[Subject], promise: Promise, seed: u64, count: usize) -> BTreeMap<&'static str, Counts> {
    let mutations: &[Mutation] = if promise == Promise::Same { STRUCTURE } else { FUNCTION };
    let (mut counts, mut broken) = (BTreeMap::<&str, Counts>::new(), Vec::new());
    for subject in subjects {
        let mut random = Random(seed);
        for n in 0..count {
            let (name, mutation) = mutations[n % mutations.len()];
            let Some((stage, mutant)) = mutant(subject, mutation, &mut random) else { continue };
            let counts = counts.entry(name).or_default();
            match check::programs(&mutant) {
                Err(_) => counts.refused += 1,
                Ok(()) => {
                    counts.accepted += 1;
                    if let Err(e) = verdict(subject, &mutant, promise) {
                        broken.push(format!(
                            "{}: {name}: {e}\n{}",
                            subject.name,
                            difference(&subject.programs[stage], &mutant[stage])
                        ));
                    }
                }
            }
        }
    }
    assert!(broken.is_empty(), "{} mutants:\n{}", broken.len(), broken.join("\n"));
    counts
}

/// Mutants of the function: refused by the gate, of the same results, and those that comparing with the model's graph tells.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    pub refused: usize,
    pub same: usize,
    pub told: usize,
}

/// `count` mutants of an instance's function. Each that the gate accepts and that gives other results must be told.
pub fn told(mut instance: Instance, classes: u64, seed: u64, count: usize) -> Told {
    let sound: Vec<Program> = instance.programs().iter().map(|traced| traced.program.clone()).collect();
    let subject = Subject::new("an instance", sound, classes);
    instance.check().unwrap_or_else(|error| panic!("{error}"));
    let (mut random, mut counts, mut missed) = (Random(seed), Told::default(), Vec::new());
    for n in 0..count {
        let (name, mutation) = FUNCTION[n % FUNCTION.len()];
        let Some((stage, mutant)) = mutant(&subject, mutation, &mut random) else { continue };
        if check::programs(&mutant).is_err() {
            counts.refused += 1;
            continue;
        }
        if subject.run(&mutant).is_ok_and(|found| found.same(&subject.expected)) {
            counts.same += 1;
            continue;
        }
        let put = |instance: &mut Instance, programs: &[Program]| {
            instance.programs().iter_mut().zip(programs).for_each(|(traced, program)| traced.program = program.clone());
        };
        put(&mut instance, &mutant);
        match instance.check() {
            Ok(_) => missed.push(format!("{name}\n{}", difference(&subject.programs[stage], &mutant[stage]))),
            Err(_) => counts.told += 1,
        }
        put(&mut instance, &subject.programs);
    }
    assert!(missed.is_empty(), "{} mutants are not told:\n{}", missed.len(), missed.join("\n"));
    counts
}

/// The stage and the programs; `None` where no try finds anything to change.
fn mutant(subject: &Subject, mutation: Change, random: &mut Random) -> Option<(usize, Vec<Program>)> {
    (0..100).find_map(|_| {
        let mut programs = subject.programs.clone();
        let stage = random.below(programs.len());
        mutation(&mut programs[stage], random).map(|()| (stage, programs))
    })
}

fn verdict(subject: &Subject, mutant: &[Program], promise: Promise) -> Result<(), String> {
    let found = subject.run(mutant).map_err(|e| format!("accepted, but fails: {e}"))?;
    let expected = match promise {
        Promise::Same => subject.expected.clone(),
        Promise::SameOnEveryMesh => {
            let whole: Vec<Program> = mutant.iter().map(unsharded).collect();
            subject.run(&whole).map_err(|e| format!("fails on one rank: {e}"))?
        }
    };
    if found.same(&expected) { Ok(()) } else { Err("accepted, but gives other results".to_owned()) }
}

/// Lines of the two texts that are not in the other.
fn difference(a: &Program, b: &Program) -> String {
    let (a, b) = (dcc_program::text::print(a), dcc_program::text::print(b));
    let only = |a: &str, b: &str, sign: char| -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        b.lines().for_each(|line| *counts.entry(line).or_default() += 1);
        let mut out = String::new();
        for line in a.lines() {
            match counts.get_mut(line) {
                Some(n) if *n > 0 => *n -= 1,
                _ => out += &format!("  {sign} {line}\n"),
            }
        }
        out
    };
    only(&a, &b, '-') + &only(&b, &a, '+')
}
