"""What the workers do: segments to parts, or to staged runs; a column's ids; staged runs to parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.bad_rows import SegmentTally
from embark.data.prepare.budget import Budget
from embark.data.prepare.ids import How, feature_of, hashed
from embark.data.prepare.journal import Journal
from embark.data.prepare.numbering import Targets, number_keys, read_codes
from embark.data.prepare.pieces import Inputs, Keys, RawRows, Schema, Segment
from embark.data.prepare.pool import Report
from embark.data.prepare.readers import reader_for
from embark.data.prepare.splits import TRAIN, split_rows
from embark.data.prepare.staging import STAGED, Column, Run, StageWriter, encode, keys_of, read_runs
from embark.data.prepare.transform import transform_of, transformed
from embark.data.prepared.layout import Layout, Rows
from embark.data.prepared.manifest import SPLITS
from embark.data.prepared.part_writer import PartWriter
from embark.spec.run import RunSpec

IDS = "ids"
"""Folder of the maps from keys to ids, beside the data."""
Kind = Literal["read", "stage", "number", "write"]
_Finish = Callable[[], dict[str, Any]]
"""Puts what was done on disk and gives its record."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work that leaves a record in the journal."""

    kind: Kind
    name: str
    """Of the segment, or of the column to number."""
    weight: int
    """How much of the stage it is: bytes of input, keys, rows."""
    segment: Segment | None = None
    file_index: int = 0
    column: int = 0
    layout: Layout | None = None
    """Of what is written."""
    starts: tuple[int, ...] = ()
    """Of each column that was numbered: the place of the segment's first key among all."""

    @property
    def record(self) -> str:
        """Its record's name."""
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a task."""

    record: dict[str, Any]
    seconds: dict[str, float]
    """By kind of work."""


@dataclass(slots=True)
class _Clock:
    """Where the time goes."""

    seconds: dict[str, float] = field(default_factory=dict)
    _at: float = field(default_factory=time.perf_counter)

    def lap(self, what: str) -> None:
        """What was done since the last lap."""
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._at
        self._at = now


@dataclass(frozen=True)
class Preparation:
    """All that a worker must know. It is sent to each once."""

    spec: RunSpec
    schema: Schema
    inputs: Inputs
    out: Path
    budget: Budget
    hows: tuple[How, ...]
    segment_names: tuple[str, ...] = ()

    def do(self, task: Task, report: Report) -> Callable[[], Result]:
        """The task; calling what comes back waits for the disk and writes the record, which makes it done."""
        clock = _Clock()
        finish = {"read": self._read, "stage": self._stage, "number": self._number, "write": self._write}[task.kind](
            task, report, clock)

        def finished() -> Result:
            began_s = time.perf_counter()
            record = finish()
            Journal(self.out).write(task.record, record)
            return Result(record, clock.seconds | {"waiting for the disk": time.perf_counter() - began_s})

        return finished

    def hash_layout(self) -> Layout:
        """Where every column's rows are given."""
        return self.layout([column.rows or 1 for column in self.schema.sparse])

    def layout(self, rows: Sequence[int]) -> Layout:
        """With tables of so many rows."""
        features = (feature_of(column, num) for column, num in zip(self.schema.sparse, rows, strict=True))
        return Layout(self.schema.dense, tuple(features), self.spec.data.prepare.dense_bits)

    @property
    def staged(self) -> Path:
        return Journal(self.out).directory / STAGED

    def targets(self, column: int) -> Targets:
        """Where the ids of a column go."""
        name = self.schema.sparse[column].name
        return Targets(self.out / IDS / f"{name}.keys.npy", self.out / IDS / f"{name}.ids.npy",
                       self.staged / f"{name}.codes")

    def _read(self, task: Task, report: Report, clock: _Clock) -> _Finish:
        """Rows straight to parts: every id is known by its key alone."""
        layout = task.layout or self.hash_layout()
        writers = _Writers(self.out, task.name, layout)
        tally = SegmentTally()
        for raw, split, dense in self._portions(task, tally, report, clock):
            ids = tuple(self._hashed(i, raw.keys[i], raw.is_missing[i]) for i in range(len(raw.keys)))
            clock.lap("ids")
            writers.add(Rows(raw.label, dense, ids, raw.lengths), split)
            clock.lap("writing")
        return lambda: tally.to_json() | {"parts": writers.close()}

    def _stage(self, task: Task, report: Report, clock: _Clock) -> _Finish:
        """Rows to runs: their ids are known when all are counted."""
        writer = StageWriter(self.staged, task.name)
        tally = SegmentTally()
        waiting: list[_Portion] = []
        for raw, split, dense in self._portions(task, tally, report, clock):
            columns = tuple(
                _Values(raw.keys[i], raw.is_missing[i], raw.lengths[i]) if how == "frequency" else
                _Values(self._hashed(i, raw.keys[i], raw.is_missing[i]), None, raw.lengths[i])
                for i, how in enumerate(self.hows)
            )
            waiting.append(_Portion(raw.label.astype(np.uint8), split, dense, columns))
            clock.lap("ids")
            if sum(len(w.label) for w in waiting) >= self.budget.run_rows:
                self._end_run(writer, waiting, clock)
        self._end_run(writer, waiting, clock)
        return lambda: tally.to_json() | {"runs": writer.close()}

    def _end_run(self, writer: StageWriter, waiting: list[_Portion], clock: _Clock) -> None:
        if not waiting:
            return
        split = np.concatenate([w.split for w in waiting])
        is_train = split == TRAIN
        columns = []
        for i, how in enumerate(self.hows):
            joined = _joined([w.columns[i] for w in waiting])
            columns.append(encode(joined.keys, joined.is_missing, is_train, joined.lengths) if how == "frequency" else
                           Column(joined.keys, joined.lengths))
        clock.lap("ids")
        writer.add(Run(np.concatenate([w.label for w in waiting]), split, np.concatenate([w.dense for w in waiting]),
                       tuple(columns)))
        waiting.clear()
        clock.lap("writing")

    def _number(self, task: Task, report: Report, clock: _Clock) -> _Finish:
        """Ids for a column's keys, the most frequent first."""
        column, prepare = self.schema.sparse[task.column], self.spec.data.prepare
        (self.out / IDS).mkdir(exist_ok=True)
        runs = [run for name in self.segment_names
                for run in keys_of(self.staged, name, self._runs(name), task.column)]
        limit = column.rows or prepare.max_rows
        numbered = number_keys(runs, self.targets(task.column), min_count=prepare.min_count, max_kept=limit - 1,
                               max_entries=self.budget.max_entries, report=report)
        clock.lap("ids")
        return lambda: {"distinct": numbered.num_distinct, "kept": numbered.num_kept,
                        "rows": column.rows or 1 + numbered.num_kept, "name": column.name}

    def _write(self, task: Task, report: Report, clock: _Clock) -> _Finish:
        """Staged runs to parts, now that every key has its id."""
        assert task.layout is not None
        layout, runs = task.layout, self._runs(task.name)
        numbered = [i for i, how in enumerate(self.hows) if how == "frequency"]
        tables: dict[int, Iterator[NDArray[np.int32]]] = {}
        for start, i in zip(task.starts, numbered, strict=True):
            counts = [run["columns"][i]["num_keys"] for run in runs]
            starts = start + np.cumsum([0, *counts[:-1]])
            tables[i] = read_codes(self.targets(i).codes, starts.tolist(), counts)
        writers = _Writers(self.out, task.name, layout)
        is_list = [column.is_list for column in self.schema.sparse]
        for run in read_runs(self.staged, task.name, runs, len(self.schema.dense), is_list):
            clock.lap("reading")
            ids = tuple(
                np.concatenate([[0], next(tables[i])]).astype(feature.id_dtype)[column.values] if i in tables else
                column.values for i, (feature, column) in enumerate(zip(layout.features, run.columns, strict=True))
            )
            clock.lap("ids")
            writers.add(Rows(run.label, run.dense, ids, tuple(column.lengths for column in run.columns)), run.split)
            clock.lap("writing")
            report(len(run.label), 0, 0)
        return lambda: {"parts": writers.close()}

    def _portions(
        self, task: Task, tally: SegmentTally, report: Report, clock: _Clock
    ) -> Iterator[tuple[RawRows, NDArray[np.uint8], NDArray[np.float32]]]:
        """Rows of the segment with their split and their dense values as the model wants them."""
        assert task.segment is not None
        reader = reader_for(self.schema, self.spec, self.inputs)
        how, told = transform_of(self.spec.data.prepare, self.schema), 0
        for raw in reader.read(task.segment, self.budget.chunk_bytes):
            clock.lap("parsing")
            tally.add(raw)
            split = split_rows(self.spec.data, task.file_index, task.segment, raw)
            dense = transformed(raw.dense, how)
            clock.lap("dense")
            if len(raw):
                yield raw, split, dense
            read_bytes = min(raw.read_bytes, task.weight - told)
            told += read_bytes
            report(read_bytes, len(raw), raw.num_bad)
        clock.lap("parsing")
        report(task.weight - told, 0, 0)

    def _hashed(self, column: int, keys: Keys, is_missing: NDArray[np.bool_] | None) -> NDArray[Any]:
        rows = self.schema.sparse[column].rows
        assert rows is not None
        return hashed(keys, is_missing, rows, feature_of(self.schema.sparse[column], rows).id_dtype)

    def _runs(self, name: str) -> list[dict[str, Any]]:
        record = Journal(self.out).read(f"stage/{name}")
        assert record is not None
        runs: list[dict[str, Any]] = record["runs"]
        return runs


