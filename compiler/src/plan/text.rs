//! The text of a plan, for golden tests and `--emit plan`: one forward node a line, with its factors, axes and stage.

use super::{Plan, Strategy};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use dcc_program::{AxisId, Mesh, TensorType};
use smallvec::SmallVec;

impl Plan {
    /// `%12 dot_general(b t d, d n -> b t n) {b: mb dp, n: tp} stage 0  # /h.0/MatMul`
    pub fn text(&self, graph: &Graph) -> String {
        let axes: Vec<String> = self.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
        let mut out =
            format!("plan mesh({}) batch {} {}\n", axes.join(", "), names(&self.mesh, &self.batch), self.schedule.name());
        for (&id, strategy) in &self.strategies {
            let node = &graph[id];
            let types: SmallVec<[&TensorType; 4]> = node.operands.iter().map(|&o| graph.ty(o)).collect();
            let spec = node.op.rule(&types, &node.ty).spec;
            out += &format!("%{} {}({})", id.0, label(graph, id), spec.text());
            let factors = strategy.text(&spec.names, &self.mesh);
            if !factors.is_empty() {
                out += &format!(" {{{factors}}}");
            }
            if let Some(stage) = self.stages.get(&id) {
                out += &format!(" stage {stage}");
            }
            if !graph.origin(id).is_empty() {
                out += &format!("  # {}", graph.origin(id));
            }
            out.push('\n');
        }
        out
    }
}

impl Strategy {
    /// `b: mb dp, n: tp, keep tp`; factors without axes are left out.
    pub fn text(&self, factors: &[String], mesh: &Mesh) -> String {
        let sharded = self.factors.iter().zip(factors).filter(|(axes, _)| !axes.is_empty());
        let mut parts: Vec<String> = sharded.map(|(axes, name)| format!("{name}: {}", names(mesh, axes))).collect();
        if !self.keep.is_empty() {
            parts.push(format!("keep {}", names(mesh, &self.keep)));
        }
        parts.join(", ")
    }
}

fn label(graph: &Graph, id: NodeId) -> String {
    match &graph[id].op {
        Op::Param(param) => format!("param {}", param.name),
        Op::Input(input) => format!("input {}", input.name),
        Op::Unary(unary) => unary.op.name().to_owned(),
        Op::Binary(binary) => binary.op.name().to_owned(),
        op => op.name().to_owned(),
    }
}

pub(super) fn names(mesh: &Mesh, axes: &[AxisId]) -> String {
    let names: Vec<&str> = axes.iter().map(|&a| mesh.name(a)).collect();
    names.join(" ")
}
