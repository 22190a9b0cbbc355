//! tract runs a model: in a thread of its own, since it may panic, and its stack is deep.

use dcc_runtime::exec::whole::Tensor;

/// The name of its thread, whose panics are no bugs of dcc.
pub const TRACT: &str = "tract";

/// Why tract does not compute a model.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The number of the node, where tract names one.
    pub node: Option<usize>,
    pub reason: String,
}

/// The outputs of an ONNX model whose nodes are called `dcc.<number>.…`, for its inputs in order.
#[cfg(feature = "tract")]
pub fn run(model: Vec<u8>, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, Refusal> {
    const STACK: usize = 256 << 20;
    let thread = std::thread::Builder::new().name(TRACT.to_owned()).stack_size(STACK);
    let work = move || imp::compute(&model, inputs).map_err(|error| refusal(error.chain().map(ToString::to_string)));
    let thread = thread.spawn(work).map_err(|error| refusal([error.to_string()].into_iter()))?;
    thread.join().unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(refusal([format!("tract panics: {}", text.unwrap_or_default())].into_iter()))
    })
}

#[cfg(not(feature = "tract"))]
pub fn run(_: Vec<u8>, _: Vec<Tensor>) -> Result<Vec<Tensor>, Refusal> {
    Err(Refusal { node: None, reason: "this dcc was built without tract".to_owned() })
}

/// From what tract says, the outermost part first.
#[cfg(feature = "tract")]
fn refusal(chain: impl Iterator<Item = String>) -> Refusal {
    const MOST: usize = 300;
    let text = chain.collect::<Vec<_>>().join(": ").split_whitespace().collect::<Vec<_>>().join(" ");
    let number = |at: &str| at.split('.').next().and_then(|digits| digits.parse().ok());
    let node = text.split("dcc.").skip(1).find_map(number);
    let text = text.split("dcc.").map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches('.'));
    let text: String = text.collect();
    let mut reason: String = text.chars().take(MOST).collect();
    if reason.len() < text.len() {
        reason.push('…');
    }
    Refusal { node, reason }
}

#[cfg(feature = "tract")]
mod imp {
    use super::Tensor;
    use dcc_program::DType;
    use tract_onnx::prelude::*;

    pub fn compute(model: &[u8], inputs: Vec<Tensor>) -> TractResult<Vec<Tensor>> {
        let onnx = tract_onnx::onnx().with_ignore_output_shapes(true).with_ignore_value_info(true);
        // Optimised: as a graph only, tract takes a bool mask of Attention for numbers to add.
        let model = onnx.model_for_read(&mut &*model)?.into_optimized()?.into_runnable()?;
        let inputs = inputs.iter().map(|tensor| Ok(given(tensor)?.into_tvalue())).collect::<TractResult<TVec<_>>>()?;
        model.run(inputs)?.into_iter().map(|value| taken(&value)).collect()
    }

    fn given(tensor: &Tensor) -> TractResult<tract_onnx::prelude::Tensor> {
        let shape: Vec<usize> = tensor.shape.iter().map(|&dim| dim as usize).collect();
        macro_rules! elements {
            ($ty:ty, $from:expr) => {{
                let values: Vec<$ty> = tensor.bytes.as_chunks().0.iter().copied().map($from).collect();
                tract_onnx::prelude::Tensor::from_shape(&shape, &values)
            }};
        }
        match tensor.dtype {
            DType::Bool => elements!(bool, |[byte]: [u8; 1]| byte != 0),
            DType::U8 => elements!(u8, u8::from_ne_bytes),
            DType::I8 => elements!(i8, i8::from_ne_bytes),
            DType::U16 => elements!(u16, u16::from_ne_bytes),
            DType::I16 => elements!(i16, i16::from_ne_bytes),
            DType::U32 => elements!(u32, u32::from_ne_bytes),
            DType::I32 => elements!(i32, i32::from_ne_bytes),
            DType::U64 => elements!(u64, u64::from_ne_bytes),
            DType::I64 => elements!(i64, i64::from_ne_bytes),
            DType::F16 => elements!(half::f16, half::f16::from_ne_bytes),
            DType::F32 => elements!(f32, f32::from_ne_bytes),
            DType::F64 => elements!(f64, f64::from_ne_bytes),
            DType::BF16 => tract_onnx::tract_hir::internal::bail!("tract has no bfloat16"),
        }
    }

    fn taken(value: &tract_onnx::prelude::Tensor) -> TractResult<Tensor> {
        let shape: Vec<u64> = value.shape().iter().map(|&dim| dim as u64).collect();
        macro_rules! bytes {
            ($dtype:expr, $ty:ty, $to:expr) => {{
                let view = value.to_plain_array_view::<$ty>()?;
                Tensor { dtype: $dtype, shape, bytes: view.iter().copied().flat_map($to).collect() }
            }};
        }
        Ok(match value.datum_type() {
            DatumType::Bool => bytes!(DType::Bool, bool, |x| [u8::from(x)]),
            DatumType::U8 => bytes!(DType::U8, u8, u8::to_ne_bytes),
            DatumType::I8 => bytes!(DType::I8, i8, i8::to_ne_bytes),
            DatumType::U16 => bytes!(DType::U16, u16, u16::to_ne_bytes),
            DatumType::I16 => bytes!(DType::I16, i16, i16::to_ne_bytes),
            DatumType::U32 => bytes!(DType::U32, u32, u32::to_ne_bytes),
            DatumType::I32 => bytes!(DType::I32, i32, i32::to_ne_bytes),
            DatumType::U64 => bytes!(DType::U64, u64, u64::to_ne_bytes),
            DatumType::I64 => bytes!(DType::I64, i64, i64::to_ne_bytes),
            DatumType::F16 => bytes!(DType::F16, half::f16, half::f16::to_ne_bytes),
            DatumType::F32 => bytes!(DType::F32, f32, f32::to_ne_bytes),
            DatumType::F64 => bytes!(DType::F64, f64, f64::to_ne_bytes),
            // How tract has sizes.
            _ => taken(value.cast_to::<i64>()?.as_ref())?,
        })
    }
}
