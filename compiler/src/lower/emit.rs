//! From a cluster of nodes to kernel IR: every value is pulled by the index at which it is wanted.
//!
//! Members of the cluster become row variables or are recomputed in the statement that needs them; inline nodes turn into index
//! arithmetic; everything else is loaded from its buffer. All indices are global.

#[cfg(test)]
mod tests;

use crate::fuse::assembly::{Assembly, assembly};
use crate::fuse::refs::{dim_of, is_loaded, reduced_index};
use crate::fuse::{Cluster, Fusion, Role};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use dcc_program::DType;
use dcc_program::kernel::{Argument, BinaryOp, CompareOp, DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode, VarId};
use rustc_hash::FxHashMap;

/// A kernel and the nodes whose buffers are its inputs and outputs.
pub struct Emitted {
    pub kernel: Kernel,
    pub inputs: Vec<NodeId>,
    pub outputs: Vec<NodeId>,
}

/// The kernel of a cluster. `mode` says whether an output is an accumulator.
pub fn cluster(graph: &Graph, fusion: &Fusion, cluster: &Cluster, mode: impl Fn(NodeId) -> StoreMode) -> Emitted {
    if let [member] = cluster.members[..]
        && let Some(assembly) = assembly(graph, member)
    {
        return assembled(graph, fusion, member, &assembly, mode(member));
    }
    let mut emitter = Emitter::new(graph, fusion, Some(cluster));
    for dim in 0..cluster.dims.len() {
        let id = emitter.kernel.dim(format!("i{dim}"));
        if !cluster.inner.contains(&id) {
            emitter.kernel.outer.push(id);
        }
    }
    let (mut outputs, mut whole) = (Vec::new(), Vec::new());
    for &member in &cluster.members {
        let index = &cluster.index[&member];
        let row = !cluster.inner.is_empty() && index.iter().all(|i| !cluster.inner.contains(&dim_of(i)));
        if let Op::Reduce(_) = graph[member].op {
            emitter.reduce(member, index, cluster);
        } else if row || (cluster.inner.is_empty() && fusion.materialised[member.0 as usize]) {
            let value = emitter.compute(member, index);
            let var = emitter.var(member);
            emitter.kernel.body.push(Stmt::Let { var, value });
        }
        if fusion.materialised[member.0 as usize] && !cluster.inner.is_empty() {
            match row || matches!(graph[member].op, Op::Reduce(_)) {
                true => emitter.store(member, index, Vec::new(), mode(member), &mut outputs),
                false => whole.push(member),
            }
        }
    }
    if cluster.inner.is_empty() {
        whole.extend(cluster.members.iter().filter(|m| fusion.materialised[m.0 as usize]));
    }
    // All that is read is read before whole blocks are written: results may lie where operands lay.
    for member in whole {
        emitter.store(member, &cluster.index[&member], cluster.inner.clone(), mode(member), &mut outputs);
    }
    Emitted { kernel: emitter.kernel, inputs: emitter.inputs, outputs }
}

/// The kernel that writes the parts of `node` to their places: its points are those of a part, or of the other dims if parts have one.
fn assembled(graph: &Graph, fusion: &Fusion, node: NodeId, assembly: &Assembly, mode: StoreMode) -> Emitted {
    let mut emitter = Emitter::new(graph, fusion, None);
    let ty = graph.ty(node);
    let one = Index::Affine { terms: Vec::new(), offset: 0 };
    let looped = |d: &usize| *d != assembly.dim || assembly.size > 1;
    let index: Vec<Index> = (0..ty.rank())
        .map(|d| if looped(&d) { Index::Dim(emitter.kernel.dim(format!("i{d}"))) } else { one.clone() })
        .collect();
    emitter.kernel.outer = (0..ty.rank()).filter(looped).map(|d| dim_of(&index[d])).collect();
    emitter.kernel.outputs.push(Argument { dtype: ty.dtype, rank: ty.rank() as u8 });
    for part in &assembly.parts {
        let (reader, operand) = part.read;
        let inline = fusion.roles[part.value.0 as usize] == Role::Inline && !is_loaded(graph, reader, operand);
        let value = if inline { emitter.element(part.value, &index) } else { emitter.load(part.value, &index, Outside::Never) };
        let mut at = index.clone();
        at[assembly.dim] = emitter.affine(&index[assembly.dim], 1, part.start as i64);
        emitter.kernel.body.push(Stmt::Store { output: 0, over: Vec::new(), index: at, value, mode });
    }
    Emitted { kernel: emitter.kernel, inputs: emitter.inputs, outputs: vec![node] }
}

