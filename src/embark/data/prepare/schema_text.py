"""A schema for people: a row for each column, and the lines of a spec that say the same."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from embark.data.prepare.pieces import Schema, SparseColumn

_MAX_LINE = 100


def describe(schema: Schema) -> list[dict[str, object]]:
    """Of each column of the input what it was taken for, why, and some of its values."""
    sparse = {column.source: column for column in schema.sparse}
    return [
        {"column": name, "taken_for": _taken_for(schema, name, sparse.get(name)), "why": schema.why.get(name, ""),
         "examples": schema.examples.get(name, "")}
        for name in schema.columns
    ]


def toml_of(schema: Schema) -> str:
    """The lines that leave nothing to guess."""
    data: dict[str, Any] = {"label": schema.label}
    prepare: dict[str, Any] = {"format": schema.format}
    if schema.format != "criteo":
        data["dense_columns"] = list(schema.dense)
        if schema.format == "csv":
            prepare |= {"delimiter": schema.delimiter, "header": schema.has_header}
            if not schema.has_header:
                prepare["column_names"] = list(schema.columns)
        lists = [column.source for column in schema.sparse if column.is_list]
        hexadecimal = [column.source for column in schema.sparse if column.kind == "hex"]
        prepare["sparse_columns"] = [column.source for column in schema.sparse if not column.is_list]
        prepare |= {"list_columns": lists} if lists else {}
        prepare |= {"hex_columns": hexadecimal} if hexadecimal else {}
        prepare |= {"ignored_columns": list(schema.ignored)} if schema.ignored else {}
        prepare |= {"split": "column", "split_column": schema.split_column} if schema.split_column else {}
    return f"[data]\n{_lines(data)}\n[data.prepare]\n{_lines(prepare)}"


def _taken_for(schema: Schema, name: str, column: SparseColumn | None) -> str:
    if name == schema.label:
        return "label"
    if name in schema.dense:
        return "dense"
    if name == schema.split_column:
        return "split"
    if column is None:
        return "ignored"
    of = {"hex": "hexadecimal ids", "integer": "integer ids", "text": "words"}[column.kind]
    table = f", table {column.name}" if column.column else ""
    most = f"list of {of}, at most {column.max_ids}" if column.is_list else of
    return f"{most}{table}"


def _lines(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: str | bool | list[str]) -> str:
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    cells = ", ".join(map(_toml, value))
    if len(cells) < _MAX_LINE:
        return f"[{cells}]"
    # A name may hold a space, so a line may end only behind a comma.
    lines = textwrap.wrap(cells.replace(" ", "\0").replace(",\0", ", "), _MAX_LINE, break_long_words=False)
    return "[\n    " + "\n    ".join(lines).replace("\0", " ") + ",\n]"
