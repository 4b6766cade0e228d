"""What the doctor found is shown line by line, and at the end in one sentence; code 1 where something is wrong."""

from __future__ import annotations

import json

import pytest

from embark.__main__ import run
from embark.cli.console import Console
from embark.cli.doctor import _show
from embark.doctor.host import Check

WELL = Check("python", "ok", "3.12.4", "one of 3.11, 3.12")
WORTH = Check("clock", "warning", "set by nobody", "kept by NTP", "systemctl enable --now chrony")
WRONG = Check("/dev/shm", "wrong", "64 MiB", "at least 1 GiB", "--shm-size=8g")


@pytest.mark.parametrize(("checks", "code", "sentence"), [
    ([WELL], 0, "this machine: ready (1 check)"),
    ([WELL, WORTH], 0, "this machine: ready (2 checks); warnings: clock"),
    ([WELL, WORTH, WRONG], 1, "this machine: not ready: /dev/shm; warnings: clock"),
])
def test_the_sentence_at_the_end_and_the_code(checks: list[Check], code: int, sentence: str, capsys):
    assert _show(Console(), checks, "this machine") == code
    assert capsys.readouterr().out.splitlines()[-1] == sentence
    assert _show(Console(quiet=True), checks, "this machine") == code
    assert capsys.readouterr().out.splitlines() == [sentence]


def test_what_is_wrong_has_its_fix_below_it_and_what_is_ok_has_none(capsys):
    _show(Console(), [WELL, WRONG], "this machine")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "python", "3.12.4"]
    assert lines[1] == "WRONG   /dev/shm         64 MiB; expected at least 1 GiB"
    assert lines[2].strip() == "fix: --shm-size=8g"


def test_a_program_gets_rows_and_nothing_else(capsys):
    assert _show(Console(json=True), [WELL, WRONG], "this machine") == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows[1] == {"name": "/dev/shm", "verdict": "wrong", "found": "64 MiB", "expected": "at least 1 GiB",
                       "fix": "--shm-size=8g"}


@pytest.mark.parametrize("words", [["quickstart"], ["--machine", "p5.48xlarge"], ["--set", "place.nodes=2"]])
def test_a_spec_or_a_machine_without_cloud_is_refused(words: list[str], capsys):
    assert run(["doctor", *words]) == 64
    assert "--cloud" in capsys.readouterr().err


def test_the_account_of_no_machine_is_refused(capsys):
    assert run(["doctor", "--cloud"]) == 64
    assert "--machine" in capsys.readouterr().err
