"""What a server's events say: findings in a sentence, versions apart, and any damaged event survived."""

from __future__ import annotations

import json

import numpy as np
import pytest
from served_traffic import TROUBLES, serve_event, window

from embark.events.quality import Quality
from embark.events.traffic import RECENT_S, TrafficRecord, TrafficView, quantiles_s
from embark.report.record import Record


def found_in(*events):
    quality = Quality()
    for event in events:
        quality.add(event)
    return {one.name: one.cause for one in quality.findings()}


def test_traffic_like_the_reference_has_no_finding():
    assert found_in(serve_event(), *(window(10.0 * i) for i in range(1, 9))) == {}


def test_a_drifted_column_is_named_with_what_moved():
    causes = found_in(serve_event(), window(10), window(20, age=(115, 200, 185)))
    assert list(causes) == ["served-columns-drifted"]
    assert "age: PSI 0.2" in causes["served-columns-drifted"]
    assert "missing or 0: 12 % now, 1.0 % in the reference" in causes["served-columns-drifted"]
    later = [window(RECENT_S + 100 + 10 * i) for i in range(3)]
    assert found_in(serve_event(), window(20, age=(115, 200, 185)), *later) == {}  # it is over


def test_calibration_and_a_refused_version_are_said_in_numbers():
    assert found_in(*TROUBLES["served-miscalibrated"]) == {
        "served-miscalibrated": "Predicted clicks are 1.50 times the observed ones, over 1,000 labels with 200 clicks "
                                "that came back."}
    refused = found_in(*TROUBLES["served-version-refused"])
    assert "version 2 is refused: it is damaged" in refused["served-version-refused"]


def test_each_version_is_compared_with_its_own_rows_and_replicas_add_up():
    one, two = TrafficRecord(), TrafficRecord()
    for event in (serve_event(), window(10, age=(250, 125, 125)), serve_event(2, 15.0), window(20, 2)):
        one.add(event)
    for event in (serve_event(2, 16.0), window(20, 2)):
        two.add(event)
    assert [text for _, text, _ in one.changes] == ["version 1 answers: the server started",
                                                    "version 2 answers"]
    view = TrafficView([one, two])
    assert view.version == 2
    assert {column.drift.num for column in view.columns} == {1_000}
    assert not any(column.drift.level for column in view.columns)
    assert one.metrics()["requests_per_s"] == 50
    assert set(one.metrics()["psi"]) == {"age", "word"}
    assert view.latency_s()[0] == pytest.approx(1e-3, rel=0.13)


def test_quantiles_are_interpolated_within_their_bin():
    latency = np.zeros(102, int)
    latency[41] = 100  # 10 ms to 11.2 ms
    p50, p95, p99 = quantiles_s(latency)
    assert 0.01 < p50 < p95 < p99 < 0.0113
    assert quantiles_s(np.zeros(102, int)) == (None, None, None)


DAMAGED = [{"version": "x"}, {"version": 1, "latency": {"a": 1}}, {"version": 1, "scores": [1, 2]},
           {"version": 1, "columns": {"counts": [[1]]}}, {"version": 1, "statuses": [1]},
           {"version": 1, "seconds": "long", "rows": -5}, {"version": 1e300}]


def test_damaged_events_are_skipped():
    record = Record()
    lines = [{"event": "traffic", "time_s": 1.0, **one} for one in DAMAGED]
    serve = [{"event": "serve", "time_s": 1.0, "version": 1, "reference": {"columns": [{"labels": 5}], "scores": "no"}},
             json.loads(serve_event().to_json())]
    for line in [*lines, serve[0], serve[1], *lines]:
        record.add_line(json.dumps(line).encode(), 100.0)
    assert record.traffic
    assert len(record.traffic.windows) < 2 * len(DAMAGED)
    assert TrafficView([record.traffic]).columns[0].drift.num == 0
