"""torch's turn of mesh.py: GPT mini on two processes of one thread each, over gloo; prints one line of JSON.

    python mesh_torch.py '{"case": ..., "folder": ..., "mesh": "dp" | "tp" | "pp" | "zero3", "seconds": ..., "microbatches": ...}'

The model is GPT-2 (HF's), written with a linear layer for each of Q, K and V, so that DTensor can split heads; the mesh is applied as
PyTorch's own guides do. A step is timed from batch in hand to weights updated, on the slower process.
"""

import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import cases
import stored
import turn

RANKS = 2


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.ln_1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """All of it, or one stage of a pipeline; ends share the embedding's values."""

    def __init__(self, config, layers, first=True, last=True):
        super().__init__()
        width = config["width"]
        self.layers = layers
        self.h = nn.ModuleList(Block(width, config["heads"]) for _ in layers)
        self.wpe = nn.Embedding(config["length"], width) if first else None
        self.wte = nn.Embedding(config["vocab"], width) if first else None
        self.ln_f = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, config["vocab"], bias=False) if last else None
        self.tie()

    def tie(self):
        if self.wte is not None and self.head is not None:
            self.head.weight = self.wte.weight

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))

    def load(self, weights):
        """weights: HF's, by the names in the graph."""
        tensor = lambda name: torch.from_numpy(weights[name].copy())
        embedding = next(tensor(name) for name in ("lm_head.weight", "transformer.wte.weight") if name in weights)
        found = {"wte.weight": embedding, "head.weight": embedding, "wpe.weight": tensor("transformer.wpe.weight"),
                 "ln_f.weight": tensor("transformer.ln_f.weight"), "ln_f.bias": tensor("transformer.ln_f.bias")}
        for own, layer in enumerate(self.layers):
            for kind, turned in (("weight", True), ("bias", False)):
                of = lambda name: tensor(f"transformer.h.{layer}.{name}.{kind}")
                parts = zip("qkv", of("attn.c_attn").chunk(3, -1))
                named = {**dict(parts), "proj": of("attn.c_proj"), "fc": of("mlp.c_fc"), "out": of("mlp.c_proj")}
                found |= {f"h.{own}.{name}.{kind}": value.T if turned else value for name, value in named.items()}
                found |= {f"h.{own}.{name}.{kind}": of(name) for name in ("ln_1", "ln_2")}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(found[name])


def optimizer_of(o, parameters):
    """AdamW in its fused form, which takes sharded and whole parameters apart."""
    a, parameters = cases.optimizer(o["case"]), list(parameters)
    groups = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], a["lr"], betas=(a["beta1"], a["beta2"]), eps=a["eps"],
                             weight_decay=a["weight_decay"], fused=True)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_step(o, model, rows, context=None):
    """A step of a whole model on `rows` of the batch."""
    optimizer = optimizer_of(o, model.parameters())

    def step(ids, labels):
        ids, labels = rows(ids), rows(labels)
        if context is None:
            loss = cross_entropy(model(ids), labels)
            loss.backward()
        else:
            with context():
                loss = cross_entropy(model(ids), labels)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def dp(o, rank, model):
    from torch.nn.parallel import DistributedDataParallel
    return plain_step(o, DistributedDataParallel(model, gradient_as_bucket_view=True), lambda x: x.chunk(RANKS)[rank])


def zero3(o, rank, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(o, model, lambda x: x.chunk(RANKS)[rank])


def tp(o, rank, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {"wte": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
    for i in range(len(model.h)):
        plan |= {f"h.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "fc")}
        plan |= {f"h.{i}.{name}": RowwiseParallel() for name in ("proj", "out")}
    parallelize_module(model, mesh, plan)
    model.tie()
    # What no plan names stays whole on both.
    return plain_step(o, model, lambda x: x, loss_parallel)


def pp(o, rank, model):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, o["microbatches"], loss_fn=cross_entropy)
    optimizer = optimizer_of(o, model.parameters())
    shared = model.wte.weight if rank == 0 else model.head.weight

    def step(ids, labels):
        losses = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        dist.all_reduce(shared.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / o["microbatches"]

    return step


MESHES = {"dp": dp, "tp": tp, "pp": pp, "zero3": zero3}
# How a step's loss comes from what the processes have.
MEAN, SAME, ONE = 0.5, 0.5, 1.0
SHARE = {"dp": MEAN, "zero3": MEAN, "tp": SAME, "pp": ONE}


def work(rank, o, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    o["case"] = cases.CASES[o["case"]]
    config, layers = o["case"].config, list(range(o["case"].config["layers"]))
    if o["mesh"] == "pp":
        half = len(layers) // RANKS
        model = Gpt(config, layers[rank * half:][:half], rank == 0, rank == RANKS - 1)
    else:
        model = Gpt(config, layers)
    model.load(stored.weights(o["folder"]))
    step = MESHES[o["mesh"]](o, rank, model)
    batches = [{name: torch.from_numpy(rows) for name, rows in batch.items()} for batch in stored.batches(o["folder"])]
    losses, warm, timed, begin = [], [], [], 0.0
    while len(timed) < turn.LEAST or sum(timed) < o["seconds"]:
        batch = batches[len(losses) % len(batches)]
        dist.barrier()
        start = time.perf_counter()
        loss = step(batch["input_ids"], batch["labels"])
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        mean = torch.tensor([SHARE[o["mesh"]] * loss], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        losses.append(mean.item())
        (timed if turn.is_warm(warm) else warm).append(took.item())
        begin = begin if timed else time.monotonic()
    if rank == 0:
        print(json.dumps({"losses": losses[:turn.FIRST], "steps": len(timed), "timed": [begin, time.monotonic()], "wall_ms": 1e3 * statistics.median(timed),
                          "versions": {"torch": torch.__version__}}), flush=True)
    # Without joining gloo's threads, which sometimes aborts the process: what was measured is told.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (json.loads(sys.argv[1]), port), nprocs=RANKS)
