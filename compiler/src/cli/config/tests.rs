//! Every flag of every command by file and by variable, and what counts before what.

use super::catalog::{Catalog, Flag, Leaf, Takes};
use super::*;
use crate::cli::{Cli, refused as wrong};
use clap::CommandFactory;
use std::collections::BTreeMap;

fn command() -> clap::Command {
    Cli::command()
}

fn words(text: &str) -> Vec<OsString> {
    text.split_whitespace().map(OsString::from).collect()
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(String, OsString)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.into())).collect()
}

fn config(text: &str, path: &str, environment: &[(&str, &str)]) -> Config {
    let catalog = Catalog::new(&command());
    let mut config = Config::of_file(&catalog, text, Path::new(path)).unwrap_or_else(|error| panic!("{}", error.text()));
    environment::read(&catalog, &variables(environment), &mut config).unwrap();
    config
}

/// The words of a command line with what is configured.
fn applied(config: &Config, line: &str) -> Vec<String> {
    let command = command();
    let matches = command.clone().ignore_errors(true).try_get_matches_from(words(line)).unwrap();
    let (path, leaf) = leaf(&matches);
    let applied = config.apply(&command, &path, leaf, words(line), &[]).unwrap_or_else(|error| panic!("{}", error.text()));
    applied.arguments.into_iter().map(|word| word.into_string().unwrap()).collect()
}

/// What `line` becomes, behind itself.
#[track_caller]
fn check(text: &str, environment: &[(&str, &str)], line: &str, added: &str) {
    let found = applied(&config(text, "dcc.toml", environment), line);
    assert_eq!(found.join(" "), format!("{line} {added}").trim_end(), "{text} {environment:?}");
}

fn refused(text: &str) -> String {
    Config::of_file(&Catalog::new(&command()), text, Path::new("dcc.toml")).unwrap_err().text()
}

/// A value that a flag takes, as its command parses it.
fn samples(leaf: &Leaf, flag: &Flag) -> Vec<String> {
    if flag.takes == Takes::Nothing {
        return vec!["true".to_owned()];
    }
    let inner = leaf.path.iter().fold(command(), |command, name| command.find_subcommand(name).unwrap().clone());
    let candidates = [
        "1", "2", "0.5", "a=1", "auto", "adamw", "1f1b", "samples", "all", "batch", "f64", "cpu", "compiled", "graph", "sm_80",
        "x",
    ];
    let arg = inner.get_arguments().find(|arg| arg.get_id() == flag.id.as_str()).cloned();
    let possible = arg.iter().flat_map(|arg| arg.get_possible_values()).map(|value| value.get_name().to_owned());
    let all: Vec<String> = possible.chain(candidates.map(str::to_owned)).collect();
    let parses = |text: &String| {
        let mut line = vec!["dcc".to_owned()];
        line.extend(leaf.path.iter().cloned());
        line.push(format!("--{}={text}", flag.long));
        let error = command().try_get_matches_from(&line).err();
        let kind = error.map(|error| error.kind());
        !matches!(kind, Some(clap::error::ErrorKind::InvalidValue | clap::error::ErrorKind::ValueValidation))
    };
    all.into_iter().filter(parses).take(1).collect()
}

