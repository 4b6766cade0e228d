"""What a run costs is counted from its events: while machines are held, and no second twice."""

from __future__ import annotations

import time

import pytest

from embark.events.events import Event
from embark.events.spending import spending


def start(time_s: float, first_step: int = 0, **values: object) -> Event:
    return Event("start", {"first_step": first_step, "num_steps": 1000, **values}, time_s)


def steps(begin_s: float, first: int, last: int, every: int = 10, step_s: float = 0.5) -> list[Event]:
    return [Event("step", {"step": step, "step_s": step_s}, begin_s + (step - first) * step_s)
            for step in range(first + every, last + 1, every)]


def end(time_s: float, step: int, outcome: str = "done") -> Event:
    return Event("end", {"step": step, "outcome": outcome}, time_s)


def test_a_run_that_has_not_started_has_no_cost():
    assert spending([]) is None
    assert spending([Event("note", {"text": "x"}, 1.0)]) is None


def test_a_complete_run_is_its_start_and_its_steps():
    spent = spending([start(100, age_s=20.0, usd_per_hour=36.0), *steps(120, 0, 1000), end(630, 1000)])
    assert spent is not None
    assert (spent.waiting_s, spent.useful_s, spent.redone_s) == (40.0, 510.0, 0.0)
    assert spent.usd == pytest.approx(5.5)
    assert spent.left_s == 0.0


def test_the_time_left_includes_saves_and_evaluations():
    # 400 steps of half a second took 250 s: a save of 50 s lies among them.
    spent = spending([start(0, usd_per_hour=3600.0), *steps(0, 0, 200), *steps(150, 200, 400)])
    assert spent is not None
    assert spent.wall_step_s == pytest.approx(250 / 400)
    assert spent.left_s == pytest.approx(600 * 250 / 400)


def killed_and_back(**values: object) -> list[Event]:
    """100 steps from 10 to 60, killed; a process from 140, told at 150, 60 done again from 170 to 200 and on to 270."""
    return [start(10, **values), *steps(10, 0, 100), start(150, 40, age_s=10.0, **values), *steps(170, 40, 240)]


def test_a_run_that_was_killed_is_split_into_useful_redone_and_waiting():
    spent = spending(killed_and_back(usd_per_hour=3600.0))
    assert spent is not None
    assert spent.redone_s == 30.0
    assert spent.useful_s == 50 + 100 - 30
    assert spent.waiting_s == 80 + 30  # the machines are held while the process is away, and while it loads
    assert spent.usd == pytest.approx(spent.held_s) == pytest.approx(260)


def test_spot_machines_are_paid_only_while_they_are_held():
    alone = spending(killed_and_back(usd_per_hour=3600.0, is_spot=True))
    of_four = spending(killed_and_back(usd_per_hour=3600.0, is_spot=True, num_machines=4))
    assert alone is not None
    assert of_four is not None
    assert alone.waiting_s == 30
    assert of_four.waiting_s == 30 + 60
    assert (alone.usd, of_four.usd) == (pytest.approx(180), pytest.approx(240))


def test_time_after_an_end_is_nobodys():
    events = [start(0), *steps(0, 0, 100), end(50, 100, "budget"), start(9000, 100), *steps(9000, 100, 200)]
    spent = spending(events, usd_per_hour=3600.0)
    assert spent is not None
    assert spent.usd == pytest.approx(100)
    assert spent.lost.num == 0


def test_starts_that_came_to_nothing_are_paid_once():
    events = [start(0), *steps(0, 0, 100), start(100, age_s=20.0), Event("error", {}, 110.0), start(200),
              *steps(200, 0, 20)]
    spent = spending(events, usd_per_hour=3600.0)
    assert spent is not None
    assert spent.usd == pytest.approx(210)


def test_each_start_is_paid_at_its_own_price():
    events = [start(0, usd_per_hour=3600.0), *steps(0, 0, 100), end(50, 100, "budget"),
              start(100, 100, usd_per_hour=7200.0), *steps(100, 100, 200)]
    spent = spending(events)
    assert spent is not None
    assert (spent.usd, spent.usd_per_hour) == (pytest.approx(50 + 100), 7200.0)


def test_without_a_price_there_are_hours_and_no_dollars():
    spent = spending(killed_and_back())
    assert spent is not None
    assert spent.held_s == 260
    assert (spent.usd, spent.usd_for(10.0), spent.lost.usd) == (None, None, None)


def test_a_run_under_way_is_counted_to_now_and_one_that_ended_is_not():
    going = [start(0, usd_per_hour=3600.0), *steps(0, 0, 100)]
    assert spending(going, now_s=80.0).usd == pytest.approx(80)
    assert spending(going, now_s=20.0).usd == pytest.approx(50)  # a clock that is behind takes nothing back
    assert spending([*going, end(51, 100, "interrupted")], now_s=80.0).usd == pytest.approx(51)


