"""Metrics sent to a service from a separate thread, so that no run waits for it."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from embark.events.events import Event
from embark.events.metrics import Latest, Reading
from embark.formatting import to_one_line

CLOSE_S = 3.0
"""How long the last sending may take before the run ends without it: a preempted machine has little time."""
MAX_CHARS = 200


class Sender(Protocol):
    """A client of one service."""

    def send(self, readings: Sequence[Reading]) -> None:
        """Raises if it fails."""
        ...

    def close(self) -> None: ...


class SendingSink:
    """Sends the newest value of every series that has a new one, every so many seconds and at the end.

    What waits is bounded by the number of series. A failure is reported once, and the next sending tries again.
    """

    def __init__(self, name: str, make: Callable[[], Sender], every_s: float) -> None:
        self._name, self._make, self._every_s = name, make, every_s
        self._latest = Latest()
        self._sent_s: dict[tuple[str, object], float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._problem = ""
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name=f"embark-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._latest.add(event)

    def take_problem(self) -> str:
        """Why sending fails, once."""
        if self._is_reported or not self._problem:
            return ""
        self._is_reported = True
        return f"{self._name} does not receive the metrics; training continues: {self._problem}"

    def hurry(self) -> None:
        """Begin the last sending without waiting for it."""
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
            except Exception as error:  # whatever a service or its client raises must not stop a run
                self._problem = self._problem or to_one_line(f"{type(error).__name__}: {error}")[:MAX_CHARS]
        if sender is not None:
            try:
                sender.close()
            except Exception as error:
                self._problem = self._problem or to_one_line(error)[:MAX_CHARS]

    def _fresh(self) -> list[Reading]:
        with self._lock:
            newest = list(self._latest.readings())
        return [one for one in newest if one.time_s > self._sent_s.get((one.metric.name, one.labels), 0.0)]
