"""Exports of PyTorch, torchvision and transformers models, by both exporters at several opsets, through `dcc compile` and `dcc run`.

    python tests/exports/run.py --dcc target/release/dcc [--only NAME,…] [--specs dynamo20,script17,…] [--steps N]
        [--least SPEC=N,…] [--keep FOLDER]

Needs torch, torchvision, transformers, onnx, onnxscript and safetensors; downloads nothing. An export is `ok` where dcc compiles it in
time and trains exactly the parameters that PyTorch's gradient reaches, under their PyTorch names; each that is missing, and each that
trains besides, must be named in a warning. It is `refused` where dcc names what it does not support, and `failed` otherwise, which fails the
run, as do fewer that are `ok` than --least says (an export that PyTorch cannot make counts as none).

With `--steps` each model also trains that many steps in float64 against PyTorch, from the first whole export of either exporter and from the
first optimised one: losses, gradient norms and every final tensor, running statistics included, to 1e-9; a rate off by 1 % must be seen.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import resource
import shutil
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
from safetensors.numpy import load_file
from torch.overrides import TorchFunctionMode

# An optimized export loses names and biases; opset 18 and 13 have a symbolic batch.
SPECS = "dynamo18,dynamo18-optimized,dynamo20,dynamo20-optimized,dynamo23,dynamo23-optimized,script13,script17"
SYMBOLIC = (13, 18)
# Smaller tensors are compared as if this were their size: their exact values are zero.
SECONDS, TOLERANCE, LEAST_SCALE = 20, 1e-9, 1e-3
# No exporter tells parameters that need no gradient from others, the older one no buffers; most of these are known by their names.
UNTOLD = {"model.final_logits_bias"}
# So bounded, a step moves weights visibly and never far, whatever the scale of the loss.
RATE, MOMENTUM, CLIP = 0.05, 0.9, 0.05


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
    """Names and elements of each parameter that a gradient reaches, and the names of parameters that need none and of buffers."""
    model, inputs = make(name)
    model(**inputs).sum().backward()
    parameters = dict(model.named_parameters())
    frozen = [key for key, value in parameters.items() if not value.requires_grad]
    buffers = [key for key, value in model.named_buffers() if value.is_floating_point()]
    tied = {}
    for key, value in model.named_parameters(remove_duplicate=False):
        tied.setdefault(value, set()).add(key)
    return [(tied[value], value.numel()) for value in parameters.values() if value.grad is not None], frozen, buffers


def elements(path):
    """Of each tensor of a file."""
    graph = onnx.load(path, load_external_data=False).graph
    found = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    constants = [(node.output[0], a.t) for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    return {**found, **{key: math.prod(tensor.dims) for key, tensor in constants}}


def check(dcc, path, inputs, wanted, frozen, buffers):
    """`ok`, `refused` or `failed`, a line about it, and where it is `ok`, `Export`."""
    command = [dcc, "compile", path, "--loss", "mse", "--json", "-o", path.with_suffix(".dcc"), *batch_flags(path, inputs)]
    code, report, seconds, what = call(command)
    if code:
        bug = code in (1, 101) or code < 0 or "DCC100" in what
        return "failed" if bug or "not support" not in what else "refused", what, None
    report = json.loads(report)
    known = {name: {name, *report["aliases"].get(name, [])} for name in report["trained"]}
    told = lambda names: any(f"`{name}`" in warning for warning in report["warnings"] for name in names)
    missing = [tied for tied, _ in wanted if not any(tied & names for names in known.values())]
    parameters = set().union(*(tied for tied, _ in wanted))
    besides = [names for names in known.values() if not names & parameters]
    untold = UNTOLD | set(frozen) if path.stem.startswith("script") else set(frozen)
    silent = [min(names) for names in missing + besides if not told(names) and not names & untold]
    sizes = {**{name: size for tied, size in wanted for name in tied}, **elements(path)}
    surplus = sum(sizes.get(one, 0) for one in report["trained"]) - sum(size for _, size in wanted)
    line = f"{len(wanted) - len(missing)} of {len(wanted)} parameters, {seconds:.1f} s" + f", elements {surplus:+}" * (surplus != 0)
    for what, some in (("missing", [min(names) for names in missing]), ("besides", [min(names) for names in besides]), ("UNTOLD", silent)):
        line += f", {what} {', '.join(some[:4])}" * bool(some)
    line += "".join(f" | {warning[:300]}" for warning in report["warnings"])
    if seconds > SECONDS or silent or surplus and not missing + besides:
        return "failed", line, None
    freeze = [min(names) for names in besides if names & {*frozen, *buffers}]
    whole = not missing and len(freeze) == len(besides)
    return "ok", line, Export(path, freeze, report["aliases"]) if whole else None


@dataclasses.dataclass
class Export:
    """A file that has all parameters."""

    path: Path
    # What trains besides unless it is told not to.
    freeze: list
    # Names of PyTorch by those of the file.
    aliases: dict


def reference(name, folder, steps, export):
    """Losses, gradient norms and final tensors of a few steps of SGD in float64 as the file says; the data are in `folder`."""
    model, inputs = make(name)
    model.double()
    for child in model.modules():
        if isinstance(child, torch.nn.Embedding) and export.path.stem.startswith("script"):
            child.padding_idx = None  # a Gather without its call knows none
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and child.momentum is not None:
            child.momentum = 1 - float(np.float32(1 - child.momentum))
    batch = len(next(iter(inputs.values())))
    generator = torch.Generator().manual_seed(1)
    draw = lambda like: torch.randn(like.shape, generator=generator) if like.is_floating_point() else like.roll(1, 0)
    rows = {key: torch.cat([value, *(draw(value) for _ in range(steps - 1))]) for key, value in inputs.items()}
    with torch.no_grad():
        like = make(name)[0].double()(**{key: widened(value) for key, value in inputs.items()})
    rows["target"] = torch.randn(steps * batch, *like.shape[1:], generator=generator)
    np.savez(folder / "data.npz", **{key: value.numpy() for key, value in rows.items()})
    graph = onnx.load(export.path).graph
    buffers = dict(model.named_buffers())
    for tensor in graph.initializer:  # running statistics that the older exporter's own pass has moved
        if tensor.name in buffers:
            buffers[tensor.name].copy_(torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()))
    optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), [], []
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for step in range(steps):
        part = {key: widened(value[step * batch : (step + 1) * batch]) for key, value in rows.items()}
        target = part.pop("target")
        with AsFile(graph):
            loss = F.mse_loss(model(**part), target)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    final = {key: value.numpy() for key, value in model.state_dict().items() if value.is_floating_point()}
    moved = max(difference(final[key], start[key].numpy()) for key, _ in model.named_parameters())
    return losses, norms, final, moved


def difference(found, exact):
    return float(np.abs(found - exact).max()) / max(float(np.abs(exact).max()), LEAST_SCALE) if exact.size else 0.0


def nearest(found, exact, is_alias):
    """How far a tensor of the file is from PyTorch's; under another name it may be transposed."""
    turned = [found.T] if is_alias or found.shape != exact.shape else []
    return min((difference(one, exact) for one in [found, *turned] if one.shape == exact.shape), default=math.inf)


