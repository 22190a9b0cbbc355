//! From all settings to the words that one command line takes of them.

use super::catalog::{Catalog, Flag, Takes};
use super::value::relative;
use super::{Config, Origin, Setting};
use crate::cli::failure::Failure;
use crate::error::Error;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use std::ffi::OsString;

/// A command line with what is configured.
#[derive(Debug)]
pub struct Applied {
    pub arguments: Vec<OsString>,
    pub used: Used,
}

/// Settings that a command line takes, for messages that are about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Used {
    taken: Vec<Taken>,
    /// Keys that do not count for what the command is about, with their places.
    left_out: Vec<(String, Origin)>,
}

/// A setting for one flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    pub id: String,
    pub key: String,
    /// Of the flag.
    pub texts: Vec<String>,
    pub origin: Origin,
    takes: Takes,
    /// Lower counts first: variables before the file, the command's own key before a general one.
    rank: (u8, usize),
    /// Whether it stands where other commands see it too.
    is_general: bool,
}

impl Taken {
    fn words(&self) -> Vec<String> {
        let key = &self.key;
        match self.takes {
            Takes::Nothing => self.texts.iter().map(|_| format!("--{key}")).collect(),
            Takes::Count => {
                let count = self.texts.first().and_then(|text| text.parse().ok()).unwrap_or(0);
                vec![format!("--{key}"); count]
            }
            Takes::One | Takes::Many => self.texts.iter().map(|text| format!("--{key}={text}")).collect(),
        }
    }
}

impl Config {
    /// What counts for a flag of the command at `path`. Errors: a value that the flag cannot take at all.
    pub(super) fn effective(&self, catalog: &Catalog, path: &[String], flag: &Flag) -> Result<Option<Taken>, Error> {
        let scopes = catalog.reach(path, flag);
        let rank = |setting: &&Setting| {
            let near = scopes.iter().position(|scope| *scope == setting.scope)?;
            Some((u8::from(matches!(setting.origin, Origin::File { .. })), near))
        };
        let fits = self.settings.iter().filter(|setting| setting.key == flag.long);
        let Some((rank, setting)) = fits.filter_map(|s| Some((rank(&s)?, s))).min_by_key(|(rank, _)| *rank) else {
            return Ok(None);
        };
        let wrong = |what: String| Error::usage(format!("`{}`: {what}", flag.long)).at(&setting.origin);
        let mut texts = setting.value.texts(flag).map_err(|what| wrong(what).help("see docs/configuration.md"))?;
        if matches!(setting.origin, Origin::File { .. }) {
            texts = texts.into_iter().map(|text| relative(text, flag, &self.folder)).collect();
        }
        Ok(Some(Taken {
            id: flag.id.clone(),
            key: flag.long.clone(),
            texts,
            origin: setting.origin.clone(),
            takes: flag.takes,
            rank,
            is_general: setting.scope != path,
        }))
    }

    /// The arguments with the settings that they leave room for: not those of flags that are given, nor of flags that conflict with
    /// what counts before them, nor of `left_out`.
    pub(super) fn apply(
        &self,
        command: &Command,
        path: &[String],
        matches: &ArgMatches,
        arguments: Vec<OsString>,
        left_out: &[String],
    ) -> Result<Applied, Failure> {
        let catalog = Catalog::new(command);
        let Some(leaf) = catalog.leaf(path) else { return Ok(Applied { arguments, used: Used::default() }) };
        let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let mut used = Used::default();
        for flag in leaf.flags.iter().filter(|flag| !is_given(&flag.id)) {
            match self.effective(&catalog, path, flag)? {
                Some(taken) if left_out.contains(&flag.id) => used.left_out.push((taken.key, taken.origin)),
                Some(taken) if !taken.texts.is_empty() => used.taken.push(taken),
                _ => {}
            }
        }
        let given = leaf.flags.iter().filter(|flag| is_given(&flag.id)).map(|flag| flag.id.as_str());
        yield_to(inner(command, path), &given.collect::<Vec<_>>(), &mut used.taken);
        drop_unusable(command, &arguments, &mut used.taken);
        Ok(Applied { arguments: with(&arguments, &used.taken), used })
    }
}

