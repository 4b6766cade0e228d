"""A run is finished, running, stopped, failed or killed, and says so."""

from __future__ import annotations

import pytest

from embark.events.events import Event
from embark.report.context import status_of
from embark.report.record import Record

BEGAN_S = 1_700_000_000.0


def events(*more: Event) -> list[Event]:
    steps = [Event("step", {"step": n, "loss": 0.5}, BEGAN_S + n) for n in range(1, 11)]
    return [Event("start", {"num_steps": 100}, BEGAN_S), *steps,
            Event("save", {"step": 10, "path": "x", "bytes": 1}, BEGAN_S + 10), *more]


@pytest.mark.parametrize(
    ("more", "silent_s", "state", "result"),
    [
        ([], 1, "running", "Running: step 10 of 100"),
        ([], 3600, "killed", "No sign of life for 1 h 00 min (usually an event every 1.0 s), at step 10 of 100."),
        ([Event("end", {"outcome": "done", "step": 100}, BEGAN_S + 10)], 9e9, "finished", "Trained to step 100"),
        ([Event("interrupt", {"step": 10, "signal": "SIGTERM"}, BEGAN_S + 10),
          Event("end", {"outcome": "interrupted", "step": 10}, BEGAN_S + 10)], 1, "stopped",
         "Interrupted by SIGTERM at step 10"),
        ([Event("error", {"text": "out of memory\n  fix: a smaller batch"}, BEGAN_S + 10)], 1, "failed",
         "Failed at step 10 of 100: out of memory. Run the same command to resume from step 10"),
    ],
)  # fmt: skip
def test_the_state_and_its_sentence(more, silent_s, state, result):
    record = Record(events(*more))
    status = status_of(record, BEGAN_S + 10 + silent_s)
    assert status.state == state
    assert status.sentence.startswith(result)


def test_a_run_that_continued_after_a_stop_is_running_again():
    record = Record(events(Event("end", {"outcome": "interrupted", "step": 10}, BEGAN_S + 10),
                              Event("start", {"num_steps": 100, "first_step": 10}, BEGAN_S + 50)))
    assert status_of(record, BEGAN_S + 51).state == "running"
    assert record.end == {}


def test_a_run_that_loads_and_compiles_is_given_time():
    record = Record([Event("start", {"num_steps": 100}, BEGAN_S)])
    assert status_of(record, BEGAN_S + 300).state == "running"
    assert status_of(record, BEGAN_S + 3000).state == "killed"


def test_silence_is_measured_by_what_was_usual():
    steps = [Event("step", {"step": n}, BEGAN_S + 600 * n) for n in (1, 2, 3)]
    slow = [Event("start", {"num_steps": 9}, BEGAN_S), *steps]
    assert status_of(Record(slow), BEGAN_S + 2400).state == "running"
    assert status_of(Record(slow), BEGAN_S + 20_000).state == "killed"


def test_of_a_run_far_away_little_is_heard():
    record = Record(events())
    assert status_of(record, BEGAN_S + 600, is_remote=True).state == "running"
    assert status_of(record, BEGAN_S + 600).state == "killed"


def test_a_run_without_events_is_waiting():
    status = status_of(Record(), BEGAN_S)
    assert status.label == "not started"
    assert "No events yet" in status.sentence
