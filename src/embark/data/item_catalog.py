"""The items of retrieval as the training data has them: which there are, how often each is a positive, what is known of
each, and which of them a user has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Array, Floats, Int32s, Int64s
from embark.features.hashing import hash_counters, stream_key
from embark.spec import ModelSpec, is_item_table
from embark.values import frozen
from .loader import Batch, SampleSource

_ROWS_AT_ONCE = 65_536
_NEGATIVES = 0x6E6567  # The stream of random numbers.


def next_items(source: SampleSource, model: ModelSpec) -> Int32s:
    """Return the rising rows of the history's table that a model of the next item ranks: those of the log's items, or
    all where the source does not know them."""
    found: Int32s | None = getattr(source, "catalog", None)
    return np.arange(model.feature(model.sequence.history).rows, dtype=np.int32) if found is None else found


@frozen
class ItemCatalog:
    """All items of the training data, by rising id."""

    ids: Int32s  # [n]
    counts: Int64s  # [n]: positives with the item.
    samples: Batch
    """The sample of each item: what it has in its first sample of epoch 0, without what belongs to the user tower."""
    seen: Int64s  # Rising: user × rows of the item table + item, of all positives. Empty without a user.
    num_rows: int  # Rows of the item table.

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, which: Array) -> Batch:
        """Return these items as samples without a user."""
        return self.samples.take(which)

    def seen_by(self, user: int) -> Int64s:
        """Return the positions in the catalogue of the items that the user has in the training data."""
        low, high = np.searchsorted(self.seen, (user * self.num_rows, (user + 1) * self.num_rows))
        return np.searchsorted(self.ids, self.seen[low:high] - user * self.num_rows)

    def negatives(self, seed: int, step: int, first: int, stop: int) -> Int64s:
        """Return the positions of negatives `first` to `stop` of a step. They are drawn uniformly by a counter, so
        that any rank draws its own, and a resumed run those of an undisturbed one."""
        bits = hash_counters(stream_key(seed, _NEGATIVES, step), np.arange(first, stop))
        return (bits % np.uint64(len(self.ids))).astype(np.int64)

    def expected_counts(self, batch_size: int, num_sampled: int) -> Floats:
        """Return by id how often an item is among the candidates of a step on average; 0 for ids that are no item."""
        found = np.zeros(self.num_rows, np.float64)
        found[self.ids] = batch_size * self.counts / max(1, self.counts.sum()) + num_sampled / len(self.ids)
        return found.astype(np.float32)


def with_negatives(batch: Batch, items: Batch) -> Batch:
    """Return the samples of `batch` and behind them those of `items`."""
    return replace(Batch.join([batch, items]), is_fixed=False)


def column_ids(batch: Batch, table: int) -> Int32s:
    """Return the ids [B] of a table with one id per sample; −1 for a sample without one."""
    found = np.full(len(batch.label), -1, np.int32)
    has_one = batch.lengths[table] > 0
    found[has_one] = batch.by_feature(batch.ids)[table]
    return found


@frozen
class _Part:
    """The items in the samples that one rank reads."""

    ids: Int32s
    counts: Int64s
    samples: Batch  # One sample for each id.
    seen: Int64s


def read_item_catalog(
    source: SampleSource, model: ModelSpec, *, rank: int = 0, num_ranks: int = 1,
    gathered: Callable[[Any], Sequence[Any]] = lambda value: [value]
) -> ItemCatalog:
    """Read the training samples once, shared among the ranks; every rank must call it."""
    two, names = model.two_tower, [table.name for table in model.table_list()]
    rows = model.table_list()[names.index(two.item)].rows
    item, user = names.index(two.item), names.index(two.user) if two.user and two.exclude_seen else None
    total = source.num_train_samples
    parts = [_read(source, start, min(start + _ROWS_AT_ONCE, (rank + 1) * total // num_ranks), item, user, rows)
             for start in range(rank * total // num_ranks, (rank + 1) * total // num_ranks, _ROWS_AT_ONCE)]
    mine = _merge(parts, is_item=[is_item_table(model, name) for name in names]) if parts else None
    found = _merge([part for part in gathered(mine) if part is not None],
                   is_item=[is_item_table(model, name) for name in names])
    if not found.counts.sum():
        raise DataError("the training data has no positive sample: two towers learn from rows whose label is 1",
                        "check data.label")
    samples = replace(found.samples, dense=found.samples.dense.copy(), label=np.zeros(len(found.ids), np.float32))
    samples.dense[:, : model.num_dense - two.num_item_dense] = 0
    return ItemCatalog(found.ids, found.counts, samples, found.seen, rows)


def _read(source: SampleSource, start: int, stop: int, item: int, user: int | None, rows: int) -> _Part:
    batch = source.train_rows(0, start, stop)
    items, is_positive = column_ids(batch, item), batch.label > 0.5
    if (items < 0).any():
        raise DataError(f"sample {start + int((items < 0).argmax())} of the training data has no item",
                        "leave out rows without an item")
    ids, first = np.unique(items, return_index=True)
    counts = np.bincount(np.searchsorted(ids, items[is_positive]), minlength=len(ids)).astype(np.int64)
    seen = np.empty(0, np.int64)
    if user is not None:
        users = column_ids(batch, user).astype(np.int64)
        seen = np.unique((users * rows + items)[is_positive & (users >= 0)])
    return _Part(ids, counts, batch.take(first), seen)


def _merge(parts: Sequence[_Part], is_item: Sequence[bool]) -> _Part:
    """Join parts. The sample of an item is that of the first part that has it."""
    every = np.concatenate([part.ids for part in parts])
    ids, first, inverse = np.unique(every, return_index=True, return_inverse=True)
    counts = np.zeros(len(ids), np.int64)
    np.add.at(counts, inverse, np.concatenate([part.counts for part in parts]))
    samples = Batch.join([part.samples for part in parts]).take(first)
    keep = np.array(is_item)
    kept = np.repeat(keep, samples.lengths.sum(axis=1))
    samples = replace(samples, ids=samples.ids[kept], lengths=samples.lengths * keep[:, None], is_fixed=False,
                      weights=None, best_probability=None)
    return _Part(ids, counts, samples, np.unique(np.concatenate([part.seen for part in parts])))
