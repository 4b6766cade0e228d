"""Rules (a known symptom, its cause and its fix: rows of `rules/*.toml`), and the search of logs for them and for the
figures that checks need."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from embark.events.quality import quality_rules
from embark.formatting import shortlist
from embark.values import JsonDict, frozen
from .source import DiagnosedFile, Line, fold, lines, pieces, rank_of, time_of

Kind = Literal["cause", "symptom", "summary", "slow", "quality"]
"""`cause`: ends a run by itself. `symptom`: what the other ranks then say. `summary`: what a launcher says at the end.
`slow`: the run continues, slower than it should. `quality`: what the run's figures say about the model."""
Where = Literal["log", "event", "manifest", "metric", "spec"]
FOLDER = Path(__file__).with_name("rules")


@frozen
class Pattern:
    """A text to search for."""

    needle: bytes
    """Stands in every line that matches, folded as keys of lines are. It is searched for first, since that is quick."""
    regex: re.Pattern[str]
    also: bytes = b""  # A second text in every such line, for a needle that is common.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of `rules/*.toml`."""

    code: str
    name: str
    kind: Kind
    where: tuple[Where, ...] = ("log",)
    patterns: tuple[Pattern, ...] = field(repr=False)  # Empty where a check in Python finds it.
    cured_by: tuple[Pattern, ...] = field(repr=False)  # A later line that shows it is over.
    unless: tuple[str, ...] = ()  # Codes of rules that replace this one if they match.
    explains: tuple[str, ...] = ()  # Codes of other causes that follow from this one.
    cause: str  # One sentence; `{name}` is what the pattern's group of that name found.
    fix: str
    command: str = ""
    source: str
    num_least: int = 1  # Reported from this many lines on.


@cache
def load_rules() -> tuple[Rule, ...]:
    """Return all rules, by code."""
    rows = [row for path in sorted(FOLDER.glob("*.toml"))
            for row in tomllib.loads(path.read_text(encoding="utf-8"))["rule"]]
    rows += [{name: value for name, value in row.items() if name != "note"} | {"kind": "quality", "where": ["event"]}
             for row in quality_rules().values()]
    return tuple(sorted((_rule(row) for row in rows), key=lambda rule: rule.code))


def rule_named(name: str) -> Rule:
    return next(rule for rule in load_rules() if rule.name == name)


def _rule(row: JsonDict) -> Rule:
    patterns = [_text(text) for text in row.pop("text", ())] + [_like(*words) for words in row.pop("like", ())]
    cured_by = tuple(_like(*words) for words in row.pop("cured_by", ()))
    lists: JsonDict = {name: tuple(row.pop(name)) for name in ("where", "unless", "explains") if name in row}
    return Rule(patterns=tuple(patterns), cured_by=cured_by, **lists, **row)


def _text(text: str) -> Pattern:
    """Return a pattern that finds the text itself, as whole words."""
    begin = r"(?<!\w)" if text[0].isalnum() else ""
    end = r"(?!\w)" if text[-1].isalnum() else ""
    return Pattern(fold(text), re.compile(begin + re.escape(text) + end))


def _like(needle: str, regex: str, also: str = "") -> Pattern:
    return Pattern(fold(needle), re.compile(regex), fold(also))


MAX_RANKS_SHOWN = 6


@frozen
class Evidence:
    """A line that shows something."""

    source: str  # The file's name; `-` for standard input.
    line: int  # Counted from 1; 0 if no single line shows it.
    text: str
    order: tuple[int, int] = field(repr=False)  # Index of the source among the others, and of the line in it.
    time: str = ""  # `11-15 09:15:00.123456`, or empty: comparable with others, in whatever form the line had it.
    rank: int | None = None

    @property
    def location(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@frozen
class RuleMatch:
    """All lines that matched one rule: the first of them, and how many."""

    rule: Rule
    first: Evidence
    num_lines: int = 1
    ranks: frozenset[int] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)  # Named groups of the pattern in the first line.
    cause: str = ""  # Replaces the rule's cause, as do `fix` and `command`.
    fix: str = ""
    command: str = ""

    def merged(self, other: RuleMatch) -> RuleMatch:
        return replace(
            self, num_lines=self.num_lines + other.num_lines, ranks=self.ranks | other.ranks,
            cause=self.cause or other.cause, fix=self.fix or other.fix, command=self.command or other.command)


