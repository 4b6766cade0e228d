"""One check: what was found, what is expected, and the fix."""

from dataclasses import dataclass
from typing import Literal

from embark.stack.versions import Finding

Verdict = Literal["ok", "warning", "wrong"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """What is there, what should be, and what to do if they differ."""

    name: str
    verdict: Verdict
    """`wrong`: a run would fail, or not be what it seems. `warning`: it would be slow, cost more, or fail some day."""
    found: str
    expected: str = ""
    fix: str = ""
    """A command, or a sentence; empty if all is well."""


def check(name: str, is_ok: bool, found: str, expected: str, fix: str, *, bad: Verdict = "wrong") -> Check:
    return Check(name, "ok", found, expected) if is_ok else Check(name, bad, found, expected, fix)


def check_package(finding: Finding) -> Check:
    return check(finding.name, finding.ok, finding.found or "missing", finding.expected, finding.fix)


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
