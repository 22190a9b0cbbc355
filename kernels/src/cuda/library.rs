//! The kernels of `library` as CUDA C++: texts specialised to their sizes by constants, from the same plain data as on the CPU.
//!
//! Operands have the order that instructions have. Sums have one order, which shapes decide: no two threads add to one place.

pub mod attention;
pub mod gemm;
pub mod heads;
pub mod pool;
pub mod product;
pub mod rows;
pub mod scan;
pub mod scatter;
pub mod top_k;

use super::{Launch, Source};

/// What a vendor's library computes, in its terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    Product(gemm::Gemm),
    Attention(heads::Heads),
}

/// Threads of a block where nothing asks for others.
const THREADS: usize = 256;

/// One loop over operands: its length and its element strides in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop<const N: usize> {
    size: usize,
    strides: [usize; N],
}

/// The same loops, slowest first, in fewer where they walk on like one.
fn merged<const N: usize>(loops: &[Loop<N>]) -> Vec<Loop<N>> {
    let mut all: Vec<Loop<N>> = Vec::new();
    for inner in loops.iter().filter(|each| each.size != 1) {
        match all.last_mut() {
            Some(outer) if (0..N).all(|i| outer.strides[i] == inner.size * inner.strides[i]) => {
                *outer = Loop { size: outer.size * inner.size, strides: inner.strides };
            }
            _ => all.push(*inner),
        }
    }
    all
}

/// Loops through a list of offsets. `None`: there are none.
fn loops_of<const N: usize>(offsets: &[[usize; N]]) -> Option<Vec<Loop<N>>> {
    let [first, second, ..] = offsets else { return Some(Vec::new()) };
    let mut strides = [0; N];
    for (stride, (from, to)) in strides.iter_mut().zip(first.iter().zip(second)) {
        *stride = to.checked_sub(*from)?;
    }
    let at = |base: &[usize; N], i: usize| std::array::from_fn(|operand| base[operand] + i * strides[operand]);
    let size = offsets.iter().enumerate().take_while(|(i, offset)| **offset == at(first, *i)).count();
    let whole = offsets.chunks(size).all(|run| run.len() == size && run.iter().enumerate().all(|(i, o)| *o == at(&run[0], i)));
    let outer: Vec<[usize; N]> = offsets.iter().step_by(size).copied().collect();
    let mut loops = if whole { loops_of(&outer)? } else { return None };
    loops.push(Loop { size, strides });
    Some(loops)
}

/// The offset of point `n` of `loops`, which are merged, in one operand.
fn offset<const N: usize>(loops: &[Loop<N>], operand: usize, n: &str) -> String {
    let mut terms = Vec::new();
    let mut inner = 1;
    for (i, each) in loops.iter().enumerate().rev() {
        let mut term = n.to_owned();
        if inner > 1 {
            term += &format!(" / {inner}");
        }
        if i > 0 {
            term += &format!(" % {}", each.size);
        }
        if each.strides[operand] > 0 {
            terms.push(format!("(long long)({term}) * {}", each.strides[operand]));
        }
        inner *= each.size;
    }
    if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }
}

/// An entry whose body is `body`, and its launch. One block at a time may have all registers: without a number there the compiler would
/// rather spill. Errors: more blocks than a grid has.
fn entry(name: &str, arguments: &str, body: &str, launch: ([usize; 2], usize, usize)) -> Result<(String, Launch), String> {
    entry_of(name, arguments, body, launch, 1)
}

/// As `entry`, with registers for so many blocks at a time.
fn entry_of(
    name: &str,
    arguments: &str,
    body: &str,
    (blocks, threads, shared): ([usize; 2], usize, usize),
    resident: usize,
) -> Result<(String, Launch), String> {
    let fits = blocks[0] <= i32::MAX as usize && blocks[1] <= u16::MAX as usize;
    if !fits {
        return Err(format!("a kernel of {} x {} blocks", blocks[0], blocks[1]));
    }
    let bounds = format!("__launch_bounds__({threads}, {resident})");
    let text = format!("extern \"C\" __global__ void {bounds}\n{name}({arguments}) {{\n{body}}}\n");
    let blocks = blocks.map(|count| count as u32);
    Ok((text, Launch { entry: name.to_owned(), blocks, threads: threads as u32, shared: shared as u32 }))
}

/// A source of these texts; launches of no block are left out.
fn source(text: String, entries: Vec<(String, Launch)>, workspace: usize, operand_bytes: Vec<usize>) -> Source {
    let mut source = Source { text, workspace, operand_bytes, ..Source::default() };
    for (text, launch) in entries {
        source.text += &text;
        if launch.blocks.iter().all(|count| *count > 0) {
            source.launches.push(launch);
        }
    }
    source
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_through_offsets() {
        let loops =
            [Loop { size: 2, strides: [100, 60] }, Loop { size: 3, strides: [20, 4] }, Loop { size: 4, strides: [5, 1] }];
        let all: Vec<[usize; 2]> =
            (0..24).map(|n| [n / 12 * 100 + n / 4 % 3 * 20 + n % 4 * 5, n / 12 * 60 + n / 4 % 3 * 4 + n % 4]).collect();
        let fewer = vec![loops[0], Loop { size: 12, strides: [5, 1] }];
        assert_eq!(loops_of(&all), Some(fewer.clone()));
        assert_eq!(merged(&loops), fewer);
        assert_eq!(offset(&fewer, 0, "n"), "(long long)(n % 12) * 5 + (long long)(n / 12) * 100");
        let mut broken = all;
        broken[17][0] += 1;
        assert_eq!(loops_of(&broken), None);
        assert_eq!(offset::<1>(&[], 0, "n"), "0");
    }
}
