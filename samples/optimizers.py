"""Optimizers of the reference scripts: those of torch.optim by name, and two that it has not, after their papers.

    of("lamb", groups, lr, {"eps": 1e-6})
"""

import torch
from torch.optim import _muon


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, arXiv 2302.06675."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in (p for p in group["params"] if p.grad is not None):
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                update = torch.sign(beta1 * m + (1 - beta1) * w.grad)
                w.sub_(group["lr"] * (update + group["weight_decay"] * w))
                m.mul_(beta2).add_(w.grad, alpha=1 - beta2)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, arXiv 1904.00962, with the identity as its phi; a ratio of a norm that is zero is 1."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in (p for p in group["params"] if p.grad is not None):
                state = self.state[w]
                state["t"] = t = state.get("t", 0) + 1
                m = state.setdefault("m", torch.zeros_like(w)).mul_(beta1).add_(w.grad, alpha=1 - beta1)
                v = state.setdefault("v", torch.zeros_like(w)).mul_(beta2).addcmul_(w.grad, w.grad, value=1 - beta2)
                r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * w
                above, below = w.norm().item(), r.norm().item()
                w.sub_(group["lr"] * (above / below if above > 0 and below > 0 else 1.0) * r)


def orthogonal(matrix, coefficients, steps, eps):
    """torch.optim's iteration in the matrix's own dtype, where that of PyTorch is always in bfloat16."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


_muon._zeropower_via_newtonschulz = orthogonal


class Muon:
    """torch.optim.Muon for matrices but `tables`, AdamW for everything else, at one rate."""

    def __init__(self, groups, lr, momentum=0.95, muon_scale="original", betas=(0.9, 0.999), eps=1e-8, tables=()):
        tables = {id(p) for p in tables}
        split = lambda matrix: [
            {"params": chosen, "weight_decay": g.get("weight_decay", 0.0)}
            for g in groups if (chosen := [p for p in g["params"] if (p.ndim == 2 and id(p) not in tables) == matrix])
        ]
        matrices, rest = split(True), split(False)
        scale = muon_scale.replace("-", "_")
        self.all = [torch.optim.Muon(matrices, lr, momentum=momentum, adjust_lr_fn=scale)] if matrices else []
        self.all += [torch.optim.AdamW(rest, lr, betas=betas, eps=eps)] if rest else []
        self.param_groups = [g for o in self.all for g in o.param_groups]

    def zero_grad(self):
        for o in self.all:
            o.zero_grad()

    def step(self):
        for o in self.all:
            o.step()


def adafactor(groups, lr, eps):
    return torch.optim.Adafactor(groups, lr, eps=(None, eps))


# By the name of `--optimizer`: what makes it, and its settings with their defaults.
ADAM = dict(betas=(0.9, 0.999), eps=1e-8)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(momentum=0.0, nesterov=False)),
    "adam": (torch.optim.Adam, ADAM),
    "adamw": (torch.optim.AdamW, ADAM),
    "adagrad": (torch.optim.Adagrad, dict(eps=1e-10)),
    "rmsprop": (torch.optim.RMSprop, dict(alpha=0.99, eps=1e-8, momentum=0.0, centered=False)),
    "lion": (Lion, dict(betas=(0.9, 0.99))),
    "lamb": (Lamb, dict(betas=(0.9, 0.999), eps=1e-6)),
    "adafactor": (adafactor, dict(eps=1e-3)),
    "muon": (Muon, dict(momentum=0.95, muon_scale="original", **ADAM)),
}


def settings(name, given):
    """Of the optimizer `name`: those of `given` that it has, else its defaults."""
    return {k: default if given.get(k) is None else given[k] for k, default in OPTIMIZERS[name][1].items()}


def of(name, groups, lr, given, tables=()):
    """The optimizer `name` of parameter groups with a weight decay each; `tables` are those that rows are looked up in."""
    extra = {"tables": tables} if name == "muon" else {}
    return OPTIMIZERS[name][0](groups, lr=lr, **settings(name, given), **extra)
