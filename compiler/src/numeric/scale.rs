//! A small instance of a partitioned training graph: the same nodes, the same strategies, smaller dims on a smaller mesh.
//!
//! Dims that correspond through the ops' rules are one class, and have one size; a dim of several factors is their product. A class is
//! halved, with all that this demands, as long as each dim goes on to be evenly, or unevenly, sharded as it was. A slice or pad by a few
//! elements (next tokens) stays one by as many; what other slices, windows of convolutions and tables that computed indices select from
//! demand keeps its size. Numbers in the graph stay, such as the
//! 1/n of a mean: the instance computes something else than the model, and every rank must compute just that.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Op, Rule};
use crate::plan::{Plan, Strategy};
use crate::schedule;
use dcc_program::program::{ParamKind, Piece};
use dcc_program::{AxisId, FactorId, Mesh, TensorType};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Elements that a step may compute on all ranks, about a minute's work.
const BUDGET: f64 = 2e7;
/// Ranks that the mesh is brought down to, if that leaves two on each axis.
const RANKS: u32 = 32;
/// Microbatches, unless a search ordered them.
const MICROBATCHES: u32 = 4;
/// Ties that are looked at before a class is given up.
const MOST_STEPS: u32 = 10_000;
/// A smaller dim would be no example of itself.
const LEAST: u64 = 3;

pub(super) struct Scaled {
    pub graph: Graph,
    pub plan: Plan,
    /// What was made smaller, as `12288 → 96`.
    pub changes: Vec<String>,
}

/// `graph` and `plan`, smaller. Errors: an op that does not take the smaller operands (a broken invariant).
pub(super) fn down(graph: &Graph, plan: &Plan, keeps_microbatches: bool) -> Result<Scaled> {
    let mesh = smaller_mesh(plan, keeps_microbatches);
    let mut dims = Dims::of(graph, plan, &mesh);
    let old = dims.sizes.clone();
    dims.shrink(graph, &mesh);
    let mut changes: BTreeSet<(u64, u64)> = BTreeSet::new();
    let classes = dims.parent.iter().enumerate().filter(|&(at, &parent)| at == parent).map(|(at, _)| at);
    changes.extend(classes.filter(|&at| dims.sizes[at] != old[at]).map(|at| (old[at], dims.sizes[at])));
    let axes = plan.mesh.axes.iter().zip(&mesh.axes).filter(|(a, b)| a.size != b.size);
    let axes = axes.map(|(a, b)| format!("{} {} → {}", a.name, a.size, b.size));
    let changes = changes.into_iter().rev().map(|(from, to)| format!("{from} → {to}")).chain(axes).collect();
    let graph = dims.apply(graph)?;
    Ok(Scaled { graph, plan: Plan { mesh, ..plan.clone() }, changes })
}

/// Fewer ranks on the largest axes, which keep more than one, and few microbatches, of which the schedule has an order; stages stay.
fn smaller_mesh(plan: &Plan, keeps_microbatches: bool) -> Mesh {
    let mut smaller = plan.mesh.clone();
    let rule = schedule::rule(plan.schedule, plan.virtual_stages);
    for axis in &mut smaller.axes {
        if axis.name == "mb" && !keeps_microbatches {
            let mut few = (1..=MICROBATCHES.min(axis.size)).rev().chain(MICROBATCHES..axis.size);
            axis.size = few.find(|&count| rule.order(plan.stages(), count).is_ok()).unwrap_or(axis.size);
        }
    }
    while smaller.world() > RANKS {
        let axes = smaller.axes.iter_mut().filter(|a| shrinks(&a.name));
        match axes.max_by_key(|axis| axis.size) {
            Some(axis) if axis.size > 2 => axis.size = axis.size.div_ceil(2),
            _ => break,
        }
    }
    smaller
}

fn shrinks(axis: &str) -> bool {
    !["mb", "pp"].contains(&axis)
}

/// How sizes of classes depend on each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tie {
    /// A dim, and the factors whose sizes multiply to its.
    Product(usize, Vec<usize>),
    /// The second has so many elements more than the first.
    Longer(usize, usize, i64),
}

