"""Events: everything that is shown anywhere is made of these."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embark.events.jsonable import to_jsonable
from embark.events.sinks.resilient_file import PatientFile


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: `start plan predict note step ranks phases eval save resume interrupt
    end error`."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)
    """Seconds since 1970."""
    rank: int = 0

    def to_json(self) -> str:
        """One line; what is no number becomes null, which JSON has."""
        told = {"event": self.kind, "time_s": round(self.time_s, 6), "rank": self.rank, **self.values}
        return json.dumps(to_jsonable(told), allow_nan=False)


class Sink(Protocol):
    """Where events go: a file, a terminal, TensorBoard."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """`events.jsonl`: one JSON object a line, flushed line by line, so that a killed run keeps what it said."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = PatientFile(path, "ab")
        if cut:  # a line the last run did not finish must not swallow our first
            self._file.write(b"\n")

    def emit(self, event: Event) -> None:
        self._file.write(f"{event.to_json()}\n".encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Fanout:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """All of them, whatever one raises."""
        with ExitStack() as closing:
            for sink in reversed(self._sinks):
                closing.callback(sink.close)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file; a line cut short by a kill is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                yield Event(values.pop("event"), values, values.pop("time_s"), values.pop("rank"))
            except (ValueError, KeyError, AttributeError, TypeError):
                continue
