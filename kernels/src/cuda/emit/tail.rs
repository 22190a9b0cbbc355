//! An elementwise kernel's statements as a product's tail: at elements of an operand whose values are at hand, wherever they lie.

use super::super::mapping::{Mapping, is_even};
use super::{Entry, Vector, emit_by, stored};
use crate::library::vector::Ty;
use crate::tile::{Access, Array, Nest, Typing};
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Outside, Stmt};
use std::collections::{BTreeMap, BTreeSet};

/// A simplified nest whose every point reads the one element of `given` that is its own.
pub(in crate::cuda) struct Pointwise<'a> {
    nest: &'a Nest,
    typing: Typing,
    mapping: Mapping,
    given: u8,
    /// The dims of `given`.
    dims: Vec<DimId>,
    load: ExprId,
}

impl<'a> Pointwise<'a> {
    /// `None` where the nest is no such one, or where its threads had better lie along other dims than `given` does.
    pub fn new(nest: &'a Nest, given: usize) -> Option<Pointwise<'a>> {
        let kernel = &nest.kernel;
        let single = |stmt: &Stmt| match stmt {
            Stmt::Let { .. } => true,
            Stmt::Store { over, .. } => over.is_empty(),
            Stmt::Reduce { .. } => false,
        };
        let given = u8::try_from(given).ok().filter(|_| kernel.body.iter().all(single))?;
        let ids = (0..kernel.exprs.len() as u32).map(ExprId);
        let mut loads = ids.filter(|id| matches!(kernel.get(*id), Expr::Load { input, .. } if *input == given));
        let (load, None) = (loads.next()?, loads.next()) else { return None };
        let Expr::Load { index, outside: Outside::Never, .. } = kernel.get(load) else { return None };
        let plain = |index: &Index| if let Index::Dim(dim) = index { Some(*dim) } else { None };
        let dims: Vec<DimId> = index.iter().map(plain).collect::<Option<_>>()?;
        let extent = |dim: &DimId| nest.extents[usize::from(dim.0)];
        let long = |dims: &[DimId]| dims.iter().copied().filter(|dim| extent(dim) != 1).collect::<Vec<DimId>>();
        let (own, all) = (long(&dims), long(&kernel.outer));
        let set: BTreeSet<DimId> = own.iter().copied().collect();
        // Each point has an element of its own, and there are no others.
        if set.len() != own.len() || set != all.iter().copied().collect() || all.is_empty() {
            return None;
        }
        let typing = Typing::new(kernel);
        let mapping = Mapping::new(nest, &typing);
        let along = Access::new(nest, &nest.inputs[usize::from(given)], index, Outside::Never).strides;
        let last = *mapping.outer.last()?;
        let fits = mapping.group == 1 && mapping.across.is_none() && along[usize::from(last.0)] == 1;
        fits.then_some(Pointwise { nest, typing, mapping, given, dims, load })
    }

    pub fn points(&self) -> usize {
        self.mapping.points
    }

    pub fn array(&self) -> &'a Array {
        &self.nest.inputs[usize::from(self.given)]
    }

    /// Most elements side by side that are best taken together.
    pub fn vector(&self) -> usize {
        let array = self.array();
        let strides = Access::new(self.nest, array, &self.index(), Outside::Never).strides;
        let last = *self.mapping.outer.last().expect("there are points");
        let even =
            |vector: &usize| is_even(&strides, last, *vector) && self.nest.extents[usize::from(last.0)].is_multiple_of(*vector);
        (0..).map(|shift| self.mapping.vector >> shift).find(|vector| *vector <= 1 || even(vector)).unwrap_or(1).max(1)
    }

    fn index(&self) -> Vec<Index> {
        self.dims.iter().copied().map(Index::Dim).collect()
    }

    /// Statements for `vector` elements from element `at` on, whose values, as sums have them, are in the array `sum`; and the parameters they
    /// read.
    pub fn text(&self, vector: usize) -> (String, BTreeSet<usize>) {
        let mapping = Mapping { vector, ..self.mapping.clone() };
        let array = self.array();
        let rounded = |element: &str| match self.typing.ty(self.load) {
            Ty::F32 if array.dtype.bytes() == 2 => format!("narrow<{}>(sum[{element}])", stored(array.dtype)),
            _ => format!("sum[{element}]"),
        };
        emit_by(self.nest, &self.typing, &mapping, Entry::Whole, |emitter| {
            emitter.indent = 2;
            let i = emitter.index_type();
            let strides = Access::dense(array);
            let first = self.dims.iter().position(|dim| self.nest.extents[usize::from(dim.0)] != 1);
            for (n, (dim, stride)) in self.dims.iter().zip(strides).enumerate() {
                let place = usize::from(dim.0);
                if self.nest.extents[place] == 1 {
                    emitter.index[place] = Some("0".to_owned());
                    continue;
                }
                let shifted = if stride == 1 { format!("({i})at") } else { format!("({i})at / {stride}") };
                let own = if Some(n) == first { shifted } else { format!("{shifted} % {}", array.block[n]) };
                emitter.line(format!("const {i} i{place} = {own};"));
                emitter.index[place] = Some(format!("i{place}"));
            }
            for dim in &self.nest.kernel.outer {
                emitter.index[usize::from(dim.0)].get_or_insert_with(|| "0".to_owned());
            }
            let element = if vector > 1 { "v" } else { "0" };
            emitter.tiles = BTreeMap::from([(self.load, rounded(element))]);
            let all: Vec<usize> = (0..self.nest.kernel.body.len()).collect();
            let dim = *self.mapping.outer.last().expect("there are points");
            emitter.elements(&all, Vector { dim, length: vector });
        })
    }
}
