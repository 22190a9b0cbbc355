"""Reference losses of mixed precision: trains each case with PyTorch in float32 and under torch.autocast; tests/golden/autocast/NAME.json.

A case *is* the dcc command, as in golden.py, whose conventions hold. The forward pass runs under `torch.autocast("cpu", dtype)`, the
loss is taken of the outputs in float32 (as autocast does on GPUs, where cross_entropy is of its float32 list), parameters, gradients
and AdamW are float32; float16 with `torch.amp.GradScaler`. What a test compares is the mean over steps of
|loss - float32 loss|: rounding makes two runs differ, but a good one does not differ more than PyTorch's. Runs of hundreds of steps part
by chance too, so `sample_gpt` is trained from several initial values and the mean is over all of them.

    python samples/autocast.py [NAME ...]
"""

import contextlib
import json
import logging
import math
import sys
import time
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import golden

OUT = golden.ROOT / "tests/golden/autocast"
GPT = golden.CASES["sample_gpt"].replace("--steps 100", "--steps 200")
CASES = {
    "gpt2_tiny": f"tests/models/gpt2_tiny.onnx {golden.TINY} --steps 200",
    "cnn": f"{golden.CNN} --optimizer sgd --lr 0.02 --momentum 0.9 --steps 100",
    "sample_gpt": GPT,
}
# Initial values, instead of those of the flags alone.
SEEDS = {"sample_gpt": [1, 2, 3, 4, 5]}
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
# PyTorch has no fast products of float16 on CPUs: hours for this one, whose products are made by `WideProducts`.
SLOW = {("sample_gpt", "f16")}
# Where the scale starts, if not at 2^16: PyTorch skips steps of sample_gpt from there on, and is then a step or two behind.
SCALE = {"sample_gpt": 2.0**13}

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


class WideProducts(TorchDispatchMode):
    """Matrix products of float16 as those of the same numbers in float32, rounded: float16 products that accumulate in float32. The
    first eight losses of sample_gpt are within 4e-6 of those by PyTorch's own products."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        half = any(isinstance(a, torch.Tensor) and a.dtype == torch.float16 for a in args)
        if func not in PRODUCTS or not half:
            return func(*args, **(kwargs or {}))
        return func(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **(kwargs or {})).half()


def train(o, dtype, scale=2.0**16):
    """Losses; under autocast where `dtype` is a half type. Also what GradScaler's scale is after the last step."""
    module, inputs, model, parameters = golden.prepare(o, torch.float32)
    batch, names = golden.batches(o, inputs, model), [i.name for i in model.graph.input]
    optimizer, scaler = golden.optimizer_of(o, parameters, module), torch.amp.GradScaler("cpu", scale, enabled=dtype == torch.float16)
    losses = []
    for step in range(o.steps):
        rows = golden.tensors(batch(step), torch.float32)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            outputs = golden.run_model(module, names, rows)
        loss = golden.loss_of(o, [output.float() for output in outputs], rows)
        scaler.scale(loss).backward()
        for group in optimizer.param_groups:
            group["lr"] = golden.rate(o, step)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters.values(), o.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        losses.append(golden.number(torch.tensor(loss.item()).numpy()[()]))
    return losses, scaler.get_scale()


def gradients(o):
    """By half type and parameter: how far the gradient under autocast is from float32's, over the norm of the latter; of the first
    batch and the initial weights. Losses of two runs drift apart by chance; this does not."""
    module, inputs, model, parameters = golden.prepare(o, torch.float32)
    rows = golden.tensors(golden.batches(o, inputs, model)(0), torch.float32)
    names, scale, found = [i.name for i in model.graph.input], 2.0**13, {}
    for key, dtype in ({"f32": torch.float32} | HALVES).items():
        module.zero_grad(set_to_none=True)
        with WideProducts(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            outputs = golden.run_model(module, names, rows)
        with WideProducts():
            (scale * golden.loss_of(o, [output.float() for output in outputs], rows)).backward()
        found[key] = {name: parameter.grad.double() / scale for name, parameter in parameters.items()}
    off = lambda key, name: ((found[key][name] - found["f32"][name]).norm() / found["f32"][name].norm()).item()
    return {key: {name: float(f"{off(key, name):.3g}") for name in sorted(parameters)} for key in HALVES}


def case(name):
    flags, start = f"{CASES[name]} {golden.COMMON}".split(), time.time()
    at = flags.index("--init") + 1
    seeds = SEEDS.get(name, [int(flags[at])])
    record = {"script": "samples/autocast.py", "torch": torch.__version__.split("+")[0], "flags": flags, "seeds": seeds}
    record["gradients"] = gradients(golden.parse(flags))
    if name in SCALE:
        record["loss_scale"] = SCALE[name]
    OUT.mkdir(parents=True, exist_ok=True)
    for key, dtype in ({"f32": torch.float32} | HALVES).items():
        record[key] = []
        for seed, exact in zip(seeds, record["f32"] or [None] * len(seeds)):
            o = golden.parse(flags[:at] + [str(seed)] + flags[at + 1 :])
            with WideProducts() if (name, key) in SLOW else contextlib.nullcontext():
                losses, scale = train(o, dtype, SCALE.get(name, 2.0**16))
            record[key].append(losses)
            off = sum(abs(a - b) for a, b in zip(losses, exact or losses)) / o.steps
            told = f"{key} off by {off:.2e}" + (f", scale {scale:.0f}" if key == "f16" else "")
            print(f"{name}, seed {seed}: {told}; {time.time() - start:.0f} s", flush=True)
    OUT.joinpath(f"{name}.json").write_text(golden.compact(json.dumps(record, indent=1)) + "\n")


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in CASES:
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            case(name)


if __name__ == "__main__":
    main()
