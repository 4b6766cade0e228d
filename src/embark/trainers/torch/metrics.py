"""Predictions and labels, counted on the device and summed over all ranks with one all-reduce."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embark.events.drift import LOGITS, NUM_SCORE_BINS
from embark.run.evaluation import LARGEST_LOGIT, NUM_BINS, STATE_SIZE, exact_auc, metrics_from, metrics_of
from .world import World


def sums_of(logits: Tensor, label: Tensor, is_counted: Tensor | None = None) -> Tensor:
    """Sum log loss, predicted clicks and clicks over a batch."""
    loss = binary_cross_entropy_with_logits(logits.float(), label, is_counted, reduction="sum")
    chances = logits.sigmoid()
    return torch.stack([loss, (chances if is_counted is None else chances * is_counted).sum(), label.sum()])


class HeldOut:
    """Predictions of held-out samples, which stay on the device until all are there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        self._logits: list[Tensor] = []
        self._clicks: list[Tensor] = []

    @torch.no_grad()
    def add(self, logits: Tensor, label: Tensor) -> None:
        """Add a batch. Nothing comes back to the host."""
        self._sums += sums_of(logits, label)
        self._logits.append(logits.detach().float().nan_to_num(nan=0.0))  # the loss keeps its NaN
        self._clicks.append(label > 0.5)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks, which must all call it."""
        logits, is_click = torch.cat(self._logits), torch.cat(self._clicks)
        others = logits[~is_click].sort().values

        def count_halves(piece: NDArray[np.float32]) -> int:
            some = torch.from_numpy(piece).to(others.device)
            return int(torch.searchsorted(others, some).sum() + torch.searchsorted(others, some, right=True).sum())

        auc, num_samples = exact_auc(self._world, logits[is_click].cpu().numpy(), len(others), count_halves)
        return metrics_from(self._world.sum_over_ranks(self._sums).tolist(), auc, num_samples)

    @torch.no_grad()
    def score_counts(self) -> list[int]:
        """Count the predictions in each bin of `events.drift`, over all ranks, which must all call it."""
        logits = torch.cat(self._logits)
        bins = torch.bucketize(logits, torch.from_numpy(LOGITS).to(logits), right=True)
        counts: list[int] = self._world.sum_over_ranks(torch.bincount(bins, minlength=NUM_SCORE_BINS)).tolist()
        return counts


def logit_bins(logits: Tensor) -> Tensor:
    """Return the bin of each logit in a histogram of `NUM_BINS`; NaN counts as 0, and the loss keeps it."""
    within = logits.nan_to_num(nan=0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return ((within + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))).long().clamp_(max=NUM_BINS - 1)


class MetricWindow:
    """Predictions and labels counted since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._state = torch.zeros(STATE_SIZE - 1, dtype=torch.float64, device=device)
        self._counts, self._sums = self._state.split([2 * NUM_BINS, 3])
        self._num_samples = 0

    def add(self, logits: Tensor, label: Tensor) -> None:
        """Count a batch. Nothing comes back to the host."""
        self.accumulate(logits, label)
        self.count(len(label))

    def count(self, num_samples: int) -> None:
        """Count samples that were accumulated, which only the host knows."""
        self._num_samples += num_samples

    @torch.no_grad()
    def accumulate(self, logits: Tensor, label: Tensor, is_counted: Tensor | None = None) -> None:
        """Count a batch on the device, in tensors that stay where they are: all of it, or what `is_counted` [samples]
        has 1 for."""
        bins = logit_bins(logits) + label.long() * NUM_BINS
        # Not bincount: on a GPU that waits for the device to learn the largest bin.
        self._counts.index_add_(0, bins, (torch.ones_like(logits) if is_counted is None else is_counted).double())
        self._sums += sums_of(logits, label, is_counted)

    @property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """Tensors that `accumulate` changes: counts, and the sums of `sums_of`."""
        return self._counts, self._sums

    def clone_sums(self) -> Tensor:
        """Copy the accumulated sums, to be restored with `set_sums`."""
        return self._state.clone()

    def set_sums(self, saved: Tensor) -> None:
        """Discard everything accumulated since `clone_sums`."""
        self._state.copy_(saved)

    def state(self, world: World) -> Tensor:
        """Return the window of all ranks together, for a checkpoint."""
        return world.sum_over_ranks(torch.cat([self._state, self._state.new_tensor([self._num_samples])]))

    def empty_state(self) -> Tensor:
        """Return a tensor that a checkpoint's window is read into."""
        return self._state.new_zeros(STATE_SIZE)

    def set_state(self, state: Tensor, world: World) -> None:
        """Resume from a checkpoint: rank 0 holds it for all, however many there were."""
        if world.is_first:
            self._state.copy_(state[:-1])
            self._num_samples = int(state[-1])

    def take(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks and start the window anew."""
        state = self.state(world).cpu().numpy()
        self.clear()
        return metrics_of(state)

    def clear(self) -> None:
        self._state.zero_()
        self._num_samples = 0
