//! `dcc.toml`: keys that hold for all commands, and a table per command.

use super::catalog::Catalog;
use super::value::Value;
use super::{Origin, Setting};
use crate::cli::typo::nearest;
use crate::error::Error;
use toml::de::{DeTable, DeValue};

/// The settings of a file. Errors: no TOML, a key that no command has, with the line.
pub fn read(catalog: &Catalog, text: &str, name: &str) -> Result<Vec<Setting>, Error> {
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(String::new(), |span| format!(":{}", line(text, span.start)));
        let help = "values are TOML: tp = 2, loss = \"mse\", data = [\"a.npz\"]; see docs/configuration.md";
        Error::usage(format!("{name} is no TOML: {}", error.message())).at(format!("{name}{line}")).help(help)
    })?;
    let mut reader = Reader { catalog, text, name, settings: Vec::new() };
    reader.table(table.get_ref(), &[])?;
    reader.settings.sort_by_key(|setting| setting.origin.clone());
    Ok(reader.settings)
}

struct Reader<'a> {
    catalog: &'a Catalog,
    text: &'a str,
    name: &'a str,
    settings: Vec<Setting>,
}

impl Reader<'_> {
    fn table(&mut self, table: &DeTable<'_>, scope: &[String]) -> Result<(), Error> {
        for (key, value) in table.iter() {
            let (name, line) = (key.get_ref().to_string(), line(self.text, key.span().start));
            let inner: Vec<String> = scope.iter().cloned().chain([name.clone()]).collect();
            match value.get_ref() {
                DeValue::Table(inner_table) if self.catalog.has_scope(&inner) => self.table(inner_table, &inner)?,
                value if self.catalog.keys(scope).contains(name.as_str()) => {
                    let origin = Origin::File { path: self.name.to_owned(), line };
                    self.settings.push(Setting { scope: scope.to_vec(), key: name, value: Value::of(value), origin });
                }
                value => {
                    return Err(self.unknown(&inner, matches!(value, DeValue::Table(_))).at(format!("{}:{line}", self.name)));
                }
            }
        }
        Ok(())
    }

    fn unknown(&self, path: &[String], is_table: bool) -> Error {
        let (key, scope) = path.split_last().expect("a key has a name");
        let of = if scope.is_empty() { String::new() } else { format!(" of [{}]", scope.join(".")) };
        if self.catalog.has_scope(path) {
            let table = path.join(".");
            return Error::usage(format!("`{table}` is a command, not a key")).help(format!("write its keys below [{table}]"));
        }
        let keys = self.catalog.keys(scope);
        let deeper = self.catalog.scopes();
        let tables = deeper
            .iter()
            .filter(|known| known.len() == path.len() && known.starts_with(scope))
            .map(|known| &known[scope.len()]);
        let tables: Vec<&str> = tables.map(String::as_str).collect();
        let error = Error::usage(match is_table {
            true => format!("no command `{}`", path.join(" ")),
            false => format!("unknown key `{key}`{of}"),
        });
        let elsewhere = self.catalog.leaves.iter().filter(|leaf| leaf.flags.iter().any(|flag| flag.long == *key));
        let elsewhere: Vec<String> = elsewhere.map(|leaf| format!("[{}]", leaf.path.join("."))).collect();
        if !elsewhere.is_empty() {
            return error.help(format!("--{key} is a flag of other commands: write it under {}", elsewhere.join(" or ")));
        }
        let most = key.chars().count().div_ceil(3);
        let near = match is_table {
            true => nearest(key, tables, most).or_else(|| nearest(key, keys, most)),
            false => nearest(key, keys, most).or_else(|| nearest(key, tables, most)),
        };
        error.help(match near {
            Some(near) => format!("did you mean `{near}`?"),
            None => "`dcc config show --all` lists all keys".to_owned(),
        })
    }
}

/// From 1.
fn line(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count() + 1
}
