"""Cells of dates and times as microseconds since 1970, in UTC; hour, weekday and age of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from embark.data.prepare.arrow.cells import CellParser, Mask, SparseCells, as_text, is_text, trim
from embark.data.prepare.time_format import (
    ISO_PATTERNS,
    MAX_MICROS,
    MEANINGS,
    MICROS_PER_DAY,
    MICROS_PER_HOUR,
    MICROS_PER_UNIT,
    TimeFormat,
)
from embark.errors import DataError

_MICROS = pa.timestamp("us")


@dataclass(frozen=True, slots=True)
class Times:
    """A column of dates or times."""

    micros: NDArray[np.int64]  # [n]: 0 where there is none.
    is_missing: Mask
    is_bad: Mask

    def keys(self, feature: str) -> SparseCells:
        """The hour from 1 to 24, the weekday from 1 (Monday) to 7: the id itself, since 0 is for a missing time."""
        whole = self.micros // MICROS_PER_HOUR % 24 if feature == "hour" else (self.micros // MICROS_PER_DAY + 3) % 7
        return SparseCells((whole + 1).astype(np.uint64), is_missing=self.is_missing)

    def days_until(self, other: "Times") -> NDArray[np.float64]:
        """NaN where either is missing."""
        days = (other.micros - self.micros) / MICROS_PER_DAY
        return np.where(self.is_missing | other.is_missing, np.nan, days)


def parse_times(array: Any, format: TimeFormat, cells: CellParser) -> Times:
    """Each cell has the one format of its column; another is bad, since a guess for each cell could mix time zones."""
    array = trim(array) if is_text(array.type) else array
    if is_text(array.type) and format in ISO_PATTERNS:
        return _of_text(as_text(cells.without_missing(array)), format)
    if format not in (found := _formats_of_type(array.type)) and found:
        raise DataError(f"holds {array.type}, and the first file's holds {MEANINGS[format]}",
                        fix="write the column alike in every file")
    if types.is_timestamp(array.type) or types.is_date(array.type):
        array = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False)
        micros = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return Times(micros, array.is_null().to_numpy(zero_copy_only=False), np.zeros(len(array), np.bool_))
    values, is_bad = cells.numbers(array)
    is_bad = np.zeros(len(values), np.bool_) if is_bad is None else is_bad
    micros = np.rint(values * MICROS_PER_UNIT.get(format, 1))
    is_bad = is_bad | (np.abs(micros) >= MAX_MICROS)
    is_missing = np.isnan(values) & ~is_bad
    return Times(np.where(is_bad | is_missing, 0, micros).astype(np.int64), is_missing, is_bad)


def _formats_of_type(kind: Any) -> tuple[TimeFormat, ...]:
    """Which formats a column of this type can have; any, where this is empty."""
    if types.is_date(kind):
        return ("date",)
    if types.is_timestamp(kind):
        return ("local",) if kind.tz is None else ("zoned",)
    return () if is_text(kind) or types.is_null(kind) else ("s", "ms")


def _of_text(text: Any, format: TimeFormat) -> Times:
    is_there = text.is_valid().to_numpy(zero_copy_only=False)
    fits = pc.match_substring_regex(text, ISO_PATTERNS[format])
    text = pc.if_else(fits, text, pa.scalar(None, text.type))
    text = pc.replace_substring_regex(text, "([.][0-9]{6})[0-9]+", r"\1")  # microseconds are kept
    kind = _MICROS
    if format == "zoned":
        text, kind = pc.replace_substring_regex(text, " ?UTC$", "Z"), pa.timestamp("us", "UTC")
    try:
        parsed = text.cast(kind)
    except pa.ArrowInvalid:  # A day or an hour that no calendar has, so each on its own.
        parsed = pa.chunked_array([_cast_one(text[i : i + 1], kind) for i in range(len(text))]).combine_chunks()
    has_time = parsed.is_valid().to_numpy(zero_copy_only=False)
    micros = parsed.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return Times(micros, ~is_there, is_there & ~has_time)


def _cast_one(text: Any, kind: Any) -> Any:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([None], kind)
