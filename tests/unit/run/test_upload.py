"""What a run has told is where the run lives before its next save."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest
from limits import HANG_S

from embark.errors import Fault
from embark.run.logger import EventUploader
from embark.store import RunDir


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    made = RunDir(f"memory://{uuid4().hex}/run")
    made.path.mkdir(parents=True)
    return made


def until(happened) -> None:
    end_s = time.monotonic() + HANG_S
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_complete_lines_are_copied_as_they_come(run_dir):
    run_dir.events.write_bytes(b'{"a": 1}\n{"b"')
    with EventUploader(run_dir, every_s=0.02):
        until(lambda: run_dir.store.exists("events.jsonl"))
        assert run_dir.store.read("events.jsonl") == b'{"a": 1}\n'
        run_dir.events.write_bytes(b'{"a": 1}\n{"b": 2}\n')
        until(lambda: run_dir.store.read("events.jsonl") == b'{"a": 1}\n{"b": 2}\n')


def test_an_unavailable_store_stops_neither_run_nor_upload(run_dir, monkeypatch):
    run_dir.events.write_bytes(b"x\n")
    write, calls = run_dir.store.write, []

    def failing(path, data, size_bytes=None):
        calls.append(path)
        if len(calls) < 3:
            raise Fault("away")
        write(path, data)

    monkeypatch.setattr(run_dir.store, "write", failing)
    with EventUploader(run_dir, every_s=0.02):
        until(lambda: run_dir.store.exists("events.jsonl"))
    assert len(calls) >= 3


@pytest.mark.parametrize("is_on", [True, False])
def test_a_run_on_this_machine_or_on_another_rank_copies_nothing(tmp_path, is_on):
    place = RunDir(str(tmp_path)) if is_on else RunDir(f"memory://{uuid4().hex}/run")
    with EventUploader(place, is_on=is_on, every_s=0.01) as copying:
        assert not copying._thread.is_alive()
