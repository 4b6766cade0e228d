"""The order in which records are trained: by event time within a bound, with labels joined. It is a function of the
records of each partition alone: two runs over the same records give the same rows. The clock only tells which times
cannot be true: those of a day from now or later."""

from __future__ import annotations

import heapq
import json
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from embark.errors import DataError
from embark.features.values import event_time_s, json_object
from embark.formatting import to_one_line
from embark.values import JsonDict, frozen
from .records import Message, Offset, Row

COUNTS = ("num_rows", "num_late", "num_unreadable", "num_labels", "num_labels_joined", "num_labels_unmatched",
          "num_without_label")
MAX_REASONS = 100
MAX_AHEAD_S = 86_400.0  # A record that claims a later time would make all records after it late.
MAX_STATE_AHEAD_S = 365 * MAX_AHEAD_S  # What a state claims was compared with a clock that may have been set since.


@frozen
class OrderSettings:
    """Settings for ordering and joining records."""

    label: str  # The label's column.
    time_column: str = ""
    bound_s: float = 0.0
    key: str = ""
    label_window_s: float = 0.0


@dataclass(slots=True)
class OrderState:
    """All state between the records that were read and the rows that were released. Records are never changed, so a
    copy of the collections is a copy of the state."""

    offsets: dict[str, Offset]
    newest_s: dict[str, float]  # The newest event of each partition.
    watermark_s: float = -math.inf  # All older records were released or dropped.
    num_added: int = 0  # Orders events with the same time.
    early: list[tuple[float, int, bool, Row]] = field(default_factory=list)
    """A heap of records newer than the watermark: time, number, whether it is a label, and the row."""
    waiting: deque[tuple[float, Row]] = field(default_factory=deque)  # Rows that wait for their labels.
    labels: dict[str, tuple[float, Any, bool]] = field(default_factory=dict)  # Time, label, whether it was joined.
    label_ends: deque[tuple[float, str]] = field(default_factory=deque)
    ready: deque[Row] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # Why records were dropped.

    def drop(self, why: str) -> int:
        """Count a record that is dropped; return how many were for this reason. All but the first reasons are one."""
        why = why if why in self.reasons or len(self.reasons) < MAX_REASONS else "other reasons"
        self.reasons[why] += 1
        return self.reasons[why]

    def copy(self) -> OrderState:
        return OrderState(**{one.name: copy(getattr(self, one.name)) for one in fields(self)})

    def to_json(self) -> str:
        """Return the state as a checkpoint stores it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        watermark_s = self.watermark_s if math.isfinite(self.watermark_s) else None
        return json.dumps({**values, "watermark_s": watermark_s}, default=list)

    @staticmethod
    def from_json(text: str | bytes, where: str = "the state of a stream") -> OrderState:
        """Read what `to_json` wrote; anything else is refused."""
        try:
            found: JsonDict = json.loads(text)
            if found["watermark_s"] is None:
                found["watermark_s"] = -math.inf
            state: OrderState = _adapter().validate_python(found)
            if not all(math.isfinite(newest_s) for newest_s in state.newest_s.values()):
                raise ValueError("the time of its newest event is not finite")
            if max([state.watermark_s, *state.newest_s.values()]) > time.time() + MAX_STATE_AHEAD_S:
                raise ValueError("its newest event is more than a year ahead of this machine's clock")
            return state
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{where}: is not the state of a stream: {to_one_line(error)[:200]}",
                            "remove the checkpoint: the run then resumes from the one before") from None


@cache
def _adapter() -> TypeAdapter[OrderState]:
    return TypeAdapter(OrderState)


class EventOrder:
    """Takes records one by one and gives rows out in the order of their events."""

    def __init__(self, settings: OrderSettings, state: OrderState | None = None) -> None:
        self._settings = settings
        self.state = state or OrderState({}, {})
        self._partitions: list[str] = []

    def open(self, partitions: Sequence[str]) -> None:
        """Set the partitions."""
        self._partitions = sorted(partitions)

    def next_partition(self) -> str:
        """Return the partition that holds the others up: whose newest event is the oldest. It depends on the records
        alone, so that the order does, whatever arrives first."""
        newest = self.state.newest_s
        return min(self._partitions, key=lambda partition: newest.get(partition, -math.inf))

    def add(self, partition: str, message: Message) -> str:
        """Add the next record of `next_partition()`; return why it is dropped, if it is."""
        state, settings = self.state, self._settings
        state.offsets[partition] = message.offset
        row = None if message.why else json_object(message.value)
        at = None if row is None else self._time_of(row, message)
        if at is not None and at > time.time() + MAX_AHEAD_S:
            state.counts["num_unreadable"] += 1
            return f"its time in column {settings.time_column!r} is more than a day ahead of this machine's clock"
        if row is None or at is None or (settings.key and row.get(settings.key) is None):
            state.counts["num_unreadable"] += 1
            if row is None:
                return message.why or "not a JSON object"
            return (f"no value in column {settings.key!r}" if at is not None
                    else f"no time in column {settings.time_column!r}: ISO 8601, seconds or milliseconds")
        why = ""
        is_label = bool(settings.key) and row.get(settings.label) is not None
        state.counts["num_labels" if is_label else "num_rows"] += 1
        if at < state.watermark_s:
            state.counts["num_late"] += 1
            why = f"older than the newest event by more than stream.bound_s = {settings.bound_s:g}"
        else:
            heapq.heappush(state.early, (at, state.num_added, is_label, row))
            state.num_added += 1
        state.newest_s[partition] = max(at, state.newest_s.get(partition, -math.inf))
        self._advance()
        return why

    def take(self, num_rows: int) -> list[Row]:
        """Return rows that are ready."""
        return [self.state.ready.popleft() for _ in range(num_rows)]

    def _time_of(self, row: Row, message: Message) -> float | None:
        if self._settings.time_column:
            return event_time_s(row.get(self._settings.time_column))
        return max(0.0, self.state.watermark_s) if message.time_s is None else message.time_s  # never late

    def _advance(self) -> None:
        """Release the rows that no later record can precede, given the bound on delay."""
        state, settings = self.state, self._settings
        newest = [state.newest_s.get(partition, -math.inf) for partition in self._partitions]
        state.watermark_s = max(state.watermark_s, min(newest) - settings.bound_s)
        while state.early and state.early[0][0] <= state.watermark_s:
            at, _, is_label, row = heapq.heappop(state.early)
            if is_label:
                self._keep_label(at, row)
            elif settings.key:
                state.waiting.append((at, row))
            else:
                state.ready.append(row)
        while state.waiting and state.waiting[0][0] + settings.label_window_s <= state.watermark_s:
            state.ready.append(self._labelled(*state.waiting.popleft()))
        self._forget_labels()

    def _keep_label(self, at: float, row: Row) -> None:
        key = str(row[self._settings.key])
        before = self.state.labels.get(key)
        self.state.labels[key] = (at, row[self._settings.label], bool(before and before[2]))
        self.state.label_ends.append((at, key))

    def _labelled(self, at: float, row: Row) -> Row:
        settings, key = self._settings, str(row[self._settings.key])
        label_at, label, _ = self.state.labels.get(key, (-math.inf, 0, False))
        if abs(label_at - at) > settings.label_window_s:
            self.state.counts["num_without_label"] += 1
            return {**row, settings.label: 0}
        self.state.counts["num_labels_joined"] += 1
        self.state.labels[key] = (label_at, label, True)
        return {**row, settings.label: label}

    def _forget_labels(self) -> None:
        """Forget old labels. A label may be older than its row by the window, and the row then waits as long again."""
        state, kept_s = self.state, 2 * self._settings.label_window_s
        while state.label_ends and state.label_ends[0][0] + kept_s < state.watermark_s:
            at, key = state.label_ends.popleft()
            found = state.labels.get(key)
            if found and found[0] == at:  # else a newer one replaced it
                del state.labels[key]
                state.counts["num_labels_unmatched"] += not found[2]
