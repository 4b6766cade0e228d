"""A stream most of whose records are dropped says so, and why; one that cannot be trained on at all stops the run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from embark.data.stream.records import StreamStopped
from embark.data.stream.source import WINDOW, StreamSource
from embark.errors import DataError
from embark.features.values import event_time_s
from embark.spec import RunSpec, resolve

BATCH = 16
ROW = {"t": 1.7e9, "label": 1, "price": 0.5, "user": 7}


def spec_of(folder: Path) -> RunSpec:
    return resolve({
        "model": {"num_dense": 1, "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8],
                  "tables": [{"name": "user", "rows": 50}]},
        "data": {"dense_columns": ["price"]}, "train": {"batch_size": BATCH},
        "stream": {"source": "files", "path": str(folder), "time_column": "t"}})


def write(folder: Path, records: list[object]) -> RunSpec:
    folder.mkdir()
    (folder / "0.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return spec_of(folder)


@pytest.mark.parametrize(("record", "why"), [
    ({**ROW, "t": "noon"}, "no time in column 't'"),
    (["a", "list"], "not a JSON object"),
    ({"t": 1.7e9, "label": 1, "price": 0.5, "usr": 7}, "column 'user' is empty"),
    ({**ROW, "label": "maybe"}, "column 'label'"),
])
def test_a_stream_without_a_readable_record_stops_the_run(tmp_path, record, why):
    with closing(StreamSource(write(tmp_path / "in", [record] * (WINDOW + BATCH)))) as source, \
            pytest.raises(DataError, match=r"none of the first 1,0.. records") as caught:
        source.train_rows(0, 0, BATCH)
    assert why in caught.value.what


def test_a_clock_that_jumped_ahead_is_named_if_later_records_are_late(tmp_path):
    spec = write(tmp_path / "in", [ROW] * BATCH + [{**ROW, "t": "2024-06-01"}] + [ROW] * (2 * WINDOW))
    warnings: list[str] = []
    with closing(StreamSource(spec)) as source:
        assert len(source.train_rows(0, 0, BATCH).label) == BATCH
        with source.reading(lambda: True, warnings.append), pytest.raises(StreamStopped):
            source.train_rows(0, BATCH, 2 * BATCH)
    assert len(warnings) == 1  # not once for each window
    assert "older than the newest event by more than stream.bound_s = 0" in warnings[0]
    assert "the newest event is of 2024-06-01T00:00:00Z" in warnings[0]


@pytest.mark.parametrize(("names", "why"), [
    (None, "there is no such folder yet"), ([], "no file yet"), (["rows.txt"], "no file with a name that ends with"),
])
def test_a_run_that_finds_no_record_says_where_it_looked(tmp_path, monkeypatch, names, why):
    monkeypatch.setattr("embark.data.stream.source.FIRST_S", 0.0)
    if names is not None:
        (tmp_path / "in").mkdir()
    for name in names or ():
        (tmp_path / "in" / name).write_text("{}")
    warnings: list[str] = []
    with closing(StreamSource(spec_of(tmp_path / "in"))) as source, \
            source.reading(lambda: bool(warnings), warnings.append), pytest.raises(StreamStopped):
        source.train_rows(0, 0, BATCH)
    assert f"no record of the stream for 0 s: {tmp_path}/in: {why}" in warnings[0]


def joined(folder: Path, rows: list[object]) -> RunSpec:
    spec = write(folder, [{**ROW, "t": ROW["t"] + at, "id": at, **row} for at, row in enumerate(rows)])
    return resolve({**spec.model_dump(exclude_unset=True), "stream": {
        **spec.stream.model_dump(exclude_unset=True), "key": "id", "label_window_s": 5}})


def test_rows_that_carry_their_labels_are_refused_where_a_key_joins_them(tmp_path):
    with closing(StreamSource(joined(tmp_path / "in", [{}] * (WINDOW + BATCH)))) as source, \
            pytest.raises(DataError, match="no record of the stream can be trained on: all 1,000") as caught:
        source.train_rows(0, 0, BATCH)
    assert "stream.key = 'id' makes such a record a label" in caught.value.what
    assert caught.value.fix == "if rows carry their labels, leave out stream.key and stream.label_window_s"


def test_a_few_rows_that_carry_their_labels_are_named_while_it_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("embark.data.stream.source.FIRST_S", 0.0)
    warnings: list[str] = []
    with closing(StreamSource(joined(tmp_path / "in", [{}] * BATCH))) as source, \
            source.reading(lambda: bool(warnings), warnings.append), pytest.raises(StreamStopped):
        source.train_rows(0, 0, BATCH)
    assert "no new file; all 16 records that could be read have a value in column 'label'" in warnings[0]
    assert "leave out stream.key and stream.label_window_s" in warnings[0]


def test_labels_before_their_rows_and_with_columns_of_rows_are_no_mistake(tmp_path):
    bare = [{"price": None, "user": None}] * (WINDOW + BATCH)
    for name, first in (("bare", bare), ("few", [{}] * BATCH)):
        with closing(StreamSource(joined(tmp_path / name, [*first, *[{"label": None}] * 3 * BATCH]))) as source:
            assert not source.train_rows(0, 0, BATCH).label.any()


def test_microseconds_are_no_event_time():
    assert event_time_s(1_700_000_000_123) == 1_700_000_000.123
    assert event_time_s(1_700_000_000_123_456) is None
