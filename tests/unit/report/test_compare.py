"""Runs side by side: which was better, by what, and what differs in their specs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from embark.catalog.pricing import RunPrice
from embark.events.events import Event, to_jsonable
from embark.report.compare import SpecDifference, compare_document, compare_runs
from embark.report.context import RunContext
from embark.report.document import html_page
from embark.report.record import Record


@pytest.fixture
def side(make_run, make_context):
    def make(name: str, auc: float | None = 0.75, price: float | None = None, batch_size: int = 64, **ends):
        events = [event for event in make_run(num_stops=0) if event.kind != "eval"]
        rows = [Event("eval", {"step": 1000, "num_samples": 9, "auc": auc, "log_loss": 0.5}, events[-1].time_s)]
        end = Event("end", {**events[-1].values, **ends}, events[-1].time_s)
        spec = {"name": name, "train": {"batch_size": batch_size}}
        return make_context([*events[:-1], *(rows if auc is not None else []), end], name=name,
            uri=f"runs/{name}", spec=spec, price=RunPrice(price))

    return make


def test_the_better_one_is_named_with_what_it_was_better_by(side):
    found = compare_runs([side("a", 0.76), side("b", 0.79, batch_size=128)])
    assert found.best == "b"
    assert found.sentence == "b was better: held-out AUC 0.7900 against 0.7600 of a (+0.0300)."
    assert found.spec == (SpecDifference("train.batch_size", ("64", "128")),)


def test_the_best_checkpoint_counts_where_early_stopping_kept_it(side):
    stopped, other = side("stopped", 0.76), side("other", 0.77)
    best = Event("eval", {"step": 600, "num_samples": 9, "auc": 0.79, "log_loss": 0.4}, stopped.record.last_s)
    stopped.record.add(best)
    stopped.record.add(Event("eval", {**best.values, "step": 1000, "auc": 0.76, "log_loss": 0.5}, best.time_s))
    early = {"metric": "auc", "best": 0.79, "best_step": 600, "path": "runs/stopped/checkpoints/step-000000600"}
    for path, value in (("", 0.76), (early["path"], 0.79)):
        stopped.record.add(Event("end", {**stopped.record.end, "early_stopping": {**early, "path": path}}, best.time_s))
        found = compare_runs([stopped, other])
        assert found.runs[0].values["eval_auc"] == value
        assert found.best == ("stopped" if path else "other")
    assert found.runs[0].values["eval_log_loss"] == 0.4


def test_of_two_that_learnt_equally_well_the_cheaper_one_is_better(side):
    found = compare_runs([side("a", 0.7600, price=10.0), side("b", 0.7602, price=30.0)])
    assert found.best == "a"
    assert "learned equally well" in found.sentence
    assert "a was cheaper: $0.14 against $0.42" in found.sentence


@pytest.mark.parametrize(("model", "is_other"), [
    ({"num_tables": 3}, True), ({"num_dense": 1}, True), ({"embedding_dim": 8}, False),
    ({"tables": [{"name": "user", "rows": 9}]}, True),
])
def test_synthetic_samples_are_drawn_by_the_model_too(side, model, is_other):
    first = side("a", 0.76)
    other = replace(first, name="b", spec={**first.spec, "model": model})
    assert ("not trained on the same samples (model." in compare_runs([first, other]).sentence) is is_other
    data = {"kind": "prepared", "path": "out"}
    prepared = [replace(one, spec={**one.spec, "data": data}) for one in (first, other)]
    assert "same samples" not in compare_runs(prepared).sentence


@pytest.mark.parametrize(("name", "how"), [
    ("num_train_samples", "trained on the same samples (number of training samples)"),
    ("num_eval_samples", "evaluated on the same held-out samples (number of held-out samples)")])
def test_data_prepared_anew_in_the_same_place_is_a_reason_for_care(side, name, how):
    first, other = (replace(side(run, 0.76), spec={"data": {"kind": "prepared", "path": "out"}}) for run in "ab")
    other.record.start = {**other.record.start, name: 7}
    assert compare_runs([first, other]).sentence.endswith(f"They were not {how}: compare with care.")


@pytest.mark.parametrize(("data", "how"), [
    ({"seed": 7}, "trained on the same samples (data.seed)"),
    ({"num_eval_samples": 7}, "evaluated on the same held-out samples (data.num_eval_samples)"),
    ({"num_eval_samples": 7, "seed": 7}, "trained on the same samples (data.num_eval_samples, data.seed)"),
])
def test_other_samples_are_a_reason_for_care(side, data, how):
    first = side("a", 0.76)
    other = replace(first, name="b", spec={**first.spec, "data": data})
    assert compare_runs([first, other]).sentence.endswith(f"They were not {how}: compare with care.")


def test_none_is_better_where_nothing_differs(side):
    found = compare_runs([side("a"), side("b")])
    assert found.best == ""
    assert found.spec == ()
    assert "neither was faster" in found.sentence


def test_without_evaluations_the_training_loss_decides(side):
    found = compare_runs([side("a", None), side("b", None)])
    assert "training loss" in found.sentence


def test_runs_that_reported_nothing_are_compared_by_nothing(make_context):
    found = compare_runs([make_context([]), make_context([])])
    assert found.sentence.startswith("Nothing to compare")
    assert [run.name for run in found.runs] == ["runs/demo", "runs/demo (2)"]
    assert "Nothing to compare" in html_page(compare_document(found))


def test_three_runs_and_their_curves_lie_over_each_other(side):
    found = compare_runs([side("a", 0.76), side("b", 0.79), side("<b>c</b>", 0.78)])
    assert found.sentence == "b was better: held-out AUC 0.7900 against 0.7800 of <b>c</b> (+0.0100)."
    html = html_page(compare_document(found))
    first = re.search(r'<svg [^>]*class="chart">.*?</svg></svg>', html)
    assert first is not None
    assert all(f'class="stroke k{n}"' in first.group() for n in range(3))
    assert "<b>" not in html
    assert "&lt;b&gt;c&lt;/b&gt;" in html


def test_json_holds_the_same(side):
    data = to_jsonable(compare_runs([side("a", 0.76), side("b", 0.79, batch_size=128)]))
    assert data["best"] == "b"
    assert data["runs"][1]["values"]["eval_auc"] == 0.79
    assert data["runs"][0]["state"] == "finished"
    assert "context" not in data["runs"][0]
    assert data["spec"] == [{"field": "train.batch_size", "values": ["64", "128"]}]


def test_a_small_difference_in_what_it_took_is_none(side):
    found = compare_runs([side("a", peak_bytes=100.0), side("b", peak_bytes=101.0), side("c", peak_bytes=100.0)])
    rows = {row.name: found.best_of(row) for row in found.rows()}
    assert rows["peak_bytes"] is None


def test_a_low_training_loss_is_no_merit_where_held_out_figures_exist():
    def context(name: str, train_loss: float, held_out: dict[str, float]) -> RunContext:
        events = [Event("start", {"num_steps": 10}, 0.0), Event("step", {"step": 10, "loss": train_loss}, 1.0)]
        events += [Event("eval", {"step": 10, **held_out}, 2.0)] if held_out else []
        return RunContext(name, f"runs/{name}", Record(events), 3.0)

    overfitted = context("overfitted", 0.08, {"auc": 0.66, "log_loss": 0.9})
    sound = context("sound", 0.45, {"auc": 0.74, "log_loss": 0.53})
    found = compare_runs([overfitted, sound])
    assert found.best == "sound"
    assert [row.label for row in found.rows() if found.best_of(row) == 0] == []
    assert compare_runs([context("lucky", 0.01, {}), sound]).best == ""
