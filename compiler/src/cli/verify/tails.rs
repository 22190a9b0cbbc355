//! Products with tails on a GPU: bit by bit what the product and the kernel behind it give one after the other.

use super::kernels::{bytes, elements, made_up};
use crate::cli::failure::Outcome;
use dcc_kernels::cuda::Source;
use dcc_program::artifact::Artifact;
use dcc_runtime::cuda::{Gpu, Kernels, Tailed};
use dcc_runtime::error::Error;
use dcc_runtime::exec::{World, texts};
use std::collections::HashSet;

/// Multiplications whose operands are made up in seconds. (Where a CPU stands for the GPU, models are small.)
const MOST: usize = 1 << 34;
const SEED: u64 = 1;

/// Those of all ranks.
pub struct Tails {
    all: Vec<Tailed>,
    too_large: usize,
}

/// What was found: how many are as they must be, and how many were left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Same {
    pub tails: usize,
    pub too_large: usize,
}

impl Tails {
    pub fn new(artifact: &Artifact) -> Outcome<Tails> {
        let world = World::new(&[&artifact.train, &artifact.eval])?;
        let (mut seen, mut all) = (HashSet::new(), Vec::new());
        for rank in 0..world.ranks() {
            let stage = world.stage(rank) as usize;
            for program in artifact.train.get(stage).into_iter().chain(artifact.eval.get(stage)) {
                let made = texts(&world, program, rank)?.tailed();
                all.extend(made.into_iter().filter(|tailed| {
                    let Tailed { product, nest, given, beside, .. } = tailed;
                    seen.insert(format!("{product:?} {nest:?} {given} {beside:?}"))
                }));
            }
        }
        let found = all.len();
        all.retain(|tailed| tailed.product.multiplications() <= MOST);
        Ok(Tails { too_large: found - all.len(), all })
    }

    /// Of each the product, the kernel behind it, and both as one.
    pub fn sources(&self) -> Outcome<Vec<Source>> {
        let mut sources = Vec::new();
        for (n, Tailed { product, nest, given, beside, .. }) in self.all.iter().enumerate() {
            let whole = product.with_tail(nest, *given, *beside, &format!("whole{n}"));
            let whole = whole.map(|whole| whole.expect("it was made before"));
            let made = [product.source(&format!("product{n}")), Source::new(nest, &format!("nest{n}")), whole];
            for source in made {
                sources.push(source.map_err(Error::device)?);
            }
        }
        Ok(sources)
    }

    /// Of kernels that begin at `first`. Errors: one gives other bits; of the GPU.
    pub fn check(&self, gpu: &Gpu, kernels: &Kernels, first: usize) -> Outcome<Same> {
        for (n, Tailed { product, nest, given, beside, origin }) in self.all.iter().enumerate() {
            let [alone, behind, whole] = [0, 1, 2].map(|which| first + 3 * n + which);
            let types = product.types();
            let sizes = &kernels.source(alone).operand_bytes;
            let count = |operand: usize| (types.operands, sizes[operand] / types.operands.bytes() as usize);
            let arrays: Vec<_> = [count(0), count(1)].into_iter().chain(elements(nest)).collect();
            let made = made_up(arrays.iter().copied(), SEED);
            let mut raw: Vec<Vec<u8>> = made.iter().zip(&arrays).map(|(values, (dtype, _))| bytes(*dtype, values)).collect();
            let mut of_nest = raw.split_off(2);
            let mut of_product = [&raw[..], &[vec![0; sizes[2]]]].concat();
            let others = of_nest.iter().enumerate().filter(|(operand, _)| operand != given).map(|(_, raw)| raw.clone());
            let own = beside.operands();
            let mut of_whole: Vec<Vec<u8>> = of_product[..own].iter().cloned().chain(others).collect();
            let ranks: usize = nest.inputs.iter().chain(&nest.outputs).map(|array| array.block.len()).sum();
            let parameters = vec![0; nest.extents.len() + ranks];
            kernels.run(gpu, alone, &mut of_product, &[])?;
            of_nest[*given].clone_from(&of_product[2]);
            kernels.run(gpu, behind, &mut of_nest, &parameters)?;
            kernels.run(gpu, whole, &mut of_whole, &parameters)?;
            of_nest.remove(*given);
            let apart: Vec<Vec<u8>> = of_product.into_iter().take(own).chain(of_nest).collect();
            if apart != of_whole {
                let what = "a product gives other bits with the kernel behind it as its tail than without";
                return Err(Error::device(what).at(format!("{}: {origin}", gpu.name())).into());
            }
        }
        Ok(Same { tails: self.all.len(), too_large: self.too_large })
    }
}
