"""Numbers for `tests/suite/ops/nodes.rs`: nodes of ONNX Runtime's domain, their results and gradients in PyTorch float64.

    python tests/golden/nodes/contrib.py > tests/golden/nodes/contrib.json      # torch 2.15, onnx 1.23, onnxruntime 1.31

Cases as of gradients.py. What is written here in PyTorch's operations has the results of onnxruntime's own kernels, in f32, or nothing is
written; its CPU kernels have no packed queries, keys and values.
"""

import math

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from gradients import CASES, CODES, encode, ints, rand, write

DOMAIN = "com.microsoft"
TOLERANCE = 2e-5


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def model(op, names, inputs, results, domain, codes, **attributes):
    """A node; `results` has None for those that are not asked for."""
    outs = [f"y{i}" if y is not None else "" for i, y in enumerate(results)]
    nodes = [helper.make_node(op, names, outs, domain=domain, **attributes)]
    info = lambda name, t: helper.make_tensor_value_info(name, codes[t.dtype], list(t.shape))  # noqa: E731
    graph = helper.make_graph(nodes, "g", [info(n, t) for n, t in zip(names, inputs) if n],
                              [info(n, t) for n, t in zip(outs, results) if n])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)], ir_version=10)


def compare(op, names, inputs, results, domain, attributes):
    """With onnxruntime."""
    narrow = model(op, names, inputs, results, domain, CODES | {torch.float64: TensorProto.FLOAT}, **attributes)
    session = onnxruntime.InferenceSession(narrow.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {n: (t.float() if t.dtype == torch.float64 else t).numpy() for n, t in zip(names, inputs) if n}
    for y, theirs in zip([y for y in results if y is not None], session.run(None, feed)):
        assert y.shape == theirs.shape, (op, attributes, y.shape, theirs.shape)
        off = np.abs(y.detach().numpy() - theirs).max()
        assert off < TOLERANCE, (op, attributes, off)


def case(op, function, inputs, domain=DOMAIN, runs=True, **attributes):
    names = [f"x{i}" if t is not None else "" for i, t in enumerate(inputs)]
    leaves = [t.clone().requires_grad_(t.dtype == torch.float64) if t is not None else None for t in inputs]
    results = function(*leaves)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    if runs:
        compare(op, names, inputs, results, domain, attributes)
    kept = [y for y in results if y is not None]
    loss = sum((y.reshape(-1) * (torch.arange(y.numel(), dtype=torch.float64) + k).cos()).sum()
               for k, y in enumerate(kept) if y.is_floating_point())
    loss.backward()
    CASES.append({
        "name": f"{op} {len(CASES)} {attributes}",
        "model": model(op, names, inputs, results, domain, CODES, **attributes).SerializeToString().hex(), "constants": [],
        "inputs": {n: encode(t) for n, t in zip(names, inputs) if n}, "results": [encode(y.detach()) for y in kept],
        "gradients": {n: encode(t.grad) for n, t in zip(names, leaves) if t is not None and t.grad is not None},
    })


def activations():
    for shape in ((5,), (2, 3), (2, 1, 3)):
        case("Gelu", F.gelu, [rand(*shape)])
        case("BiasGelu", lambda x, b: F.gelu(x + b), [rand(*shape), rand(shape[-1])])
        case("FastGelu", lambda x, b=None: F.gelu(x if b is None else x + b, approximate="tanh"),
             [rand(*shape)] + [rand(shape[-1])] * (len(shape) > 1))
    for shape, alpha in (((5,), 1.702), ((2, 3), 0.5), ((2, 1, 3), 2.0)):
        case("QuickGelu", lambda x: x * torch.sigmoid(float(np.float32(alpha)) * x), [rand(*shape)], alpha=alpha)


def products():
    case("FusedMatMul", lambda a, b: 0.5 * a @ b, [rand(3, 4), rand(4, 2)], alpha=0.5)
    case("FusedMatMul", lambda a, b: a.mT @ b, [rand(2, 4, 3), rand(2, 4, 5)], transA=1)
    case("FusedMatMul", lambda a, b: 0.25 * a @ b.mT, [rand(2, 1, 3, 4), rand(3, 5, 4)], transB=1, alpha=0.25)
    case("FusedMatMul", lambda a, b: a.mT @ b.mT, [rand(4, 3), rand(2, 5, 4)], transA=1, transB=1)
    case("FusedMatMul", lambda a, b: a.transpose(0, 1) @ b, [rand(3, 2, 4), rand(2, 4, 5)], transBatchA=1)
    case("FusedMatMul", lambda a, b: a.permute(1, 2, 3, 0) @ b.permute(1, 2, 0, 3), [rand(4, 2, 3, 5), rand(4, 2, 3, 2)], transA=1, transBatchA=1,
         transBatchB=1)
    case("FusedGemm", lambda a, b, c: F.relu(a @ b + c), [rand(3, 4), rand(4, 2), rand(2)], activation="Relu")
    case("FusedGemm", lambda a, b, c: F.leaky_relu(0.5 * a.T @ b + 2 * c, 0.25), [rand(4, 3), rand(4, 2), rand(3, 2)],
         activation="LeakyRelu", activation_alpha=0.25, alpha=0.5, beta=2.0, transA=1)
    case("FusedGemm", lambda a, b: torch.tanh(a @ b.T), [rand(5, 4), rand(2, 4)], activation="Tanh", transB=1)
    x, w, b = rand(2, 3, 5, 4), rand(4, 3, 3, 2), rand(4)
    plain = dict(kernel_shape=[3, 2], strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], group=1)
    case("FusedConv", lambda x, w, b: F.relu(F.conv2d(x, w, b)), [x, w, b], activation="Relu", **plain)
    case("FusedConv", lambda x, w, b, z: torch.sigmoid(F.conv2d(x, w, b) + z), [x, w, b, rand(2, 4, 3, 3)], activation="Sigmoid", **plain)
    clipped = lambda x, w, b: F.conv2d(x, w, b, 2, 1).clamp(-0.5, 1.5)  # noqa: E731
    case("FusedConv", clipped, [rand(1, 2, 6, 5), rand(3, 2, 3, 3), rand(3)], activation="Clip", activation_params=[-0.5, 1.5],
         kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], dilations=[1, 1], group=1)
    alpha, beta = float(np.float32(0.3)), float(np.float32(0.4))
    sharp = lambda x, w, b: (alpha * F.conv2d(x, w, b, groups=2) + beta).clamp(0, 1)  # noqa: E731
    case("FusedConv", sharp, [rand(2, 4, 5, 4), rand(4, 2, 3, 2), rand(4)], activation="HardSigmoid",
         activation_params=[alpha, beta], **plain | dict(group=2))


