"""How far a run is, read from its events while they are written."""

from __future__ import annotations

import json

from embark.rehearse.controller import EventReader, Resume


def write(path, *events) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"event": kind, "time_s": 1.0, **values}) + "\n" for kind, values in events)


def test_it_follows_a_run_through_a_loss(tmp_path):
    events = tmp_path / "events.jsonl"
    reader = EventReader(tmp_path)
    assert reader.read().phase == "waiting for the ranks to meet"
    write(events, ("start", {"world_size": 4, "num_steps": 10, "first_step": 0}), ("step", {"step": 1, "loss": 0.7}),
          ("step", {"step": 2, "loss": 0.6}), ("save", {"step": 2}), ("step", {"step": 3, "loss": 0.5}))
    assert reader.read().phase == "4 ranks have met; step 3 of 10, saved step 2"
    write(events, ("start", {"world_size": 4, "num_steps": 10, "first_step": 2}), ("resume", {"step": 2}),
          ("step", {"step": 3, "loss": 0.5}), ("step", {"step": 10, "loss": 0.25}), ("save", {"step": 10}),
          ("eval", {"step": 10, "auc": 0.7, "log_loss": 0.3}), ("end", {"outcome": "done", "step": 10}))
    progress = reader.read()
    assert progress.resumes == [Resume(2, 1)]
    assert (progress.is_done, progress.final_loss, progress.world_sizes) == (True, 0.25, [4, 4])


def test_a_run_that_begins_all_over_lost_every_step(tmp_path):
    write(tmp_path / "events.jsonl", ("start", {"world_size": 2, "num_steps": 9, "first_step": 0}),
          ("step", {"step": 4, "loss": 1.0}), ("start", {"world_size": 2, "num_steps": 9, "first_step": 0}))
    assert EventReader(tmp_path).read().resumes == [Resume(0, 4)]


def test_a_line_that_is_not_complete_yet_is_read_later(tmp_path):
    events = tmp_path / "events.jsonl"
    reader = EventReader(tmp_path)
    complete = json.dumps({"event": "save", "time_s": 1.0, "step": 5}) + "\n"
    events.write_text(complete[:9])
    assert reader.read().saved == []
    with events.open("a") as file:
        file.write(complete[9:] + "{not json\n")
    assert reader.read().saved == [5]


def test_a_run_whose_folder_is_in_the_container_is_not_followed():
    assert EventReader(None).read().phase == "waiting for the ranks to meet"
