#!/usr/bin/env bash
# For 64-bit Arm, by emulation on another machine: the kernels' tests, and training of two models on one rank and on two, whose losses are
# this machine's. Needs `rustup target add aarch64-unknown-linux-gnu`, its compilers (Debian: gcc-aarch64-linux-gnu,
# g++-aarch64-linux-gnu) and qemu-aarch64 (Debian: qemu-user), registered with the kernel (binfmt_misc) so that a process can start others.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || {
    echo 'error: this kernel does not run programs of aarch64: register qemu-aarch64 with binfmt_misc (Debian: qemu-user-binfmt)' >&2
    exit 1
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cargo test --locked --target "$target" -p dcc-kernels --lib --test convolution --test generated --test halves
cargo build --locked -p dcc
cargo build --locked --target "$target" -p dcc
folder=${CARGO_TARGET_DIR:-target}

# losses DCC MODEL DATA FLAGS...: of three steps.
losses() {
    "$1" run "tests/models/$2.onnx" --data "tests/models/data/$3.npz" --init 1 --steps 3 "${@:4}" --metrics-file "$scratch/metrics" \
        >"$scratch/out" 2>&1 || {
        cat "$scratch/out" >&2
        return 1
    }
    grep -o '"loss":[^,}]*' "$scratch/metrics"
}
failed=0
while read -r model data flags; do
    # shellcheck disable=SC2086
    here=$(losses "$folder/debug/dcc" "$model" "$data" $flags)
    # shellcheck disable=SC2086
    there=$(losses "$folder/$target/debug/dcc" "$model" "$data" $flags)
    # Every chain of sums is the same on all machines, but what a library of elementary functions returns need not be.
    if paste <(echo "$here") <(echo "$there") | tr -d '"a-z:' |
        awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-6 * $1) bad = 1 } END { exit bad || NR != 3 }'; then
        printf '%-12s %-40s %s\n' "$model" "$flags" "$(tail -1 <<<"$there")"
    else
        printf 'error: %s %s: here %s, there %s\n' "$model" "$flags" "$here" "$there" >&2
        failed=1
    fi
done <<'MODELS'
gpt2_tiny gpt2_tiny_next --global-batch-size 4
gpt2_tiny gpt2_tiny_next --global-batch-size 4 --tp 2 --optimizer adamw
mlp mlp --global-batch-size 8 --dp 2
MODELS
exit $failed
