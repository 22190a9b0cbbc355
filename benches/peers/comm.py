"""Collectives between processes of one machine: dcc beside gloo (torch.distributed) and Open MPI's shared memory, in turns.

    python benches/peers/comm.py [--ranks 2 4] [--max-bytes 67108864] [--rounds 5] [--out benches/COLLECTIVES.md]

A figure is the median over rounds, in each of which every program measures all sizes itself, in one way: see `dcc bench comm --help`.
It has a turn for small sizes and one for large ones, so that each is short: a host moves its guests between its cores. dcc and Open MPI,
which small sizes take a second or two, have several of those a round, in turns: what other guests do meanwhile changes as quickly.
Open MPI's turn is a C program, gloo's is torch's Python. Ranks beyond the processors share them: Open MPI is told so, and to yield while
it waits. A round of transfers is judged by its first ones and made shorter where it would take more than a tenth of a second; a turn
that takes longer than --limit is cut off, and what it has not measured is said.

Each turn's figures are kept, in comm.json of --cache. A sitting that ended early, since the processors were not fit or it was interrupted,
goes on with the turns that are left by the same command and --resume.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import environments
import machine
import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
KEPT = "comm.json"
PROBES = 20  # looks at the processors before the first turn
LARGE, SMALL = 1 << 20, 4096  # bytes: where the bars are about bandwidth, and about latency


def output(o, command):
    """What a command has printed by its end or by the limit, when its processes end too."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, errors = child.communicate(timeout=o.limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            return child.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return child.communicate()[0]
    if child.returncode:
        raise SystemExit(f"error: {command[0]}:\n{errors[-4000:]}")
    return out


def dcc_turn(o, ranks, least, most):
    text = output(o, [o.dcc, "bench", "comm", "--ranks", str(ranks), "--min-bytes", str(least), "--max-bytes", str(most), "--json"])
    return {(f["kind"], f["bytes"]): f["microseconds"] for f in (json.loads(text) if text else [])}


def lines(text):
    """Of `kind bytes microseconds` lines, the last of which may be cut off."""
    whole = text[:text.rfind("\n") + 1]
    return {(kind, int(size)): float(took) for kind, size, took in map(str.split, whole.splitlines())}


def gloo_turn(o, ranks, least, most):
    return lines(output(o, [environments.python_of("torch", o.cache), HERE / "comm_gloo.py", str(ranks), str(least), str(most)]))


def mpi_turn(o, ranks, least, most):
    scripts, program = environments.python_of("mpi", o.cache).parent, o.cache / "comm_mpi"
    if not program.exists() or program.stat().st_mtime < (HERE / "comm_mpi.c").stat().st_mtime:
        subprocess.run([scripts / "mpicc", "-O2", "-o", program, HERE / "comm_mpi.c"], check=True)
    settings = {"btl": "self,sm", "pml": "ob1"}
    if ranks > len(os.sched_getaffinity(0)):
        settings["mpi_yield_when_idle"] = "1"
    told = [word for name, value in settings.items() for word in ("--mca", name, value)]
    command = [scripts / "mpirun", "--allow-run-as-root", "--oversubscribe", *told]
    return lines(output(o, [*command, "-n", str(ranks), program, str(least), str(most)]))


TURNS = {"dcc": dcc_turn, "gloo": gloo_turn, "Open MPI": mpi_turn}


class Unfit(Exception):
    """The processors were not near each other, or others kept them or their cores busy, each time that a turn was tried."""


def lone_turn(o, cores, name, *span):
    """A turn's figures, and the load before it. It counts where the processors are near each other before it and after, and, of sizes that
    are a matter of instructions, have their cores to themselves; else it is made again, a few times. gloo's counts anyway: it sleeps."""
    ranks, _, most = span
    alone = most <= SMALL and ranks <= len(os.sched_getaffinity(0))
    for _ in range(o.tries):
        load, end = machine.quiet(o.max_load, o.wait), time.monotonic() + o.wait
        while not (fit := name == "gloo" or cores.is_fit(alone)) and time.monotonic() < end:
            time.sleep(0.2)
        figures = TURNS[name](o, *span) if fit else {}
        if fit and load < o.max_load and (name == "gloo" or cores.is_fit(alone)):
            return figures, load
    raise Unfit(f"others kept {load:.2f} processors busy, or the processors were far from each other or shared their cores, {o.tries} times")


def turns(o, spans):
    """Round, ranks, sizes and program of each turn, in order."""
    for round_, ranks, span in itertools.product(range(o.rounds), o.ranks, spans):
        names = [*TURNS, *[name for name in TURNS if name != "gloo"] * ((o.small_turns if span[1] <= SMALL else 1) - 1)]
        for place in range(len(names)):
            yield round_, ranks, span, names[(place + round_) % len(names)]


def kept_turns(o, sitting):
    """What the sitting that is resumed has of turns, in order. Errors: it is another commit's or another command's."""
    if not o.resume:
        return []
    kept = json.loads((o.cache / KEPT).read_text()) if (o.cache / KEPT).exists() else {"sitting": None}
    if kept["sitting"] != sitting:
        raise SystemExit(f"error: {o.cache / KEPT} is of {kept['sitting']}, not of {sitting}: nothing to resume")
    return kept["turns"]


def keep(o, sitting, done):
    """Writes what there is, or leaves what there was."""
    new = o.cache / f"{KEPT}.new"
    new.write_text(json.dumps({"sitting": sitting, "turns": done}))
    new.replace(o.cache / KEPT)