@frozen
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
    source: str  # Reference for the rule.
    follows: tuple[str, ...] = ()  # Names of other findings that follow from it.

    @property
    def ranks_text(self) -> str:
        """`ranks 1, 3`; empty where no line names its rank."""
        if not self.ranks:
            return ""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {shortlist(list(map(str, self.ranks)), MAX_RANKS_SHOWN)}"


MAX_SUBJECTS = 500
MAX_QUOTED = 280  # Characters of a line that are quoted.
MAX_KNOWN, MAX_KNOWN_BYTES = 100_000, 400  # Limits of the cache of line keys: entries, and bytes of each.
MAX_NOTIFIED = 200_000  # Lines of one kind that a check is given; more of them add nothing.
_SAFE = re.compile(r"[\w./:@+\-]{1,200}")
"""A value from a log may stand in a command that a person copies: nothing a shell would read may be in it."""
_CONDITION = re.compile(r"(?i)\b(?:if|when|whenever|unless)\s+"
                        r"(?:the |an? |any |your |(?:you|we) (?:see|get|hit|meet)\b.{0,60})?[\"'`«“(\[]*$")
"""Before a text: it says what to do should it come, not that it came."""

Handle = Callable[[str, Evidence], None]
Listener = tuple[bytes, Handle]  # A needle, and what handles each line that has it.


