//! Elementwise primitives: functions of one, two or three operands, comparisons and selection.

use super::{Body, LANES, Primitive, Shape, Ty, compiled, fetch, keep_loop, put};
use crate::cpu::isa::Isa;
use crate::library::math::Real;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::rounding::stochastic;
use std::marker::PhantomData;

/// A function of up to three elements.
pub(super) trait Function {
    type A: Copy;
    type B: Copy;
    type C: Copy;
    type R: Copy;
    fn apply(a: Self::A, b: Self::B, c: Self::C) -> Self::R;
    /// Whether `apply` is for such an operand. All others are for `rare`, one by one.
    #[inline(always)]
    fn is_common(_: Self::A) -> bool {
        true
    }
    #[inline(always)]
    fn rare(a: Self::A, b: Self::B, c: Self::C) -> Self::R {
        Self::apply(a, b, c)
    }
}

/// How many operands a function reads, and which of them are single.
struct Map<F, const OPERANDS: usize, const A1: bool, const B1: bool, const C1: bool>(PhantomData<F>);

impl<F: Function, const OPERANDS: usize, const A1: bool, const B1: bool, const C1: bool> Body for Map<F, OPERANDS, A1, B1, C1> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        let whole = n / LANES * LANES;
        // SAFETY: the primitive's contract; the short stretch at the end goes through padded copies.
        unsafe {
            let mut i = 0;
            while i < whole {
                keep_loop();
                let x = view::<F::A, A1>(a, i);
                let out = if OPERANDS == 1 {
                    lanes1::<F, A1>(x)
                } else if OPERANDS == 2 {
                    lanes2::<F, A1, B1>(x, view::<F::B, B1>(b, i))
                } else {
                    lanes3::<F, A1, B1, C1>(x, view::<F::B, B1>(b, i), view::<F::C, C1>(c, i))
                };
                *dst.cast::<F::R>().add(i).cast() = out;
                i += LANES;
            }
            if whole < n {
                let count = n - whole;
                let x = &fetch::<F::A, A1>(a, whole, count);
                let out = if OPERANDS == 1 {
                    lanes1::<F, A1>(x)
                } else if OPERANDS == 2 {
                    lanes2::<F, A1, B1>(x, &fetch::<F::B, B1>(b, whole, count))
                } else {
                    lanes3::<F, A1, B1, C1>(x, &fetch::<F::B, B1>(b, whole, count), &fetch::<F::C, C1>(c, whole, count))
                };
                put(dst, whole, count, &out);
            }
        }
    }
}

/// The operand's elements from `i` on, or its single one at the front.
///
/// # Safety
/// As `Primitive`; a single operand's array is read at its front only.
#[inline(always)]
unsafe fn view<'a, T, const SINGLE: bool>(p: *const u8, i: usize) -> &'a [T; LANES] {
    // SAFETY: the caller's.
    unsafe { &*p.cast::<T>().add(if SINGLE { 0 } else { i }).cast::<[T; LANES]>() }
}

// Plain loops over whole arrays: what is not inlined here would be compiled for the baseline.

#[inline(always)]
fn lanes1<F: Function, const A1: bool>(x: &[F::A; LANES]) -> [F::R; LANES] {
    // SAFETY: zero is a value of the operands' types, all plain numbers; the function has no second and third.
    let (y, z) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: as above.
    let mut out = unsafe { [std::mem::zeroed(); LANES] };
    for l in 0..LANES {
        out[l] = F::apply(x[if A1 { 0 } else { l }], y, z);
    }
    if !x.iter().fold(true, |all, x| all & F::is_common(*x)) {
        for l in (0..LANES).filter(|l| !F::is_common(x[*l])) {
            out[l] = F::rare(x[l], y, z);
        }
    }
    out
}

#[inline(always)]
fn lanes2<F: Function, const A1: bool, const B1: bool>(x: &[F::A; LANES], y: &[F::B; LANES]) -> [F::R; LANES] {
    // SAFETY: as in `lanes1`.
    let (z, mut out) = unsafe { (std::mem::zeroed(), [std::mem::zeroed(); LANES]) };
    for l in 0..LANES {
        out[l] = F::apply(x[if A1 { 0 } else { l }], y[if B1 { 0 } else { l }], z);
    }
    out
}

