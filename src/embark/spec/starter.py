"""Starter specs and the field reference, generated from the sections."""

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from embark.spec.model import Table
from embark.spec.presets import PRESETS
from embark.spec.run import RunSpec


def starter(preset: str) -> str:
    """The preset as TOML: what it sets, each field under a comment."""
    spec = PRESETS[preset]()
    doc = (PRESETS[preset].__doc__ or "").strip().splitlines()[0]
    lines = [f"# {doc}", f"# Train it: embark train {preset}.toml", f'name = "{spec.name}"']
    for section in ("model", "data", "train", "store", "watch"):
        part: BaseModel = getattr(spec, section)
        if part.model_fields_set:
            lines += ["", f"[{section}]", *_lines(section, part)]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Every field of a spec as a page of Markdown."""
    lines = ["# The spec, field by field", "",
             "TOML in. Unknown keys are errors; `--set section.field=value` overrides any of them.", ""]
    for name, info in RunSpec.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += [f"## `[{name}]`", "", (section.__doc__ or "").strip().splitlines()[0], "", *_table(section), ""]
            for inner, kind in _inner_sections(section):
                brackets = ("[[", "]]") if kind is Table else ("[", "]")
                lines += [f"### `{brackets[0]}{name}.{inner}{brackets[1]}`", "", (kind.__doc__ or "").strip(), "",
                          *_table(kind), ""]
        else:
            lines += [f"`{name}` (default `{info.default!r}`): {info.description}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _inner_sections(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in section.model_fields.items():
        if name == "tables":
            yield name, Table
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield name, info.annotation


def _lines(section: str, part: BaseModel) -> Iterator[str]:
    values: Mapping[str, Any] = part.model_dump(mode="json", exclude_unset=True)
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
        yield f"# {_one_line(info.description)}"
        yield f"{name} = {_inline(value)}"
    yield from later


def _inline(value: object) -> str:
    """A TOML value on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _table(section: type[BaseModel]) -> list[str]:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            continue  # has a table of its own
        default = "required" if info.is_required() else f"`{_default(info.default)}`"
        rows.append(f"| `{name}` | {_cell(default)} | {_cell(_one_line(info.description))} |")
    return rows


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(value: object) -> str:
    if value is None:
        return "not given"
    return _inline(list(value) if isinstance(value, tuple) else value)
