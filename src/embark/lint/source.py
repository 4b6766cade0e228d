"""A file's text, YAML as nodes that know their position in it, and edits in location.

No object is constructed, so no tag runs code: PyYAML composes the nodes, once its events show that they are neither too
deep, nor too many, nor alias bombs. What an edit does not touch stays byte for byte, comments too."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, eq=False)
class SourceFile:
    """One file's text, indexed by characters."""

    path: Path
    text: str
    starts: tuple[int, ...] = field(repr=False)  # The index at which each line begins.

    @staticmethod
    def of(path: Path, text: str) -> SourceFile:
        return SourceFile(path, text, (0, *(match.end() for match in re.finditer("\n", text))))

    def line_of(self, index: int) -> int:
        """The number of the line at an index, counted from 1."""
        return bisect.bisect_right(self.starts, index)

    def line(self, number: int) -> str:
        """The text of a line, counted from 1; empty past the end."""
        if not 0 < number <= len(self.starts):
            return ""
        return self.text[self.starts[number - 1]:self.end_of_line(self.starts[number - 1])]

    def start_of_line(self, index: int) -> int:
        return self.starts[self.line_of(index) - 1]

    def end_of_line(self, index: int) -> int:
        """The index behind the newline."""
        line = self.line_of(index)
        return self.starts[line] if line < len(self.starts) else len(self.text)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a file."""

    source: SourceFile
    start: int
    end: int

    def __bool__(self) -> bool:
        return bool(self.source.starts)

    @property
    def location(self) -> Span:
        return self

    @property
    def line(self) -> int:
        return self.source.line_of(self.start)

    @property
    def text(self) -> str:
        return self.source.text[self.start:self.end]


NOWHERE = Span(SourceFile(Path(), "", ()), 0, 0)  # The span of what no file has; it is false.


@dataclass(frozen=True, slots=True)
class Edit:
    """A span of a file, and the text that replaces it."""

    location: Span
    new: str


MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_ALIASES = 1_000
_UNSAFE_TAG = "tag:yaml.org,2002:python/"
_PLAIN_TAGS = frozenset({"map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value"})


class BadYaml(NamedTuple):
    """The text is not readable YAML. `line` is counted from 1."""

    what: str
    line: int


@dataclass(slots=True, eq=False)
class Node:
    """A mapping, a list or a scalar. A missing key is an empty node, so that lookups can be chained."""

    location: Span
    value: str | int | float | bool | None = None
    text: str = ""  # A scalar as it is written, without its quotes.
    is_plain: bool = True  # Written without quotes, on a line of its own.
    pairs: dict[str, tuple[Node, Node]] | None = None  # A mapping's keys and values, by key.
    items: list[Node] | None = None
    is_flow: bool = False  # Written with braces or brackets.
    repeated: list[Node] = field(default_factory=list)  # Keys that occur twice in this mapping.
    tag: str = ""

    def __bool__(self) -> bool:
        return bool(self.location)

    def __getitem__(self, key: str) -> Node:
        pair = self.pairs.get(key) if self.pairs else None
        return pair[1] if pair else NOTHING

    def key(self, name: str) -> Node:
        """The node of the key itself."""
        pair = self.pairs.get(name) if self.pairs else None
        return pair[0] if pair else NOTHING

    def at(self, dotted: str) -> Node:
        """The node at a dotted path such as `spec.template.spec`."""
        node = self
        for part in dotted.split("."):
            node = node[part]
        return node

    def __iter__(self) -> Iterator[Node]:
        return iter(self.items or ())

    @property
    def names(self) -> list[str]:
        """A mapping's keys."""
        return list(self.pairs or ())

    def values(self) -> list[Node]:
        return [value for _, value in (self.pairs or {}).values()]

    @property
    def is_map(self) -> bool:
        return self.pairs is not None

    @property
    def integer(self) -> int | None:
        """The value as a whole number, even if it is written in quotes."""
        if isinstance(self.value, bool):
            return None
        if isinstance(self.value, int):
            return self.value
        return int(self.text) if self.text.isascii() and self.text.isdigit() and len(self.text) < 12 else None

    @property
    def words(self) -> list[str]:
        """The texts of a list's scalars."""
        return [item.text for item in self if not item.is_map and item.items is None]

    @property
    def texts(self) -> dict[str, str]:
        """The texts of a mapping's scalars, by key."""
        return {name: value.text for name, (_, value) in (self.pairs or {}).items()}

    def plain(self) -> Any:
        """The dicts, lists and scalars that YAML means."""
        if self.pairs is not None:
            return {name: value.plain() for name, (_, value) in self.pairs.items()}
        return self.value if self.items is None else [item.plain() for item in self.items]

    def walk(self, budget: int = MAX_NODES) -> Iterator[Node]:
        """This node and all below it. An alias is walked as often as it is used, up to a limit."""
        waiting = [self]
        while waiting and budget > 0:
            node = waiting.pop()
            budget -= 1
            yield node
            waiting.extend(reversed(node.items if node.items is not None else node.values()))


