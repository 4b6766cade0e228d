"""Batches for one rank: which samples a step takes, and threads that have them ready."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np

from embark.features.arrays import Array, Bytes, Floats, Int32s, Int64s, ragged_positions
from embark.model.steps import samples_per_rank, steps_per_epoch
from embark.spec import Table
from embark.values import frozen

if TYPE_CHECKING:
    from .prepared.source import PreparedSource, RawBatches


T = TypeVar("T")


def num_loader_threads() -> int:
    """Return how many threads of a rank make batches: its share of the cores but one, which the training itself
    needs."""
    ranks = int(os.getenv("LOCAL_WORLD_SIZE", 1))
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks - 1))


class _OnePass(Generic[T]):
    """One rank's share of the global steps `start_step` to `stop_step`, made ahead of time by threads.

    It can be iterated once: a second pass raises, for it would be silently empty.
    """

    _share: Share
    _ahead: Prefetcher[T]
    _is_begun = False

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[T]:
        if self._is_begun or self._ahead.is_closed:
            raise RuntimeError(f"a {type(self).__name__} can be iterated once; make another one for another pass")
        self._is_begun = True
        self._ahead.start()
        return self._ahead.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and drop the finished batches; each thread ends after the batch it is making."""
        self._ahead.close()


class Loader(_OnePass["Batch"]):
    """Batches of numpy arrays."""

    def __init__(
        self, source: SampleSource, *, batch_size: int, rank: int, world_size: int, start_step: int, stop_step: int,
        depth: int = 2, num_threads: int | None = None
    ) -> None:
        self._source = source
        self._share = Share(source.num_train_samples, batch_size, rank, world_size, start_step, stop_step)
        num_threads = num_threads or min(num_loader_threads(), max(1, len(self._share)))
        self._ahead = Prefetcher(self._make, len(self._share), depth=depth, num_threads=num_threads)

    def _make(self, number: int) -> Batch:
        return self._source.train_rows(*self._share.of(number))


