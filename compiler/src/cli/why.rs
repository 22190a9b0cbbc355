//! `dcc inspect ART.dcc --why NAME --model MODEL.onnx`: how a parameter lies, what reads it, and what its other shardings would cost: the
//! model compiled again with each of them pinned, everything else chosen anew around it.

use super::again;
use super::failure::{Failure, Outcome};
use super::flags::CompileFlags;
use super::timeline::{Step, milliseconds};
use super::typo::nearest;
use crate::cost::{Machine, sections};
use crate::error::Error;
use crate::report::size;
use dcc_program::artifact::Artifact;
use dcc_program::manifest::Manifest;
use dcc_program::program::{Action, BufferId, Instr, Library, ParamKind, Program, TokenId};
use dcc_program::{AxisId, TensorType, text};
use dcc_runtime::error::Error as RuntimeError;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

pub struct Why {
    name: String,
    /// Others that the parameter has in the module.
    also: Vec<String>,
    /// Its pieces on each stage, as texts.
    lies: Vec<String>,
    /// What computes with it, in the order of the programs.
    readers: Vec<String>,
    ways: Vec<Way>,
}

/// A sharding of the parameter.
struct Way {
    /// As `--param` has it.
    sharding: String,
    chosen: bool,
    cost: Result<Cost, String>,
}

/// Of one step, by estimate: seconds, and those of all stages; bytes that are planned for the fullest rank; bytes that a rank of each
/// stage puts into collectives and messages, added up.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    busy: f64,
    memory: u64,
    traffic: u64,
}

impl Why {
    /// Errors: an artifact that does not train, another model, a name that no parameter has.
    pub fn of(artifact: &Artifact, model: &Path, name: &str) -> Outcome<Why> {
        let others = others(artifact)?;
        let names: BTreeSet<&str> = artifact.train.iter().flat_map(|p| &p.params).map(|param| param.name.as_str()).collect();
        let owner = || others.iter().find(|(own, also)| names.contains(own.as_str()) && also.iter().any(|other| other == name));
        let name = match (names.contains(name), owner()) {
            (true, _) => name,
            (false, Some((own, _))) => own,
            (false, None) => {
                let all = names.iter().copied().chain(others.values().flatten().map(String::as_str));
                return Err(unknown(name, &all.collect()).into());
            }
        };
        let as_it_is = Cost::of(artifact)?;
        let (shape, shard) = sharding(artifact, name);
        let mut ways = Vec::new();
        let tensor_parallel = artifact.train.iter().any(|p| p.mesh.axes.iter().any(|axis| is_tensor(&axis.name)));
        let dims = (0..shape.len()).filter(|&dim| shape[dim] > 1).map(Some);
        for dim in std::iter::once(None).chain(dims).filter(|_| tensor_parallel) {
            let sharding = dim.map_or("Replicate".to_owned(), |dim| format!("Shard({dim})@tp"));
            let chosen = shard == dim;
            let cost = match chosen {
                true => Ok(as_it_is),
                false => priced(artifact, model, &format!("{name}={sharding}"))?,
            };
            ways.push(Way { sharding, chosen, cost });
        }
        if ways.is_empty() {
            ways.push(Way { sharding: "Replicate".to_owned(), chosen: true, cost: Ok(as_it_is) });
        }
        let also = others.get(name).cloned().unwrap_or_default();
        Ok(Why { name: name.to_owned(), also, lies: lies(artifact, name), readers: readers(artifact, name), ways })
    }

