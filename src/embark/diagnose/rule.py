"""A rule (a known symptom, its cause and its fix: a row of `rules/*.toml`), the lines that match it, a diagnosis."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from embark.diagnose.source import fold

Kind = Literal["cause", "symptom", "summary", "slow"]
"""`cause`: ends a run by itself. `symptom`: what the other ranks then say. `summary`: what a launcher says at the end.
`slow`: the run continues, slower than it should."""
Where = Literal["log", "event", "manifest", "metric", "spec"]
FOLDER = Path(__file__).with_name("rules")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text to look for."""

    needle: bytes
    """Stands in every line that matches, folded as keys of lines are. It is searched for first, since that is quick."""
    regex: re.Pattern[str]
    also: bytes = b""
    """Stands in every such line too: for a needle that many lines have."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row."""

    code: str
    name: str
    kind: Kind
    where: tuple[Where, ...]
    patterns: tuple[Pattern, ...] = field(repr=False)
    """Empty where a check in Python finds it."""
    cured_by: tuple[Pattern, ...] = field(repr=False)
    """A later line that shows it is over."""
    unless: tuple[str, ...]
    """Codes of rules that say the same better."""
    explains: tuple[str, ...]
    """Codes of other causes that follow from this one."""
    cause: str
    """One sentence; `{name}` is what the pattern's group of that name found."""
    fix: str
    command: str
    source: str
    num_least: int = 1
    """Reported from this many lines on."""


@cache
def load_rules() -> tuple[Rule, ...]:
    """All of them, by code."""
    rows = [row for path in sorted(FOLDER.glob("*.toml"))
            for row in tomllib.loads(path.read_text(encoding="utf-8"))["rule"]]
    return tuple(sorted((_rule(row) for row in rows), key=lambda rule: rule.code))


def rule_named(name: str) -> Rule:
    return next(rule for rule in load_rules() if rule.name == name)


def _rule(row: Mapping[str, Any]) -> Rule:
    unknown = set(row) - {"code", "name", "kind", "where", "text", "like", "cured_by", "unless", "explains", "cause",
                          "fix", "command", "source", "num_least"}
    where = tuple(row.get("where", ["log"]))
    if unknown or row["kind"] not in get_args(Kind) or set(where) - set(get_args(Where)):
        raise ValueError(f"{row['code']}: {unknown or row['kind']}")
    patterns = [_text(text) for text in row.get("text", ())]
    patterns += [_like(*words) for words in row.get("like", ())]
    return Rule(
        code=row["code"], name=row["name"], kind=cast(Kind, row["kind"]), where=cast("tuple[Where, ...]", where),
        patterns=tuple(patterns), cured_by=tuple(_like(*words) for words in row.get("cured_by", ())),
        unless=tuple(row.get("unless", ())), explains=tuple(row.get("explains", ())), cause=row["cause"],
        fix=row["fix"], command=row.get("command", ""), source=row["source"], num_least=row.get("num_least", 1),
    )


def _text(text: str) -> Pattern:
    """The text itself, as whole words."""
    begin = r"(?<!\w)" if text[0].isalnum() else ""
    end = r"(?!\w)" if text[-1].isalnum() else ""
    return Pattern(fold(text), re.compile(begin + re.escape(text) + end))


def _like(needle: str, regex: str, also: str = "") -> Pattern:
    return Pattern(fold(needle), re.compile(regex), fold(also))


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
