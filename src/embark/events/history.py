"""What the events of one run have said so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from embark.events.curve import Point, Series
from embark.events.events import Event
from embark.formatting import to_finite

PACE_S = 30.0
"""The time left is told from the steps of the last so many seconds."""


class History:
    """The newest of each kind of event, the points of the curves, and the pace."""

    def __init__(self) -> None:
        self.start: Mapping[str, Any] = {}
        self.step: Mapping[str, Any] = {}
        self.eval: Mapping[str, Any] = {}
        self.save: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.predict: Mapping[str, Any] = {}
        self.steps_done = 0
        self.seconds_left: float | None = None
        self.loss = Series()
        self.auc = Series()
        self.eval_loss: list[Point] = []
        self.eval_auc: list[Point] = []
        self._ticks: deque[tuple[float, int]] = deque()

    @property
    def num_steps(self) -> int:
        return int(to_finite(self.start.get("num_steps")) or 0)

    @property
    def steps_to_do(self) -> int:
        return max(0, self.num_steps - self.steps_done)

    def take(self, event: Event) -> None:
        values = event.values
        if event.kind == "start":
            self.start = values
            self.steps_done = int(to_finite(values.get("first_step")) or 0)
        elif event.kind == "progress":
            self._tick(event)
            self.step = {**self.step, **values}
        elif event.kind == "step":
            self._tick(event)
            self.step = values
            _add(self.loss, values, "loss")
            _add(self.auc, values, "auc")
        elif event.kind == "eval":
            self.eval = values
            _append(self.eval_loss, values, "log_loss")
            _append(self.eval_auc, values, "auc")
            self._ticks.clear()  # the time it took says nothing of the steps to come
        elif event.kind == "save":
            self.save = values
            self._ticks.clear()
        elif event.kind == "predict":
            self.predict = values
        elif event.kind == "resume":
            self.steps_done = int(to_finite(values.get("step")) or 0)
        elif event.kind == "end":
            self.end = values
            self.steps_done = int(to_finite(values.get("step")) or self.steps_done)

    def _tick(self, event: Event) -> None:
        self.steps_done = int(to_finite(event.values.get("step")) or self.steps_done)
        self._ticks.append((event.time_s, self.steps_done))
        while event.time_s - self._ticks[0][0] > PACE_S and len(self._ticks) > 2:
            self._ticks.popleft()
        (t0, first), (t1, last) = self._ticks[0], self._ticks[-1]
        if last > first and t1 > t0:
            self.seconds_left = self.steps_to_do * (t1 - t0) / (last - first)


def _add(series: Series, values: Mapping[str, Any], name: str) -> None:
    step, value = to_finite(values.get("step")), to_finite(values.get(name))
    if step is not None and value is not None:
        series.add(step, value)


def _append(points: list[Point], values: Mapping[str, Any], name: str) -> None:
    step, value = to_finite(values.get("step")), to_finite(values.get(name))
    if step is not None and value is not None:
        points.append((step, value))
