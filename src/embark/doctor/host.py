"""The machine that is checked, and what a check says."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from embark.values import frozen

Verdict = Literal["ok", "warning", "wrong"]
GIB = 2**30
TIMEOUT_S = 20.0
MAX_CHARS = 1 << 20


@frozen
class Host:
    """The machine to check, which tests replace."""

    root: Path = Path("/")  # Holds `/proc`, `/sys` and `/dev`.
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run_dir: Path = Path("runs")  # The folder that runs would write to.

    def path(self, text: str) -> Path:
        return self.root / text.lstrip("/")

    def read(self, text: str) -> str:
        """Return a file's text; empty if it cannot be read."""
        try:
            return self.path(text).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def home(self, text: str) -> Path:
        """Return a path below the user's own folder."""
        return Path(self.env.get("HOME") or "~").expanduser() / text

    def ask(self, *words: str, timeout_s: float = TIMEOUT_S) -> str | None:
        """Return the output of a program; None if it is missing or fails."""
        program = shutil.which(words[0], path=self.env.get("PATH", ""))
        if program is None:
            return None
        try:
            done = subprocess.run([program, *words[1:]], capture_output=True, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=timeout_s, check=False, env=dict(self.env))
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:MAX_CHARS] if done.returncode == 0 else None


@frozen
class Check:
    """The result of one check: the actual state, the expected one, and the fix if they differ."""

    name: str
    verdict: Verdict
    """`wrong`: a run would fail, or not be what it seems. `warning`: it would be slow, cost more, or fail some day."""
    found: str
    expected: str = ""
    fix: str = ""  # A command, or a sentence; empty if all is well.


Checks = Iterator[Check]


def check(name: str, is_ok: bool, found: str, expected: str, fix: str, *, bad: Verdict = "wrong") -> Check:
    return Check(name, "ok", found, expected) if is_ok else Check(name, bad, found, expected, fix)


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