def normal(x, gain, bias, e):
    return F.layer_norm(x, x.shape[-1:], gain, bias, e)


def rms(x, gain, e):
    return F.rms_norm(x, x.shape[-1:], gain, e)


def norms():
    for shape, e in (((2, 4), 0.25), ((2, 3, 4), 0.5), ((1, 2, 5), 1.0)):
        width = shape[-1]
        case("SimplifiedLayerNormalization", lambda x, g: rms(x, g, e), [rand(*shape), rand(width)], domain="", epsilon=e, axis=-1)
        given = [rand(*shape), rand(*shape), rand(width), rand(width)]
        case("SkipLayerNormalization", lambda x, s, g, b: normal(x + s, g, b, e), given, epsilon=e)
        case("SkipLayerNormalization", lambda x, s, g, b, c: (normal(x + s + c, g, b, e), None, None, x + s + c),
             [*given, rand(width)], epsilon=e)
        case("SkipSimplifiedLayerNormalization", lambda x, s, g: rms(x + s, g, e), given[:3], epsilon=e)
        case("SkipSimplifiedLayerNormalization", lambda x, s, g, c: (rms(x + s + c, g, e), None, None, x + s + c),
             given[:3] + [rand(width)], epsilon=e)
    case("SkipLayerNormalization", lambda x, s, g: normal(x + s, g, None, 1.0), [rand(2, 3, 4), rand(1, 3, 4), rand(4)], epsilon=1.0)
    tables = [rand(7, 4), rand(5, 4), rand(2, 4), rand(4), rand(4)]
    ids, segments = i32([[1, 6, 3], [0, 1, 1]]), i32([[0, 1, 1], [0, 0, 1]])
    mask, places = i32([[1, 1, 0], [1, 1, 1]]), i32([[4, 0, 1], [2, 2, 0]])

    def embedded(e, segments, places):
        def run(ids, s, word, place, segment, gain, bias, mask=None, p=None):
            at = torch.arange(ids.shape[1]) if places is None else places.long()
            x = word[ids.long()] + place[at] + (segment[segments.long()] if segments is not None else 0)
            counts = torch.zeros(ids.shape[0], dtype=torch.int32) if mask is None else mask.sum(1, dtype=torch.int32)
            return normal(x, gain, bias, e), counts
        return run

    case("EmbedLayerNormalization", embedded(0.25, segments, None), [ids, segments, *tables, mask], epsilon=0.25)
    case("EmbedLayerNormalization", embedded(0.5, None, None), [ids, None, *tables[:2], None, *tables[3:]], epsilon=0.5)
    case("EmbedLayerNormalization", embedded(1.0, segments, places), [ids, segments, *[t[:, :3] for t in tables[:3]], *[t[:3] for t in tables[3:]], mask, places],
         epsilon=1.0)


