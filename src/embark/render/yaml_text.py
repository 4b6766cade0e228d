"""Values as YAML text: block style, the order they were given in, comments where a person would wonder.

    yaml_text([{"kind": "Job", "spec": {"backoffLimit": note(6, "three for each node")}}], about="The training job.")

Lists and mappings are laid out here; every scalar is written by PyYAML, and what another reader could take for a number
or a truth value is put in quotes, so any text reads back as itself. There are no anchors and no tags.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

WIDTH = 110
_LOOKS_LIKE_ANOTHER_TYPE = re.compile(
    r"[-+]?[\d.][\d_.:,]*(?:e[-+]?\d*)?$|[-+]?0[xob][\da-f_]*$|[yn]$|[-+]?\.(?:inf|nan)$", re.IGNORECASE
)
"""PyYAML speaks YAML 1.1; Kubernetes' reader also takes 1e3, 0o7 and the like for numbers."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A value with a comment above it."""

    value: Any
    why: str


def note(value: Any, why: str) -> Noted:
    """Return a value of a mapping or a list with a comment above its line."""
    return Noted(value, why)


def yaml_text(documents: Sequence[Mapping[str, Any]], *, about: str) -> str:
    """Return documents of one file, under a header that says what it is and who wrote it."""
    parts = ["\n".join(_lines(document, 0)) + "\n" for document in documents]
    return header(about) + "---\n".join(parts)


def yaml_part(value: Any, indent: int = 0) -> str:
    """Return a value for the middle of a document; without an indent, a scalar stands behind its key."""
    return "\n".join(_lines(value, indent))


def header(about: str) -> str:
    """Comment lines for the top of a file whose comments begin with `#`."""
    made = ("Written by `embark render`. Change the spec and run it again: --diff shows what would change; files "
            "edited by hand are kept unless --force is given.")
    return "".join(f"{line}\n" for line in (*comment(about), *comment(made)))


def nest(text: str, indent: int) -> str:
    """Indent YAML text, and wrap its comments anew."""
    found: list[str] = []
    for margin, lines in groupby(text.rstrip("\n").split("\n"), key=_comment_margin):
        if margin is None:
            found += [" " * indent + line if line else line for line in lines]
        else:
            found += comment(" ".join(line.strip()[2:] for line in lines), indent + margin)
    return "\n".join(found)


def _comment_margin(line: str) -> int | None:
    words = line.lstrip()
    return len(line) - len(words) if words.startswith("# ") else None


def comment(text: str, indent: int = 0) -> list[str]:
    """Comment lines; no character of `text` can end the comment."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    room = max(40, WIDTH - indent)
    return [" " * indent + "# " + line for line in textwrap.wrap(" ".join(words), room, break_long_words=False,
                                                                 break_on_hyphens=False)]


def plain(value: Any) -> Any:
    """Return the value without its comments: what reading the text gives."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _lines(value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, Noted):
        yield from comment(value.why, indent)
        yield from _lines(value.value, indent)
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{' ' * indent}{_scalar(str(key), is_key=True)[0]}:", inner, indent, nested=indent + 2)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            yield from _item(inner, indent)
    else:
        first, *rest = _scalar(value)
        yield " " * indent + first
        yield from (" " * indent + line if line else line for line in rest)


def _entry(head: str, value: Any, indent: int, nested: int) -> Iterator[str]:
    """Yield a `key: value`, with the value beside the key or under it."""
    if isinstance(value, Noted):
        yield from comment(value.why, indent)
        value = value.value
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        # A list lies under its key, not right of it, as kubectl and most people write it.
        yield from _lines(value, indent if isinstance(value, list | tuple) else nested)
        return
    first, *rest = _scalar(value)
    yield f"{head} {first}"
    yield from (" " * indent + line if line else line for line in rest)


def _item(value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, Noted):
        yield from comment(value.why, indent)
        value = value.value
    lead = " " * indent + "- "
    if isinstance(value, Mapping | list | tuple) and value:
        inner = list(_lines(value, indent + 2))
        # A comment of the first line cannot stand behind the dash.
        num_comments = next(i for i, line in enumerate(inner) if not line.lstrip().startswith("# "))
        yield from (" " * indent + line.lstrip() for line in inner[:num_comments])
        yield lead + inner[num_comments].lstrip()
        yield from inner[num_comments + 1:]
        return
    first, *rest = _scalar(value)
    yield lead + first
    yield from (" " * indent + line if line else line for line in rest)


def _scalar(value: Any, *, is_key: bool = False) -> list[str]:
    """Return the lines of a scalar behind a key at the left edge; further lines are those of a block, already
    indented."""
    if isinstance(value, Mapping):
        return ["{}"]
    if isinstance(value, list | tuple):
        return ["[]"]
    if not (value is None or isinstance(value, str | bool | int | float)):
        raise TypeError(f"{value!r} has no place in YAML")
    return _scalar_text(value, is_key=is_key).split("\n")


@lru_cache(10_000, typed=True)  # the same keys and values stand in many files
def _scalar_text(value: str | bool | float | None, *, is_key: bool) -> str:
    import yaml

    node = yaml.representer.SafeRepresenter().represent_data(value)
    if isinstance(value, str):
        node = yaml.ScalarNode(node.tag, value, style=_style(value, is_key=is_key))
    pair = yaml.MappingNode("tag:yaml.org,2002:map", [(yaml.ScalarNode("tag:yaml.org,2002:str", "k"), node)])
    text = yaml.serialize(pair, Dumper=yaml.SafeDumper, width=float("inf"), allow_unicode=True)
    return str(text).removeprefix("k: ").removesuffix("\n")


def _style(text: str, *, is_key: bool) -> str | None:
    # Spaces at the end of a line cannot be seen in a block, nor can most characters that do not print.
    is_clear = all(line.isprintable() and not line.endswith(" ") for line in text.split("\n"))
    if is_clear and not is_key and "\n" in text.strip("\n"):
        return "|"
    return '"' if _LOOKS_LIKE_ANOTHER_TYPE.match(text) or not text.isprintable() else None
