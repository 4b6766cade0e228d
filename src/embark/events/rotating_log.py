"""`events.jsonl` of a process without an end: its size and the number of its older files are bounded."""

from pathlib import Path

from embark.events.events import Event, EventLog

MAX_BYTES = 64 << 20
NUM_OLDER = 3


class RotatingEventLog:
    """A full file becomes `events.1.jsonl`, the one before it `events.2.jsonl`, and the oldest is deleted."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, num_older: int = NUM_OLDER) -> None:
        self._path, self._max_bytes, self._num_older = path, max_bytes, num_older
        self._log = EventLog(path)
        self._num_bytes = path.stat().st_size

    def emit(self, event: Event, opening: Event) -> None:
        """`opening`: the first event of every file, without which the others could not be read."""
        num_bytes = len(event.to_json()) + 1
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            self._rotate()
            if opening is not event:
                self._log.emit(opening)
        self._log.emit(event)
        self._num_bytes = self._path.stat().st_size

    def _rotate(self) -> None:
        self._log.close()
        files = [self._path, *(self._path.with_suffix(f".{number}.jsonl") for number in range(1, self._num_older + 1))]
        for older, newer in zip(files[:0:-1], files[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)
        self._log = EventLog(self._path)

    def close(self) -> None:
        self._log.close()