/// Classes of the dims of all values and the factors of all rules, and their sizes.
struct Dims {
    /// First element of each node: one per dim of its value, then one per factor of its rule.
    first: Vec<usize>,
    parent: Vec<usize>,
    /// By class.
    sizes: Vec<u64>,
    fixed: Vec<bool>,
    ties: Vec<Tie>,
    /// Of a class: the ties that it has a part in.
    parts: FxHashMap<usize, Vec<usize>>,
    /// How many shards each class was and is cut into, by axes that lie on it together.
    shards: BTreeMap<usize, BTreeSet<(u64, u64)>>,
    rules: Vec<Rule>,
}

impl Dims {
    fn of(graph: &Graph, plan: &Plan, mesh: &Mesh) -> Dims {
        let rules: Vec<Rule> = graph.ids().map(|id| graph.rule(&graph[id])).collect();
        let mut dims = Dims {
            first: Vec::with_capacity(graph.nodes.len()),
            parent: Vec::new(),
            sizes: Vec::new(),
            fixed: Vec::new(),
            ties: Vec::new(),
            parts: FxHashMap::default(),
            shards: BTreeMap::new(),
            rules,
        };
        for id in graph.ids() {
            dims.first.push(dims.sizes.len());
            dims.sizes.extend(graph.ty(id).shape.iter());
            dims.sizes.extend(&dims.rules[id.0 as usize].sizes);
        }
        dims.parent = (0..dims.sizes.len()).collect();
        dims.fixed = vec![false; dims.sizes.len()];
        let mut products = Vec::new();
        for id in graph.ids() {
            let spec = dims.rules[id.0 as usize].spec.clone();
            let sides = graph[id].operands.iter().zip(&spec.operands).map(|(&o, d)| (o, d));
            for (value, factors) in sides.chain([(id, &spec.result)]) {
                for (dim, factors) in factors.iter().enumerate() {
                    let dim = dims.first[value.0 as usize] + dim;
                    let factors: Vec<usize> = factors.iter().map(|f| dims.factor(graph, id, f.0)).collect();
                    match factors[..] {
                        [factor] => dims.join(dim, factor),
                        _ => products.push((dim, factors)),
                    }
                }
            }
        }
        dims.join_gradients(graph);
        dims.find_ties(graph, products);
        dims.fix(graph);
        dims.find_shards(graph, plan, mesh);
        dims
    }

    fn factor(&self, graph: &Graph, id: NodeId, factor: u8) -> usize {
        self.first[id.0 as usize] + graph.ty(id).rank() + usize::from(factor)
    }

