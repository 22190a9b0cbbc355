"""PyTorch's turn: trains a case and prints one line of JSON.

    python torch_turn.py CASE [--mode eager|default|reduce-overhead|max-autotune-no-cudagraphs|…] [--weights f32|bf16] [--device cuda|cpu]

Forward and loss are compiled in `--mode` of torch.compile (`eager`: not), AdamW is the fused one, and matrix products, convolutions and
attention are in bf16: by autocast, or because the weights and moments are (`--weights bf16`, which is another training: dcc's weights are
f32). Attention takes the faster of cuDNN and FlashAttention, ResNets are in channels_last. Batches lie on the GPU before the clock starts,
and nothing waits for a loss while it runs. A step's time is that between events before and after it.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cases
import models

ORDERS = {  # which kernel of attention is tried first
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}

GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def clock(call, count):
    """Milliseconds of each of `count` calls on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def attention_ms(case, order):
    """Milliseconds of attention forward and backward at the case's shape, the median of ten; None where it fails."""
    c, rows = case.config, case.batch // case.microbatches
    shape = lambda heads: (rows, heads, c["length"], c["width"] // c["heads"])
    heads, kv_heads = c["heads"], c.get("kv_heads", c["heads"])
    try:
        q, k, v, dy = (torch.randn(shape(n), device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads, heads))
        for x in (q, k, v):
            x.requires_grad_()

        def both():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=case.family != "bert", enable_gqa=heads != kv_heads)
            torch.autograd.grad(y, (q, k, v), dy)

        with sdpa_kernel(ORDERS[order], set_priority=True):
            return statistics.median(clock(both, 15)[5:])
    except RuntimeError:
        return None


def batches_on(device, case):
    """[[(inputs, labels) of a microbatch] of a batch]"""
    rows = models.batches(case)
    if case.family == "resnet":
        rows["image"] = rows["image"].to(memory_format=torch.channels_last)
    rows = {name: x.to(device) for name, x in rows.items()}
    size, made = case.batch // case.microbatches, []
    for start in range(0, case.batch * case.kept, size):
        piece = {name: x[start:start + size] for name, x in rows.items()}
        made.append((piece, piece.pop("labels")))
    return [made[i:i + case.microbatches] for i in range(0, len(made), case.microbatches)]


def trainer(case, o):
    """step(batch) -> the loss on the device, and the module."""
    module = models.module_of(case, o.device)
    models.fill(module, case)
    is_half = o.weights == "bf16"
    if is_half:
        module = module.to(torch.bfloat16)
    if case.family == "resnet":
        module = module.to(memory_format=torch.channels_last)
    a = cases.ADAMW
    optimizer = torch.optim.AdamW(module.parameters(), case.rate, betas=(a["beta1"], a["beta2"]), eps=a["eps"],
                                  weight_decay=a["weight_decay"], fused=True)
    share, kind = 1 / case.microbatches, o.device

    def loss_of(inputs, labels):
        if is_half:
            inputs = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in inputs.items()}
        with torch.autocast(kind, torch.bfloat16, enabled=not is_half):
            out = module(**inputs)
        return F.cross_entropy(out.flatten(0, -2).float(), labels.flatten(), ignore_index=cases.IGNORED) * share

    if o.mode != "eager":
        loss_of = torch.compile(loss_of, mode=o.mode, dynamic=False)
    # A graph's gradients lie in its own memory, where its next replay writes: what several replays add up must lie elsewhere.
    is_kept = case.microbatches > 1 and o.mode in GRAPHS
    if is_kept:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)

    def step(batch):
        optimizer.zero_grad(set_to_none=not is_kept)
        total = 0
        for inputs, labels in batch:
            torch.compiler.cudagraph_mark_step_begin()
            loss = loss_of(inputs, labels)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total.clone()

    return step, module


def timed(case, o, step, batches):
    """What was measured: losses of all steps, milliseconds of those after the warm ones, seconds until the first was done, memory."""
    began, losses, turn = time.perf_counter(), [], iter(range(1 << 30))

    def one():
        losses.append(step(batches[next(turn) % len(batches)]))

    one()
    losses[0].item()
    first = time.perf_counter() - began
    for at in range(1, case.warm):
        if at == 3 and o.device == "cuda":  # all is compiled and captured: what trying kernels took does not count
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        one()
    if o.device == "cuda":
        torch.cuda.synchronize()
        spent = clock(one, case.steps - case.warm)
    else:
        spent = []
        for _ in range(case.steps - case.warm):
            began = time.perf_counter()
            one()
            spent.append(1e3 * (time.perf_counter() - began))
    ms = statistics.median(spent)
    return {"ms": ms, "mean_ms": statistics.mean(spent), "steps": len(spent), "items_s": 1e3 * case.items / ms,
            "losses": [float(loss) for loss in losses], "first_s": first} | memory(o)


def memory(o):
    """peak_bytes: of tensors; of graphs, whose tensors the allocator forgets, what it holds. used_bytes: of the GPU, CUDA's own included."""
    if o.device != "cuda":
        return {"peak_bytes": None, "used_bytes": None}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_reserved() if o.mode in GRAPHS else torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "used_bytes": total - free}


def trained(case, o, attention):
    """What was measured with this order of attention's kernels."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # its keys do not tell the orders apart
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{CACHE}-{attention}"
    with sdpa_kernel(ORDERS[attention], set_priority=True):
        step, module = trainer(case, o)
        return timed(case, o, step, batches_on(o.device, case)), models.parameters(module)


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=cases.CASES)
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs")
    parser.add_argument("--weights", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main():
    o = options()
    case, on_gpu = cases.CASES[o.case], o.device == "cuda"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if not on_gpu:
        torch.set_num_threads(1)
    orders = {name: attention_ms(case, name) for name in ORDERS} if on_gpu and case.is_text else {"flash": 0.0}
    tried = sorted((name for name in orders if orders[name] is not None), key=orders.get)
    while True:
        attention = tried.pop(0)
        try:
            measured, (total, met) = trained(case, o, attention)
            break
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that works by itself, but not where the graph is compiled
            if not tried:
                raise
            print(f"with attention by {attention}: {error}\nwith {tried[0]}:", file=sys.stderr)
            torch._dynamo.reset()
    print(json.dumps({
        "case": case.name, "by": "torch", **measured, "parameters": total, "met": met,
        "settings": {"mode": o.mode, "weights": o.weights, "attention": attention if on_gpu and case.is_text else None, "attention_ms": orders},
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if on_gpu else None},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }))


if __name__ == "__main__":
    main()
