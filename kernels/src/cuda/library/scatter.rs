//! Additions at computed places; see `scatter.cuh`.

use super::{Loop, entry, merged, offset, source};
use crate::cuda::Source;
use crate::cuda::emit::stored;
use crate::library::scatter::{Factor, Indexed};
use dcc_program::program::StoreMode;
use dcc_program::types::DType;

const TEXT: &str = include_str!("scatter.cuh");

/// Blocks for which the sources are not cut into parts.
const BLOCKS: usize = 256;
/// Fewest sources of a part.
const PART: usize = 1024;
/// Most parts of the sources.
const PARTS: usize = 64;
/// Bytes of the sums of a block, and of what its threads say to each other about them.
const SUMS: usize = 32 << 10;
/// Columns of which each thread has one.
const WIDE: usize = 32;
/// Sources whose rounds fit into a turn.
const TURNS: usize = 1 << 21;

/// out[.., index, ..] += update from indices of `index` and updates of `dtype`: the sums of `library::scatter::ScatterAdd`.
/// `mode` says whether the result is zero before.
///
/// # Panics
/// If a factor is of one operand alone.
///
/// Errors: dtypes that the kernel does not take, too many blocks.
pub fn scatter_add(
    (factors, indexed): (&[Factor], Indexed),
    (dtype, index): (DType, DType),
    mode: StoreMode,
    name: &str,
) -> Result<Source, String> {
    let (computed, bytes) = match dtype {
        DType::F64 => ("double", 8),
        DType::F32 | DType::F16 | DType::BF16 => ("float", 4),
        other => return Err(format!("no scatter_add of {}", other.name())),
    };
    if !matches!(index, DType::I32 | DType::I64) {
        return Err(format!("no scatter_add by {}", index.name()));
    }
    let plan = Plan::new(factors, indexed, bytes);
    let (ty, index_ty) = (stored(dtype), stored(index));
    let parted = plan.parts > 1;
    let workspace = if parted { plan.parts * plan.results() * bytes } else { 0 };
    let arguments = format!("const {index_ty}* indices, const {ty}* updates, {ty}* out, {computed}* workspace");
    let arguments = if parted { &arguments[..] } else { arguments.trim_end_matches(&format!(", {computed}* workspace")[..]) };
    let parts = if parted { "workspace".to_owned() } else { format!("({computed}*)nullptr") };
    let function = if plan.by_source { "by_source" } else { "by_column" };
    let body = format!("    scatter::{function}<{name}_plan>(indices, updates, out, {parts});\n");
    let mut entries = vec![entry(name, arguments, &body, ([plan.blocks(), plan.parts], plan.threads, 0))?];
    if parted {
        let body = format!("    scatter::finish<{name}_plan>(out, workspace);\n");
        entries.push(entry(
            &format!("{name}_finish"),
            arguments,
            &body,
            ([plan.results().div_ceil(plan.threads), 1], plan.threads, 0),
        )?);
    }
    let types = format!("    typedef {ty} Stored;\n    typedef {computed} Computed;\n    typedef {index_ty} Index;\n");
    let text = format!("{TEXT}struct {name}_plan {{\n{types}{}}};\n", plan.text(mode));
    let element = dtype.bytes() as usize;
    let [indices, updates, out] = plan.reach(factors, indexed);
    let operands = vec![indices * index.bytes() as usize, updates * element, out * element];
    Ok(source(text, entries, workspace, operands))
}

/// The loops by their kind, and how they are spread over threads. Strides are of indices, updates, result.
struct Plan {
    batch: Vec<Loop<3>>,
    sources: Vec<Loop<3>>,
    columns: Vec<Loop<3>>,
    indexed: Indexed,
    /// Whether threads have sources, not columns.
    by_source: bool,
    threads: usize,
    rows: usize,
    parts: usize,
}