class Scan:
    """Collects what rules match, over all sources."""

    def __init__(self, rules: Sequence[Rule], listeners: Sequence[Listener] = ()) -> None:
        self._patterns: dict[bytes, list[tuple[Pattern, Rule, bool]]] = {}
        for rule in rules:
            for pattern in rule.patterns:
                self._patterns.setdefault(pattern.needle, []).append((pattern, rule, False))
            for pattern in rule.cured_by:
                self._patterns.setdefault(pattern.needle, []).append((pattern, rule, True))
        self._listeners = {fold(needle.decode()): handle for needle, handle in listeners}
        self._needles = {*self._patterns, *self._listeners}
        self._num_notified: Counter[bytes] = Counter()
        self._muted: set[bytes] = set()  # Needles of checks alone that have had enough lines.
        self._known: dict[bytes, tuple[bytes, ...]] = {}
        self._open: dict[tuple[str, str], RuleMatch] = {}  # Keyed by code and subject, such as a pod.
        self.cut_short: list[str] = []  # Sources that could not be read to their end.

    @property
    def matches(self) -> list[RuleMatch]:
        """Matches by rule and subject, without those that a later line cured."""
        return list(self._open.values())

    def read(self, source: DiagnosedFile, order: int, *, only: Callable[[Rule], bool] | None = None) -> None:
        """Search a source, the `order`th of all; with `only`, for some rules and no checks."""
        file = source.open()
        try:
            for some in lines(file):
                for line, needles in self._lines_with_needles(some):
                    self._look(line, needles, source.name, order, only)
        except (EOFError, OSError) as error:  # a log that was cut while it was packed or copied still says something
            self.cut_short.append(f"{source.name}: {error}")
        finally:
            if source.path is not None:
                file.close()

    def take_line(self, text: str, evidence: Evidence) -> None:
        """Search one line that is at hand."""
        key = fold(text)
        for needle, patterns in self._patterns.items():
            if needle in key:
                for pattern, rule, is_cure in patterns:
                    if not is_cure and (match := pattern.regex.search(text)):
                        self._take(rule, evidence, match.groupdict(default=""))

    def _lines_with_needles(self, some: Sequence[Line]) -> Iterator[tuple[Line, Sequence[bytes]]]:
        """Yield lines that may match. Which needles a line has depends on its key alone, so each key is searched
        once."""
        fresh = list({line.key for line in some if line.key not in self._known})
        new = dict(zip(fresh, self._needles_in(fresh), strict=True))
        for line in some:
            needles = self._known.get(line.key) or new.get(line.key)
            if needles and not (self._muted and self._muted.issuperset(needles)):
                yield line, needles
        if len(self._known) < MAX_KNOWN:
            self._known.update((key, needles) for key, needles in new.items() if len(key) <= MAX_KNOWN_BYTES)

    def _needles_in(self, keys: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return the needles of each key; all keys are searched at once, which is quicker than one by one."""
        text = b"\n".join(keys)
        starts = [0, *accumulate(len(key) + 1 for key in keys)]
        found: list[tuple[bytes, ...]] = [()] * len(keys)
        for needle in self._needles - self._muted:
            index = text.find(needle)
            while index >= 0:
                at = bisect_right(starts, index) - 1
                if needle in self._listeners or any(one.also in keys[at] for one, _, _ in self._patterns[needle]):
                    found[at] += (needle,)
                index = text.find(needle, starts[at + 1])
        return found

    def _look(
        self, line: Line, needles: Sequence[bytes], name: str, order: int, only: Callable[[Rule], bool] | None
    ) -> None:
        taken: dict[str, tuple[Rule, Evidence, Mapping[str, str]]] = {}
        cured: list[tuple[Rule, str]] = []
        for needle in needles:
            for text in pieces(line, needle):
                for pattern, rule, is_cure in self._patterns.get(needle, ()):
                    if (only is not None and not only(rule)) or not (match := pattern.regex.search(text)):
                        continue
                    if _CONDITION.search(text, max(0, match.start() - 100), match.start()):
                        continue
                    found = match.groupdict(default="")
                    if is_cure:
                        cured.append((rule, found.get("subject", "")))
                    elif rule.code not in taken:
                        taken[rule.code] = rule, _evidence(name, line, order, text, match.start()), found
                if only is None and needle in self._listeners:
                    self._notify(needle, text, _evidence(name, line, order, text, 0))
        for rule, subject in cured:
            self._open = {key: match for key, match in self._open.items() if key[0] != rule.code
                          or (subject and key[1] not in ("", subject))}
        for code, (rule, evidence, values) in taken.items():
            if not any(code == cure.code for cure, _ in cured):
                self._take(rule, evidence, values)

    def _notify(self, needle: bytes, text: str, evidence: Evidence) -> None:
        """Pass a line to a check. Each kind of line has its own limit: a long run's steps must not hide the lines at
        its end."""
        self._num_notified[needle] += 1
        if self._num_notified[needle] <= MAX_NOTIFIED:
            self._listeners[needle](text, evidence)
        elif needle not in self._patterns:
            self._muted.add(needle)

    def _take(self, rule: Rule, evidence: Evidence, values: Mapping[str, str]) -> None:
        key = (rule.code, values.get("subject", ""))
        known = self._open.get(key)
        if known is None and len(self._open) >= MAX_SUBJECTS:
            return
        safe = {name: value for name, value in values.items() if _SAFE.fullmatch(value)}
        ranks = frozenset() if evidence.rank is None else frozenset({evidence.rank})
        match = RuleMatch(rule, evidence, ranks=ranks, values=safe)
        self._open[key] = match if known is None else known.merged(match)


def _evidence(name: str, line: Line, order: int, text: str, at: int) -> Evidence:
    return Evidence(name, line.number, _excerpt(text, at), (order, line.number), time_of(text), rank_of(text))


def _excerpt(text: str, at: int) -> str:
    """Return the part of a long line that is worth quoting."""
    if len(text) <= MAX_QUOTED:
        return text
    begin = max(0, min(at - MAX_QUOTED // 4, len(text) - MAX_QUOTED))
    return ("…" if begin else "") + text[begin : begin + MAX_QUOTED]
