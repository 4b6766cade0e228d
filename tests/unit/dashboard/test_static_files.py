"""The page's own files."""

from __future__ import annotations

import re
from pathlib import Path

import embark.dashboard
from embark.dashboard.server import static_files

FOLDER = Path(embark.dashboard.__file__).parent / "static"


def test_every_file_is_served_under_its_name():
    assert set(static_files()) == {"/", *(f"/static/{path.name}" for path in FOLDER.iterdir())}


def test_every_name_that_a_file_asks_for_is_served():
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert f"/static/{name}" in static_files(), f"{path.name} imports {name}"
    for name in re.findall(r'(?:src|href)="(/[^"]*)"', (FOLDER / "index.html").read_text()):
        assert name in static_files()


def test_no_module_is_longer_than_one_reads_at_once():
    long = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.js")}
    assert {name: num for name, num in long.items() if num > 300} == {}
