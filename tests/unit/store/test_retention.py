"""What is kept is what some rule keeps, and always the newest."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embark.store.checkpoint_store import reasons_to_keep

TEN = dict.fromkeys(range(100, 1100, 100))
AUC = dict(zip(range(100, 600, 100), (0.71, 0.79, 0.75, 0.79, 0.70), strict=True))

metrics = st.none() | st.floats(allow_nan=True, allow_infinity=True)
runs = st.dictionaries(st.integers(0, 10_000), metrics, max_size=30)
counts = st.integers(0, 8)
ways = st.sampled_from(["up", "down"])


def to_delete(checkpoints, **rules) -> set[int]:
    return {step for step, reasons in reasons_to_keep(checkpoints, **rules).items() if not reasons}


def test_the_last_ones_stay():
    assert to_delete(TEN, keep_last=3) == {100, 200, 300, 400, 500, 600, 700}


def test_order_does_not_matter():
    assert to_delete(dict(reversed(TEN.items())), keep_last=3) == to_delete(TEN, keep_last=3)


def test_milestones_stay():
    assert to_delete(TEN, keep_last=1, keep_every=300) == {100, 200, 400, 500, 700, 800}


@pytest.mark.parametrize(
    ("better", "num", "deleted"),
    [("up", 1, {100, 200, 300}), ("up", 2, {100, 300}), ("up", 3, {100}), ("down", 1, {100, 200, 300, 400}),
     ("down", 2, {200, 300, 400})],
)
def test_the_best_stay_and_of_equal_ones_the_newer(better: Literal["up", "down"], num: int, deleted: set[int]):
    assert to_delete(AUC, keep_last=1, keep_best=num, better=better) == deleted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("better", ["up", "down"])
def test_what_was_not_measured_is_never_the_best(bad: float | None, better: Literal["up", "down"]):
    run = {1: bad, 2: 0.5, 3: bad, 4: bad}
    assert to_delete(run, keep_last=1, keep_best=1, better=better) == {1, 3}
    assert to_delete(run, keep_last=1, keep_best=4, better=better) == {1, 3}


def test_where_nothing_was_measured_only_the_other_rules_keep():
    assert to_delete({1: math.nan, 2: None, 3: None}, keep_last=1, keep_best=2) == {1, 2}


def test_the_first_step_counts_as_a_milestone():
    assert to_delete(dict.fromkeys((0, 5, 7)), keep_last=1, keep_every=10) == {5}


def test_none_gives_none():
    assert to_delete({}, keep_last=2) == set()


@given(runs, st.integers(-1, 8), counts, counts, ways)
def test_the_newest_is_never_deleted_and_nothing_unknown_is(run, last, every, best, better):
    deleted = to_delete(run, keep_last=last, keep_every=every, keep_best=best, better=better)
    assert deleted <= run.keys()
    assert not run or max(run) not in deleted


@given(runs, counts, counts, counts, ways)
def test_asking_again_after_deleting_deletes_nothing_more(run, last, every, best, better):
    deleted = to_delete(run, keep_last=last, keep_every=every, keep_best=best, better=better)
    left = {step: metric for step, metric in run.items() if step not in deleted}
    assert to_delete(left, keep_last=last, keep_every=every, keep_best=best, better=better) == set()


@given(runs, counts, counts, counts, ways)
def test_another_rule_only_ever_keeps_more(run, last, every, best, better):
    deleted = to_delete(run, keep_last=last, keep_every=every, keep_best=best, better=better)
    assert deleted <= to_delete(run, keep_last=last)
    assert deleted <= to_delete(run, keep_last=last, keep_every=every)
    assert deleted <= to_delete(run, keep_last=last, keep_best=best, better=better)
