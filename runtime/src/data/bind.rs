//! Files to inputs: which array feeds which input, whether it fits, whether its values do.

use super::convert::{Bounds, Convert};
use super::file::{Array, Files};
use super::order::Permutation;
use super::{Dataset, Feed, Fill, Input, Kind, Layout, Options, Order};
use crate::error::{Error, Result};
use bytes::Bytes;
use dcc_program::DType;

/// Files that a message names.
const NAMED: usize = 3;

pub fn bind(files: &Files, inputs: &[Input], options: &Options) -> Result<Dataset> {
    check_keys(files, inputs, options)?;
    let tokens = token_input(files, inputs, options)?;
    let mut feeds = Vec::new();
    let mut len: Option<(u64, &str)> = None;
    for input in inputs {
        let fill = options.fills.iter().find(|(name, _)| *name == input.name).map(|(_, fill)| fill);
        let arrays: Vec<&Array> = files.of(&input.name).collect();
        let (feed, count) = match (fill, &arrays[..]) {
            (Some(fill), []) => (filled(input, fill)?, None),
            (None, []) => {
                let shift = u64::from(input.name == "labels");
                let (feed, count) = token_feed(input, &files.tokens, shift, tokens)?;
                (feed, Some(count))
            }
            (None, arrays) => {
                let (feed, count) = fed(input, arrays, options.layout)?;
                (feed, Some(count))
            }
            (Some(_), _) => {
                return Err(Error::data_option(format!("--input {} feeds what the data have too", input.name)));
            }
        };
        match (len, count) {
            (Some((before, name)), Some(count)) if before != count => {
                let what = format!("`{name}` has {before} {}, `{}` {count}", unit(options.layout), input.name);
                return Err(at_files(files, Error::data_shape(what)));
            }
            (_, Some(count)) => len = Some((count, &input.name)),
            (_, None) => {}
        }
        feeds.push(feed);
    }
    let len = len.map(|(count, _)| count);
    check_rows(inputs, &feeds)?;
    let batch = feeds.iter().map(|feed| feed.batch).max().unwrap_or(1).max(1);
    let samples = match (options.layout, len) {
        (Layout::Samples, Some(samples)) if samples < batch => {
            let what = format!("the data have {samples} samples, one batch needs {batch}");
            return Err(at_files(files, Error::data_shape(what).help("give more data or a smaller --global-batch-size")));
        }
        (Layout::Samples, Some(samples)) => samples,
        (Layout::Steps, Some(0)) => return Err(at_files(files, Error::data_shape("the data have no steps"))),
        _ => batch,
    };
    let order = Permutation::new(options.order, options.seed, samples, batch);
    let fingerprint = fingerprint(&feeds, options.layout, options.order, options.seed);
    Ok(Dataset { fingerprint, feeds, order, len, layout: options.layout })
}

/// Errors: of two inputs that samples feed, one takes more rows of a step than the other.
fn check_rows(inputs: &[Input], feeds: &[Feed]) -> Result<()> {
    let by_samples = inputs.iter().zip(feeds).filter(|(_, feed)| matches!(feed.kind, Kind::Samples { .. }));
    let rows: Vec<(&str, u64)> = by_samples.map(|(input, feed)| (input.name.as_str(), feed.batch)).collect();
    match rows.iter().find(|(_, count)| *count != rows[0].1) {
        None => Ok(()),
        Some((name, count)) => {
            let (first, rows) = rows[0];
            let what = format!("a step takes {rows} samples of `{first}`, but {count} rows of `{name}`");
            Err(Error::data_shape(what).help("use --layout steps, or give the model an output with a row for each sample"))
        }
    }
}

/// With the files that the data are of: the first three.
fn at_files(files: &Files, error: Error) -> Error {
    let mut paths: Vec<String> =
        files.arrays.iter().chain(&files.tokens).map(|array| array.path.display().to_string()).collect();
    paths.dedup();
    let more = paths.len().saturating_sub(NAMED);
    paths.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    error.at(paths.join(", ") + &more)
}

fn unit(layout: Layout) -> &'static str {
    match layout {
        Layout::Samples => "samples",
        Layout::Steps => "steps",
    }
}

