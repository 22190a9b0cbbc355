//! Tensors of the model file: dtype, shape and where the data are, checked against each other but not read.

use bytes::Bytes;
use dcc_program::external::check_location;
use dcc_program::{DType, Shape};

use super::known::Known;
use super::model::Model;
use super::proto::TensorProto;
use super::proto::tensor_proto::{DataLocation, DataType};
use crate::error::{Error, Result};
use crate::graph::addressable;

/// Where a tensor's little-endian data are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorData {
    /// In the model file itself.
    Inline { offset: u64, length: u64 },
    /// In a file beside the model; `location` is relative to the model's folder.
    External { location: String, offset: u64, length: u64 },
    /// The model has them as protobuf numbers; these are their bytes.
    Owned(Bytes),
}

/// A tensor that the model defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    pub data: TensorData,
}

impl Tensor {
    /// Checks dims, dtype and length of `proto`. `name` is the tensor's own or that of the constant it belongs to.
    pub fn new(model: &Model, name: &str, proto: &TensorProto) -> Result<Tensor> {
        let place = || format!("tensor `{name}`");
        let dtype = dtype(proto.data_type()).map_err(|error| error.at(place()))?;
        let shape = dims(&proto.dims).map_err(|error| error.at(place()))?;
        let length = byte_length(dtype, &shape).map_err(|error| error.at(place()))?;
        if proto.segment.is_some() {
            return Err(Error::tensor("tensors in segments are not supported").at(place()));
        }
        let data = match proto.data_location() {
            DataLocation::External => external(proto, length).map_err(|error| error.at(place()))?,
            DataLocation::Default => internal(model, proto, dtype, length).map_err(|error| error.at(place()))?,
        };
        Ok(Tensor { name: name.to_owned(), dtype, shape, data })
    }

