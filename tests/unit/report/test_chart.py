"""Curves as SVG: round ticks, gaps, spikes that stay, and nothing outside of the frame."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.report.charts import chart, say_figure, say_step
from embark.report.svg_chart import Rule, Stroke

SVG = re.compile(r' d="([^"]*)"')


def path_of(strokes, **options) -> str:
    drawn = chart(strokes, say_y=say_figure, **options)
    assert drawn is not None
    return next(d for d in SVG.findall(drawn) if d.startswith("M"))


def test_a_value_that_is_no_number_makes_a_gap():
    path = path_of([Stroke([1, 2, 3, 4, 5], [1, 2, math.nan, 2, 1], "k0")])
    assert path.count("M") == 2


@pytest.mark.parametrize("ys", [[], [1.0], [math.nan] * 5, [math.inf, 1.0]])
def test_what_has_no_two_points_is_not_drawn(ys):
    assert chart([Stroke(list(range(len(ys))), ys, "k0")], say_y=say_figure) is None


def test_a_spike_among_a_hundred_thousand_points_is_drawn():
    ys = [1.0] * 100_000
    ys[54_321] = 9.0
    drawn = chart([Stroke(list(range(100_000)), ys, "k0")], say_y=say_figure, from_zero=True)
    assert drawn is not None
    assert len(drawn) < 20_000
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path_of([Stroke(list(range(100_000)), ys, "k0")]))]
    assert min(heights) < 30 < max(heights)


def test_the_first_steps_do_not_press_the_rest_into_a_line():
    ys = [10.0, 5.0, *[0.5 + 0.01 * (n % 2) for n in range(98)]]
    path = path_of([Stroke(list(range(100)), ys, "k0")])
    heights = [float(y) for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", path)]
    assert heights[0] < 0  # beyond the top, where it is cut off
    assert max(heights[20:]) - min(heights[20:]) > 60


def test_rules_have_their_words_and_those_outside_are_left_out():
    drawn = chart([Stroke([0, 10], [1, 2], "k0")], [Rule(5, "save", "checkpoint 5"), Rule(50, "stop", "later")],
                  say_y=say_figure)
    assert drawn is not None
    assert "checkpoint 5" in drawn
    assert "later" not in drawn


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.one_of(st.floats(-1e30, 1e30), st.just(math.nan))), max_size=40))
def test_whatever_the_numbers_it_is_xml_or_nothing(points):
    drawn = chart([Stroke([x for x, _ in points], [y for _, y in points], "k0", has_dots=True)], say_y=say_figure)
    if drawn is not None:
        assert "nan" not in drawn
        ET.fromstring(drawn)


def test_steps_are_reported_shortly():
    assert [say_step(n) for n in (0, 2500, 20_000, 1_500_000, 2e9)] == ["0", "2,500", "20 k", "1.5 M", "2 B"]
