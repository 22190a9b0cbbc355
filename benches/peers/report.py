"""The report: tables of medians, and which bars hold. From measurements only; see `run.py` for what a result holds."""

import math
import statistics

from cases import CASES, SIX

F32 = ("eager", "compile", "jax", "ort")
BF16 = ("eager bf16", "compile bf16")
TITLES = {"dcc": "dcc", "eager": "torch eager", "compile": "torch.compile", "jax": "JAX", "ort": "ORT-training",
          "dcc bf16": "dcc", "eager bf16": "torch eager", "compile bf16": "torch.compile"}
LEAST_ROUNDS = 3  # of each row of a report that is kept
OVERALL, OVER_ONE_THREAD, FROM_MS = 1.3, 1.7, 20  # the geometric mean; 2 threads over 1, of steps above so many ms
FIRST_STEP_S, PREPARED_S = 5, 0.5  # from the command, compiling included; of it kernels
OF_PEAK, OVER_F32, OVER_AUTOCAST = 0.7, 1.4, 1.0


class Measured:
    """A result by case, threads and program."""

    def __init__(self, result):
        self.result, self.cells, self.rounds = result, {}, {}
        for round in result["rounds"]:
            key = round["case"], round["threads"]
            self.rounds.setdefault(key, []).append(round["counted"])
            for turn in round["turns"] if round["counted"] else []:
                self.cells.setdefault((*key, turn["program"]), []).append(turn)
        self.cases = [case for case in CASES.values() if any(name == case.name for name, _ in self.rounds)]
        self.threads = sorted({threads for _, threads in self.rounds})

    def all_turns(self):
        return [turn for turns in self.cells.values() for turn in turns]

    def turns(self, case, threads, program):
        return [t for t in self.cells.get((case.name, threads, program), []) if "wall_ms" in t]

    def median(self, case, threads, program, what="wall_ms"):
        """Of the turns that count; None where there is none."""
        values = [t[what] for t in self.turns(case, threads, program)]
        return statistics.median(values) if values else None

    def spread(self, case, threads, program):
        """From the fastest turn to the slowest, of the median."""
        values = [t["wall_ms"] for t in self.turns(case, threads, program)]
        return (max(values) - min(values)) / statistics.median(values)

    def leanest(self, case, threads, what, programs=F32):
        """The peer with the smallest median, and it."""
        found = [(self.median(case, threads, p, what), p) for p in programs]
        found = [(value, p) for value, p in found if value is not None]
        return min(found) if found else (None, None)

    def ratio(self, case, threads, what="wall_ms", program="dcc", programs=F32):
        """How many times as fast as the fastest peer dcc is."""
        own, (peer, _) = self.median(case, threads, program, what), self.leanest(case, threads, what, programs)
        return peer / own if own and peer else None


def joined(results):
    """Results of one commit on one machine as one, with the rounds of all: of several sittings."""
    whole = {}
    for result in results:
        if is_mesh(result):
            key = id(result)
        else:
            key = tuple(repr(result[what]) for what in ("commit", "machine", "avx2", "quick", "seconds", "max_load"))
        if key in whole:
            both = {what: whole[key][what] + result[what] for what in ("rounds", "starts")}
            both["command"] = f"{whole[key]['command']}`, `run.py {result['command']}"
            result = whole[key] | both | {"peak_gflops": max(whole[key]["peak_gflops"], result["peak_gflops"])}
        whole[key] = result
    return list(whole.values())


def unfit(result):
    """Why a result may not be kept."""
    found = ["it is of --quick"] if result["quick"] else []
    if is_mesh(result):
        counted = sum(r["counted"] for r in result["rounds"])
        return found + ([f"meshes: {counted} rounds count; {LEAST_ROUNDS} are needed"] if counted < LEAST_ROUNDS else [])
    for (case, threads), counted in Measured(result).rounds.items():
        if sum(counted) < LEAST_ROUNDS:
            found.append(f"{case}, {threads} threads: {sum(counted)} of {len(counted)} rounds count; {LEAST_ROUNDS} are needed")
    return found


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value, digits=3):
    """With so many digits that matter."""
    if value is None:
        return "–"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def times(value):
    return "–" if value is None else f"{value:.2f} ×"


