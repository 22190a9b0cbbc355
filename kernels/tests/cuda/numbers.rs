//! Numbers as bytes of a dtype, made up and compared.

use dcc_program::types::DType;

/// Largest |x - y| / (1 + |y|) of a result x and its f64 value y: few roundings of sums of some hundred terms.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::BF16 => 2e-2,
        _ => 0.0,
    }
}

/// The largest error. Errors: a value outside of the tolerance.
pub fn compare(dtype: DType, got: &[f64], expected: &[f64]) -> Result<f64, String> {
    assert_eq!(got.len(), expected.len(), "elements");
    let mut worst: f64 = 0.0;
    for (i, (x, y)) in got.iter().zip(expected).enumerate() {
        let error = if x == y || (x.is_nan() && y.is_nan()) { 0.0 } else { (x - y).abs() / (1.0 + y.abs()) };
        if error.is_nan() || error > tolerance(dtype) {
            return Err(format!("{x} at {i}, expected {y}"));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn half_bits(dtype: DType, x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    if dtype == DType::BF16 {
        return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    }
    let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
    if x.abs() < 2f64.powi(-14) {
        return sign | (x.abs() * 2f64.powi(24)).round_ties_even() as u16;
    }
    sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112 << 23)) >> 13) as u16
}

fn half_value(dtype: DType, bits: u16) -> f64 {
    if dtype == DType::BF16 {
        return f32::from_bits(u32::from(bits) << 16).into();
    }
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

pub fn encoded(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = |x: &f64| match dtype {
        DType::F32 => (*x as f32).to_le_bytes().to_vec(),
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::I32 => (*x as i32).to_le_bytes().to_vec(),
        DType::I64 => (*x as i64).to_le_bytes().to_vec(),
        DType::U32 => (*x as u32).to_le_bytes().to_vec(),
        DType::U64 => (*x as u64).to_le_bytes().to_vec(),
        DType::I16 => (*x as i16).to_le_bytes().to_vec(),
        DType::U16 => (*x as u16).to_le_bytes().to_vec(),
        DType::I8 => (*x as i8).to_le_bytes().to_vec(),
        DType::U8 | DType::Bool => vec![*x as u8],
        DType::F16 | DType::BF16 => half_bits(dtype, *x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

pub fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |b: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(b.try_into().expect("4 bytes")).into(),
        DType::F64 => f64::from_le_bytes(b.try_into().expect("8 bytes")),
        DType::I32 => i32::from_le_bytes(b.try_into().expect("4 bytes")).into(),
        DType::I64 => i64::from_le_bytes(b.try_into().expect("8 bytes")) as f64,
        DType::U32 => u32::from_le_bytes(b.try_into().expect("4 bytes")).into(),
        DType::U64 => u64::from_le_bytes(b.try_into().expect("8 bytes")) as f64,
        DType::I16 => i16::from_le_bytes(b.try_into().expect("2 bytes")).into(),
        DType::U16 => u16::from_le_bytes(b.try_into().expect("2 bytes")).into(),
        DType::I8 => i8::from_le_bytes([b[0]]).into(),
        DType::U8 | DType::Bool => b[0].into(),
        DType::F16 | DType::BF16 => half_value(dtype, u16::from_le_bytes(b.try_into().expect("2 bytes"))),
    };
    bytes.chunks_exact(dtype.bytes() as usize).map(value).collect()
}

/// Exact in every float type.
pub fn numbers(count: usize, seed: usize) -> Vec<f64> {
    let mut state = seed as u64 * 7919 + 17;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % 257) as f64 / 64.0 - 2.0
    };
    (0..count).map(|_| next()).collect()
}
