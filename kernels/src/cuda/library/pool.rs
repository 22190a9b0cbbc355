//! The greatest element of each window and where it is. A thread's each: neighbouring windows share most of what they read.

use super::{Loop, THREADS, entry, loops_of, offset, source};
use crate::cuda::Source;
use crate::cuda::emit::stored;
use crate::library::pool::{Axis, MaxPool};
use dcc_program::types::DType;

/// Values and i32 places in the image's plane: the first of equal ones, the last NaN, -1 for a window without elements.
/// Errors: dtypes that the kernel does not take, planes in no order.
pub fn max_pool(pool: &MaxPool, dtype: DType, name: &str) -> Result<Source, String> {
    let computed = match dtype {
        DType::F64 => "double",
        DType::F32 | DType::F16 | DType::BF16 => "float",
        other => return Err(format!("no max_pool of {}", other.name())),
    };
    let ty = stored(dtype);
    let planes = loops_of(&pool.planes).ok_or("a max_pool of planes that no loops go through")?;
    let first = pool.planes.first().copied().unwrap_or([0; 2]);
    let product = |size: fn(&Axis) -> usize| pool.axes.iter().map(size).product::<usize>();
    let (size, image) = (product(|axis| axis.outputs), product(|axis| axis.image));
    let total = pool.planes.len() * size;
    let arguments = format!("const {ty}* x, {ty}* values, int* places");
    let body = body(pool, &planes, first, &Of { stored: ty, computed, size: size.max(1), total });
    let launched = entry(name, &arguments, &body, ([total.div_ceil(THREADS), 1], THREADS, 0))?;
    let reach = |operand: usize, plane: usize| pool.planes.iter().map(|at| at[operand] + plane).max().unwrap_or(0);
    let bytes = dtype.bytes() as usize;
    let outputs = reach(1, size);
    Ok(source(String::new(), vec![launched], 0, vec![reach(0, image) * bytes, outputs * bytes, outputs * 4]))
}

/// Types, and windows of a plane and of all.
struct Of {
    stored: &'static str,
    computed: &'static str,
    size: usize,
    total: usize,
}

fn body(pool: &MaxPool, planes: &[Loop<2>], first: [usize; 2], of: &Of) -> String {
    let Of { stored, computed, size, total } = of;
    let mut text = format!(
        "    const long long n = (long long)blockIdx.x * {THREADS} + threadIdx.x;\n    if (n >= {total}LL) return;\n    \
         [[maybe_unused]] const long long plane = n / {size};\n    const int window = (int)(n % {size});\n    x += {} + {};\n    \
         {computed} best = -({computed})infinity();\n    int place = -1;\n",
        first[0],
        offset(planes, 0, "plane")
    );
    let mut inner = 1;
    let mut starts: Vec<String> = Vec::new();
    for (i, axis) in pool.axes.iter().enumerate().rev() {
        let Axis { outputs, stride, pad, .. } = axis;
        starts.push(format!("    const int begin{i} = window / {inner} % {} * {stride} - ({pad});\n", outputs.max(&1)));
        inner *= (*outputs).max(1);
    }
    text.extend(starts);
    let mut at = "0".to_owned();
    for (i, Axis { image, taps, dilation, .. }) in pool.axes.iter().enumerate() {
        text += &format!(
            "    for (int tap{i} = 0; tap{i} < {taps}; ++tap{i}) {{\n    const int at{i} = begin{i} + tap{i} * {dilation};\n    \
             if (at{i} < 0 || at{i} >= {image}) continue;\n"
        );
        at = if i == 0 { "at0".to_owned() } else { format!("({at}) * {image} + at{i}") };
    }
    text += &format!(
        "    const int here = {at};\n    const {computed} found = widen(x[here]);\n    \
         if (found > best || found != found || place < 0) best = found, place = here;\n    {}\n",
        "}".repeat(pool.axes.len())
    );
    text += &format!("    const long long to = {} + {} + window;\n", first[1], offset(planes, 1, "plane"));
    text + &format!("    values[to] = narrow<{stored}>(best);\n    places[to] = place;\n")
}