    fn root(&self, mut at: usize) -> usize {
        while self.parent[at] != at {
            at = self.parent[at];
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.parent[a.max(b)] = a.min(b);
    }

    /// A sum of gradients is of the value's shape, even where it has none to sum; state is of its parameter's.
    fn join_gradients(&mut self, graph: &Graph) {
        let mut params: FxHashMap<(&str, Option<Piece>), NodeId> = FxHashMap::default();
        for id in graph.ids() {
            if let Op::Param(param) = &graph[id].op
                && param.kind == ParamKind::Weight
            {
                params.insert((&param.name, param.piece), id);
            }
        }
        for id in graph.ids() {
            let of = match &graph[id].op {
                Op::GradSum(sum) if (sum.of as usize) < graph.nodes.len() => NodeId(sum.of),
                Op::Param(param) => match params.get(&(param.name.as_str(), param.piece)) {
                    Some(&weight) => weight,
                    None => continue,
                },
                _ => continue,
            };
            if graph.ty(of).shape == graph.ty(id).shape {
                for dim in 0..graph.ty(id).rank() {
                    self.join(self.first[of.0 as usize] + dim, self.first[id.0 as usize] + dim);
                }
            }
        }
    }

    fn find_ties(&mut self, graph: &Graph, products: Vec<(usize, Vec<usize>)>) {
        let product = |(dim, factors): (usize, Vec<usize>)| {
            Tie::Product(self.root(dim), factors.iter().map(|&factor| self.root(factor)).collect())
        };
        let mut unique: BTreeSet<Tie> = products.into_iter().map(product).collect();
        for id in graph.ids() {
            for dim in 0..graph.ty(id).rank() {
                if let Some(longer) = lengthens(graph, id, dim) {
                    let operand = self.first[graph[id].operands[0].0 as usize];
                    unique.insert(Tie::Longer(self.root(operand + dim), self.root(self.first[id.0 as usize] + dim), longer));
                }
            }
        }
        self.ties = unique.into_iter().collect();
        for (at, tie) in self.ties.iter().enumerate() {
            let classes = match tie {
                Tie::Product(dim, factors) => factors.iter().chain([dim]).copied().collect(),
                Tie::Longer(a, b, _) => vec![*a, *b],
            };
            for class in classes {
                self.parts.entry(class).or_default().push(at);
            }
        }
    }

    /// Classes whose size something else fixes.
    fn fix(&mut self, graph: &Graph) {
        let inputs: Vec<bool> = indices_of_inputs(graph);
        for id in graph.ids() {
            let rule = &self.rules[id.0 as usize];
            let fixed: Vec<u8> = match &graph[id].op {
                Op::Slice(_) | Op::Pad(_) => {
                    let tied = |f: &&FactorId| {
                        let sides = rule.spec.operands.iter().chain([&rule.spec.result]);
                        let dim = sides.filter_map(|dims| dims.iter().position(|d| d.contains(f))).next();
                        dim.is_some_and(|dim| lengthens(graph, id, dim).is_some())
                    };
                    rule.whole.iter().filter(|f| !tied(f)).map(|f| f.0).collect()
                }
                Op::Concatenate(_) | Op::Reshape(_) | Op::Convolution(_) | Op::MaxPool(_) | Op::TopK(_) => {
                    rule.whole.iter().map(|f| f.0).collect()
                }
                // What is computed must stay below the table's size.
                Op::Gather(gather) if !inputs[graph[id].operands[1].0 as usize] => vec![gather.indexed().0],
                Op::ScatterAdd(scatter) if !inputs[graph[id].operands[0].0 as usize] => vec![scatter.indexed().0],
                _ => Vec::new(),
            };
            for factor in fixed {
                let class = self.root(self.factor(graph, id, factor));
                if !std::mem::replace(&mut self.fixed[class], true) {
                    tracing::debug!(
                        size = self.sizes[class],
                        op = graph[id].op.name(),
                        at = graph.origin(id),
                        "keeps its size"
                    );
                }
            }
        }
    }

    fn find_shards(&mut self, graph: &Graph, plan: &Plan, mesh: &Mesh) {
        let count = |axes: &[AxisId]| (plan.mesh.shards(axes), mesh.shards(axes));
        for (&id, Strategy { factors, .. }) in &plan.strategies {
            for (factor, axes) in factors.iter().enumerate() {
                let class = self.root(self.factor(graph, id, factor as u8));
                self.shards.entry(class).or_default().insert(count(axes));
            }
        }
        for (&id, shard) in &plan.shards {
            for (dim, axes) in shard.iter().enumerate() {
                let class = self.root(self.first[id.0 as usize] + dim);
                self.shards.entry(class).or_default().insert(count(axes));
            }
        }
    }

    /// Halves what is largest as long as the work is over budget.
    fn shrink(&mut self, graph: &Graph, mesh: &Mesh) {
        let original = self.sizes.clone();
        let mut stuck: BTreeSet<usize> = BTreeSet::new();
        while self.work(graph, mesh) > BUDGET {
            let classes = (0..self.parent.len()).filter(|&at| self.parent[at] == at && !stuck.contains(&at));
            let Some(class) = classes.filter(|&at| self.sizes[at] > LEAST).max_by_key(|&at| self.sizes[at]) else { return };
            if let Some(changes) = self.halved(class, &original) {
                changes.into_iter().for_each(|(class, size)| self.sizes[class] = size);
            } else {
                stuck.insert(class);
            }
        }
    }

    /// Elements that all ranks compute in a step, products counted by their factors.
    fn work(&self, graph: &Graph, mesh: &Mesh) -> f64 {
        let of = |id: NodeId| {
            let rule = &self.rules[id.0 as usize];
            let size = |factor: u8| self.sizes[self.root(self.factor(graph, id, factor))] as f64;
            rule.spec.ids().map(|f| size(f.0)).product::<f64>()
        };
        // Of what is not sharded every rank does all; a quarter is a guess.
        let repeated = f64::from(mesh.world()).max(4.0) / 4.0;
        repeated * graph.ids().map(of).sum::<f64>()
    }

    /// New sizes with class `class` halved, and all that must change with it.
    fn halved(&self, class: usize, original: &[u64]) -> Option<BTreeMap<usize, u64>> {
        let mut changed: BTreeMap<usize, u64> = BTreeMap::new();
        let ties = self.parts.get(&class).cloned().unwrap_or_default();
        let exact = ties.iter().any(|&at| matches!(self.ties[at], Tie::Product(..)));
        let size = self.sizes[class];
        let mut sizes = (size / 2..size).take(if exact { 1 } else { 4 });
        let size = sizes.find(|&half| self.allows(class, half, original) && !(exact && 2 * half != size))?;
        changed.insert(class, size);
        let mut work = ties;
        for _ in 0..MOST_STEPS {
            let Some(at) = work.pop() else { return Some(changed) };
            let Some((next, size)) = self.mended(at, &changed, original)? else { continue };
            changed.insert(next, size);
            work.push(at);
            work.extend(&self.parts[&next]);
        }
        None
    }

    /// What else must change for a tie to hold; outer `None` where nothing helps, inner where it holds.
    fn mended(&self, at: usize, changed: &BTreeMap<usize, u64>, original: &[u64]) -> Option<Option<(usize, u64)>> {
        let now = |class: usize| changed.get(&class).copied().unwrap_or(self.sizes[class]);
        let free = |class: &usize| !changed.contains_key(class);
        let half =
            |class: usize| (free(&class) && self.can_halve(class, original)).then(|| Some((class, self.sizes[class] / 2)));
        match &self.ties[at] {
            Tie::Product(dim, factors) => {
                let (have, want) = (factors.iter().map(|&f| now(f)).product::<u64>(), now(*dim));
                match have {
                    _ if have == want => Some(None),
                    _ if have == 2 * want => factors.iter().rev().find_map(|&f| half(f)),
                    _ if 2 * have == want => half(*dim),
                    _ => None,
                }
            }
            &Tie::Longer(a, b, more) => {
                let (from_a, from_b) = (now(a).checked_add_signed(more)?, now(b).checked_add_signed(-more)?);
                let becomes = |class, size| (free(&class) && self.allows(class, size, original)).then_some(Some((class, size)));
                match from_a == now(b) {
                    true => Some(None),
                    false => becomes(b, from_a).or_else(|| becomes(a, from_b)),
                }
            }
        }
    }

    fn can_halve(&self, class: usize, original: &[u64]) -> bool {
        self.sizes[class].is_multiple_of(2) && self.allows(class, self.sizes[class] / 2, original)
    }

    /// Whether a class may have `size`: every shard has something, and it is even where it was.
    fn allows(&self, class: usize, size: u64, original: &[u64]) -> bool {
        let even = |&(before, after): &(u64, u64)| {
            size >= after && size.is_multiple_of(after) == original[class].is_multiple_of(before)
        };
        !self.fixed[class] && size >= LEAST && self.shards.get(&class).is_none_or(|counts| counts.iter().all(even))
    }

    /// The graph with these sizes, node for node.
    fn apply(&self, graph: &Graph) -> Result<Graph> {
        let pieces = self.pieces(graph);
        let mut out = graph.clone();
        for id in graph.ids() {
            let first = self.first[id.0 as usize];
            let shape: Vec<u64> = (0..graph.ty(id).rank()).map(|dim| self.sizes[self.root(first + dim)]).collect();
            let mut op = graph[id].op.clone();
            match &mut op {
                Op::Input(op) => op.shape = shape.iter().copied().collect(),
                Op::Param(op) => {
                    op.shape = shape.iter().copied().collect();
                    op.piece = op.piece.map(|piece| pieces[&(op.name.clone(), piece)]);
                }
                Op::Iota(op) => op.shape = shape.iter().copied().collect(),
                Op::Uniform(op) => op.shape = shape.iter().copied().collect(),
                Op::BroadcastInDim(op) => op.shape = shape.iter().copied().collect(),
                Op::Reshape(op) => op.shape = shape.iter().copied().collect(),
                Op::ScatterAdd(op) => op.size = self.sizes[self.root(self.factor(graph, id, op.indexed().0))],
                Op::Slice(op) => {
                    let x = graph[id].operands[0];
                    let old = &graph.ty(x).shape;
                    for dim in 0..shape.len() {
                        // What is cut off at either end stays so.
                        op.limit[dim] = out.ty(x).shape[dim] - (old[dim] - op.limit[dim]);
                    }
                }
                _ => {}
            }
            out.nodes[id.0 as usize].op = op;
            let ty = TensorType::new(graph.ty(id).dtype, shape);
            self.agrees(&out, graph, id, &ty)?;
            out.nodes[id.0 as usize].ty = ty;
        }
        Ok(out)
    }

    /// The op takes the smaller operands, gives the type, and has the factors that strategies number.
    fn agrees(&self, out: &Graph, graph: &Graph, id: NodeId, ty: &TensorType) -> Result<()> {
        let node = &out[id];
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| out.ty(o)).collect();
        let inferred = node.op.infer(&types)?;
        let same = inferred == *ty && node.op.rule(&types, ty).spec == self.rules[id.0 as usize].spec;
        if same { Ok(()) } else { Err(Error::internal("a smaller instance has other factors").at(graph.origin(id))) }
    }

