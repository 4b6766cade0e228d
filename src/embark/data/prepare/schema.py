"""What each column of the input is; the same for a person, and as the lines of a spec."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal

from embark.spec.data import PrepareSpec

_MAX_LINE = 100


@dataclass(frozen=True, slots=True)
class SparseColumn:
    """A column that becomes a table."""

    name: str
    kind: Literal["hex", "integer", "text"]
    is_list: bool = False
    max_ids: int = 1  # Of a list: longer ones are cut.
    rows: int | None = None  # Of its table, where the spec gives them.
    column: str = ""  # Its name in the input, where a table cannot have that name.

    @property
    def source(self) -> str:
        """The column of the input it comes from."""
        return self.column or self.name


@dataclass(frozen=True, slots=True)
class Schema:
    """The roles of the columns of the input."""

    format: Literal["criteo", "csv", "jsonl", "parquet"]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    columns: tuple[str, ...]  # All columns of the input, in its order.
    ignored: tuple[str, ...] = ()
    delimiter: str = "\t"
    has_header: bool = False
    split_column: str = ""
    why: dict[str, str] = field(default_factory=dict)  # By column: the reason for its role, for people to read.
    examples: dict[str, str] = field(default_factory=dict)  # By column: some of its values, for people to read.
    list_delimiter: str = ""  # Between the values of a cell of text; empty: `|` or `;`.

    def describe(self) -> list[dict[str, object]]:
        """A row for each column of the input: its role, the reason, and some of its values."""
        sparse = {column.source: column for column in self.sparse}
        return [{"column": name, "taken_for": self._role(name, sparse.get(name)), "why": self.why.get(name, ""),
                 "examples": self.examples.get(name, "")} for name in self.columns]

    def to_toml(self, given: PrepareSpec) -> str:
        """The lines of a spec that leave nothing to guess, with what is `given`."""
        data: dict[str, Any] = {"label": self.label}
        prepare = given.model_dump(mode="json", exclude_defaults=True) | {"format": self.format}
        if self.format != "criteo":
            data["dense_columns"] = list(self.dense)
            if self.format == "csv":
                prepare |= {"delimiter": self.delimiter, "header": self.has_header}
                if not self.has_header:
                    prepare["column_names"] = list(self.columns)
            prepare["sparse_columns"] = [column.source for column in self.sparse if not column.is_list]
            optional = {
                "list_columns": [column.source for column in self.sparse if column.is_list],
                "hex_columns": [column.source for column in self.sparse if column.kind == "hex"],
                "list_delimiter": self.list_delimiter if any(column.is_list for column in self.sparse) else "",
                "ignored_columns": list(self.ignored),
                "split": "column" if self.split_column else "",
                "split_column": self.split_column,
            }
            prepare |= {key: value for key, value in optional.items() if value}
        sections = {"data": data, "data.prepare": prepare}
        return "\n".join(f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
                         for name, section in sections.items())

    def _role(self, name: str, column: SparseColumn | None) -> str:
        if name == self.label:
            return "label"
        if name in self.dense:
            return "dense"
        if name == self.split_column:
            return "split"
        if column is None:
            return "ignored"
        of = {"hex": "hexadecimal ids", "integer": "integer ids", "text": "words"}[column.kind]
        table = f", table {column.name}" if column.column else ""
        return (f"list of {of}, at most {column.max_ids}" if column.is_list else of) + table


def _toml(value: str | float | list[str]) -> str:
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    cells = ", ".join(_toml(cell).replace(" ", "\0") for cell in value)
    if len(cells) < _MAX_LINE:
        return f"[{cells}]".replace("\0", " ")
    # A name may hold a space or a hyphen, so a line may end only behind a comma.
    lines = textwrap.wrap(cells, _MAX_LINE, break_long_words=False, break_on_hyphens=False)
    return "[\n    " + "\n    ".join(lines).replace("\0", " ") + ",\n]"
