"""Puts it all together: what was seen in every source, which of it is the cause and which only follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from embark.catalog import Catalog
from embark.diagnose.finding import Diagnosis, Evidence, Seen, Whose
from embark.diagnose.nccl_log import NcclLog
from embark.diagnose.rule import Rule, load_rules
from embark.diagnose.scan import Scan
from embark.diagnose.source import Source
from embark.diagnose.steps import Steps
from embark.diagnose.versions import Versions
from embark.formatting import to_one_line
from embark.spec import RunSpec
from embark.store.errors import without_secrets

MAX_QUOTED = 300
TIERS = {"cause": 0, "symptom": 1, "summary": 2, "slow": 3}
OUT_OF_MEMORY: Mapping[str, Whose] = {
    "gpu-out-of-memory": "device", "tables-do-not-fit": "device", "host-out-of-memory": "host", "killed": "host",
}
"""Rules that the plan has a word on, and whose memory it is about."""
WhatFits = Callable[[RunSpec, Whose], str]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer."""

    diagnoses: tuple[Diagnosis, ...]
    """The cause first."""
    num_sources: int
    cut_short: tuple[str, ...] = ()
    """Sources that could not be read to their end."""


def diagnose(
    sources: Sequence[Source],
    *,
    spec: RunSpec | None = None,
    catalog: Catalog | None = None,
    what_fits: WhatFits | None = None,
    rules: Sequence[Rule] | None = None,
    names: Mapping[str, str] | None = None,
) -> Report:
    """Look through all sources, together. `what_fits` is asked where memory ran out and the spec is known. `names`:
    what to put into a command for words like SPEC."""
    nccl, steps, versions = NcclLog(), Steps(), Versions()
    scan = Scan(load_rules() if rules is None else rules,
                (*nccl.listeners, *steps.listeners, *versions.listeners))
    seen: list[Seen] = []
    for order, source in enumerate(sources):
        if source.form == "events":
            for text, evidence in steps.read_events(source, order):
                scan.take_line(text, evidence)
        elif source.form == "manifest" and source.path is not None:
            scan.read(source, order, only=lambda rule: rule.is_of("manifest"))
        else:
            scan.read(source, order)
    seen += scan.found
    seen += [*nccl.findings(spec, catalog), *steps.findings(), *versions.findings()]
    told = [_named(_told(one, spec, what_fits), names or {}) for one in _ranked(_without_weaker(_merged(seen)))]
    diagnoses = [*_joined(told), *_lint(sources)]
    return Report(tuple(diagnoses), len(sources), tuple(scan.cut_short))


def _merged(seen: Sequence[Seen]) -> list[Seen]:
    """What the lines and a check both saw is told once, by the first of them."""
    together: dict[str, Seen] = {}
    for one in seen:
        known = together.get(one.rule.code)
        together[one.rule.code] = one if known is None else replace(
            known, num_lines=known.num_lines + one.num_lines, ranks=known.ranks | one.ranks,
            cause=known.cause or one.cause, fix=known.fix or one.fix, command=known.command or one.command)
    return list(together.values())


def _without_weaker(seen: Sequence[Seen]) -> list[Seen]:
    """Of rules that say the same, the one that says it best."""
    codes = {one.rule.code for one in seen}
    return [one for one in seen if not codes & set(one.rule.unless)]


def _ranked(seen: Sequence[Seen]) -> list[Seen]:
    """Causes before symptoms before summaries; among equals what came first; what follows from another after it."""
    has_times = all(one.first.time for one in seen)
    following = {code for one in seen for code in one.rule.explains}

    def key(one: Seen) -> tuple[int, bool, str, tuple[int, int]]:
        return (TIERS[one.rule.kind], one.rule.code in following, one.first.time if has_times else "", one.first.order)

    return sorted(seen, key=key)


def _joined(told: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """What follows from the first cause is told with it, not as a finding of its own."""
    fatal = [one for one in told if one.kind != "slow"]
    slow = [one for one in told if one.kind == "slow"]
    if fatal:
        first, rest = fatal[0], fatal[1:]
        explained = next((rule.explains for rule in load_rules() if rule.code == first.code), ())
        follows = [one for one in rest if TIERS[one.kind] > TIERS[first.kind] or one.code in explained]
        own = [one for one in rest if one not in follows]
        yield _with_follows(first, tuple(one.name for one in follows))
        yield from own
    yield from slow


def _told(one: Seen, spec: RunSpec | None, what_fits: WhatFits | None) -> Diagnosis:
    rule = one.rule
    values = _Values(one.values)
    fix = one.fix or rule.fix.format_map(values)
    whose = OUT_OF_MEMORY.get(rule.name)
    if whose is not None and spec is not None and what_fits is not None and (words := what_fits(spec, whose)):
        fix = f"{words}. Else: {fix}"
    return Diagnosis(
        rule.code, rule.name, rule.kind, one.cause or rule.cause.format_map(values), fix,
        one.command or rule.command.format_map(values), _quoted(one.first), one.num_lines, tuple(sorted(one.ranks)),
        rule.source,
    )


def _named(one: Diagnosis, names: Mapping[str, str]) -> Diagnosis:
    command = one.command
    for name, word in names.items():
        command = word.join(re.split(rf"(?<![\w-]){name}(?![\w-])", command))
    return replace(one, command=command)


def _lint(sources: Sequence[Source]) -> Iterator[Diagnosis]:
    """Manifests beside the logs: what `embark lint` says of them."""
    paths = [source.path for source in sources if source.form == "manifest" and source.path is not None]
    if not paths:
        return
    from embark.lint.check import lint_paths

    order: Mapping[str, int] = {str(path): place for place, path in enumerate(paths)}
    for found in lint_paths([Path(path) for path in paths]):
        if found.rule.level == "error":
            evidence = Evidence(found.path, found.line, found.hit.what, (order.get(found.path, 0), found.line))
            yield Diagnosis(found.rule.code, found.rule.name, "manifest", found.rule.happens, found.hit.fix,
                            f"embark lint {found.path}", _quoted(evidence), 1, (), found.rule.source)


def _quoted(evidence: Evidence) -> Evidence:
    """The line as it may be shown: one line, no control characters, no secrets, no longer than is read."""
    text = without_secrets(to_one_line(evidence.text))
    if len(text) > MAX_QUOTED:
        text = text[: MAX_QUOTED - 1] + "…"
    return Evidence(to_one_line(evidence.source), evidence.line, text, evidence.order, evidence.time, evidence.rank)


def _with_follows(one: Diagnosis, follows: tuple[str, ...]) -> Diagnosis:
    return replace(one, follows=follows)


class _Values(dict[str, str]):
    """What a pattern did not find stands as a word to fill in."""

    def __missing__(self, name: str) -> str:
        return name.upper()
