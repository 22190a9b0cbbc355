//! Copies of rows, and zeros.

use super::{THREADS, entry, source};
use crate::cuda::Source;
use crate::cuda::transfer::{UNITS, choose_copy};

/// `count` rows of `bytes` each. Operands begin with their first row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub count: usize,
    pub bytes: usize,
    pub from_stride: usize,
    pub to_stride: usize,
    /// A power of two that divides both operands' addresses.
    pub alignment: usize,
}

/// The widest type of which all these bytes are a multiple, and its bytes.
fn word(multiples: &[usize]) -> (&'static str, usize) {
    let (bytes, word) = UNITS[choose_copy(multiples).entry];
    (word, bytes)
}

/// The rows, copied. Errors: more than a grid has threads.
pub fn copy(rows: &Rows, name: &str) -> Result<Source, String> {
    let Rows { count, bytes, from_stride, to_stride, alignment } = *rows;
    let strides = if count > 1 { [from_stride, to_stride] } else { [0; 2] };
    let (ty, width) = word(&[bytes, strides[0], strides[1], alignment]);
    let words = bytes / width;
    let [from, to] = strides.map(|stride| stride / width);
    let body = format!(
        "    const long long n = (long long)blockIdx.x * {THREADS} + threadIdx.x;\n    if (n >= {}LL) return;\n    \
         const long long row = n / {words}, at = n % {words};\n    y[row * {to} + at] = x[row * {from} + at];\n",
        count * words
    );
    let blocks = (count * words).div_ceil(THREADS);
    let launched = if blocks == 0 {
        Vec::new()
    } else {
        vec![entry(name, &format!("const {ty}* x, {ty}* y"), &body, ([blocks, 1], THREADS, 0))?]
    };
    let reach = |stride: usize| if count == 0 { 0 } else { (count - 1) * stride + bytes };
    Ok(source(String::new(), launched, 0, vec![reach(strides[0]), reach(strides[1])]))
}

/// `bytes` zeros at an address that `alignment` divides. Errors: more than a grid has threads.
pub fn zero(bytes: usize, alignment: usize, name: &str) -> Result<Source, String> {
    let (ty, width) = word(&[bytes, alignment]);
    let words = bytes / width;
    let body = format!(
        "    const long long n = (long long)blockIdx.x * {THREADS} + threadIdx.x;\n    if (n < {words}LL) y[n] = {{}};\n"
    );
    let launched = entry(name, &format!("{ty}* y"), &body, ([words.div_ceil(THREADS), 1], THREADS, 0))?;
    Ok(source(String::new(), vec![launched], 0, vec![bytes]))
}
