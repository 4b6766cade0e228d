"""Batches as they lie in a block: raw bytes, to be decoded where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.layout import Layout

Range = tuple[int, int, int]
"""Epoch, first sample, the one behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class RawBatches:
    """`num_batches` batches of `num_rows` rows, one behind the other in a block that has room for `room` of them, whose
    fields are where `layout.map(room * num_rows)` says."""

    buffer: NDArray[np.uint8]
    num_rows: int
    layout: Layout
    num_batches: int = 1
    room: int = 1


class RawSource(Protocol):
    """A source that can hand its rows out as they lie."""

    @property
    def num_train_samples(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def train_raw(self, ranges: Sequence[Range], into: NDArray[np.uint8], room: int = 1) -> RawBatches:
        """Samples of each range, which are all of one length, in the epoch's order, written into `into`."""
        ...
