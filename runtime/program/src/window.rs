//! Windows of convolutions and pools: how a dim of the image, of the output and of the kernel lie to each other.
//!
//! Text: `x0 = 2 y0 + 1 k0 - 1`: output 0 sees the image from -1 on, output 1 from 1 on. What lies outside of the image is zero in a
//! convolution and no candidate in a maximum.

use crate::factors::FactorSpec;

/// `image = stride · output + dilation · tap − pad`; each of the three names a factor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Window {
    pub image: String,
    pub output: String,
    pub tap: String,
    pub stride: u32,
    pub dilation: u32,
    /// Elements before the image; negative where the first window begins inside of it.
    pub pad: i32,
}

/// Windows over planes whose dims are one dim of the tensor, `x`, and their results, `y`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Pool {
    /// `n c x -> n c y`.
    pub spec: FactorSpec,
    /// The dims of `x` and of `y`, major first.
    pub dims: Vec<PoolDim>,
}

/// One dim of a pool: `image = stride · output + dilation · tap − pad`, and the sizes. Text: `7 -> 4 taps 3 stride 2 dilation 1 pad 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PoolDim {
    pub image: u64,
    pub outputs: u64,
    pub taps: u64,
    pub stride: u32,
    pub dilation: u32,
    pub pad: i32,
}

impl From<PoolDim> for String {
    fn from(dim: PoolDim) -> String {
        dim.text()
    }
}

impl TryFrom<String> for PoolDim {
    type Error = String;

    fn try_from(text: String) -> Result<PoolDim, String> {
        PoolDim::parse(&text)
    }
}

impl PoolDim {
    pub fn text(&self) -> String {
        let PoolDim { image, outputs, taps, stride, dilation, pad } = self;
        format!("{image} -> {outputs} taps {taps} stride {stride} dilation {dilation} pad {pad}")
    }

    /// Reads what `text` prints.
    pub fn parse(text: &str) -> Result<PoolDim, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let parsed = match words[..] {
            [image, "->", outputs, "taps", taps, "stride", stride, "dilation", dilation, "pad", pad] => (|| {
                let [image, outputs, taps] = [image.parse().ok()?, outputs.parse().ok()?, taps.parse().ok()?];
                let (stride, dilation, pad) = (stride.parse().ok()?, dilation.parse().ok()?, pad.parse().ok()?);
                Some(PoolDim { image, outputs, taps, stride, dilation, pad })
            })(),
            _ => None,
        };
        parsed.ok_or_else(|| format!("`{text}` is no dim of a pool"))
    }

    /// Where in the image `tap` of `output` lies.
    pub fn image_at(&self, output: u64, tap: u64) -> Option<u64> {
        inside((self.stride, output), (self.dilation, tap), self.pad, self.image)
    }
}

impl Pool {
    /// Reads what `text` prints.
    pub fn parse(text: &str) -> Result<Pool, String> {
        let (spec, dims) = text.split_once(';').ok_or("a pool is `spec; dims`")?;
        let dims = dims.split(',').map(PoolDim::parse).collect::<Result<_, _>>()?;
        Ok(Pool { spec: FactorSpec::parse(spec)?, dims })
    }

    pub fn text(&self) -> String {
        let dims: Vec<String> = self.dims.iter().map(PoolDim::text).collect();
        format!("{}; {}", self.spec.text(), dims.join(", "))
    }

    /// Elements of `x` and of `y`.
    pub fn sizes(&self) -> [u64; 2] {
        let product = |size: fn(&PoolDim) -> u64| self.dims.iter().map(size).fold(1, u64::saturating_mul);
        [product(|dim| dim.image), product(|dim| dim.outputs)]
    }
}

/// `stride · output + dilation · tap − pad` where that is below `size`.
fn inside((stride, output): (u32, u64), (dilation, tap): (u32, u64), pad: i32, size: u64) -> Option<u64> {
    let ahead = i128::from(stride) * i128::from(output) + i128::from(dilation) * i128::from(tap);
    u64::try_from(ahead - i128::from(pad)).ok().filter(|&at| at < size)
}

impl From<Window> for String {
    fn from(window: Window) -> String {
        window.text()
    }
}

impl TryFrom<String> for Window {
    type Error = String;

    fn try_from(text: String) -> Result<Window, String> {
        Window::parse(&text)
    }
}

impl Window {
    pub fn text(&self) -> String {
        let Window { image, output, tap, stride, dilation, pad } = self;
        let (sign, size) = (if *pad < 0 { '+' } else { '-' }, pad.unsigned_abs());
        format!("{image} = {stride} {output} + {dilation} {tap} {sign} {size}")
    }

    /// Reads what `text` prints.
    pub fn parse(text: &str) -> Result<Window, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let parsed = match words[..] {
            [image, "=", stride, output, "+", dilation, tap, sign @ ("+" | "-"), pad] => (|| {
                let pad: i32 = pad.parse().ok().filter(|&pad| pad >= 0)?;
                let (stride, dilation) = (stride.parse().ok()?, dilation.parse().ok()?);
                let [image, output, tap] = [image, output, tap].map(str::to_owned);
                Some(Window { image, output, tap, stride, dilation, pad: if sign == "-" { pad } else { -pad } })
            })(),
            _ => None,
        };
        parsed.ok_or_else(|| format!("`{text}` is no window such as `x = 2 y + 1 k - 1`"))
    }

    /// The three factors in the order image, output, tap.
    pub fn names(&self) -> [&str; 3] {
        [&self.image, &self.output, &self.tap]
    }

    /// Where in an image of `size` elements `tap` of `output` lies.
    pub fn image_at(&self, output: u64, tap: u64, size: u64) -> Option<u64> {
        inside((self.stride, output), (self.dilation, tap), self.pad, size)
    }
}

/// Windows as one text, separated by commas.
pub fn windows_text(windows: &[Window]) -> String {
    windows.iter().map(Window::text).collect::<Vec<_>>().join(", ")
}

/// Reads what `windows_text` prints.
pub fn parse_windows(text: &str) -> Result<Vec<Window>, String> {
    text.split(',').filter(|window| !window.trim().is_empty()).map(Window::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_round_trip() {
        let text = "x0 = 2 y0 + 1 k0 - 1, x1 = 1 y1 + 3 k1 + 2";
        let windows = parse_windows(text).unwrap();
        assert_eq!(windows_text(&windows), text);
        assert_eq!(windows[1].pad, -2);
        for wrong in ["x = y + k", "x = 2 y + 1 k - -1", "x = 2 y + 1 k * 1", "= 2 y + 1 k - 1"] {
            assert!(Window::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pools_round_trip() {
        let text = "n c x -> n c y; 7 -> 4 taps 3 stride 2 dilation 1 pad 1, 6 -> 2 taps 2 stride 3 dilation 2 pad -1";
        let pool = Pool::parse(text).unwrap();
        assert_eq!(pool.text(), text);
        assert_eq!(pool.sizes(), [42, 8]);
        assert!(Pool::parse("n x -> n y; 7 -> 4 taps 3 stride 2").is_err());
    }

    #[test]
    fn positions_outside_of_the_image_are_none() {
        let window = Window::parse("x = 2 y + 3 k - 1").unwrap();
        let at: Vec<Option<u64>> = [(0, 0), (0, 1), (1, 0), (1, 2)].map(|(y, k)| window.image_at(y, k, 7)).to_vec();
        assert_eq!(at, [None, Some(2), Some(1), None]);
    }
}
