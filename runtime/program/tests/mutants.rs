//! Machine-made mutants of sound programs: what the gate accepts must run to its end and give what it gives on one device.
//! (A mutant may compute another function, such as an update done twice; on every mesh it must be the same one.) Parser fuzz
//! and round trips go over the same texts.

use dcc_program::check;
use dcc_program::program::{ParamKind, Program};
use dcc_program::simulate::{Scalars, Simulator, Tensor};
use dcc_program::text::{parse, print};
use std::collections::BTreeMap;

const MLP: &[&str] = &[include_str!("programs/mlp_tp2.txt")];
const PIPE: &[&str] = &[include_str!("programs/pipe_stage0.txt"), include_str!("programs/pipe_stage1.txt")];

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

/// Loss and weights after two steps.
fn run(programs: &[Program]) -> Result<Vec<f64>, String> {
    let mut simulator = Simulator::new(programs).map_err(|e| e.to_string())?;
    let weights = [("fc1.weight", tensor(&[4, 6], 1)), ("fc2.weight", tensor(&[6, 3], 2))];
    for (name, value) in &weights {
        simulator.set(name, &ParamKind::Weight, value).map_err(|e| e.to_string())?;
    }
    let inputs = BTreeMap::from([("x".to_owned(), tensor(&[8, 4], 3)), ("target".to_owned(), tensor(&[8, 3], 4))]);
    let mut out = Vec::new();
    for step in 1..=2 {
        let outputs = simulator.step(&inputs, Scalars { learning_rate: 0.1, step, seed: 0 }).map_err(|e| e.to_string())?;
        out.extend(outputs.get("loss").ok_or("no loss")?.values.iter().copied());
    }
    for (name, _) in &weights {
        out.extend(simulator.get(name, &ParamKind::Weight).map_err(|e| e.to_string())?.values);
    }
    Ok(out)
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

fn mutants(texts: &[&str], seed: u64, count: usize) {
    let mut random = Random(seed);
    let parsed: Vec<Program> = texts.iter().map(|t| parse(t).unwrap()).collect();
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
            let got = run(&set).unwrap_or_else(|e| panic!("accepted, but fails: {e}\n{mutant}"));
            let whole: Vec<Program> = set.iter().map(unsharded).collect();
            let meant = run(&whole).unwrap_or_else(|e| panic!("fails on one device: {e}\n{mutant}"));
            let same = got.len() == meant.len() && got.iter().zip(&meant).all(|(a, b)| (a - b).abs() <= 1e-12);
            assert!(same, "accepted, but differs from one device: {got:?} {meant:?}\n{mutant}");
        }
    }
    assert!(0 < accepted && accepted * 3 < tried, "{accepted} of {tried} mutants accepted");
}

/// The same program for one rank per stage and one microbatch: every axis but `pp` of size 1, offsets stretched so that the
/// larger blocks fit. What a mutant computes there is what it means.
fn unsharded(p: &Program) -> Program {
    let mut p = p.clone();
    let factor: u64 = p.mesh.axes.iter().filter(|a| a.name != "pp").map(|a| u64::from(a.size)).product();
    p.mesh.axes.iter_mut().filter(|a| a.name != "pp").for_each(|a| a.size = 1);
    p.buffers.iter_mut().for_each(|b| b.offset *= factor);
    p.areas.iter_mut().for_each(|a| a.bytes *= factor);
    p.persistent_bytes *= factor;
    p.scratch_bytes *= factor;
    p.order.retain(|step| step.microbatch == 0);
    p
}

#[test]
fn accepted_mutants_give_equal_results() {
    mutants(MLP, 1, 400);
    mutants(PIPE, 2, 400);
}

#[test]
fn any_text_gives_a_program_or_an_error() {
    let mut random = Random(3);
    for &text in MLP.iter().chain(PIPE) {
        for _ in 0..3000 {
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
