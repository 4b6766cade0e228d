"""Served traffic in a browser: charts, the drifted column in words, and no panel of training."""

from __future__ import annotations

import time

import pytest
from served_traffic import TROUBLES, serve_event, window
from watched_runs import write_run

pytestmark = pytest.mark.needs("chromium")


def test_a_server_shows_its_traffic_and_a_run_its_training(tmp_path, serve, open_page):
    now = time.time()
    events = [serve_event(1, now - 40, model="<img src=x onerror=alert(1)>"), *(
        window(now - 30 + 10 * i, age=(150, 200, 150), labels=TROUBLES["served-miscalibrated"][1].values["labels"])
        for i in range(3))]
    (tmp_path / "a-8000").mkdir()
    (tmp_path / "a-8000" / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    write_run(tmp_path / "trained")
    page = open_page(serve(tmp_path).url)
    page.wait_for_selector("#traffic [data-column=age][data-level=large]")
    assert "missing or 0: 30 %, 1.0 %" in page.inner_text("#traffic [data-column=age]")
    for chart in ("requests", "rows", "latency", "scores", "calibration"):
        page.wait_for_function("(key) => +document.querySelector(`[data-chart=traffic-${key}]`).dataset.points > 0",
                               arg=chart)
    page.wait_for_selector("#diagnosis:has-text('drifted')")
    assert not page.is_visible("#curves")
    page.click("text=trained")
    page.wait_for_selector("#curves")
    assert not page.is_visible("#traffic")
    assert page.evaluate("window.noticed") == []
