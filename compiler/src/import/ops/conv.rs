//! Convolutions and transposed convolutions.
//!
//! Groups become a dim of their own: `(g c)` of the image, `(g o)` of the kernel. A kernel of one element without pads and strides
//! is a matrix product, and imported as one.

use dcc_program::kernel::BinaryOp;
use dcc_program::{FactorSpec, Shape};

use super::windows::{AutoPad, Windows, auto_pad, halves, names};
use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::value::Value;
use crate::ops::Convolution;

pub const ONNX: &[(&str, Import)] = &[("Conv", conv), ("ConvTranspose", conv_transpose)];

/// Channels of the image, of the kernel's second dim and of the result, and the groups.
struct Channels {
    groups: u64,
    /// Of one group.
    image: u64,
    kernel: u64,
}

impl Channels {
    /// Of an image `[N, C, …]` and a kernel whose dim 0 is split by group.
    fn new(call: &Call, image: &[u64], kernel: &[u64]) -> Result<Channels> {
        let groups = u64::try_from(call.node.int_or("group", 1)?).unwrap_or(0);
        let wrong = |why: &str| Error::shape(format!("{} of {image:?} with a kernel of {kernel:?}: {why}", call.node.op));
        if image.len() < 3 || kernel.len() != image.len() {
            return Err(wrong("batch, channels and the same spatial dims in both expected"));
        }
        if groups == 0 || !image[1].is_multiple_of(groups) || !kernel[0].is_multiple_of(groups) {
            return Err(wrong(&format!("{groups} groups do not divide the channels")));
        }
        Ok(Channels { groups, image: image[1] / groups, kernel: kernel[0] / groups })
    }

    /// Factor names, and a shape, of a tensor whose channels lie in `dims`: size and name of each; group and channel dims of size 1
    /// are left out where `drop` says so.
    fn part(lead: &[(&str, u64)], spatial: (char, &[u64])) -> (String, Shape) {
        let lead_names = lead.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
        let shape = lead.iter().map(|&(_, size)| size).chain(spatial.1.iter().copied()).collect();
        (format!("{lead_names} {}", names(spatial.0, spatial.1.len())), shape)
    }
}

fn with_bias(build: &mut Build, call: &Call, y: Value) -> Result<Value> {
    // PyTorch's exporter writes zeros where the module has no bias, those of 3-D convolutions in a wrong shape.
    let Some(bias) = call.optional(2).filter(|bias| bias.uniform() != Some(0.0)) else { return Ok(y) };
    let rank = y.rank(build)?;
    let size: u64 = bias.shape(build)?.iter().product();
    let mut shape = vec![1; rank - 1];
    shape[0] = size;
    let bias = build.reshape(bias, &shape)?;
    build.binary(BinaryOp::Add, &y, &bias)
}

pub(super) fn conv(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (x, w) = (call.input(0)?, call.input(1)?);
    let (image, kernel) = (x.shape(build)?, w.shape(build)?);
    let channels = Channels::new(call, &image, &kernel)?;
    if kernel[1] != channels.image {
        let what = format!("Conv of {} channels in {} groups with a kernel of {:?}", image[1], channels.groups, &kernel[..]);
        return Err(Error::shape(what));
    }
    let mut windows = Windows::new(call, &image[2..], Some(&kernel[2..]))?;
    windows.resolve(auto_pad(call)?);
    let outputs = windows.outputs(false)?;
    if channels.groups == 1 && windows.is_identity() {
        let spatial = names('x', windows.rank());
        let spatial: Vec<&str> = spatial.split(' ').collect();
        let w = build.reshape(w, &kernel[..2])?;
        let (from, to) = ([&["n", "c"], &spatial[..]].concat(), [&["n", "o"], &spatial[..]].concat());
        let y = build.dot((x, &from), (&w, &["o", "c"]), &to)?;
        return Ok(vec![with_bias(build, call, y)?]);
    }
    let Channels { groups: g, image: c, kernel: o } = channels;
    let (x_lead, w_lead, y_lead) = leads(image[0], [g, c, o]);
    let (x_names, x_shape) = Channels::part(&x_lead, ('x', &image[2..]));
    let (w_names, w_shape) = Channels::part(&w_lead, ('k', &kernel[2..]));
    let (y_names, _) = Channels::part(&y_lead, ('y', &outputs));
    let (x, w) = (build.reshape(x, &x_shape)?, build.reshape(w, &w_shape)?);
    let y = convolution(build, (&x, &w), &format!("{x_names}, {w_names} -> {y_names}"), &windows, &outputs)?;
    let shape: Shape = [image[0], kernel[0]].into_iter().chain(outputs).collect();
    let y = build.reshape(&y, &shape)?;
    Ok(vec![with_bias(build, call, y)?])
}

