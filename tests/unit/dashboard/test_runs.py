"""Runs that are read while they change."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from watched_runs import append, event_lines, line, step_line, write_run

from embark.catalog.pricing import RunPrice
from embark.dashboard import runs as runs_module
from embark.dashboard.api import detail, summary
from embark.dashboard.curves import Window, charts_text, curves_text
from embark.dashboard.runs import Runs, WatchedRun
from embark.report import run_files
from embark.report.run_files import RunFiles


def run_of(folder: Path) -> WatchedRun:
    run = WatchedRun(RunFiles(folder))
    read_all(run)
    return run


def read_all(run: WatchedRun) -> None:
    while run.look(time.time()):
        pass


def curve(run: WatchedRun, name: str = "loss", **window) -> dict:
    return json.loads(curves_text(run, Window(**window)))["curves"][name]


def test_new_steps_are_seen_and_change_the_version(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo", num_steps=1000, until_step=200, ends=False))
    before = run.version
    append(tmp_path / "demo", step_line(210, time.time()))
    read_all(run)
    assert run.version > before
    assert curve(run)["x"][-1] == 210


def test_nothing_new_changes_no_version(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo"))
    before = run.version
    read_all(run)
    assert run.version == before


def test_a_run_that_is_deleted_is_reported_to_be_and_keeps_its_curves(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo"))
    shutil.rmtree(tmp_path / "demo")
    read_all(run)
    summarized = summary(run, time.time())
    assert summarized["state"] == "deleted"
    assert len(curve(run)["x"]) == 20


def test_a_run_that_comes_back_after_it_was_deleted_starts_again(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo", num_steps=400))
    shutil.rmtree(tmp_path / "demo")
    read_all(run)
    write_run(tmp_path / "demo", num_steps=100)
    read_all(run)
    assert summary(run, time.time())["state"] == "finished"
    assert curve(run)["x"][-1] == 100


def test_a_run_that_is_replaced_shows_only_the_new_one(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo", num_steps=400, name="old"))
    write_run(tmp_path / "demo", num_steps=1000, name="new", first_s=time.time() - 500)
    read_all(run)
    assert (run.record.steps_done, run.record.start["name"]) == (1000, "new")


def test_a_long_file_is_shown_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_files, "BLOCK_BYTES", 100_000)
    folder = write_run(tmp_path / "long", num_steps=10_000, every=1, first_s=time.time() - 10**6)
    run = WatchedRun(RunFiles(folder))
    assert run.look(time.time())
    shown = summary(run, time.time())
    assert (0 < shown["share_read"] < 1, shown["state"], shown["step"] > 100) == (True, "running", True)
    read_all(run)
    shown = summary(run, time.time())
    assert (shown["share_read"], shown["state"], run.record.num_events) == (1.0, "finished", 10_002)


def test_lines_that_are_no_events_are_counted_and_passed_over(tmp_path: Path):
    folder = write_run(tmp_path / "demo", ends=False)
    append(folder, '{"event": "step", "time\n', "\x00\x01binary\n", "\n", step_line(500, time.time()))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\xfd\n" + step_line(510, time.time()).encode()[:40])
    run = run_of(folder)
    summarized = summary(run, time.time())
    assert summarized["num_bad_lines"] == 3
    assert curve(run)["x"][-1] == 500


def test_nan_and_infinity_are_gaps_in_json_that_any_browser_reads(tmp_path: Path):
    folder = write_run(tmp_path / "demo", ends=False)
    append(folder, step_line(210, time.time(), loss=float("nan")), step_line(220, time.time(), loss=float("inf")))
    run = run_of(folder)
    assert curve(run)["y"][-2:] == [None, None]
    json.dumps(detail(run, time.time()), default=str)


def test_steps_out_of_order_are_drawn_in_order(tmp_path: Path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(step_line(step, time.time()) for step in (30, 10, 20)))
    assert curve(run_of(folder))["x"] == [10, 20, 30]


def test_zooming_gives_more_of_the_part_and_its_neighbours(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo", num_steps=5000, every=1))
    complete = [x for x in curve(run, num_points=100)["x"] if 1000 <= x <= 1100]
    part = curve(run, num_points=100, low=1000, high=1100)["x"]
    assert len(complete) < 10
    assert len(part) > 80
    assert (part[0], part[-1]) == (999, 1101)


def test_charts_of_a_run_have_its_parts_ranks_and_machines(tmp_path: Path):
    run = run_of(write_run(tmp_path / "demo", rich=True))
    charts = {chart["key"]: chart for chart in
              json.loads(charts_text(run, Window()))["charts"]}
    assert set(charts) == {"phases", "ranks", "util_percent", "used_bytes", "power_w", "temperature_c", "cpu",
                           "memory", "network", "disk"}
    assert [line["label"] for line in charts["ranks"]["lines"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [line["label"] for line in charts["network"]["lines"]] == ["in", "out"]


def test_dynamic_tables_have_a_chart_for_each_metric(tmp_path: Path):
    folder = write_run(tmp_path / "demo")
    append(folder, line("step", time.time(), step=10**6, id_hit_rate={"user": 0.75, "item": 0.5},
                        ids_evicted={"user": 3, "item": 0}))
    first, second, *_ = json.loads(charts_text(run_of(folder), Window()))["charts"]
    assert (first["key"], first["title"]) == ("tables.id_hit_rate", "Ids with a row")
    assert {one["label"]: one["y"] for one in first["lines"]} == {"user": [0.75], "item": [0.5]}
    assert (second["key"], [one["y"] for one in second["lines"]]) == ("tables.ids_evicted", [[3], [0]])


def test_more_lines_than_eyes_can_tell_apart_become_their_range(tmp_path: Path):
    folder = write_run(tmp_path / "demo")
    append(folder, *(line("ranks", time.time(), step=s, step_s=[0.1 + r / 1000 for r in range(64)]) for s in (1, 2)))
    ranks = json.loads(charts_text(run_of(folder), Window()))["charts"][0]
    assert ranks["num_lines"] == 64
    assert {line["label"]: line["y"][0] for line in ranks["lines"]} == pytest.approx(
        {"greatest": 0.163, "mean": 0.1315, "least": 0.1})


def test_runs_that_come_later_are_found_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs_module, "FIND_S", 0.05)
    monkeypatch.setattr(runs_module, "LOOK_S", 0.02)
    with Runs(lambda: [RunFiles(path) for path in sorted(tmp_path.iterdir())]) as runs:
        assert runs.all() == []
        write_run(tmp_path / "late", num_steps=100, until_step=50, ends=False)
        wait_for(lambda: runs.all() and runs.all()[0].record.steps_done == 50)
        append(tmp_path / "late", step_line(60, time.time()))
        wait_for(lambda: runs.all()[0].record.steps_done == 60)
        (late,) = runs.all()
        assert curve(late)["x"][-1] == 60


def test_a_store_that_fails_is_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runs_module, "LOOK_S", 0.02)
    files = RunFiles(write_run(tmp_path / "demo"))
    is_down = threading.Event()
    is_down.set()
    real = files.size_bytes

    def size_bytes(name: str) -> int | None:
        if is_down.is_set():
            raise OSError("the store does not answer")
        return real(name)

    monkeypatch.setattr(files, "size_bytes", size_bytes)
    with Runs(lambda: [files]) as runs:
        wait_for(lambda: runs.error == "the store does not answer")
        is_down.clear()
        wait_for(lambda: runs.error == "" and runs.all()[0].record.num_events > 0)


def test_reading_and_asking_at_once_never_disagree(tmp_path: Path):
    folder = write_run(tmp_path / "demo", num_steps=10**6, until_step=100, ends=False)
    run = run_of(folder)
    failures: list[BaseException] = []
    stop = threading.Event()

    def ask() -> None:
        try:
            while not stop.is_set():
                result = curve(run)
                assert len(result["x"]) == len(result["y"])
                detail(run, time.time())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(110, 1500, 10):
        append(folder, step_line(step, time.time()))
        run.look(time.time())
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def wait_for(is_so, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


def test_costs_are_counted_at_the_price_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.time()
    folder = tmp_path / "paid"
    folder.mkdir()
    lines = list(event_lines(num_steps=36_000, until_step=18_000, every=1000, first_s=now - 1800, ends=False))
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "spec.toml").write_text('name = "paid"\n')
    run = run_of(folder)
    monkeypatch.setattr(runs_module, "price_of_run", lambda _spec, _start: RunPrice(100.0, "1 node"))
    money = summary(run, now)["money"]
    assert money["spent_usd"] == pytest.approx(50.0, rel=0.01)
    assert money["to_go_usd"] == pytest.approx(50.0, rel=0.01)
