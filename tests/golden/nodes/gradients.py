"""Numbers for `tests/suite/ops/nodes.rs`: ONNX nodes, their results and gradients in PyTorch float64.

    python tests/golden/nodes/gradients.py > tests/golden/nodes/gradients.json      # torch 2.15, onnx 1.23

Each case: the model's bytes in hex, inputs by name, results, and the gradient of sum(result_k * cos(k, k + 1, ...)) over all
float results by each float input. What PyTorch has not is written out here in its operations, as ONNX's text says it.
"""

import json
import math

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

CASES = []
COUNT = 0


def rand(*shape, low=None, high=None):
    """Numbers that no other case has: normal, or uniform in a range."""
    global COUNT
    COUNT += 1
    g = torch.Generator().manual_seed(COUNT)
    if low is None:
        return torch.randn(*shape, generator=g, dtype=torch.float64)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def encode(t):
    data = [x if math.isfinite(x) else str(x) for x in t.double().reshape(-1).tolist()]
    return {"shape": list(t.shape), "data": data, "dtype": {torch.int64: "i64", torch.int32: "i32", torch.bool: "bool", torch.float32: "f32"}.get(t.dtype, "f64")}


CODES = {torch.float64: TensorProto.DOUBLE, torch.float32: TensorProto.FLOAT, torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32, torch.bool: TensorProto.BOOL}


def case(op, function, inputs, opset=23, constants=(), nodes=None, deprecated=False, **attributes):
    """Inputs x0, x1 and so on may be None; those at `constants` are known while compiling. `nodes` stand for one of `op`."""
    names = [f"x{i}" if t is not None else "" for i, t in enumerate(inputs)]
    leaves = [t.clone().requires_grad_(t.dtype == torch.float64) if t is not None else None for t in inputs]
    results = function(*leaves)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    nodes = nodes or [helper.make_node(op, names, [f"y{i}" for i in range(len(results))], **attributes)]
    infos = [helper.make_tensor_value_info(n, CODES[t.dtype], list(t.shape)) for n, t in zip(names, inputs) if n]
    outs = [helper.make_tensor_value_info(f"y{i}", CODES[t.dtype], list(t.shape)) for i, t in enumerate(results)]
    model = helper.make_model(helper.make_graph(nodes, "g", infos, outs), opset_imports=[helper.make_opsetid("", opset)])
    if not deprecated:
        onnx.checker.check_model(model)
    loss = 0
    for k, y in enumerate(results):
        if y.is_floating_point() and y.requires_grad:
            loss = loss + (y.reshape(-1) * (torch.arange(y.numel(), dtype=torch.float64) + k).cos()).sum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    gradients = {n: encode(t.grad) for n, t in zip(names, leaves) if t is not None and t.grad is not None}
    CASES.append({
        "name": f"{op} {len(CASES)} {attributes}", "model": model.SerializeToString().hex(),
        "constants": [names[i] for i in constants if i < len(names) and names[i]],
        "inputs": {n: encode(t) for n, t in zip(names, inputs) if n},
        "results": [encode(y.detach()) for y in results], "gradients": gradients,
    })


def each(op, function, shapes=((5,), (2, 3), (2, 1, 3)), low=None, high=None, opset=23, **attributes):
    for shape in shapes:
        case(op, function, [rand(*shape, low=low, high=high)], opset=opset, **attributes)


def pointwise():
    alpha, gamma = float(np.float32(1.6732632)), float(np.float32(1.050701))
    plain = {
        "Softplus": F.softplus, "Elu": F.elu, "Celu": F.celu, "Selu": lambda x: gamma * F.elu(x, alpha), "Mish": F.mish, "Softsign": F.softsign,
        "HardSwish": F.hardswish, "Gelu": F.gelu, "Relu": F.relu, "LeakyRelu": F.leaky_relu, "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh, "Erf": torch.erf, "Exp": torch.exp, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan,
        "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Abs": torch.abs, "Neg": torch.neg,
        "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Reciprocal": torch.reciprocal,
    }
    for op, function in plain.items():
        each(op, function, opset=24 if op == "Swish" else 23)
    for op, function, low, high in [("Asin", torch.asin, -0.9, 0.9), ("Acos", torch.acos, -0.9, 0.9),
                                    ("Atanh", torch.atanh, -0.9, 0.9), ("Acosh", torch.acosh, 1.1, 3.0),
                                    ("Log", torch.log, 0.1, 3.0), ("Sqrt", torch.sqrt, 0.1, 3.0)]:
        each(op, function, low=low, high=high)
    at_zero = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.float64)
    for op in ("Elu", "Celu", "Selu", "Relu", "LeakyRelu", "Abs", "Softsign"):
        case(op, plain[op], [at_zero])
    each("Gelu", lambda x: F.gelu(x, approximate="tanh"), approximate="tanh")
    quarter = 0.25
    each("LeakyRelu", lambda x: F.leaky_relu(x, quarter), alpha=quarter, opset=7)
    each("Elu", lambda x: F.elu(x, 1.5), alpha=1.5)
    each("Celu", lambda x: F.celu(x, 2.0), alpha=2.0)
    each("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), alpha=0.5)
    each("Shrink", lambda x: F.hardshrink(x, 0.5), lambd=0.5)
    each("Shrink", lambda x: F.softshrink(x, 0.25), lambd=0.25, bias=0.25)
    each("HardSigmoid", lambda x: (x * 0.25 + 0.5).clamp(0, 1), alpha=0.25, beta=0.5)
    each("Swish", lambda x: x * torch.sigmoid(1.5 * x), alpha=1.5, opset=24)
    for shape, slope in [((2, 3), (3,)), ((2, 3, 2), (3, 1)), ((4,), (1,))]:
        case("PRelu", lambda x, w: torch.where(x > 0, x, x * w), [rand(*shape), rand(*slope)])
    for shape in ((4,), (2, 3), (2, 1, 2)):
        case("SwiGLU", lambda a, b: a * torch.sigmoid(0.5 * a) * b, [rand(*shape), rand(*shape)], opset=28, alpha=0.5)
        case("Mod", torch.fmod, [rand(*shape) * 5, rand(*shape)], fmod=1)
        for op, f in [("Sum", sum), ("Mean", lambda v: sum(v) / 3), ("Max", lambda v: torch.maximum(torch.maximum(*v[:2]), v[2])),
                      ("Min", lambda v: torch.minimum(torch.minimum(*v[:2]), v[2]))]:
            case(op, lambda *v, f=f: f(v), [rand(*shape), rand(*shape), rand(1)])


def reductions():
    functions = {
        "ReduceL1": lambda x, d, k: x.abs().sum(d, k), "ReduceL2": lambda x, d, k: x.norm(2, d, k),
        "ReduceLogSum": lambda x, d, k: (x * x).sum(d, k).log(), "ReduceLogSumExp": lambda x, d, k: x.logsumexp(d, k),
        "ReduceSumSquare": lambda x, d, k: (x * x).sum(d, k), "ReduceSum": lambda x, d, k: x.sum(d, k),
        "ReduceMean": lambda x, d, k: x.mean(d, k), "ReduceMax": lambda x, d, k: x.amax(d, k), "ReduceMin": lambda x, d, k: x.amin(d, k),
    }
    for op, f in functions.items():
        for shape, axes, keep in [((3, 4), [1], 1), ((2, 3, 2), [0, 2], 0), ((2, 3), [0], 1)]:
            x = rand(*shape)
            if op == "ReduceLogSum":
                case(op, lambda x: x.sum(axes, bool(keep)).log(), [x.abs() + 0.1], opset=17, axes=axes, keepdims=keep)
            else:
                case(op, lambda x: f(x, axes, bool(keep)), [x], opset=17 if op != "ReduceSum" else 11, axes=axes, keepdims=keep)
    for shape, axis in [((3, 4), 1), ((2, 3, 2), 0), ((2, 3), 1)]:
        case("ReduceProd", lambda x: x.prod(axis, keepdim=True), [rand(*shape)], opset=17, axes=[axis])
    case("ReduceL2", lambda x: x.norm(2, 1), [torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)], opset=17, axes=[1], keepdims=0)
    for shape, axis, exclusive, reverse in [((5,), 0, 0, 0), ((2, 4), 1, 1, 0), ((3, 2), 0, 0, 1), ((2, 3), 1, 1, 1)]:
        def product(x):
            y = x.flip(axis) if reverse else x
            y = y.cumprod(axis)
            if exclusive:
                y = torch.cat([torch.ones_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)], axis)
            return y.flip(axis) if reverse else y
        case("CumProd", lambda x, _: product(x), [rand(*shape), ints(axis)], opset=26, constants=[1], exclusive=exclusive, reverse=reverse)
    zeros = torch.tensor([2.0, 0.0, 3.0, 0.0, 4.0], dtype=torch.float64)
    case("CumProd", lambda x, _: x.cumprod(0), [zeros, ints(0)], opset=26, constants=[1])


