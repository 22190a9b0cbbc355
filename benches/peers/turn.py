"""A peer's turn, the same for all: set up, train, and print one line of JSON.

    python {torch,jax,ort}_turn.py '{"case": ..., "folder": ..., "threads": ..., "seconds": ..., ...}'

A step is timed from batch in hand to loss in hand and weights updated, as dcc's `step_ms` is. CPU time is that of all threads of
the process over the timed steps, between the times `timed`; memory the peak resident set over what the process had when all its imports were made.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

WARM, LONG = 3, 3.0  # steps before the clock starts, or one where steps so far took so many seconds
LEAST, FIRST = 3, 3  # the fewest steps that are timed; losses that are reported


def is_warm(spent):
    """Whether the steps so far, each with its seconds, suffice to start the clock."""
    return len(spent) >= WARM or sum(spent) >= LONG


def status_mib(field, pid="self"):
    """A size of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {field} in /proc/{pid}/status")


def options():
    """Of this turn; `case` becomes the case."""
    import cases
    o = json.loads(sys.argv[1])
    return o | {"case": cases.CASES[o["case"]]}


def run(o, set_up, versions):
    """set_up: called once, gives step(batch) -> loss as a float. To be called when everything is imported."""
    import stored
    base = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    step, batches = set_up(), stored.batches(o["folder"])
    losses, warm, timed = [], [], []
    while len(timed) < LEAST or sum(timed) < o["seconds"]:
        batch, start = batches[(len(warm) + len(timed)) % len(batches)], time.perf_counter()
        loss = step(batch)
        (timed if is_warm(warm) else warm).append(time.perf_counter() - start)
        losses.append(loss)
        if not timed:  # of what comes next
            first, cpu = (time.perf_counter() - started if len(warm) == 1 else first), time.process_time()
            begin = time.monotonic()
    cpu, end = time.process_time() - cpu, time.monotonic()
    print(json.dumps({
        "losses": losses[:FIRST], "steps": len(timed), "wall_ms": 1e3 * statistics.median(timed), "cpu_ms": 1e3 * cpu / len(timed),
        "timed": [begin, end], "memory_mib": status_mib("VmHWM") - base, "imports_mib": base, "first_s": first,
        "cpus": len(os.sched_getaffinity(0)), "versions": versions,
    }))
