"""Nothing that a run says becomes script; who has no token sees nothing; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from watched_runs import append, line, step_line, write_run

from embark.catalog.pricing import RunPrice
from embark.dashboard import runs as runs_module
from embark.dashboard import server as server_module
from embark.dashboard.server import static_files
from embark.diagnose.scan import Diagnosis, Evidence

pytestmark = pytest.mark.needs("chromium")

SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = '"><img src=x onerror="window.hacked = 1">'
LINK = "javascript:window.hacked=1"
STYLE = "</style><style>*{display:none}</style>${window.hacked=1}{{window.hacked=1}}"
ALL = f"{SCRIPT}{IMAGE}{LINK}{STYLE}'\"`--><svg onload=window.hacked=1>"


def hostile(folder: Path) -> Path:
    """A run that has them everywhere a value of its own is shown."""
    write_run(folder, rich=True, ends=False)
    now = time.time()
    (folder / "spec.toml").write_text(f"name = {json.dumps(ALL)}\n")
    (folder / "a.log").write_text(f"WARNING {ALL}\n{ALL}\n")
    append(
        folder,
        line("start", now, num_steps=1000, first_step=0, device_name=ALL, engine=ALL, engine_reason=ALL, precision=ALL,
             run_dir=LINK, world_size=2, batch_size=ALL),
        line("plan", now, tables=[{"table": ALL, "rows": 10, "dim": 4, "sharding": ALL, "kernel": ALL, "ranks": [0, 1],
                                   "bytes": 1000}], per_rank=[{"rank": 0, "bytes": 500}, {"rank": 1, "bytes": 500}]),
        line("predict", now, step_s=0.1, peak_bytes=1e9, bound_by=ALL),
        line("note", now, level="warning", text=ALL), line("note", now, level=ALL, text=ALL),
        line("ranks", now, step=10, step_s=[0.1, 0.2], input_s=[0, 0], systems=[
            {"host": ALL, "cpu_percent": 3, "gpus": [{"index": ALL, "util_percent": 5},
                                                     {"index": 1, "util_percent": ALL}]}]),
        line("phases", now, step=10, seconds={ALL: 1.0, "input": 0.1}), line(ALL, now, **{ALL: ALL}),
        *(step_line(step, now) for step in range(1, 40)), line("interrupt", now, step=10, signal=ALL),
        line("end", now, outcome="interrupted", step=10),
        line("error", now, text=ALL),
    )
    return folder


@pytest.fixture
def hostile_page(tmp_path: Path, serve, open_page, drawn, monkeypatch):
    name = ALL.replace("/", "∕")
    hostile(tmp_path / name[:100])
    evidence = Evidence(ALL, 3, ALL, (0, 0))
    found = [Diagnosis(ALL, ALL, kind, ALL, ALL, ALL, evidence, 1, (), "") for kind in (ALL, "slow")]
    monkeypatch.setattr(server_module, "diagnose_run", lambda _: found)
    monkeypatch.setattr(runs_module, "price_of_run", lambda *_: RunPrice(12.0, ALL))
    page = open_page(serve(tmp_path).url)
    drawn(page, num_points=1)
    page.wait_for_selector(".finding")
    page.wait_for_selector(".lines li")
    return page


def test_nothing_that_a_run_says_is_executed(hostile_page):
    page = hostile_page
    page.select_option("#logs select", "1")
    page.wait_for_function("() => document.querySelector('.lines').textContent.includes('WARNING <script>')")
    page.click("summary")
    page.hover("[data-curve=loss] .plot", position={"x": 200, "y": 60})
    page.wait_for_selector(".tip:not([hidden])")
    page.hover(".piece >> nth=0")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("window.noticed") == []
    assert page.locator("main script, main style, main img, nav script, nav img, [onerror], [onload]").count() == 0
    assert page.locator("a[href^='javascript']").count() == 0
    assert page.is_visible(".figures")


def test_what_a_run_says_is_shown_letter_by_letter(hostile_page):
    page = hostile_page
    for place in ("#diagnosis", "#plan", "#about", "#money", ".lines", ".sentence", "h1"):
        assert "<script>window.hacked = 1</script>" in page.inner_text(place).replace("∕", "/"), place


def test_no_file_of_the_page_makes_markup_out_of_text():
    scripts = {path: body.decode() for path, (_, body) in static_files().items() if path.endswith(".js")}
    assert len(scripts) > 10
    for path, text in scripts.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
                     "srcdoc", "DOMParser", "createContextualFragment", "http://", "https://"):
            assert word not in text.replace("http://www.w3.org/2000/svg", ""), f"{path}: {word}"
    html = static_files()["/"][1].decode()
    assert html.count("<script") == 1
    assert "style=" not in html
    assert " on" + "click" not in html


def test_every_script_is_asked_for_at_once():
    html = static_files()["/"][1].decode()
    scripts = {path for path in static_files() if path.endswith(".js")}
    assert {path for path in scripts if f'"{path}"' in html} == scripts


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path, serve, open_page, drawn):
    write_run(tmp_path / "one", rich=True)
    server = serve(tmp_path)
    page = open_page(server.url)
    drawn(page, num_points=10)
    assert page.requested
    assert all(url.startswith(server.url) for url in page.requested)


def test_without_the_token_nothing_is_seen_and_with_it_everything(tmp_path: Path, serve, open_page, drawn):
    write_run(tmp_path / "private-name")
    server = serve(tmp_path, token="a-token-of-some-length")
    bare = server.url.partition("?")[0]
    page = open_page(bare, is_ready=False)
    assert page.content().count("needs its token") == 1
    assert "private-name" not in page.content()
    assert page.evaluate("fetch('/api/runs').then((answer) => answer.status)") == 401
    assert page.evaluate("fetch('/static/main.js').then((answer) => answer.status)") == 401
    page = open_page(server.url)
    drawn(page, num_points=10)
    assert page.url == bare
    assert page.evaluate("document.cookie") == ""
    page.reload()
    drawn(page, num_points=10)


def test_another_site_cannot_read_or_frame_the_page(tmp_path: Path, serve, open_page):
    write_run(tmp_path / "private-name")
    server = serve(tmp_path)
    other = serve(tmp_path)
    page = open_page(other.url)
    blocked = "(url) => fetch(url).then(() => 'read', () => 'refused')"
    assert page.evaluate(blocked, f"http://localhost:{server.port}/api/runs") == "refused"
    assert page.evaluate("(url) => fetch(url, { mode: 'no-cors' }).then(() => 'read', () => 'refused')",
                         f"http://localhost:{server.port}/api/runs") == "refused"
