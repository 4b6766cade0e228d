"""Applies `--filter`, `--flatten` and `--format` to the objects that a gcloud command returns."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cloudsim.state import Refusal
from embark.values import JsonDict, JsonMap

_KEY = re.compile(r"([\w-]+)|\[(\d*)\]|\.")
_TERM = re.compile(r"(?P<not>-|NOT )?(?P<key>[\w.\[\]-]+)(?P<op>!=|>=|<=|[=:~<>])(?P<value>\"[^\"]*\"|'[^']*'|\S*)")
_CALL = re.compile(r"\.(basename|segment|len|list|scope)\(([^)]*)\)$")


def show(rows: Any, *, format_: str, filter_: str = "", flatten: Sequence[str] = (), limit: str = "") -> str:
    """Format `rows`, which is a list for commands that list and one object otherwise."""
    is_list = isinstance(rows, list)
    found = [row for row in (rows if is_list else [rows]) if matches(row, filter_)]
    for name in [word for words in flatten for word in words.split(",")]:
        key = name.removesuffix("[]")
        found = [_with(row, key, item) for row in found for item in _get(row, key) or []]
    if limit:
        found = found[:int(limit)]
    kind, _, inner = format_.partition("(")
    kind, keys = kind.partition("[")[0], _split(inner.rpartition(")")[0])
    if kind in ("value", "get", "csv"):
        mark = "," if kind == "csv" else "\t"
        return "".join(f"{mark.join(_text(_project(row, key)) for key in keys)}\n" for row in found)
    if kind == "json":
        return json.dumps(found if is_list or flatten else found[0] if found else {}, indent=2) + "\n"
    if kind in ("", "yaml", "default", "text", "table"):
        return "".join("---\n" * is_list + yaml.safe_dump(_plain(row), sort_keys=True) for row in found)
    if kind in ("none", "disable"):
        return ""
    raise Refusal(f"ERROR: gcloud crashed (UnknownFormatError): Format for [{kind}] is unknown to this stand-in", 1)


def matches(row: Any, filter_: str) -> bool:
    """Return whether an object meets terms joined by AND; a key that is missing matches nothing."""
    rest = filter_.strip()
    while rest:
        term = _TERM.match(rest)
        if term is None:
            raise Refusal(f"ERROR: unparseable filter: [{filter_}]")
        if _matches(row, term) == bool(term["not"]):
            return False
        rest = re.sub(r"^(AND\s+)", "", rest[term.end():].strip())
        if rest.startswith("OR "):
            raise Refusal(f"ERROR: a filter with OR is unknown to this stand-in: [{filter_}]")
    return True


def _matches(row: Any, term: re.Match[str]) -> bool:
    value, found = term["value"].strip("\"'"), _project(row, term["key"])
    texts = [str(one) for one in (found if isinstance(found, list) else [] if found is None else [found])]
    if term["op"] == "~":
        return any(re.search(value, text) for text in texts)
    if term["op"] == "!=":
        return value not in texts
    if term["op"] == ":":
        pattern = re.escape(value).replace(r"\*", ".*")
        return any(re.search(rf"(^|\W){pattern}($|\W)", text, re.IGNORECASE) for text in texts)
    if term["op"] == "=":
        return any(text.lower() == value.lower() for text in texts)
    raise Refusal(f"ERROR: a filter with {term['op']} is unknown to this stand-in")


def _project(row: Any, key: str) -> Any:
    call = _CALL.search(key)
    if call is None:
        return _get(row, key)
    found = _get(row, key[:call.start()])
    if call[1] == "basename":
        return str(found or "").rpartition("/")[2]
    if call[1] == "segment":
        parts = str(found or "").split("/")
        return parts[int(call[2])] if abs(int(call[2])) < len(parts) else ""
    if call[1] == "len":
        return len(found or ())
    if call[1] == "scope":
        return str(found or "").partition("/regions/")[2] or str(found or "")
    return ",".join(map(str, found or ()))


def _get(row: Any, key: str) -> Any:
    for name, index in _KEY.findall(key):
        if name:
            row = [one.get(name) for one in row if isinstance(one, Mapping)] if isinstance(row, list) else (
                row.get(name) if isinstance(row, Mapping) else None)
        elif index:
            row = row[int(index)] if isinstance(row, list) and int(index) < len(row) else None
    return row


def _with(row: JsonMap, key: str, item: Any) -> JsonDict:
    first, _, rest = key.partition(".")
    return {**row, first: _with(row.get(first) or {}, rest, item) if rest else item}


def _split(text: str) -> list[str]:
    """Split at commas outside of parentheses, and drop attributes such as `:label=NAME`, which values do not show."""
    return [part.strip().partition(":")[0] for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return ";".join(map(_text, value))
    return ";".join(f"{key}={_text(one)}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)


def _plain(row: Any) -> Any:
    return json.loads(json.dumps(row, default=str))
