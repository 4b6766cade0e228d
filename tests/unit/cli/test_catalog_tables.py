"""What a table leaves out to fit the terminal."""

import json

import pytest

from embark.cli.catalog_tables import fitting_table
from embark.cli.console import Console

ROWS = [{"name": "a-rather-long-name", "note": "x" * 30, "usd": 1234.5}, {"name": "b", "note": None, "usd": 2}]
HEADINGS = {"name": "name", "note": "note", "usd": "dollars an hour"}


@pytest.mark.parametrize(("columns", "has_note"), [(67, True), (66, False)])
def test_a_column_goes_just_when_the_table_would_not_fit(monkeypatch, capsys, columns, has_note):
    monkeypatch.setenv("COLUMNS", str(columns))
    fitting_table(Console(), ROWS, HEADINGS, ["note"])
    out = capsys.readouterr().out
    assert ("x" * 30 in out) is has_note
    assert "a-rather-long-name" in out
    assert "dollars an hour" in out


def test_json_leaves_nothing_out(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    fitting_table(Console(json=True), ROWS, HEADINGS, ["note"])
    assert json.loads(capsys.readouterr().out) == [dict(row) for row in ROWS]


def test_no_rows_are_no_fault(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "10")
    fitting_table(Console(), [], HEADINGS, ["note"])
    assert "nothing to show" in capsys.readouterr().out
