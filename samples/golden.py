"""Reference numbers from PyTorch: trains each case in float32 and float64 and writes tests/golden/numbers/NAME.json.

A case *is* the dcc command: its flags are parsed here and mean what they mean to dcc. Conventions of the numbers:
- Parameters start from `init.py`'s float32 values and data from the files' values; float64 widens both.
- Float32 constants of the ONNX file (epsilons, GELU's coefficients, RoPE's frequencies) are widened, not replaced by better
  ones; everything computed from them, casts to float32 included, is float64. For models up to 1 M parameters the forward
  pass in float64 is checked against the ONNX reference evaluator on the graph itself.
- `controls` are the same runs with one setting changed by 1 %: a comparison that accepts them is too loose.
- `parameters`: sum and l2 norm over all elements, and up to 16 samples: elements floor(k (n-1) / 15), k = 0..15, of the
  flattened tensor of n elements (all of it where n <= 16). Elements whose exact gradient is zero hold rounding noise that
  Adam magnifies: they are listed under `noise` as [start, end) and count as 0 in sums, norms and samples.
- `f32_off`: the largest |f32 - f64| over a parameter's elements. Compare samples with tolerances relative to the tensor's
  largest element, not to each: repeating a case with its batches' rows reversed moves a float64 parameter by < 1e-12 so
  measured, but single elements near zero by up to 5e-8 of themselves.
- `projections`, of models up to 1 M parameters: sums over all elements, each times a number of its own in [-1, 1), by two such
  sequences: 2 frac((i+1) r) - 1 for element i from 0 and r = sqrt(2), sqrt(3), in float64. No element can be off unseen, and none
  can take another's place.
- `gradient`: the same of the first step's gradient before clipping, in float64.

    python samples/golden.py [NAME ...]
"""

import argparse
import contextlib
import json
import logging
import math
import re
import sys
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5LayerNorm

import export
import init
import optimizers

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/golden/numbers"
MLP = "tests/models/mlp.onnx --data tests/models/data/mlp.npz --init-rule *.weight=std:0.1 --global-batch-size 32"
RECURRENT = "tests/models/NAME.onnx --data tests/models/data/mlp.npz --init-rule *weight*=std:0.3 --global-batch-size 32"
CNN = "tests/models/cnn.onnx --data tests/models/data/mlp.npz --init-rule *.weight=std:0.4 --global-batch-size 16"
SAMPLE_MLP = "samples/mlp/model.onnx --data samples/mlp/digits.npz --init-rule *.weight=std:0.04 --global-batch-size 64"
IGNORE = "--data tests/models/data/mlp_ignore.npz --init-rule *.weight=std:0.1 --global-batch-size 32"
GPT2 = "--optimizer adamw --lr 3e-3 --betas 0.9,0.98 --weight-decay 0.1 --grad-clip 0.5 --lr-schedule cosine --warmup 4 --min-lr 3e-4"
TINY = f"--data tests/models/data/gpt2_tiny.npz --global-batch-size 32 {GPT2}"
LLAMA = f"--data tests/models/data/gpt2_tiny.npz --global-batch-size 16 {GPT2}"
TWO = "tests/models/two_inputs.onnx --data tests/models/data/two_inputs.npz" \
      " --input basis=@tests/models/data/two_inputs_basis.npy --init-rule *t.weight=std:0.3 --global-batch-size 8"
