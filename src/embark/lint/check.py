"""Runs the rules over files, and fixes what can be fixed."""

import datetime
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

from embark.catalog.load import load_catalog
from embark.errors import UserError, nearest
from embark.kubernetes.yaml_nodes import SourceFile, Span
from embark.store import write_atomic
from embark.values import frozen
from .edits import Edit
from .manifests import Manifests
from .read import Files, read_files, read_sources
from .rule import Finding, Hit, Rule
from .rules import ALL_RULES, SUBJECTS

MAX_PASSES = 12
_IGNORE = re.compile(r"embark-lint: ignore((?:[ ,]+EMB\d+)+)")


@frozen
class Change:
    """A file that fixes change."""

    path: Path
    new: str = field(repr=False)


@frozen
class LintReport:
    """The findings that are left, and the changes that fixes made."""

    findings: tuple[Finding, ...]
    changes: tuple[Change, ...]
    num_fixed: int
    num_errors: int
    num_warnings: int


def lint(
    paths: Sequence[Path | str] | Path | str, *, fix: bool = False, select: Collection[str] = (),
    ignore: Collection[str] = ()
) -> LintReport:
    """Lint files and folders together; with `fix`, write the automatic fixes."""
    if not paths:
        raise UserError("no file to lint", "embark lint FILE…, or a folder")
    named = [Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)]
    found = lint_paths(named, select=select, ignore=ignore)
    changes, left = fix_paths(named, select=select, ignore=ignore) if fix else ([], found)
    for change in changes:
        _write(change)
    levels = Counter(one.level for one in left)
    return LintReport(tuple(left), tuple(changes), len(found) - len(left), levels["error"], levels["warning"])


def lint_paths(
    paths: Sequence[Path], *, select: Collection[str] = (), ignore: Collection[str] = (),
    today: datetime.date | None = None
) -> list[Finding]:
    """Return all findings in these files and folders, taken together."""
    return lint_files(read_files(paths), rules_of(select, ignore), today=today)


def lint_texts(texts: dict[str, str], today: datetime.date | None = None) -> list[Finding]:
    """Return findings in texts that are not on disk, taken together."""
    return lint_files(read_sources(SourceFile.of(Path(name), text) for name, text in texts.items()), today=today)


def lint_files(
    files: Files, rules: Sequence[Rule] = ALL_RULES, *, today: datetime.date | None = None
) -> list[Finding]:
    """Return findings in the order of file and line; the same finding at one location is reported once."""
    manifests = Manifests(files, load_catalog(), today or datetime.date.today())
    found: dict[tuple[str, SourceFile, int, str], Finding] = {}
    subjects = cache(lambda name: list(SUBJECTS[name](manifests)))
    for rule in rules:
        for hit in _hits(rule, manifests, subjects):
            if not is_ignored(rule, hit):
                found.setdefault((rule.code, hit.location.source, hit.location.start, hit.what), Finding.of(rule, hit))
    order = {id(source): number for number, source in enumerate(files.sources)}
    return sorted(found.values(), key=lambda one: (
        order.get(id(one.hit.location.source), 0), one.hit.location.start, one.code))


def _hits(rule: Rule, manifests: Manifests, subjects: Callable[[str], list[Any]]) -> Iterator[Hit]:
    parameters = inspect.signature(rule.check).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    for one in subjects(names[0]):
        values = (*one, manifests) if isinstance(one, tuple) else (one, manifests)
        if not rule.kinds or values[0].kind in rule.kinds:
            yield from rule.check(*values[: len(names)])


def is_ignored(rule: Rule, hit: Hit) -> bool:
    """Return whether a comment on the finding's line, or right above it, says `embark-lint: ignore` and the rule's
    code."""
    source, line = hit.location.source, hit.location.line
    lines = [source.line(line)]
    while line > 1 and source.line(line - 1).lstrip().startswith("#"):
        line -= 1
        lines.append(source.line(line))
    return any(rule.code in match.group(1) for text in lines for match in _IGNORE.finditer(text))


def fix_paths(
    paths: Sequence[Path], *, select: Collection[str] = (), ignore: Collection[str] = ()
) -> tuple[list[Change], list[Finding]]:
    """Apply the automatic fixes without writing them; returns the changes and the findings that are left."""
    rules, files = rules_of(select, ignore), read_files(paths)
    first = {source.path: source for source in files.sources}
    findings = lint_files(files, rules)
    for _ in range(MAX_PASSES):
        sound = {source: text for source, text in fixed(findings).items()
                 if text != source.text and still_reads(source, text)}
        if not sound:
            break
        empty = {one.source: one for one in files.unread if not one.source.text}
        files = read_sources(empty.get(one) or SourceFile.of(one.path, sound.get(one, one.text))
                             for one in files.sources)
        findings = lint_files(files, rules)
    changes = [Change(one.path, one.text) for one in files.sources
               if one.text != first[one.path].text]
    return changes, findings


def _write(change: Change) -> None:
    """Replace the file and keep its mode, so that a script stays executable."""
    try:
        path = change.path.resolve()
        mode = path.stat().st_mode & 0o7777
        write_atomic(path, change.new)
        path.chmod(mode)
    except OSError as error:
        raise UserError(f"{change.path}: {error.strerror}", "the file was not changed") from error


def rules_of(select: Collection[str], ignore: Collection[str]) -> list[Rule]:
    """Select rules by code or name, or by the beginning of a code: EMB4 selects all rules on AWS."""
    known = {name for rule in ALL_RULES for name in (rule.code, rule.name)}
    for word in (*select, *ignore):
        if not any(_means(word, rule) for rule in ALL_RULES):
            raise UserError(f"{word!r}: no such rule", nearest(word, known))
    chosen = [rule for rule in ALL_RULES if not select or any(_means(word, rule) for word in select)]
    return [rule for rule in chosen if not any(_means(word, rule) for word in ignore)]


def _means(word: str, rule: Rule) -> bool:
    return rule.name == word or (word.upper().startswith("EMB") and rule.code.startswith(word.upper()))


def fixed(findings: Iterable[Finding]) -> dict[SourceFile, str]:
    """Return the new text of each file that the findings' edits change. Of findings whose edits overlap, only the first
    is applied."""
    taken: dict[SourceFile, list[Edit]] = {}
    for finding in findings:
        edits = finding.hit.edits
        if not any(_overlap(edit.location, other.location) for edit in edits
                   for other in taken.get(edit.location.source, ())):
            for edit in edits:
                taken.setdefault(edit.location.source, []).append(edit)
    return {source: _apply(source.text, edits) for source, edits in taken.items()}


def still_reads(old: SourceFile, new: str) -> bool:
    """Return whether a changed text is complete, and has as many documents as before."""
    before, after = read_sources([old]), read_sources([SourceFile.of(old.path, new)])
    return not after.unread and len(before.documents) == len(after.documents)


def _overlap(one: Span, other: Span) -> bool:
    """Return whether two edits touch the same text, or insert at the same index."""
    return (one.start < other.end and other.start < one.end) or one.start == other.start


def _apply(text: str, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: one.location.start, reverse=True):
        text = text[: edit.location.start] + edit.new + text[edit.location.end :]
    return text
