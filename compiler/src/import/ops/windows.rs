//! What the attributes of convolutions and pools say of each spatial dim.

use dcc_program::{PoolDim, Shape, Window};

use super::{Call, attribute_value};
use crate::error::{Error, Result};

/// Kernel sizes, strides, dilations and pads of the spatial dims.
#[derive(Clone, Debug)]
pub struct Windows {
    pub image: Shape,
    pub taps: Vec<u64>,
    pub strides: Vec<u64>,
    pub dilations: Vec<u64>,
    /// Before and after.
    pub pads: Vec<[i64; 2]>,
}

/// Where pads come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoPad {
    Given,
    Valid,
    /// As many outputs as strides fit; an odd pad goes to the end, or to the start.
    SameUpper,
    SameLower,
}

pub fn auto_pad(call: &Call) -> Result<AutoPad> {
    match call.node.string_or("auto_pad", "NOTSET")? {
        "NOTSET" | "" => Ok(AutoPad::Given),
        "VALID" => Ok(AutoPad::Valid),
        "SAME_UPPER" => Ok(AutoPad::SameUpper),
        "SAME_LOWER" => Ok(AutoPad::SameLower),
        other => Err(attribute_value("auto_pad", other)),
    }
}

/// Both sides of a total pad, of which the odd one is at the start or at the end; what a negative one adds is at the end.
pub fn halves(total: i64, at_start: bool) -> [i64; 2] {
    let start = if at_start { total - total.div_euclid(2) } else { total / 2 };
    [start, total - start]
}

/// A list attribute of one positive number for each of `dims` dims, 1 by default.
fn counts(call: &Call, name: &str, dims: usize) -> Result<Vec<u64>> {
    let Some(given) = call.node.ints(name)? else { return Ok(vec![1; dims]) };
    let positive: Option<Vec<u64>> = given.iter().map(|&n| u32::try_from(n).ok().filter(|&n| n > 0).map(u64::from)).collect();
    let fits = positive.filter(|list| list.len() == dims);
    fits.ok_or_else(|| Error::attribute(format!("{name} = {given:?} is not a positive number for each of {dims} dims")))
}

impl Windows {
    /// Of an image with these spatial dims. Pools have `kernel_shape`, convolutions their kernel's shape.
    pub fn new(call: &Call, image: &[u64], taps: Option<&[u64]>) -> Result<Windows> {
        let dims = image.len();
        let said = call.node.ints("kernel_shape")?.is_some().then(|| counts(call, "kernel_shape", dims)).transpose()?;
        let taps = match (taps, said) {
            (Some(taps), Some(said)) if taps != said => {
                return Err(Error::shape(format!("kernel_shape {said:?} of a kernel of shape {taps:?}")));
            }
            (Some(taps), _) => taps.to_vec(),
            (None, Some(said)) => said,
            (None, None) => return Err(Error::attribute("kernel_shape is missing")),
        };
        if dims == 0 || taps.len() != dims || image.contains(&0) || taps.contains(&0) {
            return Err(Error::shape(format!("windows of {taps:?} over an image of {image:?}")));
        }
        let mut windows = Windows {
            image: Shape::from_slice(image),
            taps,
            strides: counts(call, "strides", dims)?,
            dilations: counts(call, "dilations", dims)?,
            pads: vec![[0; 2]; dims],
        };
        if let Some(given) = call.node.ints("pads")? {
            // Far more than any image, and no sum of them overflows.
            if given.len() != 2 * dims || given.iter().any(|pad| pad.unsigned_abs() > 1 << 30) {
                return Err(Error::attribute(format!("pads = {given:?} of {dims} dims")));
            }
            windows.pads = (0..dims).map(|d| [given[d], given[d + dims]]).collect();
        }
        if (0..dims).any(|d| windows.image[d] > 1 << 40 || windows.taps[d] > 1 << 30) {
            return Err(Error::limit(format!("windows of {:?} over an image of {image:?}", windows.taps)));
        }
        Ok(windows)
    }

    pub fn rank(&self) -> usize {
        self.image.len()
    }

    /// Elements from a window's first tap to its last.
    pub fn extent(&self, d: usize) -> i64 {
        self.dilations[d] as i64 * (self.taps[d] as i64 - 1) + 1
    }

    /// Pads of the image as `auto_pad` asks for them.
    pub fn resolve(&mut self, auto: AutoPad) {
        for d in 0..self.rank() {
            let (size, stride) = (self.image[d] as i64, self.strides[d] as i64);
            match auto {
                AutoPad::Given => {}
                AutoPad::Valid => self.pads[d] = [0, 0],
                AutoPad::SameUpper | AutoPad::SameLower => {
                    let outputs = (size + stride - 1) / stride;
                    let total = ((outputs - 1) * stride + self.extent(d) - size).max(0);
                    self.pads[d] = halves(total, auto == AutoPad::SameLower);
                }
            }
        }
    }

