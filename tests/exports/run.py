"""Exports of PyTorch, torchvision and transformers models, by both exporters at several opsets: each through `dcc compile`.

    python tests/exports/run.py --dcc target/release/dcc [--only NAME,…] [--specs dynamo20,script17,…] [--steps N] [--keep FOLDER]

Needs torch, torchvision, transformers, onnx and onnxscript; downloads nothing. An export is `ok` where dcc compiles it in time and trains
every parameter that PyTorch's gradient reaches, under its PyTorch name, or warns about what the exporter did to them. It is
`refused` where dcc names what it does not support, and `failed` otherwise, which fails the run. With `--steps` each model also trains that
many steps in float64, from the first of its exports, against PyTorch.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from models import FAMILIES, Positional, make
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# An optimized export loses names and biases; opset 18 and 13 have a symbolic batch.
SPECS = "dynamo18,dynamo18-optimized,dynamo20,dynamo20-optimized,dynamo23,dynamo23-optimized,script13,script17"
SYMBOLIC = (13, 18)
SECONDS, TOLERANCE, RATE = 20, 1e-10, 1e-5


def export(name, spec, folder):
    """The files of a spec by name: the dynamo exporter gives both of its own."""
    model, inputs = make(name)
    opset = int(spec.removeprefix("dynamo").removeprefix("script"))
    path = folder / f"{spec}.onnx"
    if spec.startswith("script"):
        axes = {key: {0: "batch"} for key in inputs} | {"y": {0: "batch"}} if opset in SYMBOLIC else None
        training = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(Positional(model, list(inputs)), tuple(inputs.values()), path, dynamo=False, opset_version=opset,
                          do_constant_folding=False, training=training, input_names=list(inputs), output_names=["y"], dynamic_axes=axes)
        return {spec: path}
    shapes = [{key: {0: torch.export.Dim.DYNAMIC} for key in inputs}] if opset in SYMBOLIC else []
    for dynamic in [*shapes, None]:
        try:
            program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, optimize=False, opset_version=opset, output_names=["y"],
                                        dynamic_shapes=dynamic, verbose=False)
            break
        except Exception as error:
            if not dynamic:
                raise RuntimeError(error.__cause__ or error) from error
    program.save(path)
    program.optimize()
    program.save(folder / f"{spec}-optimized.onnx")
    return {spec: path, f"{spec}-optimized": folder / f"{spec}-optimized.onnx"}


def seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def call(command):
    """Exit code, standard output, seconds of CPU, and the error as two lines in one."""
    start = seconds_of_children()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    error = next((i for i, line in enumerate(lines) if line.startswith("error") or "panicked" in line), None)
    what = " ".join(line.strip() for line in lines[error : error + 2]) if error is not None else f"exit {done.returncode}"
    return done.returncode, done.stdout, seconds_of_children() - start, what


@contextlib.contextmanager
def quiet():
    """What the exporters print, from C++ too, goes nowhere."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        for here, fd in zip(kept, (1, 2)):
            os.dup2(here, fd)
            os.close(here)


def batch_flags(path, inputs):
    """Of a symbolic export the batch, and where its inputs have a symbol each, that all of them count samples."""
    graph = onnx.load(path, load_external_data=False).graph
    symbols = {value.name: value.type.tensor_type.shape.dim[0].dim_param for value in graph.input}
    if not any(symbols.values()):
        return []
    named = [flag for name in symbols for flag in ("--batch-dim", f"{name}=0")]
    return ["--global-batch-size", len(next(iter(inputs.values()))), *(named if len(set(symbols.values())) > 1 else [])]


def expected(name):
    """Names and elements of each parameter that a gradient reaches, and the names of what PyTorch keeps constant: no exporter tells what
    needs no gradient, the older one not even buffers."""
    model, inputs = make(name)
    model(**inputs).sum().backward()
    parameters = dict(model.named_parameters())
    frozen = [key for key, value in parameters.items() if not value.requires_grad]
    frozen += [key for key, value in model.named_buffers() if value.is_floating_point()]
    tied = {}
    for key, value in model.named_parameters(remove_duplicate=False):
        tied.setdefault(value, set()).add(key)
    return [(tied[value], value.numel()) for value in parameters.values() if value.grad is not None], frozen


