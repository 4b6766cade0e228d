"""Ticks are round, few and inside the axis."""

from __future__ import annotations

import pytest

from embark.events.plotting import Axis


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.4512, 0.4533), (-3, 7), (0, 123_456), (1e-9, 2e-9), (5, 5)])
def test_ticks_are_round_few_and_inside(low, high):
    ticks = Axis(low, high, 0, 1).ticks(5)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-12 <= tick <= high + 1e-9 * max(1, abs(high)) for tick in ticks)
