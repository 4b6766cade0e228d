"""Dates and times of an Arrow column as microseconds, and the parts of them that are features."""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, cast
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from embark.errors import DataError
from embark.features.arrays import Array, Doubles, Int64s, Mask
from embark.features.time_formats import num_digits
from embark.features.values import (
    ISO_PATTERNS,
    MAX_MICROS,
    MICROS_PER_DAY,
    MICROS_PER_HOUR,
    MICROS_PER_UNIT,
    TimeFormat,
    meaning_of_format,
)
from embark.spec.time_formats import MONTHS, time_pattern
from embark.values import frozen
from .cells import CellParser, SparseCells, as_text, is_text, trim

_MICROS = pa.timestamp("us")
_EPOCH = datetime(1970, 1, 1)
_PER_MINUTE = 60_000_000


@frozen
class Times:
    """A column of dates or times."""

    micros: Int64s  # [n]: microseconds since 1970 in UTC; 0 if there is no time.
    is_missing: Mask
    is_bad: Mask
    zone: str = ""  # The zone of the hours and days; empty: UTC.

    def keys(self, part: str) -> SparseCells:
        """Return the hour from 1 to 24, the weekday from 1 (Monday) to 7, the day of the month or the month: the id
        itself, since 0 is for a missing time."""
        local = self.micros + _offsets(self.micros, self.zone, is_local=False)
        if part == "hour":
            found = local // MICROS_PER_HOUR % 24 + 1
        elif part == "weekday":
            found = (local // MICROS_PER_DAY + 3) % 7 + 1
        else:
            months = local.astype("datetime64[us]").astype("datetime64[M]")
            days = local.astype("datetime64[us]").astype("datetime64[D]") - months.astype("datetime64[D]")
            found = months.astype(np.int64) % 12 + 1 if part == "month" else days.astype(np.int64) + 1
        return SparseCells(found.astype(np.uint64), is_missing=self.is_missing)

    def days_until(self, other: "Times") -> Doubles:
        """Return the days between two times, NaN where either is missing."""
        days = (other.micros - self.micros) / MICROS_PER_DAY
        return np.where(self.is_missing | other.is_missing, np.nan, days)


def _offsets(micros: Int64s, zone: str, *, is_local: bool) -> Int64s:
    """Return [n]: by how many microseconds the local time is ahead of UTC; `is_local`: the times are local ones, of
    which an hour that comes twice is its first."""
    if not zone:
        return np.zeros(1, np.int64)
    days, index = np.unique(micros // MICROS_PER_DAY, return_inverse=True)
    ends = np.array([[_offset(zone, day * 1440, is_local), _offset(zone, (day + 1) * 1440, is_local)]
                     for day in days.tolist()], np.int64).reshape(-1, 2)
    found: Int64s = ends[index, 0]
    changing = np.flatnonzero((ends[:, 0] != ends[:, 1])[index])
    if len(changing):
        minutes, index = np.unique(micros[changing] // _PER_MINUTE, return_inverse=True)
        found[changing] = np.array([_offset(zone, minute, is_local) for minute in minutes.tolist()], np.int64)[index]
    return found


@lru_cache(1 << 16)
def _offset(zone: str, minute: int, is_local: bool) -> int:
    try:
        moment = _EPOCH + timedelta(minutes=minute)
        zoned = moment.replace(tzinfo=ZoneInfo(zone)) if is_local else moment.replace(tzinfo=UTC).astimezone(
            ZoneInfo(zone))
    except OverflowError:  # at the ends of the calendar
        return 0
    return (zoned.utcoffset() or timedelta()) // timedelta(microseconds=1)


def parse_times(array: Any, format: str, cells: CellParser, zone: str = "") -> Times:
    """Read times. Each cell has the one format of its column; another is bad, since a guess for each cell could mix
    time zones. Times that say no zone are of `zone`."""
    array = trim(array) if is_text(array.type) else array
    found = _parsed(array, format, cells)
    has_zone = format in ("zoned", "s", "ms") or "%z" in format
    micros = found.micros if has_zone else found.micros - _offsets(found.micros, zone, is_local=True)
    return Times(np.where(found.is_missing | found.is_bad, 0, micros), found.is_missing, found.is_bad, zone)


def _parsed(array: Any, format: str, cells: CellParser) -> Times:
    if "%" in format and not (types.is_timestamp(array.type) or types.is_date(array.type)):
        text = array if is_text(array.type) else array.cast(pa.string())
        return _of_format(as_text(cells.without_missing(text)), format)
    if is_text(array.type) and format in ISO_PATTERNS:
        return _of_text(as_text(cells.without_missing(array)), format)
    if format not in (found := _formats_of_type(array.type)) and found:
        raise DataError(f"holds {array.type}, and the first file's holds {meaning_of_format(format)}",
                        "write the column alike in every file")
    if types.is_timestamp(array.type) or types.is_date(array.type):
        array = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False)
        micros = np.asarray(array.cast(pa.int64()).fill_null(0))
        return Times(micros, np.asarray(array.is_null()), np.zeros(len(array), np.bool_))
    values, is_bad = cells.numbers(array)
    is_bad = np.zeros(len(values), np.bool_) if is_bad is None else is_bad
    micros = np.rint(values * MICROS_PER_UNIT.get(format, 1))
    is_bad = is_bad | (np.abs(micros) >= MAX_MICROS)
    is_missing = np.isnan(values) & ~is_bad
    return Times(np.where(is_bad | is_missing, 0, micros).astype(np.int64), is_missing, is_bad)


def _formats_of_type(kind: Any) -> tuple[TimeFormat, ...]:
    """Return which formats a column of this type can have; empty: any."""
    if types.is_date(kind):
        return ("date",)
    if types.is_timestamp(kind):
        return ("local",) if kind.tz is None else ("zoned",)
    return () if is_text(kind) or types.is_null(kind) else ("s", "ms")


def _of_text(text: Any, format: str) -> Times:
    is_there = np.asarray(text.is_valid())
    fits = pc.match_substring_regex(text, ISO_PATTERNS[cast(TimeFormat, format)])
    text = pc.if_else(fits, text, pa.scalar(None, text.type))
    text = pc.replace_substring_regex(text, "([.][0-9]{6})[0-9]+", r"\1")  # microseconds are kept
    kind = _MICROS
    if format == "zoned":
        text, kind = pc.replace_substring_regex(text, " ?UTC$", "Z"), pa.timestamp("us", "UTC")
    try:
        parsed = text.cast(kind)
    except pa.ArrowInvalid:  # A day or an hour that no calendar has, so each on its own.
        parsed = pa.chunked_array([_cast_one(text[i : i + 1], kind) for i in range(len(text))]).combine_chunks()
    has_time = np.asarray(parsed.is_valid())
    micros = np.asarray(parsed.cast(pa.int64()).fill_null(0))
    return Times(micros, ~is_there, is_there & ~has_time)


def _cast_one(text: Any, kind: Any) -> Any:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([None], kind)


def _of_format(text: Any, format: str) -> Times:
    """Read times in the format of Python's `strptime`."""
    is_there = np.asarray(text.is_valid())
    if width := num_digits(format):  # Numbers have lost the zeros in front.
        text = pc.utf8_lpad(text, width, "0")
    groups = pc.extract_regex(text, time_pattern(format))
    fits = np.asarray(groups.is_valid())
    names = {groups.type.field(i).name for i in range(groups.type.num_fields)}

    def words(name: str) -> Any:
        return pc.if_else(groups.is_valid(), pc.struct_field(groups, name), "0")

    def number(name: str, default: int = 0) -> Int64s:
        if name not in names:
            return np.full(len(text), default, np.int64)
        found: Int64s = np.asarray(words(name).cast(pa.int64()))
        return found

    year = number("Y", 1970)
    if "y" in names:
        year = number("y") + np.where(number("y") < 69, 2000, 1900)
    month = number("m", 1)
    for name, length in (("b", 3), ("B", 9)):
        if name in names:
            month = _positions(words(name), [one[:length] for one in MONTHS]) + 1
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (number("d", 1) - 1)
    hour = number("H")
    if "I" in names:
        hour = number("I") % 12 + (12 * _positions(words("p"), ["am", "pm"]) if "p" in names else 0)
    minutes = hour * 60 + number("M")
    if "z" in names:
        sign, hours, rest = (pc.struct_field(pc.extract_regex(
            words("z"), "^(?P<s>[+-]?)(?P<h>[0-9Z]{0,2}):?(?P<m>[0-9]{0,2})$"), name) for name in "shm")
        ahead = sum(
            np.asarray(pc.if_else(pc.match_substring_regex(one, "^[0-9]+$"), one, "0").cast(pa.int64())) * factor
            for one, factor in ((hours, 60), (rest, 1)))
        minutes = minutes - np.where(np.asarray(pc.equal(sign, "-")), -ahead, ahead)
    micros = days.astype(np.int64) * MICROS_PER_DAY + minutes * _PER_MINUTE + number("S") * 1_000_000
    if "f" in names:
        micros += np.asarray(pc.utf8_rpad(words("f"), 6, "0").cast(pa.int64()))
    is_bad = is_there & ~(fits & (days.astype("datetime64[M]") == months) & (year > 0) & (np.abs(micros) < MAX_MICROS))
    return Times(np.where(is_there & ~is_bad, micros, 0), ~is_there, is_bad)


def _positions(words: Any, among: list[str]) -> Array:
    """Return the position of each word, or 0."""
    found: Array = np.asarray(pc.index_in(pc.ascii_lower(words), value_set=pa.array(among)).fill_null(0))
    return found.astype(np.int64)
