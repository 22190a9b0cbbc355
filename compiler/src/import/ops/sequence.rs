//! Sequences of static length, which exporters use for `split` and `cat`, and fill in loops.

use super::shape::split_sizes;
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::{Value, axis};

pub const ONNX: &[(&str, Import)] = &[
    ("ConcatFromSequence", concat_from_sequence),
    ("SequenceAt", sequence_at),
    ("SequenceConstruct", sequence_construct),
    ("SequenceEmpty", sequence_empty),
    ("SequenceErase", sequence_erase),
    ("SequenceInsert", sequence_insert),
    ("SequenceLength", sequence_length),
    ("SplitToSequence", split_to_sequence),
];

/// Elements of a sequence.
const MOST_PARTS: u64 = 1 << 14;

fn list<'c>(call: &'c Call, position: usize) -> Result<&'c [Value]> {
    match call.input(position)? {
        Value::List(list) => Ok(list),
        _ => Err(Error::graph(format!("input {position} of {} is a tensor, not a sequence", call.node.op))),
    }
}

fn sequence_construct(_: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let items = (0..call.inputs.len()).map(|position| call.input(position).cloned());
    Ok(vec![Value::List(items.collect::<Result<_>>()?)])
}

fn sequence_length(_: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![Known::int(dcc_program::DType::I64, list(call, 0)?.len() as i64).into()])
}

fn sequence_empty(_: &mut Build, call: &Call) -> Result<Vec<Value>> {
    call.node.int_or("dtype", 1)?;
    Ok(vec![Value::List(Vec::new())])
}

/// Where input `input` says, of `places`; where it is omitted, at `default`.
fn place(build: &Build, call: &Call, input: usize, places: usize, default: usize) -> Result<usize> {
    if call.optional(input).is_none() {
        return Ok(default);
    }
    let given = call.known_number(build, input)? as i64;
    // Counted from the end of the items, also where the place behind the last one is meant by their number.
    let items = default as i64;
    let at = if given < 0 { given.saturating_add(items) } else { given };
    let at = usize::try_from(at).ok().filter(|&at| at < places);
    at.ok_or_else(|| Error::shape(format!("position {given} in a sequence of {items} items")))
}

fn sequence_insert(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut items = list(call, 0)?.to_vec();
    if items.len() as u64 >= MOST_PARTS {
        return Err(Error::limit(format!("a sequence of more than {MOST_PARTS} parts")));
    }
    let at = place(build, call, 2, items.len() + 1, items.len())?;
    items.insert(at, call.input(1)?.clone());
    Ok(vec![Value::List(items)])
}

fn sequence_erase(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut items = list(call, 0)?.to_vec();
    let Some(last) = items.len().checked_sub(1) else { return Err(Error::shape("an empty sequence")) };
    let at = match call.optional(1) {
        Some(_) => place(build, call, 1, items.len(), items.len())?,
        None => last,
    };
    items.remove(at);
    Ok(vec![Value::List(items)])
}

fn sequence_at(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let list = list(call, 0)?;
    let position = axis(call.known_number(build, 1)? as i64, list.len())
        .map_err(|_| Error::shape(format!("an index outside of a sequence of {} items", list.len())))?;
    Ok(vec![list[position].clone()])
}

fn concat_from_sequence(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let list = list(call, 0)?;
    let Some(first) = list.first() else { return Err(Error::shape("an empty sequence")) };
    let rank = first.rank(build)?;
    if !call.node.flag("new_axis", false)? {
        return Ok(vec![build.concatenate(list, call.axis(0, rank)?)?]);
    }
    let dim = call.axis(0, rank + 1)?;
    let mut parts = Vec::with_capacity(list.len());
    for part in list {
        let mut shape = part.shape(build)?;
        if shape.len() != rank {
            return Err(Error::shape(format!("a sequence of values of {rank} and of {} dims", shape.len())));
        }
        shape.insert(dim, 1);
        parts.push(build.reshape(part, &shape)?);
    }
    Ok(vec![build.concatenate(&parts, dim)?])
}

/// A scalar `split` is the size of all parts but perhaps the last; without it every part has size 1.
fn split_to_sequence(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dim = call.axis(0, shape.len())?;
    let keep = call.node.flag("keepdims", true)?;
    let given = call.optional(1).map(|_| call.known(build, 1)).transpose()?;
    let part = given.filter(|known| known.rank() == 0).and_then(Known::uniform_int).unwrap_or(1);
    let count = shape[dim] / part.max(1) as u64;
    if count > MOST_PARTS {
        return Err(Error::limit(format!("a sequence of {count} parts, at most {MOST_PARTS} are supported")));
    }
    let sizes = match given {
        None => vec![1; shape[dim] as usize],
        Some(known) if known.rank() == 0 => match call.known_ints(build, 1)?[0] {
            part @ 1.. => (0..shape[dim]).step_by(part as usize).map(|start| (shape[dim] - start).min(part as u64)).collect(),
            other => return Err(attribute_value("split", other)),
        },
        Some(_) => split_sizes(&call.known_ints(build, 1)?, shape[dim])?,
    };
    let (mut parts, mut start) = (Vec::with_capacity(sizes.len()), 0);
    for size in sizes {
        let mut part = build.narrow(x, dim, start, size)?;
        if given.is_none() && !keep {
            let mut squeezed = shape.clone();
            squeezed.remove(dim);
            part = build.reshape(&part, &squeezed)?;
        }
        parts.push(part);
        start += size;
    }
    Ok(vec![Value::List(parts)])
}
