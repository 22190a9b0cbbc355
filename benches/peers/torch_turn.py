"""PyTorch's turn: eager or compiled, AdamW in its fused form; under autocast where `bf16` is asked for."""

import numpy as np
import torch
from torch.nn import functional as F

import cases
import graphs
import stored
import turn


def set_up(o):
    torch.set_num_threads(o["threads"])
    case = o["case"]
    a = cases.optimizer(case)
    module = graphs.module_of(case)
    named = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, array in stored.weights(o["folder"]).items():
            named[name].copy_(torch.from_numpy(np.array(array)))
    if case.family == "resnet":
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), a["lr"], betas=(a["beta1"], a["beta2"]), eps=a["eps"],
                                  weight_decay=a["weight_decay"], fused=True)

    def loss_of(labels, **inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=o["bf16"]):
            out = module(**inputs)
            out = getattr(out, "logits", out)
        return F.cross_entropy(out.flatten(0, -2).float(), labels.flatten(), ignore_index=cases.IGNORED)

    if o["compile"]:
        if o["avx2"]:
            from torch._inductor import config
            config.cpp.simdlen = 256  # bits; it would else generate for what the machine has
        loss_of = torch.compile(loss_of)

    def step(batch):
        loss = loss_of(**{name: torch.from_numpy(rows) for name, rows in batch.items()})
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    o = turn.options()
    turn.run(o, lambda: set_up(o), {"torch": torch.__version__})
