"""What events have told, and whether the run lives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from watched_runs import event_lines, line, ranks_line, step_line

from embark.report.context import Liveness, status_of
from embark.report.record import Record

NOW = 1_800_000_000.0


def record_of(lines: list[str], now_s: float = NOW) -> Record:
    record = Record()
    for text in lines:
        record.add_line(text.encode(), now_s)
    return record


def status(lines: list[str], *, now_s: float = NOW, **options: Any) -> Liveness:
    return status_of(record_of(lines, now_s), now_s, **options)


def begun(**result: Any) -> list[str]:
    return list(event_lines(first_s=NOW - 20, ends=False, **result))


def test_a_run_that_spoke_just_now_is_running_and_says_what_is_left():
    record = record_of(begun(num_steps=1000, until_step=200))
    assert status_of(record, NOW).state == "running"
    assert (record.steps_done, record.num_steps) == (200, 1000)
    assert record.seconds_left == pytest.approx(80.0)


def test_a_run_that_reported_it_is_done_is_finished():
    assert status(list(event_lines(first_s=NOW - 9000))).state == "finished"


def test_a_run_that_is_silent_for_long_counts_as_killed():
    found = status(begun(), now_s=NOW + 3600)
    assert found.state == "killed"
    assert found.last_s == pytest.approx(NOW)
    assert "1 h 00 min" in found.sentence
    assert "every 1.0 s" in found.sentence


def test_a_run_that_is_as_silent_as_it_was_before_is_not_killed():
    lines = [*begun(), step_line(210, NOW + 300), step_line(220, NOW + 301)]
    assert status(lines, now_s=NOW + 301 + 400).state == "running"
    assert status(lines, now_s=NOW + 301 + 500).state == "killed"


def test_a_run_far_away_is_heard_of_when_it_saves():
    assert status(begun(), now_s=NOW + 900, is_remote=True).state == "running"
    assert status(begun(), now_s=NOW + 4000, is_remote=True).state == "killed"


def test_a_preempted_run_is_stopped_and_says_where_it_continues():
    lines = [*begun(), line("save", NOW, step=200), line("interrupt", NOW, step=200, signal="SIGTERM"),
             line("end", NOW, outcome="interrupted", step=200)]
    found = status(lines)
    assert found.state == "stopped"
    assert "SIGTERM" in found.sentence
    assert "to resume from step 200" in found.sentence


def test_a_run_that_reported_an_error_has_failed():
    found = status([*begun(), line("error", NOW, text="out of memory\n  fix: smaller batches")])
    assert found.state == "failed"
    assert "at step 200 of 200: out of memory. No checkpoint yet" in found.sentence


def test_a_run_without_files_is_deleted_and_without_events_waits():
    assert status(begun(), is_deleted=True).state == "deleted"
    assert status([]).state == "waiting"


def test_a_run_that_continued_is_running_again_from_its_checkpoint():
    lines = [*begun(), line("end", NOW, outcome="interrupted", step=200),
             line("start", NOW + 5, num_steps=1000, first_step=150), line("resume", NOW + 5, step=150),
             step_line(160, NOW + 6)]
    record = record_of(lines, NOW + 6)
    assert status_of(record, NOW + 6).state == "running"
    assert record.steps_done == 160
    assert record.steps.column("loss")[0].max() == 160


def test_a_time_from_the_future_is_no_sign_of_status():
    lines = [*begun(), step_line(210, NOW + 10**7)]
    found = status(lines, now_s=NOW + 3600)
    assert found.state == "killed"
    assert found.last_s == pytest.approx(NOW)


def test_a_run_whose_clock_is_far_ahead_is_shown_all_the_same():
    lines = list(event_lines(first_s=NOW + 10**6, ends=False))
    assert status(lines).state == "running"


def test_the_file_seen_to_grow_is_a_sign_of_life_whatever_the_clocks_say():
    assert status(begun(), now_s=NOW + 3600, heard_s=NOW + 3595).state == "running"


def test_a_rank_that_is_slow_and_a_gpu_are_stored_by_name():
    record = record_of([*begun(), ranks_line(200, NOW, slow=2)])
    assert record.ranks.column("step_s.2")[1].tolist() == pytest.approx([0.15])
    assert record.machines.column("0.gpu.3.used_bytes")[1].tolist() == [33e9]


@pytest.mark.parametrize("odd", [
    line("ranks", NOW, step=1, step_s="slow", systems="none"),
    line("ranks", NOW, step=1, step_s=[None, "x", {}], systems=[None, {"gpus": 3}, {"gpus": [None, {"index": "<b>"}]}]),
    line("ranks", NOW, step=1, systems=[{"gpus": [{"index": 10**400}, {"index": -1}]}]),
    line("phases", NOW, step=None, seconds=[1, 2]), line("phases", NOW, seconds={"input": "long"}),
    line("plan", NOW, tables={"a": 1}, per_rank=7), line("start", NOW, num_steps="many", first_step=[]),
    line("eval", NOW, step={}, auc="good"), line("save", NOW), line("end", NOW), line("predict", NOW, step_s="fast"),
    line("note", NOW, text=7, level=None), line("unheard-of", NOW, x=1), line("resume", NOW, step=math.nan),
])
def test_an_event_with_odd_values_spoils_nothing(odd: str):
    record = record_of([*begun(), odd, step_line(210, NOW)])
    assert record.steps.column("loss")[0].max() == 210


def test_rare_events_are_stored_in_a_bounded_room():
    record = record_of([*begun(), *(line("note", NOW, text=str(i)) for i in range(9000))])
    assert len(record.milestones) <= 4001
