"""Events survive a kill."""

import json

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


def test_a_fanout_reaches_every_sink(tmp_path):
    logs = [EventLog(tmp_path / name) for name in ("a", "b")]
    fanout = Fanout(logs)
    fanout.emit(Event("start", {}, 1.0))
    fanout.close()
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() != ""
