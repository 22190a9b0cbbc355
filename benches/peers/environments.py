"""The peers' Python environments, made from PyPI by `venv` and `pip` into the cache; remade when a requirement changes."""

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEWEST = {"ort": (3, 11)}  # the newest Python that has wheels


def requirements(name):
    """The text of a requirements file and of those that it names."""
    path = HERE / "requirements" / f"{name}.txt"
    text = path.read_text()
    named = [line.split()[1] for line in text.splitlines() if line.startswith("-r ")]
    return text + "".join((path.parent / other).read_text() for other in named)


def version_of(python):
    try:
        command = [python, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return tuple(map(int, out.split()))
    except (OSError, subprocess.CalledProcessError):
        return None


def base_python(name):
    """An interpreter to make the environment with."""
    limit = NEWEST.get(name, (3, 99))
    for python in (sys.executable, "python3.11", "python3"):
        version = version_of(python)
        if version and (3, 11) <= version <= limit:
            return python
    raise SystemExit(f"error: environment {name} needs Python 3.11 with venv on the PATH")


def python_of(name, cache):
    """The interpreter of an environment, made where there is none or its requirements have changed."""
    folder, digest = cache / name, hashlib.sha256(requirements(name).encode()).hexdigest()
    python, stamp = folder / "bin/python", folder / "requirements.sha256"
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"environment {name}: installing into {folder}", flush=True)
    subprocess.run([base_python(name), "-m", "venv", "--clear", folder], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "-r",
               HERE / "requirements" / f"{name}.txt"]
    subprocess.run(command, check=True)
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", folder / "lib"], check=False)
    stamp.write_text(digest)
    return python


def release_of(name, package, cache):
    """The version of a package in an environment."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    return subprocess.run([python_of(name, cache), "-c", code, package], capture_output=True, text=True, check=True).stdout.strip()
