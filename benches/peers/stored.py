"""What all programs read: a folder for each case with the graph, its initial weights and the batches. Needs numpy only.

model.onnx        the graph, weights not inside, for dcc, which fills them by the same rule
weights.npy       the weights one after the other, float32; weights.json: {ONNX name: [offset, shape]}
batches.npz       {input: BATCHES x batch rows}, with `labels`, integers
ort.onnx          the same for onnxruntime-training, see `prepare.py`
ort/              its artifacts, or refused.txt with its message
"""

import json
from pathlib import Path

import numpy as np

from cases import BATCHES


def weights(folder):
    """{ONNX name: array}, views of the mapped file: a program pays for its copies alone."""
    flat = np.load(Path(folder) / "weights.npy", mmap_mode="r")
    index = json.loads((Path(folder) / "weights.json").read_text())
    return {name: flat[at:at + int(np.prod(shape))].reshape(shape) for name, (at, shape) in index.items()}


def write_weights(folder, values):
    """values: {ONNX name: float32 array}."""
    index, at = {}, 0
    for name, array in values.items():
        index[name] = at, array.shape
        at += array.size
    flat = np.lib.format.open_memmap(folder / "weights.npy", "w+", np.float32, (at,))
    for name, array in values.items():
        flat[index[name][0]:index[name][0] + array.size] = array.ravel()
    flat.flush()
    (folder / "weights.json").write_text(json.dumps(index))


def batches(folder):
    """The batches, each {input: array}."""
    data = dict(np.load(Path(folder) / "batches.npz"))
    return [{name: np.split(rows, BATCHES)[t] for name, rows in data.items()} for t in range(BATCHES)]
