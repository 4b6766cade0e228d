"""A spec as TOML text: written, as a commented starter, and which line a field stands on; the presets."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from embark.values import JsonDict, JsonMap, read_table
from .run import RunSpec

_TABLES: dict[str, JsonDict] = read_table(__file__, "presets.toml")
ABOUT: dict[str, str] = {name: table.pop("about") for name, table in _TABLES.items()}
"""A sentence on each preset."""


PRESETS: dict[str, Callable[[], RunSpec]] = {
    name: partial(RunSpec.model_validate, {"name": name, **table}) for name, table in _TABLES.items()}


_ARRAY = re.compile(r"^(\S+ = )\[\n((?:    .*,\n)+)\]$", re.MULTILINE)
_HEADER = re.compile(r"^\s*(\[{1,2})\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+?)\s*=")


def to_toml(spec: RunSpec, *, only_set: bool = False) -> str:
    """Write the spec as TOML; fields without a value are left out, TOML having no null. With `only_set`, only the
    fields that the user set."""
    values = spec.model_dump(mode="json", exclude_none=True, exclude_unset=only_set)
    values = {"name": spec.name, **{key: value for key, value in values.items() if value != {}}}
    # tomli_w writes each element on its own line, and escapes line breaks in strings.
    text = _ARRAY.sub(lambda match: match[1] + "[" + " ".join(line.strip() for line in match[2].split("\n"))[:-2] + "]",
                      tomli_w.dumps(values))
    for code in filter(None, (spec.model.code, spec.data.code, spec.stream.code)):  # a person reads it as lines
        text = text.replace(tomli_w.dumps({"code": code}), tomli_w.dumps({"code": code}, multiline_strings=True))
    return text


def line_of(text: str, field: str) -> int:
    """Return the line of `field` (`model.tables.2.rows`), of the nearest section that contains it, or 1. tomllib keeps
    no positions, so the text is scanned."""
    lines = _field_lines(text)
    parts = field.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((lines[name] for name in names if name in lines), 1)


def flatten(values: JsonMap, above: str = "") -> JsonDict:
    """Return dotted names and their values; lists stay whole."""
    flat: JsonDict = {}
    for name, value in values.items():
        flat |= flatten(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def inline(value: object) -> str:
    """Write a TOML value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {inline(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(inline(v) for v in value) + "]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def starter(preset: str, path: Path | None = None) -> str:
    """Write the preset as TOML for `path`: what it sets, each field under a comment. The run gets the file's name if
    that can be one."""
    spec, path = PRESETS[preset](), path or Path(f"{preset}.toml")
    name = spec.name
    with suppress(ValidationError):
        name = RunSpec(name=path.stem).name
    lines = [f"# {ABOUT[preset]}", f"# Train it: embark train {shlex.quote(str(path))}", f'name = "{name}"']
    for section in ("model", "data", "train", "store", "watch"):
        part: BaseModel = getattr(spec, section)
        if part.model_fields_set:
            lines += ["", f"[{section}]", *_lines(section, part)]
    return "\n".join(lines) + "\n"


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field is, or may be beside a plain value."""
    return next((one for one in (annotation, *get_args(annotation))
                 if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _lines(section: str, part: BaseModel) -> Iterator[str]:
    values: JsonMap = part.model_dump(mode="json", exclude_unset=True)
    later: list[str] = []
    for name, value in values.items():
        info = type(part).model_fields[name]
        if isinstance(value, dict):
            if value:
                later += ["", f"[{section}.{name}]", *_lines(f"{section}.{name}", getattr(part, name))]
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for row in value:
                later += ["", f"[[{section}.{name}]]", tomli_w.dumps(row).strip()]
            continue
        yield f"# {one_line(info.description)}"
        yield f"{name} = {inline(value)}"
    yield from later


def one_line(text: str | None) -> str:
    """Return the text with its line breaks as spaces."""
    return " ".join((text or "").split())


@lru_cache(1)  # a spec may have a mistake in each of its tables
def _field_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _bare(header[2])
            if header[1] == "[[":
                counts[section] = counts.get(section, -1) + 1
                lines.setdefault(section, number)
                section = f"{section}.{counts[section]}"
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            name = _bare(key[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
