//! Which value of its call each input of a node is.

use crate::import::fx::FxCall;
use crate::import::proto::NodeProto;

/// Pairs of an input's position and the position of the call's argument that it must be, of operators whose inputs are arguments
/// as they are; none where the node computes something else, such as the sum of a product with its bias.
pub fn positions(node: &NodeProto, call: &FxCall) -> &'static [(usize, usize)] {
    match (call.target(), node.op_type()) {
        (
            "aten._native_batch_norm_legit_functional" | "aten.batch_norm" | "aten._native_batch_norm_legit",
            "BatchNormalization",
        )
        | ("aten.native_batch_norm", "BatchNormalization") => &[(1, 1), (2, 2), (3, 3), (4, 4)],
        ("aten.instance_norm", "InstanceNormalization") => &[(1, 1), (2, 2)],
        ("aten.layer_norm" | "aten.native_layer_norm", "LayerNormalization") => &[(1, 2), (2, 3)],
        ("aten.group_norm", "GroupNormalization") => &[(1, 2), (2, 3)],
        ("aten.rms_norm" | "aten._fused_rms_norm", "RMSNormalization") => &[(1, 2)],
        ("aten.linear", "Gemm") => &[(1, 1), (2, 2)],
        ("aten.addmm", "Gemm") => &[(0, 1), (1, 2), (2, 0)],
        ("aten.conv1d" | "aten.conv2d" | "aten.conv3d" | "aten.convolution", "Conv" | "ConvTranspose") => &[(1, 1), (2, 2)],
        ("aten.conv_transpose1d" | "aten.conv_transpose2d" | "aten.conv_transpose3d", "ConvTranspose") => &[(1, 1), (2, 2)],
        _ => &[],
    }
}

/// What a norm reads where its call has `None`: ones for gains and variances, zeros for the rest.
pub fn absent(op: &str, input: usize) -> Option<bool> {
    match (op, input) {
        ("BatchNormalization", 1 | 4) => Some(true),
        ("BatchNormalization", 2 | 3) => Some(false),
        ("InstanceNormalization" | "LayerNormalization" | "GroupNormalization" | "RMSNormalization", 1) => Some(true),
        ("InstanceNormalization" | "LayerNormalization" | "GroupNormalization", 2) => Some(false),
        _ => None,
    }
}

/// The argument of its call that a node of a decomposed operator reads in another shape: gains and biases of a group norm, slopes.
pub fn reshaped<'m>(node: &NodeProto, call: &FxCall<'m>) -> Option<&'m str> {
    let position = match (call.target(), node.op_type()) {
        ("aten.group_norm", "Mul") => 2,
        ("aten.group_norm", "Add") => 3,
        ("aten.prelu" | "aten._prelu_kernel", "PRelu") => 1,
        _ => return None,
    };
    call.arguments().get(position).and_then(|argument| argument.strip_prefix('%'))
}

/// Whether the node is its call and reads tensors as they are, in either order.
pub fn is_plain(node: &NodeProto, call: &FxCall) -> bool {
    matches!(
        (call.target(), node.op_type()),
        ("aten.add", "Add")
            | ("aten.sub", "Sub")
            | ("aten.mul", "Mul")
            | ("aten.div", "Div")
            | ("aten.matmul" | "aten.mm", "MatMul")
    )
}