    /// A tensor in a file of its own, such as `input_0.pb`: it owns its bytes.
    pub fn alone(name: &str, proto: &TensorProto) -> Result<Tensor> {
        let (dtype, shape) = (dtype(proto.data_type())?, dims(&proto.dims)?);
        let length = byte_length(dtype, &shape)?;
        if proto.segment.is_some() || proto.data_location() == DataLocation::External {
            return Err(Error::tensor("the tensor's data are elsewhere"));
        }
        let data = match proto.raw_data.as_ref().filter(|raw| !raw.is_empty()) {
            Some(raw) if raw.len() as u64 == length => TensorData::Owned(raw.clone()),
            Some(raw) => {
                return Err(Error::tensor(format!("{} bytes of raw data for dims and dtype that need {length}", raw.len())));
            }
            None => typed(proto, dtype, length)?,
        };
        Ok(Tensor { name: name.to_owned(), dtype, shape, data })
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The elements, for reference evaluation. Errors: as `bytes`.
    pub fn read(&self, model: &Model) -> Result<crate::interp::Tensor> {
        Ok(Known::read(self, &self.bytes(model)?)?.to_tensor())
    }

    /// The bytes, where the caller gave the file that holds them. Errors: DCC0110.
    pub fn bytes(&self, model: &Model) -> Result<Bytes> {
        let (file, offset, length) = match &self.data {
            TensorData::Owned(bytes) => return Ok(bytes.clone()),
            TensorData::Inline { offset, length } => (model.bytes(), *offset, *length),
            TensorData::External { location, offset, length } => {
                let missing = || {
                    Error::external(format!("`{location}` is needed while compiling, for its constant `{}`", self.name))
                        .help("put the file beside the model")
                };
                (model.file(location).ok_or_else(missing)?, *offset, *length)
            }
        };
        let end = offset.saturating_add(length);
        if end > file.len() as u64 {
            let size = file.len();
            return Err(Error::external(format!("bytes {offset}..{end} are beyond the end of a file of {size} bytes"))
                .at(format!("tensor `{}`", self.name)));
        }
        Ok(file.slice(offset as usize..end as usize))
    }
}

/// The element type of an ONNX code. Errors: DCC0105 for those that dcc does not compute with.
pub fn dtype(code: i32) -> Result<DType> {
    let known = DataType::try_from(code).map_err(|_| Error::dtype(format!("{code} is no ONNX element type")))?;
    Ok(match known {
        DataType::Bool => DType::Bool,
        DataType::Uint8 => DType::U8,
        DataType::Int8 => DType::I8,
        DataType::Uint16 => DType::U16,
        DataType::Int16 => DType::I16,
        DataType::Uint32 => DType::U32,
        DataType::Int32 => DType::I32,
        DataType::Uint64 => DType::U64,
        DataType::Int64 => DType::I64,
        DataType::Float16 => DType::F16,
        DataType::Bfloat16 => DType::BF16,
        DataType::Float => DType::F32,
        DataType::Double => DType::F64,
        other => return Err(Error::dtype(format!("element type {} is not supported", other.as_str_name()))),
    })
}

/// The ONNX code of an element type.
pub fn code(dtype: DType) -> i32 {
    let code = match dtype {
        DType::Bool => DataType::Bool,
        DType::U8 => DataType::Uint8,
        DType::I8 => DataType::Int8,
        DType::U16 => DataType::Uint16,
        DType::I16 => DataType::Int16,
        DType::U32 => DataType::Uint32,
        DType::I32 => DataType::Int32,
        DType::U64 => DataType::Uint64,
        DType::I64 => DataType::Int64,
        DType::F16 => DataType::Float16,
        DType::BF16 => DataType::Bfloat16,
        DType::F32 => DataType::Float,
        DType::F64 => DataType::Double,
    };
    code.into()
}

/// Checked dims. Errors: DCC0108 for negative ones and for products that overflow.
pub fn dims(dims: &[i64]) -> Result<Shape> {
    let shape =
        dims.iter().map(|&dim| u64::try_from(dim).map_err(|_| Error::limit(format!("dim {dim} of {dims:?} is negative"))));
    let shape: Shape = shape.collect::<Result<_>>()?;
    addressable(&shape)?;
    Ok(shape)
}

/// Bytes of a dense tensor; at most 2^62, so that sums of a few never overflow.
fn byte_length(dtype: DType, shape: &[u64]) -> Result<u64> {
    addressable(shape)?;
    Ok(dtype.bytes() * shape.iter().product::<u64>())
}

fn external(proto: &TensorProto, expected: u64) -> Result<TensorData> {
    let mut location = None;
    let (mut offset, mut length) = (0, expected);
    for entry in &proto.external_data {
        let number = || {
            let parsed = entry.value().parse::<u64>().ok().filter(|&number| number <= i64::MAX as u64);
            parsed.ok_or_else(|| Error::external(format!("external data {} `{}` is no byte count", entry.key(), entry.value())))
        };
        match entry.key() {
            "location" => location = Some(entry.value().to_owned()),
            "offset" => offset = number()?,
            "length" => length = number()?,
            // A checksum of the whole file and a hint for allocators: neither changes what the tensor holds.
            "checksum" | "basepath" => {}
            other => return Err(Error::external(format!("external data key `{other}` is not supported"))),
        }
    }
    let location = location.ok_or_else(|| Error::external("external data without a location"))?;
    check_location(&location).map_err(|error| {
        Error::external(error.to_string())
            .help("external data must lie in the model's folder; move them there and export again")
    })?;
    if length != expected {
        return Err(Error::tensor(format!("{length} bytes of external data for dims and dtype that need {expected}")));
    }
    Ok(TensorData::External { location, offset, length })
}

fn internal(model: &Model, proto: &TensorProto, dtype: DType, expected: u64) -> Result<TensorData> {
    let Some(raw) = proto.raw_data.as_ref().filter(|raw| !raw.is_empty() || typed_count(proto) == 0) else {
        return typed(proto, dtype, expected);
    };
    if raw.len() as u64 != expected {
        return Err(Error::tensor(format!("{} bytes of raw data for dims and dtype that need {expected}", raw.len())));
    }
    let offset = (raw.as_ptr() as usize).wrapping_sub(model.bytes().as_ptr() as usize);
    match offset.checked_add(raw.len()).is_some_and(|end| end <= model.bytes().len()) {
        true => Ok(TensorData::Inline { offset: offset as u64, length: expected }),
        false => Ok(TensorData::Owned(raw.clone())),
    }
}

fn typed_count(proto: &TensorProto) -> usize {
    proto.float_data.len()
        + proto.int32_data.len()
        + proto.int64_data.len()
        + proto.double_data.len()
        + proto.uint64_data.len()
        + proto.string_data.len()
}

/// Little-endian bytes of the typed fields; ONNX keeps the narrow types in `int32_data`.
fn typed(proto: &TensorProto, dtype: DType, expected: u64) -> Result<TensorData> {
    let bytes: Vec<u8> = match dtype {
        DType::F32 => proto.float_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::F64 => proto.double_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::I64 => proto.int64_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::U64 => proto.uint64_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::U32 => proto.uint64_data.iter().flat_map(|&number| (number as u32).to_le_bytes()).collect(),
        narrow => {
            let width = narrow.bytes() as usize;
            proto.int32_data.iter().flat_map(|number| number.to_le_bytes().into_iter().take(width)).collect()
        }
    };
    if bytes.len() as u64 != expected {
        let (got, wanted) = (bytes.len() as u64 / dtype.bytes(), expected / dtype.bytes());
        return Err(Error::tensor(format!("{got} elements of data for dims that need {wanted}")));
    }
    Ok(TensorData::Owned(Bytes::from(bytes)))
}
