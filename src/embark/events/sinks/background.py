"""Metrics on their way to somebody else's service: from a thread of their own, so that no run waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from embark.events.events import Event
from embark.events.metrics import Latest, Reading
from embark.formatting import to_one_line

CLOSE_S = 3.0
"""What the last sending may take before the run ends without it: a machine that is taken away gives little time."""
MAX_WORDS = 200


class Sender(Protocol):
    """Knows one service."""

    def send(self, readings: Sequence[Reading]) -> None:
        """Raises where it could not."""
        ...

    def close(self) -> None: ...


class SendingSink:
    """Sends the newest value of every series that has a new one, every so many seconds and at the end.

    What waits to be sent is bounded by the number of series. A failure is kept to be told once; the next sending
    tries again.
    """

    def __init__(self, name: str, make: Callable[[], Sender], every_s: float) -> None:
        self._name, self._make, self._every_s = name, make, every_s
        self._latest = Latest()
        self._sent_s: dict[tuple[str, object], float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._problem = ""
        self._has_told = False
        self._thread = threading.Thread(target=self._run, name=f"embark-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._latest.take(event)

    def take_problem(self) -> str:
        """Why nothing arrives, once."""
        if self._has_told or not self._problem:
            return ""
        self._has_told = True
        return f"{self._name} does not get the metrics, and training goes on: {self._problem}"

    def hurry(self) -> None:
        """Begin the last sending, and do not wait for it."""
        self._stop.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        sender: Sender | None = None
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._every_s)
            try:
                sender = sender or self._make()
                if fresh := self._fresh():
                    sender.send(fresh)
                    self._sent_s |= {(one.metric.name, one.labels): one.time_s for one in fresh}
            except Exception as error:  # whatever a service or its client raises: none of it is worth a run
                self._problem = self._problem or to_one_line(f"{type(error).__name__}: {error}")[:MAX_WORDS]
        if sender is not None:
            try:
                sender.close()
            except Exception as error:
                self._problem = self._problem or to_one_line(error)[:MAX_WORDS]

    def _fresh(self) -> list[Reading]:
        with self._lock:
            newest = list(self._latest.readings())
        return [one for one in newest if one.time_s > self._sent_s.get((one.metric.name, one.labels), 0.0)]
