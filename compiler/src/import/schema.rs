//! The operators of the default ONNX domain: in which opsets they exist and how many inputs and outputs they take.
//!
//! The table is @generated from `onnx.defs` (onnx 1.23.2, opset 28), opset 7 and up; versions of equal arity are merged.

/// Newest opset of the table.
pub const NEWEST_OPSET: i64 = 28;
/// Oldest opset that dcc reads.
pub const OLDEST_OPSET: i64 = 7;
/// Number of inputs or outputs of a variadic operator.
const ANY: u8 = u8::MAX;

/// One version of an operator, inclusive bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arity {
    pub since: u8,
    pub inputs: (u8, u8),
    pub outputs: (u8, u8),
}

/// What an opset says of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    Yes(Arity),
    /// The operator came with a later opset.
    Since(u8),
    /// No opset has such an operator.
    No,
}

/// Looks `op` up in `opset`.
pub fn lookup(op: &str, opset: i64) -> Known {
    let Ok(found) = OPS.binary_search_by_key(&op, |&(name, _)| name) else { return Known::No };
    let versions = OPS[found].1;
    match versions.iter().rev().find(|version| i64::from(version.since) <= opset) {
        Some(&arity) => Known::Yes(arity),
        None => Known::Since(versions[0].since),
    }
}

const fn v(since: u8, min_inputs: u8, max_inputs: u8, min_outputs: u8, max_outputs: u8) -> Arity {
    Arity { since, inputs: (min_inputs, max_inputs), outputs: (min_outputs, max_outputs) }
}

