//! Named tensors in files: .npz, .safetensors, folders of ONNX tensors. What is written is there whole or not at all.

use super::super::export::Stored;
use super::super::failure::{self, Outcome};
use super::super::output;
use crate::error::Error;
use crate::import::proto::TensorProto;
use crate::import::{self, TensorData};
use dcc_program::DType;
use dcc_runtime::data::Array;
use dcc_runtime::exec::whole::Tensor;
use npyz::zip::write::FileOptions;
use npyz::zip::{CompressionMethod, DateTime, ZipWriter};
use npyz::{AutoSerialize, WriteOptions, WriterBuilder};
use prost::Message;
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};

pub struct Named {
    pub name: String,
    pub tensor: Tensor,
}

/// The bytes of what is to be written.
pub enum Encoded {
    File {
        path: PathBuf,
        bytes: Vec<u8>,
        count: usize,
    },
    /// Files of a folder.
    Folder {
        path: PathBuf,
        files: Vec<(String, Vec<u8>)>,
    },
}

impl Encoded {
    pub fn path(&self) -> &Path {
        match self {
            Encoded::File { path, .. } | Encoded::Folder { path, .. } => path,
        }
    }

    /// Takes back what was written. What was there before is gone either way.
    fn remove(&self) {
        match self {
            Encoded::File { path, .. } => output::remove(path),
            Encoded::Folder { path, files } => files.iter().for_each(|(name, _)| output::remove(&path.join(name))),
        }
    }

    /// Tensors.
    pub fn count(&self) -> usize {
        match self {
            Encoded::File { count, .. } => *count,
            Encoded::Folder { files, .. } => files.len(),
        }
    }
}

/// The tensors `<anything>_<i>.pb` of a folder, by their number; none where the path is no folder with such files.
pub fn numbered(folder: &Path) -> Outcome<Vec<(usize, Array)>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let failed = |error| failure::io("read inputs", folder, error);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let number = name.strip_prefix("input_").and_then(|rest| rest.strip_suffix(".pb")?.parse().ok());
        if let Some(number) = number {
            found.push((number, read_proto(&path)?));
        }
    }
    found.sort_by_key(|(number, _)| *number);
    Ok(found)
}

fn read_proto(path: &Path) -> Outcome<Array> {
    let bytes = super::super::model::map(path)?;
    let proto = TensorProto::decode(bytes).map_err(|error| {
        let what = format!("no ONNX tensor: {error}");
        dcc_runtime::error::Error::damaged_data(what).at(path.display())
    })?;
    let tensor = import::Tensor::alone(proto.name(), &proto).map_err(|error| error.at(path.display()))?;
    let TensorData::Owned(bytes) = tensor.data else { unreachable!("a tensor alone owns its bytes") };
    Ok(Array { name: tensor.name, dtype: tensor.dtype, shape: tensor.shape.to_vec(), bytes, path: path.to_owned() })
}

/// In the form that the path's extension asks for.
pub fn encode(path: &Path, values: &[Named]) -> Outcome<Encoded> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let (path, count) = (path.to_owned(), values.len());
    Ok(match extension.as_str() {
        "npz" => Encoded::File { bytes: npz(&path, values)?, path, count },
        "safetensors" => {
            let views = values.iter().map(|value| {
                let Tensor { dtype, shape, bytes } = &value.tensor;
                (value.name.as_str(), Stored::new(*dtype, shape, bytes))
            });
            let bytes = safetensors::serialize(views, None).map_err(|error| failure::io("write", &path, error))?;
            Encoded::File { bytes, path, count }
        }
        "" => {
            let file = |(number, value): (usize, &Named)| (format!("output_{number}.pb"), proto(value).encode_to_vec());
            Encoded::Folder { files: values.iter().enumerate().map(file).collect(), path }
        }
        other => {
            let what = format!("tensors cannot be written as .{other}");
            return Err(Error::usage(what).at(path.display()).help("use .npz, .safetensors, or the name of a folder").into());
        }
    })
}

/// Writes all of them; where one cannot be, none.
pub fn write_all(files: &[Encoded]) -> Outcome<()> {
    for (done, file) in files.iter().enumerate() {
        let written = match file {
            Encoded::File { path, bytes, .. } => output::file(path, |out| out.write_all(bytes)),
            Encoded::Folder { path, files } => write_folder(path, files),
        };
        if let Err(failure) = written {
            files[..done].iter().for_each(Encoded::remove);
            return Err(failure);
        }
    }
    Ok(())
}

fn write_folder(path: &Path, files: &[(String, Vec<u8>)]) -> Outcome<()> {
    std::fs::create_dir_all(path).map_err(|error| failure::io("make the folder", path, error))?;
    files.iter().try_for_each(|(name, bytes)| output::file(&path.join(name), |out| out.write_all(bytes)))
}

fn proto(value: &Named) -> TensorProto {
    let Tensor { dtype, shape, bytes } = &value.tensor;
    TensorProto {
        name: Some(value.name.clone()),
        dims: shape.iter().map(|&dim| dim as i64).collect(),
        data_type: Some(import::code(*dtype)),
        raw_data: Some(bytes.clone().into()),
        ..TensorProto::default()
    }
}

fn npz(path: &Path, values: &[Named]) -> Outcome<Vec<u8>> {
    let failed = |error: &dyn std::fmt::Display| failure::io("write", path, error);
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for Named { name, tensor } in values {
        let array = npy(tensor).ok_or_else(|| {
            Error::usage(format!("`{name}` is {}, which NumPy has not", tensor.dtype.name())).help("write .safetensors")
        })?;
        let options = FileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(DateTime::default())
            .large_file(tensor.bytes.len() >= 1 << 31);
        archive.start_file(format!("{name}.npy"), options).map_err(|error| failed(&error))?;
        array.and_then(|array| archive.write_all(&array)).map_err(|error| failed(&error))?;
    }
    Ok(archive.finish().map_err(|error| failed(&error))?.into_inner())
}

/// A .npy file; none where NumPy has no such dtype.
fn npy(tensor: &Tensor) -> Option<io::Result<Vec<u8>>> {
    Some(match tensor.dtype {
        DType::Bool => array(tensor, |[byte]: [u8; 1]| byte != 0),
        DType::U8 => array(tensor, u8::from_ne_bytes),
        DType::I8 => array(tensor, i8::from_ne_bytes),
        DType::U16 => array(tensor, u16::from_ne_bytes),
        DType::I16 => array(tensor, i16::from_ne_bytes),
        DType::U32 => array(tensor, u32::from_ne_bytes),
        DType::I32 => array(tensor, i32::from_ne_bytes),
        DType::U64 => array(tensor, u64::from_ne_bytes),
        DType::I64 => array(tensor, i64::from_ne_bytes),
        DType::F16 => array(tensor, half::f16::from_ne_bytes),
        DType::F32 => array(tensor, f32::from_ne_bytes),
        DType::F64 => array(tensor, f64::from_ne_bytes),
        DType::BF16 => return None,
    })
}

/// A .npy file of elements of `N` bytes.
fn array<T: AutoSerialize, const N: usize>(tensor: &Tensor, element: fn([u8; N]) -> T) -> io::Result<Vec<u8>> {
    let mut file = Vec::with_capacity(tensor.bytes.len() + 128);
    let mut writer = WriteOptions::new().default_dtype().shape(&tensor.shape).writer(&mut file).begin_nd()?;
    writer.extend(tensor.bytes.as_chunks().0.iter().copied().map(element))?;
    writer.finish()?;
    Ok(file)
}
