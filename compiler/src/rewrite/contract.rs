//! Rules about contractions: what stands before or after `dot_general` moves into its spec, or out of it.

use super::movement::{merged, operand, scaled, ty};
use super::term::{Expr, Graph, Term};
use crate::ops::{Binary, DotGeneral, Op, Reshape};
use dcc_program::factors::DimFactors;
use dcc_program::kernel::BinaryOp;
use dcc_program::{FactorId, FactorSpec, Shape};
use egg::Id;

fn dot(term: &Term) -> Option<&DotGeneral> {
    match term.op()? {
        Op::DotGeneral(op) => Some(op),
        _ => None,
    }
}

/// The spec with its factors renumbered and renamed in order of appearance, so that equal contractions are equal terms.
pub fn canonical(spec: &FactorSpec) -> FactorSpec {
    let mut out = FactorSpec { names: Vec::new(), operands: Vec::new(), result: Vec::new() };
    let mut order: Vec<FactorId> = Vec::new();
    let mut number = |dims: &Vec<DimFactors>| -> Vec<DimFactors> {
        dims.iter()
            .map(|dim| {
                dim.iter()
                    .map(|f| {
                        let at = order.iter().position(|o| o == f).unwrap_or_else(|| {
                            order.push(*f);
                            order.len() - 1
                        });
                        FactorId(at as u8)
                    })
                    .collect()
            })
            .collect()
    };
    out.operands = spec.operands.iter().map(&mut number).collect();
    out.result = number(&spec.result);
    let mut names: Vec<String> = Vec::new();
    for f in order {
        let name = &spec.names[usize::from(f.0)];
        names.push(name.clone());
    }
    out.names = names;
    out
}

fn node(spec: FactorSpec, wide: bool, a: Expr, b: Expr) -> Expr {
    Expr::node(DotGeneral { spec: canonical(&spec), wide }, [a, b])
}

/// A transposed operand is read in place.
pub fn dot_transpose(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(DotGeneral { spec, wide }) = dot(term) else { return Vec::new() };
    let mut found = Vec::new();
    for side in 0..2 {
        for t in operand(egraph, term, side) {
            let Some(Op::Transpose(op)) = t.op() else { continue };
            let mut spec = spec.clone();
            let dims = spec.operands[side].clone();
            for (factors, &from) in dims.iter().zip(&op.perm) {
                spec.operands[side][usize::from(from)] = factors.clone();
            }
            let mut args = [Expr::Class(term.args[0]), Expr::Class(term.args[1])];
            args[side] = Expr::Class(t.args[0]);
            let [a, b] = args;
            found.push(node(spec, *wide, a, b));
        }
    }
    found
}

/// The result is made in the order that it is read in.
pub fn transpose_dot(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Transpose(op)) = term.op() else { return Vec::new() };
    let turned = |t: &Term| {
        let DotGeneral { mut spec, wide } = dot(t)?.clone();
        spec.result = op.perm.iter().map(|&p| spec.result[usize::from(p)].clone()).collect();
        Some(node(spec, wide, Expr::Class(t.args[0]), Expr::Class(t.args[1])))
    };
    operand(egraph, term, 0).filter_map(turned).collect()
}

/// A number times an operand is that number times the result.
pub fn dot_scale(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(DotGeneral { spec, wide }) = dot(term) else { return Vec::new() };
    let mut found = Vec::new();
    for side in 0..2 {
        for (x, number) in scaled(egraph, term.args[side]) {
            let mut args = [Expr::Class(term.args[0]), Expr::Class(term.args[1])];
            args[side] = Expr::Class(x);
            let [a, b] = args;
            let product = Expr::Node(DotGeneral { spec: spec.clone(), wide: *wide }.into(), vec![a, b]);
            found.push(Expr::node(Binary { op: BinaryOp::Mul }, [product, Expr::Splat(number, term.ty.clone())]));
        }
    }
    found
}