/// Sorted by name.
#[rustfmt::skip]
pub const OPS: &[(&str, &[Arity])] = &[
    ("Abs", &[v(7, 1, 1, 1, 1)]),
    ("Acos", &[v(7, 1, 1, 1, 1)]),
    ("Acosh", &[v(9, 1, 1, 1, 1)]),
    ("Add", &[v(7, 2, 2, 1, 1)]),
    ("AffineGrid", &[v(20, 2, 2, 1, 1)]),
    ("And", &[v(7, 2, 2, 1, 1)]),
    ("ArgMax", &[v(7, 1, 1, 1, 1)]),
    ("ArgMin", &[v(7, 1, 1, 1, 1)]),
    ("Asin", &[v(7, 1, 1, 1, 1)]),
    ("Asinh", &[v(9, 1, 1, 1, 1)]),
    ("Atan", &[v(7, 1, 1, 1, 1)]),
    ("Atanh", &[v(9, 1, 1, 1, 1)]),
    ("Attention", &[v(23, 3, 6, 1, 4), v(24, 3, 7, 1, 4)]),
    ("AveragePool", &[v(7, 1, 1, 1, 1)]),
    ("BatchNormalization", &[v(7, 5, 5, 1, 5), v(14, 5, 5, 1, 3)]),
    ("Bernoulli", &[v(15, 1, 1, 1, 1)]),
    ("BitCast", &[v(26, 1, 1, 1, 1)]),
    ("BitShift", &[v(11, 2, 2, 1, 1)]),
    ("BitwiseAnd", &[v(18, 2, 2, 1, 1)]),
    ("BitwiseNot", &[v(18, 1, 1, 1, 1)]),
    ("BitwiseOr", &[v(18, 2, 2, 1, 1)]),
    ("BitwiseXor", &[v(18, 2, 2, 1, 1)]),
    ("BlackmanWindow", &[v(17, 1, 1, 1, 1)]),
    ("Cast", &[v(7, 1, 1, 1, 1)]),
    ("CastLike", &[v(15, 2, 2, 1, 1)]),
    ("CausalConvWithState", &[v(27, 2, 4, 2, 2)]),
    ("Ceil", &[v(7, 1, 1, 1, 1)]),
    ("Celu", &[v(12, 1, 1, 1, 1)]),
    ("CenterCropPad", &[v(18, 2, 2, 1, 1)]),
    ("Clip", &[v(7, 1, 1, 1, 1), v(11, 1, 3, 1, 1)]),
    ("Col2Im", &[v(18, 3, 3, 1, 1)]),
    ("Compress", &[v(9, 2, 2, 1, 1)]),
    ("Concat", &[v(7, 1, ANY, 1, 1)]),
    ("ConcatFromSequence", &[v(11, 1, 1, 1, 1)]),
    ("Constant", &[v(7, 0, 0, 1, 1)]),
    ("ConstantOfShape", &[v(9, 1, 1, 1, 1)]),
    ("Conv", &[v(7, 2, 3, 1, 1)]),
    ("ConvInteger", &[v(10, 2, 4, 1, 1)]),
    ("ConvTranspose", &[v(7, 2, 3, 1, 1)]),
    ("Cos", &[v(7, 1, 1, 1, 1)]),
    ("Cosh", &[v(9, 1, 1, 1, 1)]),
    ("CumProd", &[v(26, 2, 2, 1, 1)]),
    ("CumSum", &[v(11, 2, 2, 1, 1)]),
    ("DFT", &[v(17, 1, 2, 1, 1), v(20, 1, 3, 1, 1)]),
    ("DeformConv", &[v(19, 3, 5, 1, 1)]),
    ("DepthToSpace", &[v(7, 1, 1, 1, 1)]),
    ("DequantizeLinear", &[v(10, 2, 3, 1, 1)]),
    ("Det", &[v(11, 1, 1, 1, 1)]),
    ("Div", &[v(7, 2, 2, 1, 1)]),
    ("Dropout", &[v(7, 1, 1, 1, 2), v(12, 1, 3, 1, 2)]),
    ("DynamicQuantizeLinear", &[v(11, 1, 1, 3, 3)]),
    ("Einsum", &[v(12, 1, ANY, 1, 1)]),
    ("Elu", &[v(7, 1, 1, 1, 1)]),
    ("Equal", &[v(7, 2, 2, 1, 1)]),
    ("Erf", &[v(9, 1, 1, 1, 1)]),
    ("Exp", &[v(7, 1, 1, 1, 1)]),
    ("Expand", &[v(8, 2, 2, 1, 1)]),
    ("EyeLike", &[v(9, 1, 1, 1, 1)]),
    ("Flatten", &[v(7, 1, 1, 1, 1)]),
    ("Floor", &[v(7, 1, 1, 1, 1)]),
    ("GRU", &[v(7, 3, 6, 0, 2)]),
    ("Gather", &[v(7, 2, 2, 1, 1)]),
    ("GatherElements", &[v(11, 2, 2, 1, 1)]),
    ("GatherND", &[v(11, 2, 2, 1, 1)]),
    ("Gelu", &[v(20, 1, 1, 1, 1)]),
    ("Gemm", &[v(7, 3, 3, 1, 1), v(11, 2, 3, 1, 1)]),
    ("GlobalAveragePool", &[v(7, 1, 1, 1, 1)]),
    ("GlobalLpPool", &[v(7, 1, 1, 1, 1)]),
    ("GlobalMaxPool", &[v(7, 1, 1, 1, 1)]),
    ("Greater", &[v(7, 2, 2, 1, 1)]),
    ("GreaterOrEqual", &[v(12, 2, 2, 1, 1)]),
    ("GridSample", &[v(16, 2, 2, 1, 1)]),
    ("GroupNormalization", &[v(21, 3, 3, 1, 1)]),
    ("HammingWindow", &[v(17, 1, 1, 1, 1)]),
    ("HannWindow", &[v(17, 1, 1, 1, 1)]),
    ("HardSigmoid", &[v(7, 1, 1, 1, 1)]),
    ("HardSwish", &[v(14, 1, 1, 1, 1)]),
    ("Hardmax", &[v(7, 1, 1, 1, 1)]),
    ("Identity", &[v(7, 1, 1, 1, 1)]),
    ("If", &[v(7, 1, 1, 1, ANY)]),
    ("ImageDecoder", &[v(20, 1, 1, 1, 1)]),
    ("InstanceNormalization", &[v(7, 3, 3, 1, 1)]),
    ("IsInf", &[v(10, 1, 1, 1, 1)]),
    ("IsNaN", &[v(9, 1, 1, 1, 1)]),
    ("LRN", &[v(7, 1, 1, 1, 1)]),
    ("LSTM", &[v(7, 3, 8, 0, 3)]),
    ("LayerNormalization", &[v(17, 2, 3, 1, 3)]),
    ("LeakyRelu", &[v(7, 1, 1, 1, 1)]),
    ("Less", &[v(7, 2, 2, 1, 1)]),
    ("LessOrEqual", &[v(12, 2, 2, 1, 1)]),
    ("LinearAttention", &[v(27, 3, 6, 2, 2)]),
    ("Log", &[v(7, 1, 1, 1, 1)]),
    ("LogSoftmax", &[v(7, 1, 1, 1, 1)]),
    ("Loop", &[v(7, 3, ANY, 1, ANY), v(11, 2, ANY, 1, ANY)]),
    ("LpNormalization", &[v(7, 1, 1, 1, 1)]),
    ("LpPool", &[v(7, 1, 1, 1, 1)]),
    ("MatMul", &[v(7, 2, 2, 1, 1)]),
    ("MatMulInteger", &[v(10, 2, 4, 1, 1)]),
    ("Max", &[v(7, 1, ANY, 1, 1)]),
    ("MaxPool", &[v(7, 1, 1, 1, 1), v(8, 1, 1, 1, 2)]),
    ("MaxRoiPool", &[v(7, 2, 2, 1, 1)]),
    ("MaxUnpool", &[v(9, 2, 3, 1, 1)]),
    ("Mean", &[v(7, 1, ANY, 1, 1)]),
    ("MeanVarianceNormalization", &[v(9, 1, 1, 1, 1)]),
    ("MelWeightMatrix", &[v(17, 5, 5, 1, 1)]),
    ("Min", &[v(7, 1, ANY, 1, 1)]),
    ("Mish", &[v(18, 1, 1, 1, 1)]),
    ("Mod", &[v(10, 2, 2, 1, 1)]),
    ("Mul", &[v(7, 2, 2, 1, 1)]),
    ("Multinomial", &[v(7, 1, 1, 1, 1)]),
    ("Neg", &[v(7, 1, 1, 1, 1)]),
    ("NegativeLogLikelihoodLoss", &[v(12, 2, 3, 1, 1)]),
    ("NonMaxSuppression", &[v(10, 2, 5, 1, 1)]),
    ("NonZero", &[v(9, 1, 1, 1, 1)]),
    ("Not", &[v(7, 1, 1, 1, 1)]),
    ("OneHot", &[v(9, 3, 3, 1, 1)]),
    ("Optional", &[v(15, 0, 1, 1, 1)]),
    ("OptionalGetElement", &[v(15, 1, 1, 1, 1)]),
    ("OptionalHasElement", &[v(15, 1, 1, 1, 1), v(18, 0, 1, 1, 1)]),
    ("Or", &[v(7, 2, 2, 1, 1)]),
    ("PRelu", &[v(7, 2, 2, 1, 1)]),
    ("Pad", &[v(7, 1, 1, 1, 1), v(11, 2, 3, 1, 1), v(18, 2, 4, 1, 1)]),
    ("Pow", &[v(7, 2, 2, 1, 1)]),
    ("QLinearConv", &[v(10, 8, 9, 1, 1)]),
    ("QLinearMatMul", &[v(10, 8, 8, 1, 1)]),
    ("QuantizeLinear", &[v(10, 2, 3, 1, 1)]),
    ("RMSNormalization", &[v(23, 2, 2, 1, 1)]),
    ("RNN", &[v(7, 3, 6, 0, 2)]),
    ("RandomNormal", &[v(7, 0, 0, 1, 1)]),
    ("RandomNormalLike", &[v(7, 1, 1, 1, 1)]),
    ("RandomUniform", &[v(7, 0, 0, 1, 1)]),
    ("RandomUniformLike", &[v(7, 1, 1, 1, 1)]),
    ("Range", &[v(11, 3, 3, 1, 1)]),
    ("Reciprocal", &[v(7, 1, 1, 1, 1)]),
    ("ReduceL1", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceL2", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceLogSum", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceLogSumExp", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceMax", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceMean", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceMin", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceProd", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("ReduceSum", &[v(7, 1, 1, 1, 1), v(13, 1, 2, 1, 1)]),
    ("ReduceSumSquare", &[v(7, 1, 1, 1, 1), v(18, 1, 2, 1, 1)]),
    ("RegexFullMatch", &[v(20, 1, 1, 1, 1)]),
    ("Relu", &[v(7, 1, 1, 1, 1)]),
    ("Reshape", &[v(7, 2, 2, 1, 1)]),
    ("Resize", &[v(10, 2, 2, 1, 1), v(11, 3, 4, 1, 1), v(13, 1, 4, 1, 1)]),
    ("ReverseSequence", &[v(10, 2, 2, 1, 1)]),
    ("RoiAlign", &[v(10, 3, 3, 1, 1)]),
    ("RotaryEmbedding", &[v(23, 3, 4, 1, 1)]),
    ("Round", &[v(11, 1, 1, 1, 1)]),
    ("STFT", &[v(17, 2, 4, 1, 1)]),
    ("Scan", &[v(8, 2, ANY, 1, ANY), v(9, 1, ANY, 1, ANY)]),
    ("Scatter", &[v(9, 3, 3, 1, 1)]),
    ("ScatterElements", &[v(11, 3, 3, 1, 1)]),
    ("ScatterND", &[v(11, 3, 3, 1, 1)]),
    ("Selu", &[v(7, 1, 1, 1, 1)]),
    ("SequenceAt", &[v(11, 2, 2, 1, 1)]),
    ("SequenceConstruct", &[v(11, 1, ANY, 1, 1)]),
    ("SequenceEmpty", &[v(11, 0, 0, 1, 1)]),
    ("SequenceErase", &[v(11, 1, 2, 1, 1)]),
    ("SequenceInsert", &[v(11, 2, 3, 1, 1)]),
    ("SequenceLength", &[v(11, 1, 1, 1, 1)]),
    ("SequenceMap", &[v(17, 1, ANY, 1, ANY)]),
    ("Shape", &[v(7, 1, 1, 1, 1)]),
    ("Shrink", &[v(9, 1, 1, 1, 1)]),
    ("Sigmoid", &[v(7, 1, 1, 1, 1)]),
    ("Sign", &[v(9, 1, 1, 1, 1)]),
    ("Sin", &[v(7, 1, 1, 1, 1)]),
    ("Sinh", &[v(9, 1, 1, 1, 1)]),
    ("Size", &[v(7, 1, 1, 1, 1)]),
    ("Slice", &[v(7, 1, 1, 1, 1), v(10, 3, 5, 1, 1)]),
    ("Softmax", &[v(7, 1, 1, 1, 1)]),
    ("SoftmaxCrossEntropyLoss", &[v(12, 2, 3, 1, 2)]),
    ("Softplus", &[v(7, 1, 1, 1, 1)]),
    ("Softsign", &[v(7, 1, 1, 1, 1)]),
    ("SpaceToDepth", &[v(7, 1, 1, 1, 1)]),
    ("Split", &[v(7, 1, 1, 1, ANY), v(13, 1, 2, 1, ANY)]),
    ("SplitToSequence", &[v(11, 1, 2, 1, 1)]),
    ("Sqrt", &[v(7, 1, 1, 1, 1)]),
    ("Squeeze", &[v(7, 1, 1, 1, 1), v(13, 1, 2, 1, 1)]),
    ("StringConcat", &[v(20, 2, 2, 1, 1)]),
    ("StringNormalizer", &[v(10, 1, 1, 1, 1)]),
    ("StringSplit", &[v(20, 1, 1, 2, 2)]),
    ("Sub", &[v(7, 2, 2, 1, 1)]),
    ("Sum", &[v(7, 1, ANY, 1, 1)]),
    ("SwiGLU", &[v(28, 2, 2, 1, 1)]),
    ("Swish", &[v(24, 1, 1, 1, 1)]),
    ("Tan", &[v(7, 1, 1, 1, 1)]),
    ("Tanh", &[v(7, 1, 1, 1, 1)]),
    ("TensorScatter", &[v(24, 2, 3, 1, 1)]),
    ("TfIdfVectorizer", &[v(9, 1, 1, 1, 1)]),
    ("ThresholdedRelu", &[v(10, 1, 1, 1, 1)]),
    ("Tile", &[v(7, 2, 2, 1, 1)]),
    ("TopK", &[v(7, 1, 1, 2, 2), v(10, 2, 2, 2, 2)]),
    ("Transpose", &[v(7, 1, 1, 1, 1)]),
    ("Trilu", &[v(14, 1, 2, 1, 1)]),
    ("Unique", &[v(11, 1, 1, 1, 4)]),
    ("Unsqueeze", &[v(7, 1, 1, 1, 1), v(13, 2, 2, 1, 1)]),
    ("Upsample", &[v(7, 1, 1, 1, 1), v(9, 2, 2, 1, 1)]),
    ("Where", &[v(9, 3, 3, 1, 1)]),
    ("Xor", &[v(7, 2, 2, 1, 1)]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_finds_versions() {
        assert!(OPS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(lookup("Dropout", 11), Known::Yes(v(7, 1, 1, 1, 2)));
        assert_eq!(lookup("Dropout", 20), Known::Yes(v(12, 1, 3, 1, 2)));
        assert_eq!(lookup("Attention", 20), Known::Since(23));
        assert_eq!(lookup("Reshap", 20), Known::No);
    }
}
