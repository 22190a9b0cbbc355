"""The machine's measured f32 multiply-add peak of one thread."""

import os
import subprocess
from pathlib import Path


def measured(scratch, processors, avx2):
    """GFLOP/s on one of `processors`, or None without a C compiler."""
    out, restricted = scratch / "peak", ["-DONLY_AVX2"] if avx2 else []
    source = Path(__file__).with_name("peak.c")
    try:
        subprocess.run(["cc", "-O2", "-march=native", *restricted, "-o", out, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    pin = lambda: os.sched_setaffinity(0, processors[:1])
    return float(subprocess.run([out], check=True, capture_output=True, text=True, preexec_fn=pin).stdout)