    /// Where the pieces of each tensor lie now: one behind the other, as before.
    fn pieces(&self, graph: &Graph) -> BTreeMap<(String, Piece), Piece> {
        let mut sizes: BTreeMap<(String, Piece), u64> = BTreeMap::new();
        for id in graph.ids() {
            if let Op::Param(param) = &graph[id].op
                && let Some(piece) = param.piece
            {
                let class = self.root(self.first[id.0 as usize] + usize::from(piece.dim));
                sizes.insert((param.name.clone(), piece), self.sizes[class]);
            }
        }
        let mut ends: BTreeMap<String, u64> = BTreeMap::new();
        let mut moved = BTreeMap::new();
        for ((name, piece), size) in sizes {
            let end = ends.entry(name.clone()).or_default();
            moved.insert((name, piece), Piece { dim: piece.dim, start: *end, end: *end + size });
            *end += size;
        }
        moved
    }
}

/// How many elements more than its operand a slice or a pad has along `dim`, if it cuts or adds few.
fn lengthens(graph: &Graph, id: NodeId, dim: usize) -> Option<i64> {
    let few = match &graph[id].op {
        Op::Slice(op) => op.stride[dim] == 1,
        Op::Pad(op) => op.interior[dim] == 0,
        _ => false,
    };
    let (from, to) = (graph.ty(graph[id].operands.first().copied()?).shape.get(dim)?, graph.ty(id).shape[dim]);
    let more = to as i64 - *from as i64;
    (few && more != 0 && 8 * more.unsigned_abs() <= *from).then_some(more)
}

/// Integers that are an input's, moved and replaced at most by a constant where they are out of range.
fn indices_of_inputs(graph: &Graph) -> Vec<bool> {
    let mut found: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        let of = |o: NodeId| found[o.0 as usize];
        let is = match &node.op {
            Op::Input(_) => true,
            Op::Reshape(_) | Op::Transpose(_) | Op::Cast(_) | Op::BroadcastInDim(_) => of(node.operands[0]),
            Op::Select(_) => of(node.operands[1]) && is_zero(graph, node.operands[2]),
            _ => false,
        };
        found.push(is);
    }
    found
}

/// Row 0 is in every table.
fn is_zero(graph: &Graph, mut id: NodeId) -> bool {
    while let Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Cast(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    matches!(&graph[id].op, Op::Const(number) if number.value() == 0.0)
}