def test_nothing_is_foretold_before_the_first_step():
    spent = spending([start(0, usd_per_hour=3600.0)], now_s=30.0)
    assert spent is not None
    assert (spent.waiting_s, spent.left_s) == (30.0, None)


DAYS = 2 * 86400.0


def test_a_wall_clock_set_ahead_within_a_run_changes_no_time_of_its_events(monkeypatch):
    before = Event("step")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + DAYS)
    assert 0 <= Event("step").time_s - before.time_s < 3600


def begin(time_s: float, attempt: int, **values: object) -> Event:
    return Event("begin", {"attempt": attempt, "age_s": 2.0, "usd_per_hour": 3600.0, **values}, time_s)


def killed(began_s: float, ended_s: float) -> dict[str, float]:
    """What the next start finds in the lease."""
    return {"previous_began_s": began_s, "previous_ended_s": ended_s}


def test_a_begin_and_its_start_are_one_attempt():
    spent = spending([begin(10, 1), start(30, age_s=22.0, attempt=1), *steps(30, 0, 1000), end(530, 1000)])
    assert spent is not None
    assert (spent.waiting_s, spent.useful_s, spent.num_without_step) == (22.0, 500.0, 0)
    assert spent.usd == pytest.approx(522)


def test_a_start_without_the_number_of_the_begin_before_it_is_another_attempt():
    spent = spending([begin(10, 1), start(100, age_s=20.0, usd_per_hour=3600.0), *steps(100, 0, 10)])
    assert spent is not None
    assert (spent.num_without_step, spent.without_step_s, spent.waiting_s) == (1, 2.0, 22.0)


def test_starts_that_were_killed_while_loading_count_to_their_last_sign_of_life():
    events = [begin(10, 1), begin(100, 2, **killed(9.9, 20)), begin(200, 3, **killed(99.9, 250))]
    spent = spending(events, ended_s=205.0)
    assert spent is not None
    assert (spent.num_without_step, spent.without_step_s) == (3, 12 + 100 + 7)  # none is counted into the next
    assert spent.estimated_s == 10 + 98 + 5
    assert spent.usd == pytest.approx(119)
    assert spent.lost.num == 0
    assert spending(events, now_s=300.0).held_s == 12 + 100 + 102


def test_a_start_that_was_killed_before_its_begin_is_found_in_the_lease():
    spent = spending([begin(10, 1), Event("error", {"text": "no data"}, 12.0), begin(1000, 3, **killed(500.0, 510.0))])
    assert spent is not None
    assert (spent.num_without_step, spent.without_step_s, spent.estimated_s) == (2, 4 + 10, 10.0)
    assert spent.held_s == 4 + 10 + 2


def test_the_tail_of_a_killed_spot_machine_is_counted():
    tail = [start(10, attempt=1, is_spot=True, usd_per_hour=3600.0), *steps(10, 0, 100),
            begin(500, 2, is_spot=True, **killed(9.0, 75.0)), start(510, 40, attempt=2, is_spot=True),
            *steps(510, 40, 60)]
    spent = spending(tail)
    assert spent is not None
    assert spent.estimated_s == 15.0
    assert spent.held_s == 65 + 22
    assert spent.lost.num == 1


def test_a_finished_run_stays_finished_when_a_later_start_is_killed():
    spent = spending([begin(0, 1), start(5, attempt=1), *steps(5, 0, 1000), end(505, 1000), begin(900, 2)])
    assert spent is not None
    assert (spent.outcome, spent.left_s) == ("done", 0.0)


def test_the_budget_that_ended_a_run_is_not_that_of_a_later_begin():
    events = [begin(0, 1, budget_usd=100.0), start(5, attempt=1), *steps(5, 0, 100), end(55, 100, "budget")]
    spent = spending([*events, begin(900, 2, budget_usd=200.0)])
    assert spent is not None
    assert (spent.outcome, spent.budget_usd) == ("budget", 100.0)


@pytest.mark.parametrize("jump_s", [0.0, 3e7, -3e7])
def test_a_clock_that_jumps_between_two_attempts_costs_nothing(jump_s):
    later = 1e9 + 100 + jump_s
    events = [begin(1e9, 1, boot="b", uptime_s=50.0), start(1e9 + 5, attempt=1), *steps(1e9 + 5, 0, 100),
              begin(later, 2, boot="b", uptime_s=150.0), start(later + 5, 40, attempt=2), *steps(later + 5, 40, 60)]
    spent = spending(events)
    assert spent is not None
    assert spent.held_s == pytest.approx(2 + 100 + 15)
    assert spent.lost.down_s == pytest.approx(50.0)
