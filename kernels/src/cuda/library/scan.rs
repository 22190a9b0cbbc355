//! Running sums; see `scan.cuh`.

use super::{THREADS, entry, source};
use crate::cuda::Source;
use crate::cuda::emit::stored;
use crate::library::scatter::Cumsum;
use dcc_program::types::DType;

const TEXT: &str = include_str!("scan.cuh");

/// Lines for which each thread has its own.
const MANY: usize = 1 << 14;
/// Steps of a line that one thread walks in any case.
const SHORT: usize = 64;

/// The sums of `cumsum`, of floats in an order that its sizes decide; integers wrap. Errors: dtypes that the kernel does not take.
pub fn cumsum(cumsum: &Cumsum, dtype: DType, name: &str) -> Result<Source, String> {
    let Cumsum { outer, size, inner, exclusive, reverse } = *cumsum;
    let computed = match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::I32 | DType::I64 => "long long",
        other => return Err(format!("no cumsum of {}", other.name())),
    };
    let ty = stored(dtype);
    let lines = if size == 0 { 0 } else { outer * inner };
    let alone = lines >= MANY || size <= SHORT;
    let (function, blocks) = if alone { ("threads", lines.div_ceil(THREADS)) } else { ("blocks", lines) };
    let text = format!(
        "{TEXT}struct {name}_sizes {{\n    typedef {ty} Stored;\n    typedef {computed} Computed;\n    \
         static constexpr long long OUTER = {outer}, INNER = {inner};\n    static constexpr int SIZE = {size}, THREADS = {THREADS};\n    \
         static constexpr bool EXCLUSIVE = {exclusive}, REVERSE = {reverse};\n}};\n"
    );
    let body = format!("    scan::{function}<{name}_sizes>(x, y);\n");
    let launched = entry(name, &format!("const {ty}* x, {ty}* y"), &body, ([blocks, 1], THREADS, 0))?;
    let bytes = outer * size * inner * dtype.bytes() as usize;
    Ok(source(text, vec![launched], 0, vec![bytes, bytes]))
}
