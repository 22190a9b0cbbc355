"""Writes a GPT-3-size graph (96 layers, 12288 wide, 96 heads, vocabulary 51200, 2048 tokens; 175 G parameters) without weights.

The nodes are those of an exported GPT-2 after constant folding, at opset 20 with decomposed attention: it is for compile
time and memory. The weights would take 702 GB in weights.bin, so most offsets exceed 32 bits.

    python samples/gpt3.py [FILE]        # default tests/models/gpt3_175b.onnx
"""

import sys
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

LAYERS, WIDTH, HEADS, VOCAB, LENGTH = 96, 12288, 96, 51200, 2048


class Writer:
    """Nodes and initializers of a growing graph; parameters only take up room in weights.bin."""

    def __init__(self):
        self.nodes, self.initializers, self.offset = [], [], 0

    def parameter(self, name, *shape):
        length = 4 * int(np.prod(shape, dtype=object))
        t = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        for key, text in (("location", "weights.bin"), ("offset", self.offset), ("length", length)):
            t.external_data.add(key=key, value=str(text))
        self.offset += length
        self.initializers.append(t)
        return name

    def constant(self, name, array):
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op, *inputs, outputs=1, **attributes):
        base = f"{op}_{len(self.nodes)}"
        names = [base] if outputs == 1 else [f"{base}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, base, **attributes))
        return names[0] if outputs == 1 else names

    def linear(self, x, name, fan_in, fan_out):
        y = self.node("MatMul", x, self.parameter(f"{name}.weight", fan_in, fan_out))
        return self.node("Add", y, self.parameter(f"{name}.bias", fan_out))

    def norm(self, x, name):
        return self.node("LayerNormalization", x, self.parameter(f"{name}.weight", WIDTH), self.parameter(f"{name}.bias", WIDTH))

    def gelu(self, x):
        cube = self.node("Mul", "gelu_cubic", self.node("Pow", x, "three"))
        t = self.node("Tanh", self.node("Mul", "gelu_scale", self.node("Add", x, cube)))
        return self.node("Mul", self.node("Mul", "half", x), self.node("Add", t, "one"))

    def attention(self, x, name):
        q, k, v = self.node("Split", self.linear(x, f"{name}.c_attn", WIDTH, 3 * WIDTH), outputs=3, axis=2, num_outputs=3)
        q, k, v = (self.node("Transpose", self.node("Reshape", y, "split_heads"), perm=perm)
                   for y, perm in ((q, (0, 2, 1, 3)), (k, (0, 2, 3, 1)), (v, (0, 2, 1, 3))))
        scores = self.node("Where", "causal", self.node("Mul", self.node("MatMul", q, k), "score_scale"), "lowest")
        y = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        y = self.node("Reshape", self.node("Transpose", y, perm=(0, 2, 1, 3)), "merge_heads")
        return self.linear(y, f"{name}.c_proj", WIDTH, WIDTH)

    def block(self, x, name):
        x = self.node("Add", x, self.attention(self.norm(x, f"{name}.ln_1"), f"{name}.attn"))
        h = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc", WIDTH, 4 * WIDTH)
        return self.node("Add", x, self.linear(self.gelu(h), f"{name}.mlp.c_proj", 4 * WIDTH, WIDTH))


def build():
    w = Writer()
    f32 = np.float32
    for name, number in (("three", 3), ("gelu_cubic", 0.044715), ("gelu_scale", np.sqrt(2 / np.pi)), ("half", 0.5), ("one", 1),
                         ("score_scale", (WIDTH // HEADS) ** -0.5), ("lowest", np.finfo(f32).min)):
        w.constant(name, f32(number))
    w.constant("split_heads", np.array([0, LENGTH, HEADS, WIDTH // HEADS]))
    w.constant("merge_heads", np.array([0, LENGTH, WIDTH]))
    position = w.node("Range", w.constant("zero", np.int64(0)), w.constant("length", np.int64(LENGTH)), w.constant("step", np.int64(1)))
    column = w.node("Unsqueeze", position, w.constant("last", np.array([1])))
    w.nodes.append(helper.make_node("GreaterOrEqual", [column, position], ["causal"], "causal"))
    wte = w.parameter("wte.weight", VOCAB, WIDTH)
    x = w.node("Add", w.node("Gather", wte, "input_ids"), w.node("Gather", w.parameter("wpe.weight", LENGTH, WIDTH), position))
    for i in range(LAYERS):
        x = w.block(x, f"h.{i}")
    x = w.norm(x, "ln_f")
    w.nodes.append(helper.make_node("MatMul", [x, w.node("Transpose", wte, perm=(1, 0))], ["logits"], "lm_head"))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", LENGTH])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", LENGTH, VOCAB])
    graph = helper.make_graph(w.nodes, "gpt3", [ids], [logits], w.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="gpt3.py")


def check(model):
    """onnx.checker on the graph with its parameters as inputs: it would look for weights.bin."""
    copy = ModelProto()
    copy.CopyFrom(model)
    parameters = [t for t in copy.graph.initializer if t.external_data]
    for t in parameters:
        copy.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
        copy.graph.initializer.remove(t)
    checker.check_model(copy, full_check=True)


def main():
    default = Path(__file__).resolve().parent.parent / "tests/models/gpt3_175b.onnx"
    model = build()
    check(model)
    Path(sys.argv[1] if len(sys.argv) > 1 else default).write_bytes(model.SerializeToString(deterministic=True))
    parameters = sum(int(np.prod(t.dims, dtype=object)) for t in model.graph.initializer if t.external_data)
    print(f"{len(model.graph.node)} nodes, {parameters / 1e9:.1f} G parameters, {model.ByteSize() // 1000} kB")


if __name__ == "__main__":
    main()
