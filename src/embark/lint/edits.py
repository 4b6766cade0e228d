"""Edits in place: what they do not touch stays byte for byte, comments too."""

from dataclasses import dataclass

from embark.kubernetes.yaml_nodes import Node, Span


@dataclass(frozen=True, slots=True)
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


def add_key(mapping: Node, text: str) -> tuple[Edit, ...]:
    """Insert a first key, such as `completionMode: Indexed`, into a mapping."""
    keys = [key.location for key, _ in (mapping.pairs or {}).values() if key]
    if not keys or not mapping or mapping.tag:
        return ()
    first = min(keys, key=lambda key: key.start)
    if not mapping.location.start <= first.start < mapping.location.end:
        return ()  # it is of an anchor elsewhere
    at = Span(first.source, first.start, first.start)
    column = first.start - first.source.start_of_line(first.start)
    return (Edit(at, f"{text}, " if mapping.is_flow else f"{text}\n{' ' * column}"),)


def set_key(mapping: Node, name: str, value: str) -> tuple[Edit, ...]:
    """Replace the value of a key, or add the key."""
    return set_scalar(mapping[name], value) if mapping[name] else add_key(mapping, f"{name}: {value}")


def remove_key(mapping: Node, name: str) -> tuple[Edit, ...]:
    """Remove a key of a block mapping with its lines, if nothing else stands on them."""
    key, value = mapping.key(name), mapping[name]
    if mapping.is_flow or not key or not value or len(mapping.names) < 2:
        return ()
    source = key.location.source
    start = source.start_of_line(key.location.start)
    end = source.end_of_line(max(value.location.end - 1, key.location.start))
    if source.text[start:key.location.start].strip():
        return ()
    return (Edit(Span(source, start, end), ""),)


def remove_item(items: Node, item: Node) -> tuple[Edit, ...]:
    """Remove an item of a list, with its dash or its comma."""
    if not item or items.items is None or item not in items.items:
        return ()
    source, contents = item.location.source, items.items
    number = contents.index(item)
    if items.is_flow:
        if contents[number + 1:]:
            return (Edit(Span(source, item.location.start, contents[number + 1].location.start), ""),)
        if number:
            return (Edit(Span(source, contents[number - 1].location.end, item.location.end), ""),)
        return ()
    start = source.start_of_line(item.location.start)
    if source.text[start:item.location.start].strip() != "-" or len(contents) < 2:
        return ()
    return (Edit(Span(source, start, source.end_of_line(item.location.end - 1)), ""),)


def remove_line(location: Span, begins: str) -> tuple[Edit, ...]:
    """Remove the line of a location, if it begins with `begins` and has nothing else on it."""
    source = location.source
    start, end = source.start_of_line(location.start), source.end_of_line(location.start)
    line = source.text[start:end].strip()
    is_alone = line.startswith(begins) and line[len(begins):].partition("#")[0].strip() == location.text
    return (Edit(Span(source, start, end), ""),) if is_alone else ()
