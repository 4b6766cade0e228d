"""A line that shows something, the rule it matched, and the diagnosis made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from embark.diagnose.rule import Rule

MAX_RANKS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows something."""

    source: str
    """The file's name; `-` for standard input."""
    line: int
    """From 1; 0 where no single line shows it."""
    text: str
    order: tuple[int, int] = field(repr=False)
    """Of the source among the others, and of the line in it."""
    time: str = ""
    """`11-15 09:15:00.123456`, or empty: comparable with others, in whatever form the line had it."""
    rank: int | None = None

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """All lines that matched one rule: the first of them, and how many."""

    rule: Rule
    first: Evidence
    num_lines: int = 1
    ranks: frozenset[int] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)
    """What the pattern's named groups found in the first line."""
    cause: str = ""
    """Instead of the rule's."""
    fix: str = ""
    command: str = ""

    def merged(self, other: RuleMatch) -> RuleMatch:
        return replace(
            self, num_lines=self.num_lines + other.num_lines, ranks=self.ranks | other.ranks,
            cause=self.cause or other.cause, fix=self.fix or other.fix, command=self.command or other.command)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause, its evidence and its fix."""

    code: str
    name: str
    kind: str
    cause: str
    fix: str
    command: str
    evidence: Evidence
    num_lines: int
    ranks: tuple[int, ...]
    source: str
    """Where the rule is known from."""
    follows: tuple[str, ...] = ()
    """Names of other findings that follow from it."""

    @property
    def ranks_text(self) -> str:
        """`ranks 1, 3`; empty where no line names its rank."""
        if not self.ranks:
            return ""
        shown = ", ".join(map(str, self.ranks[:MAX_RANKS_SHOWN]))
        more = f" and {len(self.ranks) - MAX_RANKS_SHOWN} more" if len(self.ranks) > MAX_RANKS_SHOWN else ""
        return f"rank {shown}" if len(self.ranks) == 1 else f"ranks {shown}{more}"
