//! Golden texts of the passes: `tests/golden/<pass>/*.txt` hold options, a forward graph, and what comes out of that pass.
//!
//! The first line of a case is its options (`tp=2 grad-accum=2 optimizer=sgd`), `====` ends the input. A new case is a file without
//! output and a run with `UPDATE_EXPECT=1`. `stage=N` and `show=forward,kernels` (of a plan: `show=param,dot_general`) cut the text to what the case is about;
//! `input=NAME` takes a longer graph from `tests/golden/inputs`.
//!
//! Those of `cuda` show kernels for GPUs (`show=kernel3`): how they are launched, and their texts, without templates that kernels share.
//!
//! The gate's cases are programs and faults (`faults`), those of the compile report commands (`report`).

#[cfg(target_os = "linux")]
mod cuda;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod report;

use dcc::graph::{Graph, verify};
use dcc::loss::{LossKind, LossOptions};
use dcc::ops::Op;
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::precision::{LossScale, Mixed};
use dcc::train::{Trainable, TrainingOptions, train_step};
use dcc::{lower, place, plan, rewrite, schedule, sources};
use dcc_program::program::{Mode, ParamKind};
use dcc_program::{DType, check, text};
use expect_test::expect_file;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const END: &str = "====\n";
const LINES: usize = 60;

struct Case {
    options: BTreeMap<String, String>,
    graph: Graph,
}

impl Case {
    /// Errors: the line that is wrong.
    fn parse(text: &str) -> Result<Case, String> {
        let (options, graph) = text.split_once('\n').ok_or("a case begins with its options")?;
        let known = [
            "input",
            "dp",
            "cp",
            "ep",
            "tp",
            "pp",
            "zero",
            "dtype",
            "grad-accum",
            "schedule",
            "sequence-parallel",
            "loss",
            "optimizer",
            "stage",
            "params",
            "show",
        ];
        let mut found = BTreeMap::new();
        for option in options.split_whitespace() {
            let (key, value) = option.split_once('=').ok_or_else(|| format!("`{option}` is no option"))?;
            if !known.contains(&key) {
                return Err(format!("unknown option `{key}`"));
            }
            found.insert(key.to_owned(), value.to_owned());
        }
        let graph = match found.get("input") {
            Some(name) => Graph::parse(&read(&folder("inputs").join(format!("{name}.txt"))))?,
            None => Graph::parse(graph)?,
        };
        verify(&graph).map_err(|e| e.to_string())?;
        Ok(Case { options: found, graph })
    }

    fn number(&self, key: &str) -> u32 {
        self.options.get(key).map_or(1, |value| value.parse().expect("a number"))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.options.get(key).map(String::as_str)
    }

    fn parallel(&self) -> Parallel {
        let schedule = match self.text("schedule") {
            Some("gpipe") => Schedule::GPipe,
            _ => Schedule::OneFOneB,
        };
        let [dp, cp, ep, tp, pp, microbatches] = ["dp", "cp", "ep", "tp", "pp", "grad-accum"].map(|key| self.number(key));
        let sequence_parallel = self.text("sequence-parallel") == Some("true");
        let zero = self.text("zero").map_or(Zero::Nothing, |stage| Zero::ALL[stage.parse::<usize>().expect("a stage")]);
        Parallel { dp, cp, ep, tp, pp, microbatches, schedule, sequence_parallel, zero, ..Parallel::default() }
    }

    fn training(&self) -> TrainingOptions {
        let optimizer = match self.text("optimizer") {
            Some("adamw") => OptimizerOptions::default(),
            _ => {
                OptimizerOptions { optimizer: Optimizer::Sgd { momentum: 0.0, nesterov: false }, ..OptimizerOptions::default() }
            }
        };
        let kind = LossKind::parse(self.text("loss").unwrap_or("output")).expect("a loss");
        let half = self.text("dtype").map(|dtype| DType::parse(dtype).expect("a dtype"));
        let scale = |half| (half == DType::F16).then(LossScale::default);
        let parameters = self.text("params").map_or(DType::F32, |dtype| DType::parse(dtype).expect("a dtype"));
        let mixed = half.map(|half| Mixed { half, gradients: DType::F32, parameters, scale: scale(half) });
        TrainingOptions { loss: LossOptions { kind, ..LossOptions::default() }, optimizer, mixed, ..TrainingOptions::default() }
    }