/// An operand is read without the dims along which it repeats and that the other operand has.
pub fn dot_broadcast(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(DotGeneral { spec, wide }) = dot(term) else { return Vec::new() };
    let mut found = Vec::new();
    for side in 0..2 {
        for t in operand(egraph, term, side) {
            let Some(Op::BroadcastInDim(op)) = t.op() else { continue };
            let dims = &spec.operands[side];
            let repeated = (0..dims.len()).filter(|d| !op.dims.contains(&(*d as u8)));
            if !repeated.into_iter().all(|d| spec.operands[1 - side].contains(&dims[d])) || op.dims.is_empty() {
                continue;
            }
            let mut spec = spec.clone();
            spec.operands[side] = op.dims.iter().map(|&d| dims[usize::from(d)].clone()).collect();
            let mut args = [Expr::Class(term.args[0]), Expr::Class(term.args[1])];
            args[side] = Expr::Class(t.args[0]);
            let [a, b] = args;
            found.push(node(spec, *wide, a, b));
        }
    }
    found
}

/// An operand whose dims were merged before is read with the dims that it had: `reshape(dot(reshape x))` is a `dot` with more
/// factors.
pub fn dot_reshape(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(op) = dot(term) else { return Vec::new() };
    let mut found = Vec::new();
    for side in 0..2 {
        for t in operand(egraph, term, side).filter(|t| matches!(t.op(), Some(Op::Reshape(_)))) {
            found.extend(unmerged(egraph, term, op, side, t.args[0]));
        }
    }
    found
}

fn unmerged(egraph: &Graph, term: &Term, op: &DotGeneral, side: usize, source: Id) -> Option<Expr> {
    let from = &ty(egraph, source).shape;
    let groups = merged(from, &ty(egraph, term.args[side]).shape)?;
    let mut spec = op.spec.clone();
    // Parts of each factor: itself, or new ones for the dims that were merged.
    let mut parts: Vec<(Vec<FactorId>, Vec<u64>)> = spec.ids().map(|f| (vec![f], Vec::new())).collect();
    for (dim, group) in spec.operands[side].clone().iter().zip(&groups) {
        if group.len() == 1 {
            continue;
        }
        let factor = dim[0];
        let fresh: Vec<FactorId> = (0..group.len()).map(|i| FactorId((spec.names.len() + i) as u8)).collect();
        let name = spec.names[usize::from(factor.0)].clone();
        spec.names.extend((0..group.len()).map(|i| format!("{name}{i}")));
        parts[usize::from(factor.0)] = (fresh, from[group.clone()].to_vec());
    }
    unique_names(&mut spec.names);
    let open = |dims: &Vec<DimFactors>| -> Vec<DimFactors> {
        let plain = |f: &FactorId| DimFactors::from_slice(&[*f]);
        dims.iter().flat_map(|dim| parts[usize::from(dim[0].0)].0.iter().map(plain)).collect()
    };
    let sizes = |dims: &Vec<DimFactors>, shape: &[u64]| -> Shape {
        let of = |(dim, size): (&DimFactors, &u64)| match &parts[usize::from(dim[0].0)].1 {
            sizes if sizes.is_empty() => vec![*size],
            sizes => sizes.clone(),
        };
        dims.iter().zip(shape).flat_map(of).collect()
    };
    let other = term.args[1 - side];
    let other_shape = sizes(&spec.operands[1 - side], &ty(egraph, other).shape);
    let other = Expr::Class(other).reshaped(&ty(egraph, other).shape, &other_shape);
    let result_shape = sizes(&spec.result, &term.ty.shape);
    let mut args = [Expr::Class(source), other];
    if side == 1 {
        args.swap(0, 1);
    }
    let opened =
        FactorSpec { operands: spec.operands.iter().map(open).collect(), result: open(&spec.result), names: spec.names };
    let [a, b] = args;
    let product = node(opened, op.wide, a, b);
    Some(if result_shape == term.ty.shape { product } else { Expr::node(Reshape { shape: term.ty.shape.clone() }, [product]) })
}

fn unique_names(names: &mut [String]) {
    for i in 0..names.len() {
        while names[..i].contains(&names[i]) {
            names[i].push('x');
        }
    }
}
