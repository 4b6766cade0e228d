"""Rows that wait for their ids: for `frequency` all training rows are counted before the first id is known.

A segment's rows lie in runs. In a run each column's values are numbered among themselves: `codes` from 1 on, by
rising key, 0 for a missing one. The distinct keys and how many training rows have each lie in a second file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.pieces import Keys

STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Column:
    """One sparse column of some rows."""

    values: NDArray[Any]
    """Codes of a column that is to be numbered; else ids."""
    lengths: NDArray[np.int32] | None = None
    keys: Keys | None = None
    """Of a column that is to be numbered: distinct, rising; code − 1 is the place."""
    counts: NDArray[np.uint32] | None = None
    """Training rows that have each key."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some rows of a segment, in order."""

    label: NDArray[np.uint8]
    split: NDArray[np.uint8]
    dense: NDArray[np.float32]
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Where a column's distinct keys of one run lie."""

    path: Path
    start: int
    """In bytes; the counts follow the keys."""
    num_keys: int
    dtype: np.dtype[Any]

    def read_keys(self, start: int, stop: int) -> Keys:
        return np.fromfile(self.path, self.dtype, stop - start, offset=self.start + start * self.dtype.itemsize)

    def read_counts(self, start: int, stop: int) -> NDArray[np.uint32]:
        offset = self.start + self.num_keys * self.dtype.itemsize + start * 4
        return np.fromfile(self.path, np.uint32, stop - start, offset=offset)

    def map_keys(self) -> Keys:
        """Without reading them, for looking at a few."""
        if not self.num_keys:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.start, (self.num_keys,))


def encode(
    keys: Keys, is_missing: NDArray[np.bool_] | None, is_train: NDArray[np.bool_], lengths: NDArray[np.int32] | None
) -> Column:
    """Number the values of a run among themselves. `is_train` is by row."""
    if lengths is not None:
        is_train = np.repeat(is_train, lengths)
    present = None if is_missing is None else np.flatnonzero(~is_missing)
    order, rising = _sorted(keys if present is None else keys[present])
    if present is not None:
        order = present[order]
    is_new = np.empty(len(rising), np.bool_)
    is_new[:1] = True
    np.not_equal(rising[1:], rising[:-1], out=is_new[1:])
    distinct = rising[is_new]
    codes = np.zeros(len(keys), _code_dtype(len(distinct)))
    codes[order] = np.cumsum(is_new, dtype=np.uint32)
    counts = np.bincount(codes[is_train], minlength=len(distinct) + 1)[1:].astype(np.uint32)
    return Column(codes, lengths, distinct, counts)


class StageWriter:
    """Writes the runs of one segment."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._paths = _paths(directory, name)
        self._rows, self._keys = (open(f"{path}.part", "wb") for path in self._paths)  # noqa: SIM115
        self._runs: list[dict[str, Any]] = []

    def add(self, run: Run) -> None:
        """Write one more run."""
        told: dict[str, Any] = {"rows": len(run.label), "start": self._rows.tell(), "columns": []}
        for array in (run.label, run.split, run.dense):
            self._rows.write(np.ascontiguousarray(array).data)
        for column in run.columns:
            about: dict[str, Any] = {"num": len(column.values), "dtype": column.values.dtype.str}
            if column.lengths is not None:
                self._rows.write(column.lengths.astype(np.int32).data)
            self._rows.write(np.ascontiguousarray(column.values).data)
            if column.keys is not None and column.counts is not None:
                about |= {"keys": self._keys.tell(), "num_keys": len(column.keys), "key": column.keys.dtype.str}
                self._keys.write(column.keys.data)
                self._keys.write(column.counts.data)
            told["columns"].append(about)
        self._runs.append(told)

    def close(self) -> list[dict[str, Any]]:
        """Everything is on disk; the record by which it is found again."""
        for file, path in zip((self._rows, self._keys), self._paths, strict=True):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(f"{path}.part", path)
        return self._runs


def read_runs(
    directory: Path, name: str, record: Sequence[dict[str, Any]], num_dense: int, is_list: Sequence[bool]
) -> Iterator[Run]:
    """The runs of a segment, without keys."""
    with open(_paths(directory, name)[0], "rb") as file:
        for told in record:
            num = told["rows"]
            label, split = _take(file, np.uint8, num), _take(file, np.uint8, num)
            dense = _take(file, np.float32, num * num_dense).reshape(num, num_dense)
            columns = []
            for about, has_lengths in zip(told["columns"], is_list, strict=True):
                lengths = _take(file, np.int32, num) if has_lengths else None
                columns.append(Column(_take(file, np.dtype(about["dtype"]), about["num"]), lengths))
            yield Run(label, split, dense, tuple(columns))


def keys_of(directory: Path, name: str, record: Sequence[dict[str, Any]], column: int) -> list[RunKeys]:
    """A column's keys in each run of a segment."""
    path = _paths(directory, name)[1]
    found = [told["columns"][column] for told in record]
    return [RunKeys(path, about["keys"], about["num_keys"], np.dtype(about["key"])) for about in found]


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.rows", directory / f"{name}.keys"


def _take(file: BinaryIO, dtype: Any, num: int) -> NDArray[Any]:
    array = np.empty(num, dtype)
    if file.readinto(array.data.cast("B") if num else bytearray()) != array.nbytes:  # type: ignore[attr-defined]
        raise EOFError(file.name)
    return array


def _code_dtype(num_keys: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if num_keys < 1 << 8 else np.uint16 if num_keys < 1 << 16 else np.uint32


def _sorted(keys: Keys) -> tuple[NDArray[np.integer[Any]], Keys]:
    """The order that sorts them, and them in it."""
    if keys.dtype == np.uint32:
        # Key and place in one word: sorting words takes half the time of sorting places by key.
        words = keys.astype(np.uint64)
        words <<= np.uint64(32)
        words |= np.arange(len(keys), dtype=np.uint64)
        words.sort()
        return words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(keys)
    return order, keys[order]
