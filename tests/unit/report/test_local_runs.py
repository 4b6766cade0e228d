"""Runs of this machine are listed with how they ended, and removed unless they are being trained."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from watched_runs import append, line, write_run

from embark.__main__ import run
from embark.report.local_runs import list_local_runs
from embark.store.lease import TTL_S, acquire
from embark.store.run_dir import RunDir


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_runs_are_listed_with_state_and_size(capsys):
    assert list_local_runs().runs == ()
    for name in ("one", "two"):
        write_run(Path("runs") / name)
    assert run(["runs", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert {one["name"] for one in listed} == {"one", "two"}
    assert all(one["state"] and one["size_bytes"] > 0 for one in listed)
    assert run(["runs", "list"]) == 0
    assert "2 runs in runs" in capsys.readouterr().out


def test_a_run_that_stopped_early_is_listed_with_the_checkpoint_kept(capsys):
    run_dir = write_run(Path("runs") / "one", rich=True, ends=False)
    early = {"metric": "auc", "best": 0.79, "best_step": 100, "path": "runs/one/checkpoints/step-000000100"}
    append(run_dir, line("eval", time.time(), step=200, auc=0.71, log_loss=0.7, normalized_entropy=0.91),
           line("end", time.time(), outcome="done", step=200, early_stopping=early))
    assert run(["runs", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["held_out_auc"], listed["held_out_normalized_entropy"]) == (0.79, 0.66)
    assert run(["report", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval"]["step"] == 100
    text = Path("runs/one/report.html").read_text()
    assert "0.7900" in text
    assert "at step 100" in text


def test_a_run_killed_before_its_spec_was_saved_is_listed_and_removed(capsys):
    write_run(Path("runs") / "one")
    (Path("runs") / "early").mkdir()
    (Path("runs") / "early" / "events.jsonl").write_text('{"event": "note", "time_s": 1, "text": "hello"}\n')
    assert {one.name for one in list_local_runs().runs} == {"one", "early"}
    assert run(["runs", "remove", "early", "--yes"]) == 0
    assert {one.name for one in list_local_runs().runs} == {"one"}


def test_a_run_that_is_being_trained_is_listed_with_who_trains_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("one", "two"):
        write_run(Path("runs") / name)
    lease = acquire(RunDir("runs/one").store, TTL_S)
    try:
        assert run(["runs", "list"]) == 0
        assert f"process {os.getpid()} of" in capsys.readouterr().out
        assert run(["runs", "list", "--json"]) == 0
    finally:
        lease.release()
    held = {one["name"]: one["held_by"] for one in json.loads(capsys.readouterr().out)["runs"]}
    assert f"process {os.getpid()} of" in held["one"]
    assert held["two"] == ""
    assert not any(one.held_by for one in list_local_runs().runs)


def test_a_run_is_removed_only_when_asked_and_with_nothing_beside_it(capsys):
    for name in ("one", "two"):
        write_run(Path("runs") / name)
    assert run(["runs", "remove", "one"]) == 64  # not a terminal: nobody can be asked
    assert "--yes skips the prompt" in capsys.readouterr().err
    assert Path("runs/one").is_dir()
    assert run(["runs", "remove", "one", "--yes"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["two"]


def test_a_run_that_is_being_trained_is_not_removed(capsys):
    write_run(Path("runs/one"))
    lease = acquire(RunDir("runs/one").store, TTL_S)
    try:
        assert run(["runs", "remove", "one", "--yes"]) == 64
    finally:
        lease.release()
    assert "is being trained by" in capsys.readouterr().err
    assert Path("runs/one/events.jsonl").is_file()
    assert run(["runs", "remove", "one", "--yes"]) == 0


def test_a_link_is_not_followed_and_a_word_that_is_no_run_is_refused(capsys):
    write_run(Path("elsewhere/one"))
    Path("runs").mkdir()
    Path("runs/one").symlink_to(Path("elsewhere/one").absolute())
    Path("runs/data").mkdir()
    assert run(["runs", "remove", "one", "--yes"]) == 64
    assert "is a link to" in capsys.readouterr().err
    assert run(["runs", "remove", "data", "--yes"]) == 64
    assert Path("elsewhere/one/events.jsonl").is_file()
    assert Path("runs/data").is_dir()
