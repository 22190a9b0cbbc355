//! `dcc verify MODEL.onnx`: its flags, and what is printed.

use super::compare::tolerance;
use super::model::{Asked, Question, Report, ask, check_built};
use crate::cli::failure::Outcome;
use crate::cli::output;
use crate::error::Error;
use dcc_program::DType;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct ModelFlags {
    /// Compute on these inputs, as `dcc eval` takes them (default: made up)
    #[arg(long, value_name = "I", help_heading = "Of a model")]
    inputs: Option<PathBuf>,
    /// The seed of inputs that are made up (default: 1)
    #[arg(long, value_name = "SEED", help_heading = "Of a model")]
    seed: Option<i64>,
    /// Size of a symbolic dim (default: 2 for dim 0 of an input, else the first of a few that the model can have)
    #[arg(long, value_name = "NAME=N", help_heading = "Of a model")]
    dim: Vec<String>,
    /// Fill parameters that have no data from this seed
    #[arg(long, value_name = "SEED", help_heading = "Of a model")]
    init: Option<u64>,
}

impl ModelFlags {
    /// Errors: a flag that does not belong to artifacts.
    pub fn refuse_for_artifact(&self) -> Result<(), Error> {
        let given = [
            ("--inputs", self.inputs.is_some()),
            ("--seed", self.seed.is_some()),
            ("--dim", !self.dim.is_empty()),
            ("--init", self.init.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(Error::usage(format!("{flag} belongs to a model: this is an artifact")).help("drop the flag"))
            }
            None => Ok(()),
        }
    }
}

pub fn run(args: &super::Args) -> Outcome<i32> {
    let path = &args.subject;
    if args.model.is_some() {
        return Err(Error::usage("--model belongs to an artifact: this is a model")
            .at(path.display())
            .help("drop the flag")
            .into());
    }
    check_built(path)?;
    let ModelFlags { inputs, seed, dim, init } = &args.opinion;
    let asked = Asked { inputs: inputs.clone(), dim: dim.clone(), seed: seed.unwrap_or(1), init: *init };
    let question = Question::open(path, &asked)?;
    let report = ask(&question, &|_| {})?;
    match args.json {
        true => output::json(&value(&report))?,
        false => output::data(&text(&report, &asked, &question.options.name))?,
    }
    Ok(0)
}

fn value(report: &Report) -> serde_json::Value {
    let left_out = report.left_out.iter().map(|node| json!({ "node": node.place, "reason": node.reason }));
    let undefined = report.undefined.iter().map(|cast| json!({ "node": cast.place, "elements": cast.elements }));
    let checked = report.refused.is_none() && report.values > 0;
    json!({
        "schema": 1, "agrees": checked.then_some(true), "nodes": report.nodes, "values": report.values,
        "outputs": report.outputs, "largest": report.largest * tolerance(DType::F32), "tolerance": tolerance(DType::F32),
        "unchecked": left_out.collect::<Vec<_>>(), "undefined": undefined.collect::<Vec<_>>(), "refused": report.refused,
    })
}

fn text(report: &Report, asked: &Asked, name: &str) -> String {
    let input = |input: &crate::import::InputInfo| format!("{} {}{:?}", input.name, input.dtype.name(), input.shape.as_slice());
    let inputs: Vec<String> = report.inputs.iter().map(input).collect();
    let from = match &asked.inputs {
        Some(path) => format!("of {}", path.display()),
        None => format!("made up from seed {}", asked.seed),
    };
    let mut out = match &report.refused {
        Some(reason) => format!("{name}: no second opinion: tract cannot run this model: {reason}\n"),
        None if report.values == 0 => format!("{name}: no second opinion: tract runs none of its nodes\n"),
        None => format!(
            "{name}: dcc and tract agree: {} outputs, {} values of {} of {} nodes, in shape and to {:.1e} (allowed: {:.0e} of a \
             tensor's largest element)\n",
            report.outputs,
            report.values,
            report.nodes - report.left_out.len(),
            report.nodes,
            report.largest * tolerance(DType::F32),
            tolerance(DType::F32)
        ),
    };
    if report.refused.is_some() || report.values == 0 {
        out += "dcc runs it, but nothing was compared: compare `dcc eval` with the framework that exported it\n";
    }
    let mut alike: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in &report.left_out {
        alike.entry(&node.reason).or_default().push(&node.place);
    }
    for (reason, places) in alike {
        let more = if places.len() > 1 { format!(" and {} more", places.len() - 1) } else { String::new() };
        out += &format!("unchecked, since tract does not run it and was given dcc's result: {}{more}: {reason}\n", places[0]);
    }
    for cast in &report.undefined {
        let (elements, place) = (cast.elements, &cast.place);
        out += &format!(
            "unchecked, since ONNX does not define it: {elements} elements of {place}, numbers that its result cannot hold\n"
        );
    }
    out + &format!("inputs {from}: {}\n", inputs.join(", "))
}
