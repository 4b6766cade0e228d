"""A run that was launched is found again, whatever became of the other files."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from embark.errors import UserError
from embark.launch import run_registry
from embark.launch.backend import RunHandle, Status
from embark.launch.run_registry import (
    RunRecord,
    delete_record,
    find_run,
    list_runs,
    location_hash,
    registry_dir,
    run_status,
    save_record,
)
from embark.launch.shell import Shell
from embark.store.run_dir import EVENTS


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run(name: str = "dlrm", context: str = "east", **changes) -> RunRecord:
    handle = RunHandle(name, "kubernetes", {"context": context, "namespace": "embark", "num_nodes": 2}, "a title",
                       "s3://b/runs/dlrm", 110.08)
    return replace(RunRecord(handle, 'name = "dlrm"\n', 1000.0, is_submitted=True), **changes)


def test_a_record_is_read_back_complete():
    save_record(run(is_cancelled=True))
    assert find_run("dlrm") == run(is_cancelled=True)
    assert registry_dir().is_dir()


def test_the_same_run_is_remembered_once_and_the_newer_counts():
    save_record(run(is_submitted=False))
    save_record(run())
    assert [r.is_submitted for r in list_runs().runs] == [True]


def test_two_of_a_name_in_two_clusters_are_reported_apart():
    east, west = save_record(run()), save_record(run(context="west"))
    with pytest.raises(UserError, match="launched in 2 places") as caught:
        find_run("dlrm")
    for one in (east, west):
        word = f"dlrm@{location_hash(one.handle)}"
        assert word in caught.value.fix
        assert find_run(word) == one


def test_a_run_that_was_only_trained_is_reported_with_embark_watch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "my run").mkdir(parents=True)
    (tmp_path / "runs" / "my run" / EVENTS).touch()
    with pytest.raises(UserError, match="my run: nothing was launched under that name from here") as caught:
        find_run("my run")
    assert caught.value.fix == "it was trained without embark launch: embark watch 'runs/my run' shows it"


class Platform:
    """Answers with one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def status(self, _handle: RunHandle) -> Status:
        return self._status

    def events(self, _handle: RunHandle) -> list:
        return []


@pytest.mark.parametrize(("state", "shown", "reason"), [
    ("failed", "gone", "cancelled; it had to be killed: its last checkpoint may be older"),
    ("gone", "gone", "cancelled; stopped after 5.0 s"), ("succeeded", "succeeded", "stopped after 5.0 s"),
])
def test_a_cancelled_run_has_not_failed(monkeypatch, state, shown, reason):
    platform = Platform(Status(state=state, reason="stopped after 5.0 s"))
    monkeypatch.setattr(run_registry, "backend_of", lambda *_, **__: platform)
    status = run_status(run(is_cancelled=True), Shell(), print)
    assert (status.state, status.reason) == (shown, reason)


def test_a_misspelt_name_gets_the_nearest_one():
    save_record(run("quickstart"))
    with pytest.raises(UserError) as caught:
        find_run("quickstar")
    assert "quickstart" in caught.value.fix


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"handle": 7}', b"\xff\xfe", b'{"handle": {}}',
                                  b"[" * 100_000])
def test_a_damaged_file_is_passed_over_and_named(text):
    save_record(run())
    bad = registry_dir() / "bad.json"
    bad.write_bytes(text)
    found = list_runs()
    assert [r.handle.name for r in found.runs] == ["dlrm"]
    assert found.broken == (bad,)


def test_the_newest_comes_first_and_a_forgotten_one_is_gone():
    save_record(run("old", submitted_s=1.0))
    newest = save_record(run("new", submitted_s=2.0))
    assert [r.handle.name for r in list_runs().runs] == ["new", "old"]
    delete_record(newest)
    delete_record(newest)
    assert [r.handle.name for r in list_runs().runs] == ["old"]


def _write_many(number: int) -> None:
    for turn in range(20):
        save_record(run(spec_toml=f"{number} {turn} " + "x" * 20_000))


def test_writers_at_the_same_time_leave_one_complete_file():
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not list_runs().broken
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert find_run("dlrm").spec_toml.endswith("x" * 20_000)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="could not be recorded") as caught:
        save_record(run())
    assert "XDG_DATA_HOME" in caught.value.fix