#[inline(always)]
fn lanes3<F: Function, const A1: bool, const B1: bool, const C1: bool>(
    x: &[F::A; LANES],
    y: &[F::B; LANES],
    z: &[F::C; LANES],
) -> [F::R; LANES] {
    // SAFETY: as in `lanes1`.
    let mut out = unsafe { [std::mem::zeroed(); LANES] };
    for l in 0..LANES {
        out[l] = F::apply(x[if A1 { 0 } else { l }], y[if B1 { 0 } else { l }], z[if C1 { 0 } else { l }]);
    }
    out
}

pub(super) fn one<F: Function>(isa: Isa) -> Primitive {
    compiled::<Map<F, 1, false, true, true>>(isa)
}

fn two<F: Function>(isa: Isa, shapes: [Shape; 2]) -> Primitive {
    match shapes {
        [Shape::Tile, Shape::Tile] => compiled::<Map<F, 2, false, false, true>>(isa),
        [Shape::Tile, Shape::Single] => compiled::<Map<F, 2, false, true, true>>(isa),
        [Shape::Single, _] => compiled::<Map<F, 2, true, false, true>>(isa),
    }
}

fn three<F: Function>(isa: Isa, shapes: [Shape; 3]) -> Primitive {
    let single = shapes.map(|shape| shape == Shape::Single);
    match single {
        [false, false, false] => compiled::<Map<F, 3, false, false, false>>(isa),
        [false, false, true] => compiled::<Map<F, 3, false, false, true>>(isa),
        [false, true, false] => compiled::<Map<F, 3, false, true, false>>(isa),
        [false, true, true] => compiled::<Map<F, 3, false, true, true>>(isa),
        [true, false, false] => compiled::<Map<F, 3, true, false, false>>(isa),
        [true, false, true] => compiled::<Map<F, 3, true, false, true>>(isa),
        [true, true, _] => compiled::<Map<F, 3, true, true, false>>(isa),
    }
}

macro_rules! functions {
    ($($name:ident<$t:ident $(: $bound:ident)?>($x:ident: $a:ty, $y:ident: $b:ty, $z:ident: $c:ty) -> $r:ty = $body:expr;)*) => {$(
        struct $name<$t = ()>(PhantomData<$t>);
        impl<$t: Copy $(+ $bound)?> Function for $name<$t> {
            type A = $a;
            type B = $b;
            type C = $c;
            type R = $r;
            #[inline(always)]
            fn apply($x: $a, $y: $b, $z: $c) -> $r {
                $body
            }
        }
    )*};
}

macro_rules! circular {
    ($($name:ident, $common:ident, $rare:expr;)*) => {$(
        struct $name<T>(PhantomData<T>);
        impl<T: Float> Function for $name<T> {
            type A = T;
            type B = u8;
            type C = u8;
            type R = T;
            #[inline(always)]
            fn apply(x: T, _: u8, _: u8) -> T {
                Real::$common(x)
            }
            #[inline(always)]
            fn is_common(x: T) -> bool {
                x.is_moderate()
            }
            #[inline(always)]
            fn rare(x: T, _: u8, _: u8) -> T {
                x.map($rare)
            }
        }
    )*};
}
circular! {
    Sin, sin, f64::sin;
    Cos, cos, f64::cos;
}

