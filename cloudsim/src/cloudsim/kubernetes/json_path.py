"""The part of kubectl's JSONPath that is in use: fields, indexes, `[*]` and `[?(@.a=="b")]`."""

import json
import re
from typing import Any

_STEP = re.compile(r"""
    \.\.?(?P<field>(?:\\.|[^.\[\]{}\\])+) | \[(?P<index>-?\d+)\] | \[(?P<all>\*)\]
    | \['(?P<quoted>[^']+)'\] | \[\?\(@(?P<path>[^=!<>]+?)\s*(?P<op>==|!=)\s*["'](?P<value>[^"']*)["']\)\]
""", re.VERBOSE)


def evaluate(template: str, thing: Any) -> str:
    """Fill in a template with `{…}` parts; several values of one part are joined by a space."""
    if "{" not in template:
        template = f"{{{template}}}"
    ranged = re.fullmatch(r"(.*?)\{range (?P<path>[^}]+)\}(?P<body>.*?)\{end\}(.*)", template, re.DOTALL)
    if ranged:
        return "".join(evaluate(ranged["body"], one) for one in find(ranged["path"], thing))
    return re.sub(r"\{([^}]*)\}", lambda part: _part(part[1], thing), template)


def find(path: str, thing: Any) -> list[Any]:
    """Return every value that a path leads to; a missing field leads to none."""
    path = path.removeprefix("$").strip()
    if path and path[0] not in ".[":
        path = f".{path}"
    found, index = [thing], 0
    while index < len(path):
        step = _STEP.match(path, index)
        if step is None:
            raise ValueError(f"unrecognized character in JSONPath: {path[index:]}")
        index = step.end()
        found = [value for one in found for value in _follow(step, one)]
    return found


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _part(text: str, thing: Any) -> str:
    if text[:1] in "\"'":
        return text[1:-1].replace("\\n", "\n").replace("\\t", "\t")
    return " ".join(text_of(value) for value in find(text, thing))


def _follow(step: re.Match[str], value: Any) -> list[Any]:
    if step["index"] is not None:
        return [value[int(step["index"])]] if isinstance(value, list) and len(value) > int(step["index"]) else []
    if step["path"] is not None:
        rows = value if isinstance(value, list) else []
        return [row for row in rows if (step["op"] == "==") == (step["value"] in map(text_of, find(step["path"], row)))]
    name = step["quoted"] or (step["field"] or "*").replace("\\.", ".")
    if step["all"] or name == "*":
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    return [value[name]] if isinstance(value, dict) and name in value else []