    /// Outputs along each dim. With `ceil`, the last window may lack elements, as the only one may, but has to begin in the image or
    /// the pad before it.
    pub fn outputs(&self, ceil: bool) -> Result<Vec<u64>> {
        let output = |d: usize| {
            let (size, stride, [before, after]) = (self.image[d] as i64, self.strides[d] as i64, self.pads[d]);
            let room = size + before + after - self.extent(d);
            let moves = if ceil { room + stride - 1 } else { room }.div_euclid(stride);
            let outputs = if ceil && moves * stride >= size + before { moves } else { moves + 1 };
            let wrong = || Error::shape(format!("a window of {} over {} elements", self.extent(d), size + before + after));
            u64::try_from(outputs).ok().filter(|&outputs| outputs > 0).ok_or_else(wrong)
        };
        (0..self.rank()).map(output).collect()
    }

    /// Without the taps that lie behind the image in every window.
    pub fn clipped(&self) -> Windows {
        let reached = |d: usize| (self.image[d] as i64 - 1 + self.pads[d][0]).div_euclid(self.dilations[d] as i64) + 1;
        let taps = (0..self.rank()).map(|d| self.taps[d].min(reached(d).max(1) as u64)).collect();
        Windows { taps, ..self.clone() }
    }

    /// Whether each window is one element of the image, and all are in order.
    pub fn is_identity(&self) -> bool {
        (0..self.rank()).all(|d| self.taps[d] == 1 && self.strides[d] == 1 && self.pads[d] == [0, 0])
    }

    /// The relations of dims `x0 x1 …`, `y0 y1 …` and `k0 k1 …`.
    pub fn relations(&self) -> Vec<Window> {
        let window = |d: usize| Window {
            image: format!("x{d}"),
            output: format!("y{d}"),
            tap: format!("k{d}"),
            stride: self.strides[d] as u32,
            dilation: self.dilations[d] as u32,
            pad: self.pads[d][0] as i32,
        };
        (0..self.rank()).map(window).collect()
    }

    pub fn pool_dims(&self, outputs: &[u64]) -> Vec<PoolDim> {
        let dim = |d: usize| PoolDim {
            image: self.image[d],
            outputs: outputs[d],
            taps: self.taps[d],
            stride: self.strides[d] as u32,
            dilation: self.dilations[d] as u32,
            pad: self.pads[d][0] as i32,
        };
        (0..self.rank()).map(dim).collect()
    }
}

/// `x0 x1 …`
pub fn names(letter: char, dims: usize) -> String {
    (0..dims).map(|d| format!("{letter}{d}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Image, taps, stride, dilation and pad of both sides; and the outputs without and with `ceil_mode`, 0 where it is refused, by
    /// PyTorch 2.15: `F.max_pool1d(torch.zeros(1, 1, image), taps, stride, pad, dilation, ceil).shape[2]`.
    const OUTPUTS: &[([u64; 5], [u64; 2])] = &[
        ([3, 896, 896, 1, 0], [0, 1]),
        ([3, 5, 2, 1, 0], [0, 0]),
        ([3, 5, 1, 1, 0], [0, 0]),
        ([3, 4, 2, 1, 0], [0, 1]),
        ([7, 3, 2, 1, 1], [4, 4]),
        ([6, 3, 2, 1, 1], [3, 4]),
        ([5, 2, 3, 1, 1], [2, 2]),
        ([4, 2, 3, 1, 1], [2, 2]),
        ([3, 2, 4, 1, 1], [1, 1]),
        ([4, 3, 4, 3, 1], [0, 1]),
        ([4, 3, 3, 4, 1], [0, 0]),
        ([1, 3, 2, 1, 1], [1, 1]),
    ];

    fn windows([image, taps, stride, dilation, pad]: [u64; 5]) -> Windows {
        Windows {
            image: Shape::from_slice(&[image]),
            taps: vec![taps],
            strides: vec![stride],
            dilations: vec![dilation],
            pads: vec![[pad as i64; 2]],
        }
    }

    #[test]
    fn outputs_are_as_many_as_in_torch() {
        for &(sizes, expected) in OUTPUTS {
            let found = [false, true].map(|ceil| windows(sizes).outputs(ceil).map_or(0, |outputs| outputs[0]));
            assert_eq!(found, expected, "{sizes:?}");
        }
    }

    #[test]
    fn clipped_windows_see_what_whole_ones_see() {
        for &(sizes, [_, outputs]) in OUTPUTS {
            let (whole, clipped) = (windows(sizes), windows(sizes).clipped());
            let seen = |windows: &Windows| -> Vec<u64> {
                let dim = windows.pool_dims(&[outputs])[0];
                (0..outputs).flat_map(|y| (0..dim.taps).filter_map(move |k| dim.image_at(y, k))).collect()
            };
            assert_eq!(seen(&clipped), seen(&whole), "{sizes:?}");
            assert!(clipped.taps[0] <= sizes[0] + sizes[4], "{sizes:?}: {} taps", clipped.taps[0]);
        }
    }
}
