"""Edits in place: everything that is not touched stays byte for byte, comments too."""

import difflib
from collections.abc import Iterable, Sequence

from embark.lint.read import Kind, read_sources
from embark.lint.rule import Finding
from embark.lint.source import Edit, Place, Source
from embark.lint.yaml_nodes import Node


def set_scalar(node: Node, new: str) -> tuple[Edit, ...]:
    """Another value for a scalar."""
    return (Edit(node.place, new),) if node.place is not None else ()


def replace_within(place: Place | None, old: str, new: str) -> tuple[Edit, ...]:
    """A part of a stretch of text; nothing where it does not stand there exactly once."""
    if place is None or not old or place.text.count(old) != 1:
        return ()
    start = place.start + place.text.index(old)
    return (Edit(Place(place.source, start, start + len(old)), new),)


def add_key(mapping: Node, text: str) -> tuple[Edit, ...]:
    """A new first key of a mapping: `completionMode: Indexed`."""
    keys = [key for key, _ in (mapping.pairs or {}).values() if key.place is not None]
    if not keys or mapping.place is None or mapping.tag:
        return ()
    first = min(keys, key=lambda key: key.place.start if key.place else 0).place
    assert first is not None
    if not mapping.place.start <= first.start < mapping.place.end:
        return ()  # it is of an anchor elsewhere
    at = Place(first.source, first.start, first.start)
    column = first.source.column_of(first.start)
    return (Edit(at, f"{text}, " if mapping.is_flow else f"{text}\n{' ' * column}"),)


def set_key(mapping: Node, name: str, value: str) -> tuple[Edit, ...]:
    """Another value for a key, or a new key."""
    return set_scalar(mapping[name], value) if mapping[name] else add_key(mapping, f"{name}: {value}")


def remove_key(mapping: Node, name: str) -> tuple[Edit, ...]:
    """A key of a block mapping, whole lines; nothing where others stand on them."""
    key, value = mapping.key(name), mapping[name]
    if mapping.is_flow or key.place is None or value.place is None or len(mapping.names) < 2:
        return ()
    source = key.place.source
    start, end = source.start_of_line(key.place.start), source.end_of_line(max(value.place.end - 1, key.place.start))
    if source.text[start:key.place.start].strip():
        return ()
    return (Edit(Place(source, start, end), ""),)


def remove_item(items: Node, item: Node) -> tuple[Edit, ...]:
    """An item of a list, with its dash or its comma."""
    if item.place is None or items.place is None or items.items is None or item not in items.items:
        return ()
    source, contents = item.place.source, items.items
    number = contents.index(item)
    if items.is_flow:
        before, after = contents[number - 1].place if number else None, contents[number + 1:]
        if after and after[0].place is not None:
            return (Edit(Place(source, item.place.start, after[0].place.start), ""),)
        if before is not None:
            return (Edit(Place(source, before.end, item.place.end), ""),)
        return ()
    start = source.start_of_line(item.place.start)
    if source.text[start:item.place.start].strip() != "-" or len(contents) < 2:
        return ()
    return (Edit(Place(source, start, source.end_of_line(item.place.end - 1)), ""),)


def remove_line(place: Place, begins: str) -> tuple[Edit, ...]:
    """The whole line of a place, where it begins so and nothing else stands on it."""
    source = place.source
    start, end = source.start_of_line(place.start), source.end_of_line(place.start)
    line = source.text[start:end].strip()
    head = line[: len(begins)]
    rest = line[len(begins):].strip()
    if head != begins or rest.partition("#")[0].strip() != place.text:
        return ()
    return (Edit(Place(source, start, end), ""),)


def fixed(findings: Iterable[Finding]) -> dict[Source, str]:
    """The new text of each file that the findings' edits change. A finding whose edits meet another's waits."""
    taken: dict[Source, list[Edit]] = {}
    for finding in findings:
        edits = finding.hit.edits
        if edits and not any(_overlaps(edit, taken.get(edit.place.source, ())) for edit in edits):
            for edit in edits:
                taken.setdefault(edit.place.source, []).append(edit)
    return {source: _apply(source.text, edits) for source, edits in taken.items()}


def still_reads(old: Source, new: str, kind: Kind | None) -> bool:
    """Whether a changed text can be read whole, and has as many documents as before."""
    before, after = read_sources([(old, kind)]), read_sources([(Source.of(old.path, new), kind)])
    return not after.unread and len(before.documents) == len(after.documents)


def diff(source: Source, new: str) -> str:
    name = str(source.path)
    lines = difflib.unified_diff(source.text.splitlines(keepends=True), new.splitlines(keepends=True), name, name)
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _overlaps(edit: Edit, others: Sequence[Edit]) -> bool:
    """Two insertions at one place also do."""
    place = edit.place
    return any((place.start < other.place.end and other.place.start < place.end) or place.start == other.place.start
               for other in others)


def _apply(text: str, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: one.place.start, reverse=True):
        text = text[: edit.place.start] + edit.new + text[edit.place.end :]
    return text