/// The command at `path`.
fn inner<'a>(command: &'a Command, path: &[String]) -> &'a Command {
    path.iter().fold(command, |command, name| command.find_subcommand(name).expect("clap parsed this command"))
}

/// Takes away what conflicts with a given flag or with what counts before it.
fn yield_to(command: &Command, given: &[&str], taken: &mut Vec<Taken>) {
    let names = |id: &str, other: &str| {
        let arg = command.get_arguments().find(|arg| arg.get_id() == id);
        arg.is_some_and(|arg| command.get_arg_conflicts_with(arg).iter().any(|arg| arg.get_id() == other))
    };
    let conflict = |a: &str, b: &str| names(a, b) || names(b, a);
    let all = taken.clone();
    taken.retain(|one| {
        let before = all.iter().filter(|other| other.rank < one.rank).map(|other| other.id.as_str());
        !given.iter().copied().chain(before).any(|other| conflict(&one.id, other))
    });
}

/// General settings are for the commands that can take them: one that needs a flag which is not there is left out.
fn drop_unusable(command: &Command, arguments: &[OsString], taken: &mut Vec<Taken>) {
    let lacks = |taken: &[Taken]| {
        let error = command.clone().try_get_matches_from(with(arguments, taken)).err()?;
        (error.kind() == ErrorKind::MissingRequiredArgument).then(|| error.to_string())
    };
    while let Some(text) = lacks(taken) {
        let culprit = (0..taken.len()).filter(|&at| taken[at].is_general).find(|&at| {
            let without: Vec<Taken> = taken.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, t)| t.clone()).collect();
            lacks(&without).as_ref() != Some(&text)
        });
        match culprit {
            Some(at) => drop(taken.remove(at)),
            None => return,
        }
    }
}

/// The arguments and the words of settings, before a `--` that ends the flags.
fn with(arguments: &[OsString], taken: &[Taken]) -> Vec<OsString> {
    let end = arguments.iter().position(|word| word == "--").unwrap_or(arguments.len());
    let words = taken.iter().flat_map(Taken::words).map(OsString::from);
    arguments[..end].iter().cloned().chain(words).chain(arguments[end..].iter().cloned()).collect()
}

impl Used {
    /// `tp 2, lr 1e-3 from dcc.toml; dp 4 from DCC_DP`: none where nothing is configured.
    pub fn summary(&self) -> Option<String> {
        let mut parts: Vec<(String, Vec<String>)> = Vec::new();
        for taken in &self.taken {
            let source = match &taken.origin {
                Origin::File { path, .. } => path.clone(),
                Origin::Variable(name) => name.clone(),
            };
            let text = match taken.takes {
                Takes::Nothing => taken.key.clone(),
                _ => format!("{} {}", taken.key, taken.texts.join(" ")),
            };
            match parts.iter_mut().find(|(known, _)| *known == source) {
                Some((_, texts)) => texts.push(text),
                None => parts.push((source, vec![text])),
            }
        }
        let parts: Vec<String> = parts.iter().map(|(source, texts)| format!("{} from {source}", texts.join(", "))).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// What the user set and this command does not use.
    pub fn unused(&self) -> Option<String> {
        let keys: Vec<String> = self.left_out.iter().map(|(key, origin)| format!("{key} ({origin})")).collect();
        (!keys.is_empty()).then(|| keys.join(", "))
    }

    /// The message of a failure, with where its flags come from. `arguments` are those that clap refused.
    pub fn explain(
        &self,
        mut text: String,
        is_wrong: impl Fn(&[OsString]) -> Option<String>,
        arguments: &[OsString],
    ) -> String {
        let wrong = is_wrong(&with(arguments, &self.taken));
        for (at, taken) in self.taken.iter().enumerate() {
            let others = || self.taken.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, t)| t.clone()).collect::<Vec<_>>();
            let is_culprit = || wrong.is_some() && is_wrong(&with(arguments, &others())) != wrong;
            if mentions(&text, &taken.key) || is_culprit() {
                text += &format!("\n  note {} is from {}", taken.words().join(" "), taken.origin);
            }
        }
        text
    }
}

/// Whether a text has `--key` as a word.
fn mentions(text: &str, key: &str) -> bool {
    let flag = format!("--{key}");
    text.match_indices(&flag).any(|(at, _)| {
        let next = text[at + flag.len()..].chars().next();
        next.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '-')
    })
}
