"""What the workers do: segments to parts, or to runs that wait for ids; a column's ids; runs to parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from embark.data.prepared.manifest import IDS, SPLITS
from embark.data.prepared.parts import PartWriter
from embark.data.workers import Report
from embark.features.arrays import Array, Bytes
from embark.features.encoding import IdMethod, hash_ids, weights_of_keys
from embark.features.layout import Feature, Layout, Rows
from embark.features.made import bucket_ids, filled_keys
from embark.features.numbers import DrawnRows, Numbers, NumberSample, with_bounds
from embark.features.rows import Keys, RawRows
from embark.features.schema import Schema, SparseColumn
from embark.features.statistics import ValueStatistics, statistic_columns, with_statistics
from embark.spec import PrepareSpec, RunSpec
from embark.store import LocalStore, commit
from embark.values import JsonDict, frozen
from . import id_numbering, statistics_count
from .inputs import Inputs
from .journal import PREPARING, Journal, record_path
from .rows import Reader, Segment, SegmentCounts
from .splits import TRAIN, assign_splits
from .stored import Extent

if TYPE_CHECKING:
    from embark.features.arrow.row_parser import RowParser
    from .budget import Budget

Kind = Literal["times", "read", "stage", "number", "count", "write", "sequence"]
Finish = Callable[[], JsonDict]  # Waits for the disk and gives the record of what was done.


@frozen
class Task:
    """A piece of work that leaves a record in the journal."""

    kind: Kind
    name: str  # The name of the segment, or of the column to number.
    weight: int  # Size of the task within its stage: bytes of input, keys or rows.
    segment: Segment | None = None
    file_index: int = 0
    column: int = 0
    layout: Layout | None = None  # The layout of the written parts.
    starts: tuple[int, ...] = ()
    """The position of the segment's first key among those of all segments, for each of `Preparation.counted`; of
    sequences, the first bucket of users and the one behind the last."""
    numbers: Numbers | None = None  # How the written parts have numbers.
    split_starts: tuple[int, ...] = ()  # Times at which validation and test begin in a split by time.
    bin_starts: tuple[int, ...] = ()  # Times at which the bins of training rows begin whose labels are counted.
    label_rate: float = 0.0  # Of all training rows.
    first_time: int = 0  # The oldest time of a log.
    min_count: int = 1  # Training rows of a value with an id of its own, if the spec does not say.

    @property
    def record(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Preparation:
    """Everything that a worker must know. It is sent to each worker once."""

    spec: RunSpec
    schema: Schema
    inputs: Inputs
    out: Path
    budget: Budget
    id_methods: tuple[IdMethod, ...]
    segment_names: tuple[str, ...] = ()
    known: Mapping[str, id_numbering.KnownIds] = field(default_factory=dict)  # Ids of earlier data, by column.
    known_statistics: tuple[ValueStatistics, ...] = ()  # Of earlier data.
    numbers: Numbers | None = None  # None: they are fitted to the training rows first.
    drawn: DrawnRows = field(default_factory=DrawnRows)  # For the numbers' samples, by this process.
    is_log: ClassVar[bool] = False  # Rows are choices of users, and become sequences.

    def do(self, task: Task, report: Report) -> Callable[[], JsonDict]:
        """Do the task; calling what is returned waits for the disk and writes the record, which makes it done."""
        finish: Finish = getattr(self, f"_{task.kind}")(task, report)
        return lambda: self.journal.write(task.record, finish())

    @property
    def journal(self) -> Journal:
        return Journal(LocalStore(self.out))

    def moved(self, out: Path) -> Preparation:
        """Return the same preparation in another folder."""
        known = {name: replace(one, keys=out / one.keys.relative_to(self.out), ids=out / one.ids.relative_to(self.out))
                 for name, one in self.known.items()}
        return replace(self, out=out, known=known)

    def needed(self, task: Task) -> Iterator[list[Extent]]:
        """Yield the parts of other tasks' files that a task reads. Each list is here before the next is asked for."""
        def extent(path: Path, start: int = 0, size_bytes: int | None = None) -> Extent:
            return Extent(path.relative_to(self.out).as_posix(), start, size_bytes)

        if task.kind in ("number", "count"):
            yield [Extent(record_path(f"stage/{name}")) for name in self.segment_names]
            names = [f"{task.column}.statistics"]
            entry_bytes = statistics_count.ENTRY.itemsize
            if task.kind == "number":
                names, entry_bytes = [str(i) for i in (task.column, *self._beside(task.column))], 4
                if known := self.known.get(self.schema.sparse[task.column].name):
                    yield [extent(known.keys), extent(known.ids)]
            yield [extent(run.path, run.start, run.num_keys * (run.dtype.itemsize + entry_bytes))
                   for name in names for segment in self.segment_names for run in self._keys_of(segment, name)]
        elif task.kind == "write":
            yield [Extent(record_path(f"stage/{task.name}"))]
            nums = {name: sum(run[name]["num"] for run in self._runs(task.name)) for name in self.counted}
            files = [*((self.id_files(i).codes, 4) for i in self.numbered),
                     *((self.statistic_files(i).codes, statistics_count.BEFORE.itemsize) for i in self.statistics)]
            yield [extent(id_numbering.rows_file(self._runs_directory, task.name)),
                   *(extent(path, start * size, num * size)
                     for (path, size), start, num in zip(files, task.starts, nums.values(), strict=True))]

    def reader(self, *, only_time: bool = False) -> Reader:
        schema = self.schema.only_time() if only_time else self.schema
        return open_reader(schema, self.spec.data.prepare, self.inputs)

    def layout(self, rows: Sequence[int] | None = None) -> Layout:
        """Return the layout with tables of these numbers of rows; without `rows`, with the numbers that the spec
        gives."""
        num_rows = rows or [column.rows or 1 for column in self.schema.sparse if not column.weights_of]
        num_rows = [*num_rows, *(1 for column in self.schema.sparse if column.weights_of)]
        features = (Feature(column.name, num, column.most_ids, column.is_list,
                            column.weights_of) for column, num in zip(self.schema.sparse, num_rows, strict=True))
        dense = self.schema.dense_names if self.numbers is None else self.numbers.names
        return Layout((*dense, *self.schema.statistics_names), tuple(features), self.spec.data.prepare.dense_bits,
                      tuple(label.name for label in self.schema.labels))

    def keep_statistics(self) -> JsonDict:
        """Write the statistics of earlier data beside the new data, and return the manifest's records of them."""
        found = {}
        for one in self.known_statistics:
            files = self.statistic_files(one.column)
            files.keys.parent.mkdir(exist_ok=True)
            for path, values in ((files.keys, one.keys), (files.ids, one.values)):
                with open(f"{path}.part", "wb") as file:
                    np.save(file, values)
                    commit(file, path)
            found[files.ids.stem] = files.record("statistics", {"rows": len(one.keys), "sha256": files.sha256()})
        return found

    @property
    def numbered(self) -> list[int]:
        """Positions of the columns whose ids go by frequency."""
        return [i for i, method in enumerate(self.id_methods) if method == "frequency"]

    @property
    def statistics(self) -> dict[int, SparseColumn]:
        """The columns whose statistics are counted, by their positions."""
        return {} if self.known_statistics else statistic_columns(self.schema)

    @property
    def counted(self) -> list[str]:
        """Names of the keys that runs have: of the numbered columns, then of those with statistics."""
        return [*map(str, self.numbered), *(f"{i}.statistics" for i in self.statistics)]

    def statistic_files(self, column: int) -> id_numbering.IdFiles:
        name = f"{self.schema.sparse[column].name}.statistics"
        return id_numbering.IdFiles(self.out / IDS / f"{name}.keys.npy", self.out / IDS / f"{name}.npy",
                                    self._runs_directory / f"{name}.codes")

    def id_files(self, column: int) -> id_numbering.IdFiles:
        name = self.schema.sparse[column].name
        return id_numbering.IdFiles.of(self.out / IDS, name, self._runs_directory / f"{name}.codes")

    def times_file(self, segment: str) -> Path:
        """Return the file of the times of a segment's rows, as int64."""
        return self._runs_directory / f"{segment}.times"

    def sample_file(self, segment: str) -> Path:
        """Return the file of cells of a segment's training rows."""
        return self._runs_directory / f"{segment}.numbers"

    @property
    def _runs_directory(self) -> Path:
        return self.out / PREPARING / "staged"

    def _times(self, task: Task, report: Report) -> Finish:
        """Write the rows' times alone, which say where a split by time begins."""
        path = self.times_file(task.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.part", "wb") as file:
            for raw in self._raw_portions(task, report, only_time=True):
                assert raw.time is not None
                file.write(raw.time.data)
            commit(file, path)
        return dict

    def _read(self, task: Task, report: Report) -> Finish:
        """Write rows straight to parts: the key alone gives the id."""
        layout = self.layout()
        writers, counts = _Writers(self.out, task.name, layout), SegmentCounts()
        for raw in self._portions(task, counts, report):
            ids = tuple(self._hash(layout, raw, i) for i in range(len(raw.keys)))
            writers.add(Rows(raw.label, raw.dense, ids, raw.lengths), raw.split)
        return lambda: counts.to_json() | {"parts": writers.close()}

    def _stage(self, task: Task, report: Report) -> Finish:
        """Write rows to runs: their ids are known when all are counted."""
        writer, counts = id_numbering.RunWriter(self._runs_directory, task.name), SegmentCounts()
        waiting: list[RawRows] = []
        num_trained = num_positive = 0
        samples = [NumberSample.none(len(self.schema.dense_names))]
        for raw in self._portions(task, counts, report):
            assert raw.split is not None
            trained = np.flatnonzero(raw.split == TRAIN)
            num_trained += len(trained)
            num_positive += int(main_label(raw)[trained].sum())
            if self.numbers is None:
                samples.append(NumberSample.of(self.spec.data.seed, task.file_index, raw.positions[trained],
                                               raw.dense.take(trained, axis=0), self.drawn.highest))
                self.drawn.add(samples[-1])
            waiting.append(raw)
            if not self.counted or sum(map(len, waiting)) >= self.budget.run_rows:
                self._end_run(writer, waiting, task)
        self._end_run(writer, waiting, task)
        if self.numbers is None:
            NumberSample.join(samples).write(self.sample_file(task.name))
        return lambda: counts.to_json() | {"runs": writer.close(), "trained": num_trained, "positive": num_positive}

    def _end_run(self, writer: id_numbering.RunWriter, waiting: list[RawRows], task: Task) -> None:
        if not waiting:
            return
        raw, layout = RawRows.join(waiting), self.layout()
        waiting.clear()
        assert raw.split is not None
        is_train = raw.split == TRAIN
        keys_of: dict[str, tuple[Keys, Array]] = {}
        ids: list[Array] = []
        for i, method in enumerate(self.id_methods):
            if method == "frequency":
                numbered = id_numbering.encode(raw.keys[i], raw.is_missing[i], is_train, raw.lengths[i])
                keys_of[str(i)] = numbered.keys, numbered.counts
                ids.append(numbered.codes)
            else:
                ids.append(self._hash(layout, raw, i))
        for i in self.statistics:
            in_bins = statistics_count.encode_bins(filled_keys(raw.keys[i], raw.is_missing[i]),
                                                   self._bins(task, raw), main_label(raw) > 0)
            keys_of[f"{i}.statistics"] = in_bins.keys, in_bins.entries
            ids.append(in_bins.codes)
        label = raw.label if self.schema.labels else raw.label.astype(np.uint8)
        lengths = (*raw.lengths, *(None for _ in self.statistics))
        writer.add(Rows(label, raw.dense, tuple(ids), lengths), raw.split, keys_of)

    def _bins(self, task: Task, raw: RawRows) -> Bytes:
        """Return the bin of each row: the labels of the bins before it may go into its features."""
        if raw.time is not None:
            bins = np.searchsorted(np.asarray(task.bin_starts, np.int64), raw.time, side="right").astype(np.uint8)
        else:
            bins = statistics_count.random_bins(self.spec.data.seed, task.file_index, raw.positions)
        return np.where(raw.split == TRAIN, bins, np.uint8(statistics_count.HELD_OUT))

    def _number(self, task: Task, report: Report) -> Finish:
        """Number a column's keys, the known ones first, then the most frequent."""
        column, prepare = self.schema.sparse[task.column], self.spec.data.prepare
        (self.out / IDS).mkdir(exist_ok=True)
        runs, beside = ([run for i in columns for name in self.segment_names for run in self._keys_of(name, str(i))]
                        for columns in ([task.column], self._beside(task.column)))
        known, limit = self.known.get(column.name), column.rows or prepare.max_rows
        if known:
            limit = max(known.num_rows, limit)
        found = id_numbering.number_keys(
            runs, self.id_files(task.column), min_count=column.min_count or prepare.min_count or task.min_count,
            max_rows=limit, max_entries=self.budget.max_entries, report=report, known=known, beside=beside,
            has_counts=self.is_log)
        num_rows = max(column.rows or 0, found.num_rows, known.num_rows if known else 0)
        about: JsonDict = {"name": column.name, "rows": num_rows, "distinct": found.num_distinct,
                                 "kept": found.num_known + found.num_new}
        if known:
            about |= {"known": found.num_known, "new": found.num_new}
        return lambda: about | {"sha256": self.id_files(task.column).sha256()}

    def _beside(self, column: int) -> list[int]:
        """Return the other columns whose values have the ids of this one."""
        tables = {table.name: table.weights for table in self.spec.model.tables}
        names = [one.name for one in self.schema.sparse]
        return [i for i in self.numbered if i != column and names[column] in tables
                and tables.get(names[i]) == tables[names[column]]]

    def _count(self, task: Task, report: Report) -> Finish:
        """Count the rows and the labels of each value of a column."""
        column, files = self.schema.sparse[task.column], self.statistic_files(task.column)
        files.keys.parent.mkdir(exist_ok=True)
        runs = [run for name in self.segment_names for run in self._keys_of(name, f"{task.column}.statistics")]
        num = statistics_count.count_values(runs, files, column.statistics, task.label_rate,
                                            self.budget.max_entries // 2, report)
        return lambda: {"name": files.ids.stem, "rows": num, "sha256": files.sha256()}

    def _write(self, task: Task, report: Report) -> Finish:
        """Write runs to parts, now that every key has its id."""
        assert task.layout is not None
        layout, runs = task.layout, self._runs(task.name)
        nums = {name: [run[name]["num"] for run in runs] for name in self.counted}
        starts = {name: (start + np.cumsum([0, *nums[name][:-1]])).tolist()
                  for name, start in zip(self.counted, task.starts, strict=True)}
        tables = {i: id_numbering.read_codes(self.id_files(i).codes, starts[str(i)], nums[str(i)])
                  for i in self.numbered}
        before = {i: id_numbering.read_codes(self.statistic_files(i).codes, starts[name], nums[name],
                                             statistics_count.BEFORE)
                  for i in self.statistics for name in [f"{i}.statistics"]}
        writers, num = _Writers(self.out, task.name, layout), len(layout.features)
        is_list = [*(column.is_list for column in self.schema.sparse), *(False for _ in self.statistics)]
        for rows, split in id_numbering.read_runs(self._runs_directory, task.name, len(runs), is_list):
            statistics = [statistics_count.row_statistics(
                column.statistics, next(before[i]), codes, split == TRAIN, task.label_rate,
                has_time=self.schema.has_row_time
            ) for (i, column), codes in zip(self.statistics.items(), rows.ids[num:], strict=True)]
            ids = tuple(
                np.concatenate([[0], next(tables[i])]).astype(feature.id_dtype)[values] if i in tables else values
                for i, (feature, values) in enumerate(zip(layout.features, rows.ids, strict=False))
            )
            dense = rows.dense
            if task.numbers:
                schema = with_bounds(self.schema, task.numbers)
                ids = tuple(bucket_ids(column, schema, dense).astype(values.dtype) if column.kind == "bucket" else
                            values for column, values in zip(schema.sparse, ids, strict=True))
                dense = task.numbers.encode(dense)
            if statistics:
                dense = np.concatenate([dense, *statistics], axis=1)
            writers.add(Rows(rows.label, dense, ids, rows.lengths[:num]), split)
            report(len(rows), 0, 0)
        return lambda: {"parts": writers.close()}

    def _portions(self, task: Task, counts: SegmentCounts, report: Report) -> Iterator[RawRows]:
        """Yield rows of the segment with their split, their dense values transformed if nothing must be known first."""
        assert task.segment is not None
        for raw in self._raw_portions(task, report):
            counts.add(raw)
            if self.numbers is not None:
                dense = self.numbers.encode(raw.dense)
                raw = replace(raw, dense=with_statistics(dense, self.known_statistics, raw))
            if len(raw):
                split = assign_splits(self.spec.data, task.file_index, task.segment, raw, task.split_starts)
                yield replace(raw, split=split, time=raw.time if self.statistics else None)

    def _raw_portions(self, task: Task, report: Report, *, only_time: bool = False) -> Iterator[RawRows]:
        """Yield rows of the segment as they are."""
        assert task.segment is not None
        for raw in self.reader(only_time=only_time).read(task.segment, self.budget.chunk_bytes):
            yield raw
            if not only_time:
                report(0, len(raw), raw.num_bad)
        report(task.weight, 0, 0)

    def _hash(self, layout: Layout, raw: RawRows, column: int) -> Array:
        feature = layout.features[column]
        if feature.weights_of:
            return weights_of_keys(raw.keys[column])
        return hash_ids(raw.keys[column], raw.is_missing[column], feature.rows, feature.id_dtype)

    def _keys_of(self, segment: str, name: str) -> list[id_numbering.RunKeys]:
        return id_numbering.keys_of(self._runs_directory, segment, self._runs(segment), name)

    def _runs(self, name: str) -> list[JsonDict]:
        record = self.journal.read(f"stage/{name}")
        assert record is not None
        return list(record["runs"])


def main_label(raw: RawRows) -> Array:
    """Return [n]: 0 or 1."""
    return raw.label if raw.label.ndim == 1 else raw.label[:, 0]


def open_reader(schema: Schema, prepare: PrepareSpec, inputs: Inputs, parser: RowParser | None = None) -> Reader:
    """Open the reader of the schema's format; pyarrow is imported only if it needs it. `parser` takes the columns
    instead of the one that makes rows; Criteo's reader has none."""
    if schema.format == "criteo":
        from .criteo_reader import CriteoReader

        return CriteoReader(schema, inputs)
    from .readers import CsvReader, JsonLinesReader, ParquetReader

    readers: dict[str, type[CsvReader | ParquetReader]] = {
        "csv": CsvReader, "jsonl": JsonLinesReader, "parquet": ParquetReader}
    return readers[schema.format](schema, prepare, inputs, parser)


class _Writers:
    """Writes the parts of a segment, by split."""

    def __init__(self, out: Path, name: str, layout: Layout) -> None:
        self._writers = [PartWriter(out, f"{split}/{name}", layout) for split in SPLITS]

    def add(self, rows: Rows, split: Bytes | None) -> None:
        assert split is not None
        for position, num in enumerate(np.bincount(split, minlength=len(SPLITS))):
            if num:
                self._writers[position].add(rows if num == len(rows) else rows.select(split == position))

    def close(self) -> dict[str, list[JsonDict]]:
        return {split: [asdict(part) for part in writer.close()]
                for split, writer in zip(SPLITS, self._writers, strict=True)}
