"""What a result is of: dcc's sources, and the command."""

import shlex
import subprocess
import sys
from pathlib import Path


def commit():
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def command_line():
    """As it was given, but for what names places of this machine, and for that it was given more than once."""
    words, shown = iter(sys.argv[1:]), []
    for word in words:
        name, _, value = word.partition("=")
        if name == "--resume":
            continue
        if name not in ("--dcc", "--cache", "--out"):
            shown.append(shlex.quote(word))
        elif not value:
            next(words, None)
    return " ".join(shown)
