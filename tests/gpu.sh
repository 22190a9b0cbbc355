#!/usr/bin/env bash
# Proves and measures dcc on a machine with an NVIDIA GPU, which needs neither a network nor Rust:
#   tests/gpu.sh check|sanitize|train|nccl|bench [MODEL...]
# DCC: the binary, built elsewhere (`cargo build --release -p dcc`, then `strip`), ./dcc by default. NVIDIA's libraries (CUDA 12 or 13: NVRTC
# at least) are taken from the packages of `python3`, as PyTorch's wheels bring them, or from LD_LIBRARY_PATH.
# Every part that passed is left out when it is run again (RESULTS, results.tsv by default), so that a run may be cut off; parts last minutes.
# At the end all results so far are printed and written to benches/GPU.md (REPORT).
# `bench` keeps its measurements in BENCH (./bench), what can be made again in CACHE; BENCH_DEVICE=cpu runs it at tiny models, without a GPU.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
DCC=$(realpath "${DCC:-dcc}")
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-results.tsv}
REPORT=${REPORT:-$here/benches/GPU.md}
LIMIT=${LIMIT:-420}
BENCH_DEVICE=${BENCH_DEVICE:-cuda}
CACHE=${CACHE:-${TMPDIR:-/tmp}/dcc-bench}
own_libraries=${LD_LIBRARY_PATH:-}
began=$SECONDS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
touch "$RESULTS"

libraries=$("$PYTHON" - <<'PYTHON' 2>/dev/null
import pathlib
try:
    import nvidia
    roots = [pathlib.Path(path) for path in nvidia.__path__]
except ImportError:
    roots = []
print(":".join(sorted({str(file.parent) for root in roots for file in root.rglob("lib*.so*")
                       if "stubs" not in file.parts})))
PYTHON
)
export LD_LIBRARY_PATH="${libraries:+$libraries:}${LD_LIBRARY_PATH:-}"
# NCCL is looked for without a number, which wheels do not have.
nccl=$(tr ':' '\n' <<<"$LD_LIBRARY_PATH" | while read -r folder; do ls "$folder"/libnccl.so.2 2>/dev/null; done | head -1)
if [ -n "$nccl" ]; then
    ln -s "$nccl" "$scratch/libnccl.so"
    LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$scratch"
fi

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
commit=$(git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown)
bench=${BENCH:-bench}/$commit-$BENCH_DEVICE

# Mesh by mesh of one model: compiled once, with initial values of the script's own.
# model, data, flags
SAMPLES="
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --optimizer adamw --grad-clip 1
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --dtype bf16 --optimizer adamw
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --dtype f16
gpt2_tiny_dropout gpt2_tiny_next --global-batch-size 4 --grad-accum 2
llama_tiny gpt2_tiny_next --global-batch-size 4 --optimizer lamb
llama_tiny gpt2_tiny_next --global-batch-size 4 --dtype bf16 --optimizer muon
cnn mlp --global-batch-size 8 --optimizer sgd
cnn mlp --global-batch-size 8 --dtype bf16 --optimizer adafactor
cnn mlp --global-batch-size 4 --dtype f64
mlp mlp --global-batch-size 8 --optimizer lion
families/resnet mlp --global-batch-size 8 --optimizer sgd
"
MESHES="
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --dp 2 --zero 1 --grad-clip 1
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --dp 2 --zero 3 --grad-accum 2 --grad-clip 1
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --tp 2
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --tp 2 --sequence-parallel --dp 2
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --pp 2 --grad-accum 4
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --tp 2 --pp 2 --grad-accum 2
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --dp 4 --dtype bf16 --zero 2
gpt2_tiny_dropout gpt2_tiny_next --global-batch-size 4 --dp 2 --tp 2
llama_tiny gpt2_tiny_next --global-batch-size 4 --cp 2 --dp 2
llama_tiny gpt2_tiny_next --global-batch-size 4 --tp 4
families/resnet mlp --global-batch-size 8 --dp 2 --tp 2 --optimizer sgd
cnn mlp --global-batch-size 8 --dp 4
"
# Larger shapes than the tests', generated kernels against float64 and all against the CPU.
SHAPES="
gpt2_124m - --global-batch-size 2 --optimizer adamw --grad-clip 1
gpt2_124m - --global-batch-size 2 --dtype bf16 --optimizer adamw
"

# one PART NAME COMMAND...: runs it unless it passed before, and keeps the verdict and its last line.
one() {
    local part=$1 name=$2 out verdict took
    shift 2
    if grep -qF "$part"$'\t'"$name"$'\t'"$commit"$'\tpassed' "$RESULTS"; then
        return 0
    fi
    if ((SECONDS - began > LIMIT)); then
        echo "$part: time is up; run it again to go on" >&2
        return 1
    fi
    took=$SECONDS
    out=$("$@" 2>&1) && verdict=passed || verdict=failed
    took=$((SECONDS - took))
    printf '%s\t%s\t%s\t%s\t%s s\t%s\n' "$part" "$name" "$commit" "$verdict" "$took" "$(tail -1 <<<"$out" | tr '\t' ' ')" >>"$RESULTS"
    tail -1 "$RESULTS"
    [ $verdict = passed ] || printf '%s\n' "$out" | tail -20 >&2
}

