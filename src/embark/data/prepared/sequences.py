"""Prepared logs as samples of next-item models: users out of mapped blocks."""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from embark.data.loader import Batch, check_range
from embark.data.next_item import NextItemBatches, Users
from embark.features.arrays import Int32s, Int64s, ragged_positions
from embark.features.layout import Block
from embark.spec import DataSpec, ModelSpec
from .manifest import HELD_OUT_ENDS, LOG_SPLITS, SEQUENCES, Manifest, Part
from .order import EpochOrder, Shuffle, row_order
from .parts import Parts

_MOST_ORDERS = 3
_MOST_ROW_ORDERS = 64
_TRAIN, _VALIDATION, _TEST = range(3)


class SequenceSource:
    """The users of a prepared log, in a new order each epoch: by file, by block and within a block. A sample is the
    newest items of a user's training part; of an evaluation, those up to the held-out one."""

    def __init__(
        self, manifest: Manifest, model: ModelSpec, data: DataSpec, parts: Parts, items: tuple[Int32s, Int64s]
    ) -> None:
        self._about, self._fingerprint = manifest.settings[SEQUENCES], manifest.fingerprint()
        self._parts, self._seed, self._block_rows = parts, data.seed, manifest.block_rows
        self._batches = NextItemBatches(model, data, *items)
        self._batches.check_users(data.path, self._about["most_distinct"], "a user")
        self.catalog: Int32s = self._batches.catalog
        self.counts: Int64s = self._batches.counts  # How often each item of the catalog is in the log.
        layout = manifest.layout
        names = [feature.name for feature in layout.features]
        self._ends = [names.index(name) for name in HELD_OUT_ENDS]
        self._has_times = bool(model.sequence.times)
        self._train_parts = manifest.parts.get("train", ())
        every = tuple(part for split in LOG_SPLITS for part in manifest.parts.get(split, ()))
        self._split = _TEST if data.eval_split == "test" else _VALIDATION
        self._held_out = [(part, self._about["held_out"][part.file][self._split - 1]) for part in every]
        self._stops = list(accumulate((num for _, num in self._held_out), initial=0))
        self._firsts = dict(zip((part.file for part in every), accumulate((p.rows for p in every), initial=0),
                                strict=False))
        self.num_train_samples = manifest.num_rows("train")
        self.num_eval_samples = self._stops[-1]
        self._shuffle: Shuffle = "rows" if data.shuffle == "auto" else data.shuffle
        self._orders = lru_cache(_MOST_ORDERS)(self._epoch_order)
        self._row_orders = lru_cache(_MOST_ROW_ORDERS)(partial(row_order, data.seed))
        self._rows_of = lru_cache(_MOST_ROW_ORDERS)(self._held_out_rows)
        longest, most = self._about["longest"], self._batches.max_length
        self.notes: tuple[str, ...] = (f"some of {self._about['users']:,} users have more than {most} items, up to "
                                       f"{longest:,}: the newest are used",) if longest - 2 > most else ()

    def fingerprint(self) -> str:
        return self._fingerprint

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return users `start` to `stop` of the epoch's order, with negatives of this epoch."""
        found: list[Users] = []
        for piece in self._orders(epoch).pieces(start, stop):
            if self._shuffle == "rows":
                whole = type(piece)(piece.part, piece.block, piece.block_rows, 0, piece.block_rows)
                rows = self._row_orders(epoch, whole)[piece.start : piece.stop]
            else:
                rows = np.arange(piece.start, piece.stop)
            found.append(self._users(self._train_parts[piece.part], piece.block, rows, _TRAIN))
        return self._batches.train(_joined(found), epoch)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return held-out users, in the order of the files."""
        return self._batches.evaluate(self._eval_users(start, stop))

    def eval_seen(self, start: int, stop: int) -> tuple[Int32s, Int64s]:
        """Return all items before the held-out one, user by user, and how many each user has."""
        users = self._eval_users(start, stop)
        starts = np.cumsum(users.lengths) - users.lengths
        return users.items[ragged_positions(starts, users.ends - 1)], users.ends - 1

    def _eval_users(self, start: int, stop: int) -> Users:
        check_range(start, stop, self.num_eval_samples)
        found: list[Users] = []
        at = int(np.searchsorted(self._stops, start, side="right")) - 1
        while start < stop or not found:
            part, first = self._held_out[at][0], self._stops[at]
            end = min(stop, self._stops[at + 1])
            rows = self._rows_of(part)[start - first : end - first]
            blocks = rows // self._block_rows
            for block in np.unique(blocks).tolist() or [0]:
                found.append(self._users(part, block, rows[blocks == block] % self._block_rows, self._split))
            start, at = end, at + 1
        return _joined(found)

    def _held_out_rows(self, part: Part) -> Int64s:
        """Return the rows of a part that have a held-out item."""
        with self._parts.using(part) as opened:
            ends = [opened.block(block).ids(self._ends[self._split])[:, 0]
                    for block in range(-(-part.rows // self._block_rows))]
            return np.flatnonzero(np.concatenate(ends))

    def _users(self, part: Part, number: int, rows: Int64s, split: int) -> Users:
        """Copy users out of a block: of training, only their items for that."""
        with self._parts.using(part) as opened:
            block: Block = opened.block(number)
            _, items, offsets = block.ragged[0]
            ends = block.ids(self._ends[split])[rows, 0].astype(np.int64)
            lengths = ends if split == _TRAIN else (offsets[rows + 1] - offsets[rows])
            at = ragged_positions(offsets[rows], lengths)
            times = block.ragged[1][1][at] if self._has_times else None
            first = self._firsts[part.file] + number * self._block_rows
            return Users(first + rows, items[at].astype(np.int32), lengths, ends, times)

    def _epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder([part.rows for part in self._train_parts], self._block_rows, shuffle=self._shuffle,
                          seed=self._seed, epoch=epoch)


def _joined(several: Sequence[Users]) -> Users:
    if len(several) == 1:
        return several[0]

    def joined(name: str) -> Any:
        arrays = [getattr(users, name) for users in several]
        return None if arrays[0] is None else np.concatenate(arrays)

    return Users(*(joined(name) for name in ("numbers", "items", "lengths", "ends", "times")))
