"""Embark in a notebook: what a real kernel shows, and the guide that is one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from limits import HANG_S
from nbclient import NotebookClient

GUIDE = Path(__file__).parents[2] / "docs" / "start" / "notebook.ipynb"
VIEW = """
from embark.events import Event
from embark.events.sinks.notebook import default_view

(view,) = default_view(None)
view.emit(Event("start", {"name": "demo", "num_steps": 9, "num_train_samples": 640, "batch_size": 64}))
view.emit(Event("step", {"step": 3, "loss": 0.61, "auc": 0.7, "samples_per_s": 900.0}))
view.emit(Event("note", {"level": "warning", "text": "<b>slow</b>"}))
"""
END = """
view.emit(Event("eval", {"step": 9, "auc": 0.7512, "log_loss": 0.5, "num_samples": 100}))
view.emit(Event("end", {"outcome": "done", "step": 9}))
view.close()
"""


def executed(book: nbformat.NotebookNode, folder: Path) -> list[list[nbformat.NotebookNode]]:
    """The outputs of each cell of code, run by a kernel in `folder`."""
    client = NotebookClient(book, timeout=HANG_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert not [one for cell in outputs for one in cell if one.output_type == "stream" and one.name == "stderr"]
    return outputs


def test_a_notebook_shows_a_run_as_one_output_that_is_updated(tmp_path):
    cells = [nbformat.v4.new_code_cell(code) for code in (VIEW, VIEW + END)]
    (shown,), (ended,) = executed(nbformat.v4.new_notebook(cells=cells), tmp_path)
    page = shown.data["text/html"]
    assert "step 3/9" in shown.data["text/plain"]
    assert "━" in shown.data["text/plain"]
    assert "&lt;b&gt;slow&lt;/b&gt;" in page
    assert "<b>slow" not in page
    assert "━" not in ended.data["text/plain"]
    assert "held out  step 9   AUC 0.7512" in ended.data["text/plain"]
    assert "\x1b" not in page + ended.data["text/html"] + ended.data["text/plain"]


@pytest.mark.slow
def test_the_guide_s_notebook_runs_and_shows_what_it_says(tmp_path):
    book = nbformat.read(GUIDE, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    outputs = executed(book, tmp_path)
    assert [len(shown) for shown in outputs] == [1, 0, *[1] * (len(outputs) - 2)]
    text = [cell[0].get("text") or cell[0].data["text/plain"] for cell in outputs if cell]
    raw, splits, run, curves, evaluated, importance, best, by_score, two, exported = text
    assert "customer" in raw
    assert sum(map(int, re.findall(r"\d+", splits.splitlines()[1])[1:])) == 18_000
    assert "eval_auc" in curves
    held = float(re.search(r"Held-out AUC (0\.\d+)", run)[1])
    assert 0.75 < held < 0.85
    assert f"{held:.4f}" in evaluated
    assert {"customer", "category", "city", "price", "shown_weekday"} <= set(importance.split())
    assert float(best.splitlines()[1].split()[-1]) > 0.9
    rows = [list(map(float, line.split()[-3:])) for line in by_score.splitlines()[2:]]
    assert sum(row[0] for row in rows) == 2_000
    assert all(abs(score - bought) < 0.15 for num, score, bought in rows if num > 100)
    high, low = map(float, re.findall(r"0\.\d+", two))
    assert high > 0.6 > 0.4 > low
    assert "version 1 in offers-model" in exported
