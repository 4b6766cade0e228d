"""What a reader of a stream gives, and what it must be able to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from embark.spec.data import moment

Offset = int | str | list[Any] | None  # What JSON can hold; None: before the first record.
Row = Mapping[str, Any]
_YEAR_10000_S = 253_402_300_800.0  # Neither seconds nor milliseconds are as large: microseconds perhaps.
_LAST_SECONDS = 1e11  # Larger numbers are milliseconds since 1970.


@dataclass(frozen=True, slots=True)
class Message:
    """A record as its reader has it."""

    offset: Offset
    value: bytes | str | Row  # A JSON object.
    time_s: float | None = None  # The broker's time of it.


class StreamReader(Protocol):
    """Partitions, each a sequence of records that is the same every time it is read from an offset on."""

    def open(self, offsets: Mapping[str, Offset]) -> Sequence[str]:
        """Connect; returns the names of the partitions, which continue behind these offsets."""

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        """The next records of it, those that there are; none where there are none within about this time, or the
        broker cannot be reached."""

    def acknowledge(self, offsets: Mapping[str, Offset]) -> None:
        """A committed checkpoint contains the records up to these: they will not be asked for again."""

    def problem(self) -> str:
        """Why nothing can be read at the moment; empty where it can."""

    def close(self) -> None: ...


class StreamStopped(Exception):
    """The run was asked to stop while it waited for records."""


def row_of(value: bytes | str | Row) -> Row | None:
    """None of what is not a JSON object."""
    if isinstance(value, Mapping):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def event_time_s(value: Any) -> float | None:
    """Seconds since 1970, of a number of seconds or milliseconds or of ISO 8601; None where it is neither."""
    if isinstance(value, str):
        try:
            return moment(value).timestamp()
        except ValueError:
            pass
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(seconds) or isinstance(value, bool):
        return None
    seconds = seconds / 1000 if abs(seconds) > _LAST_SECONDS else seconds
    return seconds if abs(seconds) < _YEAR_10000_S else None
