"""Whole training steps of dcc beside PyTorch, torch.compile, JAX and onnxruntime-training, in turns. See README.md.

    python benches/peers/run.py [--quick | --avx2] [--models NAME ...] [--threads 1 2] [--out benches/RESULTS.md]
    python benches/peers/run.py --report RESULTS.json ... [--out benches/RESULTS.md]
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path

import cases
import dcc_turn
import environments
import machine
import peak
import provenance
import report
from cases import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMITS = ROOT / "benches/limits.md"  # written by hand, about the figures that are kept

# Program: its environment and what its turn is told. Those in bf16 run on the GPTs alone.
PEERS = {
    "eager": ("torch", dict(compile=False, bf16=False)),
    "compile": ("torch", dict(compile=True, bf16=False)),
    "jax": ("jax", {}),
    "ort": ("ort", {}),
    "eager bf16": ("torch", dict(compile=False, bf16=True)),
    "compile bf16": ("torch", dict(compile=True, bf16=True)),
}
DCC = {"dcc": (), "dcc bf16": ("--dtype", "bf16")}
FIRST_LOSS, HALF_LOSS = 2e-5, 5e-3  # how far first losses may lie apart, of themselves; any loss in bf16
CONTROL = 4  # what the control multiplies the rate by: its losses must be refused


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dcc", default=str(ROOT / "target/release/dcc"), help="the release binary")
    p.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    p.add_argument("--programs", nargs="+", choices=[*DCC, *PEERS], help="default: all, in --quick those in f32")
    p.add_argument("--quick", action="store_true", help="one round of short turns: a look, not a result")
    p.add_argument("--avx2", action="store_true", help="restrict all to AVX2, dcc by --max-isa, leave onnxruntime out")
    p.add_argument("--dcc-env", action="append", default=[], metavar="NAME=VALUE", help="for dcc's turns")
    p.add_argument("--dcc-flag", action="append", default=[], metavar="FLAG", help="for `dcc compile`, as --dcc-flag=--x")
    p.add_argument("--rounds", type=int, help="that count, of each model and number of threads (default 3, in --quick 1)")
    p.add_argument("--seconds", type=float, help="timed in a turn, at least (default 1.5, in --quick 1)")
    p.add_argument("--max-load", type=float, default=0.2, help="processors that others may keep busy before and in a turn")
    p.add_argument("--wait", type=float, default=60, help="seconds to wait for less before a round is discarded")
    p.add_argument("--spare", type=int, default=3, help="rounds that may be discarded, of each model and number of threads")
    p.add_argument("--cache", type=Path, default=ROOT / "target/peers", help="environments, models, compiled kernels, results")
    p.add_argument("--date", help="for the head of the report")
    p.add_argument("--report", nargs="+", type=Path, metavar="RESULTS.json", help="render what was measured; measure nothing")
    p.add_argument("--out", type=Path, help="write the report here, not to stdout")
    o = p.parse_args()
    o.rounds = o.rounds or (1 if o.quick else 3)
    o.seconds = o.seconds or (1.0 if o.quick else 1.5)
    o.cache = o.cache.resolve()
    return o


def programs_of(o, case):
    chosen = o.programs or [p for p in (*DCC, *PEERS) if not (o.quick and "bf16" in p)]
    left_out = ({"ort"} if o.avx2 else set()) | (set() if case.family == "gpt" else {p for p in chosen if "bf16" in p})
    return [p for p in chosen if p not in left_out]


def environment(o, threads):
    """What a peer's process finds in its environment."""
    kernels = o.cache / ("kernels-avx2" if o.avx2 else "kernels")
    held = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if o.avx2:
        held |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
    return os.environ | held, kernels


def prepared(o, case):
    """The folder of a case, exported where it is not there or its definition has changed."""
    sources = [HERE / n for n in ("graphs.py", "prepare.py", "stored.py", "ort_turn.py")]
    sources += [ROOT / "samples" / n for n in ("models.py", "families.py", "export.py", "init.py")]
    text = repr((case.family, case.batch, case.config, case.rules, cases.ADAMW, cases.SEED, cases.BATCHES)) + "".join(f.read_text() for f in sources) + "".join(map(environments.requirements, ("torch", "ort")))
    folder = o.cache / "models" / case.name
    stamp, digest = folder / "digest", hashlib.sha256(text.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"{case.name}: exporting", flush=True)
        env, _ = environment(o, 1)
        for name, script in (("torch", ["prepare.py", folder, case.name]), ("ort", ["ort_turn.py", "--artifacts", folder, case.name])):
            command = [environments.python_of(name, o.cache), HERE / script[0], *script[1:]]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"error: {script[0]} {case.name}:\n{done.stderr[-4000:]}")
        stamp.write_text(digest)
    return folder


