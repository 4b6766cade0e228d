"""The logs of many pods as one, by time; followed through lost connections and replaced pods."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from embark.launch.backend import LogLine, split_rank_prefix
from embark.launch.backends.kubernetes.status import Pod
from embark.launch.shell import CommandResult, LineMultiplexer, LineStream

Open = Callable[[Pod, str, bool], LineStream]
"""Pod, `--since-time` or nothing, whether to follow: the program that reads its log."""
Failed = Callable[[Pod, CommandResult], None]
"""Told how a reading failed; raises where trying again is of no use."""
QUIET_S = 0.3
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


@dataclass(slots=True)
class _Seen:
    """How far a pod's log was read: its last line's time, and how many lines had that time."""

    last_ns: int = 0
    num_at_last: int = 0
    to_skip: int = 0
    """Lines of `last_ns` that a new reading brings again."""

    def begin(self) -> str:
        """For `--since-time`: whole seconds, so that some lines come again."""
        self.to_skip = self.num_at_last
        if not self.last_ns:
            return ""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.last_ns // 1_000_000_000))

    def is_new(self, at_ns: int) -> bool:
        if not at_ns or at_ns > self.last_ns:
            self.last_ns, self.num_at_last, self.to_skip = at_ns or self.last_ns, 1, 0
            return True
        if at_ns == self.last_ns:
            if self.to_skip:
                self.to_skip -= 1
                return False
            self.num_at_last += 1
            return True
        return False


class PodLogFollower:
    """Reads the pods' logs once, then goes on with what is new."""

    def __init__(self, open_log: Open, failed: Failed) -> None:
        self._open = open_log
        self._failed = failed
        self._seen: dict[str, _Seen] = {}

    def now(self, pods: Sequence[Pod]) -> Iterator[LogLine]:
        """What there is."""
        started = [pod for pod in pods if pod.has_started]
        yield from heapq.merge(*(self._read(pod) for pod in started), key=lambda line: line.time_ns)

    def on(
        self, list_pods: Callable[[], Sequence[Pod]], is_over: Callable[[], bool], poll_s: float
    ) -> Iterator[LogLine]:
        """What comes, until the run has ended and all of it is read."""
        arriving = LineMultiplexer()
        pods: dict[str, Pod] = {}
        done: set[str] = set()
        try:
            while True:
                over = is_over()
                for pod in list_pods():
                    pods[pod.name] = pod
                    mark = _mark(pod)
                    if pod.has_started and mark not in done and mark not in arriving:
                        seen = self._seen.setdefault(pod.name, _Seen())
                        arriving.add(mark, self._open(pod, seen.begin(), True))
                until_s = time.monotonic() + poll_s
                while True:
                    yield from self._take(arriving, pods)
                    for mark, ended in arriving.ended():
                        pod = pods[mark.partition(" ")[0]]
                        # One that ended well was read to its end; else it is opened again, from its last line.
                        if not ended.is_ok:
                            self._failed(pod, ended)
                        elif pod.phase != "Running":
                            done.add(mark)
                    if time.monotonic() >= until_s or (over and not arriving.is_busy):
                        break
                if over and not arriving.is_busy:
                    yield from self.now([p for p in list_pods() if _mark(p) not in done])
                    return
        finally:
            arriving.close()

    def _take(self, arriving: LineMultiplexer, pods: dict[str, Pod]) -> list[LogLine]:
        found = []
        for mark, text in arriving.take(QUIET_S):
            pod = pods[mark.partition(" ")[0]]
            line = line_of(pod, text)
            if self._seen.setdefault(pod.name, _Seen()).is_new(line.time_ns):
                found.append(line)
        return sorted(found, key=lambda line: line.time_ns)

    def _read(self, pod: Pod) -> Iterator[LogLine]:
        seen = self._seen.setdefault(pod.name, _Seen())
        lines = self._open(pod, seen.begin(), False)
        try:
            for text in lines:
                line = line_of(pod, text)
                if seen.is_new(line.time_ns):
                    yield line
            ended = lines.wait()
            if not ended.is_ok:
                self._failed(pod, ended)
        finally:
            lines.close()


def line_of(pod: Pod, text: str) -> LogLine:
    """Of `kubectl logs --timestamps`."""
    stamp, _, rest = text.partition(" ")
    at_ns = time_ns(stamp)
    return split_rank_prefix(LogLine(at_ns, pod.name, rest if at_ns else text, pod.index))


def time_ns(stamp: str) -> int:
    """`2026-11-15T09:14:59.123456789Z` since 1970; 0 for anything else."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return 0
    whole, digits, zone = match.groups()
    try:
        at = datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone))
    except ValueError:
        return 0
    return int(at.timestamp()) * 1_000_000_000 + int((digits or "").ljust(9, "0")[:9])


def _mark(pod: Pod) -> str:
    return f"{pod.name} {pod.uid} {pod.num_container_starts}"
