"""Small modules of which PyTorch's exporters damage the parameters, as exported, and how they train in PyTorch.

Writes `tests/models/damage/NAME_EXPORTER.onnx` with weights inside, `NAME.npz` with the data of 5 steps beside them, and the losses of
these steps by SGD at 0.05 in float64 into `tests/golden/import/damage.json`. Norms and biases are as fresh modules have them: equal.

    python samples/damage.py
"""

import contextlib
import io
import json
import logging
import warnings

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

from export import ROOT, clean

STEPS, BATCH, RATE = 5, 6, 0.05
DYNAMO, KEPT, TRAIN, EVAL = "dynamo", "kept", "train", "eval"


class Module(nn.Module):
    """Layers by name, and what is computed of them."""

    def __init__(self, forward, buffers={}, parameters={}, **layers):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.computed = forward

    def forward(self, x):
        return self.computed(self, x)


# In single precision, as the files have it, what it is in double.
EPS = 2.0**-17


def norms(of, **kw):
    """Two linear layers, each between norms."""
    forward = lambda m, x: m.c(m.o(m.b(m.m(m.a(m.n(x))))))
    return Module(forward, n=of(8, eps=EPS), a=nn.Linear(8, 8), m=of(8, eps=EPS), b=nn.Linear(8, 8), o=of(8, eps=EPS, **kw), c=nn.Linear(8, 4))


def pre_activation():
    forward = lambda m, x: m.b(F.relu(m.n(m.a(F.relu(m.m(x.transpose(1, 2)))).transpose(1, 2)))).mean(1)
    return Module(forward, m=nn.BatchNorm1d(8, EPS), a=nn.Conv1d(8, 8, 1, bias=False), n=nn.LayerNorm(8, EPS), b=nn.Linear(8, 4))


def images(norm, other):
    forward = lambda m, x: m.fc((m.m(m.b(F.relu(m.n(m.a(x))))) ** 2).flatten(1)[:, :24])
    return Module(forward, a=nn.Conv2d(3, 6, 3), n=norm, b=nn.Conv2d(6, 6, 3), m=other, fc=nn.Linear(24, 4))


def tied(read):
    forward = lambda m, x: read(F.relu(m.fc(m.emb(x))) + m.emb(x), m.emb.weight)
    return Module(forward, emb=nn.Embedding(13, 8), fc=nn.Linear(8, 8))


def gammas():
    forward = lambda m, x: m.c((x + m.g * m.a(x)) + m.h * m.b(x) * m.alpha) * m.beta
    values = dict(g=torch.full((8,), 0.1), h=torch.full((8,), 0.1), alpha=torch.tensor(1.0), beta=torch.tensor(1.0))
    return Module(forward, parameters=values, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 4))


def buffers():
    values = dict(pe=torch.randn(8), mean=torch.randn(8), scale=torch.rand(8) + 0.5)
    forward = lambda m, x: m.b(F.relu(m.a((x - m.mean) / m.scale) + m.pe))
    return Module(forward, buffers=values, a=nn.Linear(8, 8), b=nn.Linear(8, 4))


def equal_layers():
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.load_state_dict(a.state_dict())
    return Module(lambda m, x: m.d(m.q(m.b(m.p(m.a(x))))), a=a, p=nn.PReLU(), b=b, q=nn.PReLU(), d=nn.Linear(8, 4))


def weight_norm():
    return Module(lambda m, x: m.b(F.relu(m.a(x))), a=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), b=nn.Linear(8, 4))


def warp():
    forward = lambda m, x: F.grid_sample(x, F.affine_grid(m.theta, (BATCH, 3, 6, 6), align_corners=False), align_corners=False)
    return Module(forward, parameters=dict(theta=torch.eye(2, 3).expand(BATCH, 2, 3).clone()))


def detached():
    forward = lambda m, x: m.b(F.relu(m.a(x)) * m.a(x).detach())
    return Module(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4))


class Recurrent(nn.Module):
    """A recurrent layer whose second bias is zero, as Keras' cells have none; `trained` or not."""

    def __init__(self, cell, trained):
        super().__init__()
        self.cell, self.fc = cell(8, 6, batch_first=True), nn.Linear(6, 4)
        nn.init.zeros_(self.cell.bias_hh_l0).requires_grad_(trained)

    def forward(self, x):
        return self.fc(self.cell(x)[0])