class RawLoader(_OnePass["RawBatches"]):
    """The bytes of blocks, `capacity` steps in one, in a ring of buffers.

    A buffer is filled again only after `release`. At most `max_held` may be out at a time, or the next never comes.
    """

    def __init__(
        self, source: PreparedSource, *, batch_size: int, rank: int, world_size: int, start_step: int, stop_step: int,
        allocate: Callable[[int], Bytes] | None = None, depth: int = 2, num_threads: int = 1,
        max_held: int = 2, capacity: int = 1, spare_rows: int = 0
    ) -> None:
        """Create the loader. `spare_rows` is the number of spare rows of a block whose rows the device puts in order,
        as in `PreparedSource.train_raw`."""
        self._source, self._spare_rows = source, spare_rows
        self._share = Share(source.num_train_samples, batch_size, rank, world_size, start_step, stop_step)
        self._capacity, self._num_threads = capacity, num_threads
        num_fills = -(-len(self._share) // capacity)
        order = source.layout.row_order(capacity * self._share.samples_per_rank, spare_rows)
        size_bytes = order.start + order.size_bytes
        allocate = allocate or (lambda size: np.empty(size, np.uint8))
        # One for each batch begun or out, so that a thread never waits for a buffer that a later batch has.
        self._free: LifoQueue[Bytes | None] = LifoQueue()  # The last one is still in the cache.
        for _ in range(max(1, depth) + num_threads + max_held):
            self._free.put(allocate(size_bytes))
        self._ahead = Prefetcher(self._make, num_fills, depth=depth, num_threads=num_threads)

    def release(self, batches: RawBatches) -> None:
        """Give back batches that are copied or used up: their buffer may be filled again."""
        self._free.put(batches.buffer)

    def close(self) -> None:
        """Stop the threads. Batches that are out stay as they are."""
        for _ in range(self._num_threads):
            self._free.put(None)  # which ends a thread that waits for a buffer
        super().close()

    def _make(self, number: int) -> RawBatches:
        steps = range(number * self._capacity, min((number + 1) * self._capacity, len(self._share)))
        buffer = self._free.get()
        if buffer is None:
            raise RuntimeError("the RawLoader was closed")
        return self._source.train_raw([self._share.of(step) for step in steps], buffer, self._capacity,
                                      spare_rows=self._spare_rows)


class Share:
    """The samples that one rank takes in each of the global steps `start_step` to `stop_step`."""

    def __init__(
        self, num_train_samples: int, batch_size: int, rank: int, world_size: int, start_step: int, stop_step: int
    ) -> None:
        self.samples_per_rank: int = samples_per_rank(batch_size, world_size)
        self._batch_size, self._rank = batch_size, rank
        self._steps = range(start_step, max(start_step, stop_step))
        self._steps_per_epoch = steps_per_epoch(num_train_samples, batch_size)

    def __len__(self) -> int:
        return len(self._steps)

    def of(self, number: int) -> tuple[int, int, int]:
        """Return the epoch, the first sample and the sample behind the last of the `number`-th step."""
        epoch, step_in_epoch = divmod(self._steps[number], self._steps_per_epoch)
        start = step_in_epoch * self._batch_size + self._rank * self.samples_per_rank
        return epoch, start, start + self.samples_per_rank


def eval_batches(source: SampleSource, *, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """Yield every held-out sample once over all ranks, in as many batches of one size on every rank.

    Where the samples run out a batch is filled up with copies; its `num_valid`, which may be 0, leaves them out.
    Threads make the batches ahead of time.
    """
    size = samples_per_rank(batch_size, world_size)
    num_samples = source.num_eval_samples

    def make(number: int) -> Batch:
        start, stop = eval_range(number, num_samples, batch_size, rank, world_size)
        if stop - start == size:
            return source.eval_rows(start, stop)
        some = source.eval_rows(start, stop) if stop > start else source.eval_rows(num_samples - 1, num_samples)
        filled_up = some.take(np.minimum(np.arange(size), len(some.label) - 1))
        return replace(filled_up, num_valid=stop - start)

    ahead = Prefetcher(make, -(-num_samples // batch_size), depth=2, num_threads=num_loader_threads())
    try:
        ahead.start()
        yield from ahead.take()
    finally:
        ahead.close()


def eval_range(number: int, num_samples: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return which held-out samples a rank has in batch `number` of an evaluation: the first, and the one behind the
    last."""
    size = samples_per_rank(batch_size, world_size)
    start = min(number * batch_size + rank * size, num_samples)
    return start, min(start + size, num_samples)


@frozen
class Batch:
    """B samples with F sparse features, feature-major as TorchRec wants them."""

    dense: Floats  # [B, num_dense]
    ids: Array  # int32: all ids of feature 0, sample by sample, then all of feature 1, …
    """int64 where a dynamic table has ids that are no rows: any 64 bits but −2⁶³ (`data.dynamic_ids.NO_ID`)."""
    lengths: Int32s  # [F, B]: how many ids each sample has in each feature.
    label: Floats  # [B]: 0 or 1; of `model.tasks` [B, tasks], NaN where a sample has none.
    is_fixed: bool = True
    """Every sample has the same number of ids in a feature, the same in every batch of this source."""
    num_valid: int = -1  # Samples that count; those behind them only fill the batch up. −1: all.
    weights: Floats | None = None
    """The weight of each id, as `ids`; 1 where a feature has none. None: no feature has any."""
    best_probability: Floats | None = None
    """[B]: the probability the label was drawn with, where the source knows it; of tasks [B, outputs], the best that a
    network could give."""

    @property
    def num_samples(self) -> int:
        """The number of samples that count."""
        return len(self.label) if self.num_valid < 0 else self.num_valid

    def starts(self) -> Int64s:
        """Return [F, B]: where the ids of each sample begin."""
        return np.cumsum(self.lengths, dtype=np.int64).reshape(self.lengths.shape) - self.lengths

    def by_feature(self, values: Array) -> list[Array]:
        """Split `ids`, `weights` or anything else with a value for each id by feature."""
        return np.split(values, np.cumsum(self.lengths.sum(axis=1, dtype=np.int64))[:-1])

    def take(self, samples: Array, starts: Int64s | None = None) -> Batch:
        """Return these samples, in this order. Whoever takes often passes `starts()`."""
        lengths, starts = self.lengths[:, samples], self.starts() if starts is None else starts
        at = ragged_positions(starts[:, samples], lengths)
        return replace(self, dense=self.dense[samples], ids=self.ids[at], lengths=lengths, label=self.label[samples],
                       weights=None if self.weights is None else self.weights[at],
                       best_probability=None if self.best_probability is None else self.best_probability[samples])

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Return the samples of all batches, one batch behind the other."""
        def joined(name: str, axis: int = 0) -> Any:
            values = [getattr(batch, name) for batch in batches]
            return None if any(one is None for one in values) else np.concatenate(values, axis)

        def by_feature(name: str) -> Any:
            if any(getattr(batch, name) is None for batch in batches):
                return None
            split = [batch.by_feature(getattr(batch, name)) for batch in batches]
            return np.concatenate([part for parts in zip(*split, strict=True) for part in parts])

        return replace(batches[0], dense=joined("dense"), ids=by_feature("ids"), lengths=joined("lengths", 1),
                       label=joined("label"), weights=by_feature("weights"),
                       best_probability=joined("best_probability"))


class SampleSource(Protocol):
    """Random access to samples by position, so that any rank can take any slice and resume anywhere."""

    @property
    def num_train_samples(self) -> int: ...

    @property
    def num_eval_samples(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the data, such as ids that were clipped."""

    def fingerprint(self) -> str:
        """Return a checksum of all samples, the held-out ones too; empty where the spec alone decides what they are."""

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return samples `start` to `stop` of the epoch's order."""

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return samples `start` to `stop` of the held-out ones."""


class SequenceSource(SampleSource, Protocol):
    """Samples of next-item models: in those of an evaluation the history's last id is the held-out item."""

    @property
    def catalog(self) -> Int32s:
        """The rows of the history's table, rising, that are items of the log: what is ranked and drawn."""

    def eval_seen(self, start: int, stop: int) -> tuple[Int32s, Int64s]:
        """Return all items that the users of `eval_rows` chose before the held-out one, user by user, and how many each
        has: also those for which the history has no room."""


def check_range(start: int, stop: int, num_samples: int) -> None:
    """Raise if there are no samples `start` to `stop`."""
    if not 0 <= start <= stop <= num_samples:
        raise IndexError(f"samples {start} to {stop} of {num_samples}")


class Prefetcher(Generic[T]):
    """Calls `make(0)`, `make(1)`, … up to `count` in threads, at most `depth` results ready beside those being made.

    An error is raised when its turn comes, after everything before it.
    """

    def __init__(
        self, make: Callable[[int], T], count: int, *, depth: int, num_threads: int = 1, name: str = "embark-loader"
    ) -> None:
        self._make, self._count = make, count
        self._most_begun = max(1, depth) + num_threads
        self._ready: dict[int, T | BaseException] = {}
        self._next_to_make = self._num_taken = 0
        self._lock = threading.Lock()
        self._has_more = threading.Condition(self._lock)  # for the consumer
        self._has_space = threading.Condition(self._lock)  # for the producers
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads and drop the finished items; each thread ends after the item it is making."""
        with self._lock:
            self._is_closed = True
            self._ready.clear()
            self._has_more.notify_all()
            self._has_space.notify_all()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def take(self) -> Iterator[T]:
        """Yield the results in order."""
        while self._num_taken < self._count:
            with self._lock:
                while self._num_taken not in self._ready and not self._is_closed:
                    self._has_more.wait()
                if self._is_closed:
                    raise RuntimeError("the Loader was closed before its last batch")
                made = self._ready.pop(self._num_taken)
                if isinstance(made, BaseException):
                    raise made
                self._num_taken += 1
                self._has_space.notify()
            yield made

    def _run(self) -> None:
        while (number := self._begun()) is not None:
            try:
                made: T | BaseException = self._make(number)
            except BaseException as error:
                made = error
            with self._lock:
                if self._is_closed:
                    return
                self._ready[number] = made
                if isinstance(made, BaseException):
                    self._next_to_make = self._count
                    self._has_space.notify_all()
                if number == self._num_taken:
                    self._has_more.notify()

    def _begun(self) -> int | None:
        """Return the next number to make, once there is space for it; None at the end."""
        with self._lock:
            while not self._is_closed and self._next_to_make < self._count:
                if self._next_to_make - self._num_taken < self._most_begun:
                    self._next_to_make += 1
                    return self._next_to_make - 1
                self._has_space.wait()
        return None


def weights_by_feature(batch: Batch, tables: Sequence[Table]) -> dict[str, Floats]:
    """Return the weights of a batch, under the names of `weights_features`."""
    if batch.weights is None:
        return {}
    return {table.weights_feature: part for table, part in zip(tables, batch.by_feature(batch.weights), strict=True)
            if table.weights_column}


def pooling_weights(batch: Batch, tables: Sequence[Table]) -> Floats:
    """Return what each row is multiplied by before rows are summed."""
    assert batch.weights is not None
    return np.concatenate([weights_in_sum(*feature) for feature in zip(
        batch.by_feature(batch.weights), batch.lengths, tables, strict=True)])


def weights_in_sum(weights: Floats, lengths: Int32s, table: Table) -> Floats:
    """Return the factors of one feature's ids; for a mean each id's share of its sample's weights."""
    if table.pooling != "mean":
        return weights
    owner = np.repeat(np.arange(len(lengths)), lengths)
    total = np.bincount(owner, weights, minlength=len(lengths))
    return weights / np.where(total > 0, total, 1).astype(np.float32)[owner]
