"""The interval between saves is the one that loses the least time, and says so with its numbers."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from embark.store.checkpoint_interval import (
    MAX_EVERY_S,
    MAX_LOST_S,
    MAX_PAUSE_SHARE,
    expected_overhead,
    steps_between_saves,
    young_daly_interval_s,
)

MIN, H, DAY = 60.0, 3600.0, 86400.0
costs = st.floats(0.01, 10_000)
mtbfs = st.floats(10, 100 * DAY)
steps = st.floats(0.001, 30)
graces = st.floats(0, 300)


@pytest.mark.parametrize(("mtbf_s", "published_min"), [(24 * H, "117"), (6 * H, "57"), (15 * MIN, "9.1")])
def test_it_gives_the_values_of_dalys_paper(mtbf_s, published_min):
    """His figures 3, 4 and 5: a save of 5 minutes."""
    num_digits = len(published_min.partition(".")[2])
    assert f"{young_daly_interval_s(5 * MIN, mtbf_s) / MIN:.{num_digits}f}" == published_min


def test_for_cheap_saves_it_is_youngs_square_root():
    assert young_daly_interval_s(1, DAY) == pytest.approx(math.sqrt(2 * DAY), rel=5e-3)


@pytest.mark.parametrize("cost_s", [20.0, 30.0, 1e6])
def test_a_save_that_outlasts_failures_is_made_once_a_failure(cost_s):
    assert young_daly_interval_s(cost_s, 10) == 10


def test_the_ends_of_its_range():
    assert young_daly_interval_s(0, DAY) == 0
    assert young_daly_interval_s(5, math.inf) == math.inf


@given(costs, mtbfs)
def test_no_other_interval_loses_noticeably_less(cost_s, mtbf_s):
    """Also where a save costs more than half the time between failures, where Young's formula is off."""
    assume(cost_s < 2 * mtbf_s)
    chosen_s = young_daly_interval_s(cost_s, mtbf_s)
    lost = expected_overhead(chosen_s, cost_s, mtbf_s)
    others = (chosen_s * 1.1 ** k for k in range(-40, 41))
    assert lost <= min(expected_overhead(other_s, cost_s, mtbf_s) for other_s in others) + 2e-3


@given(costs, mtbfs)
def test_a_clearly_other_interval_loses_more(cost_s, mtbf_s):
    assume(cost_s < mtbf_s / 2)
    chosen_s = young_daly_interval_s(cost_s, mtbf_s)
    lost = expected_overhead(chosen_s, cost_s, mtbf_s)
    assert expected_overhead(chosen_s * 2, cost_s, mtbf_s) > lost
    assert expected_overhead(chosen_s / 2, cost_s, mtbf_s) > lost


@given(costs, mtbfs)
def test_rarer_failures_and_dearer_saves_make_it_longer(cost_s, mtbf_s):
    assume(cost_s < mtbf_s / 2)
    assert young_daly_interval_s(cost_s, 2 * mtbf_s) > young_daly_interval_s(cost_s, mtbf_s)
    assert young_daly_interval_s(cost_s, mtbf_s) > young_daly_interval_s(cost_s / 2, mtbf_s)


@given(st.floats(0.01, 1e6), st.floats(0, 1e6), st.floats(0.01, 1e9))
def test_the_overhead_is_a_share(every_s, cost_s, mtbf_s):
    assert 0 <= expected_overhead(every_s, cost_s, mtbf_s) <= 1
    assert expected_overhead(every_s, cost_s, math.inf) <= expected_overhead(every_s, cost_s, mtbf_s) + 1e-9


@pytest.mark.parametrize(("every_s", "cost_s", "mtbf_s"), [(300, 20, 2000), (100, 100, 500), (2000, 5, 1000)])
def test_the_overhead_is_what_a_simulated_run_loses(every_s, cost_s, mtbf_s):
    generator = random.Random(1)
    num_intervals, spent_s = 20_000, 0.0
    for _ in range(num_intervals):
        while (failure_s := generator.expovariate(1 / mtbf_s)) < every_s + cost_s:
            spent_s += failure_s
        spent_s += every_s + cost_s
    simulated = 1 - num_intervals * every_s / spent_s
    assert expected_overhead(every_s, cost_s, mtbf_s) == pytest.approx(simulated, abs=0.02)