/// What arithmetic needs of floats beyond `Real`.
trait Float: Real + std::ops::Neg<Output = Self> + Number {
    fn map(self, f: fn(f64) -> f64) -> Self;
    fn sqrt(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    fn round_even(self) -> Self;
    fn is_infinite(self) -> bool;
    fn powf(self, y: Self) -> Self;
}

/// Arithmetic of floats, and of integers that wraps.
trait Number: Copy + PartialOrd {
    fn zero() -> Self;
    fn one() -> Self;
    fn add(self, y: Self) -> Self;
    fn sub(self, y: Self) -> Self;
    fn mul(self, y: Self) -> Self;
    fn div(self, y: Self) -> Self;
    fn rem(self, y: Self) -> Self;
    fn negate(self) -> Self;
    fn absolute(self) -> Self;
}

macro_rules! float {
    ($t:ty) => {
        impl Float for $t {
            #[inline(always)]
            fn map(self, f: fn(f64) -> f64) -> Self {
                f(f64::from(self)) as $t
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn floor(self) -> Self {
                self.floor()
            }
            #[inline(always)]
            fn ceil(self) -> Self {
                self.ceil()
            }
            #[inline(always)]
            fn round_even(self) -> Self {
                self.round_ties_even()
            }
            #[inline(always)]
            fn is_infinite(self) -> bool {
                self.is_infinite()
            }
            #[inline(always)]
            fn powf(self, y: Self) -> Self {
                if y == 2.0 { self * self } else { self.powf(y) }
            }
        }
        number!($t, 0.0, 1.0, |x, y| x + y, |x, y| x - y, |x, y| x * y, |x, y| x / y, |x, y| x % y, |x| -x, |x| x.abs());
    };
}
macro_rules! number {
    ($t:ty, $zero:expr, $one:expr, $add:expr, $sub:expr, $mul:expr, $div:expr, $rem:expr, $neg:expr, $abs:expr) => {
        impl Number for $t {
            #[inline(always)]
            fn zero() -> Self {
                $zero
            }
            #[inline(always)]
            fn one() -> Self {
                $one
            }
            #[inline(always)]
            fn add(self, y: Self) -> Self {
                let f: fn($t, $t) -> $t = $add;
                f(self, y)
            }
            #[inline(always)]
            fn sub(self, y: Self) -> Self {
                let f: fn($t, $t) -> $t = $sub;
                f(self, y)
            }
            #[inline(always)]
            fn mul(self, y: Self) -> Self {
                let f: fn($t, $t) -> $t = $mul;
                f(self, y)
            }
            #[inline(always)]
            fn div(self, y: Self) -> Self {
                let f: fn($t, $t) -> $t = $div;
                f(self, y)
            }
            #[inline(always)]
            fn rem(self, y: Self) -> Self {
                let f: fn($t, $t) -> $t = $rem;
                f(self, y)
            }
            #[inline(always)]
            fn negate(self) -> Self {
                let f: fn($t) -> $t = $neg;
                f(self)
            }
            #[inline(always)]
            fn absolute(self) -> Self {
                let f: fn($t) -> $t = $abs;
                f(self)
            }
        }
    };
}
float!(f32);
float!(f64);
number!(
    i64,
    0,
    1,
    |x, y| x.wrapping_add(y),
    |x, y| x.wrapping_sub(y),
    |x, y| x.wrapping_mul(y),
    |x, y| if y == 0 { 0 } else { x.wrapping_div(y) },
    |x, y| if y == 0 { 0 } else { x.wrapping_rem(y) },
    |x| x.wrapping_neg(),
    |x| x.wrapping_abs()
);

/// The larger (smaller) of two; NaN if one is.
#[inline(always)]
fn larger<T: PartialOrd + Copy>(x: T, y: T) -> T {
    // A NaN in x fails `x >= y` but not `x == x`'s negation: keep it; a NaN in y fails both comparisons and is taken.
    if x > y || x.partial_cmp(&x).is_none() { x } else { y }
}
#[inline(always)]
fn smaller<T: PartialOrd + Copy>(x: T, y: T) -> T {
    if x < y || x.partial_cmp(&x).is_none() { x } else { y }
}

functions! {
    Negate<T: Number>(x: T, _y: u8, _z: u8) -> T = x.negate();
    Absolute<T: Number>(x: T, _y: u8, _z: u8) -> T = x.absolute();
    Sign<T: Number>(x: T, _y: u8, _z: u8) -> T = {
        let sign = if x < T::zero() { T::one().negate() } else { x };
        if x > T::zero() { T::one() } else { sign }
    };
    Exp<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::exp(x);
    Expm1<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::expm1(x);
    Log<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::log(x);
    Log1p<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::log1p(x);
    Sqrt<T: Float>(x: T, _y: u8, _z: u8) -> T = Float::sqrt(x);
    Rsqrt<T: Float>(x: T, _y: u8, _z: u8) -> T = T::one().div(Float::sqrt(x));
    Tanh<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::tanh(x);
    Logistic<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::logistic(x);
    Erf<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::erf(x);
    Gelu<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::gelu(x);
    GeluSlope<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::gelu_slope(x);
    GeluTanh<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::gelu_tanh(x);
    GeluTanhSlope<T: Float>(x: T, _y: u8, _z: u8) -> T = Real::gelu_tanh_slope(x);
    Tan<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::tan);
    Asin<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::asin);
    Acos<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::acos);
    Atan<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::atan);
    Sinh<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::sinh);
    Cosh<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::cosh);
    Asinh<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::asinh);
    Acosh<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::acosh);
    Atanh<T: Float>(x: T, _y: u8, _z: u8) -> T = x.map(f64::atanh);
    Floor<T: Float>(x: T, _y: u8, _z: u8) -> T = Float::floor(x);
    Ceil<T: Float>(x: T, _y: u8, _z: u8) -> T = Float::ceil(x);
    RoundEven<T: Float>(x: T, _y: u8, _z: u8) -> T = Float::round_even(x);
    IsNan<T: Float>(x: T, _y: u8, _z: u8) -> u8 = u8::from(x.partial_cmp(&x).is_none());
    IsInf<T: Float>(x: T, _y: u8, _z: u8) -> u8 = u8::from(x.is_infinite());
    FlipBool<T>(x: u8, _y: PhantomData<T>, _z: u8) -> u8 = x ^ 1;
    FlipInt<T>(x: i64, _y: PhantomData<T>, _z: u8) -> i64 = !x;
    Add<T: Number>(x: T, y: T, _z: u8) -> T = x.add(y);
    Sub<T: Number>(x: T, y: T, _z: u8) -> T = x.sub(y);
    Mul<T: Number>(x: T, y: T, _z: u8) -> T = x.mul(y);
    Div<T: Number>(x: T, y: T, _z: u8) -> T = x.div(y);
    Rem<T: Number>(x: T, y: T, _z: u8) -> T = x.rem(y);
    Max<T: Number>(x: T, y: T, _z: u8) -> T = larger(x, y);
    Min<T: Number>(x: T, y: T, _z: u8) -> T = smaller(x, y);
    Pow<T: Float>(x: T, y: T, _z: u8) -> T = Float::powf(x, y);
    RoundStochastic<T>(x: f32, y: f32, _z: PhantomData<T>) -> f32 = stochastic(x, y);
    PowInt<T>(x: i64, y: i64, _z: PhantomData<T>) -> i64 = power(x, y);
    AndBool<T>(x: u8, y: u8, _z: PhantomData<T>) -> u8 = x & y;
    OrBool<T>(x: u8, y: u8, _z: PhantomData<T>) -> u8 = x | y;
    XorBool<T>(x: u8, y: u8, _z: PhantomData<T>) -> u8 = x ^ y;
    AndInt<T>(x: i64, y: i64, _z: PhantomData<T>) -> i64 = x & y;
    OrInt<T>(x: i64, y: i64, _z: PhantomData<T>) -> i64 = x | y;
    XorInt<T>(x: i64, y: i64, _z: PhantomData<T>) -> i64 = x ^ y;
    Equal<T: PartialOrd>(x: T, y: T, _z: u8) -> u8 = u8::from(x == y);
    NotEqual<T: PartialOrd>(x: T, y: T, _z: u8) -> u8 = u8::from(x != y);
    Less<T: PartialOrd>(x: T, y: T, _z: u8) -> u8 = u8::from(x < y);
    LessEqual<T: PartialOrd>(x: T, y: T, _z: u8) -> u8 = u8::from(x <= y);
    Select<T>(condition: u8, yes: T, no: T) -> T = if condition != 0 { yes } else { no };
    MulAdd<T: Number>(x: T, y: T, z: T) -> T = x.mul(y).add(z);
    MulSub<T: Number>(x: T, y: T, z: T) -> T = x.mul(y).sub(z);
    SubMul<T: Number>(x: T, y: T, z: T) -> T = z.sub(x.mul(y));
    AddScaled<T: Number>(x: T, y: T, z: [T; 2]) -> T = x.mul(z[0]).add(y.mul(z[1]));
    SubScaled<T: Number>(x: T, y: T, z: [T; 2]) -> T = x.mul(z[0]).sub(y.mul(z[1]));
}

