"""The logs of machines as one, by time; followed through cut connections and replaced machines."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from embark.formatting import to_one_line
from embark.launch.backend import LogLine, Notify, split_rank_prefix
from embark.launch.backends.kubernetes.log_follower import time_ns
from embark.launch.backends.vm.ssh import Host, Ssh
from embark.launch.shell import LineMultiplexer, LineStream

QUIET_S = 0.2
AGAIN_S = 2.0
"""Until a connection that ended is made again."""
Look = Callable[[], tuple[Sequence[Host], bool]]
"""The machines that can be read, and whether the run is over."""


@dataclass(slots=True)
class _Place:
    """How far one machine's log was read."""

    born: str = ""
    following_line: int = 0

    def line(self, host: Host, text: str) -> LogLine | None:
        """None of what is no line of the log, or was read before."""
        first, _, rest = text.partition(" ")
        if first == "born":
            if rest != self.born:
                self.born, self.following_line = rest, 0
            return None
        if not first.isdigit() or int(first) < self.following_line:
            return None
        self.following_line = int(first) + 1
        stamp, _, said = rest.partition(" ")
        at_ns = time_ns(stamp)
        return split_rank_prefix(LogLine(at_ns, host.name, said if at_ns else rest, host.index))


class MachineLogs:
    """Reads the machines' logs once, then goes on with what is new."""

    def __init__(self, ssh: Ssh, *, tell: Notify) -> None:
        self._ssh = ssh
        self._tell = tell
        self._places: dict[int, _Place] = {}
        self._is_told: set[int] = set()

    def now(self, hosts: Sequence[Host]) -> Iterator[LogLine]:
        """What there is."""
        yield from heapq.merge(*(self._read(host) for host in hosts), key=lambda line: line.time_ns)

    def on(self, look: Look, poll_s: float) -> Iterator[LogLine]:
        """What comes, until the run is over and all of it is read."""
        arriving = LineMultiplexer()
        hosts: dict[str, Host] = {}
        not_before_s: dict[str, float] = {}
        try:
            while True:
                there, over = look()
                if over:
                    yield from self._take(arriving, hosts, QUIET_S)
                    arriving.close()
                    yield from self.now(there)
                    return
                hosts.update({str(host.index): host for host in there})
                until_s = time.monotonic() + poll_s
                while time.monotonic() < until_s:
                    for host in there:
                        key = str(host.index)
                        if key not in arriving and time.monotonic() >= not_before_s.get(key, 0.0):
                            arriving.add(key, self._open(host, follow=True))
                    yield from self._take(arriving, hosts, QUIET_S)
                    ended = arriving.ended()
                    for key, done in ended:
                        not_before_s[key] = time.monotonic() + AGAIN_S
                        if not done.is_ok and hosts[key].index not in self._is_told:
                            self._is_told.add(hosts[key].index)
                            self._tell(f"the connection to {hosts[key].name} was cut, and is made again: "
                                       f"{to_one_line(done.err)[:200]}")
                    if ended and not arriving.is_busy:
                        break  # it may be over: better asked now than after the whole wait
        finally:
            arriving.close()

    def _open(self, host: Host, *, follow: bool) -> LineStream:
        place = self._places.setdefault(host.index, _Place())
        return self._ssh.read_log(host, place.born, place.following_line, follow=follow)

    def _take(self, arriving: LineMultiplexer, hosts: dict[str, Host], wait_s: float) -> list[LogLine]:
        found = []
        for key, text in arriving.take(wait_s):
            line = self._places[hosts[key].index].line(hosts[key], text)
            if line is not None:
                self._is_told.discard(line.index or 0)
                found.append(line)
        return sorted(found, key=lambda line: line.time_ns)

    def _read(self, host: Host) -> Iterator[LogLine]:
        place = self._places.setdefault(host.index, _Place())
        lines = self._ssh.read_log(host, place.born, place.following_line, follow=False)
        try:
            for text in lines:
                line = place.line(host, text)
                if line is not None:
                    yield line
            ended = lines.wait()
            if not ended.is_ok:
                self._tell(f"the log of {host.name} could not be read: {to_one_line(ended.err)[:300]}")
        finally:
            lines.close()
