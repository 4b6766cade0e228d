"""The disk is tried for real, for a moment, and left as it was."""

from __future__ import annotations

import time
from collections import namedtuple
from pathlib import Path

import pytest

from embark.doctor.host import Host
from embark.doctor.machine import MIN_DISK_BYTES, check_disk, measure

Usage = namedtuple("Usage", "total used free")


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path):
    num_bytes, seconds = measure(tmp_path, max_bytes=16 << 20)
    assert 0 < num_bytes <= 16 << 20
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_left_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fdatasync", lambda _: time.sleep(0.1))
    assert measure(tmp_path, limit_s=0.2)[0] <= 4 * (4 << 20)


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**9, 0, 50 << 20))
    assert measure(tmp_path)[0] <= 5 << 20


def test_speed_and_size_are_reported_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embark.doctor.machine.MAX_PROBE_BYTES", 8 << 20)
    free, speed = check_disk(Host(run_dir=tmp_path / "not" / "there" / "yet"))
    assert free.name == "free disk"
    assert f" in {tmp_path}" in speed.found
    assert "MB/s" in speed.found
    assert not (tmp_path / "not").exists()


def test_a_slow_disk_is_a_warning_and_a_full_one_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fdatasync", lambda _: time.sleep(0.3))
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(MIN_DISK_BYTES, 0, MIN_DISK_BYTES // 2))
    free, speed = check_disk(Host(run_dir=tmp_path))
    assert (free.verdict, speed.verdict) == ("wrong", "warning")
    assert "store.root" in free.fix


def test_a_folder_that_cannot_be_written_is_wrong():
    *_, speed = check_disk(Host(run_dir=Path("/proc")))
    assert speed.verdict == "wrong"
    assert "store.root" in speed.fix
