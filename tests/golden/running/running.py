"""Writes running.json: small models with BatchNorm where exporters leave it in forms of their own, trained by PyTorch in float64.

    python tests/golden/running/running.py                         # torch 2.15, onnx 1.23

Each case: the model's bytes in hex, the data of all steps, the loss of each step of SGD, and every tensor of the model at the end.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

BATCH, WIDTH, STEPS, RATE = 8, 4, 4, 0.05
GENERATOR = torch.Generator().manual_seed(5)
CASES = []


def values(*shape):
    """Numbers that f32 has."""
    return torch.randn(*shape, generator=GENERATOR).double()


def case(name, nodes, tensors, forward, owners=None):
    """`forward` computes y of x by the tensors `t`; `owners` are names that the file gives to other tensors too."""
    t = {key: value.clone() for key, value in tensors.items()}
    for key, owner in (owners or {}).items():
        t[key] = tensors[owner].clone()
    statistics = {key for key in t if "running" in key}
    trained = [value.requires_grad_() for key, value in t.items() if key not in statistics]
    x, target = values(STEPS * BATCH, WIDTH), values(STEPS * BATCH, WIDTH)
    optimizer, losses = torch.optim.SGD(trained, lr=RATE), []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        loss = F.mse_loss(forward(x[rows], t), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    info = lambda n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [BATCH, WIDTH])
    initializers = [numpy_helper.from_array(value.detach().float().numpy(), key) for key, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [info("x")], [info("y")], initializers)
    model = helper.make_model(graph, producer_name="pytorch", opset_imports=[helper.make_opsetid("", 20)])
    data = {"x": x.reshape(-1).tolist(), "target": target.reshape(-1).tolist()}
    CASES.append({"name": name, "model": model.SerializeToString().hex(), "data": data, "losses": losses,
                  "tensors": {key: value.detach().reshape(-1).tolist() for key, value in t.items()}})


def norm(x, y, names, **attributes):
    return helper.make_node("BatchNormalization", [x, *names.split()], [y], **attributes)


def product(x, w, y):
    return helper.make_node("MatMul", [x, w], [y])


def moved(x, t, keep, mean="n.running_mean", var="n.running_var", weight="n.weight", bias="n.bias"):
    return F.batch_norm(x, t[mean], t[var], t[weight], t[bias], True, 1 - keep)


FRESH = {"n.weight": torch.ones(WIDTH).double(), "n.bias": torch.zeros(WIDTH).double()}
STATISTICS = {"n.running_mean": torch.zeros(WIDTH).double(), "n.running_var": torch.ones(WIDTH).double()}
NAMES = "n.weight n.bias n.running_mean n.running_var"


def main():
    weights = {"a": values(WIDTH, WIDTH) / 2, "b": values(WIDTH, WIDTH) / 2}
    whole = {**FRESH, **STATISTICS, **weights}
    case("of an input", [norm("x", "h", NAMES, momentum=0.75), product("h", "a", "i"), helper.make_node("Relu", ["i"], ["j"]), product("j", "b", "y")],
         whole, lambda x, t: moved(x, t, 0.75).matmul(t["a"]).relu().matmul(t["b"]))
    for keep in (0.0, 1.0):
        case(f"that keeps {keep}", [product("x", "a", "h"), norm("h", "i", NAMES, momentum=keep), product("i", "b", "y")],
             whole, lambda x, t: moved(x.matmul(t["a"]), t, keep).matmul(t["b"]))
    case("used three times",
         [product("x", "a", "h"), norm("h", "i", NAMES, momentum=0.75), helper.make_node("Tanh", ["i"], ["j"]), product("j", "a", "k"),
          norm("k", "l", NAMES, momentum=0.75), helper.make_node("Tanh", ["l"], ["m"]), product("m", "b", "o"), norm("o", "y", NAMES, momentum=0.75)],
         whole, lambda x, t: moved(moved(moved(x @ t["a"], t, 0.75).tanh() @ t["a"], t, 0.75).tanh() @ t["b"], t, 0.75))
    case("of merged tensors", [product("x", "a", "h"), norm("h", "i", "n.weight n.bias n.bias n.weight", momentum=0.75), product("i", "b", "y")],
         {**FRESH, **weights}, lambda x, t: moved(x @ t["a"], t, 0.75) @ t["b"],
         {"n.running_mean": "n.bias", "n.running_var": "n.weight"})
    case("whose mean is a bias elsewhere",
         [helper.make_node("Add", ["x", "n.bias"], ["h"]), product("h", "a", "i"), norm("i", "j", "n.weight c n.bias n.weight", momentum=0.75), product("j", "b", "y")],
         {**FRESH, "c": values(WIDTH), **weights},
         lambda x, t: moved((x + t["n.bias"]) @ t["a"], t, 0.75, bias="c") @ t["b"], {"n.running_mean": "n.bias", "n.running_var": "n.weight"})
    path = Path(__file__).with_suffix(".json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in CASES) + "\n]\n")


main()
