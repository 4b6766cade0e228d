"""Events: everything that is shown anywhere is made of them."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embark.events.jsonable import to_jsonable
from embark.events.sinks.resilient_file import ResilientFile


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
        """One line; NaN and infinity become null, which JSON has."""
        fields = {"event": self.kind, "time_s": round(self.time_s, 6), "rank": self.rank, **self.values}
        return json.dumps(to_jsonable(fields), allow_nan=False)


class Sink(Protocol):
    """Where events go: a file, a terminal, TensorBoard."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """`events.jsonl`: one JSON object a line, flushed line by line, so that a killed run keeps its events."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = ResilientFile(path, "ab")
        if cut:  # a line that the last process did not finish must not swallow our first
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


def parse_event(line: str | bytes) -> Event | None:
    """The event of a line; None for a line that holds none: cut short, no JSON, or written by something else."""
    try:
        values: Any = json.loads(line)
        kind, time_s = values.pop("event"), float(values.pop("time_s"))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    rank = values.pop("rank", 0)
    if not isinstance(kind, str) or not math.isfinite(time_s):
        return None
    return Event(kind, values, time_s, rank if isinstance(rank, int) else 0)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file; a line cut short by a kill is skipped."""
    with path.open("rb") as lines:
        yield from filter(None, map(parse_event, lines))
