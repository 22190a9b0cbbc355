//! The model's inputs with all sizes bound: symbolic dims from the command line, the batch from the global batch size.

use std::collections::{BTreeMap, BTreeSet};

use dcc_program::{DType, Shape};

use super::Options;
use super::flatten::{Flat, flatten};
use super::model::Model;
use super::node::ValueId;
use super::proto::ValueInfoProto;
use super::proto::tensor_shape_proto::dimension::Value as Dim;
use super::proto::type_proto::Value as Type;
use super::tensor::dtype;
use crate::error::{Error, Result};

/// An input of the model, of static shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    /// The dim that counts samples.
    pub batch_dim: Option<u8>,
    /// Whether an output depends on it.
    pub used: bool,
}

/// A dim as the file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Size {
    Fixed(u64),
    Symbol(String),
}

struct Declared {
    name: String,
    dtype: DType,
    dims: Vec<Size>,
    batch_dim: Option<usize>,
}

/// Inputs of the graph in order, and the global batch size if any input counts samples.
#[derive(Clone, Debug, Default)]
pub(super) struct Bound {
    pub inputs: Vec<(ValueId, InputInfo)>,
    pub batch: Option<u64>,
    /// The batch that a static export has in its shapes.
    pub baked: Option<u64>,
}

pub(super) fn bind(flat: &Flat, options: &Options) -> Result<Bound> {
    let mut declared = declarations(flat)?;
    for name in options.batch_dims.keys().chain(options.constants.keys()) {
        if !declared.iter().any(|(_, input)| input.name == *name) {
            let names: Vec<&str> = declared.iter().map(|(_, input)| input.name.as_str()).collect();
            return Err(
                Error::usage(format!("the model has no input `{name}`")).note(format!("its inputs: {}", names.join(", ")))
            );
        }
    }
    check_dims(&declared, options)?;
    if options.global_batch == Some(0) {
        return Err(Error::usage("the global batch size is 0"));
    }
    let symbols = choose_batch(&mut declared, options)?;
    let baked = if symbols.is_empty() { baked_batch(&declared)? } else { None };
    let given = symbols.iter().find_map(|symbol| options.dims.get(symbol).copied());
    let mut sizes = options.dims.clone();
    if let Some(batch) = options.global_batch.or(given) {
        for symbol in &symbols {
            let size = *sizes.entry(symbol.clone()).or_insert(batch);
            if size != batch {
                return Err(Error::usage(format!("--dim {symbol}={size} contradicts the global batch size {batch}"))
                    .help(format!("`{symbol}` is the model's batch dim; give one of the two")));
            }
        }
    }
    check_unbound(&declared, &sizes, &symbols)?;
    let batch =
        symbols.first().map(|symbol| sizes[symbol]).or(options.global_batch).or(baked).filter(|_| counts_samples(&declared));
    let size = |dim: &Size| match dim {
        Size::Fixed(size) => *size,
        Size::Symbol(name) => sizes[name],
    };
    let inputs = declared.iter().map(|(id, input)| {
        let mut shape: Vec<i64> = input.dims.iter().map(|dim| size(dim) as i64).collect();
        if let (Some(dim), Some(batch)) = (input.batch_dim, batch) {
            shape[dim] = batch as i64;
        }
        let shape = super::tensor::dims(&shape).map_err(|error| error.at(format!("input `{}`", input.name)))?;
        let batch_dim = input.batch_dim.map(|dim| dim as u8);
        Ok((*id, InputInfo { name: input.name.clone(), dtype: input.dtype, shape, batch_dim, used: true }))
    });
    Ok(Bound { inputs: inputs.collect::<Result<_>>()?, batch, baked })
}

