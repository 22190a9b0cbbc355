//! Data files, told apart by their first bytes: .npy, .npz, .safetensors, token files of nanoGPT and llm.c, folders of .npy.
//!
//! Arrays stay mapped; only compressed members of an .npz are read into memory.

use crate::error::{Error, Result};
use bytes::Bytes;
use dcc_program::DType;
use dcc_program::map::{Pages, map_pages};
use npyz::zip::{CompressionMethod, ZipArchive};
use safetensors::SafeTensors;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A row-major, little-endian array.
#[derive(Clone, Debug)]
pub struct Array {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub bytes: Bytes,
    pub path: PathBuf,
}

/// All that `--data` names.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// In the order given, named after `--map`; those of one name are parts of one array.
    pub arrays: Vec<Array>,
    /// One-dimensional integer arrays without a name, in the order given.
    pub tokens: Vec<Array>,
    /// Where they lie, if they are mapped.
    pub pages: Vec<Pages>,
}

/// llm.c: magic, version, count, then zeros up to 1024 bytes. GPT-2 tokens are u16, Llama 3 tokens u32.
const LLM_C: [(u32, u32, DType); 2] = [(20240520, 1, DType::U16), (20240801, 7, DType::U32)];
const LLM_C_HEADER: usize = 1024;
/// No header of a compressed .npy is longer.
const MOST_HEADER: usize = 1 << 20;

impl Files {
    /// `map`: `(key, input)` of `--map KEY=INPUT`. Errors: no kind of file that dcc reads, a damaged one, a key twice in one file,
    /// a `--map` of a key that is not there.
    pub fn open(paths: &[PathBuf], map: &[(String, String)]) -> Result<Files> {
        let mut files = Files::default();
        for path in paths {
            files.add(path)?;
        }
        for (key, input) in map {
            if files.of(key).next().is_none() {
                let what = format!("--map {key}={input}: the data have no key `{key}`");
                return Err(Error::data_option(what).help(format!("keys: {}", files.names())));
            }
            files.arrays.iter_mut().filter(|array| array.name == *key).for_each(|array| array.name.clone_from(input));
        }
        let mut found = BTreeSet::new();
        if let Some(array) = files.arrays.iter().find(|array| !found.insert((&array.name, &array.path))) {
            return Err(Error::data_keys(format!("the data have `{}` twice", array.name)).at(array.path.display()));
        }
        Ok(files)
    }

    /// The arrays of one name, in the order given.
    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Array> {
        self.arrays.iter().filter(move |array| array.name == name)
    }

    pub fn names(&self) -> String {
        let names: BTreeSet<&str> = self.arrays.iter().map(|array| array.name.as_str()).collect();
        names.into_iter().collect::<Vec<_>>().join(", ")
    }