def speeds(m, what, programs, spread):
    rows = []
    for case in m.cases:
        for threads in m.threads:
            if not m.turns(case, threads, programs[0]):
                continue
            cells = []
            for program in programs:
                refused = any("refused" in t for t in m.cells.get((case.name, threads, program), []))
                value = m.median(case, threads, program, what)
                several = spread and len(m.turns(case, threads, program)) > 1
                span = f" ±{50 * m.spread(case, threads, program):.0f} %" if several else ""
                cells.append("refused" if refused else number(value) + span)
            _, fastest = m.leanest(case, threads, what, programs[1:])
            cells += [TITLES.get(fastest, "–"), times(m.ratio(case, threads, what, programs[0], programs[1:]))]
            rows.append([case.title, threads, *cells])
    return table(["model", "threads", *(TITLES[p] for p in programs), "fastest peer", "dcc is"], rows)


def memory(m):
    rows = []
    for case in m.cases:
        for threads in m.threads:
            own = m.median(case, threads, "dcc", "memory_mib")
            peer, leanest = m.leanest(case, threads, "memory_mib")
            if own is None:
                continue
            cells = [number(m.median(case, threads, p, "memory_mib")) for p in F32]
            rows.append([case.title, threads, number(own), *cells, TITLES.get(leanest, "–"),
                         f"{100 * own / peer:.0f} %" if peer else "–", f"{100 * case.memory:.0f} %"])
    return table(["model", "threads", "dcc", *(TITLES[p] for p in F32), "leanest peer", "dcc needs", "bar"], rows)


def plural(threads):
    return f"{threads} thread{'s' * (threads != 1)}"


def bar(what, found, most=False):
    """A row: whether a bar holds for all of `found`, [name, measured, bar], said plainly. most: the measured may not exceed it."""
    known = [(name, value, limit) for name, value, limit in found if value is not None]
    shown = [f"{name} {value:.2f} {'≤' if most else '≥'} {limit:g}" for name, value, limit in known]
    fails = [(value > limit if most else value < limit) for _, value, limit in known]
    short, good = ([text for text, fail in zip(shown, fails) if fail == which] for which in (True, False))
    missing = [name for name, value, _ in found if value is None]
    said = "**falls short**" if short else "holds" if known and not missing else "holds so far" if known else "not measured"
    return [what, said, "; ".join(text.replace("≥", "<").replace("≤", ">") for text in short) or "–", "; ".join(good) or "–",
            ", ".join(missing) or "–"]


