"""What is measured: the metrics of `metrics.toml`, their readings in events, and those of several tasks as rows of
text."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from embark.formatting import MISSING, format_count, format_float, to_finite, to_float, to_one_line
from embark.values import JsonDict, JsonMap, frozen, read_table
from .events import Event

Kind = Literal["gauge", "counter"]
Labels = tuple[tuple[str, str], ...]  # Names and values, in the order of the metric's `labels`.
Parts = tuple[tuple[str, str], ...]  # Fields and their labels; no label where the field is the value or contains it.

ENDS = frozenset({"end", "error", "interrupt"})
SPLITS = {"step": "train", "eval": "eval"}
_PART = re.compile(r"(?P<field>\w+)(?:\[(?P<label>\w+)\])?")
_NAMED_BY = {"host": "host", "gpu": "index"}
"""The field that names a row of a list; a plain number in a list is named by its index."""


@frozen
class Metric:
    """One measured quantity, named as it stands in events and in TensorBoard."""

    name: str
    label: str  # Name for people to read.
    meaning: str
    paths: tuple[str, ...]
    """Where events have it: `step.loss` is the value `loss` of `step` events. `ranks.systems[host].gpus[gpu].power_w`
    goes through lists or maps whose entries are distinguished by the labels in brackets. `#save` counts events."""
    group: str  # The heading it is shown under.
    unit: str = ""  # Empty for a plain number.
    better: Literal["up", "down"] | None = None  # `None` if neither direction is better.
    kind: Kind = "gauge"  # A counter only grows.

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that distinguish its several values in one run; `split` is `train` or `eval`."""
        inner = tuple(part.partition("]")[0] for part in self.paths[0].split("[")[1:])
        return ("split", *inner) if self.has_splits else inner

    @property
    def has_splits(self) -> bool:
        return {path.partition(".")[0] for path in self.paths} >= {"step", "eval"}


_TABLE = read_table(__file__, "metrics.toml")
METRICS = tuple(Metric(**{**row, "paths": tuple(row["paths"])}) for row in _TABLE["metric"])
GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS))
TRAINING_GROUPS = tuple(group for group in GROUPS if group not in ("The run", "Served traffic"))
"""Groups that a dashboard of training shows over time."""
DYNAMIC_METRICS = tuple(metric.name for metric in METRICS if metric.group == "Dynamic tables")
UNITS: dict[str, dict[str, str]] = _TABLE["units"]  # Our units as each service names them.
_BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """Return the metric of this name; None for a value that is not one, such as `step` or `path`."""
    return _BY_NAME.get(name)


def metric(name: str) -> Metric:
    """Return the metric of this name, which must exist."""
    return _BY_NAME[name]


@frozen
class Reading:
    """One number at one time."""

    metric: Metric
    labels: Labels
    value: float
    time_s: float


def readings(event: Event, *, null_is_nan: bool = False) -> Iterator[Reading]:
    """Yield every metric of an event. In events from a file, a null among the learning metrics was a NaN."""
    for metric, parts, first in _PATHS.get(event.kind, ()):
        for labels, found in _values(event.values, parts, first):
            is_nan = found is None and null_is_nan and metric.group in ("Learning", "Tasks")
            value = math.nan if is_nan else to_float(found)
            if value is not None:
                yield Reading(metric, labels, value, event.time_s)


class Latest:
    """The newest value of every metric of a run, and how often things happened."""

    def __init__(self, events: Iterable[Event] = (), *, null_is_nan: bool = False) -> None:
        self._null_is_nan = null_is_nan
        self._newest: dict[tuple[str, Labels], Reading] = {}
        self._counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._is_running = False
        self._time_s: float | None = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        for reading in readings(event, null_is_nan=self._null_is_nan):
            self._newest[reading.metric.name, reading.labels] = reading
        if event.kind in self._counts:
            self._counts[event.kind] += 1
        if event.kind == "start":
            self._drop_machines()
        if event.kind != "note":
            self._is_running = event.kind not in ENDS
        self._time_s = event.time_s if self._time_s is None else max(self._time_s, event.time_s)

    def readings(self) -> Iterator[Reading]:
        """Yield the newest readings in the order of the list of metrics."""
        if self._time_s is None:
            return
        by_name: dict[str, list[Reading]] = {}
        for reading in self._newest.values():
            by_name.setdefault(reading.metric.name, []).append(reading)
        for metric in METRICS:
            path = metric.paths[0]
            if path.startswith("#"):
                yield Reading(metric, (), float(self._counts[path[1:]]), self._time_s)
            elif path == "@running":
                yield Reading(metric, (), float(self._is_running), self._time_s)
            elif path == "@time":
                yield Reading(metric, (), self._time_s, self._time_s)
            else:
                yield from by_name.get(metric.name, ())

    def _drop_machines(self) -> None:
        """Forget ranks and machines: a new attempt may have fewer of them, and others."""
        self._newest = {key: one for key, one in self._newest.items() if not {"rank", "host"} & set(one.metric.labels)}


