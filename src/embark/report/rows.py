"""The numbers of a run of any length in bounded memory: where they become too many, only extremes are kept."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from embark.features.arrays import Doubles
from embark.formatting import to_float

STEP, TIME = "step", "time_s"
_WAITING = 1024


class Rows:
    """A table that grows in both directions: `step`, `time_s`, and the measured columns."""

    def __init__(self, names: Sequence[str] = (), *, max_rows: int = 1 << 17, max_cells: int = 1 << 22) -> None:
        self._columns: dict[str, int] = {name: at for at, name in enumerate((STEP, TIME, *names))}
        self._cells = np.empty((256, len(self._columns)))
        self._num = 0
        self._each = 2  # Number of rows that are reduced to two.
        self._num_loose = 0  # The last rows that do not make a block yet.
        self._waiting: list[Sequence[Any]] = []
        self._max_rows = max_rows
        self._max_cells = max_cells
        self._cuts: list[tuple[int, float]] = []

    def __len__(self) -> int:
        self._settle()
        return self._num

    @property
    def names(self) -> list[str]:
        """Names of the measured columns."""
        return list(self._columns)[2:]

    def add(self, row: Sequence[Any]) -> None:
        """Add step, time and the values in the order of the columns. What is no number is a gap."""
        self._waiting.append(row)
        if len(self._waiting) >= _WAITING:
            self._settle()

    def add_named(self, step: Any, time_s: float, values: Mapping[str, Any]) -> None:
        """Add values by name; a new name makes a column."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._settle()
            self._columns |= {name: len(self._columns) + at for at, name in enumerate(new)}
            self._cells = np.hstack([self._cells, np.full((len(self._cells), len(new)), np.nan)])
        self.add((step, time_s, *(values.get(name) for name in self.names)))

    def begin_again(self, step: float) -> None:
        """Resume from `step`: earlier values of later steps no longer count."""
        self._settle()
        self._num_loose = 0
        if self._num:
            self._cuts.append((self._num, step))

    def column(self, name: str, by: str = STEP) -> tuple[Doubles, Doubles]:
        """Return positions and values, in order. With `by` step, steps that were trained again later are left out."""
        self._settle()
        if name not in self._columns:
            return np.empty(0), np.empty(0)
        cells = self._cells[: self._num]
        xs, ys = cells[:, self._columns[by]], cells[:, self._columns[name]]
        counts = np.isfinite(xs)
        if by == STEP:
            for end, step in self._cuts:
                counts[:end] &= xs[:end] <= step
        xs, ys = xs[counts], ys[counts]
        if len(xs) > 1 and (np.diff(xs) < 0).any():
            order = np.argsort(xs, kind="stable")
            xs, ys = xs[order], ys[order]
        return xs, ys

    def values(self, name: str) -> Doubles:
        """Return the finite values of a column, by step."""
        values = self.column(name)[1]
        return values[np.isfinite(values)]

    def last(self, num_rows: int) -> dict[str, Doubles]:
        """Return the newest rows, by column."""
        self._settle()
        cells = self._cells[max(0, self._num - num_rows) : self._num]
        return {name: cells[:, at].copy() for name, at in self._columns.items()}

    def _settle(self) -> None:
        """Store the waiting rows. Those that do not make a block yet stay as they are, at the end."""
        if not self._waiting:
            return
        loose = self._cells[self._num - self._num_loose : self._num]
        new = np.vstack([loose, _as_cells(self._waiting, len(self._columns))])
        self._waiting = []
        self._num -= self._num_loose
        self._num_loose = 0
        limit = min(self._max_rows, max(256, self._max_cells // len(self._columns))) // 4 * 4
        at = 0
        while at < len(new):
            # a block of more rows than fit is closed early
            each = min(self._each, limit // 4)
            whole = (len(new) - at) // each * each
            taken = min(whole, limit // 4 // 2 * each) or len(new) - at
            part = extremes(new[at : at + taken], each) if whole and each > 2 else new[at : at + taken]
            if self._num + len(part) > limit:
                self._halve()
                continue
            self._append(part)
            self._num_loose = 0 if whole or each <= 2 else taken
            at += taken

    def _append(self, new: Doubles) -> None:
        if self._num + len(new) > len(self._cells):
            more = np.full((max(len(self._cells), len(new)), len(self._columns)), np.nan)
            self._cells = np.vstack([self._cells, more])
        self._cells[self._num : self._num + len(new)] = new
        self._num += len(new)

    def _halve(self) -> None:
        """Reduce blocks of twice as many rows to two from now on."""
        whole = self._num // 4 * 4
        halved = np.concatenate([extremes(self._cells[:whole], 4), self._cells[whole : self._num]])
        self._num = len(halved)
        self._cells[: self._num] = halved
        self._each *= 2
        self._cuts = [(-(-end // 2), step) for end, step in self._cuts]


def extremes(cells: Doubles, each: int) -> Doubles:
    """Reduce blocks of `each` rows to two: the least and the greatest of each column, in the order they came."""
    blocks = cells.reshape(-1, each, cells.shape[1])
    gap = np.isnan(blocks)
    low = np.argmin(np.where(gap, np.inf, blocks), axis=1)
    high = np.argmax(np.where(gap, -np.inf, blocks), axis=1)
    both = (np.minimum(low, high), np.maximum(low, high))
    pairs = np.stack([np.take_along_axis(blocks, at[:, None, :], 1)[:, 0] for at in both], axis=1)
    return pairs.reshape(-1, cells.shape[1])


def _as_cells(rows: Iterable[Sequence[Any]], width: int) -> Doubles:
    rows = list(rows)
    if all(len(row) == width for row in rows):
        try:
            return np.array(rows, np.float64)
        except (ValueError, TypeError, OverflowError):
            pass
    cells = np.full((len(rows), width), np.nan)
    for at, row in enumerate(rows):
        for column, value in enumerate(row[:width]):
            read = to_float(value)
            cells[at, column] = np.nan if read is None else read
    return cells
