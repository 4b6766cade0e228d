"""What the events of one run have told so far, in a bounded room however long they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from embark.events.events import Event
from embark.formatting import to_finite
from embark.report.rows import Rows

CURVES = ("loss", "auc", "normalized_entropy", "samples_per_s", "step_s", "learning_rate", "log_loss", "calibration")
EVALS = ("auc", "normalized_entropy", "log_loss", "calibration", "eval_s")
PHASES = ("input", "copy", "lookup", "all_to_all", "dense", "optimizer", "other")
HOST = ("cpu_percent", "resident_bytes", "host_used_bytes", "host_bytes", "net_in_bytes_per_s", "net_out_bytes_per_s",
        "disk_read_bytes_per_s", "disk_write_bytes_per_s")
GPU = ("util_percent", "used_bytes", "total_bytes", "power_w", "temperature_c")
MAX_TOLD = 4000
"""Of the events that are kept one by one; of more, the oldest are let go."""
MAX_GAPS = 256
MAX_RANKS = 4096
FUTURE_S = 60.0
"""A clock may be that far ahead of ours before its times are doubted."""
_FIRST_STEPS = 4
_KEPT = frozenset({"start", "plan", "predict", "note", "eval", "save", "resume", "interrupt", "end", "error"})


class Story:
    """The newest of each kind of event, the numbers of the curves, and what happened when."""

    def __init__(self) -> None:
        self.start: Mapping[str, Any] = {}
        self.step: Mapping[str, Any] = {}
        self.eval: Mapping[str, Any] = {}
        self.save: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.error: Mapping[str, Any] = {}
        self.interrupt: Mapping[str, Any] = {}
        self.plan: Mapping[str, Any] = {}
        self.predict: Mapping[str, Any] = {}
        self.systems: Sequence[Mapping[str, Any]] = ()
        """Of the newest `ranks` event."""
        self.steps = Rows(CURVES)
        self.evals = Rows(EVALS)
        self.phases = Rows(PHASES, max_rows=1 << 14)
        self.ranks = Rows(max_rows=1 << 13)
        """`step_s.0`, `input_s.0` and so on for each rank."""
        self.own = Rows(max_rows=1 << 13)
        """`own_s.0` and so on: a rank's step without its wait for the others, measured less often."""
        self.machines = Rows(max_rows=1 << 13)
        """`0.cpu_percent` of a host, `0.gpu.3.util_percent` of its GPU."""
        self.gaps_s: deque[float] = deque(maxlen=MAX_GAPS)
        """Between an event and the next, of late."""
        self.longest_gap_s = 0.0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.num_events = 0
        self.num_bad_lines = 0
        self.sessions: list[list[float]] = []
        """When each start was, and the last event after it."""
        self._told: deque[Event] = deque(maxlen=MAX_TOLD)
        self._last_step: Event | None = None
        self._steps_since = 0
        self._take = {"step": self._take_step, "ranks": self._take_ranks, "phases": self._take_phases}

    def take(self, event: Event, now_s: float) -> None:
        """One more, in the order they stand in the file."""
        self.num_events += 1
        time_s = event.time_s
        if time_s <= now_s + FUTURE_S:
            self._mark_time(event.kind, time_s)
        self._take.get(event.kind, self._take_rare)(event)

    @property
    def told(self) -> list[Event]:
        """The events that happen seldom, and of the steps the first and last between them."""
        return [*self._told, *([self._last_step] if self._last_step else [])]

    @property
    def steps_done(self) -> int:
        found = [to_finite(values.get("step")) for values in (self.end, self.interrupt, self.step, self.save)]
        first = to_finite(self.start.get("first_step")) or 0.0
        return int(max([first, *(step for step in found if step is not None)]))

    @property
    def num_steps(self) -> int:
        return int(to_finite(self.start.get("num_steps")) or 0)

    @property
    def step_s(self) -> float | None:
        """A step's usual time, of late."""
        if (told := to_finite(self.end.get("step_s"))) is not None:
            return told
        times = self.steps.last(50)["step_s"]
        times = times[np.isfinite(times)]
        return float(np.median(times)) if len(times) else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last points, evaluations and saves included."""
        if self.end or not self.num_steps:
            return None
        last = self.steps.last(50)
        known = np.isfinite(last["step"]) & np.isfinite(last["time_s"])
        steps, times = last["step"][known], last["time_s"][known]
        if len(steps) > 1 and self.sessions:
            kept = times >= self.sessions[-1][0]
            steps, times = steps[kept], times[kept]
        if len(steps) > 1 and steps[-1] > steps[0] and times[-1] > times[0]:
            return float(max(0, self.num_steps - steps[-1]) * (times[-1] - times[0]) / (steps[-1] - steps[0]))
        step_s = self.step_s
        return None if step_s is None else max(0, self.num_steps - self.steps_done) * step_s

    @property
    def usual_gap_s(self) -> float | None:
        """Between two events."""
        return float(np.median(self.gaps_s)) if self.gaps_s else None

    @property
    def usual_save_gap_s(self) -> float | None:
        """Between two checkpoints, which is when a run far away shows its events."""
        times = [event.time_s for event in self._told if event.kind in ("start", "save")]
        gaps = [after - before for before, after in pairwise(times) if after > before]
        return float(np.median(gaps)) if gaps else None

    def _mark_time(self, kind: str, time_s: float) -> None:
        if kind == "start":
            self.sessions.append([time_s, time_s])
        elif self.last_s is not None and time_s > self.last_s:
            self.gaps_s.append(time_s - self.last_s)
            self.longest_gap_s = max(self.longest_gap_s, time_s - self.last_s)
        self.first_s = time_s if self.first_s is None else min(self.first_s, time_s)
        self.last_s = time_s if self.last_s is None else max(self.last_s, time_s)
        if self.sessions:
            self.sessions[-1][1] = max(self.sessions[-1][1], time_s)

    def _take_step(self, event: Event) -> None:
        values = event.values
        self.step = values
        get = values.get
        self.steps.add((get("step"), event.time_s, *[get(name) for name in CURVES]))
        self._steps_since += 1
        if self._steps_since <= _FIRST_STEPS:
            self._told.append(event)
        else:
            self._last_step = event

    def _take_rare(self, event: Event) -> None:
        if event.kind not in _KEPT:
            return
        if self._last_step is not None:
            self._told.append(self._last_step)
            self._last_step = None
        self._told.append(event)
        values, kind = event.values, event.kind
        if kind == "start":
            self._begin(values)
        elif kind == "resume":
            self._go_on_from(to_finite(values.get("step")) or 0.0)
        elif kind == "eval":
            self.eval = values
            self.evals.add((values.get("step"), event.time_s, *(values.get(name) for name in EVALS)))
        elif kind in ("save", "end", "error", "interrupt", "plan", "predict"):
            setattr(self, kind, values)

    def _begin(self, values: Mapping[str, Any]) -> None:
        self.start = values
        self.end = self.error = self.interrupt = {}
        self._steps_since = 0
        self._go_on_from(to_finite(values.get("first_step")) or 0.0)

    def _go_on_from(self, step: float) -> None:
        for rows in (self.steps, self.evals, self.phases, self.ranks, self.own, self.machines):
            rows.begin_again(step)
        if (told := to_finite(self.step.get("step"))) is not None and told > step:
            self.step = {**self.step, "step": step}
        if (saved := to_finite(self.save.get("step"))) is not None and saved > step:
            self.save = {}

    def _take_phases(self, event: Event) -> None:
        seconds = event.values.get("seconds")
        if isinstance(seconds, Mapping):
            self.phases.add((event.values.get("step"), event.time_s, *(seconds.get(name) for name in PHASES)))
        own_s = event.values.get("own_s")
        if isinstance(own_s, list) and own_s:
            told = {f"own_s.{rank}": own for rank, own in enumerate(own_s[:MAX_RANKS])}
            self.own.add_named(event.values.get("step"), event.time_s, told)

    def _take_ranks(self, event: Event) -> None:
        values = event.values
        told = {f"{name}.{rank}": seconds for name in ("step_s", "input_s") if isinstance(values.get(name), list)
                for rank, seconds in enumerate(values[name][:MAX_RANKS])}
        if told:
            self.ranks.add_named(values.get("step"), event.time_s, told)
        systems = values.get("systems")
        if not isinstance(systems, list):
            return
        self.systems = [system for system in systems[:MAX_RANKS] if isinstance(system, Mapping)]
        measured: dict[str, Any] = {}
        for at, system in enumerate(self.systems):
            measured |= {f"{at}.{name}": system[name] for name in HOST if name in system}
            gpus = system.get("gpus")
            for gpu in gpus if isinstance(gpus, list) else ():
                index = to_finite(gpu.get("index", 0)) if isinstance(gpu, Mapping) else None
                if index is not None and 0 <= index < MAX_RANKS:
                    measured |= {f"{at}.gpu.{int(index)}.{name}": gpu[name] for name in GPU if name in gpu}
        if measured:
            self.machines.add_named(values.get("step"), event.time_s, measured)
