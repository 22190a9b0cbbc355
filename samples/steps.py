"""Reference numbers of compiler/src/train/tests.rs: 20 steps of small models in float64, and controls with one setting off by 1 %.

The models are built by hand on both sides. Element i of tensor k starts as 0.4 sin(0.7 i + k); of input k at step t,
sin(1.3 i + k + 0.37 t). Writes tests/golden/steps.json.

    python samples/steps.py
"""

import json
from pathlib import Path

import optimizers
import torch
from torch.nn import functional as F

OUT = Path(__file__).resolve().parent.parent / "tests/golden/steps.json"
B, I, H, C, T = 6, 5, 7, 4, 8
CASES = {
    "sgd_momentum": dict(loss="cross-entropy", optimizer="sgd", lr=0.1, momentum=0.9),
    "sgd_nesterov_l2": dict(loss="mse", optimizer="sgd", lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.02),
    "sgd_plain_clip": dict(loss="l1", optimizer="sgd", lr=0.1, grad_clip=0.2),
    "adam_l2_clip": dict(loss="bce", optimizer="adam", lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, grad_clip=0.1),
    "adamw": dict(loss="cross-entropy", optimizer="adamw", lr=0.02, weight_decay=0.1, label_smoothing=0.1),
    "adamw_matrices": dict(loss="mse", optimizer="adamw", lr=0.02, weight_decay=0.3, decay="matrices", grad_clip=0.3),
    "adagrad": dict(loss="mse", optimizer="adagrad", lr=0.05, eps=1e-3, weight_decay=0.02),
    "rmsprop": dict(loss="cross-entropy", optimizer="rmsprop", lr=0.01, alpha=0.9, eps=1e-5, weight_decay=0.02),
    "rmsprop_centered": dict(loss="mse", optimizer="rmsprop", lr=0.005, momentum=0.8, centered=True, eps=1e-4, grad_clip=0.3),
    "lion": dict(loss="cross-entropy", optimizer="lion", lr=0.003, betas=(0.8, 0.95), weight_decay=0.3),
    "lamb": dict(loss="mse", optimizer="lamb", lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, grad_clip=0.3),
    "lamb_tied": dict(loss="next-token", optimizer="lamb", lr=0.02, weight_decay=0.1),
    "adafactor": dict(loss="cross-entropy", optimizer="adafactor", lr=0.3, eps=0.2, weight_decay=0.1),
    "adafactor_tied": dict(loss="next-token", optimizer="adafactor", lr=0.02),
    "muon": dict(loss="mse", optimizer="muon", lr=0.02, momentum=0.9, weight_decay=0.1),
    "muon_tied": dict(loss="next-token", optimizer="muon", lr=0.01, muon_scale="match-rms-adamw", eps=1e-4, grad_clip=0.02),
    "next_token_tied": dict(loss="next-token", optimizer="adamw", lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, grad_clip=0.02),
}
SETTINGS = ("lr", "momentum", "alpha", "eps", "weight_decay", "grad_clip", "label_smoothing")


def wave(shape, scale, rate, start):
    n = int(torch.Size(shape).numel())
    return (scale * torch.sin(rate * torch.arange(n, dtype=torch.float64) + start)).reshape(shape)


def labels(t):
    """Class of sample i at step t; every fifth is ignored."""
    i = torch.arange(B) + t
    return torch.where(i % 5 == 0, -100, (i * i) % C)


def tokens(t):
    i = torch.arange(B * T).reshape(B, T)
    return (i * i + 3 * i + t) % C


def parameters(loss):
    shapes = [(C, H), (H, H)] if loss == "next-token" else [(I, H), (H,), (H, C), (C,)]
    return [wave(s, 0.4, 0.7, k).requires_grad_() for k, s in enumerate(shapes)]


def loss_of(case, w, t):
    kind = case["loss"]
    if kind == "next-token":
        logits = torch.tanh(w[0][tokens(t)] @ w[1]) @ w[0].T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens(t)[:, 1:].flatten())
    y = torch.tanh(wave((B, I), 1, 1.3, 0.37 * t) @ w[0] + w[1]) @ w[2] + w[3]
    if kind == "cross-entropy":
        return F.cross_entropy(y, labels(t), label_smoothing=case.get("label_smoothing", 0.0))
    target = wave((B, C), 1, 1.3, 1 + 0.37 * t)
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(y, (target > 0).double())
    return {"mse": F.mse_loss, "l1": F.l1_loss}[kind](y, target)


def optimizer(case, w):
    decay = case.get("weight_decay", 0.0)
    groups = [{"params": [p], "weight_decay": 0.0 if case.get("decay") == "matrices" and p.ndim < 2 else decay} for p in w]
    return optimizers.of(case["optimizer"], groups, case["lr"], case, w[:1] if case["loss"] == "next-token" else ())


def run(case):
    w = parameters(case["loss"])
    step = optimizer(case, w)
    losses, norms = [], []
    for t in range(20):
        step.zero_grad()
        loss = loss_of(case, w, t)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(w, case.get("grad_clip", float("inf")))
        step.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {"loss": losses, "grad_norm": norms, "weights": [p.detach().flatten().tolist() for p in w]}


def main():
    out = {"script": "samples/steps.py", "torch": torch.__version__.split("+")[0], "cases": {}}
    for name, case in CASES.items():
        controls = {s: run({**case, s: case[s] * 1.01})["loss"][-1] for s in SETTINGS if s in case}
        out["cases"][name] = {"options": case, **run(case), "controls": controls}
    text = json.dumps(out)
    for key in ('"cases"', '"loss": [', '"grad_norm"', '"weights"', '"controls"', *(f'"{name}"' for name in CASES)):
        text = text.replace(key, "\n" + key)
    OUT.write_text(text + "\n")


main()
