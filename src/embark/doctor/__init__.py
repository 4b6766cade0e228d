"""Checks whether this machine, or with `account` the cloud account, is ready to train; every check has its fix. Changes
nothing, and loads torch only in a child process. May import diagnose and below."""

import datetime
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embark.stack import versions as stack

Verdict = Literal["ok", "warning", "wrong"]
GIB = 2**30
TIMEOUT_S = 20.0
MAX_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """The machine to check, which tests replace."""

    root: Path = Path("/")  # Holds `/proc`, `/sys` and `/dev`.
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run_dir: Path = Path("runs")  # Where runs would write.

    def path(self, text: str) -> Path:
        return self.root / text.lstrip("/")

    def read(self, text: str) -> str:
        """A file's text; empty if it cannot be read."""
        try:
            return self.path(text).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def home(self, text: str) -> Path:
        """Below the user's own folder."""
        return Path(self.env.get("HOME") or "~").expanduser() / text

    def ask(self, *words: str, timeout_s: float = TIMEOUT_S) -> str | None:
        """What a program prints; None if it is missing or fails."""
        program = shutil.which(words[0], path=self.env.get("PATH", ""))
        if program is None:
            return None
        try:
            done = subprocess.run([program, *words[1:]], capture_output=True, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=timeout_s, check=False, env=dict(self.env))
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:MAX_CHARS] if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Check:
    """What is there, what should be, and what to do if they differ."""

    name: str
    verdict: Verdict
    """`wrong`: a run would fail, or not be what it seems. `warning`: it would be slow, cost more, or fail some day."""
    found: str
    expected: str = ""
    fix: str = ""  # A command, or a sentence; empty if all is well.


def check(name: str, is_ok: bool, found: str, expected: str, fix: str, *, bad: Verdict = "wrong") -> Check:
    return Check(name, "ok", found, expected) if is_ok else Check(name, bad, found, expected, fix)


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def check_host(host: Host | None = None, today: datetime.date | None = None) -> Iterator[Check]:
    """All checks of a machine, in the order to fix them, each as soon as it is known."""
    from embark.doctor.credentials import check_credentials
    from embark.doctor.gpus import check_driver, check_gpus, list_gpus
    from embark.doctor.machine import check_disk, check_machine, check_prices
    from embark.doctor.network import Facts, Probe, check_network, check_ranks

    host = host or Host()
    packages = stack.installed()
    # Torch takes seconds to load, and the rest does not wait for it.
    probe = Probe(host) if packages["torch"] else None
    try:
        found = list_gpus(host)
        yield from check_machine(host)
        for one in stack.check(packages, gpu=bool(found)):
            yield check(one.name, one.ok, one.found or "missing", one.expected, one.fix)
        yield from check_gpus(host, found, packages)
        yield from check_network(host)
        yield from check_disk(host)
        yield from check_credentials(host)
        yield check_prices(today or datetime.date.today())
        facts = probe.facts() if probe else Facts()
        yield from check_driver(host, facts.cuda, facts.arches, found)
        if probe:
            yield from check_ranks(facts, len(found))
    finally:
        if probe:
            probe.end()
