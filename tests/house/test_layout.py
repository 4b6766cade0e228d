"""A file is short and about what its name says; one place prints."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "embark"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
MAY_PRINT = {"cli/console.py", "events/sinks/terminal.py", "stack/versions.py"}
"""stack.py is also a script that runs before rich is installed."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_longer_than_one_reads_at_once(path: Path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{name_of(path)} has {num_lines} lines: split it by subject"


def test_no_module_is_named_for_nothing():
    vague = [name_of(path) for path in SOURCES if VAGUE & set(path.relative_to(PACKAGE).with_suffix("").parts)]
    assert not vague


def test_every_room_is_a_package():
    rooms = {path.parent for path in SOURCES}
    assert not [name_of(room) for room in sorted(rooms) if not (room / "__init__.py").exists()]


@pytest.mark.parametrize("path", [p for p in SOURCES if name_of(p) not in MAY_PRINT], ids=name_of)
def test_only_the_console_prints(path: Path):
    printing = [f"{name_of(path)}:{line}" for line in prints(path.read_text())]
    assert not printing, "hand it to console, or tell it as an event"


def test_the_search_for_prints_finds_them():
    source = 'import sys\nprint(1)\nsys.stdout.write("x")\nsys.stderr.write("x")\nself.print(2)\nout = sys.stdout\n'
    assert prints(source) == [2, 3, 4]


def prints(source: str) -> list[int]:
    """The lines that write to the terminal."""
    writers = {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if ast.unparse(call.func) in writers)
