//! The first elements of rows, in order; see `top_k.cuh`.

use super::{THREADS, entry, source};
use crate::cuda::Source;
use crate::cuda::emit::stored;
use crate::library::top_k::TopK;
use dcc_program::types::DType;

const TEXT: &str = include_str!("top_k.cuh");

/// Bytes of shared memory for a tile's keys.
const KEYS: usize = 16 << 10;

/// The indices of `top_k`: those of the CPU. Errors: dtypes that the kernel does not take, rows whose indices are no int, too many blocks.
pub fn top_k(top_k: &TopK, dtype: DType, name: &str) -> Result<Source, String> {
    let TopK { outer, size, inner, k, largest } = *top_k;
    if dtype == DType::Bool || i32::try_from(size).is_err() {
        return Err(format!("no top_k of {size} {}", dtype.name()));
    }
    let wide = dtype.bytes() > 4;
    let (key, key_bytes) = if wide { ("unsigned long long", 8) } else { ("unsigned int", 4) };
    let signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let tile = size.next_power_of_two().clamp(2, KEYS / key_bytes);
    let (tiles, kept, rows) = (size.div_ceil(tile), k.min(tile), outer * inner);
    let threads = (tile / 2).clamp(32, THREADS);
    let candidates = if tiles > 1 { rows * tiles * kept } else { 0 };
    let ty = stored(dtype);
    let text = format!(
        "{TEXT}struct {name}_sizes {{\n    typedef {ty} Stored;\n    typedef {key} Key;\n    \
         static constexpr long long INNER = {inner}, K = {k}, CANDIDATES = {candidates};\n    \
         static constexpr int SIZE = {size}, TILE = {tile}, TILES = {tiles}, KEPT = {kept}, THREADS = {threads};\n    \
         static constexpr bool SIGNED = {signed}, LARGEST = {largest};\n}};\n"
    );
    let arguments = format!("const {ty}* x, long long* y");
    let (arguments, workspace) = match candidates {
        0 => (arguments, format!("({key}*)nullptr")),
        _ => (format!("{arguments}, {key}* workspace"), "workspace".to_owned()),
    };
    let body = format!("    top_k::tiles<{name}_sizes>(x, y, {workspace});\n");
    let blocks = if k == 0 { 0 } else { rows * tiles };
    let mut entries = vec![entry(name, &arguments, &body, ([blocks, 1], threads, 0))?];
    if candidates > 0 {
        let body = format!("    top_k::merge<{name}_sizes>(y, workspace);\n");
        let launch = ([candidates.div_ceil(threads), 1], threads, 0);
        entries.push(entry(&format!("{name}_merge"), &arguments, &body, launch)?);
    }
    let operands = vec![rows * size * dtype.bytes() as usize, rows * k * 8];
    Ok(source(text, entries, candidates * (key_bytes + 4), operands))
}
