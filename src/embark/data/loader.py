"""Batches for one rank: which samples a step takes, and a thread that has them ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from embark.data.batch import Batch, Source
from embark.errors import DataError, UserError


def steps_per_epoch(source: Source, batch_size: int) -> int:
    """Whole batches in an epoch; the odd rest is left out, so that every rank has as many."""
    steps = source.num_train_samples // batch_size
    if steps == 0:
        raise DataError(
            f"the data has {source.num_train_samples} rows to train on, fewer than train.batch_size = {batch_size}",
            fix=f"set train.batch_size to {max(source.num_train_samples, 1)} or less, or bring more data",
        )
    return steps


class Loader:
    """One rank's share of the global steps `start_step` to `stop_step`, made ahead of time by one thread.

    It is gone through once: a second pass raises, for it would be silently empty.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        start_step: int,
        stop_step: int,
        depth: int = 2,
    ) -> None:
        self._source = source
        self._batch_size = batch_size
        self._samples_per_rank = _samples_per_rank(batch_size, world_size)
        self._rank = rank
        self._steps = range(start_step, max(start_step, stop_step))
        self._steps_per_epoch = steps_per_epoch(source, batch_size)
        self._depth = max(1, depth)
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        if self._thread is not None or self._is_closed:
            raise RuntimeError("a Loader is gone through once; make another one for another pass")
        self._thread = threading.Thread(target=self._produce, name="embark-loader", daemon=True)
        self._thread.start()
        return self._consume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop what it had ready; it ends after the batch it is making."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _consume(self) -> Iterator[Batch]:
        for _ in self._steps:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._error or self._is_closed)
                if self._is_closed:
                    raise RuntimeError("the Loader was closed before its last batch")
                if not self._ready and self._error is not None:
                    raise self._error
                batch = self._ready.popleft()
                self._changed.notify_all()
            yield batch

    def _produce(self) -> None:
        try:
            for step in self._steps:
                batch = self._batch_of(step)
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._is_closed)
                    if self._is_closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _batch_of(self, step: int) -> Batch:
        epoch, step_in_epoch = divmod(step, self._steps_per_epoch)
        start = step_in_epoch * self._batch_size + self._rank * self._samples_per_rank
        return self._source.train_rows(epoch, start, start + self._samples_per_rank)


def eval_batches(source: Source, *, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """Every held-out sample once over all ranks, in as many batches of one size on every rank.

    Where the samples run out a batch is filled up with copies; its `num_valid`, which may be 0, leaves them out.
    """
    size = _samples_per_rank(batch_size, world_size)
    num_samples = source.num_eval_samples
    for first in range(0, num_samples, batch_size):
        start = min(first + rank * size, num_samples)
        stop = min(start + size, num_samples)
        if stop - start == size:
            yield source.eval_rows(start, stop)
        else:
            some = source.eval_rows(start, stop) if stop > start else source.eval_rows(num_samples - 1, num_samples)
            yield replace(_filled_up(some, size), num_valid=stop - start)


def _samples_per_rank(batch_size: int, world_size: int) -> int:
    if batch_size % world_size:
        down = batch_size // world_size * world_size
        raise UserError(
            f"train.batch_size = {batch_size} cannot be shared equally by {world_size} ranks",
            fix=f"set train.batch_size = {down or world_size}",
        )
    return batch_size // world_size


def _filled_up(batch: Batch, size: int) -> Batch:
    """The batch with its last sample repeated until there are `size`."""
    num_copies = size - len(batch.label)
    ids: list[NDArray[np.int32]] = []
    end = 0
    for lengths in batch.lengths:
        start, end = end, end + int(lengths.sum())
        last = batch.ids[end - int(lengths[-1]) : end]
        ids += [batch.ids[start:end], np.tile(last, num_copies)]
    probability = batch.best_probability
    return replace(
        batch,
        dense=np.pad(batch.dense, ((0, num_copies), (0, 0)), mode="edge") if batch.dense.size else
        np.empty((size, batch.dense.shape[1]), np.float32),
        ids=np.concatenate(ids),
        lengths=np.pad(batch.lengths, ((0, 0), (0, num_copies)), mode="edge"),
        label=np.pad(batch.label, (0, num_copies), mode="edge"),
        best_probability=None if probability is None else np.pad(probability, (0, num_copies), mode="edge"),
    )
