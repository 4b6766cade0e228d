"""Runs the rules over files, and mends what can be mended."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from embark.catalog.load import load_catalog
from embark.errors import UserError, nearest
from embark.lint.edit import diff, fixed, still_reads
from embark.lint.read import Files, kind_of, read_files, read_sources
from embark.lint.rule import Finding, Hit, Rule, World
from embark.lint.rules import ALL_RULES
from embark.lint.source import Source

MAX_PASSES = 12
_IGNORE = re.compile(r"embark-lint: ignore((?:[ ,]+EMB\d+)+)")


@dataclass(frozen=True, slots=True)
class Change:
    """A file that a fix changes."""

    path: Path
    old: Source
    new: str

    @property
    def diff(self) -> str:
        return diff(self.old, self.new)


def lint_paths(paths: Sequence[Path], *, select: Collection[str] = (), ignore: Collection[str] = ()) -> list[Finding]:
    """All findings in these files and folders, taken together."""
    return lint_files(read_files(paths), rules_of(select, ignore))


def lint_text(name: str, text: str) -> list[Finding]:
    """Findings in one text that is not on disk, of the kind its name says: what a renderer is about to write."""
    return lint_texts({name: text})


def lint_texts(texts: dict[str, str]) -> list[Finding]:
    """Findings in texts that are not on disk, taken together."""
    loaded = [(Source.of(Path(name), text), kind_of(Path(name), text[:200].encode())) for name, text in texts.items()]
    return lint_files(read_sources(loaded), ALL_RULES)


def lint_files(files: Files, rules: Sequence[Rule] = ALL_RULES) -> list[Finding]:
    """In the order of file and line; one that is found twice at one place is told once."""
    world = World(files, load_catalog())
    found: dict[tuple[str, Source, int, str], Finding] = {}
    for rule in rules:
        for hit in rule.check(world):
            if not is_ignored(rule, hit):
                found.setdefault((rule.code, hit.place.source, hit.place.start, hit.what), Finding(rule, hit))
    order = {id(source): number for number, source in enumerate(files.sources)}
    return sorted(found.values(), key=lambda one: (order.get(id(one.hit.place.source), 0), one.hit.place.start,
                                                   one.rule.code))


def is_ignored(rule: Rule, hit: Hit) -> bool:
    """A comment on the finding's own line, or right above it, says `embark-lint: ignore` and the rule's code."""
    source, line = hit.place.source, hit.place.line
    told = [source.line(line)]
    while line > 1 and source.line(line - 1).lstrip().startswith("#"):
        line -= 1
        told.append(source.line(line))
    return any(rule.code in match.group(1) for text in told for match in _IGNORE.finditer(text))


def fix_paths(
    paths: Sequence[Path], *, select: Collection[str] = (), ignore: Collection[str] = ()
) -> tuple[list[Change], list[Finding]]:
    """What the automatic fixes make of the files, and what is left. Nothing is written."""
    rules, files = rules_of(select, ignore), read_files(paths)
    first = {source.path: source for source in files.sources}
    texts = {source.path: source.text for source in files.sources}
    stuck: set[Path] = set()
    findings = lint_files(files, rules)
    for _ in range(MAX_PASSES):
        changed = False
        for source, new in fixed(one for one in findings if Path(one.path) not in stuck).items():
            if new == source.text:
                continue
            if still_reads(source, new, kind_of(source.path, source.text[:200].encode())):
                texts[source.path] = new
                changed = True
            else:
                stuck.add(source.path)
        if not changed:
            break
        findings = lint_files(_again(files, texts), rules)
    changes = [Change(path, first[path], text) for path, text in texts.items() if text != first[path].text]
    return changes, findings


def rules_of(select: Collection[str], ignore: Collection[str]) -> list[Rule]:
    """By code or name, or by a code's beginning: EMB4 is all of AWS."""
    known = {name for rule in ALL_RULES for name in (rule.code, rule.name)}
    for word in (*select, *ignore):
        if not any(_means(word, rule) for rule in ALL_RULES):
            raise UserError(f"{word!r}: no such rule", fix=nearest(word, known))
    chosen = [rule for rule in ALL_RULES if not select or any(_means(word, rule) for word in select)]
    return [rule for rule in chosen if not any(_means(word, rule) for word in ignore)]


def _means(word: str, rule: Rule) -> bool:
    return rule.name == word or (word.upper().startswith("EMB") and rule.code.startswith(word.upper()))


def _again(files: Files, texts: dict[Path, str]) -> Files:
    unread = {one.source.path: one for one in files.unread if not one.source.text}
    return read_sources(
        unread[source.path] if source.path in unread else
        (Source.of(source.path, texts[source.path]), kind_of(source.path, texts[source.path][:200].encode()))
        for source in files.sources
    )
