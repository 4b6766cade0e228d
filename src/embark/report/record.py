"""What the events of a run say, gathered in one pass and in bounded memory however many they are."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from embark.events.events import Change, Event, NewestEvents, changes_of, parse_event
from embark.events.metrics import DYNAMIC_METRICS
from embark.events.monitoring import SLOW_RANK
from embark.events.quality import Quality
from embark.events.spending import Attempt, Interruption, Spending, attempts, interruptions, spending
from embark.events.traffic import TrafficRecord
from embark.formatting import strip_control_chars, to_finite
from embark.store import EVENTS
from embark.values import JsonDict, JsonMap, frozen
from .rows import Rows
from .run_files import RunFiles, Tail

CURVES = ("loss", "auc", "normalized_entropy", "samples_per_s", "step_s", "learning_rate", "log_loss", "calibration")
EVALS = ("auc", "normalized_entropy", "log_loss", "calibration", "eval_s")
PHASES = ("input", "copy", "lookup", "all_to_all", "dense", "optimizer", "other")
HOST = ("cpu_percent", "resident_bytes", "host_used_bytes", "host_bytes", "net_in_bytes_per_s", "net_out_bytes_per_s",
        "disk_read_bytes_per_s", "disk_write_bytes_per_s")
GPU = ("util_percent", "used_bytes", "total_bytes", "power_w", "temperature_c")
MAX_MILESTONES = 4000  # The oldest of more are dropped.
MAX_GAPS = 256
MAX_RANKS = 4096
FUTURE_S = 60.0  # Seconds that another machine's clock may be ahead.
_FIRST_STEPS, _LAST_STEPS = 4, 16
_MILESTONES = frozenset({"begin", "start", "plan", "predict", "note", "eval", "save", "resume", "warm_start", "change",
                         "interrupt", "end", "error"})
_NEWEST = frozenset({"save", "end", "error", "interrupt", "plan", "predict"})


@frozen
class Save:
    """A checkpoint, when it was written."""

    step: int
    time_s: float
    size_bytes: float | None
    save_s: float | None


class Record(NewestEvents):
    """The newest event of each kind, the numbers of the curves, and what happened when.

    Unknown events, and values that are no numbers, are skipped.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__()
        self.systems: Sequence[JsonMap] = ()  # One a machine, of the newest `ranks` event.
        self.rank_times_s: tuple[float, ...] = ()  # A step's time by rank, of the newest `ranks` event.
        self.steps = Rows(CURVES)
        self.evals = Rows(EVALS)
        self.phases = Rows(PHASES, max_rows=1 << 14)
        self.ranks = Rows(max_rows=1 << 13)  # `step_s.0`, `input_s.0` and so on for each rank.
        self.own = Rows(max_rows=1 << 13)
        """`own_s.0` and so on: a rank's step without its wait for the others, measured less often."""
        self.tables = Rows(max_rows=1 << 13)  # `id_hit_rate.user` and so on, of dynamic tables.
        self.machines = Rows(max_rows=1 << 13)  # `0.cpu_percent` of a host, `0.gpu.3.util_percent` of its GPU.
        self.longest_gap_s = 0.0  # Longest time between two events of one attempt.
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.num_events = 0
        self.num_bad_lines = 0
        self.num_notes = 0
        self.quality = Quality()
        self._gaps_s: deque[float] = deque(maxlen=MAX_GAPS)
        self._milestones: deque[Event] = deque(maxlen=MAX_MILESTONES)
        self._last_steps: deque[Event] = deque(maxlen=_LAST_STEPS)
        self._last_event: Event | None = None
        self._num_steps_seen = 0
        for event in events:
            self.add(event)

    def add(self, event: Event, now_s: float = math.inf) -> None:
        """Add the next event, in the order of the file. A time after `now_s` is another clock's mistake."""
        self.num_events += 1
        self.quality.add(event)
        if event.time_s <= now_s + FUTURE_S:
            self._add_time(event.kind, event.time_s)
        if event.kind == "step":
            self._add_step(event)
        elif event.kind == "ranks":
            self._add_ranks(event)
        elif event.kind == "phases":
            self._add_phases(event)
        elif event.kind in _MILESTONES:
            self._add_milestone(event)
        self._last_event = event if event.kind in ("ranks", "phases") else None

    def add_line(self, line: bytes, now_s: float) -> None:
        event = parse_event(line)
        try:
            if event is not None:
                self.add(event, now_s)
            elif line.strip():
                self.num_bad_lines += 1
        except (ValueError, TypeError, OverflowError, AttributeError):
            self.num_bad_lines += 1

    @property
    def traffic(self) -> TrafficRecord:
        """The traffic of a server; false where the run is none."""
        return self.quality.traffic

    @property
    def milestones(self) -> list[Event]:
        """Everything but steps and measurements; of the steps, the first and last between them."""
        return [*self._milestones, *self._since_milestone()]

    def _since_milestone(self) -> list[Event]:
        return [*self._last_steps, *([self._last_event] if self._last_event else [])]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self._milestones if event.kind == kind]

    @property
    def saves(self) -> list[Save]:
        read = [(to_finite(event.values.get("step")), event) for event in self.of_kind("save")]
        return [Save(int(step), event.time_s, to_finite(event.values.get("bytes")),
                     to_finite(event.values.get("save_s"))) for step, event in read if step is not None]

    @property
    def error_text(self) -> str:
        return strip_control_chars(self.error.get("text") or "unknown error") if self.error else ""

    def changes(self) -> list[Change]:
        """Return the changes of settings or data that were accepted on resume."""
        return changes_of(self._milestones)

    def attempts(self) -> list[Attempt]:
        return attempts(self.milestones)

    def interruptions(self) -> tuple[Interruption, ...]:
        return interruptions(self.attempts())

    def spending(self, usd_per_hour: float | None = None, now_s: float | None = None) -> Spending | None:
        """Return what the run has cost; `now_s` where it is still running."""
        return spending(self.milestones, usd_per_hour=usd_per_hour, now_s=now_s)

    @property
    def steps_done(self) -> int:
        found = [to_finite(values.get("step")) for values in (self.end, self.interrupt, self.step, self.save)]
        first = to_finite(self.start.get("first_step")) or 0.0
        return int(max([first, *(step for step in found if step is not None)]))

    @property
    def num_samples(self) -> float:
        """Samples that the model was trained on; repeated steps count once."""
        return self.steps_done * (to_finite(self.start.get("batch_size")) or 0.0)

    @property
    def samples_per_s(self) -> float | None:
        """The rate of the complete run where it had one attempt, else the median."""
        overall = to_finite(self.end.get("samples_per_s")) if len(self.of_kind("start")) == 1 else None
        return overall if overall is not None else self.median("samples_per_s")

    @property
    def held_s(self) -> float:
        """Machine time, as `embark cost` counts it."""
        spent = self.spending()
        return spent.held_s if spent else 0.0

    @property
    def step_s(self) -> float | None:
        """The usual time of a step."""
        total = to_finite(self.end.get("step_s"))
        return total if total is not None else self.median("step_s", 50)

    def median(self, name: str, num_rows: int = 1 << 30) -> float | None:
        """Return the median of a curve's newest rows; the first holds warm-up, and counts only where it is the only
        one."""
        values = self.steps.last(num_rows)[name]
        values = values[np.isfinite(values)]
        return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else None

    @property
    def seconds_left(self) -> float | None:
        """Time left at the pace of the last steps, evaluations and saves included."""
        if self.end or not self.num_steps:
            return None
        last = self.steps.last(50)
        known = np.isfinite(last["step"]) & np.isfinite(last["time_s"])
        if starts := self.of_kind("start"):
            known &= last["time_s"] >= starts[-1].time_s
        steps, times = last["step"][known], last["time_s"][known]
        if len(steps) > 1 and steps[-1] > steps[0] and times[-1] > times[0]:
            return float(max(0, self.num_steps - steps[-1]) * (times[-1] - times[0]) / (steps[-1] - steps[0]))
        step_s = self.step_s
        return None if step_s is None else self.steps_to_do * step_s

    @property
    def usual_gap_s(self) -> float:
        """Median seconds between two events."""
        return float(np.median(self._gaps_s)) if self._gaps_s else 0.0

    @property
    def usual_save_gap_s(self) -> float:
        """Median seconds between two checkpoints, which is when the events of a remote run arrive."""
        times = [event.time_s for event in self._milestones if event.kind in ("start", "save")]
        gaps = [after - before for before, after in pairwise(times) if after > before]
        return float(np.median(gaps)) if gaps else 0.0

    def _add_time(self, kind: str, time_s: float) -> None:
        if kind not in ("begin", "start") and self.last_s is not None and time_s > self.last_s:
            self._gaps_s.append(time_s - self.last_s)
            self.longest_gap_s = max(self.longest_gap_s, time_s - self.last_s)
        self.first_s = time_s if self.first_s is None else min(self.first_s, time_s)
        self.last_s = time_s if self.last_s is None else max(self.last_s, time_s)

    def _add_step(self, event: Event) -> None:
        self.step = event.values
        get = event.values.get
        self.steps.add((get("step"), event.time_s, *[get(name) for name in CURVES]))
        by_table = {f"{name}.{table}": value for name in DYNAMIC_METRICS
                    if isinstance(of_tables := get(name), Mapping) for table, value in of_tables.items()}
        if by_table:
            self.tables.add_named(get("step"), event.time_s, by_table)
        self._num_steps_seen += 1
        (self._milestones if self._num_steps_seen <= _FIRST_STEPS else self._last_steps).append(event)

    def _add_milestone(self, event: Event) -> None:
        values, kind = event.values, event.kind
        self._milestones.extend(self._since_milestone() if kind in ("begin", "start") else
                                list(self._last_steps)[-1:])
        self._last_steps.clear()
        self._milestones.append(event)
        if kind in _NEWEST:
            setattr(self, kind, values)
        elif kind == "begin":
            self.end = self.error = self.interrupt = {}
        elif kind == "start":
            self.start = values
            self.end = self.error = self.interrupt = {}
            self._num_steps_seen = 0
            self._resume_from(to_finite(values.get("first_step")) or 0.0)
        elif kind == "resume":
            self._resume_from(to_finite(values.get("step")) or 0.0)
        elif kind == "eval":
            self.add_eval(values)
            self.evals.add((values.get("step"), event.time_s, *(values.get(name) for name in EVALS)))
        elif kind == "note":
            self.num_notes += 1

    def _resume_from(self, step: float) -> None:
        for rows in (self.steps, self.evals, self.phases, self.ranks, self.own, self.tables, self.machines):
            rows.begin_again(step)
        if (last := to_finite(self.step.get("step"))) is not None and last > step:
            self.step = {**self.step, "step": step}
        if (saved := to_finite(self.save.get("step"))) is not None and saved > step:
            self.save = {}

    def _add_phases(self, event: Event) -> None:
        seconds, own_s = event.values.get("seconds"), event.values.get("own_s")
        if isinstance(seconds, Mapping):
            self.phases.add((event.values.get("step"), event.time_s, *(seconds.get(name) for name in PHASES)))
        if isinstance(own_s, list) and own_s:
            self.own.add_named(event.values.get("step"), event.time_s,
                               {f"own_s.{rank}": own for rank, own in enumerate(own_s[:MAX_RANKS])})

    def _add_ranks(self, event: Event) -> None:
        values = event.values
        by_rank = {f"{name}.{rank}": seconds for name in ("step_s", "input_s") if isinstance(values.get(name), list)
                   for rank, seconds in enumerate(values[name][:MAX_RANKS])}
        if by_rank:
            self.ranks.add_named(values.get("step"), event.time_s, by_rank)
            times = [to_finite(seconds) for name, seconds in by_rank.items() if name.startswith("step_s.")]
            known = tuple(seconds for seconds in times if seconds is not None)
            self.rank_times_s = known if len(known) == len(times) else ()
        if not isinstance(values.get("systems"), list):
            return
        self.systems = [system for system in values["systems"][:MAX_RANKS] if isinstance(system, Mapping)]
        measured: JsonDict = {}
        for host, system in enumerate(self.systems):
            measured |= {f"{host}.{name}": system[name] for name in HOST if name in system}
            for gpu in gpus_of(system):
                index = to_finite(gpu.get("index", 0))
                if index is not None and 0 <= index < MAX_RANKS:
                    measured |= {f"{host}.gpu.{int(index)}.{name}": gpu[name] for name in GPU if name in gpu}
        if measured:
            self.machines.add_named(values.get("step"), event.time_s, measured)


def read_record(files: RunFiles) -> Record:
    """Read all events that a run has written; empty where there are none."""
    record, tail = Record(), Tail(files, EVENTS)
    while True:
        read = tail.look()
        if read.is_new:
            record = Record()
        for line in read.lines:
            record.add_line(line, time.time())
        if read.is_end:
            return record


def gpus_of(system: JsonMap) -> list[JsonMap]:
    gpus = system.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []


def slow_ranks(times_s: Mapping[int, float], least_s: float = 0.0) -> dict[int, float]:
    """Return the ranks that the others wait for, and the others' usual time.

    With few ranks, a slow one moves the median itself, so each is compared with the median of the others.
    """
    ranks = np.array(list(times_s))
    times = np.array(list(times_s.values()))
    if len(times) < 2:
        return {}
    found = {}
    for at in np.flatnonzero(times > np.median(times)):
        others_s = float(np.median(np.delete(times, at)))
        if times[at] > SLOW_RANK * others_s and times[at] - others_s > least_s:
            found[int(ranks[at])] = others_s
    return found
