//! What can be configured: every long flag of every command, as clap defines it.

use crate::cli::flags::CompileFlags;
use clap::{Arg, ArgAction, Command, ValueHint};
use std::any::TypeId;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    /// Nothing, and counts how often it stands there.
    Count,
    One,
    /// Any number of values.
    Many,
}

#[derive(Clone, Debug)]
pub struct Flag {
    pub id: String,
    /// Without dashes: the key.
    pub long: String,
    pub takes: Takes,
    /// Its values are `A=B`: a table says the same.
    pub is_pair: bool,
    /// Its value is `A,B`: a list says the same.
    pub is_list: bool,
    pub is_path: bool,
    /// Its value is a path where it has a slash.
    pub may_be_path: bool,
    pub default: Vec<String>,
    pub help: String,
}

/// A command that does something.
#[derive(Clone, Debug)]
pub struct Leaf {
    pub path: Vec<String>,
    pub flags: Vec<Flag>,
}

#[derive(Clone, Debug)]
pub struct Catalog {
    pub leaves: Vec<Leaf>,
    /// Of what to compile: `run` compiles too.
    compile: BTreeSet<String>,
}

impl Catalog {
    pub fn new(command: &Command) -> Catalog {
        let of_compile = <CompileFlags as clap::Args>::augment_args(Command::new("flags"));
        let mut catalog =
            Catalog { leaves: Vec::new(), compile: of_compile.get_arguments().map(|a| a.get_id().to_string()).collect() };
        let global: Vec<Flag> = flags(command).collect();
        catalog.collect(command, &[], &global);
        catalog
    }

    fn collect(&mut self, command: &Command, path: &[String], global: &[Flag]) {
        for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
            let path: Vec<String> = path.iter().cloned().chain([inner.get_name().to_owned()]).collect();
            if inner.has_subcommands() {
                self.collect(inner, &path, global);
            } else {
                let flags = flags(inner).chain(global.iter().cloned()).collect();
                self.leaves.push(Leaf { path, flags });
            }
        }
    }

    pub fn leaf(&self, path: &[String]) -> Option<&Leaf> {
        self.leaves.iter().find(|leaf| leaf.path == path)
    }

    /// Whether a command is called that, or a group of commands.
    pub fn has_scope(&self, scope: &[String]) -> bool {
        self.below(scope).next().is_some()
    }

    fn below(&self, scope: &[String]) -> impl Iterator<Item = &Leaf> {
        self.leaves.iter().filter(move |leaf| leaf.path.starts_with(scope))
    }

    /// Keys that may stand at `scope`.
    pub fn keys(&self, scope: &[String]) -> BTreeSet<&str> {
        self.below(scope).flat_map(|leaf| &leaf.flags).map(|flag| flag.long.as_str()).collect()
    }

    /// All places where keys may stand, the outermost first.
    pub fn scopes(&self) -> BTreeSet<Vec<String>> {
        self.leaves.iter().flat_map(|leaf| (0..=leaf.path.len()).map(|n| leaf.path[..n].to_vec())).collect()
    }

    /// Where a setting for a command's flag may stand, the nearest first.
    pub fn reach(&self, path: &[String], flag: &Flag) -> Vec<Vec<String>> {
        let mut scopes: Vec<Vec<String>> = (0..=path.len()).rev().map(|n| path[..n].to_vec()).collect();
        if (path == ["run"] || path == ["bench", "step"]) && self.compile.contains(&flag.id) {
            scopes.insert(1, vec!["compile".to_owned()]);
        }
        scopes
    }
}

/// The long flags of a command, the one that names the file left out.
fn flags(command: &Command) -> impl Iterator<Item = Flag> {
    let long = |arg: &&Arg| arg.get_long().is_some_and(|long| !["help", "version", super::FILE].contains(&long));
    command.get_arguments().filter(long).map(flag)
}

fn flag(arg: &Arg) -> Flag {
    let names: Vec<String> = arg.get_value_names().unwrap_or_default().iter().map(|name| name.to_string()).collect();
    let takes = match arg.get_action() {
        ArgAction::SetTrue | ArgAction::SetFalse => Takes::Nothing,
        ArgAction::Count => Takes::Count,
        ArgAction::Append => Takes::Many,
        _ => Takes::One,
    };
    Flag {
        id: arg.get_id().to_string(),
        long: arg.get_long().unwrap_or_default().to_owned(),
        takes,
        is_pair: takes == Takes::Many && names.iter().any(|name| name.contains('=')),
        is_list: takes == Takes::One && names.iter().any(|name| name.contains(',')),
        is_path: arg.get_value_parser().type_id() == TypeId::of::<PathBuf>(),
        may_be_path: arg.get_value_hint() == ValueHint::AnyPath && arg.get_value_parser().type_id() == TypeId::of::<String>(),
        default: arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect(),
        help: arg.get_help().map(|help| help.to_string()).unwrap_or_default(),
    }
}
