"""The page follows runs: as they grow, end, die, go, and come."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from watched_runs import append, line, step_line, write_run

pytestmark = pytest.mark.needs("chromium")


def points(page, curve: str = "loss") -> int:
    return int(page.get_attribute(f"[data-curve={curve}]", "data-points"))


def ink(page, curve: str = "loss") -> list[int]:
    """How many pixels of each eighth of the chart's width hold a line."""
    return page.evaluate("""(curve) => {
      const canvas = document.querySelector(`[data-curve=${curve}] canvas`);
      const { width, height } = canvas;
      const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
      const found = Array(8).fill(0);
      for (let x = 0; x < width; x += 1) for (let y = 0; y < height; y += 1) {
        const [r, g, b, a] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
        if (a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60) found[Math.floor((8 * x) / width)] += 1;
      }
      return found;
    }""", curve)


def test_the_curves_of_a_live_run_move(tmp_path: Path, serve, open_page, drawn):
    folder = write_run(tmp_path / "live", num_steps=1000, until_step=100, ends=False)
    page = open_page(serve(tmp_path).url)
    drawn(page, num_points=10)
    assert page.inner_text(".head .pill") == "running"
    assert sum(ink(page)) > 100
    before = points(page)
    stop = threading.Event()

    def train() -> None:
        for step in range(110, 900, 10):
            append(folder, step_line(step, time.time(), bend=200))
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        drawn(page, num_points=before + 30)
        page.wait_for_function("() => document.querySelector('.figures dd').textContent !== '10 %'")
    finally:
        stop.set()
        thread.join()
    assert page.evaluate("window.noticed") == []


def test_a_line_is_really_drawn_over_the_complete_width(tmp_path: Path, serve, open_page, drawn):
    write_run(tmp_path / "demo", num_steps=1000)
    page = open_page(serve(tmp_path).url)
    drawn(page, num_points=50)
    assert all(count > 10 for count in ink(page)[1:])
    page.uncheck(".tick input", force=True)
    page.wait_for_function("() => document.querySelector('[data-curve=loss]').dataset.points === '0'")
    assert sum(ink(page)) == 0


def test_a_killed_run_is_shown_as_such_with_its_last_word(tmp_path: Path, serve, open_page):
    write_run(tmp_path / "dead", num_steps=1000, until_step=200, ends=False, first_s=time.time() - 7200)
    page = open_page(serve(tmp_path).url)
    page.wait_for_selector(".head .pill.is-killed")
    assert page.inner_text(".head .pill") == "no sign of life"
    words = page.inner_text(".sentence")
    assert "No sign of life for 1 h 59 min" in words
    assert "Last event at " in words
    assert page.locator(".run[data-state=killed]").count() == 1


def test_ended_run_is_shown_finished_and_preempted_run_stopped(tmp_path: Path, serve, open_page):
    one = write_run(tmp_path / "one", num_steps=1000, until_step=100, ends=False)
    page = open_page(serve(tmp_path).url)
    page.wait_for_selector(".head .pill.is-running")
    append(one, line("save", time.time(), step=100, bytes=1e9, save_s=1.0),
           line("interrupt", time.time(), step=100, signal="SIGTERM"),
           line("end", time.time(), outcome="interrupted", step=100))
    page.wait_for_selector(".head .pill.is-stopped")
    assert "to resume from step 100" in page.inner_text(".sentence")
    page.wait_for_selector(".timeline .mark.is-interrupt")
    append(one, line("start", time.time(), num_steps=1000, first_step=100), line("resume", time.time(), step=100),
           step_line(1000, time.time()), line("end", time.time(), outcome="done", step=1000))
    page.wait_for_selector(".head .pill.is-finished")
    page.wait_for_selector(".timeline .mark.is-resume")


def test_run_deleted_under_the_page_is_reported_and_curves_stay(tmp_path: Path, serve, open_page, drawn):
    write_run(tmp_path / "one", num_steps=1000)
    page = open_page(serve(tmp_path).url)
    drawn(page, num_points=50)
    shutil.rmtree(tmp_path / "one")
    page.wait_for_selector(".head .pill.is-deleted")
    assert points(page) >= 50
    assert page.evaluate("window.noticed") == []


def test_a_run_that_starts_later_appears_by_itself(tmp_path: Path, serve, open_page, drawn):
    page = open_page(serve(tmp_path).url)
    assert "Start one with embark train" in page.inner_text("#runs")
    write_run(tmp_path / "late")
    page.wait_for_selector(".run .name:has-text('late')")
    drawn(page, num_points=10)


def test_cut_unordered_and_future_lines_leave_the_page_complete(tmp_path: Path, serve, open_page, drawn):
    folder = write_run(tmp_path / "odd", num_steps=1000, until_step=500, ends=False)
    now = time.time()
    append(folder, '{"event": "step", "ti', "\n", step_line(420, now), step_line(510, now + 1e9),
           step_line(520, now, loss=float("nan"), auc=None), "\x00\x07\n", "[" * 2000 + "\n", step_line(530, now))
    page = open_page(serve(tmp_path).url)
    drawn(page, num_points=50)
    page.wait_for_function("() => document.querySelector('.sentence').textContent.includes('lines could not be read')")
    page.click("text=by time")
    drawn(page, num_points=50)
    append(folder, step_line(540, time.time()))
    page.wait_for_function("() => document.querySelector('.figures .note').textContent.startsWith('step 540')")
    assert page.evaluate("window.noticed") == []


def test_a_server_that_goes_away_is_reported(tmp_path: Path, open_page):
    from embark.dashboard.runs import Runs
    from embark.dashboard.server import serve_page
    from embark.report.run_files import RunFiles

    folder = write_run(tmp_path / "one")
    with Runs(lambda: [RunFiles(folder)]) as runs, serve_page(runs) as server:
        page = open_page(server.url)
        page.wait_for_selector(".live:has-text('live')")
        page.context.set_offline(True)
        page.wait_for_selector(".live:has-text('no connection')")
        page.context.set_offline(False)
        page.wait_for_function("() => document.querySelector('.live').textContent === 'live'")
        assert page.locator("[data-curve=loss]").count() == 1
