//! Machine-made mutants of sound programs: what the gate accepts must run to its end and give what it gives on one device.
//! (A mutant may compute another function, such as an update done twice; on every mesh it must be the same one.) Parser fuzz
//! and round trips go over the same texts.

use dcc_program::check;
use dcc_program::program::{ParamKind, Program};
use dcc_program::simulate::{Scalars, Simulator, Tensor, unsharded};
use dcc_program::text::{parse, print};
use std::collections::BTreeMap;

/// xorshift64*: the same mutants on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }
}

fn tensor(shape: &[u64], seed: u64) -> Tensor {
    let n = shape.iter().product::<u64>();
    let value = |i: u64| ((i + 1) * (2 * seed + 3) * 2_654_435_761 % 2001) as f64 / 1000.5 - 1.0;
    Tensor { shape: shape.to_vec(), values: (0..n).map(value).collect() }
}

/// Programs, and what they are fed.
struct Case {
    texts: &'static [&'static str],
    params: &'static [(&'static str, &'static [u64])],
    floats: &'static [(&'static str, &'static [u64])],
    tokens: &'static [(&'static str, &'static [u64])],
}

const MLP: Case = Case {
    texts: &[include_str!("programs/mlp_tp2.txt")],
    params: &[("fc1.weight", &[4, 6]), ("fc2.weight", &[6, 3])],
    floats: &[("x", &[8, 4]), ("target", &[8, 3])],
    tokens: &[],
};
const PIPE: Case = Case { texts: &[include_str!("programs/pipe_stage0.txt"), include_str!("programs/pipe_stage1.txt")], ..MLP };
const VOCAB: Case = Case {
    texts: &[include_str!("programs/vocab_tp2.txt")],
    params: &[("wte", &[5, 4])],
    floats: &[],
    tokens: &[("ids", &[4]), ("labels", &[4])],
};
const ATTENTION: Case = Case {
    texts: &[include_str!("programs/attention_tp2.txt")],
    params: &[("q", &[2, 3, 4, 2]), ("k", &[2, 3, 2, 2]), ("v", &[2, 3, 2, 1])],
    floats: &[],
    tokens: &[],
};

impl Case {
    fn programs(&self) -> Vec<Program> {
        self.texts.iter().map(|t| parse(t).unwrap()).collect()
    }

    fn weights(&self) -> Vec<(&'static str, Tensor)> {
        self.params.iter().zip(1..).map(|((name, shape), seed)| (*name, tensor(shape, seed))).collect()
    }

    /// Losses of two steps, then the weights.
    fn run(&self, programs: &[Program]) -> Result<Vec<f64>, String> {
        self.run_from(programs, &self.weights(), 2)
    }

    fn run_from(&self, programs: &[Program], weights: &[(&str, Tensor)], steps: i64) -> Result<Vec<f64>, String> {
        let mut simulator = Simulator::new(programs).map_err(|e| e.to_string())?;
        for (name, value) in weights {
            simulator.set(name, &ParamKind::Weight, value).map_err(|e| e.to_string())?;
        }
        let float = |((name, shape), seed): (&(&str, &[u64]), u64)| ((*name).to_owned(), tensor(shape, seed));
        let mut inputs: BTreeMap<String, Tensor> = self.floats.iter().zip(3..).map(float).collect();
        for (i, (name, shape)) in self.tokens.iter().enumerate() {
            let values = (0..shape.iter().product::<u64>() as usize).map(|n| ((3 * n + 4 * i) % 5) as f64).collect();
            inputs.insert((*name).to_owned(), Tensor { shape: shape.to_vec(), values });
        }
        let mut out = Vec::new();
        for step in 1..=steps {
            let outputs = simulator.step(&inputs, Scalars { learning_rate: 0.1, step, seed: 0 }).map_err(|e| e.to_string())?;
            out.extend(outputs.get("loss").ok_or("no loss")?.values.iter().copied());
        }
        for (name, _) in weights {
            out.extend(simulator.get(name, &ParamKind::Weight).map_err(|e| e.to_string())?.values);
        }
        Ok(out)
    }
}

/// Changes one thing that a compiler could get wrong: an instruction dropped, doubled, moved or swapped, an operand, an offset,
/// an axis, a step or a slot changed.
fn mutate(text: &str, random: &mut Random) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let first = lines.iter().position(|l| l.starts_with("section")).unwrap_or(0);
    let last = lines.iter().position(|l| l.starts_with("kernel")).unwrap_or(lines.len());
    let pick = |random: &mut Random| first + random.below(last - first);
    let (i, j) = (pick(random), pick(random));
    match random.below(6) {
        0 => _ = lines.remove(i),
        1 => {
            let line = lines[i].clone();
            lines.insert(j, line);
        }
        2 => {
            let line = lines.remove(i);
            lines.insert(j.min(lines.len()), line);
        }
        3 => lines.swap(i, j),
        // A number somewhere: buffer, offset, axis size, slot, microbatch.
        4 => {
            let digits: Vec<usize> = lines[i].bytes().enumerate().filter(|(_, c)| c.is_ascii_digit()).map(|(n, _)| n).collect();
            if !digits.is_empty() {
                let at = digits[random.below(digits.len())];
                lines[i].replace_range(at..=at, &random.below(10).to_string());
            }
        }
        _ => {
            let words = [
                ("/tp", ""),
                ("+tp", ""),
                ("+mb", ""),
                ("/mb", ""),
                (" = dot", " += dot"),
                (" += dot", " = dot"),
                (".sum", ".max"),
                ("mb", "tp"),
                ("m k", "k m"),
            ];
            let (from, to) = words[random.below(words.len())];
            lines[i] = lines[i].replacen(from, to, 1);
        }
    }
    lines.join("\n")
}

