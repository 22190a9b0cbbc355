//! The rules, one a line. Each says what a term equals; the cheapest of all that is equal is kept.
//!
//! Equal means to rounding: a rule may round once more or less, but never cancels digits, and keeps what overflows or is NaN.

use super::term::{Expr, Graph, Term};
use super::{attention, contract, movement, pattern::Pattern, slices};
use dcc_program::DType;
use egg::Id;

/// What a term of the class `Id` equals.
pub type Find = fn(&Graph, Id, &Term) -> Vec<Expr>;

#[derive(Clone, Debug)]
pub enum Body {
    /// Left and right side as text, for results of some dtypes.
    Text {
        from: Box<Pattern>,
        to: Box<Pattern>,
        of: Of,
    },
    Code(Find),
}

#[derive(Clone, Debug)]
pub struct Rule {
    pub name: &'static str,
    pub body: Body,
    pub scope: Scope,
}

/// Where a rule may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All that it builds has the shape of what it replaces: in gradients too, whose nodes are tied to forward nodes by dims.
    Pointwise,
    /// In the forward pass.
    Forward,
}

/// Result dtypes that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    Any,
    Float,
    Bool,
}

use Of::{Any, Bool, Float};

/// Name, dtype, left side, right side.
const ALGEBRA: &[(&str, Of, &str, &str)] = &[
    ("add-zero", Any, "(add ?x 0)", "?x"),
    ("sub-zero", Any, "(sub ?x 0)", "?x"),
    ("mul-one", Any, "(mul ?x 1)", "?x"),
    ("div-one", Any, "(div ?x 1)", "?x"),
    ("neg-neg", Any, "(neg (neg ?x))", "?x"),
    ("mul-minus-one", Float, "(mul ?x -1)", "(neg ?x)"),
    ("neg-scale", Float, "(neg (mul @x $a))", "(mul @x (neg $a))"),
    ("zero-sub", Float, "(sub 0 ?x)", "(neg ?x)"),
    ("sub-neg", Any, "(sub ?x (neg ?y))", "(add ?x ?y)"),
    ("add-neg", Any, "(add ?x (neg ?y))", "(sub ?x ?y)"),
    // Of numbers alone they would make ever new ones: `x / n * n` would be `x * n / n`, and that `x * n * n / n / n`.
    ("scale-scale", Float, "(mul (mul @x $a) $b)", "(mul @x (mul $a $b))"),
    ("shift-shift", Float, "(add (add @x $a) $b)", "(add @x (add $a $b))"),
    ("scale-outward", Float, "(mul (mul @x $a) @y)", "(mul (mul @x @y) $a)"),
    ("scale-of-ratio", Float, "(div (mul @x $a) @y)", "(mul (div @x @y) $a)"),
    ("scale-of-sum", Float, "(add (mul ?x $a) (mul ?y $a))", "(mul (add ?x ?y) $a)"),
    ("div-constant", Float, "(div ?x $a)", "(mul ?x (div 1 $a))"),
    ("div-sqrt", Float, "(div ?x (sqrt ?y))", "(mul ?x (rsqrt ?y))"),
    ("reciprocal-sqrt", Float, "(div 1 (sqrt ?x))", "(rsqrt ?x)"),
    ("sqrt-reciprocal", Float, "(sqrt (div 1 ?x))", "(rsqrt ?x)"),
    ("div-exp", Float, "(div ?x (exp ?y))", "(mul ?x (exp (neg ?y)))"),
    ("pow-one", Float, "(pow ?x 1)", "?x"),
    ("pow-two", Float, "(pow ?x 2)", "(mul ?x ?x)"),
    ("pow-three", Float, "(pow ?x 3)", "(mul (mul ?x ?x) ?x)"),
    ("pow-half", Float, "(pow ?x 0.5)", "(sqrt ?x)"),
    ("pow-minus-half", Float, "(pow ?x -0.5)", "(rsqrt ?x)"),
    ("pow-minus-one", Float, "(pow ?x -1)", "(div 1 ?x)"),
    ("logistic", Float, "(div 1 (add (exp (neg ?x)) 1))", "(logistic ?x)"),
    ("silu", Float, "(div ?x (add (exp (neg ?x)) 1))", "(mul ?x (logistic ?x))"),
    ("gelu", Float, "(mul (mul ?x (add (erf (mul ?x 0.7071067811865476)) 1)) 0.5)", "(gelu ?x)"),
    (
        "gelu-tanh",
        Float,
        "(mul (mul ?x (add (tanh (mul (add (mul (mul (mul ?x ?x) ?x) 0.044715) ?x) 0.7978845608028654)) 1)) 0.5)",
        "(gelu_tanh ?x)",
    ),
    (
        "gelu-tanh-factored",
        Float,
        "(mul (mul ?x (add (tanh (mul (mul ?x (add (mul (mul ?x ?x) 0.044715) 1)) 0.7978845608028654)) 1)) 0.5)",
        "(gelu_tanh ?x)",
    ),
    ("max-same", Any, "(max ?x ?x)", "?x"),
    ("min-same", Any, "(min ?x ?x)", "?x"),
    ("abs-neg", Any, "(abs (neg ?x))", "(abs ?x)"),
    ("square-neg", Float, "(mul (neg ?x) (neg ?x))", "(mul ?x ?x)"),
    ("select-same", Any, "(select ?c ?x ?x)", "?x"),
    ("select-true", Any, "(select 1 ?x ?y)", "?x"),
    ("select-false", Any, "(select 0 ?x ?y)", "?y"),
    ("select-not", Any, "(select (not ?c) ?x ?y)", "(select ?c ?y ?x)"),
    ("select-select", Any, "(select ?c (select ?c ?x ?y) ?z)", "(select ?c ?x ?z)"),
    ("not-not", Bool, "(not (not ?x))", "?x"),
    ("and-true", Bool, "(and ?x 1)", "?x"),
    ("and-false", Bool, "(and ?x 0)", "0"),
    ("and-same", Bool, "(and ?x ?x)", "?x"),
    ("or-true", Bool, "(or ?x 1)", "1"),
    ("or-false", Bool, "(or ?x 0)", "?x"),
    ("or-same", Bool, "(or ?x ?x)", "?x"),
];

