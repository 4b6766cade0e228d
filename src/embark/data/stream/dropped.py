"""Records that are dropped: where they are most of a stream, someone should know while it happens, and why."""

from collections import Counter
from collections.abc import Callable, Mapping

from embark.errors import DataError
from embark.formatting import format_count

WINDOW = 1_000  # Records.


class DropWatch:
    """Counts records and those dropped, by reason. Warns where more than half of the last ones were dropped, and stops
    a run of whose stream no record was ever trained on."""

    def __init__(self) -> None:
        self._num_records = self._num_dropped = self._records_before = self._dropped_before = 0
        self._reasons: Counter[str] = Counter()  # Of all, and …
        self._newest: Counter[str] = Counter()  # … since the last look.
        self._has_warned = False

    def add(self, why: str) -> None:
        """A record; `why` it was dropped, if it was."""
        self._num_records += 1
        if why:
            self.drop({why: 1})

    def drop(self, reasons: Mapping[str, int]) -> None:
        """Records that were added before."""
        self._num_dropped += sum(reasons.values())
        self._reasons.update(reasons)
        self._newest.update(reasons)

    def look(self, warn: Callable[[str], None], num_pending: int, *, has_trained: bool) -> None:
        """At the records since the last look, once there are enough of them; without those that are still pending."""
        num_records = self._num_records - num_pending
        num, num_dropped = num_records - self._records_before, self._num_dropped - self._dropped_before
        if max(num, num_dropped) < WINDOW:
            return
        is_much = 2 * num_dropped > num
        if is_much and not has_trained and self._num_dropped >= num_records:
            raise DataError(f"none of the first {format_count(num_records)} records of the stream can be trained "
                            f"on: {_counted(self._reasons)}",
                            fix="name the label, the dense columns and the tables as the records do: docs/follow.md")
        if is_much and not self._has_warned:
            warn(f"{format_count(num_dropped)} of the last {format_count(max(num, num_dropped))} records of the stream "
                 f"were dropped: {_counted(self._newest)}")
        self._has_warned = is_much
        self._records_before, self._dropped_before = num_records, self._num_dropped
        self._newest.clear()

    def __str__(self) -> str:
        """Of all so far; empty where none was dropped."""
        if not self._num_dropped:
            return ""
        return (f"{format_count(self._num_dropped)} of {format_count(self._num_records)} records were dropped: "
                f"{_counted(self._reasons)}")


def _counted(reasons: Counter[str]) -> str:
    return "; ".join(f"{why} ({format_count(num)})" for why, num in reasons.most_common(3))
