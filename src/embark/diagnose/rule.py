"""A rule: a known symptom, its cause and its fix. Rules are rows of `rules/*.toml`."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from embark.diagnose.lines import fold

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
