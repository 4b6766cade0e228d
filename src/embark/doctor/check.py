"""One thing looked at, and what was thought of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embark.stack.versions import Finding

Verdict = Literal["ok", "warning", "wrong"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """What is there, what should be, and what to do where they differ."""

    name: str
    verdict: Verdict
    """`wrong`: a run would fail, or not be what it seems. `warning`: it would be slow, or dearer, or fail some day."""
    found: str
    expected: str = ""
    fix: str = ""
    """A command, or a sentence; empty where all is well."""


def judged(name: str, is_good: bool, found: str, expected: str, fix: str, *, bad: Verdict = "wrong") -> Check:
    return Check(name, "ok", found, expected) if is_good else Check(name, bad, found, expected, fix)


def of_finding(finding: Finding) -> Check:
    """What the stack says of a package."""
    found = "missing" if finding.found is None else finding.found
    return judged(finding.name, finding.ok, found, finding.expected, finding.fix)


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