NOTHING = Node(NOWHERE)


def read_yaml(source: SourceFile, text: str | None = None) -> tuple[list[Node], BadYaml | None]:
    """The documents of a file; if it breaks off, those before, and why. `text` is read instead, with the same
    indexes."""
    import yaml

    text = source.text if text is None else text
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents: list[Node] = []
    try:
        num_sound, bad = _limits(yaml.parse(text, Loader=loader))
        for root in islice(yaml.compose_all(text, Loader=loader), num_sound):  # deeper ones would crash the composer
            documents.append(_node(root, source, {}))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        return documents, BadYaml(what, (mark.line if mark else 0) + 1)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return documents, BadYaml(str(error).splitlines()[0], 1)
    return documents, bad


def is_unsafe(tag: str) -> bool:
    """Whether an unsafe loader would run this tag."""
    return tag.startswith((_UNSAFE_TAG, "!!python/"))


def _limits(events: Iterable[Any]) -> tuple[int, BadYaml | None]:
    """How many documents are safe to compose, and what is wrong with the next one; syntax is left to the composer."""
    import yaml

    num_documents = num_nodes = num_aliases = 0
    open_anchors: list[str | None] = []
    try:
        for event in events:
            if isinstance(event, yaml.DocumentEndEvent):
                num_documents += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                open_anchors.pop()
            elif isinstance(event, yaml.NodeEvent):
                num_nodes += not isinstance(event, yaml.AliasEvent)
                num_aliases += isinstance(event, yaml.AliasEvent)
                what = ""
                if isinstance(event, yaml.CollectionStartEvent):
                    open_anchors.append(event.anchor)
                    what = f"nested deeper than {MAX_DEPTH} levels" if len(open_anchors) > MAX_DEPTH else ""
                elif isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
                    what = f"*{event.anchor} stands inside what it names"
                if num_nodes > MAX_NODES or num_aliases > MAX_ALIASES:
                    what = f"more than {MAX_NODES:,} values or {MAX_ALIASES:,} aliases"
                if what:
                    mark: Any = event.start_mark
                    return num_documents, BadYaml(what, mark.line + 1)
    except (yaml.YAMLError, ValueError):
        pass
    return MAX_NODES, None


def _node(composed: Any, source: SourceFile, known: dict[int, Node]) -> Node:
    """`known` has the nodes that were made before, by the composed node that aliases share."""
    if id(composed) in known:
        return known[id(composed)]
    start, end = composed.start_mark.index, composed.end_mark.index
    kind = composed.tag.removeprefix("tag:yaml.org,2002:")
    tag = "" if kind in _PLAIN_TAGS else composed.tag
    if isinstance(composed.value, str):
        node = Node(Span(source, start, end), value=_value(kind, composed), text=composed.value,
                    is_plain=not composed.style, tag=tag)
    else:
        node = Node(NOWHERE, is_flow=bool(composed.flow_style), tag=tag)
        below: list[Node] = []
        if composed.id == "sequence":
            node.items = below = [_node(item, source, known) for item in composed.value]
        else:
            node.pairs, merged = {}, []
            for pair in composed.value:
                key, value = (_node(one, source, known) for one in pair)
                below += [key, value]
                if key.text == "<<" and key.is_plain:
                    merged.append(value)
                    continue
                if key.text in node.pairs:
                    node.repeated.append(key)
                node.pairs[key.text] = (key, value)
            for base in (base for value in merged for base in (value.items if value.items is not None else [value])):
                node.pairs = {**(base.pairs or {}), **node.pairs}  # what the mapping says itself wins
        # A block ends where the next thing begins; its own text ends before the blanks and comments between.
        if not node.is_flow and below:
            end = max(one.location.end for one in below)
        node.location = Span(source, start, max(start, end))
    known[id(composed)] = node
    return node


def _value(kind: str, composed: Any) -> str | int | float | bool | None:
    """The value that YAML 1.1 reads; dates, and integers too large for any field of Kubernetes, stay text."""
    import yaml

    value: str | int | float | bool | None = composed.value
    if kind in ("null", "bool", "float") or (kind == "int" and len(composed.value) <= 20):
        with suppress(ValueError, OverflowError):
            value = yaml.constructor.SafeConstructor().construct_object(composed)
    return value


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
