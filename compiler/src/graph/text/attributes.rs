//! Attributes in a node's line: `{axes:[tp], reduce:sum}`, or nothing where an op has none.

use super::Parsed;
use dcc_program::{Mesh, TensorType};
use serde_json::{Map, Value};

/// The text of attributes that `Op::attributes` gives.
pub(super) fn print(json: &str, mesh: &Mesh) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(json) else { panic!("attributes are an object: {json}") };
    fields.remove("dtype");
    fields.remove("shape");
    for (_, value) in fields.iter_mut().filter(|(key, _)| *key == "axis" || *key == "axes") {
        name_axes(value, mesh);
    }
    let mut out = String::new();
    if !fields.is_empty() {
        write(&Value::Object(fields), &mut out);
    }
    out
}

/// The attributes at the start of `text` as `Op::parse` wants them, and what follows them.
pub(super) fn parse<'a>(text: &'a str, ty: &TensorType, mesh: &Mesh) -> Parsed<(String, &'a str)> {
    let (mut fields, rest) = match text.starts_with('{') {
        true => match value(text)? {
            (Value::Object(fields), rest) => (fields, rest),
            _ => unreachable!("`{{` opens an object"),
        },
        false => (Map::new(), text),
    };
    fields.insert("dtype".to_owned(), ty.dtype.name().into());
    fields.insert("shape".to_owned(), ty.shape.to_vec().into());
    for (_, value) in fields.iter_mut().filter(|(key, _)| *key == "axis" || *key == "axes") {
        number_axes(value, mesh)?;
    }
    Ok((Value::Object(fields).to_string(), rest))
}

fn name_axes(value: &mut Value, mesh: &Mesh) {
    match value {
        Value::Array(axes) => axes.iter_mut().for_each(|axis| name_axes(axis, mesh)),
        _ => {
            if let Some(axis) = value.as_u64().and_then(|i| mesh.axes.get(i as usize)) {
                *value = axis.name.clone().into();
            }
        }
    }
}

fn number_axes(value: &mut Value, mesh: &Mesh) -> Parsed<()> {
    match value {
        Value::Array(axes) => axes.iter_mut().try_for_each(|axis| number_axes(axis, mesh)),
        Value::String(name) => {
            let axis = mesh.axis(name).ok_or_else(|| format!("the mesh has no axis `{name}`"))?;
            *value = axis.0.into();
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Whether a string needs no quotes.
pub(super) fn bare(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c))
        && !["true", "false", "null"].contains(&text)
}

pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<(&String, &Value)> = fields.iter().collect();
            fields.sort_by_key(|&(key, _)| key);
            list(out, ['{', '}'], fields, |(key, value), out| {
                out.push_str(key);
                out.push(':');
                write(value, out);
            });
        }
        Value::Array(values) => list(out, ['[', ']'], values, write),
        Value::String(text) if bare(text) => out.push_str(text),
        other => out.push_str(&other.to_string()),
    }
}

fn list<T>(out: &mut String, [open, close]: [char; 2], items: impl IntoIterator<Item = T>, item: impl Fn(T, &mut String)) {
    out.push(open);
    for (i, x) in items.into_iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        item(x, out);
    }
    out.push(close);
}

/// A string at the start of `text`, bare or in quotes, and what follows it.
pub(super) fn string(text: &str) -> Parsed<(String, &str)> {
    match value(text)? {
        (Value::String(string), rest) => Ok((string, rest)),
        _ => Err(format!("a name is due at `{text}`")),
    }
}

/// The value at the start of `text`, and what follows it.
fn value(text: &str) -> Parsed<(Value, &str)> {
    let text = text.trim_start();
    match text.chars().next() {
        Some('{') => {
            let mut fields = Map::new();
            let rest = items(&text[1..], '}', |text| {
                let (key, rest) = string(text)?;
                let rest = rest.trim_start().strip_prefix(':').ok_or_else(|| format!("`:` is due at `{rest}`"))?;
                let (value, rest) = value(rest)?;
                fields.insert(key, value);
                Ok(rest)
            })?;
            Ok((Value::Object(fields), rest))
        }
        Some('[') => {
            let mut values = Vec::new();
            let rest = items(&text[1..], ']', |text| {
                let (value, rest) = value(text)?;
                values.push(value);
                Ok(rest)
            })?;
            Ok((Value::Array(values), rest))
        }
        Some('"') => {
            let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
            let value = stream.next().and_then(|v| v.ok()).ok_or_else(|| format!("a string is not closed: `{text}`"))?;
            Ok((value, &text[stream.byte_offset()..]))
        }
        _ => {
            let end = text.find(|c: char| c.is_whitespace() || ",:{}[]\"".contains(c)).unwrap_or(text.len());
            let (word, rest) = text.split_at(end);
            match serde_json::from_str(word) {
                Ok(value) => Ok((value, rest)),
                Err(_) if bare(word) => Ok((word.into(), rest)),
                Err(_) => Err(format!("a value is due at `{text}`")),
            }
        }
    }
}

/// Items separated by commas up to `close`; each call of `item` reads one and returns what follows it.
fn items<'a>(mut text: &'a str, close: char, mut item: impl FnMut(&'a str) -> Parsed<&'a str>) -> Parsed<&'a str> {
    loop {
        text = text.trim_start().trim_start_matches(',').trim_start();
        if let Some(rest) = text.strip_prefix(close) {
            return Ok(rest);
        }
        text = item(text)?;
    }
}
