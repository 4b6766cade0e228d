"""The loss and the metrics of several tasks, counted on the device; a sample without a label counts in no sum of it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from embark.errors import UserError
from embark.run.evaluation import NUM_BINS
from embark.run.task_metrics import combine, metrics_of_task, state_size
from embark.spec import Task
from .metrics import HeldOut, logit_bins
from .world import World

_NOT_THERE = -1e9  # Score of a row without a label; −∞ would make the gradient of a list without any NaN.


class TaskLoss(nn.Module):
    """The weighted sum of the tasks' losses. Each is a sum over the samples that have the label, by the number of all
    samples: so it is the same on any number of ranks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.tasks = list(tasks)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return weighted_loss(outputs, labels, self.tasks)


@torch.fx.wrap  # the train pipeline traces the model; which samples have a label is known only when it runs
def weighted_loss(outputs: Tensor, labels: Tensor, tasks: list[Task]) -> Tensor:
    total = outputs.new_zeros(())
    for task, output, label, is_there in _by_task(tasks, outputs, labels):
        if task.loss == "listwise":
            losses, num = list_losses(task, output, label, is_there), len(labels) // task.list_size
        else:
            losses, num = torch.where(is_there, _losses(task, output, label), 0.0), len(labels)
        total = total + task.weight * losses.sum() / num
    return total


def _by_task(tasks: Sequence[Task], outputs: Tensor, labels: Tensor) -> Iterator[tuple[Task, Tensor, Tensor, Tensor]]:
    """Return, for each task, its outputs [B] or [B, classes], its labels [B], 0 where there is none, and where there is
    one."""
    for task, output, label in zip(tasks, outputs.split([task.num_outputs for task in tasks], dim=1),
                                   labels.unbind(1), strict=True):
        is_there = ~label.isnan()
        yield task, output if task.loss == "softmax" else output.squeeze(1), label.nan_to_num(nan=0.0), is_there


def _losses(task: Task, output: Tensor, label: Tensor) -> Tensor:
    """Return the losses, [B]."""
    if task.loss == "binary":
        return binary_cross_entropy_with_logits(output, label, reduction="none")
    if task.loss == "softmax":
        return cross_entropy(output, label.long(), reduction="none")
    return (output - label).square()


def list_losses(task: Task, output: Tensor, label: Tensor, is_there: Tensor) -> Tensor:
    """Return the losses of lists, [lists]: 0 where no row is relevant.

    A loss is the cross-entropy of the relevances, as shares of their sum, against the softmax over the rows of a list.
    """
    scores, relevance = _lists(task, output, label, is_there)
    total = relevance.sum(dim=1, keepdim=True)
    shares = relevance / total.clamp(min=torch.finfo(total.dtype).tiny)
    return -(shares * scores.log_softmax(dim=1)).sum(dim=1)


