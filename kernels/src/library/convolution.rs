//! Convolution, the gradient of its image and the gradient of its kernel: products of matrices (`products`), of windows of 3 × 3 mostly
//! those of transformed tiles (`winograd`), or, of few channels, sweeps over planes (`direct`).

mod direct;
mod kernel;
mod products;
mod samples;
mod view;
mod winograd;

use super::simd::Element;
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use direct::Direct;
use products::Products;
use winograd::Winograd;

/// The three tensors of a convolution, as indices of `Plain::strides`.
pub const IMAGE: usize = 0;
pub const OUTPUT: usize = 1;
pub const KERNEL: usize = 2;

/// A factor that no window moves along, with its element stride in image, output and kernel; in two of them, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plain {
    pub size: usize,
    pub strides: [Option<usize>; 3],
}

/// One spatial dim: `image = stride · output + dilation · tap − pad`. Sizes and element strides in the order image, output, kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spatial {
    pub sizes: [usize; 3],
    pub strides: [usize; 3],
    pub stride: usize,
    pub dilation: usize,
    pub pad: isize,
}

/// Which tensor is the result, and which operand comes first: the other two in the order of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub result: usize,
    pub operands: [usize; 2],
}

/// A planned convolution.
pub struct Convolution<E>(Way<E>);

enum Way<E> {
    /// Nothing is summed up: so many elements of the result are zero. A rank may hold no channels.
    Nothing(usize),
    Direct(Box<Direct<E>>),
    Products(Box<Products<E>>),
    Winograd(Box<Winograd<E>>),
}

impl<E: Element> Convolution<E> {
    /// Plans for this machine.
    ///
    /// # Panics
    /// If a plain factor is in one tensor only.
    pub fn new(form: Form, plain: &[Plain], spatial: &[Spatial]) -> Convolution<E> {
        Self::with_isa(form, plain, spatial, Isa::detect())
    }

    /// Plans for one instruction set, which the machine must have. Panics as `new`.
    pub fn with_isa(form: Form, plain: &[Plain], spatial: &[Spatial], isa: Isa) -> Convolution<E> {
        let sizes = plain.iter().map(|f| f.size).chain(spatial.iter().flat_map(|s| s.sizes));
        if sizes.min() == Some(0) {
            return Convolution(Way::Nothing(reached(form.result, plain, spatial)));
        }
        let direct = || Direct::new(form, plain, spatial, isa).map(|direct| Way::Direct(Box::new(direct)));
        let winograd = || Winograd::new(form, plain, spatial, isa).map(|winograd| Way::Winograd(Box::new(winograd)));
        let products = || Way::Products(Box::new(Products::new(form, plain, spatial, isa)));
        Convolution(direct().or_else(winograd).unwrap_or_else(products))
    }

    /// Whether its sums are of transformed tiles, so that fewer numbers are multiplied than `flops` tells.
    pub fn is_transformed(&self) -> bool {
        matches!(self.0, Way::Winograd(_))
    }

    /// Multiplications and additions of one run, by its definition.
    pub fn flops(&self) -> usize {
        match &self.0 {
            Way::Nothing(_) => 0,
            Way::Direct(direct) => direct.flops(),
            Way::Products(products) => products.flops(),
            Way::Winograd(winograd) => winograd.flops(),
        }
    }

    /// Elements of scratch that a run needs.
    pub fn workspace(&self) -> usize {
        match &self.0 {
            Way::Nothing(_) | Way::Direct(_) => 0,
            Way::Products(products) => products.workspace(),
            Way::Winograd(winograd) => winograd.workspace(),
        }
    }

    /// `result = convolution(a, b)`, or `+=`. Operands in the order of `Form::operands`.
    ///
    /// # Panics
    /// If an operand or the workspace is too short.
    pub fn run(&self, pool: &Pool, accumulate: bool, a: &[E], b: &[E], result: &mut [E], workspace: &mut [E]) {
        match &self.0 {
            Way::Nothing(zeros) => result[..if accumulate { 0 } else { *zeros }].fill(E::ZERO),
            Way::Direct(direct) => direct.run(pool, accumulate, a, b, result),
            Way::Products(products) => products.run(pool, accumulate, a, b, result, workspace),
            Way::Winograd(winograd) => winograd.run(pool, accumulate, a, b, result, workspace),
        }
    }
}

/// Elements that a tensor must have.
fn reached(tensor: usize, plain: &[Plain], spatial: &[Spatial]) -> usize {
    let own = plain.iter().filter_map(|f| Some((f.size, f.strides[tensor]?)));
    let dims = || own.clone().chain(spatial.iter().map(|s| (s.sizes[tensor], s.strides[tensor])));
    if dims().any(|(size, _)| size == 0) { 0 } else { 1 + dims().map(|(size, stride)| (size - 1) * stride).sum::<usize>() }
}
