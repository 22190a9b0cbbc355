//! The e-graph's terms: our ops with their types. Equal classes have equal types; that is asserted at every union.

use crate::interp::{Precision, Tensor};
use crate::ops::{BroadcastInDim, Const, Op, Reshape};
use dcc_program::TensorType;
use egg::{Analysis, DidMerge, Id, Language};
use smallvec::SmallVec;

pub type Graph = egg::EGraph<Term, Facts>;

/// What a term is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Head {
    Op(Op),
    /// A value from outside of the region, by its position among those.
    Given(u32),
    /// A node of the region that no rule looks into, by its position; its op is kept elsewhere.
    Opaque(u32),
}

/// A term: op, type, operands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term {
    pub head: Head,
    pub ty: TensorType,
    pub args: SmallVec<[Id; 3]>,
}

impl Term {
    pub fn op(&self) -> Option<&Op> {
        match &self.head {
            Head::Op(op) => Some(op),
            _ => None,
        }
    }
}

impl Language for Term {
    type Discriminant = (Option<std::mem::Discriminant<Op>>, usize);

    fn discriminant(&self) -> Self::Discriminant {
        (self.op().map(std::mem::discriminant), self.args.len())
    }

    fn matches(&self, other: &Term) -> bool {
        self.head == other.head && self.ty == other.ty && self.args.len() == other.args.len()
    }

    fn children(&self) -> &[Id] {
        &self.args
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.args
    }
}

/// What is known of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    pub ty: TensorType,
    /// The number that all elements are.
    pub splat: Option<Const>,
}

/// Knows types, and folds operations on numbers.
#[derive(Clone, Debug, Default)]
pub struct Facts;

impl Analysis<Term> for Facts {
    type Data = Class;

    fn make(egraph: &mut Graph, term: &Term, _: Id) -> Class {
        Class { ty: term.ty.clone(), splat: splat(egraph, term) }
    }

    fn merge(&mut self, to: &mut Class, from: Class) -> DidMerge {
        assert_eq!(to.ty, from.ty, "equal terms have equal types");
        if to.splat.is_none() && from.splat.is_some() {
            to.splat = from.splat;
            return DidMerge(true, false);
        }
        DidMerge(false, to.splat != from.splat)
    }

    fn modify(egraph: &mut Graph, id: Id) {
        let Class { ty, splat: Some(value) } = egraph[id].data.clone() else { return };
        let number = add_splat(egraph, value, &ty);
        egraph.union(id, number);
    }
}

/// The number that all elements of a term are, computed where its operands are numbers. NaN is left alone.
fn splat(egraph: &Graph, term: &Term) -> Option<Const> {
    let known = |i: usize| egraph[term.args[i]].data.splat.clone();
    match term.op()? {
        Op::Const(value) => Some(value.clone()).filter(|v| !v.value().is_nan()),
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::StopGradient(_) | Op::Slice(_) => known(0),
        op @ (Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_)) => {
            let scalar = |dtype| TensorType::new(dtype, []);
            let operands = (0..term.args.len()).map(|i| {
                let value = known(i)?;
                let ty = scalar(value.dtype);
                Some(if ty.dtype.is_float() {
                    Tensor::floats(ty.dtype, &[], vec![value.value()])
                } else {
                    Tensor::ints(ty.dtype, &[], vec![value.bits as i64])
                })
            });
            let operands: Vec<Tensor> = operands.collect::<Option<_>>()?;
            let value = op.eval(&operands.iter().collect::<Vec<_>>(), &scalar(term.ty.dtype)).rounded(Precision::Declared);
            let value = match term.ty.dtype.is_float() {
                true => Const::float(term.ty.dtype, value.f64s()[0]),
                false => Const::int(term.ty.dtype, value.i64s()[0]),
            };
            Some(value).filter(|v| !v.value().is_nan())
        }
        _ => None,
    }
}

/// Adds a number with that type: a constant and its broadcast.
pub fn add_splat(egraph: &mut Graph, value: Const, ty: &TensorType) -> Id {
    let scalar = TensorType::new(ty.dtype, []);
    let number = egraph.add(Term { head: Head::Op(value.into()), ty: scalar, args: SmallVec::new() });
    if ty.rank() == 0 {
        return number;
    }
    let op = BroadcastInDim { shape: ty.shape.clone(), dims: Default::default() };
    egraph.add(Term { head: Head::Op(op.into()), ty: ty.clone(), args: smallvec::smallvec![number] })
}

/// What a rule says a class equals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    Class(Id),
    /// A number with a type.
    Splat(Const, TensorType),
    Node(Op, Vec<Expr>),
}

impl Expr {
    pub fn node(op: impl Into<Op>, args: impl IntoIterator<Item = Expr>) -> Expr {
        Expr::Node(op.into(), args.into_iter().collect())
    }

    /// Reshaped, or itself where it has the shape.
    pub fn reshaped(self, from: &[u64], shape: &[u64]) -> Expr {
        if from == shape { self } else { Expr::node(Reshape { shape: shape.into() }, [self]) }
    }

    /// Adds the expression, its types inferred. `None` where an op does not take its operands.
    pub fn add(&self, egraph: &mut Graph) -> Option<Id> {
        match self {
            Expr::Class(id) => Some(*id),
            Expr::Splat(value, ty) => Some(add_splat(egraph, value.clone(), ty)),
            Expr::Node(op, args) => {
                let args: SmallVec<[Id; 3]> = args.iter().map(|arg| arg.add(egraph)).collect::<Option<_>>()?;
                let ty = {
                    let types: Vec<&TensorType> = args.iter().map(|&id| &egraph[id].data.ty).collect();
                    op.infer(&types).ok()?
                };
                Some(egraph.add(Term { head: Head::Op(op.clone()), ty, args }))
            }
        }
    }
}
