"""Values as YAML text: block style, the order they were given in, comments where a person would wonder.

    yaml_part({"kind": "Job", "spec": {"backoffLimit": note(6, "three for each node")}})

PyYAML writes it, with a marker where a comment belongs. What another reader could take for a number or a truth value is
put in quotes, so any text reads back as itself. There are no anchors and no tags.
"""

import re
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from typing import Any

from embark.values import JsonDict, frozen

WIDTH = 110
_LOOKS_LIKE_ANOTHER_TYPE = re.compile(
    r"[-+]?[\d.][\d_.:,]*(?:e[-+]?\d*)?$|[-+]?0[xob][\da-f_]*$|[yn]$|[-+]?\.(?:inf|nan)$", re.IGNORECASE
)
"""PyYAML speaks YAML 1.1; Kubernetes' reader also takes 1e3, 0o7 and the like for numbers."""
_MARKER = "#embark-comment-"
_MARKED = re.compile(rf"(?P<lead>[ :-]*)'{_MARKER}(?P<number>\d+)'(?P<is_key>: null)?")


@frozen
class Noted:
    """A value with a comment above it."""

    value: Any
    why: str


def note(value: Any, why: str) -> Noted:
    """Return a value of a mapping or a list with a comment above its line."""
    return Noted(value, why)


def yaml_part(value: Any, indent: int = 0) -> str:
    """Return a value for the middle of a document; without an indent, a scalar stands behind its key."""
    comments: list[str] = []
    marked = _mark(value, comments)
    text = _dump(marked) if isinstance(marked, dict | list) and marked else _dump({"k": marked}).removeprefix("k: ")
    found: list[str] = []
    lead = ""  # Dashes before a marker, which belong to the line after the comment.
    for line in text.removesuffix("\n").split("\n"):
        line = lead + line[len(lead):]
        match = _MARKED.fullmatch(line)
        lead = match["lead"] if match else ""
        if match is None:
            found.append(" " * indent + line if line else line)
            continue
        margin = " " * (indent + len(line) - len(line.lstrip()))
        lead = lead if match["is_key"] else lead[:-2]
        found += [margin + words.lstrip() for words in comment(comments[int(match["number"])], indent + len(lead))]
    return "\n".join(found)


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


def _mark(value: Any, comments: list[str]) -> Any:
    """Return the value without its comments, which are collected, and with a marker before each noted one."""
    if isinstance(value, Mapping):
        marked: JsonDict = {}
        for key, inner in value.items():
            if isinstance(inner, Noted):
                marked[f"{_MARKER}{len(comments)}"] = None
                comments.append(inner.why)
            marked[str(key)] = _mark(inner, comments)
        return marked
    if isinstance(value, list | tuple):
        items: list[Any] = []
        for inner in value:
            if isinstance(inner, Noted):
                items.append(f"{_MARKER}{len(comments)}")
                comments.append(inner.why)
            items.append(_mark(inner, comments))
        return items
    return _mark(value.value, comments) if isinstance(value, Noted) else value


def _dump(value: Any) -> str:
    import yaml

    return str(yaml.dump(value, Dumper=_dumper(), default_flow_style=False, sort_keys=False, width=float("inf"),
                         allow_unicode=True))


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=_style(text)))
    return Dumper


def _style(text: str) -> str | None:
    # Spaces at the end of a line cannot be seen in a block, nor can most characters that do not print.
    is_clear = all(line.isprintable() and not line.endswith(" ") for line in text.split("\n"))
    if is_clear and "\n" in text.strip("\n"):
        return "|"
    return '"' if _LOOKS_LIKE_ANOTHER_TYPE.match(text) or not text.isprintable() else None
