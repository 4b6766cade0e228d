"""Specs as rows: what one says that the defaults do not, and what differs between several."""

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from embark.formatting import MISSING, pluralize, to_one_line
from embark.spec import RunSpec
from embark.values import JsonDict, JsonMap

MAX_SHOWN = 160
_NAME = "name"


def set_fields(spec: JsonMap) -> list[tuple[str, str, str, str]]:
    """Return field, value, default and meaning of all that is not the default. The name is no setting."""
    defaults = _defaults()
    rows = []
    for field, value in flat(spec).items():
        if field != _NAME and (field not in defaults or not _same(value, defaults[field])):
            rows.append((field, shown(value), shown(defaults.get(field)), _meaning(field)))
    return rows


def differences(specs: Sequence[JsonMap]) -> list[tuple[str, tuple[str, ...]]]:
    """Return each field that is not the same in all, with its value in each. What a spec leaves out is the default."""
    defaults = _defaults()
    flats = [flat(spec) for spec in specs]
    fields = list(dict.fromkeys(field for one in flats for field in one))
    rows = []
    for field in fields:
        values = [one.get(field, defaults.get(field)) for one in flats]
        if field != _NAME and any(not _same(values[0], value) for value in values[1:]):
            rows.append((field, tuple(shown(value) for value in values)))
    return rows


def field_of(spec: JsonMap, field: str) -> str:
    """Return the value of a field in a spec."""
    return shown(flat(spec).get(field, _defaults().get(field)))


def flat(values: JsonMap, above: str = "") -> JsonDict:
    """Return dotted names and their values; lists stay whole, but for lists of sections."""
    found: JsonDict = {}
    for name, value in values.items():
        dotted = f"{above}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{dotted}.")
        elif isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
            for index, one in enumerate(value):
                found |= flat(one, f"{dotted}.{one.get('name', index)}.")
        else:
            found[dotted] = value
    return found


def shown(value: Any) -> str:
    """Format a value for a cell."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        value = ", ".join(shown(one) for one in value) or "[]"
    if isinstance(value, str) and "\n" in value:  # a file's text: two of them begin alike
        digest = sha256(value.encode("utf-8", "replace")).hexdigest()
        return f"{pluralize(len(value.splitlines()), 'line')}, sha256 {digest[:12]}…"
    text = to_one_line(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


@cache
def _defaults() -> JsonDict:
    return flat(RunSpec().model_dump(mode="json"))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return (a == b and isinstance(a, bool) == isinstance(b, bool)) or (a in (None, "") and b in (None, ""))


def _meaning(field: str) -> str:
    section: Any = RunSpec
    *above, last = field.split(".")
    for name in above:
        info = section.model_fields.get(name)
        section = info.annotation if info is not None else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
    info = section.model_fields.get(last)
    text = " ".join((info.description or "").split()) if info is not None else ""
    return text.replace("`", "")
