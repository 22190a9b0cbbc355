#!/usr/bin/env bash
# Compiles all kernels of models by NVRTC for three architectures; none may spill registers. No GPU is needed.
# `tests/nvrtc.sh DCC` takes some models, `tests/nvrtc.sh DCC every` one export of each sample and family.
# PYTHON has the package nvidia-cuda-nvrtc (13, from a package index).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/gpu_models.sh
. tests/gpu_models.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

library=$("${PYTHON:-python3}" -c 'import pathlib, nvidia; print(*pathlib.Path(next(iter(nvidia.__path__))).rglob("libnvrtc.so.13"))')
[ -n "$library" ] || {
    echo 'error: no libnvrtc.so.13: pip install nvidia-cuda-nvrtc' >&2
    exit 1
}
failed=0
while read -r model flags; do
    # shellcheck disable=SC2086
    "$1" compile "tests/models/$model.onnx" -o "$scratch/art.dcc" $flags >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        exit 1
    }
    for arch in sm_80 sm_90a sm_100a; do
        found=$(LD_LIBRARY_PATH=$(dirname "$library") "$1" verify "$scratch/art.dcc" --kernels "$arch" | grep ' kernels compile for ') || {
            echo "$model: not compiled for $arch" >&2
            exit 1
        }
        printf '%-24s %s\n' "$model" "$found"
        case $found in
        *' 0 bytes spilled') ;;
        *) failed=1 ;;
        esac
    done
done < <(if [ "${2:-}" = every ]; then every_model large; else some_models; fi)
exit $failed
