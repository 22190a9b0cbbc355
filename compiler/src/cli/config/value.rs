//! Values of settings, and the words of a command line that they are.

use super::catalog::{Flag, Takes};
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// A value as it was written; what it means depends on the flag.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Bool(bool),
    /// Digits and all, as they stand there.
    Number(String),
    Text(String),
    List(Vec<Value>),
    Table(Vec<(String, Value)>),
    /// Of a variable: text, unless the flag takes something else.
    Variable(String),
}

impl Value {
    pub fn of(value: &DeValue<'_>) -> Value {
        match value {
            DeValue::Boolean(value) => Value::Bool(*value),
            DeValue::Integer(value) => Value::Number(match value.radix() {
                10 => value.as_str().to_owned(),
                radix => i64::from_str_radix(value.as_str(), radix).map_or(value.to_string(), |value| value.to_string()),
            }),
            DeValue::Float(value) => Value::Number(value.as_str().to_owned()),
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Datetime(date) => Value::Text(date.to_string()),
            DeValue::Array(values) => Value::List(values.iter().map(|value| Value::of(value.get_ref())).collect()),
            DeValue::Table(table) => Value::Table(entries(table)),
        }
    }

    /// The values of the flag: `true` or nothing for a switch, a number for one that counts. Errors: what it takes instead.
    pub fn texts(&self, flag: &Flag) -> Result<Vec<String>, String> {
        match (flag.takes, self) {
            (_, Value::Variable(text)) => variable(text, flag),
            (Takes::Nothing, Value::Bool(on)) => Ok(if *on { vec!["true".to_owned()] } else { Vec::new() }),
            (Takes::Nothing, _) => Err("it takes true or false".to_owned()),
            (Takes::Count, Value::Bool(on)) => Ok(vec![u8::from(*on).to_string()]),
            (Takes::Count, Value::Number(count)) if count.parse::<u8>().is_ok() => Ok(vec![count.clone()]),
            (Takes::Count, _) => Err("it takes a small number".to_owned()),
            (Takes::One, Value::List(values)) if flag.is_list => {
                let parts: Option<Vec<&str>> = values.iter().map(Value::scalar).collect();
                Ok(vec![parts.ok_or("its list has single values")?.join(",")])
            }
            (Takes::One, Value::List(_)) => Err("it takes one value, not a list".to_owned()),
            (Takes::One, Value::Table(_)) => Err("it takes one value, not a table".to_owned()),
            (Takes::Many, Value::List(values)) => {
                let texts: Option<Vec<String>> = values.iter().map(|value| value.scalar().map(str::to_owned)).collect();
                texts.ok_or_else(|| "its list has single values".to_owned())
            }
            (Takes::Many, Value::Table(entries)) if flag.is_pair => {
                let pairs: Option<Vec<Vec<String>>> = entries.iter().map(|(key, value)| pairs(key, value)).collect();
                Ok(pairs.ok_or("its table has single values")?.concat())
            }
            (Takes::Many, Value::Table(_)) => Err("it takes a list of values, not a table".to_owned()),
            (Takes::One | Takes::Many, value) => Ok(vec![value.scalar().unwrap_or_default().to_owned()]),
        }
    }

    fn scalar(&self) -> Option<&str> {
        match self {
            Value::Number(text) | Value::Text(text) | Value::Variable(text) => Some(text),
            Value::Bool(true) => Some("true"),
            Value::Bool(false) => Some("false"),
            Value::List(_) | Value::Table(_) => None,
        }
    }
}

fn entries(table: &DeTable<'_>) -> Vec<(String, Value)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries.into_iter().map(|(key, value)| (key.get_ref().to_string(), Value::of(value.get_ref()))).collect()
}

/// `{ seq = 256 }` is `seq=256`.
fn pairs(key: &str, value: &Value) -> Option<Vec<String>> {
    match value {
        Value::List(values) => values.iter().map(|value| Some(format!("{key}={}", value.scalar()?))).collect(),
        value => Some(vec![format!("{key}={}", value.scalar()?)]),
    }
}

fn variable(text: &str, flag: &Flag) -> Result<Vec<String>, String> {
    match flag.takes {
        Takes::Nothing => match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Ok(vec!["true".to_owned()]),
            "0" | "false" | "no" | "off" => Ok(Vec::new()),
            _ => Err("it takes true or false, 1 or 0".to_owned()),
        },
        Takes::Count => Value::Number(text.to_owned()).texts(flag),
        Takes::One => Ok(vec![text.to_owned()]),
        // Several values are written as TOML: `["a.npz", "b.npz"]`, `{ seq = 256 }`.
        Takes::Many if text.starts_with(['[', '{']) => match DeValue::parse(text) {
            Ok(value) => Value::of(value.get_ref()).texts(flag),
            Err(_) => Ok(vec![text.to_owned()]),
        },
        Takes::Many => Ok(vec![text.to_owned()]),
    }
}

/// A value of a file: paths are relative to its folder.
pub fn relative(text: String, flag: &Flag, folder: &Path) -> String {
    let join = |path: &str| folder.join(path).to_string_lossy().into_owned();
    if folder.as_os_str().is_empty() {
        return text;
    }
    if flag.is_path || (flag.may_be_path && text.contains('/')) {
        return join(&text);
    }
    // `@FILE`, `NAME=@FILE`.
    match text.split_once('@') {
        Some((before, path)) if before.is_empty() || (before.ends_with('=') && flag.is_pair && !path.contains("@")) => {
            format!("{before}@{}", join(path))
        }
        _ => text,
    }
}