/// As it stands in a file.
fn toml(flag: &Flag, texts: &[String]) -> String {
    match flag.takes {
        Takes::Nothing => "true".to_owned(),
        Takes::Count => texts[0].clone(),
        Takes::Many => format!("[{}]", texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ")),
        Takes::One => format!("{:?}", texts[0]),
    }
}

#[test]
fn every_flag_is_a_key_and_a_variable() {
    let catalog = Catalog::new(&command());
    let mut count = 0;
    for leaf in &catalog.leaves {
        for flag in &leaf.flags {
            let texts = samples(leaf, flag);
            assert!(!texts.is_empty(), "a value for --{} of {:?}", flag.long, leaf.path);
            let line = format!("dcc {}", leaf.path.join(" "));
            let expected = match flag.takes {
                Takes::Nothing | Takes::Count => format!("--{}", flag.long),
                _ => format!("--{}={}", flag.long, texts[0]),
            };
            let has = |config: &Config, what: &str| {
                let catalog = Catalog::new(&command());
                let taken = config.effective(&catalog, &leaf.path, flag).unwrap_or_else(|error| panic!("{error}"));
                let taken = taken.unwrap_or_else(|| panic!("{what} sets --{} of {line}", flag.long));
                assert_eq!(taken.texts, texts, "{what}");
            };
            let text = |scope: &[String]| match scope.is_empty() {
                true => format!("{} = {}\n", flag.long, toml(flag, &texts)),
                false => format!("[{}]\n{} = {}\n", scope.join("."), flag.long, toml(flag, &texts)),
            };
            for scope in catalog.reach(&leaf.path, flag) {
                has(&config(&text(&scope), "dcc.toml", &[]), &text(&scope));
                let name = environment::variable(&scope, &flag.long);
                let value = if flag.takes == Takes::Many { toml(flag, &texts) } else { texts[0].clone() };
                has(&config("", "dcc.toml", &[(&name, &value)]), &name);
            }
            // Of its own table it reaches the command line, whatever else is missing there.
            let own = config(&text(&leaf.path), "dcc.toml", &[]);
            assert!(applied(&own, &line).contains(&expected), "{expected} in {:?}", applied(&own, &line));
            count += 1;
        }
    }
    assert!(count > 150, "{count} flags");
    println!("{count} flags of {} commands", catalog.leaves.len());
}

#[test]
fn a_variable_means_one_key() {
    let catalog = Catalog::new(&command());
    let mut known: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for scope in catalog.scopes() {
        for key in catalog.keys(&scope) {
            known.entry(environment::variable(&scope, key)).or_default().push(format!("{scope:?} {key}"));
        }
    }
    let ambiguous: Vec<_> = known.iter().filter(|(_, keys)| keys.len() > 1).collect();
    assert!(ambiguous.is_empty(), "{ambiguous:?}");
    assert!(!known.contains_key("DCC_WORKER") && !known.contains_key("DCC_CONFIG"), "these have another meaning");
}

#[test]
fn the_nearest_setting_counts() {
    let all = "tp = 2\n[compile]\ntp = 3\n[run]\ntp = 4\n";
    check("tp = 2", &[], "dcc compile m.onnx", "--tp=2");
    check("[compile]\ntp = 3", &[], "dcc compile m.onnx", "--tp=3");
    check("tp = 2\n[compile]\ntp = 3", &[], "dcc run m.onnx", "--tp=3");
    check(all, &[], "dcc run m.onnx", "--tp=4");
    check(all, &[("DCC_TP", "5")], "dcc run m.onnx", "--tp=5");
    check(all, &[("DCC_TP", "5"), ("DCC_COMPILE_TP", "6")], "dcc run m.onnx", "--tp=6");
    check(all, &[("DCC_TP", "5"), ("DCC_RUN_TP", "7")], "dcc run m.onnx", "--tp=7");
    check(all, &[("DCC_RUN_TP", "")], "dcc run m.onnx", "--tp=4");
    check(all, &[("DCC_RUN_TP", "7")], "dcc run m.onnx --tp 8", "");
    check(all, &[], "dcc inspect m.onnx", "");
    // Flags of `compile` that say where things go are its own.
    check("[compile]\njson = true\nout = 'a.dcc'", &[], "dcc run m.onnx", "");
    check("[checkpoint]\njson = true", &[], "dcc checkpoint list d", "--json");
    check("[checkpoint.verify]\njson = true", &[], "dcc checkpoint list d", "");
}

#[test]
fn values_are_what_the_flag_takes() {
    check("[run]\nlr = 1e-3\nsteps = 1_000\ndropout = 0.1", &[], "dcc run m", "--steps=1000 --lr=1e-3 --dropout=0.1");
    check("betas = [0.9, 0.95]", &[], "dcc compile m", "--betas=0.9,0.95");
    check(
        "data = 'a.npz'\nparam = ['*.w=Replicate', 'b=Shard(0)@tp']",
        &[],
        "dcc run m",
        "--data=a.npz --param=*.w=Replicate --param=b=Shard(0)@tp",
    );
    check("dim = { seq = 256, batch = 8 }", &[], "dcc compile m", "--dim=seq=256 --dim=batch=8");
    check("[run.input]\nmask = 'ones'", &[], "dcc run m", "--input=mask=ones");
    check(
        "",
        &[("DCC_DATA", "[\"a b.npz\", \"c.npz\"]"), ("DCC_DIM", "{ seq = 4 }")],
        "dcc run m",
        "--data=a b.npz --data=c.npz --dim=seq=4",
    );
    check("", &[("DCC_DATA", "[a.npz"), ("DCC_LR", "3e-4")], "dcc run m", "--data=[a.npz --lr=3e-4");
    check("", &[("DCC_FSDP", "1"), ("DCC_VERBOSE", "2")], "dcc run m", "--fsdp --verbose --verbose");
    check("fsdp = true\nverbose = 1", &[("DCC_FSDP", "false")], "dcc run m", "--verbose");
    check("ignore-index = -1", &[], "dcc run m", "--ignore-index=-1");
    let found = applied(&config("tp = 2", "dcc.toml", &[]), "dcc run -- m.onnx");
    assert_eq!(found, ["dcc", "run", "--tp=2", "--", "m.onnx"]);
}

#[test]
fn flags_displace_what_conflicts_with_them() {
    check("steps = 100", &[], "dcc run m --epochs 2", "");
    check("zero = 2", &[], "dcc run m --fsdp", "");
    check("fsdp = true", &[("DCC_ZERO", "1")], "dcc run m", "--zero=1");
    check("epochs = 2\n[run]\nsteps = 5", &[], "dcc run m", "--steps=5");
    check("emit = 'graph'", &[], "dcc compile m --json", "");
    // On one level neither is before the other: clap says so.
    check("[run]\nsteps = 5\nepochs = 2", &[], "dcc run m", "--steps=5 --epochs=2");
}

#[test]
fn general_keys_are_for_commands_that_can_take_them() {
    check("loss = 'mse'", &[], "dcc eval m --inputs i --outputs o", "");
    check("loss = 'mse'", &[], "dcc eval m --inputs i --gradients g", "--loss=mse");
    check("[eval]\nloss = 'mse'", &[], "dcc eval m --inputs i --outputs o", "--loss=mse");
    check("save-every = 5", &[], "dcc run m --steps 1", "");
    check("save-every = 5\nsave-dir = 'd'", &[], "dcc run m --steps 1", "--save-dir=d --save-every=5");
}

#[test]
fn paths_of_a_file_are_relative_to_it() {
    let text =
        "data = ['a.npz', '/abs.npz']\nlr-schedule = '@rates'\ninput = ['m=@f.npy', 'n=ones']\nresume = 'auto'\nfreeze = 'a@b'";
    let found = applied(&config(text, "../dcc.toml", &[("DCC_METRICS_FILE", "m.jsonl")]), "dcc run m");
    let expected = "dcc run m --data=../a.npz --data=/abs.npz --input=m=@../f.npy --input=n=ones --lr-schedule=@../rates --resume=auto \
                    --metrics-file=m.jsonl --freeze=a@b";
    assert_eq!(found.join(" "), expected);
    let found = applied(&config("resume = 'runs/step-00000001'\nsave-dir = 'runs'", "up/dcc.toml", &[]), "dcc run m");
    assert_eq!(found.join(" "), "dcc run m --save-dir=up/runs --resume=up/runs/step-00000001");
}

#[test]
fn unknown_keys_are_errors_with_their_line() {
    let check = |text: &str, parts: &[&str]| {
        let found = refused(text);
        assert!(found.starts_with("error[DCC0001]: "), "{found}");
        parts.iter().for_each(|part| assert!(found.contains(part), "{part} in {found}"));
    };
    check("tp = 2\n[run]\nstpes = 5\n", &["unknown key `stpes` of [run]", "at   dcc.toml:3", "did you mean `steps`?"]);
    check("weight_decay = 0.1", &["unknown key `weight_decay`", "dcc.toml:1", "did you mean `weight-decay`?"]);
    check("\n[rnu]\nlr = 1\n", &["no command `rnu`", "dcc.toml:2", "did you mean `run`?"]);
    check("[compile]\nlr = 1\n", &["unknown key `lr` of [compile]", "--lr is a flag of other commands: write it under [run]"]);
    check("banana-split-count = 1", &["unknown key `banana-split-count`", "`dcc config show --all` lists all keys"]);
    check("[run]\nconfig = 'x'", &["unknown key `config`"]);
    check("help = true", &["unknown key `help`"]);
    check("[[run]]\nlr = 1", &["`run` is a command, not a key", "write its keys below [run]"]);
    check("checkpoint.verify = true", &["`checkpoint.verify` is a command", "dcc.toml:1"]);
    check("tp = = 2", &["dcc.toml is no TOML", "dcc.toml:1"]);
    check("tp = 2\ntp = 3", &["dcc.toml is no TOML", "duplicate key", "dcc.toml:2"]);
    check("[run]\ntp = 2\n[run]\nlr = 3", &["dcc.toml is no TOML", "dcc.toml:3"]);
}

#[test]
fn variables_that_are_nearly_ours_are_warned_of() {
    let warnings = |name: &str| config("", "dcc.toml", &[(name, "1")]).warnings;
    assert_eq!(warnings("DCC_STPES"), ["DCC_STPES is no variable of dcc and sets nothing: did you mean DCC_STEPS?"]);
    assert_eq!(warnings("DCC_RUN_STEP").len(), 1);
    for other in ["DCC_LONG", "DCC_WORKER", "DCC_HOSTILE", "DCC_HOME", "DCC_CONFIG", "DCC_TP", "DCCX_TP"] {
        assert_eq!(warnings(other), [""; 0], "{other}");
    }
}

#[test]
fn failures_name_the_origin_of_their_flags() {
    let explained = |text: &str, environment: &[(&str, &str)], line: &str, message: &str| {
        let (command, config) = (command(), config(text, "dcc.toml", environment));
        let matches = command.clone().ignore_errors(true).try_get_matches_from(words(line)).unwrap();
        let (path, leaf) = leaf(&matches);
        let applied = config.apply(&command, &path, leaf, words(line), &[]).unwrap_or_else(|error| panic!("{}", error.text()));
        applied.used.explain(message.to_owned(), wrong, &words(line))
    };
    let note = explained("tp = 'x'", &[], "dcc compile m", "");
    assert_eq!(note, "\n  note --tp=x is from dcc.toml:1");
    let note = explained("[run]\nsave-every = 5", &[("DCC_LR", "1")], "dcc run m", "");
    assert_eq!(note, "\n  note --save-every=5 is from dcc.toml:2");
    let note = explained("[run]\nsteps = 5", &[("DCC_LR", "1")], "dcc run", "");
    assert_eq!(note, "", "that there is no model is nobody's fault");
    let note = explained("tp = 0", &[("DCC_RUN_PP", "2")], "dcc run m", "--tp 0: an axis has at least one rank, --pp-x");
    assert!(note.ends_with("\n  note --tp=0 is from dcc.toml:1") && !note.contains("DCC_RUN_PP"), "{note}");
}

#[test]
fn a_value_of_another_kind_is_refused_with_its_line() {
    let check = |text: &str, environment: &[(&str, &str)], what: &str| {
        let (command, config) = (command(), config(text, "dcc.toml", environment));
        let matches = command.clone().ignore_errors(true).try_get_matches_from(words("dcc run m")).unwrap();
        let (path, leaf) = leaf(&matches);
        let failure = config.apply(&command, &path, leaf, words("dcc run m"), &[]).unwrap_err();
        assert!(failure.text().contains(what), "{what} in {}", failure.text());
    };
    check("fsdp = 'yes'", &[], "`fsdp`: it takes true or false\n  at   dcc.toml:1");
    check("tp = [1, 2]", &[], "`tp`: it takes one value, not a list");
    check("[run]\nlr = { a = 1 }", &[], "`lr`: it takes one value, not a table\n  at   dcc.toml:2");
    check("", &[("DCC_FSDP", "maybe")], "`fsdp`: it takes true or false, 1 or 0\n  at   DCC_FSDP");
}