ADAM = "--optimizer adam --lr 2e-3 --eps 1e-6"
SGD, ADAMW = "--optimizer sgd --lr 0.02 --momentum 0.9", "--optimizer adamw --lr 2e-3 --eps 1e-6 --weight-decay 0.1"
FAMILY = "--global-batch-size 16 --init-rule *weight*=std:0.3"
IMAGES = f"tests/models/families/NAME.onnx --data tests/models/data/mlp.npz {FAMILY}"
PIXELS = f"tests/models/families/NAME.onnx --data tests/models/data/pixels.npz {FAMILY} --loss cross-entropy"
CASES = {
    "mlp_momentum": f"{MLP} --optimizer sgd --lr 0.05 --momentum 0.9",
    "mlp_nesterov": f"{MLP} --optimizer sgd --lr 0.05 --momentum 0.9 --nesterov --weight-decay 0.01 --lr-schedule step:5:0.5",
    "mlp_adamw": f"{MLP} --optimizer adamw --lr 2e-3 --weight-decay 0.1",
    "mlp_adam": f"{MLP} {ADAM} --weight-decay 0.01 --lr-schedule linear --warmup 4 --min-lr 1e-4 --grad-clip 1",
    "mlp_adagrad": f"{MLP} --optimizer adagrad --lr 0.02 --eps 1e-4 --weight-decay 0.01",
    "mlp_rmsprop": f"{MLP} --optimizer rmsprop --lr 1e-3 --alpha 0.95 --eps 1e-4 --momentum 0.5 --centered",
    "mlp_lion": f"{MLP} --optimizer lion --lr 5e-4 --weight-decay 0.1",
    "mlp_lamb": f"{MLP} --optimizer lamb --lr 0.02 --eps 1e-4 --weight-decay 0.1 --grad-clip 1",
    "mlp_adafactor": f"{MLP} --optimizer adafactor --lr 0.1 --eps 0.02 --weight-decay 0.1",
    "mlp_muon": f"{MLP} --optimizer muon --lr 0.01 --momentum 0.9 --eps 1e-4 --weight-decay 0.1",
    "mlp_legacy": f"{MLP.replace('mlp.onnx', 'mlp_legacy.onnx')} --optimizer adamw --lr 2e-3 --weight-decay 0.1",
    "mlp_legacy_dropout": f"{MLP.replace('mlp.onnx', 'mlp_legacy_dropout.onnx')} --optimizer sgd --lr 0.05 --momentum 0.9",
    "mlp_smoothing": f"tests/models/mlp.onnx {IGNORE} --optimizer adamw --lr 2e-3 --label-smoothing 0.1",
    "mlp_shares": f"{MLP.replace('mlp.npz', 'mlp_shares.npz')} --loss cross-entropy {ADAMW} --label-smoothing 0.1",
    "mlp_sce": f"tests/models/mlp_sce.onnx {IGNORE} --optimizer adamw --lr 2e-3 --weight-decay 0.01",
    "mlp_sce_legacy": f"tests/models/mlp_sce_legacy.onnx {IGNORE} --optimizer adamw --lr 2e-3 --weight-decay 0.01",
    "mlp_nll": f"tests/models/mlp_nll.onnx {IGNORE} --optimizer sgd --lr 0.05 --momentum 0.9",
    "sample_mlp_momentum": f"{SAMPLE_MLP} --optimizer sgd --lr 0.05 --momentum 0.9",
    "sample_mlp_adamw": f"{SAMPLE_MLP} --optimizer adamw --lr 1e-3 --weight-decay 0.01",
    "norm_mlp": f"{MLP.replace('mlp.onnx', 'norm_mlp.onnx')} --optimizer sgd --lr 0.05 --momentum 0.9",
    "norm_mlp_frozen": f"{MLP.replace('mlp.onnx', 'norm_mlp.onnx')} --optimizer adamw --lr 2e-3 --batch-norm frozen"
                       " --init-rule *.running_mean=std:0.3",
    "norm_mlp_legacy": f"{MLP.replace('mlp.onnx', 'norm_mlp_legacy.onnx')} --optimizer adamw --lr 2e-3 --weight-decay 0.1",
    "norm_mlp_groups": f"{MLP.replace('mlp.onnx', 'norm_mlp.onnx')} --optimizer adamw --lr 2e-3 --grad-accum 2 --bn-groups 2",
    "lstm": f"{RECURRENT.replace('NAME', 'lstm')} --optimizer adamw --lr 5e-3 --grad-clip 0.5",
    "lstm_legacy": f"{RECURRENT.replace('NAME', 'lstm_legacy')} --optimizer sgd --lr 0.1 --momentum 0.9",
    "gru_legacy": f"{RECURRENT.replace('NAME', 'gru_legacy')} --optimizer adamw --lr 5e-3 --weight-decay 0.1",
    "gru": f"{RECURRENT.replace('NAME', 'families/gru')} --optimizer adamw --lr 5e-3 --grad-clip 0.5",
    "two_inputs_mse": f"{TWO} --loss mse {ADAM}",
    "two_inputs_l1": f"{TWO} --loss l1 {ADAM}",
    "two_inputs_bce": f"{TWO.replace('inputs.npz', 'inputs_bce.npz')} --loss bce --optimizer sgd --lr 0.05 --momentum 0.9",
    "two_inputs_steps": "tests/models/two_inputs.onnx --data tests/models/data/two_inputs_steps.npz --layout steps --loss mse"
                        f" --init-rule *t.weight=std:0.3 {ADAM} --steps 12",
    "cnn": f"{CNN} --optimizer adamw --lr 1e-2 --eps 1e-6 --weight-decay 0.1",
    "cnn_legacy": f"{CNN.replace('cnn.onnx', 'cnn_legacy.onnx')} --optimizer sgd --lr 0.05 --momentum 0.9 --grad-clip 1",
    "resnet": f"{IMAGES.replace('NAME', 'resnet')} --optimizer sgd --lr 0.005 --momentum 0.9",
    "resnet_legacy": f"{IMAGES.replace('NAME', 'resnet_legacy')} --optimizer sgd --lr 0.005 --momentum 0.9 --grad-clip 1",
    # A smaller eps magnifies the rounding of gradients that are exactly zero: running means further on hold it.
    "mobilenet": f"{IMAGES.replace('NAME', 'mobilenet')} {ADAMW.replace('1e-6', '1e-4')}",
    "mobilenet_legacy": f"{IMAGES.replace('NAME', 'mobilenet_legacy')} {SGD}",
    "efficientnet_legacy": f"{IMAGES.replace('NAME', 'efficientnet_legacy')} --init-rule *squeeze*=std:0.5 {ADAMW}",
    "convnext_legacy": f"{IMAGES.replace('NAME', 'convnext_legacy')} --init-rule *.scale=std:0.5 {SGD}",
    # The older exporter writes the example's batch into the expansion of the class token.
    "vit_legacy": f"{IMAGES.replace('NAME', 'vit_legacy').replace('size 16', 'size 5')} {ADAMW}",
    "efficientnet": f"{IMAGES.replace('NAME', 'efficientnet')} {SGD} --init-rule *squeeze*=std:0.5",
    "convnext": f"{IMAGES.replace('NAME', 'convnext')} --init-rule *.scale=std:0.5 {ADAMW}",
    "vit": f"{IMAGES.replace('NAME', 'vit')} {SGD}",
    "swin": f"{IMAGES.replace('NAME', 'swin')} --init-rule *.bias=std:0.5 {ADAMW}",
    "swin_legacy": f"{IMAGES.replace('NAME', 'swin_legacy')} --init-rule *.bias=std:0.5 {SGD}",
    "unet": f"{PIXELS.replace('NAME', 'unet')} {SGD}",
    "unet_shares": f"{PIXELS.replace('NAME', 'unet').replace('pixels.npz', 'pixels_shares.npz')} {ADAMW}",
    "unet_legacy": f"{PIXELS.replace('NAME', 'unet_legacy')} {ADAMW}",
    "autoencoder": f"tests/models/families/autoencoder.onnx --data tests/models/data/images.npz {FAMILY} --loss mse {ADAMW}",
    "autoencoder_legacy": "tests/models/families/autoencoder_legacy.onnx --data tests/models/data/images.npz"
                          f" {FAMILY} --loss mse {SGD}",
    "moe_legacy": f"tests/models/families/moe_legacy.onnx --data tests/models/data/gpt2_tiny.npz {FAMILY} {ADAMW}"
                  " --init-rule *experts.*=std:0.2",
    "dlrm_legacy": f"tests/models/families/dlrm_legacy.onnx --data tests/models/data/dlrm.npz {FAMILY} --loss bce {SGD}",
    "moe": f"tests/models/families/moe.onnx --data tests/models/data/gpt2_tiny.npz {FAMILY} {SGD}"
           " --init-rule *experts.*=std:0.2",
    "gshard": f"tests/models/families/gshard.onnx --data tests/models/data/gpt2_tiny.npz {FAMILY} {ADAMW}"
              " --init-rule *experts.*=std:0.2",
    "gshard_legacy": f"tests/models/families/gshard_legacy.onnx --data tests/models/data/gpt2_tiny.npz {FAMILY} {SGD}"
                     " --init-rule *experts.*=std:0.2",
    "dlrm": f"tests/models/families/dlrm.onnx --data tests/models/data/dlrm.npz {FAMILY} --loss bce {ADAMW}",
    "two_towers": f"tests/models/families/two_towers.onnx --data tests/models/data/two_towers.npz {FAMILY} --init-rule scale=ones {ADAMW}",
    "two_towers_legacy": "tests/models/families/two_towers_legacy.onnx --data tests/models/data/two_towers.npz"
                         f" {FAMILY} --init-rule scale=ones {SGD}",
    "t5": f"tests/models/families/t5.onnx --data tests/models/data/t5.npz {FAMILY} {SGD}",
    "t5_legacy": f"tests/models/families/t5_legacy.onnx --data tests/models/data/t5.npz {FAMILY} {ADAMW}",
    "gpt2_tiny": f"tests/models/gpt2_tiny.onnx {TINY}",
    "gpt2_tiny_muon": f"tests/models/gpt2_tiny.onnx {TINY} --optimizer muon --lr 2e-3 --muon-scale match-rms-adamw --eps 1e-6",
    "gpt2_tiny_opset20": f"tests/models/gpt2_tiny_opset20.onnx {TINY}",
    "gpt2_tiny_mask": f"tests/models/gpt2_tiny_mask.onnx --input attention_mask=ones {TINY}",
    "gpt2_tiny_legacy": f"tests/models/gpt2_tiny_legacy.onnx --input attention_mask=ones {TINY}",
    "gpt2_tiny_next": "tests/models/gpt2_tiny.onnx --data tests/models/data/gpt2_tiny_next.npz --global-batch-size 8"
                      " --optimizer adamw --lr 3e-3 --weight-decay 0.1 --decay matrices --no-decay *wpe* --freeze *.h.0.ln_1.*",
    "gpt2_tiny_tokens": f"tests/models/gpt2_tiny.onnx --data tests/models/data/gpt2_tiny_tokens.npy --global-batch-size 16 {GPT2}",
    "gpt2_50257": f"tests/models/gpt2_50257.onnx --data tests/models/data/gpt2_50257_tokens.npy --global-batch-size 8 {GPT2}",
    "static_gpt": f"tests/models/static_gpt.onnx --data tests/models/data/gpt2_tiny.npz {GPT2}",
    "llama_tiny": f"tests/models/llama_tiny.onnx --data tests/models/data/gpt2_tiny.npz --global-batch-size 16 {GPT2}",
    "llama_tiny_opset20": f"tests/models/llama_tiny_opset20.onnx {LLAMA}",
    "llama_tiny_opset18": f"tests/models/families/llama_tiny_opset18.onnx --freeze *inv_freq {LLAMA}",
    "bert_tiny": f"tests/models/bert_tiny.onnx --data tests/models/data/bert_tiny.npz --global-batch-size 16 {GPT2}",
    "bert_tiny_opset20": f"tests/models/bert_tiny_opset20.onnx --data tests/models/data/bert_tiny.npz --global-batch-size 16 {GPT2}",
    "bert_tiny_legacy": "tests/models/families/bert_tiny_legacy.onnx --data tests/models/data/bert_tiny.npz --global-batch-size 16"
                        f" {GPT2}",
    "sample_gpt": "samples/gpt/model.onnx --data samples/gpt/tokens.npy --global-batch-size 8 --optimizer adamw --lr 1e-3"
                  " --weight-decay 0.1 --grad-clip 1 --lr-schedule cosine --warmup 10 --min-lr 1e-4 --steps 100",
    "sample_llama": "samples/llama/model.onnx --data samples/gpt/tokens.npy --global-batch-size 8 --optimizer adamw --lr 1e-3"
                    " --weight-decay 0.1 --grad-clip 1 --lr-schedule cosine --warmup 10 --min-lr 1e-4 --steps 100",
    "sample_resnet": "samples/resnet/model.onnx --data samples/mlp/digits.npz --init-rule *conv*.weight=std:0.1"
                     " --init-rule *.down.0.weight=std:0.2 --global-batch-size 64 --optimizer sgd --lr 0.02 --momentum 0.9"
                     " --steps 60",
    "sample_lstm": "samples/lstm/model.onnx --data samples/mlp/digits.npz --init-rule *weight*=std:0.1 --global-batch-size 64"
                   " --optimizer adamw --lr 3e-3 --grad-clip 1 --steps 100",
}
COMMON = "--init 1 --order sequential"