def bars(m):
    """The rows of all bars. Ratios are of times: 1.25 is 1.25 times as fast as the fastest peer."""
    avx2, rows = m.result["avx2"], []
    for threads in m.threads:
        found = [(c.short, m.ratio(c, threads), 1.0 if avx2 else c.bar if threads == 1 else c.bar_2) for c in CASES.values()]
        rows.append(bar(f"steps, {plural(threads)}, of the fastest peer{' that can be restricted' * avx2}", found))
    if avx2:
        return rows
    ratios = [m.ratio(case, 1) for case in SIX]
    rows.append(bar("geometric mean of the first six, 1 thread",
                    [("all six", None if None in ratios else statistics.geometric_mean(ratios), OVERALL)]))
    scaled = [(c, *(m.median(c, threads, "dcc") for threads in (1, 2))) for c in CASES.values()]
    rows.append(bar(f"2 threads of our 1, steps over {FROM_MS} ms",
                    [(c.short, one / two if one and two else None, OVER_ONE_THREAD) for c, one, two in scaled if not one or one > FROM_MS]))
    big = CASES["gpt2"]
    took, peak = m.median(big, 1, "dcc"), m.result["peak_gflops"]
    rows.append(bar("model FLOPs of the measured peak, 1 thread",
                    [(big.short, big.flops / (1e6 * took * peak) if took and peak else None, OF_PEAK)]))
    gpts = [(c, threads, f"{c.short}, {plural(threads)}") for c in CASES.values() if c.family == "gpt" for threads in m.threads]
    halves = [(m.median(c, threads, "dcc"), m.median(c, threads, "dcc bf16"), text) for c, threads, text in gpts]
    rows.append(bar("bf16 of our f32", [(text, full / half if full and half else None, OVER_F32) for full, half, text in halves]))
    rows.append(bar("bf16 of torch autocast, the faster of both",
                    [(text, m.ratio(c, threads, "wall_ms", "dcc bf16", BF16), OVER_AUTOCAST) for c, threads, text in gpts]))
    for threads in m.threads:
        needs = [(c, m.median(c, threads, "dcc", "memory_mib"), m.leanest(c, threads, "memory_mib")[0]) for c in CASES.values()]
        found = [(c.short, own / peer if own and peer else None, c.memory) for c, own, peer in needs]
        rows.append(bar(f"memory of the leanest peer's, {plural(threads)}", found, most=True))
    alone = [s for s in m.result.get("starts", []) if s["load"] < m.result["max_load"] or m.result["quick"]]
    seconds = lambda what: statistics.median(s[what] for s in alone) if alone else None
    rows.append(bar("start-up: seconds from the command to the first step's loss, of them kernels", [
        (big.short, seconds("first_s"), FIRST_STEP_S), (f"{big.short}, kernels", seconds("prepare_s"), PREPARED_S)], most=True))
    return rows


def setting(result):
    m, versions = result["machine"], {}
    for turn in Measured(result).all_turns():
        versions |= turn.get("versions", {})
    peak = f"{result['peak_gflops']:.0f} GFLOP/s" if result["peak_gflops"] else "not measured (no C compiler)"
    return [
        f"- Machine: {m['processor']}, {m['processors']} processors ({m['vectors']}), {m['memory']}, {m['system']}; "
        f"f32 multiply-add peak of one thread, measured: {peak}.",
        f"- Programs: dcc {result['commit']}; " + ", ".join(f"{name} {v}" for name, v in sorted(versions.items())) + ".",
        f"- Command: `python benches/peers/run.py {result['command']}`.".replace(" `.", "`."),
        f"- Each figure is the median of turns, processes of their own of at least {result['seconds']:g} timed seconds, each the "
        "median of its steps; ± is half the way from the fastest turn to the slowest.",
        f"- A round is a turn of each program. It counts where others kept less than {result['max_load']:g} processors busy just before "
        "each turn and during it. What the first two of a turn's processors (or its one) lack to what they do on cores of their own, looked at "
        "5 times a second during the timed steps, counts as kept busy: a host may run both on one core, or another guest beside them. Such a "
        "turn is made again, up to three times.",
    ]


def section(result):
    m = Measured(result)
    title = "## AVX2 only" if result["avx2"] else "## Whole training steps"
    counts = sorted({sum(counted) for counted in m.rounds.values()})
    lost = [f"{case}, {plural(threads)}: {len(counted) - sum(counted)} of {len(counted)}" for (case, threads), counted in m.rounds.items()
            if not all(counted)]
    refused = {(t["program"], t["case"]): t["refused"] for t in m.all_turns() if "refused" in t}
    parts = [title, "", *setting(result), f"- Rounds that count, of each row: {' to '.join(map(str, counts[:1] + counts[1:][-1:]))}; "
             f"discarded: {'; '.join(lost) or 'none'}.", "",
             "### Milliseconds of a step", "", speeds(m, "wall_ms", ("dcc", *F32), True),
             "### Milliseconds of processor time of a step, all threads", "", speeds(m, "cpu_ms", ("dcc", *F32), False)]
    if any(t["program"] == "dcc bf16" for t in m.all_turns()):
        parts += ["### Milliseconds of a step in bf16, torch under autocast", "", speeds(m, "wall_ms", ("dcc bf16", *BF16), True)]
    parts += ["### Memory", "",
              "MiB at the peak: of a peer over its own imports, of dcc over a dcc that has only started.", "",
              memory(m)]
    parts += [f"{TITLES[p]} refused {case}: {text}\n" for (p, case), text in refused.items()]
    parts += ["### Bars", "", "Speeds are how many times as fast, memory a share.", "",
              table(["what", "", "falls short", "holds", "not measured"], bars(m))]
    return "\n".join(parts)


