"""Runs side by side: which was better, by what, and what differs in their specs."""

from __future__ import annotations

import re

import pytest

from embark.events.events import Event
from embark.report.compare import as_data, compare, compare_document, sparkline
from embark.report.context import Price
from embark.report.html_page import html_page
from embark.report.record import Record, record_of


@pytest.fixture
def side(make_run, make_around):
    def make(name: str, auc: float | None = 0.75, price: float | None = None, batch_size: int = 64, **ends) -> tuple:
        events = [event for event in make_run(num_stops=0) if event.kind != "eval"]
        held = [Event("eval", {"step": 1000, "num_samples": 9, "auc": auc, "log_loss": 0.5}, events[-1].time_s)]
        end = Event("end", {**events[-1].values, **ends}, events[-1].time_s)
        spec = {"name": name, "train": {"batch_size": batch_size}}
        return record_of([*events[:-1], *(held if auc is not None else []), end]), make_around(
            name=name, uri=f"runs/{name}", spec=spec, price=Price(price, "x") if price else None)

    return make


def test_the_better_one_is_named_with_what_it_was_better_by(side):
    found = compare([side("a", 0.76), side("b", 0.79, batch_size=128)])
    assert found.best == "b"
    assert found.sentence == "b was better: held-out AUC 0.7900 against 0.7600 of a (+0.0300)."
    assert found.spec == (("train.batch_size", ("64", "128")),)


def test_what_it_took_is_said_too(side):
    found = compare([side("a", 0.76, price=10.0), side("b", 0.79, price=30.0)])
    assert found.sentence.endswith("of a (+0.0300), 3.0 times dearer.")


def test_of_two_that_learnt_equally_well_the_cheaper_one_is_better(side):
    found = compare([side("a", 0.7600, price=10.0), side("b", 0.7602, price=30.0)])
    assert found.best == "a"
    assert "learnt equally well" in found.sentence
    assert "a was cheaper: $0.14 against $0.42" in found.sentence


def test_other_samples_are_a_reason_for_care(side, make_around):
    record, around = side("a", 0.76)
    other = make_around(name="b", spec={**around.spec, "data": {"seed": 7}})
    assert compare([(record, around), (record, other)]).sentence.endswith(
        "They did not see the same samples (data.seed), so take it with care.")


def test_none_is_better_where_nothing_differs(side):
    found = compare([side("a"), side("b")])
    assert found.best == ""
    assert found.spec == ()
    assert "neither was quicker" in found.sentence


def test_without_evaluations_the_training_loss_decides(side):
    found = compare([side("a", None), side("b", None)])
    assert "training loss" in found.sentence


def test_runs_that_said_nothing_are_compared_by_nothing(make_around):
    found = compare([(Record(), make_around()), (Record(), make_around())])
    assert found.sentence.startswith("Nothing to compare by")
    assert [s.name for s in found.sides] == ["runs/demo", "runs/demo (2)"]
    assert "Nothing to compare by" in html_page(compare_document(found))


def test_three_runs_and_their_curves_lie_over_each_other(side):
    found = compare([side("a", 0.76), side("b", 0.79), side("<b>c</b>", 0.78)])
    assert found.sentence == "b was better: held-out AUC 0.7900 against 0.7800 of <b>c</b> (+0.0100)."
    html = html_page(compare_document(found))
    first = re.search(r'<svg [^>]*class="chart">.*?</svg></svg>', html)
    assert first is not None
    assert all(f'class="stroke k{n}"' in first.group() for n in range(3))
    assert "<b>" not in html
    assert "&lt;b&gt;c&lt;/b&gt;" in html


def test_a_program_gets_the_same(side):
    data = as_data(compare([side("a", 0.76), side("b", 0.79, batch_size=128)]))
    assert data["best"] == "b"
    assert data["runs"][1]["eval_auc"] == 0.79
    assert data["runs"][0]["state"] == "done"
    assert data["spec"] == [{"field": "train.batch_size", "values": ["64", "128"]}]


def test_a_small_difference_in_what_it_took_is_none(side):
    found = compare([side("a", peak_bytes=100.0), side("b", peak_bytes=101.0), side("c", peak_bytes=100.0)])
    rows = {row.name: found.best_of(row) for row in found.rows()}
    assert rows["peak_bytes"] is None


def test_a_sparkline_keeps_to_its_width_and_passes_over_what_is_no_number():
    line = sparkline([float("nan"), *range(100)], 0, 99, 10)
    assert len(line) == 10
    assert line[0] == "▁"
    assert line[-1] == "█"
    assert sparkline([], 0, 1, 10) == ""
