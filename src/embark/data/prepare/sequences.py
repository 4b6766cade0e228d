"""A log of users and items as sequences: rows are spread by user over buckets, and the rows of some buckets at a time
are sorted by user and time. A row of the prepared data is a user with all items, oldest first, and how many of them are
for training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import tomli_w

from embark.data.prepared.manifest import (
    HELD_OUT_ENDS,
    LOG_SPLITS,
    MIN_HELD_OUT,
    SEQUENCES,
    Manifest,
)
from embark.data.prepared.parts import PartWriter
from embark.data.workers import Executor, Report
from embark.errors import DataError, nearest
from embark.features.arrays import Array, Int64s, is_first
from embark.features.encoding import look_up
from embark.features.hashing import hash_counters
from embark.features.layout import Feature, Layout, Rows
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
from embark.spec import PrepareSpec, RunSpec
from embark.spec.data import InteractionsSpec
from embark.spec.features import table_name
from embark.values import JsonDict, JsonMap
from . import id_numbering
from .guess import find_time_column, find_times
from .inputs import InputFile, Inputs
from .journal import record_path
from .prepare import Run, parts_of, without_files
from .rows import SegmentCounts
from .sampling import find_called, take_sample
from .stored import Extent
from .tasks import Finish, Preparation, Task

NUM_BUCKETS = 1_024
GROUP_ROWS = 1 << 20
"""Rows that are sorted at once, unless a bucket alone has more."""
GROUP_BYTES = 200 * GROUP_ROWS
SEQUENCE_BLOCK_ROWS = 4_096
MAX_NUMBER = 1 << 31
_NPY_HEADER_BYTES = 128
_ROWS_START = 2 * _NPY_HEADER_BYTES + 8 * (NUM_BUCKETS + 1)
"""Where the rows of a run begin: behind the starts of its buckets, and the two headers."""
_BUCKET_BITS = 64 - (NUM_BUCKETS - 1).bit_length()
_USER, _ITEM = 0, 1  # Positions of the columns.
_KEY = 0x5E0


def log_schema(spec: RunSpec, inputs: Inputs, files: Sequence[InputFile]) -> Schema:
    """Find the columns of a log: as the spec names them, else by what they are called."""
    how, data = spec.data.interactions, spec.data
    prepare = log_options(data.prepare, how)
    sample, where = take_sample(prepare, [how.user, how.item, data.time_column] if how.user != "user" else (),
                                inputs, files), files[0].uri
    by_name = {column.name: column for column in sample.columns}
    why: dict[str, str] = {}
    names: dict[str, str] = {}
    for role, given, default in (("users", how.user, "user"), ("items", how.item, "item"),
                                 ("times", data.time_column, "")):
        rest = [column for column in sample.columns if column.name not in names.values()]
        found = given
        if given not in by_name and given == default:
            found = find_time_column(rest) if role == "times" else find_called(rest, role)
        if (found and found not in by_name) or (not found and role != "times"):
            raise DataError(f"{where}: has no column {found or given!r}, for the {role} of the log",
                            f"{nearest(found or given, list(by_name))} Or name it: data.interactions."
                                f"{role[:-1]} = \"…\"" if role != "times" else nearest(found, list(by_name)))
        if found:
            names[role] = found
            by = "it holds" if role == "times" and not find_called([by_name[found]], role) else "its name is that of"
            why[found] = "is named in the spec" if found == given else f"{by} {role}"
    time = names.get("times", "")
    if data.prepare.split == "time" and not time:
        raise DataError(f"{where}: a split by time needs times", "name their column in data.time_column")
    times = find_times(spec.features, data.changed(time_column=time, prepare=prepare),
                       sample.columns, where)
    features = {names["users"]: table_name(names["users"]),
                names["items"]: spec.model.sequence.history or table_name(names["items"])}
    sparse = tuple(SparseColumn(features[column], "integer" if by_name[column].type == "integer" else "text",
                                column=column, is_required=True, is_user=column == names["users"],
                                rows=next((table.rows for table in spec.model.tables if column == names["items"] and
                                           table.name == features[column]), None))
                   for column in (names["users"], names["items"]))
    ignored = tuple(name for name in by_name if name not in names.values())
    return Schema(sample.format, "", (), sparse, tuple(by_name), ignored, sample.delimiter, sample.has_header, why,
                  {column.name: ", ".join(column.cells[:3]) for column in sample.columns}, times=times,
                  time_column=time, is_split_by_time=bool(time))


def log_options(prepare: PrepareSpec, how: InteractionsSpec) -> PrepareSpec:
    """Return how the files are read: `[data.interactions]` may say what `[data.prepare]` does not."""
    given = {"delimiter": how.delimiter, "column_names": how.column_names}
    return prepare.model_copy(update={key: value for key, value in given.items() if value})


def describe(spec: RunSpec, schema: Schema) -> str:
    """Return the lines of a spec that leave nothing to guess."""
    user, item = (column.source for column in schema.sparse)
    prepare = spec.data.prepare.model_dump(mode="json", exclude_defaults=True) | {"format": schema.format}
    if schema.format == "csv":
        prepare |= {"delimiter": schema.delimiter, "header": schema.has_header}
    data = {"time_column": schema.time_column} if schema.time_column else {}
    kind = spec.model.kind if "kind" in spec.model.model_fields_set else "sasrec"
    return tomli_w.dumps({"model": {"kind": kind}, "data": {
        **data, "prepare": prepare, "interactions": {"user": user, "item": item}}})


def log_layout(item: str, num_items: int, time: str) -> Layout:
    """Return the layout of users: their items, the times of these, and how many of them are for what."""
    lists = [Feature(item, num_items, MAX_NUMBER - 1, is_ragged=True)]
    if time:
        lists.append(Feature(time, MAX_NUMBER, MAX_NUMBER - 1, is_ragged=True))
    return Layout((), (*lists, *(Feature(name, MAX_NUMBER) for name in HELD_OUT_ENDS)))


class LogPreparation(Preparation):
    """The tasks of a log: segments to buckets of users, the ids of items, buckets to sequences."""

    is_log = True

    @property
    def record_type(self) -> np.dtype[Any]:
        """A row between the stages."""
        return np.dtype([("user", "<u8"), ("item", "<u8"), *([("time", "<i8")] if self.schema.time_column else [])])

    def _stage(self, task: Task, report: Report) -> Finish:
        """Spread rows over buckets of users, run by run."""
        writer, counts = id_numbering.RunWriter(self._runs_directory, task.name), SegmentCounts()
        waiting: list[RawRows] = []
        totals, spans = np.zeros(NUM_BUCKETS, np.int64), list[int]()
        for raw in self._raw_portions(task, report):
            counts.add(raw)
            waiting.append(raw)
            if sum(map(len, waiting)) >= self.budget.run_rows:
                self._end_log_run(writer, waiting, totals, spans)
        self._end_log_run(writer, waiting, totals, spans)
        return lambda: counts.to_json() | {"runs": writer.close(), "buckets": totals.tolist(),
                                           "times": [min(spans), max(spans)] if spans else []}

    def _end_log_run(
        self, writer: id_numbering.RunWriter, waiting: list[RawRows], totals: Int64s, spans: list[int]
    ) -> None:
        raw = RawRows.join(waiting) if waiting else None
        waiting.clear()
        if not raw:
            return
        rows = np.empty(len(raw), self.record_type)
        rows["user"], rows["item"] = raw.keys
        if raw.time is not None:
            rows["time"] = raw.time
            spans += [int(raw.time.min()), int(raw.time.max())]
        buckets = (hash_counters(_KEY, rows["user"]) >> np.uint64(_BUCKET_BITS)).astype(np.uint16)
        nums = np.bincount(buckets, minlength=NUM_BUCKETS)
        totals += nums
        items, counts = np.unique(rows["item"], return_counts=True)
        starts = np.concatenate([[0], np.cumsum(nums)])
        writer.write((starts, rows[np.argsort(buckets, kind="stable")].view(np.uint8)),
                     {str(_ITEM): (items, counts.astype(np.uint32))})

    def needed(self, task: Task) -> Iterator[list[Extent]]:
        """Yield the parts of other tasks' files that a task reads: of sequences, the rows of their buckets."""
        if task.kind != "sequence":
            yield from super().needed(task)
            return
        files, size = self.id_files(_ITEM), self.record_type.itemsize
        yield [Extent(record_path(f"stage/{name}")) for name in self.segment_names]
        names = {name: id_numbering.rows_file(self._runs_directory, name).relative_to(self.out).as_posix()
                 for name in self.segment_names}
        yield [*(Extent(path.relative_to(self.out).as_posix()) for path in (files.keys, files.ids)),
               *(Extent(path, run["start"], _ROWS_START) for name, path in names.items() for run in self._runs(name))]
        yield [Extent(names[name], first, num * size) for name, first, num in self._buckets(*task.starts)]

    def _sequence(self, task: Task, report: Report) -> Finish:
        """Sort the rows of some buckets, and write their users."""
        assert task.layout is not None
        rows = np.concatenate([*self._bucket_rows(*task.starts), np.empty(0, self.record_type)])
        num_rows = len(rows)
        files = self.id_files(_ITEM)
        distinct, which = np.unique(rows["item"], return_inverse=True)
        ids = look_up(distinct, np.load(files.keys, mmap_mode="r"), np.load(files.ids, mmap_mode="r"))[which]
        rows, ids = rows[ids > 0], ids[ids > 0]
        order = np.argsort(rows["user"], kind="stable") if not self.schema.time_column else \
            np.lexsort((rows["time"], rows["user"]))
        rows, ids = rows[order], ids[order]
        is_user = is_first(rows["user"])
        starts = np.flatnonzero(is_user)
        lengths = np.diff(starts, append=len(rows))
        times = (rows["time"] - task.first_time) // 1_000_000 if self.schema.time_column else None
        ends = ends_of(lengths) if not task.split_starts else \
            ends_by_time(np.cumsum(is_user) - 1, lengths, rows["time"], task.split_starts)
        report(num_rows, 0, 0)
        lists = (ids,) if times is None else (ids, times.astype(np.int32))
        users = Rows(np.zeros(len(starts), np.uint8), np.zeros((len(starts), 0), np.float32), (*lists, *ends.T),
                     (*(lengths for _ in lists), *(None for _ in HELD_OUT_ENDS)))
        is_train = ends[:, 0] >= 2  # the shortest has an item and the next one
        splits = dict(zip(LOG_SPLITS, (is_train, ~is_train & (ends[:, 1:] > 0).any(axis=1)), strict=True))
        del rows, order
        writers = {split: PartWriter(self.out, f"{split}/{task.name}", task.layout, block_rows=SEQUENCE_BLOCK_ROWS)
                   for split in splits}
        for split, mask in splits.items():
            writers[split].add(users.select(mask))
        _, num_distinct = most_distinct(ids, lengths)

        def finish() -> JsonDict:
            parts, held_out = {}, {}
            for split, mask in splits.items():
                parts[split] = [asdict(part) for part in writers[split].close()]
                stops = list(accumulate(part["rows"] for part in parts[split]))
                for part, stop in zip(parts[split], stops, strict=True):
                    own = ends[mask][stop - part["rows"] : stop, 1:]
                    held_out[part["file"]] = (own > 0).sum(axis=0).tolist()
            return {"parts": parts, "held_out": held_out, "users": len(lengths), "interactions": int(lengths.sum()),
                    "left_out": num_rows - int(lengths.sum()), "longest": int(lengths.max(initial=0)),
                    "trained": int(ends[is_train, 0].sum()), "most_distinct": num_distinct}

        return finish

    def _bucket_rows(self, low: int, high: int) -> Iterator[Array]:
        """Yield the rows of buckets `low` to `high` of each run, in the order of the input."""
        for name, first, num in self._buckets(low, high):
            with id_numbering.rows_file(self._runs_directory, name).open("rb") as file:
                file.seek(first)
                yield np.fromfile(file, self.record_type, num)

    def _buckets(self, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        """Yield where the rows of buckets `low` to `high` begin in each run of each segment, and how many they are."""
        for name in self.segment_names:
            for run in self._runs(name):
                with id_numbering.rows_file(self._runs_directory, name).open("rb") as file:
                    file.seek(run["start"])
                    starts = np.load(file)
                yield (name, run["start"] + _ROWS_START + int(starts[low]) * self.record_type.itemsize,
                       int(starts[high] - starts[low]))


def ends_of(lengths: Int64s) -> Int64s:
    """Return [users, 3]: how many items are for training, and where the history of validation and of testing ends, its
    held-out item included; 0 where there is none."""
    is_held_out = lengths >= MIN_HELD_OUT
    return np.stack([np.where(is_held_out, lengths - 2, lengths), np.where(is_held_out, lengths - 1, 0),
                     np.where(is_held_out, lengths, 0)], axis=1)


def ends_by_time(users: Int64s, lengths: Int64s, times: Int64s, starts: Sequence[int]) -> Int64s:
    """Return the same for a split by time: the first item of either period is held out, if there is one before it."""
    period = np.searchsorted(np.asarray(starts, np.int64), times, side="right")
    before = [np.bincount(users[period <= one], minlength=len(lengths)) for one in range(3)]
    held_out = [np.where((after > own) & (own > 0), own + 1, 0) for own, after in pairwise(before)]
    return np.stack([before[0], *held_out], axis=1)


def most_distinct(ids: Array, lengths: Int64s) -> tuple[int, int]:
    """Return the user with the most different items, and how many these are. Longer lists are looked at first."""
    starts, found, most = np.cumsum(lengths) - lengths, 0, 0
    for user in np.argsort(-lengths, kind="stable").tolist():
        if lengths[user] <= most:
            break
        num = len(np.unique(ids[starts[user] : starts[user] + lengths[user]]))
        if num > most:
            found, most = user, num
    return found, most


class LogRun(Run):
    """One call of `prepare` for a log."""

    no_rows = ("no user of the log has two items to train on",
               "a log with at least 4 rows for a user, of which two are held out")

    def _write_parts(
        self, pool: Executor, tasks: Sequence[Task], starts: tuple[int, ...], settings: JsonDict
    ) -> Manifest:
        records = self._do(pool, "reading", tasks)
        bad = self._checked_rows(tasks, records)
        id_maps = self._id_maps(self._do(pool, "numbering ids", self._number_tasks(records)))
        schema = self.work.schema
        item = schema.sparse[_ITEM].name
        id_maps = {item: id_maps[item] | {"counts": id_maps[item]["keys"].replace(".keys.", ".counts.")}}
        times = schema.time_column and (self.work.spec.model.sequence.times or table_name(schema.time_column))
        layout = log_layout(item, id_maps[item]["rows"], times)
        first, last = _span(records)
        if (last - first) // 1_000_000 >= MAX_NUMBER:
            raise DataError(f"the times of column {schema.time_column!r} span more than 2³¹ seconds",
                            'set data.prepare.time_unit = "ms" if they are milliseconds')
        written = self._do(pool, "writing", [
            Task("sequence", f"{number:05d}", num, layout=layout, starts=bounds, first_time=first,
                 split_starts=starts) for number, (bounds, num) in enumerate(_groups(records))])
        sums = {name: sum(record[name] for record in written)
                for name in ("users", "interactions", "left_out", "trained")}
        most = {name: max(record[name] for record in written) for name in ("longest", "most_distinct")}
        held_out = {file: nums for record in written for file, nums in record["held_out"].items()}
        return Manifest(
            layout, parts_of(written, LOG_SPLITS), "", SEQUENCE_BLOCK_ROWS, settings=without_files(settings) | {
                "id_maps": id_maps, SEQUENCES: sums | most | {"held_out": held_out}},
            sources=self._sources(settings, tasks, records), bad_rows=bad.to_json())


def _span(records: Sequence[JsonMap]) -> tuple[int, int]:
    times = [time for record in records for time in record["times"]]
    return (min(times), max(times)) if times else (0, 0)


def _groups(records: Sequence[JsonMap]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ranges of buckets with about `GROUP_ROWS` rows each, and how many rows they have."""
    nums = np.sum([record["buckets"] for record in records], axis=0)
    low = total = 0
    for bucket, num in enumerate(nums.tolist()):
        if total and total + num > GROUP_ROWS:
            yield (low, bucket), total
            low, total = bucket, 0
        total += num
    yield (low, NUM_BUCKETS), total
