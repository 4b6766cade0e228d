"""Heads between the interaction of the features and several tasks: from [samples, width] to [samples, outputs], the
outputs of all tasks in their order.

MMoE: https://dl.acm.org/doi/10.1145/3219819.3220007. PLE: https://dl.acm.org/doi/10.1145/3383313.3412236.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from embark.spec.model import ModelSpec
from embark.spec.tasks import Task
from .layers import mlp


def task_head(model: ModelSpec, width: int) -> nn.Module:
    """Make the head that `model.task_head` names, over inputs of `width`."""
    return {"shared_bottom": SharedBottom, "mmoe": MixtureOfExperts, "ple": ProgressiveExtraction}[model.task_head](
        model, width)


def scores_of(tasks: Sequence[Task], outputs: Tensor) -> Tensor:
    """Turn outputs into predictions: the probability of a 1, a number, the probability of each class."""
    parts = outputs.split([task.num_outputs for task in tasks], dim=1)
    to_score = {"binary": torch.sigmoid, "regression": lambda part: part, "listwise": lambda part: part,
                "softmax": lambda part: part.softmax(dim=1)}
    return torch.cat([to_score[task.loss](part) for task, part in zip(tasks, parts, strict=True)], dim=1)


class SharedBottom(nn.Module):
    """One network for all tasks, and a tower of each."""

    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.bottom = _expert(model, width)
        self.towers = _towers(model, width)

    def forward(self, values: Tensor) -> Tensor:
        shared = self.bottom(values)
        return torch.cat([tower(shared) for tower in self.towers], dim=1)


class MixtureOfExperts(nn.Module):
    """MMoE: experts that all tasks share; a gate of each task weights them."""

    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_expert(model, width) for _ in range(model.num_experts))
        self.gates = nn.ModuleList(nn.Linear(width, model.num_experts) for _ in model.tasks)
        self.towers = _towers(model, width)

    def forward(self, values: Tensor) -> Tensor:
        experts = torch.stack([expert(values) for expert in self.experts], dim=1)
        return _outputs(self.towers, [_mixed(gate(values), experts) for gate in self.gates])


class ProgressiveExtraction(nn.Module):
    """PLE: layers of experts that all tasks share, and of experts of each task.

    A task's gate sees both; the gate of the shared ones sees all.
    """

    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(model.num_extraction_layers):
            self.layers.append(_Extraction(model, width, is_last=number == model.num_extraction_layers - 1))
            width = model.top_mlp[-1] if model.top_mlp else width
        self.towers = _towers(model, width)

    def forward(self, values: Tensor) -> Tensor:
        of_tasks, shared = [values] * len(self.towers), values
        for layer in self.layers:
            of_tasks, shared = layer(of_tasks, shared)
        return _outputs(self.towers, of_tasks)


class _Extraction(nn.Module):
    def __init__(self, model: ModelSpec, width: int, *, is_last: bool) -> None:
        super().__init__()
        num_shared, num_own, num_tasks = model.num_experts, model.num_task_experts, len(model.tasks)
        self.shared = nn.ModuleList(_expert(model, width) for _ in range(num_shared))
        self.own = nn.ModuleList(nn.ModuleList(_expert(model, width) for _ in range(num_own)) for _ in model.tasks)
        self.gates = nn.ModuleList(nn.Linear(width, num_own + num_shared) for _ in model.tasks)
        # Nothing is above the last layer to take what the tasks share.
        self.shared_gate = None if is_last else nn.Linear(width, num_tasks * num_own + num_shared)

    def forward(self, of_tasks: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        common = [expert(shared) for expert in self.shared]
        own = [[expert(values) for expert in experts] for experts, values in zip(self.own, of_tasks, strict=True)]
        mixed = [_mixed(gate(values), torch.stack([*experts, *common], dim=1))
                 for gate, values, experts in zip(self.gates, of_tasks, own, strict=True)]
        if self.shared_gate is not None:
            every = torch.stack([*(one for experts in own for one in experts), *common], dim=1)
            shared = _mixed(self.shared_gate(shared), every)
        return mixed, shared


def _mixed(gate: Tensor, experts: Tensor) -> Tensor:
    """Mix [samples, experts, width] by the gates [samples, experts] into [samples, width]."""
    weights = torch.softmax(gate, dim=1, dtype=torch.float32).to(experts.dtype)
    return torch.bmm(weights.unsqueeze(1), experts).squeeze(1)


def _expert(model: ModelSpec, width: int) -> nn.Sequential:
    return mlp(width, model.top_mlp, model.dropout)


def _towers(model: ModelSpec, width: int) -> nn.ModuleList:
    width = model.top_mlp[-1] if model.top_mlp else width
    return nn.ModuleList(mlp(width, (*model.tower_mlp, task.num_outputs), model.dropout, ends_linear=True)
                         for task in model.tasks)


def _outputs(towers: Iterable[nn.Module], of_tasks: Iterable[Tensor]) -> Tensor:
    return torch.cat([tower(values) for tower, values in zip(towers, of_tasks, strict=True)], dim=1)