def norms():
    e = float(np.float32(1e-5))
    for shape in ((3, 4), (2, 3, 2), (2, 2, 2, 2)):
        channels = shape[1]
        w, b = rand(channels), rand(channels)
        line = lambda t: t.reshape(-1, *[1] * (len(shape) - 2))
        case("BatchNormalization",
             lambda x, w, b, m, v: (x - line(m)) / (line(v) + e).sqrt() * line(w) + line(b),
             [rand(*shape), w, b, rand(channels), rand(channels, low=0.5, high=2.0)], opset=15, epsilon=e)

        def trained(x, w, b, m, v):
            y = F.batch_norm(x, None, None, w, b, training=True, eps=e)
            dims = [d for d in range(x.ndim) if d != 1]
            return y, 0.75 * m + 0.25 * x.mean(dims), 0.75 * v + 0.25 * x.var(dims, unbiased=False)

        case("BatchNormalization", trained, [rand(*shape), w, b, rand(channels), rand(channels, low=0.5, high=2.0)],
             opset=15, epsilon=e, momentum=0.75, training_mode=1)
        if len(shape) > 2:
            case("InstanceNormalization", lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=e), [rand(*shape), w, b], epsilon=e)
    case("InstanceNormalization", lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.25), [rand(1, 2, 5), rand(2), rand(2)], epsilon=0.25)
    for shape, groups in [((2, 4, 3), 2), ((1, 6, 2, 2), 3), ((3, 4), 4 // 2)]:
        x, w, b = rand(*shape), rand(shape[1]), rand(shape[1])
        case("GroupNormalization", lambda x, w, b: F.group_norm(x, groups, w, b, e), [x, w, b], opset=21, num_groups=groups, epsilon=e)
    for shape, axis in [((3, 4), -1), ((2, 3, 2), 1), ((4,), 0)]:
        for p in (1, 2):
            case("LpNormalization", lambda x: F.normalize(x, p, axis, eps=0), [rand(*shape)], opset=22, axis=axis, p=p)
    for shape, axes in [((2, 2, 2, 2), [0, 2, 3]), ((3, 4), [0]), ((2, 3, 2), [1, 2])]:
        centred = lambda x: x - x.mean(axes, True)
        case("MeanVarianceNormalization", lambda x: centred(x) / (centred(x).square().mean(axes, True).sqrt() + 1e-9), [rand(*shape)], opset=13, axes=axes)
    for channels, size, beta in [(5, 3, 0.75), (4, 2, 0.5), (3, 5, 1.0)]:
        case("LRN", lambda x: torch_lrn(x, size, 0.5, beta, 2.0), [rand(2, channels, 2)], size=size, alpha=0.5, beta=beta, bias=2.0)
    for shape, axis in [((3, 4), -1), ((2, 3, 2), 1), ((5,), 0)]:
        case("Hardmax", lambda x: F.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis).double(), [rand(*shape)], axis=axis)


def torch_lrn(x, size, alpha, beta, bias):
    low, high = (size - 1) // 2, size // 2
    square = F.pad(x.square(), (0, 0, low, high))
    total = sum(square[:, i:i + x.shape[1]] for i in range(size))
    return x / (bias + alpha / size * total) ** beta


def indexing():
    for text, shapes in [("ij,jk->ik", [(2, 3), (3, 2)]), ("bij,bjk->bik", [(2, 2, 3), (2, 3, 2)]), ("ij->ji", [(2, 3)]), ("ij->", [(2, 3)]),
                         ("i,i", [(4,), (4,)]), ("ii->i", [(3, 3)]), ("...ij,...jk->...ik", [(2, 2, 3), (3, 2)]),
                         ("ij,jk,kl->il", [(2, 3), (3, 2), (2, 2)]), ("bi,i,bj->bj", [(2, 3), (3,), (2, 2)]), ("ij,kj->k", [(2, 3), (2, 3)]),
                         ("...i->...", [(2, 3, 2)]), ("bii->b", [(2, 3, 3)])]:
        case("Einsum", lambda *v: torch.einsum(text, *v), [rand(*s) for s in shapes], equation=text)
    x = rand(3, 4)
    case("GatherElements", lambda x, i: x.gather(1, i % 4), [x, ints([[0, -1], [2, 2], [1, 3]])], axis=1)
    case("GatherElements", lambda x, i: x.gather(0, i), [x, ints([[0, 1, 2, 0]])], axis=0)
    case("GatherElements", lambda x, i: x.gather(2, i), [rand(2, 2, 3), ints([[[1], [0]], [[2], [2]]])], axis=2)
    case("GatherND", lambda x, i: x[i[:, 0], i[:, 1]], [x, ints([[0, 1], [2, -1], [0, 1]])])
    case("GatherND", lambda x, i: x[i[:, 0]], [x, ints([[2], [0]])])
    case("GatherND", lambda x, i: torch.stack([x[b, i[b, 0]] for b in range(2)]), [rand(2, 3, 2), ints([[2], [-3]])], batch_dims=1)
    reductions = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    for name, torch_name in reductions.items():
        for shape, at, axis in [((4, 3), [[0, 2, 1], [3, 1, 0]], 0), ((2, 5), [[4, 0], [2, 3]], 1), ((6,), [-1, 2, 0], 0)]:
            i = ints(at)

            def scattered(x, i, u):
                i = i % shape[axis]
                if torch_name is None:
                    return x.scatter(axis, i, u)
                return x.scatter_reduce(axis, i, u, torch_name)

            case("ScatterElements", scattered, [rand(*shape), i, rand(*i.shape)], opset=18, axis=axis, reduction=name)
        for shape, at, tail in [((4, 2), [[3], [0]], (2,)), ((3, 3), [[0, 1], [2, -1], [1, 1]], ()), ((5,), [[4], [1], [0]], ())]:
            i = ints(at)

            def scattered(x, i, u):
                depth = i.shape[-1]
                rows = x.reshape(-1, *shape[depth:])
                offsets = i[:, 0] % shape[0] if depth == 1 else i[:, 0] % shape[0] * shape[1] + i[:, 1] % shape[1]
                if torch_name is None:
                    return rows.index_put((offsets,), u).reshape(x.shape)
                offsets = offsets.reshape(-1, *[1] * len(tail)).expand(u.shape)
                return rows.scatter_reduce(0, offsets, u, torch_name).reshape(x.shape)

            case("ScatterND", scattered, [rand(*shape), i, rand(len(at), *tail)], opset=18, reduction=name)
    case("ScatterElements", lambda x, i, u: x.scatter_add(0, i, u), [rand(3), ints([1, 1, 1, 0]), rand(4)], opset=18, reduction="add")
    for shape, k, axis, largest in [((6,), 3, 0, 1), ((2, 5), 2, 1, 0), ((3, 2, 2), 2, 0, 1)]:
        case("TopK", lambda x, _: x.topk(k, axis, bool(largest)), [rand(*shape), ints([k])], opset=11, constants=[1], axis=axis, largest=largest)

    def reverse(x, lengths, time, batch):
        x = x.movedim((time, batch), (0, 1))
        columns = [torch.cat([x[:n, b].flip(0), x[n:, b]]) for b, n in enumerate(lengths.tolist())]
        return torch.stack(columns, 1).movedim((0, 1), (time, batch))

    for shape, time, batch, lengths in [((4, 3), 0, 1, [1, 4, 2]), ((2, 3), 1, 0, [3, 2]), ((3, 2, 2), 0, 1, [2, 3])]:
        case("ReverseSequence", lambda x, l: reverse(x, l, time, batch), [rand(*shape), ints(lengths)], time_axis=time, batch_axis=batch)
    for shape, new, axis, at, mode in [((2, 4, 2), 2, 1, [0, 2], "linear"), ((2, 1, 3, 2), 1, -2, [2, 0], "linear"), ((1, 3, 2), 2, 1, [2], "circular")]:
        def write(past, update, starts):
            rows = []
            for b, start in enumerate(starts.tolist()):
                out = list(past[b].movedim(axis - 1 if axis > 0 else axis, 0))
                for t, row in enumerate(update[b].movedim(axis - 1 if axis > 0 else axis, 0)):
                    out[(start + t) % len(out)] = row
                rows.append(torch.stack(out).movedim(0, axis - 1 if axis > 0 else axis))
            return torch.stack(rows)

        part = list(shape)
        part[axis] = new
        case("TensorScatter", write, [rand(*shape), rand(*part), ints(at)], opset=24, axis=axis, mode=mode)


def blocks():
    for shape, b in [((1, 4, 2, 3), 2), ((2, 8, 1, 2), 2), ((1, 9, 1, 1), 3)]:
        n, c, h, w = shape
        case("DepthToSpace", lambda x: F.pixel_shuffle(x, b), [rand(*shape)], mode="CRD", blocksize=b)
        dcr = lambda x: x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)
        case("DepthToSpace", dcr, [rand(*shape)], blocksize=b)
        back = lambda x: x.reshape(n, c // b**2, h, b, w, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c, h, w)
        case("SpaceToDepth", back, [rand(n, c // b**2, h * b, w * b)], blocksize=b)
    for size, block, kw in [((4, 4), (2, 2), {}), ((4, 5), (2, 2), dict(stride=(2, 1))), ((3, 3), (2, 2), dict(padding=(1, 1))),
                            ((5, 5), (2, 2), dict(dilation=(2, 2)))]:
        columns = F.unfold(torch.zeros(1, 2, *size), block, **kw).shape[-1]
        names = {"stride": "strides", "dilation": "dilations"}
        attributes = {names[k]: list(v) for k, v in kw.items() if k in names}
        if "padding" in kw:
            attributes["pads"] = list(kw["padding"]) * 2
        case("Col2Im", lambda x, *_: F.fold(x, size, block, **kw), [rand(1, 2 * block[0] * block[1], columns), ints(list(size)), ints(list(block))],
             opset=18, constants=[1, 2], **attributes)
    for shape, wanted in [((5, 3), [3, 3]), ((2, 3), [4, 6]), ((4, 5), [7, 2])]:
        def centred(x, _):
            for d, n in enumerate(wanted):
                gap = x.shape[d] - n
                if gap >= 0:
                    x = x.narrow(d, gap // 2, n)
                else:
                    low = -gap // 2
                    x = F.pad(x, [0, 0] * (x.ndim - 1 - d) + [low, -gap - low])
            return x

        case("CenterCropPad", centred, [rand(*shape), ints(wanted)], opset=18, constants=[1])
    for mode in ("constant", "reflect", "edge", "wrap"):
        for pads in ([0, 0, 1, 0, 0, 2], [0, 0, 2, 0, 0, 0], [0, 0, 1, 0, 0, 1]):
            torch_mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
            case("Pad", lambda x, _: F.pad(x, (pads[2], pads[5]), torch_mode), [rand(1, 2, 4), ints(pads)], opset=21, constants=[1], mode=mode)


def step(kind, x, h, c, w, r, b, p, linear):
    """One step by ONNX's equations."""
    size = r.shape[1]
    wb, rb = b.chunk(2)
    if kind == "RNN":
        return torch.tanh(x @ w.T + h @ r.T + wb + rb), c
    if kind == "GRU":
        (wz, wr, wh), (rz, rr, rh) = w.split(size), r.split(size)
        (bz, br, bh), (dz, dr, dh) = wb.split(size), rb.split(size)
        z, s = torch.sigmoid(x @ wz.T + h @ rz.T + bz + dz), torch.sigmoid(x @ wr.T + h @ rr.T + br + dr)
        n = torch.tanh(x @ wh.T + s * (h @ rh.T + dh) + bh) if linear else torch.tanh(x @ wh.T + (s * h) @ rh.T + dh + bh)
        return (1 - z) * n + z * h, c
    i, o, f, g = (x @ w.T + h @ r.T + wb + rb).chunk(4, -1)
    pi, po, pf = p.chunk(3)
    i, f = torch.sigmoid(i + pi * c), torch.sigmoid(f + pf * c)
    c = f * c + i * torch.tanh(g)
    return torch.sigmoid(o + po * c) * torch.tanh(c), c


def recur(kind, x, w, r, b, lengths, h0, c0, p, direction, linear, layout):
    steps, batch, size = (x.shape[1], x.shape[0], r.shape[2]) if layout else (x.shape[0], x.shape[1], r.shape[2])
    if layout:
        x, h0, c0 = x.transpose(0, 1), h0 if h0 is None else h0.transpose(0, 1), c0 if c0 is None else c0.transpose(0, 1)
    ys, hs, cs = [], [], []
    for d, back in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):
        zero = x.new_zeros(batch, size)
        h, c = zero if h0 is None else h0[d], zero if c0 is None else c0[d]
        bias = x.new_zeros(2 * w.shape[1]) if b is None else b[d]
        peep = x.new_zeros(3 * size) if p is None else p[d]
        out = [None] * steps
        for t in reversed(range(steps)) if back else range(steps):
            nh, nc = step(kind, x[t], h, c, w[d], r[d], bias, peep, linear)
            live = torch.ones(batch, 1, dtype=torch.bool) if lengths is None else (lengths > t)[:, None]
            out[t] = torch.where(live, nh, zero)
            h, c = torch.where(live, nh, h), torch.where(live, nc, c)
        ys.append(torch.stack(out)), hs.append(h), cs.append(c)
    y, h, c = torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)
    if layout:
        y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
    return (y, h, c) if kind == "LSTM" else (y, h)


def recurrent():
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}
    for kind, count in gates.items():
        for direction, layout, full in [("forward", 0, False), ("reverse", 0, True), ("bidirectional", 0, True), ("bidirectional", 1, True)]:
            t, b, i, h = 3, 2, 2, 2
            d = 2 if direction == "bidirectional" else 1
            x = rand(b, t, i) if layout else rand(t, b, i)
            state = lambda: (rand(b, d, h) if layout else rand(d, b, h)) if full else None
            inputs = [x, rand(d, count * h, i), rand(d, count * h, h), rand(d, 2 * count * h) if full else None, None, state()]
            if kind == "LSTM":
                inputs += [state(), rand(d, 3 * h) if full else None]
            while inputs[-1] is None:
                inputs.pop()
            for linear in (0, 1) if kind == "GRU" else (0,):
                def f(x, w, r, bias=None, lengths=None, h0=None, c0=None, p=None):
                    return recur(kind, x, w, r, bias, lengths, h0, c0, p, direction, linear, layout)
                attributes = {"linear_before_reset": linear} if kind == "GRU" else {}
                case(kind, f, inputs, opset=14, direction=direction, layout=layout, hidden_size=h, **attributes)
        lengths = torch.tensor([1, 3], dtype=torch.int32)
        for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            def f(x, w, r, bias, lengths):
                return recur(kind, x, w, r, bias, lengths, None, None, None, direction, 0, 0)
            inputs = [rand(3, 2, 2), rand(d, count * 2, 2), rand(d, count * 2, 2), rand(d, 4 * count), lengths]
            case(kind, f, inputs, opset=14, direction=direction, hidden_size=2)
    check_against_torch()


def check_against_torch():
    """The equations above are those of torch.nn.LSTM and GRU, gates reordered."""
    for kind, order in (("LSTM", [0, 3, 1, 2]), ("GRU", [1, 0, 2])):
        net = getattr(torch.nn, kind)(2, 3).double()
        turn = lambda t: torch.cat([t.chunk(len(order))[k] for k in order])
        w, r = turn(net.weight_ih_l0), turn(net.weight_hh_l0)
        b = torch.cat([turn(net.bias_ih_l0), turn(net.bias_hh_l0)])
        x = rand(4, 2, 2)
        y = recur(kind, x, w[None], r[None], b[None], None, None, None, None, "forward", 1, 0)[0]
        assert (y[:, 0] - net(x)[0]).abs().max() < 1e-12


def grids():
    for mode, onnx_mode in (("bilinear", "linear"), ("nearest", "nearest"), ("bicubic", "cubic")):
        for padding in ("zeros", "border", "reflection") if mode != "bicubic" else ("zeros", "reflection"):  # ONNX clamps before
            for align in (0, 1):
                f = lambda x, g: F.grid_sample(x, g, mode, padding, bool(align))
                case("GridSample", f, [rand(1, 2, 3, 4), rand(1, 2, 2, 2, low=-1.6, high=1.6)], opset=20, mode=onnx_mode,
                     padding_mode=padding, align_corners=align)
    case("GridSample", lambda x, g: F.grid_sample(x, g, "bilinear", "zeros", False), [rand(1, 1, 2, 3, 2), rand(1, 2, 1, 2, 3, low=-1.2, high=1.2)],
         opset=20, mode="linear")
    for size, align in (((2, 1, 2, 3), 0), ((1, 1, 3, 2), 1), ((1, 1, 2, 2, 3), 0)):
        k = len(size) - 2
        case("AffineGrid", lambda t, _: F.affine_grid(t, size, align_corners=bool(align)), [rand(size[0], k, k + 1), ints(list(size))],
             opset=20, constants=[1], align_corners=align)


def attention():
    q, k, v = rand(1, 4, 3, 2), rand(1, 2, 4, 2), rand(1, 2, 4, 2)

    def f(q, k, v, mask=None, cap=0.0, allowed=None):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = cap * torch.tanh(s / cap) if cap else s
        s = s if mask is None else s + mask
        s = s if allowed is None else s.masked_fill(~allowed, -math.inf)
        return torch.softmax(s, -1).nan_to_num(0.0) @ v

    case("Attention", lambda q, k, v: f(q, k, v, cap=2.0), [q, k, v], softcap=2.0)
    case("Attention", lambda q, k, v, m: f(q, k, v, m, cap=0.5), [q, k, v, rand(3, 4)], softcap=0.5)
    past = [rand(1, 2, 2, 2), rand(1, 2, 2, 2)]
    causal = torch.arange(6)[None] <= torch.arange(3)[:, None] + 2

    def cached(q, k, v, mask, pk, pv):
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        return f(q, k, v, allowed=causal), k, v

    case("Attention", cached, [q, k, v, None, *past], opset=25, is_causal=1)
    place = torch.arange(3)[:, None] - torch.arange(4)[None]
    window = (place <= 1) & (place >= -1)
    case("Attention", lambda q, k, v: f(q, k, v, allowed=window), [q, k, v], opset=25, left_window_size=1, right_window_size=1)


def arithmetic():
    pairs = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1, 2), (3, 1))]
    for one, other in pairs:
        for op, f in [("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul)]:
            case(op, f, [rand(*one), rand(*other)])
        case("Div", torch.div, [rand(*one), rand(*other, low=0.5, high=2.0)])
        case("Pow", torch.pow, [rand(*one, low=0.5, high=2.0), rand(*other)])
        shape = torch.broadcast_shapes(one, other)
        case("Where", torch.where, [rand(*shape) > 0, rand(*one), rand(*other)])
    for power in (2.0, 3.0, -0.5):
        exponent = torch.tensor(power, dtype=torch.float64)
        case("Pow", lambda x, _: x**power, [rand(2, 3, low=0.5, high=2.0), exponent], constants=[1])
    for shape, low, high in [((5,), -0.5, 0.5), ((2, 3), None, 0.25), ((2, 1, 3), -0.25, None)]:
        bounds = [None if b is None else torch.tensor(b, dtype=torch.float64) for b in (low, high)]
        while bounds[-1] is None:
            bounds.pop()
        case("Clip", lambda x, *_: x.clamp(low, high), [rand(*shape), *bounds], constants=[1, 2])
    each("Clip", lambda x: x.clamp(-0.5, 0.75), shapes=((5,),), opset=7, min=-0.5, max=0.75)
    for one, other in [((2, 3), (3, 2)), ((2, 2, 3), (3, 4)), ((3,), (3, 2)), ((2, 1, 2, 3), (3, 3, 1)), ((4,), (4,))]:
        case("MatMul", torch.matmul, [rand(*one), rand(*other)])
    for a, b, c, kw in [((2, 3), (3, 4), None, {}), ((3, 2), (3, 4), (4,), dict(transA=1, alpha=0.5)),
                        ((2, 3), (4, 3), (2, 1), dict(transB=1, beta=2.0)), ((3, 2), (4, 3), (2, 4), dict(transA=1, transB=1, alpha=0.5, beta=0.25))]:
        def f(a, b, c=None):
            a, b = a.T if kw.get("transA") else a, b.T if kw.get("transB") else b
            return kw.get("alpha", 1) * (a @ b) + (0 if c is None else kw.get("beta", 1) * c)
        case("Gemm", f, [rand(*a), rand(*b), *([rand(*c)] if c else [])], **kw)
    for op in ("Identity", "Dropout"):
        each(op, lambda x: x + 0)
    for shape in ((4,), (2, 3), (2, 1, 2)):
        case("Cast", lambda x: x + 0, [rand(*shape)], to=TensorProto.DOUBLE)
        case("CastLike", lambda x, _: x + 0, [rand(*shape), rand(1)])


def layers():
    e = float(np.float32(1e-5))
    for shape, axis, bias in [((3, 4), -1, True), ((2, 3, 2), 1, False), ((2, 2, 3), 2, True), ((2, 3), 0, True)]:
        part = list(shape[axis:])
        weights = [rand(*part), *([rand(*part)] if bias else [])]
        case("LayerNormalization", lambda x, w, b=None: F.layer_norm(x, part, w, b, e), [rand(*shape), *weights], opset=17, axis=axis, epsilon=e)
        case("RMSNormalization", lambda x, w: F.rms_norm(x, part, w, 0.25), [rand(*shape), weights[0]], axis=axis, epsilon=0.25)
    for shape, axis in [((3, 4), -1), ((2, 3, 2), 1), ((2, 2, 3), 0)]:
        case("Softmax", lambda x: x.softmax(axis), [rand(*shape)], opset=13, axis=axis)
        case("LogSoftmax", lambda x: x.log_softmax(axis), [rand(*shape)], opset=13, axis=axis)
    case("Softmax", lambda x: x.flatten(1).softmax(1).reshape(x.shape), [rand(2, 3, 2)], opset=11)
    case("LogSoftmax", lambda x: x.flatten(2).log_softmax(2).reshape(x.shape), [rand(2, 2, 3)], opset=11, axis=2)
    for shape, reduction, weighted, ignore in [((4, 3), "mean", False, None), ((4, 3), "mean", True, 1), ((2, 3, 2), "sum", True, None),
                                               ((2, 3, 2, 2), "none", False, 0)]:
        labels = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(len(shape)))
        weights = [rand(shape[1], low=0.5, high=2.0)] if weighted else []
        kw = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
        for op, f in [("SoftmaxCrossEntropyLoss", F.cross_entropy), ("NegativeLogLikelihoodLoss", F.nll_loss)]:
            loss = lambda x, t, w=None: f(x, t, None if w is None else w.detach(), **kw)
            case(op, loss, [rand(*shape), labels, *weights], opset=13, constants=[2], **kw)
    for shape, extra in [((1, 2, 3, 4), {}), ((2, 1, 2, 4), {"interleaved": 1}), ((2, 3, 4), {"num_heads": 2})]:
        length, size = shape[-2], shape[-1] // extra.get("num_heads", 1)
        angles = rand(5, size // 2)
        places = torch.randint(0, 5, (shape[0], length), generator=torch.Generator().manual_seed(3))

        def rotate(x, cos, sin, places):
            heads = x if x.ndim == 4 else x.reshape(x.shape[0], length, -1, size).transpose(1, 2)
            c, s = cos[places][:, None], sin[places][:, None]
            if extra.get("interleaved"):
                a, b = heads[..., ::2], heads[..., 1::2]
                y = torch.stack([c * a - s * b, s * a + c * b], -1).flatten(-2)
            else:
                a, b = heads.chunk(2, -1)
                y = torch.cat([c * a - s * b, s * a + c * b], -1)
            return y if x.ndim == 4 else y.transpose(1, 2).reshape(x.shape)

        case("RotaryEmbedding", rotate, [rand(*shape), angles.cos(), angles.sin(), places], **extra)
    case("Attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [rand(2, 2, 3, 2), rand(2, 2, 3, 2), rand(2, 2, 3, 2)],
         is_causal=1)


def movement():
    for shape, new in [((2, 3), [6]), ((2, 3, 2), [3, -1]), ((4,), [2, 1, 2])]:
        case("Reshape", lambda x, _: x.reshape(new), [rand(*shape), ints(new)], constants=[1])
    for shape, order in [((2, 3), [1, 0]), ((2, 3, 2), [2, 0, 1]), ((1, 2, 3, 2), [0, 2, 1, 3])]:
        case("Transpose", lambda x: x.permute(order), [rand(*shape)], perm=order)
    for shapes, axis in [([(2, 3), (2, 2)], 1), ([(1, 2), (3, 2), (2, 2)], 0), ([(2, 2, 1), (2, 2, 2)], -1)]:
        case("Concat", lambda *v: torch.cat(v, axis), [rand(*s) for s in shapes], axis=axis)
    for shape, sizes, axis in [((6,), [2, 4], 0), ((2, 5), [1, 3, 1], 1), ((3, 2, 2), [2, 1], 0)]:
        case("Split", lambda x, _: x.split(sizes, axis), [rand(*shape), ints(sizes)], constants=[1], axis=axis)
    for shape, cut, start, end, axis, step in [((6,), slice(1, 5), 1, 5, 0, 1), ((3, 5), slice(0, 5, 2), 0, 2**62, 1, 2), ((4, 2), slice(-3, None), -3, 2**62, 0, 1)]:
        index = (slice(None),) * axis + (cut,)
        case("Slice", lambda x, *_: x[index], [rand(*shape), ints([start]), ints([end]), ints([axis]), ints([step])], constants=[1, 2, 3, 4])
    case("Slice", lambda x, *_: x.flip(0)[::2], [rand(5), ints([-1]), ints([-(2**62)]), ints([0]), ints([-2])], constants=[1, 2, 3, 4])
    for shape, new in [((3,), [2, 3]), ((2, 1), [2, 3]), ((1, 2, 1), [2, 2, 3])]:
        case("Expand", lambda x, _: x.expand(new), [rand(*shape), ints(new)], constants=[1])
    for shape, axes in [((3,), [0]), ((2, 3), [1]), ((2,), [0, 2])]:
        def wide(x, *_):
            for axis in axes:
                x = x.unsqueeze(axis)
            return x
        case("Unsqueeze", wide, [rand(*shape), ints(axes)], constants=[1])
        case("Squeeze", lambda x, *_: x.reshape(shape), [wide(rand(*shape)), ints(axes)], constants=[1])
    for shape, axis in [((2, 3, 2), 1), ((2, 3), 0), ((2, 1, 3, 2), 3)]:
        case("Flatten", lambda x: x.reshape(math.prod(shape[:axis]), -1), [rand(*shape)], axis=axis)
    for shape, times in [((2,), [3]), ((2, 3), [1, 2]), ((1, 2, 2), [2, 2, 1])]:
        case("Tile", lambda x, _: x.tile(times), [rand(*shape), ints(times)], constants=[1])
    for shape, k, upper in [((3, 3), 0, 1), ((2, 3, 4), 1, 1), ((4, 3), -1, 0)]:
        case("Trilu", lambda x, _: x.triu(k) if upper else x.tril(k), [rand(*shape), ints(k)], constants=[1], upper=upper)
    for shape, axis, at in [((4, 2), 0, [[1, 3], [1, -4]]), ((2, 3), 1, [2, 0]), ((2, 2, 3), -1, 1)]:
        case("Gather", lambda x, i: x.movedim(axis, 0)[i].movedim(tuple(range(i.ndim)), tuple(range(axis % x.ndim, axis % x.ndim + i.ndim))),
             [rand(*shape), ints(at)], axis=axis)
    for shape, axis, exclusive, reverse in [((5,), 0, 0, 0), ((2, 4), 1, 1, 0), ((3, 2), 0, 0, 1), ((2, 3), 1, 1, 1)]:
        def total(x, _):
            y = x.flip(axis) if reverse else x
            y = y.cumsum(axis) - (y if exclusive else 0)
            return y.flip(axis) if reverse else y
        case("CumSum", total, [rand(*shape), ints(axis)], constants=[1], exclusive=exclusive, reverse=reverse)
    for shape, sizes, axis in [((6,), [2, 4], 0), ((2, 5), [3, 2], 1), ((3, 2), [1, 2], 0)]:
        nodes = [helper.make_node("SplitToSequence", ["x0", "x1"], ["s"], axis=axis), helper.make_node("SequenceAt", ["s", "x2"], ["y0"])]
        case("SplitToSequence", lambda x, *_: x.split(sizes, axis)[1] + 0, [rand(*shape), ints(sizes), ints(1)], constants=[1, 2], nodes=nodes)


def older():
    for shape, keep, axis in [((4,), [True, False, True, True], 0), ((2, 3), [False, True, True], 1), ((3, 2), [True, False, False, True], None)]:
        kept = torch.tensor(keep).nonzero()[:, 0]
        pick = lambda x, _: x.reshape(-1)[kept] if axis is None else x.index_select(axis, kept)
        case("Compress", pick, [rand(*shape), torch.tensor(keep)], constants=[1], **({} if axis is None else {"axis": axis}))
    for shape, axis, new in [((2, 2), 0, 0), ((3,), 0, 1), ((2, 1, 2), -1, 0)]:
        nodes = [helper.make_node("SequenceConstruct", ["x0", "x1"], ["s"]),
                 helper.make_node("ConcatFromSequence", ["s"], ["y0"], axis=axis, new_axis=new)]
        join = torch.stack if new else torch.cat
        case("ConcatFromSequence", lambda *v: join(v, axis), [rand(*shape), rand(*shape)], nodes=nodes)
    for shape, at, axis in [((4, 3), [[0, 2, 1], [3, 1, 0]], 0), ((2, 5), [[4, 0], [2, 3]], 1), ((6,), [5, 2, 0], 0)]:
        case("Scatter", lambda x, i, u: x.scatter(axis, i, u), [rand(*shape), ints(at), rand(*ints(at).shape)], opset=9, axis=axis)
    for shape, scale in [((1, 2, 3), [2]), ((1, 1, 2, 3), [2, 3]), ((2, 1, 1, 2), [3, 1])]:
        scales = torch.tensor([1.0, 1.0, *map(float, scale)], dtype=torch.float32)
        case("Upsample", lambda x, _: F.interpolate(x, scale_factor=tuple(map(float, scale)), mode="nearest"), [rand(*shape), scales], opset=9,
             constants=[1])


def control():
    info = lambda name, shape, kind=TensorProto.DOUBLE: helper.make_tensor_value_info(name, kind, list(shape))
    node = helper.make_node
    for shape in ((2,), (2, 3), (1, 2, 2)):
        yes = helper.make_graph([node("Mul", ["x1", "x2"], ["t"])], "yes", [], [info("t", shape)])
        no = helper.make_graph([node("Sub", ["x1", "x2"], ["f"])], "no", [], [info("f", shape)])
        for holds, constants in ((True, [0]), (False, [])):
            nodes = [node("If", ["x0"], ["y0"], then_branch=yes, else_branch=no)]
            case("If", lambda c, a, b: a * b if holds else a - b, [torch.tensor(holds), rand(*shape), rand(*shape)], constants=constants, nodes=nodes)
        body = helper.make_graph(
            [node("Mul", ["s", "x"], ["p"]), node("Add", ["p", "x"], ["n"]), node("Sin", ["n"], ["y"])], "body",
            [info("s", shape), info("x", shape)], [info("n", shape), info("y", shape)])
        for axis, backward in ((0, 0), (len(shape), 1)):
            def scan(s, xs):
                ys = []
                for x in xs.unbind(axis)[:: -1 if backward else 1]:
                    s = s * x + x
                    ys.append(s.sin())
                return s, torch.stack(ys)
            steps = list(shape)
            steps.insert(axis, 3)
            case("Scan", scan, [rand(*shape), rand(*steps)], body=body, num_scan_inputs=1, scan_input_axes=[axis], scan_input_directions=[backward])
        body = helper.make_graph(
            [node("Identity", ["go"], ["on"]), node("Mul", ["s", "x2"], ["p"]), node("Tanh", ["p"], ["n"]), node("Identity", ["n"], ["y"])],
            "body", [info("i", (), TensorProto.INT64), info("go", (), TensorProto.BOOL), info("s", shape)],
            [info("on", (), TensorProto.BOOL), info("n", shape), info("y", shape)])

        def loop(_, s, x):
            ys = []
            for _ in range(3):
                s = (s * x).tanh()
                ys.append(s)
            return s, torch.stack(ys)

        case("Loop", loop, [ints(3), rand(*shape), rand(*shape)], constants=[0], nodes=[node("Loop", ["x0", "", "x1"], ["y0", "y1"], body=body)])


def wider():
    """Shapes and attributes that the cases above leave out."""
    for alpha in (0.5, 2.5):
        each("Celu", lambda x: F.celu(x, alpha), shapes=((3, 2),), alpha=alpha)
        each("Elu", lambda x: F.elu(x, alpha), shapes=((3, 2),), alpha=alpha)
        each("LeakyRelu", lambda x: F.leaky_relu(x, alpha), shapes=((3, 2),), alpha=alpha)
        each("ThresholdedRelu", lambda x: F.threshold(x, alpha / 2, 0.0), shapes=((3, 2),), alpha=alpha / 2)
        each("HardSigmoid", lambda x: (x * alpha + 0.25).clamp(0, 1), shapes=((3, 2),), alpha=alpha, beta=0.25)
        each("Shrink", lambda x: torch.where(x > 0.75, x - alpha, torch.where(x < -0.75, x + alpha, 0.0)), shapes=((3, 2),), lambd=0.75, bias=alpha)
        each("Selu", lambda x: 1.5 * F.elu(x, alpha), shapes=((3, 2),), alpha=alpha, gamma=1.5)
        each("Swish", lambda x: x * torch.sigmoid(alpha * x), shapes=((3, 2),), opset=24, alpha=alpha)
        case("SwiGLU", lambda a, b: a * torch.sigmoid(alpha * a) * b, [rand(3, 2), rand(3, 2)], opset=28, alpha=alpha)
    case("SwiGLU", lambda a, b: F.silu(a) * b, [rand(4, 1), rand(4, 1)], opset=28)
    case("Expand", lambda x, _: x.expand(3, 2, 4), [rand(2, 1), ints([3, 1, 4])], constants=[1])
    case("GatherElements", lambda x, i: x.gather(0, i), [rand(4, 2), ints([[3, 0], [1, 1], [3, 2]])], axis=0)
    each("HardSigmoid", lambda x: (x * float(np.float32(0.2)) + 0.5).clamp(0, 1), shapes=((3, 2),))
    x, w, b = rand(2, 3, 2), rand(3), rand(3)
    line = lambda t: t.reshape(-1, 1)
    case("BatchNormalization", lambda x, w, b, m, v: (x - line(m)) / (line(v) + 0.25).sqrt() * line(w) + line(b),
         [x, w, b, rand(3), rand(3, low=0.5, high=2.0)], opset=15, epsilon=0.25)
    case("InstanceNormalization", lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.0625), [x, w, b], epsilon=0.0625)
    case("GroupNormalization", lambda x, w, b: F.group_norm(x, 1, w, b, 0.25), [x, w, b], opset=21, num_groups=1, epsilon=0.25)
    # Numbers that each of the types has, where rounding is the identity.
    for to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        nodes = [helper.make_node("Cast", ["x0"], ["h"], to=to), helper.make_node("Cast", ["h"], ["y0"], to=TensorProto.DOUBLE)]
        case("Cast", lambda x: x + 0, [torch.randint(-8, 8, (3, to), generator=torch.Generator().manual_seed(to)) / 4.0 + torch.zeros(1, dtype=torch.float64)], nodes=nodes)
    for axes, wanted, build in [([1], [2], lambda x: x[:, 1:3]), ([-1, 0], [3, 4], lambda x: F.pad(x[:, :3], (0, 0, 0, 1)))]:
        case("CenterCropPad", lambda x, _: build(x), [rand(3, 4 + len(axes) % 2), ints(wanted)], opset=18, constants=[1], axes=axes)
    case("GatherND", lambda x, i: torch.stack([torch.stack([x[b, c, i[b, c, 0]] for c in range(2)]) for b in range(2)]),
         [rand(2, 2, 3), ints([[[2], [0]], [[-1], [1]]])], batch_dims=2)
    for shape, axes, keep in [((2, 3, 2), [1], 0), ((2, 2, 2), [0, 2], 1)]:
        case("ReduceProd", lambda x: x.movedim(axes, tuple(range(len(axes)))).reshape(math.prod(shape[a] for a in axes), -1).prod(0)
             .reshape([n if a not in axes else 1 for a, n in enumerate(shape) if keep or a not in axes]), [rand(*shape)], opset=17, axes=axes, keepdims=keep)
    case("Reshape", lambda x, _: x.reshape(3, 4), [rand(3, 2, 2), ints([0, -1])], constants=[1])
    case("Reshape", lambda x, _: x.reshape(4, 3), [rand(3, 2, 2), ints([4, 3])], constants=[1], allowzero=1)
    case("Scatter", lambda x, i, u: x.scatter(2, i, u), [rand(2, 1, 4), ints([[[3, 1]], [[0, 2]]]), rand(2, 1, 2)], opset=9, axis=2)
    for b, shape in [(4, (1, 1, 4, 8)), (1, (2, 2, 1, 3))]:
        n, c, h, w = shape
        case("SpaceToDepth", lambda x: x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b),
             [rand(*shape)], blocksize=b)
    case("Split", lambda x: x.chunk(2, 2), [rand(2, 1, 4)], opset=18, axis=2, num_outputs=2)
    case("Split", lambda x: x.split([2, 2, 1], 1), [rand(2, 5)], opset=18, axis=1, num_outputs=3)
    for axis, keep in ((1, 0), (0, 0)):
        nodes = [helper.make_node("SplitToSequence", ["x0"], ["s"], axis=axis, keepdims=keep), helper.make_node("SequenceAt", ["s", "x1"], ["y0"])]
        case("SplitToSequence", lambda x, _: x.select(axis, 1) + 0, [rand(2, 3), ints(1)], constants=[1], nodes=nodes)
    case("TopK", lambda x, _: x.topk(2, 2, False), [rand(2, 1, 4), ints([2])], opset=11, constants=[1], axis=2, largest=0)
    case("Upsample", lambda x, _: F.interpolate(x, scale_factor=(2.0, 3.0), mode="nearest"),
         [rand(1, 2, 2, 2), torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.float32)], opset=9, constants=[1], mode="nearest")

    def twice(x):
        """Each output position o reads o / 2, past the last the last."""
        at = torch.arange(2 * x.shape[-1], dtype=torch.float64) / 2
        low = at.floor().long()
        high, part = (low + 1).clamp(max=x.shape[-1] - 1), at - low
        return x[..., low] * (1 - part) + x[..., high] * part

    for shape in ((1, 1, 3), (2, 1, 4)):
        case("Upsample", lambda x, _: twice(x), [rand(*shape), torch.tensor([1.0, 1.0, 2.0], dtype=torch.float32)], opset=9, constants=[1], mode="linear")
    for shape, grid in [((2, 1, 4, 3), (2, 1, 3, 2)), ((1, 3, 2, 2), (1, 2, 3, 2))]:
        case("GridSample", lambda x, g: F.grid_sample(x, g, "bilinear", "border", True),
             [rand(*shape), rand(*grid, low=-1.4, high=1.4)], opset=20, mode="linear", padding_mode="border", align_corners=1)
    for mode, shape, pads in [("constant", (3, 2), [1, 0, 0, 2]), ("reflect", (1, 1, 3, 3), [0, 0, 1, 2, 0, 0, 0, 1]),
                              ("edge", (1, 1, 2, 3), [0, 0, 1, 2, 0, 0, 2, 0]), ("wrap", (1, 1, 3, 2), [0, 0, 1, 0, 0, 0, 1, 1])]:
        torch_mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
        pairs = [n for d in reversed(range(len(shape))) for n in (pads[d], pads[d + len(shape)])]
        case("Pad", lambda x, _: F.pad(x, pairs if mode == "constant" else pairs[:4], torch_mode), [rand(*shape), ints(pads)], opset=21, constants=[1], mode=mode)


