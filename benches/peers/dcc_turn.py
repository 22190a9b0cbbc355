"""dcc's turn: an artifact, compiled once as onnxruntime's are, trained by `dcc run` until enough steps are timed.

Wall time is the metrics' `step_ms`. CPU time and memory are read from /proc while it runs, of all its processes (one, as its
ranks are): memory is the sum of their peaks, each over that of a dcc that only starts.
"""

import fcntl
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import cases
from turn import FIRST, LEAST, is_warm, status_mib

POLL = 0.02  # seconds
FLAGS = "--loss cross-entropy --optimizer adamw --betas {beta1},{beta2} --eps {eps} --weight-decay {weight_decay}"


def settings_of(case):
    """Of `dcc compile`."""
    return FLAGS.format(**cases.optimizer(case)).split() + case.keep.split()


def environment(o):
    return os.environ | dict(text.split("=", 1) for text in o["env"])


def artifact(o, folder, name, flags=()):
    """Compiles a case; gives the artifact and the seconds."""
    path, started = Path(folder) / f"{name}.dcc", time.monotonic()
    settings = settings_of(o["case"])
    command = [o["dcc"], "compile", Path(o["folder"]) / "model.onnx", "-o", path, *settings, *o["flags"], *flags]
    done = subprocess.run(command, env=environment(o), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"dcc compile: {done.stderr.strip()}")
    return path, time.monotonic() - started


def start_mib(dcc):
    """The peak resident set of a dcc that has started and does nothing: it is read while a full pipe blocks its output."""
    out, into = os.pipe()
    os.write(into, bytes(fcntl.fcntl(into, fcntl.F_GETPIPE_SZ)))
    child = subprocess.Popen([dcc, "--version"], stdout=into)
    time.sleep(0.3)
    mib = status_mib("VmHWM", child.pid)
    os.close(into)
    while os.read(out, 1 << 16):
        pass
    os.close(out)
    child.wait()
    return mib


def tree(pid):
    """A process and what it has started, directly or not."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def cpu_s(pids):
    """Processor seconds of all their threads, to the nanosecond."""
    files = [f for pid in pids for f in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(f.read_text().split()[0]) for f in files) / 1e9


def steps_of(metrics):
    """What the metrics have so far, without a line that is still being written."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def train_flags(o):
    """Of every training by `dcc run`."""
    case = o["case"]
    rules = [word for rule in case.rules for word in ("--init-rule", rule)]
    return ["--data", Path(o["folder"]) / "batches.npz", "--order", "sequential", "--init", str(cases.SEED), *rules,
            "--lr", str(o.get("rate") or cases.optimizer(case)["lr"]), "--threads", str(o["threads"]), *o["run_flags"]]


def start(o):
    """Seconds from `dcc run MODEL` to the metrics of its first step, compiling included; those of kernels compiled and calls prepared."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, began = Path(folder) / "metrics.jsonl", time.monotonic()
        command = [o["dcc"], "run", Path(o["folder"]) / "model.onnx", *settings_of(o["case"]), *o["flags"],
                   *train_flags(o), "--steps", "1", "--json", "--metrics-file", metrics]
        child = subprocess.Popen(command, env=environment(o), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                 preexec_fn=lambda: os.sched_setaffinity(0, o["processors"]))
        while child.poll() is None and not steps_of(metrics):
            time.sleep(0.002)
        first = time.monotonic() - began
        summary = json.loads(child.communicate()[0])
        return {"first_s": first, "prepare_s": summary["ranks"][0]["prepare_ms"] / 1e3, "step_s": summary["last"]["step_ms"] / 1e3}


def run(o, art):
    """Like a peer's line of JSON. o: `rate` replaces the case's, for the control; `run_flags` are added."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, errors = Path(folder) / "metrics.jsonl", Path(folder) / "errors"
        command = [o["dcc"], "run", art, *train_flags(o), "--steps", "1000000", "--log-every", "1000000", "--metrics-file", metrics]
        with errors.open("w") as stderr:
            child = subprocess.Popen(command, env=environment(o), stdout=subprocess.DEVNULL, stderr=stderr,
                                     preexec_fn=lambda: os.sched_setaffinity(0, o["processors"]))
        try:
            return watch(o, child, metrics, errors)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(60)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def watch(o, child, metrics, errors):
    """Waits for the warm steps, then for the timed ones."""
    started, size, first, begin = time.monotonic(), 0, None, None
    while True:
        time.sleep(POLL)
        if child.poll() is not None or time.monotonic() - started > o["limit_s"]:
            raise RuntimeError(f"dcc run ended with {child.poll()}: {errors.read_text().strip()[-2000:]}")
        now = metrics.stat().st_size if metrics.exists() else 0
        if now == size:
            continue
        size, steps = now, steps_of(metrics)
        first = first or (steps and time.monotonic() - started)
        if begin is None:
            if is_warm([s["step_ms"] / 1e3 for s in steps]):
                pids = tree(child.pid)
                begin = len(steps), cpu_s(pids), time.monotonic()
            continue
        timed = [s["step_ms"] for s in steps[begin[0]:]]
        if len(timed) >= LEAST and sum(timed) >= 1e3 * o["seconds"]:
            cpu = cpu_s(pids) - begin[1]
            peaks = [status_mib("VmHWM", pid) - o["start_mib"] for pid in pids]
            return {"losses": [s["loss"] for s in steps[:FIRST]], "steps": len(timed), "wall_ms": statistics.median(timed),
                    "cpu_ms": 1e3 * cpu / len(timed), "timed": [begin[2], time.monotonic()], "memory_mib": sum(peaks), "first_s": first,
                    "versions": {}}