    fn map(&mut self, path: &Path) -> std::io::Result<Bytes> {
        let (bytes, pages) = map_pages(&File::open(path)?)?;
        self.pages.push(pages);
        Ok(bytes)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let failed = |error| Error::io("read data", path, error);
        if path.is_dir() {
            let entries =
                std::fs::read_dir(path).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>()).map_err(failed)?;
            let mut members: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
            members.retain(|member| member.extension().is_some_and(|extension| extension == "npy"));
            members.sort();
            if members.is_empty() {
                return Err(Error::data_format("a folder without .npy files").at(path.display()));
            }
            for member in members {
                let bytes = self.map(&member).map_err(failed)?;
                self.arrays.push(npy(stem(&member), bytes, &member)?);
            }
            return Ok(());
        }
        let bytes = self.map(path).map_err(failed)?;
        match &bytes[..bytes.len().min(9)] {
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => {
                let array = npy(stem(path), bytes, path)?;
                let is_tokens = array.shape.len() == 1 && !array.dtype.is_float() && array.dtype != DType::Bool;
                if is_tokens { self.tokens.push(array) } else { self.arrays.push(array) }
            }
            [b'P', b'K', 3 | 5, ..] => self.arrays.extend(npz(bytes, path)?),
            [_, _, _, _, _, 0, 0, 0, b'{'] => self.arrays.extend(safetensors(bytes, path)?),
            _ if path.extension().is_some_and(|extension| extension == "bin") => self.tokens.push(token_file(bytes, path)?),
            _ => {
                return Err(Error::data_format("no kind of data file that dcc reads")
                    .at(path.display())
                    .help("use .npz, .npy, .safetensors, a folder of NAME.npy, or a token file .bin"));
            }
        }
        Ok(())
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The bytes of an array whose header says `shape`.
fn array(name: String, dtype: DType, shape: Vec<u64>, bytes: Bytes, path: &Path) -> Result<Array> {
    let due = shape.iter().try_fold(dtype.bytes(), |product, &dim| product.checked_mul(dim));
    if due != Some(bytes.len() as u64) {
        let text = format!("`{name}` of {} {shape:?} has {} bytes, not {}", dtype.name(), bytes.len(), due.unwrap_or(u64::MAX));
        return Err(Error::damaged_data(text).at(path.display()));
    }
    Ok(Array { name, dtype, shape, bytes, path: path.to_owned() })
}

/// NumPy's format 1 to 3: magic, version, header length, a Python dict, the elements.
fn npy(name: String, bytes: Bytes, path: &Path) -> Result<Array> {
    let (start, dtype, shape) = header(&name, &bytes, path)?;
    array(name, dtype, shape, bytes.slice(start..), path)
}

/// Where the Python dict of a .npy file is.
fn dict(bytes: &[u8]) -> Option<Range<usize>> {
    let (start, length) = match &bytes[..bytes.len().min(12)] {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, a, b, ..] => (10, usize::from(u16::from_le_bytes([*a, *b]))),
        [0x93, b'N', b'U', b'M', b'P', b'Y', 2 | 3, _, a, b, c, d] => (12, u32::from_le_bytes([*a, *b, *c, *d]) as usize),
        _ => return None,
    };
    Some(start..start + length)
}

/// Where the elements of a .npy file begin, and what they are.
fn header(name: &str, bytes: &[u8], path: &Path) -> Result<(usize, DType, Vec<u64>)> {
    let damaged = |what: &str| Error::damaged_data(format!("`{name}`: {what}")).at(path.display());
    let dict = dict(bytes).ok_or_else(|| damaged("no .npy header"))?;
    let header = bytes.get(dict.clone()).ok_or_else(|| damaged("the header ends early"))?;
    let header = std::str::from_utf8(header).map_err(|_| damaged("the header is no text"))?;
    let field = |key: &str| {
        let (_, rest) = header.split_once(key)?;
        Some(rest.trim_start_matches(['\'', '"', ':', ' ']))
    };
    let descr = field("descr").and_then(|rest| rest.split(['\'', '"']).next()).ok_or_else(|| damaged("no dtype"))?;
    let dtype = numpy_dtype(descr).ok_or_else(|| {
        Error::data_format(format!("`{name}` has numpy dtype `{descr}`, which dcc does not read"))
            .at(path.display())
            .help("use bool, an integer or a float dtype in little-endian order")
    })?;
    let shape = field("shape").and_then(|rest| rest.strip_prefix('(')?.split(')').next()).ok_or_else(|| damaged("no shape"))?;
    let dims = shape.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    let shape: Vec<u64> = dims.map(|dim| dim.parse().map_err(|_| damaged("a dim is no number"))).collect::<Result<_>>()?;
    if shape.len() > 1 && field("fortran_order").is_none_or(|rest| !rest.starts_with("False")) {
        return Err(Error::data_format(format!("`{name}` is in Fortran order"))
            .at(path.display())
            .help("save it with np.ascontiguousarray"));
    }
    Ok((dict.end, dtype, shape))
}

