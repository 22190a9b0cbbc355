//! `convolution`: a contraction in which windows relate a dim of the image, of the output and of the kernel.
//!
//! The relation `image = stride · output + dilation · tap − pad` treats its three tensors alike: what sums over taps is a convolution, over
//! outputs too the gradient of its kernel, and what is left is the gradient of its image, a transposed convolution. So one op is
//! all three, and each is the gradient of the other two. A group is a factor that all three tensors have.

use super::dot::{factor_sizes, factor_strides, infer_by_spec, is_false, respec, sum_dtype};
use super::example::{Example, floats, rounded};
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Tensor, offsets};
use dcc_program::factors::DimFactors;
use dcc_program::{DType, FactorId, FactorSpec, Shape, TensorType, Window};
use serde::{Deserialize, Serialize};

/// `Σ` over the factors missing from the result of the product of both operands, over those triples that the windows relate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Convolution {
    /// For instance `n c x, o c k -> n o y`.
    pub spec: FactorSpec,
    /// Each has one factor in either operand and one in the result.
    pub windows: Vec<Window>,
    /// Size of each window's factor in the result, which no operand has.
    pub sizes: Shape,
    /// Half floats give f32, in which they are summed, instead of their own dtype.
    #[serde(default, skip_serializing_if = "is_false")]
    pub wide: bool,
}

impl Convolution {
    /// From texts known to parse.
    pub fn of(spec: &str, windows: &str, sizes: &[u64]) -> Convolution {
        let spec = FactorSpec::parse(spec).expect("a convolution of ours parses");
        let windows = dcc_program::window::parse_windows(windows).expect("a window of ours parses");
        Convolution { spec, windows, sizes: Shape::from_slice(sizes), wide: false }
    }

    fn factor(&self, name: &str) -> Option<FactorId> {
        self.spec.names.iter().position(|n| n == name).map(|i| FactorId(i as u8))
    }

    /// The factor of each window that `dims` have.
    fn window_factors(&self, dims: &[DimFactors]) -> Vec<Option<FactorId>> {
        let has = |f: &FactorId| dims.iter().any(|dim| dim[..] == [*f]);
        let of = |w: &Window| w.names().into_iter().filter_map(|name| self.factor(name)).find(has);
        self.windows.iter().map(of).collect()
    }

    /// All factors of windows.
    fn moved(&self) -> Vec<FactorId> {
        self.windows.iter().flat_map(|w| w.names()).filter_map(|name| self.factor(name)).collect()
    }

    /// What is wrong with the spec, if anything is.
    fn flaw(&self) -> Option<String> {
        let spec = &self.spec;
        if spec.operands.len() != 2 || self.sizes.len() != self.windows.len() {
            return Some("two operands and a size for each window expected".to_owned());
        }
        if self.windows.iter().any(|w| w.stride == 0 || w.dilation == 0) {
            return Some("a window that does not move".to_owned());
        }
        let moved = self.moved();
        if moved.len() != 3 * self.windows.len() || (1..moved.len()).any(|i| moved[..i].contains(&moved[i])) {
            return Some("a window's factor is unknown, or in two windows".to_owned());
        }
        let sides = [&spec.operands[0], &spec.operands[1], &spec.result];
        let each_has_one = sides.iter().all(|dims| self.window_factors(dims).iter().all(Option::is_some));
        let count = |f: FactorId| {
            [spec.in_operand(0, f), spec.in_operand(1, f), spec.in_result(f)].into_iter().filter(|&has| has).count()
        };
        let placed = spec.ids().all(|f| if moved.contains(&f) { count(f) == 1 } else { count(f) > 1 });
        (!each_has_one || !placed).then(|| "a factor is in too many or too few tensors".to_owned())
    }
}

/// Offsets in both operands and the result.
type Triple = [usize; 3];

/// All triples of elements that meet along the windows.
fn meeting(op: &Convolution, sizes: &[u64], strides: &[Vec<isize>; 3]) -> Vec<Triple> {
    let mut all = vec![[0; 3]];
    for window in &op.windows {
        let [image, output, tap] = window.names().map(|name| usize::from(op.factor(name).expect("infer saw it").0));
        let mut pairs = Vec::new();
        for y in 0..sizes[output] {
            for k in 0..sizes[tap] {
                let Some(x) = window.image_at(y, k, sizes[image]) else { continue };
                let at = |s: &Vec<isize>| {
                    s[image] as usize * x as usize + s[output] as usize * y as usize + s[tap] as usize * k as usize
                };
                pairs.push([at(&strides[0]), at(&strides[1]), at(&strides[2])]);
            }
        }
        all = all.iter().flat_map(|a| pairs.iter().map(move |b| [a[0] + b[0], a[1] + b[1], a[2] + b[2]])).collect();
    }
    all
}