type Lead = Vec<(&'static str, u64)>;

/// The dims before the spatial ones of image, kernel and result, for `n` samples, `g` groups, `c` channels in and `o` out of each.
/// Where each channel is a group, the dims of one channel are left out.
fn leads(n: u64, [g, c, o]: [u64; 3]) -> (Lead, Lead, Lead) {
    let keep = |dims: &[(&'static str, u64)]| -> Lead {
        let kept = |&(name, size): &(&'static str, u64)| match name {
            "g" => g > 1,
            "c" | "o" => g == 1 || size > 1,
            _ => true,
        };
        dims.iter().copied().filter(kept).collect()
    };
    (keep(&[("n", n), ("g", g), ("c", c)]), keep(&[("g", g), ("o", o), ("c", c)]), keep(&[("n", n), ("g", g), ("o", o)]))
}

pub(super) fn convolution(
    build: &mut Build,
    (a, b): (&Value, &Value),
    spec: &str,
    windows: &Windows,
    sizes: &[u64],
) -> Result<Value> {
    let (a, b) = (build.node(a)?, build.node(b)?);
    let spec = FactorSpec::parse(spec).expect("factor names are identifiers");
    Ok(build
        .graph
        .add(Convolution { spec, windows: windows.relations(), sizes: Shape::from_slice(sizes), wide: false }, &[a, b])?
        .into())
}

/// The gradient of a convolution's image: x is in the place of its output.
fn conv_transpose(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (x, w) = (call.input(0)?, call.input(1)?);
    let (image, kernel) = (x.shape(build)?, w.shape(build)?);
    let channels = Channels::new(call, &image, &kernel)?;
    if kernel[0] != image[1] {
        return Err(Error::shape(format!("ConvTranspose of {} channels with a kernel of {:?}", image[1], &kernel[..])));
    }
    let mut windows = Windows::new(call, &image[2..], Some(&kernel[2..]))?;
    let results = transposed_sizes(call, &mut windows)?;
    let (g, o) = (channels.groups, kernel[1]);
    let (x_lead, w_lead, y_lead) = leads(image[0], [g, channels.image, o]);
    let order: Lead = ["g", "c", "o"].iter().filter_map(|n| w_lead.iter().find(|(name, _)| name == n).copied()).collect();
    let (x_names, x_shape) = Channels::part(&x_lead, ('y', &image[2..]));
    let (w_names, w_shape) = Channels::part(&order, ('k', &kernel[2..]));
    let (y_names, _) = Channels::part(&y_lead, ('x', &results));
    let (x, w) = (build.reshape(x, &x_shape)?, build.reshape(w, &w_shape)?);
    let y = convolution(build, (&x, &w), &format!("{x_names}, {w_names} -> {y_names}"), &windows, &results)?;
    let shape: Shape = [image[0], g * o].into_iter().chain(results).collect();
    let y = build.reshape(&y, &shape)?;
    Ok(vec![with_bias(build, call, y)?])
}

/// Sizes of the result, from pads or the other way around.
fn transposed_sizes(call: &Call, windows: &mut Windows) -> Result<Vec<u64>> {
    let dims = windows.rank();
    let auto = auto_pad(call)?;
    let list = |name: &str| {
        let given = call.node.ints(name)?;
        let fits =
            |list: &&[i64]| (list.len() == dims || list.len() == dims + 2) && list.iter().all(|&n| (0..1 << 30).contains(&n));
        match given {
            Some(list) if !fits(&list) => Err(Error::attribute(format!("{name} = {list:?} of {dims} dims"))),
            // Some exporters give batch and channels too.
            Some(list) => Ok(Some(list[list.len() - dims..].to_vec())),
            None => Ok(None),
        }
    };
    let extra = list("output_padding")?.unwrap_or_else(|| vec![0; dims]);
    let wanted = list("output_shape")?;
    let mut sizes = Vec::new();
    for d in 0..dims {
        let (size, stride) = (windows.image[d] as i64, windows.strides[d] as i64);
        let full = stride * (size - 1) + extra[d] + windows.extent(d);
        let wanted = match (&wanted, auto) {
            (Some(wanted), _) => Some(wanted[d]),
            (None, AutoPad::SameUpper | AutoPad::SameLower) => Some(size * stride),
            (None, AutoPad::Given | AutoPad::Valid) => None,
        };
        windows.pads[d] = match wanted {
            Some(wanted) => halves(full - wanted, auto != AutoPad::SameUpper),
            None if auto == AutoPad::Valid => [0, 0],
            None => windows.pads[d],
        };
        let made = full - windows.pads[d][0] - windows.pads[d][1];
        let made = u64::try_from(made).ok().filter(|&made| made > 0);
        sizes.push(made.ok_or_else(|| Error::shape(format!("ConvTranspose of {size} elements leaves none after its pads")))?);
    }
    Ok(sizes)
}
