"""`embark launch` of a server on this machine: it answers, comes back after a crash, and ends by `embark cancel`."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv
from limits import HANG_S

from embark import export_run
from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import UserError
from embark.launch.run_registry import find_run
from embark.spec import RunSpec

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def spec_of(folder: Path, *, is_exported: bool = True) -> RunSpec:
    spec = prepared_spec(folder, write_csv(folder / "a.csv", draw_rows(200, 0)),
                         write_csv(folder / "b.csv", draw_rows(40, 1)))
    if is_exported:
        export_run(save_run(spec).uri, str(folder / "models"))
    return spec.model_copy(update={
        "place": spec.place.model_copy(update={"target": "serve"}),
        "serve": spec.serve.model_copy(update={"artifact": str(folder / "models")})})


def until(is_so) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_dry_run_says_the_command_and_one_without_an_artifact_is_refused(tmp_path, capsys):
    spec = spec_of(tmp_path, is_exported=False)
    with pytest.raises(UserError, match="has no exported model"):
        launch_run(Console(), spec, yes=False, dry_run=True)
    export_run(save_run(spec).uri, str(tmp_path / "models"))
    assert launch_run(Console(), spec, yes=False, dry_run=True) == 0
    output = capsys.readouterr().out
    assert f"-m embark serve {tmp_path}/models --port=" in output
    assert "clicks-serve on this machine: http://127.0.0.1:" in output


@pytest.mark.slow
def test_a_server_answers_comes_back_after_a_crash_and_ends(tmp_path, capsys, monkeypatch, warm_python):
    monkeypatch.setattr("embark.launch.backends.local.sys", SimpleNamespace(executable=warm_python))
    monkeypatch.setattr("embark.launch.supervisor_client.WAIT_S", 0.1)
    assert launch_run(Console(), spec_of(tmp_path), yes=False, dry_run=False) == 0
    handle = find_run("clicks-serve").handle
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in draw_rows(3, 2)]

    def scores() -> list[float] | None:
        request = urllib.request.Request(f"http://127.0.0.1:{handle.where['port']}/score",
                                         json.dumps({"rows": rows}).encode())
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)["scores"]
        except OSError:
            return None

    until(scores)
    first = scores()
    assert len(first or ()) == 3
    assert status_command("clicks-serve", console=Console()) == 0
    assert "running" in capsys.readouterr().out
    child = json.loads((handle.folder / "child.json").read_text())["pid"]
    os.kill(child, signal.SIGKILL)
    until(lambda: json.loads((handle.folder / "child.json").read_text())["pid"] != child)
    until(scores)
    assert scores() == first
    assert logs_command("clicks-serve", console=Console()) == 0
    assert "server | serving clicks, version 1" in capsys.readouterr().out
    assert cancel_command("clicks-serve", yes=True, console=Console()) == 0
    assert f"the exported model in {tmp_path}/models" in capsys.readouterr().out
    assert scores() is None
    assert status_command("clicks-serve", console=Console()) == 0
    assert "gone: cancelled; stopped" in capsys.readouterr().out
