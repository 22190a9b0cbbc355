"""Puts the turns of `torch_turn.py` and `dcc_turn.py` side by side. Needs nothing but Python.

    python compare.py FOLDER            # the table of all cases whose turns are all there
    python compare.py FOLDER CASE       # one line; fails where the losses say that the programs did not train alike
    python compare.py FOLDER CASE --fastest     # torch's fastest mode so far

FOLDER has CASE/torch-MODE-TURN.json and CASE/dcc-TURN.json, a line of JSON each.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import cases

TURNS = 2  # of each program


def turns(folder, case, files):
    """The JSON of these files, by name; those that are whole."""
    found = []
    for path in sorted((folder / case.name).glob(files)):
        text = path.read_text().strip().splitlines()
        found += [json.loads(text[-1])] if text else []
    return found


def fastest(folder, case):
    """Torch's mode whose first turn took the least time."""
    return min(turns(folder, case, "torch-*-1.json"), key=lambda t: t["ms"], default={"settings": {"mode": ""}})["settings"]["mode"]


def pair(folder, case):
    """(turns of dcc, turns of torch in its fastest mode), or None where some are to come."""
    dcc, torch = turns(folder, case, "dcc-*.json"), turns(folder, case, f"torch-{fastest(folder, case)}-[0-9].json")
    return (dcc, torch) if len(dcc) >= TURNS and len(torch) >= TURNS else None


def apart(case, dcc, torch):
    """How far the losses of steps lie apart at most, as a share of the first; the initial values are not the same, only as widely spread."""
    gaps = [abs(a - b) for a, b in zip(dcc[0]["losses"], torch[0]["losses"], strict=True)]
    return max(gap if gap == gap else math.inf for gap in gaps) / abs(torch[0]["losses"][0])


def gib(size):
    return "–" if size is None else f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def figures(case, dcc, torch):
    """What a row is made of."""
    ms, torch_ms = (statistics.median(t["ms"] for t in turns) for turns in (dcc, torch))
    flops = None if torch[0]["device"] == "cpu" else case.flops(torch[0]["met"])
    mfu = [flops / (1e-3 * x) / cases.PEAK if flops else None for x in (ms, torch_ms)]
    peak, torch_peak = (max((t["peak_bytes"] or 0 for t in turns), default=0) or None for turns in (dcc, torch))
    used, torch_used = (max((t["used_bytes"] or 0 for t in turns), default=0) or None for turns in (dcc, torch))
    return {"ms": ms, "torch_ms": torch_ms, "ratio": torch_ms / ms, "mfu": mfu[0], "torch_mfu": mfu[1], "peak": peak, "torch_peak": torch_peak,
            "memory": peak / torch_peak if torch_peak else None, "used": used, "torch_used": torch_used,
            "items_s": 1e3 * case.items / ms, "torch_items_s": 1e3 * case.items / torch_ms, "apart": apart(case, dcc, torch)}


def percent(share):
    return "–" if share is None else f"{100 * share:.1f} %"


def bars(case, f):
    """The bars of a case, each with whether it is met."""
    verdict = lambda ok: "met" if ok else "missed"
    said = [f"{case.bars['speed']:.2f} × {verdict(f['ratio'] >= case.bars['speed'])}"] if "speed" in case.bars else []
    if "mfu" in case.bars and f["mfu"] is not None:
        said.append(f"{100 * case.bars['mfu']:.0f} % MFU {verdict(f['mfu'] >= case.bars['mfu'])}")
    if f["memory"] is not None:
        said.append(f"0.8 × memory {verdict(f['memory'] <= 0.8)}")
    return ", ".join(said)


def row(case, dcc, torch):
    f, s = figures(case, dcc, torch), torch[0]["settings"]
    settings = s["mode"] + (f", {s['attention']}" if s["attention"] else "")
    unit = "tokens" if case.is_text else "samples"
    memory = "–" if f["memory"] is None else f"{f['memory']:.2f} ×"
    return (f"| {case.title} | {f['ms']:.3g} ms | {f['torch_ms']:.3g} ms | {f['ratio']:.2f} × | {f['items_s']:,.0f} {unit}/s | {percent(f['mfu'])} | "
            f"{percent(f['torch_mfu'])} | {gib(f['peak'])} ({gib(f['used'])}) | {gib(f['torch_peak'])} ({gib(f['torch_used'])}) | {memory} | "
            f"{settings} | {f['apart']:.1e} | {bars(case, f)} |")


HEAD = """| model, a step | dcc | torch | faster by | dcc's speed | MFU | torch's MFU | dcc's memory (of the GPU) | torch's memory (of the GPU) | memory | torch's mode | losses apart | bars |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def table(folder):
    rows, versions, devices = [], {}, set()
    for case in cases.CASES.values():
        found = pair(folder, case)
        if found:
            rows.append(row(case, *found))
            versions |= found[0][0]["versions"] | found[1][0]["versions"]
            devices.add(found[1][0]["device"])
    if not rows:
        return ""
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"""Medians of {TURNS} turns each, in turns, on {', '.join(sorted(devices))}; {named}. `benches/gpu/README.md` says how.

{HEAD}
""" + "\n".join(rows) + "\n"


def line(folder, case):
    found = pair(folder, case)
    if not found:
        raise SystemExit("turns are missing")
    f = figures(case, *found)
    if not f["apart"] <= case.close:
        raise SystemExit(f"{case.name}: losses lie apart by {f['apart']:.2g} of the first, allowed: {case.close}")
    print(f"{f['ms']:.3g} ms a step, torch {f['torch_ms']:.3g}: {f['ratio']:.2f} ×, MFU {percent(f['mfu'])}, losses {f['apart']:.1e} apart")


def main():
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    if not rest:
        print(table(folder))
    elif "--fastest" in rest:
        print(fastest(folder, cases.CASES[rest[0]]))
    else:
        line(folder, cases.CASES[rest[0]])


if __name__ == "__main__":
    main()