/// Rules that look at dims, dtypes or whole patterns.
const CODE: &[(&str, Scope, Find)] = &[
    ("cast-cast", Scope::Pointwise, movement::cast_cast),
    ("compare-select", Scope::Pointwise, movement::compare_select),
    ("not-compare", Scope::Pointwise, movement::not_compare),
    ("reshape-reshape", Scope::Forward, movement::reshape_reshape),
    ("transpose-transpose", Scope::Forward, movement::transpose_transpose),
    ("transpose-reshape", Scope::Forward, movement::transpose_reshape),
    ("transpose-merged", Scope::Forward, movement::transpose_merged),
    ("split-transpose", Scope::Forward, movement::split_transpose),
    ("broadcast-broadcast", Scope::Forward, movement::broadcast_broadcast),
    ("pointwise-of-broadcasts", Scope::Forward, movement::pointwise_of_broadcasts),
    ("pointwise-of-transposes", Scope::Forward, movement::pointwise_of_transposes),
    ("pointwise-of-reshapes", Scope::Forward, movement::pointwise_of_reshapes),
    ("div-broadcast", Scope::Forward, movement::div_broadcast),
    ("reduce-broadcast", Scope::Forward, movement::reduce_broadcast),
    ("reduce-scale", Scope::Forward, movement::reduce_scale),
    ("reduce-reduce", Scope::Forward, movement::reduce_reduce),
    ("slice-transpose", Scope::Forward, slices::slice_transpose),
    ("concatenate-transposes", Scope::Forward, slices::concatenate_transposes),
    ("slice-slice", Scope::Forward, slices::slice_slice),
    ("slice-concatenate", Scope::Forward, slices::slice_concatenate),
    ("concatenate-slices", Scope::Forward, slices::concatenate_slices),
    ("dot-transpose", Scope::Forward, contract::dot_transpose),
    ("transpose-dot", Scope::Forward, contract::transpose_dot),
    ("dot-scale", Scope::Forward, contract::dot_scale),
    ("dot-broadcast", Scope::Forward, contract::dot_broadcast),
    ("dot-reshape", Scope::Forward, contract::dot_reshape),
    ("attention", Scope::Forward, attention::find),
    ("attention-groups", Scope::Forward, attention::grouped_operands),
    ("attention-transpose", Scope::Forward, attention::transposed_operand),
    ("transpose-attention", Scope::Forward, attention::transposed_result),
];

/// All rules.
pub fn all() -> Vec<Rule> {
    let text = |&(name, of, from, to): &(&'static str, Of, &str, &str)| {
        let body = Body::Text { from: Box::new(Pattern::parse(from)), to: Box::new(Pattern::parse(to)), of };
        Rule { name, body, scope: Scope::Pointwise }
    };
    let code = |&(name, scope, find): &(&'static str, Scope, Find)| Rule { name, body: Body::Code(find), scope };
    ALGEBRA.iter().map(text).chain(CODE.iter().map(code)).collect()
}

impl Rule {
    /// What `term` of class `id` equals by this rule.
    pub fn find(&self, egraph: &Graph, id: Id, term: &Term) -> Vec<Expr> {
        match &self.body {
            Body::Code(find) => find(egraph, id, term),
            Body::Text { from, to, of } => {
                let applies = match of {
                    Of::Any => true,
                    Of::Float => term.ty.dtype.is_float(),
                    Of::Bool => term.ty.dtype == DType::Bool,
                };
                if !applies {
                    return Vec::new();
                }
                from.find(egraph, term).iter().map(|bound| to.fill(bound, &term.ty)).collect()
            }
        }
    }
}
