"""Ten runs of a hundred thousand steps open before their files are read, and stay smooth."""

from __future__ import annotations

from pathlib import Path

import pytest
from watched_runs import event_lines

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.slow]

NUM_RUNS = 10
NUM_STEPS = 100_000
OPEN_S = 60.0
ACT_S = 10.0
"""A hundred times what an act takes on a quiet machine: drawing every point of a million would take minutes."""
MIN_POINTS = NUM_RUNS * 300
NUM_CURVES = 6
WATCH = f"""
const isDrawn = (chart) => +chart.dataset.points >= {MIN_POINTS};
const drawn = () => [...document.querySelectorAll("[data-curve]")].filter(isDrawn);
const look = () => drawn().length === {NUM_CURVES} ? (window.drawnMs = performance.now()) : setTimeout(look, 5);
look();
"""
ACT = """async (act) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  await frame();
  const begun = performance.now();
  eval(act);
  await frame();
  return performance.now() - begun;
}"""


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    text = "".join(event_lines(num_steps=NUM_STEPS, every=1))
    assert text.count("\n") == NUM_STEPS + 2
    for number in range(NUM_RUNS):
        (folder / f"run-{number}").mkdir()
        # other values, the same shape
        (folder / f"run-{number}" / "events.jsonl").write_text(text.replace('"auc": 0.7', f'"auc": 0.{number}7'))
    return folder


def test_ten_runs_of_a_hundred_thousand_steps_open_at_once_and_stay_smooth(long_runs: Path, serve, browser):
    server = serve(long_runs)  # nothing is read yet: the first view is part of what is measured
    page = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True).new_page()
    page.set_default_timeout(60_000)
    page.add_init_script(WATCH)
    page.goto(server.url)
    page.wait_for_function("() => window.drawnMs")
    opened_s = page.evaluate("window.drawnMs") / 1000
    assert opened_s < OPEN_S

    keys = "document.querySelector('[data-curve=loss]').dispatchEvent(new KeyboardEvent('keydown', {{ key: '{}' }}))"
    acts = {"zoom": keys.format("+"), "all": keys.format("0"), "log": keys.format("l"),
            "hide": "document.querySelector('.tick input').click()",
            "show": "document.querySelector('.tick input').click()",
            "smooth": "const slider = document.querySelector('.smooth input'); slider.value = '0.9'; "
                      "slider.dispatchEvent(new Event('input'))"}
    for name, act in acts.items():
        action_s = min(page.evaluate(ACT, act) / 1000 for _ in range(1 if name in ("hide", "show") else 4))
        assert action_s < ACT_S, name
    page.context.close()