artifact() { # model flags: compiles to $scratch/art.dcc
    # shellcheck disable=SC2086
    "$DCC" compile "$here/tests/models/$1.onnx" -o "$scratch/art.dcc" $2 >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        return 1
    }
}

# What a model is fed: a file of the tests, or nothing, then values of chance.
feed() {
    [ "$1" = - ] || echo "--data $here/tests/models/data/$1.npz"
}

kernels() { # model data flags
    artifact "$1" "$3" && "$DCC" verify "$scratch/art.dcc" --kernels cuda >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        return 1
    }
    grep kernels "$scratch/out"
}

both() { # model data flags: every instruction, by dcc's own kernels, on GPU and CPU
    # shellcheck disable=SC2046
    artifact "$1" "$3" && "$DCC" run "$scratch/art.dcc" $(feed "$2") --init 1 --lr 0.01 --steps 2 --device both --gemm own \
        --attention own >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        return 1
    }
    grep 'results of .* and the CPU agree' "$scratch/out"
}

# The losses of both devices: the largest relative difference of 5 steps, and of 20, in which roundings grow. Half floats may differ by more.
curve() { # model data flags [flags of the run]
    local near=1e-5 far=1e-3 device
    case $3 in *f16*) near=5e-3 far=2e-2 ;; *f64*) near=1e-11 far=1e-9 ;; esac
    artifact "$1" "$3" || return 1
    for device in cpu cuda; do
        rm -f "$scratch/$device.jsonl"
        # shellcheck disable=SC2046
        "$DCC" run "$scratch/art.dcc" $(feed "$2") --init 1 --lr 0.01 --steps 20 --device $device $([ $device = cpu ] || echo "${4:-}") \
            --metrics-file "$scratch/$device.jsonl" >"$scratch/out" 2>&1 || {
            cat "$scratch/out"
            return 1
        }
        sed -n 's/.*"loss":\([-0-9.e+]*\).*/\1/p' "$scratch/$device.jsonl" >"$scratch/$device.loss"
    done
    paste "$scratch/cpu.loss" "$scratch/cuda.loss" | awk -v near=$near -v far=$far '
        { d = $1 - $2; if (d < 0) d = -d; s = $1 < 0 ? -$1 : $1; if (s < 1) s = 1; d /= s; if ($2 == "" || $2 != $2 + 0) bad = 1 }
        NR <= 5 && d > first { first = d }
        d > all { all = d }
        END {
            printf "losses within %.1e of the CPU in 5 steps (bound %s), %.1e in %d (bound %s)\n", first, near, all, NR, far
            exit bad || NR != 20 || first > near || all > far
        }'
}

sanitized() { # tool model data flags
    artifact "$2" "$4" || return 1
    # shellcheck disable=SC2046
    compute-sanitizer --tool "$1" --error-exitcode 9 "$DCC" run "$scratch/art.dcc" $(feed "$3") --init 1 --lr 0.01 --steps 2 \
        --device cuda --gemm own --attention own --timeout 300
}

each() { # part function list
    local model data flags
    while read -r model data flags; do
        [ -n "$model" ] || continue
        one "$1" "$2 $model $flags" "$2" "$model" "$data" "$flags" || return 0
    done <<<"$3"
}

compare() {
    "$PYTHON" "$here/benches/gpu/compare.py" "$bench" "$@"
}

# kept FILE COMMAND...: what it prints becomes FILE, where it succeeds in the time that is left.
kept() {
    local file=$1 left=$((whole - SECONDS + began)) code
    shift
    timeout -k 10 $((left > 10 ? left : 10)) "$@" >"$scratch/out" 2>"$scratch/err"
    code=$?
    if ((code)); then
        ((code == 124 || code == 137)) && echo "cut off: another run goes on where the compilers' caches end" >>"$scratch/err"
        tail -40 "$scratch/err"
        return 1
    fi
    mv "$scratch/out" "$file"
    sed -n '$s/.*"ms": \([0-9.]*\).*/\1/p' "$file" | awk '{ printf "%.4g ms a step, the median\n", $1 }'
}

# The artifact and the data: files that are made again where they are missing.
prepared() { # model
    [ "$CACHE/$1/$commit" -nt "$DCC" ] && return
    "$PYTHON" "$here/benches/gpu/dcc_turn.py" "$1" "$CACHE/$1" --dcc "$DCC" --compile &&
        "$PYTHON" "$here/benches/gpu/data.py" "$1" "$CACHE/$1/data" && touch "$CACHE/$1/$commit"
}

torch_turn() { # model mode turn
    kept "$bench/$1/torch-$2-$3.json" env LD_LIBRARY_PATH="$own_libraries" TORCHINDUCTOR_CACHE_DIR="$CACHE/inductor" \
        TRITON_CACHE_DIR="$CACHE/triton" "$PYTHON" "$here/benches/gpu/torch_turn.py" "$1" --mode "$2" --device "$BENCH_DEVICE"
}