def parse(flags):
    """The flags as contract.md defines them, those that the cases use."""
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("--data", required=True)
    for name, default in (("--optimizer", "adamw"), ("--betas", None), ("--lr-schedule", "constant"), ("--loss", "auto"),
                          ("--layout", "samples"), ("--order", "shuffled"), ("--batch-norm", "batch"), ("--decay", "all"), ("--muon-scale", None)):
        p.add_argument(name, default=default)
    for name, default in (("--lr", 1e-3), ("--momentum", None), ("--eps", None), ("--alpha", None), ("--weight-decay", 0.0), ("--grad-clip", None), ("--dropout", None),
                          ("--min-lr", 0.0), ("--label-smoothing", 0.0)):
        p.add_argument(name, type=float, default=default)
    for name, default in (("--steps", 20), ("--warmup", 0), ("--init", None), ("--global-batch-size", None), ("--grad-accum", 1),
                          ("--bn-groups", 1)):
        p.add_argument(name, type=int, default=default)
    for name in ("--init-rule", "--input", "--no-decay", "--freeze"):
        p.add_argument(name, action="append", default=[])
    p.add_argument("--nesterov", action="store_true")
    p.add_argument("--centered", action="store_true")
    o = p.parse_args(flags)
    o.betas = o.betas and tuple(float(b) for b in o.betas.split(","))
    vars(o).update(optimizers.settings(o.optimizer, vars(o)))
    assert o.order == "sequential"
    return o


