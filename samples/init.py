"""The `--init SEED` formula of dcc in numpy: the same bits for PyTorch, ONNX files and dcc.

Value i of parameter NAME is scale * sqrt(3) * (2u - 1), where u = (x[i mod 4] >> 8) * 2^-24 and x = philox4x32-10 with
key = (lo, hi) of SEED and counter = (lo, hi of i div 4, lo, hi of fnv1a64(NAME)). It is computed in f64 as
(scale * sqrt(3)) * (2u - 1), one multiplication after the other, and rounded once to the initializer's dtype: a run in
float64 starts from the same float32 values, widened.

The rule for a parameter is the last `--init-rule GLOB=zeros|ones|std:S` that matches its name, else: rank >= 2: std:0.02;
rank 1: ones where the graph uses it as the gain of a normalisation (or as a running variance), else zeros. A gain is
- input 1 of LayerNormalization, RMSNormalization, BatchNormalization, InstanceNormalization, GroupNormalization, also
  through Identity, Cast, CastLike, Reshape, Unsqueeze and Expand; input 4 of BatchNormalization (the running variance); or
- in a decomposed graph, a factor of a Mul whose other factor is a normalised value: a Div by Sqrt(..), or a Mul by a
  reciprocal square root (Reciprocal(Sqrt(..)), Div(1, Sqrt(..)) or Pow(.., -0.5)), through Identity, Cast and CastLike; or an
  InstanceNormalization, also through changes of shape (GroupNorm, as exporters decompose it).

    python samples/init.py            # self-check against the known answers of Random123
    python samples/init.py m.onnx 7 weights.safetensors [GLOB=RULE ...]
"""

import sys
from fnmatch import fnmatchcase

import numpy as np

MASK32 = np.uint64(0xFFFFFFFF)
NORM_OPS = {"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "BatchNormalization",
            "InstanceNormalization", "GroupNormalization"}
PASSING = {"Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Expand"}


def philox4x32_10(counter, key):
    """Random123's philox4x32 with 10 rounds. counter: 4 arrays of uint32, key: 2 ints; gives 4 arrays of uint32."""
    c = [np.asarray(word, np.uint64) for word in counter]
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & MASK32, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & MASK32]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK32, (k1 + np.uint64(0xBB67AE85)) & MASK32
    return [word.astype(np.uint32) for word in c]


