"""dcc's turn: trains a case by `dcc run` and prints one line of JSON, as `torch_turn.py` does. Needs nothing but Python.

    python dcc_turn.py CASE FOLDER [--dcc dcc] [--device cuda|cpu]

FOLDER has CASE.dcc (`--compile` makes it) and `data`. A step's time is the `step_ms` of dcc's metrics: from batch in hand, in the host's memory, to
loss in hand. Memory is what dcc planned, and the most that nvidia-smi saw in use on the GPU meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import threading
import time
from pathlib import Path

import cases

MODELS = Path(__file__).resolve().parent / "models"


def compile_command(case, dcc, art):
    a = cases.ADAMW
    return [dcc, "compile", MODELS / f"{case.name}.onnx", "-o", art, "--global-batch-size", str(case.batch), "--grad-accum", str(case.microbatches),
            "--dtype", "bf16", "--loss", "cross-entropy", "--optimizer", "adamw", "--betas", f"{a['beta1']},{a['beta2']}", "--eps", str(a["eps"]),
            "--weight-decay", str(a["weight_decay"]), "--recompute", "selective"]


def run_command(case, o, metrics):
    rules = [word for rule in case.rules for word in ("--init-rule", rule)]
    return [o.dcc, "run", o.folder / f"{case.name}.dcc", "--data", o.folder / "data", "--order", "sequential", "--init", str(cases.SEED), *rules,
            "--lr", str(case.rate), "--steps", str(case.steps), "--device", o.device, "--timeout", "300", "--log-every", "1000000",
            "--metrics-file", metrics, "--json"]


class Watch(threading.Thread):
    """The most bytes in use on GPU 0 at any time, by nvidia-smi; None without one."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = None, threading.Event()

    def run(self):
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.done.wait(0.3):
            try:
                text = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
            except (OSError, subprocess.TimeoutExpired):
                continue
            if text.isdigit():
                self.most = max(self.most or 0, int(text) << 20)


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def turn(case, o):
    metrics = o.folder / f"{case.name}.jsonl"
    metrics.unlink(missing_ok=True)
    watch, began = Watch(), time.monotonic()
    if o.device == "cuda":
        watch.start()
    summary = json.loads(output(run_command(case, o, metrics)))
    took = time.monotonic() - began
    watch.done.set()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(steps) == case.steps, f"{len(steps)} steps of {case.steps}"
    spent, rank = [s["step_ms"] for s in steps[case.warm:]], summary["ranks"][0]
    ms = statistics.median(spent)
    return {"case": case.name, "by": "dcc", "ms": ms, "mean_ms": statistics.mean(spent), "steps": len(spent), "items_s": 1e3 * case.items / ms,
            "losses": [s["loss"] for s in steps], "took_s": took, "prepare_s": rank["prepare_ms"] / 1e3, "peak_bytes": rank["planned_bytes"],
            "used_bytes": watch.most, "device": o.device, "versions": {"dcc": output([o.dcc, "--version"]).strip().removeprefix("dcc ")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=cases.CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dcc", default="dcc")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", action="store_true", help="only make the artifact")
    o = parser.parse_args()
    case = cases.CASES[o.case]
    if o.compile:
        o.folder.mkdir(parents=True, exist_ok=True)
        output(compile_command(case, o.dcc, o.folder / f"{case.name}.dcc"))
    else:
        print(json.dumps(turn(case, o)))


if __name__ == "__main__":
    main()
