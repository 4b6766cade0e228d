"""What events say is gathered in one pass, whatever shape they are in, and as they come."""

from __future__ import annotations

import numpy as np
import pytest

from embark.events.events import Event
from embark.events.spending import attempts, interruptions, spending
from embark.report.record import Record, read_record, slow_ranks
from embark.report.run_files import RunFiles
from embark.store.run_dir import EVENTS


def test_steps_that_were_redone_count_once(make_run):
    record = Record(make_run())
    assert record.steps.column("loss")[0].tolist() == list(range(20, 1001, 20))
    assert record.num_samples == 1000 * 4096


@pytest.mark.parametrize("num_stops", [0, 1, 2])
@pytest.mark.parametrize("outcome", ["done", "interrupted", ""])
def test_stops_and_spending_are_those_of_all_events_though_few_are_stored(make_run, num_stops, outcome):
    events = make_run(num_steps=5000, outcome=outcome, num_stops=num_stops)
    record = Record(events)
    assert record.interruptions() == interruptions(attempts(events))
    assert record.spending(36.0) == spending(events, usd_per_hour=36.0)
    assert len(record.milestones) < len(events) / 4


def test_each_attempt_has_its_own_time(make_run):
    record = Record(make_run())
    assert [(a.first_step, a.last_step, a.outcome) for a in record.attempts()] == [
        (0, 340, ""), (300, 600, "interrupted"), (600, 1000, "done")]
    assert record.held_s == pytest.approx(17 + 15 + 20 + 2 * 30)  # machines are held while they wait for each other


def test_what_is_no_event_is_passed_over(tmp_path, make_run):
    complete = [event.to_json() for event in make_run()]
    bad = ["", "{", "[1, 2]", "null", '"event"', '{"event": 3, "time_s": 1, "rank": 0}', '{"event": "step"}',
           '{"event": "step", "time_s": "soon", "rank": 0, "step": 3}', '{"event": "step", "time_s": NaN, "step": 3}',
           '{"event": "unheard-of", "time_s": 1700000000.0, "rank": 0, "x": [1]}',
           '{"event": "ranks", "time_s": 1700000000.0, "rank": 0, "step_s": "x", "systems": [3, {"gpus": 4}]}',
           '{"event": "phases", "time_s": 1700000000.0, "rank": 0, "seconds": 3}',
           '{"event": "step", "time_s": 1700000000.0, "rank": 0, "step": "x", "loss": {}}',
           '{"event": "plan", "time_s": 1700000000.0, "rank": 0, "tables": 7}', "\x00\xff"]  # fmt: skip
    mixed = [line for pair in zip(complete, bad * len(complete), strict=False) for line in pair]
    (tmp_path / EVENTS).write_text("\n".join(mixed))
    record = read_record(RunFiles(tmp_path))
    assert record.steps.values("loss").size == 50
    assert record.steps_done == 1000


def test_a_loss_that_is_no_number_is_a_gap_and_not_a_zero(make_run):
    events = [Event("start", {"num_steps": 3}, 1.0), Event("step", {"step": 1, "loss": 0.5}, 2.0),
              Event("step", {"step": 2, "loss": None}, 3.0), Event("step", {"step": 3, "loss": "no"}, 4.0)]
    values = Record(events).steps.column("loss")[1]
    assert values[0] == 0.5
    assert np.isnan(values[1:]).all()


def test_a_directory_without_events_is_an_empty_record(tmp_path):
    record = read_record(RunFiles(tmp_path))
    assert not record.start
    assert record.interruptions() == ()
    assert record.spending(1.0) is None


def test_slow_ranks_are_found_whether_few_or_many(make_run):
    record = Record(make_run(num_stops=0))
    assert slow_ranks(dict(enumerate(record.rank_times_s))) == {2: 0.05}
    assert slow_ranks({0: 0.1, 1: 0.2}) == {1: 0.1}
    assert slow_ranks({0: 0.1}) == {}
    assert record.phases.values("lookup").mean() == pytest.approx(0.03)
