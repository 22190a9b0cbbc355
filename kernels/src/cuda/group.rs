//! Launches of loop nests as one: blocks that share no data, each doing what a block of one of the launches does alone, bit for bit.
//!
//! Launches of one text differ in operands only and share a function, of which each has the same number of blocks. A block finds its function
//! by comparing its number with constants, and its operands by a division, in a table that is the kernel's only argument: so they lie in
//! constant memory, where a kernel's arguments always do, and no block waits for a look-up.

use super::{Launch, Source};
use std::fmt::Write;

/// What a launch of a generated kernel does, in terms of its arguments and of `block` and `piece`, its number along x and along y.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// Statements.
    pub(super) text: String,
    /// Those that it uses, in its order.
    pub arguments: Vec<Argument>,
    /// Their types, and their names.
    pub(super) types: Vec<(String, String)>,
    /// Whether many can be in one kernel: what they have in shared memory does not add up.
    pub joins: bool,
}

/// What a word of 8 bytes that a launch gets is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A pointer to one of inputs, then outputs.
    Operand(usize),
    /// The pointer to the workspace.
    Workspace,
    /// The value of one of `Source::parameters`.
    Parameter(usize),
}

/// Launch `launch` of a source, with so many sets of operands.
#[derive(Clone, Copy)]
pub struct Kind<'a> {
    pub source: &'a Source,
    pub launch: usize,
    pub members: usize,
}

/// Words of a table: arguments of a kernel have 4 KiB.
pub const TABLE: usize = 512;

impl Kind<'_> {
    fn body(&self) -> &Body {
        &self.source.bodies[self.launch]
    }

    fn launch(&self) -> &Launch {
        &self.source.launches[self.launch]
    }

    /// Blocks of one member.
    fn blocks(&self) -> usize {
        self.launch().blocks.iter().map(|count| *count as usize).product()
    }

    fn words(&self) -> usize {
        self.body().arguments.len() * self.members
    }
}

impl Source {
    /// One entry `name` for all members of `kinds`, which have blocks of equally many threads. Its table has each member's arguments, kind after
    /// kind. Errors: more words than a table has, more blocks than a grid.
    pub fn group(name: &str, kinds: &[Kind<'_>]) -> Result<Source, String> {
        let threads = kinds.first().map_or(0, |kind| kind.launch().threads);
        let table: usize = kinds.iter().map(Kind::words).sum();
        let blocks: usize = kinds.iter().map(|kind| kind.blocks() * kind.members).sum();
        let alike = kinds.iter().all(|kind| kind.launch().threads == threads && kind.launch().shared == 0 && kind.body().joins);
        if !alike || table > TABLE || blocks > i32::MAX as usize {
            return Err(format!("a group of {blocks} blocks, {threads} threads and {table} words"));
        }
        let mut text = format!("struct {name}_table {{ long long words[{table}]; }};\n");
        for (n, kind) in kinds.iter().enumerate() {
            let Body { text: body, types, .. } = kind.body();
            let arguments: String = types.iter().map(|(ty, name)| format!(", {ty} {name}")).collect();
            let piece = if kind.launch().blocks[1] > 1 { ", const int piece" } else { "" };
            let _ =
                writeln!(text, "__device__ __forceinline__ void {name}_{n}(const int block{piece}{arguments}) {{\n{body}}}",);
        }
        let _ = writeln!(
            text,
            "extern \"C\" __global__ void __launch_bounds__({threads}, 1)\n{name}(const __grid_constant__ {name}_table table) {{\n    \
             const int all = blockIdx.x;"
        );
        Search { name, kinds }.write(&mut text, 0..kinds.len(), 1);
        text += "}\n";
        let launch = Launch { entry: name.to_owned(), blocks: [blocks as u32, 1], threads, shared: 0 };
        Ok(Source { text, launches: vec![launch], table, ..Source::default() })
    }
}

/// The way from a block's number to its function.
struct Search<'a> {
    name: &'a str,
    kinds: &'a [Kind<'a>],
}

impl Search<'_> {
    fn write(&self, text: &mut String, range: std::ops::Range<usize>, depth: usize) {
        let indent = "    ".repeat(depth);
        if range.len() == 1 {
            return self.call(text, range.start, &indent);
        }
        let middle = range.start + range.len() / 2;
        let _ = writeln!(text, "{indent}if (all < {}) {{", self.first(middle));
        self.write(text, range.start..middle, depth + 1);
        let _ = writeln!(text, "{indent}}} else {{");
        self.write(text, middle..range.end, depth + 1);
        let _ = writeln!(text, "{indent}}}");
    }

    /// The first block of a kind.
    fn first(&self, n: usize) -> usize {
        self.kinds[..n].iter().map(|kind| kind.blocks() * kind.members).sum()
    }

    /// Calls the function of kind `n`.
    fn call(&self, text: &mut String, n: usize, indent: &str) {
        let (kind, name) = (&self.kinds[n], self.name);
        let [along, pieces] = kind.launch().blocks;
        let (blocks, first) = (kind.blocks(), self.first(n));
        let words: usize = self.kinds[..n].iter().map(Kind::words).sum();
        let Body { arguments, types, .. } = kind.body();
        let _ = writeln!(text, "{indent}const int own = all - {first}, member = own / {blocks}, block = own % {blocks};");
        let _ = writeln!(text, "{indent}const long long* words = table.words + {words} + member * {};", arguments.len());
        let own = if pieces > 1 { format!("block % {along}, block / {along}") } else { "block".to_owned() };
        let given: String = types.iter().enumerate().map(|(at, (ty, _))| format!(", ({ty})words[{at}]")).collect();
        let _ = writeln!(text, "{indent}{name}_{n}({own}{given});");
    }
}