def fnv1a64(name):
    """The 64-bit FNV-1a hash of a name's UTF-8 bytes."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def uniform(seed, name, count):
    """`count` values in [0, 1), float64, multiples of 2^-24."""
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    h = fnv1a64(name)
    fill = lambda word: np.full_like(block, word)
    counter = [block & MASK32, block >> np.uint64(32), fill(h & 0xFFFFFFFF), fill(h >> 32)]
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return (np.stack(words, axis=1).reshape(-1)[:count] >> np.uint32(8)) * 2.0**-24


def value(name, shape, seed, rule, dtype=np.float32):
    """The initial value of one parameter under a rule `zeros`, `ones` or `std:S`."""
    if rule in ("zeros", "ones"):
        return np.full(shape, float(rule == "ones"), dtype)
    scale = float(rule.removeprefix("std:"))
    u = uniform(seed, name, int(np.prod(shape)))
    return (scale * np.sqrt(3.0) * (2.0 * u - 1.0)).reshape(shape).astype(dtype)


def rule_for(name, rank, is_gain, rules):
    """The rule of a parameter: the last match of `rules` (list of "GLOB=RULE"), else the default."""
    for glob, rule in reversed([r.rsplit("=", 1) for r in rules]):
        if fnmatchcase(name, glob):
            return rule
    return "std:0.02" if rank >= 2 else "ones" if is_gain else "zeros"


def gains(graph):
    """Names of the initializers that are norm gains or running variances, found from the graph alone."""
    producer = {out: node for node in graph.node for out in node.output}

    def source(name, ops):
        while name in producer and producer[name].op_type in ops:
            name = producer[name].input[0]
        return name

    def is_op(name, op):
        return name in producer and producer[name].op_type == op

    def is_rsqrt(name):
        name = source(name, PASSING)
        node = producer.get(name)
        if node is None:
            return False
        if node.op_type in ("Reciprocal", "Div"):
            return is_op(source(node.input[-1], PASSING), "Sqrt")
        return node.op_type == "Pow" and constant_of(node.input[1], producer, graph) == -0.5

    def is_normalised(name):
        if is_op(source(name, PASSING), "InstanceNormalization"):
            return True
        node = producer.get(source(name, {"Identity", "Cast", "CastLike"}))
        if node is None:
            return False
        if node.op_type == "Div":
            return is_op(source(node.input[1], PASSING), "Sqrt")
        return node.op_type == "Mul" and any(is_rsqrt(i) for i in node.input)

    found = set()
    for node in graph.node:
        if node.op_type in NORM_OPS:
            found.update(source(node.input[i], PASSING) for i in (1, 4) if i == 1 or node.op_type[0] == "B" and i < len(node.input))
        elif node.op_type == "Mul":
            a, b = node.input
            found.update(source(x, PASSING) for x, y in ((a, b), (b, a)) if is_normalised(y))
    return found & {t.name for t in graph.initializer}


def constant_of(name, producer, graph):
    """The value of a scalar constant, or None."""
    from onnx import numpy_helper
    tensors = [t for t in graph.initializer if t.name == name and not t.external_data]
    node = producer.get(name)
    if node is not None and node.op_type == "Constant":
        for a in node.attribute:
            if a.name == "value_float":
                return a.f
            tensors += [a.t] if a.name == "value" else []
    return numpy_helper.to_array(tensors[0]).reshape(-1)[0] if tensors and np.prod(tensors[0].dims) == 1 else None


def without_data(tensor):
    """Whether an initializer's data lie in an external file (which the committed graphs do not have)."""
    return tensor.data_location == 1


def model_values(model, seed, rules=(), all_floats=False):
    """{initializer name: array} for the initializers without data (all_floats: with `--init-all`, every float one)."""
    import onnx
    gain = gains(model.graph)
    values = {}
    for t in model.graph.initializer:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(t.data_type)
        if without_data(t) or all_floats and t.dims and np.issubdtype(dtype, np.floating):
            rule = rule_for(t.name, len(t.dims), t.name in gain, list(rules))
            values[t.name] = value(t.name, tuple(t.dims), seed, rule, dtype)
    return values


def fill_onnx(model, values):
    """Puts the values into the model's initializers, as inline data."""
    from onnx import numpy_helper
    for t in model.graph.initializer:
        if t.name in values:
            t.CopyFrom(numpy_helper.from_array(values[t.name], t.name))


def fill_torch(module, values, names=None):
    """Copies the values into a module's parameters. names: {ONNX name: (parameter name, transposed)} where they differ."""
    import torch
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    with torch.no_grad():
        for name, array in values.items():
            parameter, transposed = (names or {}).get(name, (name, False))
            state[parameter].copy_(torch.from_numpy(np.array(array.T if transposed else array, order="C")))


def self_check():
    """Known answers for philox4x32-10 (Random123, kat_vectors) and FNV-1a."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for counter, key, expected in [
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi[:4], pi[4:], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]:
        assert " ".join(f"{int(x):08x}" for x in philox4x32_10(counter, key)) == expected, expected
    assert fnv1a64("") == 0xCBF29CE484222325 and fnv1a64("foobar") == 0x85944171F73967E8
    assert abs(value("w", (1000, 100), 1, "std:0.02").std() - 0.02) < 1e-4
    print("init.py: ok", value("wte.weight", (4,), 1234, "std:0.02").tolist())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        self_check()
    else:
        import onnx
        from safetensors.numpy import save_file
        save_file(model_values(onnx.load(sys.argv[1], load_external_data=False), int(sys.argv[2]), sys.argv[4:]), sys.argv[3])
