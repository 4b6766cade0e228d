"""A curve of any length takes a bounded room, and keeps what catches the eye."""

from __future__ import annotations

import math

import pytest

from embark.report import line as module
from embark.report.line import Line


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(module, "MAX_POINTS", 256)


def test_a_long_line_keeps_its_peaks_its_gaps_and_its_last_point(short):
    line = Line()
    for n in range(10_000):
        line.add(n, float(n), 99.0 if n == 1234 else math.nan if n == 4321 else math.sin(n / 500))
    assert len(line.kept) <= 256
    assert max(value for value in line.kept.values if value == value) == 99.0
    assert sum(math.isnan(value) for value in line.kept.values) == 1
    assert line.kept.steps[-1] == 9999
    assert list(line.kept.steps) == sorted(line.kept.steps)
    assert list(line.kept.steps) == list(line.kept.times_s)


def test_what_is_redone_leaves_the_line_and_is_kept_beside_it():
    line = Line()
    for n in range(1, 11):
        line.add(n, 100.0 + n, float(n))
    line.forget_after(7)
    line.add(8, 200.0, 80.0)
    assert list(line.kept.values) == [1, 2, 3, 4, 5, 6, 7, 80]
    assert [list(piece.steps) for piece in line.lost] == [[7, 8, 9, 10]]
    line.forget_after(100)
    assert len(line.lost) == 1


def test_the_first_point_counts_for_the_usual_value_only_where_it_is_all():
    line = Line()
    line.add(1, 1.0, 50.0)
    assert line.median == 50.0
    for n in range(2, 5):
        line.add(n, 1.0, float(n))
    assert line.median == 3.0
    assert Line().median is None
    assert Line().last is None


def test_the_best_is_the_greatest_or_the_least():
    line = Line()
    for step, value in ((1, 0.5), (2, 0.9), (3, math.nan), (4, 0.7)):
        line.add(step, 1.0, value)
    assert line.best("up") == (2, 0.9)
    assert line.best("down") == (1, 0.5)
    assert Line().best("up") is None
