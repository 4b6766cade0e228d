"""`embark watch`: which runs are meant, at what price, and what the verb says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from limits import HANG_S
from watched_runs import append, line, write_run

from embark.__main__ import run
from embark.cli.console import Console
from embark.cli.watch import watch_page
from embark.errors import ExitCode, UserError
from embark.launch.backend import RunHandle
from embark.launch.run_registry import RunRecord, save_record
from embark.report.context import diagnose_run
from embark.report.run_files import RunFiles, find_runs


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def names(*words: str) -> list[str]:
    return [files.name for files in find_runs(words)()]


def test_without_a_name_all_runs_of_the_runs_folder_are_watched():
    write_run(Path("runs/one"))
    find = find_runs(())
    write_run(Path("runs/two"))
    (Path("runs") / "not-a-run").mkdir()
    assert sorted(files.name for files in find()) == ["one", "two"]


def test_a_run_is_named_by_its_folder_or_its_name_and_a_folder_by_its_path():
    write_run(Path("runs/one"))
    write_run(Path("elsewhere/two"))
    assert names("one") == names("runs/one") == ["one"]
    assert names("elsewhere", "one") == ["two", "one"]


def test_a_word_that_means_nothing_says_what_is_near():
    write_run(Path("runs/quickstart"))
    with pytest.raises(UserError, match="no such run") as raised:
        find_runs(("quikstart",))
    assert "quickstart" in raised.value.fix
    with pytest.raises(UserError, match="no such run"):
        find_runs(("nothing-like-it",))


def test_the_first_run_appears_where_none_was_before():
    find = find_runs(())
    assert find() == []
    write_run(Path("runs/one"))
    assert [run.name for run in find()] == ["one"]


def test_a_project_s_folder_means_the_runs_in_it():
    write_run(Path("project/runs/one"))
    assert [run.name for run in find_runs(("project",))()] == ["one"]


def test_what_a_launched_run_printed_is_among_its_logs(tmp_path: Path):
    folder = write_run(Path("runs/one"))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "log").write_text("printed\n")
    handle = RunHandle("one", "local", {"folder": str(tmp_path / "kept")}, run_uri=str(folder.absolute()))
    save_record(RunRecord(handle, "", time.time(), is_submitted=True, path=tmp_path / "data/embark/runs/one.json"))
    (files,) = find_runs(("one",))()
    assert [log.name for log in files.logs()] == ["launch log"]


def test_a_fault_in_the_events_is_diagnosed_with_its_fix():
    folder = write_run(Path("runs/one"), ends=False)
    append(folder, line("error", time.time(), text="CUDA out of memory. Tried to allocate 2.00 GiB"))
    found = diagnose_run(RunFiles(folder))
    assert found[0].name == "gpu-out-of-memory"
    assert found[0].fix
    assert found[0].evidence.source.endswith("events.jsonl")


def served(capsys: pytest.CaptureFixture[str], **options) -> tuple[dict, threading.Event, threading.Thread]:
    until = threading.Event()
    values = {"host": "127.0.0.1", "port": 0, "token": "", "opens": False, **options}
    thread = threading.Thread(target=lambda: watch_page(Console(json=True), ["runs"], until=until, **values))
    thread.start()
    text = ""
    deadline = time.monotonic() + HANG_S
    while not text.strip().endswith("}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        text += capsys.readouterr().out
    return json.loads(text), until, thread


def test_the_page_is_served_and_its_address_reported(capsys: pytest.CaptureFixture[str]):
    write_run(Path("runs/one"))
    output, until, thread = served(capsys)
    try:
        assert output["runs"] == ["runs/one"]
        with urllib.request.urlopen(output["url"] + "api/runs", timeout=HANG_S) as answer:
            assert [run["name"] for run in json.load(answer)["runs"]] == ["one"]
    finally:
        until.set()
        thread.join(HANG_S)
    assert not thread.is_alive()


def test_beyond_this_machine_a_token_is_made_and_asked_for(capsys: pytest.CaptureFixture[str]):
    write_run(Path("runs/one"))
    output, until, thread = served(capsys, host="0.0.0.0")
    try:
        address, _, token = output["url"].partition("?token=")
        port = address.rstrip("/").rpartition(":")[2]
        assert len(token) >= 32
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=HANG_S)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Authorization": f"Bearer {token}"})
        assert urllib.request.urlopen(request, timeout=HANG_S).status == 200
    finally:
        until.set()
        thread.join(HANG_S)


@pytest.mark.parametrize("token", ["has space", "ü" * 20, "a;b=c" * 5, "short"])
def test_a_token_that_would_not_hold_is_refused(token: str):
    with pytest.raises(UserError, match="--token"):
        watch_page(Console(), [], host="0.0.0.0", port=0, token=token, opens=False)


def test_a_port_that_is_none_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert run(["watch", "--port", "70000"]) == ExitCode.BAD_INPUT
    assert "--port 70000 is not a port" in capsys.readouterr().err


def test_ctrl_c_ends_the_verb_well(tmp_path: Path):
    write_run(Path("runs/one"))
    words = [sys.executable, "-m", "embark", "watch", "--no-open", "--port", "0", "--quiet"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        try:
            _, complaints = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert (process.returncode, complaints) == (ExitCode.DONE, "")
