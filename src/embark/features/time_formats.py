"""Common formats of dates and times, and which of them some cells fit."""

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache

from embark.spec.time_formats import PACKED, time_pattern

_CLOCKS = ("", "%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
_DATES = ("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d",
          "%Y.%m.%d", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y")
_COMMON = (*(f"{date} {clock}".rstrip() for date in _DATES for clock in _CLOCKS), "%d/%b/%Y:%H:%M:%S %z",
           "%a %b %d %H:%M:%S %z %Y", "%a, %d %b %Y %H:%M:%S %z")
_COMMON_DIGITS = ("%Y%m%d", "%Y%m%d%H", "%y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S")
_COMMON_YEARS = range(1970, 2070)
_NEARLY_ALL = 0.99


def num_digits(format: str) -> int:
    """Return how many digits a format of digits alone has, such as `%Y%m%d`; 0 for others."""
    return sum(4 if part == "Y" else 2 for part in format.split("%")[1:]) if PACKED.fullmatch(format) else 0


@cache
def _compiled(format: str) -> re.Pattern[str]:
    return re.compile(time_pattern(format))


def fits(cell: str, format: str) -> bool:
    """Return whether a cell is written so."""
    cell = cell.zfill(num_digits(format))
    if not _compiled(format).match(cell):
        return False
    try:
        return not num_digits(format) or datetime.strptime(cell, format).year in _COMMON_YEARS
    except ValueError:
        return False


def common_formats(cells: Sequence[str], *, may_be_digits: bool) -> list[str]:
    """Return the common formats that nearly all cells fit: one if they are unambiguous."""
    if not cells:
        return []

    candidates = _COMMON_DIGITS if may_be_digits and cells[0].isdigit() else _COMMON
    likely = [format for format in candidates if any(fits(cell, format) for cell in cells[:3])]
    found = [format for format in likely if sum(fits(cell, format) for cell in cells) >= _NEARLY_ALL * len(cells)]
    return [one for one in found if "%B" not in one or one.replace("%B", "%b") not in found]  # May is both.
