//! What holds of every graph after every pass.

use super::{Graph, NodeId};
use crate::error::Result;
use dcc_program::TensorType;

/// Operands precede their users, dtypes and shapes are what the ops infer, no axis occurs twice in a type.
/// Errors: an internal error that names the node; a pass is wrong, not the user.
pub fn verify(graph: &Graph) -> Result<()> {
    for id in graph.ids() {
        let node = &graph[id];
        if node.operands.iter().any(|&o| o >= id) {
            return Err(graph.broken(id, "an operand follows its user"));
        }
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
        let inferred = node.op.infer(&types).map_err(|e| graph.broken(id, &e.what))?;
        if inferred.dtype != node.ty.dtype || inferred.shape != node.ty.shape {
            return Err(graph.broken(id, "the type is not what the op infers"));
        }
        if let Some(mesh) = &graph.mesh {
            node.ty.check_axes(mesh).map_err(|e| graph.broken(id, &e))?;
        }
    }
    let out_of_range = |id: &NodeId| id.0 as usize >= graph.nodes.len();
    match graph.outputs.iter().find(|(_, id)| out_of_range(id)) {
        Some((name, _)) => Err(crate::error::Error::internal(format!("output {name} is no node"))),
        None => Ok(()),
    }
}
