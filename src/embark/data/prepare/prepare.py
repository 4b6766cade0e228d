"""`embark data prepare`: raw files to the prepared format, on all cores, within a memory limit, resumable."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from embark.data.column_report import MAX_ROWS, Problem, unseen_ids
from embark.data.prepared.manifest import (
    EARLIER,
    IDS,
    MANIFEST,
    NUMBERS,
    SEQUENCES,
    SHARED,
    SPLITS,
    TABLES,
    TIME_SPLIT,
    Manifest,
    Part,
    Split,
    shared_tables,
)
from embark.data.progress import MemoryMonitor, OnProgress, ProgressReporter
from embark.data.workers import Executor, Work, WorkerPool
from embark.errors import DataError, UserError
from embark.features.encoding import IdMethod, id_methods
from embark.features.layout import Layout
from embark.features.numbers import Numbers, NumberSample, fit_numbers, fixed_numbers
from embark.features.schema import FIXED_ROWS, Schema, SparseColumn
from embark.spec import POOLED_KINDS, RunSpec
from embark.spec.data import is_of_log
from embark.store import LocalStore, NotFound, ObjectStore, open_store
from embark.values import JsonDict, JsonMap, frozen
from .budget import Budget, plan_budget
from .earlier_ids import EarlierIds, open_earlier
from .guess import guess_schema
from .id_numbering import IdFiles
from .inputs import InputFile, Inputs, open_inputs, tables_of
from .journal import PREPARING, Journal, differences, shown
from .rows import BadRows, should_give_up
from .splits import (
    check_splits,
    describe_time_split,
    given_starts,
    newest_starts,
    time_split_record,
)
from .statistics_count import time_bins
from .stored import Extent, StoredPreparation, TaskFolder, driver_folder
from .tasks import Kind, Preparation, Task, open_reader

SEGMENT_BYTES = 96 << 20
MIN_SEGMENT_BYTES = 8 << 20
SMALL_BYTES = 16 << 20  # Input that is prepared before another process has started.
_PREVIEW_BYTES = 1 << 20
_REVISION = 3  # Version of how rows are made of the input; a journal of another one is of no use.
RARE, ROWS_OF_ONE = 3, 500  # Training rows of a value with an id of its own: so many, at most one in `ROWS_OF_ONE`.
_ALWAYS = ("name", "kind", "is_list", "max_ids", "rows", "column")  # Fields of columns that settings always have.
Record = JsonDict


@frozen
class Preview:
    """The plan of a preparation."""

    schema: Schema
    toml: str  # Lines of the spec, with what was guessed.
    files: list[InputFile]
    splits: str
    ids: str
    budget: Budget

    @property
    def input_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def tables(self) -> list[str]:
        """The Delta and Iceberg tables that are read, with their versions."""
        return list(map(str, tables_of(self.files)))

    def to_dict(self) -> JsonDict:
        schema, budget = self.schema, self.budget
        return {
            "dry_run": True, "format": schema.format, "num_files": len(self.files), "input_bytes": self.input_bytes,
            "tables": self.tables, "columns": schema.describe(), "toml": self.toml, "splits": self.splits,
            "ids": self.ids,
            "memory_bytes": budget.memory_bytes, "num_workers": budget.num_workers,
            "worker_bytes": budget.worker_bytes, "chunk_bytes": budget.chunk_bytes
        }


@frozen
class PrepareResult:
    """The result of a preparation."""

    path: Path | str  # A folder, or the URI in an object store.
    manifest: Manifest
    input_bytes: int
    elapsed_s: float
    memory_bytes: int  # The largest of all processes of this machine together.
    was_complete: bool  # The data was there already, made of the same files with the same settings.
    dropped: Mapping[str, str] = field(default_factory=dict)  # Columns of the input that are in no table, and why.
    id_map_from: str = ""  # The earlier data whose ids were kept.
    hints: tuple[Problem, ...] = ()  # Oddities that a person may want to look at.

    def to_dict(self) -> JsonDict:
        manifest = self.manifest
        return {
            "path": str(self.path), "input_bytes": self.input_bytes, "rows": manifest.rows_by_split,
            "size_bytes": manifest.size_bytes, "bad_rows": manifest.bad_rows, "elapsed_s": self.elapsed_s,
            "memory_bytes": self.memory_bytes, "was_complete": self.was_complete, "layout": manifest.layout.to_json(),
            "dropped": dict(self.dropped), "time_split": manifest.time_split,
            "hints": [asdict(hint) for hint in self.hints],
            **({"id_map_from": self.id_map_from, "id_maps": manifest.settings["id_maps"]} if self.id_map_from else {})
        }


def preview(spec: RunSpec) -> Preview:
    """Say what each column is taken for, and how rows, ids and memory are handled. Nothing is written."""
    spec, schema, inputs, files, earlier = _open_inputs(spec)
    prepare, methods = spec.data.prepare, _methods(spec, schema, earlier)
    if is_of_log(spec):
        return _preview_log(spec, schema, files, earlier)
    splits = {
        "fraction": f"random: {spec.data.eval_fraction:g} to validation, {prepare.test_fraction:g} to test",
        "file": f"by file: {', '.join(prepare.validation_files)} to validation, "
                f"{', '.join(prepare.test_files) or 'none'} to test",
        "time": describe_time_split(spec.data)
    }[prepare.split]
    rare = {None: " or rare", 1: ""}.get(prepare.min_count, f" or seen fewer than {prepare.min_count} times")
    ids = {"hash": "by hash, modulo the table's rows",
           "frequency": f"by frequency: 0 for what is missing{rare}, then by descending count"}
    if earlier:
        ids["frequency"] = f"as in {earlier.path}; new values get new rows"
    schema = _with_transforms(spec, schema, inputs, files, earlier)
    return Preview(schema, schema.to_toml(prepare, spec.features), files, splits,
                   "; ".join(ids[method] for method in dict.fromkeys(
                       method for method, column in zip(methods, schema.sparse, strict=True)
                       if column.kind not in FIXED_ROWS and not column.weights_of)) or "by buckets and times",
                   _budget(spec, schema, has_runs=_has_runs(schema, methods)))


def _preview_log(
    spec: RunSpec, schema: Schema, files: list[InputFile], earlier: EarlierIds | None
) -> Preview:
    from .sequences import describe

    split = describe_time_split(spec.data) + "; the first item of each user there" \
        if spec.data.prepare.split == "time" else "each user's last item to test, the one before it to validation"
    order = f"users' items in the order of column {schema.time_column}" if schema.time_column else \
        "users' items in the order of the rows"
    rare = f"those seen fewer than {spec.data.prepare.min_count} times are left out, then " \
        if (spec.data.prepare.min_count or 1) > 1 else ""
    ids = f"as in {earlier.path}; new items get new rows" if earlier else "by descending count, from 1"
    return Preview(schema, describe(spec, schema), files, f"{order}; {split}", rare + ids,
                   _budget(spec, schema, has_runs=True))


def _with_transforms(
    spec: RunSpec, schema: Schema, inputs: Inputs, files: Sequence[InputFile], earlier: EarlierIds | None
) -> Schema:
    """Return the schema with the transform of each number column as the reason for its role, by the first rows."""
    numbers = earlier.before.numbers if earlier else _fixed_numbers(spec, schema)
    if numbers is None:
        reader = open_reader(schema.without_split(), spec.data.prepare, inputs)
        found = NumberSample.none(len(schema.dense_names))
        for raw in reader.read(reader.segments(files[0], MIN_SEGMENT_BYTES)[0], _PREVIEW_BYTES):
            found = NumberSample.of(spec.data.seed, 0, raw.positions, raw.dense)
            break
        numbers = _fitted(spec, schema, found)
    why = {code.column: "; ".join(filter(None, (schema.why.get(code.column, ""), code.describe())))
           for code in numbers.codes if code.column in schema.dense}
    return replace(schema, why={**schema.why, **why})


def prepare_from_spec(
    spec: RunSpec, out: str | Path = "", *, on_progress: OnProgress | None = None, fresh: bool = False
) -> PrepareResult:
    """Prepare the files of `data.prepare.input` into the folder or the URI `out`, by default `data.path`; what the spec
    leaves open is guessed."""
    spec, schema, inputs, files, earlier = _open_inputs(spec)
    return prepare(spec, schema, inputs, files, out or spec.data.path, on_progress=on_progress, fresh=fresh,
                   earlier=earlier)


def _open_inputs(spec: RunSpec) -> tuple[RunSpec, Schema, Inputs, list[InputFile], EarlierIds | None]:
    """Find the input files of a spec that trains on the data it prepares, and the roles of their columns."""
    if spec.data.kind != "prepared":
        raise UserError(f"data.kind is {spec.data.kind!r}, and `embark data prepare` writes \"prepared\" data",
                        'set data.kind = "prepared" and data.path to the folder to write')
    inputs, files = open_inputs(spec.data.prepare.input)
    earlier = open_earlier(spec, _REVISION)
    if earlier:
        spec = earlier.completed(spec)
    if is_of_log(spec):
        from .sequences import log_options, log_schema

        prepare = log_options(spec.data.prepare, spec.data.interactions)
        spec = spec.changed(data=spec.data.changed(prepare=prepare))
        schema = log_schema(spec, inputs, files)
    else:
        schema = guess_schema(spec, inputs, files)
    return spec, earlier.aligned(spec, schema) if earlier else schema, inputs, files, earlier


def _fixed_numbers(spec: RunSpec, schema: Schema) -> Numbers | None:
    if schema.bucketed:
        return None
    return fixed_numbers(spec.features, schema.dense_names, is_criteo=schema.format == "criteo")


def _fitted(spec: RunSpec, schema: Schema, sample: NumberSample) -> Numbers:
    # A column may become several dense values unasked, unless the spec says how many there are.
    may_add = "num_dense" not in spec.model.model_fields_set and not spec.model.two_tower.num_item_dense
    return fit_numbers(spec.features, schema.dense_names, sample, may_add=may_add, bucketed=schema.bucketed)


def _methods(spec: RunSpec, schema: Schema, earlier: EarlierIds | None) -> tuple[IdMethod, ...]:
    if is_of_log(spec):
        return tuple("hash" if column.is_user else "frequency" for column in schema.sparse)
    return earlier.methods(schema) if earlier else id_methods(spec.data.prepare, schema)


def _budget(spec: RunSpec, schema: Schema, *, has_runs: bool) -> Budget:
    if is_of_log(spec):
        from .sequences import GROUP_BYTES

        return plan_budget(spec.data.prepare, schema, has_runs=has_runs, group_bytes=GROUP_BYTES)
    return plan_budget(spec.data.prepare, schema, has_runs=has_runs)


def _has_runs(schema: Schema, methods: Sequence[IdMethod]) -> bool:
    """Return whether rows wait until all are counted."""
    return "frequency" in methods or any(column.statistics for column in schema.sparse)


def prepare(
    spec: RunSpec, schema: Schema, inputs: Inputs, files: list[InputFile], out: str | Path, *,
    on_progress: OnProgress | None = None, fresh: bool = False, earlier: EarlierIds | None = None
) -> PrepareResult:
    """Prepare `files` into the folder or the URI `out`, with the ids of `earlier` data.

    An interrupted call is resumed. Data that is complete already is left as it is. `fresh` starts over.
    """
    check_splits(spec.data, files)
    began_s, input_bytes = time.monotonic(), sum(file.size_bytes for file in files)
    methods = _methods(spec, schema, earlier)
    numbers = earlier.before.numbers if earlier else _fixed_numbers(spec, schema)
    budget = _budget(spec, schema, has_runs=_has_runs(schema, methods) or numbers is None)
    store, is_log = open_store(out), is_of_log(spec)
    settings = settings_of(spec, schema, files, store, earlier)
    with driver_folder(store) as folder, MemoryMonitor() as memory, Journal(store) as journal:
        if fresh:
            store.delete(MANIFEST)  # first: without it, what is half removed is not data
            journal.clear(*SPLITS, IDS)
        complete = _complete_already(store, settings)
        if complete is None:
            journal.begin(settings)
            if is_log:
                from .sequences import LogPreparation, LogRun
            work = (LogPreparation if is_log else Preparation)(
                spec, schema, inputs, folder.path, budget, methods, numbers=numbers,
                known_statistics=earlier.statistics(schema) if earlier else ())
            run = (LogRun if is_log else Run)(work, files, journal, folder, ProgressReporter(on_progress, memory))
            manifest = run.prepare(settings, earlier)
            run.progress.end()
        journal.remove()
        hints: tuple[Problem, ...] = ()
        if not is_log:
            folder.fetch(_first_parts(complete or manifest))
            hints = tuple(unseen_ids(folder.path, complete or manifest))
    path = store.root if isinstance(store, LocalStore) else store.uri
    return PrepareResult(path, complete or manifest, input_bytes, time.monotonic() - began_s, memory.peak_bytes,
                         was_complete=complete is not None,
                         dropped={name: schema.why.get(name, "") for name in schema.ignored},
                         id_map_from=earlier.path if earlier else "", hints=hints)


def _first_parts(manifest: Manifest) -> Iterator[Extent]:
    """Yield the parts whose rows are looked at in the end."""
    for parts in manifest.parts.values():
        num_rows = 0
        for part in parts:
            if num_rows < MAX_ROWS:
                yield Extent(part.file)
            num_rows += part.rows


def settings_of(
    spec: RunSpec, schema: Schema, files: Sequence[InputFile], store: ObjectStore, earlier: EarlierIds | None = None
) -> JsonDict:
    """Collect all that the result depends on. Files go by the folder of the data: the current directory may be another
    next time."""
    out = store.root if isinstance(store, LocalStore) else "/"
    prepare = spec.data.prepare
    options = prepare.model_dump(mode="json", exclude={"input", "format", "memory_gb", "num_workers", "max_bad_share",
                                                       "id_map_from", "executor"})
    roles = {key: value for key, value in asdict(schema).items()
             if key not in ("why", "examples") and (key != "labels" or value)}
    defaults = {one.name: one.default for one in fields(SparseColumn)}
    roles["sparse"] = [{key: value for key, value in column.items() if key in _ALWAYS or value != defaults[key]}
                       for column in roles["sparse"]]
    numbers = _fixed_numbers(spec, schema)
    is_mlperf = numbers is not None and bool(numbers.codes)
    methods = {**({"dense": "mlperf"} if is_mlperf else {}), "ids": list(_methods(spec, schema, earlier))}
    return json.loads(json.dumps({  # type: ignore[no-any-return]
        "revision": _REVISION,
        "schema": roles,
        "prepare": options | methods,
        **({"features": features} if (features := spec.features.model_dump(mode="json")) else {}),
        "seed": spec.data.seed,
        "eval_fraction": spec.data.eval_fraction,
        "segment_bytes": segment_bytes_of(sum(file.size_bytes for file in files)),
        "files": [{"uri": file.uri if "://" in file.uri else os.path.relpath(file.uri, out), "bytes": file.size_bytes,
                   "changed": file.changed} for file in files],
        **({EARLIER: earlier.settings()} if earlier else {}),
        **({TABLES: [asdict(one) for one in tables]} if (tables := tables_of(files)) else {}),
        **({SHARED: shared} if (shared := shared_tables(spec.model)) else {})
    }))


@dataclass
class Run:
    """One call of `prepare`: it does the tasks that are not done yet, stage after stage."""

    work: Preparation
    files: Sequence[InputFile]
    journal: Journal
    folder: TaskFolder
    progress: ProgressReporter
    no_rows = ("no row of the input is for training", "check data.prepare.split and what it needs")

    def prepare(self, settings: JsonDict, earlier: EarlierIds | None) -> Manifest:
        """Do everything, the manifest last."""
        if earlier:  # whose ids are needed here, to number the new ones behind them
            known = earlier.fetch(self.work.out / PREPARING / "earlier", is_moved=self._is_stored)
            self.work = replace(self.work, known=known)
        tasks = self._segment_tasks(settings["segment_bytes"])
        self.work = replace(self.work, segment_names=tuple(task.name for task in tasks))
        self.folder.put()
        with self._executor() as pool:
            starts = self._split_starts(pool, tasks)
            manifest = self._write_parts(pool, tasks, starts, settings)
        if starts:
            manifest.settings[TIME_SPLIT] = time_split_record(self.work.spec.data, starts)
        if not manifest.num_rows("train"):
            what, fix = self.no_rows
            raise DataError(what, fix)
        self.journal.put(MANIFEST, manifest.to_text())
        return manifest

    def _write_parts(
        self, pool: Executor, tasks: Sequence[Task], starts: tuple[int, ...], settings: JsonDict
    ) -> Manifest:
        """Read the segments and write the data; return its manifest."""
        bin_starts = self._bin_starts(pool, tasks, starts)
        records = self._do(pool, "reading", [replace(task, split_starts=starts, bin_starts=bin_starts)
                                             for task in tasks])
        bad = self._checked_rows(tasks, records)
        written, id_maps, rate = records, self._id_maps(), 0.0
        numbers = self.work.numbers
        if numbers is None:
            numbers = self._fitted(self._here([self.work.sample_file(task.name) for task in tasks]))
        if self.work.numbered:
            id_maps = self._id_maps(self._do(pool, "numbering ids", self._number_tasks(records)))
        names = (*numbers.names, *self.work.schema.statistics_names)
        layout = replace(self.work.layout([about["rows"] for about in id_maps.values()]), dense=names)
        if self.work.statistics:
            rate = sum(record["positive"] for record in records) / max(1, sum(r["trained"] for r in records))
            counted = self._do(pool, "counting labels", self._count_tasks(records, rate))
            id_maps |= {about["name"]: self.work.statistic_files(column).record("statistics", about)
                        for about, column in zip(counted, self.work.statistics, strict=True)}
        id_maps |= self.work.keep_statistics()
        self.folder.put()
        if self._is_staged:
            tasks = [replace(task, numbers=numbers if self.work.numbers is None else None) for task in tasks]
            written = self._do(pool, "writing", self._write_tasks(tasks, records, layout, rate))
        return Manifest(
            layout, parts_of(written, SPLITS), self.work.schema.label,
            settings=without_files(settings) | {"id_maps": id_maps, **self._state(numbers)},
            sources=self._sources(settings, tasks, records), bad_rows=bad.to_json()
        )

    def _checked_rows(self, tasks: Sequence[Task], records: Sequence[Record]) -> BadRows:
        """Return the rows that could not be read; too many of them are refused, and input without rows."""
        bad = BadRows.collect(self.files, self._by_file(tasks, records))
        bad.check(self.work.spec.data.prepare.max_bad_share)
        if not bad.num_rows:
            raise DataError(f"{self.files[0].uri}: has no rows" if len(self.files) == 1 else "no file has any rows",
                            "data.prepare.input must name a file with at least one row")
        return bad

    def _sources(
        self, settings: JsonDict, tasks: Sequence[Task], records: Sequence[Record]
    ) -> tuple[Record, ...]:
        """Return the files with the numbers of their lines and rows."""
        return tuple(file | {name: sum(record[name] for record in of_file) for name in ("lines", "rows")}
                     for file, of_file in zip(settings["files"], self._by_file(tasks, records), strict=True))

    def _executor(self) -> Executor:
        prepare = self.work.spec.data.prepare
        work: Work = StoredPreparation(self.work, self.folder.uri) if self._is_stored else self.work
        if prepare.executor == "ray":
            from embark.data.ray_executor import RayExecutor

            return RayExecutor(work, prepare.num_workers, self.work.budget.memory_bytes)
        total_bytes = sum(file.size_bytes for file in self.files)
        return WorkerPool(work, 0 if total_bytes <= SMALL_BYTES else self.work.budget.num_workers)

    @property
    def _is_stored(self) -> bool:
        """Whether each task is done in a folder of its own."""
        return not self.folder.is_direct or self.work.spec.data.prepare.executor == "ray"

    def _here(self, paths: list[Path]) -> list[Path]:
        """Have these files of the tasks on this machine."""
        self.folder.fetch([Extent(path.relative_to(self.work.out).as_posix()) for path in paths])
        return paths

    @property
    def _is_staged(self) -> bool:
        """Whether something must be known of all rows before they can be written."""
        return bool(self.work.counted) or self.work.numbers is None

    def _fitted(self, samples: Sequence[Path]) -> Numbers:
        """Compute the state of the numbers' transforms from the segments' samples of training rows."""
        schema, spec = self.work.schema, self.work.spec
        found = NumberSample.none(len(schema.dense_names))
        for path in samples:
            found = NumberSample.join([found, NumberSample.read(path)])
        return _fitted(spec, schema, found)

    def _segment_tasks(self, segment_bytes: int) -> list[Task]:
        reader = self.work.reader()
        kind: Kind = "stage" if self._is_staged else "read"
        tasks = []
        for index, file in enumerate(self.files):
            segments = reader.segments(file, segment_bytes)
            if not segments:  # a Parquet file without rows
                continue
            # A segment of Parquet counts row groups, so bytes are shared out by them.
            first, size = segments[0].start, segments[-1].stop - segments[0].start
            for s in segments:
                ends = [file.size_bytes * (at - first) // max(1, size) for at in (s.start, s.stop)]
                tasks.append(Task(kind, f"{index:05d}-{s.index:05d}", ends[1] - ends[0], s, index))
        return tasks

    def _split_starts(self, pool: Executor, tasks: Sequence[Task]) -> tuple[int, ...]:
        """Return where validation and test begin in a split by time, from the spec or from all rows' times."""
        data = self.work.spec.data
        if data.prepare.split != "time":
            return ()
        if starts := given_starts(data):
            return starts
        self._do(pool, "reading times", [replace(task, kind="times") for task in tasks])
        return newest_starts(data, self._here([self.work.times_file(task.name) for task in tasks]))

    def _bin_starts(self, pool: Executor, tasks: Sequence[Task], starts: tuple[int, ...]) -> tuple[int, ...]:
        """Return where the bins of training rows begin by time; empty where rows have none."""
        if not (self.work.statistics and self.work.schema.has_row_time):
            return ()
        self._do(pool, "reading times", [replace(task, kind="times") for task in tasks])
        times = self._here([self.work.times_file(task.name) for task in tasks])
        return time_bins(times, starts[0] if starts else None)

    def _do(self, pool: Executor, stage: str, tasks: Sequence[Task]) -> list[Record]:
        """Return the records of the tasks, in order; tasks that have a record are not done again."""
        done = self.journal.read_all(task.record for task in tasks)
        records = {task.name: done[task.record] for task in tasks if task.record in done}
        missing = [task for task in tasks if task.name not in records]
        total = sum(task.weight for task in tasks)
        if stage == "reading":
            self.progress.num_rows = sum(record["rows"] for record in records.values())
            self.progress.num_bad = sum(record["bad"] for record in records.values())
        self.progress.begin(stage, total, total - sum(task.weight for task in missing))
        for task, record in pool.run(missing, self.progress.advance):
            records[task.name] = record
            max_share = self.work.spec.data.prepare.max_bad_share
            if stage == "reading" and should_give_up(self.progress.num_rows, self.progress.num_bad, max_share):
                ended = [task for task in tasks if task.name in records]
                by_file = self._by_file(ended, [records[task.name] for task in ended])
                BadRows.collect(self.files, by_file).check(max_share)
        return [records[task.name] for task in tasks]

    @staticmethod
    def _state(numbers: Numbers) -> Record:
        """Return what the manifest records of the transforms; nothing of those without a state."""
        if all(code.is_plain for code in numbers.codes):
            return {}
        return {NUMBERS: json.loads(json.dumps([asdict(code) for code in numbers.codes]))}

    def _by_file(self, tasks: Sequence[Task], records: Sequence[Record]) -> list[list[Record]]:
        """Return the segments' records of each file, in order."""
        return [[record for task, record in zip(tasks, records, strict=True) if task.file_index == index]
                for index in range(len(self.files))]

    def _num_keys(self, record: Record) -> dict[str, int]:
        """Return how many keys of each of `counted` the segment's runs have."""
        return {name: sum(run[name]["num"] for run in record["runs"]) for name in self.work.counted}

    def _number_tasks(self, records: Sequence[Record]) -> list[Task]:
        sizes, least = [self._num_keys(record) for record in records], 1
        if not self.work.is_log and self.work.spec.model.kind in POOLED_KINDS:
            least = max(1, min(RARE, sum(record["trained"] for record in records) // ROWS_OF_ONE))
        # The longest first, so that the workers end at about the same time.
        return sorted((Task("number", self.work.schema.sparse[i].name, 2 * sum(size[str(i)] for size in sizes),
                            column=i, min_count=least) for i in self.work.numbered), key=lambda task: -task.weight)

    def _count_tasks(self, records: Sequence[Record], rate: float) -> list[Task]:
        sizes = [self._num_keys(record) for record in records]
        return [Task("count", column.name, sum(size[f"{i}.statistics"] for size in sizes), column=i, label_rate=rate)
                for i, column in self.work.statistics.items()]

    def _write_tasks(
        self, tasks: Sequence[Task], records: Sequence[Record], layout: Layout, rate: float
    ) -> list[Task]:
        nums = np.array([[0] * len(self.work.counted), *(list(self._num_keys(r).values()) for r in records)])
        return [replace(task, kind="write", weight=record["rows"], layout=layout, starts=tuple(starts),
                        label_rate=rate)
                for task, record, starts in zip(tasks, records, np.cumsum(nums, axis=0).tolist(), strict=False)]

    def _id_maps(self, records: Sequence[Record] = ()) -> dict[str, Record]:
        """Return for each sparse column how its ids were made, its table's rows, and where the map is."""
        maps: dict[str, Record] = {column.name: {"how": "hash", "rows": column.rows}
                                   for column in self.work.schema.sparse if not column.weights_of}
        for record in records:
            name = record["name"]
            maps[name] = IdFiles.of(self.work.out / IDS, name).record("frequency", record)
        return maps


def parts_of(written: Sequence[Record], splits: Sequence[Split]) -> dict[Split, tuple[Part, ...]]:
    """Collect the parts that tasks have written."""
    return {split: tuple(Part(**part) for record in written for part in record["parts"][split]) for split in splits}


def _complete_already(store: ObjectStore, settings: JsonDict) -> Manifest | None:
    """Return the data that is there if it comes from the same input and settings; other data is refused, and nothing
    is lost."""
    try:
        text = store.read(MANIFEST).decode()
    except NotFound:
        return None
    manifest = Manifest.from_text(text, store.where(MANIFEST))
    was = {key: value for key, value in manifest.settings.items()
           if key not in ("id_maps", TIME_SPLIT, NUMBERS, SEQUENCES)}
    if was != without_files(settings) or _versions(manifest.sources) != _versions(settings["files"]):
        differing = differences(was, without_files(settings))
        raise UserError(f"{store.uri}: holds data that was prepared from other files or with other settings"
                        + shown(differing), "--fresh removes it and starts over, or set another data.path")
    return manifest


def _versions(files: Iterable[JsonMap]) -> list[tuple[Any, ...]]:
    """Identify files by name, size and time of change, wherever they lie now."""
    return [(os.path.basename(str(file.get("uri"))), file.get("bytes"), file.get("changed")) for file in files]


def without_files(settings: JsonDict) -> JsonDict:
    """Return the settings without the files that were read."""
    return {key: value for key, value in settings.items() if key != "files"}


def segment_bytes_of(total_bytes: int) -> int:
    """Choose the size of segments by the input alone, so that the same input gives the same files anywhere: some 50
    MiB of parts each, less for small inputs, so that every core has work."""
    return min(SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, total_bytes // 32))