def peer_turn(o, name, case, folder, threads, seconds):
    """A peer's line of JSON, or {"refused": its message}."""
    where, told = PEERS[name]
    refused = folder / "ort/refused.txt"
    if name == "ort" and refused.exists():
        if case.family != "resnet":
            raise SystemExit(f"error: onnxruntime-training does not train {case.name}: {refused.read_text()}")
        return {"refused": refused.read_text()}
    env, kernels = environment(o, threads)
    told = told | dict(case=case.name, folder=str(folder), threads=threads, seconds=seconds, kernels=str(kernels), avx2=o.avx2)
    command = [environments.python_of(where, o.cache), HERE / f"{where}_turn.py", json.dumps(told)]
    processors = machine.processors(threads)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200,
                          preexec_fn=lambda: os.sched_setaffinity(0, processors))
    if done.returncode:
        raise SystemExit(f"error: {name}, {case.name}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Model:
    """A case with its folder and dcc's artifacts."""

    def __init__(self, o, case, scratch, start_mib, cores):
        self.o, self.cores, self.case, self.folder, self.programs = o, cores, case, prepared(o, case), programs_of(o, case)
        self.told = dict(dcc=o.dcc, case=case, folder=self.folder, env=o.dcc_env, flags=o.dcc_flag,
                         run_flags=["--max-isa", "avx2"] if o.avx2 else [], start_mib=start_mib, limit_s=600)
        self.artifacts = {name: dcc_turn.artifact(self.told, scratch, f"{case.name}-{name}", DCC[name])[0]
                          for name in self.programs if name in DCC}
        self.warm()

    def warm(self):
        """Lets those that compile for themselves fill their caches, once."""
        for name in self.programs:
            for threads in self.o.threads if name in ("compile", "compile bf16", "jax") else []:
                _, kernels = environment(self.o, threads)
                mark = kernels / "warm" / f"{self.case.name}-{name}-{threads}".replace(" ", "-")
                state = (self.folder / "digest").read_text() + environments.requirements(PEERS[name][0])
                if not mark.exists() or mark.read_text() != state:
                    print(f"{self.case.name}: {name} compiles for {threads} threads", flush=True)
                    peer_turn(self.o, name, self.case, self.folder, threads, 0)
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.write_text(state)

    def turn(self, name, threads, **changes):
        if name in PEERS:
            return peer_turn(self.o, name, self.case, self.folder, threads, self.o.seconds)
        told = self.told | dict(threads=threads, seconds=self.o.seconds, processors=machine.processors(threads)) | changes
        return dcc_turn.run(told, self.artifacts[name])

    def round(self, number, threads):
        """A turn of each program, beginning with another one each time, and the most processors that others kept busy; ends early
        where these are too many."""
        at, turns, worst = number % len(self.programs), [], 0.0
        for name in self.programs[at:] + self.programs[:at]:
            turn, load = machine.turn(self.o.max_load, self.o.wait, self.cores[threads], lambda: self.turn(name, threads))
            worst = max(worst, load)
            if turn is None:
                break
            turns.append(dict(case=self.case.name, threads=threads, program=name, **turn))
            if worst >= self.o.max_load:
                break
        return turns, worst


def differs(case, turn, other):
    """Whether two programs' first losses say that they train different things."""
    half = "bf16" in turn["program"] + other["program"]
    pairs = enumerate(zip(turn["losses"], other["losses"]))
    limit = lambda i: HALF_LOSS if half else case.later if i else FIRST_LOSS
    return any(not math.isclose(a, b, rel_tol=limit(i)) for i, (a, b) in pairs)


def compare(case, turns):
    """Fails the run where a program trains something else."""
    ran = [t for t in turns if "losses" in t]
    for turn in ran[1:]:
        if differs(case, turn, ran[0]):
            lines = "\n".join(f"  {t['program']:14} {t['losses']}" for t in ran)
            raise SystemExit(f"error: {case.name}: {turn['program']} does not train what {ran[0]['program']} trains:\n{lines}")


def control(model, turns, threads):
    """The comparison with each peer in f32 must refuse dcc with another learning rate; whether there were such turns."""
    name = next((p for p in model.programs if p == "dcc"), None)
    others = [t for t in turns if "losses" in t and t["program"] in PEERS and "bf16" not in t["program"]]
    if name and others:
        changed = model.turn(name, threads, rate=CONTROL * model.case.rate, seconds=0) | {"program": name}
        if not all(differs(model.case, changed, t) for t in others):
            raise SystemExit(f"error: {model.case.name}: the comparison does not see a learning rate times {CONTROL}")
    return bool(others)


def measure(o, models, keep):
    """All rounds, each with its turns, and whether it counts. keep(rounds, []) after each pass over the models."""
    rounds, started = [], time.monotonic()
    counted = {(model.case.name, threads): 0 for model in models for threads in o.threads}
    controlled = set()
    for number in range(o.rounds + o.spare):
        for model in models:
            for threads in o.threads:
                key = model.case.name, threads
                if counted[key] >= o.rounds:
                    continue
                turns, load = model.round(number, threads)
                compare(model.case, turns)
                if model not in controlled and control(model, turns, threads):
                    controlled.add(model)
                alone = load < o.max_load
                counted[key] += alone
                rounds.append(dict(case=model.case.name, threads=threads, counted=alone, load=load, turns=turns))
                told = " ".join(f"{t['program']} {t['wall_ms']:.1f}" for t in turns if "wall_ms" in t)
                print(f"{time.monotonic() - started:5.0f} s  {model.case.name}, {threads} threads: {told} ms"
                      f"{'' if alone else f', DISCARDED: others kept {load:.1f} processors busy'}", flush=True)
        keep(rounds, [])
    return rounds


def starts(o, models):
    """Start-ups of the largest GPT, on as many processors as there are to be measured."""
    found = []
    for model in (m for m in models if m.case.name == "gpt2" and "dcc" in m.programs):
        told = model.told | dict(threads=max(o.threads), processors=machine.processors(max(o.threads)))
        for _ in range(o.rounds):
            load, others = machine.quiet(o.max_load, o.wait), machine.Others()
            found.append(dcc_turn.start(told) | dict(case=model.case.name, threads=max(o.threads)))
            found[-1]["load"] = max(load, others.load())
            print(f"start: first step after {found[-1]['first_s']:.2f} s; others kept {found[-1]['load']:.1f} processors busy", flush=True)
    return found


def main():
    o = arguments()
    if o.report:
        return emit(o, [json.loads(path.read_text()) for path in o.report])
    for name in ("torch", "jax", "ort"):
        environments.python_of(name, o.cache)
    commit = provenance.commit()
    with tempfile.TemporaryDirectory(dir=o.cache) as scratch:
        peak_gflops = peak.measured(Path(scratch), machine.processors(1), o.avx2)
        start_mib = dcc_turn.start_mib(o.dcc)
        cores = {threads: machine.Cores(Path(scratch), machine.processors(threads)) for threads in o.threads}
        models = [Model(o, CASES[name], scratch, start_mib, cores) for name in o.models]
        path = o.cache / f"results{'-avx2' if o.avx2 else ''}{'-quick' if o.quick else ''}.json"

        def keep(rounds, started):
            result = dict(machine=machine.described(), commit=commit, command=provenance.command_line(), avx2=o.avx2, quick=o.quick,
                          seconds=o.seconds, max_load=o.max_load, peak_gflops=peak_gflops, start_mib=start_mib, rounds=rounds,
                          starts=started)
            path.write_text(json.dumps(result, indent=1))
            return result

        result = keep(measure(o, models, keep), starts(o, models))
    print(f"measured: {path}")
    emit(o, [result])


def emit(o, results):
    results = report.joined(results)
    text = report.rendered(results, o.date)
    if not o.out:
        print(text)
        return
    short = [reason for result in results for reason in report.unfit(result)]
    if short:
        raise SystemExit("error: not a result, so not written:\n  " + "\n  ".join(short))
    o.out.write_text(f"{text}\n{LIMITS.read_text()}")


if __name__ == "__main__":
    main()
