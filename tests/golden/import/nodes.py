"""Writes nodes.json: ONNX's own node tests of the operators that dcc imports, small ones, a few of each operator.

    python tests/golden/import/nodes.py

Each case has the model's bytes in hex, the values of its inputs and outputs, and which inputs are part of the program: those
that ONNX passes as shapes, axes, sizes and the like.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
from onnx.backend.test.loader import load_node_model_tests

HERE = Path(__file__).parent
OPERATORS = Path(__file__).parents[3] / "compiler/src/import/ops"
SUPPORTED = {name for file in OPERATORS.glob("*.rs") for name in re.findall(r'\("([A-Z]\w+)", ', file.read_text())} | {"If", "Loop", "Scan"}
DTYPES = {"float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32", "bool": "bool"}
PER_OPERATOR, ELEMENTS = 3, 130
# What has no smaller cases: windows, images, recurrent layers, attention.
MORE_ELEMENTS = 1600
# Not deterministic, or with results that are written to four digits.
SKIPPED = {"Bernoulli", "Dropout", "test_gridsample_bicubic", "test_averagepool_2d_ceil_last_window_starts_on_pad"}
CONSTANT = {
    "AffineGrid": [1], "CenterCropPad": [1], "Col2Im": [1, 2], "Compress": [1], "CumProd": [1], "If": [0], "Loop": [0, 1], "TopK": [1],
    "MelWeightMatrix": [0, 1, 2, 3, 4], "Resize": [1, 2, 3], "STFT": [1, 3], "Upsample": [1], "MaxUnpool": [2],
    "BlackmanWindow": [0], "DFT": [1, 2], "HammingWindow": [0], "HannWindow": [0], "NonZero": [0], "SequenceErase": [1], "SequenceInsert": [2],
    "CumSum": [1], "Expand": [1], "OneHot": [1], "Pad": [1, 2, 3], "Range": [0, 1, 2], "Reshape": [1], "Slice": [1, 2, 3, 4],
    "Split": [1], "Squeeze": [1], "Tile": [1], "Trilu": [1], "Unsqueeze": [1], "ConstantOfShape": [0], "Clip": [1, 2],
}


def encode(value, most):
    array = np.asarray(value)
    dtype = DTYPES.get(str(array.dtype))
    if dtype is None or array.size > most:
        return None
    flat = array.reshape(-1)
    numbers = [float(str(x)) for x in flat] if array.dtype.kind == "f" else flat.astype(np.int64).tolist()
    return {"dtype": dtype, "shape": list(array.shape), "values": [x if math.isfinite(x) else str(x) for x in numbers]}


def add(tests, count, cases, most):
    """Cases of operators that have too few, with up to `most` elements in each tensor."""
    for test in tests:
        nodes = test.model.graph.node if test.model else []
        if len(nodes) != 1 or nodes[0].op_type not in SUPPORTED - SKIPPED or test.name in SKIPPED:
            continue
        op = nodes[0].op_type
        opset = max((o.version for o in test.model.opset_import if o.domain in ("", "ai.onnx")), default=7)
        constant = [1] if op.startswith("Reduce") else CONSTANT.get(op, [])
        try:
            inputs, outputs = ([encode(x, most) for x in values] for values in test.data_sets[0])
        except (TypeError, ValueError):
            continue
        if None in inputs or None in outputs or count[op] >= PER_OPERATOR or opset < 7 or test.name in cases:
            continue
        count[op] += 1
        constants = [nodes[0].input[i] for i in constant if i < len(nodes[0].input) and nodes[0].input[i]]
        cases[test.name] = json.dumps({"name": test.name, "model": test.model.SerializeToString().hex(), "constants": constants,
                                       "inputs": inputs, "outputs": outputs})


def main():
    count, cases = Counter(), {}
    tests = sorted(load_node_model_tests(), key=lambda test: test.name)
    for most in (ELEMENTS, MORE_ELEMENTS):
        add(tests, count, cases, most)
    lines = [cases[name] for name in sorted(cases)]
    (HERE / "nodes.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "cases of", len(count), "operators; none of", sorted(SUPPORTED - set(count)))


main()
