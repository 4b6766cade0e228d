"""Ticks are round, few and inside the axis."""

from __future__ import annotations

import pytest

from embark.events.plotting import Axis, format_time_tick


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.4512, 0.4533), (-3, 7), (0, 123_456), (1e-9, 2e-9), (5, 5)])
def test_ticks_are_round_few_and_inside(low, high):
    ticks = Axis(low, high, 0, 1).ticks(5)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-12 <= tick <= high + 1e-9 * max(1, abs(high)) for tick in ticks)


def test_time_ticks_are_times_that_people_say():
    assert Axis(0, 3600, 0, 1).time_ticks(5) == [0, 900, 1800, 2700, 3600]
    assert Axis(0, 400, 0, 1).time_ticks(5) == [0, 120, 240, 360]
    assert len(Axis(0, 30 * 86_400, 0, 1).time_ticks(5)) == 5
    assert [format_time_tick(seconds) for seconds in (0.5, 90, 7200, 864_000)] == ["0.5 s", "1.5 min", "2 h", "10 d"]
