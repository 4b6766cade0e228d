"""A run whose directory is in S3 is watched there: read as it grows, found below a prefix, and said to be gone."""

from __future__ import annotations

import json
import time
from uuid import uuid4

import pytest
from watched_runs import event_lines, step_line

from embark.dashboard.api import detail, log_lines, summary
from embark.dashboard.curves import Window, curves_text
from embark.dashboard.runs import WatchedRun
from embark.errors import UserError
from embark.report.context import diagnose_run
from embark.report.run_files import find_runs
from embark.store import open_store


@pytest.fixture
def uri(s3_emulator, environment) -> str:
    environment(s3_emulator.env)
    return f"{s3_emulator.uri}/{uuid4().hex}"


def put(uri: str, events: str, **files: str) -> None:
    store = open_store(uri)
    store.write("spec.toml", b'name = "far"\n')
    store.write("events.jsonl", events.encode())
    for name, text in files.items():
        store.write(name.replace("__", "/"), text.encode())


def last_step(run: WatchedRun) -> float:
    run.look(time.time())
    return json.loads(curves_text(run, Window()))["curves"]["loss"]["x"][-1]


def test_a_run_in_s3_is_read_on_as_its_events_are_published(uri: str):
    events = "".join(event_lines(num_steps=1000, until_step=100, ends=False))
    put(f"{uri}/far", events)
    (files,) = find_runs((f"{uri}/far",))()
    run = WatchedRun(files)
    assert (run.name, last_step(run)) == ("far", 100)
    put(f"{uri}/far", events + step_line(110, time.time()))
    assert last_step(run) == 110
    summarized = summary(run, time.time())
    assert (summarized["state"], summarized["is_remote"]) == ("running", True)
    put(f"{uri}/far", "".join(event_lines(num_steps=50)))
    assert last_step(run) == 50
    open_store(uri).delete_prefix("far")
    run.look(time.time())
    assert summary(run, time.time())["state"] == "deleted"
    assert detail(run, time.time())["spec"] == 'name = "far"\n'


def test_runs_below_a_prefix_are_found_and_a_prefix_without_any_says_so(uri: str):
    put(f"{uri}/one", "".join(event_lines()))
    put(f"{uri}/two", "".join(event_lines()))
    assert [files.name for files in find_runs((uri,))()] == ["one", "two"]
    with pytest.raises(UserError, match="no run there"):
        find_runs((f"{uri}/nothing",))


def test_logs_in_s3_are_shown_and_diagnosed_without_touching_them(uri: str, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    put(f"{uri}/far", "".join(event_lines(ends=False)), logs__rank_0="torch.OutOfMemoryError: CUDA out of memory.\n")
    (files,) = find_runs((f"{uri}/far",))()
    run = WatchedRun(files)
    run.look(time.time())
    assert log_lines(run, file=1, words="memory")["lines"][0]["level"] == "error"
    assert diagnose_run(files)[0].name == "gpu-out-of-memory"
    assert not (tmp_path / "cache").exists()
