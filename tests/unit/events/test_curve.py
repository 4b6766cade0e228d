"""A curve goes where its points go."""

import math

from embark.events.plotting import MARK, MAX_POINTS, Series, draw, sparkline


def test_a_rising_line_runs_from_bottom_left_to_top_right():
    chart = draw([(0, 0.0), (100, 1.0)], [], width=8, height=4)
    assert chart is not None
    assert [row.strip() != "" for row in chart.rows] == [True] * 4
    starts = [len(row) - len(row.lstrip()) for row in chart.rows]
    assert starts == sorted(starts, reverse=True)
    assert (chart.low, chart.high, chart.first, chart.last) == (0.0, 1.0, 0, 100)
    assert all(len(row) == 8 for row in chart.rows)


def test_a_steep_line_is_joined_up():
    chart = draw([(0, 0.0), (49, 0.0), (50, 9.0), (100, 9.0)], [], width=10, height=6)
    assert chart is not None
    assert all(row.strip() for row in chart.rows)


def test_a_flat_line_lies_in_the_middle():
    chart = draw([(0, 0.5), (10, 0.5)], [], width=6, height=3)
    assert chart is not None
    assert [bool(row.strip()) for row in chart.rows] == [False, True, False]
    assert len(chart.rows[1].strip()) == 6


def test_marks_lie_over_the_line_at_their_value():
    chart = draw([(0, 0.0), (100, 0.0)], [(50, 1.0), (100, 0.0)], width=9, height=3)
    assert chart is not None
    assert chart.rows[0].index(MARK) == 4
    assert chart.rows[2][8] == MARK


def test_what_cannot_be_drawn_is_left_out():
    points = [(0, 0.5), (5, math.nan), (7, math.inf), (10, 0.7)]
    chart = draw(points, [(3, math.nan)], width=6, height=3)
    assert chart is not None
    assert (chart.low, chart.high) == (0.5, 0.7)
    assert MARK not in "".join(chart.rows)


def test_one_point_is_no_curve():
    assert draw([(5, 0.5)], [(5, 0.6)], width=6, height=3) is None
    assert draw([], [], width=6, height=3) is None


def test_a_long_series_stays_small_and_keeps_its_ends_and_its_mean():
    series = Series()
    for step in range(100_001):
        series.add(step, step / 100_000)
    points = series.points
    assert len(points) <= MAX_POINTS
    assert points[0][0] < 200
    assert points[-1][0] > 99_900
    assert points == sorted(points)
    assert all(abs(value - step / 100_000) < 1e-9 for step, value in points)


def test_a_sparkline_keeps_to_its_width_and_passes_over_what_is_no_number():
    line = sparkline([float("nan"), *range(100)], 0, 99, 10)
    assert len(line) == 10
    assert line[0] == "▁"
    assert line[-1] == "█"
    assert sparkline([], 0, 1, 10) == ""
