//! From an artifact to the bytes of its file.

use super::{ALIGN, Artifact, Data, FORMAT};
use serde::{Deserialize, Serialize};
use std::io;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub options: serde_json::Map<String, serde_json::Value>,
    pub sections: Vec<Section>,
    pub tensors: Vec<TensorEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    pub name: String,
    /// From the first aligned byte after the header.
    pub offset: u64,
    pub bytes: u64,
    pub blake3: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntry {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileEntry>,
    /// The section that holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub path: String,
    pub offset: u64,
    pub bytes: u64,
    pub file_bytes: u64,
}

/// What the names of sections of machine code begin with.
pub(super) const CODE: &str = "code.";

pub(super) fn aligned(at: u64) -> u64 {
    at.next_multiple_of(ALIGN)
}

/// The first line of a file with this header.
pub(super) fn first_line(header: &str) -> String {
    format!("dcc artifact {FORMAT} {} {}\n", blake3::hash(header.as_bytes()).to_hex(), header.len())
}

enum Body<'a> {
    Text(String),
    Bytes(&'a [u8]),
}

impl Body<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Body::Text(text) => text.as_bytes(),
            Body::Bytes(bytes) => bytes,
        }
    }
}

/// Header and sections, in file order.
pub(super) struct Layout<'a> {
    pub header: String,
    sections: Vec<(u64, Body<'a>)>,
}

impl Layout<'_> {
    pub fn of(artifact: &Artifact) -> Layout<'_> {
        let mut named: Vec<(String, Body)> = Vec::new();
        for (mode, programs) in [("train", &artifact.train), ("eval", &artifact.eval)] {
            let text = |(i, p)| (format!("{mode}.{i}"), Body::Text(crate::text::print(p)));
            named.extend(programs.iter().enumerate().map(text));
        }
        if !artifact.forward.is_empty() {
            named.push(("forward".to_owned(), Body::Bytes(artifact.forward.as_bytes())));
        }
        let mut tensors = Vec::new();
        for (i, tensor) in artifact.tensors.iter().enumerate() {
            let (mut file, mut section) = (None, None);
            match &tensor.data {
                Data::Absent => {}
                Data::File { path, offset, bytes, file_bytes } => {
                    let (offset, bytes, file_bytes) = (*offset, *bytes, *file_bytes);
                    file = Some(FileEntry { path: path.clone(), offset, bytes, file_bytes });
                }
                Data::Embedded(bytes) => {
                    let name = format!("tensor.{i}");
                    named.push((name.clone(), Body::Bytes(bytes)));
                    section = Some(name);
                }
            }
            let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype.name().to_owned(), tensor.shape.to_vec());
            tensors.push(TensorEntry { name, dtype, shape, file, section });
        }
        named.extend(artifact.code.iter().map(|(name, bytes)| (format!("{CODE}{name}"), Body::Bytes(bytes))));
        let (mut entries, mut sections, mut at) = (Vec::new(), Vec::new(), 0);
        for (name, body) in named {
            let bytes = body.bytes().len() as u64;
            entries.push(Section { name, offset: at, bytes, blake3: blake3::hash(body.bytes()).to_hex().to_string() });
            sections.push((at, body));
            at = aligned(at + bytes);
        }
        let header = Header { options: artifact.options.clone(), sections: entries, tensors };
        let header = serde_json::to_string(&header).expect("strings and numbers are JSON");
        Layout { header, sections }
    }
}

pub(super) fn write(artifact: &Artifact, out: &mut impl io::Write) -> io::Result<()> {
    let layout = Layout::of(artifact);
    let line = first_line(&layout.header);
    out.write_all(line.as_bytes())?;
    out.write_all(layout.header.as_bytes())?;
    let start = aligned((line.len() + layout.header.len()) as u64);
    let mut at = (line.len() + layout.header.len()) as u64;
    for (offset, body) in &layout.sections {
        out.write_all(&vec![0; (start + offset - at) as usize])?;
        out.write_all(body.bytes())?;
        at = start + offset + body.bytes().len() as u64;
    }
    out.flush()
}
