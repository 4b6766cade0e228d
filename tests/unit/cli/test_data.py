"""`embark data make`, `check` and `copy` as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HANG_S

from embark.__main__ import run
from embark.data.prepared import MANIFEST

SMALL = ["--set", "data.num_train_samples=5000", "--set", "data.num_eval_samples=1000"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(capsys):
    assert run(["data", "make", "laptop", "--out", "made", "-q", *SMALL]) == 0
    capsys.readouterr()
    return Path("made")


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_make_says_what_it_made_and_never_overwrites(capsys, made):
    assert run(["data", "make", "laptop", "--out", "made", *SMALL]) == 64
    assert "--force" in capsys.readouterr().err
    assert run(["data", "make", "laptop", "--out", "made", "--force", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == {"train": 5_000, "validation": 1_000, "test": 0}
    assert result["size_bytes"] == sum(path.stat().st_size for path in made.rglob("*.bin"))


def test_make_writes_where_the_spec_s_data_is(capsys):
    Path("a.toml").write_text('[data]\nkind = "prepared"\npath = "here"\nnum_train_samples = 3000\n'
                              "num_eval_samples = 500\n[model]\nnum_tables = 2\nrows_per_table = 50\n")
    assert run(["data", "make", "a.toml"]) == 0
    assert "made 3,500 rows" in capsys.readouterr().out
    assert run(["data", "check", "a.toml"]) == 0
    assert "complete" in capsys.readouterr().out


def test_make_refuses_what_the_disk_cannot_hold(capsys):
    assert run(["data", "make", "laptop", "--out", "made", "--set", "data.num_train_samples=900000000000"]) == 64
    assert "the disk has" in capsys.readouterr().err
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["make", "laptop"], "--out FOLDER"),
        (["make", "laptop", "--out", "s3://bucket/x"], "embark data copy FOLDER s3://bucket/x"),
        (["check", "laptop"], "there is no data to check"),
        (["check", "nowhere"], "nowhere: no such folder of prepared data"),
        (["check", "made/nowhere"], "made/nowhere: no such folder of prepared data"),
        (["check", "nowhere.toml"], "nowhere.toml: no such file"),
        (["check", "."], "no manifest.json"),
        (["check", ".", "--set", "data.seed=2"], "--set: changes a spec, and . is prepared data"),
        (["check", "laptop", "--set", "data.kind=columns"], "names 0 columns, but model.num_dense is 13"),
        (["copy", "nowhere", "x"], "nothing to copy"),
        (["prepare", "laptop"], 'set data.kind = "prepared"'),
        (["prepare", "laptop", "--set", "data.kind=prepared", "--set", "data.path=x"], "data.prepare.input"),
        (["chck", "x"], "chck"),
    ],
)
def test_a_slip_is_a_sentence_with_its_fix_and_exit_64(capsys, words, what):
    assert run(["data", *words]) == 64
    captured = capsys.readouterr()
    assert what in captured.err
    assert "Traceback" not in captured.err


def test_check_shows_every_column_and_says_it_is_complete(capsys, made):
    assert run(["data", "check", "made"]) == 0
    printed = capsys.readouterr().out
    assert "made: complete; rows: train 5,000, validation 1,000" in printed
    for name in ("dense_0", "dense_12", "cat_0", "cat_7"):
        assert name in printed
    assert run(["data", "check", "made/manifest.json", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == []
    assert len(result["columns"]) == 22


def test_check_ends_with_1_where_something_is_wrong(capsys, made):
    part = next(made.glob("train/*.bin"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert run(["data", "check", "made"]) == 1
    captured = capsys.readouterr()
    assert "its checksum is not the manifest's" in captured.err
    assert "1 problem" in captured.out
    assert run(["data", "check", "made", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["where"] == part.relative_to(made).as_posix()


def test_a_copy_is_the_same_and_is_not_made_twice(capsys, made):
    assert run(["data", "copy", "made", "there", "--dry-run"]) == 0
    assert "would copy 3 files" in capsys.readouterr().out
    assert not Path("there").exists()
    assert run(["data", "copy", "made", "there", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified_by"] == "checksums"
    assert content(Path("there")) == content(made)
    assert run(["data", "copy", "made", "there"]) == 0
    assert "nothing to copy: all 3 files" in capsys.readouterr().out


def test_other_data_is_replaced_only_when_forced(capsys, made):
    assert run(["data", "copy", "made", "there", "-q"]) == 0
    assert run(["data", "make", "laptop", "--out", "other", "-q", *SMALL, "--set", "data.seed=2"]) == 0
    assert run(["data", "copy", "other", "there"]) == 64
    assert "holds other prepared data" in capsys.readouterr().err
    assert content(Path("there")) == content(made)
    assert run(["data", "copy", "other", "there", "--force"]) == 0
    assert content(Path("there")) == content(Path("other"))


def test_incomplete_data_is_not_copied(capsys, made):
    next(made.glob("train/*.bin")).unlink()
    assert run(["data", "copy", "made", "there"]) == 64
    assert "is incomplete" in capsys.readouterr().err
    Path("made/.preparing").mkdir()
    Path("made/.preparing/x").touch()
    (made / MANIFEST).unlink()
    assert run(["data", "copy", "made", "there"]) == 64
    assert "unfinished preparation" in capsys.readouterr().err
    assert not Path("there").exists()


def test_any_folder_and_any_file_are_copied_and_nothing_is_overwritten(capsys):
    Path("raw/deep").mkdir(parents=True)
    Path("raw/deep/day_0").write_text("a")
    Path("raw/day_1").write_text("b")
    assert run(["data", "copy", "raw", "there", "--verify"]) == 0
    assert content(Path("there")) == content(Path("raw"))
    assert run(["data", "copy", "raw/deep/day_0", "one"]) == 0
    assert content(Path("one")) == {"day_0": b"a"}
    Path("raw/day_1").write_text("c")
    assert run(["data", "copy", "raw", "there"]) == 64
    assert "exists already, with other content" in capsys.readouterr().err
    assert Path("there/day_1").read_text() == "b"
    assert run(["data", "copy", "raw", "there", "--force"]) == 0
    assert content(Path("there")) == content(Path("raw"))


def test_a_place_is_not_copied_into_itself(capsys, made):
    for target in ("made", "./made/", "made/inside"):
        assert run(["data", "copy", "made", target]) == 64
        assert "is the same as" in capsys.readouterr().err


def test_a_make_that_is_killed_leaves_nothing_that_is_taken_for_data(tmp_path):
    """Its workers end with it."""
    command = [sys.executable, "-m", "embark", "data", "make", "laptop", "--out", "made",
               "--set", "data.num_train_samples=60000000", "--set", "data.prepare.num_workers=2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + HANG_S
    while not list(Path("made").glob("train/*")) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(Path("made").glob("train/*"))
    assert run(["data", "check", "made"]) == 64
    until = time.monotonic() + HANG_S
    while group_is_alive(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not group_is_alive(process.pid)
    assert run(["data", "make", "laptop", "--out", "made", "-q", *SMALL]) == 0
    assert run(["data", "check", "made", "-q"]) == 0


def group_is_alive(group: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False
