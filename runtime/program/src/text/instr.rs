//! Reads the right side of an instruction: kernel, library call, start of a transfer, wait.

use super::cursor::{Cursor, Parsed};
use crate::factors::FactorSpec;
use crate::mesh::Mesh;
use crate::program::*;
use crate::types::Reduce;
use crate::window::{Pool, parse_windows};

/// What `t0 =` or `b0 =` or `b0 +=` stands before.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Target {
    None,
    Token(TokenId),
    Assign,
    Accumulate,
}

pub(super) fn action(line: &mut Cursor, mesh: &Mesh, target: Target) -> Parsed<Action> {
    let word = line.word("an operation")?;
    let is_start = word == "start";
    if is_start != matches!(target, Target::Token(_)) {
        return Err("a `start`, and nothing else, gives a token".to_owned());
    }
    if target == Target::Accumulate && !matches!(word, "dot" | "scatter_add" | "convolution") {
        return Err(format!("`{word}` cannot add to its result; only dot, scatter_add and convolution can"));
    }
    Ok(match (word, target) {
        ("start", Target::Token(token)) => Action::Start { token, transfer: transfer(line, mesh)? },
        ("wait", _) => Action::Wait(TokenId(line.id('t').ok_or_else(|| line.expected("a token"))?)),
        ("fused", _) => {
            line.expect(".")?;
            Action::Kernel(line.number("a kernel's number")?)
        }
        _ => {
            let mode = if target == Target::Accumulate { StoreMode::Accumulate } else { StoreMode::Assign };
            Action::Library(library(word, line, mesh, mode)?)
        }
    })
}

fn library(word: &str, line: &mut Cursor, mesh: &Mesh, mode: StoreMode) -> Parsed<Library> {
    Ok(match word {
        "copy" => Library::Copy,
        "zero" => {
            let mut terms = 1;
            if line.eat("(") {
                line.expect("terms")?;
                terms = line.number("a number of terms")?;
                line.expect(")")?;
            }
            Library::Zero { terms }
        }
        "resolve" => Library::ResolveMicrobatches,
        "dot" => Library::Dot { spec: FactorSpec::parse(line.parenthesized()?)?, mode },
        "reshape" => {
            let mut spec = FactorSpec::parse(line.parenthesized()?)?;
            if spec.operands.is_empty() {
                spec.operands.push(Vec::new());
            }
            Library::Reshape { spec }
        }
        "scatter_add" => {
            let text = line.parenthesized()?;
            let (spec, indexed) = text.split_once(';').ok_or("scatter_add lacks `; factor`")?;
            Library::ScatterAdd { spec: FactorSpec::parse(spec)?, indexed: indexed.trim().to_owned(), mode }
        }
        "convolution" => {
            let (spec, windows) = line.parenthesized()?.split_once(';').ok_or("convolution lacks `; windows`")?;
            Library::Convolution { spec: FactorSpec::parse(spec)?, windows: parse_windows(windows)?, mode }
        }
        "max_pool" => Library::MaxPool(Pool::parse(line.parenthesized()?)?),
        "attention" => Library::Attention(attention(line.parenthesized()?)?),
        "attention_grad" => Library::AttentionGrad(attention(line.parenthesized()?)?),
        _ => {
            let mut inner = Cursor::new(line.parenthesized().map_err(|_| format!("unknown operation `{word}`"))?);
            let library = small(word, &mut inner, mesh)?;
            inner.done()?;
            library
        }
    })
}

fn small(word: &str, inner: &mut Cursor, mesh: &Mesh) -> Parsed<Library> {
    match word {
        "cumsum" => {
            let dim = dim(inner)?;
            let exclusive = flag(inner, "exclusive");
            Ok(Library::Cumsum { dim, exclusive, reverse: flag(inner, "reverse") })
        }
        "top_k" => {
            let dim = dim(inner)?;
            inner.expect(",")?;
            inner.expect("k")?;
            let k = inner.number("a number of elements")?;
            Ok(Library::TopK { dim, k, largest: flag(inner, "largest") })
        }
        "slice" => {
            let axis = inner.axis(mesh)?;
            inner.expect(",")?;
            Ok(Library::SliceAxis { axis, dim: dim(inner)? })
        }
        "keep_first" => Ok(Library::KeepFirst { axis: inner.axis(mesh)? }),
        "drop_mb" => Ok(Library::DropMicrobatch { dim: dim(inner)? }),
        _ => Err(format!("unknown operation `{word}`")),
    }
}

