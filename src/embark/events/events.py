"""Events: everything that is shown anywhere is made of them; one JSON object a line, in a file that survives a full
disk. Their time is what the wall clock said when the process began, and the seconds counted since: a step of the wall
clock changes no duration and spends no budget."""

import dataclasses
import json
import math
import os
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import IO, Any, Protocol

from embark.errors import Fault
from embark.formatting import format_count, redact, to_finite, to_one_line
from embark.values import JsonMap, frozen

MAX_EVALS = 1_000  # Evaluations in memory: the best one is seldom older.


def uptime_s() -> float:
    """Return the seconds since this machine booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_began_s = time.time() - uptime_s()


def now_s() -> float:
    """Return the seconds since 1970."""
    return _began_s + uptime_s()


def to_jsonable(value: Any) -> Any:
    """Convert a value to JSON's own types. NaN and infinity become null; dataclass fields with `repr=False` are left
    out."""
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(held) for held in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(to_jsonable, value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
    for as_plain in ("model_dump", "tolist"):  # pydantic's and numpy's own ways, with neither imported
        if hasattr(value, as_plain):
            return to_jsonable(getattr(value, as_plain)())
    return str(value)


class ResilientFile:
    """A file whose failed writes raise only at `close`, if they still fail then: training matters more than its log."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._file = path.open(mode, buffering=0)
        self._waiting = bytearray()
        self._error: OSError | None = None

    def is_gone(self) -> bool:
        """Tell whether the open file lost its name: it was deleted, moved or replaced."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return True
        except OSError:  # what ails the file system, the next save says
            return False

    def write(self, data: bytes) -> None:
        self._waiting += data

    def flush(self) -> None:
        self._error = None
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            self._error = error

    def close(self) -> None:
        if self._file.closed:
            return
        self.flush()
        self._file.close()
        if self._error:
            cause = os.strerror(self._error.errno or 0).lower()
            raise Fault(f"could not write the end of {self.path}: {cause}",
                        "free some space, then run the same command to resume")


@frozen
class Event:
    """One thing that happened: `begin start plan predict note step ranks phases eval save resume change interrupt end
    error`."""

    kind: str
    values: JsonMap = field(default_factory=dict)
    time_s: float = field(default_factory=now_s)  # Seconds since 1970.
    rank: int = 0

    def __post_init__(self) -> None:
        """Remove secrets from what others wrote, also in events stored before: it goes to files, terminals and
        services."""
        if self.kind in ("note", "error") and "text" in self.values:
            object.__setattr__(self, "values", {**self.values, "text": redact(str(self.values["text"]))})

    def to_json(self) -> str:
        """Write one line; NaN and infinity become null, which JSON has."""
        fields = {"event": self.kind, "time_s": round(self.time_s, 6), "rank": self.rank, **self.values}
        return json.dumps(to_jsonable(fields), allow_nan=False)


class NewestEvents(ABC):
    """The values of the newest event of each kind; empty where there was none."""

    def __init__(self) -> None:
        self.start: JsonMap = {}
        self.step: JsonMap = {}
        self.eval: JsonMap = {}
        self._evals: deque[JsonMap] = deque(maxlen=MAX_EVALS)
        self.save: JsonMap = {}
        self.end: JsonMap = {}
        self.error: JsonMap = {}
        self.interrupt: JsonMap = {}
        self.plan: JsonMap = {}
        self.predict: JsonMap = {}

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """Steps of the run, those before its last resume included."""

    @property
    @abstractmethod
    def seconds_left(self) -> float | None:
        """Time left at the pace of the last steps."""

    def add_eval(self, values: JsonMap) -> None:
        self.eval = values
        self._evals.append(values)

    @property
    def kept(self) -> JsonMap:
        """What is known of the checkpoint that early stopping kept, which is the run's model; empty without one."""
        state = self.end.get("early_stopping")
        return state if isinstance(state, Mapping) and state.get("path") else {}

    @property
    def held_out(self) -> JsonMap:
        """The evaluation of the run's model: of the checkpoint that early stopping kept, or else the last one."""
        found = [values for values in self._evals if self.kept and values.get("step") == self.kept.get("best_step")]
        return found[-1] if found else self.eval

    @property
    def num_steps(self) -> int:
        return int(to_finite(self.start.get("num_steps")) or 0)

    @property
    def steps_to_do(self) -> int:
        return max(0, self.num_steps - self.steps_done)


