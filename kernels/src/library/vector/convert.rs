//! Conversions between the types that elements are stored and computed in.

use super::arithmetic::{Function, one};
use super::{Primitive, Ty};
use crate::cpu::isa::Isa;
use dcc_program::DType;
use std::marker::PhantomData;

/// Conversion from one stored or computed type to another.
struct Convert<A, R>(PhantomData<(A, R)>);

macro_rules! convert {
    ($($a:ty => $r:ty : |$x:ident| $body:expr;)*) => {$(
        impl Function for Convert<$a, $r> {
            type A = $a;
            type B = u8;
            type C = u8;
            type R = $r;
            #[inline(always)]
            fn apply($x: $a, _: u8, _: u8) -> $r {
                $body
            }
        }
    )*};
}

/// A bool as it is stored.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Flag(u8);
/// Stored half floats.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16(u16);
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

convert! {
    i8 => i64: |x| i64::from(x); i16 => i64: |x| i64::from(x); i32 => i64: |x| i64::from(x);
    u8 => i64: |x| i64::from(x); u16 => i64: |x| i64::from(x); u32 => i64: |x| i64::from(x);
    i64 => i8: |x| x as i8; i64 => i16: |x| x as i16; i64 => i32: |x| x as i32;
    i64 => u8: |x| x as u8; i64 => u16: |x| x as u16; i64 => u32: |x| x as u32;
    F16 => f32: |x| from_f16(x.0); Bf16 => f32: |x| f32::from_bits(u32::from(x.0) << 16);
    f32 => F16: |x| F16(to_f16(x)); f32 => Bf16: |x| Bf16(to_bf16(x));
    f32 => f64: |x| f64::from(x); f64 => f32: |x| x as f32;
    i64 => f32: |x| x as f32; i64 => f64: |x| x as f64;
    f32 => i64: |x| x as i64; f64 => i64: |x| x as i64;
    Flag => i64: |x| i64::from(x.0); Flag => f32: |x| f32::from(x.0); Flag => f64: |x| f64::from(x.0);
    f32 => Flag: |x| Flag(u8::from(x != 0.0)); f64 => Flag: |x| Flag(u8::from(x != 0.0)); i64 => Flag: |x| Flag(u8::from(x != 0));
}

/// dst = a, from the stored type to the type it is computed in; `None` where they are the same.
pub fn widen(isa: Isa, stored: DType) -> Option<Primitive> {
    Some(match stored {
        DType::Bool | DType::I64 | DType::U64 | DType::F32 | DType::F64 => return None,
        DType::I8 => one::<Convert<i8, i64>>(isa),
        DType::I16 => one::<Convert<i16, i64>>(isa),
        DType::I32 => one::<Convert<i32, i64>>(isa),
        DType::U8 => one::<Convert<u8, i64>>(isa),
        DType::U16 => one::<Convert<u16, i64>>(isa),
        DType::U32 => one::<Convert<u32, i64>>(isa),
        DType::F16 => one::<Convert<F16, f32>>(isa),
        DType::BF16 => one::<Convert<Bf16, f32>>(isa),
    })
}

/// dst = a, from the type it is computed in to the stored type; integers wrap, floats round to nearest even.
pub fn narrow(isa: Isa, stored: DType) -> Option<Primitive> {
    Some(match stored {
        DType::Bool | DType::I64 | DType::U64 | DType::F32 | DType::F64 => return None,
        DType::I8 => one::<Convert<i64, i8>>(isa),
        DType::I16 => one::<Convert<i64, i16>>(isa),
        DType::I32 => one::<Convert<i64, i32>>(isa),
        DType::U8 => one::<Convert<i64, u8>>(isa),
        DType::U16 => one::<Convert<i64, u16>>(isa),
        DType::U32 => one::<Convert<i64, u32>>(isa),
        DType::F16 => one::<Convert<f32, F16>>(isa),
        DType::BF16 => one::<Convert<f32, Bf16>>(isa),
    })
}

/// dst = a between computed types; `None` where they are the same.
pub fn cast(isa: Isa, from: Ty, to: Ty) -> Option<Primitive> {
    Some(match (from, to) {
        (Ty::F32, Ty::F64) => one::<Convert<f32, f64>>(isa),
        (Ty::F64, Ty::F32) => one::<Convert<f64, f32>>(isa),
        (Ty::F32, Ty::I64) => one::<Convert<f32, i64>>(isa),
        (Ty::F64, Ty::I64) => one::<Convert<f64, i64>>(isa),
        (Ty::I64, Ty::F32) => one::<Convert<i64, f32>>(isa),
        (Ty::I64, Ty::F64) => one::<Convert<i64, f64>>(isa),
        (Ty::F32, Ty::Bool) => one::<Convert<f32, Flag>>(isa),
        (Ty::F64, Ty::Bool) => one::<Convert<f64, Flag>>(isa),
        (Ty::I64, Ty::Bool) => one::<Convert<i64, Flag>>(isa),
        (Ty::Bool, Ty::F32) => one::<Convert<Flag, f32>>(isa),
        (Ty::Bool, Ty::F64) => one::<Convert<Flag, f64>>(isa),
        (Ty::Bool, Ty::I64) => one::<Convert<Flag, i64>>(isa),
        _ => return None,
    })
}

/// IEEE half to single; subnormals by the exact product with 2^-24.
#[inline(always)]
fn from_f16(x: u16) -> f32 {
    let (sign, exponent, mantissa) = (u32::from(x & 0x8000) << 16, u32::from(x >> 10 & 31), u32::from(x & 1023));
    let special = f32::from_bits(0x7f80_0000 | mantissa << 13);
    let normal = f32::from_bits((exponent + 112) << 23 | mantissa << 13);
    let subnormal = mantissa as f32 * 5.960_464_5e-8;
    let magnitude = if exponent == 31 {
        special
    } else if exponent == 0 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// Single to IEEE half, to nearest even.
#[inline(always)]
fn to_f16(x: f32) -> u16 {
    let (sign, bits) = ((x.to_bits() >> 16 & 0x8000) as u16, x.to_bits() & 0x7fff_ffff);
    let rounded = bits.wrapping_add(0xfff + (bits >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Below 2^-14 the sum with 0.5 leaves the half's subnormal digits, rounded, in the low bits.
    let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let magnitude = if bits > 0x7f80_0000 {
        0x7e00
    } else if bits >= 0x477f_f000 {
        0x7c00
    } else if bits < 0x3880_0000 {
        subnormal
    } else {
        rounded
    };
    sign | magnitude as u16
}

/// A value as a half float holds it.
pub(crate) fn rounded(half: DType, x: f32) -> f32 {
    match half {
        DType::F16 => from_f16(to_f16(x)),
        DType::BF16 => f32::from_bits(u32::from(to_bf16(x)) << 16),
        _ => x,
    }
}

#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { (bits >> 16 | 0x40) as u16 } else { rounded as u16 }
}
