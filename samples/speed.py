"""Whole training steps of dcc beside torch eager: the MLP and the GPT sample, in turns, on 1 and 2 threads.

Both train the same model on the same batches with the same settings (those of the goldens). A turn is a process of its own;
its figure is the median step after the first few, a case's the median of its turns. torch runs AdamW as it comes and, in turns of
its own, with `fused=True`. Fails where dcc's figure is above that of torch as it comes.

    cargo build --release --bin dcc
    python samples/speed.py [--dcc target/release/dcc] [--turns 5] [--steps 40] [--threads 1 2] [NAME ...]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import export
import golden
import init

CASES = {"mlp": "sample_mlp_adamw", "gpt": "sample_gpt"}
WARM = 5


def flags_of(case, steps):
    flags = golden.CASES[CASES[case]].replace(" --steps 100", "")
    return f"{flags} --steps {steps} {golden.COMMON}".split()


def torch_turn(case, steps, threads, fused):
    """Milliseconds of each step of torch eager: batch in hand to weights updated."""
    torch.set_num_threads(threads)
    o = golden.parse(flags_of(case, steps))
    build, _ = export.graphs()[o.model]
    module, inputs = build()
    model = golden.onnx.load(golden.ROOT / o.model, load_external_data=False)
    init.fill_torch(module, init.model_values(model, o.init, o.init_rule))
    batch, names = golden.batches(o, inputs, model), [i.name for i in model.graph.input]
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=fused)
    times = []
    for step in range(steps):
        rows = golden.tensors(batch(step), torch.float32)
        start = time.perf_counter()
        loss = golden.loss_of(o, golden.run_model(module, names, rows), rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if o.grad_clip:
            torch.nn.utils.clip_grad_norm_(parameters, o.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = golden.rate(o, step)
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def dcc_turn(dcc, case, steps, threads):
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [dcc, "run", *flags_of(case, steps), "--threads", str(threads), "--metrics-file", str(metrics)]
        subprocess.run(command, cwd=golden.ROOT, check=True, stderr=subprocess.DEVNULL)
        return [json.loads(line)["step_ms"] for line in metrics.read_text().splitlines()]


def other_process(case, steps, threads, fused):
    command = [sys.executable, __file__, "--torch-turn", case, str(steps), str(threads), str(int(fused))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("names", nargs="*", default=[])
    p.add_argument("--dcc", default=str(golden.ROOT / "target/release/dcc"))
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--torch-turn", nargs=4)
    o = p.parse_args()
    if o.torch_turn:
        case, steps, threads, fused = o.torch_turn
        print(json.dumps(torch_turn(case, int(steps), int(threads), fused == "1")))
        return
    slower = False
    print("case threads   dcc ms  torch ms  fused ms  dcc/torch  dcc/fused")
    for case in o.names or CASES:
        for threads in o.threads:
            turns = {"dcc": [], "torch": [], "fused": []}
            for _ in range(o.turns):
                middle = lambda times: statistics.median(times[WARM:])
                turns["dcc"].append(middle(dcc_turn(o.dcc, case, o.steps, threads)))
                turns["torch"].append(middle(other_process(case, o.steps, threads, False)))
                turns["fused"].append(middle(other_process(case, o.steps, threads, True)))
            a, b, c = (statistics.median(turns[k]) for k in ("dcc", "torch", "fused"))
            print(f"{case:4} {threads:7} {a:8.2f} {b:9.2f} {c:9.2f} {a / b:10.2f} {a / c:10.2f}", flush=True)
            slower |= a > b
    sys.exit(slower)


if __name__ == "__main__":
    main()