def test_with_time_to_save_after_a_notice_the_cheapest_interval_is_taken():
    choice = steps_between_saves(1, 12, 0.5, DAY, grace_s=120)
    assert choice.every_steps == int(young_daly_interval_s(1, DAY) / 0.5) == 830
    assert choice.why == ("saving every 830 steps (6 min 55 s): a save takes 12.0 s, 1.0 s of it with training paused, "
                          "and a failure is expected every 1 d 00 h, so 0.49% of the time is lost")


def test_without_it_saves_come_sooner_and_the_reason_is_given():
    choice = steps_between_saves(40, 40, 0.2, 4 * H, grace_s=30)
    assert choice.every_steps * 0.2 + 40 <= MAX_LOST_S < young_daly_interval_s(40, 4 * H)
    assert choice.why == ("saving every 2,800 steps (9 min 20 s): a save takes 40.0 s, and a failure is expected every "
                          "4 h 00 min, so 8.60% of the time is lost; 17 min 27 s would cost least; a preemption leaves "
                          "only 30.0 s, too short for a step and a save, and loses at most 10 min 00 s")


def test_the_step_at_hand_counts_against_the_grace():
    assert "preemption" not in steps_between_saves(10, 10, 4.9, DAY, grace_s=15).why
    assert "preemption" in steps_between_saves(10, 10, 5.1, DAY, grace_s=15).why


def test_where_the_cheapest_interval_loses_little_anyway_it_stays():
    choice = steps_between_saves(0.1, 40, 0.2, H, grace_s=30)
    assert choice.every_steps == steps_between_saves(0.1, 40, 0.2, H, grace_s=3000).every_steps
    assert choice.why.endswith("a preemption leaves only 30.0 s, too short for a step and a save, and loses at "
                               "most 1 min 20 s")


def test_where_no_failure_is_expected_it_still_saves():
    choice = steps_between_saves(5, 5, 0.2, math.inf, grace_s=30)
    assert choice.every_steps == MAX_EVERY_S / 0.2
    assert "no failure is expected" in choice.why


def test_one_step_is_the_least():
    choice = steps_between_saves(0, 0, 10, 20, grace_s=30)
    assert choice.every_steps == 1
    assert choice.why.startswith("saving every 1 step (10.0 s)")


@given(costs, st.floats(0, 2000), steps, mtbfs, graces)
def test_the_bounds_hold_between_them(pause_s, background_s, step_s, mtbf_s, grace_s):
    cost_s = pause_s + background_s
    choice = steps_between_saves(pause_s, cost_s, step_s, mtbf_s, grace_s)
    every_s = choice.every_steps * step_s
    cheapest_s = young_daly_interval_s(pause_s, mtbf_s)
    has_time = step_s + cost_s <= grace_s
    slack_s = step_s * 1.001 + 1e-6
    assert choice.every_steps >= 1
    assert every_s >= (cost_s - pause_s) * 0.999, "a save would begin before the last was committed"
    assert every_s <= max(cheapest_s, cost_s - pause_s) + slack_s, "never rarer than what costs least"
    assert every_s <= max(MAX_EVERY_S, cost_s - pause_s) + slack_s
    # Between the bounds there must be room for a whole number of steps.
    if not has_time and max(cost_s - pause_s, pause_s / MAX_PAUSE_SHARE, slack_s) + slack_s < MAX_LOST_S - cost_s:
        assert every_s + cost_s <= MAX_LOST_S * 1.001, "a preemption would lose more than is borne"
    if has_time:
        assert "preemption" not in choice.why


@given(costs, steps, mtbfs)
def test_a_shorter_grace_never_makes_saves_rarer(cost_s, step_s, mtbf_s):
    short = steps_between_saves(cost_s, cost_s, step_s, mtbf_s, grace_s=0)
    long = steps_between_saves(cost_s, cost_s, step_s, mtbf_s, grace_s=1e9)
    assert short.every_steps <= long.every_steps


@given(costs, steps, mtbfs)
def test_keeping_losses_small_does_not_eat_the_run(pause_s, step_s, mtbf_s):
    assume(step_s < pause_s)
    every_s = steps_between_saves(pause_s, pause_s, step_s, mtbf_s, grace_s=0).every_steps * step_s
    if young_daly_interval_s(pause_s, mtbf_s) > 10 * pause_s and 10 * pause_s < MAX_EVERY_S:
        assert pause_s / (pause_s + every_s) <= 1.2 * MAX_PAUSE_SHARE
