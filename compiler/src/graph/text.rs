//! The text of a graph: one node a line, exact in both directions.
//!
//! ```text
//! graph mesh(mb=2, tp=2)                                       the mesh only where one is set
//! forward                                                      phase of the nodes that follow
//! %2 f32[64/mb, 1024/tp] @0 = dot_general{spec:"m k, k n -> m n"} %0, %1   # /fc1/MatMul
//! backward
//! %5 f32[256, 1024/tp]+mb @0 = dot_general{spec:"m k, m n -> k n"} %0, %4 like %2   # /fc1/MatMul
//! %6 f32[256, 1024/tp]+mb @0 = grad_sum{of:1} %5 of %1
//! output loss = %9
//! ```
//! `@0` is the stage; `like` is `GradOf::Op`, `of` is `GradOf::Value`; after `#` stands the origin. Attributes are JSON with bare
//! words for names, axes by name, and without the `dtype` and `shape` that the node's type repeats.

mod attributes;

use super::{GradOf, Graph, NodeId, Phase};
use crate::ops::Op;
use attributes::{bare, quoted};
use dcc_program::{Mesh, MeshAxis, TensorType};
use std::fmt;

type Parsed<T> = std::result::Result<T, String>;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = Mesh { axes: Vec::new() };
        let mesh = self.mesh.as_ref().unwrap_or(&none);
        match &self.mesh {
            Some(mesh) => {
                let axes: Vec<String> = mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
                writeln!(f, "graph mesh({})", axes.join(", "))?;
            }
            None => writeln!(f, "graph")?,
        }
        let mut phase = None;
        for id in self.ids() {
            if phase != Some(self[id].phase) {
                writeln!(f, "{}", self[id].phase.name())?;
                phase = Some(self[id].phase);
            }
            self.write_node(f, id, mesh)?;
        }
        for (name, id) in &self.outputs {
            writeln!(f, "output {} = %{}", if bare(name) { name.clone() } else { quoted(name) }, id.0)?;
        }
        Ok(())
    }
}

impl Graph {
    /// Reads what `Display` prints. `Err` names the line and what is wrong there.
    pub fn parse(text: &str) -> Parsed<Graph> {
        let mut graph = Graph::new();
        for (number, line) in text.lines().enumerate() {
            graph.parse_line(number == 0, line).map_err(|e| format!("line {}: {e}", number + 1))?;
        }
        graph.cursor = super::Cursor::default();
        Ok(graph)
    }

    fn write_node(&self, f: &mut fmt::Formatter<'_>, id: NodeId, mesh: &Mesh) -> fmt::Result {
        let node = &self[id];
        write!(f, "%{} {}", id.0, node.ty.text(mesh))?;
        if let Some(stage) = node.stage {
            write!(f, " @{stage}")?;
        }
        write!(f, " = {}{}", node.op.name(), attributes::print(&node.op.attributes(), mesh))?;
        for (i, operand) in node.operands.iter().enumerate() {
            write!(f, "{} %{}", if i == 0 { "" } else { "," }, operand.0)?;
        }
        match self.grad_of(id) {
            Some(GradOf::Op(of)) => write!(f, " like %{}", of.0)?,
            Some(GradOf::Value(of)) => write!(f, " of %{}", of.0)?,
            None => {}
        }
        match self.origin(id) {
            "" => writeln!(f),
            origin => writeln!(f, "   # {}", escape(origin)),
        }
    }

    fn parse_line(&mut self, first: bool, line: &str) -> Parsed<()> {
        let line = line.trim();
        if first {
            self.mesh = parse_mesh(line.strip_prefix("graph").ok_or("a graph's text begins with `graph`")?.trim())?;
        } else if let Some(rest) = line.strip_prefix("output ") {
            let (name, rest) = attributes::string(rest)?;
            let rest = rest.trim_start().strip_prefix('=').ok_or("an output is `name = %node`")?;
            let (id, rest) = node_id(rest)?;
            if id.0 as usize >= self.nodes.len() || !rest.trim().is_empty() {
                return Err(format!("output {name} is no node"));
            }
            self.outputs.push((name, id));
        } else if let Some(phase) = Phase::ALL.into_iter().find(|p| p.name() == line) {
            self.set_phase(phase);
        } else if !line.is_empty() {
            self.parse_node(line)?;
        }
        Ok(())
    }

