"""EMB0xx: files that cannot be read, or do not say what they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from embark.lint.rule import Hit, Rules, World
from embark.lint.source import Place
from embark.lint.yaml_nodes import is_unsafe

RULES = Rules()
YAML = "https://yaml.org/spec/1.2.2/"


@RULES.add("EMB001", "unreadable", "error", "The file, or the rest of it, cannot be read, so nothing in it is checked.",
           YAML)
def unreadable(world: World) -> Iterator[Hit]:
    for one in world.files.unread:
        if one.is_ours:
            yield Hit(Place(one.source, one.index, one.index), f"the file {one.what}", one.fix)


@RULES.add("EMB002", "not-a-kind-that-is-read", "warning", "The file is of a kind that no rule looks at.", YAML)
def not_a_kind_that_is_read(world: World) -> Iterator[Hit]:
    for one in world.files.unread:
        if not one.is_ours:
            yield Hit(Place(one.source, one.index, one.index), f"the file {one.what}", one.fix)


@RULES.add("EMB003", "repeated-key", "error",
           "A key that stands twice: one of the two is dropped without a word, or the API server refuses both.",
           YAML + "#3213-node-comparison")
def repeated_key(world: World) -> Iterator[Hit]:
    for document in world.documents:
        for node in document.root.walk():
            for key in node.repeated:
                if key.place is not None:
                    yield Hit(key.place, f"{key.text} stands twice in one mapping", "keep one of them")


@RULES.add("EMB004", "tag-that-runs-code", "error",
           "A `!!python` tag makes an unsafe loader run code; no manifest needs one.",
           "https://pyyaml.org/wiki/PyYAMLDocumentation")
def tag_that_runs_code(world: World) -> Iterator[Hit]:
    for document in world.documents:
        for node in document.root.walk():
            if is_unsafe(node.tag) and node.place is not None:
                yield Hit(node.place, f"the tag {node.tag} would run code where it is loaded carelessly",
                          "write the value itself")