def train(dcc, export, folder, inputs, wanted, rate=RATE):
    """The largest difference of a run from PyTorch's, relatively, and what differs so; or the error."""
    losses, norms, final, _ = wanted
    metrics, saved, weights = folder / "metrics.jsonl", folder / "saved", folder / "final.safetensors"
    shutil.rmtree(saved, ignore_errors=True)
    metrics.unlink(missing_ok=True)
    command = [dcc, "run", export.path, "--data", folder / "data.npz", "--loss", "mse", "--steps", len(losses), "--order", "sequential",
               "--dtype", "f64", "--optimizer", "sgd", "--momentum", MOMENTUM, "--grad-clip", CLIP, "--lr", rate,
               "--metrics-file", metrics, "--save-dir", saved, *batch_flags(export.path, inputs)]
    command += [flag for one in export.freeze for flag in ("--freeze", one)]
    for words in (command, [dcc, "export", saved, "--safetensors", weights]):
        code, _, _, what = call(words)
        if code:
            return math.inf, what
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [(abs(line[key] - exact) / abs(exact), key) for key, all_of in (("loss", losses), ("grad_norm", norms))
             for line, exact in zip(lines, all_of, strict=True)]
    tensors = load_file(weights)
    named = {alias: one for one in tensors for alias in export.aliases.get(one, [])} | {one: one for one in tensors}
    for key, exact in final.items():
        if key in named:
            found.append((nearest(tensors[named[key]], exact, named[key] != key), key))
        elif "running_" in key:
            return math.inf, f"no final {key}"
    count = sum(key in named for key in final)
    return (*max(found), f"{count} final tensors")


