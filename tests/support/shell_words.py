"""The words that a shell makes of a command line, without running the command."""

from __future__ import annotations

import subprocess

from limits import HANG_S


def words_of(line: str, **environ: str) -> list[str]:
    """As bash would hand them to the program, with these variables set and no others."""
    script = f"for word in {line}; do printf '%s\\0' \"$word\"; done"
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=True, timeout=HANG_S,
                          env={"PATH": "/usr/bin:/bin", **environ})
    return done.stdout.split("\0")[:-1]