/// Whether `, name` follows.
fn flag(line: &mut Cursor, name: &str) -> bool {
    let mut ahead = line.clone();
    let found = ahead.eat(",") && ahead.eat_word(name);
    if found {
        *line = ahead;
    }
    found
}

fn dim(line: &mut Cursor) -> Parsed<u8> {
    if !line.eat_word("dim") {
        return Err(line.expected("`dim`"));
    }
    line.number("a dim")
}

/// `b h t e, b h s e, b h s f -> b h t f; scale 0.125, causal, mask additive`.
fn attention(text: &str) -> Parsed<Attention> {
    let (spec, options) = text.split_once(';').ok_or("attention lacks `; scale …`")?;
    let mut options = options.split(',').map(str::trim).peekable();
    let scale = options.next().and_then(|s| s.strip_prefix("scale ")).ok_or("attention lacks `scale`")?;
    let scale = match scale.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => scale.parse::<f64>().ok().map(f64::to_bits),
    };
    let causal = options.next_if_eq(&"causal").is_some();
    let mask = match options.next() {
        None => MaskKind::None,
        Some("mask additive") => MaskKind::Additive,
        Some("mask boolean") => MaskKind::Boolean,
        Some(other) => return Err(format!("unknown option `{other}` of attention")),
    };
    if let Some(extra) = options.next() {
        return Err(format!("unknown option `{extra}` of attention"));
    }
    Ok(Attention { spec: FactorSpec::parse(spec)?, causal, mask, scale: scale.ok_or("attention's scale is no number")? })
}

fn transfer(line: &mut Cursor, mesh: &Mesh) -> Parsed<Transfer> {
    let word = line.word("a transfer")?;
    let reduce = if matches!(word, "all_reduce" | "stage_sum") {
        line.expect(".")?;
        let name = line.word("a reduction")?;
        Reduce::parse(name).ok_or_else(|| format!("unknown reduction `{name}`"))?
    } else {
        Reduce::Sum
    };
    line.expect("(")?;
    let transfer = match word {
        "all_reduce" => {
            let mut axes = smallvec::smallvec![line.axis(mesh)?];
            while line.eat(",") {
                axes.push(line.axis(mesh)?);
            }
            Transfer::AllReduce { reduce, axes }
        }
        "stage_sum" => Transfer::StageSum { group: line.id('g').ok_or_else(|| line.expected("a group"))?, reduce },
        "send" | "recv" => {
            let preposition = if word == "send" { "to" } else { "from" };
            if !line.eat_word(preposition) {
                return Err(line.expected(&format!("`{preposition}`")));
            }
            let stage = line.number("a stage")?;
            let lane = if line.eat(",") { lane(line)? } else { 0 };
            if word == "send" { Transfer::Send { to: stage, lane } } else { Transfer::Recv { from: stage, lane } }
        }
        _ => along_axis(word, line, mesh)?,
    };
    line.expect(")")?;
    Ok(transfer)
}

fn lane(line: &mut Cursor) -> Parsed<u32> {
    if !line.eat_word("lane") {
        return Err(line.expected("`lane`"));
    }
    line.number("a lane")
}

fn along_axis(word: &str, line: &mut Cursor, mesh: &Mesh) -> Parsed<Transfer> {
    if !matches!(word, "reduce_scatter" | "all_gather" | "all_to_all") {
        return Err(format!("unknown transfer `{word}`"));
    }
    let axis = line.axis(mesh)?;
    line.expect(",")?;
    let dim = dim(line)?;
    Ok(match word {
        "reduce_scatter" => Transfer::ReduceScatter { axis, dim },
        "all_gather" => Transfer::AllGather { axis, dim },
        _ => {
            line.expect("->")?;
            Transfer::AllToAll { axis, from: dim, to: line.number("a dim")? }
        }
    })
}