    /// All passes up to `pass`, in the order of `dcc::compile`, and the text of what that one gives.
    fn run(&self, pass: &str) -> dcc::Result<String> {
        let forward = rewrite::simplify(&self.graph)?;
        if pass == "rewrite" {
            return Ok(forward.to_string());
        }
        let forward = sources::split(&forward)?;
        if pass == "sources" {
            return Ok(forward.to_string());
        }
        let forward = rewrite::simplify(&forward)?;
        let training = rewrite::simplify(&train_step(&forward, &trainable(&forward), &self.training())?.graph)?;
        if pass == "train" {
            return Ok(shown(&training.to_string(), self.text("show")));
        }
        let plan = plan::choose(&training, &self.parallel())?;
        if pass == "plan" {
            return Ok(planned(&plan.text(&training), self.text("show")));
        }
        let placed = place::place(&training, &plan)?;
        verify(&placed)?;
        if pass == "place" {
            return Ok(shown(&placed.to_string(), self.text("show")));
        }
        let programs = lower::programs(&placed, &plan, "case", Mode::Train, &schedule::turns(&plan, &schedule::order(&plan)))?;
        check::programs(&programs).expect("the gate accepts what lowering gives");
        let stage = self.options.get("stage").map(|stage| stage.parse::<u32>().expect("a stage"));
        let wanted = programs.iter().filter(|program| stage.is_none_or(|stage| program.stage == stage));
        #[cfg(target_os = "linux")]
        if pass == "cuda" {
            return Ok(cuda::kernels(&programs, self.text("show")));
        }
        Ok(wanted.map(|program| shown(&text::print(program), self.text("show"))).collect())
    }
}

fn trainable(graph: &Graph) -> Vec<Trainable> {
    let mut names: Vec<String> = Vec::new();
    for node in &graph.nodes {
        if let Op::Param(param) = &node.op
            && param.kind == ParamKind::Weight
            && !names.contains(&param.name)
        {
            names.push(param.name.clone());
        }
    }
    names.into_iter().map(|name| Trainable { name, aliases: Vec::new(), by_default: true }).collect()
}

/// The sections of a text named in `show`; `head` is what precedes them, `output` and `kernels` what follows.
fn shown(text: &str, show: Option<&str>) -> String {
    let Some(show) = show else { return text.to_owned() };
    let wanted: Vec<&str> = show.split(',').collect();
    let (mut section, mut out) = ("head", String::new());
    for line in text.lines() {
        section = match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["section", name] | [name @ ("begin" | "count" | "ready" | "forward" | "backward" | "update")] => name,
            ["order", ..] => "order",
            ["output", ..] if !text.starts_with("program") => "output",
            ["kernel", ..] => "kernels",
            _ => section,
        };
        if wanted.contains(&section) {
            out += line;
            out.push('\n');
        }
    }
    out
}

/// The lines of a plan for the kinds of node named in `show`.
fn planned(text: &str, show: Option<&str>) -> String {
    let Some(show) = show else { return text.to_owned() };
    let kind = |line: &str| line.split([' ', '(']).nth(1).unwrap_or_default().to_owned();
    let wanted = |line: &&str| !line.starts_with('%') || show.split(',').any(|word| word == kind(line));
    text.lines().filter(wanted).map(|line| format!("{line}\n")).collect()
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn cases(name: &str) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder(name)).expect("a folder of cases").map(|e| e.expect("a case").path()).collect();
    paths.sort();
    paths
}

fn check(pass: &str) {
    let paths = cases(pass);
    assert!(!paths.is_empty(), "no case in {pass}");
    for path in paths {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let whole = read(&path);
        let input = whole.split_once(END).map_or(whole.as_str(), |(input, _)| input);
        let case = Case::parse(input).unwrap_or_else(|e| panic!("{pass}/{name}: {e}"));
        let output = case.run(pass).unwrap_or_else(|e| format!("{e}\n"));
        hold(&path, input, &output);
    }
}

/// Compares with what the file has, or writes it.
fn hold(path: &Path, input: &str, output: &str) {
    let lines = input.lines().count() + output.lines().count();
    assert!(lines < LINES, "{} has {lines} lines: show less of it\n{output}", path.display());
    expect_file![path].assert_eq(&format!("{input}{END}{output}"));
}

macro_rules! passes {
    ($($pass:ident),+ $(,)?) => {
        /// In the order of the compiler; each folder has the name of its pass.
        const PASSES: &[&str] = &[$(stringify!($pass)),+];

        $(#[test]
        fn $pass() {
            check(stringify!($pass));
        })+
    };
}

passes! { rewrite, sources, train, plan, place, lower }

/// Whether every .txt of the folder is read here.
pub fn reads(folder: &str) -> bool {
    PASSES.contains(&folder) || ["check", "cuda", "inputs", "report"].contains(&folder)
}

#[test]
fn every_input_is_read() {
    let cases: Vec<String> = PASSES.iter().chain(&["cuda"]).flat_map(|pass| cases(pass)).map(|path| read(&path)).collect();
    for path in self::cases("inputs") {
        let option = format!("input={}", path.file_stem().expect("a name").to_string_lossy());
        let read = cases.iter().any(|case| case.lines().next().is_some_and(|line| line.split(' ').any(|word| word == option)));
        assert!(read, "no case has {option}");
    }
}
