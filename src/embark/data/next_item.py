"""Samples of next-item models: a user's newest items, and items that the user did not choose, of a log in memory or
prepared."""

from __future__ import annotations

from typing import Any

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Hashes, Int32s, Int64s, Mask, ragged_positions
from embark.features.hashing import STEP, hash_counters, stream_key, uniform
from embark.spec import DataSpec, ModelSpec
from embark.values import frozen
from .loader import Batch

_ORDER, _NEGATIVES, _EVAL_NEGATIVES = range(3)
MAX_REDRAWS = 100
_FILTER_BITS = 16  # Marks of chosen items for each of them.


@frozen
class Users:
    """Some users with their items, oldest first."""

    numbers: Int64s  # What their negatives are drawn by.
    items: Int32s  # One user behind the other.
    lengths: Int64s
    ends: Int64s  # How many items there are up to the history's last.
    times: Int32s | None = None  # As `items`.


def order_key(seed: int, epoch: int) -> Any:
    """Return the key by which the users of an epoch are shuffled."""
    return stream_key(seed, _ORDER, epoch)


class NextItemBatches:
    """Makes batches of users."""

    def __init__(self, model: ModelSpec, data: DataSpec, catalog: Int32s, counts: Int64s) -> None:
        self.catalog, self.counts = catalog, counts
        by_name = {table.name: table for table in model.table_list()}
        roles = model.sequence
        self._tables, self._num_dense, self._seed = model.table_list(), model.num_dense, data.seed
        self._history, self._negatives = by_name[roles.history], by_name.get(roles.negatives)
        self._times = roles.times
        self._how = data.interactions
        self._sampler = FrequencySampler(counts) if self._how.negatives == "frequency" else None

    @property
    def max_length(self) -> int:
        """The longest history, the item included that is predicted last."""
        return self._history.multi_hot

    def check_users(self, path: str, most_distinct: int, name: str) -> None:
        """Refuse a log of which a user has chosen every item."""
        if self._negatives is not None and most_distinct >= len(self.catalog):
            raise DataError(f"{path}: {name} chose all of the {len(self.catalog)} items of the log, so that no "
                            "negative is left", "leave out this user, or add rows of other items")

    def train(self, users: Users, epoch: int) -> Batch:
        """Return samples with negatives of this epoch."""
        num = self._negatives.multi_hot if self._negatives and self._how.negatives != "in_batch" else 0
        return self._batch(users, stream_key(self._seed, _NEGATIVES, epoch), num, self._sampler)

    def evaluate(self, users: Users) -> Batch:
        """Return samples whose last item is to be found, with the same negatives every time."""
        num = self._how.num_eval_negatives if self._negatives else 0
        return self._batch(users, stream_key(self._seed, _EVAL_NEGATIVES), num, None)

    def _batch(self, users: Users, key: Any, num_negatives: int, sampler: FrequencySampler | None) -> Batch:
        lengths = np.minimum(users.ends, self._history.multi_hot)
        starts = np.cumsum(users.lengths) - users.lengths
        rows = ragged_positions(starts + users.ends - lengths, lengths)
        found = {self._history.name: (users.items[rows], lengths)}
        if self._negatives:
            found[self._negatives.name] = (self._draw(users, key, num_negatives, sampler),
                                           np.full(len(lengths), num_negatives))
        if self._times and users.times is not None:
            found[self._times] = (users.times[rows], lengths)
        missing = [table.name for table in self._tables if table.name not in found]
        if missing:
            raise DataError(f"model.tables: {missing[0]} is nothing that an interaction log has",
                            "it has the features that [model.sequence] names")
        return Batch(
            dense=np.zeros((len(lengths), self._num_dense), np.float32),
            ids=np.concatenate([found[table.name][0] for table in self._tables]),
            lengths=np.stack([found[table.name][1] for table in self._tables]).astype(np.int32),
            label=np.ones(len(lengths), np.float32), is_fixed=False
        )

    def _draw(self, users: Users, key: Any, num: int, sampler: FrequencySampler | None) -> Int32s:
        """Draw items of the log that are not among the users' own, by user and index alone."""
        num_rows = int(self.catalog[-1]) + 1
        chosen = _Chosen(users, num_rows)
        counters = ((users.numbers * num)[:, None] + np.arange(num)).reshape(-1) * MAX_REDRAWS
        owner = np.repeat(np.arange(len(users.numbers)) * num_rows, num)
        drawn = self._items(hash_counters(key, counters), sampler)
        pending = np.flatnonzero(chosen.has(owner + drawn))
        for turn in range(1, MAX_REDRAWS):
            if not len(pending):
                break
            drawn[pending] = self._items(hash_counters(key, counters[pending] + turn), sampler)
            pending = pending[chosen.has(owner[pending] + drawn[pending])]
        return drawn

    def _items(self, bits: Hashes, sampler: FrequencySampler | None) -> Int32s:
        """Return an item of the catalog for each 64 random bits."""
        if sampler is not None:
            return self.catalog[sampler.draw(uniform(bits))]
        bits >>= np.uint64(32)
        bits *= np.uint64(len(self.catalog))
        bits >>= np.uint64(32)
        return self.catalog.take(bits.view(np.int64))


class _Chosen:
    """The items of some users. Marks in a small table find nearly all items that are not among them."""

    def __init__(self, users: Users, num_rows: int) -> None:
        owner = np.repeat(np.arange(len(users.lengths)) * num_rows, users.lengths)
        self._pairs = np.sort(owner + users.items)
        self._shift = np.uint64(64 - max(10, (_FILTER_BITS * len(self._pairs)).bit_length()))
        self._marks = np.zeros(1 << (64 - int(self._shift)), np.bool_)
        self._marks[self._slots(self._pairs)] = True

    def _slots(self, pairs: Int64s) -> Hashes:
        slots = pairs.view(np.uint64) * np.uint64(STEP)
        slots >>= self._shift
        return slots

    def has(self, pairs: Int64s) -> Mask:
        """Tell of each pair of a user and an item whether the user has the item."""
        found: Mask = self._marks.take(self._slots(pairs).view(np.int64))
        maybe = np.flatnonzero(found)
        at = np.minimum(np.searchsorted(self._pairs, pairs[maybe]), max(0, len(self._pairs) - 1))
        found[maybe] = self._pairs[at] == pairs[maybe]
        return found


class FrequencySampler:
    """Draws positions, as likely as their counts are large."""

    def __init__(self, counts: Int64s) -> None:
        self._ends = np.cumsum(counts)
        # Where the search begins: a table of four cells for each position leaves few steps.
        cells = np.arange(4 * len(counts)) * (int(self._ends[-1]) / (4 * len(counts)))
        self._firsts = np.searchsorted(self._ends, cells, side="right")

    def draw(self, fractions: Any) -> Int64s:
        """Return the position of each fraction in [0, 1)."""
        values = fractions * int(self._ends[-1])
        at: Int64s = self._firsts[(fractions * len(self._firsts)).astype(np.int64)]
        pending = np.flatnonzero(self._ends[at] <= values)
        while len(pending):
            at[pending] += 1
            pending = pending[self._ends[at[pending]] <= values[pending]]
        return at
