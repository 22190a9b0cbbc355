//! Elementwise reductions on bytes: `into[i] = into[i] ∘ from[i]`, in native byte order, at any alignment.
//!
//! f16 and bf16 are added in f32 and rounded after every addition, in the same fixed order as all others.

use super::{DType, Reduce};
use half::{bf16, f16};

/// Reduces `from` into `into`; both hold whole elements of `dtype`.
pub fn accumulate(reduce: Reduce, dtype: DType, into: &mut [u8], from: &[u8]) {
    match dtype {
        DType::Bool => bools(reduce, into, from),
        DType::U8 => integers(reduce, into, from, u8::from_ne_bytes, u8::to_ne_bytes, u8::wrapping_add, u8::wrapping_mul),
        DType::I8 => integers(reduce, into, from, i8::from_ne_bytes, i8::to_ne_bytes, i8::wrapping_add, i8::wrapping_mul),
        DType::U16 => integers(reduce, into, from, u16::from_ne_bytes, u16::to_ne_bytes, u16::wrapping_add, u16::wrapping_mul),
        DType::I16 => integers(reduce, into, from, i16::from_ne_bytes, i16::to_ne_bytes, i16::wrapping_add, i16::wrapping_mul),
        DType::U32 => integers(reduce, into, from, u32::from_ne_bytes, u32::to_ne_bytes, u32::wrapping_add, u32::wrapping_mul),
        DType::I32 => integers(reduce, into, from, i32::from_ne_bytes, i32::to_ne_bytes, i32::wrapping_add, i32::wrapping_mul),
        DType::U64 => integers(reduce, into, from, u64::from_ne_bytes, u64::to_ne_bytes, u64::wrapping_add, u64::wrapping_mul),
        DType::I64 => integers(reduce, into, from, i64::from_ne_bytes, i64::to_ne_bytes, i64::wrapping_add, i64::wrapping_mul),
        DType::F16 => floats(reduce, into, from, |b| f16::from_ne_bytes(b).to_f32(), |x: f32| f16::from_f32(x).to_ne_bytes()),
        DType::BF16 => {
            floats(reduce, into, from, |b| bf16::from_ne_bytes(b).to_f32(), |x: f32| bf16::from_f32(x).to_ne_bytes())
        }
        DType::F32 => floats(reduce, into, from, f32::from_ne_bytes, f32::to_ne_bytes),
        DType::F64 => floats(reduce, into, from, f64::from_ne_bytes, f64::to_ne_bytes),
    }
}

/// A bool sum is `or`, a product `and`.
fn bools(reduce: Reduce, into: &mut [u8], from: &[u8]) {
    match reduce {
        Reduce::Sum | Reduce::Max => each(into, from, |[a]: [u8; 1], [b]| [a | b]),
        Reduce::Min | Reduce::Prod => each(into, from, |[a]: [u8; 1], [b]| [a & b]),
    }
}

fn integers<const N: usize, T: Ord>(
    reduce: Reduce,
    into: &mut [u8],
    from: &[u8],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
    add: impl Fn(T, T) -> T,
    multiply: impl Fn(T, T) -> T,
) {
    match reduce {
        Reduce::Sum => each(into, from, |a, b| write(add(read(a), read(b)))),
        Reduce::Prod => each(into, from, |a, b| write(multiply(read(a), read(b)))),
        Reduce::Max => each(into, from, |a, b| write(read(a).max(read(b)))),
        Reduce::Min => each(into, from, |a, b| write(read(a).min(read(b)))),
    }
}

/// Max and min keep a NaN, as the ops of the same names do.
fn floats<const N: usize, T>(
    reduce: Reduce,
    into: &mut [u8],
    from: &[u8],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
) where
    T: Copy + PartialOrd + std::ops::Add<Output = T> + std::ops::Mul<Output = T>,
{
    let is_nan = |x: T| x.partial_cmp(&x).is_none();
    match reduce {
        Reduce::Sum => each(into, from, |a, b| write(read(a) + read(b))),
        Reduce::Prod => each(into, from, |a, b| write(read(a) * read(b))),
        Reduce::Max => each(into, from, |a, b| {
            let (x, y) = (read(a), read(b));
            write(if x >= y || is_nan(x) { x } else { y })
        }),
        Reduce::Min => each(into, from, |a, b| {
            let (x, y) = (read(a), read(b));
            write(if x <= y || is_nan(x) { x } else { y })
        }),
    }
}

fn each<const N: usize>(into: &mut [u8], from: &[u8], combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (into, _) = into.as_chunks_mut::<N>();
    let (from, _) = from.as_chunks::<N>();
    for (a, &b) in into.iter_mut().zip(from) {
        *a = combine(*a, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced(reduce: Reduce, a: &[f32], b: &[f32]) -> Vec<f32> {
        let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        let mut into = bytes(a);
        accumulate(reduce, DType::F32, &mut into, &bytes(b));
        into.as_chunks::<4>().0.iter().map(|&x| f32::from_ne_bytes(x)).collect()
    }

    #[test]
    fn reduces_floats_and_keeps_nan() {
        assert_eq!(reduced(Reduce::Sum, &[1.0, 2.0], &[0.5, -2.0]), [1.5, 0.0]);
        assert_eq!(reduced(Reduce::Prod, &[3.0], &[0.5]), [1.5]);
        assert_eq!(reduced(Reduce::Max, &[1.0, -2.0], &[0.5, 2.0]), [1.0, 2.0]);
        assert_eq!(reduced(Reduce::Min, &[1.0, -2.0], &[0.5, 2.0]), [0.5, -2.0]);
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            assert!(reduced(reduce, &[f32::NAN, 1.0], &[1.0, f32::NAN]).iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn integers_wrap_and_bools_are_logical() {
        let mut into = i32::MAX.to_ne_bytes();
        accumulate(Reduce::Sum, DType::I32, &mut into, &1i32.to_ne_bytes());
        assert_eq!(i32::from_ne_bytes(into), i32::MIN);
        let mut flags = [0, 1, 1];
        accumulate(Reduce::Sum, DType::Bool, &mut flags, &[1, 1, 0]);
        assert_eq!(flags, [1, 1, 1]);
        accumulate(Reduce::Min, DType::Bool, &mut flags, &[1, 0, 1]);
        assert_eq!(flags, [1, 0, 1]);
    }
}
