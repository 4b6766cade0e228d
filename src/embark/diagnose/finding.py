"""What was seen, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from embark.diagnose.rule import Rule

MAX_RANKS_TOLD = 6
Whose = Literal["device", "host"]
"""Memory."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows something."""

    source: str
    """The file's name; `-` for standard input."""
    line: int
    """From 1; 0 for what stands in no one line."""
    text: str
    order: tuple[int, int]
    """Of the source among the others, and of the line in it."""
    time: str = ""
    """`11-15 09:15:00.123456`, or empty: comparable with others, in whatever form the line had it."""
    rank: int | None = None

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Seen:
    """All lines of one rule, of which the first is kept."""

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

    def more(self, evidence: Evidence) -> Seen:
        ranks = self.ranks if evidence.rank is None else self.ranks | {evidence.rank}
        return replace(self, num_lines=self.num_lines + 1, ranks=ranks)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause, as it is told."""

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
    """Names of what else was found and follows from it."""

    @property
    def ranks_words(self) -> str:
        if not self.ranks:
            return ""
        shown = ", ".join(map(str, self.ranks[:MAX_RANKS_TOLD]))
        more = f" and {len(self.ranks) - MAX_RANKS_TOLD} more" if len(self.ranks) > MAX_RANKS_TOLD else ""
        return f"rank {shown}" if len(self.ranks) == 1 else f"ranks {shown}{more}"
