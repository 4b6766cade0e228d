"""The logs of many pods or machines as one, by time; tailed through lost connections and replacements."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from embark.launch.backend import LogLine
from embark.launch.shell import CommandResult, LineMultiplexer, LineStream

BATCH_S = 0.25
RETRY_S = 2.0  # Seconds until a stream that ended is opened again.


@dataclass(frozen=True, slots=True)
class LogSource:
    """The log of one pod or machine."""

    key: str  # Changes when the pod is replaced or its container restarts.
    open: Callable[[bool], LineStream]  # Continues where it was last read; True: and tails it.
    parse: Callable[[str], LogLine | None]  # None: it was read before, or is no line of the log.
    on_failure: Callable[[CommandResult], None]  # Raises if trying again is of no use.
    is_final: bool = False  # Nothing is added any more: a stream that ends well has read all of it.


Look = Callable[[], tuple[Sequence[LogSource], bool]]  # The logs there are, and whether the run has ended.


def read_logs(sources: Sequence[LogSource]) -> Iterator[LogLine]:
    """Yield the lines that exist now, by time."""
    return heapq.merge(*map(_read, sources), key=lambda line: line.time_ns)


def tail_logs(look: Look, poll_s: float) -> Iterator[LogLine]:
    """Yield new lines until the run has ended and all of them are read."""
    streams = LineMultiplexer()
    sources: dict[str, LogSource] = {}
    complete: set[str] = set()
    not_before_s: dict[str, float] = {}
    try:
        while True:
            current, is_over = look()
            sources.update({source.key: source for source in current})
            until_s = time.monotonic() + poll_s
            has_ended = False
            while time.monotonic() < until_s and not (has_ended and not streams.is_busy):
                for key in (source.key for source in current):
                    is_open = key in complete or key in streams
                    if not is_open and time.monotonic() >= not_before_s.get(key, 0.0):
                        streams.add(key, sources[key].open(True))
                parsed = [sources[key].parse(text) for key, text in streams.take(BATCH_S)]
                yield from sorted((line for line in parsed if line), key=lambda line: line.time_ns)
                for key, result in streams.ended():
                    has_ended = True
                    not_before_s[key] = time.monotonic() + RETRY_S
                    if not result.is_ok:
                        sources[key].on_failure(result)
                    elif sources[key].is_final:
                        complete.add(key)
            if is_over:
                streams.close()
                yield from read_logs([source for source in look()[0] if source.key not in complete])
                return
    finally:
        streams.close()


def _read(source: LogSource) -> Iterator[LogLine]:
    stream = source.open(False)
    try:
        for text in stream:
            line = source.parse(text)
            if line is not None:
                yield line
        result = stream.wait()
        if not result.is_ok:
            source.on_failure(result)
    finally:
        stream.close()