/// The text with declarations put back that a mutation dropped, so that more mutants parse.
fn declared(mutant: &str, original: &str) -> String {
    let (Ok(p), Err(e)) = (parse(original), parse(mutant)) else { return mutant.to_owned() };
    let lost = e.what.strip_prefix('b').and_then(|w| w.split(' ').next()).and_then(|n| n.parse::<usize>().ok());
    let Some(line) = lost.and_then(|n| print(&p).lines().find_map(|l| declaration(l, n))) else { return mutant.to_owned() };
    mutant.replacen("section begin", &format!("buffer {line}\nsection begin"), 1)
}

fn declaration(line: &str, id: usize) -> Option<String> {
    let at = line.find(&format!("b{id} f32["))?;
    let end = line[at..].find(" =").or(line[at..].find(", b")).map_or(line.len(), |n| at + n);
    Some(line[at..end].to_owned())
}

fn mutants(case: &Case, seed: u64, count: usize) {
    let (mut random, texts) = (Random(seed), case.texts);
    let parsed = case.programs();
    let (mut tried, mut accepted) = (0, 0);
    while tried < count {
        let stage = random.below(texts.len());
        let mutant = declared(&mutate(texts[stage], &mut random), texts[stage]);
        let Ok(program) = parse(&mutant) else { continue };
        if program == parsed[stage] {
            continue;
        }
        tried += 1;
        let mut set = parsed.clone();
        set[stage] = program;
        if check::programs(&set).is_ok() {
            accepted += 1;
            let got = case.run(&set).unwrap_or_else(|e| panic!("accepted, but fails: {e}\n{mutant}"));
            let whole: Vec<Program> = set.iter().map(unsharded).collect();
            let meant = case.run(&whole).unwrap_or_else(|e| panic!("fails on one device: {e}\n{mutant}"));
            // A mutant may overflow, then on one device too.
            let scale = meant.iter().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
            let close = |a: f64, b: f64| a.is_finite() == b.is_finite() && (!a.is_finite() || (a - b).abs() <= 1e-10 * scale);
            let same = got.len() == meant.len() && got.iter().zip(&meant).all(|(a, b)| close(*a, *b));
            assert!(same, "accepted, but differs from one device: {got:?} {meant:?}\n{mutant}");
        }
    }
    assert!(0 < accepted && accepted * 3 < tried, "{accepted} of {tried} mutants accepted");
}

#[test]
fn sound_programs_mean_the_same_on_any_mesh() {
    for case in [MLP, PIPE, VOCAB, ATTENTION] {
        let programs = case.programs();
        check::programs(&programs).unwrap();
        let whole: Vec<Program> = programs.iter().map(unsharded).collect();
        let (got, meant) = (case.run(&programs).unwrap(), case.run(&whole).unwrap());
        assert!(got.iter().zip(&meant).all(|(a, b)| (a - b).abs() <= 1e-13), "{got:?}\n{meant:?}");
    }
}

/// What a step subtracts is the gradient of the loss, by central differences.
#[test]
fn attention_and_vocabulary_gradients() {
    for case in [ATTENTION, VOCAB] {
        let (programs, weights) = (case.programs(), case.weights());
        let step = case.run_from(&programs, &weights, 1).unwrap();
        let mut at = 1;
        for w in 0..weights.len() {
            for i in 0..weights[w].1.values.len() {
                let loss = |delta: f64| {
                    let mut moved = weights.clone();
                    moved[w].1.values[i] += delta;
                    case.run_from(&programs, &moved, 1).unwrap()[0]
                };
                let (numeric, exact) = ((loss(1e-5) - loss(-1e-5)) / 2e-5, (weights[w].1.values[i] - step[at]) / 0.1);
                assert!((numeric - exact).abs() < 1e-8, "{} {i}: {numeric} {exact}", weights[w].0);
                at += 1;
            }
        }
    }
}

#[test]
fn accepted_mutants_give_equal_results() {
    mutants(&MLP, 1, 300);
    mutants(&PIPE, 2, 300);
    mutants(&VOCAB, 3, 300);
    mutants(&ATTENTION, 4, 200);
}

#[test]
fn any_text_gives_a_program_or_an_error() {
    let mut random = Random(3);
    for &text in [MLP, PIPE, VOCAB, ATTENTION].iter().flat_map(|case| case.texts) {
        for _ in 0..1500 {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..=random.below(3) {
                let (at, length) = (random.below(bytes.len()), random.below(12));
                let other = random.below(bytes.len());
                match random.below(4) {
                    0 => bytes[at] = random.below(128) as u8,
                    1 => drop(bytes.drain(at..(at + length).min(bytes.len()))),
                    2 => bytes.truncate(at),
                    _ => {
                        let part = bytes[other..(other + length).min(bytes.len())].to_vec();
                        bytes.splice(at..at, part);
                    }
                }
                if bytes.is_empty() {
                    break;
                }
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(p) = parse(&text) {
                assert_eq!(parse(&print(&p)).as_ref(), Ok(&p), "{text}");
                let _ = check::programs(&[p]);
            }
        }
    }
}
