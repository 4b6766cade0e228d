"""A machine made of files and small programs, to be looked at instead of this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from embark.doctor.host import Host


class Machine:
    """Its root, its home, and programs that print what real ones print."""

    def __init__(self, folder: Path) -> None:
        self.root, self.home, self.programs = folder / "root", folder / "home", folder / "programs"
        for made in (self.root, self.home, self.programs):
            made.mkdir()
        self.env: dict[str, str] = {"HOME": str(self.home), "PATH": str(self.programs)}

    def has(self, path: str, text: str = "") -> Path:
        """A file below the root."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def runs(self, program: str, *answers: tuple[str, str]) -> None:
        """A program that prints the text of the first answer whose words are among its own; else it fails."""
        folder = self.programs / f".{program}"
        folder.mkdir(exist_ok=True)
        lines = ["#!/bin/sh", 'words=" $* "']
        for number, (words, text) in enumerate(answers):
            (folder / str(number)).write_text(text)
            lines.append(f"""case "$words" in *"{words}"*) /bin/cat '{folder}/{number}'; exit 0;; esac""")
        file = self.programs / program
        file.write_text("\n".join([*lines, "exit 6", ""]))
        file.chmod(0o755)

    @property
    def host(self) -> Host:
        return Host(self.root, self.env, self.home / "runs")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def with_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that gives every limit of this process these values, soft and hard."""
    import resource

    def set_to(soft: int, hard: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))

    return set_to
