"""A run's folder shows what is in it, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from embark.report.run_files import RunFiles


def test_a_link_that_leads_out_of_the_run_is_not_followed(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("do not show me\n")
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "train.log").symlink_to(secret)
    (run / "events.jsonl").symlink_to(secret)
    (run / "logs" / "away").symlink_to(tmp_path)
    files = RunFiles(run)
    assert files.logs() == []
    assert files.size_bytes("events.jsonl") is None
    assert files.read("train.log", 0, 100) == b""
    assert files.read("../secret", 0, 100) == b""
    assert files.read("logs/away/secret", 0, 100) == b""


def test_a_run_that_is_itself_reached_by_a_link_is_read(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("hello\n")
    (tmp_path / "newest").symlink_to(run)
    files = RunFiles(tmp_path / "newest")
    assert [log.name for log in files.logs()] == ["train.log"]
    assert files.read("train.log", 1, 3) == b"ell"


def test_a_log_kept_elsewhere_is_read_by_its_name(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "log").write_text("printed\n")
    files = RunFiles(tmp_path / "run", launch_log=tmp_path / "log")
    assert [(log.name, log.size_bytes) for log in files.logs()] == [("launch log", 8)]
    assert files.read("launch log", 0, 100) == b"printed\n"


def test_a_log_folder_that_is_a_link_is_not_walked(tmp_path: Path, monkeypatch):
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (run, outside):
        folder.mkdir()
    (outside / "secret.log").write_text("secret")
    (run / "logs").symlink_to(outside)
    (run / "ranks").mkdir()
    (run / "ranks" / "0.log").write_text("shown")
    walked = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: walked.append(str(path)) or scan(path))
    assert [log.name for log in RunFiles(run).logs()] == ["ranks/0.log"]
    assert not [path for path in walked if "outside" in path or path.endswith("logs")]
