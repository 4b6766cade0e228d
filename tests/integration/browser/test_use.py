"""The page is worked by pointer, by touch and by keys, on a large screen and a small one, in light and in dark."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from watched_runs import append, line, write_run

from embark.catalog.pricing import RunPrice
from embark.dashboard import runs as runs_module
from embark.formatting import format_usd

pytestmark = pytest.mark.needs("chromium")

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def rich(tmp_path: Path, serve, monkeypatch):
    write_run(tmp_path / "one", num_steps=1000, rich=True)
    write_run(tmp_path / "two", num_steps=1000, rich=True, until_step=400, ends=False)
    price = RunPrice(98.32, "1 × p5.48xlarge, on demand")
    monkeypatch.setattr(runs_module, "price_of_run", lambda *_: price)
    return serve(tmp_path)


def range_of(page) -> str:
    return page.get_attribute("[data-curve=loss]", "data-range")


def test_dragging_zooms_all_curves_and_a_double_click_shows_all_again(rich, open_page, drawn):
    page = open_page(rich.url)
    drawn(page, num_points=50)
    complete = range_of(page)
    page.wait_for_selector("#diagnosis .finding h2")  # it comes last, above the curves, and moves them
    plot = page.locator("[data-curve=loss] .plot")
    plot.hover(position={"x": 100, "y": 60})
    box = plot.bounding_box()
    page.mouse.down()
    page.mouse.move(box["x"] + 180, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function("(complete) => document.querySelector('[data-curve=loss]').dataset.range !== complete",
                           arg=complete)
    assert page.get_attribute("[data-curve=auc]", "data-range") == range_of(page)
    page.wait_for_selector("text=show all")
    page.dblclick("[data-curve=auc] .plot", position={"x": 150, "y": 50})
    page.wait_for_function("(complete) => document.querySelector('[data-curve=loss]').dataset.range === complete",
                           arg=complete)
    page.wait_for_selector("text=show all", state="hidden")


def test_dollars_are_formatted_as_in_the_terminal(rich, open_page):
    amounts = [0, 0.0004, 0.0304, 0.0999, 4.1, 999.5, 1234.4, 98_320, -12.5]
    shown = open_page(rich.url).evaluate("async (amounts) => amounts.map((await import('/static/format.js')).usd)",
                                         amounts)
    assert shown == list(map(format_usd, amounts))


def test_every_part_is_shown_with_what_it_is_about(rich, open_page, drawn):
    page = open_page(rich.url)
    drawn(page, num_points=50)
    page.wait_for_selector("[data-chart=ranks]")
    assert "Rank 2 is slow" in page.inner_text("#ranks")
    assert page.locator(".rank.is-slow").count() == 1
    assert "all-to-all" in page.inner_text("#phases")
    assert "evaluation" in page.inner_text("#timeline")
    assert "checkpoint" in page.inner_text("#timeline")
    assert "6 tables" in page.inner_text("#plan")
    assert page.locator(".holder").count() == 4
    assert "+11 %" in page.inner_text("#prediction")
    assert "$98.32" in page.inner_text("#money")
    assert {"util_percent", "used_bytes", "power_w", "network", "disk", "cpu"} <= set(
        page.eval_on_selector_all("[data-chart]", "all => all.map((one) => one.dataset.chart)"))
    assert "NVIDIA H100" in page.inner_text("#about")
    assert page.evaluate("window.noticed") == []


def test_all_can_be_done_by_keys(rich, open_page, drawn):
    page = open_page(rich.url)
    drawn(page, num_points=50)
    page.focus("[data-curve=loss]")
    complete = range_of(page)
    page.keyboard.press("ArrowRight")
    assert page.is_visible("[data-curve=loss] .tip")
    assert "step" in page.inner_text("[data-curve=loss] .tip .at")
    page.keyboard.press("+")
    assert range_of(page) != complete
    page.keyboard.press("Escape")
    assert range_of(page) == complete
    page.keyboard.press("l")
    assert page.get_attribute("[data-curve=loss] .chip", "aria-pressed") == "true"
    page.focus(".pick >> nth=1")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('two')")
    assert page.evaluate("document.activeElement.classList.contains('pick')")
    page.focus(".tick input >> nth=0")
    page.keyboard.press("Space")
    page.wait_for_function("() => !document.querySelector('.tick input').checked")
    assert page.evaluate("document.activeElement.type") == "checkbox"


def test_tab_reaches_every_control_and_each_has_a_name(rich, open_page, drawn):
    page = open_page(rich.url)
    drawn(page, num_points=50)
    nameless = page.evaluate("""() => {
      const nameOf = (one) => one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length;
      const reached = [...document.querySelectorAll("button, input, select, a, [tabindex='0']")];
      return reached.filter((one) => one.offsetParent !== null && !nameOf(one)).map((one) => one.outerHTML);
    }""")
    assert nameless == []
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.closest('[id]')?.id"))
    assert {"skip", "tools", "runs", "curves", "timeline"} <= seen


def test_page_fits_a_phone_and_a_tap_reads_a_point(rich, open_page, drawn):
    page = open_page(rich.url, **PHONE)
    drawn(page, num_points=50)
    page.wait_for_selector("[data-chart=ranks]")
    for size in ({"width": 768, "height": 1024}, {"width": 320, "height": 640}, PHONE["viewport"]):
        page.set_viewport_size(size)
        page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=size["width"])
        page.wait_for_function("(width) => document.querySelector('[data-curve=loss]').clientWidth <= width",
                               arg=size["width"])
    page.locator("[data-curve=loss] .plot").scroll_into_view_if_needed()
    page.tap("[data-curve=loss] .plot", position={"x": 180, "y": 60})
    page.wait_for_function("() => document.querySelector('[data-curve=loss] .tip .at')?.textContent.startsWith('step')")
    assert page.locator("[data-curve=loss] .tip .at").is_visible()


def test_dark_follows_the_system_and_can_be_chosen(rich, open_page, drawn):
    page = open_page(rich.url, color_scheme="dark")
    drawn(page, num_points=50)
    colour = "() => getComputedStyle(document.body.querySelector('.card')).backgroundColor"
    dark = page.evaluate(colour)
    page.click("text=auto colours")
    page.wait_for_selector("html[data-mode=light]")
    assert page.evaluate(colour) == "rgb(255, 255, 255)" != dark
    page.reload()
    drawn(page, num_points=50)
    assert page.get_attribute("html", "data-mode") == "light"


def test_text_stands_out_from_its_ground(rich, open_page, drawn):
    page = open_page(rich.url, color_scheme="light")
    drawn(page, num_points=50)
    for mode in ("light", "dark"):
        page.emulate_media(color_scheme=mode)
        page.wait_for_function("(mode) => matchMedia(`(prefers-color-scheme: ${mode})`).matches", arg=mode)
        assert {name: ratio for name, ratio in contrasts(page).items() if ratio < 4.5} == {}


def contrasts(page) -> dict[str, float]:
    return page.evaluate("""(pairs) => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const parts = style.getPropertyValue(name).trim().slice(1).match(/../g).map((two) => parseInt(two, 16) / 255);
        const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return Object.fromEntries(pairs.map(([a, b]) => {
        const [x, y] = [light(a), light(b)].sort((m, n) => n - m);
        return [`${a} on ${b}`, (x + 0.05) / (y + 0.05)];
      }));
    }""", [["--ink", "--card"], ["--ink-soft", "--card"], ["--ink-soft", "--paper"], ["--good", "--good-soft"],
           ["--bad", "--bad-soft"], ["--warning", "--warning-soft"], ["--accent", "--accent-soft"]])


def test_the_log_is_filtered_by_words_and_by_level(tmp_path: Path, serve, open_page):
    folder = write_run(tmp_path / "one")
    append(folder, line("note", time.time(), level="warning", text="the disk is slow"))
    page = open_page(serve(tmp_path).url)
    page.wait_for_selector(".lines li")
    page.fill("#logs input", "disk slow")
    page.wait_for_function("() => document.querySelectorAll('.lines li').length === 1")
    assert "the disk is slow" in page.inner_text(".lines")
    page.fill("#logs input", "no such words")
    page.wait_for_selector(".lines .empty")
    page.fill("#logs input", "")
    page.select_option("#logs select >> nth=1", "warning")
    page.wait_for_function("() => document.querySelectorAll('.lines li').length === 1")


def test_a_run_that_tells_little_says_what_would_fill_the_gaps(tmp_path: Path, serve, open_page):
    write_run(tmp_path / "bare", num_steps=100)
    page = open_page(serve(tmp_path).url)
    for place in ("#phases", "#ranks", "#plan", "#prediction", "#money", "#machines"):
        page.wait_for_selector(f"{place} .empty")
        assert len(page.inner_text(f"{place} .empty")) > 20


def test_the_list_shows_the_held_out_auc_and_tells_the_ninth_run_apart(tmp_path: Path, serve, open_page):
    for number in range(9):
        write_run(tmp_path / f"a-sweep-of-learning-rates-{number}", num_steps=1000, rich=True)
    page = open_page(serve(tmp_path).url)
    page.wait_for_function("() => document.querySelectorAll('.runs .run').length === 9")
    page.wait_for_function("""() => [...document.querySelectorAll('.pick .facts')].every(
        (facts) => /^held-out AUC 0/.test(facts.innerText))""")
    shown = page.eval_on_selector_all(".pick .facts", """all => all.map((facts) => {
        const range = document.createRange();
        range.setStart(facts.firstChild, 0);
        range.setEnd(facts.firstChild, facts.firstChild.data.indexOf("·"));
        return range.getBoundingClientRect().right <= facts.getBoundingClientRect().right;
    })""")
    assert shown == [True] * 9
    swatches = page.eval_on_selector_all(".tick .swatch", "all => all.map((one) => one.style.background)")
    assert len(set(swatches)) == 9
