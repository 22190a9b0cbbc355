//! Algebraic rules as text: `(mul ?x 1)` to `?x`. `?x` is any class, `$a` one that is a number, `@x` one that is none, `2` that number.
//!
//! Ops go by the names that graphs print; a number is any that its dtype does not tell from it. Addition, multiplication, `max`, `min`, `and`, `or` match in both orders. Numbers of
//! a right side have the type of what the rule replaces.

use super::term::{Expr, Graph, Term};
use crate::interp::{Precision, Tensor};
use crate::ops::{Binary, Compare, Const, Op, Select, Unary};
use dcc_program::TensorType;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use egg::Id;

#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    Any(String),
    /// A class that is a number.
    Constant(String),
    /// One that is none.
    Varying(String),
    Number(f64),
    Node(Op, Vec<Pattern>),
}

/// What the variables stand for.
pub type Bindings = Vec<(String, Id)>;

impl Pattern {
    /// Reads a pattern. Panics on one that is wrong: they are all ours.
    pub fn parse(text: &str) -> Pattern {
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut tokens = spaced.split_whitespace();
        let pattern = Pattern::read(&mut tokens, text);
        assert!(tokens.next().is_none(), "`{text}` goes on after its end");
        pattern
    }

    fn read<'a>(tokens: &mut impl Iterator<Item = &'a str>, text: &str) -> Pattern {
        let token = tokens.next().unwrap_or_else(|| panic!("`{text}` ends early"));
        if let Some(name) = token.strip_prefix('?') {
            return Pattern::Any(name.to_owned());
        }
        if let Some(name) = token.strip_prefix('$') {
            return Pattern::Constant(name.to_owned());
        }
        if let Some(name) = token.strip_prefix('@') {
            return Pattern::Varying(name.to_owned());
        }
        if token != "(" {
            return Pattern::Number(token.parse().unwrap_or_else(|_| panic!("`{token}` in `{text}` is no number")));
        }
        let name = tokens.next().unwrap_or_default();
        let unary = UnaryOp::parse(name).map(|op| (Unary { op }.into(), 1));
        let binary = || BinaryOp::parse(name).map(|op| (Binary { op }.into(), 2));
        let compare = || CompareOp::parse(name).map(|op| (Compare { op }.into(), 2));
        let select = || (name == "select").then(|| (Select {}.into(), 3));
        let found: Option<(Op, usize)> = unary.or_else(binary).or_else(compare).or_else(select);
        let (op, count) = found.unwrap_or_else(|| panic!("`{name}` in `{text}` is no op"));
        let args = (0..count).map(|_| Pattern::read(tokens, text)).collect();
        assert_eq!(tokens.next(), Some(")"), "`{text}` does not close {name}");
        Pattern::Node(op, args)
    }

    /// All ways in which a term of some class is this pattern.
    pub fn find(&self, egraph: &Graph, term: &Term) -> Vec<Bindings> {
        self.in_term(egraph, term, &Bindings::new())
    }

    fn in_term(&self, egraph: &Graph, term: &Term, bound: &Bindings) -> Vec<Bindings> {
        let Pattern::Node(op, args) = self else { return Vec::new() };
        if term.op() != Some(op) {
            return Vec::new();
        }
        let orders: &[[usize; 3]] = if commutes(op) { &[[0, 1, 2], [1, 0, 2]] } else { &[[0, 1, 2]] };
        let mut all = Vec::new();
        for order in orders {
            let mut found = vec![bound.clone()];
            for (arg, &position) in args.iter().zip(order) {
                let next = |b: &Bindings| arg.in_class(egraph, term.args[position], b);
                found = found.iter().flat_map(next).collect();
            }
            all.extend(found.into_iter().filter(|b| !all.contains(b)).collect::<Vec<_>>());
        }
        all
    }

    fn in_class(&self, egraph: &Graph, id: Id, bound: &Bindings) -> Vec<Bindings> {
        let id = egraph.find(id);
        let data = &egraph[id].data;
        let bind = |name: &String| match bound.iter().find(|(n, _)| n == name) {
            Some(&(_, other)) if egraph.find(other) != id => Vec::new(),
            Some(_) => vec![bound.clone()],
            None => vec![[&bound[..], &[(name.clone(), id)]].concat()],
        };
        match self {
            Pattern::Any(name) => bind(name),
            Pattern::Constant(name) if data.splat.is_some() => bind(name),
            Pattern::Varying(name) if data.splat.is_none() => bind(name),
            Pattern::Number(n) if data.splat.as_ref().is_some_and(|v| is_number(v, *n)) => vec![bound.clone()],
            // What is a number has no cheaper form, and may be of ever so many terms of which it is itself an operand: 0 is tanh(0) and 0 · 0.
            Pattern::Node(..) if data.splat.is_some() => Vec::new(),
            Pattern::Node(..) => egraph[id].nodes.iter().flat_map(|term| self.in_term(egraph, term, bound)).collect(),
            _ => Vec::new(),
        }
    }

    /// The expression with the variables filled in; numbers have type `ty`.
    pub fn fill(&self, bound: &Bindings, ty: &TensorType) -> Expr {
        match self {
            Pattern::Any(name) | Pattern::Constant(name) | Pattern::Varying(name) => {
                let found = bound.iter().find(|(n, _)| n == name);
                Expr::Class(found.unwrap_or_else(|| panic!("`{name}` is not on the left side")).1)
            }
            Pattern::Number(n) => Expr::Splat(Const::of(ty.dtype, *n), ty.clone()),
            Pattern::Node(op, args) => Expr::Node(op.clone(), args.iter().map(|arg| arg.fill(bound, ty)).collect()),
        }
    }
}

/// Whether `value` is `n`, as its dtype holds both.
pub(super) fn is_number(value: &Const, n: f64) -> bool {
    let held = |x| Tensor::floats(value.dtype, &[], vec![x]).rounded(Precision::Declared).f64s()[0];
    value.value() == n || value.dtype.is_float() && held(value.value()) == held(n)
}

fn commutes(op: &Op) -> bool {
    use BinaryOp::{Add, And, Max, Min, Mul, Or};
    matches!(op, Op::Binary(b) if [Add, Mul, Max, Min, And, Or].contains(&b.op))
}