/// Errors: an input that dcc cannot hold, and the first node that reads it.
fn declarations(flat: &Flat) -> Result<Vec<(ValueId, Declared)>> {
    let declaration = |&(id, info): &(ValueId, &ValueInfoProto)| {
        let reader = flat.nodes.iter().find(|node| node.reads().any(|read| read == id));
        let place = format!("input `{}`", info.name());
        match reader {
            Some(node) => Ok((id, declare(info, format!("{place}, read by {}", node.place()))?)),
            // What has an input of a kind that dcc does not know has a node of that kind too.
            None => {
                let first = flat.nodes.first().map_or(String::new(), |node| format!("; the first node is {}", node.place()));
                Ok((id, declare(info, format!("{place}, read by none{first}"))?))
            }
        }
    };
    flat.inputs.iter().map(declaration).collect()
}

/// Whether dcc can hold what the model's inputs are. Errors: as `bind`, before any size is known.
pub fn check_inputs(model: &Model) -> Result<()> {
    declarations(&flatten(model)?).map(drop)
}

/// The name of a dim that is open. Exporters also write `?` and the like, which then need not be the same everywhere, or a
/// negative size.
pub fn symbol(dim: Option<&Dim>) -> Option<&str> {
    match dim {
        Some(Dim::DimParam(symbol)) if !matches!(symbol.as_str(), "" | "?" | "-1" | "None" | "*") => Some(symbol),
        _ => None,
    }
}

fn declare(info: &ValueInfoProto, place: String) -> Result<Declared> {
    let name = info.name().to_owned();
    let Some(Type::TensorType(tensor)) = info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else {
        return Err(Error::dtype("an input that is not a tensor").at(place));
    };
    let dtype = dtype(tensor.elem_type()).map_err(|error| error.at(&place))?;
    let Some(shape) = &tensor.shape else {
        return Err(Error::shape("an input of unknown rank").at(place).help("export with static or named dims"));
    };
    let mut dims = Vec::with_capacity(shape.dim.len());
    for (position, dim) in shape.dim.iter().enumerate() {
        dims.push(match &dim.value {
            Some(Dim::DimValue(size @ 0..)) => Size::Fixed(super::tensor::dims(&[*size]).map_err(|error| error.at(&place))?[0]),
            other => Size::Symbol(symbol(other.as_ref()).map_or_else(|| format!("{name}.{position}"), str::to_owned)),
        });
    }
    Ok(Declared { name, dtype, dims, batch_dim: None })
}

/// Sets each input's batch dim; gives the symbols that stand for the batch. Towers that were exported with a symbol each share their
/// samples where the user says that both count them.
fn choose_batch(declared: &mut [(ValueId, Declared)], options: &Options) -> Result<BTreeSet<String>> {
    let symbol = |input: &Declared, dim: u8| match input.dims.get(usize::from(dim)) {
        Some(Size::Symbol(symbol)) => Some(symbol.clone()),
        _ => None,
    };
    let said = |(_, input): &(ValueId, Declared)| options.batch_dims.get(&input.name).copied();
    let mut symbols: BTreeSet<String> =
        declared.iter().filter_map(|input| said(input)?.and_then(|dim| symbol(&input.1, dim))).collect();
    if symbols.is_empty() {
        let unsaid = declared.iter().filter(|input| said(input).is_none());
        symbols = unsaid.filter_map(|(_, input)| symbol(input, 0)).collect();
        if symbols.len() > 1 {
            symbols.retain(|symbol| !options.dims.contains_key(symbol));
        }
        let unnamed = |(_, input): &(ValueId, Declared)| symbol(input, 0).is_none_or(|symbol| is_unnamed(&symbol, &input.name));
        if symbols.len() > 1 && !declared.iter().all(unnamed) {
            return Err(ambiguous(declared, &symbols));
        }
    }
    for (_, input) in declared.iter_mut() {
        input.batch_dim = match options.batch_dims.get(&input.name) {
            Some(None) => None,
            Some(&Some(dim)) if usize::from(dim) >= input.dims.len() => {
                return Err(Error::usage(format!("--batch-dim {}={dim}: the input has {} dims", input.name, input.dims.len())));
            }
            Some(&Some(dim)) => Some(usize::from(dim)),
            None if symbols.is_empty() => (!input.dims.is_empty()).then_some(0),
            None => symbol(input, 0).is_some_and(|symbol| symbols.contains(&symbol)).then_some(0),
        };
    }
    Ok(symbols)
}