def batches(o, module_inputs, model):
    """Step t -> {input: array}, with `labels` or `target`: sequential, wrapping around, an incomplete last batch dropped."""
    raw = np.load(ROOT / o.data)
    if isinstance(raw, np.ndarray):
        length = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
        count = (len(raw) - 1) // length
        window = np.arange(count)[:, None] * length + np.arange(length)
        data = {model.graph.input[0].name: raw[window], "labels": raw[window + 1]}
    else:
        data = dict(raw)
    count = len(next(iter(data.values())))
    size = o.global_batch_size or len(next(iter(module_inputs.values())))
    extra = dict(text.split("=") for text in o.input)

    def batch(t):
        if o.layout == "steps":
            return {k: v[t % count] for k, v in data.items()}
        start = t % (count // size) * size
        rows = {k: v[start:start + size] for k, v in data.items()}
        for name, kind in extra.items():
            rows[name] = np.load(ROOT / kind[1:]) if kind[0] == "@" else np.ones_like(rows["input_ids"])
        return rows

    return batch


def loss_of(o, outputs, rows):
    """The loss by contract.md's rules, for the kinds that the cases use."""
    logits = outputs[0]
    if o.loss in ("mse", "l1", "bce"):
        return {"mse": F.mse_loss, "l1": F.l1_loss, "bce": F.binary_cross_entropy_with_logits}[o.loss](logits, rows["target"])
    if logits.ndim == 0:
        return logits
    if "labels" not in rows:
        logits, labels = logits[:, :-1], rows["input_ids"][:, 1:]
    else:
        labels = rows["labels"]
    if labels.is_floating_point():
        return F.cross_entropy(logits, labels, label_smoothing=o.label_smoothing)
    if logits.shape[:-1] != labels.shape:
        logits = logits.movedim(1, -1)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=o.label_smoothing)


