//! Float tensors that are part of the program, as sizes are: scales of a Resize, bounds of a Range, what a Pad fills with.

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
        "ConstantOfShape" => &[0],
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