macro_rules! by_type {
    ($ty:expr, $function:ident, $call:ident($($argument:expr),*)) => {
        match $ty {
            Ty::F32 => $call::<$function<f32>>($($argument),*),
            Ty::F64 => $call::<$function<f64>>($($argument),*),
            Ty::I64 => $call::<$function<i64>>($($argument),*),
            Ty::Bool => panic!("no arithmetic on bool"),
        }
    };
}
macro_rules! by_float {
    ($ty:expr, $function:ident, $call:ident($($argument:expr),*)) => {
        match $ty {
            Ty::F32 => $call::<$function<f32>>($($argument),*),
            Ty::F64 => $call::<$function<f64>>($($argument),*),
            _ => panic!("a function of floats"),
        }
    };
}

/// dst = op(a).
pub fn unary(isa: Isa, op: UnaryOp, ty: Ty) -> Primitive {
    match op {
        UnaryOp::Neg => by_type!(ty, Negate, one(isa)),
        UnaryOp::Abs => by_type!(ty, Absolute, one(isa)),
        UnaryOp::Sign => by_type!(ty, Sign, one(isa)),
        UnaryOp::Exp => by_float!(ty, Exp, one(isa)),
        UnaryOp::Expm1 => by_float!(ty, Expm1, one(isa)),
        UnaryOp::Log => by_float!(ty, Log, one(isa)),
        UnaryOp::Log1p => by_float!(ty, Log1p, one(isa)),
        UnaryOp::Sqrt => by_float!(ty, Sqrt, one(isa)),
        UnaryOp::Rsqrt => by_float!(ty, Rsqrt, one(isa)),
        UnaryOp::Tanh => by_float!(ty, Tanh, one(isa)),
        UnaryOp::Logistic => by_float!(ty, Logistic, one(isa)),
        UnaryOp::Erf => by_float!(ty, Erf, one(isa)),
        UnaryOp::Gelu => by_float!(ty, Gelu, one(isa)),
        UnaryOp::GeluSlope => by_float!(ty, GeluSlope, one(isa)),
        UnaryOp::GeluTanh => by_float!(ty, GeluTanh, one(isa)),
        UnaryOp::GeluTanhSlope => by_float!(ty, GeluTanhSlope, one(isa)),
        UnaryOp::Sin => by_float!(ty, Sin, one(isa)),
        UnaryOp::Cos => by_float!(ty, Cos, one(isa)),
        UnaryOp::Tan => by_float!(ty, Tan, one(isa)),
        UnaryOp::Asin => by_float!(ty, Asin, one(isa)),
        UnaryOp::Acos => by_float!(ty, Acos, one(isa)),
        UnaryOp::Atan => by_float!(ty, Atan, one(isa)),
        UnaryOp::Sinh => by_float!(ty, Sinh, one(isa)),
        UnaryOp::Cosh => by_float!(ty, Cosh, one(isa)),
        UnaryOp::Asinh => by_float!(ty, Asinh, one(isa)),
        UnaryOp::Acosh => by_float!(ty, Acosh, one(isa)),
        UnaryOp::Atanh => by_float!(ty, Atanh, one(isa)),
        UnaryOp::Floor => by_float!(ty, Floor, one(isa)),
        UnaryOp::Ceil => by_float!(ty, Ceil, one(isa)),
        UnaryOp::RoundEven => by_float!(ty, RoundEven, one(isa)),
        UnaryOp::Not if ty == Ty::Bool => one::<FlipBool>(isa),
        UnaryOp::Not => one::<FlipInt>(isa),
        UnaryOp::IsNan => by_float!(ty, IsNan, one(isa)),
        UnaryOp::IsInf => by_float!(ty, IsInf, one(isa)),
    }
}

