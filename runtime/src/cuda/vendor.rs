//! NVIDIA's libraries beside dcc's own kernels: each may compute what it is faster at.

use super::attentions::{Attending, Attentions, Trial};
use super::driver::Gpu;
use super::products::{Product, Products};
use super::queue::Stream;
use crate::error::Result;
use dcc_kernels::cuda::library::Terms;

/// What dcc's own kernels compute alone, whatever is installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Own {
    pub products: bool,
    pub attention: bool,
}

/// The libraries that are installed and may be used.
pub struct Vendor {
    own: Own,
    products: Option<Products>,
    /// Opened for the first attention, which many programs do without; then `None` where it cannot be.
    attentions: Option<Option<Attentions>>,
}

/// What a library computes in place of a kernel.
pub enum Chosen {
    Product(Product),
    Attention(Attending),
}

impl Vendor {
    pub fn open(gpu: &Gpu, own: Own) -> Result<Vendor> {
        let products = if own.products { None } else { Products::open(gpu)? };
        Ok(Vendor { own, products, attentions: None })
    }

    /// Without libraries.
    pub fn none() -> Vendor {
        Vendor { own: Own { products: true, attention: true }, products: None, attentions: None }
    }

    /// Where products may be the library's.
    pub fn products(&self) -> Option<&Products> {
        self.products.as_ref()
    }

    /// Whether a library could compute it, if it is installed.
    pub fn has(&self, terms: &Terms) -> bool {
        match terms {
            Terms::Product(_) => self.products.is_some(),
            Terms::Attention(_) => !self.own.attention,
        }
    }

    /// The library's way, where that is faster than the own kernel. What lies where the operands are is lost.
    pub fn choose(&mut self, terms: &Terms, trial: Trial<'_>) -> Result<Option<Chosen>> {
        match terms {
            Terms::Product(gemm) => {
                let (Some(products), [lhs, rhs, out, ..]) = (&self.products, trial.at) else { return Ok(None) };
                let product = products.choose(trial.gpu.stream(), gemm, [*lhs, *rhs, *out], trial.own)?;
                Ok(product.map(Chosen::Product))
            }
            Terms::Attention(heads) => {
                if self.attentions.is_none() {
                    self.attentions = Some(Attentions::open(trial.gpu)?);
                }
                match self.attentions.as_mut().and_then(Option::as_mut) {
                    Some(attentions) => Ok(attentions.choose(heads, trial)?.map(Chosen::Attention)),
                    None => Ok(None),
                }
            }
        }
    }

    /// Starts what was chosen on the own kernel's operands, behind all work of the stream so far.
    pub fn start(&self, stream: &Stream, chosen: &Chosen, operands: &[u64]) -> Result<()> {
        match (chosen, self) {
            (Chosen::Product(product), Vendor { products: Some(products), .. }) => {
                products.start(stream, product, [operands[0], operands[1], operands[2]])
            }
            (Chosen::Attention(attending), Vendor { attentions: Some(Some(attentions)), .. }) => {
                attentions.start(attending, operands)
            }
            _ => unreachable!("what was chosen is of a library that is there"),
        }
    }
}
