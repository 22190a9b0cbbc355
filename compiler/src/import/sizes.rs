//! Inputs whose values are sizes: they reach an operand which must be known while compiling.

use std::collections::BTreeSet;

use super::flatten::flatten;
use super::model::Model;
use super::node::Node;
use crate::error::Result;

/// Operands of `op` that say shapes, axes, counts or pads.
fn operands(op: &str) -> &'static [usize] {
    match op {
        "BlackmanWindow" | "ConstantOfShape" | "HammingWindow" | "HannWindow" | "If" | "NonZero" => &[0],
        "Loop" => &[0, 1],
        "MelWeightMatrix" => &[0, 1, 2, 3, 4],
        "STFT" => &[1, 3],
        "Range" => &[0, 1, 2],
        "Slice" => &[1, 2, 3, 4],
        "Pad" => &[1, 3],
        "Resize" => &[1, 2, 3],
        "Upsample" => &[1],
        "SequenceInsert" => &[2],
        "Col2Im" | "DFT" => &[1, 2],
        "AffineGrid" | "CenterCropPad" | "Compress" | "CumProd" | "CumSum" | "Expand" | "OneHot" | "Reshape" | "SequenceAt"
        | "SequenceErase" | "Split" | "SplitToSequence" | "Squeeze" | "Tile" | "TopK" | "Trilu" | "Unsqueeze" => &[1],
        op if op.starts_with("Reduce") => &[1],
        _ => &[],
    }
}

/// Names of the model's inputs whose values say sizes: through any operators but those that ask for a shape.
/// Errors: of the graph.
pub fn size_inputs(model: &Model) -> Result<BTreeSet<String>> {
    let flat = flatten(model)?;
    let mut says_sizes = vec![false; flat.values.len()];
    visit(&flat.nodes, &mut says_sizes);
    let found = flat.inputs.iter().filter(|(id, _)| says_sizes[id.0 as usize]);
    Ok(found.map(|(_, info)| info.name().to_owned()).collect())
}

/// Marks what says sizes, from the last node to the first.
fn visit(nodes: &[Node], says_sizes: &mut [bool]) {
    for node in nodes.iter().rev() {
        for (_, body) in &node.bodies {
            // A Loop's graph gives its condition first.
            let results = &body.outputs[usize::from(node.op == "Loop").min(body.outputs.len())..];
            for (outer, inner) in node.outputs.iter().zip(results) {
                if let Some(outer) = outer {
                    says_sizes[inner.0 as usize] |= says_sizes[outer.0 as usize];
                }
            }
            visit(&body.nodes, says_sizes);
            // The last inputs of a body are the last inputs of its node.
            for (inner, outer) in body.inputs.iter().rev().zip(node.inputs.iter().rev()) {
                if let Some(outer) = outer {
                    says_sizes[outer.0 as usize] |= says_sizes[inner.0 as usize];
                }
            }
        }
        let passes = node.bodies.is_empty()
            && node.outputs.iter().flatten().any(|id| says_sizes[id.0 as usize])
            && !matches!(node.op, "Shape" | "Size");
        for (position, id) in node.inputs.iter().enumerate().filter_map(|(position, id)| Some((position, (*id)?))) {
            says_sizes[id.0 as usize] |= passes || operands(node.op).contains(&position);
        }
    }
}
