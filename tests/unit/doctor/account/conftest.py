"""Programs on the path that answer as the clouds' own command lines do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Answer = Callable[..., None]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """A function that puts a program on the path: for words among its own it prints JSON, or fails with a text."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(program: str, answers: dict[str, object], failures: dict[str, str] | None = None) -> None:
        lines = ["#!/bin/sh", f'echo "$*" >> "{folder}/{program}.asked"', 'words=" $* "']
        for number, (words, text) in enumerate((failures or {}).items()):
            (folder / f"{program}.e{number}").write_text(text)
            lines.append(f"""case "$words" in *" {words} "*) cat '{folder}/{program}.e{number}' >&2; exit 1;; esac""")
        for number, (words, answer) in enumerate(answers.items()):
            (folder / f"{program}.{number}").write_text(json.dumps(answer))
            lines.append(f"""case "$words" in *" {words} "*) cat '{folder}/{program}.{number}'; exit 0;; esac""")
        file = folder / program
        file.write_text("\n".join([*lines, 'echo "ERROR: unrecognized arguments: $*" >&2', "exit 2", ""]))
        file.chmod(0o755)

    return make
