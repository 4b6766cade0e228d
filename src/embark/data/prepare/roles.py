"""What a column looks like: numbers, ids, lists or text, judged by its sampled cells and its name."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import Literal

from embark.data.prepare.sampling import Column

Role = Literal["label", "dense", "sparse", "list", "split", "ignored"]
Kind = Literal["hex", "integer", "text"]

_FEW = 50
"""So few different numbers are rather the names of groups than amounts."""
_MANY_ROWS = 100
"""From here on it means something that no value comes twice."""
_LIST_SHARE = 0.05
_SKEW = 0.1
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf(inity)?|nan", re.IGNORECASE)
_HEX_ID = re.compile(r"[0-9a-fA-F]{8}")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}")
_TIME_WORDS = {"time", "timestamp", "date", "datetime", "ts", "created", "updated", "unix"}
_ID_WORDS = {
    "id", "ids", "uid", "user", "item", "movie", "product", "ad", "campaign", "device", "site", "app", "cat",
    "category", "code", "zip", "zipcode", "postcode", "hash", "key", "idx", "index", "type", "class", "group", "region",
    "city", "country", "brand", "store", "shop", "channel", "genre", "hour", "weekday", "month", "session", "query",
}
_AMOUNT_WORDS = {
    "count", "counts", "num", "number", "price", "amount", "age", "score", "qty", "quantity", "duration", "length",
    "total", "sum", "clicks", "views", "rate", "ratio", "avg", "mean", "max", "min", "size", "weight", "height",
    "width", "distance", "income", "cost", "salary", "revenue", "seconds", "minutes", "days", "balance", "rating",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """One column's role."""

    role: Role
    why: str
    kind: Kind = "text"
    """Of a sparse column or a list."""


def judge(column: Column, list_delimiter: str) -> Judgement:
    """The role of a column that the spec does not name."""
    cells, different = column.cells, len(set(column.cells))
    if column.type == "nested":
        return Judgement("ignored", "holds structures, which are not read")
    if column.type == "list":
        return Judgement("list", f"the file says that it holds lists of {_plural(kind_of(column))}", kind_of(column))
    if not cells:
        return Judgement("ignored", f"empty in every row ({column.num_rows:,} checked)")
    if column.type == "time" or all(_DATE.match(cell) for cell in cells):
        return Judgement("ignored", "holds times; name it in data.dense_columns to take the seconds as a number"
                         if column.type == "time" else "holds dates")
    share = sum(list_delimiter in cell for cell in cells) / len(cells)
    if column.type == "text" and share >= _LIST_SHARE:
        kind = kind_of(column, list_delimiter)
        return Judgement("list", f"{list_delimiter!r} stands in {share:.0%} of its cells", kind)
    if column.type == "boolean":
        return Judgement("sparse", "holds true and false", "integer")
    if is_hex(column):
        return Judgement("sparse", "holds hexadecimal numbers of 8 digits", "hex")
    if column.type == "integer" or all(_INTEGER.fullmatch(cell) for cell in cells):
        return _judge_integers(column, different)
    if column.type == "float" or all(_NUMBER.fullmatch(cell) for cell in cells):
        return Judgement("dense", "holds numbers with fractions")
    if different == len(cells) >= _MANY_ROWS:
        return Judgement("ignored", f"different text in every row ({len(cells):,} checked)")
    return Judgement("sparse", f"holds words, {different:,} different in {len(cells):,} rows checked", "text")


def kind_of(column: Column, list_delimiter: str = "") -> Kind:
    """How the values of a sparse column are read; words can be anything."""
    cells = column.cells
    if list_delimiter:
        cells = tuple(value.strip() for cell in cells for value in cell.split(list_delimiter) if value.strip())
    if column.type in ("integer", "boolean"):
        return "integer"
    if column.type == "float":
        return "integer" if cells and all(float(cell).is_integer() for cell in cells) else "text"
    if cells and all(_INTEGER.fullmatch(cell) and not _has_leading_zero(cell) and len(cell) < 19 for cell in cells):
        return "integer"
    return "text"


def is_hex(column: Column) -> bool:
    """Eight digits each, and letters among them."""
    cells = column.cells
    has_letters = any(not cell.isdigit() for cell in cells)
    return len(cells) > 1 and has_letters and all(_HEX_ID.fullmatch(cell) for cell in cells)


def is_zero_one(column: Column) -> bool:
    """It could be the label."""
    if column.type in ("list", "nested", "time") or not column.cells:
        return False
    return {cell.lower() for cell in column.cells} <= {"0", "1", "0.0", "1.0", "true", "false"}


def _judge_integers(column: Column, different: int) -> Judgement:
    cells = column.cells
    values = [int(cell) for cell in cells]
    low, high, words = min(values), max(values), _words(column.name)
    seen = f"{different:,} different in {len(cells):,} rows checked"
    if any(map(_has_leading_zero, cells)):
        return Judgement("sparse", f"holds digits with zeros in front, so they are names; {seen}", "text")
    if len(values) >= _MANY_ROWS and values[0] in (0, 1) and values[:_MANY_ROWS] == list(
        range(values[0], values[0] + _MANY_ROWS)
    ):
        return Judgement("ignored", "numbers the rows")
    is_time = low >= 900_000_000 and high < 2_200_000_000
    is_time_ms = low >= 900_000_000_000 and high < 2_200_000_000_000
    if (is_time or is_time_ms) and (words & _TIME_WORDS or (not words & _ID_WORDS and different > 0.1 * len(cells))):
        unit = "seconds" if is_time else "milliseconds"
        return Judgement("ignored", f"holds times, in {unit} since 1970")
    if different <= _FEW and not (words & _AMOUNT_WORDS and different > 10):
        return Judgement("sparse", f"holds integers, only {seen}", "integer")
    is_skewed = statistics.median(values) - low < _SKEW * (high - low)
    if words & _AMOUNT_WORDS and not words & {"id", "ids"}:
        return Judgement("dense", f"holds integers from {low:,} to {high:,}, and its name says amounts")
    if words & _ID_WORDS or column.name.lower().endswith("id"):
        if different == len(cells) >= _MANY_ROWS:
            return Judgement("ignored", f"different id in every row ({len(cells):,} checked)")
        return Judgement("sparse", f"holds integers, and its name says ids; {seen}", "integer")
    if low < 0 or is_skewed:
        return Judgement("dense", f"holds integers from {low:,} to {high:,}, most of them small: amounts")
    if different == len(cells) >= _MANY_ROWS:
        return Judgement("ignored", f"different number in every row ({len(cells):,} checked)")
    return Judgement("sparse", f"holds integers spread over {low:,} to {high:,}, {seen}: ids", "integer")


def _words(name: str) -> set[str]:
    """`userId`, `user_id` and `User ID` all hold `user` and `id`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _has_leading_zero(cell: str) -> bool:
    digits = cell.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0"


def _plural(kind: Kind) -> str:
    return {"hex": "hexadecimal numbers", "integer": "integers", "text": "words"}[kind]
