"""The layers between the interaction and several tasks, as the trainer builds them, and what their gates mix."""

from __future__ import annotations

from dataclasses import dataclass

from embark.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TaskLayers:
    """Of a head over inputs of one width."""

    sizes: tuple[tuple[int, int], ...]  # Width in and out of each linear layer.
    mixed_width: int  # Values of a sample that gates weight, over all gates.


def task_layers_of(model: ModelSpec, width: int) -> TaskLayers:
    """By `model.task_head`."""
    num_tasks, num_shared, num_own = len(model.tasks), model.num_experts, model.num_task_experts
    sizes: list[tuple[int, int]] = []
    mixed = 0
    after = model.top_mlp[-1] if model.top_mlp else width
    if model.task_head == "shared_bottom":
        sizes += _mlp(width, model.top_mlp)
    elif model.task_head == "mmoe":
        sizes += num_shared * _mlp(width, model.top_mlp) + num_tasks * [(width, num_shared)]
        mixed = num_tasks * num_shared * after
    else:
        for number in range(model.num_extraction_layers):
            sizes += (num_shared + num_tasks * num_own) * _mlp(width, model.top_mlp)
            sizes += num_tasks * [(width, num_own + num_shared)]
            mixed += num_tasks * (num_own + num_shared) * after
            if number < model.num_extraction_layers - 1:
                sizes.append((width, num_tasks * num_own + num_shared))
                mixed += (num_tasks * num_own + num_shared) * after
            width = after
    for task in model.tasks:
        sizes += _mlp(after, (*model.tower_mlp, task.num_outputs))
    return TaskLayers(tuple(sizes), mixed)


def _mlp(width: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((width, *sizes), sizes, strict=False))