@dataclass(frozen=True, slots=True)
class _Values:
    """A column of a portion: its keys, or its ids where they are known."""

    keys: NDArray[Any]
    is_missing: NDArray[np.bool_] | None
    lengths: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class _Portion:
    label: NDArray[np.uint8]
    split: NDArray[np.uint8]
    dense: NDArray[np.float32]
    columns: tuple[_Values, ...]


def _joined(several: Sequence[_Values]) -> _Values:
    is_missing = None
    if any(v.is_missing is not None for v in several):
        is_missing = np.concatenate(
            [np.zeros(len(v.keys), np.bool_) if v.is_missing is None else v.is_missing for v in several])
    lengths = [v.lengths for v in several if v.lengths is not None]
    return _Values(np.concatenate([v.keys for v in several]), is_missing, np.concatenate(lengths) if lengths else None)


class _Writers:
    """The parts of a segment, by split."""

    def __init__(self, out: Path, name: str, layout: Layout) -> None:
        self._writers = [PartWriter(out, f"{split}/{name}", layout) for split in SPLITS]

    def add(self, rows: Rows, split: NDArray[np.uint8]) -> None:
        nums = np.bincount(split, minlength=len(SPLITS))
        for position, num in enumerate(nums):
            if num == len(rows):
                self._writers[position].add(rows)
            elif num:
                self._writers[position].add(_picked(rows, split == position))

    def close(self) -> dict[str, list[dict[str, Any]]]:
        return {split: [asdict(part) for part in writer.close()]
                for split, writer in zip(SPLITS, self._writers, strict=True)}


def _picked(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """The rows of the mask."""
    places = np.flatnonzero(mask)
    return Rows(
        rows.label[places], rows.dense.take(places, axis=0),
        tuple(ids.take(places) if lengths is None else ids[np.repeat(mask, lengths)]
              for ids, lengths in zip(rows.ids, rows.lengths, strict=True)),
        tuple(None if lengths is None else lengths[places] for lengths in rows.lengths),
    )
