"""Raw batches for one rank, in a ring of buffers: filled by threads, and filled again once released."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from embark.data.loader import Share
from embark.data.prefetcher import Prefetcher
from embark.data.prepared.source import RawBatches, RawSource

TOGETHER_ROWS = 65_536
MOST_TOGETHER = 8
"""Batches that are made together: as many as come to about so many rows, and no more than this."""


def num_together(samples_per_rank: int) -> int:
    """How many batches of this size go together: to hand one from thread to thread costs as much as to fill a small
    one, and small copies do not run beside each other."""
    return max(1, min(MOST_TOGETHER, TOGETHER_ROWS // samples_per_rank))


class RawLoader:
    """One rank's share of the global steps `start_step` to `stop_step`, as the bytes of blocks, several steps in one.

    A buffer is filled anew only after `release`. At most `max_held` may be out at a time. It can be iterated once.
    """

    def __init__(
        self,
        source: RawSource,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        start_step: int,
        stop_step: int,
        allocate: Callable[[int], NDArray[np.uint8]] | None = None,
        depth: int = 2,
        num_threads: int = 1,
        max_held: int = 2,
        capacity: int = 1,
    ) -> None:
        self._source = source
        self._share = Share(source.num_train_samples, batch_size, rank, world_size, start_step, stop_step)
        self._max_held = max_held
        self._capacity = capacity
        num_fills = -(-len(self._share) // capacity)
        size_bytes = source.layout.map(capacity * self._share.samples_per_rank).size_bytes
        allocate = allocate or (lambda size: np.empty(size, np.uint8))
        # One for each batch begun or out, so that a thread never waits for a buffer that a later batch has.
        self._free = [allocate(size_bytes) for _ in range(max(1, depth) + num_threads + max_held)]
        self._out: dict[int, RawBatches] = {}
        self._changed = threading.Condition()
        self._ahead = Prefetcher(self._make, num_fills, depth=depth, num_threads=num_threads)
        self._is_begun = self._is_closed = False

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[RawBatches]:
        if self._is_begun or self._is_closed:
            raise RuntimeError("a RawLoader can be iterated once; make another one for another pass")
        self._is_begun = True
        self._ahead.start()
        return self._hand_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def release(self, batches: RawBatches) -> None:
        """They are copied or used up: their buffer may be filled again."""
        with self._changed:
            if self._out.pop(id(batches), None) is not batches:
                raise RuntimeError("these are not out: they were released before, or are another loader's")
            self._free.append(batches.buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads. Batches that are out stay as they are."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._ahead.close()

    def _hand_out(self) -> Iterator[RawBatches]:
        made = self._ahead.take()
        while True:
            with self._changed:
                if self._is_closed:
                    raise RuntimeError("the RawLoader was closed")
                if len(self._out) >= self._max_held:
                    raise RuntimeError(f"{self._max_held} are out, the most there may be: release one first")
            batches = next(made, None)
            if batches is None:
                return
            with self._changed:
                self._out[id(batches)] = batches
            yield batches

    def _make(self, number: int) -> RawBatches:
        steps = range(number * self._capacity, min((number + 1) * self._capacity, len(self._share)))
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_closed)
            if self._is_closed:
                raise RuntimeError("the RawLoader was closed")
            buffer = self._free.pop()
        return self._source.train_raw([self._share.of(step) for step in steps], buffer, self._capacity)
