//! Names of buffers, for files that do not tell them from parameters: PyTorch's older exporter writes both as initializers.

/// What names of parameters have in them: of the layers of `torch.nn`, and of the tokens and embeddings of transformers.
const PARAMETERS: &[&str] =
    &["weight", "bias", "gamma", "beta", "embed", "token", "cls", "logit_scale", "layer_scale", "lora_", "original"];

/// What names of buffers have in them, whatever else: of transformers the biases that BART adds to logits and DeepSeek to scores of experts,
/// and `weights` of sinusoidal positions, among others.
const BUFFERS: &[&str] = &[
    "running_",
    "masked_bias",
    "logits_bias",
    "correction_bias",
    "weights",
    "buffer",
    "mask",
    "cached",
    "ema_",
    "_ema",
    "_avg",
];

/// Whether a module's tensor of this name may be a buffer.
pub fn may_be_buffer(name: &str) -> bool {
    // Names that the exporter made are of constants it folded.
    let made = name.contains("::") || name.starts_with('/');
    let (module, leaf) = name.rsplit_once('.').unwrap_or(("", name));
    // An element of a list has its list's name.
    let leaf = if leaf.bytes().all(|byte| byte.is_ascii_digit()) { module } else { leaf }.to_lowercase();
    let among = |words: &[&str]| words.iter().any(|word| leaf.contains(word));
    !made && (among(BUFFERS) || !among(PARAMETERS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_layers_are_no_buffers() {
        let buffers = [
            "pe",
            "mean",
            "scale",
            "norm.running_mean",
            "attn.masked_bias",
            "rotary.inv_freq",
            "a.cos_cached",
            "a.1",
            "final_logits_bias",
            "embed_positions.weights",
            "gate.e_score_correction_bias",
        ];
        let parameters = ["fc.weight", "rnn.weight_ih_l0", "cls_token", "a.pos_embed", "onnx::MatMul_3", "bias", "ln.gamma"];
        assert_eq!(buffers.iter().filter(|name| !may_be_buffer(name)).count(), 0);
        assert_eq!(parameters.iter().filter(|name| may_be_buffer(name)).count(), 0);
    }
}