fn names(inputs: &[Input]) -> String {
    inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn check_keys(files: &Files, inputs: &[Input], options: &Options) -> Result<()> {
    if let Some(array) = files.arrays.iter().find(|array| inputs.iter().all(|input| input.name != array.name)) {
        return Err(Error::data_keys(format!("the data have `{}`, which is no input", array.name))
            .at(array.path.display())
            .help(format!("inputs: {}; rename with --map {}=INPUT", names(inputs), array.name)));
    }
    if let Some((name, _)) = options.fills.iter().find(|(name, _)| inputs.iter().all(|input| input.name != *name)) {
        return Err(Error::data_option(format!("--input {name}: no such input")).help(format!("inputs: {}", names(inputs))));
    }
    Ok(())
}

/// The input that token files feed: the one of integers `[batch, sequence]` that nothing else feeds. `Err` says why there is none.
fn token_input<'a>(files: &Files, inputs: &'a [Input], options: &Options) -> Result<Option<&'a Input>> {
    if files.tokens.is_empty() {
        return Ok(None);
    }
    let fed = |input: &&Input| {
        files.arrays.iter().any(|array| array.name == input.name) || options.fills.iter().any(|(name, _)| *name == input.name)
    };
    let is_tokens = |input: &&Input| {
        input.name != "labels" && !input.dtype.is_float() && input.shape.len() == 2 && input.batch_dim == Some(0)
    };
    let candidates: Vec<&Input> = inputs.iter().filter(is_tokens).filter(|input| !fed(input)).collect();
    match candidates[..] {
        [input] => Ok(Some(input)),
        [] => Err(Error::data_keys("the data are tokens, but no input takes integers [batch, sequence]")
            .help(format!("inputs: {}", names(inputs)))),
        _ => {
            let several = candidates.iter().map(|input| input.name.as_str()).collect::<Vec<_>>().join(", ");
            Err(Error::data_keys(format!("the data are tokens, but several inputs could take them: {several}"))
                .help("feed the others with --input NAME=ones, zeros or arange"))
        }
    }
}

fn product(dims: &[u64]) -> u64 {
    dims.iter().product()
}

fn feed(input: &Input, kind: Kind, parts: Vec<(u64, Bytes)>, convert: Convert) -> Feed {
    let (outer, batch, inner) = match input.batch_dim {
        Some(dim) => (product(&input.shape[..dim]), input.shape[dim], product(&input.shape[dim + 1..])),
        None => (1, 1, product(&input.shape)),
    };
    Feed { kind, parts, convert, outer, batch, inner }
}

fn bounds(input: &Input) -> Bounds {
    Bounds { vocabulary: input.vocabulary, ignore_index: input.ignore_index }
}

/// Samples or steps of all `arrays`, one after another.
fn fed(input: &Input, arrays: &[&Array], layout: Layout) -> Result<(Feed, u64)> {
    let mut due = input.shape.clone();
    match (layout, input.batch_dim) {
        (Layout::Samples, Some(dim)) => drop(due.remove(dim)),
        (Layout::Samples, None) => {
            return Err(Error::data_keys(format!("input `{}` has no batch dim, so samples cannot feed it", input.name))
                .at(place(arrays[0]))
                .help(format!("use --layout steps, or --input {}=@FILE.npy", input.name)));
        }
        (Layout::Steps, _) => {}
    }
    if let Some(array) = arrays.iter().find(|array| array.shape.get(1..) != Some(&due[..])) {
        return Err(Error::data_shape(format!(
            "`{}` has shape {:?}, input `{}` needs [{}, {}]",
            array.name,
            array.shape,
            input.name,
            unit(layout),
            due.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        ))
        .at(place(array)));
    }
    let convert = checked(input, arrays.iter().copied())?;
    let (parts, count) = parts(arrays.iter().map(|array| (array.shape[0], &array.bytes)));
    let kind = if layout == Layout::Samples { Kind::Samples { shift: 0 } } else { Kind::Steps(count) };
    Ok((feed(input, kind, parts, convert), count))
}

fn place(array: &Array) -> String {
    format!("`{}` in {}", array.name, array.path.display())
}

/// From the one dtype of all `arrays`, whose values fit.
fn checked<'a>(input: &Input, mut arrays: impl Iterator<Item = &'a Array> + Clone) -> Result<Convert> {
    let dtype = arrays.clone().next().map_or(input.dtype, |array| array.dtype);
    let convert = Convert::new(dtype, input.dtype);
    arrays.try_for_each(|array| {
        if array.dtype != dtype {
            let what = format!("the parts of `{}` are of {} and {}", input.name, dtype.name(), array.dtype.name());
            return Err(Error::data_format(what).at(place(array)));
        }
        convert.check(&array.bytes, &bounds(input)).map_err(|error| error.at(place(array)))
    })?;
    Ok(convert)
}

