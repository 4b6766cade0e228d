"""EMB0xx: files that cannot be read, or do not say what they seem to."""

from collections.abc import Iterator

from embark.lint.read import Document
from embark.lint.rule import Hit, World
from embark.lint.source import Place
from embark.lint.yaml_nodes import is_unsafe


def unreadable(world: World) -> Iterator[Hit]:
    for one in world.files.unread:
        if one.is_ours:
            yield Hit(Place(one.source, one.index, one.index), f"the file {one.what}", one.fix)


def not_a_kind_that_is_read(world: World) -> Iterator[Hit]:
    for one in world.files.unread:
        if not one.is_ours:
            yield Hit(Place(one.source, one.index, one.index), f"the file {one.what}", one.fix)


def repeated_key(document: Document) -> Iterator[Hit]:
    for node in document.root.walk():
        for key in node.repeated:
            if key.place is not None:
                yield Hit(key.place, f"{key.text} occurs twice in one mapping")


def tag_that_runs_code(document: Document) -> Iterator[Hit]:
    for node in document.root.walk():
        if is_unsafe(node.tag) and node.place is not None:
            yield Hit(node.place, f"the tag {node.tag} would run code in an unsafe loader")
