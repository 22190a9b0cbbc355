"""Exports the cases and writes what `stored.py` lists. Runs in the torch environment; the graph serves dcc and onnxruntime alike.

    python prepare.py FOLDER CASE
"""

import contextlib
import io
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxscript.optimizer
import torch

import cases
import graphs
import stored

import export  # of samples/, which graphs makes importable
import init

OPSET = 20  # the newest that onnxruntime-training 1.19 and the exporter share, with GELU as one operator


def batch_rows(case):
    """{input: rows}: pixels and tokens at random, a part of the labels ignored where masked words are guessed."""
    rng, c, count = np.random.default_rng(case.batch), case.config, case.batch * cases.BATCHES
    if case.family == "mlp":
        return {"image": rng.random((count, c["widths"][0]), np.float32), "labels": rng.integers(0, c["widths"][-1], count)}
    if not case.is_text:
        image = rng.standard_normal((count, 3, c["size"], c["size"]), np.float32)
        return {"image": image, "labels": rng.integers(0, c["classes"], count)}
    tokens = rng.integers(0, c["vocab"], (count, c["length"] + 1))
    if case.family != "bert":
        return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
    ids = tokens[:, :-1].copy()
    ends, at = rng.integers(3 * c["length"] // 4, c["length"] + 1, (count, 1)), np.arange(c["length"])
    guessed = (rng.random(ids.shape) < 0.15) & (at < ends)
    labels = np.where(guessed, ids, cases.IGNORED)
    return {"input_ids": np.where(guessed, 103, ids), "attention_mask": (at < ends).astype(np.int64),
            "token_type_ids": np.tile(at >= c["length"] // 2, (count, 1)).astype(np.int64), "labels": labels}


def folded(model, values):
    """The same graph for onnxruntime-training: constants folded, sequences of pieces as Split (both by onnxscript), powers as products
    (the trainer would else fuse GELU's cube into an operator whose gradient takes longer)."""
    held = [t for t in model.graph.initializer if t.name in values]
    rest, make = [t for t in model.graph.initializer if t.name not in values], onnx.helper
    model.graph.input.extend(make.make_tensor_value_info(t.name, t.data_type, t.dims) for t in held)
    del model.graph.initializer[:]
    model.graph.initializer.extend(rest)
    model = onnxscript.optimizer.optimize(model)
    inputs = [v for v in model.graph.input if v.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    scalars = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if not t.dims}
    scalars |= {n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node
                if n.op_type == "Constant" and n.attribute[0].name == "value"}
    model.graph.initializer.extend(held)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Pow" and scalars.get(node.input[1]) == 3:
            x, y = node.input[0], node.output[0]
            nodes += [make.make_node("Mul", [x, x], [y + ".square"]), make.make_node("Mul", [y + ".square", x], [y])]
        else:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    folder, case = Path(sys.argv[1]), cases.CASES[sys.argv[2]]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "batches.npz", **batch_rows(case))
    batch = {name: torch.from_numpy(rows) for name, rows in stored.batches(folder)[0].items() if name != "labels"}
    module = graphs.module_of(case)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model = export.export(module, batch, opset=OPSET, static=True)
    export.clean(model, False)
    named = dict(module.named_parameters(remove_duplicate=False))
    export.strip(model, [t.name for t in model.graph.initializer if t.name in named])
    values = init.model_values(model, cases.SEED, case.rules)
    missing = {id(p) for p in named.values()} - {id(named[name]) for name in values}
    assert not missing, f"{len(missing)} parameters are not in the graph by name"
    stored.write_weights(folder, values)
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    (folder / "ort.onnx").write_bytes(folded(model, values).SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
