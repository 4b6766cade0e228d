"""What a reader of a stream gives, and what it must be able to do."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from embark.values import JsonMap, frozen

Offset = int | str | list[Any] | None  # A JSON value; None stands for the position before the first record.
Offsets = Mapping[str, Offset]
Row = JsonMap


@frozen
class Message:
    """A record of a stream."""

    offset: Offset
    value: bytes | str | Row  # A JSON object.
    time_s: float | None = None  # The broker's time of it.
    why: str = ""  # Why it cannot be used, if it cannot.
    file: str = ""  # The file that it stands for, if it is not a row.


class StreamReader(Protocol):
    """Reads partitions, each a sequence of records that is the same every time it is read from an offset on."""

    def open(self, offsets: Offsets) -> Sequence[str]:
        """Connect; return the names of the partitions, which continue behind these offsets."""

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        """Return the next records of a partition that there are; none if none come within about this time, or the
        broker cannot be reached."""

    def acknowledge(self, offsets: Offsets) -> None:
        """Note that a committed checkpoint contains the records up to these: they will not be asked for again."""

    def problem(self) -> str:
        """Return why nothing can be read at the moment; empty if it can."""

    def close(self) -> None: ...


class StreamStopped(Exception):
    """The run was asked to stop while it waited for records."""

