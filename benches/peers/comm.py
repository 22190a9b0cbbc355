"""Collectives between processes of one machine: dcc beside gloo (torch.distributed) and Open MPI's shared memory, in turns.

    python benches/peers/comm.py [--ranks 2 4] [--max-bytes 67108864] [--rounds 3] [--out benches/COLLECTIVES.md]

A figure is the median over rounds, in each of which every program measures all sizes itself, in one way: see `dcc bench comm --help`.
Open MPI's turn is a C program, gloo's is torch's Python. Ranks beyond the processors share them: Open MPI is told so.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import environments
import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
LARGE, SMALL = 1 << 20, 4096  # bytes: where the bars are about bandwidth, and about latency


def dcc_turn(o, ranks):
    command = [o.dcc, "bench", "comm", "--ranks", str(ranks), "--max-bytes", str(o.max_bytes), "--json"]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {(f["kind"], f["bytes"]): f["microseconds"] for f in figures}


def lines(command):
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(kind, int(size)): float(took) for kind, size, took in map(str.split, out.splitlines())}


def gloo_turn(o, ranks):
    return lines([environments.python_of("torch", o.cache), HERE / "comm_gloo.py", str(ranks), str(o.max_bytes)])


def mpi_turn(o, ranks):
    scripts, program = environments.python_of("mpi", o.cache).parent, o.cache / "comm_mpi"
    if not program.exists() or program.stat().st_mtime < (HERE / "comm_mpi.c").stat().st_mtime:
        subprocess.run([scripts / "mpicc", "-O2", "-o", program, HERE / "comm_mpi.c"], check=True)
    command = [scripts / "mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,sm", "--mca", "pml", "ob1"]
    return lines([*command, "-n", str(ranks), program, str(o.max_bytes)])


TURNS = {"dcc": dcc_turn, "gloo": gloo_turn, "Open MPI": mpi_turn}


def measured(o):
    """{(ranks, program): {(kind, bytes): [microseconds of each round]}}, and the load of others at each turn."""
    found, loads = {}, []
    for round_ in range(o.rounds):
        for ranks in o.ranks:
            for place in range(len(TURNS)):
                name, turn = list(TURNS.items())[(place + round_) % len(TURNS)]
                loads.append(machine.quiet(o.max_load, o.wait))
                for key, took in turn(o, ranks).items():
                    found.setdefault((ranks, name), {}).setdefault(key, []).append(took)
                print(f"round {round_ + 1}, {ranks} ranks, {name}: others kept {loads[-1]:.2f} processors busy", flush=True)
    return found, loads


def report(o, found, loads):
    m = machine.described()
    text = ["# Collectives beside gloo and Open MPI", ""]
    text += [f"{m['processor']}, {m['processors']} processors, {m['vectors']}; {m['system']}. Microseconds, medians of {o.rounds} rounds in "
             f"turns; others kept at most {max(loads):.2f} processors busy before a turn.", ""]
    shortfalls = []
    for ranks in o.ranks:
        figure = {name: {key: statistics.median(t) for key, t in found[ranks, name].items()} for name in TURNS}
        for kind in KINDS:
            text += [f"## {kind}, {ranks} ranks", "", "| bytes | dcc | gloo | Open MPI | gloo ÷ dcc | Open MPI ÷ dcc |", "|---|---|---|---|---|---|"]
            for size in sorted(size for k, size in figure["dcc"] if k == kind):
                ours, gloo, mpi = (figure[name].get((kind, size)) for name in TURNS)
                ratios = [other / ours if other else None for other in (gloo, mpi)]
                cells = [f"{t:.2f}" if t else "–" for t in (ours, gloo, mpi, *ratios)]
                text.append(f"| {size} | " + " | ".join(cells) + " |")
                bar = 5 if size < SMALL else 3 if size > LARGE else None
                if bar and ratios[0] and ratios[0] < bar:
                    shortfalls.append(f"{kind}, {ranks} ranks, {size} bytes: {ratios[0]:.2f} × gloo, not {bar} ×")
                if ratios[1] and ratios[1] < 1:
                    shortfalls.append(f"{kind}, {ranks} ranks, {size} bytes: {ratios[1]:.2f} × Open MPI")
            text.append("")
    text += ["## Bars", "", "≥ 3 × gloo above 1 MiB, ≥ 5 × below 4 KiB, never slower than Open MPI. Short:" if shortfalls else
             "≥ 3 × gloo above 1 MiB, ≥ 5 × below 4 KiB, never slower than Open MPI: all hold.", ""]
    return "\n".join(text + [f"- {line}" for line in shortfalls]) + "\n"


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dcc", default=str(ROOT / "target/release/dcc"), help="the release binary")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument("--max-bytes", type=int, default=64 << 20)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--max-load", type=float, default=0.2, help="processors that others may keep busy before a turn")
    p.add_argument("--wait", type=float, default=60, help="seconds to wait for that; --out then refuses the result")
    p.add_argument("--cache", type=Path, default=ROOT / "target/peers")
    p.add_argument("--out", type=Path)
    return p.parse_args()


def main():
    o = arguments()
    o.cache.mkdir(parents=True, exist_ok=True)
    found, loads = measured(o)
    text = report(o, found, loads)
    print(text)
    if o.out:
        if max(loads) > o.max_load:
            raise SystemExit(f"error: others kept {max(loads):.2f} processors busy: {o.out} is not written")
        o.out.write_text(text)


if __name__ == "__main__":
    main()