def rate(o, t):
    """The learning rate of step t (from 0)."""
    if t < o.warmup:
        return o.lr * (t + 1) / o.warmup
    kind, p = o.lr_schedule.split(":"), (t - o.warmup) / (o.steps - o.warmup)
    if kind[0] == "step":
        return o.lr * float(kind[2]) ** (t // int(kind[1]))
    return {"constant": o.lr, "linear": o.min_lr + (o.lr - o.min_lr) * (1 - p),
            "cosine": o.min_lr + (o.lr - o.min_lr) * (1 + math.cos(math.pi * p)) / 2}[kind[0]]


class FileGelu(torch.nn.Module):
    """transformers' tanh GELU with its coefficients as the file has them, in float32."""

    def forward(self, x):
        a, b = float(np.float32(math.sqrt(2.0 / math.pi))), float(np.float32(0.044715))
        return 0.5 * x * (1.0 + torch.tanh(a * (x + b * torch.pow(x, 3.0))))


class FileErf(TorchFunctionMode):
    """GELU where the older exporter writes it out: the root of two as the file has it, in float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.gelu:
            return function(*args, **(kwargs or {}))
        return 0.5 * args[0] * (1.0 + torch.erf(args[0] / float(np.float32(math.sqrt(2.0)))))


class FileDropout(torch.nn.Module):
    """With dcc's mask: of each call the numbers of its global elements, for the seed 0 and the step."""

    def __init__(self, share):
        super().__init__()
        self.share, self.step, self.calls = share, 0, 0

    def begin(self, step):
        self.step, self.calls = step, 0

    def forward(self, x):
        block = np.arange(-(-x.numel() // 4), dtype=np.uint64)
        words = init.philox4x32_10([block, 0 * block, 0 * block + self.calls, 0 * block + self.step], (0, 0))
        self.calls += 1
        uniform = (np.stack(words, axis=1).ravel()[:x.numel()] >> np.uint32(8)) * 2.0**-24
        return x * torch.from_numpy(uniform >= np.float32(self.share)).view(x.shape) / (1 - self.share)


def rms_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def rotary(self, x, position_ids):
    angle = torch.cat([position_ids[..., None].to(x.dtype) * self.inv_freq] * 2, dim=-1)
    return angle.cos(), angle.sin()


def as_file(module, model, dtype, change, dropout):
    """Makes the module compute as the ONNX file says, in `dtype`. change: factor for `norm_eps` or `scale`; dropout: the share, None for
    that of the file."""
    scales = [a.f for node in model.graph.node if node.op_type == "Attention" for a in node.attribute if a.name == "scale"]
    calls = any("torch.ops.aten.embedding" in entry.value for node in model.graph.node for entry in node.metadata_props)
    for child in module.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(child, name):
                setattr(child, name, float(np.float32(getattr(child, name))) * change.get("norm_eps", 1))
        if hasattr(child, "scaling"):
            child.scaling = (scales[0] if scales else child.scaling) * change.get("scale", 1)
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
            child.momentum = 1 - float(np.float32(1 - child.momentum))
        if isinstance(child, torch.nn.Embedding) and not calls:
            child.padding_idx = None  # a Gather without its call knows none: every row that is read gets its gradient
        if isinstance(child, NewGELUActivation):
            child.forward = FileGelu().forward
        elif isinstance(child, (LlamaRMSNorm, T5LayerNorm)):
            child.forward = rms_norm.__get__(child)
        elif isinstance(child, LlamaRotaryEmbedding):
            child.forward = rotary.__get__(child)
    module.file_mode = FileErf() if any(node.op_type == "Erf" for node in model.graph.node) else contextlib.nullcontext()
    for name, child in list(module.named_children()):
        if isinstance(child, torch.nn.Dropout) and child.p > 0:
            setattr(module, name, FileDropout(dropout or float(np.float32(child.p))))
    return module.to(dtype)


def prepare(o, dtype, change=()):
    """The module with the case's initial values, its example inputs, the ONNX graph, {ONNX name: parameter}."""
    build, _ = export.graphs()[o.model]
    torch.manual_seed(1)
    module, inputs = build()
    model = onnx.load(ROOT / o.model, load_external_data=False)
    values = init.model_values(model, o.init, o.init_rule)
    buffers = dict(module.named_buffers())
    for t in model.graph.initializer:  # running statistics that the exporter's own pass has moved
        if t.name in buffers and t.name not in values:
            buffers[t.name].copy_(torch.from_numpy(onnx.numpy_helper.to_array(t).copy()))
    init.fill_torch(module, values)
    module = as_file(module, model, dtype, dict(change), o.dropout)
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    kept = values.keys() | {t.name for t in model.graph.initializer if t.name in buffers and buffers[t.name].is_floating_point()}
    return module, inputs, model, {t.name: named[t.name] for t in model.graph.initializer if t.name in kept}


def tensors(rows, dtype):
    """Arrays as torch tensors: floats in `dtype`, integers as int64."""
    return {k: torch.from_numpy(v).to(dtype if v.dtype.kind == "f" else torch.int64) for k, v in rows.items()}


def run_model(module, names, rows):
    with module.file_mode:
        out = module(**{name: rows[name] for name in names})
    return [out.logits] if hasattr(out, "logits") else list(out) if isinstance(out, tuple) else [out]


def dropouts(module):
    return [child for child in module.modules() if isinstance(child, FileDropout)]


def optimizer_of(o, parameters, module):
    """torch.optim with the groups that the decay flags ask for."""
    decays = lambda n, p: (o.decay == "all" or p.ndim >= 2) and not any(fnmatchcase(n, g) for g in o.no_decay)
    groups = [{"params": [p for n, p in parameters.items() if decays(n, p) == on], "weight_decay": o.weight_decay * on}
              for on in (True, False)]
    groups = [g for g in groups if g["params"]]
    tables = [m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    return optimizers.of(o.optimizer, groups, o.lr, vars(o), tables)


def train(o, dtype, change=(), steps=None):
    """Per step loss, gradient norm and rate; the parameters after the last step, the trained ones' first gradients, by name;
    with BatchNorm the loss of all data in evaluation after the last step."""
    module, inputs, model, parameters = prepare(o, dtype, change)
    batch, names, log = batches(o, inputs, model), [i.name for i in model.graph.input], []
    trained = {n: p for n, p in parameters.items() if not any(fnmatchcase(n, g) for g in o.freeze)}
    if o.batch_norm == "frozen":
        for child in module.modules():
            if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
                child.eval()
    for step in range(steps or o.steps):
        rows = tensors(batch(step), dtype)
        for child in dropouts(module):
            child.begin(step + 1)
        module.zero_grad(set_to_none=True)
        loss = 0
        for part in range(o.grad_accum):  # parts of equal counts
            size = o.global_batch_size and o.global_batch_size // o.grad_accum
            some = rows if o.grad_accum == 1 else {k: v[part * size:(part + 1) * size] for k, v in rows.items()}
            part_loss = loss_of(o, run_model(module, names, some), some) / o.grad_accum
            part_loss.backward()
            loss += part_loss.detach()
        if step == 0:
            trained = {n: p for n, p in trained.items() if p.grad is not None}
            optimizer = optimizer_of(o, trained, module)
            first = {n: p.grad.numpy().copy() for n, p in trained.items()}
        clip = o.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(o, step)
        optimizer.step()
        log.append((loss.item(), norm.item(), rate(o, step)))
    final = {n: p.detach().numpy() for n, p in parameters.items()}
    evaluated = None
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        module.eval()
        data = dict(np.load(ROOT / o.data))
        size = o.global_batch_size or 1
        whole = len(next(iter(data.values()))) // size * size  # an incomplete last batch is left out
        rows = tensors({k: v[:whole] for k, v in data.items()}, dtype)
        with torch.no_grad():
            evaluated = loss_of(o, run_model(module, names, rows), rows).item()
    return log, final, first, evaluated


class Gelu(OpRun):
    """The reference evaluator's own goes through an Erf in float32."""

    op_domain = ""
    op_schema = onnx.defs.get_schema("Gelu", 20)

    def _run(self, x, approximate="none"):
        return (F.gelu(torch.from_numpy(x), approximate=approximate).numpy(),)


class Erf(OpRun):
    """In the precision of its operand, unlike the reference evaluator's."""

    op_domain = ""
    op_schema = onnx.defs.get_schema("Erf", 13)

    def _run(self, x):
        return (torch.erf(torch.from_numpy(x)).numpy(),)


def forward_of_graph(o, module, model, rows):
    """Largest relative difference, in the first output, of the module in float64 and the graph with all float32 made float64."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    init.fill_onnx(double, init.model_values(model, o.init, o.init_rule))
    widen = lambda t: onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t).astype(np.float64), t.name)
    for t in double.graph.initializer:
        if t.data_type == onnx.TensorProto.FLOAT:
            t.CopyFrom(widen(t))
    for node in double.graph.node:
        for a in node.attribute:
            if a.name == "to" and a.i == onnx.TensorProto.FLOAT:
                a.i = onnx.TensorProto.DOUBLE
            elif a.type == onnx.AttributeProto.TENSOR and a.t.data_type == onnx.TensorProto.FLOAT:
                a.t.CopyFrom(widen(a.t))
            elif node.op_type == "Constant" and a.name in ("value_float", "value_floats"):
                a.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(
                    np.array(a.f if a.name == "value_float" else list(a.floats), np.float64))))
    del double.graph.value_info[:]
    feed = {i.name: rows[i.name].numpy() for i in model.graph.input}
    trains = any(a.name == "training_mode" and a.i for node in model.graph.node for a in node.attribute)
    module.train(trains)  # BatchNorm is exported in either form
    with torch.no_grad():
        expected = run_model(module, list(feed), rows)[0].numpy()
    return float(np.abs(ReferenceEvaluator(double, new_ops=[Gelu, Erf]).run(None, feed)[0] - expected).max() / np.abs(expected).max())


def noise_of(name, shape):
    """[start, end) of the elements whose exact gradient is zero: attention's key bias (softmax ignores it), a bias before
    BatchNorm."""
    if name.endswith(("attn.c_attn.bias", "qkv.bias")):
        return [shape[0] // 3, 2 * shape[0] // 3]
    return [0, shape[0]] if name.endswith(("attention.self.key.bias", ".k_proj.bias")) or name == "fc.bias" else None


def number(x):
    """Shortest text that reads back: of a float32 its own, not that of the float64 it widens to."""
    return float(str(x)) if isinstance(x, np.float32) else float(x)


def projections(values):
    """Sums that every element is in with a factor of its own."""
    at = np.arange(1, values.size + 1, dtype=np.float64)
    return [float(values @ (2 * np.modf(at * np.sqrt(r))[0] - 1)) for r in (2.0, 3.0)]


def summary(name, f32, f64, gradient, whole):
    """One parameter's entry; gradient: None where it does not train; whole: with projections."""
    out = {"shape": list(f32.shape), "trained": gradient is not None}
    arrays = {"f32": f32.ravel().copy(), "f64": f64.ravel().copy()} | ({} if gradient is None else {"gradient": gradient.ravel()})
    noise, n = noise_of(name, f32.shape), f64.size
    # What a BatchNorm further on takes away; its mean of what has none, but for float32's rounding in the exporter's own pass.
    if gradient is not None and np.abs(gradient).max() < 1e-13 or gradient is None and np.abs(f64).max() < 1e-8:
        noise = [0, n]
    if noise:
        out["noise"] = noise
        for array in arrays.values():
            array[noise[0]:noise[1]] = 0
    out["f32_off"] = float(np.abs(arrays["f32"] - arrays["f64"]).max())
    at = [k * (n - 1) // 15 for k in range(16)] if n > 16 else range(n)
    for key, array in arrays.items():
        wide = array.astype(np.float64)
        out[key] = {"sum": float(wide.sum()), "norm": float(np.linalg.norm(wide)), "samples": [number(array[i]) for i in at]}
        if whole and key != "gradient":
            out[key]["projections"] = projections(wide)
    return out


def controls(o, module):
    """(what, changed flags, changes of the module): one setting off by 1 %."""
    of = optimizers.settings(o.optimizer, vars(o))
    for name in ("momentum", "alpha"):
        if of.get(name):
            yield f"{name} x 0.99", {name: of[name] * 0.99}, {}
    if "eps" in of:
        yield "eps x 1.01", {"eps": o.eps * 1.01}, {}
    if "betas" in of:
        yield "beta2 x 0.99", {"betas": (o.betas[0], o.betas[1] * 0.99)}, {}
    for child in dropouts(module):
        yield "share of dropout x 1.01", {"dropout": child.share * 1.01}, {}
    epsilons = [getattr(m, name) for m in module.modules() for name in ("eps", "variance_epsilon") if hasattr(m, name)]
    # Losses show neither BERT's 1e-12 nor what is beside variances of one.
    if max(epsilons, default=0) > 1e-9 and o.batch_norm != "frozen":
        yield "epsilon of the norms x 1.01", {}, {"norm_eps": 1.01}
    if any(hasattr(m, "scaling") for m in module.modules()):
        yield "scale of attention x 1.01", {}, {"scale": 1.01}


def control(o, change, final64, trained):
    """One control's record, and how far its parameters end from the case's (relative l2, the largest of all)."""
    what, changes, inside = change
    steps = min(o.steps, 20)
    log, final, _, _ = train(argparse.Namespace(**vars(o) | changes), torch.float64, inside, steps)
    text = lambda v: ",".join(repr(x) for x in v) if isinstance(v, tuple) else repr(v)
    flags = [part for key, v in changes.items() for part in (f"--{key}", text(v))]
    distance = lambda n: np.linalg.norm(final[n] - final64[n]) / (np.linalg.norm(final64[n]) or 1)
    seen = [n for n in trained if not noise_of(n, final[n].shape) and np.abs(trained[n]).max() > 1e-13]
    moved = max(map(float, map(distance, seen))) if steps == o.steps else None
    return {"changed": what, "flags": flags, "f64": columns(log, torch.float64)}, moved


def columns(log, dtype):
    convert = np.float32 if dtype == torch.float32 else float
    return {"loss": [number(convert(l)) for l, _, _ in log], "grad_norm": [number(convert(n)) for _, n, _ in log]}


def deviation(a, b):
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def case(name):
    """One golden file, and a line that says how well the controls stand out."""
    flags = f"{CASES[name]} {COMMON}".split()
    if "--steps" not in flags:
        flags += ["--steps", "20"]
    o, start = parse(flags), time.time()
    module, inputs, model, parameters = prepare(o, torch.float64)
    checked, small = None, sum(p.numel() for p in module.parameters()) < 1e6
    if small and not dropouts(module):
        rows = tensors(batches(o, inputs, model)(0), torch.float64)
        checked = forward_of_graph(o, module, model, rows)
        assert checked < 1e-12, (name, checked)
    log32, final32, _, evaluated32 = train(o, torch.float32)
    log64, final64, first, evaluated = train(o, torch.float64)
    f32, f64 = columns(log32, torch.float32), columns(log64, torch.float64)
    off, told = [], []
    for change in controls(o, module):
        record, moved = control(o, change, final64, first)
        off.append(record)
        told.append(f"{change[0]}: {deviation(record['f64']['loss'], f64['loss']):.0e}" + (f"/{moved:.0e}" if moved else ""))
    record = {
        "script": "samples/golden.py", "torch": torch.__version__.split("+")[0], "flags": flags,
        "lr": [r for _, _, r in log64], "f32": f32, "f64": f64, "controls": off,
        "parameters": {n: summary(n, final32[n], final64[n], first.get(n), small) for n in final64},
    }
    if evaluated is not None:
        record["eval_loss"] = evaluated
        record["eval_loss_f32"] = evaluated32
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    OUT.joinpath(f"{name}.json").write_text(compact(text) + "\n")
    graph = f", graph in f64 {checked:.0e}" if checked is not None else ""
    print(f"{name}: loss {f64['loss'][0]:.4f} to {f64['loss'][-1]:.4f}, f32 off by {deviation(f32['loss'], f64['loss']):.0e}{graph}; "
          f"{', '.join(told)}; {time.time() - start:.0f} s", flush=True)


def compact(text):
    """Puts lists of numbers and strings on one line each."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m.group()).replace("[ ", "[").replace(" ]", "]"), text)


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in CASES:
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            case(name)


if __name__ == "__main__":
    main()
