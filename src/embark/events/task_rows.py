"""The metrics of several tasks as rows of text: what the terminal, the page and the report show of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from embark.events.metrics import METRICS
from embark.formatting import MISSING, format_float, to_finite, to_one_line

PREFIX = "task_"
_MAX_NAME = 40
_SHOWN = {metric.name.removeprefix(PREFIX): metric for metric in METRICS
          if metric.name.startswith(PREFIX) and not metric.name.startswith(f"{PREFIX}best_")}


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One metric of one task."""

    task: str
    metric: str
    held_out: str
    ceiling: str  # What the true probabilities of synthetic data reach.
    train: str


def task_rows(held: Mapping[str, Any], step: Mapping[str, Any]) -> list[TaskRow]:
    """Of the newest evaluation and the newest training window, task by task."""
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


def task_lines(values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each task of one event, and its metrics in short."""
    for name, of_task in _tasks(values):
        yield name, [f"{metric.label} {format_float(of_task[key])}" for key, metric in _SHOWN.items() if key in of_task]


def _tasks(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found = values.get("tasks")
    for name, of_task in found.items() if isinstance(found, Mapping) else ():
        if isinstance(of_task, Mapping):
            yield to_one_line(name)[:_MAX_NAME], of_task