/// Each with the count before it, those left out that have none; and the count of all.
fn parts<'a>(counted: impl Iterator<Item = (u64, &'a Bytes)>) -> (Vec<(u64, Bytes)>, u64) {
    let mut total = 0;
    let mut parts = Vec::new();
    for (count, bytes) in counted.filter(|(count, _)| *count > 0) {
        parts.push((total, bytes.clone()));
        total += count;
    }
    (parts, total)
}

/// Sample i is tokens `[i·T, i·T + T + 1)` of its part: the input takes the first T, the labels (`shift` 1) the last.
fn token_feed(input: &Input, tokens: &[Array], shift: u64, takes: Option<&Input>) -> Result<(Feed, u64)> {
    let takes = takes.filter(|takes| takes.name == input.name || (shift == 1 && takes.shape == input.shape));
    let (Some(_), &[_, length]) = (takes, &input.shape[..]) else {
        return Err(Error::data_keys(format!("input `{}` has no data", input.name)).help(format!(
            "add the key, rename one with --map KEY={0}, or use --input {0}=ones, zeros, arange or @FILE.npy",
            input.name
        )));
    };
    let convert = checked(input, tokens.iter())?;
    let samples = |part: &Array| part.shape[0].saturating_sub(1) / length.max(1);
    let (parts, samples) = parts(tokens.iter().map(|part| (samples(part), &part.bytes)));
    Ok((feed(input, Kind::Samples { shift }, parts, convert), samples))
}

fn filled(input: &Input, fill: &Fill) -> Result<Feed> {
    let elements = product(&input.shape) as usize;
    let last = input.shape.last().copied().unwrap_or(1).max(1);
    let (source, bytes): (DType, Bytes) = match fill {
        Fill::Zeros => (DType::U8, vec![0; elements].into()),
        Fill::Ones => (DType::U8, vec![1; elements].into()),
        Fill::Arange => {
            (DType::I64, (0..elements as u64).flat_map(|i| ((i % last) as i64).to_le_bytes()).collect::<Vec<u8>>().into())
        }
        Fill::File(path) => {
            let files = Files::open(std::slice::from_ref(path), &[])?;
            let [array] = &[files.arrays, files.tokens].concat()[..] else {
                return Err(Error::data_option(format!("--input {}: one .npy is needed", input.name)).at(path.display()));
            };
            (array.dtype, repeated(input, array)?)
        }
    };
    let convert = Convert::new(source, input.dtype);
    convert.check(&bytes, &bounds(input)).map_err(|error| error.at(format!("--input {}", input.name)))?;
    Ok(feed(input, Kind::Steps(1), vec![(0, bytes)], convert))
}

/// The array as the input's whole shape, its batch dim repeated where it is 1.
fn repeated(input: &Input, array: &Array) -> Result<Bytes> {
    if array.shape == input.shape {
        return Ok(array.bytes.clone());
    }
    let mut one = input.shape.clone();
    let Some(dim) = input.batch_dim.filter(|&dim| std::mem::replace(&mut one[dim], 1) > 0 && array.shape == one) else {
        let what = format!("--input {}: shape {:?}, not {:?}", input.name, array.shape, input.shape);
        return Err(Error::data_shape(what).at(array.path.display()));
    };
    let inner = (product(&input.shape[dim + 1..]) * array.dtype.bytes()) as usize;
    let rows = array.bytes.chunks_exact(inner.max(1));
    Ok(rows.flat_map(|row| row.repeat(input.shape[dim] as usize)).collect::<Vec<u8>>().into())
}

/// Sizes, order and both ends of every part: other data in the same files are found, without reading all of them.
pub fn fingerprint(feeds: &[Feed], layout: Layout, order: Order, seed: u64) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{layout:?} {order:?} {seed}").as_bytes());
    for feed in feeds {
        hasher.update(format!("{:?} {} {} {}", feed.kind, feed.convert.source.name(), feed.outer, feed.inner).as_bytes());
        for (first, part) in &feed.parts {
            let end = part.len().min(4096);
            hasher
                .update(&first.to_le_bytes())
                .update(&(part.len() as u64).to_le_bytes())
                .update(&part[..end])
                .update(&part[part.len() - end..]);
        }
    }
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("a hash has 32 bytes"))
}
