"""AUC, normalized entropy, log loss and calibration, added up on the device and over all ranks.

Scores are counted in fine bins of the logit, so a window of any length is a tensor of fixed size: it adds up over
ranks with one all-reduce and needs no score kept. The AUC differs from the exact one by less than 1e-5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embark.trainers.torch.world import World

NUM_BINS = 16_384
LARGEST_LOGIT = 12.0


class MetricWindow:
    """What was predicted and what happened since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2 * NUM_BINS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._num_samples = 0

    def add(self, logits: Tensor, label: Tensor) -> None:
        """Count a batch. Nothing comes back to the host."""
        self.accumulate(logits, label)
        self.count(len(label))

    def count(self, num_samples: int) -> None:
        """How many samples were accumulated: the part that the host knows."""
        self._num_samples += num_samples

    @torch.no_grad()
    def accumulate(self, logits: Tensor, label: Tensor) -> None:
        """The part that the device does, in tensors that stay where they are."""
        within = logits.nan_to_num(nan=0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)  # the loss keeps its NaN
        bins = ((within + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))).long().clamp_(max=NUM_BINS - 1)
        bins += label.long() * NUM_BINS
        # Not bincount: on a GPU that waits for the device to learn the largest bin.
        self._counts.index_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
        loss = binary_cross_entropy_with_logits(logits.float(), label, reduction="sum")
        self._sums += torch.stack([loss, logits.sigmoid().sum(), label.sum()])

    def clone_sums(self) -> tuple[Tensor, Tensor]:
        """What was accumulated, to be put back with `set_sums`."""
        return self._counts.clone(), self._sums.clone()

    def set_sums(self, kept: tuple[Tensor, Tensor]) -> None:
        """Forget what was accumulated since `clone_sums`."""
        self._counts.copy_(kept[0])
        self._sums.copy_(kept[1])

    def state(self, world: World) -> Tensor:
        """The window of all ranks together, for a checkpoint."""
        mine = torch.cat([self._counts, self._sums, self._sums.new_tensor([self._num_samples])])
        return world.sum_over_ranks(mine)

    def empty_state(self) -> Tensor:
        """Where a checkpoint's window is read into."""
        return torch.zeros(2 * NUM_BINS + 4, dtype=torch.float64, device=self._counts.device)

    def set_state(self, state: Tensor, world: World) -> None:
        """Go on from there: rank 0 holds it for all, whatever their number was."""
        if world.is_first:
            self._counts.copy_(state[: 2 * NUM_BINS])
            self._sums.copy_(state[2 * NUM_BINS : -1])
            self._num_samples = int(state[-1])

    def take(self, world: World) -> dict[str, float]:
        """The metrics over all ranks; the window starts anew. Undefined ones are NaN."""
        both = self.state(world).cpu()
        self._counts.zero_()
        self._sums.zero_()
        self._num_samples = 0
        negatives, positives = both[:NUM_BINS], both[NUM_BINS : 2 * NUM_BINS]
        loss, predicted, clicks, samples = both[2 * NUM_BINS :].tolist()
        return {
            "auc": _auc(negatives, positives),
            "log_loss": _ratio(loss, samples),
            "normalized_entropy": _ratio(_ratio(loss, samples), _entropy(_ratio(clicks, samples))),
            "calibration": _ratio(predicted, clicks),
            "num_samples": samples,
        }


def _auc(negatives: Tensor, positives: Tensor) -> float:
    """Share of (click, no click) pairs in the right order; a tie is half right."""
    below = negatives.cumsum(0) - negatives
    right = (positives * (below + negatives / 2)).sum()
    return _ratio(float(right), float(positives.sum() * negatives.sum()))


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return math.nan
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
