"""How values are written: numbers, dates and times, values of JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

from embark.spec import moment
from embark.values import JsonMap

INTEGER = "[+-]?[0-9]+"  # Patterns mean the same to Python and to pyarrow.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
TimeFormat = Literal["date", "local", "zoned", "s", "ms"]
_DATE, _CLOCK = "[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?"
ISO_PATTERNS: dict[TimeFormat, str] = {
    "date": f"^{_DATE}$", "local": f"^{_DATE}{_CLOCK}$",
    "zoned": f"^{_DATE}{_CLOCK}(Z| ?UTC|[+-][0-9]{{2}}(:?[0-9]{{2}})?)$"
}
MEANINGS: dict[TimeFormat, str] = {
    "date": "dates (2024-05-31)", "local": "times without a zone (2024-05-31T18:00:00), taken as UTC",
    "zoned": "times with a zone (2024-05-31T18:00:00Z)", "s": "seconds since 1970", "ms": "milliseconds since 1970"
}
DecimalSign = Literal[".", ","]
GROUPED: dict[str, str] = {sign: rf"[+-]?(([0-9]{{1,3}}({between}[0-9]{{3}})+|[0-9]+)({own}[0-9]*)?|{own}[0-9]+)"
                           "([eE][+-]?[0-9]+)?"
                           for sign, own, between in ((",", ",", "[.]"), (".", "[.]", ","))}
"""Numbers by their decimal sign, with the other sign between thousands or not."""
MICROS_PER_UNIT = {"s": 1_000_000, "ms": 1_000}
MICROS_PER_HOUR, MICROS_PER_DAY = 3_600_000_000, 86_400_000_000
MAX_MICROS = 253_402_300_800_000_000  # The year 10,000.
_COMMON = {"s": (788_900_000, 2_200_000_000), "ms": (788_900_000_000, 2_200_000_000_000)}
_YEAR_10000_S = MAX_MICROS / 1e6  # Neither seconds nor milliseconds are as large: microseconds perhaps.
_LAST_SECONDS = 1e11  # Larger numbers are milliseconds since 1970.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def meaning_of_format(format: str) -> str:
    """Describe a format of times for people."""
    return f"times written {format}" if "%" in format else MEANINGS[cast(TimeFormat, format)]


def decimal_sign(cells: Sequence[str]) -> DecimalSign | None:
    """Return the decimal sign of numbers that are written with commas, if only one can be meant."""
    found: list[DecimalSign] = []
    for sign, pattern in GROUPED.items():
        if all(cell and re.fullmatch(pattern, cell) for cell in cells):
            found.append(cast(DecimalSign, sign))
    return found[0] if len(found) == 1 and any("," in cell for cell in cells) else None


def time_formats(cells: Sequence[str], unit: Literal["auto", "s", "ms"] = "auto") -> Counter[TimeFormat | None]:
    """Count how many of the cells have each format; None counts cells that are no time."""
    return Counter(_format_of(cell, unit) for cell in cells)


def _format_of(cell: str, unit: Literal["auto", "s", "ms"]) -> TimeFormat | None:
    if found := next((name for name, pattern in ISO_PATTERNS.items() if re.fullmatch(pattern, cell)), None):
        return found
    if not re.fullmatch(NUMBER, cell):
        return None
    return next((name for name in ("s", "ms") if unit == name or (unit == "auto" and _is_common(cell, name))), None)


def _is_common(cell: str, unit: Literal["s", "ms"]) -> bool:
    low, high = _COMMON[unit]
    return low <= float(cell) < high


def micros_of(moment: datetime) -> int:
    """Return the microseconds since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def moment_text(micros: int) -> str:
    """Return ISO 8601, in UTC."""
    return (_EPOCH + timedelta(microseconds=micros)).isoformat().replace("+00:00", "Z")


def json_object(value: bytes | str | JsonMap) -> JsonMap | None:
    """Read a JSON object, or return one that is read already; None if it is anything else."""
    if not isinstance(value, bytes | str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def json_line(line: bytes) -> JsonMap | None:
    """Read a JSON object of a file; None if it is anything else, or has half of a character, which no text can have."""
    found = json_object(line)
    if found is not None and (b"\\ud" in line or b"\\uD" in line):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            return None
    return found


def json_cell(value: Any) -> str:
    """Return a value as text; empty if there is none."""
    kind = type(value)
    if kind is str:
        return str(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)  # as json.dumps, in a fifth of the time
    if value is None:
        return ""
    return str(int(value)) if kind is bool else json.dumps(value)


def event_time_s(value: Any) -> float | None:
    """Return seconds since 1970 from a number of seconds or milliseconds or from ISO 8601; None for anything else, and
    for times before 1970."""
    seconds = math.nan
    if isinstance(value, str):
        with suppress(ValueError, OverflowError):
            seconds = moment(value).timestamp()
    if math.isnan(seconds) and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            seconds = float(value)
            seconds = seconds / 1000 if seconds > _LAST_SECONDS else seconds
    return seconds if 0 <= seconds < _YEAR_10000_S else None