/// Whether nobody has named the first dim of an input, but perhaps a tool that numbers dims: it counts samples, as a dim of fixed size
/// in its place would.
fn is_unnamed(symbol: &str, input: &str) -> bool {
    let number = ["unk__", "DynamicDimension."].into_iter().find_map(|prefix| symbol.strip_prefix(prefix));
    *symbol == format!("{input}.0") || number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn ambiguous(declared: &[(ValueId, Declared)], symbols: &BTreeSet<String>) -> Error {
    let (mut flags, mut places) = (Vec::new(), Vec::new());
    for (_, input) in declared {
        if let Some(Size::Symbol(symbol)) = input.dims.first()
            && symbols.contains(symbol)
        {
            flags.push(format!("--batch-dim {}=0", input.name));
            places.push(format!("`{symbol}` of {}", input.name));
        }
    }
    Error::unbound(format!("more than one symbol could be the batch: {}", places.join(", ")))
        .note("a symbol that does not count samples needs a size instead: --dim SYMBOL=N")
        .help(format!("add {}", flags.join(" ")))
}

/// Errors: a size of a symbol that no input has.
fn check_dims(declared: &[(ValueId, Declared)], options: &Options) -> Result<()> {
    let dims = declared.iter().flat_map(|(_, input)| &input.dims);
    let symbol = |dim: &Size| if let Size::Symbol(symbol) = dim { Some(format!("`{symbol}`")) } else { None };
    let known: BTreeSet<String> = dims.filter_map(symbol).collect();
    match options.dims.iter().find(|(name, _)| !known.contains(&format!("`{name}`"))) {
        None => Ok(()),
        Some((name, size)) => Err(Error::usage(format!("--dim {name}={size}: the model has no symbolic dim `{name}`")).help(
            match known.is_empty() {
                true => "drop it: all dims of the model's inputs have sizes".to_owned(),
                false => format!("its symbolic dims: {}", Vec::from_iter(known).join(", ")),
            },
        )),
    }
}

fn counts_samples(declared: &[(ValueId, Declared)]) -> bool {
    declared.iter().any(|(_, input)| input.batch_dim.is_some())
}

/// The size that the batch dims of all inputs have.
fn baked_batch(declared: &[(ValueId, Declared)]) -> Result<Option<u64>> {
    let mut batch = None;
    for (_, input) in declared {
        let Some(Size::Fixed(size)) = input.batch_dim.map(|dim| &input.dims[dim]) else { continue };
        let first = batch.get_or_insert((size, &input.name));
        if first.0 != size {
            let what =
                format!("dim 0 of `{}` is {}, of `{}` {size}: which inputs count samples?", first.1, first.0, input.name);
            return Err(Error::unbound(what).help(format!("mark those that do not: `--batch-dim {}=none`", input.name)));
        }
    }
    Ok(batch.map(|(size, _)| *size))
}

fn check_unbound(declared: &[(ValueId, Declared)], sizes: &BTreeMap<String, u64>, batch: &BTreeSet<String>) -> Result<()> {
    let mut open: BTreeMap<&str, String> = BTreeMap::new();
    for (_, input) in declared {
        for (position, dim) in input.dims.iter().enumerate() {
            if let Size::Symbol(symbol) = dim
                && !sizes.contains_key(symbol)
            {
                open.entry(symbol).or_insert_with(|| format!("`{symbol}` (dim {position} of {})", input.name));
            }
        }
    }
    if open.is_empty() {
        return Ok(());
    }
    let flag = |symbol: &&str| match batch.contains(*symbol) {
        true => "--global-batch-size B".to_owned(),
        false => format!("--dim {symbol}=N"),
    };
    let mut flags: Vec<String> = open.keys().map(flag).collect();
    let mut seen = BTreeSet::new();
    flags.retain(|flag| seen.insert(flag.clone()));
    let listed: Vec<String> = open.into_values().collect();
    Err(Error::unbound(format!("the model leaves open the size of {}", listed.join(", ")))
        .help(format!("add {}", flags.join(" "))))
}
