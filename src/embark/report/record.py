"""What the events of a run say, gathered as they are read: however many, in one pass."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embark.events.events import Event
from embark.events.history import History
from embark.events.interruptions import Interruption, interruptions
from embark.events.names import find
from embark.events.spending import Spending, spending
from embark.formatting import strip_control_chars, to_finite
from embark.report.line import Line
from embark.report.locations import EVENTS, FolderPlace
from embark.report.machine import Machine
from embark.report.tail import Tail, parse

MAX_NOTES = 200
MAX_GAPS = 256
_FIRST_STEPS, _LAST_STEPS = 2, 32
_SIGNS = frozenset({"start", "resume", "save", "interrupt", "error", "end"})
"""Of these every one is kept: they say when a run stopped and went on."""


@dataclass(slots=True)
class Attempt:
    """From one start to whatever ended it."""

    start_s: float
    first_step: int
    last_s: float
    last_step: int
    outcome: str = ""
    """Of the `end` event; empty where none came."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint, when it was written."""

    step: int
    time_s: float
    size_bytes: float | None
    save_s: float | None
    path: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that the run said."""

    time_s: float
    level: str
    text: str


class Record:
    """One run. Unknown events, and values that are no numbers, are passed over."""

    def __init__(self) -> None:
        self.history = History()
        self.attempts: list[Attempt] = []
        self.plan: Mapping[str, Any] = {}
        self.train: dict[str, Line] = {}
        """By metric, from `step` events."""
        self.evals: dict[str, Line] = {}
        self.saves: list[Save] = []
        self.notes: list[Note] = []
        self.num_notes = 0
        self.error = ""
        """Of the last attempt."""
        self.machine = Machine()
        self.num_events = 0
        self.last_s: float | None = None
        self._signs: list[Event] = []
        self._steps_seen = 0
        self._last_steps: deque[Event] = deque(maxlen=_LAST_STEPS)
        self._last_event: Event | None = None
        self._gaps_s: deque[float] = deque(maxlen=MAX_GAPS)
        self.longest_gap_s = 0.0
        """Between two events of one attempt."""

    @property
    def start(self) -> Mapping[str, Any]:
        return self.history.start

    @property
    def predict(self) -> Mapping[str, Any]:
        return self.history.predict

    @property
    def end(self) -> Mapping[str, Any]:
        """Of the last attempt; empty where it has not ended."""
        return self.history.end if self.attempts and self.attempts[-1].outcome else {}

    @property
    def has_begun(self) -> bool:
        return bool(self.attempts)

    @property
    def steps_done(self) -> int:
        return self.history.steps_done

    @property
    def num_steps(self) -> int:
        return self.history.num_steps

    @property
    def num_samples(self) -> float:
        """That the model has learnt from; what was redone counts once."""
        return self.steps_done * (to_finite(self.start.get("batch_size")) or 0.0)

    @property
    def samples_per_s(self) -> float | None:
        """Over all; an `end` speaks of its own attempt, so that of several the usual pace is told."""
        told = to_finite(self.end.get("samples_per_s")) if len(self.attempts) == 1 else None
        line = self.train.get("samples_per_s")
        return told if told is not None or line is None else line.median

    @property
    def held_s(self) -> float:
        """Seconds from each start to its last sign of life, together: the time that machines worked on it."""
        return sum(attempt.last_s - attempt.start_s for attempt in self.attempts)

    @property
    def usual_gap_s(self) -> float:
        """Between two events, of late."""
        return statistics.median(self._gaps_s) if self._gaps_s else 0.0

    def take(self, event: Event) -> None:
        self.num_events += 1
        kind, values, time_s = event.kind, event.values, event.time_s
        if not math.isfinite(time_s):
            return
        if self.last_s is not None and kind != "start" and time_s > self.last_s:
            self._gaps_s.append(time_s - self.last_s)
            self.longest_gap_s = max(self.longest_gap_s, time_s - self.last_s)
        self.last_s = time_s if self.last_s is None else max(self.last_s, time_s)
        step = to_finite(values.get("step"))
        if kind == "start":
            self._begin(event)
        self.history.take(event)
        if self.attempts:
            self._reach(self.attempts[-1], kind, step, time_s)
        if kind in _SIGNS:
            self._signs.append(event)
        self._last_event = event
        if kind == "step" and step is not None:
            self._take_step(event)
            _add_all(self.train, values, step, time_s)
        elif kind == "eval" and step is not None:
            _add_all(self.evals, values, step, time_s)
        elif kind == "resume" and step is not None:
            self._forget_after(step)
        elif kind == "plan":
            self.plan = values
        elif kind == "save" and step is not None:
            self.saves.append(Save(int(step), time_s, to_finite(values.get("bytes")), to_finite(values.get("save_s")),
                                   strip_control_chars(values.get("path", ""))))
        elif kind in ("ranks", "phases"):
            self.machine.take(kind, values, step if step is not None else self.steps_done, time_s)
        elif kind == "note":
            self._note(Note(time_s, str(values.get("level", "info")), strip_control_chars(values.get("text", ""))))
        elif kind == "error":
            self.error = strip_control_chars(values.get("text", "")) or "an error that said nothing"

    def interruptions(self) -> tuple[Interruption, ...]:
        return interruptions(self._told())

    def spending(self, usd_per_hour: float | None = None, now_s: float | None = None) -> Spending | None:
        """What it has taken; `now_s` where it is under way."""
        return spending(self._told(), usd_per_hour=usd_per_hour, now_s=now_s)

    def _told(self) -> list[Event]:
        """As few events as say the same of stops and times as all of them."""
        return [*self._signs, *self._last_steps, *([self._last_event] if self._last_event else [])]

    def _begin(self, event: Event) -> None:
        first = int(to_finite(event.values.get("first_step")) or 0)
        self._forget_after(first)
        self.error = ""
        self._signs = self._told()
        self._last_steps.clear()
        self._last_event = None
        self._steps_seen = 0
        self.attempts.append(Attempt(event.time_s, first, event.time_s, first))

    def _reach(self, attempt: Attempt, kind: str, step: float | None, time_s: float) -> None:
        attempt.last_s = max(attempt.last_s, time_s)
        if step is not None and kind in ("step", "eval", "save", "end", "interrupt"):
            attempt.last_step = max(attempt.last_step, int(step))
        if kind == "end":
            attempt.outcome = str(self.history.end.get("outcome") or "done")

    def _take_step(self, event: Event) -> None:
        """The first of an attempt and the newest are enough to tell its pace."""
        self._steps_seen += 1
        (self._signs if self._steps_seen <= _FIRST_STEPS else self._last_steps).append(event)

    def _forget_after(self, step: float) -> None:
        for line in (*self.train.values(), *self.evals.values(), *self.machine.lines.values()):
            line.forget_after(step)

    def _note(self, note: Note) -> None:
        self.num_notes += 1
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)


def read_record(folder: Path) -> Record:
    """Of a run's directory; empty where it has no events."""
    record, tail = Record(), Tail(FolderPlace(folder), EVENTS)
    take_new(record, tail)
    return record


def take_new(record: Record, tail: Tail) -> Record:
    """What was written since the last look; a new record where the file is another one than it was."""
    while True:
        read = tail.look()
        if read.is_new:
            record = Record()
        for line in read.lines:
            if event := parse(line):
                record.take(event)
        if read.is_end:
            return record


def record_of(events: Iterable[Event]) -> Record:
    record = Record()
    for event in events:
        record.take(event)
    return record


def _add_all(lines: dict[str, Line], values: Mapping[str, Any], step: float, time_s: float) -> None:
    for name, value in values.items():
        if type(value) is not float:
            if value is not None and to_finite(value) is None:
                continue
            value = math.nan if value is None else float(value)
        line = lines.get(name)
        if line is None:
            if find(name) is None:
                continue
            line = lines[name] = Line()
        line.add(step, time_s, value)
