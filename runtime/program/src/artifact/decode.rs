//! From the bytes of a file to an artifact: hashes first, then structure, then the gate. Any bytes give an artifact or an error.

use super::encode::{CODE, Header, TensorEntry, aligned};
use super::{Artifact, ArtifactError, Data, FORMAT, Result, Tensor, is_relative};
use crate::program::{Mode, Program};
use crate::types::DType;
use bytes::Bytes;
use std::collections::BTreeMap;

/// A first line is short; without its end the file is none of ours.
const MAX_FIRST_LINE: usize = 256;

pub(super) fn artifact(file: Bytes) -> Result<Artifact> {
    let (header, header_end) = header(&file)?;
    let start = aligned(header_end);
    let mut sections: BTreeMap<String, Bytes> = BTreeMap::new();
    let mut end = header_end;
    for section in &header.sections {
        let part = section.name.clone();
        let from = start.checked_add(section.offset);
        let to = from.and_then(|from| from.checked_add(section.bytes));
        let (Some(from), Some(to)) = (from, to) else { return Err(malformed(&part, "its offset overflows")) };
        if from != aligned(end) || sections.contains_key(&part) {
            return Err(malformed(&part, "it is not where the last one ends, or there twice"));
        }
        if to > file.len() as u64 {
            return Err(ArtifactError::Truncated { part });
        }
        let bytes = file.slice(from as usize..to as usize);
        let padding = &file[end as usize..from as usize];
        if padding.iter().any(|&b| b != 0) || blake3::hash(&bytes).to_hex().as_str() != section.blake3 {
            return Err(ArtifactError::Damaged { part });
        }
        sections.insert(part, bytes);
        end = to;
    }
    if end != file.len() as u64 {
        return Err(malformed("end", "more bytes follow"));
    }
    let artifact = Artifact {
        train: programs("train", Mode::Train, &mut sections)?,
        eval: programs("eval", Mode::Eval, &mut sections)?,
        forward: text("forward", &mut sections)?,
        code: code(&mut sections),
        tensors: header.tensors.into_iter().map(|t| tensor(t, &mut sections)).collect::<Result<_>>()?,
        options: header.options,
    };
    if let Some((name, _)) = sections.first_key_value() {
        return Err(malformed(name, "nothing refers to it"));
    }
    artifact.verify()?;
    Ok(artifact)
}

fn malformed(part: &str, what: impl Into<String>) -> ArtifactError {
    ArtifactError::Malformed { part: part.to_owned(), what: what.into() }
}

/// The header, and where it ends.
fn header(file: &Bytes) -> Result<(Header, u64)> {
    let line_end = file.iter().take(MAX_FIRST_LINE).position(|&b| b == b'\n');
    let line = line_end.and_then(|end| std::str::from_utf8(&file[..end]).ok());
    let Some((rest, end)) = line.and_then(|l| l.strip_prefix("dcc artifact ")).zip(line_end) else {
        let start = &b"dcc artifact "[..];
        let cut = !file.is_empty() && file.len() < MAX_FIRST_LINE && (file.starts_with(start) || start.starts_with(file));
        return Err(if cut { ArtifactError::Truncated { part: "first line".to_owned() } } else { ArtifactError::NotArtifact });
    };
    let words: Vec<&str> = rest.split(' ').collect();
    if words[0] != FORMAT.to_string() {
        return Err(ArtifactError::Version { found: words[0].to_owned(), known: FORMAT });
    }
    let length = words.get(2).and_then(|n| n.parse::<usize>().ok());
    let (Some(hash), Some(length), 3) = (words.get(1), length, words.len()) else {
        return Err(malformed("first line", "expected a hash and a length"));
    };
    let from = end + 1;
    let Some(to) = from.checked_add(length).filter(|&to| to <= file.len()) else {
        return Err(ArtifactError::Truncated { part: "header".to_owned() });
    };
    let text = &file[from..to];
    if blake3::hash(text).to_hex().as_str() != *hash {
        return Err(ArtifactError::Damaged { part: "header".to_owned() });
    }
    let header: Header = serde_json::from_slice(text).map_err(|e| malformed("header", e.to_string()))?;
    if header.sections.is_empty() {
        return Err(malformed("header", "it lists no programs"));
    }
    Ok((header, to as u64))
}

fn programs(mode: &str, expected: Mode, sections: &mut BTreeMap<String, Bytes>) -> Result<Vec<Program>> {
    let mut out = Vec::new();
    while let Some((part, bytes)) = sections.remove_entry(&format!("{mode}.{}", out.len())) {
        let text = std::str::from_utf8(&bytes).map_err(|e| malformed(&part, e.to_string()))?;
        let program = crate::text::parse(text).map_err(|e| malformed(&part, e.to_string()))?;
        if program.mode != expected {
            return Err(malformed(&part, "it is a program of the other mode"));
        }
        out.push(program);
    }
    Ok(out)
}

/// A section of text; empty where there is none.
fn text(part: &str, sections: &mut BTreeMap<String, Bytes>) -> Result<String> {
    let bytes = sections.remove(part).unwrap_or_default();
    String::from_utf8(bytes.into()).map_err(|e| malformed(part, e.to_string()))
}

fn code(sections: &mut BTreeMap<String, Bytes>) -> BTreeMap<String, Bytes> {
    let named = sections.extract_if(CODE.to_owned().., |name, _| name.starts_with(CODE));
    named.map(|(name, bytes)| (name[CODE.len()..].to_owned(), bytes)).collect()
}

fn tensor(entry: TensorEntry, sections: &mut BTreeMap<String, Bytes>) -> Result<Tensor> {
    let part = format!("tensor {}", entry.name);
    let dtype = DType::parse(&entry.dtype).ok_or_else(|| malformed(&part, format!("unknown dtype {}", entry.dtype)))?;
    let data = match (entry.file, entry.section) {
        (None, None) => Data::Absent,
        (Some(f), None) if is_relative(&f.path) => {
            Data::File { path: f.path, offset: f.offset, bytes: f.bytes, file_bytes: f.file_bytes }
        }
        (Some(f), None) => return Err(malformed(&part, format!("the path {} is not relative", f.path))),
        (None, Some(name)) => {
            let bytes = sections.remove(&name).ok_or_else(|| malformed(&part, format!("there is no section {name}")))?;
            Data::Embedded(bytes)
        }
        (Some(_), Some(_)) => return Err(malformed(&part, "it is in a file and embedded")),
    };
    let tensor = Tensor { name: entry.name, dtype, shape: entry.shape.into_iter().collect(), data };
    let bytes = match &tensor.data {
        Data::Absent => tensor.expected_bytes(),
        Data::File { bytes, offset, file_bytes, .. } if offset.checked_add(*bytes).is_some_and(|e| e <= *file_bytes) => {
            Some(*bytes)
        }
        Data::File { .. } => None,
        Data::Embedded(bytes) => Some(bytes.len() as u64),
    };
    if bytes.is_none() || bytes != tensor.expected_bytes() {
        return Err(malformed(&part, format!("{bytes:?} bytes for {} of shape {:?}", tensor.dtype.name(), tensor.shape)));
    }
    Ok(tensor)
}
