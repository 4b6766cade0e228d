"""Writes docs/reference/spec.md: every field of a spec, with its default and its docstring.

`make docs` runs it.
"""

from __future__ import annotations

import sys
from typing import get_origin

from pydantic import BaseModel

from embark.spec import RunSpec, Table, Task
from embark.spec.toml import inline, one_line, section_in


def reference() -> str:
    """Write every field of a spec as a page of Markdown."""
    lines = ["# The spec, field by field", "",
             "TOML in. Unknown keys are errors; `--set section.field=value` overrides any of them.", ""]
    for name, info in RunSpec.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += [f"## `[{name}]`", "", (section.__doc__ or "").strip().splitlines()[0], "", *_table(section), ""]
            for inner, field in section.model_fields.items():
                kind = section_in(field.annotation)
                if kind is None:
                    continue
                brackets = ("[[", "]]") if kind in (Table, Task) else ("[", "]")
                key = ".NAME" if get_origin(field.annotation) is dict else ""
                lines += [f"### `{brackets[0]}{name}.{inner}{key}{brackets[1]}`", "", (kind.__doc__ or "").strip(), "",
                          *_table(kind), ""]
        else:
            lines += [f"`{name}` (default `{info.default!r}`): {info.description}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(section: type[BaseModel]) -> list[str]:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            continue  # has a table of its own
        default = "required" if info.is_required() else f"`{_default(info.default)}`"
        rows.append(f"| `{name}` | {_cell(default)} | {_cell(one_line(info.description))} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(value: object) -> str:
    if value is None:
        return "not given"
    return inline(list(value) if isinstance(value, tuple) else value)


if __name__ == "__main__":
    sys.stdout.write(reference())
