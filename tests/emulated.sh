#!/usr/bin/env bash
# Runs the generated kernels of one export of each sample and family without a GPU, on the stand-ins of tests/stand_in: against float64,
# under AddressSanitizer, the threads of a block in three orders. `tests/emulated.sh DCC`; ten minutes of two cores. CXX is the compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/gpu_models.sh
. tests/gpu_models.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cxx=${CXX:-g++}
"$cxx" -std=c++17 -O2 -shared -fPIC -o "$scratch/libcuda.so" tests/stand_in/cuda.cpp -ldl
"$cxx" -std=c++17 -O2 -shared -fPIC -o "$scratch/libnvrtc.so" tests/stand_in/nvrtc.cpp
export DCC_STAND_IN_CXX="$cxx -O1 -fsanitize=address -I$PWD/tests/stand_in" XDG_CACHE_HOME="$scratch/cache"
sanitizer=$("$cxx" -print-file-name=libasan.so)
options=detect_leaks=0:verify_asan_link_order=0:detect_stack_use_after_return=0

# MODEL FLAGS: its kernels under every seed.
emulated() {
    local model=$1 own seed
    own=$(mktemp -d -p "$scratch")
    # shellcheck disable=SC2086
    "$DCC" compile "tests/models/$model.onnx" -o "$own/art.dcc" $2 >"$own/out" 2>&1 || {
        cat "$own/out"
        return 1
    }
    for seed in 1 2 3; do
        LD_LIBRARY_PATH=$scratch LD_PRELOAD=$sanitizer ASAN_OPTIONS=$options DCC_STAND_IN_SEED=$seed DCC_STAND_IN_CACHE=$own \
            "$DCC" verify "$own/art.dcc" --kernels cuda >"$own/out" 2>&1 || {
            cat "$own/out"
            echo "FAILED: $model $2, seed $seed"
            return 1
        }
    done
    printf '%-24s %s\n' "$model" "$(grep kernels "$own/out")"
    rm -rf "$own"
}
export -f emulated
export DCC=$1 scratch sanitizer options
# shellcheck disable=SC2016
every_model | sed 's/ /\n/' | xargs -d '\n' -n 2 -P "$(nproc)" bash -c 'emulated "$0" "$1"'
