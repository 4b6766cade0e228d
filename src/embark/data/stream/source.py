"""Rows without end as a source of batches, whose whole state goes into checkpoints: each record is trained once."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from embark.data.loader import Batch
from embark.data.prepare.later_rows import PreparedWith
from embark.data.prepared.cache import read_manifest
from embark.data.task_labels import task_labels
from embark.errors import DataError, UserError
from embark.events.heartbeat import beat
from embark.features.arrow.row_parser import Location, RowParser, json_column
from embark.features.encoding import RowEncoder, plain_row_format
from embark.features.rows import RawRows
from embark.features.schema import Schema
from embark.features.values import json_object, moment_text
from embark.formatting import format_count
from embark.spec import PrepareSpec, RunSpec, label_columns
from embark.store import Checkpoint, CheckpointStore
from embark.values import JsonDict
from .event_order import COUNTS, EventOrder, OrderSettings, OrderState
from .files_reader import read_records
from .open_reader import open_reader
from .records import Message, Row, StreamReader, StreamStopped
from .usable import DeadLetters, RowCheck, parsed

STREAM_FILE = "stream.json"  # A file of checkpoints.
ENDLESS_STEPS = 1 << 40
POLL_S = 0.2
STALLED_S = 60.0  # Warn after this time without a record of a partition that others wait for.
FIRST_S = 5.0  # Warn after this time if no record, or none but labels, was ever read.
UNREADABLE = "num_unreadable"
WINDOW = 1_000  # Number of the latest records whose drops are counted.
LABELS_FIX = "if rows carry their labels, leave out stream.key and stream.label_window_s"


class StreamSource:
    """Makes batches of the rows of a stream, in the order of their events; a batch is closed by its last row, never by
    a clock. They are made one after the other, and `trained` says which are no longer needed."""

    notes: tuple[str, ...] = ()
    num_eval_samples = 0

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._batch_size = spec, spec.train.batch_size
        self.num_train_samples = ENDLESS_STEPS * self._batch_size
        self._tables = spec.model.table_list()
        self._id_dtype = np.int64 if spec.model.has_dynamic_tables else np.int32
        schema, prepare, self._encoder, self._fingerprint = _row_format(spec)
        beat()
        self._parser = RowParser(schema, prepare)
        label_parser = RowParser(replace(schema, dense=(), sparse=(), times=()), prepare)
        label = spec.data.label
        stream = spec.stream
        self._settings = OrderSettings(label, stream.time_column, stream.bound_s, stream.key, stream.label_window_s)
        self._check = RowCheck(self._settings, self._parser.columns, self._parse, partial(_parse, label_parser))
        self._order = EventOrder(self._settings)
        self.run_uri = spec.name  # The URI of the run's directory, if it has one.
        self.letters: DeadLetters | None = None
        self._reader: StreamReader | None = None
        self._records: dict[str, deque[tuple[Message, Message]]] = {}  # As they were read, and checked.
        self._drops, self._has_rows = DropWatch(stream.max_dropped_share), False
        self._next = 0
        self._turn = threading.Condition()
        self._states: dict[int, OrderState] = {}  # The state behind the batch before each position.
        self._acknowledge: JsonDict | None = None
        self._saved_offsets: dict[int, JsonDict] = {}
        self._is_closed = False
        self._is_stopping: Callable[[], bool] = lambda: False
        self._warn: Callable[[str], None] = lambda _: None

    def fingerprint(self) -> str:
        """Return the checksum of the data that the id maps come from."""
        return self._fingerprint

    def restore(self, checkpoints: CheckpointStore, checkpoint: Checkpoint) -> None:
        """Continue behind the records that this checkpoint contains."""
        step = checkpoint.step
        if STREAM_FILE not in checkpoint.files:
            raise UserError(f"the checkpoint of step {step} has no state of a stream: the run was trained on its data",
                            "start another run with train.warm_start, which takes its weights")
        path = f"{checkpoint.name}/{STREAM_FILE}"
        state = OrderState.from_json(checkpoints.store.read(path), checkpoints.store.where(path))
        self._order = EventOrder(self._settings, state)
        self._next = step * self._batch_size
        self._states = {self._next: self._order.state.copy()}

    @contextmanager
    def reading(self, is_stopping: Callable[[], bool], warn: Callable[[str], None]) -> Iterator[None]:
        """Wait for records while the block runs: `is_stopping` says when to give up, and `warn` hears what holds it
        up."""
        self._is_stopping, self._warn = is_stopping, warn
        try:
            yield
        finally:
            self._is_closed = True

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return the next rows; wait for their turn, and for the records."""
        with self._turn:
            self._turn.wait_for(lambda: start <= self._next or self._next < 0)
            if self._next < 0:
                raise StreamStopped
            if start < self._next:
                raise DataError(f"rows {start:,} to {stop - 1:,} of the stream are no longer in memory",
                                "the records before the offsets of the next checkpoint have them")
            try:
                batch = self._make(stop - start)
            except BaseException:
                self._next = -1
                raise
            finally:
                self._turn.notify_all()
            self._states.setdefault(0, OrderState({}, {}))
            self._states[stop] = self._order.state.copy()
            self._next = stop
            return batch

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Raise: each row is scored before it is trained on, so none is held out."""
        raise IndexError(f"samples {start} to {stop} of 0")

    def rows_of_files(self, path: str) -> tuple[Batch, int]:
        """Read labelled rows of a file or a folder as records of the stream are read; return also how many cannot
        be."""
        values = list(read_records(path))
        raw = parsed(self._parse, [row for value in values if (row := json_object(value)) is not None])
        if not len(raw):
            raise DataError(f"{path}: has no row that can be read", "labelled rows with the columns of the stream")
        return self._batch(raw), len(values) - len(raw)

    def trained(self, step: int) -> None:
        """Forget the states before a step."""
        beat()
        position = step * self._batch_size
        for old in [one for one in list(self._states) if one < position]:
            del self._states[old]

    def checkpoint_files(self, step: int) -> dict[str, bytes]:
        """Return the state behind `step` steps, for their checkpoint."""
        state = self._states[step * self._batch_size]
        self._saved_offsets = {step: state.offsets}
        return {STREAM_FILE: state.to_json().encode()}

    def committed(self, step: int) -> None:
        """Note that the checkpoint of `step` is committed. The thread that reads tells the broker."""
        self._acknowledge = self._saved_offsets.pop(step, None) or self._acknowledge

    def status(self, step: int) -> JsonDict:
        """Return what was read, what came late and what was joined up to a step, for the run's log."""
        state = self._states[step * self._batch_size]
        has_time = bool(self._settings.time_column) and math.isfinite(state.watermark_s)
        return {**{name: state.counts[name] for name in COUNTS}, "dropped": dict(state.reasons),
                "num_in_memory": len(state.early) + len(state.waiting) + len(state.ready),
                **({"event_time_s": state.watermark_s} if has_time else {})}

    def close(self) -> None:
        """Tell the broker what the last checkpoint has, and leave it."""
        self._is_closed = True
        with self._turn:
            if self._reader is not None:
                self._acknowledge_now(self._reader)
                self._reader.close()
                self._reader = None

    def _make(self, num_rows: int) -> Batch:
        """Make a batch of rows that can be read; those that cannot are counted."""
        found: list[RawRows] = []
        missing = num_rows
        while missing:
            self._read_until(missing)
            rows = self._order.take(missing)
            raw = parsed(self._parse, rows)
            self._order.state.counts[UNREADABLE] += len(rows) - len(raw)  # of a checkpoint of an earlier Embark
            self._drops.drop(raw.reasons)
            if len(raw):
                found.append(raw)
                self._has_rows = True
            self._look_at_drops()
            missing -= len(raw)
        return self._batch(RawRows.join(found))

    def _read_until(self, num_ready: int) -> None:
        reader, order = self._opened(), self._order
        while len(order.state.ready) < num_ready:
            partition = order.next_partition()
            records = self._records[partition]
            if not records:
                found = self._wait_for(reader, partition)
                records.extend(zip(found, self._check.check(found), strict=True))
            message, checked = records.popleft()
            self._drops.add(why := order.add(partition, checked))
            if why:
                self._keep_letter(partition, message, why)
            elif (labels := self._labels_alone(WINDOW)) and None not in map(
                    checked.value.get, self._check.columns):  # type: ignore[union-attr]  # it is a row
                raise DataError(f"no record of the stream can be trained on: {labels}", LABELS_FIX)
            self._look_at_drops()

    def _labels_alone(self, least: int = 1) -> str:
        """Say that labels have come, at least so many, and no row; empty otherwise."""
        counts, settings = self._order.state.counts, self._settings
        if counts["num_rows"] or counts["num_labels"] < least:
            return ""
        return (f"all {format_count(counts['num_labels'])} records that could be read have a value in column "
                f"{settings.label!r}, and stream.key = {settings.key!r} makes such a record a label, not a row")

    def _keep_letter(self, partition: str, message: Message, why: str) -> None:
        number = self._order.state.drop(why)
        is_kept = self.letters is None or self.letters.add(partition, message, why, number)
        if message.file and is_kept:
            self._warn(f"{self._spec.stream.path}/{message.file}: {why}")

    def _look_at_drops(self) -> None:
        def warn(text: str) -> None:
            newest_s = max(self._order.state.newest_s.values(), default=0.0)
            has_time = bool(self._settings.time_column and newest_s)
            self._warn(text + (f"; the newest event is of {moment_text(round(1e6 * newest_s))}" if has_time else ""))

        self._drops.look(warn, len(self._order.state.ready), has_trained=self._has_rows or self._next > 0,
                         letters=str(self.letters.path) if self.letters else "")

    def _wait_for(self, reader: StreamReader, partition: str) -> list[Message]:
        began_s, has_warned = time.monotonic(), False
        while True:
            beat()
            self._acknowledge_now(reader)
            if found := reader.poll(partition, POLL_S):
                return found
            if self._is_closed or self._is_stopping():
                raise StreamStopped
            labels = self._labels_alone()
            limit_s = STALLED_S if self._order.state.offsets and not labels else FIRST_S
            if not has_warned and time.monotonic() - began_s > limit_s:
                has_warned = True
                others = "it has none, and the other partitions wait: rows are trained in order of their events"
                why = reader.problem() or (others if len(self._records) > 1 else "it has no new ones")
                drops = f"; {self._drops}" if str(self._drops) else ""
                drops += f"; {labels}: {LABELS_FIX}" if labels else ""
                self._warn(f"no record of {partition or 'the stream'} for {limit_s:.0f} s: {why}{drops}")

    def _opened(self) -> StreamReader:
        if self._reader is None:
            reader = open_reader(self._spec, self.run_uri)
            partitions = reader.open(self._order.state.offsets)
            self._order.open(partitions)
            self._records = {partition: deque() for partition in partitions}
            self._reader = reader
        return self._reader

    def _acknowledge_now(self, reader: StreamReader) -> None:
        offsets, self._acknowledge = self._acknowledge, None
        if offsets:
            reader.acknowledge(offsets)

    def _parse(self, rows: list[Row]) -> RawRows:
        return self._encoder.readable(_parse(self._parser, rows))

    def _batch(self, raw: RawRows) -> Batch:
        rows, num_rows = self._encoder.encode(raw), len(raw)
        names = [feature.name for feature in self._encoder.layout.features]
        ids, lengths, weights = [], [], []
        for table in self._tables:
            at = names.index(table.name)
            own, num_ids = rows.ids[at].reshape(-1), rows.lengths[at]
            ids.append(own)
            lengths.append(np.full(num_rows, len(own) // num_rows, np.int32) if num_ids is None else num_ids)
            weights.append(rows.ids[names.index(table.weights_feature)] if table.weights_column else
                           np.ones(len(own), np.float32))
        tasks = self._spec.model.tasks
        label = task_labels(raw.label[:, 1:], label_columns(tasks), tasks) if tasks else raw.label
        is_fixed = all(num_ids is None for num_ids in rows.lengths)
        return Batch(dense=rows.dense, ids=np.concatenate(ids).astype(self._id_dtype), label=label, is_fixed=is_fixed,
                     lengths=np.stack(lengths).astype(np.int32),
                     weights=np.concatenate(weights) if self._spec.model.has_weighted_ids else None)


def _parse(parser: RowParser, rows: list[Row]) -> RawRows:
    numbers = np.arange(len(rows))
    cells = partial(json_column, rows, parser=parser)
    return parser.parse(cells, Location(numbers, numbers, len(rows)), "the stream")


def _row_format(spec: RunSpec) -> tuple[Schema, PrepareSpec, RowEncoder, str]:
    """Return how a row becomes what the model takes, as in training and in serving, and the checksum of the data that
    says so."""
    if spec.data.kind == "prepared":
        manifest = read_manifest(spec.data.path)
        if before := PreparedWith.of(spec.data.path, manifest):
            return before.schema.without_split(), before.prepare, before.row_encoder(), manifest.fingerprint()
    return *plain_row_format(spec.model, spec.data, features=spec.features), ""


class DropWatch:
    """Counts records and dropped ones, by reason. It warns if more than half of the last ones were dropped, and stops
    a run of whose stream no record was ever trained on, or more than `max_share` of the last ones were dropped."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._num_records = self._num_dropped = self._records_before = self._dropped_before = 0
        self._reasons: Counter[str] = Counter()  # Dropped records by reason.
        self._newest: Counter[str] = Counter()  # Drops since the last look.
        self._has_warned = False

    def add(self, why: str) -> None:
        """Count a record, and `why` it was dropped, if it was."""
        self._num_records += 1
        if why:
            self.drop({why: 1})

    def drop(self, reasons: Mapping[str, int]) -> None:
        """Count drops among the records that were added before."""
        self._num_dropped += sum(reasons.values())
        self._reasons.update(reasons)
        self._newest.update(reasons)

    def look(self, warn: Callable[[str], None], num_pending: int, *, has_trained: bool, letters: str) -> None:
        """Check the records since the last look, once there are enough of them, without those that are still
        pending. The file `letters` has some of those that were dropped."""
        num_records = self._num_records - num_pending
        num, num_dropped = num_records - self._records_before, self._num_dropped - self._dropped_before
        if max(num, num_dropped) < WINDOW:
            return
        is_much = 2 * num_dropped > num
        if is_much and not has_trained and self._num_dropped >= num_records:
            raise DataError(f"none of the first {format_count(num_records)} records of the stream can be trained "
                            f"on: {_counted(self._reasons)}",
                            "name the label, the dense columns and the tables as the records do: "
                                "docs/guides/follow.md" + (f"; {letters} has some of them" if letters else ""))
        if num_dropped > self._max_share * num:
            raise DataError(f"{format_count(num_dropped)} of the last {format_count(num)} records of the stream cannot "
                            f"be trained on, more than stream.max_dropped_share = {self._max_share:g}: "
                            f"{_counted(self._newest)}",
                            f"correct what sends them{f' ({letters} has some)' if letters else ''}, or set a "
                                "larger share")
        if is_much and not self._has_warned:
            warn(f"{format_count(num_dropped)} of the last {format_count(max(num, num_dropped))} records of the stream "
                 f"were dropped: {_counted(self._newest)}")
        self._has_warned = is_much
        self._records_before, self._dropped_before = num_records, self._num_dropped
        self._newest.clear()

    def __str__(self) -> str:
        """Summarize all drops so far; empty if there is none."""
        if not self._num_dropped:
            return ""
        return (f"{format_count(self._num_dropped)} of {format_count(self._num_records)} records were dropped: "
                f"{_counted(self._reasons)}")


def _counted(reasons: Counter[str]) -> str:
    return "; ".join(f"{why} ({format_count(num)})" for why, num in reasons.most_common(3))
