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
# Not deterministic, or with results that are written to four digits.
SKIPPED = {"Dropout", "test_gridsample_bicubic"}
CONSTANT = {
    "AffineGrid": [1], "CenterCropPad": [1], "Col2Im": [1, 2], "Compress": [1], "CumProd": [1], "If": [0], "Loop": [0, 1], "TopK": [1],
    "CumSum": [1], "Expand": [1], "OneHot": [1], "Pad": [1, 2, 3], "Range": [0, 1, 2], "Reshape": [1], "Slice": [1, 2, 3, 4],
    "Split": [1], "Squeeze": [1], "Tile": [1], "Trilu": [1], "Unsqueeze": [1], "ConstantOfShape": [0], "Clip": [1, 2],
}


def encode(value):
    array = np.asarray(value)
    dtype = DTYPES.get(str(array.dtype))
    if dtype is None or array.size > ELEMENTS:
        return None
    flat = array.reshape(-1)
    numbers = [float(str(x)) for x in flat] if array.dtype.kind == "f" else flat.astype(np.int64).tolist()
    return {"dtype": dtype, "shape": list(array.shape), "values": [x if math.isfinite(x) else str(x) for x in numbers]}


def main():
    count, lines = Counter(), []
    for test in sorted(load_node_model_tests(), key=lambda test: test.name):
        nodes = test.model.graph.node if test.model else []
        if len(nodes) != 1 or nodes[0].op_type not in SUPPORTED - SKIPPED or test.name in SKIPPED:
            continue
        op = nodes[0].op_type
        opset = max(o.version for o in test.model.opset_import)
        constant = [1] if op.startswith("Reduce") else CONSTANT.get(op, [])
        try:
            inputs, outputs = ([encode(x) for x in values] for values in test.data_sets[0])
        except (TypeError, ValueError):
            continue
        if None in inputs or None in outputs or count[op] == PER_OPERATOR or opset < 7:
            continue
        count[op] += 1
        constants = [nodes[0].input[i] for i in constant if i < len(nodes[0].input) and nodes[0].input[i]]
        case = {"name": test.name, "model": test.model.SerializeToString().hex(), "constants": constants,
                "inputs": inputs, "outputs": outputs}
        lines.append(json.dumps(case))
    (HERE / "nodes.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "cases of", len(count), "operators; none of", sorted(SUPPORTED - set(count)))


main()
