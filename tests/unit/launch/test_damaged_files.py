"""One damaged file of a launched run is named, with what to do about it, and hides no other run."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from embark.__main__ import run
from embark.errors import ExitCode
from embark.launch import supervisor
from embark.launch.backend import RunHandle
from embark.launch.run_registry import RunRecord, registry_dir, save_record

FILES = {supervisor.STARTED: {"pid": 4_000_000, "mark": "boot 1", "time_s": 1000.0},
         supervisor.STATE: {"phase": "running", "num_restarts": 0, "num_faults": 0, "last_code": 0},
         supervisor.ENDED: {"code": 0, "was_stopped": False, "time_s": 1060.0}}
DEEP = "[" * 100_000
DAMAGES = [
    ("started.json", {"mark": None}), ("started.json", {"pid": None}), ("started.json", {"pid": "many"}),
    ("started.json", {"pid": True}), ("started.json", {"pid": 10**400}), ("started.json", "{"),
    ("started.json", "[]"), ("started.json", DEEP), ("started.json", {"time_s": "noon"}),
    ("ended.json", {"time_s": "noon"}), ("ended.json", {"time_s": None}), ("ended.json", {"code": "zero"}),
    ("ended.json", {"time_s": float("nan")}), ("ended.json", '{"code": 0}'),
    ("state.json", {"num_restarts": "many"}), ("state.json", {"last_code": [7]}), ("state.json", {"phase": 7}),
    ("record", {"where": {}}), ("record", {"where": {"folder": 7}}),
    ("record", {"where": {"folder": "x", "grace_s": "long"}}), ("record", "{"), ("record", DEEP),
]
OUT_OF_TABLE = re.compile(r"Traceback|took -")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)


def launched(name: str, tmp_path) -> RunRecord:
    folder = registry_dir() / "local" / name
    folder.mkdir(parents=True)
    for file, values in FILES.items():
        (folder / file).write_text(json.dumps(values))
    (folder / supervisor.LOG).write_text("2026-01-01T00:00:00.000000Z hello\n")
    where = {"folder": str(folder), "num_ranks": 1, "cwd": str(tmp_path), "grace_s": 1}
    handle = RunHandle(name, "local", where, f"{name} here", str(tmp_path / "runs" / name))
    return save_record(RunRecord(handle, f'name = "{name}"\n', time.time(), is_submitted=True))


def damage(record: RunRecord, file: str, changes: dict[str, object] | str) -> str:
    """Damage a file of a run; return its path."""
    path = record.path if file == "record" else record.handle.folder / file
    values = json.loads(path.read_text())
    if isinstance(changes, str):
        path.write_text(changes)
    elif file == "record":
        path.write_text(json.dumps({**values, "handle": {**values["handle"], **changes}}))
    else:
        path.write_text(json.dumps({key: value for key, value in {**values, **changes}.items() if value is not None}))
    return str(path)


@pytest.mark.parametrize(("file", "changes"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_named_and_hides_no_other_run(file, changes, tmp_path, capsys):
    good, bad = launched("good", tmp_path), launched("bad", tmp_path)
    path = damage(bad, file, changes)

    assert run(["status"]) == ExitCode.DONE
    told = capsys.readouterr()
    assert re.search(r"good +succeeded", told.out)
    assert "took 1 min" in told.out
    assert path in told.out + told.err
    assert not OUT_OF_TABLE.search(told.out + told.err)

    for words in (["status", "bad"], ["cancel", "bad", "--yes"]):
        code = run(words)
        told = capsys.readouterr()
        assert code == ExitCode.BAD_INPUT, (words, told)
        assert path in told.err
        assert "fix:" in told.err
        assert not OUT_OF_TABLE.search(told.out + told.err)
    for words in (["logs", "bad"], ["cost", "bad"], ["status", "good"], ["logs", "good"]):
        assert run(words) in (ExitCode.DONE, ExitCode.BAD_INPUT), words
        told = capsys.readouterr()
        assert not OUT_OF_TABLE.search(told.out + told.err)
    assert run(["cancel", "good", "--yes"]) == ExitCode.DONE
    shutil.rmtree(good.handle.folder)
