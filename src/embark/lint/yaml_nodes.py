"""YAML as nodes that know their position. No object is constructed, so no tag runs code.

PyYAML composes the nodes, once its events show that they are neither too deep, nor too many, nor alias bombs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from embark.lint.source import Place, Source

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_ALIASES = 1_000
_UNSAFE_TAG = "tag:yaml.org,2002:python/"
_PLAIN_TAGS = frozenset({"map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value"})


class BadYaml(Exception):
    """The text is not readable YAML. `line` is counted from 1."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


@dataclass(slots=True, eq=False)
class Node:
    """A mapping, a list or a scalar. A missing key is an empty node, so that lookups can be chained."""

    place: Place | None
    """None: there is no such node."""
    value: str | int | float | bool | None = None
    text: str = ""
    """A scalar as it is written, without its quotes."""
    is_plain: bool = True
    """Written without quotes, on a line of its own."""
    pairs: dict[str, tuple[Node, Node]] | None = None
    """A mapping's keys and values, by key."""
    items: list[Node] | None = None
    is_flow: bool = False
    """Written with braces or brackets."""
    repeated: list[Node] = field(default_factory=list)
    """Keys that occur twice in this mapping."""
    tag: str = ""

    def __bool__(self) -> bool:
        return self.place is not None

    def __getitem__(self, key: str) -> Node:
        pair = self.pairs.get(key) if self.pairs else None
        return pair[1] if pair else NOTHING

    def key(self, name: str) -> Node:
        """The node of the key itself."""
        pair = self.pairs.get(name) if self.pairs else None
        return pair[0] if pair else NOTHING

    def at(self, dotted: str) -> Node:
        """`spec.template.spec`"""
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
    def whole(self) -> int | None:
        """A whole number, also if it is written in quotes."""
        if isinstance(self.value, bool):
            return None
        if isinstance(self.value, int):
            return self.value
        return int(self.text) if self.text.isascii() and self.text.isdigit() and len(self.text) < 12 else None

    @property
    def words(self) -> list[str]:
        """The texts of a list's scalars."""
        return [item.text for item in self if not item.is_map and item.items is None]

    def walk(self, budget: int = MAX_NODES) -> Iterator[Node]:
        """This node and all below it. An alias is walked as often as it is used, up to a limit."""
        waiting = [self]
        while waiting and budget > 0:
            node = waiting.pop()
            budget -= 1
            yield node
            waiting.extend(reversed(node.items if node.items is not None else node.values()))


NOTHING = Node(None)


def read_yaml(source: Source, text: str | None = None) -> tuple[list[Node], BadYaml | None]:
    """The documents of a file; if it breaks off, those before, and why. `text`: read instead, with the same places."""
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
    """A tag that an unsafe loader would run."""
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


def _node(composed: Any, source: Source, known: dict[int, Node]) -> Node:
    """`known`: what was made before, by the composed node that an alias shares."""
    if id(composed) in known:
        return known[id(composed)]
    start, end = composed.start_mark.index, composed.end_mark.index
    kind = composed.tag.removeprefix("tag:yaml.org,2002:")
    tag = "" if kind in _PLAIN_TAGS else composed.tag
    if isinstance(composed.value, str):
        node = Node(Place(source, start, end), value=_value(kind, composed.value), text=composed.value,
                    is_plain=not composed.style, tag=tag)
    else:
        node = Node(None, is_flow=bool(composed.flow_style), tag=tag)
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
            end = max(one.place.end for one in below if one.place)
        node.place = Place(source, start, max(start, end))
    known[id(composed)] = node
    return node


def _value(kind: str, text: str) -> str | int | float | bool | None:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    digits = text.replace("_", "").lower()
    try:
        if kind == "int":
            return _whole(digits) if len(digits.lstrip("+-")) <= 20 else text
        if kind == "float":
            return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        pass
    return text


def _whole(text: str) -> int:
    """As YAML 1.1 counts: 0x10 and 0b10 by their base, 010 in octal."""
    digits = text.lstrip("+-")
    base = 16 if digits.startswith("0x") else 2 if digits.startswith("0b") else 8 if digits.startswith("0") else 10
    return int(text, base)
