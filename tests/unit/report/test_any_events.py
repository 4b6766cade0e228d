"""Whatever a file of events holds, there is a page, a comparison and a screen of it."""

from __future__ import annotations

import json
from io import StringIO

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from embark.dashboard.terminal import View, screen, text_lines
from embark.report.compare import compare_document, compare_runs
from embark.report.context import RunContext
from embark.report.document import html_page
from embark.report.record import Record
from embark.report.report import report

KINDS = ("start", "plan", "predict", "step", "eval", "save", "resume", "interrupt", "end", "error", "note", "ranks",
         "phases", "progress", "else")
FIELDS = ("step", "loss", "auc", "log_loss", "step_s", "samples_per_s", "num_steps", "first_step", "batch_size",
          "world_size", "outcome", "signal", "text", "level", "tables", "per_rank", "systems", "input_s", "seconds",
          "bytes", "path", "peak_bytes", "name", "device", "versions", "num_samples", "age_s", "usd_per_hour", "save_s")
ODD = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=6))
NESTED = st.recursive(ODD, lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.dictionaries(st.sampled_from(("table", "ranks", "bytes", "rows", "gpus", "host", "util_percent", "cpu_percent",
                                     "used_bytes", "total_bytes", "input", "dense", "x")), inner, max_size=4)),
    max_leaves=8)  # fmt: skip
EVENTS = st.lists(st.tuples(
    st.sampled_from(KINDS), st.one_of(st.floats(0, 2e9), st.floats()),
    st.dictionaries(st.sampled_from(FIELDS), NESTED, max_size=6)), max_size=12)  # fmt: skip


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(EVENTS)
def test_any_events_can_be_shown(result):
    record = Record()
    for kind, time_s, values in result:
        record.add_line(json.dumps({"event": kind, "time_s": time_s, "rank": 0, **values}, default=str).encode(), 1.7e9)
    context = RunContext(name="x", uri="runs/x", record=record, now_s=1.7e9, spec={"train": {"batch_size": 3}})
    document = report(context)
    assert html_page(document).endswith("</html>\n")
    assert html_page(compare_document(compare_runs([context, context])))
    view = View("x", record, context.status, record.spending(2.0))
    Console(file=StringIO(), width=80, height=24).print(screen([view], width=80, height=24))
    assert list(text_lines(view))
