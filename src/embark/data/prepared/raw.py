"""A batch as it lies in a block: raw bytes, to be decoded where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """A block of `num_rows` rows, whose fields are where `layout.map(num_rows)` says."""

    buffer: NDArray[np.uint8]
    num_rows: int
    layout: Layout


class RawSource(Protocol):
    """A source that can hand its rows out as they lie."""

    @property
    def num_train_samples(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def train_raw(self, epoch: int, start: int, stop: int, into: NDArray[np.uint8]) -> RawBatch:
        """Samples `start` to `stop` of the epoch's order, written into `into`."""
        ...

    def train_raws(
        self, ranges: Sequence[tuple[int, int, int]], intos: Sequence[NDArray[np.uint8]]
    ) -> list[RawBatch]:
        """Several (epoch, start, stop) of one length, each as `train_raw` gives it."""
        ...