def attended(q, k, v, heads, mask=None, causal=False, scale=None):
    """Of [batch, tokens, heads * size]; the mask is added."""
    split = lambda x: x if x.dim() == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    q, k, v = split(q), split(k), split(v)
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def barred(allowed, filter=-10000.0):
    return torch.where(allowed, 0.0, filter).double()


def self_attention():
    def run(heads, sizes, mask=None, **kw):
        def attention(x, w, b=None, *rest):
            packed = x @ w if b is None else x @ w + b
            added = rest[2] if len(rest) > 2 else 0
            return attended(*packed.split(sizes, -1), heads, added if mask is None else mask + added, **kw)
        return attention

    x, w, b = rand(2, 3, 5), rand(5, 12), rand(12)
    place = torch.arange(3)
    case("Attention", run(2, [4, 4, 4]), [x, w, b], num_heads=2)
    case("Attention", run(2, [4, 4, 4], causal=True), [x, w, b], num_heads=2, unidirectional=1)
    keys = barred(place < torch.tensor([2, 3])[:, None])[:, None, None]
    case("Attention", run(2, [4, 4, 4], keys), [x, w, b, i32([2, 3])], num_heads=2)
    keys = barred((place < torch.tensor([3, 2])[:, None]) & (place >= torch.tensor([1, 0])[:, None]))[:, None, None]
    case("Attention", run(2, [4, 4, 4], keys), [x, w, b, i32([3, 2, 1, 0])], num_heads=2)
    given = i32([[1, 0, 1], [1, 1, 0]])
    case("Attention", run(1, [4, 4, 4], barred(given > 0, -50.0)[:, None, None], scale=0.5), [x, w, b, given], num_heads=1,
         mask_filter_value=-50.0, scale=0.5)
    given = i32([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 1, 1], [0, 1, 1], [0, 0, 1]]])
    case("Attention", run(2, [4, 4, 4], barred(given > 0)[:, None]), [x, w, b, given], num_heads=2)
    case("Attention", run(2, [4, 4, 4]), [x, w, b, None, None, rand(2, 2, 3, 3)], num_heads=2)
    case("Attention", run(2, [4, 4, 6]), [rand(1, 4, 3), rand(3, 14), rand(14)], num_heads=2, qkv_hidden_sizes=[4, 4, 6])
    case("Attention", run(3, [6, 6, 6], causal=True), [rand(3, 2, 4), rand(4, 18), rand(18)], num_heads=3, unidirectional=1)


