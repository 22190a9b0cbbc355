//! Float tensors that are part of the program, as sizes are: scales of a Resize, bounds of a Range, what a Pad fills with, a quantiser's scale, what OneHot writes, a norm's epsilon.

use std::collections::BTreeSet;

use super::flatten::Flat;
use super::node::{Node, ValueId};

/// Operands of `op` that are numbers of the operator, not data, and that it takes as floats.
fn operands(op: &str) -> &'static [usize] {
    match op {
        "Resize" => &[1, 2],
        "Upsample" => &[1],
        "Range" => &[0, 1, 2],
        "Pad" => &[2],
        "Dropout" => &[1],
        "QuantizeLinear" | "DequantizeLinear" => &[1, 2],
        "ConstantOfShape" => &[0],
        "OneHot" => &[2],
        _ => &[],
    }
}

/// Names of values that nodes read as such numbers only, directly or through an Identity or a Concat.
pub(super) fn literals(flat: &Flat) -> BTreeSet<String> {
    let mut literal = BTreeSet::new();
    let mut data: BTreeSet<ValueId> = flat.outputs.iter().map(|&(_, id)| id).collect();
    visit(&flat.nodes, &mut literal, &mut data);
    literal.difference(&data).map(|id| flat.values[id.0 as usize].clone()).collect()
}

/// Names of values that are only added to what a root is taken of, and nothing else: numbers among them keep norms from dividing by zero.
pub(super) fn epsilons(flat: &Flat) -> BTreeSet<String> {
    let (mut rooted, mut added) = (Read::default(), Read::default());
    rooted.otherwise.extend(flat.outputs.iter().map(|&(_, id)| id));
    each_node(&flat.nodes, &mut |node| rooted.note(node, node.op == "Sqrt"));
    let is_rooted = |id: &ValueId| rooted.so.contains(id) && !rooted.otherwise.contains(id);
    added.otherwise.extend(flat.outputs.iter().map(|&(_, id)| id));
    each_node(&flat.nodes, &mut |node| added.note(node, node.op == "Add" && node.outputs.iter().flatten().all(is_rooted)));
    added.so.difference(&added.otherwise).map(|id| flat.values[id.0 as usize].clone()).collect()
}

/// Values that nodes of one kind read, and that others do.
#[derive(Default)]
struct Read {
    so: BTreeSet<ValueId>,
    otherwise: BTreeSet<ValueId>,
}

impl Read {
    fn note(&mut self, node: &Node, is_so: bool) {
        let to = if is_so { &mut self.so } else { &mut self.otherwise };
        to.extend(node.inputs.iter().flatten());
        self.otherwise.extend(node.bodies.iter().flat_map(|(_, body)| &body.outputs));
    }
}

fn each_node(nodes: &[Node], visit: &mut impl FnMut(&Node)) {
    for node in nodes {
        visit(node);
        node.bodies.iter().for_each(|(_, body)| each_node(&body.nodes, visit));
    }
}

/// From the last node to the first, so that what a node gives is settled before it.
fn visit(nodes: &[Node], literal: &mut BTreeSet<ValueId>, data: &mut BTreeSet<ValueId>) {
    for node in nodes.iter().rev() {
        for (_, body) in &node.bodies {
            data.extend(&body.outputs);
            visit(&body.nodes, literal, data);
        }
        let only_literal = |id: &ValueId| literal.contains(id) && !data.contains(id);
        let passes = matches!(node.op, "Identity" | "Concat") && node.outputs.iter().flatten().all(only_literal);
        for (position, id) in node.inputs.iter().enumerate().filter_map(|(position, id)| Some((position, (*id)?))) {
            let is_literal = passes || operands(node.op).contains(&position);
            if is_literal {
                literal.insert(id)
            } else {
                data.insert(id)
            };
        }
    }
}