MESHES = {  # dcc's program: torch's, and how many times as fast dcc is to be
    "dcc dp 2": ("torch DDP", 1.3), "dcc tp 2": ("torch DTensor", 1.3), "dcc pp 2": ("torch pipelining", 1.3),
    "dcc ZeRO-3": ("torch FSDP2", 1.5),
}
ALONE, OF_ALONE = "dcc, 1 process", 0.85  # on two threads; what dp 2 is to be of it


def mesh_section(result):
    """Of a result of mesh.py."""
    found = {}
    for turn in (turn for r in result["rounds"] if r["counted"] for turn in r["turns"]):
        found.setdefault(turn["program"], []).append(turn["wall_ms"])
    took = {program: statistics.median(ms) for program, ms in found.items()}
    shown = lambda p: f"{number(took[p])} ±{50 * (max(found[p]) - min(found[p])) / took[p]:.0f} %" if p in took else "–"
    ratio = lambda own, other: took[other] / took[own] if own in took and other in took else None
    counted = sum(r["counted"] for r in result["rounds"])
    versions = {k: v for r in result["rounds"] for t in r["turns"] for k, v in t.get("versions", {}).items()}
    m = result["machine"]
    rows = [[own, shown(own), other, shown(other), times(ratio(own, other)), times(ratio(own, ALONE))] for own, (other, _) in MESHES.items()]
    rows.append([ALONE + ", 2 threads", shown(ALONE), "–", "–", "–", times(ratio(ALONE, ALONE))])
    checks = [bar("dp 2 of the single process on 2 threads", [("GPT mini", ratio("dcc dp 2", ALONE), OF_ALONE)]),
              bar("meshes of torch's", [(own, ratio(own, other), limit) for own, (other, limit) in MESHES.items()])]
    return "\n".join([
        "## Meshes of two processes", "",
        f"GPT mini in f32, one thread a process, collectives over gloo and dcc's shared memory on one machine: {m['processor']}, "
        f"{m['processors']} processors, {m['system']}; dcc {result['commit']}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f". Medians of turns of at least {result['seconds']:g} timed seconds, rounds: {counted}; others kept at most "
        f"{max(r['load'] for r in result['rounds'] if r['counted']):.1f} processors busy. Pipelines in 1F1B, {result['microbatches']} microbatches.", "",
        "### Milliseconds of a step", "",
        table(["dcc", "ms", "torch", "ms", "dcc is", "of 1 process"], rows),
        "### Bars", "", table(["what", "", "falls short", "holds", "not measured"], checks)])


def rendered(results, date):
    head = ["# Measured", "", "Written by `benches/peers/run.py`; what is measured, and how, is in [peers/README.md](peers/README.md)."]
    head += [f"Measured {date}."] if date else []
    quick = ["", "**A look, not a result: one round of short turns.**"] if any(r["quick"] for r in results) else []
    meshes = any(is_mesh(r) for r in results)
    missing = [] if meshes else ["## Not measured yet", "", "dp, tp and pp beside DDP, DTensor and pipelining, ZeRO-3 beside FSDP2.", ""]
    sections = [mesh_section(r) if is_mesh(r) else section(r) for r in results]
    return "\n".join([*head, *quick, "", *sections, *missing])


def is_mesh(result):
    return result.get("kind") == "mesh"
