"""What is done to pods while they train: `1@30s`, `0@step20`, `1@30s+10s`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embark.errors import UserError

FaultKind = Literal["preempt", "kill", "pause", "cut"]
DURATION_S = 10.0
"""Of a pause or a cut whose length is not said."""
_FAULT = re.compile(r"(?P<pod>\d+)@(?:step(?P<step>\d+)|(?P<at>\d+(?:\.\d+)?)(?P<unit>ms|s|m)?)"
                    r"(?:\+(?P<long>\d+(?:\.\d+)?)(?P<long_unit>ms|s|m)?)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one pod."""

    kind: FaultKind
    pod: int
    at_s: float | None
    """Since the pods were started; None where a step is named."""
    at_step: int | None = None
    duration_s: float = 0.0

    def __str__(self) -> str:
        when = f"step{self.at_step}" if self.at_step is not None else f"{self.at_s:g}s"
        long = f"+{self.duration_s:g}s" if self.duration_s else ""
        return f"--{self.kind} {self.pod}@{when}{long}"

    def is_due(self, elapsed_s: float, step: int) -> bool:
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def read_faults(kind: FaultKind, words: Sequence[str], num_pods: int) -> list[Fault]:
    """From the words of a flag."""
    found = []
    for word in words:
        match = _FAULT.fullmatch(word)
        has_length = kind in ("pause", "cut")
        example = "1@30s+10s" if has_length else "1@30s"
        if match is None or (match["long"] and not has_length):
            by_step = example.replace("30s", "step20")
            raise UserError(f"--{kind} {word}: is no pod and time", fix=f"--{kind} {example}, or {by_step}")
        if int(match["pod"]) >= num_pods:
            raise UserError(f"--{kind} {word}: there is no pod {match['pod']}",
                            fix=f"pods are counted from 0 to {num_pods - 1}")
        at_s = float(match["at"]) * _UNITS[match["unit"]] if match["at"] else None
        long_s = float(match["long"]) * _UNITS[match["long_unit"]] if match["long"] else DURATION_S
        found.append(Fault(kind, int(match["pod"]), at_s, int(match["step"]) if match["step"] else None,
                           long_s if has_length else 0.0))
    return found


def read_duration(text: str, flag: str) -> float:
    """`10m`, `90s`, `1h`: seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None or not float(match[1]):
        raise UserError(f"{flag} {text}: is no time", fix=f"{flag} 10m")
    return float(match[1]) * _UNITS[match[2]]