def others_attention():
    q, k, v = rand(2, 3, 4), rand(2, 5, 4), rand(2, 5, 6)
    case("MultiHeadAttention", lambda q, k, v: attended(q, k, v, 2), [q, k, v], num_heads=2)
    biased = lambda q, k, v, b: attended(q + b[:4], k + b[4:8], v + b[8:], 2, scale=0.25)  # noqa: E731
    case("MultiHeadAttention", biased, [q, k, v, rand(14)], num_heads=2, scale=0.25)
    given = i32([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    keys = barred(given > 0)[:, None, None]
    case("MultiHeadAttention", lambda q, k, v, *_: attended(q, k, v, 2, keys), [q, k, v, None, given], num_heads=2)
    counted = barred(torch.arange(5) < torch.tensor([4, 2])[:, None], -20.0)[:, None, None]
    both = lambda q, k, v, b, m, a: attended(q, k, v, 1, counted + a)  # noqa: E731
    case("MultiHeadAttention", both, [q, k, v, None, i32([4, 2]), rand(2, 1, 3, 5)], num_heads=1, mask_filter_value=-20.0)
    case("MultiHeadAttention", lambda q: attended(*[q[:, :, :, i].flatten(2) for i in range(3)], 2), [rand(2, 3, 2, 3, 4)], runs=False, num_heads=2)
    packed = lambda q, kv: attended(q, kv[:, :, :, 0].flatten(2), kv[:, :, :, 1].flatten(2), 2)  # noqa: E731
    case("MultiHeadAttention", packed, [rand(2, 3, 8), rand(2, 5, 2, 2, 4)], runs=False, num_heads=2)
    case("MultiHeadAttention", lambda q, k, v: attended(q, k, v, 2), [rand(1, 3, 8), rand(1, 2, 5, 4), rand(1, 2, 5, 4)], num_heads=2)
    case("MultiHeadAttention", lambda q, k, v: attended(q, k, v, 3, causal=True), [rand(2, 4, 6), rand(2, 4, 6), rand(2, 4, 6)], num_heads=3, unidirectional=1)


def rotated(x, ids, cos, sin, neighbours, width=None):
    """Of [batch, heads, tokens, size]."""
    at = ids.long() if ids.dim() == 2 else ids.long() + torch.arange(x.shape[2])[None]
    c, s = cos[at][:, None], sin[at][:, None]
    part, rest = (x, x[..., :0]) if width is None else (x[..., :width], x[..., width:])
    a, b = (part[..., ::2], part[..., 1::2]) if neighbours else part.chunk(2, -1)
    a, b = a * c - b * s, a * s + b * c
    part = torch.stack([a, b], -1).flatten(-2) if neighbours else torch.cat([a, b], -1)
    return torch.cat([part, rest], -1)


def rotary():
    cos, sin = rand(8, 2), rand(8, 2)
    case("RotaryEmbedding", lambda x, i, c, s: rotated(x, i, c, s, False), [rand(2, 3, 4, 4), ints([[0, 1, 2, 3], [5, 4, 7, 6]]), cos, sin])
    case("RotaryEmbedding", lambda x, i, c, s: rotated(x, i, c, s, True), [rand(2, 1, 3, 4), ints([2]), cos, sin], interleaved=1)
    flat = lambda x, i, c, s: rotated(x.unflatten(-1, (3, 4)).transpose(1, 2), i, c, s, False).transpose(1, 2).flatten(2)  # noqa: E731
    case("RotaryEmbedding", flat, [rand(2, 2, 12), ints([1]), cos, sin])
    part = lambda x, i, c, s: rotated(x.unflatten(-1, (2, 6)).transpose(1, 2), i, c, s, False, 4).transpose(1, 2).flatten(2)  # noqa: E731
    case("RotaryEmbedding", part, [rand(1, 3, 12), ints([[1, 2, 3]]), cos, sin], rotary_embedding_dim=4, num_heads=2)


if __name__ == "__main__":
    activations()
    products()
    norms()
    self_attention()
    others_attention()
    rotary()
    write()