impl OpDef for Convolution {
    const NAME: &'static str = "convolution";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(Self::NAME, operands)?;
        if a.dtype != b.dtype || !a.dtype.is_float() {
            return Err(Error::dtype(format!("convolution of {} and {}", a.dtype.name(), b.dtype.name())));
        }
        if let Some(flaw) = self.flaw() {
            return Err(Error::shape(format!("convolution({}): {flaw}", self.spec.text())));
        }
        let made = self.window_factors(&self.spec.result);
        let mut known = self.spec.clone();
        known.result.retain(|dim| !made.contains(&Some(dim[0])));
        let mut ty = infer_by_spec(Self::NAME, &known, operands)?;
        for (position, dim) in self.spec.result.iter().enumerate() {
            if let Some(window) = made.iter().position(|f| *f == Some(dim[0])) {
                ty.shape.insert(position, self.sizes[window]);
            }
        }
        Ok(TensorType::new(sum_dtype(ty.dtype, self.wide), ty.shape))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { whole: self.moved(), ..Rule::new(self.spec.clone()) }
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0], vec![1]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let sizes = factor_sizes(&self.spec, operands, result);
        let all: Vec<FactorId> = self.spec.ids().collect();
        let shapes = [&operands[0].shape, &operands[1].shape, &result.shape];
        let dims = [&self.spec.operands[0], &self.spec.operands[1], &self.spec.result];
        let strides = [0, 1, 2].map(|i| factor_strides(&all, dims[i], shapes[i]));
        let moved = self.moved();
        let plain: Vec<usize> = all.iter().filter(|f| !moved.contains(f)).map(|f| usize::from(f.0)).collect();
        let shape: Vec<u64> = plain.iter().map(|&f| sizes[f]).collect();
        let along = |i: usize| offsets(&shape, 0, &plain.iter().map(|&f| strides[i][f]).collect::<Vec<_>>());
        let meeting = meeting(self, &sizes, &strides);
        let (a, b) = (operands[0].f64s(), operands[1].f64s());
        let mut out = vec![0.0; result.elements() as usize];
        for ((i, j), k) in along(0).zip(along(1)).zip(along(2)) {
            for [x, y, z] in &meeting {
                out[k + z] += a[i + x] * b[j + y];
            }
        }
        Tensor::floats(result.dtype, &result.shape, out)
    }

    /// The same relation with dy in the place of the operand that it differentiates.
    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let dtype = g.ty(g.operand(0)).dtype;
        let dy = g.of_value(y, |g| g.cast(dy, dtype))?;
        for (i, other) in [(0, 1), (1, 0)] {
            let with = g.operand(other);
            let shape = g.ty(g.operand(i)).shape.clone();
            let to = &self.spec.operands[i];
            let size = |f: &Option<FactorId>| to.iter().position(|dim| Some(dim[0]) == *f).map(|dim| shape[dim]);
            let sizes =
                self.window_factors(to).iter().map(size).collect::<Option<Shape>>().expect("infer saw a factor of each window");
            let (result, rest) = (&self.spec.result[..], &self.spec.operands[other][..]);
            let (dims, operands) = if i == 0 { ([result, rest], [dy, with]) } else { ([rest, result], [with, dy]) };
            let spec = respec(&self.spec, &dims, to);
            g.give(i, |g| g.add(Convolution { spec, windows: self.windows.clone(), sizes, wide: false }, &operands))?;
        }
        Ok(())
    }

    fn examples() -> Vec<Example> {
        let of = |spec: &str, windows: &str, sizes: &[u64], a: &[u64], b: &[u64]| {
            Example::new(Convolution::of(spec, windows, sizes), [floats(1, a), floats(2, b)])
        };
        let plane = "x0 = 1 y0 + 1 k0 - 1, x1 = 2 y1 + 1 k1 - 1";
        let half = |wide, dtype| {
            let op = Convolution { wide, ..Convolution::of("n c x, o c k -> n o y", "x = 2 y + 1 k - 1", &[3]) };
            let operands = [floats(1, &[2, 5, 6]), floats(2, &[4, 5, 3])];
            Example::new(op, operands.map(|x| rounded(dtype, &x))).wrt(&[])
        };
        vec![
            half(false, DType::BF16),
            half(true, DType::F16),
            of("n c x, o c k -> n o y", "x = 2 y + 1 k - 1", &[3], &[2, 5, 6], &[4, 5, 3]),
            of("n c x0 x1, o c k0 k1 -> n o y0 y1", plane, &[4, 3], &[2, 3, 4, 6], &[5, 3, 3, 2]),
            of("n g c x, g o c k -> n g o y", "x = 1 y + 2 k - 0", &[3], &[2, 3, 2, 5], &[3, 4, 2, 2]),
            of("n c x0 x1, c k0 k1 -> n c y0 y1", plane, &[4, 3], &[2, 5, 4, 6], &[5, 3, 3]),
            of("n c x, k -> n c y", "x = 3 y + 1 k + 1", &[2], &[2, 5, 8], &[3]),
            of("n c y, c o k -> n o x", "x = 3 y + 2 k - 1", &[11], &[2, 3, 4], &[3, 5, 2]),
            of("n c x0 x1, n o y0 y1 -> o c k0 k1", plane, &[3, 2], &[2, 3, 4, 6], &[2, 5, 4, 3]),
            of(
                "n c x0 x1 x2, o c k0 k1 k2 -> n o y0 y1 y2",
                "x0 = 1 y0 + 1 k0 - 0, x1 = 2 y1 + 1 k1 - 2, x2 = 1 y2 + 2 k2 - 1",
                &[2, 3, 3],
                &[2, 2, 3, 4, 5],
                &[3, 2, 2, 3, 3],
            ),
        ]
    }
}
