"""What a run lost is told from its events, whatever stopped it."""

from __future__ import annotations

import pytest

from embark.events.events import Event, read_events
from embark.events.spending import Interruption, attempts, interruptions, losses, losses_sentence


def found_in(events):
    return interruptions(attempts(events))


def start(time_s: float, first_step: int = 0) -> list[Event]:
    found = [Event("start", {"first_step": first_step, "num_steps": 1000}, time_s)]
    return found + ([Event("resume", {"step": first_step}, time_s)] if first_step else [])


def steps(begin_s: float, first: int, last: int, every: int = 10, step_s: float = 0.5) -> list[Event]:
    """Steps after `first` up to `last`, each so long."""
    return [Event("step", {"step": step, "step_s": step_s}, begin_s + (step - first) * step_s)
            for step in range(first + every, last + 1, every)]


def save(time_s: float, step: int) -> Event:
    return Event("save", {"step": step}, time_s)


def stop(time_s: float, step: int, signal: str = "SIGTERM") -> list[Event]:
    return [save(time_s, step), Event("interrupt", {"step": step, "signal": signal}, time_s),
            Event("end", {"step": step, "outcome": "interrupted"}, time_s)]


def done(time_s: float, step: int = 1000) -> Event:
    return Event("end", {"step": step, "outcome": "done"}, time_s)


def test_a_run_that_was_never_stopped_lost_nothing():
    events = [*start(0), *steps(10, 0, 100), done(70, 100)]
    assert found_in(events) == ()
    assert losses_sentence(losses(found_in(events), 100.0)) == ""


def test_a_killed_run_redoes_what_came_after_its_checkpoint():
    # Steps 1 to 100 take from 10 to 60; the checkpoint is of step 60; it dies, and is back at 150.
    events = [*start(0), *steps(10, 0, 100), save(40.5, 60), *start(150, 60), *steps(170, 60, 1000), done(700)]
    assert found_in(events) == (
        Interruption(stopped_s=60.0, resumed_s=170.0, reason="died", stopped_step=100, resumed_step=60, lost_steps=40,
                     redone_s=20.0, down_s=110.0, restarted_s=150.0),
    )


@pytest.mark.parametrize(("signal", "reason"), [
    ("SIGTERM", "preempted"), ("SIGUSR1", "preempted"), ("notice", "preempted"), ("SIGINT", "interrupted"),
])
def test_a_run_that_was_asked_to_stop_loses_no_step(signal: str, reason: str):
    events = [*start(0), *steps(10, 0, 50), *stop(36, 53, signal), *start(100, 53), *steps(110, 53, 103)]
    (found,) = found_in(events)
    assert (found.reason, found.lost_steps, found.redone_s, found.stopped_step) == (reason, 0, 0.0, 53)
    assert (found.down_s, found.away_s) == (74.0, 64.0)


def test_an_error_that_was_reported_is_named():
    events = [*start(0), *steps(10, 0, 50), Event("error", {"text": "a rank was lost"}, 36.0), *start(60),
              *steps(70, 0, 10)]
    (found,) = found_in(events)
    assert (found.reason, found.stopped_s, found.lost_steps, found.resumed_step) == ("error", 36.0, 50, 0)


def test_two_starts_in_a_row_are_one_stop():
    events = [*start(0), *steps(10, 0, 50), *start(100), *start(200), *start(300), *steps(310, 0, 10)]
    (found,) = found_in(events)
    assert (found.stopped_s, found.resumed_s, found.restarted_s) == (35.0, 310.0, 300.0)


def test_a_start_without_a_step_adds_no_second_interruption():
    events = [*start(0), *steps(10, 0, 50), *start(100), *stop(105, 0), *start(200), *steps(210, 0, 10)]
    (found,) = found_in(events)
    assert (found.reason, found.down_s) == ("died", 175.0)


def test_a_stopped_run_would_repeat_what_it_has_not_saved():
    events = [*start(0), *steps(10, 0, 50), save(31, 40), Event("error", {"text": "lost"}, 36.0)]
    (found,) = found_in(events)
    assert (found.resumed_s, found.resumed_step, found.lost_steps, found.redone_s) == (None, None, 10, 5.0)
    assert found.down_s == 0.0


def test_a_run_that_is_back_and_still_loads_waits_until_now():
    events = [*start(0), *steps(10, 0, 50), save(31, 40), *start(100, 40), Event("plan", {}, 104.0)]
    (found,) = found_in(events)
    assert (found.resumed_s, found.lost_steps, found.down_s, found.away_s) == (None, 10, 69.0, 65.0)


def test_a_run_under_way_is_not_taken_for_dead():
    assert found_in([*start(0), *steps(10, 0, 50)]) == ()