def _values(held: Any, parts: Parts, labels: Labels) -> Iterator[tuple[Labels, Any]]:
    if not parts:
        yield labels, held
        return
    (field, label), rest = parts[0], parts[1:]
    if not isinstance(held, Mapping) or field not in held:
        return
    inner = held[field]
    if not label:
        yield from _values(inner, rest, labels)
    elif isinstance(inner, Mapping):
        for key, value in inner.items():
            yield from _values(value, rest, (*labels, (label, str(key))))
    elif isinstance(inner, list | tuple):
        for index, value in enumerate(inner):
            named = value.get(_NAMED_BY.get(label, label), index) if isinstance(value, Mapping) else index
            if not (value is None and not rest):  # a rank without a value
                yield from _values(value, rest, (*labels, (label, str(named))))


def _read_paths() -> dict[str, list[tuple[Metric, Parts, Labels]]]:
    """Return the metrics of each kind of event and the way to each."""
    found: dict[str, list[tuple[Metric, Parts, Labels]]] = {}
    for metric in METRICS:
        for path in metric.paths:
            if path[0] in "#@":
                continue
            kind, _, fields = path.partition(".")
            parts = tuple((part["field"], part["label"] or "") for part in _PART.finditer(fields))
            first: Labels = (("split", SPLITS[kind]),) if metric.has_splits else ()
            found.setdefault(kind, []).append((metric, parts, first))
    return found


_PATHS = _read_paths()
_COUNTED = tuple(metric.paths[0][1:] for metric in METRICS if metric.paths[0].startswith("#"))


TASK_PREFIX = "task_"
_SHOWN = {metric.name.removeprefix(TASK_PREFIX): metric for metric in METRICS
          if metric.name.startswith(TASK_PREFIX) and not metric.name.startswith(f"{TASK_PREFIX}best_")}


@frozen
class TaskRow:
    """One metric of one task."""

    task: str
    metric: str
    held_out: str
    ceiling: str  # The value that the true probabilities of synthetic data reach.
    train: str


def task_rows(held: JsonMap, step: JsonMap) -> list[TaskRow]:
    """Return rows from the newest evaluation and the newest training window, task by task."""
    trained = dict(_tasks(step))
    rows = []
    for name, of_task in _tasks(held) if "tasks" in held else trained.items():
        of_step = trained.get(name, {})
        for key, metric in _SHOWN.items():
            if key in of_task:
                ceiling = to_finite(of_task.get(f"best_{key}"))
                rows.append(TaskRow(name, metric.label, format_float(of_task[key]) if "tasks" in held else MISSING,
                                    MISSING if ceiling is None else format_float(ceiling),
                                    format_float(of_step.get(key))))
    return rows


def _tasks(values: JsonMap) -> Iterator[tuple[str, JsonMap]]:
    found = values.get("tasks")
    for name, of_task in found.items() if isinstance(found, Mapping) else ():
        if isinstance(of_task, Mapping):
            yield to_one_line(name), of_task


def ranking_rows(rankings: Mapping[str, Mapping[str, float]]) -> list[JsonDict]:
    """Return rows with Hit, NDCG and MRR of the next item at each K, by what the held-out items were ranked among."""
    rows: list[JsonDict] = []
    for name, found in rankings.items():
        among = {"all_items": f"all {format_count(found['num_candidates'])} items",
                 "unseen_items": "items new to the user"}.get(
            name, f"{format_count(found['num_candidates'] - 1)} sampled negatives, for comparison only")
        rows += [{"ranked among": to_one_line(among), "metric": label, **{
            f"@{key.removeprefix(prefix)}": value for key, value in found.items() if key.startswith(prefix)},
            "users": int(found["num_users"])}
            for label, prefix in (("Hit", "hit_at_"), ("NDCG", "ndcg_at_"), ("MRR", "mrr_at_"))]
    return rows
