"""Writes windows.json: ONNX convolutions and pools with results and gradients of PyTorch float64.

    python tests/golden/import/windows.py                               # torch 2.15, onnx 1.23

Each case: the model's bytes in hex, its inputs by name, the result, and the gradient of sum(result * cos(0, 1, 2, ...)) for each.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

CASES = []


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encode(t):
    return {"dtype": "f64", "shape": list(t.shape), "values": t.reshape(-1).tolist()}


def case(name, op, function, attributes, opset=20, constants={}, **inputs):
    leaves = {k: v.clone().requires_grad_() for k, v in inputs.items()}
    result = function(**leaves)
    weights = torch.arange(result.numel(), dtype=torch.float64).cos().reshape(result.shape)
    (result * weights).sum().backward()
    info = lambda n, t: helper.make_tensor_value_info(n, TensorProto.DOUBLE, list(t.shape))
    names = [*inputs, "", "", "sizes"] if constants else list(inputs)
    node = helper.make_node(op, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", [info(n, t) for n, t in inputs.items()], [info("y", result)], list(constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    CASES.append({"name": name, "model": model.SerializeToString().hex(), "inputs": {k: encode(v) for k, v in inputs.items()},
                  "result": encode(result.detach()), "gradients": {k: encode(v.grad) for k, v in leaves.items()}})


def conv(name, x, w, stride, pad, dilation, groups=1, bias=False, pads=None, opset=20, **extra):
    """`pads`: of both ends where they differ; PyTorch then pads before."""
    dims = len(x) - 2
    inputs = {"x": values(1, *x), "w": values(2, *w)} | ({"b": values(3, w[0])} if bias else {})
    ends = pads or [*pad, *pad]
    around = [e for d in reversed(range(dims)) for e in (ends[d], ends[d + dims])]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    attributes = dict(strides=stride, pads=ends, dilations=dilation, group=groups) | extra
    if "auto_pad" in extra:
        del attributes["pads"]
    case(name, "Conv", lambda x, w, b=None: function(F.pad(x, around), w, b, stride, 0, dilation, groups), attributes, opset, **inputs)


def transposed(name, x, w, stride, pad, extra, dilation, groups=1, bias=False):
    dims = len(x) - 2
    inputs = {"x": values(1, *x), "w": values(2, *w)} | ({"b": values(3, w[1] * groups)} if bias else {})
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    attributes = dict(strides=stride, pads=[*pad, *pad], output_padding=extra, dilations=dilation, group=groups)
    case(name, "ConvTranspose", lambda x, w, b=None: function(x, w, b, stride, pad, extra, groups, dilation), attributes, **inputs)


def max_pool(name, x, kernel, stride, pad, dilation, ceil=False):
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    attributes = dict(kernel_shape=kernel, strides=stride, pads=[*pad, *pad], dilations=dilation, ceil_mode=int(ceil))
    case(name, "MaxPool", lambda x: function(x, kernel, stride, pad, dilation, ceil), attributes, x=x)


def avg_pool(name, x, kernel, stride, pad, ceil=False, include=False):
    function = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(kernel)]
    attributes = dict(kernel_shape=kernel, strides=stride, pads=[*pad, *pad], ceil_mode=int(ceil), count_include_pad=int(include))
    case(name, "AveragePool", lambda x: function(x, kernel, stride, pad, ceil, include), attributes, x=x)


def lp_pool(name, x, p, kernel, stride):
    """A sum without the scale of PyTorch's own, which is the same where every window is full."""
    function = {1: F.avg_pool1d, 2: F.avg_pool2d}[len(kernel)]
    count = torch.tensor(kernel).prod()
    case(name, "LpPool", lambda x: (function(x.abs() ** p, kernel, stride) * count) ** (1 / p),
         dict(kernel_shape=kernel, strides=stride, p=p), x=x)



def resize(name, x, mode, to, attributes, align=False, **kw):
    """Scales and sizes as PyTorch's exporter gives them: sizes."""
    sizes = helper.make_tensor("sizes", TensorProto.INT64, [len(x)], [*x[:2], *to])
    case(name, "Resize", lambda x: F.interpolate(x, to, mode=mode, align_corners=align or None, **kw), attributes,
         constants={"sizes": sizes}, x=values(30, *x))