dcc_turn() { # model turn
    prepared "$1" && kept "$bench/$1/dcc-$2.json" "$PYTHON" "$here/benches/gpu/dcc_turn.py" "$1" "$CACHE/$1" --dcc "$DCC" --device "$BENCH_DEVICE"
}

# torch in each mode, dcc, torch in its fastest mode, dcc.
measure() { # model
    local mode best
    mkdir -p "$bench/$1"
    for mode in $MODES; do
        # What failed twice at a mode will again; the other mode is measured all the same.
        [ "$(grep -cF "bench"$'\t'"$1 torch $mode 1"$'\t'"$commit"$'\tfailed' "$RESULTS")" -lt 2 ] || continue
        one bench "$1 torch $mode 1" torch_turn "$1" "$mode" 1 || return 1
    done
    one bench "$1 dcc 1" dcc_turn "$1" 1 || return 1
    best=$(compare "$1" --fastest)
    if [ -n "$best" ] && [ -f "$bench/$1/dcc-1.json" ]; then
        one bench "$1 torch $best 2" torch_turn "$1" "$best" 2 || return 1
        one bench "$1 dcc 2" dcc_turn "$1" 2 || return 1
    fi
    one bench "$1" compare "$1"
}

# Of what was run several times, the last result; turns of a benchmark only where they failed.
report() {
    local speed
    speed=$([ -d "$bench" ] && compare)
    {
        echo "# On a GPU"
        echo
        echo "By \`tests/gpu.sh\` on ${gpu:-no GPU}, commit $commit. What is not here was not run."
        echo
        if [ -n "$speed" ]; then
            printf '## Speed\n\n%s\n\n## All parts\n\n' "$speed"
        fi
        echo "| part | what | result | took | last line |"
        echo "|---|---|---|---|---|"
        awk -F '\t' -v commit="$commit" '
            $3 == commit {
                key = $1 FS $2
                if (!(key in row)) keys[++n] = key
                row[key] = $1 == "bench" && $2 ~ / / && $4 == "passed" ? "" : sprintf("| %s | %s | %s | %s | %s |\n", $1, $2, $4, $5, $6)
            }
            END { for (i = 1; i <= n; i++) printf "%s", row[keys[i]] }' "$RESULTS"
    } >"$REPORT.new" && mv "$REPORT.new" "$REPORT"
    cat "$REPORT"
}

part=${1:-}
shift || true
case $part in
check)
    each check kernels "$SAMPLES"
    each check both "$SAMPLES"
    each check both "$SHAPES"
    ;;
train)
    each train curve "$SAMPLES"
    each train curve "$MESHES"
    ;;
nccl)
    one nccl 'one rank' curve gpt2_tiny gpt2_tiny_next '--global-batch-size 4' '--gpu-comm nccl'
    # NCCL has no two ranks on one GPU before 2.30.
    export NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_MODULE_LOADING=EAGER
    version=$("$PYTHON" -c 'import ctypes; n = ctypes.c_int(); ctypes.CDLL("libnccl.so").ncclGetVersion(ctypes.byref(n)); print(n.value)' 2>/dev/null)
    if [ "${version:-0}" -lt 23000 ] && [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -lt 2 ]; then
        echo "NCCL ${version:-of no known version} and one GPU: meshes of two ranks are left out" >&2
    else
        one nccl '--tp 2' curve gpt2_tiny gpt2_tiny_next '--global-batch-size 4 --tp 2' '--gpu-comm nccl'
        one nccl '--dp 2 --zero 3' curve gpt2_tiny gpt2_tiny_next '--global-batch-size 4 --dp 2 --zero 3' '--gpu-comm nccl'
        one nccl '--pp 2' curve gpt2_tiny gpt2_tiny_next '--global-batch-size 4 --pp 2 --grad-accum 2' '--gpu-comm nccl'
    fi
    ;;
sanitize)
    for tool in memcheck racecheck synccheck initcheck; do
        while read -r model data flags; do
            [ -n "$model" ] || continue
            one sanitize "$tool $model $flags" sanitized $tool "$model" "$data" "$flags" || break 2
        done <<<"$SAMPLES"
    done
    ;;
bench)
    # A turn may take minutes where compilers' caches are empty: none begins late, and all end in time.
    whole=$((LIMIT + 45))
    LIMIT=$((LIMIT * 2 / 3))
    unfinished=0
    MODES=${MODES:-$([ "$BENCH_DEVICE" = cpu ] && echo eager || echo max-autotune-no-cudagraphs reduce-overhead)}
    for model in ${*:-$("$PYTHON" "$here/benches/gpu/cases.py" "$BENCH_DEVICE")}; do
        measure "$model" || unfinished=1
        ((unfinished)) && break
    done
    ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
report
! awk -F '\t' -v commit="$commit" -v part="$part" '$1 == part && $3 == commit { last[$2] = $4 } END { for (n in last) if (last[n] != "passed") exit 1 }' \
    "$RESULTS" && exit 1
exit "${unfinished:-0}"