def _lists(task: Task, output: Tensor, label: Tensor, is_there: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and relevances, [lists, list_size]; rows without a label have a score too small to be chosen."""
    if len(label) % task.list_size:
        raise UserError(f"task {task.name}: {len(label)} rows, a rank's part of the batch, are not whole lists of "
                        f"{task.list_size}", "train.batch_size must be a multiple of list_size times the ranks")
    scores = torch.where(is_there, output, _NOT_THERE)
    return scores.view(-1, task.list_size), label.view(-1, task.list_size)


def _list_sums(task: Task, output: Tensor, label: Tensor, is_there: Tensor) -> Tensor:
    """Sum losses, NDCG@k, hits among the first k, and lists, over the lists with a relevant row."""
    scores, relevance = _lists(task, output.float(), label, is_there)
    has_any, k = (relevance > 0).any(dim=1), min(task.k, task.list_size)
    ranked = relevance.gather(1, scores.argsort(dim=1, descending=True, stable=True))[:, :k].double()
    ideal = relevance.sort(dim=1, descending=True).values[:, :k].double()
    discount = 1 / torch.arange(2, k + 2, dtype=torch.float64, device=label.device).log2()
    ndcg = (ranked @ discount / (ideal @ discount).clamp(min=1e-300)) * has_any
    hits = (ranked > 0).any(dim=1) & has_any
    losses = list_losses(task, output.float(), label, is_there)
    return torch.stack([value.sum(dtype=torch.float64) for value in (losses, ndcg, hits, has_any)])


class TaskWindow:
    """Predictions and labels of each task, counted since the last `take`: one row of sums for all tasks."""

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
        self._tasks = tuple(tasks)
        self._sums = torch.zeros(sum(map(state_size, self._tasks)), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch. Nothing comes back to the host."""
        parts = self._sums.split([state_size(task) for task in self._tasks])
        for part, (task, output, label, is_there) in zip(parts, _by_task(self._tasks, outputs, labels), strict=True):
            if task.loss == "binary":
                part.index_add_(0, logit_bins(output) + label.long() * NUM_BINS, is_there.double())
                part = part[2 * NUM_BINS :]
            part += _task_sums(task, output, label, is_there)

    accumulate = add

    def count(self, num_samples: int) -> None:
        """Do nothing: the sums have the numbers of samples."""

    def clone_sums(self) -> Tensor:
        """Copy the accumulated sums, to be restored with `set_sums`."""
        return self._sums.clone()

    def set_sums(self, saved: Tensor) -> None:
        """Discard everything accumulated since `clone_sums`."""
        self._sums.copy_(saved)

    def state(self, world: World) -> Tensor:
        """Return the window of all ranks together, for a checkpoint."""
        return world.sum_over_ranks(self._sums.clone())

    def empty_state(self) -> Tensor:
        """Return a tensor that a checkpoint's window is read into."""
        return torch.zeros_like(self._sums)

    def set_state(self, state: Tensor, world: World) -> None:
        """Resume from a checkpoint: rank 0 holds it for all, however many there were."""
        if world.is_first:
            self._sums.copy_(state)

    def take(self, world: World) -> dict[str, Any]:
        """Return the metrics over all ranks and start the window anew."""
        state = self.state(world).cpu().numpy()
        self._sums.zero_()
        found, start = {}, 0
        for task in self._tasks:
            found[task.name] = metrics_of_task(task, state[start : start + state_size(task)])
            start += state_size(task)
        return combine(self._tasks, found)


class TaskHeldOut:
    """Predictions of held-out samples of each task."""

    def __init__(self, tasks: Sequence[Task], world: World) -> None:
        self._tasks, self._world = tuple(tasks), world
        self._binary = {task.name: HeldOut(world) for task in self._tasks if task.loss == "binary"}
        self._others = [task for task in self._tasks if task.loss != "binary"]
        self._sums = {task.name: torch.zeros(state_size(task), dtype=torch.float64, device=world.device)
                      for task in self._others}

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        for task, output, label, is_there in _by_task(self._tasks, outputs, labels):
            if task.loss == "binary":
                self._binary[task.name].add(output[is_there], label[is_there])
            else:
                self._sums[task.name] += _task_sums(task, output, label, is_there)

    @torch.no_grad()
    def metrics(self) -> dict[str, Any]:
        """Return the metrics over all ranks, which must all call it."""
        found = {task.name: self._binary[task.name].metrics() if task.loss == "binary" else
                 metrics_of_task(task, self._world.sum_over_ranks(self._sums[task.name]).cpu().numpy())
                 for task in self._tasks}
        return combine(self._tasks, found)


def _task_sums(task: Task, output: Tensor, label: Tensor, is_there: Tensor) -> Tensor:
    """Sum over the samples with a label, as `run.task_metrics.metrics_of_task` expects."""
    if task.loss == "listwise":
        return _list_sums(task, output, label, is_there)
    values = [torch.where(is_there, _losses(task, output.float(), label), 0.0)]
    if task.loss == "binary":
        values += [output.sigmoid() * is_there, label]
    elif task.loss == "softmax":
        values.append((output.argmax(dim=1) == label.long()) & is_there)
    else:
        values += [torch.where(is_there, (output - label).abs(), 0.0), label, label.double().square()]
    return torch.stack([value.sum(dtype=torch.float64) for value in (*values, is_there)])