/// The kernel of one inline node that needs a buffer.
pub fn single(graph: &Graph, fusion: &Fusion, node: NodeId, mode: StoreMode) -> Emitted {
    let mut emitter = Emitter::new(graph, fusion, None);
    let index: Vec<Index> = (0..graph.ty(node).rank()).map(|d| Index::Dim(emitter.kernel.dim(format!("i{d}")))).collect();
    emitter.kernel.outer = index.iter().map(dim_of).collect();
    let mut outputs = Vec::new();
    let value = emitter.compute(node, &index);
    emitter.store_value(node, &index, Vec::new(), mode, value, &mut outputs);
    Emitted { kernel: emitter.kernel, inputs: emitter.inputs, outputs }
}

struct Emitter<'a> {
    graph: &'a Graph,
    fusion: &'a Fusion,
    cluster: Option<&'a Cluster>,
    kernel: Kernel,
    inputs: Vec<NodeId>,
    vars: FxHashMap<NodeId, VarId>,
    memo: FxHashMap<(NodeId, Vec<Index>), ExprId>,
    interned: FxHashMap<Expr, ExprId>,
    /// What loads give where the element at hand may not exist.
    outside: Outside,
}

impl<'a> Emitter<'a> {
    fn new(graph: &'a Graph, fusion: &'a Fusion, cluster: Option<&'a Cluster>) -> Emitter<'a> {
        Emitter {
            graph,
            fusion,
            cluster,
            kernel: Kernel::default(),
            inputs: Vec::new(),
            vars: FxHashMap::default(),
            memo: FxHashMap::default(),
            interned: FxHashMap::default(),
            outside: Outside::Never,
        }
    }

    fn expr(&mut self, expr: Expr) -> ExprId {
        if let Some(&id) = self.interned.get(&expr) {
            return id;
        }
        let id = ExprId(self.kernel.exprs.len() as u32);
        self.kernel.exprs.push(expr.clone());
        self.interned.insert(expr, id);
        id
    }

    fn int(&mut self, value: i64) -> ExprId {
        self.expr(Expr::Const { dtype: DType::I64, bits: value as u64 })
    }

    fn var(&mut self, node: NodeId) -> VarId {
        let var = VarId(self.vars.len() as u32);
        self.vars.insert(node, var);
        var
    }

    fn reduce(&mut self, node: NodeId, index: &[Index], cluster: &Cluster) {
        let Op::Reduce(op) = &self.graph[node].op else { unreachable!("the caller saw a reduction") };
        let operand = self.graph[node].operands[0];
        let at = reduced_index(op, index, &cluster.inner);
        let value = match self.fusion.loads.contains(&node) {
            true => self.load(operand, &at, Outside::Never),
            false => self.element(operand, &at),
        };
        let var = self.var(node);
        self.kernel.body.push(Stmt::Reduce { var, op: op.op, over: cluster.inner.clone(), value });
    }

    fn store(&mut self, node: NodeId, index: &[Index], over: Vec<DimId>, mode: StoreMode, outputs: &mut Vec<NodeId>) {
        let value = self.element(node, index);
        self.store_value(node, index, over, mode, value, outputs);
    }

    fn store_value(
        &mut self,
        node: NodeId,
        index: &[Index],
        over: Vec<DimId>,
        mode: StoreMode,
        value: ExprId,
        outputs: &mut Vec<NodeId>,
    ) {
        let ty = self.graph.ty(node);
        self.kernel.outputs.push(Argument { dtype: ty.dtype, rank: ty.rank() as u8 });
        let output = outputs.len() as u8;
        outputs.push(node);
        self.kernel.body.push(Stmt::Store { output, over, index: index.to_vec(), value, mode });
    }

    /// The element of `node` at `index`.
    fn element(&mut self, node: NodeId, index: &[Index]) -> ExprId {
        if let Some(&var) = self.vars.get(&node) {
            return self.expr(Expr::Var(var));
        }
        let own = self.cluster.and_then(|c| c.index.get(&node)).is_some_and(|own| own == index);
        let inline = self.fusion.roles[node.0 as usize] == Role::Inline;
        if own || inline { self.compute(node, index) } else { self.load(node, index, self.outside) }
    }

    fn load(&mut self, node: NodeId, index: &[Index], outside: Outside) -> ExprId {
        let input = self.inputs.iter().position(|&n| n == node).unwrap_or_else(|| {
            let ty = self.graph.ty(node);
            self.kernel.inputs.push(Argument { dtype: ty.dtype, rank: ty.rank() as u8 });
            self.inputs.push(node);
            self.inputs.len() - 1
        });
        self.expr(Expr::Load { input: input as u8, index: index.to_vec(), outside })
    }

    fn compute(&mut self, node: NodeId, index: &[Index]) -> ExprId {
        let key = (node, index.to_vec());
        if let Some(&expr) = self.memo.get(&key) {
            return expr;
        }
        let expr = self.compute_new(node, index);
        self.memo.insert(key, expr);
        expr
    }

    fn compute_new(&mut self, id: NodeId, index: &[Index]) -> ExprId {
        let node = &self.graph[id];
        let operand = |i: usize| node.operands[i];
        match &node.op {
            Op::Const(c) => self.expr(Expr::Const { dtype: c.dtype, bits: c.bits }),
            Op::Training(_) => self.expr(Expr::Const { dtype: DType::Bool, bits: 1 }),
            Op::Iota(op) => {
                let position = self.position(&index[usize::from(op.dim)]);
                if op.dtype == DType::I64 { position } else { self.expr(Expr::Cast(op.dtype, position)) }
            }
            Op::Uniform(op) => {
                let (seed, step) = (self.element(operand(0), &[]), self.element(operand(1), &[]));
                let element = self.flat(index, &op.shape);
                self.expr(Expr::Uniform { id: op.id, seed, step, element })
            }
            Op::Unary(op) => {
                let x = self.element(operand(0), index);
                self.expr(Expr::Unary(op.op, x))
            }
            Op::Binary(op) => {
                let (a, b) = (self.element(operand(0), index), self.element(operand(1), index));
                self.expr(Expr::Binary(op.op, a, b))
            }
            Op::Compare(op) => {
                let (a, b) = (self.element(operand(0), index), self.element(operand(1), index));
                self.expr(Expr::Compare(op.op, a, b))
            }
            Op::Select(_) => {
                let [c, a, b] = [0, 1, 2].map(|i| self.element(operand(i), index));
                self.expr(Expr::Select(c, a, b))
            }
            Op::Cast(op) => {
                let x = self.element(operand(0), index);
                self.expr(Expr::Cast(op.dtype, x))
            }
            Op::GradSum(_) => self.sum(id, index),
            _ => self.moved(id, index),
        }
    }

    /// The terms of a gradient sum one after the other; whole half floats are added in f32 and rounded once.
    fn sum(&mut self, id: NodeId, index: &[Index]) -> ExprId {
        let node = &self.graph[id];
        let wide = node.ty.dtype.is_float() && node.ty.dtype.bytes() == 2 && node.operands.len() > 2;
        let wide = wide && node.ty.sharding.pending.is_empty();
        let mut sum = None;
        for &operand in &node.operands {
            let mut term = self.element(operand, index);
            if wide {
                term = self.expr(Expr::Cast(DType::F32, term));
            }
            sum = Some(sum.map_or(term, |sum| self.expr(Expr::Binary(BinaryOp::Add, sum, term))));
        }
        let sum = sum.expect("a gradient sum has a term");
        if wide { self.expr(Expr::Cast(node.ty.dtype, sum)) } else { sum }
    }

    /// Ops that only change indices.
    fn moved(&mut self, id: NodeId, index: &[Index]) -> ExprId {
        let node = &self.graph[id];
        let first = node.operands[0];
        match &node.op {
            Op::BroadcastInDim(op) => {
                let at: Vec<Index> = op.dims.iter().map(|&d| index[usize::from(d)].clone()).collect();
                self.element(first, &at)
            }
            Op::Transpose(op) => {
                let mut at = index.to_vec();
                op.perm.iter().enumerate().for_each(|(result, &d)| at[usize::from(d)] = index[result].clone());
                self.element(first, &at)
            }
            Op::Reshape(_) => {
                let to = &node.ty.shape;
                let mut kept = index.iter().zip(to).filter(|(_, size)| **size != 1).map(|(i, _)| i.clone());
                let from = &self.graph.ty(first).shape;
                let zero = Index::Affine { terms: Vec::new(), offset: 0 };
                let at: Vec<Index> =
                    from.iter().map(|&d| if d == 1 { zero.clone() } else { kept.next().unwrap_or(zero.clone()) }).collect();
                self.element(first, &at)
            }
            Op::Slice(op) => {
                let at: Vec<Index> = index
                    .iter()
                    .enumerate()
                    .map(|(d, i)| match self.graph.ty(first).shape[d] == node.ty.shape[d] {
                        true => i.clone(),
                        false => self.affine(i, op.stride[d] as i64, op.start[d] as i64),
                    })
                    .collect();
                self.element(first, &at)
            }
            Op::Reverse(op) => {
                let mut at = index.to_vec();
                for &d in &op.dims {
                    at[usize::from(d)] = self.affine(&index[usize::from(d)], -1, node.ty.shape[usize::from(d)] as i64 - 1);
                }
                self.element(first, &at)
            }
            Op::Pad(op) => self.pad(id, op, index),
            Op::Concatenate(op) => self.concatenate(id, usize::from(op.dim), index),
            Op::Gather(op) => {
                debug_assert!(is_loaded(self.graph, id, 0));
                let position = |f| op.spec.result.iter().position(|d| d.first() == Some(&f)).expect("a result factor");
                let at: Vec<Index> = op.spec.operands[1].iter().map(|d| index[position(d[0])].clone()).collect();
                let row = self.element(node.operands[1], &at);
                let row = if self.graph.ty(node.operands[1]).dtype == DType::I64 {
                    row
                } else {
                    self.expr(Expr::Cast(DType::I64, row))
                };
                let indexed = op.indexed();
                let factor = |d: &dcc_program::factors::DimFactors| d[0];
                let at: Vec<Index> = op.spec.operands[0]
                    .iter()
                    .map(|d| if factor(d) == indexed { Index::Expr(row) } else { index[position(d[0])].clone() })
                    .collect();
                self.load(first, &at, Outside::Zero)
            }
            other => unreachable!("{} is no part of a kernel", other.name()),
        }
    }

    fn pad(&mut self, id: NodeId, op: &crate::ops::Pad, index: &[Index]) -> ExprId {
        let first = self.graph[id].operands[0];
        let mut at = Vec::new();
        let mut holes: Option<ExprId> = None;
        for (d, i) in index.iter().enumerate() {
            if self.graph.ty(first).shape[d] == self.graph.ty(id).shape[d] {
                at.push(i.clone());
                continue;
            }
            let shifted = self.affine(i, 1, -(op.low[d] as i64));
            if op.interior[d] == 0 {
                at.push(shifted);
                continue;
            }
            // Only every (interior + 1)-th element exists.
            let (position, period) = (self.position(&shifted), self.int(op.interior[d] as i64 + 1));
            let zero = self.int(0);
            let rest = self.expr(Expr::Binary(BinaryOp::Rem, position, period));
            let here = self.expr(Expr::Compare(CompareOp::Eq, rest, zero));
            holes = Some(match holes {
                Some(other) => self.expr(Expr::Binary(BinaryOp::And, other, here)),
                None => here,
            });
            let before = self.expr(Expr::Compare(CompareOp::Lt, position, zero));
            let quotient = self.expr(Expr::Binary(BinaryOp::Div, position, period));
            let outside = self.int(-1);
            at.push(Index::Expr(self.expr(Expr::Select(before, outside, quotient))));
        }
        let value = self.at_distance(id, 0, &at);
        match holes.or_else(|| self.edges(id, op, index)) {
            Some(here) => {
                let zero = self.expr(Expr::Const { dtype: self.graph.ty(id).dtype, bits: 0 });
                self.expr(Expr::Select(here, value, zero))
            }
            None => value,
        }
    }

    /// Operand `i` of `id` at an index that may lie outside of it: zero there if it is loaded, anything if it is computed.
    fn at_distance(&mut self, id: NodeId, i: usize, at: &[Index]) -> ExprId {
        let operand = self.graph[id].operands[i];
        if is_loaded(self.graph, id, i) || self.fusion.roles[operand.0 as usize] != Role::Inline {
            return self.load(operand, at, Outside::Zero);
        }
        let outside = std::mem::replace(&mut self.outside, Outside::Zero);
        let value = self.element(operand, at);
        self.outside = outside;
        value
    }

    /// Whether an element of a pad lies inside, where that must be asked: what is computed outside is not zero by itself.
    fn edges(&mut self, id: NodeId, op: &crate::ops::Pad, index: &[Index]) -> Option<ExprId> {
        let first = self.graph[id].operands[0];
        if is_loaded(self.graph, id, 0) || self.fusion.roles[first.0 as usize] != Role::Inline {
            return None;
        }
        let mut inside = None;
        for (d, i) in index.iter().enumerate().filter(|(d, _)| op.low[*d] != 0 || op.high[*d] != 0) {
            let (zero, low) = (self.zero_around(first, d), op.low[d] as i64);
            let high = low + self.graph.ty(first).shape[d] as i64;
            let sides = [(op.low[d], zero[0], CompareOp::Ge, low), (op.high[d], zero[1], CompareOp::Lt, high)];
            for (_, _, compare, bound) in sides.into_iter().filter(|&(count, zero, ..)| count != 0 && !zero) {
                let (position, bound) = (self.position(i), self.int(bound));
                let here = self.expr(Expr::Compare(compare, position, bound));
                inside = Some(inside.map_or(here, |other| self.expr(Expr::Binary(BinaryOp::And, other, here))));
            }
        }
        inside
    }

    /// Whether a part of a loaded value is zero below its first and above its last place along `d`, since that is outside of the value.
    fn zero_around(&self, part: NodeId, mut d: usize) -> [bool; 2] {
        let (mut id, mut start, size) = (part, 0, self.graph.ty(part).shape[d]);
        while self.fusion.roles[id.0 as usize] == Role::Inline {
            match &self.graph[id].op {
                Op::Slice(op) => start += op.start[d],
                Op::Transpose(op) => d = usize::from(op.perm[d]),
                Op::Cast(_) => {}
                _ => return [false; 2],
            }
            id = self.graph[id].operands[0];
        }
        [start == 0, start + size == self.graph.ty(id).shape[d]]
    }

    fn concatenate(&mut self, id: NodeId, dim: usize, index: &[Index]) -> ExprId {
        let operands = self.graph[id].operands.clone();
        let position = self.position(&index[dim]);
        let mut starts = vec![0i64];
        for &operand in &operands {
            starts.push(starts[starts.len() - 1] + self.graph.ty(operand).shape[dim] as i64);
        }
        let mut value = None;
        for k in (0..operands.len()).rev() {
            let mut at = index.to_vec();
            at[dim] = self.affine(&index[dim], 1, -starts[k]);
            let here = self.at_distance(id, k, &at);
            value = Some(match value {
                Some(later) => {
                    let end = self.int(starts[k + 1]);
                    let before = self.expr(Expr::Compare(CompareOp::Lt, position, end));
                    self.expr(Expr::Select(before, here, later))
                }
                None => here,
            });
        }
        value.expect("infer refused a concatenation of nothing")
    }

    /// `index · factor + offset`; never a plain loop dim, which would bind that dim's size.
    fn affine(&mut self, index: &Index, factor: i64, offset: i64) -> Index {
        match index {
            Index::Dim(dim) => Index::Affine { terms: vec![(*dim, factor)], offset },
            Index::Affine { terms, offset: inner } => {
                let terms = terms.iter().map(|&(dim, c)| (dim, c * factor)).collect();
                Index::Affine { terms, offset: inner * factor + offset }
            }
            Index::Expr(expr) => {
                let (factor, offset) = (self.int(factor), self.int(offset));
                let scaled = self.expr(Expr::Binary(BinaryOp::Mul, *expr, factor));
                Index::Expr(self.expr(Expr::Binary(BinaryOp::Add, scaled, offset)))
            }
        }
    }

    /// The index as an i64 value.
    fn position(&mut self, index: &Index) -> ExprId {
        match index {
            Index::Dim(dim) => self.expr(Expr::Position(*dim)),
            Index::Expr(expr) => *expr,
            Index::Affine { terms, offset } => {
                let mut sum = self.int(*offset);
                for &(dim, coefficient) in terms {
                    let (position, coefficient) = (self.expr(Expr::Position(dim)), self.int(coefficient));
                    let term = self.expr(Expr::Binary(BinaryOp::Mul, position, coefficient));
                    sum = self.expr(Expr::Binary(BinaryOp::Add, sum, term));
                }
                sum
            }
        }
    }

    /// Row-major index of an element in a tensor of `shape`.
    fn flat(&mut self, index: &[Index], shape: &[u64]) -> ExprId {
        let mut sum = self.int(0);
        for (i, &size) in index.iter().zip(shape) {
            let (position, size) = (self.position(i), self.int(size as i64));
            let scaled = self.expr(Expr::Binary(BinaryOp::Mul, sum, size));
            sum = self.expr(Expr::Binary(BinaryOp::Add, scaled, position));
        }
        sum
    }
}
