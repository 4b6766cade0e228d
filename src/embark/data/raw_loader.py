"""Raw batches for one rank, in a ring of buffers that go round: filled by threads, given back by who used them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from embark.data.ahead import Ahead
from embark.data.loader import Share
from embark.data.prepared.raw import RawBatch, RawSource

SHEAF_ROWS = 16_384
"""About how many rows a thread makes before it hands them over."""


class RawLoader:
    """One rank's share of the global steps `start_step` to `stop_step`, as the bytes of blocks.

    A batch's buffer is filled anew only after `release(batch)`. At most `max_held` batches may be out at a time.
    It is gone through once.
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
        sheaf_rows: int = SHEAF_ROWS,
    ) -> None:
        self._source = source
        self._share = Share(source.num_train_samples, batch_size, rank, world_size, start_step, stop_step)
        self._max_held = max_held
        self._size_bytes = source.layout.map(self._share.samples_per_rank).size_bytes
        allocate = allocate or (lambda size: np.empty(size, np.uint8))
        # Small batches are made several at a time: to hand one from thread to thread costs as much as to fill it.
        self._sheaf = max(1, min(sheaf_rows // self._share.samples_per_rank, len(self._share)))
        num_sheaves = -(-len(self._share) // self._sheaf)
        depth = -(-max(1, depth) // self._sheaf)
        # Each batch begun, the sheaf being handed out and each batch held have one, so a thread never waits for one
        # that a later batch has taken.
        num_buffers = (depth + num_threads + 1) * self._sheaf + max_held
        self._free = [allocate(self._size_bytes) for _ in range(num_buffers)]
        self._out: dict[int, RawBatch] = {}
        self._changed = threading.Condition()
        self._ahead = Ahead(self._make, num_sheaves, depth=depth, num_threads=num_threads)
        self._is_begun = self._is_closed = False

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[RawBatch]:
        if self._is_begun or self._is_closed:
            raise RuntimeError("a RawLoader is gone through once; make another one for another pass")
        self._is_begun = True
        self._ahead.start()
        return self._hand_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def release(self, batch: RawBatch) -> None:
        """The batch is copied or used up: its buffer may be filled again."""
        with self._changed:
            if self._out.pop(id(batch), None) is not batch:
                raise RuntimeError("this batch is not out: it was released before, or another loader's")
            self._free.append(batch.buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads. Batches that are out stay as they are."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._ahead.close()

    def _hand_out(self) -> Iterator[RawBatch]:
        for sheaf in self._ahead.take():
            for batch in sheaf:
                with self._changed:
                    if self._is_closed:
                        raise RuntimeError("the RawLoader was closed")
                    if len(self._out) >= self._max_held:
                        raise RuntimeError(
                            f"{self._max_held} batches are out, the most there may be: release one first")
                    self._out[id(batch)] = batch
                yield batch

    def _make(self, number: int) -> list[RawBatch]:
        steps = range(number * self._sheaf, min((number + 1) * self._sheaf, len(self._share)))
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= len(steps) or self._is_closed)
            if self._is_closed:
                raise RuntimeError("the RawLoader was closed")
            buffers = [self._free.pop() for _ in steps]
        return self._source.train_raws([self._share.of(step) for step in steps], buffers)
