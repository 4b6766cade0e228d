"""Numbers in a bounded room."""

from __future__ import annotations

import numpy as np
import pytest

from embark.report.rows import Rows


def filled(num: int, *, max_rows: int = 1 << 17) -> Rows:
    rows = Rows(("loss",), max_rows=max_rows)
    for step in range(num):
        rows.add((step, 1000.0 + step, float(step)))
    return rows


def test_rows_come_back_by_step_and_by_time():
    rows = filled(3000)
    steps, loss = rows.column("loss")
    assert steps.tolist() == loss.tolist() == list(range(3000))
    times, _ = rows.column("loss", "time_s")
    assert times[-1] == 3999.0


def test_room_is_bounded_and_a_single_spike_outlives_every_halving():
    rows = Rows(("loss",), max_rows=1000)
    for step in range(100_000):
        rows.add((step, float(step), 7.0 if step == 31_337 else -7.0 if step == 54_321 else 0.0))
    steps, loss = rows.column("loss")
    assert len(steps) <= 1000
    assert (loss.max(), loss.min()) == (7.0, -7.0)
    assert abs(steps[loss.argmax()] - 31_337) < 1000
    assert (steps[0], steps[-1]) == (0.0, 99_999.0)
    assert (np.diff(steps) >= 0).all()


def test_what_is_trained_again_replaces_what_was_by_step_and_stays_by_time():
    rows = filled(100)
    rows.begin_again(40.0)
    for step in range(41, 60):
        rows.add((step, 2000.0 + step, -1.0))
    steps, loss = rows.column("loss")
    assert steps.tolist() == list(range(60))
    assert set(loss[41:]) == {-1.0}
    assert len(rows.column("loss", "time_s")[0]) == 119


def test_what_is_trained_again_is_still_reported_apart_after_a_halving():
    rows = filled(900, max_rows=1000)
    rows.begin_again(100.0)
    for step in range(101, 500):
        rows.add((step, 5000.0 + step, -1.0))
    steps, loss = rows.column("loss")
    assert steps.max() == 499
    assert (loss[steps > 105] == -1.0).all()


def test_rows_out_of_order_are_put_in_order():
    rows = Rows(("loss",))
    for step in (3, 1, 2):
        rows.add((step, float(step), float(step)))
    assert rows.column("loss")[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("odd", [None, "high", float("nan"), [1], {"a": 1}, 10**400, True])
def test_a_value_that_is_no_number_is_a_gap_and_spoils_no_other(odd: object):
    rows = Rows(("loss", "auc"))
    rows.add((1, 1.0, 0.5, 0.6))
    rows.add((2, 2.0, odd, 0.7))
    assert rows.column("auc")[1].tolist() == [0.6, 0.7]
    assert rows.column("loss")[1][0] == 0.5


def test_a_name_that_comes_later_makes_a_column_with_gaps_before():
    rows = Rows()
    rows.add_named(1, 1.0, {"gpu.0": 10})
    rows.add_named(2, 2.0, {"gpu.0": 20, "gpu.1": 30})
    assert rows.names == ["gpu.0", "gpu.1"]
    steps, second = rows.column("gpu.1")
    assert steps.tolist() == [1, 2]
    assert np.isnan(second[0])
    assert second[1] == 30


def test_many_columns_take_fewer_rows():
    rows = Rows(max_cells=100_000)
    for step in range(2000):
        rows.add_named(step, float(step), {f"gpu.{i}": i for i in range(100)})
    assert len(rows) * 102 <= 100_000 + 256 * 102


def test_a_very_long_run_of_very_many_columns_still_ends():
    rows = Rows(max_rows=256)
    for step in range(60_000):
        rows.add_named(step, float(step), {"gpu": float(step == 777)})
    steps, values = rows.column("gpu")
    assert len(steps) <= 256
    assert values.max() == 1.0


def test_old_rows_are_no_coarser_than_new_ones():
    rows = Rows(("loss",), max_rows=1000)
    for step in range(100_000):
        rows.add((step, float(step), float(step % 977)))
    steps, _ = rows.column("loss")
    first, last = steps[steps < 50_000], steps[steps >= 50_000]
    assert len(first) > 200
    assert len(last) < 4 * len(first)
