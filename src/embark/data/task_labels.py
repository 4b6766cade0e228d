"""Floats of several tasks: [rows, tasks] in float32, NaN where a row has no label for a task."""

from collections.abc import Sequence

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Floats, Mask
from embark.spec import Task, main_task


def task_labels(values: Floats, columns: Sequence[str], tasks: Sequence[Task]) -> Floats:
    """Select the label of each task from the data's `columns` [rows, columns]."""
    found: Floats = np.ascontiguousarray(values[:, [columns.index(task.column) for task in tasks]])
    for position, task in enumerate(tasks):
        if task.above is not None:
            values = found[:, position]
            found[:, position] = np.where(np.isnan(values), np.nan, values > task.above)
    return found


def main_label(label: Floats, tasks: tuple[Task, ...]) -> Floats:
    """Return [rows] of 0 or 1: the label, or that of the first binary task, 0 if it is missing or no task is binary."""
    if label.ndim == 1:
        return label
    position = main_task(tasks)
    main: Floats = (label[:, position] > 0.5).astype(np.float32) if position >= 0 else np.zeros(len(label), np.float32)
    return main


def check_lists(num_samples: int, list_size: int, what: str) -> None:
    """Refuse data that ends within a list."""
    if num_samples % list_size:
        raise DataError(f"{what}: {num_samples:,} rows are not whole lists of {list_size}",
                        "fill up shorter lists with rows without a label, or change list_size of the task")


def bad_labels(label: Floats, task: Task) -> Mask:
    """Mark values that are not labels of the task; a missing one is a label."""
    if task.loss == "binary":
        is_bad = (label != 0) & (label != 1)
    elif task.loss == "softmax":
        is_bad = (label < 0) | (label >= task.num_classes) | (label != np.floor(label))
    else:
        is_bad = ~np.isfinite(label) | ((label < 0) & (task.loss == "listwise"))
    found: Mask = is_bad & ~np.isnan(label)
    return found


def meaning_of(task: Task) -> str:
    """Describe the labels of a task for a person."""
    if task.loss == "softmax":
        return f"a class from 0 to {task.num_classes - 1}"
    return {"binary": "0 or 1", "listwise": "relevances, numbers from 0 up"}.get(task.loss, "a number")
