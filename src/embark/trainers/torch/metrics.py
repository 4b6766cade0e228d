"""Predictions and labels, counted on the device and summed over all ranks with one all-reduce."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embark.run.evaluation import LARGEST_LOGIT, NUM_BINS, STATE_SIZE, metrics_of
from embark.trainers.torch.world import World


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

    def set_sums(self, saved: tuple[Tensor, Tensor]) -> None:
        """Discard what was accumulated since `clone_sums`."""
        self._counts.copy_(saved[0])
        self._sums.copy_(saved[1])

    def state(self, world: World) -> Tensor:
        """The window of all ranks together, for a checkpoint."""
        mine = torch.cat([self._counts, self._sums, self._sums.new_tensor([self._num_samples])])
        return world.sum_over_ranks(mine)

    def empty_state(self) -> Tensor:
        """Where a checkpoint's window is read into."""
        return torch.zeros(STATE_SIZE, dtype=torch.float64, device=self._counts.device)

    def set_state(self, state: Tensor, world: World) -> None:
        """Resume from a checkpoint: rank 0 holds it for all, however many there were."""
        if world.is_first:
            self._counts.copy_(state[: 2 * NUM_BINS])
            self._sums.copy_(state[2 * NUM_BINS : -1])
            self._num_samples = int(state[-1])

    def take(self, world: World) -> dict[str, float]:
        """The metrics over all ranks; the window starts anew."""
        state = self.state(world).cpu().numpy()
        self._counts.zero_()
        self._sums.zero_()
        self._num_samples = 0
        return metrics_of(state)
