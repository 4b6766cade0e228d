"""A real browser, and pages served to it from folders of runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from limits import HANG_S

from embark.dashboard import runs as runs_module
from embark.dashboard.runs import Runs
from embark.dashboard.server import PageServer, serve_page
from embark.report.run_files import RunFiles

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"]

NOTICED = """
window.noticed = [];
const notice = (kind, words) => addEventListener(kind, (event) => window.noticed.push(`${kind}: ${words(event)}`));
notice("securitypolicyviolation", (event) => `${event.violatedDirective} ${event.blockedURI}`);
notice("error", (event) => event.message);
notice("unhandledrejection", (event) => event.reason);
window.alert = () => window.noticed.push("alert");
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Idle it takes a sixth of a processor, so none is left running for the other tests of the session."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server looks often, so that no test waits for it."""
    monkeypatch.setattr(runs_module, "LOOK_S", 0.05)
    monkeypatch.setattr(runs_module, "FIND_S", 0.1)


@pytest.fixture
def serve(quick: None) -> Iterator[Callable[..., PageServer]]:
    """Serves the runs below a folder, until the test ends."""
    with ExitStack() as stack:
        def start(folder: Path, *, token: str = "") -> PageServer:
            runs = stack.enter_context(Runs(lambda: [RunFiles(path) for path in sorted(folder.iterdir())]))
            return stack.enter_context(serve_page(runs, token=token))

        yield start


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address as a fresh visitor; what went wrong in the page is in `noticed`."""
    contexts: list[Any] = []

    def start(url: str, *, is_ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.add_init_script(NOTICED)
        page = context.new_page()
        page.set_default_timeout(HANG_S * 1000)
        page.requested = []
        page.on("request", lambda request: page.requested.append(request.url))
        page.goto(url)
        if is_ready:
            page.wait_for_selector("html[data-ready]")
        return page

    yield start
    for context in contexts:
        context.close()


@pytest.fixture
def drawn() -> Callable[..., None]:
    """Waits until a curve has at least so many points on the screen."""

    def wait(page: Any, curve: str = "loss", num_points: int = 2) -> None:
        has_points = "([curve, num]) => +document.querySelector(`[data-curve=${curve}]`).dataset.points >= num"
        page.wait_for_function(has_points, arg=[curve, num_points])

    return wait
