"""Pods of services as processes of this machine: started, started again when they end, and asked whether they are
ready, as a kubelet does it."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from embark.kubernetes.pods import Pod
from embark.launch.shell import LineMultiplexer, LineStream
from embark.rehearse.controller import RESTART_S, Observer
from embark.rehearse.load import LOOPBACK
from embark.rehearse.processes import Processes, Start

MAX_STARTS = 3  # Of a pod that ends before it is ready.


@dataclass(slots=True)
class RunningPod:
    """One pod, as its kubelet sees it."""

    pod: Pod
    start: Start
    lines: LineStream
    port: int = 0  # 0: it is asked nothing.
    probe: str = ""  # The path of the readiness probe.
    num_starts: int = 1
    is_ready: bool = False
    last_lines: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """Whether a Service sends requests there."""
        return self.is_ready and self.lines.code is None

    def get(self, path: str) -> str | None:
        """What it answers; None where it does not."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def metric(self, name: str) -> list[float]:
        """Its values, of all labels."""
        return [float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([\d.e+-]+)$",
                                                     self.get("/metrics") or "", re.MULTILINE)]


class Kubelet:
    """Of all pods of a rehearsal."""

    def __init__(self, engine: Processes, observer: Observer, until_s: float) -> None:
        """`until_s`: when to give up waiting, by `time.monotonic`."""
        self._engine, self._observer, self._until_s = engine, observer, until_s
        self._output, self._number = LineMultiplexer(), 0
        self.pods: list[RunningPod] = []

    def start(self, pod: Pod, port: int = 0, probe: str = "") -> RunningPod:
        self.pods.append(RunningPod(pod, *self._start(pod), port=port, probe=probe))
        return self.pods[-1]

    def note(self, text: str) -> None:
        """To who observes."""
        self._observer.note(text)

    def kill(self, one: RunningPod) -> None:
        """SIGKILL, without notice."""
        self.note(f"{one.pod.name} is killed under load")
        self._engine.kill(one.start)

    def wait(self, is_so: Callable[[], bool]) -> bool:
        """False: it is too late, or a pod was started too often."""
        while not is_so():
            self.take(0.05)
            self._look()
            if time.monotonic() > self._until_s or any(
                    one.num_starts > MAX_STARTS and not one.is_ready for one in self.pods):
                return False
        return True

    def end(self, pods: list[RunningPod], grace_s: float) -> list[int | None]:
        """SIGTERM to these; their exit codes within the grace period."""
        for one in pods:
            self._engine.term(one.start)
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and any(one.lines.code is None for one in pods):
            self.take(0.05)
        return [one.lines.code for one in pods]

    def take(self, wait_s: float) -> None:
        """Show the lines that have come."""
        for key, text in self._output.take(wait_s):
            found = next(one for one in self.pods if one.pod.name == key.partition("#")[0])
            found.last_lines = [*found.last_lines[-20:], text]
            self._observer.line(found.pod.name, "", text)

    def close(self) -> None:
        self._output.close()

    def _look(self) -> None:
        for one in self.pods:
            if one.lines.code is not None:
                self.note(f"{one.pod.name} ended with {one.lines.code}; it is started again")
                time.sleep(RESTART_S)
                one.start, one.lines = self._start(one.pod)
                one.num_starts, one.is_ready = one.num_starts + 1, False
            elif one.port:
                one.is_ready = one.get(one.probe) is not None if one.probe else True

    def _start(self, pod: Pod) -> tuple[Start, LineStream]:
        start = Start(pod, self._number, 0)
        self._number += 1
        lines = self._engine.start(start)
        self._output.add(start.key, lines)
        return start, lines
