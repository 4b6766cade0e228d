"""`embark diagnose` as a person and a program see it."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest

from embark.cli.console import Console
from embark.cli.diagnose import diagnose
from embark.diagnose.scan import load_rules
from embark.errors import ExitCode
from embark.spec import load_spec
from embark.spec.toml import to_toml

ROOT = Path(__file__).parents[3]
FAULTY = ROOT / "tests" / "fixtures" / "diagnose" / "faulty"

JSON = Console(json=True)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


def test_nothing_found_says_so_plainly_and_ends_with_0(capsys, tmp_path):
    (tmp_path / "a.log").write_text("all is well\n")
    assert diagnose(str(tmp_path / "a.log")) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("nothing found in 1 file")


def test_json_is_one_object_whatever_the_log_holds(capsys, tmp_path):
    (tmp_path / "a.log").write_bytes(b"AccessDenied \x1b[31m\x00\xff \xf0\x9f\x92\xa5 {{x}}\n")
    assert diagnose(str(tmp_path / "a.log"), console=JSON) == ExitCode.OTHER
    (one,) = json.loads(capsys.readouterr().out)["diagnoses"]
    assert (one["name"], one["evidence"]["line"], one["kind"]) == ("store-access-denied", 1, "cause")
    assert one["command"]
    assert one["source"].startswith("https://")


def test_a_pipe_is_read(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\nOOMKilled\n")))
    assert diagnose("-") == ExitCode.OTHER
    assert "seen: -:2: OOMKilled" in capsys.readouterr().out


def test_a_run_is_found_with_its_spec_events_and_logs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "dlrm"
    run.mkdir(parents=True)
    spec = load_spec("laptop", ["place.machine=p5.48xlarge", "place.nodes=2"])
    (run / "spec.toml").write_text(to_toml(spec))
    (run / "events.jsonl").write_text('{"event": "step", "time_s": 1, "rank": 0, "step": 7, "loss": null}\n')
    (run / "rank0.log").write_text("n:1:1 [0] NCCL INFO Using network Socket\n")
    assert diagnose("dlrm", console=JSON) == ExitCode.OTHER
    found = [one["name"] for one in json.loads(capsys.readouterr().out)["diagnoses"]]
    assert found == ["loss-not-a-number", "tcp-instead-of-fabric"]


def test_a_run_s_spec_that_cannot_be_read_stops_nothing(capsys, tmp_path):
    (tmp_path / "spec.toml").write_text("[train]\nbatch_sze = 3\n")
    (tmp_path / "rank0.log").write_text("OOMKilled\n")
    assert diagnose(str(tmp_path)) == ExitCode.OTHER
    captured = capsys.readouterr()
    assert "host-out-of-memory" in captured.out
    assert "is not used" in captured.err


def test_the_rules_are_listed(capsys):
    assert diagnose(rules=True, console=JSON) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)) == len(load_rules())


def test_the_page_of_rules_is_current():
    spec = importlib.util.spec_from_file_location("make_diagnose", ROOT / "tools" / "make_diagnose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (ROOT / "docs" / "reference" / "diagnose.md").read_text(), "make docs"