fn numpy_dtype(descr: &str) -> Option<DType> {
    let (order, kind) = descr.split_at_checked(1)?;
    let dtype = match kind {
        "b1" => DType::Bool,
        "u1" => DType::U8,
        "i1" => DType::I8,
        "u2" => DType::U16,
        "i2" => DType::I16,
        "u4" => DType::U32,
        "i4" => DType::I32,
        "u8" => DType::U64,
        "i8" => DType::I64,
        "f2" => DType::F16,
        "f4" => DType::F32,
        "f8" => DType::F64,
        _ => return None,
    };
    (order != ">" || dtype.bytes() == 1).then_some(dtype)
}

fn npz(bytes: Bytes, path: &Path) -> Result<Vec<Array>> {
    let damaged = |what: &dyn std::fmt::Display| Error::damaged_data(format!("not a readable .npz: {what}")).at(path.display());
    let mut archive = ZipArchive::new(Cursor::new(bytes.clone())).map_err(|error| damaged(&error))?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let mut member = archive.by_index(index).map_err(|error| damaged(&error))?;
        let Some(name) = member.name().strip_suffix(".npy").map(str::to_owned) else { continue };
        let content = if member.compression() == CompressionMethod::Stored {
            let (start, size) = (member.data_start() as usize, member.size() as usize);
            let end = start.checked_add(size).filter(|&end| end <= bytes.len()).ok_or_else(|| damaged(&"it ends early"))?;
            bytes.slice(start..end)
        } else {
            unpacked(&name, &mut member, path)?.into()
        };
        arrays.push(npy(name, content, path)?);
    }
    Ok(arrays)
}

/// A compressed .npy file, to one byte more than its header says: little can unpack to very much. What is read, not what the header
/// promises, decides the memory.
fn unpacked(name: &str, member: &mut dyn Read, path: &Path) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut read_to = |content: &mut Vec<u8>, end: u64| {
        let read = (&mut *member).take(end.saturating_sub(content.len() as u64)).read_to_end(content);
        read.map_err(|error| Error::damaged_data(format!("not a readable .npz: {error}")).at(path.display()))
    };
    read_to(&mut content, 12)?;
    let end = dict(&content).map_or(0, |dict| dict.end.min(MOST_HEADER));
    read_to(&mut content, end as u64)?;
    let (start, dtype, shape) = header(name, &content, path)?;
    let due = shape.iter().fold(dtype.bytes(), |product, &dim| product.saturating_mul(dim));
    read_to(&mut content, due.saturating_add(start as u64 + 1))?;
    Ok(content)
}

fn safetensors(bytes: Bytes, path: &Path) -> Result<Vec<Array>> {
    let damaged = |what: &dyn std::fmt::Display| Error::damaged_data(format!("not readable: {what}")).at(path.display());
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| damaged(&error))?;
    let array_of = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = DType::parse(&view.dtype().to_string().to_lowercase()).ok_or_else(|| {
            Error::data_format(format!("`{name}` has dtype {}, which dcc does not read", view.dtype())).at(path.display())
        })?;
        let shape = view.shape().iter().map(|&dim| dim as u64).collect();
        array(name, dtype, shape, bytes.slice_ref(view.data()), path)
    };
    // As they lie in the file: the crate has them in an order of chance.
    let mut all = tensors.tensors();
    all.sort_by_key(|(name, view)| (view.data().as_ptr().addr(), name.clone()));
    all.into_iter().map(array_of).collect()
}

fn token_file(bytes: Bytes, path: &Path) -> Result<Array> {
    let word = |index: usize| bytes.get(4 * index..4 * index + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let known = LLM_C.iter().find(|(magic, version, _)| word(0) == Some(*magic) && word(1) == Some(*version));
    let (dtype, bytes) = match known {
        Some(&(_, _, dtype)) if bytes.len() >= LLM_C_HEADER => (dtype, bytes.slice(LLM_C_HEADER..)),
        // nanoGPT has no header.
        _ => (DType::U16, bytes),
    };
    let count = bytes.len() as u64 / dtype.bytes();
    array(stem(path), dtype, vec![count], bytes, path)
}