conv("conv1d", (2, 3, 9), (4, 3, 3), [2], [1], [1], bias=True)
conv("conv1d_dilated", (2, 4, 11), (6, 2, 3), [1], [2], [3], groups=2)
conv("conv2d", (2, 3, 6, 5), (4, 3, 3, 2), [1, 2], [1, 0], [1, 1], bias=True, opset=7)
conv("conv2d_pointwise", (2, 3, 4, 5), (6, 3, 1, 1), [1, 1], [0, 0], [1, 1], bias=True)
conv("conv2d_pointwise_strided", (2, 3, 5, 5), (4, 3, 1, 1), [2, 2], [0, 0], [1, 1])
conv("conv2d_depthwise", (2, 4, 6, 6), (4, 1, 3, 3), [2, 2], [1, 1], [1, 1], groups=4, bias=True)
conv("conv2d_multiplier", (2, 3, 5, 4), (6, 1, 2, 2), [1, 1], [0, 0], [1, 2], groups=3)
conv("conv2d_uneven_pads", (1, 2, 5, 5), (3, 2, 3, 3), [2, 1], [0, 0], [1, 1], pads=[0, 2, 1, 1])
conv("conv2d_same_upper", (1, 2, 5, 6), (3, 2, 2, 4), [2, 1], [0, 0], [1, 1], pads=[0, 1, 1, 2], auto_pad="SAME_UPPER")
conv("conv2d_same_lower", (1, 2, 5, 6), (3, 2, 2, 4), [2, 1], [0, 0], [1, 1], pads=[1, 2, 0, 1], auto_pad="SAME_LOWER")
conv("conv3d", (1, 2, 4, 3, 5), (4, 1, 2, 3, 2), [1, 1, 2], [1, 1, 0], [2, 1, 1], groups=2, bias=True)
transposed("transpose1d", (2, 3, 4), (3, 2, 3), [2], [1], [1], [1], bias=True)
transposed("transpose2d", (1, 4, 3, 4), (4, 3, 2, 3), [2, 3], [0, 1], [0, 1], [2, 1], groups=2, bias=True)
transposed("transpose2d_depthwise", (2, 3, 4, 3), (3, 1, 4, 2), [2, 2], [1, 0], [0, 0], [1, 1], groups=3)
transposed("transpose3d", (1, 2, 2, 3, 2), (2, 3, 2, 2, 2), [2, 1, 1], [0, 0, 1], [0, 0, 0], [1, 2, 1])
ties = lambda seed, *shape: values(seed, *shape).round()
max_pool("max1d", ties(4, 2, 3, 9), [3], [2], [1], [1])
max_pool("max2d", ties(5, 2, 2, 6, 7), [3, 2], [2, 3], [1, 0], [1, 2], ceil=True)
max_pool("max2d_overlapping", values(6, 1, 3, 6, 6), [3, 3], [1, 1], [1, 1], [1, 1])
max_pool("max3d", ties(7, 1, 2, 4, 5, 6), [2, 3, 2], [2, 1, 2], [0, 1, 1], [1, 1, 2])
avg_pool("avg1d", values(8, 2, 3, 9), [3], [2], [1])
avg_pool("avg2d", values(9, 2, 2, 6, 7), [3, 2], [2, 3], [1, 1], ceil=True)
avg_pool("avg2d_with_pads", values(10, 2, 2, 6, 7), [3, 2], [2, 3], [1, 1], ceil=True, include=True)
avg_pool("avg2d_plain", values(11, 2, 3, 6, 4), [2, 2], [2, 2], [0, 0])
avg_pool("avg3d", values(12, 1, 2, 4, 5, 3), [2, 3, 3], [1, 2, 1], [1, 0, 1], include=True)
max_pool("max2d_beyond", ties(31, 2, 2, 3, 4), [3, 7], [7, 5], [1, 3], [3, 1], ceil=True)
avg_pool("avg2d_beyond", values(32, 2, 3, 3, 3), [7, 7], [7, 7], [0, 0], ceil=True)
avg_pool("avg2d_beyond_pads", values(33, 1, 2, 3, 4), [7, 8], [4, 5], [1, 0], ceil=True)
avg_pool("avg2d_beyond_with_pads", values(34, 1, 2, 3, 4), [7, 8], [4, 5], [1, 2], ceil=True, include=True)
case("lp2d_beyond", "LpPool", lambda x: (x ** 2).sum((2, 3), keepdim=True).sqrt(),
     dict(kernel_shape=[7, 5], strides=[5, 3], p=2, ceil_mode=1), x=values(35, 2, 2, 3, 4))
