"""Reference outputs and gradients from PyTorch: writes tests/golden/eval/NAME.json, which `dcc eval` must reproduce.

A case is a model of this repository with `init.py`'s weights of seed 1 and inputs by a formula that the test repeats: element i of a
float input is ((i * 37 + 11) mod 101) / 50 - 1, of an integer input (i * 37 + 11) mod its `modulus`; a mask's modulus 1 means ones.
Recorded are the module's outputs by their ONNX names in float32 and float64, and of one loss its value and gradients in float64,
each summarised as golden.py summarises parameters.

    python samples/forward.py [NAME ...]
"""

import json
import sys

import numpy as np
import onnx
import torch

import golden

OUT = golden.ROOT / "tests/golden/eval"
# name: model, its init rules, shapes of its inputs with their modulus, the loss and the modulus of its labels
CASES = {
    "mlp": ("tests/models/mlp.onnx", ["*.weight=std:0.1"], {"image": ([5, 64], None)}, "cross-entropy", 10),
    "gpt2_tiny": ("tests/models/gpt2_tiny.onnx", [], {"input_ids": ([3, 16], 211)}, "next-token", None),
    "llama_tiny": ("tests/models/llama_tiny.onnx", [], {"input_ids": ([2, 16], 211)}, "next-token", None),
    "bert_tiny": ("tests/models/bert_tiny.onnx", [], {"input_ids": ([2, 16], 211), "attention_mask": ([2, 16], 1),
                                                     "token_type_ids": ([2, 16], 2)}, "cross-entropy", 211),
    "two_inputs": ("tests/models/two_inputs.onnx", ["*t.weight=std:0.3"], {"a": ([4, 12], None), "b": ([4, 5], None), "basis": ([24, 24], None)},
                   "mse", None),
}


def values(shape, modulus):
    i = np.arange(int(np.prod(shape)), dtype=np.int64) * 37 + 11
    flat = (i % 101) / 50 - 1 if modulus is None else np.ones_like(i) if modulus == 1 else i % modulus
    return flat.reshape(shape).astype(np.float32 if modulus is None else np.int64)


def case(name):
    path, rules, shapes, loss, classes = CASES[name]
    o = golden.parse([path, "--data", "-", "--init", "1", "--order", "sequential", "--loss", loss]
                     + [word for rule in rules for word in ("--init-rule", rule)])
    results = {}
    for dtype in (torch.float32, torch.float64):
        module, inputs, model, parameters = golden.prepare(o, dtype)
        names, outputs = [i.name for i in model.graph.input], [x.name for x in model.graph.output]
        rows = golden.tensors({n: values(*shapes[n]) for n in names}, dtype)
        found = golden.run_model(module, names, rows)
        extra = {}
        if loss == "cross-entropy":
            extra["labels"] = (list(found[0].shape[:-1]), classes)
        elif loss == "mse":
            extra["target"] = (list(found[0].shape), None)
        rows |= golden.tensors({n: values(*x) for n, x in extra.items()}, dtype)
        value = golden.loss_of(o, found, rows)
        value.backward()
        results[dtype] = found, value, parameters
    (single, _, _), (double, value, parameters) = results[torch.float32], results[torch.float64]
    numpy = lambda x: x.detach().numpy()
    record = {
        "script": "samples/forward.py", "torch": torch.__version__.split("+")[0], "model": path,
        "flags": ["--init", "1"] + [word for rule in rules for word in ("--init-rule", rule)],
        "inputs": {n: {"shape": s, "modulus": m} for n, (s, m) in (shapes | extra).items()},
        "outputs": {n: golden.summary(n, numpy(a), numpy(b), None) for n, a, b in zip(outputs, single, double, strict=True)},
        "loss_kind": loss, "loss": value.item(),
        "gradients": {n: golden.summary(n, numpy(p.grad), numpy(p.grad), None)
                      for n, p in parameters.items() if p.grad is not None},
    }
    OUT.mkdir(parents=True, exist_ok=True)
    OUT.joinpath(f"{name}.json").write_text(golden.compact(json.dumps(record, indent=1)) + "\n")
    print(f"{name}: {len(outputs)} outputs, {loss} {value.item():.6f}, {len(record['gradients'])} gradients")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or CASES:
        case(name)
