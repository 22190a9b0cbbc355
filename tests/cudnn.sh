#!/usr/bin/env bash
# Lets cuDNN plan the attentions of models for GPUs that are not here; it must have a plan for each. `tests/cudnn.sh DCC`.
# PYTHON has the packages nvidia-cudnn-cu13, nvidia-cublas and nvidia-cuda-nvrtc (from a package index). The driver, which the library wants to
# load, is a stand-in that says yes to all.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/gpu_models.sh
. tests/gpu_models.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

folders=$("${PYTHON:-python3}" -c 'import pathlib, nvidia
files = [file for root in nvidia.__path__ for file in pathlib.Path(root).rglob("lib*.so*")]
print(":".join(sorted({str(file.parent) for file in files})))')
case $(tr ':' '\n' <<<"$folders" | while read -r folder; do ls "$folder"; done) in
*libcudnn_graph.so*) ;;
*)
    echo 'error: no libcudnn: pip install nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-nvrtc' >&2
    exit 1
    ;;
esac
# What the libraries link of the driver, and what they look for by name; a library and a kernel of it are not null.
{
    tr ':' '\n' <<<"$folders" | while read -r folder; do
        find "$folder" -maxdepth 1 -name 'libcudnn*.so*' -exec grep -haoE '\bcu[A-Z][A-Za-z0-9_]{3,60}\b' {} +
    done |
        grep -E '^cu(Init|Driver|Device|Ctx|Mem|Module|Library|Kernel|Func|Launch|Stream|Event|Tensor|Get|Occupancy|Pointer|Array|Graph|Tex|Surf|Link|Ipc|Profiler|Green|Core|Log|User|External|Signal|Wait|Import|Destroy|Primary|Flush|Multicast|Checkpoint)' |
        sort -u
} >"$scratch/names"
while read -r name; do
    case $name in
    cuInit) echo "int $name(void) { return 100; }" ;;
    cuLibraryLoadData | cuLibraryGetKernel | cuKernelGetFunction | cuModuleLoadData* | cuModuleGetFunction)
        echo "int $name(void **made) { *made = (void *)4096; return 0; }"
        ;;
    *) echo "int $name(void) { return 0; }" ;;
    esac
done <"$scratch/names" >"$scratch/driver.c"
"${CC:-cc}" -w -shared -fPIC -Wl,-soname,libcuda.so.1 "$scratch/driver.c" -o "$scratch/libcuda.so.1"
failed=0
while read -r model flags; do
    case $flags in
    *f16*) ;;
    *) continue ;;
    esac
    # shellcheck disable=SC2086
    "$1" compile "tests/models/$model.onnx" -o "$scratch/art.dcc" $flags >"$scratch/out" 2>&1 || {
        cat "$scratch/out"
        exit 1
    }
    for arch in sm_80 sm_90a sm_100a; do
        found=$(LD_LIBRARY_PATH="$folders:$scratch" "$1" verify "$scratch/art.dcc" --kernels "$arch" | grep ' has plans for ') || continue
        printf '%-24s %-8s %s\n' "$model" "$arch" "$found"
        [[ $found =~ for\ ([0-9]+)\ of\ ([0-9]+) ]] && [ "${BASH_REMATCH[1]}" = "${BASH_REMATCH[2]}" ] || failed=1
    done
done < <(every_model large)
exit $failed
