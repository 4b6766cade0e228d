"""The picture: one file without script, every point named once, no name on another."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_setups import hand_estimator

from embark.formatting import format_usd
from embark.plan.chart import (
    HEIGHT,
    MOST_TICKS,
    axis_of,
    draw_svg,
    front_letters,
    plot,
)
from embark.plan.survey import Bounds, Survey, near_front, pareto_front, survey_catalog
from embark.plan.workload import DataSize

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found():
    estimator = hand_estimator(lambda s: 40.0 / (s.num_nodes * s.machine.gpu_memory_gib) ** 0.9,
                               data_size=DataSize(65_536 * 100_000, 0))
    return survey_catalog(estimator, max_nodes=4)


def marks(root):
    return [e for e in root.iter() if "dot" in e.get("class", "").split() and e.find(f"{SVG}title") is not None]


def test_it_is_one_file_that_needs_nothing_else(found):
    text = draw_svg(found, "criteo-1tb")
    ET.fromstring(text)
    assert "<script" not in text
    assert not re.search(r"(href|src|url\()", text)
    assert "prefers-color-scheme: dark" in text


def test_every_setup_is_a_mark_that_says_what_it_is(found):
    root = ET.fromstring(draw_svg(found, "run"))
    titles = [e.find(f"{SVG}title").text for e in marks(root)]
    shown = near_front(found)
    assert len(titles) == len(shown)
    assert any("p4d.24xlarge" in t and "$" in t and "ms a step" in t for t in titles)


def test_the_front_is_a_line_through_its_points(found):
    root = ET.fromstring(draw_svg(found, "run"))
    line, = (e for e in root.iter(f"{SVG}path") if e.get("class") == "stroke front")
    points = [tuple(map(float, p.split())) for p in line.get("d").lstrip("M").split("L")]
    assert len(points) == len(pareto_front(found.fitting, "on_demand"))
    assert points == sorted(points)
    assert [y for _, y in points] == sorted(y for _, y in points)  # cheaper is lower, and down is more


def test_every_setup_of_the_front_is_named_beside_its_letter(found):
    root = ET.fromstring(draw_svg(found, "run"))
    letters = [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "letter"]
    named = [[e.text for e in row] for row in root.iter(f"{SVG}text") if [e.get("class") for e in row][:1] == ["name"]]
    front = pareto_front(found.fitting, "on_demand")
    assert letters == [letter for letter, *_ in named] == list(front_letters(found).values())
    assert [title for _, title, _ in named] == [e.setup.title for e in front]
    assert all(0 < float(e.get("y")) < HEIGHT for e in root.iter(f"{SVG}text"))


def test_a_deadline_and_a_budget_are_lines(found):
    text = draw_svg(found, "run", Bounds(deadline_s=3600.0, budget_usd=50.0))
    assert "deadline 1 h 00 min" in text
    assert "budget $50.00" in text
    assert text.count('class="bound"') == 2
    assert "outside" in text


def test_text_from_a_spec_cannot_become_markup(found):
    assert "&lt;b&gt;" in draw_svg(found, "<b>")


def test_nothing_to_draw_is_reported():
    assert "nothing here fits" in draw_svg(Survey("on_demand", (), (), (), 0), "run")


@settings(max_examples=40)
@given(values=st.lists(st.floats(0.01, 1e7), min_size=1, max_size=20))
def test_an_axis_holds_its_values_and_its_labels_do_not_overlap(values):
    axis = axis_of(values, 76.0, 932.0)
    assert all(75.9 <= axis.position(value) <= 932.1 for value in values)
    for ticks in (axis.ticks(MOST_TICKS), axis.time_ticks(MOST_TICKS)):
        assert all(axis.position(b) - axis.position(a) >= 80 for a, b in pairwise(ticks))


def test_wide_ranges_are_logarithmic_and_narrow_ones_are_not():
    assert axis_of([60, 36_000], 0, 100).is_log
    assert not axis_of([60, 90], 0, 100).is_log
    assert axis_of([50, 4000], 0, 900).time_ticks(MOST_TICKS)[:3] == [60, 120, 300]
    assert "$10.00" in map(format_usd, axis_of([1, 100], 0, 900).ticks(MOST_TICKS))


def test_a_terminal_shows_the_front_by_letters(found):
    lines = plot(found, width=76, height=14)
    assert len(lines) == 16
    assert all(len(line) <= 76 for line in lines)
    drawn = "".join(line.split("│")[-1] for line in lines[:14])
    letters = set(front_letters(found).values())
    assert len(letters & set(drawn)) >= len(letters) - 2  # two may share a cell
    assert lines[0].lstrip().startswith("$")


def test_a_terminal_too_narrow_or_too_little_to_show_draws_nothing(found):
    assert plot(found, width=20, height=14) == []
    assert plot(Survey("on_demand", found.fitting[:1], (), (), 1), width=76, height=14) == []
