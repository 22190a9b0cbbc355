"""The machine: what it is, whether others use it, which processors a turn gets."""

import contextlib
import math
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PROBE = 0.5  # seconds over which the load before a turn is taken
TRIES = 4  # of a turn
PROBES, PROBE_S = 30, 0.1  # of each processor, for what it does while it has its core to itself


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


class Cores:
    """What a turn's processors, the first one or two of them, have of their cores, by cores.c: a host moves its guests between its cores;
    two processors on one core are little more than one, and one beside another guest's is less."""

    def __init__(self, folder, processors):
        self.processors, self.least_ns, self.most_added = processors[:2], math.inf, 0.0
        self.command = [folder / "cores", *map(str, self.processors)]
        source = Path(__file__).with_name("cores.c")
        subprocess.run(["cc", "-O2", "-march=native", "-pthread", "-o", self.command[0], source], check=True)
        self.most = 0.0
        for _ in range(PROBES):
            self.most = max([self.most, *(self.numbers(processor)[0] for processor in self.processors)])
            time.sleep(PROBE_S)

    def numbers(self, *processors):
        """Of all, or those given."""
        command = [self.command[0], *map(str, processors)] if processors else self.command
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
        return [float(word) for word in out.split()]

    def seen(self):
        """Of two: how many times as much both do at once as one alone, the nanoseconds that a cache line takes, and the additions in one of
        the slower."""
        times, ns, added = self.numbers()
        if times > 1.8:  # on one core a line takes less than ever between two
            self.least_ns = min(self.least_ns, ns)
        self.most_added = max(self.most_added, added)
        return times, ns, added

    def missing(self):
        """Processors that are not there."""
        if len(self.processors) > 1:
            return max(0.0, 2 - self.seen()[0])
        [rate] = self.numbers()
        self.most = max(self.most, rate)
        return 1 - rate / self.most

    @contextlib.contextmanager
    def watched(self):
        """Gives missing(start, end), for when this is over: how many processors were missing from one time to another
        (time.monotonic) within, on average, or None where this process may not look before all others do."""
        looks = []
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen([*self.command, "watch"], stdin=subprocess.PIPE, stdout=out, stderr=errors)
            try:
                yield lambda start, end: self.looked(looks, start, end)
            finally:
                child.stdin.close()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            for file in (out, errors):
                file.seek(0)
            if child.returncode not in (0, 3):
                raise RuntimeError(f"cores watch: {errors.read().strip()}")
            looks += [tuple(map(float, line.split())) for line in out]

    def looked(self, looks, start, end):
        """Of what one can do alone on its core, the most that was ever seen of any."""
        self.most = max([self.most, *(rate for look in looks for rate in look[1:])])
        within = [look for look in looks if start <= look[0] <= end]
        missing = [max(0.0, len(self.processors) - sum(look[1:]) / self.most) for look in within]
        return sum(missing) / len(missing) if missing else None

    def is_fit(self, alone):
        """Whether both are there and a cache line takes about as little as it ever took; if `alone`, neither sharing its core with others."""
        times, ns, added = self.seen()
        return times > 1.8 and ns < 1.5 * self.least_ns and (not alone or added > 0.8 * self.most_added)


class Others:
    """How many processors everyone else kept busy since this was made."""

    def __init__(self):
        self.start, self.busy, self.own = time.monotonic(), busy_s(), own_s()

    def load(self):
        return max(0.0, (busy_s() - self.busy - own_s() + self.own) / (time.monotonic() - self.start))


def turn(limit, wait_s, cores, make):
    """What `make()` gives, a turn with the times `timed`, and how many processors others kept busy before it or in it; None and that
    where these were `limit` or more before it. A turn in whose timed steps so many processors were missing is made again, a few times."""
    for _ in range(TRIES):
        load = quiet(limit, wait_s, cores)
        if load >= limit:
            return None, load
        others = Others()
        with cores.watched() as missing:
            made = make()
        load = max(load, others.load())
        if "timed" in made:
            seen = missing(*made["timed"])
            load = max(load, cores.missing() if seen is None else seen)
        if load < limit:
            break
    return made, load


def quiet(limit, wait_s, cores=None):
    """Waits until others keep fewer than `limit` processors busy; the load then, or that after `wait_s` seconds of waiting."""
    end = time.monotonic() + wait_s
    while True:
        others = Others()
        time.sleep(PROBE)
        load = max(others.load(), cores.missing() if cores else 0.0)
        if load < limit or time.monotonic() > end:
            return load


def processors(threads):
    """Those that a turn with this many threads may use: the last ones, since the first serves most interrupts."""
    available = sorted(os.sched_getaffinity(0))
    if threads > len(available):
        raise SystemExit(f"error: {threads} threads on {len(available)} processors: give fewer by --threads")
    return available[-threads:]
