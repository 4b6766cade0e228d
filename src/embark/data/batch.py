"""A batch as numpy arrays, and what every source of batches offers."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples with F sparse features, feature-major as TorchRec wants them."""

    dense: NDArray[np.float32]
    """[B, num_dense]"""
    ids: NDArray[np.int32]
    """All ids of feature 0, sample by sample, then all of feature 1, …"""
    lengths: NDArray[np.int32]
    """[F, B]: how many ids each sample has in each feature."""
    label: NDArray[np.float32]
    """[B]: 0 or 1."""
    is_fixed: bool = True
    """Every sample has the same number of ids in a feature, the same in every batch of this source."""
    num_valid: int = -1
    """Samples that count; those behind them only fill the batch up. −1: all."""
    best_probability: NDArray[np.float32] | None = None
    """[B]: the probability the label was drawn with, where the source knows it."""

    @property
    def num_samples(self) -> int:
        """How many samples count."""
        return len(self.label) if self.num_valid < 0 else self.num_valid


class Source(Protocol):
    """Random access to samples by position, so that any rank can take any slice and resume anywhere."""

    @property
    def num_train_samples(self) -> int: ...

    @property
    def num_eval_samples(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found on opening that a person should know, such as ids that were clipped."""
        ...

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` of the epoch's order."""
        ...

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` of the held-out ones."""
        ...
