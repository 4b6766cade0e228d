"""Dense values are those of the plain formula; a row's split depends on the row alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from embark.data.prepare.inputs import InputFile
from embark.data.prepare.rows import Segment
from embark.data.prepare.splits import assign_splits, check_splits
from embark.errors import DataError
from embark.features.encoding import dense_transform, transform_dense
from embark.features.rows import RawRows
from embark.spec.features import FeaturesSpec


def rows_at(positions, split=None) -> RawRows:
    num = len(positions)
    return RawRows(np.asarray(positions, np.int64), np.zeros(num, np.float32), np.zeros((num, 0), np.float32), (), (),
                   (), split=split)


FILES = [InputFile(f"data/day_{i}.gz", 10) for i in range(4)]


def test_a_random_split_does_not_depend_on_the_segment(make_spec):
    data = make_spec({"test_fraction": 0.05}, eval_fraction=0.2).data
    positions = np.arange(100_000) * 243
    complete = assign_splits(data, 1, Segment(FILES[1], 0, 0, 10**9), rows_at(positions))
    shares = np.bincount(complete, minlength=3) / len(complete)
    assert shares == pytest.approx([0.75, 0.2, 0.05], abs=0.01)
    pieces = [assign_splits(data, 1, Segment(FILES[1], i, i, 10**9), rows_at(some))
              for i, some in enumerate(np.array_split(positions, 7))]
    assert np.concatenate(pieces).tolist() == complete.tolist()


def test_another_seed_or_file_draws_otherwise(make_spec):
    rows, segment = rows_at(np.arange(5000)), Segment(FILES[0], 0, 0, 1)
    draws = [assign_splits(make_spec(seed=seed).data, index, segment, rows) for seed, index in [(1, 0), (2, 0), (1, 1)]]
    assert (draws[0] != draws[1]).any()
    assert (draws[0] != draws[2]).any()


def test_files_go_where_their_names_say(make_spec):
    data = make_spec({"split": "file", "validation_files": ["day_2"], "test_files": ["day_[3-9].gz"]}).data
    check_splits(data, FILES)
    splits = [assign_splits(data, i, Segment(file, 0, 0, 1), rows_at(range(3))).tolist()
              for i, file in enumerate(FILES)]
    assert splits == [[0] * 3, [0] * 3, [1] * 3, [2] * 3]


def test_a_name_that_no_file_has_is_refused_with_those_there_are(make_spec):
    with pytest.raises(DataError, match=r"'day_23'.*\n.*day_0\.gz"):
        check_splits(make_spec({"split": "file", "validation_files": ["day_23"]}).data, FILES)


def test_no_file_left_to_train_on_is_refused(make_spec):
    with pytest.raises(DataError, match="every file"):
        check_splits(make_spec({"split": "file", "test_files": ["*"]}).data, FILES)


VALUES = [0.0, 1.0, -1.0, -2.0, -3.0, -1e6, 5.0, 12345678.0, 1e10, math.nan]


@pytest.mark.parametrize(("how", "formula"), [
    ("mlperf", lambda x: math.log(max(x, -2) + 3)),
    ("log", lambda x: math.copysign(math.log(1 + abs(x)), x)),
    ("none", lambda x: x),
])
def test_the_formula_holds(how, formula):
    got = np.array([VALUES], np.float32)
    transform_dense(got, how)
    assert got.dtype == np.float32
    wanted = [formula(0.0 if math.isnan(x) else x) for x in VALUES]
    assert got[0].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_auto_is_mlperf_for_criteo_and_log_for_others(criteo):
    assert dense_transform(FeaturesSpec(), criteo.schema()) == "mlperf"
    assert dense_transform(FeaturesSpec(), replace(criteo.schema(), format="csv")) == "log"
    assert dense_transform(FeaturesSpec(numbers="none"), criteo.schema()) == "none"
