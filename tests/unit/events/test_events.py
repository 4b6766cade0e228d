"""Events survive a kill."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from embark.errors import Fault, RunInUse
from embark.events.events import Event, EventLog, Fanout, read_events


def test_what_is_written_is_read_back(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl")
    events = [Event("step", {"step": 1, "loss": 0.5}, 12.5, 0), Event("note", {"text": "π\n[red]"}, 13.0, 3)]
    for event in events:
        log.emit(event)
    assert list(read_events(tmp_path / "run" / "events.jsonl")) == events  # before it is closed
    log.close()


def test_a_line_is_one_json_object_with_the_kind_first():
    line = Event("save", {"step": 2, "text": "two\nlines"}, 1.23456789, 1).to_json()
    assert "\n" not in line
    assert list(json.loads(line).items()) == [
        ("event", "save"), ("time_s", 1.234568), ("rank", 1), ("step", 2), ("text", "two\nlines"),
    ]  # fmt: skip


def test_a_line_cut_short_neither_swallows_the_next_nor_stops_the_reader(tmp_path):
    path = tmp_path / "events.jsonl"
    first = Event("step", {"step": 1}, 1.0)
    path.write_text(first.to_json() + "\n" + first.to_json()[:20])
    log = EventLog(path)
    log.emit(Event("resume", {"step": 1}, 2.0))
    log.close()
    assert [event.kind for event in read_events(path)] == ["step", "resume"]


def test_what_is_no_event_is_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    good = Event("end", {}, 1.0).to_json()
    path.write_bytes(b'5\n[]\n"x"\nnull\n{"event": "step"}\n\xff\xfe\n\n' + good.encode() + b"\n")
    assert [event.kind for event in read_events(path)] == ["end"]


def test_a_second_run_adds_to_the_log(tmp_path):
    (tmp_path / "events.jsonl").touch()
    for _ in range(2):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit(Event("start", {}, 1.0))
        log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_threads_that_log_at_once_lose_no_event(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: log.emit(Event("note", {"number": number, "text": "x" * 20_000})), range(500)))
    log.close()
    assert sorted(event.values["number"] for event in read_events(tmp_path / "events.jsonl")) == list(range(500))


def test_a_fanout_reaches_every_sink(tmp_path):
    logs = [EventLog(tmp_path / name) for name in ("a", "b")]
    fanout = Fanout(logs)
    fanout.emit(Event("start", {}, 1.0))
    fanout.close()
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() != ""


@pytest.mark.parametrize("remove", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
def test_a_run_whose_folder_is_deleted_or_moved_ends_with_a_fault(tmp_path, remove):
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.emit(Event("start", {}))
    remove(tmp_path / "run")
    with pytest.raises(Fault, match="was deleted or moved while the run was training"):
        log.emit(Event("step", {"step": 1}))
    log.close()


def test_a_log_that_another_process_replaced_says_who_holds_the_run(tmp_path):
    def check() -> None:
        raise RunInUse("run was taken over", fix="the other process trains on")

    log = EventLog(tmp_path / "events.jsonl", check=check)
    log.emit(Event("start", {}))
    (tmp_path / "copy").write_bytes((tmp_path / "events.jsonl").read_bytes())
    (tmp_path / "copy").replace(tmp_path / "events.jsonl")
    with pytest.raises(RunInUse, match="taken over"):
        log.emit(Event("step", {"step": 1}))
    log.close()
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")] == ["start"]