def elements(path):
    """Of each tensor of a file."""
    graph = onnx.load(path, load_external_data=False).graph
    found = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    constants = [(node.output[0], a.t) for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    return {**found, **{key: math.prod(tensor.dims) for key, tensor in constants}}


def check(dcc, path, inputs, wanted, frozen):
    """`ok`, `refused` or `failed`, a line about it, and what dcc trains."""
    command = [dcc, "compile", path, "--loss", "mse", "--json", "-o", path.with_suffix(".dcc"), *batch_flags(path, inputs)]
    code, report, seconds, what = call(command)
    if code:
        bug = code in (1, 101) or code < 0 or "DCC100" in what
        return "failed" if bug or "not support" not in what else "refused", what, []
    report = json.loads(report)
    trained, aliases = set(report["trained"]) - set(frozen), report["aliases"]
    sizes = {**{name: size for tied, size in wanted for name in tied}, **elements(path)}
    names = {*trained, *(alias for one in trained for alias in aliases.get(one, []))}
    missing = sorted(min(tied) for tied, _ in wanted if not tied & names)
    surplus = sum(sizes.get(one, 0) for one in trained) - sum(size for _, size in wanted)
    told = [line for line in report["warnings"] if "held constant" not in line]
    line = f"{len(wanted) - len(missing)} of {len(wanted)} parameters, {seconds:.1f} s"
    line += f", missing {', '.join(missing[:4])}" * bool(missing) + f", elements {surplus:+}" * (surplus != 0)
    line += "".join(f" | {warning}" for warning in report["warnings"])
    return "failed" if seconds > SECONDS or (missing or surplus) and not told else "ok", line, report["trained"]


def train(dcc, name, path, folder, steps, freeze):
    """A few steps of SGD in float64 against PyTorch's; the largest relative difference of a loss."""
    model, inputs = make(name)
    model.double()
    batch = len(next(iter(inputs.values())))
    generator = torch.Generator().manual_seed(1)
    draw = lambda like: torch.randn(like.shape, generator=generator) if like.is_floating_point() else like.roll(1, 0)
    rows = {key: torch.cat([value, *(draw(value) for _ in range(steps - 1))]) for key, value in inputs.items()}
    with torch.no_grad():
        like = make(name)[0].double()(**{key: widened(value) for key, value in inputs.items()})
    rows["target"] = torch.randn(steps * batch, *like.shape[1:], generator=generator)
    np.savez(folder / "data.npz", **{key: value.numpy() for key, value in rows.items()})
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(steps):
        part = {key: widened(value[step * batch : (step + 1) * batch]) for key, value in rows.items()}
        target = part.pop("target")
        with AsFile():
            loss = F.mse_loss(model(**part), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    metrics = folder / "metrics.jsonl"
    command = [dcc, "run", path, "--data", folder / "data.npz", "--loss", "mse", "--steps", steps, "--order", "sequential",
               "--dtype", "f64", "--optimizer", "sgd", "--lr", RATE, "--metrics-file", metrics, *batch_flags(path, inputs)]
    command += [flag for one in freeze for flag in ("--freeze", one)]
    code, _, _, what = call(command)
    if code:
        return "failed", what
    found = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
    return "ok" if worst < TOLERANCE else "failed", f"{steps} steps, losses {losses[0]:.6f} → {losses[-1]:.6f}, differ by {worst:.1e}"


class AsFile(TorchFunctionMode):
    """Numbers in the code are as the file has them, in single precision; what casts to that stays in double, as in dcc."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*(as_file(value) for value in args), **{key: as_file(value) for key, value in (kwargs or {}).items()})


def as_file(value):
    if isinstance(value, float):
        return float(np.float32(value))
    return torch.float64 if value is torch.float32 else value


def widened(value):
    return value.double() if value.is_floating_point() else value


def family(args, name, folder):
    """Verdicts of all exports of a model."""
    _, inputs = make(name)
    wanted, frozen = expected(name)
    specs = args.specs.split(",")
    verdicts, first = [], None
    for spec in dict.fromkeys(spec.removesuffix("-optimized") for spec in specs):
        try:
            with quiet():
                files = export(name, spec, folder)
        except Exception as error:
            print(f"no file  {name:12} {spec:18} {' '.join(str(error).split())[:160]}", flush=True)
            continue
        for spec, path in files.items():
            if spec not in specs:
                continue
            verdict, line, trained = check(args.dcc, path, inputs, wanted, frozen)
            verdicts.append((spec, verdict, line))
            first = first or (path, [one for one in frozen if one in trained])
            print(f"{verdict:8} {name:12} {spec:18} {line}", flush=True)
    if first and args.steps:
        path, freeze = first
        verdict, line = train(args.dcc, name, path, folder, args.steps, freeze)
        verdicts.append(("training", verdict, line))
        print(f"{verdict:8} {name:12} {'training':18} {line}", flush=True)
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcc", default="target/release/dcc")
    parser.add_argument("--only", default=",".join(FAMILIES), help="names of models.py")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the exports here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    verdicts = []
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.keep / name if args.keep else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            verdicts += family(args, name, folder)
    for spec in dict.fromkeys(spec for spec, *_ in verdicts):
        counts = [verdict for other, verdict, _ in verdicts if other == spec]
        print(f"{spec:18} " + ", ".join(f"{counts.count(verdict)} {verdict}" for verdict in ("ok", "refused", "failed")))
    sys.exit(any(verdict == "failed" for _, verdict, _ in verdicts))


main()
