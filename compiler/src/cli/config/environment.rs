//! Variables: `DCC_LR` for all commands with that flag, `DCC_RUN_LR` for one.

use super::catalog::Catalog;
use super::value::Value;
use super::{Config, FILE, Origin, Setting};
use crate::cli::typo::nearest;
use crate::error::Error;
use std::collections::BTreeMap;
use std::ffi::OsString;

const PREFIX: &str = "DCC_";

/// The variable of a key.
pub fn variable(scope: &[String], key: &str) -> String {
    let words: Vec<&str> = scope.iter().map(String::as_str).chain([key]).collect();
    format!("{PREFIX}{}", words.join("_").replace('-', "_").to_ascii_uppercase())
}

/// All variables, and the keys that they are.
pub fn all(catalog: &Catalog) -> BTreeMap<String, (Vec<String>, String)> {
    let of = |scope: Vec<String>| {
        let keys: Vec<String> = catalog.keys(&scope).into_iter().map(str::to_owned).collect();
        keys.into_iter().map(move |key| (variable(&scope, &key), (scope.clone(), key)))
    };
    catalog.scopes().into_iter().flat_map(of).collect()
}

/// Adds what the environment sets; an empty variable sets nothing. One that is nearly ours is warned of, others are not ours.
pub fn read(catalog: &Catalog, variables: &[(String, OsString)], config: &mut Config) -> Result<(), Error> {
    let known = all(catalog);
    let own = variable(&[], FILE);
    for (name, value) in variables.iter().filter(|(name, value)| name.starts_with(PREFIX) && !value.is_empty()) {
        match known.get(name) {
            Some((scope, key)) => {
                let text = value.to_str().ok_or_else(|| Error::usage(format!("{name} is no UTF-8")).help("set it again"))?;
                let origin = Origin::Variable(name.clone());
                let value = Value::Variable(text.to_owned());
                config.settings.push(Setting { scope: scope.clone(), key: key.clone(), value, origin });
            }
            None if *name == own => {}
            None => {
                let most = if name.len() - PREFIX.len() > 6 { 2 } else { 1 };
                if let Some(near) = nearest(name, known.keys().map(String::as_str).chain([own.as_str()]), most) {
                    config.warnings.push(format!("{name} is no variable of dcc and sets nothing: did you mean {near}?"));
                }
            }
        }
    }
    Ok(())
}
