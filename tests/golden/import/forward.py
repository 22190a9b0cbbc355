"""Writes forward.json: what onnxruntime computes for the test graphs, with weights and inputs by formula.

    python tests/golden/import/forward.py

Element i of the tensor NAME without data is 0.4 u - 0.2 (plus 1 for gains of norms), u = (i * 2654435761 + fnv1a64(NAME)) mod
2^32 / 2^32. Element i of an integer input is (7 i + 3) mod 13, of `token_type_ids` i mod 2, of `attention_mask` 0 in the last
two columns of every second row, else 1; of a float input as of a tensor. Of each output 24 elements spread evenly are kept.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "samples"))
from init import fill_onnx, fnv1a64, gains  # noqa: E402

BATCH = 4
SKIPPED = {"gpt2_124m", "gpt2_50257", "gpt3_175b", "gpt2_tiny_dropout", "mlp_legacy_dropout"}


def fill(name, shape, offset):
    i = np.arange(int(np.prod(shape)), dtype=np.uint64)
    u = ((i * np.uint64(2654435761) + np.uint64(fnv1a64(name) % 2**32)) % np.uint64(2**32)).astype(np.float64) / 2**32
    return (0.4 * u - 0.2 + offset).reshape(shape).astype(np.float32)


def feed(info):
    shape = [d.dim_value or BATCH for d in info.type.tensor_type.shape.dim]
    i = np.arange(int(np.prod(shape)), dtype=np.int64)
    if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
        return fill(info.name, shape, 0.0)
    if info.name == "attention_mask":
        row, column = i // shape[1], i % shape[1]
        return np.where((row % 2 == 1) & (column >= shape[1] - 2), 0, 1).reshape(shape)
    return (i % 2 if info.name == "token_type_ids" else (7 * i + 3) % (10 if info.name == "labels" else 13)).reshape(shape)


def main():
    found = {}
    for path in sorted([*(ROOT / "tests/models").glob("*.onnx"), *(ROOT / "tests/models/attention").glob("*.onnx")]):
        if path.stem in SKIPPED:
            continue
        model = onnx.load(path, load_external_data=False)
        gain = gains(model.graph)
        fill_onnx(model, {t.name: fill(t.name, tuple(t.dims), float(t.name in gain and len(t.dims) == 1))
                          for t in model.graph.initializer if t.data_location == 1})
        session = onnxruntime.InferenceSession(model.SerializeToString())
        values = session.run(None, {i.name: feed(i) for i in model.graph.input})
        found[path.stem] = {}
        for output, value in zip(model.graph.output, values):
            flat = value.astype(np.float64).reshape(-1)
            kept = flat[:: max(1, len(flat) // 24)][:24]
            found[path.stem][output.name] = {"shape": list(value.shape), "values": [round(float(x), 8) for x in kept]}
        print(path.stem, file=sys.stderr)
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(outputs)}" for name, outputs in found.items())
    (Path(__file__).parent / "forward.json").write_text("{\n" + text + "\n}\n")


main()
