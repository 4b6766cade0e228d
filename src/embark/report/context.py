"""What events do not say of a run: handed in by the verb, which may look into stores, catalogs and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Price:
    """Of all its machines together."""

    usd_per_hour: float
    words: str
    """`2 x p5.48xlarge, $110.08 an hour on demand in us-west-2`"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that is there."""

    step: int
    time_s: float | None
    size_bytes: int
    metric: str
    """What it had on the held-out samples, in words."""
    why: str
    """Why it is kept, or what is wrong with it."""
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is off, and its fix."""

    name: str
    cause: str
    fix: str
    seen: str = ""
    command: str = ""
    is_slow_only: bool = False


@dataclass(frozen=True, slots=True)
class RunContext:
    """All of it."""

    name: str
    uri: str
    now_s: float
    is_remote: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict)
    """As its `spec.toml` has it; empty where there is none."""
    spec_toml: str = ""
    price: Price | None = None
    no_price: str = ""
    """Why there is none."""
    kept: tuple[Kept, ...] = ()
    best_by: str = ""
    """What the held-out figure of a checkpoint is."""
    findings: tuple[Finding, ...] | None = None
    """`None`: nobody has looked."""
    commands: tuple[str, ...] = ()
    """How to do it again, or go on."""
