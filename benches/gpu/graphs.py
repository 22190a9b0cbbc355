"""Exports the cases without weights to `models/`, which is committed: machines with a GPU need no exporter.

    python graphs.py [NAME ...]

Parameters take no memory on the way: they are never written, and the graph has references to an absent weights.bin in their place.
"""

import contextlib
import io
import logging
import sys
import warnings
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

import cases
import models

sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))
import export  # of samples/

OPSET = 23
FOLDER = Path(__file__).resolve().parent / "models"


def example(case):
    """Inputs for tracing: two samples."""
    c = case.config
    if case.family == "mlp":
        return {"image": torch.zeros(2, c["widths"][0])}
    if case.family == "resnet":
        return {"image": torch.zeros(2, 3, c["size"], c["size"])}
    ids = torch.zeros(2, c["length"], dtype=torch.int64)
    return {"input_ids": ids} | ({"token_type_ids": ids.clone()} if case.family == "bert" else {})


def graph(case):
    """The model, each parameter a reference into weights.bin."""
    module, inputs = models.module_of(case, "cpu"), example(case)
    batch = torch.export.Dim("batch")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program = torch.onnx.export(module, (), kwargs=inputs, dynamo=True, optimize=False, opset_version=OPSET, verbose=False,
                                    output_names=["logits"], dynamic_shapes={name: {0: batch} for name in inputs})
    named, offset = dict(module.named_parameters(remove_duplicate=False)), 0
    for name, value in program.model.graph.initializers.items():
        if name in named:
            length = 4 * named[name].numel()
            value.const_value = ir.ExternalTensor("weights.bin", offset, length, ir.DataType.FLOAT, name=name,
                                                  shape=ir.Shape(tuple(named[name].shape)))
            offset += -(-length // 64) * 64
    held = {id(named[name]) for name in program.model.graph.initializers if name in named}
    missing = {id(p) for p in named.values()} - held
    assert not missing, f"{len(missing)} parameters are not in the graph by name"
    model = ir.to_proto(program.model)
    export.clean(model, True)
    return model, models.parameters(module)


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or cases.CASES:
        model, (total, met) = graph(cases.CASES[name])
        data = model.SerializeToString(deterministic=True)
        (FOLDER / f"{name}.onnx").write_bytes(data)
        print(f"{name}: {len(model.graph.node)} nodes, {total / 1e6:.1f} M parameters, {met / 1e6:.1f} M of them met, {len(data) // 1000} kB",
              flush=True)


if __name__ == "__main__":
    main()