def signals():
    def parts(z, real=False):
        return z.real.unsqueeze(-1) if real else torch.view_as_real(z.resolve_conj())

    def numbers(x):
        return x[..., 0] if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())

    forward = lambda n, axis, onesided: lambda x, *_: parts((torch.fft.rfft if onesided else torch.fft.fft)(numbers(x), n, axis))
    back = lambda n, axis, onesided: lambda x, *_: parts((torch.fft.irfft if onesided else torch.fft.ifft)(numbers(x), n, axis), onesided)
    for shape, n, axis, inverse, onesided in [
        ((6, 1), 6, 0, 0, 0), ((2, 5, 1), 5, 1, 0, 1), ((2, 4, 3, 2), 6, 1, 0, 0), ((1, 7, 2), 4, 1, 0, 0), ((2, 3, 4, 2), 4, 2, 1, 0),
        ((2, 4, 2), 6, 1, 1, 1), ((1, 3, 2), 5, 1, 1, 1), ((2, 2, 4, 1), 3, 2, 0, 1),
    ]:
        function = (back if inverse else forward)(n, axis, onesided)
        case("DFT", function, [rand(*shape), ints(n), ints(axis)], constants=[1, 2], opset=20, inverse=inverse, onesided=onesided)
    case("DFT", forward(4, 1, 1), [rand(2, 4, 1)], opset=17, onesided=1)
    case("DFT", forward(3, 2, 0), [rand(1, 2, 3, 2)], opset=19, axis=-2)
    case("DFT", back(6, 1, 1), [rand(2, 4, 2)], opset=20, inverse=1, onesided=1)
    # What an EmbeddingBag is exported as: rows added one by one, joined.
    for shapes, at, order in [([(2, 3), (1, 3)], -1, [1, 0]), ([(2, 2), (3, 2), (1, 2)], 1, [0, 2, 1]), ([(4,), (2,)], 0, [1, 0])]:
        last = len(shapes)
        nodes = [helper.make_node("SequenceEmpty", [], ["s0"], dtype=TensorProto.DOUBLE)]
        nodes += [helper.make_node("SequenceInsert", [f"s{i}", f"x{i}"], [f"s{i + 1}"]) for i in range(last - 1)]
        nodes += [helper.make_node("SequenceInsert", [f"s{last - 1}", f"x{last - 1}", f"x{last}"], [f"s{last}"]),
                  helper.make_node("ConcatFromSequence", [f"s{last}"], ["y0"], axis=0)]
        case("SequenceInsert", lambda *v: torch.cat([v[i] for i in order]), [*(rand(*s) for s in shapes), ints(at)], constants=[last], nodes=nodes)
    for shapes, at, left in [([(2, 3), (1, 3)], 0, [1]), ([(2, 2), (3, 2), (1, 2)], -2, [0, 2]), ([(4,), (2,)], None, [0])]:
        last = len(shapes)
        nodes = [helper.make_node("SequenceConstruct", [f"x{i}" for i in range(last)], ["s"]),
                 helper.make_node("SequenceErase", ["s"] if at is None else ["s", f"x{last}"], ["t"]),
                 helper.make_node("ConcatFromSequence", ["t"], ["y0"], axis=0)]
        case("SequenceErase", lambda *v: torch.cat([v[i] for i in left]), [*(rand(*s) for s in shapes), *([] if at is None else [ints(at)])],
             constants=[last], nodes=nodes)

