"""Rows of the catalog's TOML and CSV files, and what is wrong in them."""

import csv
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from embark.catalog.machine import Origin
from embark.errors import Mistake, UserError, nearest

DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
CONFIDENCES = ("read", "documented", "unconfirmed")


class CatalogError(UserError):
    """All the mistakes of a catalog's files, at once."""

    def __init__(self, what: str, mistakes: Sequence[Mistake], *, fix: str = "") -> None:
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        super().__init__(f"{count} in {what}\n" + "\n".join(f"  {m}" for m in self.mistakes), fix=fix)


class Row:
    """One row or table. What is wrong in it goes to `mistakes`, and the reader gets a harmless value instead."""

    def __init__(self, where: str, name: str, values: dict[str, Any], mistakes: list[Mistake]) -> None:
        self.where = where
        self.name = name
        self._values = values
        self._mistakes = mistakes
        self._fields_read: set[str] = set()

    def wrong(self, field: str, what: str, fix: str = "") -> None:
        value = self._values.get(field, "")
        self._mistakes.append(Mistake(self.where, f"{self.name} {field}".strip(), str(value), what, fix))

    def text(self, field: str, *, required: bool = True, one_of: Iterable[str] = ()) -> str:
        self._fields_read.add(field)
        value: object = self._values.get(field, "")
        choices = list(one_of)
        if not isinstance(value, str):
            self.wrong(field, "should be text")
            return ""
        if not value and required and "" not in choices:
            self.wrong(field, "is empty")
        elif choices and value and value not in choices:
            self.wrong(field, "no such name", nearest(value, (choice for choice in choices if choice)))
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list in TOML, words in CSV."""
        self._fields_read.add(field)
        value = self._values.get(field, [])
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            self.wrong(field, "should be a list of texts")
            return ()
        return tuple(words)

    def number(self, field: str, *, zero: bool = False, below: float = math.inf) -> float | None:
        """A number above zero, or nothing where the field is empty."""
        self._fields_read.add(field)
        value = self._values.get(field, "")
        if value == "":
            return None
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.wrong(field, "should be a number, or empty where it is not known")
            return None
        if number < 0 or (number == 0 and not zero):
            self.wrong(field, "should be more than 0, or empty where it is not known")
            return None
        if number >= below:
            self.wrong(field, f"should be less than {below:g}")
            return None
        return number

    def needed(self, field: str) -> float:
        """A number that must be there; where it is not, one that no later check finds fault with."""
        value = self.number(field)
        if value is None and self._values.get(field, "") == "":
            self.wrong(field, "is empty")
        return value if value is not None else math.nan

    def whole(self, field: str) -> int | None:
        value = self.number(field)
        if value is not None and value != int(value):
            self.wrong(field, "should be a whole number")
        return None if value is None else int(value)

    def steps(self, field: str) -> tuple[tuple[float, float], ...]:
        self._fields_read.add(field)
        value = self._values.get(field, [])
        try:
            steps = tuple((float(up_to), float(share)) for up_to, share in value)
        except (TypeError, ValueError):
            self.wrong(field, "should be a list of [up to, share]")
            return ()
        if list(steps) != sorted(steps) or not all(0 <= share < 1 for _, share in steps):
            self.wrong(field, "steps should rise, and shares lie between 0 and 1")
        return steps

    def origin(self, sources: Iterable[str] | None = None, of: str = "") -> Origin:
        """Source, date and confidence; with `sources`, only what is named there may be a source. `of`: a part's own."""
        source = self.text(of + "source")
        known = None if sources is None else set(sources)
        for part in source.split("+") if known is not None and source else ():
            if part not in (known or ()):
                self.wrong(of + "source", "not in sources.toml", nearest(part, known or ()))
        date = self.text(of + "date")
        if date and not DATE.fullmatch(date):
            self.wrong(of + "date", "should be a date such as 2026-11 or 2026-11-15")
        return Origin(source, date, self.text(of + "confidence", one_of=CONFIDENCES))

    def has(self, field: str) -> bool:
        return field in self._values

    def done(self) -> None:
        """What nobody asked for is a misspelt field."""
        for field in self._values:
            if field not in self._fields_read:
                self.wrong(field, "no such field", nearest(field, self._fields_read))


def toml_rows(path: Path, mistakes: list[Mistake]) -> list[Row]:
    """Every table of a TOML file."""
    text = path.read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        mistakes.append(Mistake(path.name, "", "", f"is not TOML: {error}"))
        return []
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"\[([\w.-]+)\]", line))}
    rows = []
    for name, values in tables.items():
        if isinstance(values, dict):
            rows.append(Row(f"{path.name}:{lines.get(name, 1)}", name, values, mistakes))
        else:
            mistakes.append(Mistake(path.name, name, str(values), "stands outside of a table", f"[{name}]"))
    return rows


def csv_rows(
    path: Path, columns: Sequence[str], key: str, mistakes: list[Mistake], optional: Sequence[str] = ()
) -> list[Row]:
    """Every row of a CSV file that has just these columns, in any order; the optional ones may be left out."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (csv.Error, UnicodeDecodeError) as error:
        mistakes.append(Mistake(path.name, "", "", f"is not CSV in UTF-8: {error}"))
        return []
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    for column in columns:
        if column not in header:
            mistakes.append(Mistake(f"{path.name}:1", column, "", "no such column", f"columns: {','.join(columns)}"))
    for column in dict.fromkeys(header):
        if column not in (*columns, *optional):
            nearest_column = nearest(column, (*columns, *optional))
            mistakes.append(Mistake(f"{path.name}:1", column, "", "unknown column", nearest_column))
        elif header.count(column) > 1:
            mistakes.append(Mistake(f"{path.name}:1", column, "", "stands twice"))
    if set(header) - set(optional) != set(columns) or len(header) != len(set(header)):
        return []
    rows = []
    for number, cells in lines[1:]:
        where = f"{path.name}:{number}"
        if len(cells) != len(header):
            mistakes.append(Mistake(where, "", "", f"has {len(cells)} cells, the heading has {len(header)}"))
            continue
        values = {column: cell.strip() for column, cell in zip(header, cells, strict=True)}
        rows.append(Row(where, values[key], values, mistakes))
    return rows
