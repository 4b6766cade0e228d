"""Batches for one rank: which samples a step takes, and threads that have them ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from embark.data.batch import Batch, Source
from embark.data.prefetcher import Prefetcher
from embark.errors import DataError
from embark.model.batch import samples_per_rank


def steps_per_epoch(source: Source, batch_size: int) -> int:
    """Full batches in an epoch; the remainder is left out, so that every rank has as many."""
    return _steps_per_epoch(source.num_train_samples, batch_size)


class Loader:
    """One rank's share of the global steps `start_step` to `stop_step`, made ahead of time by threads.

    It can be iterated once: a second pass raises, for it would be silently empty.
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
        num_threads: int = 1,
    ) -> None:
        self._source = source
        self._share = Share(source.num_train_samples, batch_size, rank, world_size, start_step, stop_step)
        self._ahead = Prefetcher(self._make, len(self._share), depth=depth, num_threads=num_threads)
        self._is_begun = False

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[Batch]:
        if self._is_begun or self._ahead.is_closed:
            raise RuntimeError("a Loader can be iterated once; make another one for another pass")
        self._is_begun = True
        self._ahead.start()
        return self._ahead.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and drop what they had ready; each ends after the batch it is making."""
        self._ahead.close()

    def _make(self, number: int) -> Batch:
        return self._source.train_rows(*self._share.of(number))


class Share:
    """Which samples one rank takes in each of the global steps `start_step` to `stop_step`."""

    def __init__(
        self, num_train_samples: int, batch_size: int, rank: int, world_size: int, start_step: int, stop_step: int
    ) -> None:
        self.samples_per_rank: int = samples_per_rank(batch_size, world_size)
        self._batch_size = batch_size
        self._rank = rank
        self._steps = range(start_step, max(start_step, stop_step))
        self._steps_per_epoch = _steps_per_epoch(num_train_samples, batch_size)

    def __len__(self) -> int:
        return len(self._steps)

    def of(self, number: int) -> tuple[int, int, int]:
        """Epoch, first sample and the one behind the last, of the `number`-th of the steps."""
        epoch, step_in_epoch = divmod(self._steps[number], self._steps_per_epoch)
        start = step_in_epoch * self._batch_size + self._rank * self.samples_per_rank
        return epoch, start, start + self.samples_per_rank


def eval_batches(source: Source, *, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """Every held-out sample once over all ranks, in as many batches of one size on every rank.

    Where the samples run out a batch is filled up with copies; its `num_valid`, which may be 0, leaves them out.
    """
    size = samples_per_rank(batch_size, world_size)
    num_samples = source.num_eval_samples
    for first in range(0, num_samples, batch_size):
        start = min(first + rank * size, num_samples)
        stop = min(start + size, num_samples)
        if stop - start == size:
            yield source.eval_rows(start, stop)
        else:
            some = source.eval_rows(start, stop) if stop > start else source.eval_rows(num_samples - 1, num_samples)
            yield replace(_filled_up(some, size), num_valid=stop - start)


def _steps_per_epoch(num_train_samples: int, batch_size: int) -> int:
    steps = num_train_samples // batch_size
    if steps == 0:
        raise DataError(
            f"the data has {num_train_samples} rows to train on, fewer than train.batch_size = {batch_size}",
            fix=f"set train.batch_size to {max(num_train_samples, 1)} or less, or bring more data",
        )
    return steps


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
