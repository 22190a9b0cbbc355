//! Element types: what may become what, and the loops that do it.

use crate::error::{Error, Result};
use dcc_program::DType;
use half::{bf16, f16};

/// A checked conversion.
#[derive(Clone, Copy)]
pub struct Convert {
    pub source: DType,
    pub target: DType,
    run: fn(&[u8], &mut [u8]),
}

/// What values an input takes besides those of its dtype.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    pub vocabulary: Option<u64>,
    pub ignore_index: Option<i64>,
}

trait Scalar: Copy {
    const BYTES: usize;
    const IS_FLOAT: bool;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn to_f64(self) -> f64;
    fn of_f64(value: f64) -> Self;
    /// Wide enough for all integer dtypes.
    fn to_i128(self) -> i128;
    fn of_i128(value: i128) -> Self;
}

macro_rules! scalar {
    ($ty:ty, $is_float:expr, $to_f64:expr, $of_f64:expr, $to_i128:expr, $of_i128:expr) => {
        impl Scalar for $ty {
            const BYTES: usize = size_of::<$ty>();
            const IS_FLOAT: bool = $is_float;
            fn read(bytes: &[u8]) -> Self {
                <$ty>::from_le_bytes(bytes.try_into().expect("a chunk of the element's size"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn to_f64(self) -> f64 {
                $to_f64(self)
            }
            fn of_f64(value: f64) -> Self {
                $of_f64(value)
            }
            fn to_i128(self) -> i128 {
                $to_i128(self)
            }
            fn of_i128(value: i128) -> Self {
                $of_i128(value)
            }
        }
    };
}
macro_rules! integers {
    ($($ty:ty),*) => { $(scalar!($ty, false, |x| x as f64, |x| x as $ty, |x| x as i128, |x| x as $ty);)* };
}
integers!(u8, i8, u16, i16, u32, i32, u64, i64);
scalar!(f32, true, f64::from, |x| x as f32, |x| x as i128, |x| x as f32);
scalar!(f64, true, |x| x, |x| x, |x| x as i128, |x| x as f64);
scalar!(f16, true, f16::to_f64, f16::from_f64, |x: f16| x.to_f64() as i128, |x| f16::from_f64(x as f64));
scalar!(bf16, true, bf16::to_f64, bf16::from_f64, |x: bf16| x.to_f64() as i128, |x| bf16::from_f64(x as f64));

/// Runs `$body` with `$ty` the Rust type of a dtype; bools are bytes.
macro_rules! dispatch {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::Bool | DType::U8 => {
                type $ty = u8;
                $body
            }
            DType::I8 => {
                type $ty = i8;
                $body
            }
            DType::U16 => {
                type $ty = u16;
                $body
            }
            DType::I16 => {
                type $ty = i16;
                $body
            }
            DType::U32 => {
                type $ty = u32;
                $body
            }
            DType::I32 => {
                type $ty = i32;
                $body
            }
            DType::U64 => {
                type $ty = u64;
                $body
            }
            DType::I64 => {
                type $ty = i64;
                $body
            }
            DType::F16 => {
                type $ty = f16;
                $body
            }
            DType::BF16 => {
                type $ty = bf16;
                $body
            }
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::F64 => {
                type $ty = f64;
                $body
            }
        }
    };
}

fn convert<S: Scalar, D: Scalar>(source: &[u8], target: &mut [u8]) {
    for (from, to) in source.chunks_exact(S::BYTES).zip(target.chunks_exact_mut(D::BYTES)) {
        let value = S::read(from);
        let value = if S::IS_FLOAT || D::IS_FLOAT { D::of_f64(value.to_f64()) } else { D::of_i128(value.to_i128()) };
        value.write(to);
    }
}

impl Convert {
    pub fn new(source: DType, target: DType) -> Convert {
        let run: fn(&[u8], &mut [u8]) = match source == target {
            true => |source, target| target.copy_from_slice(source),
            false => dispatch!(source, S => dispatch!(target, D => convert::<S, D>)),
        };
        Convert { source, target, run }
    }

    /// Whole elements of `source` (little-endian, at any alignment) to as many of `target`.
    pub fn run(&self, source: &[u8], target: &mut [u8]) {
        (self.run)(source, target);
    }

    /// Errors: the first value that the target dtype or the vocabulary does not have, with its index.
    pub fn check(&self, bytes: &[u8], bounds: &Bounds) -> Result<()> {
        let widens = widens(self.source, self.target);
        if widens && bounds.vocabulary.is_none() {
            return Ok(());
        }
        let found = dispatch!(self.source, S => first_bad::<S>(bytes, self.target, bounds));
        let Some((index, value)) = found else { return Ok(()) };
        Err(match bounds.vocabulary {
            Some(vocabulary) => Error::data_range(format!(
                "value {value} (element {index}) is not an index below {vocabulary}{}",
                bounds.ignore_index.map_or(String::new(), |ignored| format!(" nor the ignored {ignored}"))
            )),
            None => Error::data_range(format!(
                "value {value} (element {index}, {}) is no {} value",
                self.source.name(),
                self.target.name()
            )),
        })
    }
}

impl std::fmt::Debug for Convert {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} -> {}", self.source.name(), self.target.name())
    }
}

