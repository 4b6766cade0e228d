"""A rehearsal trains on a sample of the run's own data."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from exported_runs import draw_rows, prepared_spec, write_csv
from prepared_rows import FIXED, RAGGED, make_prepared

from embark.data import open_source, resolve_from_data
from embark.data.prepare.later_rows import PreparedWith
from embark.data.prepared.cache import read_manifest
from embark.data.sample import take_sample, write_sample
from embark.errors import DataError
from embark.rehearse.downscale import MAX_ROWS, SAMPLE, downscale_spec
from embark.spec import RunSpec, resolve


def rehearsed(spec: RunSpec, out: Path, *, num_train: int = 12, num_eval: int = 4):
    """The sample written out, and opened with the spec that a rehearsal trains."""
    sample, unread = take_sample(spec, num_train=num_train, num_eval=num_eval)
    assert sample is not None
    assert unread == ""
    write_sample(sample, out, max_rows=MAX_ROWS)
    small = downscale_spec(spec, world_size=2, num_steps=3, sample=sample)
    assert (small.data.kind, small.data.path) == ("prepared", SAMPLE)
    assert small.train.batch_size <= sample.num_train
    here = small.model_copy(update={"data": small.data.model_copy(update={"path": str(out), "shuffle": "none"})})
    return open_source(resolve_from_data(here))


@pytest.mark.parametrize("features", [FIXED, RAGGED], ids=["fixed", "ragged"])
def test_a_sample_has_the_first_rows_with_ids_that_small_tables_hold(tmp_path, features):
    made = make_prepared(tmp_path / "data", features, train=30, validation=9)
    spec = made.spec()
    source = rehearsed(spec, tmp_path / "sample")
    assert (source.num_train_samples, source.num_eval_samples) == (12, 4)
    whole = made.open(shuffle="none").train_rows(0, 0, 12)
    batch = source.train_rows(0, 0, 12)
    np.testing.assert_array_equal(batch.label, whole.label)
    np.testing.assert_array_equal(batch.dense, whole.dense)
    np.testing.assert_array_equal(batch.lengths, whole.lengths)
    rows = np.repeat([min(feature.rows, MAX_ROWS) for feature in features], whole.lengths.sum(axis=1))
    np.testing.assert_array_equal(batch.ids, whole.ids % rows)


def test_it_has_rows_of_a_csv_file(tmp_path):
    with (tmp_path / "clicks.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["user", "price", "click"], *([i % 7 + 2_000, i / 2, i % 2] for i in range(200))])
    spec = resolve({"model": {"num_dense": 1, "tables": [{"name": "user", "rows": 3_000}]},
                    "data": {"kind": "columns", "path": str(tmp_path / "clicks.csv"), "label": "click",
                             "dense_columns": ["price"]}})
    source = rehearsed(spec, tmp_path / "sample")
    batch = source.train_rows(0, 0, 12)
    assert set(batch.ids) <= set(range(7))
    assert set(batch.label) == {0.0, 1.0}


def test_a_sample_of_hashed_ids_keeps_what_turns_raw_rows_into_ids(tmp_path):
    rows = [write_csv(tmp_path / name, draw_rows(num, num)) for name, num in (("a.csv", 100), ("b.csv", 20))]
    spec = prepared_spec(tmp_path, *rows, prepare={"ids": "hash", "time_columns": {}}, model={
        "num_dense": 1, "tables": [{"name": name, "rows": rows} for name, rows in (
            ("word", 4 * MAX_ROWS), ("number", 7), ("tags", 2 * MAX_ROWS))]})
    rehearsed(spec, tmp_path / "sample")
    manifest = read_manifest(str(tmp_path / "sample"))
    kept, whole = PreparedWith.of(str(tmp_path / "sample"), manifest), read_manifest(spec.data.path)
    assert kept is not None
    assert kept.schema.needed == PreparedWith.of(spec.data.path, whole).schema.needed
    assert manifest.layout.dense == whole.layout.dense
    assert [one.hashed_rows for one in kept.row_encoder().maps] == [
        min(feature.rows, MAX_ROWS) for feature in whole.layout.features]


def test_unreadable_data_is_explained_and_wrong_data_is_refused(tmp_path):
    there = resolve({"data": {"kind": "prepared", "path": "/nowhere/data"}})
    assert take_sample(there, num_train=1, num_eval=1) == (None, "/nowhere/data: there is no manifest.json")
    file = resolve({"data": {"kind": "columns", "path": "/nowhere/x.csv"}, "model": {"num_dense": 0}})
    assert "no such file" in take_sample(file, num_train=1, num_eval=1)[1]
    made = make_prepared(tmp_path / "data", RAGGED, train=30)
    wrong = resolve({"data": {"kind": "prepared", "path": str(made.path)}, "model": {"num_dense": 77}})
    with pytest.raises(DataError, match="not what"):
        take_sample(wrong, num_train=1, num_eval=1)
