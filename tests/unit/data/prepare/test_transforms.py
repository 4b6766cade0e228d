"""Dense values are those of the plain formula; a row's split depends on the row alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embark.data.prepare.inputs import InputFile
from embark.data.prepare.rows import Segment
from embark.data.prepare.splits import assign_splits, check_splits
from embark.errors import DataError
from embark.features.made import _MAX_COMPARED, bucket_ids
from embark.features.numbers import MAX_SPLIT_ROWS, DrawnRows, Numbers, NumberSample, fit_numbers, fixed_numbers
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
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
def test_the_formula_of_earlier_data_holds(how, formula):
    got = Numbers.plain(how, ["x"]).encode(np.array([VALUES], np.float32).T)
    assert got.dtype == np.float32
    wanted = [formula(0.0 if math.isnan(x) else x) for x in VALUES]
    assert got[:, 0].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def fitted(values: list[float], may_add: bool = True, num_rows: int = 10**6, **features: object) -> Numbers:
    cells = np.array([values], np.float32).T
    sample = replace(NumberSample.of(1, 0, np.arange(len(cells)), cells), num_rows=num_rows)
    return fit_numbers(FeaturesSpec.model_validate(features), ["x"], sample, may_add=may_add)


def encoded(numbers: Numbers, *cells: float) -> list[list[float]]:
    return numbers.encode(np.array([cells], np.float32).T).tolist()


def test_auto_is_mlperf_for_criteo_and_the_spec_decides_for_others():
    assert fixed_numbers(FeaturesSpec(), ["x"], is_criteo=True) == Numbers.plain("mlperf", ["x"])
    assert fixed_numbers(FeaturesSpec(), ["x"], is_criteo=False) is None
    assert fixed_numbers(FeaturesSpec(numbers="mlperf"), ["x"], is_criteo=False) == Numbers.plain("mlperf", ["x"])


@pytest.mark.parametrize(("values", "transform"), [
    (list(range(18, 92)), "standardize"), ([0, 1] * 50, "standardize"), ([-5.0, 1e6] * 50, "standardize"),
    ([0.0] * 90 + [10.0 ** i for i in range(10)], "log"), ([math.exp(i / 20) for i in range(200)], "log"),
])
def test_auto_takes_the_logarithm_of_amounts_with_a_long_tail(values, transform):
    code, = fitted(values).codes
    assert code.transform == transform
    got = fitted(values).encode(np.array([values], np.float32).T)
    assert abs(got.mean()) < 0.2
    assert 0.4 < got.std() < 1.2


def test_auto_splits_a_column_into_buckets_where_training_rows_are_few():
    values = [float(value) for value in range(100)]
    few, many = fitted(values, num_rows=MAX_SPLIT_ROWS), fitted(values, num_rows=MAX_SPLIT_ROWS + 1)
    assert few.names == tuple(f"x_bin_{number}" for number in range(1, 17))
    assert "with more than 262,144 training rows standardize" in few.codes[0].describe()
    assert many.names == fitted(values, num_rows=100, may_add=False).names == ("x",)


def test_a_missing_number_is_the_mean_and_has_a_flag():
    numbers = fitted([1, 2, 3, 4, math.nan])
    assert numbers.names == ("x", "x_missing")
    assert encoded(numbers, math.nan, 2.5) == [[0, 1], [0, 0]]
    assert fitted([1, 2, 3, 4]).names == fitted([1, math.nan], missing_flags=False).names == ("x",)
    assert fitted([1, math.nan], may_add=False).names == ("x",)
    assert encoded(fitted([1, 2, 3, math.nan], numbers="none", missing_flags=False), math.nan) == [[2]]


def test_an_outlier_is_cut_and_does_not_scale_the_others():
    numbers = fitted([*range(5_000), 1e30], numbers="standardize")
    assert encoded(numbers, 1e38, -1e38) == [[8], [-8]]
    assert encoded(numbers, 4_000)[0][0] == pytest.approx(1.04, abs=0.05)


def test_piecewise_linear_says_how_far_a_number_is_through_each_bin():
    numbers = fitted([0, 1, 2, 3, 4], numbers="piecewise_linear", num_buckets=2)
    assert numbers.names == ("x_bin_1", "x_bin_2")
    assert encoded(numbers, -9, 1, 2, 3, 9) == [[0, 0], [0.5, 0], [1, 0], [1, 0.5], [1, 1]]


def test_a_value_of_most_rows_takes_one_bucket_of_many():
    numbers = fitted([0] * 900 + list(range(1, 101)), numbers="piecewise_linear", num_buckets=8)
    edges = numbers.codes[0].boundaries
    assert len(edges) >= 5
    assert max(second - first for first, second in pairwise(edges)) < 40


def test_quantiles_are_the_share_of_rows_below():
    numbers = fitted(list(range(101)), numbers="quantiles")
    assert [row[0] for row in encoded(numbers, -5, 0, 25, 50, 100, 900)] == pytest.approx([-1, -1, -0.5, 0, 1, 1])


def test_clip_cuts_where_the_spec_or_the_percentiles_say():
    assert encoded(fitted([1, 2, 3], columns={"x": {"transform": "clip", "min": 1.5, "max": 2.5}}), 0, 2, 9) == [
        [1.5], [2], [2.5]]
    assert encoded(fitted(list(range(101)), numbers="clip"), -50, 500) == [[1], [99]]


def test_a_sample_is_the_same_however_rows_are_cut():
    cells = np.random.default_rng(0).normal(size=(5_000, 2)).astype(np.float32)
    cells[7, 1] = np.nan
    whole = NumberSample.of(3, 0, np.arange(5_000), cells)
    pieces = [NumberSample.of(3, 0, np.arange(start, min(start + 700, 5_000)), cells[start : start + 700])
              for start in range(0, 5_000, 700)]
    joined = NumberSample.join([NumberSample.none(2), *pieces[::-1]])
    assert np.array_equal(whole.draws, joined.draws)
    assert np.array_equal(whole.dense, joined.dense, equal_nan=True)
    assert whole.num_missing.tolist() == joined.num_missing.tolist() == [0, 1]


def test_the_sample_has_no_rows_that_earlier_segments_keep_out(monkeypatch):
    monkeypatch.setattr("embark.features.numbers.MAX_SAMPLE_ROWS", 1024)
    cells = np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32)
    drawn, parts = DrawnRows(), [NumberSample.none(3)]
    for start in (*range(0, 20_000, 500), 500):  # one of them again, as after a failure
        rows = np.arange(start, start + 500)
        parts.append(NumberSample.of(3, 0, rows, cells[rows], drawn.highest))
        drawn.add(parts[-1])
    whole, joined = NumberSample.of(3, 0, np.arange(20_000), cells), NumberSample.join(parts[:-1])
    assert len(whole.draws) == 1024
    assert np.array_equal(whole.draws, joined.draws)
    assert np.array_equal(whole.dense, joined.dense)
    assert drawn.highest == whole.draws[-1]
    assert sum(len(part.draws) for part in parts) < 6_000


ANY_CELLS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(*[ANY_CELLS] * 6), min_size=1, max_size=40), st.booleans(), st.sampled_from([1, 2, 1 << 12]))
def test_a_row_has_the_same_bits_alone_and_among_others(rows, all_flags, slab_rows):
    cells = np.array([*rows, [-0.0] * 6], np.float32)
    columns = {f"x{at}": {"transform": how, "missing_flag": all_flags or at == 1} for at, how in enumerate(
        ("standardize", "log", "mlperf", "quantiles", "clip", "none" if all_flags else "piecewise_linear"))}
    columns["x4"] |= {"min": 0.0}
    sample = NumberSample.of(1, 0, np.arange(len(cells)), cells)
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("embark.features.numbers._SLAB_ROWS", slab_rows)
        numbers = fit_numbers(FeaturesSpec.model_validate({"columns": columns}), [*columns], sample, may_add=True)
        before = cells.copy()
        together = numbers.encode(cells)
        assert cells.tobytes() == before.tobytes()
        alone = [numbers.encode(row[None]) for row in cells]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    assert math.copysign(1, together[-1, numbers.names.index("x4")]) == 1


@pytest.mark.parametrize("num", [0, 1, 15, _MAX_COMPARED, _MAX_COMPARED + 1, 300])
def test_a_bucket_begins_with_its_boundary_and_a_missing_number_has_none(num):
    bounds = tuple(float(bound) for bound in range(num))
    column = SparseColumn("b", "bucket", rows=num + 2, parts=("x",), buckets=(bounds,))
    schema = Schema("csv", "label", ("x",), (column,), ("label", "x"))
    cells = np.array([[-1.0, -0.0, 0.0, 0.5, 1.0, num - 1, num, math.inf, -math.inf, math.nan]], np.float32).T
    wanted = [0 if math.isnan(cell) else 1 + sum(bound <= cell for bound in bounds) for cell in cells[:, 0]]
    assert bucket_ids(column, schema, cells).tolist() == wanted


def test_a_column_has_its_cells_however_many_dense_values_it_has():
    cells = np.array([[-9, 3, 40, math.nan, 7.25, 1e6], [5, math.nan, 1, 2, 3, 4]], np.float32).T
    columns = {"x": {"transform": "piecewise_linear", "missing_flag": True}, "y": {"transform": "none"}}
    sample = NumberSample.of(1, 0, np.arange(101), np.stack([np.arange(101)] * 2, axis=1).astype(np.float32))
    numbers = fit_numbers(FeaturesSpec.model_validate({"columns": columns}), ["x", "y"], sample, may_add=True)
    dense = np.column_stack([numbers.encode(cells.copy()), np.arange(6)])
    (x, cells_of_x, flag), (y, cells_of_y, none), (count, counts, _) = numbers.by_column(
        (*numbers.names, "user_count"), dense)
    assert (x, y, none, count) == ("x", "y", None, "user_count")
    assert cells_of_x.tolist() == pytest.approx([0, 3, 40, 50, 7.25, 100], rel=1e-6)
    assert flag.tolist() == [0, 0, 0, 1, 0, 0]
    assert cells_of_y.tolist() == dense[:, -2].tolist()
    assert counts.tolist() == list(range(6))