/// dst = op(a, b); not both operands may be single.
pub fn binary(isa: Isa, op: BinaryOp, ty: Ty, shapes: [Shape; 2]) -> Primitive {
    let logic = ty == Ty::Bool;
    match op {
        BinaryOp::Add | BinaryOp::Max | BinaryOp::Or if logic => two::<OrBool>(isa, shapes),
        BinaryOp::Mul | BinaryOp::Min | BinaryOp::And if logic => two::<AndBool>(isa, shapes),
        BinaryOp::Xor if logic => two::<XorBool>(isa, shapes),
        BinaryOp::And => two::<AndInt>(isa, shapes),
        BinaryOp::Or => two::<OrInt>(isa, shapes),
        BinaryOp::Xor => two::<XorInt>(isa, shapes),
        BinaryOp::Add => by_type!(ty, Add, two(isa, shapes)),
        BinaryOp::Sub => by_type!(ty, Sub, two(isa, shapes)),
        BinaryOp::Mul => by_type!(ty, Mul, two(isa, shapes)),
        BinaryOp::Div => by_type!(ty, Div, two(isa, shapes)),
        BinaryOp::Rem => by_type!(ty, Rem, two(isa, shapes)),
        BinaryOp::Max => by_type!(ty, Max, two(isa, shapes)),
        BinaryOp::Min => by_type!(ty, Min, two(isa, shapes)),
        BinaryOp::Pow if ty == Ty::I64 => two::<PowInt>(isa, shapes),
        BinaryOp::Pow => by_float!(ty, Pow, two(isa, shapes)),
        BinaryOp::RoundStochastic => two::<RoundStochastic>(isa, shapes),
    }
}

