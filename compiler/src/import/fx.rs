//! What PyTorch's exporter says of a node: the call of the exported program that it was made of.

use super::proto::NodeProto;

/// The metadata property that holds the call.
const KEY: &str = "pkg.torch.onnx.fx_node";

/// A text such as `%embedding : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%p_wte_weight,
/// %input_ids, 0), kwargs = {})`; empty where the file has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FxCall<'m>(pub &'m str);

impl<'m> FxCall<'m> {
    pub fn of(node: &'m NodeProto) -> FxCall<'m> {
        FxCall(node.metadata_props.iter().find(|entry| entry.key() == KEY).map_or("", |entry| entry.value()))
    }

    /// The values that it names, its own first.
    pub fn values(&self) -> impl Iterator<Item = &'m str> {
        let end = |part: &str| part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
        self.0.split('%').skip(1).map(move |part| &part[..end(part)])
    }

    pub fn reads(&self, value: &str) -> bool {
        self.values().any(|other| other == value)
    }

    /// Such as `aten.linear`, without the overload.
    pub fn target(&self) -> &'m str {
        let path = self.0.split_once("target=torch.ops.").map_or("", |(_, rest)| rest);
        let path = path.split_once(']').map_or("", |(path, _)| path);
        path.rsplit_once('.').map_or(path, |(op, _)| op)
    }

    /// Its positional arguments as they are written: `%x`, `None`, `[1, 1]`.
    pub fn arguments(&self) -> Vec<&'m str> {
        let Some((_, rest)) = self.0.split_once("](args = (") else { return Vec::new() };
        let (mut depth, mut start, mut found) = (0, 0, Vec::new());
        for (at, letter) in rest.char_indices() {
            match letter {
                '(' | '[' | '{' => depth += 1,
                ')' if depth == 0 => {
                    found.push(rest[start..at].trim());
                    break;
                }
                ')' | ']' | '}' => depth -= 1,
                ',' if depth == 0 => {
                    found.push(rest[start..at].trim());
                    start = at + 1;
                }
                _ => {}
            }
        }
        found.retain(|argument| !argument.is_empty());
        found
    }

    /// The row of an embedding that gets no gradient, `padding_idx`: the call's third argument, absent or -1 where there is none.
    pub fn padding_row(&self) -> Option<u64> {
        self.embedding(2)?.parse().ok()
    }

    /// Whether gradients of an embedding's rows are divided by how often the batch has them, `scale_grad_by_freq`.
    pub fn divides_by_frequency(&self) -> bool {
        self.embedding(3) == Some("True")
    }

    fn embedding(&self, argument: usize) -> Option<&'m str> {
        (self.target() == "aten.embedding").then(|| self.arguments().get(argument).copied()).flatten()
    }
}

/// Whether the exporter folded a BatchNorm into the node, whose call it then names.
pub fn is_fused(node: &NodeProto) -> bool {
    node.metadata_props.iter().any(|note| note.value().contains("FuseBatchNorm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_whole_words() {
        let call =
            FxCall("%linear_1 : [num_users=1] = call_function[target=t](args = (%x, %p_fc_weight, %p_fc_bias), kwargs = {})");
        assert_eq!(call.values().collect::<Vec<_>>(), ["linear_1", "x", "p_fc_weight", "p_fc_bias"]);
        assert!(call.reads("p_fc_bias") && !call.reads("p_fc"));
    }

    #[test]
    fn arguments_are_split_at_the_top() {
        let text = "%n : [num_users=1] = call_function[target=torch.ops.aten.layer_norm.default](args = (%x, [8, (1, 2)], None, %p_b,), kwargs = {a: 1})";
        let call = FxCall(text);
        assert_eq!((call.target(), call.arguments()), ("aten.layer_norm", vec!["%x", "[8, (1, 2)]", "None", "%p_b"]));
        assert_eq!((FxCall("").target(), FxCall("").arguments().len()), ("", 0));
    }

    #[test]
    fn gradients_of_embeddings() {
        let text = |op: &str, arguments: &str| {
            format!("%e : [num_users=1] = call_function[target=torch.ops.aten.{op}](args = ({arguments}), kwargs = {{}})")
        };
        let call = |op: &str, arguments: &str| FxCall(&text(op, arguments)).padding_row();
        let divides = |arguments: &str| FxCall(&text("embedding.default", arguments)).divides_by_frequency();
        assert_eq!(["%p_w, %ids, -1, True", "%p_w, %ids, 7, False, True", "%p_w, %ids"].map(divides), [true, false, false]);
        assert_eq!(call("embedding.default", "%p_w, %ids, 0"), Some(0));
        assert_eq!(call("embedding.default", "%p_w, %ids, 7, False, True"), Some(7));
        assert_eq!(call("embedding.default", "%p_w, %ids"), None);
        assert_eq!(call("embedding.default", "%p_w, %ids, -1, True"), None);
        assert_eq!(call("index_select.default", "%p_w, %ids, 0"), None);
        assert_eq!(FxCall("").padding_row(), None);
    }
}