class AsFile(TorchFunctionMode):
    """Numbers in the code are as the file has them, in single precision but for the few that an exporter writes in double (the older one
    the scale of attention); what casts to single precision stays in double, as in dcc."""

    def __init__(self, graph):
        super().__init__()
        self.spells_gelu = any(node.op_type == "Erf" for node in graph.node)
        constants = [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
        numbers = [onnx.numpy_helper.to_array(one) for one in [*constants, *graph.initializer] if math.prod(one.dims) == 1]
        self.doubles = {float(one.item()) for one in numbers if one.dtype == np.float64}
        self.singles = {float(one.item()) for one in numbers if one.dtype == np.float32}
        self.attention = F.scaled_dot_product_attention

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        if function is F.gelu and self.spells_gelu and (kwargs or {}).get("approximate", "none") == "none":
            return 0.5 * args[0] * (1.0 + torch.erf(args[0] / float(np.float32(math.sqrt(2.0)))))
        return function(*(self.of(value) for value in args), **{key: self.of(value) for key, value in (kwargs or {}).items()})

    def __enter__(self):
        F.scaled_dot_product_attention = self.scaled  # for the functions of F that call it, which no mode sees inside
        return super().__enter__()

    def __exit__(self, *error):
        F.scaled_dot_product_attention = self.attention
        return super().__exit__(*error)

    def scaled(self, query, *args, scale=None, **kwargs):
        """Attention whose scale, where the exporter has folded it, is the square of a number of the file."""
        exact = query.shape[-1] ** -0.5 if scale is None else scale
        folded = [one * one for one in self.singles if abs(one * one / exact - 1) < 1e-6]
        return self.attention(query, *args, scale=folded[0] if folded else scale, **kwargs)

    def of(self, value):
        if isinstance(value, float) and value not in self.doubles:
            return float(np.float32(value))
        return torch.float64 if value is torch.float32 else value


def widened(value):
    return value.double() if value.is_floating_point() else value


def family(args, name, folder):
    """Verdicts of all exports of a model."""
    _, inputs = make(name)
    wanted, frozen, buffers = expected(name)
    specs = args.specs.split(",")
    verdicts, whole = [], {}
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
            verdict, line, export_of = check(args.dcc, path, inputs, wanted, frozen, buffers)
            verdicts.append((spec, verdict, line))
            kind = spec.rstrip("0123456789") if spec.startswith("script") else "dynamo" + "-optimized" * spec.endswith("-optimized")
            whole |= {kind: export_of} if export_of and kind not in whole else {}
            print(f"{verdict:8} {name:12} {spec:18} {line}", flush=True)
    for kind, export_of in whole.items() if args.steps else ():
        exact = reference(name, folder, args.steps, export_of)
        worst, what, *count = train(args.dcc, export_of, folder, inputs, exact)
        verdict, spec = "ok" if worst < TOLERANCE else "failed", f"train {kind}"
        line = f"{args.steps} steps, {', '.join(count)} moved by up to {exact[3]:.0e}: off by {worst:.1e} in {what}"
        if verdict == "ok" and kind == next(iter(whole)):
            control, what, *_ = train(args.dcc, export_of, folder, inputs, exact, RATE * 1.01)
            verdict = "ok" if control > TOLERANCE else "failed"
            line += f"; with a rate 1 % higher by {control:.1e} in {what}"
        verdicts.append((spec, verdict, line))
        print(f"{verdict:8} {name:12} {spec:18} {line}", flush=True)
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcc", default="target/release/dcc")
    parser.add_argument("--only", default=",".join(FAMILIES), help="names of models.py")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--least", default="", help="SPEC=N: fail where fewer exports of SPEC (or runs of `train KIND`) are ok")
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
    failed = any(verdict == "failed" for _, verdict, _ in verdicts)
    least = dict(pair.split("=") for pair in args.least.split(",") if pair)
    for spec in dict.fromkeys([*(spec for spec, *_ in verdicts), *least]):
        counts = [verdict for other, verdict, _ in verdicts if other == spec]
        few = counts.count("ok") < int(least.get(spec, 0))
        failed |= few
        print(f"{spec:22} " + ", ".join(f"{counts.count(verdict)} {verdict}" for verdict in ("ok", "refused", "failed"))
              + f": MISSED, at least {least.get(spec)} were" * few)
    sys.exit(failed)


main()
