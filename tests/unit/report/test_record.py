"""What events say is gathered in one pass, whatever shape they are in, and as they come."""

from __future__ import annotations

import json
import math

import pytest

from embark.events.events import Event
from embark.events.interruptions import interruptions
from embark.events.spending import spending
from embark.report.locations import EVENTS, FolderPlace
from embark.report.record import Record, read_record, record_of, take_new
from embark.report.tail import Tail


def test_steps_that_were_redone_are_set_apart_and_count_once(make_run):
    loss = record_of(make_run()).train["loss"]
    assert list(loss.kept.steps) == list(range(20, 1001, 20))
    assert [list(piece.steps) for piece in loss.lost] == [[300, 320, 340]]  # joined to where it went on from
    assert record_of(make_run()).num_samples == 1000 * 4096


@pytest.mark.parametrize("num_stops", [0, 1, 2])
@pytest.mark.parametrize("outcome", ["done", "interrupted", ""])
def test_stops_and_spending_are_those_of_all_events_though_few_are_kept(make_run, num_stops, outcome):
    events = make_run(num_steps=5000, outcome=outcome, num_stops=num_stops)
    record = record_of(events)
    assert record.interruptions() == interruptions(events)
    assert record.spending(36.0) == spending(events, usd_per_hour=36.0)
    assert len(record._told()) < len(events) / 4


def test_each_attempt_has_its_own_time(make_run):
    record = record_of(make_run())
    assert [(a.first_step, a.last_step, a.outcome) for a in record.attempts] == [
        (0, 340, ""), (300, 600, "interrupted"), (600, 1000, "done")]
    assert record.held_s == pytest.approx(17 + 15 + 20)


def test_what_is_no_event_is_passed_over(tmp_path, make_run):
    whole = [event.to_json() for event in make_run()]
    bad = ["", "{", "[1, 2]", "null", '"event"', '{"event": 3, "time_s": 1, "rank": 0}', '{"event": "step"}',
           '{"event": "step", "time_s": "soon", "rank": 0, "step": 3}', '{"event": "step", "time_s": NaN, "step": 3}',
           '{"event": "unheard-of", "time_s": 1700000000.0, "rank": 0, "x": [1]}',
           '{"event": "ranks", "time_s": 1700000000.0, "rank": 0, "step_s": "x", "systems": [3, {"gpus": 4}]}',
           '{"event": "phases", "time_s": 1700000000.0, "rank": 0, "seconds": 3}',
           '{"event": "step", "time_s": 1700000000.0, "rank": 0, "step": "x", "loss": {}}',
           '{"event": "plan", "time_s": 1700000000.0, "rank": 0, "tables": 7}', "\x00\xff"]  # fmt: skip
    mixed = [line for pair in zip(whole, bad * len(whole), strict=False) for line in pair]
    (tmp_path / EVENTS).write_text("\n".join(mixed))
    record = read_record(tmp_path)
    assert list(record.train["loss"].kept.steps) == list(range(20, 1001, 20))
    assert record.steps_done == 1000


def test_a_loss_that_is_no_number_is_a_gap_and_not_a_zero(make_run):
    events = [Event("start", {"num_steps": 3}, 1.0), Event("step", {"step": 1, "loss": 0.5}, 2.0),
              Event("step", {"step": 2, "loss": None}, 3.0), Event("step", {"step": 3, "loss": "no"}, 4.0)]
    values = list(record_of(events).train["loss"].kept.values)
    assert values[0] == 0.5
    assert math.isnan(values[1])
    assert len(values) == 2


def test_a_directory_without_events_is_an_empty_record(tmp_path):
    record = read_record(tmp_path)
    assert not record.has_begun
    assert record.interruptions() == ()
    assert record.spending(1.0) is None


def test_new_events_are_read_as_they_come_and_a_cut_line_waits_for_its_end(tmp_path):
    path, tail, record = tmp_path / EVENTS, Tail(FolderPlace(tmp_path), EVENTS), Record()
    lines = [json.dumps({"event": "step", "time_s": float(n), "rank": 0, "step": n, "loss": 1.0}) for n in (1, 2, 3)]
    path.write_text(lines[0] + "\n" + lines[1][:20])
    record = take_new(record, tail)
    assert list(record.train["loss"].kept.steps) == [1]
    with path.open("a") as file:
        file.write(lines[1][20:] + "\n" + lines[2] + "\n")
    record = take_new(record, tail)
    assert list(record.train["loss"].kept.steps) == [1, 2, 3]
    path.write_text(lines[2] + "\n")
    assert list(take_new(record, tail).train["loss"].kept.steps) == [3]


def test_ranks_and_machines_are_summed_up(make_run):
    machine = record_of(make_run(num_stops=0)).machine
    assert machine.slow_ranks() == [2]
    assert machine.ranks[2].mean_s == pytest.approx(0.09)
    assert machine.mean_phases() == pytest.approx({"input": 0.01, "lookup": 0.03, "dense": 0.01})
    assert list(machine.mean_phases()) == ["input", "lookup", "dense"]
    assert machine.lines["gpu_memory_share"].last == pytest.approx(60 / 140)
    assert machine.lines["power_w"].last == 600.0