def measured(o, commit):
    """{(ranks, program): {(kind, bytes): [microseconds of each round]}}, and the load of others at each turn."""
    started = time.monotonic()
    sitting = [commit, *(getattr(o, name) for name in ("ranks", "max_bytes", "rounds", "small_turns"))]
    done = kept_turns(o, sitting)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as in run.py's turns: torch's threads do not spin beside ranks
    cores = machine.Cores(o.cache, machine.processors(2))
    for _ in range(PROBES):
        cores.seen()
        time.sleep(0.2)
    spans = [span for span in ((4, min(SMALL, o.max_bytes)), (4 * SMALL, o.max_bytes)) if span[0] <= span[1]]
    for round_, ranks, (least, most), name in itertools.islice(turns(o, spans), len(done), None):
        figures, load = lone_turn(o, cores, name, ranks, least, most)
        done.append({"ranks": ranks, "name": name, "load": load, "figures": [[*key, took] for key, took in figures.items()]})
        keep(o, sitting, done)
        print(f"{time.monotonic() - started:5.0f} s  round {round_ + 1}, {ranks} ranks, {least} to {most} bytes, {name}: a cache line takes "
              f"{cores.least_ns:.0f} ns; others kept {load:.2f} processors busy", flush=True)
    found = {}
    for turn in done:
        for kind, size, took in turn["figures"]:
            found.setdefault((turn["ranks"], turn["name"]), {}).setdefault((kind, size), []).append(took)
    return found, [turn["load"] for turn in done]


def report(o, commit, found, loads):
    shortfalls, missing, tables = [], [], []
    for ranks in o.ranks:
        times = {name: found.get((ranks, name), {}) for name in TURNS}
        for kind in KINDS:
            tables += [f"## {kind}, {ranks} ranks", "", "| bytes | dcc | gloo | Open MPI | gloo ÷ dcc | Open MPI ÷ dcc |", "|---|---|---|---|---|---|"]
            for size in sizes(o):
                where, took = f"{kind}, {ranks} ranks, {size} bytes", {name: times[name].get((kind, size)) for name in TURNS}
                missing += [f"{where}: {name}" for name in TURNS if not took[name]]
                ours, *peers = (statistics.median(took[name]) if took[name] else None for name in TURNS)
                ratios = [peer / ours if peer and ours else None for peer in peers]
                cells = [*map(with_spread, took.values()), *(f"{ratio:.2f}" if ratio else "–" for ratio in ratios)]
                tables.append(f"| {size} | " + " | ".join(cells) + " |")
                bar = 5 if size < SMALL else 3 if size > LARGE else None
                if bar and ratios[0] and ratios[0] < bar:
                    shortfalls.append(f"{where}: {ratios[0]:.2f} × gloo, not {bar} ×")
                if ratios[1] and ratios[1] < 1:
                    shortfalls.append(f"{where}: {ratios[1]:.2f} × Open MPI")
            tables.append("")
    said = "Short:" if shortfalls else "no shortfall in what is measured." if missing else "all hold."
    bars = ["## Bars", "", f"≥ 3 × gloo above 1 MiB, ≥ 5 × below 4 KiB, never slower than Open MPI: {said}", ""]
    bars += [f"- {line}" for line in shortfalls]
    bars += ["", f"Cut off after {o.limit:g} s, so not measured:", "", *(f"- {line}" for line in missing)] if missing else []
    return "\n".join(head(o, commit, loads) + tables + bars) + "\n"


def head(o, commit, loads):
    m, release = machine.described(), environments.release_of
    return ["# Collectives beside gloo and Open MPI", "",
            f"{m['processor']}, {m['processors']} processors, {m['vectors']}; {m['system']}. dcc {commit}, gloo of torch "
            f"{release('torch', 'torch', o.cache)}, Open MPI {release('mpi', 'openmpi', o.cache)}. Microseconds, medians of {o.rounds} rounds in turns, "
            f"± half the way from the fastest to the slowest; others kept at most {max(loads):.2f} processors busy before a turn. A turn of dcc and of "
            "Open MPI counts where the processors are near each other before it and after (a cache line takes less than 1.5 times what it takes at "
            "least); of up to 4 KiB between as many ranks as processors, where both then add 0.8 times as many numbers as ever, or more. Of such sizes "
            f"both have {o.small_turns} turns a round, one after the other.", "",
            f"    python benches/peers/comm.py {provenance.command_line()}".rstrip(), ""]


def with_spread(took):
    return f"{statistics.median(took):.2f} ±{50 * (max(took) - min(took)) / statistics.median(took):.0f} %" if took else "–"


def sizes(o):
    """4 B to the largest, each four times the one before."""
    return [4 << 2 * i for i in range(40) if 4 << 2 * i <= o.max_bytes]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dcc", default=str(ROOT / "target/release/dcc"), help="the release binary")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument("--max-bytes", type=int, default=64 << 20)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--small-turns", type=int, default=5, help="of sizes to 4 KiB, of dcc and Open MPI, in each round")
    p.add_argument("--limit", type=float, default=240, help="seconds of a turn, at most")
    p.add_argument("--max-load", type=float, default=0.2, help="processors that others may keep busy before a turn")
    p.add_argument("--wait", type=float, default=60, help="seconds to wait for that")
    p.add_argument("--tries", type=int, default=20, help="how often a turn is made until the processors stay fit")
    p.add_argument("--cache", type=Path, default=ROOT / "target/peers")
    p.add_argument("--resume", action="store_true", help="go on with the sitting that ended early")
    p.add_argument("--out", type=Path)
    return p.parse_args()


def main():
    o = arguments()
    o.cache.mkdir(parents=True, exist_ok=True)
    commit = provenance.commit()
    try:
        found, loads = measured(o, commit)
    except Unfit as reason:
        raise SystemExit(f"error: {reason}") from None
    text = report(o, commit, found, loads)
    print(text)
    if o.out:
        o.out.write_text(text)


if __name__ == "__main__":
    main()
