"""A spec to start from, with the meaning of every line beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from embark.spec.presets import PRESETS
from embark.spec.run import RunSpec


def starter(preset: str) -> str:
    """The preset as TOML: what it sets, each line under a sentence on what it means."""
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
            if "tables" in section.model_fields:
                from embark.spec.model import Table

                lines += ["### `[[model.tables]]`", "", (Table.__doc__ or "").strip(), "", *_table(Table), ""]
        else:
            lines += [f"`{name}` (default `{info.default!r}`): {info.description}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _lines(section: str, part: BaseModel) -> Iterator[str]:
    values: Mapping[str, Any] = part.model_dump(mode="json", exclude_unset=True)
    later: list[str] = []
    for name, value in values.items():
        info = type(part).model_fields[name]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for row in value:
                later += ["", f"[[{section}.{name}]]", tomli_w.dumps(row).strip()]
            continue
        yield f"# {info.description}"
        yield f"{name} = {_inline(value)}"
    yield from later


def _inline(value: object) -> str:
    """A list on one line, as a person would write it."""
    if isinstance(value, list):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _table(section: type[BaseModel]) -> list[str]:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, info in section.model_fields.items():
        default = "required" if info.is_required() else f"`{_default(info.default)}`"
        rows.append(f"| `{name}` | {default} | {info.description} |")
    return rows


def _default(value: object) -> str:
    if value is None:
        return "not given"
    return _inline(list(value) if isinstance(value, tuple) else value)
