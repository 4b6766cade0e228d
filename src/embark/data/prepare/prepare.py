"""`embark data prepare`: raw files to the prepared format, by all cores, in the memory that was given, resumable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.data.prepare.bad_rows import BadRows, gather, is_hopeless, refuse_too_many
from embark.data.prepare.budget import Budget, budget_of, segment_bytes_of
from embark.data.prepare.ids import how_of
from embark.data.prepare.journal import PREPARING, Journal
from embark.data.prepare.memory import MemoryWatch
from embark.data.prepare.pieces import InputFile, Inputs, Schema
from embark.data.prepare.pool import Pool
from embark.data.prepare.progress import Tell, Teller
from embark.data.prepare.readers import reader_for
from embark.data.prepare.splits import check_splits
from embark.data.prepare.transform import transform_of
from embark.data.prepare.work import IDS, Kind, Preparation, Result, Task
from embark.data.prepared.manifest import MANIFEST, SPLITS, STATISTICS, Manifest, Part
from embark.errors import DataError, UserError
from embark.store.atomic_file import write_atomic

if TYPE_CHECKING:
    from embark.data.prepared.layout import Layout
    from embark.spec.run import RunSpec

SMALL_BYTES = 16 << 20
"""Input that is done before another process has started."""
_REVISION = 1
"""Of how rows are made of the input; a journal of another one is of no use."""


def prepare(
    spec: RunSpec,
    schema: Schema,
    inputs: Inputs,
    files: list[InputFile],
    out: Path,
    *,
    tell: Tell,
    fresh: bool = False,
) -> Manifest:
    """Prepare `files` into the folder `out`.

    A call that was stopped is gone on with. A folder that is whole already is left as it is. `fresh` begins again.
    """
    check_files(files)
    check_splits(spec.data, files)
    hows = how_of(spec.data.prepare, schema)
    budget = budget_of(spec.data.prepare, schema, has_runs="frequency" in hows)
    settings = settings_of(spec, schema, files)
    out.mkdir(parents=True, exist_ok=True)
    with MemoryWatch() as memory, Journal(out) as journal:
        if fresh:
            _remove(out)
        elif (done := _whole_already(out, settings)) is not None:
            journal.remove()
            return done
        journal.begin(settings)
        work = Preparation(spec, schema, inputs, out, budget, hows)
        run = _Run(work, files, journal, Teller(tell, memory))
        manifest = run.prepare(settings)
        run.teller.end(_summary(run, manifest, memory))
        journal.remove()
    return manifest


def check_files(files: Sequence[InputFile]) -> None:
    """There are some, and none is empty."""
    if not files:
        raise DataError("there are no files to prepare", fix="data.prepare.input names them")
    for file in files:
        if not file.size_bytes:
            raise DataError(f"{file.uri}: the file is empty", fix="leave it out of data.prepare.input, or get it again")


def settings_of(spec: RunSpec, schema: Schema, files: Sequence[InputFile]) -> dict[str, Any]:
    """All that the result depends on."""
    prepare = spec.data.prepare
    asked = prepare.model_dump(mode="json", exclude={"input", "format", "memory_gb", "num_workers", "max_bad_share"})
    told = asdict(schema)
    for for_people in ("why", "examples"):
        told.pop(for_people, None)
    return json.loads(json.dumps({  # type: ignore[no-any-return]
        "revision": _REVISION,
        "schema": told,
        "prepare": asked | {"dense": transform_of(prepare, schema), "ids": list(how_of(prepare, schema))},
        "seed": spec.data.seed,
        "eval_fraction": spec.data.eval_fraction,
        "segment_bytes": segment_bytes_of(sum(file.size_bytes for file in files)),
        "files": [{"uri": file.uri, "bytes": file.size_bytes, "changed": file.changed} for file in files],
    }))


class _Run:
    """One call: the tasks that are not done yet, stage after stage."""

    def __init__(self, work: Preparation, files: Sequence[InputFile], journal: Journal, teller: Teller) -> None:
        self.work, self.files, self.journal, self.teller = work, files, journal, teller
        self.seconds: Counter[str] = Counter()
        total_bytes = sum(file.size_bytes for file in files)
        self.num_workers = 0 if total_bytes <= SMALL_BYTES else work.budget.num_workers

    def prepare(self, settings: dict[str, Any]) -> Manifest:
        """Everything, the manifest last."""
        tasks = self._segment_tasks(settings["segment_bytes"])
        self.work = replace(self.work, segment_names=tuple(task.name for task in tasks))
        with Pool(self.work, self.num_workers) as pool:
            records = self._do(pool, "reading", tasks)
            bad = self._checked(tasks, records)
            layout, columns = self.work.hash_layout(), self._columns_by_hash()
            written = records
            if "frequency" in self.work.hows:
                numbered = self._do(pool, "numbering ids", self._number_tasks(records))
                layout, columns = self._numbered(numbered, columns)
                written = self._do(pool, "writing", self._write_tasks(tasks, records, layout))
        parts = {
            split: tuple(Part(**{**part, "block_starts": tuple(part["block_starts"])})
                         for record in written for part in record["parts"][split])
            for split in SPLITS
        }
        sources = [
            file | {"lines": sum(r["lines"] for r in of_file), "rows": sum(r["rows"] for r in of_file)}
            for file, of_file in zip(settings["files"], self._by_file(tasks, records), strict=True)
        ]
        manifest = Manifest(
            layout, parts, self.work.schema.label, settings=_without_files(settings) | {"id_maps": columns},
            sources=tuple(sources), bad_rows=bad.to_json(),
        )
        if not manifest.num_rows("train"):
            raise DataError("no row of the input is for training", fix="look at data.prepare.split and what it needs")
        return self._finished(manifest)

    def _segment_tasks(self, segment_bytes: int) -> list[Task]:
        reader = reader_for(self.work.schema, self.work.spec, self.work.inputs)
        kind: Kind = "stage" if "frequency" in self.work.hows else "read"
        tasks = []
        for index, file in enumerate(self.files):
            segments = reader.segments(file, segment_bytes)
            # Of Parquet a segment counts row groups, so bytes are shared out by them.
            first, size = segments[0].start, segments[-1].stop - segments[0].start
            for s in segments:
                ends = [file.size_bytes * (at - first) // max(1, size) for at in (s.start, s.stop)]
                tasks.append(Task(kind, f"{index:05d}-{s.index:05d}", ends[1] - ends[0], s, index))
        return tasks

    def _do(self, pool: Pool, stage: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Their records, in order; those that are there already are not done again."""
        records = {task.name: record for task in tasks if (record := self.journal.read(task.record)) is not None}
        missing = [task for task in tasks if task.name not in records]
        total = sum(task.weight for task in tasks)
        self.teller.begin(stage, total, total - sum(task.weight for task in missing))
        if stage == "reading":
            self.teller.num_rows = sum(record["rows"] for record in records.values())
            self.teller.num_bad = sum(record["bad"] for record in records.values())
        for task, result in pool.run(missing, self._report):
            assert isinstance(task, Task)
            assert isinstance(result, Result)
            records[task.name] = result.record
            self.seconds.update(result.seconds)
            if stage == "reading" and is_hopeless(self.teller.num_rows, self.teller.num_bad, self._max_bad_share):
                refuse_too_many(gather(self.files, self._by_file(tasks, list(records.values()), records)),
                                self._max_bad_share)
        return [records[task.name] for task in tasks]

    def _report(self, num_done: int, num_rows: int, num_bad: int) -> None:
        self.teller.report(num_done, num_rows, num_bad)

    @property
    def _max_bad_share(self) -> float:
        return self.work.spec.data.prepare.max_bad_share

    def _checked(self, tasks: Sequence[Task], records: Sequence[dict[str, Any]]) -> BadRows:
        bad = gather(self.files, self._by_file(tasks, records))
        refuse_too_many(bad, self._max_bad_share)
        if not bad.num_rows:
            raise DataError(f"{self.files[0].uri}: has no rows" if len(self.files) == 1 else "no file has any rows")
        return bad

    def _by_file(
        self, tasks: Sequence[Task], records: Sequence[dict[str, Any]], known: dict[str, dict[str, Any]] | None = None
    ) -> list[list[dict[str, Any]]]:
        """The segments' records of each file, in order; of `known` only as far as they are there."""
        by_name = known or {task.name: record for task, record in zip(tasks, records, strict=True)}
        found: list[list[dict[str, Any]]] = [[] for _ in self.files]
        for task in tasks:
            if task.name in by_name:
                found[task.file_index].append(by_name[task.name])
        return found

    def _number_tasks(self, records: Sequence[dict[str, Any]]) -> list[Task]:
        sizes = self._num_keys(records)
        # The longest first, so that the workers end at about the same time.
        return sorted((Task("number", self.work.schema.sparse[i].name, 2 * sum(sizes[i]), column=i) for i in sizes),
                      key=lambda task: -task.weight)

    def _num_keys(self, records: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
        """Of each column that is numbered: the keys in each segment's runs."""
        return {i: [sum(run["columns"][i]["num_keys"] for run in record["runs"]) for record in records]
                for i, how in enumerate(self.work.hows) if how == "frequency"}

    def _write_tasks(self, tasks: Sequence[Task], records: Sequence[dict[str, Any]], layout: Layout) -> list[Task]:
        before = dict.fromkeys(self._num_keys(records), 0)
        made = []
        for task, record in zip(tasks, records, strict=True):
            starts = tuple(before.values())
            made.append(replace(task, kind="write", weight=record["rows"], layout=layout, starts=starts))
            for i, nums in self._num_keys([record]).items():
                before[i] += nums[0]
        return made

    def _columns_by_hash(self) -> dict[str, dict[str, Any]]:
        return {column.name: {"how": "hash", "rows": column.rows}
                for column, how in zip(self.work.schema.sparse, self.work.hows, strict=True) if how == "hash"}

    def _numbered(
        self, numbered: Sequence[dict[str, Any]], columns: dict[str, dict[str, Any]]
    ) -> tuple[Layout, dict[str, dict[str, Any]]]:
        """The layout now that the tables' rows are known, and where the maps are."""
        by_name = {record["name"]: record for record in numbered}
        rows, about = [], {}
        for i, column in enumerate(self.work.schema.sparse):
            if column.name in columns:
                about[column.name] = columns[column.name]
            else:
                record, targets = by_name[column.name], self.work.targets(i)
                about[column.name] = {
                    "how": "frequency", "rows": record["rows"], "distinct": record["distinct"], "kept": record["kept"],
                    "keys": f"{IDS}/{targets.keys.name}", "ids": f"{IDS}/{targets.ids.name}",
                }
            rows.append(about[column.name]["rows"])
        return self.work.layout(rows), about

    def _finished(self, manifest: Manifest) -> Manifest:
        """Statistics, then the manifest, which makes it whole."""
        from embark.data.statistics import compute_statistics

        self.teller.begin("counting", sum(manifest.num_rows(split) for split in SPLITS))
        budget, out = self.work.budget, self.work.out
        statistics = compute_statistics(
            out, manifest, memory_bytes=budget.memory_bytes, num_workers=max(1, self.num_workers),
            tell=self.teller.pass_on,
        )
        text = json.dumps(statistics, indent=1) + "\n"
        write_atomic(out / STATISTICS, text)
        manifest = replace(manifest, statistics_sha256=hashlib.sha256(text.encode()).hexdigest())
        write_atomic(out / MANIFEST, manifest.to_text())
        self.teller.end_stage()
        return manifest


def _whole_already(out: Path, settings: dict[str, Any]) -> Manifest | None:
    """What is there, if it is of the same input and settings; else it is refused, and nothing is lost."""
    path = out / MANIFEST
    if not path.exists():
        return None
    manifest = Manifest.from_text(path.read_text(), str(path))
    was = {key: value for key, value in manifest.settings.items() if key != "id_maps"}
    files = [{key: source.get(key) for key in ("uri", "bytes", "changed")} for source in manifest.sources]
    if was != _without_files(settings) or files != settings["files"]:
        raise UserError(f"{out}: holds data that was prepared from other files or with other settings",
                        fix="--fresh removes it and begins again, or give another data.path")
    return manifest


def _without_files(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "files"}


def _remove(out: Path) -> None:
    """What an earlier call wrote, the manifest first. Nothing else that lies there."""
    (out / MANIFEST).unlink(missing_ok=True)
    (out / STATISTICS).unlink(missing_ok=True)
    for name in (*SPLITS, IDS):
        shutil.rmtree(out / name, ignore_errors=True)
    for path in (out / PREPARING).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _summary(run: _Run, manifest: Manifest, memory: MemoryWatch) -> dict[str, Any]:
    elapsed_s = run.teller.elapsed_s
    budget: Budget = run.work.budget
    return {
        "rows": {split: manifest.num_rows(split) for split in SPLITS},
        "rows_per_s": run.teller.num_rows / elapsed_s if elapsed_s else 0.0,
        "size_bytes": manifest.size_bytes,
        "peak_memory_bytes": memory.peak_bytes,
        "memory_bytes": budget.memory_bytes,
        "num_workers": max(1, run.num_workers),
        "stages_s": {name: round(spent_s, 3) for name, spent_s in run.teller.stages_s.items()},
        "work_s": {name: round(spent_s, 3) for name, spent_s in run.seconds.items()},
    }