/// dst = op(a, b) as bool; not both operands may be single.
pub fn compare(isa: Isa, op: CompareOp, ty: Ty, shapes: [Shape; 2]) -> Primitive {
    macro_rules! all {
        ($function:ident, $shapes:expr) => {
            match ty {
                Ty::F32 => two::<$function<f32>>(isa, $shapes),
                Ty::F64 => two::<$function<f64>>(isa, $shapes),
                Ty::I64 => two::<$function<i64>>(isa, $shapes),
                Ty::Bool => two::<$function<u8>>(isa, $shapes),
            }
        };
    }
    match op {
        CompareOp::Eq => all!(Equal, shapes),
        CompareOp::Ne => all!(NotEqual, shapes),
        CompareOp::Lt => all!(Less, shapes),
        CompareOp::Le => all!(LessEqual, shapes),
        CompareOp::Gt | CompareOp::Ge => panic!("written as `lt` and `le` with operands exchanged"),
    }
}

/// dst = a (bool) ? b : c; not all operands may be single.
pub fn select(isa: Isa, ty: Ty, shapes: [Shape; 3]) -> Primitive {
    match ty {
        Ty::F32 => three::<Select<f32>>(isa, shapes),
        Ty::F64 => three::<Select<f64>>(isa, shapes),
        Ty::I64 => three::<Select<i64>>(isa, shapes),
        Ty::Bool => three::<Select<u8>>(isa, shapes),
    }
}

/// What is done with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    /// a * b + c
    Added,
    /// a * b - c
    Less,
    /// c - a * b
    Subtracted,
}

/// dst = a * b with c, rounded twice; not all operands may be single.
pub fn with_product(isa: Isa, ty: Ty, term: Term, shapes: [Shape; 3]) -> Primitive {
    match term {
        Term::Added => by_float!(ty, MulAdd, three(isa, shapes)),
        Term::Less => by_float!(ty, MulSub, three(isa, shapes)),
        Term::Subtracted => by_float!(ty, SubMul, three(isa, shapes)),
    }
}

/// dst = a * c[0] ± b * c[1], each product rounded; a and b are tiles.
pub fn scaled(isa: Isa, ty: Ty, subtracts: bool) -> Primitive {
    let shapes = [Shape::Tile, Shape::Tile, Shape::Single];
    if subtracts { by_float!(ty, SubScaled, three(isa, shapes)) } else { by_float!(ty, AddScaled, three(isa, shapes)) }
}

/// xʸ, wrapping; 1 / xⁿ truncated where y is negative, 0 for x = 0.
pub(crate) fn power(x: i64, y: i64) -> i64 {
    if y < 0 {
        return match x {
            1 => 1,
            -1 => 1 - 2 * (y & 1),
            _ => 0,
        };
    }
    let (mut product, mut base, mut rest) = (1_i64, x, y);
    while rest > 0 {
        if rest & 1 == 1 {
            product = product.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        rest >>= 1;
    }
    product
}
