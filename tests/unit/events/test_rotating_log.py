"""A server's record is bounded in size and number of files, and each of them can be read alone."""

from embark.events.events import Event, RotatingEventLog, read_events


def test_the_record_is_bounded_and_each_file_begins_with_the_opening_event(tmp_path):
    opening = Event("serve", {"version": 3})
    path = tmp_path / "events.jsonl"
    log = RotatingEventLog(path, max_bytes=2_000)
    log.emit(opening, opening)
    for number in range(200):
        if number == 100:  # a restart goes on where the last process ended
            log.close()
            log = RotatingEventLog(path, max_bytes=2_000)
        log.emit(Event("traffic", {"number": number}), opening)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events.1.jsonl", "events.jsonl"]
    assert all(file.stat().st_size <= 2_000 for file in files)
    by_age = [list(read_events(tmp_path / name)) for name in ("events.1.jsonl", "events.jsonl")]
    assert all(events[0].values == {"version": 3} for events in by_age)
    numbers = [event.values["number"] for events in by_age for event in events if event.kind == "traffic"]
    assert numbers == list(range(numbers[0], 200))


def test_an_event_larger_than_the_limit_is_written(tmp_path):
    log = RotatingEventLog(tmp_path / "events.jsonl", max_bytes=10)
    event = Event("serve", {"version": 1})
    log.emit(event, event)
    log.emit(Event("traffic", {"rows": 5}), event)
    log.close()
    assert [one.kind for one in read_events(tmp_path / "events.jsonl")] == ["serve", "traffic"]