@pytest.mark.parametrize("outcome", ["done", "budget"])
def test_going_on_with_a_run_that_had_ended_is_no_interruption(outcome: str):
    ended = Event("end", {"step": 50, "outcome": outcome}, 36.0)
    assert found_in([*start(0), *steps(10, 0, 50), ended, *start(1000, 50), *steps(1010, 50, 100)]) == ()


def test_a_death_after_the_last_step_is_an_interruption():
    events = [*start(0), *steps(10, 0, 50), save(36, 50), *start(100, 50), done(105, 50)]
    (found,) = found_in(events)
    assert (found.lost_steps, found.resumed_s) == (0, 105.0)


def test_clocks_that_disagree_never_give_negative_seconds():
    events = [*start(1000), *steps(1010, 0, 50), *start(500), *steps(510, 0, 50), done(600, 50)]
    (found,) = found_in(events)
    assert found.down_s == 0.0
    assert found.away_s == 0.0


def test_events_that_make_no_sense_are_passed_over():
    broken = [Event("step", {"step": "x"}, 5.0), Event("save", {}, 6.0), Event("resume", {"step": None}, 7.0),
              Event("unheard", {"step": 4}, 7.0)]
    events = [*broken, *start(0), *broken, *steps(10, 0, 50), *start(100), *steps(110, 0, 10)]
    (found,) = found_in(events)
    assert found.lost_steps == 50


def test_the_file_of_a_killed_run_with_a_cut_line_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    complete = [event.to_json() for event in [*start(0), *steps(10, 0, 100)]]
    again = [event.to_json() for event in [*start(150), *steps(170, 0, 20)]]
    path.write_text("\n".join([*complete[:-1], complete[-1][:30], *again]) + "\n")
    (found,) = found_in(read_events(path))
    assert (found.stopped_step, found.lost_steps) == (90, 90)


def test_the_first_window_of_a_start_is_not_the_pace():
    slow = Event("step", {"step": 10, "step_s": 5.0}, 60.0)
    events = [*start(0), slow, *steps(60, 10, 50), *start(150), *steps(170, 0, 10)]
    (found,) = found_in(events)
    assert found.redone_s == 25.0


TWICE = (
    Interruption(60.0, 100.0, "preempted", 100, 80, 20, 6.0, 40.0, 90.0),
    Interruption(200.0, 255.0, "preempted", 150, 129, 21, 6.0, 55.0, 240.0),
)


def test_what_was_lost_in_one_sentence():
    lost = losses(TWICE, 30.0)
    assert losses_sentence(lost) == "preempted twice; 41 steps (12.0 s) repeated, 1 min 35 s down: $0.89"
    assert losses_sentence(losses(TWICE)) == "preempted twice; 41 steps (12.0 s) repeated, 1 min 35 s down"
    died = Interruption(60.0, 100.0, "died", 100, 99, 1, 0.3, 40.0, 90.0)
    assert losses_sentence(losses([died])) == "interrupted once; 1 step (0.30 s) repeated, 40.0 s down"
    assert losses_sentence(losses([*TWICE, died])).startswith("interrupted 3 times; 42 steps")
    requests = Interruption(60.0, 100.0, "preempted", 100, 100, 0, 0.0, 40.0, 90.0)
    assert losses_sentence(losses([requests])) == "preempted once; no steps repeated, 40.0 s down"


def test_a_spot_machine_that_is_gone_is_not_paid_while_it_is_waited_for():
    full = losses(TWICE, 3600.0).usd
    alone = losses(TWICE, 3600.0, is_spot=True).usd
    of_four = losses(TWICE, 3600.0, num_machines=4, is_spot=True).usd
    assert full == pytest.approx(12 + 95)
    assert alone == pytest.approx(12 + 95 - 70)
    assert of_four == pytest.approx(12 + 95 - 70 / 4)


def test_nobody_waited_for_a_run_that_was_stopped_by_hand():
    by_hand = Interruption(0.0, 90_000.0, "interrupted", 100, 100, 0, 0.0, 90_000.0, 89_990.0)
    lost = losses([by_hand], 3600.0)
    assert lost.down_s == 10.0
    assert lost.usd == pytest.approx(10.0)


def test_steps_that_nobody_has_redone_yet_are_not_reported_to_be():
    once = [*start(0), *steps(10, 0, 100), save(40.5, 60), Event("error", {"text": "no space left", "step": 100}, 61.0)]
    assert losses_sentence(losses(found_in(once))) == "interrupted once; 40 steps (20.0 s) to repeat, 0.00 s down"
    back = [*once, *start(150, 60), *steps(170, 60, 100)]
    assert "40 steps (20.0 s) repeated" in losses_sentence(losses(found_in(back)))
    again = [*back, Event("error", {"text": "no space left", "step": 100}, 200.0)]
    assert "80 steps (40.0 s) repeated or to repeat" in losses_sentence(losses(found_in(again)))
