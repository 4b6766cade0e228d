"""The learning rates of the steps to come, on the device: nothing is launched between two steps to set them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NUM_ROWS = 256  # Steps whose rates are brought there together.


class StepRates:
    """`now` has those of the step that runs."""

    def __init__(self, rates_at: Callable[[int], Sequence[float]], device: torch.device) -> None:
        self._rates_at, self._is_gpu = rates_at, device.type == "cuda"
        self.now = torch.zeros(len(rates_at(0)), device=device)
        self._rows = torch.zeros(NUM_ROWS, len(self.now), device=device)  # By the step.
        self._first: int | None = None  # The step of the first row.

    def bring(self, step: int) -> None:
        """See to it that those of `step` are there."""
        first = step - step % NUM_ROWS
        if first != self._first:
            rows = torch.tensor([self._rates_at(one) for one in range(first, first + NUM_ROWS)])
            self._rows.copy_(rows.pin_memory() if self._is_gpu else rows, non_blocking=True)
            self._first = first

    def start(self, dense: Tensor, inputs: Tensor, step: Tensor) -> None:
        """Begin a step: count it, take its rates, and copy its dense features into the first columns of `inputs`."""
        if self._is_gpu:
            from embark.trainers.torch.engines.cuda_graph import start_kernels

            start_kernels.start(dense, inputs, step, self._rows, self.now)
            return
        step += 1
        self.now.copy_(self._rows[int(step) % NUM_ROWS])
        inputs[:, : dense.shape[1]] = dense
