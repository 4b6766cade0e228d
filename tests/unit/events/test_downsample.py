"""Few points that look like many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.events.plotting import means, thin


def test_a_spike_of_one_point_in_a_million_is_stored() -> None:
    xs = np.arange(1_000_000)
    ys = np.zeros(1_000_000)
    ys[654_321], ys[777_777] = 9.0, -9.0
    few_xs, few_ys = thin(xs, ys, 1000)
    assert len(few_xs) <= 1000
    assert few_ys[few_xs == 654_321] == [9.0]
    assert few_ys[few_xs == 777_777] == [-9.0]


def test_few_points_are_left_as_they_are() -> None:
    xs, ys = thin([1, 2, 3], [4, float("nan"), 6], 1000)
    assert xs.tolist() == [1, 2, 3]
    assert ys[[0, 2]].tolist() == [4, 6]
    assert np.isnan(ys[1])


def test_a_stretch_without_numbers_stays_a_gap() -> None:
    ys = np.ones(10_000)
    ys[4_000:6_000] = np.nan
    xs, few = thin(np.arange(10_000), ys, 100)
    assert np.isnan(few[(xs >= 4_200) & (xs < 5_800)]).all()
    assert np.isfinite(few[(xs < 3_800) | (xs > 6_200)]).all()


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1e9, 1e9), max_size=120), st.lists(st.floats(allow_nan=True), min_size=120, max_size=120),
    st.integers(2, 100),
)
def test_what_is_stored_is_some_of_the_points_in_order_with_the_extremes(xs, ys, num_points) -> None:
    xs.sort()
    ys = ys[: len(xs)]
    few_xs, few_ys = thin(xs, ys, num_points)
    assert len(few_xs) == len(few_ys) <= max(num_points, 2)
    assert (np.diff(few_xs) >= 0).all()
    points = {(x, repr(y)) for x, y in zip(xs, map(float, ys), strict=True)}
    assert {(x, repr(float(y))) for x, y in zip(few_xs, few_ys, strict=True)} <= points
    finite = [y for y in ys if np.isfinite(y)]
    if finite and num_points > 3:
        retained = few_ys[np.isfinite(few_ys)]
        assert (retained.min(), retained.max()) == (min(finite), max(finite))


def test_means_weigh_a_spike_as_one_point_and_leave_gaps_out() -> None:
    ys = np.ones(1000)
    ys[500] = 101.0
    ys[10:20] = np.nan
    xs, few = means(np.arange(1000), ys, 10)
    assert len(xs) == 10
    assert few[5] == pytest.approx(2.0)
    assert few[0] == 1.0
    assert (np.diff(xs) > 0).all()
