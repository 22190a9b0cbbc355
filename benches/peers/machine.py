"""The machine: what it is, whether others use it, which processors a turn gets."""

import os
import platform
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PROBE = 0.5  # seconds over which the load before a turn is taken


def described():
    """{what: value} for the report."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next(line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name"))
    flags = next(line.split(":")[1].split() for line in cpu.splitlines() if line.startswith("flags"))
    vectors = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {"processor": model, "processors": len(os.sched_getaffinity(0)), "vectors": ", ".join(vectors),
            "memory": f"{memory / 2**20:.0f} GiB", "system": f"{platform.system()} {platform.release()}"}


def busy_s():
    """Processor seconds of all processes, and of other guests of the host (steal), since the start."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICK


def own_s():
    """Processor seconds of this process and of its children that ended."""
    return sum(os.times()[:4])


class Others:
    """How many processors everyone else kept busy since this was made."""

    def __init__(self):
        self.start, self.busy, self.own = time.monotonic(), busy_s(), own_s()

    def load(self):
        return max(0.0, (busy_s() - self.busy - own_s() + self.own) / (time.monotonic() - self.start))


def quiet(limit, wait_s):
    """Waits until others keep fewer than `limit` processors busy; the load then, or that after `wait_s` seconds of waiting."""
    end = time.monotonic() + wait_s
    while True:
        others = Others()
        time.sleep(PROBE)
        load = others.load()
        if load < limit or time.monotonic() > end:
            return load


def processors(threads):
    """Those that a turn with this many threads may use: the last ones, since the first serves most interrupts."""
    available = sorted(os.sched_getaffinity(0))
    if threads > len(available):
        raise SystemExit(f"error: {threads} threads on {len(available)} processors: give fewer by --threads")
    return available[-threads:]
