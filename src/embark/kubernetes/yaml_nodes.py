"""YAML as nodes that know their location in the file.

No object is constructed, so no tag runs code: PyYAML composes the nodes, once its events show that they are neither too
deep, nor too many, nor alias bombs.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from embark.values import frozen


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
        """Return the number of the line at an index, counted from 1."""
        return bisect.bisect_right(self.starts, index)

    def line(self, number: int) -> str:
        """Return the text of a line, counted from 1; empty past the end."""
        if not 0 < number <= len(self.starts):
            return ""
        return self.text[self.starts[number - 1]:self.end_of_line(self.starts[number - 1])]

    def start_of_line(self, index: int) -> int:
        return self.starts[self.line_of(index) - 1]

    def end_of_line(self, index: int) -> int:
        """Return the index behind the newline."""
        line = self.line_of(index)
        return self.starts[line] if line < len(self.starts) else len(self.text)


@frozen
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
        return (self.pairs or {}).get(key, (NOTHING, NOTHING))[1]

    def key(self, name: str) -> Node:
        """Return the node of the key itself."""
        return (self.pairs or {}).get(name, (NOTHING, NOTHING))[0]

    def at(self, dotted: str) -> Node:
        """Return the node at a dotted path such as `spec.template.spec`."""
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
        """Return the dicts, lists and scalars that YAML means."""
        if self.pairs is not None:
            return {name: value.plain() for name, (_, value) in self.pairs.items()}
        return self.value if self.items is None else [item.plain() for item in self.items]

    def walk(self, budget: int = MAX_NODES) -> Iterator[Node]:
        """Yield this node and all below it. An alias is walked as often as it is used, up to a limit."""
        waiting = [self]
        while waiting and budget > 0:
            node = waiting.pop()
            budget -= 1
            yield node
            waiting.extend(reversed(node.items if node.items is not None else node.values()))


NOTHING = Node(NOWHERE)


def read_yaml(source: SourceFile, text: str | None = None) -> tuple[list[Node], BadYaml | None]:
    """Return the documents of a file; if it breaks off, those before, and why. `text` is read instead, with the same
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
    """Return whether an unsafe loader would run this tag."""
    return tag.startswith((_UNSAFE_TAG, "!!python/"))


def _limits(events: Iterable[Any]) -> tuple[int, BadYaml | None]:
    """Return how many documents are safe to compose, and what is wrong with the next one; syntax is left to the
    composer."""
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
    """Return the value that YAML 1.1 reads; dates, and integers too large for any field of Kubernetes, stay text."""
    import yaml

    value: str | int | float | bool | None = composed.value
    if kind in ("null", "bool", "float") or (kind == "int" and len(composed.value) <= 20):
        with suppress(ValueError, OverflowError):
            value = yaml.constructor.SafeConstructor().construct_object(composed)
    return value
