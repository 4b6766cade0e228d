"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Literal, Protocol

from embark.kubernetes.yaml_nodes import Span
from embark.values import frozen
from .edits import Edit

Level = Literal["error", "warning"]


class Located(Protocol):
    """A part of a file: a YAML node, a command, a pod, a span."""

    @property
    def location(self) -> Span: ...


@frozen
class Hit:
    """A mistake, and the part of a file that it is in."""

    where: Located
    what: str = ""  # The consequence, with the values of this file; empty for the rule's own text.
    fix: str = ""
    edits: tuple[Edit, ...] = ()

    @property
    def location(self) -> Span:
        return self.where.location


Hits = Iterator[Hit]
Check = Callable[..., Hits]
"""Takes what its first parameter names (`job`, `pod`, `command`, …), one at a time, and optionally the manifests."""


@frozen
class Rule:
    """One mistake that a cluster or a cloud accepts and that fails later."""

    code: str
    name: str
    group: str
    level: Level
    happens: str  # The consequence, whatever the values.
    source: str  # The page or code that says so.
    check: Check = field(repr=False)
    can_fix: bool = False
    kinds: frozenset[str] = frozenset()  # Kinds of objects that are checked; all if it is empty.
    what: str = ""  # The text of a hit that has none of its own.
    fix: str = ""


@frozen
class Finding:
    """A rule's hit with all that a user wants to know about it."""

    path: str
    line: int
    code: str
    name: str
    level: Level
    what: str
    fix: str
    happens: str
    source: str
    can_fix: bool
    hit: Hit = field(repr=False)

    @staticmethod
    def of(rule: Rule, hit: Hit) -> Finding:
        return Finding(
            path=str(hit.location.source.path), line=hit.location.line, code=rule.code, name=rule.name,
            level=rule.level, what=hit.what or rule.what, fix=hit.fix or rule.fix, happens=rule.happens,
            source=rule.source, can_fix=bool(hit.edits), hit=hit)