    pub fn text(&self) -> String {
        let also = if self.also.is_empty() { String::new() } else { format!(", also {}", self.also.join(", ")) };
        let mut lines = vec![format!("{}{also}", self.name)];
        lines.extend(self.lies.iter().map(|text| format!("  {text}")));
        lines.push("read by".to_owned());
        lines.extend(self.readers.iter().map(|text| format!("  {text}")));
        lines.push(format!(
            "{:<16} {:>14} {:>14} {:>14} {:>15}",
            "sharding", "a step", "all stages", "fullest rank", "communication"
        ));
        let base = self.ways.iter().find(|way| way.chosen).and_then(|way| way.cost.as_ref().ok());
        for way in &self.ways {
            let mark = if way.chosen { "   as it is" } else { "" };
            let line = match (&way.cost, base) {
                (Ok(cost), Some(base)) if !way.chosen => format!(
                    "{:>14} {:>14} {:>14} {:>15}",
                    signed(cost.seconds - base.seconds, milliseconds),
                    signed(cost.busy - base.busy, milliseconds),
                    signed(cost.memory as f64 - base.memory as f64, |bytes| size(bytes as u64)),
                    signed(cost.traffic as f64 - base.traffic as f64, |bytes| size(bytes as u64)),
                ),
                (Ok(Cost { seconds, busy, memory, traffic }), _) => format!(
                    "{:>14} {:>14} {:>14} {:>15}",
                    milliseconds(*seconds),
                    milliseconds(*busy),
                    size(*memory),
                    size(*traffic)
                ),
                (Err(why), _) => format!("   cannot be: {why}"),
            };
            lines.push(format!("{:<16} {line}{mark}", way.sharding));
        }
        if let [_] = self.ways[..] {
            lines.push(
                "the mesh has no tensor-parallel axis to shard it over; --zero shards parameters over data-parallel ranks"
                    .to_owned(),
            );
        }
        lines.join("\n") + "\n"
    }

    pub fn json(&self) -> Value {
        let way = |way: &Way| match &way.cost {
            Ok(Cost { seconds, busy, memory, traffic }) => json!({
                "sharding": way.sharding,
                "chosen": way.chosen,
                "seconds": seconds,
                "busy": busy,
                "memory": memory,
                "traffic": traffic,
            }),
            Err(error) => json!({ "sharding": way.sharding, "chosen": way.chosen, "error": error }),
        };
        json!({
            "schema": 1,
            "kind": "why",
            "name": self.name,
            "lies": self.lies,
            "readers": self.readers,
            "shardings": self.ways.iter().map(way).collect::<Vec<_>>(),
        })
    }
}

impl Cost {
    fn of(artifact: &Artifact) -> Outcome<Cost> {
        let step = Step::of(artifact)?;
        let traffic = artifact.train.iter().map(traffic).sum();
        // A parameter may be cut, gathered and added up once a step, outside of the passes.
        let once = artifact.train.iter().map(|program| sections::once(program, &Machine::default()));
        let (slowest, all) = once.fold((0.0_f64, 0.0), |(most, sum), seconds| (most.max(seconds), sum + seconds));
        Ok(Cost { seconds: step.seconds() + slowest, busy: step.busy() + all, memory: step.fullest(), traffic })
    }
}

/// By the name of a parameter, others that it has in the module.
fn others(artifact: &Artifact) -> Outcome<BTreeMap<String, Vec<String>>> {
    let malformed = |what| RuntimeError::artifact(format!("the artifact's options are malformed: {what}"));
    let manifest = Manifest::from_options(&artifact.options).map_err(malformed)?;
    Ok(manifest.parameters.into_iter().map(|(name, parameter)| (name, parameter.other_names())).collect())
}

fn unknown(name: &str, names: &BTreeSet<&str>) -> Error {
    let error = Error::usage(format!("--why: no parameter is named `{name}`"));
    let near = nearest(name, names.iter().copied(), name.chars().count().div_ceil(3));
    error.help(match near {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`dcc inspect` lists the parameters".to_owned(),
    })
}

/// What the model would cost with that `--param` besides the flags of the artifact; where there is no such plan, why.
fn priced(artifact: &Artifact, model: &Path, pin: &str) -> Outcome<Result<Cost, String>> {
    let with_pin = |mut flags: CompileFlags, _: &_| {
        flags.param.push(pin.to_owned());
        flags
    };
    match again::compiled(artifact, model, with_pin) {
        Ok(other) => Ok(Ok(Cost::of(&other.artifact)?)),
        Err(Failure::Compiler(error)) if error.code.exit() == 4 => Ok(Err(error.what)),
        Err(failure) => Err(failure),
    }
}