VECTORS, ROWS, IMAGES, TOKENS = (8,), (5, 8), (3, 6, 6), (5,)
# The module, a sample of its input, its exporters.
MODULES = {
    "pre_activation": (pre_activation, ROWS, [DYNAMO, EVAL]),
    "layer_norms": (lambda: norms(nn.LayerNorm), VECTORS, [EVAL]),
    "bare_layer_norm": (lambda: norms(nn.LayerNorm, elementwise_affine=False), VECTORS, [DYNAMO]),
    "bare_instance_norm": (lambda: images(nn.InstanceNorm2d(6, EPS, affine=True), nn.InstanceNorm2d(6, EPS)), IMAGES, [DYNAMO]),
    "group_norms": (lambda: images(nn.GroupNorm(2, 6, EPS), nn.GroupNorm(3, 6, EPS)), IMAGES, [DYNAMO, EVAL]),
    "bare_group_norm": (lambda: images(nn.GroupNorm(2, 6, EPS), nn.GroupNorm(2, 6, EPS, affine=False)), IMAGES, [DYNAMO]),
    "equal_layers": (equal_layers, ROWS, [DYNAMO, EVAL]),
    "tied": (lambda: tied(F.linear), TOKENS, [EVAL]),
    "tied_turned": (lambda: tied(lambda h, w: h @ w.T), TOKENS, [DYNAMO]),
    "tied_part": (lambda: tied(lambda h, w: h @ w[2:9].T), TOKENS, [DYNAMO, EVAL]),
    "one_bias": (lambda: Recurrent(nn.LSTM, False), ROWS, [EVAL]),
    "two_biases": (lambda: Recurrent(nn.GRU, True), ROWS, [EVAL]),
    # What cannot be undone, or not by every exporter.
    "detached": (detached, VECTORS, [DYNAMO, KEPT]),
        "gammas": (gammas, VECTORS, [DYNAMO, EVAL]),
    "buffers": (buffers, VECTORS, [TRAIN]),
    "weight_norm": (weight_norm, VECTORS, [DYNAMO, EVAL]),
    "folded_norm": (lambda: images(nn.BatchNorm2d(6), nn.Identity()), IMAGES, [DYNAMO, EVAL]),
    "warp": (warp, IMAGES, [DYNAMO]),
}


def make(name):
    torch.manual_seed(1)
    return MODULES[name][0]()


def draw(shape, generator):
    if shape == TOKENS:
        return torch.randint(0, 13, (STEPS * BATCH, *shape), generator=generator)
    return torch.randn(STEPS * BATCH, *shape, generator=generator)


def export(name, exporter, x, path):
    model = make(name).train(exporter != EVAL)
    names = dict(input_names=["x"], output_names=["y"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if exporter in (DYNAMO, KEPT):
            torch.onnx.export(model, (x,), path, dynamo=True, optimize=exporter == DYNAMO, opset_version=20, external_data=False, verbose=False, **names)
        else:
            folding = {} if exporter == EVAL else dict(training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)
            torch.onnx.export(model, (x,), path, dynamo=False, opset_version=17, **folding, **names)
    proto = onnx.load(path)
    clean(proto, False)
    del proto.graph.value_info[:]
    onnx.save(proto, path)


def losses(name, x, generator):
    """Of steps in float64, and the targets."""
    model = make(name).double().train()
    batches = (x.double() if x.is_floating_point() else x).split(BATCH)
    with torch.no_grad():
        shape = make(name).double()(batches[0]).shape
    target = torch.randn(STEPS * BATCH, *shape[1:], generator=generator)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for batch, wanted in zip(batches, target.double().split(BATCH)):
        loss = F.mse_loss(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, target


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder, golden = ROOT / "tests/models/damage", {}
    folder.mkdir(exist_ok=True)
    for name, (_, shape, exporters) in MODULES.items():
        generator = torch.Generator().manual_seed(3)
        x = draw(shape, generator)
        golden[name], target = losses(name, x, generator)
        np.savez(folder / f"{name}.npz", x=x.numpy(), target=target.numpy())
        for exporter in exporters:
            export(name, exporter, x[:BATCH], folder / f"{name}_{exporter}.onnx")
    text = json.dumps(golden, indent=1)
    (ROOT / "tests/golden/import/damage.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