class Sink(Protocol):
    """A destination of events: a file, a terminal, TensorBoard."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """`events.jsonl`: one JSON object a line, flushed line by line, so that a killed run keeps its events."""

    def __init__(
        self, path: Path, is_lost: Callable[[], bool] = lambda: False, check: Callable[[], None] = lambda: None
    ) -> None:
        """`is_lost`: another process has taken the run over, and its log is no longer this one's to write.
        `check` waits for the answer of a remote store, and raises if so."""
        self._is_lost, self._check = is_lost, check
        self._lock = threading.Lock()  # A thread that reads a stream reports what holds it up.
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = _ends_within_a_line(path)
        self._file = ResilientFile(path, "ab")
        if is_cut:  # a line that the last process did not finish must not swallow our first
            self._file.write(b"\n")

    def emit(self, event: Event) -> None:
        line = f"{event.to_json()}\n".encode()
        with self._lock:
            if self._is_lost():  # looked at last: a process may be paused for long at any instant before
                return
            self._file.write(line)
            self._file.flush()
        if self._file.is_gone():
            self._check()
            raise Fault(f"{self._file.path} was deleted or moved while the run was training, so its record is gone",
                        "if that was a mistake, put the folder back; the same command starts or resumes the run")

    def close(self) -> None:
        self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class Fanout:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """Close all of them, whatever one raises."""
        with ExitStack() as closing:
            for sink in reversed(self._sinks):
                closing.callback(sink.close)


MAX_LINE_BYTES = 32 << 20  # The plan of a model with many tables takes a few megabytes.
BLOCK_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_RANK = 1 << 20
MAX_TIME_S = 2.0**37  # Calendars end there.


def parse_event(line: str | bytes) -> Event | None:
    """Parse a line; None for a line without an event: cut short, no JSON, or written by something else."""
    try:
        values: Any = json.loads(line)
        if "\\ud" in (line if isinstance(line, str) else line.decode(errors="replace")):  # half a pair has no UTF-8
            values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
        kind, time_s = values.pop("event"), float(values.pop("time_s"))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    rank = values.pop("rank", 0)
    if not isinstance(kind, str) or not abs(time_s) < MAX_TIME_S or _is_deep(values):
        return None
    return Event(kind, values, time_s, rank if isinstance(rank, int) and 0 <= rank < MAX_RANK else 0)


def _is_deep(values: Any) -> bool:
    """Return whether values are nested so deeply that a reader could not write them again."""
    for _ in range(MAX_DEPTH):
        values = [inner for one in (values.values() if isinstance(values, dict) else values)
                  if isinstance(one, (dict, list)) for inner in (one.values() if isinstance(one, dict) else one)]
        if not values:
            return False
    return True


class LineSplitter:
    """Cuts blocks of bytes into lines. A line that is too long for an event becomes empty, and is not held."""

    def __init__(self) -> None:
        self.rest = b""
        self._is_skipping = False

    def lines(self, block: bytes) -> list[bytes]:
        """Return the lines that end in this block."""
        *lines, rest = (self.rest + block).split(b"\n")
        if self._is_skipping and lines:
            lines[0], self._is_skipping = b"", False
        self._is_skipping = self._is_skipping or len(rest) > MAX_LINE_BYTES
        self.rest = b"" if self._is_skipping else rest
        return lines


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of blocks, the last one also if it has no end."""
    splitter = LineSplitter()
    for block in blocks:
        yield from splitter.lines(block)
    yield splitter.rest


def read_blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(BLOCK_BYTES), b"")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file; a line cut short by a kill is skipped."""
    with path.open("rb") as file:
        yield from filter(None, map(parse_event, split_lines(read_blocks(file))))


def resume_command(start: JsonMap) -> str:
    """Return `the same command`, changed if `--fresh` would start another run, and has perhaps given this one another
    name."""
    if not start.get("is_fresh"):
        return "the same command"
    name = to_one_line(start.get("run_dir", "")).rpartition("/")[2]
    return "the same command " + ("without --fresh" if name == start.get("name") else
                                  f"with --set name={shlex.quote(name)} in place of --fresh")


MAX_SHOWN = 80
_DIGEST = 64  # Characters of a SHA-256, of which a person sees the first few.


@frozen
class Change:
    """A field that a run learns from, and its value before and after a resume from `step`."""

    field: str
    old: Any
    new: Any
    step: int

    def __str__(self) -> str:
        old, new = shown_value(self.old), shown_value(self.new)
        return f"{self.field}: {old} up to step {format_count(self.step)}, {new} from there on"


def changes_of(events: Iterable[Event]) -> list[Change]:
    """Return the changes in force, oldest first: a later start from an earlier step undoes what came after that
    step."""
    found: list[Change] = []
    for event in events:
        if event.kind == "start":
            first_step = to_finite(event.values.get("first_step")) or 0
            found = [change for change in found if change.step <= first_step]
        elif event.kind == "change" and (step := to_finite(event.values.get("step"))) is not None:
            values = event.values
            found.append(Change(to_one_line(values.get("field", "")), values.get("old"), values.get("new"), int(step)))
    return found


def warm_start_text(values: JsonMap) -> str:
    """Say whose weights a run began with, from a `warm_start` event."""
    step, fresh, rows = (format_count(values.get(name)) for name in ("from_step", "num_fresh_rows", "num_rows"))
    return f"of {to_one_line(values.get('run', ''))} at step {step}; {fresh} of {rows} table rows are new"


def shown_value(value: Any) -> str:
    """Return a field's value for a sentence."""
    if isinstance(value, str) and len(digest := value.partition(" ")[0]) == _DIGEST:
        return f"sha256 {to_one_line(value)[:12]}…{value[len(digest):]}"
    text = "none" if value in (None, "") else to_one_line(value) if isinstance(value, str) else to_one_line(repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


MAX_BYTES = 128 << 20


class RotatingEventLog:
    """`events.jsonl` of a process without an end. A full file becomes `events.1.jsonl`, in place of the one before."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._log = EventLog(path)

    def emit(self, event: Event, opening: Event) -> None:
        """Append an event; `opening` is the first event of every file, without which the others could not be read. The
        file may have been emptied meanwhile."""
        num_bytes = self._path.stat().st_size
        if num_bytes and num_bytes + len(event.to_json()) + 1 > self._max_bytes:
            self._log.close()
            self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._log = EventLog(self._path)
            num_bytes = 0
        if not num_bytes and opening is not event:
            self._log.emit(opening)
        self._log.emit(event)

    def close(self) -> None:
        self._log.close()