/// Smallest and largest integer, or for floats the range of integers that are all exact.
fn range(dtype: DType) -> (i128, i128) {
    match dtype {
        DType::Bool => (0, 1),
        DType::F16 => (-(1 << 11), 1 << 11),
        DType::BF16 => (-(1 << 8), 1 << 8),
        DType::F32 => (-(1 << 24), 1 << 24),
        DType::F64 => (-(1 << 53), 1 << 53),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => (0, (1 << (8 * dtype.bytes())) - 1),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
            let half = 1i128 << (8 * dtype.bytes() - 1);
            (-half, half - 1)
        }
    }
}

/// Whether every value of `source` has its place in `target`, by their types.
fn widens(source: DType, target: DType) -> bool {
    let ((low, high), (least, most)) = (range(source), range(target));
    match (source.is_float(), target.is_float()) {
        (true, false) => false,
        // Rounding is expected between floats; only f16 and bf16 differ in range from larger ones.
        (true, true) => target.bytes() >= source.bytes() && (target.bytes() > 2 || source == target),
        _ => source != DType::Bool && source == target || least <= low && high <= most,
    }
}

fn first_bad<S: Scalar>(bytes: &[u8], target: DType, bounds: &Bounds) -> Option<(usize, String)> {
    let (least, most) = range(target);
    let is_index = |value: i128| {
        bounds.vocabulary.is_none_or(|vocabulary| (0..i128::from(vocabulary)).contains(&value))
            || bounds.ignore_index.map(i128::from) == Some(value)
    };
    let fits = |value: S| match (S::IS_FLOAT, target.is_float()) {
        (true, true) => !value.to_f64().is_finite() || overflows_not(value.to_f64(), target),
        (true, false) => {
            let (float, integer) = (value.to_f64(), value.to_i128());
            float == integer as f64 && (least..=most).contains(&integer) && is_index(integer)
        }
        _ => (least..=most).contains(&value.to_i128()) && is_index(value.to_i128()),
    };
    let at = bytes.chunks_exact(S::BYTES).position(|element| !fits(S::read(element)))?;
    let value = S::read(&bytes[at * S::BYTES..(at + 1) * S::BYTES]);
    Some((at, if S::IS_FLOAT { value.to_f64().to_string() } else { value.to_i128().to_string() }))
}

fn overflows_not(value: f64, target: DType) -> bool {
    match target {
        DType::F16 => f16::from_f64(value).is_finite(),
        DType::BF16 => bf16::from_f64(value).is_finite(),
        DType::F32 => (value as f32).is_finite(),
        _ => true,
    }
}