impl Plan {
    fn new(factors: &[Factor], indexed: Indexed, bytes: usize) -> Plan {
        let group = |index: bool, out: bool| -> Vec<Loop<3>> {
            let kind = |f: &&Factor| f.index.is_some() == index && f.update.is_some() && f.out.is_some() == out;
            let as_loop =
                |f: &Factor| Loop { size: f.size, strides: [f.index, f.update, f.out].map(|stride| stride.unwrap_or(0)) };
            factors.iter().filter(kind).map(as_loop).collect()
        };
        let (batch, sources, columns) = (group(true, true), group(true, false), group(false, true));
        let kinds = batch.len() + sources.len() + columns.len();
        assert!(kinds == factors.len(), "every factor of a scatter is in the updates and in another operand");
        let [batch, sources, columns] = [batch, sources, columns].map(|loops| merged(&loops));
        let width = count(&columns).max(1);
        let by_source = width < WIDE && count(&sources) < TURNS;
        let (threads, rows) = if by_source {
            let threads = count(&sources).next_power_of_two().clamp(64, 256);
            (threads, (SUMS / (width * bytes + 4)).min(indexed.valid).max(1))
        } else {
            let threads = width.div_ceil(width.div_ceil(256)).next_multiple_of(32).max(128);
            (threads, (SUMS / (threads * bytes)).clamp(1, 32))
        };
        let mut plan = Plan { batch, sources, columns, indexed, by_source, threads, rows, parts: 1 };
        let most = count(&plan.sources).div_ceil(PART).clamp(1, PARTS);
        plan.parts = (BLOCKS / plan.blocks().max(1)).clamp(1, most);
        plan
    }

    fn blocks(&self) -> usize {
        let columns = count(&self.columns);
        let stretches = if self.by_source { columns.min(1) } else { columns.div_ceil(self.threads) };
        count(&self.batch) * self.indexed.valid.div_ceil(self.rows) * stretches
    }

    /// Elements of the result.
    fn results(&self) -> usize {
        count(&self.batch) * self.indexed.valid * count(&self.columns)
    }

    fn text(&self, mode: StoreMode) -> String {
        let Indexed { stride, offset: first, valid } = self.indexed;
        let ints = [
            ("BATCH", count(&self.batch)),
            ("SOURCES", count(&self.sources)),
            ("COLUMNS", count(&self.columns)),
            ("VALID", valid),
            ("THREADS", self.threads),
            ("ROWS", self.rows),
            ("PARTS", self.parts),
        ];
        let ints: String = ints.iter().map(|(name, value)| format!("    static constexpr int {name} = {value};\n")).collect();
        let at = |name: &str, loops: &[Loop<3>], operand: usize| {
            format!("    __device__ static long long {name}(int n) {{ return {}; }}\n", offset(loops, operand, "n"))
        };
        let functions = [
            at("batch_index", &self.batch, 0),
            at("batch_update", &self.batch, 1),
            at("batch_out", &self.batch, 2),
            at("source_index", &self.sources, 0),
            at("source_update", &self.sources, 1),
            at("column_update", &self.columns, 1),
            at("column_out", &self.columns, 2),
        ];
        format!(
            "{ints}    static constexpr long long STRIDE = {stride}, OFFSET = {first};\n    static constexpr bool ADDS = {};\n{}",
            mode == StoreMode::Accumulate,
            functions.concat()
        )
    }

    /// Elements from the first to the last of each operand.
    fn reach(&self, factors: &[Factor], indexed: Indexed) -> [usize; 3] {
        let of = |stride: fn(&Factor) -> Option<usize>, more: usize| {
            let dims = || factors.iter().filter_map(move |f| stride(f).map(|s| (f.size, s)));
            if dims().any(|dim| dim.0 == 0) { 0 } else { 1 + more + dims().map(|(size, s)| (size - 1) * s).sum::<usize>() }
        };
        [of(|f| f.index, 0), of(|f| f.update, 0), of(|f| f.out, indexed.valid.saturating_sub(1) * indexed.stride)]
    }
}

fn count(loops: &[Loop<3>]) -> usize {
    loops.iter().map(|each| each.size).product()
}
