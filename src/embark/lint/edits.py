"""Edits in place: what they do not touch stays byte for byte, comments too."""

from embark.kubernetes.yaml_nodes import Node, Span
from embark.values import frozen


@frozen
class Edit:
    """A span of a file, and the text that replaces it."""

    location: Span
    new: str


def set_scalar(node: Node, new: str) -> tuple[Edit, ...]:
    """Replace the value of a scalar."""
    return (Edit(node.location, new),) if node else ()


def replace_within(location: Span, old: str, new: str) -> tuple[Edit, ...]:
    """Replace a part of a span, if it occurs there exactly once."""
    if not old or location.text.count(old) != 1:
        return ()
    start = location.start + location.text.index(old)
    return (Edit(Span(location.source, start, start + len(old)), new),)


def set_key(mapping: Node, name: str, value: str) -> tuple[Edit, ...]:
    """Replace the value of a key, or insert the key before the first of the mapping."""
    if mapping[name]:
        return set_scalar(mapping[name], value)
    keys = [key.location for key, _ in (mapping.pairs or {}).values() if key]
    if not keys or not mapping or mapping.tag:
        return ()
    first = min(keys, key=lambda key: key.start)
    if not mapping.location.start <= first.start < mapping.location.end:
        return ()  # it is of an anchor elsewhere
    column = first.start - first.source.start_of_line(first.start)
    after = ", " if mapping.is_flow else "\n" + " " * column
    return (Edit(Span(first.source, first.start, first.start), f"{name}: {value}{after}"),)