    fn parse_node(&mut self, line: &str) -> Parsed<()> {
        let (left, right) = line.split_once(" = ").ok_or("a node is `%id type = op operands`")?;
        let (id, left) = node_id(left)?;
        let (ty, stage) = match left.split_once('@') {
            Some((ty, stage)) => (ty, Some(stage.trim().parse().map_err(|_| format!("`{stage}` is no stage"))?)),
            None => (left, None),
        };
        let none = Mesh { axes: Vec::new() };
        let mesh = self.mesh.as_ref().unwrap_or(&none);
        let ty = TensorType::parse(ty.trim(), mesh)?;
        let end = right.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(right.len());
        let (attributes, mut rest) = attributes::parse(&right[end..], &ty, mesh)?;
        let op = Op::parse(&right[..end], &attributes)?;
        let mut operands = Vec::new();
        while rest.trim_start().starts_with([',', '%']) {
            let (operand, after) = node_id(rest.trim_start().trim_start_matches(','))?;
            if operand.0 as usize >= self.nodes.len() {
                return Err(format!("operand %{} does not precede %{}", operand.0, id.0));
            }
            operands.push(operand);
            rest = after;
        }
        let (of, rest) = parse_grad_of(rest.trim())?;
        let origin = match rest.trim() {
            "" => String::new(),
            comment => unescape(comment.strip_prefix('#').ok_or(format!("`{comment}` after the operands"))?.trim()),
        };
        self.set_grad_of(of);
        self.set_stage(stage);
        self.set_origin(&origin);
        let expected = NodeId(self.nodes.len() as u32);
        let added = self.add_typed(op, &operands, ty);
        if id != expected || added != expected {
            return Err(format!("%{} stands where %{} is due, or repeats a node", id.0, expected.0));
        }
        Ok(())
    }
}

fn node_id(text: &str) -> Parsed<(NodeId, &str)> {
    let digits = text.trim_start().strip_prefix('%').ok_or_else(|| format!("a node `%n` is due at `{text}`"))?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let id = digits[..end].parse().map_err(|_| format!("`%{}` is no node", &digits[..end]))?;
    Ok((NodeId(id), &digits[end..]))
}

fn parse_grad_of(text: &str) -> Parsed<(Option<GradOf>, &str)> {
    for (word, kind) in [("like ", GradOf::Op as fn(NodeId) -> GradOf), ("of ", GradOf::Value)] {
        if let Some(rest) = text.strip_prefix(word) {
            let (id, rest) = node_id(rest)?;
            return Ok((Some(kind(id)), rest));
        }
    }
    Ok((None, text))
}

fn parse_mesh(text: &str) -> Parsed<Option<Mesh>> {
    if text.is_empty() {
        return Ok(None);
    }
    let axes = text.strip_prefix("mesh(").and_then(|t| t.strip_suffix(')')).ok_or_else(|| format!("`{text}` is no mesh"))?;
    let axis = |text: &str| {
        let (name, size) = text.trim().split_once('=')?;
        Some(MeshAxis { name: name.to_owned(), size: size.parse().ok()? })
    };
    let axes = axes.split(',').filter(|t| !t.trim().is_empty());
    let axes: Option<Vec<MeshAxis>> = axes.map(axis).collect();
    Ok(Some(Mesh { axes: axes.ok_or_else(|| format!("`{text}` is no mesh"))? }))
}

/// On one line.
fn escape(origin: &str) -> String {
    origin.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r")
}

fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '\\' { chars.next() } else { None }) {
            ('\\', Some('n')) => out.push('\n'),
            ('\\', Some('r')) => out.push('\r'),
            ('\\', Some(other)) => out.push(other),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
graph mesh(mb=2, tp=2)
forward
%0 f32[64/mb, 256] @0 = input{batch_dim:0, name:x}
%1 f32[256, 1024/tp] @0 = param{kind:weight, name:fc1.weight}
%2 f32[64/mb, 1024/tp] @0 = dot_general{spec:\"m k, k n -> m n\"} %0, %1   # /fc1/MatMul # 1
%3 f32[] = const{value:\"0.5\"}
%4 f32[64/mb, 1024/tp] @0 = broadcast_in_dim{dims:[]} %3
backward
%5 f32[256, 1024/tp]+mb @0 = dot_general{spec:\"m k, m n -> k n\"} %0, %4 like %2   # /fc1/MatMul # 1
%6 f32[256, 1024/tp]+mb @0 = grad_sum{of:1} %5 of %1   # C:\\\\n
%7 f32[256, 1024/tp] @0 = all_reduce{axes:[tp], reduce:sum} %6
output loss = %6
output \"a b\" = %2
";

    #[test]
    fn graphs_round_trip() {
        let graph = Graph::parse(TEXT).unwrap();
        assert_eq!(graph.to_string(), TEXT);
        assert_eq!(graph.origin(NodeId(6)), "C:\\n");
        assert_eq!(graph.grad_of(NodeId(5)), Some(GradOf::Op(NodeId(2))));
    }

    #[test]
    fn errors_name_the_line() {
        let first_error = |from: &str, to: &str| Graph::parse(&TEXT.replacen(from, to, 1)).unwrap_err();
        for (from, to, error) in [
            ("graph", "grph", "line 1: a graph's text begins with `graph`"),
            ("%4 f32[64/mb", "%4 f32[64/dp", "line 7: the mesh has no axis `dp`"),
            ("} %3", "} %9", "line 7: operand %9 does not precede %4"),
            ("all_reduce", "all_gath", "line 11: unknown op `all_gath`"),
            ("[tp]", "[dp]", "line 11: the mesh has no axis `dp`"),
            ("output loss = %6", "output loss = %60", "line 12: output loss is no node"),
        ] {
            assert_eq!(first_error(from, to), error);
        }
    }
}
