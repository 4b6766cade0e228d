"""Served traffic on the page: replicas together, the worst column first, and text of events as text."""

from __future__ import annotations

import pytest
from served_traffic import serve_event, window

from embark.dashboard.api import metrics_text, summary
from embark.dashboard.runs import Runs
from embark.dashboard.terminal import View, text_lines
from embark.dashboard.traffic import replicas_of, traffic_of
from embark.events.events import Event
from embark.report.run_files import find_runs

NOW = 1_800_000_000.0


def write(folder, *events):
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))


@pytest.fixture
def runs(tmp_path):
    """Two replicas of one model, of which one has a new version, and a server of another model."""
    now = NOW - 30
    write(tmp_path / "a-8000", serve_event(1, now - 10), window(now), window(now + 10, age=(150, 200, 150)),
          serve_event(2, now + 15), window(now + 20, 2, age=(150, 200, 150)))
    write(tmp_path / "b-8000", serve_event(2, now - 10), window(now, 2), window(now + 20, 2, age=(150, 200, 150)))
    write(tmp_path / "c-8000", serve_event(1, now, model="<b>other", place="/else"), window(now),
          Event("serve_end", {}, now + 5))
    found = Runs(find_runs([str(tmp_path)]))
    found.find()
    for run in found.all():
        run.look(NOW)
    return {run.name: run for run in found.all()}, found


def test_replicas_of_a_model_are_shown_together(runs):
    by_name, every = runs
    shown = traffic_of(replicas_of(every.all(), by_name["a-8000"]))
    assert (shown["num_replicas"], shown["version"]) == (2, 2)
    assert [column["name"] for column in shown["columns"]] == ["age", "word"]
    worst = shown["columns"][0]
    assert (worst["level"], worst["num"], worst["moved"][0]["label"]) == ("large", 1_500, "missing or 0")
    assert shown["sentence"].startswith("1 column drifted, by 1,500 rows of the last 15 minutes")
    assert [(one["version"], one["num_answering"], one["rows"]) for one in shown["versions"]] == [
        (2, 2, 15_000), (1, 0, 10_000)]
    assert shown["series"]["requests_per_s"] == [100, 50, 100]
    assert "version 2 answers" in [mark["text"] for mark in shown["marks"]]
    assert sum(shown["scores"]["now"]) == pytest.approx(1)


def test_a_server_has_a_state_and_figures_in_every_view(runs):
    by_name, every = runs
    shown = summary(by_name["a-8000"], NOW)
    assert shown["state"] == "running"
    assert shown["sentence"] == "Serving clicks, version 2 · 50 requests/s · p99 0.999 ms."
    assert ["Worst column", "PSI 1.09", "age"] in shown["serving"]["figures"]
    ended = summary(by_name["c-8000"], NOW)
    assert (ended["state"], ended["sentence"]) == ("stopped", "The server of <b>other ended; version 1 answered last.")
    assert summary(by_name["b-8000"], NOW + 3_600)["state"] == "killed"
    assert 'embark_served_column_psi{column="age",run="a-8000"}' in metrics_text(every)
    run = by_name["a-8000"]
    lines = list(text_lines(View(run.name, run.record, run.status(NOW), None, True)))
    assert any("traffic" in line and "50 requests/s" in line for line in lines)
    assert any("drifted" in line for line in lines)