def orders():
    """TopK of rows that are compared pair by pair, and of longer ones; equal values, NaN, infinities, zeros of both signs."""
    mixed = torch.tensor([[math.nan, 1.0, math.inf, -0.0, 1.0, -math.inf, math.nan, 0.0], [2.0, -0.0, math.nan, 2.0, 0.0, -1.0, -0.0, 2.0]], dtype=torch.float64)
    for x, k, axis, largest in [(mixed, 8, 1, 1), (mixed, 8, 1, 0), (mixed.repeat(1, 10), 80, 1, 1), (mixed.repeat(1, 10), 80, 1, 0),
                                (rand(2, 90), 5, 1, 1), (rand(70, 3), 4, 0, 0), ((rand(2, 100, 2) * 4).round(), 100, 1, 0)]:
        def ordered(x, _):
            values, indices = x.sort(dim=axis, descending=bool(largest), stable=True)
            return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)

        case("TopK", ordered, [x, ints([k])], opset=11, constants=[1], axis=axis, largest=largest)


def spectrograms():
    """STFT of real and complex signals, with a window that has a gradient too; the bands of mels."""
    def spectrum(length, step, onesided):
        def run(x, _, window=None, length_of=None):
            x = x[..., 0] if x.shape[-1] == 1 else torch.view_as_complex(x)
            window = torch.ones(length, dtype=torch.float64) if window is None else window
            y = torch.stft(x, length, step, window=window, center=False, onesided=bool(onesided), return_complex=True)
            return torch.view_as_real(y).transpose(1, 2)
        return run

    scalar = lambda n: torch.tensor(n, dtype=torch.int64)
    for shape, length, step, onesided, window in [((2, 13, 1), 4, 3, 1, True), ((1, 9, 1), 5, 2, 0, True), ((2, 8, 1), 6, 1, 1, False), ((2, 11, 2), 3, 4, 0, True)]:
        case("STFT", spectrum(length, step, onesided), [rand(*shape), scalar(step), rand(length) if window else None, scalar(length)],
             constants=[1, 3], opset=17, onesided=onesided)
    case("STFT", spectrum(4, 4, 1), [rand(3, 12, 1), scalar(4), rand(4)], constants=[1], opset=17)


def write():
    print("[\n" + ",\n".join(json.dumps(case) for case in CASES) + "\n]")


def main():
    pointwise()
    reductions()
    norms()
    indexing()
    blocks()
    recurrent()
    grids()
    attention()
    arithmetic()
    layers()
    movement()
    older()
    control()
    wider()
    signals()
    # Scale and bias of one number per group.
    wide = lambda t: t.repeat_interleave(2)
    case("GroupNormalization", lambda x, w, b: F.group_norm(x, 2, wide(w), wide(b), 0.25), [rand(2, 4, 3), rand(2), rand(2)],
         opset=18, deprecated=True, num_groups=2, epsilon=0.25)
    orders()
    spectrograms()
    write()


if __name__ == "__main__":
    main()
