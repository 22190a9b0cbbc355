"""GPT mini on meshes of two processes, one thread each: dcc beside torch's DDP, DTensor, pipelining and FSDP2 over gloo, in turns.

    python benches/peers/mesh.py [--quick] [--rounds 3]
    python benches/peers/run.py --report target/peers/results.json target/peers/results-mesh.json --out benches/RESULTS.md

A round is a turn of each program, beginning with another one each time, on the same weights and batches, their first losses compared
as run.py compares them; dcc with another learning rate must fail that. Both pipelines have the same microbatches, in 1F1B.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path

import dcc_turn
import environments
import machine
import provenance
import run
from cases import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CASE, MICROBATCHES = "gpt-mini", 4
ALONE = "dcc, 1 process"
# dcc's programs: threads of a process, and flags of `dcc compile`. torch's: the mesh that its turn is told.
DCC = {
    ALONE: (2, ()),
    "dcc dp 2": (1, ("--dp", "2")),
    "dcc tp 2": (1, ("--tp", "2")),
    "dcc pp 2": (1, ("--pp", "2", "--schedule", "1f1b", "--grad-accum", str(MICROBATCHES))),
    "dcc ZeRO-3": (1, ("--dp", "2", "--fsdp")),
}
TORCH = {"torch DDP": "dp", "torch DTensor": "tp", "torch pipelining": "pp", "torch FSDP2": "zero3"}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dcc", default=str(ROOT / "target/release/dcc"), help="the release binary")
    p.add_argument("--programs", nargs="+", choices=[*DCC, *TORCH], default=[*DCC, *TORCH])
    p.add_argument("--quick", action="store_true", help="one round of short turns: a look, not a result")
    p.add_argument("--rounds", type=int, help="that count (default 3, in --quick 1)")
    p.add_argument("--seconds", type=float, help="timed in a turn, at least (default 3, in --quick 1)")
    p.add_argument("--max-load", type=float, default=0.2, help="processors that others may keep busy before and in a turn")
    p.add_argument("--wait", type=float, default=60, help="seconds to wait for less before a round is discarded")
    p.add_argument("--spare", type=int, default=3, help="rounds that may be discarded")
    p.add_argument("--cache", type=Path, default=ROOT / "target/peers")
    o = p.parse_args()
    o.rounds, o.seconds = o.rounds or (1 if o.quick else 3), o.seconds or (1.0 if o.quick else 3.0)
    o.cache, o.avx2 = o.cache.resolve(), False
    return o


class Meshes:
    """The case with its folder and dcc's artifacts."""

    def __init__(self, o, scratch):
        self.o, self.case, self.cores = o, CASES[CASE], machine.Cores(Path(scratch), machine.processors(2))
        self.folder = run.prepared(o, self.case)
        self.told = dict(dcc=o.dcc, case=self.case, folder=self.folder, env=[], flags=[], run_flags=[], start_mib=0, limit_s=600)
        self.artifacts = {name: dcc_turn.artifact(self.told, scratch, name.replace(" ", "-"), DCC[name][1])[0]
                          for name in o.programs if name in DCC}

    def turn(self, name, **changes):
        if name in TORCH:
            return self.torch_turn(name)
        told = dict(threads=DCC[name][0], seconds=self.o.seconds, processors=machine.processors(2))
        return dcc_turn.run(self.told | told | changes, self.artifacts[name])

    def torch_turn(self, name):
        env, _ = run.environment(self.o, 1)
        told = dict(case=CASE, folder=str(self.folder), mesh=TORCH[name], seconds=self.o.seconds, microbatches=MICROBATCHES)
        command = [environments.python_of("torch", self.o.cache), HERE / "mesh_torch.py", json.dumps(told)]
        processors = machine.processors(2)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600,
                              preexec_fn=lambda: os.sched_setaffinity(0, processors))
        if done.returncode:
            raise SystemExit(f"error: {name}:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def round(self, number):
        """A turn of each program, and the most processors that others kept busy; ends early where these are too many."""
        at, turns, worst = number % len(self.o.programs), [], 0.0
        limit = math.inf if self.o.quick else self.o.max_load
        for name in self.o.programs[at:] + self.o.programs[:at]:
            turn, load = machine.turn(limit, self.o.wait, self.cores, lambda: self.turn(name))
            worst = max(worst, load)
            if turn is None:
                break
            turns.append(turn | {"program": name})
            if worst >= limit:
                break
        return turns, worst

    def control(self, turns):
        """The comparison with each of torch's meshes must refuse each of dcc's with another learning rate."""
        theirs = [t for t in turns if t["program"] in TORCH]
        for name in self.artifacts if theirs else []:
            changed = self.turn(name, rate=run.CONTROL * self.case.rate, seconds=0) | {"program": name}
            if not all(run.differs(self.case, changed, t) for t in theirs):
                raise SystemExit(f"error: {name}: the comparison does not see a learning rate times {run.CONTROL}")
        return bool(theirs)


def measure(o, meshes):
    rounds, started, controlled = [], time.monotonic(), False
    while sum(r["counted"] for r in rounds) < o.rounds and len(rounds) < o.rounds + o.spare:
        turns, load = meshes.round(len(rounds))
        run.compare(meshes.case, turns)
        controlled = controlled or meshes.control(turns)
        counted = load < o.max_load or o.quick
        rounds.append(dict(counted=counted, load=load, turns=turns))
        told = ", ".join(f"{t['program']} {t['wall_ms']:.1f}" for t in turns)
        print(f"{time.monotonic() - started:5.0f} s  {told} ms{'' if counted else ', DISCARDED'}; others kept {load:.1f} processors busy",
              flush=True)
    return rounds


def main():
    o = arguments()
    environments.python_of("torch", o.cache)
    environments.python_of("ort", o.cache)
    commit = provenance.commit()
    with tempfile.TemporaryDirectory(dir=o.cache) as scratch:
        rounds = measure(o, Meshes(o, scratch))
    result = dict(kind="mesh", machine=machine.described(), commit=commit, quick=o.quick, seconds=o.seconds, max_load=o.max_load,
                  microbatches=MICROBATCHES, rounds=rounds)
    path = o.cache / f"results-mesh{'-quick' if o.quick else ''}.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"measured: {path}\n")
    print(run.report.rendered([result], None))


if __name__ == "__main__":
    main()
