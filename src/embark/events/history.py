"""What the events of one run say so far, for the terminal of the process that trains."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from embark.events.curve import Point, Series
from embark.events.events import Event
from embark.formatting import to_finite

PACE_S = 30.0
"""The time left is estimated from the steps of the last so many seconds."""


class History:
    """The newest of each kind of event, the points of the curves, and the pace."""

    def __init__(self) -> None:
        self.start: Mapping[str, Any] = {}
        self.step: Mapping[str, Any] = {}
        self.eval: Mapping[str, Any] = {}
        self.save: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.predict: Mapping[str, Any] = {}
        self.interrupt: Mapping[str, Any] = {}
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

    def add(self, event: Event) -> None:
        values, kind = event.values, event.kind
        step = to_finite(values.get("step"))
        if kind in ("start", "eval", "save", "predict", "interrupt", "end", "step"):
            setattr(self, kind, values)
        if kind == "start":
            self.steps_done = int(to_finite(values.get("first_step")) or 0)
        elif kind == "progress":
            self._tick(event)
            self.step = {**self.step, **values}
        elif kind == "step":
            self._tick(event)
            for series, name in ((self.loss, "loss"), (self.auc, "auc")):
                if step is not None and (value := to_finite(values.get(name))) is not None:
                    series.add(step, value)
        elif kind == "eval":
            for points, name in ((self.eval_loss, "log_loss"), (self.eval_auc, "auc")):
                if step is not None and (value := to_finite(values.get(name))) is not None:
                    points.append((step, value))
        elif kind in ("resume", "end"):
            self.steps_done = int(step or (self.steps_done if kind == "end" else 0))
        if kind in ("eval", "save"):
            self._ticks.clear()  # their time says nothing about the steps to come

    def _tick(self, event: Event) -> None:
        self.steps_done = int(to_finite(event.values.get("step")) or self.steps_done)
        self._ticks.append((event.time_s, self.steps_done))
        while event.time_s - self._ticks[0][0] > PACE_S and len(self._ticks) > 2:
            self._ticks.popleft()
        (t0, first), (t1, last) = self._ticks[0], self._ticks[-1]
        if last > first and t1 > t0:
            self.seconds_left = self.steps_to_do * (t1 - t0) / (last - first)
