"""The report says what was run and how it went, and other people's text stays text in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from embark.catalog.pricing import RunPrice
from embark.events.events import Event
from embark.report.document import html_page
from embark.report.report import report
from embark.store.checkpoint_inspect import CheckpointInfo

BEGAN_S = 1_700_000_000.0
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>&amp; | ` [x](javascript:alert(3)) \u202e"


class Page(HTMLParser):
    """Its tags, its attributes and its text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_of(context) -> Page:
    page = Page(html_page(report(context)))
    assert page.open == []
    return page


def test_it_says_all_there_is_to_say(make_run, make_context):
    text = page_of(make_context(make_run())).text
    for payload in (
        "finished", "Held-out AUC 0.7500: 83 % of the way from chance", "NVIDIA H200", "cuda_graph: the complete step",
        "torch 2.13.0, torchrec 1.8.0", "Interrupted twice; 40 steps (2", "of the run", "0.8000",
        "Step time by rank", "over 1.3 times the others' time", "Step time by phase", "Tables on ranks",
        "64.0 MB on each of 4 ranks",
        "on demand in somewhere, $36.00 an hour", "50.0 ms", "+4.2 %", "61.0 GB", "+1.7 %", "newest",
        "The loader sets the pace",
        "train.batch_size", "4,096", "2,048", "embark train runs/demo/spec.toml --fresh", "spent per million samples",
    ):  # fmt: skip
        assert payload in text, payload
    assert "train.learning_rate" not in text  # the default
    assert "1.09 M" not in text


def test_the_file_needs_nothing_else_and_runs_nothing(make_run, make_context):
    html = html_page(report(make_context(make_run())))
    page = Page(html)
    assert not {"script", "iframe", "object", "embed", "form", "base", "img", "foreignobject"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "xlink:href", "style")]
    assert [value for name, value in page.attributes if name == "href"] == ["data:,"]
    assert not re.findall(r"@import|url\(|https?://", html)
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html
    assert "width=device-width" in html


def test_hostile_text_stays_text_everywhere(make_run, make_context, make_diagnosis):
    events = make_run()
    start = {**events[0].values, **dict.fromkeys(("device_name", "engine", "engine_reason", "precision"), HOSTILE)}
    tables = [{"table": HOSTILE, "rows": 9, "sharding": HOSTILE, "kernel": HOSTILE, "ranks": [0], "bytes": 9e6}]
    system = {"host": HOSTILE, "cpu_percent": 4.0, "gpus": [{"index": HOSTILE, "util_percent": 3}]}
    events = [
        Event("start", {**start, "versions": {"torch": HOSTILE}}, events[0].time_s),
        Event("plan", {"tables": tables, "per_rank": []}, events[0].time_s),
        Event("predict", {"step_s": 1.0, "peak_bytes": 2.0, "basis": HOSTILE, "bound_by": HOSTILE}, events[0].time_s),
        *events[3:20],
        Event("ranks", {"step": 3, "step_s": [1.0], "systems": [system]}, events[20].time_s),
        Event("phases", {"step": 3, "seconds": {HOSTILE: 3.0}}, events[20].time_s),
        Event("note", {"level": HOSTILE, "text": HOSTILE}, events[20].time_s),
        Event("save", {"step": 60, "path": HOSTILE, "bytes": 3.0}, events[20].time_s),
        Event("error", {"text": HOSTILE}, events[20].time_s),
    ]
    context = make_context(
        events, name=HOSTILE, uri=HOSTILE,
        spec={"name": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}, "train": {"optimizer": HOSTILE}},
        spec_toml=HOSTILE, price=RunPrice(1.0, HOSTILE), best_by=HOSTILE,
        checkpoints=(CheckpointInfo(1, "damaged", 1, 1.0, damage=(HOSTILE,)),), diagnoses=(make_diagnosis(HOSTILE),),
    )  # fmt: skip
    document = report(context)
    page = Page(html_page(document))
    assert page.open == []
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") > 20
    assert "\u202e" not in page.text


@pytest.mark.parametrize("num_events", [0, 1, 2, 3, 4, 5, 40])
def test_a_run_cut_anywhere_has_a_report(make_run, make_context, num_events):
    events = make_run()[:num_events]
    page = page_of(make_context(events, diagnoses=None, checkpoints=(), price=RunPrice(), now_s=BEGAN_S + 9999))
    assert ("killed" if num_events else "not started") in page.text
    assert page.text.count("Embark") >= 2


def test_without_a_price_it_says_hours_and_why(make_run, make_context):
    text = page_of(make_context(make_run(), price=RunPrice(None, "Nobody knows."))).text
    assert "Nobody knows." in text
    assert "$" not in text


def test_only_nan_losses_are_shown_as_such(make_run, make_context):
    events = [e if e.kind != "step" else Event("step", {**e.values, "loss": None, "auc": None}, e.time_s)
              for e in make_run() if e.kind != "eval"]
    text = page_of(make_context(events)).text
    assert "Normalized entropy" in text
    assert "finished" in text


def test_a_long_run_makes_a_small_page(make_run, make_context):
    html = html_page(report(make_context(make_run(num_steps=60_000, num_stops=0))))
    assert len(html) < 400_000