fn is_tensor(axis: &str) -> bool {
    axis.starts_with("tp")
}

/// Shape of the whole tensor, and the dim over which it is sharded, of its first piece.
fn sharding(artifact: &Artifact, name: &str) -> (Vec<u64>, Option<usize>) {
    let (p, ty) = weights(artifact, name).next().map(|(p, _, ty)| (p, ty)).expect("the name was found");
    let of_tensor = |axes: &[AxisId]| axes.iter().any(|&axis| is_tensor(p.mesh.name(axis)));
    (ty.shape.to_vec(), ty.sharding.dims.iter().position(|axes| of_tensor(axes)))
}

fn weights<'a>(artifact: &'a Artifact, name: &'a str) -> impl Iterator<Item = (&'a Program, String, &'a TensorType)> {
    artifact.train.iter().flat_map(move |p| {
        let mine = p.params.iter().filter(move |param| param.name == name && param.kind == ParamKind::Weight);
        mine.map(move |param| {
            let piece = param.piece.map(|piece| format!(", {}..{} of dim {}", piece.start, piece.end, piece.dim));
            (p, piece.unwrap_or_default(), p.ty(param.buffer))
        })
    })
}

fn lies(artifact: &Artifact, name: &str) -> Vec<String> {
    let text = |(p, piece, ty): (&Program, String, &TensorType)| {
        let local = ty.local_bytes(&p.mesh);
        format!("stage {}: {}{piece}, {} on a rank", p.stage, ty.text(&p.mesh), size(local))
    };
    weights(artifact, name).map(text).collect()
}

/// Instructions that read the parameter, or what is gathered of it.
fn readers(artifact: &Artifact, name: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for p in &artifact.train {
        let mine = p.params.iter().filter(|param| param.name == name && param.kind == ParamKind::Weight);
        let mut buffers: BTreeSet<BufferId> = mine.map(|param| param.buffer).collect();
        // By token, which of its tensors are of the parameter.
        let mut flying: BTreeMap<TokenId, Vec<usize>> = BTreeMap::new();
        for section in &p.sections {
            for instr in &section.body {
                let reads = instr.operands.iter().any(|operand| buffers.contains(operand));
                match instr.action {
                    Action::Start { token, .. } if reads => {
                        let own = (0..instr.operands.len()).filter(|&n| buffers.contains(&instr.operands[n]));
                        flying.insert(token, own.collect());
                    }
                    Action::Wait(token) if flying.contains_key(&token) => {
                        let own = flying.remove(&token).unwrap_or_default();
                        buffers.extend(own.into_iter().filter_map(|n| instr.results.get(n)));
                    }
                    Action::Library(Library::Reshape { .. }) if reads => buffers.extend(&instr.results),
                    _ if reads => {
                        let line =
                            format!("stage {}, {}: {}", p.stage, section.id().name(), text::print_instr(p, instr).trim());
                        lines.extend(Some(line).filter(|line| !lines.contains(line)));
                    }
                    _ => {}
                }
            }
        }
    }
    lines
}

/// Bytes that a rank puts into collectives and messages in a step.
fn traffic(program: &Program) -> u64 {
    let of = |instr: &Instr| match instr.action {
        Action::Start { .. } => instr.operands.iter().map(|&o| program.ty(o).local_bytes(&program.mesh)).sum::<u64>(),
        _ => 0,
    };
    let section = |at: u32| program.sections[at as usize].body.iter().map(of).sum::<u64>();
    program.order.iter().map(|step| section(step.section)).sum()
}

/// A difference, with its sign.
fn signed(difference: f64, text: impl Fn(f64) -> String) -> String {
    let sign = if difference < 0.0 { '−' } else { '+' };
    format!("{sign}{}", text(difference.abs()))
}
