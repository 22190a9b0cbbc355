//! `max_pool`: the greatest element of each window and where it is; its gradient is a scatter to those places.

use super::dot::{factor_sizes, factor_strides, infer_by_spec, respec};
use super::example::{Example, floats};
use super::{OpDef, Rule, ScatterAdd, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Tensor, offsets};
use dcc_program::factors::DimFactors;
use dcc_program::{DType, FactorId, Pool, TensorType};
use serde::{Deserialize, Serialize};

/// Operand `n c x`, whose last factor holds the dims of the windows' image one after the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MaxPool {
    pub pool: Pool,
    /// 0: the greatest element; NaN where a window has one. 1: where in `x` it is, i32; the first of equal ones, the last NaN, -1 in a
    /// window without elements.
    pub out: u8,
}

impl MaxPool {
    fn factor(&self, name: &str) -> Option<FactorId> {
        self.pool.spec.names.iter().position(|n| n == name).map(|i| FactorId(i as u8))
    }

    /// The image's factor and the output's.
    fn moved(&self) -> Option<[FactorId; 2]> {
        Some([self.factor("x")?, self.factor("y")?])
    }

    /// For each output of a plane, the places that its window has in the image, in order.
    fn windows(&self) -> Vec<Vec<usize>> {
        let mut all = vec![vec![0]];
        for dim in &self.pool.dims {
            let line = |y: u64| (0..dim.taps).filter_map(move |k| dim.image_at(y, k)).map(|x| x as usize).collect::<Vec<_>>();
            let lines: Vec<Vec<usize>> = (0..dim.outputs).map(line).collect();
            let below = |outer: &Vec<usize>, line: &Vec<usize>| -> Vec<usize> {
                outer.iter().flat_map(|&at| line.iter().map(move |&x| at * dim.image as usize + x)).collect()
            };
            all = all.iter().flat_map(|outer| lines.iter().map(move |line| below(outer, line))).collect();
        }
        all
    }
}

/// Value and place of the greatest element of `x` at `places`.
fn greatest(x: impl Fn(usize) -> f64, places: &[usize]) -> (f64, i64) {
    places.iter().fold((f64::NEG_INFINITY, -1), |best, &at| {
        let found = x(at);
        if found > best.0 || found.is_nan() || best.1 < 0 { (found, at as i64) } else { best }
    })
}

impl OpDef for MaxPool {
    const NAME: &'static str = "max_pool";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [image] = exactly::<1>(Self::NAME, operands)?;
        let Pool { spec, dims } = &self.pool;
        let wrong = |why: &str| Error::shape(format!("max_pool({}) of {:?}: {why}", self.pool.text(), image.shape.as_slice()));
        let (true, Some([x, y])) = (spec.operands.len() == 1, self.moved()) else { return Err(wrong("no factors x and y")) };
        if !image.dtype.is_float() {
            return Err(Error::dtype(format!("max_pool of {}", image.dtype.name())));
        }
        if dims.iter().any(|dim| dim.stride == 0 || dim.dilation == 0) {
            return Err(wrong("a window that does not move"));
        }
        let is = |f: FactorId| (spec.in_operand(0, f), spec.in_result(f));
        if spec.ids().any(|f| is(f) != (f != y, f != x)) {
            return Err(wrong("a factor is not where a pool has it"));
        }
        let [size, outputs] = self.pool.sizes();
        let at = spec.operands[0].iter().position(|dim| dim[..] == [x]);
        if at.and_then(|at| image.shape.get(at)) != Some(&size) || i32::try_from(size).is_err() {
            return Err(wrong("the windows' image is of another size, or too large"));
        }
        let position = spec.result.iter().position(|dim| dim[..] == [y]).ok_or_else(|| wrong("y is no dim"))?;
        let mut known = spec.clone();
        known.result.remove(position);
        let mut ty = infer_by_spec(Self::NAME, &known, operands)?;
        ty.shape.insert(position, outputs);
        Ok(TensorType::new(if self.out == 0 { ty.dtype } else { DType::I32 }, ty.shape))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { whole: self.moved().expect("infer saw them").to_vec(), ..Rule::new(self.pool.spec.clone()) }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let spec = &self.pool.spec;
        let sizes = factor_sizes(spec, operands, result);
        let [x, y] = self.moved().expect("infer saw them");
        let planes: Vec<FactorId> = spec.ids().filter(|&f| f != x && f != y).collect();
        let shape: Vec<u64> = planes.iter().map(|f| sizes[usize::from(f.0)]).collect();
        let along = |dims: &[DimFactors], of: &[u64]| offsets(&shape, 0, &factor_strides(&planes, dims, of));
        let step = |f: FactorId, dims: &[DimFactors], of: &[u64]| factor_strides(&[f], dims, of)[0] as usize;
        let (from, to) = (step(x, &spec.operands[0], &operands[0].shape), step(y, &spec.result, &result.shape));
        let windows = self.windows();
        let values = operands[0].f64s();
        let (mut greatest_of, mut places) = (vec![0.0; result.elements() as usize], vec![0; result.elements() as usize]);
        for (image, output) in along(&spec.operands[0], &operands[0].shape).zip(along(&spec.result, &result.shape)) {
            for (y, window) in windows.iter().enumerate() {
                let slot = output + y * to;
                (greatest_of[slot], places[slot]) = greatest(|at| values[image + at * from], window);
            }
        }
        match self.out {
            0 => Tensor::floats(result.dtype, &result.shape, greatest_of),
            _ => Tensor::ints(result.dtype, &result.shape, places),
        }
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let x = g.operand(0);
        let places = g.in_forward(|g| g.add(MaxPool { pool: self.pool.clone(), out: 1 }, &[x]))?;
        let spec = &self.pool.spec;
        let spec = respec(spec, &[&spec.result, &spec.result], &spec.operands[0]);
        g.give(0, |g| g.add(ScatterAdd { spec, size: self.pool.sizes()[0] }, &[places, dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |pool: &str, seed: u32, shape: &[u64]| {
            let pool = Pool::parse(pool).expect("a pool of ours parses");
            [0, 1].map(|out| Example::new(MaxPool { pool: pool.clone(), out }, [floats(seed, shape)]))
        };
        let mut all = Vec::new();
        all.extend(of("n c x -> n c y; 7 -> 4 taps 3 stride 2 dilation 1 pad 1", 1, &[2, 5, 7]));
        all.extend(of(
            "n c x -> n c y; 5 -> 2 taps 2 stride 2 dilation 2 pad 0, 4 -> 4 taps 2 stride 1 dilation 1 pad 1",
            2,
            &[3, 2, 20],
        ));
        all.extend(of("c n x -> n c y; 6 -> 3 taps 2 stride 2 dilation 1 pad -1", 3, &[4, 2, 6]));
        all
    }
}