/// How many of the values are not finite; of floats.
pub fn not_finite(dtype: DType, bytes: &[u8]) -> usize {
    /// Values whose exponent has all bits.
    fn count<const N: usize>(bytes: &[u8], is: impl Fn([u8; N]) -> bool) -> usize {
        bytes.as_chunks::<N>().0.iter().filter(|value| is(**value)).count()
    }
    match dtype {
        DType::F64 => count(bytes, |value| !f64::from_ne_bytes(value).is_finite()),
        DType::F32 => count(bytes, |value| !f32::from_ne_bytes(value).is_finite()),
        DType::F16 => count(bytes, |value| !f16::from_ne_bytes(value).is_finite()),
        DType::BF16 => count(bytes, |value| !bf16::from_ne_bytes(value).is_finite()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: DType, target: DType, bytes: &[u8], bounds: Bounds) -> String {
        let convert = Convert::new(source, target);
        match convert.check(bytes, &bounds) {
            Err(error) => error.report().what.clone(),
            Ok(()) => {
                let mut out = vec![0; bytes.len() / source.bytes() as usize * target.bytes() as usize];
                convert.run(bytes, &mut out);
                format!("{out:?}")
            }
        }
    }

    #[test]
    fn values_convert_or_are_named() {
        let none = Bounds::default();
        assert_eq!(check(DType::U16, DType::I64, &[1, 2], none), "[1, 2, 0, 0, 0, 0, 0, 0]");
        assert_eq!(check(DType::U8, DType::F32, &[3], none), format!("{:?}", 3f32.to_ne_bytes()));
        assert_eq!(check(DType::F64, DType::F32, &0.1f64.to_le_bytes(), none), format!("{:?}", 0.1f32.to_ne_bytes()));
        assert_eq!(
            check(DType::I64, DType::I32, &(1i64 << 40).to_le_bytes(), none),
            "value 1099511627776 (element 0, i64) is no i32 value"
        );
        assert_eq!(check(DType::F64, DType::F32, &1e300f64.to_le_bytes(), none).split(' ').next(), Some("value"));
        assert_eq!(check(DType::F32, DType::I64, &1.5f32.to_le_bytes(), none), "value 1.5 (element 0, f32) is no i64 value");
        assert_eq!(check(DType::F32, DType::I64, &f32::NAN.to_le_bytes(), none), "value NaN (element 0, f32) is no i64 value");
        assert_eq!(check(DType::U8, DType::Bool, &[0, 1, 2], none), "value 2 (element 2, u8) is no bool value");
        assert_eq!(
            check(DType::U64, DType::I64, &u64::MAX.to_le_bytes(), none).split(' ').nth(1),
            Some("18446744073709551615")
        );
        assert_eq!(check(DType::I32, DType::F32, &16_777_217i32.to_le_bytes(), none).split(' ').nth(1), Some("16777217"));
    }

    #[test]
    fn indices_stay_below_the_vocabulary() {
        let bounds = Bounds { vocabulary: Some(10), ignore_index: Some(-100) };
        assert_eq!(check(DType::I8, DType::I32, &[9, (-100i8) as u8], bounds).len(), "[9, 0, 0, 0, 156, 255, 255, 255]".len());
        assert_eq!(
            check(DType::I8, DType::I8, &[9, 10], bounds),
            "value 10 (element 1) is not an index below 10 nor the ignored -100"
        );
        let bounds = Bounds { ignore_index: None, ..bounds };
        assert_eq!(check(DType::I8, DType::I8, &[255], bounds), "value -1 (element 0) is not an index below 10");
    }

    #[test]
    fn every_pair_of_dtypes_keeps_small_integers() {
        for (source, target) in DType::ALL.into_iter().flat_map(|s| DType::ALL.into_iter().map(move |t| (s, t))) {
            let mut one = vec![0; source.bytes() as usize];
            Convert::new(DType::U8, source).run(&[1], &mut one);
            let mut there = vec![0; target.bytes() as usize];
            let convert = Convert::new(source, target);
            convert.check(&one, &Bounds::default()).unwrap();
            convert.run(&one, &mut there);
            let mut back = [0];
            Convert::new(target, DType::U8).run(&there, &mut back);
            assert_eq!(back, [1], "{convert:?}");
        }
    }
}
