"""YAML as nodes that know where they stand. Nothing is constructed, so no tag runs; nothing recurses, so depth is safe.

PyYAML's parser gives every event its place in the text, which is all that an edit in place needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from embark.lint.source import Place, Source

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_ALIASES = 1_000
_UNSAFE_TAG = "tag:yaml.org,2002:python/"


class BadYaml(Exception):
    """The text is no YAML that can be read. `line` is counted from 1."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


@dataclass(slots=True, eq=False)
class Node:
    """A mapping, a list or a scalar. A missing key is an empty node, so that chains need no questions."""

    place: Place | None
    """None where there is no such node."""
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
    """Keys that stand twice in this mapping."""
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
        """A whole number, also where it is written in quotes."""
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
            below = node.items if node.items is not None else [v for _, v in (node.pairs or {}).values()]
            waiting.extend(reversed(below))


NOTHING = Node(None)


def read_yaml(source: Source, text: str | None = None) -> tuple[list[Node], BadYaml | None]:
    """The documents of a file; where it breaks off, those before, and why.

    `text`, where it is given, is read in the file's place: it has the same places.
    """
    documents: list[Node] = []
    try:
        for node in _documents(source, source.text if text is None else text):
            documents.append(node)
    except BadYaml as bad:
        return documents, bad
    return documents, None


def _documents(source: Source, text: str) -> Iterator[Node]:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(source)
    try:
        for event in yaml.parse(text, Loader=loader):
            done = builder.take(event)
            if done is not None:
                yield done
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = (mark.line if mark else 0) + 1
        raise BadYaml(" ".join(part for part in (error.context, error.problem) if part), line) from None
    except yaml.YAMLError as error:
        raise BadYaml(str(error).splitlines()[0], 1) from None
    except (ValueError, RecursionError) as error:
        raise BadYaml(str(error), 1) from None


class _Builder:
    """Puts the events of a document together, without recursion."""

    def __init__(self, source: Source) -> None:
        import yaml
        import yaml.resolver

        self._source = source
        self._resolver: Any = yaml.resolver.Resolver()
        self._scalar: Any = yaml.ScalarNode
        self._events = yaml.events
        self._open: list[tuple[Node, list[Node]]] = []
        """Each node that is not closed, with what stands in it so far."""
        self._anchors: dict[str, Node] = {}
        self._num_nodes = self._num_aliases = 0

    def take(self, event: Any) -> Node | None:
        """The document, once its last event was taken."""
        events = self._events
        if isinstance(event, events.ScalarEvent):
            return self._add(self._scalar_node(event), event)
        if isinstance(event, (events.MappingStartEvent, events.SequenceStartEvent)):
            is_map = isinstance(event, events.MappingStartEvent)
            node = Node(self._place(event), pairs={} if is_map else None, items=None if is_map else [],
                        is_flow=bool(event.flow_style), tag=event.tag or "")
            self._count(event)
            self._keep(event, node)
            self._open.append((node, []))
            if len(self._open) > MAX_DEPTH:
                raise BadYaml(f"nested deeper than {MAX_DEPTH} levels", event.start_mark.line + 1)
        elif isinstance(event, (events.MappingEndEvent, events.SequenceEndEvent)):
            return self._close(event)
        elif isinstance(event, events.AliasEvent):
            self._num_aliases += 1
            if event.anchor not in self._anchors:
                raise BadYaml(f"no anchor &{event.anchor} above", event.start_mark.line + 1)
            if self._num_aliases > MAX_ALIASES:
                raise BadYaml(f"more than {MAX_ALIASES} aliases", event.start_mark.line + 1)
            aliased = self._anchors[event.anchor]
            if any(aliased is node for node, _ in self._open):
                raise BadYaml(f"*{event.anchor} stands inside what it names", event.start_mark.line + 1)
            return self._add(aliased, event)
        elif isinstance(event, events.DocumentStartEvent):
            self._anchors.clear()
        return None

    def _scalar_node(self, event: Any) -> Node:
        self._count(event)
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(self._scalar, event.value, event.implicit)
        node = Node(self._place(event), value=_value(tag, event.value), text=event.value,
                    is_plain=not event.style, tag=event.tag or "")
        self._keep(event, node)
        return node

    def _add(self, node: Node, event: Any) -> Node | None:
        if not self._open:
            return node
        self._open[-1][1].append(node)
        return None

    def _close(self, event: Any) -> Node | None:
        node, held = self._open.pop()
        if node.items is not None:
            node.items.extend(held)
        else:
            assert node.pairs is not None
            merged: list[Node] = []
            for key, value in zip(held[::2], held[1::2], strict=True):
                if key.text == "<<" and key.is_plain:
                    merged.append(value)
                    continue
                if key.text in node.pairs:
                    node.repeated.append(key)
                node.pairs[key.text] = (key, value)
            for value in merged:
                _merge(node, value)
        assert node.place is not None
        # A block ends where the next thing begins; its own text ends before the blanks and comments between.
        end = _text_end(held, event.start_mark.index) if not node.is_flow else event.end_mark.index
        node.place = Place(self._source, node.place.start, max(end, node.place.end))
        return self._add(node, event)

    def _count(self, event: Any) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise BadYaml(f"more than {MAX_NODES:,} values", event.start_mark.line + 1)

    def _keep(self, event: Any, node: Node) -> None:
        if event.anchor:
            self._anchors[event.anchor] = node

    def _place(self, event: Any) -> Place:
        return Place(self._source, event.start_mark.index, event.end_mark.index)


def is_unsafe(tag: str) -> bool:
    """A tag that an unsafe loader would run."""
    return tag.startswith((_UNSAFE_TAG, "!!python/"))


def _text_end(held: list[Node], otherwise: int) -> int:
    return max((node.place.end for node in held if node.place), default=otherwise)


def _merge(node: Node, value: Node) -> None:
    """`<<: *base`: what the mapping says itself wins."""
    assert node.pairs is not None
    for base in (value.items if value.items is not None else [value]):
        for name, pair in (base.pairs or {}).items():
            node.pairs.setdefault(name, pair)


def _value(tag: str, text: str) -> str | int | float | bool | None:
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if kind == "int":
        return _whole(text.replace("_", ""))
    if kind == "float":
        try:
            return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            return text
    return text


def _whole(text: str) -> int | str:
    """As YAML 1.1 counts: 0x10 and 0b10 by their base, 010 in octal."""
    digits = text.lstrip("+-").lower()
    if len(digits) > 20:
        return text
    base = 16 if digits.startswith("0x") else 2 if digits.startswith("0b") else 8 if digits.startswith("0") else 10
    try:
        return int(text, base)
    except ValueError:
        return text
