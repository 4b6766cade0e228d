"""Metrics of several tasks: those of each by its loss, and those of the run. No torch, no jax."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from embark.features.arrays import Doubles
from embark.spec import Task, main_task
from embark.values import JsonDict
from .evaluation import STATE_SIZE, metrics_of, of_probabilities, ratio
from .trainer import Ranks

LOSSES = {"binary": "log_loss", "regression": "mse", "softmax": "cross_entropy", "listwise": "cross_entropy"}
"""Name of the metric that is a task's loss."""
OF_MAIN = ("auc", "normalized_entropy", "calibration", "auc_error", "best_auc")
TASKS = "tasks"


def state_size(task: Task) -> int:
    """Return how many numbers a training window holds for a task."""
    return {"binary": STATE_SIZE, "regression": 5, "softmax": 3, "listwise": 4}[task.loss]


def metrics_of_task(task: Task, state: Doubles) -> dict[str, float]:
    """Return the metrics from sums over samples that have a label; undefined ones are NaN. Sums of a regression: the
    squared and the absolute errors, the labels, their squares and the number of samples. Sums of classes: the losses,
    how many are right, and the number. Sums of lists: the losses, NDCG, hits, and the number of lists with a relevant
    row."""
    if task.loss == "binary":
        return metrics_of(state)
    if task.loss == "listwise":
        loss, ndcg, hits, num = state.tolist()
        return {"cross_entropy": ratio(loss, num), "ndcg_at_k": ratio(ndcg, num), "hit_at_k": ratio(hits, num),
                "num_samples": num}
    if task.loss == "softmax":
        loss, right, num = state.tolist()
        return {"cross_entropy": ratio(loss, num), "accuracy": ratio(right, num), "num_samples": num}
    squared, apart, total, squares, num = state.tolist()
    around_mean = squares - ratio(total * total, num)
    return {"mse": ratio(squared, num), "mae": ratio(apart, num), "r_squared": 1 - ratio(squared, around_mean),
            "num_samples": num}


def combine(tasks: Sequence[Task], found: Mapping[str, Mapping[str, float]]) -> JsonDict:
    """Return the metrics of a run: `log_loss` is the weighted sum of the losses of the tasks that have samples; AUC,
    normalized entropy and calibration are those of the first binary task; `tasks` has those of each."""
    position = main_task(tuple(tasks))
    main = found[tasks[position].name] if position >= 0 else {}
    names = [name for name in OF_MAIN if name in main or name in ("auc", "normalized_entropy", "calibration")]
    return {**{name: main.get(name, math.nan) for name in names}, "log_loss": _weighted_loss(tasks, found),
            "num_samples": max(of_task["num_samples"] for of_task in found.values()),
            TASKS: {name: dict(of_task) for name, of_task in found.items()}}


def with_best(
    tasks: Sequence[Task], metrics: JsonDict, best: Mapping[str, Mapping[str, float]]
) -> JsonDict:
    """Add to the metrics of a run what the best possible model would reach in its binary tasks."""
    return {**metrics, **combine(tasks, {name: {**of_task, **best.get(name, {})}
                                         for name, of_task in metrics[TASKS].items()})}


def best_of(world: Ranks, tasks: Sequence[Task], outputs: Doubles, labels: Doubles) -> dict[str, dict[str, float]]:
    """Return what the true probabilities [n, outputs] reach, by binary task, over all ranks."""
    found: dict[str, dict[str, float]] = {}
    ends = np.cumsum([task.num_outputs for task in tasks])
    for task, output, label in zip(tasks, np.split(outputs, ends[:-1], axis=1), labels.T, strict=True):
        if task.loss == "binary":
            is_there = ~np.isnan(label)
            reached = of_probabilities(world, [(output[is_there, 0], label[is_there] > 0.5)])
            found[task.name] = {f"best_{name}": reached[name] for name in ("auc", "log_loss")
                                if not math.isnan(reached[name])}
    return found


def _weighted_loss(tasks: Sequence[Task], found: Mapping[str, Mapping[str, float]]) -> float:
    terms = [task.weight * found[task.name][LOSSES[task.loss]] for task in tasks
             if task.weight and found[task.name]["num_samples"]]
    return math.fsum(terms) if terms else math.nan