lp_pool("lp1d", values(13, 2, 3, 9), 1, [3], [2])
lp_pool("lp2d", values(14, 2, 2, 6, 7), 2, [3, 2], [2, 2])
lp_pool("lp2d_cubes", values(15, 1, 2, 5, 5), 3, [2, 2], [1, 1])
case("global_avg", "GlobalAveragePool", lambda x: F.adaptive_avg_pool2d(x, 1), {}, x=values(16, 2, 3, 4, 5))
case("global_avg1d", "GlobalAveragePool", lambda x: F.adaptive_avg_pool1d(x, 1), {}, x=values(17, 2, 3, 6))
case("global_avg3d", "GlobalAveragePool", lambda x: F.adaptive_avg_pool3d(x, 1), {}, x=values(18, 2, 3, 2, 3, 4))
case("global_max", "GlobalMaxPool", lambda x: F.adaptive_max_pool2d(x, 1), {}, x=ties(19, 2, 3, 4, 5))
case("global_max1d", "GlobalMaxPool", lambda x: F.adaptive_max_pool1d(x, 1), {}, x=ties(20, 2, 3, 6))
case("global_max3d", "GlobalMaxPool", lambda x: F.adaptive_max_pool3d(x, 1), {}, x=ties(21, 2, 3, 2, 3, 4))
for p, shape in ((1, (2, 3, 6)), (2, (2, 3, 4, 5)), (3, (1, 2, 3, 2, 2))):
    axes = tuple(range(2, len(shape)))
    case(f"global_lp{p}", "GlobalLpPool", lambda x: (x.abs() ** p).sum(axes, keepdim=True) ** (1 / p), dict(p=p), x=values(21 + p, *shape))

half, corners = dict(coordinate_transformation_mode="pytorch_half_pixel"), dict(coordinate_transformation_mode="align_corners")
floor = dict(coordinate_transformation_mode="asymmetric", nearest_mode="floor", mode="nearest")
resize("nearest1d", (2, 3, 5), "nearest", (10,), floor)
resize("nearest2d", (1, 2, 4, 6), "nearest", (7, 4), floor)
resize("nearest3d", (1, 2, 2, 3, 2), "nearest", (4, 6, 4), floor)
middle = floor | dict(coordinate_transformation_mode="tf_half_pixel_for_nn")
resize("nearest_exact1d", (2, 3, 5), "nearest-exact", (8,), middle)
resize("nearest_exact2d", (1, 2, 4, 7), "nearest-exact", (7, 3), middle)
resize("linear1d", (2, 3, 5), "linear", (8,), half | dict(mode="linear"))
resize("bilinear", (1, 2, 4, 5), "bilinear", (8, 10), half | dict(mode="linear"))
resize("bilinear_corners", (1, 2, 4, 5), "bilinear", (7, 3), corners | dict(mode="linear"), align=True)
resize("bilinear_antialiased", (1, 2, 6, 7), "bilinear", (3, 4), half | dict(mode="linear", antialias=1, exclude_outside=1), antialias=True)
resize("bicubic", (1, 2, 4, 5), "bicubic", (7, 8), half | dict(mode="cubic", cubic_coeff_a=-0.75))
resize("bicubic_corners", (1, 2, 4, 5), "bicubic", (6, 4), corners | dict(mode="cubic", cubic_coeff_a=-0.75), align=True)
resize("trilinear", (1, 2, 2, 3, 2), "trilinear", (3, 5, 4), half | dict(mode="linear"))

lines = ",\n".join(json.dumps(body) for body in CASES)
(Path(__file__).parent / "windows.json").write_text(f"[\n{lines}\n]\n")
